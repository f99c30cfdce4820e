"""HTTP over a network through aiohttp: TLS, proxies and compressed responses.

Certificate authorities are those of the system, or of ``SSL_CERT_FILE`` and ``SSL_CERT_DIR``.
``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE`` and ``NODE_EXTRA_CA_CERTS`` add to them. ``~/.netrc`` is
ignored, because it would replace the key that the caller configured. This module is imported at the
first request that needs it, because the import takes a tenth of a second.
"""

from __future__ import annotations

import io
import os
import ssl
from urllib.parse import urlsplit

import aiohttp

from ramify.clients.compression import too_long
from ramify.clients.http1 import HttpResponse, RequestRoute
from ramify.errors import ConfigError, ModelError, ReplyLost, Unreachable

_LARGE_BYTES = 1 << 20
_REPLACING = ("SSL_CERT_FILE", "SSL_CERT_DIR")
_NOT_TLS = ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE")
"""What OpenSSL calls an answer that is not TLS."""
_ADDING = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "NODE_EXTRA_CA_CERTS")


class HttpsClient:
    """An aiohttp session, opened at the first request. Belongs to one event loop."""

    def __init__(self, keepalive_s: float, connect_s: float, max_body_bytes: int) -> None:
        self._keepalive_s = keepalive_s
        self._connect_s = connect_s
        self._max_body_bytes = max_body_bytes
        self._session: aiohttp.ClientSession | None = None

    async def post(self, where: str, route: RequestRoute, body: bytes) -> HttpResponse:
        """Send ``body`` and return the response, whatever its status. ``where`` names the model in
        errors."""
        session = self._session or self._open()
        # A large body is sent in pieces so that it does not block the event loop.
        data = body if len(body) <= _LARGE_BYTES else io.BytesIO(body)
        try:
            async with session.post(
                route.url,
                data=data,
                headers=route.headers,
                proxy=route.proxy,
                allow_redirects=False,
            ) as response:
                return HttpResponse(
                    response.status, response.headers, await self._bounded(where, response)
                )
        except aiohttp.ClientError as error:
            raise _failure(where, route.url, route.proxy, error) from error
        except (ConnectionError, ssl.SSLError, TimeoutError) as error:
            raise ReplyLost(
                f"{where}: the connection to {route.url} broke ({_reason(error)})"
            ) from error

    async def close(self) -> None:
        if self._session is not None:
            session, self._session = self._session, None
            await session.close()

    def _open(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(
            limit=0, keepalive_timeout=self._keepalive_s, ttl_dns_cache=60, ssl=_tls() or True
        )
        self._session = aiohttp.ClientSession(
            connector=connector,
            trust_env=False,  # would read ~/.netrc, and look up proxies for every request
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._connect_s),
            cookie_jar=aiohttp.DummyCookieJar(),
        )
        return self._session

    async def _bounded(self, where: str, response: aiohttp.ClientResponse) -> bytes:
        chunks, size = [], 0
        async for chunk in response.content.iter_any():
            size += len(chunk)
            if size > self._max_body_bytes:
                error = too_long(self._max_body_bytes)
                error.args = (f"{where}: {error}",)
                raise error
            chunks.append(chunk)
        return chunks[0] if len(chunks) == 1 else b"".join(chunks)


def _tls() -> ssl.SSLContext | None:
    """Return a context with the environment's certificate authorities, or None to use aiohttp's
    default."""
    if not any(os.environ.get(name) for name in (*_REPLACING, *_ADDING)):
        return None
    _check_replacing()
    context = ssl.create_default_context()  # OpenSSL itself reads SSL_CERT_FILE and SSL_CERT_DIR
    replaced = {os.environ.get(name) for name in _REPLACING}
    for bundle in {os.environ.get(name) for name in _ADDING} - replaced:
        if not bundle:
            continue
        try:
            context.load_verify_locations(
                **{"capath" if os.path.isdir(bundle) else "cafile": bundle}
            )
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(
                f"certificate bundle {bundle}: {error}; fix or unset its variable"
            ) from None
    return context


def _check_replacing() -> None:
    """Raise ConfigError if OpenSSL could not read what these variables name. OpenSSL itself ignores
    this silently, and then every connection fails."""
    file, folders = (os.environ.get(name) for name in _REPLACING)
    if file:
        try:
            with open(file, "rb") as pem:
                is_pem = b"-----BEGIN" in pem.read()
        except OSError as error:
            raise ConfigError(
                f"SSL_CERT_FILE names {file}: {error.strerror}; fix or unset it"
            ) from None
        if not is_pem:
            raise ConfigError(
                f"SSL_CERT_FILE names {file}, which holds no certificate in PEM format; fix or "
                "unset it"
            )
    if folders and not any(os.path.isdir(folder) for folder in folders.split(os.pathsep)):
        raise ConfigError(f"SSL_CERT_DIR names {folders}, which is not a folder; fix or unset it")


def _failure(where: str, url: str, proxy: str | None, error: Exception) -> ModelError:
    through = f" through the proxy {_host(proxy)}" if proxy else ""
    match error:
        case aiohttp.ClientConnectorCertificateError() | aiohttp.ClientConnectorSSLError():
            reason = _reason(error)
            hint = (
                "the server does not speak TLS at this port: write http://"
                if any(sign in reason for sign in _NOT_TLS)
                else "name your certificate authority in SSL_CERT_FILE"
            )
            failure = Unreachable(
                f"{where}: no trusted connection to {url}{through} ({reason}); {hint}"
            )
            failure.transient = False
            return failure
        case (
            aiohttp.ClientConnectorError()
            | aiohttp.ClientHttpProxyError()
            | aiohttp.ConnectionTimeoutError()
        ):
            return Unreachable(f"{where}: cannot reach {url}{through} ({_reason(error)})")
        case aiohttp.InvalidURL():
            failure = Unreachable(f"{where}: {url} is not a URL")
            failure.transient = False
            return failure
        case _:
            return ReplyLost(
                f"{where}: the connection to {url} broke before the reply was whole "
                f"({_reason(error)})"
            )


def _host(proxy: str | None) -> str:
    parts = urlsplit(proxy or "")
    return (
        f"{parts.scheme}://{parts.hostname}:{parts.port}"
        if parts.port
        else f"{parts.scheme}://{parts.hostname}"
    )


def _reason(error: Exception) -> str:
    cause = getattr(error, "os_error", None) or getattr(error, "certificate_error", None) or error
    text = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
    return " ".join(str(text).split())[:200]
