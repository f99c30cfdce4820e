"""Inference engines as clients: what a trainer needs from an engine in addition to replies.

    local:PATH, local:HUB-NAME      the engine in this process, over a checkpoint on disk
    NAME                            the same, over a policy that ships with the package

Importing this file imports no tensor library: a model name costs nothing until it is connected.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from ramify.clients.base import Client, Request
from ramify.errors import ConfigError, ModelError, Refused
from ramify.install_command import install_command

if TYPE_CHECKING:
    pass

PROTOCOL = 3
"""Version of the ``ramify serve-policy --weight-transfer`` protocol. It increases with every change
that an older trainer or engine would misunderstand. Both sides send theirs at the start."""
TAGS = ("weights", "kv_cache")
"""Parts of an engine's memory that can sleep, by the names that vLLM and SGLang use, in the order
in which they are woken. The weights wake first, then the update runs, and the KV cache wakes last,
so that the update can also use its memory."""


class EngineLost(ModelError):
    """The engine that was asked is gone. If it comes back, it has the weights that are current
    then.

    Example:
        except inference.EngineLost:    # asked again at another engine of the fleet
    """


class CachePressure(msgspec.Struct, frozen=True):
    """Load on an engine's KV cache. A client whose engine reports it has ``async pressure() ->
    CachePressure | None``, which returns None if the server does not say."""

    full: float
    """Share of the cache that running sequences use."""
    waiting: int
    """Number of queued sequences."""
    evicted: int
    """Number of sequences that were preempted and must be recomputed; a running total."""


@runtime_checkable
class InferenceClient(Client, Protocol):
    """An engine whose weights change between training steps."""

    @property
    def version(self) -> int:
        """Version of the policy that answers now."""
        ...

    async def update(self, weights: object, version: int) -> None:
        """Switch to ``weights``, which are ``version``, and clear everything cached under the old
        ones. A reply in progress continues under the new weights and records this in its
        ``versions``."""
        ...

    async def fingerprint(self) -> str | None:
        """Fingerprint of the weights that answer now, equal for equal weights, as
        ``models.fingerprint`` computes it. None if the engine keeps its weights in another
        layout."""
        ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Log-probability of each of ``ids`` except the first, given the ids before it, at
        temperature 1."""
        ...


def need_train_extra(what: str) -> None:
    """Raise ConfigError if the packages that run a model in this process are not installed."""
    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{what} runs a model in this process and needs {package}: "
                + install_command("train")
            )


def too_long(name: str, window: int, request: Request | None, num_ids: int) -> Refused:
    """The error for a prompt of ``num_ids`` tokens that does not fit the window."""
    parts = "given as ids"
    if request is not None:
        before = request.known
        parts = f"{len(request.messages)} messages"
        if before is not None:
            new = len(request.messages) - before.num_messages
            parts = (
                f"{len(before.ids)} from the turns before, {num_ids - len(before.ids)} from {new} "
                "new messages"
            )
    error = Refused(
        f"{name}: the prompt has {num_ids} tokens ({parts}), and the window of {window} leaves no "
        "room for a reply: shorten it, or let a child look at a part"
    )
    error.too_long = True
    return error
