"""The interface of a client for one inference engine behind HTTP, whatever software the engine
runs. ``vllm.py`` and ``sglang.py`` implement it.

The load on a server's KV cache is read from its monitoring metrics (``GET /metrics``, in the text
format of Prometheus).

    vllm:kv_cache_usage_perc{model_name="m"} 0.87
    vllm:num_requests_waiting{model_name="m"} 3.0      ──▶  CachePressure(full=0.87,
    vllm:num_preemptions_total{model_name="m"} 12.0                       waiting=3, evicted=12)

If several engines run behind one server, the load is that of the fullest cache, and the numbers of
sequences are summed. A server without the metrics of vLLM or SGLang reports no load.
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
    """Parse the load on the KV cache from a server's Prometheus metrics. Returns None if the
    metrics do not mention a cache."""
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


def format_kv_cache_metrics(pressure: CachePressure) -> str:
    """Write the load on a KV cache as Prometheus metrics, under vLLM's names, so that
    ``parse_kv_cache_pressure`` can parse the text."""
    values = (pressure.full, pressure.waiting, pressure.evicted)
    kinds = ("gauge", "gauge", "counter")
    return "".join(
        f"# TYPE {names[0]} {kind}\n{names[0]} {value:g}\n"
        for names, kind, value in zip((_FULL, _WAITING, _EVICTED), kinds, values, strict=True)
    )


def combine_kv_cache_pressure(loads: Iterable[CachePressure | None]) -> CachePressure | None:
    """Combine the loads of several servers: the fill of the fullest cache, and the total numbers of
    waiting and evicted sequences. Returns None if no server reports its load."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return CachePressure(
        max(load.full for load in known),
        sum(load.waiting for load in known),
        sum(load.evicted for load in known),
    )


class ServerInfo(NamedTuple):
    """The facts that an engine server reports about itself, such as its version, context window and
    vocabulary."""

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
    """The token ids that an engine sampled for one request, with their log-probabilities."""

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
    """A client of one engine server. Each engine software has its implementation. All methods raise
    ModelError, which names the server and the request."""

    url: str

    async def facts(self) -> ServerInfo:
        """Ask the server for its version and capabilities. Raises ConfigError if the server has
        another version of the protocol, or cannot receive weights."""
        ...

    async def check_health(self) -> None:
        """Raise ModelError if the server does not report in time that it is alive."""
        ...

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledIds: ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token except the first, given the tokens before it, at
        temperature 1."""
        ...

    async def pressure(self) -> CachePressure | None:
        """Return the load on the server's KV cache, or None if the server does not report it."""
        ...

    async def has_token_id(self, id: int) -> bool:
        """Return True if a token id is in the server's vocabulary."""
        ...

    async def fingerprint(self) -> str | None: ...

    async def pause(self) -> None:
        """Stop sampling until ``resume`` is called. Replies in progress may end early, with
        ``abort`` as the reason."""
        ...

    async def resume(self) -> None: ...

    async def open_weights(self, info: dict[str, Any]) -> None:
        """Prepare the server for weight updates. Called once, with the setup information of the
        weight sync method."""
        ...

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """Send one chunk of new weights. After the last chunk, the server uses the new weights as
        ``version``, and everything cached under older weights is cleared. Raises
        EngineStateConflict if the chunk holds differences from weights that the server does not
        have."""
        ...

    async def sleep(self, level: int) -> None:
        """Release the server's memory for other users of the device. The KV cache is dropped; the
        weights move to main memory (level 1) or are dropped (level 2). No request is answered until
        all kinds of memory (``TAGS``) are awake. Must not be called on a server that already
        sleeps."""
        ...

    async def wake(self, tag: str) -> None:
        """Allocate one kind of memory again, either ``weights`` or ``kv_cache``. It must have been
        released by ``sleep``."""
        ...

    async def is_asleep(self) -> bool:
        """Return True if the server is asleep, for example because an earlier run left it so.
        Returns False if the server does not report it."""
        ...

    async def close(self) -> None: ...
