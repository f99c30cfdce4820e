"""One HTTP connection pool for a whole run: JSON bytes out, status and bytes back.

    http://, no proxy   ── http1.py     our own small client: local models and services
    everything else     ── https.py     aiohttp: TLS, proxies, compression

Nothing is imported or opened before the first request, so naming a model costs nothing. Proxies
come from ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY`` and ``NO_PROXY``, and are looked up once
per model.

Failures are ``ModelError``s that say whether the request may have been processed: before a
connection is established nothing was sent; after that, a reply that does not arrive may have been
billed. Not here: retries (see ``pool.py``) and the meaning of the JSON (see ``chat_json.py``).
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from ramify.clients.http1 import Http1Client, HttpOrigin, RequestRoute
from ramify.errors import ConfigError

if TYPE_CHECKING:
    from ramify.clients.https import HttpsClient

_KEEPALIVE_S = 4.0
"""Common servers close idle connections after five seconds. A request must not be sent at that
moment."""
_CONNECT_S = 30.0
_HEADERS = {
    "User-Agent": "ramify",
    "Content-Type": "application/json",
    "Accept": "application/json",
}


def route_to(url: str, headers: dict[str, str]) -> RequestRoute:
    """Return the route to ``url`` under the current environment."""
    proxy, headers = proxy_for(url), {**_HEADERS, **headers}
    parts = urlsplit(url)
    short = parts.scheme == "http" and proxy is None and parts.username is None and url.isascii()
    return RequestRoute(url, headers, proxy, _origin(url, headers) if short else None)


class HttpConnectionPool:
    """HTTP connection pool. Bound to the event loop of its first request."""

    def __init__(self, max_body_bytes: int = 64 << 20) -> None:
        self._max_body_bytes = max_body_bytes
        self._http: Http1Client | None = None
        self._https: HttpsClient | None = None

    def sender(self, route: RequestRoute) -> Http1Client | HttpsClient:
        """Return the client whose ``post`` sends requests along ``route``."""
        if route.origin is not None:
            if self._http is None:
                self._http = Http1Client(_KEEPALIVE_S, _CONNECT_S, self._max_body_bytes)
            return self._http
        if self._https is None:
            from ramify.clients.https import HttpsClient

            self._https = HttpsClient(_KEEPALIVE_S, _CONNECT_S, self._max_body_bytes)
        return self._https

    async def close(self) -> None:
        http, https = self._http, self._https
        self._http = self._https = None
        if http is not None:
            await http.close()
        if https is not None:
            await https.close()


def _origin(url: str, headers: dict[str, str]) -> HttpOrigin:
    parts = urlsplit(url)
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    lines = [
        f"POST {target} HTTP/1.1",
        f"Host: {parts.netloc}",
        *(f"{name}: {headers[name]}" for name in headers),
    ]
    head = "\r\n".join([*lines, "Content-Length"]).encode("latin-1")
    return HttpOrigin(parts.hostname or "", parts.port or 80, url, head)


def proxy_for(url: str) -> str | None:
    """Return the proxy that the environment configures for ``url``, or None."""
    if sys.platform not in ("darwin", "win32") and not any(
        name.lower().endswith("_proxy") for name in os.environ
    ):
        return None  # avoids the import below
    from urllib.request import getproxies, proxy_bypass

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
