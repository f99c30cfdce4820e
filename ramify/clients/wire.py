"""One HTTP connection pool for a whole run: bytes of JSON out, status and bytes back, failures as ``ModelError``.

The session is made at the first request, so that naming a model costs no import of the HTTP library. Proxies come from
``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``. Certificate authorities are the system's, or those of
``SSL_CERT_FILE`` and ``SSL_CERT_DIR``; ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE`` and ``NODE_EXTRA_CA_CERTS`` add to
them. ``~/.netrc`` is not read: it would replace the key that the caller named.

What it knows of a failure is whether the request may have been acted upon: nothing was sent before a connection stood;
after that, a reply that does not arrive may have been paid. It does not try again and does not read what the JSON says.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec

from ramify.errors import BadReply, ConfigError, ModelError, ReplyLost, Unreachable

if TYPE_CHECKING:
    import aiohttp

_KEEPALIVE_S = 4.0
"""Common servers close idle connections after five seconds; a request must not meet that moment."""
_CONNECT_S = 30.0
_REPLACING = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_ADDING = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")


class Answer(msgspec.Struct, frozen=True):
    """What a server sent back."""

    status: int
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes


class Route(msgspec.Struct, frozen=True):
    """Where one client's requests go; made once, so that a request looks nothing up."""

    url: str
    headers: dict[str, str]
    """With the key: never printed."""
    proxy: str | None

    def __repr__(self) -> str:
        return f"Route({self.url!r})"


class Wire:
    """A connection pool. Belongs to the event loop of its first request."""

    def __init__(self, max_body_bytes: int = 64 << 20) -> None:
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None
        self._tls: ssl.SSLContext | Literal[True] | None = None
        """Made at the first request that needs it; True where the library's own context serves."""

    async def post(self, where: str, route: Route, body: bytes) -> Answer:
        """Send ``body``; the answer whatever its status. ``where`` names the model in errors."""
        import aiohttp

        session = self._session or self._open()
        if self._tls is None and not route.url.startswith("http://"):
            self._tls = _tls() or True
        try:
            async with session.post(
                route.url,
                data=body,
                headers=route.headers,
                proxy=route.proxy,
                ssl=self._tls or True,
                allow_redirects=False,
            ) as response:
                return Answer(response.status, response.headers, await self._bounded(where, response))
        except aiohttp.ClientError as error:
            raise _failure(where, route, error) from error
        except TimeoutError as error:
            raise ReplyLost(f"{where}: no reply from {route.url} in time") from error
        except (ConnectionError, ssl.SSLError) as error:
            raise ReplyLost(f"{where}: the connection to {route.url} broke ({_reason(error)})") from error

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        import aiohttp

        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_S, ttl_dns_cache=60)
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,  # it would read ~/.netrc, and look proxies up for every request
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S),
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"User-Agent": "ramify", "Content-Type": "application/json", "Accept": "application/json"},
        )
        return self._session

    async def _bounded(self, where: str, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._max_body_bytes:
                raise BadReply(f"{where}: the reply is longer than {self._max_body_bytes} bytes; lower max_tokens")
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for ``url``."""
    parts = urlsplit(url)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    if not proxy or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    if not proxy.startswith(("http://", "https://")):
        if "://" in proxy:
            kind = proxy.partition("://")[0]
            raise ConfigError(
                f"the environment names a {kind} proxy for {url}: give an http:// proxy in "
                f"{parts.scheme.upper()}_PROXY, or name {parts.hostname} in NO_PROXY"
            )
        proxy = f"http://{proxy}"
    return proxy


def _tls() -> ssl.SSLContext | None:
    """A context with the environment's certificate authorities; None where the library's own serves."""
    if not any(os.environ.get(name) for name in (*_REPLACING, *_ADDING)):
        return None
    context = ssl.create_default_context()  # OpenSSL itself reads SSL_CERT_FILE and SSL_CERT_DIR
    replaced = {os.environ.get(name) for name in _REPLACING}
    for bundle in {os.environ.get(name) for name in _ADDING} - replaced:
        if not bundle:
            continue
        try:
            context.load_verify_locations(**{"capath" if os.path.isdir(bundle) else "cafile": bundle})
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"certificate bundle {bundle}: {error}; fix or unset its variable") from None
    return context


def _failure(where: str, route: Route, error: Exception) -> ModelError:
    import aiohttp

    through = f" through the proxy {_host(route.proxy)}" if route.proxy else ""
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            failure = Unreachable(
                f"{where}: no trusted connection to {route.url}{through} ({_reason(error)}); "
                "name your certificate authority in SSL_CERT_FILE"
            )
            failure.transient = False
            return failure
        case aiohttp.ClientConnectorError() | aiohttp.ClientHttpProxyError() | aiohttp.ConnectionTimeoutError():
            return Unreachable(f"{where}: cannot reach {route.url}{through} ({_reason(error)})")
        case aiohttp.InvalidURL():
            failure = Unreachable(f"{where}: {route.url} is not a URL")
            failure.transient = False
            return failure
        case _:
            return ReplyLost(
                f"{where}: the connection to {route.url} broke before the reply was whole ({_reason(error)})"
            )


def _host(proxy: str | None) -> str:
    parts = urlsplit(proxy or "")
    return f"{parts.scheme}://{parts.hostname}:{parts.port}" if parts.port else f"{parts.scheme}://{parts.hostname}"


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())[:200]
