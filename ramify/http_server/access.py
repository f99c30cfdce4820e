"""Access control of an HTTP server: where it listens, which keys it accepts, and checks of the
``Host`` and ``Origin`` headers.

    127.0.0.1:PORT      every process on this machine can connect, so a key or a token is required,
                        unless the user opens the server to this machine
    a Unix socket       in a folder that only its owner can enter; the kernel names the peer's user
    any other address   a key is always required

A page of another site can make a browser send requests to this machine, either across origins or
under a host name that the site points here (DNS rebinding). So a loopback server answers only
requests whose ``Host`` names this machine, and every server rejects requests from pages of another
origin, with or without a key. Budgets of keys are handled in ``serve/api_keys.py``.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import secrets
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from ramify.errors import ConfigError
from ramify.http_server.rejections import RequestRejected
from ramify.secret_redaction import register_secret


class ListenAddress(msgspec.Struct, frozen=True):
    """The address on which a server listens, and who may use it without an API key."""

    host: str = "127.0.0.1"
    port: int = 0
    """Port number. 0 picks a free port."""
    socket: Path | None = None
    """Path of a Unix socket to use instead of a port."""
    is_open: bool = False
    """True if any process on this machine may send requests without a key."""

    def __post_init__(self) -> None:
        if self.is_open and (self.socket is not None or not is_loopback(self.host)):
            where = self.socket or f"{self.host} is reachable from other machines, and"
            raise ConfigError(
                f"{where} cannot be used with --open-to-this-machine: remove that option, or "
                "listen on 127.0.0.1"
            )

    @property
    def needs_key(self) -> bool:
        """True if requests must present a key."""
        return not self.is_open and self.socket is None

    @property
    def is_local(self) -> bool:
        """True if no other machine can connect to the server."""
        return self.socket is not None or is_loopback(self.host)


class AcceptedApiKeys:
    """The API keys that a server accepts.

    Only their SHA-256 digests are stored.
    """

    def __init__(self, digests: Mapping[str, str]) -> None:
        """Create a set of accepted API keys from their digests.

        ``digests`` maps each caller's name to the SHA-256 digest of its key in hexadecimal.
        """
        self._digests = dict(digests)

    @classmethod
    def from_key(cls, key: str) -> AcceptedApiKeys:
        """Create a set with a single accepted key.

        From now on, logs redact the key.
        """
        register_secret("key of this server", key)
        return cls({"default": digest_of(key)})

    def caller_of_key(self, presented: str) -> str | None:
        """Return the name of the caller to whom an API key belongs, or None if it is not accepted.

        The presented key is compared with every accepted key, each time in constant time. So the
        duration reveals nothing about the keys.
        """
        found, digest = None, digest_of(presented)
        for name, expected in self._digests.items():
            if hmac.compare_digest(digest, expected):
                found = name
                # A key file may hold only the digest, so this is the first sight of the key.
                register_secret(f"key of {name}", presented)
        return found


def new_key() -> str:
    """Generate a random API key.

    A server accepts it until the server stops.
    """
    return f"rk-{secrets.token_urlsafe(24)}"


def digest_of(key: str) -> str:
    """Return the SHA-256 digest of an API key in hexadecimal.

    Surrogate escapes in the key stand for bytes that are not UTF-8.
    """
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def presented_key(http: web.Request) -> str:
    """Return the API key in a request's headers: the bearer token, or else Anthropic's
    ``x-api-key``.

    Empty if there is none.
    """
    scheme, _, key = http.headers.get("Authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or http.headers.get("x-api-key", "").strip()


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def host_of(netloc: str) -> str:
    """Return the host part of a network location such as ``localhost:8765``.

    >>> host_of("[::1]:8765")
    '::1'
    """
    return netloc[1:].partition("]")[0] if netloc.startswith("[") else netloc.partition(":")[0]


def check_host(http: web.Request, url: str) -> None:
    """Raise RequestRejected unless a request's ``Host`` header names this machine.

    The error suggests ``url`` instead.
    """
    if not is_loopback(host_of(http.host)):
        raise RequestRejected(
            f"the host {http.host!r:.100} is not this machine: send requests to {url}, and have "
            "any proxy send that name as Host",
            status=403,
            code="wrong_host",
        )


def check_origin(http: web.Request) -> None:
    """Raise RequestRejected if a web page of another origin sent the request."""
    origin = http.headers.get("Origin")
    if origin is not None and _netloc(origin) != http.host:
        raise RequestRejected(
            f"a page of {origin!r:.100} may not use this server: send requests from a program, or "
            "from a page of this server",
            status=403,
            code="wrong_origin",
        )


def _netloc(origin: str) -> str:
    try:
        return urlsplit(origin).netloc
    except ValueError:
        return ""
