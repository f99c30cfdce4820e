"""Shared by the tests of clients: a recording account, a request, servers with given answers."""

from __future__ import annotations

import asyncio
import selectors
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from ramify.clients.base import Request, Sampling
from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest
from ramify.types.message import Message, Usage


class Books:
    """An ``Account`` that records the outcome of every reservation."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, Any]] = []
        self.usage = Usage()
        self.cost: float | None = None
        self.open = 0

    @property
    def kinds(self) -> list[str]:
        return [kind for kind, _ in self.entries]

    async def reserve(self) -> None:
        self.open += 1

    def is_still_valid(self) -> bool:
        return True

    def settle(self, usage: Usage, cost: float | None) -> None:
        self.usage += usage
        self.cost = cost
        self._close("settle", usage)

    def charge_full_reservation(self, error: str) -> None:
        self._close("forfeit", error)

    def release(self, error: str) -> None:
        self._close("release", error)

    def _close(self, kind: str, what: Any) -> None:
        self.open -= 1
        assert self.open >= 0, "resolved twice"
        self.entries.append((kind, what))


def request(text: str = "hi there", max_tokens: int = 64, **options: Any) -> Request:
    return Request((Message("user", text),), Sampling(max_tokens=max_tokens), **options)


class Says:
    """A server that answers every request with the result of ``tell``: (status, body, headers)."""

    def __init__(
        self, tell: Callable[[PendingMockRequest], tuple[int, bytes, dict[str, str]]]
    ) -> None:
        self.asked: list[PendingMockRequest] = []
        self._tell = tell
        self._http = MockHttpServer(self._handle)

    @property
    def root(self) -> str:
        return f"http://127.0.0.1:{self._http.port}"

    async def __aenter__(self) -> Says:
        await self._http.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._http.close()

    def _handle(self, exchange: PendingMockRequest) -> None:
        self.asked.append(exchange)
        status, body, headers = self._tell(exchange)
        kind = headers.pop("content-type", "application/json")
        exchange.send(status, body, headers, kind)


def says(body: bytes, status: int = 200, **headers: str) -> Says:
    """A server that gives every request the same answer."""
    return Says(
        lambda _: (status, body, {name.replace("_", "-"): value for name, value in headers.items()})
    )


def run(main: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(asyncio.wait_for(main, 100))


def self_signed(folder: Path) -> tuple[Path, Path]:
    """Return a certificate for ``localhost`` that signs itself, and its key."""
    pem, key = folder / "cert.pem", folder / "key.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = ["openssl", "req", "-x509", *curve, *subject, "-keyout", str(key), "-out", str(pem)]
    subprocess.run(command, check=True, capture_output=True)
    return pem, key


def server_tls(certificate: tuple[Path, Path]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context


class SkippingSelector(selectors.DefaultSelector):  # type: ignore[misc, valid-type]
    """Skips the time in which nothing happens."""

    skipped_s = 0.0

    def select(self, timeout: float | None = None) -> Any:
        if timeout is None or timeout <= 0:
            return super().select(timeout)
        ready = super().select(min(timeout, 0.002))
        if not ready:
            self.skipped_s += timeout
        return ready


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop in which every timer ends at once if nothing else can happen."""

    def __init__(self) -> None:
        self._skipping = SkippingSelector()
        super().__init__(self._skipping)

    def time(self) -> float:
        return super().time() + self._skipping.skipped_s


def run_skipping(main: Coroutine[Any, Any, Any]) -> Any:
    """Run ``main`` on a ``SkippingLoop``."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        return runner.run(main)
