"""Lower bound for all sides: the same requests in a bare aiohttp loop, with no engine around
them."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from typing import Any

import aiohttp

PROMPT = "x" * 4000
"""About as long as a system prompt."""


async def ask(
    session: aiohttp.ClientSession, url: str, content: str, gate: asyncio.Semaphore
) -> str:
    body = {"model": "test", "messages": [{"role": "user", "content": content}], "max_tokens": 8192}
    async with gate, session.post(f"{url}/chat/completions", json=body) as response:
        return str((await response.json())["choices"][0]["message"]["content"])


async def in_a_row(url: str, count: int, repeats: int) -> list[float]:
    """Return the seconds of ``count`` sequential requests."""
    gate = asyncio.Semaphore(1)
    seconds = []
    async with aiohttp.ClientSession() as session:
        for _ in range(repeats + 1):
            started = time.perf_counter()
            for _ in range(count):
                await ask(session, url, PROMPT, gate)
            seconds.append(time.perf_counter() - started)
    return seconds[1:]


async def at_once(url: str, count: int, limit: int, repeats: int) -> list[float]:
    """Return the seconds of ``count`` requests, at most ``limit`` of them concurrent."""
    gate = asyncio.Semaphore(limit)
    seconds = []
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=limit)) as session:
        for _ in range(repeats):
            started = time.perf_counter()
            replies = await asyncio.gather(
                *(ask(session, url, f"<<scene:word>> {i}", gate) for i in range(count))
            )
            seconds.append(time.perf_counter() - started)
            assert replies == ["ok"] * count
    return seconds


TASKS = {"in_a_row": in_a_row, "at_once": at_once}


def main() -> None:
    options: dict[str, Any] = json.loads(sys.argv[2])
    print(json.dumps({"seconds": asyncio.run(TASKS[sys.argv[1]](**options))}))


if __name__ == "__main__":
    main()
