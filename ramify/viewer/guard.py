"""Access control of the viewer, and the security headers of every response.

On loopback, the server answers only requests whose host is a name of this machine, so that a
foreign web page cannot read journals by DNS rebinding. On any other address it requires a token.
The token moves from the URL, where others may see it, to a cookie. Every error is JSON:
``{"error": "…"}``.
"""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from ramify.errors import ConfigError, RamifyError, StoreError
from ramify.viewer.page_script import early, hashed

POLICY = (
    f"default-src 'none'; script-src 'self' {hashed(early())}; style-src 'self'; img-src 'self' "
    "data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for "
    "'script'; trusted-types 'none'"
)
"""Content-Security-Policy: no resources from other hosts, only one inline script, and no string may
become HTML or code."""
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class BadRequest(Exception):
    """A request without a required parameter, or with an invalid one."""


class NotAllowed(Exception):
    """A request that this server never answers, whatever its parameters are."""


class RequestGuard:
    """Access check in front of every handler of one server."""

    def __init__(
        self, host: str, token: str | None, address: Callable[[], tuple[str, int]]
    ) -> None:
        """``address`` returns the URL and the port, once the server listens.

        Raises ConfigError for an address beyond loopback without a token.
        """
        if not token and not is_loopback(host):
            raise ConfigError(
                f"{host} is reachable from other machines: give a token (--token), or listen on "
                "127.0.0.1"
            )
        self._token = token
        self._address = address

    @web.middleware
    async def admit(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Check the token or the host name, and return every error as JSON."""
        if self._token:
            token = request.query.get("token")
            if token is not None and request.path == "/" and _same(token, self._token):
                return self._set_cookie(self._token)
            if not _same(self._shown(request), self._token):
                return _failed(
                    401, "this page needs its token: open the address that ramify view printed"
                )
        elif not is_loopback(_host_of(request)):
            return _failed(
                403, f"{request.host} is not a name of this machine: open {self._address()[0]}"
            )
        try:
            return await handler(request)
        except StoreError as error:
            return _failed(404, str(error))
        except NotAllowed as error:
            return _failed(403, str(error))
        except (BadRequest, RamifyError) as error:
            return _failed(400, str(error))
        except web.HTTPException as error:
            return _failed(error.status, f"{request.method} {request.path}: {error.reason}")

    def _shown(self, request: web.Request) -> str:
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        return bearer or request.cookies.get(self._cookie, "")

    @property
    def _cookie(self) -> str:
        # Cookies ignore ports, and two viewers may run on the same machine.
        return f"ramify-view-{self._address()[1]}"

    def _set_cookie(self, token: str) -> web.Response:
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


def _same(token: str, expected: str) -> bool:
    return hmac.compare_digest(token.encode(), expected.encode())


def _host_of(request: web.Request) -> str:
    """``[::1]:8765`` -> ``::1``"""
    host = request.host
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
