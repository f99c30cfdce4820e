"""One server's HTTP: JSON out, JSON back, every wait bounded, and errors that say which server was
asked what.

Unreachable    never sent            ReplyLost     sent, and no whole answer in time
ServerFailed   a 5xx                 Refused       a 4xx           Conflict   409: the engine lacks what a delta builds on
"""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import msgspec

from ramify.errors import ModelError, RateLimited, Refused, ReplyLost, ServerFailed, Unreachable

_CONNECT_S = 10.0


class EngineStateConflict(Refused):
    """The server is in another state than the request supposes."""


class EngineHttpApi:
    """Belongs to the event loop of its first request."""

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
        """For good: who still asks gets Unreachable."""
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
                said = await answer.read()
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
            raise _error(f"{method} {where}", answer.status, said)
        return _object(where, said)


def _object(where: str, said: bytes) -> dict[str, Any]:
    if not said.strip():
        return {}
    try:
        found = msgspec.json.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return {"text": said.decode("utf-8", "replace")}
    return found if isinstance(found, dict) else {"found": found}


def _error(where: str, status: int, said: bytes) -> ModelError:
    text = f"{where} answered {status}: {_message(said)}"
    if status == 409:
        return EngineStateConflict(text)
    if status == 429:
        return RateLimited(text)
    return ServerFailed(text) if status >= 500 else Refused(text)


def _message(said: bytes) -> str:
    """What an error's body says, at most 300 characters on one line."""
    try:
        found = msgspec.json.decode(said)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = said[:2000].decode("utf-8", "replace")
    while isinstance(found, dict):
        found = next(
            (found[name] for name in ("error", "message", "detail") if found.get(name)), str(found)
        )
    return " ".join(str(found).split())[:300]
