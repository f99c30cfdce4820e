"""What every server of this room shares: listening, keys on the wire, and errors in OpenAI's shape.

It decides how a refusal looks and which addresses are safe without a key. It leaves out what is
served.
"""

from __future__ import annotations

import ipaddress
from typing import Any

from aiohttp import web

from ramify.errors import ConfigError, cannot_listen
from ramify.serve.completions import failure

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    429: "rate_limit_error",
}


class RequestRejected(Exception):
    """A request that gets an error instead of an answer. ``str()`` says what is wrong, for the
    caller."""

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
        """``param`` is the field that is wrong, ``run`` the id of the run that failed."""
        super().__init__(text)
        self.param, self.status, self.code, self.run = param, status, code, run
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
        if (
            self.run is not None
        ):  # asking again would pay for a whole run again: the caller is to decide that
            headers |= {"x-ramify-run": self.run, "x-should-retry": "false"}
        return web.Response(
            status=self.status, body=self.body(), content_type="application/json", headers=headers
        )


def kind_of(status: int) -> str:
    """OpenAI's word for an error of this status."""
    return _KINDS.get(status, "server_error" if status >= 500 else "invalid_request_error")


def failed(status: int, text: str, kind: str = "", code: str | None = None) -> web.Response:
    """An error as a response."""
    return RequestRejected(text, status=status, kind=kind, code=code).response()


def bearer(http: web.Request) -> str:
    """The key that came with a request; empty if none did."""
    return http.headers.get("Authorization", "").removeprefix("Bearer ").strip()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def refuse_open(host: str, has_key: bool) -> None:
    """Raises ConfigError for an address beyond loopback without a key."""
    if not has_key and not is_loopback(host):
        raise ConfigError(
            f"{host} can be reached from other machines: give a key (--api-key), or serve on "
            "127.0.0.1"
        )


class HttpListener:
    """An application on a port."""

    def __init__(self, host: str, port: int) -> None:
        """``port`` 0 takes a free one, and is then the one that was taken."""
        self.host, self.port = host, port
        self._runner: web.AppRunner | None = None
        self._site: web.TCPSite | None = None

    @property
    def url(self) -> str:
        """The base URL, ``http://127.0.0.1:PORT/v1``."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/v1"

    async def start(self, app: web.Application, **options: Any) -> None:
        # A request of somebody who hung up is cancelled.
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
