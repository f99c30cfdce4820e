"""How full a server's cache is, read off the metrics that it shows to monitors (``GET /metrics``,
Prometheus's text form).

    vllm:kv_cache_usage_perc{model_name="m"} 0.87        ──>  Pressure(full=0.87, waiting=3, evicted=12)
    vllm:num_requests_waiting{model_name="m"} 3.0             of several engines behind one server the fullest, and sums
    vllm:num_preemptions_total{model_name="m"} 12.0

Decides the names, of vLLM and of SGLang. A server that shows none of them does not say.
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
    """What a server's metrics say; None where they do not speak of a cache."""
    found: dict[str, list[float]] = {}
    for name, value in _LINE.findall(text):
        if name in (*_FULL, *_WAITING, *_EVICTED):
            found.setdefault(name, []).append(float(value))
    full = [value for name in _FULL for value in found.get(name, ())]
    if not full:
        return None
    waiting, evicted = (
        sum(sum(found.get(name, ())) for name in names) for names in (_WAITING, _EVICTED)
    )
    return CachePressure(max(full), int(waiting), int(evicted))


def write(pressure: CachePressure) -> str:
    """The same in vLLM's names."""
    values = (pressure.full, pressure.waiting, pressure.evicted)
    kinds = ("gauge", "gauge", "counter")
    return "".join(
        f"# TYPE {names[0]} {kind}\n{names[0]} {value:g}\n"
        for names, kind, value in zip((_FULL, _WAITING, _EVICTED), kinds, values, strict=True)
    )


def together(found: Iterable[CachePressure | None]) -> CachePressure | None:
    """Of several servers: the fullest, and sums; None where none says it."""
    told = [each for each in found if each is not None]
    if not told:
        return None
    return CachePressure(
        max(each.full for each in told),
        sum(each.waiting for each in told),
        sum(each.evicted for each in told),
    )
