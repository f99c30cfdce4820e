"""Requests to a view server of some files."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from ramify.store.base import RunStore
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.view_server import ViewServer

GOLDEN_ID = "20260301-142501-5gk0x7m-which-host"


Get = Callable[..., Awaitable[Any]]


def session(server: ViewServer) -> aiohttp.ClientSession:
    """A client that presents the token of ``server``."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.token}"})


def with_server(
    paths: Sequence[Path | RunStore],
    ask: Callable[[Get, ViewServer], Awaitable[Any]],
    **options: Any,
) -> Any:
    """Return the result of ``ask(get, server)`` for a server of ``paths``; ``get(path, **query)``
    returns JSON."""

    async def main() -> Any:
        async with (
            ViewServer(RunCatalog(paths), **options) as server,
            session(server) as http,
        ):

            async def get(path: str, **query: Any) -> Any:
                async with http.get(
                    f"http://127.0.0.1:{server.port}{path}", params=query
                ) as response:
                    return await response.json()

            return await ask(get, server)

    return asyncio.run(main())


def get_json(paths: list[Path], path: str, **query: Any) -> Any:
    return with_server(paths, lambda get, _: get(path, **query))


def calls_of(payload: dict[str, Any]) -> list[dict[str, Any]]:
    """The calls of a picture, or of changes, built from columns as the page does; a single value
    stands for a whole column."""
    num = payload.get("num", len(payload.get("indices", ())))
    whole = {
        name: each if isinstance(each, list) else [each] * num
        for name, each in payload["columns"].items()
    }
    assert {len(column) for column in whole.values()} <= {num}
    return [{name: column[at] for name, column in whole.items()} for at in range(num)]


async def messages(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The data of each event; ends with the one named ``end``."""
    async for line in response.content:
        if line.startswith(b"event: end"):
            return
        if line.startswith(b"data: "):
            yield json.loads(line[6:])
