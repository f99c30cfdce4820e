"""Cache load of a server, read from its monitoring metrics (``GET /metrics``, Prometheus text
format).

    vllm:kv_cache_usage_perc{model_name="m"} 0.87
    vllm:num_requests_waiting{model_name="m"} 3.0      ──▶  CachePressure(full=0.87,
    vllm:num_preemptions_total{model_name="m"} 12.0                       waiting=3, evicted=12)

If several engines run behind one server, the fullest cache counts, and the numbers of sequences are
summed. This file decides the metric names of vLLM and SGLang. A server with none of them reports
nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from ramify.inference.base import CachePressure

_FULL = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs")
_EVICTED = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
_LINE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})?\s+([0-9.eE+-]+)", re.MULTILINE)


def read(text: str) -> CachePressure | None:
    """The cache load in a server's metrics; None if they do not mention a cache."""
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


def write(pressure: CachePressure) -> str:
    """The inverse of ``read``, with vLLM's names."""
    values = (pressure.full, pressure.waiting, pressure.evicted)
    kinds = ("gauge", "gauge", "counter")
    return "".join(
        f"# TYPE {names[0]} {kind}\n{names[0]} {value:g}\n"
        for names, kind, value in zip((_FULL, _WAITING, _EVICTED), kinds, values, strict=True)
    )


def combined(loads: Iterable[CachePressure | None]) -> CachePressure | None:
    """Combined load of several servers: the fullest cache, and sums; None if no server reports
    any."""
    known = [load for load in loads if load is not None]
    if not known:
        return None
    return CachePressure(
        max(load.full for load in known),
        sum(load.waiting for load in known),
        sum(load.evicted for load in known),
    )
