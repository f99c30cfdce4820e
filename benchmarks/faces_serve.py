"""Benchmarks of ``ramify serve``: its overhead over the library, and the events of two hundred
concurrent streams.

    python benchmarks/faces_serve.py            print a table; --quick: fewer rounds; --json:
                                                figures as the last line
    python benchmarks/faces_serve.py --server   only the measured server; it prints its base URL

The model answers at once, in the jail, without a store. The overhead is measured over loopback with
client, server and library taking turns on one event loop. The client's own work therefore counts
against the server, and the time to wake up a second process does not. The two hundred streams come
from a separate server process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from statistics import median
from typing import Any, NamedTuple

import aiohttp
from figures import Figure, show

from ramify import RLM, Limits, Scaffold, ScriptedClient
from ramify.http_server.access import ListenAddress
from ramify.serve.recursive_run_server import RecursiveRunServer
from ramify.types.message import Message

CLIENTS = 200
TEXT = "red;3\nblue;4\n" * 3000
SYSTEM = "You drive a session; FINAL ends it. {{tools}}{{limits}}"


def model(messages: tuple[Message, ...]) -> str:
    """Two turns in a session that repeat the number in the question again and again."""
    if not messages[0].content.startswith("You drive a session"):
        return f"re: {messages[-1].content}"
    number = re.search(r"client (\d+)", messages[1].content)[1]  # type: ignore[index]
    if sum(message.role == "assistant" for message in messages) == 0:
        code = f"r = llm_query_batched(['sub <{number}> ' + str(i) for i in range(3)])"
        return f"thought <{number}>\n```repl\n{code}\n```"
    return f"```repl\nFINAL('answer <{number}>')\n```"


def rlm() -> RLM:
    limits = Limits(max_concurrency=2 * CLIENTS)
    return RLM(
        ScriptedClient(model),
        scaffold=Scaffold(name="bench", system=SYSTEM, direct_chars=0),
        limits=limits,
    )


async def serve() -> None:
    async with RecursiveRunServer(
        rlm(), name="bench", address=ListenAddress(is_open=True), max_runs=2 * CLIENTS
    ) as server:
        print(server.url, flush=True)
        await asyncio.Event().wait()


@asynccontextmanager
async def serving() -> AsyncIterator[str]:
    """Yield the base URL of a server in a separate process."""
    command = [sys.executable, __file__, "--server"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:  # noqa: ASYNC220 -- once, at the start
        assert process.stdout is not None
        try:
            yield (await asyncio.to_thread(process.stdout.readline)).strip()
        finally:
            process.terminate()


# --- what it adds ---------------------------------------------------------------------------------


def body(question: str, text: str | None, stream: bool = False) -> dict[str, Any]:
    parts = [{"type": "text", "text": each} for each in (text, question) if each is not None]
    return {"model": "bench", "messages": [{"role": "user", "content": parts}], "stream": stream}


async def compare(text: str | None, rounds: int) -> tuple[float, float]:
    """Return median (seconds of the library, seconds of the server) around a run, without the run's
    own seconds."""
    ours, served = [], []
    server = RecursiveRunServer(rlm(), name="bench", address=ListenAddress(is_open=True))
    async with rlm() as library, server, aiohttp.ClientSession() as http:
        url = server.url
        for number in range(rounds):
            question = f"client {number}"
            began = time.perf_counter()
            result = await (
                library.acompletion(question)
                if text is None
                else library.acompletion(text, question)
            )
            between = time.perf_counter()
            async with http.post(f"{url}/chat/completions", json=body(question, text)) as answer:
                found = json.loads(await answer.read())
            ended = time.perf_counter()
            if found["choices"][0]["message"]["content"] != result.response:
                raise SystemExit(f"the server answered {found}, the library {result.response!r}")
            ours.append(between - began - result.trajectory.seconds)
            served.append(ended - between - found["ramify"]["seconds"])
    skip = rounds // 10  # connections, imports, the first session
    return median(ours[skip:]), median(served[skip:])


async def overhead(quick: bool) -> AsyncIterator[Figure]:
    cases = {"a plain question": (None, 300), "two turns over 39,000 characters": (TEXT, 100)}
    for name, (text, rounds) in cases.items():
        library, served = await compare(text, rounds // 3 if quick else rounds)
        against: dict[str, float | str] = {
            "around a run in the library": library * 1e3,
            "around one over HTTP": served * 1e3,
        }
        yield Figure(f"server over library, {name}", (served - library) * 1e3, "ms", against, 5)


# --- many streams ---------------------------------------------------------------------------------


class StreamedReply(NamedTuple):
    """Result of one stream."""

    reasoning: str
    content: str
    ids: set[str]
    finish: str | None
    num_events: int
    is_done: bool


async def streamed(http: aiohttp.ClientSession, url: str, number: int) -> StreamedReply:
    reasoning, content, ids, finish, count, is_done = "", "", set(), None, 0, False
    async with http.post(
        f"{url}/chat/completions", json=body(f"client {number}", TEXT, stream=True)
    ) as answer:
        async for line in answer.content:
            if not line.startswith(b"data: "):
                continue
            count += 1
            if line == b"data: [DONE]\n":
                is_done = True
                continue
            event = json.loads(line[6:])
            choice = event["choices"][0]
            ids.add(event["id"])
            reasoning += choice["delta"].get("reasoning_content", "")
            content += choice["delta"].get("content") or ""
            finish = choice["finish_reason"] or finish
    return StreamedReply(reasoning, content, ids, finish, count, is_done)


def is_whole(told: StreamedReply, number: int) -> bool:
    """Return True if the stream has every event of this client's run in order, and none of another
    run. Sub-calls are concurrent, so they may start and end in any order."""
    code = f"r = llm_query_batched(['sub <{number}> ' + str(i) for i in range(3)])"
    root = (
        f"turn 1\nthought <{number}>\n```repl\n{code}\n```\ncall 0 ran: (no output)\n"
        f"turn 2\n```repl\nFINAL('answer <{number}>')\n```\ncall 0 ran: (no output)"
    ).split("\n")
    subs = {f"call 0.{i} (lm): sub <{number}> {i}": f"call 0.{i} ended: final" for i in range(3)}
    lines = re.sub(r"ran \d+\.\d s", "ran", told.reasoning).rstrip("\n").split("\n")
    of_subs = [line for line in lines if line.startswith("call 0.")]
    in_order = all(
        of_subs.index(start) < of_subs.index(end)
        for start, end in subs.items()
        if {start, end} <= {*of_subs}
    )
    ends = (told.content, told.finish, told.is_done, len(told.ids)) == (
        f"answer <{number}>",
        "stop",
        True,
        1,
    )
    is_root = [line for line in lines if line not in of_subs] == root
    return ends and is_root and in_order and sorted(of_subs) == sorted([*subs, *subs.values()])


async def streams(url: str, quick: bool) -> AsyncIterator[Figure]:
    wrong, seconds, events = 0, [], 0
    for _ in range(1 if quick else 3):
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
            began = time.perf_counter()
            told = await asyncio.gather(*(streamed(http, url, number) for number in range(CLIENTS)))
            seconds.append(time.perf_counter() - began)
        wrong += sum(not is_whole(each, number) for number, each in enumerate(told))
        events = sum(each.num_events for each in told)
    yield Figure(
        f"{CLIENTS} streams at once: with a lost or a mixed event", wrong, "streams", {}, 0
    )
    yield Figure(
        f"{CLIENTS} streams at once, a session each: all answered",
        median(seconds),
        "s",
        {"events": float(events)},
    )


async def _measured(quick: bool) -> list[Figure]:
    found = [figure async for figure in overhead(quick)]
    async with serving() as url:
        return found + [figure async for figure in streams(url, quick)]


def figures(quick: bool) -> Iterator[Figure]:
    """Yield all figures of the server."""
    yield from asyncio.run(_measured(quick))


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of ramify serve.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument("--server", action="store_true", help="only serve what is measured")
    options = parser.parse_args()
    if options.server:
        asyncio.run(serve())
    found = list(figures(options.quick))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
