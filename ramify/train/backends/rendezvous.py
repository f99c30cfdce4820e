"""How the ranks of one attempt find each other in a store that may still hold what an attempt
before it left.

    rank r    join/r = token ─────────▶ answer/TOKEN? ───────────────▶ name ── here/NAME/r ──▶
    rank 0    join/r? a token that was not answered: answer/TOKEN = name ────▶ here/NAME/r?

torchrun keeps one store for all attempts (``--max-restarts``): a rank that is early would read the
addresses of dead ones there. So rank 0 gives each attempt a name, under which all else is kept; a
rank takes the name for a token of its own alone, and rank 0 goes on when each has taken it. How
often torchrun restarted does not tell attempts apart: on several machines its counts differ.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ramify.errors import TrainError

_AT = "ramify/attempt"
_POLL_S = 0.02


def gather(
    store: Any, size: int, wait_s: float, look: Callable[[int], None] = lambda _: None
) -> str:
    """As rank 0: the attempt's name, once every other rank has it. ``look`` is called with each
    rank that is waited for, and raises where it is gone. Raises TrainError for one that does not
    come within ``wait_s``."""
    name, answered = secrets.token_hex(8), set()
    store.set(_AT, name)
    until = time.monotonic() + wait_s
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"{_AT}/join/{rank}"]):
                token = store.get(f"{_AT}/join/{rank}").decode()
                if token not in answered:  # may be of one that is gone: another comes then
                    store.set(f"{_AT}/answer/{token}", name)
                    answered.add(token)
        missing = [rank for rank in missing if not store.check([f"{_AT}/here/{name}/{rank}"])]
        for rank in missing:
            look(rank)
            if time.monotonic() > until:
                raise TrainError(f"rank {rank} did not start within {wait_s:g} s")
        if missing:
            time.sleep(_POLL_S)
    return name


def come(store: Any, rank: int, wait_s: float) -> str:
    """As another rank: the attempt's name. Raises TrainError where rank 0 does not come within
    ``wait_s``."""
    token = secrets.token_hex(8)
    store.set(f"{_AT}/join/{rank}", token)
    try:
        store.wait([f"{_AT}/answer/{token}"], timedelta(seconds=wait_s))
    except (
        Exception
    ) as error:  # torch has one kind for a connection that broke, and another for time that is up
        raise TrainError(
            f"rank {rank} did not hear of rank 0 within {wait_s:g} s, or the store is gone"
        ) from error
    name = str(store.get(f"{_AT}/answer/{token}").decode())
    store.set(f"{_AT}/here/{name}/{rank}", "")
    return name


def began(store: Any) -> bool:
    """Whether there was an attempt, of those that this store is for, whose rank 0 had checked all
    and waited for others."""
    return bool(store.check([_AT]))
