"""What the metering endpoint adds to a request: a part of ``suites.py``.

    caller (a process) ──> meter      ──> scripted server (a process)
    caller (a process) ──> bare proxy ──> scripted server           reads and writes bytes, no more

Both are in this process, one after the other, with the same requests. The CPU time of this process
is compared, since seconds on a busy machine say little; the median seconds are only printed.
Not here: whether budgets are kept (see ``suites.py``).
"""

from __future__ import annotations

import asyncio
import http.client
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import aiohttp
from aiohttp import web
from figures import Figure

from ramify import Model
from ramify.evaluate.systems.base import TaskItemBudget
from ramify.serve.metering_proxy import MeteringProxy

SIZES = {"2 kB": 2_000, "100 kB": 100_000}
"""Name -> characters of the prompt."""
ADDED_MS = 2.0
"""Promised maximum of what the meter adds to a request."""


class Cost(NamedTuple):
    """Cost of one request."""

    cpu_ms: float
    """CPU time of the process between the caller and the model."""
    seconds: float
    """Median, as the caller sees it."""


@contextmanager
def upstream() -> Iterator[str]:
    """A scripted server in its own process; its base URL."""
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "script.json"
        script.write_text(json.dumps([{"match": "", "reply": "a reply of some words " * 10}]))
        words = [sys.executable, "-m", "ramify.testing", "serve", str(script)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait()


@asynccontextmanager
async def bare_proxy(url: str) -> AsyncIterator[str]:
    """A proxy that forwards bodies as they are; its base URL."""
    async with aiohttp.ClientSession() as session:

        async def forward(request: web.Request) -> web.Response:
            body = await request.read()
            headers = {"Content-Type": "application/json"}
            async with session.post(f"{url}/chat/completions", data=body, headers=headers) as got:
                return web.Response(body=await got.read(), content_type="application/json")

        app = web.Application(client_max_size=1 << 28)
        app.router.add_post("/v1/chat/completions", forward)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            await runner.cleanup()


async def measured(url: str, key: str, count: int, chars: int) -> Cost:
    """The cost of ``count`` sequential requests to ``url``, after some that are not counted."""
    words = [sys.executable, __file__, "call", url, key, str(count), str(chars)]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdin is not None
    assert process.stdout is not None
    await process.stdout.readline()  # warm
    began = time.process_time()
    process.stdin.write(b"go\n")
    await process.stdin.drain()
    seconds = json.loads(await process.stdout.readline())
    cpu = time.process_time() - began
    process.stdin.close()
    await process.wait()
    return Cost(1000 * cpu / count, statistics.median(seconds))


def call(url: str, key: str, count: int, chars: int) -> None:
    """Send requests one after the other over one connection, and print their seconds."""
    place = urlsplit(url)
    connection = http.client.HTTPConnection(place.hostname or "", place.port)
    messages = [{"role": "user", "content": "x" * chars}]
    body = json.dumps({"model": "test", "messages": messages, "max_tokens": 1000}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}

    def send() -> float:
        began = time.perf_counter()
        connection.request("POST", f"{place.path}/chat/completions", body, headers)
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        return time.perf_counter() - began

    for _ in range(20):
        send()
    print("warm", flush=True)
    sys.stdin.readline()
    print(json.dumps([send() for _ in range(count)]), flush=True)


async def overhead(url: str, count: int) -> list[Figure]:
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Model("openai:test", base_url=url, api_key="none-needed", window=1 << 20)
        record = Path(folder) / "meter.jsonl"
        async with (
            MeteringProxy(model, record=record) as meter,
            meter.open_account("a", TaskItemBudget(max_tokens=1 << 40)) as seat,
            bare_proxy(url) as bare,
        ):
            for size, chars in SIZES.items():
                rounds = [
                    (
                        await measured(bare, "none", count, chars),
                        await measured(seat.base_url, seat.key, count, chars),
                    )
                    for _ in range(3)
                ]
                # The quietest round of each.
                theirs = min(bare_cost.cpu_ms for bare_cost, _ in rounds)
                ours = min(cost.cpu_ms for _, cost in rounds)
                waited = min(cost.seconds for _, cost in rounds)
                waited -= min(bare_cost.seconds for bare_cost, _ in rounds)
                found += [
                    Figure(
                        f"meter: CPU added to a request of {size}",
                        ours - theirs,
                        "ms",
                        {"bare proxy, whole": theirs},
                        floor=ADDED_MS,
                    ),
                    Figure(
                        f"meter: CPU of a request of {size} beside a bare proxy",
                        ours / theirs,
                        "×",
                        {},
                    ),
                    Figure(
                        f"meter: time added to a request of {size}",
                        1000 * waited,
                        "ms",
                        {},
                        2.0,
                    ),
                ]
    return found


def figures(count: int) -> list[Figure]:
    """``count`` is the number of requests of each measurement."""
    with upstream() as url:
        return asyncio.run(overhead(url, count))


if __name__ == "__main__":
    call(sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
