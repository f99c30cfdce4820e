"""Rendezvous of the ranks of one attempt, in a store that may still hold the state of an earlier
attempt.

    rank r    join/r = token ──▶ wait for answer/TOKEN ───────────▶ name ── here/NAME/r ──▶
    rank 0    join/r with a new token ──▶ answer/TOKEN = name ────▶ wait for here/NAME/r

torchrun keeps one store for all attempts (``--max-restarts``), so an early rank could read the
addresses of dead ranks there. Therefore rank 0 gives each attempt a name, which prefixes all other
keys. A rank obtains the name with its own random token, and rank 0 continues after every rank has
obtained it. torchrun's restart count cannot identify an attempt: it differs between machines.
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
    missing rank, and raises if it has exited. Raises TrainError if a rank does not join within
    ``wait_s``."""
    name, answered = secrets.token_hex(8), set()
    store.set(_AT, name)
    until = time.monotonic() + wait_s
    missing = list(range(1, size))
    while missing:
        for rank in missing:
            if store.check([f"{_AT}/join/{rank}"]):
                token = store.get(f"{_AT}/join/{rank}").decode()
                if token not in answered:  # it may be a dead rank's; then a new token follows
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
    """As another rank: the attempt's name. Raises TrainError if rank 0 does not answer within
    ``wait_s``."""
    token = secrets.token_hex(8)
    store.set(f"{_AT}/join/{rank}", token)
    try:
        store.wait([f"{_AT}/answer/{token}"], timedelta(seconds=wait_s))
    except Exception as error:  # torch raises different types for a lost connection and a timeout
        raise TrainError(
            f"rank {rank} got no answer from rank 0 within {wait_s:g} s, or the store is gone"
        ) from error
    name = str(store.get(f"{_AT}/answer/{token}").decode())
    store.set(f"{_AT}/here/{name}/{rank}", "")
    return name


def began(store: Any) -> bool:
    """Whether an earlier attempt in this store passed rank 0's checks and waited for other
    ranks."""
    return bool(store.check([_AT]))
