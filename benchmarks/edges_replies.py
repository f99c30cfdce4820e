"""Hostile replies of a model server: how long they stop the event loop, and whether a run still
ends in time.

    python benchmarks/edges.py --only replies
    python benchmarks/edges_replies.py NAME …    only these replies, each on one line

The server is another process. Each reply is given to a separate run with a deadline of 5 s, while
a timer of 10 ms is on the loop. What is measured: the CPU time of the longest callback, how late
the timer was at worst, and the length of the run. A thread that holds the interpreter's lock shows
only in the timer. The timer is also late if the machine is busy, so its figure is the median of
three rounds with the same reply.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import statistics
import subprocess
import sys
import tempfile
import time
from asyncio import events
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from figures import Figure

import ramify

DEADLINE_S = 5.0
TIMER_S = 0.01
MOST_CALLBACK_S = 0.05
MOST_LATE_S = 0.25
MOST_RUN_S = 5.5
MB = 1 << 20


# --- the server


def _message(**fields: Any) -> bytes:
    choice = {"message": {"role": "assistant", **fields}, "finish_reason": "stop"}
    return json.dumps({"choices": [choice], "model": "m"}).encode()


def _text(pattern: str, size: int) -> bytes:
    return _message(content=(pattern * (size // len(pattern) + 1))[:size])


def _with(extra: bytes) -> bytes:
    """A good reply with further fields before it."""
    return b"{" + extra + b"," + _message(content="FINAL(1)")[1:]


def _choice(extra: bytes) -> bytes:
    message = b'{"message":{"content":"FINAL(1)"},"finish_reason":"stop",' + extra + b"}"
    return b'{"choices":[' + message + b"]}"


def _calls(number: int) -> bytes:
    call = {"id": "a", "function": {"name": "python", "arguments": '{"code": "1"}'}}
    return _message(content="", tool_calls=[call] * number)


ORDINARY = "an ordinary reply"
REPLIES: dict[str, Callable[[], bytes]] = {
    "text of 50 MB": lambda: _text("word ", 50 * MB),
    "text of 2 MB": lambda: _text("word ", 2 * MB),
    "white space of 5 MB": lambda: _text(" ", 5 * MB),
    "white space of 2 MB": lambda: _text(" ", 2 * MB),
    "white space before JSON": lambda: b" " * (63 * MB) + _message(content="FINAL(1)"),
    "lines of 2 MB": lambda: _text("\n", 2 * MB),
    "100,000 tool calls": lambda: _calls(100_000),
    "2,000 tool calls": lambda: _calls(2_000),
    "usage of 60 MB of lists": lambda: _with(b'"usage":[' + b"[]," * (20 * MB) + b"1]"),
    "usage of lists": lambda: _with(b'"usage":[' + b"[]," * 900_000 + b"1]"),
    "usage of lists and NaN": lambda: _with(b'"usage":[' + b"[]," * 900_000 + b"NaN]"),
    "usage of slow numbers": lambda: _with(
        b'"usage":[' + b"1.23456789012345678901234567890e-300," * 75_000 + b"1]"
    ),
    "few slow numbers": lambda: _with(
        b'"usage":[' + b"1.23456789012345678901234567890e-300," * 4_000 + b"1]"
    ),
    "error of objects": lambda: _with(b'"error":{' + b'"a":{},' * 400_000 + b'"b":1}'),
    "deep lists": lambda: _with(b'"zz":' + b"[" * 500_000 + b"]" * 500_000),
    "content of 200,000 parts": lambda: _message(content=[{"type": "text", "text": "a"}] * 200_000),
    "a million token ids": lambda: _choice(b'"token_ids":[' + b"1," * 1_000_000 + b"1]"),
    "log-probabilities": lambda: _choice(
        b'"logprobs":{"content":[' + b'{"logprob":-1},' * 190_000 + b'{"logprob":1}]}'
    ),
    "characters that are not UTF-8": lambda: _text("x", 2 * MB).replace(b"xxxx", b"\xff\xfex"),
    "escaped characters": lambda: _text("\x01", 400_000),
    "finish reason of 2 MB": lambda: _message(content="x").replace(b"stop", b"s" * (2 * MB)),
    "openings of fences": lambda: _text("```repl\n", 2 * MB),
    "backquotes": lambda: _text("`", 2 * MB),
    "fences in a line": lambda: _text("``` x ", 2 * MB),
    "openings of final answers": lambda: _text("FINAL(", 2 * MB),
    "parentheses": lambda: _text("FINAL" + "(" * 5000 + "\n", 2 * MB),
    "quotation marks": lambda: _text('FINAL("""\'', 2 * MB),
    "thinking that does not end": lambda: _text("<think>", 2 * MB),
    "tags of code": lambda: _text("<code>", 2 * MB),
    "code of 2 MB": lambda: _message(content="```repl\n" + "x = 1\n" * 300_000 + "```"),
    "code with fences in strings": lambda: _message(
        content="```repl\n" + "x = '```'\n" * 180_000 + "```"
    ),
    "code of brackets": lambda: _message(content="```repl\n" + "[" * 2 * MB + "\n```"),
    "arguments of 2 MB": lambda: _message(
        content="", tool_calls=[{"id": "a", "function": {"name": "p", "arguments": "[" * 2 * MB}}]
    ),
    "error page of 60 MB": lambda: b"<title " * (9 * MB),
    "error of 60 MB of lists": lambda: b'{"error":[' + b"[]," * (20 * MB) + b"1]}",
    "60 MB in gzip": lambda: gzip.compress(_text("word ", 60 * MB), 1),
    "2 MB in gzip": lambda: gzip.compress(_text("word ", 2 * MB), 1),
    "text of 4 MB, large limit": lambda: _text("word ", 4 * MB - 100),
    "text of 60 MB, large limit": lambda: _text("word ", 60 * MB),
    "usage of 60 MB, large limit": lambda: _with(b'"usage":[' + b"[]," * (10 * MB) + b"1]"),
    "code of 4 MB, large limit": lambda: _message(
        content="```repl\n" + "x = 1\n" * 690_000 + "```"
    ),
    "chunks of one byte": lambda: _text("word ", 2 * MB),
}
HOSTILE = tuple(REPLIES)
REPLIES[ORDINARY] = lambda: _message(content="```repl\nFINAL(1)\n```")


async def _serve() -> None:
    bodies: dict[str, bytes] = {}

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode("latin-1"):
                lines = head.lower().split("\r\n")
                length = next(line for line in lines if line.startswith("content-length:"))
                asked = json.loads(await reader.readexactly(int(length.split(":")[1])))
                name = asked["model"]
                body = bodies.get(name) or bodies.setdefault(name, REPLIES[name]())
                status = "500 Failed" if name.startswith("error ") else "200 OK"
                await _send(writer, name, status, body)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0, limit=1 << 26)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


async def _send(writer: asyncio.StreamWriter, name: str, status: str, body: bytes) -> None:
    if name.startswith("chunks "):
        head = f"HTTP/1.1 {status}\r\nTransfer-Encoding: chunked\r\n\r\n"
        body = (
            b"".join(b"1\r\n%b\r\n" % body[at : at + 1] for at in range(len(body))) + b"0\r\n\r\n"
        )
    else:
        encoding = "Content-Encoding: gzip\r\n" if "gzip" in name else ""
        head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n{encoding}\r\n"
    writer.write(head.encode())
    for at in range(0, len(body), 1 << 20):
        writer.write(body[at : at + (1 << 20)])
        await writer.drain()


@contextmanager
def _server() -> Iterator[str]:
    command = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{process.stdout.readline().strip()}/v1"
        finally:
            process.terminate()


# --- the runs

RAISED = "unexpected exception:"


class Round(NamedTuple):
    """One run against one hostile reply."""

    callback_s: float
    """CPU time of the longest callback of the loop."""
    late_s: float
    """The most that the timer was late."""
    run_s: float
    outcome: str


@contextmanager
def _timed_callbacks(longest: list[float], names: list[str]) -> Iterator[None]:
    """Measure the CPU time of each callback of this process's event loops."""
    run = events.Handle._run

    def timed(handle: events.Handle) -> None:
        began = time.thread_time()
        run(handle)
        taken_s = time.thread_time() - began
        if taken_s > longest[0]:
            longest[0], names[0] = taken_s, repr(handle)

    events.Handle._run = timed  # type: ignore[method-assign]
    try:
        yield
    finally:
        events.Handle._run = run  # type: ignore[method-assign]


async def _round(url: str, name: str, folder: Path) -> Round:
    late: list[float] = [0.0]

    async def tick() -> None:
        while True:
            due = time.monotonic() + TIMER_S
            await asyncio.sleep(TIMER_S)
            late[0] = max(late[0], time.monotonic() - due)

    longest, names = [0.0], [""]
    tokens = 131_072 if name.endswith("large limit") else 8192
    async with ramify.RLM(
        f"openai:{name}@{url}",
        sandbox=ramify.SandboxSpec("process", allow_weaker=True),
        limits=ramify.Limits(
            max_seconds=DEADLINE_S, max_turns=3, max_depth=0, max_reply_tokens=tokens
        ),
        sampling=ramify.Sampling(max_tokens=tokens),
        store=ramify.Store(folder),
        direct=False,
    ) as rlm:
        await asyncio.sleep(0)
        with _timed_callbacks(longest, names):
            timer = asyncio.create_task(tick())
            await asyncio.sleep(2 * TIMER_S)
            began = time.monotonic()
            try:
                result = await rlm.acompletion("some context", "How long is it?")
                outcome = f"{result.stop}: {result.error or result.response}"
            except ramify.RamifyError as error:
                outcome = str(error)
            except Exception as error:  # noqa: BLE001 -- counted below
                outcome = f"{RAISED} {error!r}"
            run_s = time.monotonic() - began
            timer.cancel()
    if longest[0] > MOST_CALLBACK_S:
        print(f"{name}: {longest[0] * 1000:.0f} ms in {names[0][:300]}", file=sys.stderr)
    return Round(longest[0], late[0], run_s, " ".join(outcome.split())[:100])


def rounds(names: tuple[str, ...], number: int) -> Iterator[tuple[str, list[Round]]]:
    with _server() as url, tempfile.TemporaryDirectory() as folder:
        # The first run imports modules.
        asyncio.run(_round(url, ORDINARY, Path(folder)))
        for name in names:
            yield name, [asyncio.run(_round(url, name, Path(folder))) for _ in range(number)]


def measure(quick: bool) -> list[Figure]:
    """Each figure is the worst over all replies. CPU time does not depend on the machine's load,
    so the least of the rounds counts for it; for the others, the median."""
    found = list(rounds(HOSTILE, 1 if quick else 3))
    callback_s, slowest = max((min(r.callback_s for r in each), name) for name, each in found)
    late_s, latest = max((statistics.median(r.late_s for r in each), name) for name, each in found)
    run_s, longest = max((statistics.median(r.run_s for r in each), name) for name, each in found)
    return [
        Figure("replies: hostile replies", len(found), "replies", {}, least=30),
        Figure(
            "replies: runs that ended with an unexpected exception",
            sum(r.outcome.startswith(RAISED) for _, each in found for r in each),
            "runs",
            {},
            0,
        ),
        Figure(
            "replies: CPU of the longest callback",
            callback_s * 1000,
            "ms",
            {"by": slowest},
            MOST_CALLBACK_S * 1000,
        ),
        Figure(
            "replies: timer of 10 ms late by",
            late_s * 1000,
            "ms",
            {"by": latest},
            MOST_LATE_S * 1000,
        ),
        Figure("replies: longest run, deadline 5 s", run_s, "s", {"by": longest}, MOST_RUN_S),
    ]


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        asyncio.run(_serve())
        return
    for name, (each,) in rounds(tuple(sys.argv[1:]) or HOSTILE, 1):
        print(
            f"{name:32}{each.callback_s * 1000:8.0f} ms{each.late_s * 1000:8.0f} ms late"
            f"{each.run_s:8.2f} s  {each.outcome}",
            flush=True,
        )


if __name__ == "__main__":
    main()
