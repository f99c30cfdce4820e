"""The interface of inference engines: model clients whose weights can be updated while a policy is
trained.

    local:PATH, local:HUB-NAME      the engine in this process, with a checkpoint from disk
    NAME                            the same, with a policy that ships with the package

Importing this module imports no tensor library, so a model name costs nothing until a client is
connected to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import msgspec

from ramify.clients.base import Client, Request
from ramify.errors import ConfigError, ModelError, RequestRefusedError
from ramify.pip_install_command import install_command

if TYPE_CHECKING:
    pass

PROTOCOL = 3
"""Version of the ``ramify serve-policy --weight-transfer`` protocol. It increases with every change
that an older trainer or engine would misunderstand. Both sides exchange their versions first."""
TAGS = ("weights", "kv_cache")
"""Kinds of engine memory released in sleep, named as in vLLM and SGLang, in wake-up order. The KV
cache wakes last, so that updates of the weights can use its memory."""


class EngineLost(ModelError):
    """Raised if the engine that should answer a request has been lost.

    If it comes back, it first gets the current weights.

    Example:
        except inference.EngineLost:    # asked again at another engine of the fleet
    """


class CachePressure(msgspec.Struct, frozen=True):
    """How full an engine's KV cache is, and how many sequences wait for space in it.

    A client that can report it has a method ``async pressure() -> CachePressure | None``. That
    method returns None if the server does not report its load.
    """

    full: float
    """Fraction of the cache in use by running sequences."""
    waiting: int
    """Number of queued sequences."""
    evicted: int
    """Number of sequences that were preempted and must be recomputed, as a running total."""


@runtime_checkable
class UpdatableInferenceClient(Client, Protocol):
    """A client of an engine whose weights change between training steps."""

    @property
    def version(self) -> int:
        """The version of the weights that the engine uses now."""
        ...

    async def update(self, weights: object, version: int) -> None:
        """Load new weights with the version number ``version``, and clear the engine's caches.

        A reply in progress continues under the new weights. Its ``versions`` records which version
        sampled which tokens.
        """
        ...

    async def fingerprint(self) -> str | None:
        """Return a fingerprint that identifies the values of the engine's current weights.

        It is computed as in ``models.fingerprint``. Equal weights have equal fingerprints. Returns
        None if the engine stores its weights in another layout.
        """
        ...

    async def logprobs(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a sequence except the first, at temperature
        1.

        Each is conditioned on the tokens before it.
        """
        ...


def require_train_extra(what: str) -> None:
    """Raise ConfigError if the packages for running a model in this process are not installed."""
    for package in ("torch", "transformers", "safetensors"):
        if find_spec(package) is None:
            raise ConfigError(
                f"{what} runs a model in this process and needs {package}: "
                + install_command("train")
            )


def prompt_too_long_error(
    name: str, window: int, request: Request | None, num_ids: int
) -> RequestRefusedError:
    """Return the error for a prompt that leaves no room for a reply in the context window.

    The prompt has ``num_ids`` tokens.
    """
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
    error = RequestRefusedError(
        f"{name}: the prompt has {num_ids} tokens ({parts}), and the window of {window} leaves no "
        "room for a reply: shorten it, or let a child look at a part"
    )
    error.too_long = True
    return error
