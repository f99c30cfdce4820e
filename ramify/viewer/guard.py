"""Who may look, and what every answer says besides its data.

The page listens on loopback and answers only those who call it by a name of this machine, so that a
page from elsewhere cannot read a journal by renaming itself; on another address it wants a token,
which moves from the address, where it is seen and kept, to a cookie. Every error is JSON:
``{"error": "…"}``.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ramify.errors import ConfigError, StoreError
from ramify.viewer.page_script import early, hashed

POLICY = (
    f"default-src 'none'; script-src 'self' {hashed(early())}; style-src 'self'; img-src 'self' "
    "data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""Nothing from elsewhere, inline that one script alone; and no string becomes HTML or code, whoever
wrote it."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(Exception):
    """An address without something that it needs."""


class RequestGuard:
    """Stands before every handler of one server; ``address`` gives where it listens, once it
    does."""

    def __init__(
        self, host: str, token: str | None, address: Callable[[], tuple[str, int]]
    ) -> None:
        """Raises ConfigError for an address beyond loopback without a token."""
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host} can be reached from other machines: give a token (--token), or stay on "
                "127.0.0.1"
            )
        self._token, self._address = token, address

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """The caller's name for us, the token, and every error as JSON."""
        if self._token:
            given = request.query.get("token")
            if given is not None and request.path == "/" and _same(given, self._token):
                return self._let_in(self._token)
            if not _same(self._shown(request), self._token):
                return _failed(
                    401, "this page wants its token: open the address that ramify view printed"
                )
        elif not is_loopback(_host_of(request)):
            return _failed(
                403, f"{request.host} is not a name of this machine: open {self._address()[0]}"
            )
        try:
            return await handler(request)
        except StoreError as error:
            return _failed(404, str(error))
        except BadRequest as error:
            return _failed(400, str(error))
        except web.HTTPException as error:
            return _failed(error.status, f"{request.method} {request.path}: {error.reason}")

    def _shown(self, request: web.Request) -> str:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return bearer or request.cookies.get(self._cookie, "")

    @property
    def _cookie(self) -> str:
        # cookies know no ports, and two viewers may run on one machine
        return f"ramify-view-{self._address()[1]}"

    def _let_in(self, token: str) -> web.Response:
        response = web.Response(status=303, headers={"Location": "/"})
        response.set_cookie(self._cookie, token, httponly=True, samesite="Strict")
        return response


async def add_headers(_: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(_HEADERS)
    response.headers.setdefault("Cache-Control", "no-cache")


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def _failed(status: int, text: str) -> web.Response:
    return web.Response(
        status=status, body=msgspec.json.encode({"error": text}), content_type="application/json"
    )


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(), wanted.encode())


def _host_of(request: web.Request) -> str:
    """``[::1]:8765`` -> ``::1``"""
    host = request.host
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
