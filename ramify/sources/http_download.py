"""Downloads pages and files over http and https, with the HTTP client of this package.

    open_download(pool, url, …) ── GET ──> redirects, each checked ──> status and size
                                                                       └── read() … read() ── b""

This module decides which addresses may be connected to. A host name is resolved once, its private,
loopback, link-local and other special addresses are dropped, and one of the others is used. So
neither a redirect nor a name whose addresses change can reach a private server, unless
``allow_private`` is set. A proxy resolves names itself, so in that case only addresses that are
written in a URL are checked. A redirect to another scheme is refused, except from http to https. A
login is sent to its own server only. Nothing is unpacked, run or interpreted. Size and time limits,
and where the bytes are stored, are decided in ``remote_files.py``.
"""

from __future__ import annotations

import asyncio
import base64
import email.message
import ipaddress
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urljoin, urlsplit, urlunsplit

from ramify.errors import ConfigError, ModelError, Unreachable
from ramify.http_client.http_transport import HttpConnectionPool, LiveHttpExchange, route_to
from ramify.http_client.urls_and_proxies import is_http_url
from ramify.sources.loaded_sources import UnreadableSourceError
from ramify.sources.url_recognition import RemoteFileInfo, is_web, redact_url_for_display

MAX_REDIRECTS = 10
CONNECT_S = 20.0
TRIES = 3
"""Maximum number of requests to a server that reports that it is busy."""
MAX_WAIT_S = 5.0
"""Longest wait in seconds before a busy server is asked again. A longer Retry-After is an error."""
_UNBOUNDED = 1 << 62
_BUSY = (429, 502, 503, 504)
_REDIRECTS = (301, 302, 303, 307, 308)
_LATER = "try again later"
_ALLOW = "allow it with --allow-private, or in Python with ramify.load(…, allow_private=True)"


class PrivateAddressError(UnreadableSourceError):
    """Raised if every address of a host is private or reserved, before any connection is made."""

    def __init__(self, host: str, address: str) -> None:
        place = "" if host == address else f"{host}, which is "
        super().__init__(
            f"leads to {place}{address}, an address of this machine or a private network", _ALLOW
        )


def is_public(address: str) -> bool:
    """Return True if an IP address is public, that is, reachable on the Internet.

    An IPv6 address that embeds an IPv4 address is judged by the embedded one.
    """
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return False
    if isinstance(found, ipaddress.IPv6Address):
        inner = found.ipv4_mapped or found.sixtofour or (found.teredo or (None, None))[1]
        if inner is None and any(found in network for network in _IPV4_INSIDE):
            inner = ipaddress.IPv4Address(int(found) & 0xFFFFFFFF)
        if inner is not None:
            found = inner
        elif found.is_site_local or found in _LOCAL_NAT64:
            return False
    return found.is_global and not found.is_multicast


_IPV4_INSIDE = ipaddress.IPv6Network("::/96"), ipaddress.IPv6Network("64:ff9b::/96")
"""IPv6 networks whose addresses contain an IPv4 address in their last four bytes."""
_LOCAL_NAT64 = ipaddress.IPv6Network("64:ff9b:1::/48")


def filter_public_addresses(host: str, addresses: Sequence[str]) -> Sequence[str]:
    """Return the public ones among the IP addresses of a host.

    Raises PrivateAddressError if there are none.
    """
    chosen = [each for each in addresses if is_public(each)]
    if not chosen:
        raise PrivateAddressError(host, addresses[0])
    return chosen


def new_pool(allow_private: bool) -> HttpConnectionPool:
    return HttpConnectionPool(
        connect_s=CONNECT_S,
        max_body_bytes=_UNBOUNDED,
        choose_addresses=None if allow_private else filter_public_addresses,
    )


class OpenDownload:
    """A running download whose headers have arrived and whose contents can now be read.

    ``head`` describes the file: its size, type and version.
    """

    def __init__(self, exchange: LiveHttpExchange, head: RemoteFileInfo) -> None:
        self._exchange = exchange
        self.head = head

    async def read(self) -> bytes:
        """Return the next bytes of the file, or b"" at its end.

        Raises UnreadableSourceError if the connection fails.
        """
        try:
            return await self._exchange.receive()
        except ModelError as error:
            reason = _error_without_url(error, self.head.final_url)
            raise UnreadableSourceError(f"was cut off ({reason})", _LATER) from None

    async def close(self) -> None:
        await self._exchange.__aexit__()


async def open_download(
    pool: HttpConnectionPool, url: str, version: str, allow_private: bool
) -> OpenDownload:
    """Request a URL, follow its redirects, and return the download once its headers have arrived.

    Retries if the server is busy. Raises UnreadableSourceError if the file cannot be downloaded.

    ``version`` is the version of an earlier copy on this machine, or empty. The server then sends
    the file only if it has changed since.
    """
    for attempt in range(1, TRIES):
        try:
            return await _follow_redirects(pool, url, version, allow_private)
        except _ServerBusy as busy:
            wait_s = attempt if busy.wait_s is None else busy.wait_s
            if wait_s > MAX_WAIT_S:
                raise
            await asyncio.sleep(wait_s)
    return await _follow_redirects(pool, url, version, allow_private)


async def _follow_redirects(
    pool: HttpConnectionPool, url: str, version: str, allow_private: bool
) -> OpenDownload:
    seen = {url}
    origin = _origin(url)
    parts = urlsplit(url)
    login = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
    for _ in range(MAX_REDIRECTS + 1):
        headers = dict(_HEADERS)
        if login != ":" and _origin(url) == origin:
            headers["Authorization"] = f"Basic {base64.b64encode(login.encode()).decode()}"
        if version:
            kind = "If-Modified-Since" if version.endswith(" GMT") else "If-None-Match"
            headers[kind] = version
        plain = _without_login(url)
        exchange = await _open_exchange(pool, plain, headers, allow_private)
        try:
            location = exchange.headers.get("location", "")
            if exchange.status in _REDIRECTS and location:
                url = _redirect_target(plain, location)
                if url in seen:
                    raise UnreadableSourceError(
                        "redirects in a loop", "name the page that it leads to"
                    )
                seen.add(url)
            elif exchange.status in (200, 203) or (exchange.status == 304 and version):
                return OpenDownload(exchange, _file_info(exchange, plain))
            else:
                raise _status_error(exchange.status, exchange.headers)
        except BaseException:
            await exchange.__aexit__()
            raise
        await exchange.__aexit__()
    raise UnreadableSourceError(
        f"redirects more than {MAX_REDIRECTS} times", "name the page that it leads to"
    )


_HEADERS = {"Accept": "*/*", "Accept-Encoding": "identity"}


async def _open_exchange(
    pool: HttpConnectionPool, url: str, headers: Mapping[str, str], allow_private: bool
) -> LiveHttpExchange:
    host = urlsplit(url).hostname or ""
    try:
        route = route_to(url, headers, "GET")
        if route.origin[3] and not allow_private and _is_inside(host):
            raise PrivateAddressError(host, host)
        return await pool.prepare_exchange(host, route).__aenter__()
    except ConfigError as error:
        raise UnreadableSourceError("cannot be fetched", str(error)) from None
    except Unreachable as error:
        reason = error.reason or _error_without_url(error, url)
        raise UnreadableSourceError(
            f"cannot be fetched ({reason})", "check the address and the network"
        ) from None
    except ModelError as error:
        raise UnreadableSourceError(
            f"cannot be fetched ({_error_without_url(error, url)})", _LATER
        ) from None


def _is_inside(host: str) -> bool:
    """Return True if a host is clearly private, judging by its name or IP address alone.

    With a proxy, this is the only possible check, because the proxy does the lookup.
    """
    if host == "localhost" or host.endswith((".localhost", ".local", ".internal")):
        return True
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return not is_public(host)


def _error_without_url(error: ModelError, url: str) -> str:
    """Return the message of a download error without the URL, which the caller mentions
    separately."""
    host = urlsplit(url).hostname or ""
    return str(error).removeprefix(f"{host}: ").replace(f" ({url})", "").replace(url, "it")


def _redirect_target(url: str, location: str) -> str:
    """Resolve the Location header of a redirect and return the new URL.

    Raises UnreadableSourceError if the redirect is refused, for example from https to http.
    """
    try:
        to = urljoin(url, location.encode("latin-1").decode("utf-8", "replace"))
        to = _without_login(urlunsplit(urlsplit(to)._replace(fragment="")))
    except ValueError:
        to = ""
    if to and not is_web(to):
        scheme = urlsplit(to).scheme
        raise UnreadableSourceError(
            f"redirects to {scheme}:, which is refused", "name what you want"
        )
    if not is_http_url(to):
        raise UnreadableSourceError("redirects to something that is not a URL", _LATER)
    if url.startswith("https:") and to.startswith("http:"):
        raise UnreadableSourceError(
            f"redirects from https to {redact_url_for_display(to)}, which is refused",
            "name that address itself if it is meant",
        )
    return to


def _without_login(url: str) -> str:
    parts = urlsplit(url)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def _origin(url: str) -> tuple[str, str | None, int | None]:
    parts = urlsplit(url)
    return parts.scheme, parts.hostname, parts.port


def _file_info(exchange: LiveHttpExchange, url: str) -> RemoteFileInfo:
    headers = exchange.headers
    is_packed = headers.get("content-encoding", "identity").lower() not in ("", "identity")
    length = headers.get("content-length", "")
    return RemoteFileInfo(
        int(length) if length.isdecimal() and not is_packed else -1,
        headers.get("etag") or headers.get("last-modified") or "",
        exchange.status == 304,
        headers.get("content-type", ""),
        _disposition_file_name(headers.get("content-disposition", "")),
        url,
        "no-store" not in headers.get("cache-control", "").lower(),
    )


def _disposition_file_name(disposition: str) -> str:
    """Return the file name that a Content-Disposition header gives, or an empty string."""
    message = email.message.Message()
    message["Content-Disposition"] = disposition.replace("\r", "").replace("\n", "")
    try:
        return message.get_filename() or ""
    except (LookupError, UnicodeError, ValueError):
        return ""


def _status_error(status: int, headers: Mapping[str, str]) -> UnreadableSourceError:
    after = headers.get("retry-after", "")
    wait = f"try again in {after} s" if after.isdecimal() else _LATER
    answered = f"cannot be fetched (the server answered {status}"
    if status in (401, 403, 407):
        return UnreadableSourceError(
            f"{answered}: no right to read it)", "give a login, or ask for it"
        )
    if status in (404, 410):
        return UnreadableSourceError(
            f"does not exist (the server answered {status})", "check the URL"
        )
    reason = f"{answered}: too many requests)" if status == 429 else f"{answered})"
    if status in _BUSY:
        return _ServerBusy(reason, wait, float(after) if after.isdecimal() else None)
    return UnreadableSourceError(reason, wait if status >= 500 else "check the URL")


class _ServerBusy(UnreadableSourceError):
    """Raised if a web server is temporarily unable to answer and should be asked again later.

    ``wait_s`` is the number of seconds after which it asks for a new request, or None.
    """

    def __init__(self, reason: str, remedy: str, wait_s: float | None) -> None:
        super().__init__(reason, remedy)
        self.wait_s = wait_s
