"""HTTP basics of all servers: listening, bearer keys, errors in OpenAI's format, and metrics in the
format of Prometheus.

This file decides what an error response looks like and which addresses are safe without a key. Not
here: the routes (see run_server.py and policy.py). Names of keys and models are not labels of
metrics: a label should have few values, and the names of callers are private.
"""

from __future__ import annotations

import ipaddress
from collections import defaultdict
from typing import Any

from aiohttp import web

from ramify.errors import ConfigError, cannot_listen
from ramify.serve.completions import failure
from ramify.types.message import Usage

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestRejected(Exception):
    """A request that gets an error response. ``str()`` is the message for the client."""

    def __init__(
        self,
        text: str,
        *,
        param: str | None = None,
        status: int = 400,
        code: str | None = None,
        kind: str = "",
        retry_after_s: float | None = None,
        run: str | None = None,
    ) -> None:
        """``param`` is the wrong field; ``run`` is the id of the failed run."""
        super().__init__(text)
        self.param = param
        self.status = status
        self.code = code
        self.run = run
        self.kind = kind or kind_of(status)
        self.retry_after_s = retry_after_s

    def body(self) -> bytes:
        more = {} if self.run is None else {"run": self.run}
        return failure(str(self), self.kind, self.code, self.param, **more)

    def response(self) -> web.Response:
        headers = (
            {}
            if self.retry_after_s is None
            else {"retry-after": f"{max(1, round(self.retry_after_s))}"}
        )
        # A retry would pay for a whole run again, so clients must not retry automatically.
        if self.run is not None:
            headers |= {"x-ramify-run": self.run, "x-should-retry": "false"}
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def kind_of(status: int) -> str:
    """OpenAI's error type for an HTTP status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def failed(status: int, text: str, kind: str = "", code: str | None = None) -> web.Response:
    """Response for an error."""
    return RequestRejected(text, status=status, kind=kind, code=code).response()


def bearer(http: web.Request) -> str:
    """Bearer key of a request; empty if it has none."""
    return http.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_open(host: str, has_key: bool) -> None:
    """Raise ConfigError for an address beyond loopback without a key."""
    if not has_key and not is_loopback(host):
        raise ConfigError(
            f"{host} is reachable from other machines: give a key (--api-key), or listen on "
            "127.0.0.1"
        )


class HttpListener:
    """Listener that serves one aiohttp application on a port."""

    def __init__(self, host: str, port: int) -> None:
        """``port`` 0 picks a free port; after ``start``, ``port`` is the actual one."""
        self.host = host
        self.port = port
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    @property
    def url(self) -> str:
        """Base URL of the API: ``http://127.0.0.1:PORT/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    async def start(self, app: web.Application, **options: Any) -> None:
        # handler_cancellation cancels the request of a client that disconnects.
        self._runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0, **options
        )
        await self._runner.setup()
        self._site = web.TCPSite(self._runner, self.host, self.port, backlog=1024)
        try:
            await self._site.start()
        except (OSError, OverflowError) as error:
            await self._runner.cleanup()
            raise cannot_listen(self.host, self.port, error) from None
        self.port = self._runner.addresses[0][1]

    async def close(self) -> None:
        """Close every connection."""
        if self._runner is not None:
            await self._runner.cleanup()


METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.1, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)
"""Upper bounds (seconds) of the histogram of run durations."""
_ABOUT = {
    "ramify_requests_total": "Requests by path and HTTP status; 499: the client disconnected.",
    "ramify_runs_total": "Ended runs by stop reason.",
    "ramify_tokens_total": "Tokens used by ended runs, including sub-calls, by kind.",
    "ramify_model_calls_total": "Model requests of ended runs.",
    "ramify_cost_dollars_total": "Cost of ended runs in dollars, if prices are known.",
    "ramify_events_sent_total": "Events sent in streaming responses.",
}
_IN_FLIGHT = "ramify_runs_in_flight"
_DURATION = "ramify_run_seconds"


class ServerMetrics:
    """Counters of one server since its start."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, defaultdict[str, float]] = defaultdict(
            lambda: defaultdict(int)
        )
        self._buckets = [0] * (len(_SECONDS) + 1)
        self._seconds = 0.0
        self.in_flight = 0
        """Number of runs in progress."""

    def request(self, path: str, status: int) -> None:
        self._counts["ramify_requests_total"][f'path="{path}",status="{status}"'] += 1

    def events(self, count: int = 1) -> None:
        self._counts["ramify_events_sent_total"][""] += count

    def run(self, stop: str, usage: Usage, cost: float | None, seconds: float) -> None:
        """Count a run that has ended."""
        self._counts["ramify_runs_total"][f'stop="{stop}"'] += 1
        tokens = self._counts["ramify_tokens_total"]
        tokens['kind="input"'] += usage.input_tokens
        tokens['kind="output"'] += usage.output_tokens
        self._counts["ramify_model_calls_total"][""] += usage.calls
        self._counts["ramify_cost_dollars_total"][""] += cost or 0.0
        self._buckets[sum(seconds > bound for bound in _SECONDS)] += 1
        self._seconds += seconds

    def text(self) -> str:
        """All metrics in the Prometheus text format."""
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
            f"# HELP {_DURATION} Seconds from question to answer.",
            f"# TYPE {_DURATION} histogram",
        ]
        total = 0
        for bound, count in zip((*map(str, _SECONDS), "+Inf"), self._buckets, strict=True):
            total += count
            lines.append(f'{_DURATION}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{_DURATION}_sum {self._seconds:.6f}", f"{_DURATION}_count {total}"]
