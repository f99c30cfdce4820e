"""HTTP requests to one server: JSON out and back, a timeout on every wait, and errors that name the
server and the request.

    Unreachable    the request was never sent
    ReplyLost      the request was sent, and no complete answer arrived in time
    ServerFailed   status 5xx
    Refused        status 4xx
    EngineStateConflict   status 409: the engine lacks the weights that a delta builds on
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from ramify.errors import ModelError, RateLimited, Refused, ReplyLost, ServerFailed, Unreachable

_CONNECT_S = 10.0


class EngineStateConflict(Refused):
    """The server is not in the state that the request assumes."""


class EngineHttpApi:
    """HTTP client of one server. It belongs to the event loop of its first request."""

    def __init__(self, url: str, key: str = "") -> None:
        self.url = url.rstrip("/").removesuffix("/v1")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    async def get(self, path: str, timeout_s: float) -> dict[str, Any]:
        return await self._ask("GET", path, None, timeout_s)

    async def post(self, path: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        return await self._ask("POST", path, body, timeout_s)

    async def close(self) -> None:
        """Close for good: any later request raises Unreachable."""
        self._is_closed = True
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def _ask(
        self, method: str, path: str, body: dict[str, Any] | None, timeout_s: float
    ) -> dict[str, Any]:
        where = f"{self.url}{path}"
        if self._is_closed:
            raise Unreachable(f"{method} {where}: it was given up")
        if self._session is None:
            limits = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
            self._session = aiohttp.ClientSession(
                headers=self._headers, timeout=limits, connector=aiohttp.TCPConnector(limit=0)
            )
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if data is not None else {}
        try:
            async with (
                asyncio.timeout(timeout_s),
                self._session.request(method, where, data=data, headers=headers) as answer,
            ):
                payload = await answer.read()
        except TimeoutError:
            raise ReplyLost(f"{method} {where}: no answer within {timeout_s:g} s") from None
        except aiohttp.ClientConnectorError as error:
            raise Unreachable(
                f"{method} {where}: cannot be reached ({error.strerror or error.os_error})"
            ) from None
        except (aiohttp.ClientError, OSError) as error:
            raise ReplyLost(
                f"{method} {where}: the connection broke ({error or type(error).__name__})"
            ) from None
        if answer.status != 200:
            raise _error(f"{method} {where}", answer.status, payload)
        return _object(where, payload)


def _object(where: str, payload: bytes) -> dict[str, Any]:
    if not payload.strip():
        return {}
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"text": payload.decode("utf-8", "replace")}
    return value if isinstance(value, dict) else {"found": value}


def _error(where: str, status: int, payload: bytes) -> ModelError:
    text = f"{where} answered {status}: {_message(payload)}"
    if status == 409:
        return EngineStateConflict(text)
    if status == 429:
        return RateLimited(text)
    return ServerFailed(text) if status >= 500 else Refused(text)


def _message(payload: bytes) -> str:
    """The message in an error's body, at most 300 characters on one line."""
    try:
        value = msgspec.json.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError):
        value = payload[:2000].decode("utf-8", "replace")
    while isinstance(value, dict):
        value = next(
            (value[name] for name in ("error", "message", "detail") if value.get(name)), str(value)
        )
    return " ".join(str(value).split())[:300]
