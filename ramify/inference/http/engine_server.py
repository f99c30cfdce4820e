"""What a trainer does with one engine behind HTTP, whatever software it is. ``vllm.py`` and
``sglang.py`` say how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from ramify.clients.base import Sampling
from ramify.inference.base import CachePressure
from ramify.types.message import VersionSpan


class ServerInfo(NamedTuple):
    """What a server says of itself."""

    version: str
    """Of its software."""
    window: int | None
    dtype: str
    """As ``float32``; empty where it does not say."""
    vocabulary: int | None
    logprobs_mode: str
    """``processed_logprobs``: of the distribution that was drawn from. Empty where it does not
    say."""
    levels: tuple[int, ...] = (1, 2)
    """At which it can sleep, as far as it says."""


class SampledIds(NamedTuple):
    """Ids that came out."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str
    """``stop``, ``length``; ``abort`` where a pause ended it."""
    cached: int
    """Prompt tokens that were computed before."""
    versions: tuple[VersionSpan, ...] | None
    """Where the server says it."""
    kept: tuple[tuple[int, ...], ...] | None


class EngineServer(Protocol):
    """Implemented for each software. All raise ModelError, which names the server and what was
    asked."""

    url: str
    updates_in_place: bool
    """Whether requests in flight can wait for new weights and go on exactly; else they are ended
    and sent again."""

    async def facts(self) -> ServerInfo:
        """Raises ConfigError for a version of another protocol, or a server that takes no
        weights."""
        ...

    async def healthy(self) -> None:
        """Raises where it does not say in time that it is alive."""
        ...

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledIds: ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of each of ``ids`` but the first."""
        ...

    async def pressure(self) -> CachePressure | None:
        """How its cache bears what is asked; None where it does not say."""
        ...

    async def takes_id(self, id: int) -> bool:
        """Whether ``id`` is of its vocabulary."""
        ...

    async def fingerprint(self) -> str | None: ...

    async def pause(self) -> None:
        """No request goes on until ``resume``."""
        ...

    async def resume(self) -> None: ...

    async def open_weights(self, info: dict[str, Any]) -> None:
        """What the carrier says once."""
        ...

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """One chunk of a sync, or all of it. With the ``last`` the weights are ``version``, and
        nothing of others is remembered. Raises Conflict where the engine lacks what it builds
        on."""
        ...

    async def sleep(self, level: int) -> None:
        """Give memory back for whoever shares the device: keys and values are forgotten, and
        weights are kept in main memory (1) or dropped (2). Nobody is answered until all of ``TAGS``
        are awake. It may not sleep already."""
        ...

    async def wake(self, tag: str) -> None:
        """Take back what ``tag`` names, which sleeps."""
        ...

    async def is_asleep(self) -> bool:
        """Whether it was left asleep; False where it does not say."""
        ...

    async def close(self) -> None: ...
