"""The interface of a client for one inference engine behind HTTP.

``vllm.py`` and ``sglang.py`` implement it for their engines.

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
    """Parse the KV cache load from a server's Prometheus metrics.

    Returns None if they contain no cache metrics.
    """
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


def format_kv_cache_prometheus(pressure: CachePressure) -> str:
    """Format a KV cache load as Prometheus metrics with vLLM's names.

    ``parse_kv_cache_pressure`` can parse them.
    """
    values = (pressure.full, pressure.waiting, pressure.evicted)
    kinds = ("gauge", "gauge", "counter")
    return "".join(
        f"# TYPE {names[0]} {kind}\n{names[0]} {value:g}\n"
        for names, kind, value in zip((_FULL, _WAITING, _EVICTED), kinds, values, strict=True)
    )


def combine_kv_cache_pressure(loads: Iterable[CachePressure | None]) -> CachePressure | None:
    """Return the combined KV-cache load of several servers.

    It has the highest utilization and the summed counts. The counts are those of waiting and
    evicted sequences. Returns None if no server reports its load.
    """
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return CachePressure(
        max(load.full for load in known),
        sum(load.waiting for load in known),
        sum(load.evicted for load in known),
    )


class EngineServerInfo(NamedTuple):
    """What an engine server reports about itself, such as its version, context window and
    vocabulary."""

    version: str
    """Version of the engine software."""
    window: int | None
    dtype: str
    """Data type such as ``float32``. Empty if not reported."""
    vocabulary: int | None
    logprobs_mode: str
    """``processed_logprobs`` if log-probabilities are those of the distribution from which tokens
    are sampled; empty if not reported."""
    levels: tuple[int, ...] = (1, 2)
    """Sleep levels that the server supports; 1 and 2 if it does not report them."""


class SampledTokenIds(NamedTuple):
    """The token ids that an engine sampled for one request.

    Their log-probabilities are given, too.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    end: str
    """Why sampling ended: ``stop``, ``length``, or ``abort`` if a pause ended it."""
    cached: int
    """Number of prompt tokens that were already cached."""
    versions: tuple[VersionSpan, ...] | None
    """Which version of the weights sampled which tokens. None if the server does not report it."""
    kept: tuple[tuple[int, ...], ...] | None
    routed: Any = None
    """The server's report of which experts processed each token, in one of the formats described in
    ``reported_experts.py``. None if there is none."""


class EngineClient(Protocol):
    """A client of one engine server.

    Each engine software has its own implementation. Every method raises a ModelError that names the
    server and the request.
    """

    url: str

    async def facts(self) -> EngineServerInfo:
        """Ask the engine server for its version and capabilities.

        Raises ConfigError if it speaks another version of the protocol or cannot receive weights.
        """
        ...

    async def check_health(self) -> None:
        """Raise ModelError unless the engine server passes a health check in time."""
        ...

    async def sample(
        self, ids: Sequence[int], sampling: Sampling, stop_ids: Sequence[int], affinity: str
    ) -> SampledTokenIds: ...

    async def score(self, ids: Sequence[int]) -> list[float]:
        """Return the log-probability of each token of a sequence at temperature 1.

        It is conditional on the tokens before it. The first token has none, and is left out.
        """
        ...

    async def pressure(self) -> CachePressure | None:
        """Return the load on the engine server's KV cache, or None if it is not reported."""
        ...

    async def is_in_vocabulary(self, id: int) -> bool:
        """Return True if the engine's vocabulary contains the token id."""
        ...

    async def fingerprint(self) -> str | None: ...

    async def pause(self) -> None:
        """Pause the engine's sampling until ``resume`` is called.

        Replies in progress may end early with the reason ``abort``.
        """
        ...

    async def resume(self) -> None: ...

    async def open_weights(self, info: dict[str, Any]) -> None:
        """Prepare the engine server to receive weight updates.

        Called once with the weight sync's setup information.
        """
        ...

    async def update(self, info: dict[str, Any], version: int, *, first: bool, last: bool) -> None:
        """Send one chunk of new weights to the engine server.

        After the last chunk, the server uses them as ``version`` and clears everything cached under
        older weights. Raises EngineStateConflict if the chunk is a difference from weights that the
        server does not have.
        """
        ...

    async def sleep(self, level: int) -> None:
        """Release the engine server's memory, so that others can use the device.

        The KV cache is dropped. Weights move to main memory (level 1) or are dropped (level 2). No
        request is answered until all kinds of memory (``TAGS``) are awake. Must not be called on a
        sleeping server.
        """
        ...

    async def wake(self, tag: str) -> None:
        """Reallocate one kind of memory, ``weights`` or ``kv_cache``, after ``sleep`` released
        it."""
        ...

    async def is_asleep(self) -> bool:
        """Return True if the server is asleep, for example because an earlier run left it asleep.

        Returns False if the server does not report it.
        """
        ...

    async def close(self) -> None: ...
