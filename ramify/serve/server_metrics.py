"""The metrics of ``ramify serve``, in the text format of Prometheus.

Names of API keys and models are not used as labels: labels with many values are costly in
Prometheus, and the names of callers are private.
"""

from __future__ import annotations

from collections import defaultdict

from ramify.types.message import Usage

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Upper bounds (seconds) of the histogram of run durations."""
_ABOUT = {
    "ramify_requests_total": "HTTP requests by path and status; 499: the client disconnected.",
    "ramify_runs_total": "Finished runs by stop reason.",
    "ramify_tokens_total": "Tokens used by finished runs, including sub-calls, by kind.",
    "ramify_model_calls_total": "Model requests made by finished runs.",
    "ramify_cost_dollars_total": "Cost of finished runs in dollars; unknown prices count as 0.",
    "ramify_events_sent_total": "Events sent in streaming responses.",
}
_IN_FLIGHT = "ramify_runs_in_flight"
_DURATION = "ramify_run_seconds"


class ServerMetrics:
    """The counters of one server since it started."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(int)
        )
        self._buckets = [0] * (len(_SECONDS) + 1)
        self._seconds = 0.0
        self.in_flight = 0
        """Number of runs in progress."""

    def count_request(self, path: str, status: int) -> None:
        self._counts["ramify_requests_total"][f'path="{path}",status="{status}"'] += 1

    def count_sent_events(self, count: int = 1) -> None:
        self._counts["ramify_events_sent_total"][""] += count

    def count_run(self, stop: str, usage: Usage, cost: float | None, seconds: float) -> None:
        """Add a finished run to the counters: its usage, cost and duration."""
        self._counts["ramify_runs_total"][f'stop="{stop}"'] += 1
        tokens = self._counts["ramify_tokens_total"]
        tokens['kind="input"'] += usage.input_tokens
        tokens['kind="output"'] += usage.output_tokens
        self._counts["ramify_model_calls_total"][""] += usage.calls
        self._counts["ramify_cost_dollars_total"][""] += cost or 0.0
        self._buckets[sum(seconds > bound for bound in _SECONDS)] += 1
        self._seconds += seconds

    def to_prometheus_text(self) -> str:
        """Return all metrics in the text format of Prometheus."""
        lines = []
        for name, about in _ABOUT.items():
            lines += [f"# HELP {name} {about}", f"# TYPE {name} counter"]
            values = self._counts[name]
            lines += [
                f"{name}{{{labels}}} {value}" if labels else f"{name} {value}"
                for labels, value in values.items()
            ]
        lines += [
            f"# HELP {_IN_FLIGHT} Runs in progress.",
            f"# TYPE {_IN_FLIGHT} gauge",
            f"{_IN_FLIGHT} {self.in_flight}",
        ]
        return "\n".join([*lines, *self._histogram()]) + "\n"

    def _histogram(self) -> list[str]:
        lines = [
            f"# HELP {_DURATION} Duration of finished runs in seconds, from question to answer.",
            f"# TYPE {_DURATION} histogram",
        ]
        total = 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{_DURATION}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{_DURATION}_sum {self._seconds:.6f}", f"{_DURATION}_count {total}"]
