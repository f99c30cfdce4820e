"""Interface to one engine behind HTTP, whatever software it runs. ``vllm.py`` and ``sglang.py``
implement it.

The load on a server's cache is read from its monitoring metrics (``GET /metrics``, Prometheus text
format).

    vllm:kv_cache_usage_perc{model_name="m"} 0.87
    vllm:num_requests_waiting{model_name="m"} 3.0      ──▶  CachePressure(full=0.87,
    vllm:num_preemptions_total{model_name="m"} 12.0                       waiting=3, evicted=12)

If several engines run behind one server, the fullest cache counts, and the numbers of sequences are
summed. A server without the metrics of vLLM or SGLang reports nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from ramify.clients.base import Sampling
from ramify.inference.base import CachePressure
from ramify.types.message import VersionSpan

_FULL = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_EVICTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


def parse_kv_cache_pressure(text: str) -> CachePressure | None:
    """Parse the load on the KV cache from a server's Prometheus metrics. None if they do not
    mention a cache."""
    values_by_name: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        if name in (*_FULL, *_WAITING, *_EVICTED):
            values_by_name.setdefault(name, []).append(float(value))
    full = [value for name in _FULL for value in values_by_name.get(name, ())]
    if not full:
        return None
    waiting, evicted = (
        sum(sum(values_by_name.get(name, ())) for name in names) for names in (_WAITING, _EVICTED)
    )
    return CachePressure(max(full), int(waiting), int(evicted))


def format_kv_cache_pressure(pressure: CachePressure) -> str:
    """Write the load on a KV cache as Prometheus metrics, under vLLM's names.
    ``parse_kv_cache_pressure`` parses this text."""
    values = (pressure.full, pressure.waiting, pressure.evicted)
    kinds = ("gauge", "gauge", "counter")
    return "".join(
        f"# TYPE {names[0]} {kind}\n{names[0]} {value:g}\n"
        for names, kind, value in zip((_FULL, _WAITING, _EVICTED), kinds, values, strict=True)
    )


def combine_kv_cache_pressure(loads: Iterable[CachePressure | None]) -> CachePressure | None:
    """Combine the load of several servers: the fill of the fullest cache, and the total numbers of
    waiting and evicted sequences. None if no server reports its load."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return CachePressure(
        max(load.full for load in known),
        sum(load.waiting for load in known),
        sum(load.evicted for load in known),
    )


class ServerInfo(NamedTuple):
    """Facts that a server reports about itself."""

    version: str
    """Version of its software."""
    window: int | None
    dtype: str
    """Such as ``float32``; empty if it does not say."""
    vocabulary: int | None
    logprobs_mode: str
    """``processed_logprobs`` if log-probabilities are those of the distribution that was sampled
    from. Empty if it does not say."""
    levels: tuple[int, ...] = (1, 2)
    """Levels at which it can sleep, as far as it says."""


class SampledIds(NamedTuple):
    """Sampled ids and their log-probabilities."""

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str
    """``stop`` or ``length``; ``abort`` if a pause ended the reply."""
    cached: int
    """Prompt tokens that were already in the cache."""
    versions: tuple[VersionSpan, ...] | None
    """Which version sampled which tokens; None if the server does not say."""
    kept: tuple[tuple[int, ...], ...] | None
    routed: Any = None
    """What the server says about experts, in a form of ``reported_experts.py``; None: nothing."""


class EngineClient(Protocol):
    """One engine server; each software has its implementation. All methods raise ModelError, which
    names the server and the request."""

    url: str

    async def facts(self) -> ServerInfo:
        """Ask the server for facts about itself. Raises ConfigError if it has another protocol
        version, or takes no weights."""
        ...

    async def healthy(self) -> None:
        """Raise ModelError if the server does not report in time that it is alive."""
        ...

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledIds: ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Log-probability at temperature 1 of each of ``ids`` except the first."""
        ...

    async def pressure(self) -> CachePressure | None:
        """Load on the server's KV cache; None if the server does not report it."""
        ...

    async def takes_id(self, id: int) -> bool:
        """Whether a token id is in the server's vocabulary."""
        ...

    async def fingerprint(self) -> str | None: ...

    async def pause(self) -> None:
        """Stop all requests until ``resume``."""
        ...

    async def resume(self) -> None: ...

    async def open_weights(self, info: dict[str, Any]) -> None:
        """Send the setup information of the weight sync, once."""
        ...

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """Apply one chunk of a sync. After the ``last`` chunk the weights are ``version``, and
        everything cached under older weights is cleared. Raises EngineStateConflict if the engine
        lacks the weights that the chunk builds on."""
        ...

    async def sleep(self, level: int) -> None:
        """Release memory for other users of the device. The KV cache is dropped; the weights move
        to main memory (level 1) or are dropped (level 2). No request is answered until all of
        ``TAGS`` are awake. Must not be called on a server that already sleeps."""
        ...

    async def wake(self, tag: str) -> None:
        """Allocate one kind of memory (``tag``) again. It must have been released by ``sleep``."""
        ...

    async def is_asleep(self) -> bool:
        """Whether the server is asleep, for example because an earlier run left it so. False if the
        server does not report it."""
        ...

    async def close(self) -> None: ...
