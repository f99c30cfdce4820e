"""Figures of the transport: long streams, cancelled ones, cold starts over TLS, and CPU time.

    python benchmarks/reality_transport.py [--quick] [--json]

``reality.py`` calls ``measure``. What is compared with "before" is the last commit that used
aiohttp's client for TLS and its own parser for plain HTTP. It is read from the history of the
repository. Both sides take turns, each in its own process, against one server in a third.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import selectors
import ssl
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
from figures import Figure, show
from processes import quiet_env

HERE = Path(__file__).parent
BEFORE = "951c2b60"
"""Last commit with aiohttp's client."""
NUM_PIECES = 200
TEXT = "word " * NUM_PIECES
STREAM_S = 20 * 60
BLOCK = 80
"""Requests of one block, whose CPU time is measured."""


# --- the server, in its own process ---------------------------------------------------------------


async def serve(pieces: int, certificate: str) -> None:
    """Answer every request with ``TEXT``, streamed in ``pieces`` if a stream is asked for."""
    from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest
    from ramify.testing.scripted_server import completion_body, completion_stream_chunks
    from ramify.types.message import Message, Reply, Usage

    whole = completion_body(Reply(Message("assistant", TEXT), Usage(9, 9, calls=1)), "m")
    body = msgspec.json.encode(whole)
    events = b"".join(
        b"data: " + msgspec.json.encode(chunk) + b"\n\n"
        for chunk in completion_stream_chunks(whole, pieces, True)
    )
    events += b"data: [DONE]\n\n"

    def answer(exchange: PendingMockRequest) -> None:
        if b'"stream":true' in exchange.body:
            exchange.send(200, events, content_type="text/event-stream")
        else:
            exchange.send(200, body)

    tls = None
    if certificate:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(certificate, f"{certificate}.key")
    server = MockHttpServer(answer, tls=tls)
    await server.start()
    print(server.port, flush=True)
    await asyncio.Event().wait()


@contextmanager
def serving(pieces: int = 1, certificate: str = "") -> Iterator[int]:
    command = [sys.executable, __file__, "serve", str(pieces), certificate]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.terminate()


# --- one side of a comparison, in its own process -------------------------------------------------


async def requests(url: str, stream: bool) -> None:
    """For each line of the input, send a block of requests, 16 at a time, and print the CPU
    seconds of one request."""
    from ramify.clients.base import Request, Sampling
    from ramify.clients.rate_limited_requests import RateLimitedClientPool
    from ramify.types.message import Message, Usage

    class Free:
        async def reserve(self) -> None: ...
        def is_still_valid(self) -> bool:
            return True

        def settle(self, usage: Usage, cost: float | None) -> None: ...
        def charge_full_reservation(self, error: str) -> None: ...
        def release(self, error: str) -> None: ...

    pool, name = RateLimitedClientPool(max_in_flight=16), f"vllm:m@{url}"
    try:
        from ramify.clients.model_config import Model

        client = pool.client_for_model(Model(name, stream=stream))
    except ImportError:  # the commit before has no such class
        client = pool.client(name)
    request = Request((Message("user", "x" * 2000),), Sampling(max_tokens=1000))

    async def ask(times: int) -> None:
        for _ in range(times):
            await pool.ask(client, request, Free())

    for _ in sys.stdin:
        began = time.process_time()
        await asyncio.gather(*(ask(BLOCK // 16) for _ in range(16)))
        print((time.process_time() - began) / BLOCK, flush=True)
    await pool.close()


def side(package: Path | None, url: str, stream: bool) -> subprocess.Popen[str]:
    words = [sys.executable, __file__, "side", url, str(int(stream))]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(words, env=env_of(package), text=True, **pipes)


def block_of(process: subprocess.Popen[str]) -> float:
    """Return the CPU seconds of one request in the next block of a side."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("\n")
    process.stdin.flush()
    return float(process.stdout.readline())


_TEXT: dict[str, Any] = {"capture_output": True, "text": True}


def env_of(package: Path | None, **more: str) -> dict[str, str]:
    path = {"PYTHONPATH": str(package)} if package is not None else {}
    return quiet_env(PYTHONDONTWRITEBYTECODE="", OMP_NUM_THREADS="1", **path, **more)


@contextmanager
def package_before() -> Iterator[Path | None]:
    """Folder with the package as it was at ``BEFORE``; None if the history is not there."""
    with tempfile.TemporaryDirectory() as folder:
        archive = Path(folder, "before.tar")
        command = ["git", "archive", "-o", str(archive), BEFORE, "ramify"]
        if subprocess.run(command, cwd=HERE.parent, **_TEXT).returncode:
            yield None
            return
        subprocess.run(["tar", "-xf", archive.name], cwd=folder, check=True)
        yield Path(folder)


# --- figures --------------------------------------------------------------------------------------


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


async def long_stream() -> float:
    """Return the seconds of a streamed reply, on the loop's clock; 0 if it did not arrive."""
    import ramify
    from ramify import testing

    gap_s = STREAM_S / NUM_PIECES
    async with testing.ScriptedServer([TEXT], pieces=NUM_PIECES, piece_s=gap_s) as server:
        limits = ramify.Limits(max_seconds=10 * STREAM_S)
        async with ramify.RLM(f"vllm:m@{server.url}", limits=limits) as rlm:
            began = asyncio.get_running_loop().time()
            result = await rlm.acompletion("a small context", "Which words?")
            seconds = asyncio.get_running_loop().time() - began
    return seconds if result.response.strip() == TEXT.strip() else 0.0


async def cancels(count: int) -> list[float]:
    """Return the seconds from each cancellation to the moment at which the server sees it."""
    from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest

    seen: list[float] = []
    loop, is_seen = asyncio.get_running_loop(), asyncio.Event()

    async def stream(exchange: PendingMockRequest) -> None:
        exchange.begin_streamed_response("text/event-stream")
        while exchange.is_open:
            exchange.send_piece(b'data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n')
            await asyncio.sleep(0.002)
        seen.append(loop.time())
        is_seen.set()

    tasks: set[asyncio.Task[None]] = set()

    def answer(exchange: PendingMockRequest) -> None:
        tasks.add(asyncio.ensure_future(stream(exchange)))

    import ramify

    server = MockHttpServer(answer)
    await server.start()
    took: list[float] = []
    for _ in range(count):
        async with ramify.RLM(f"vllm:m@http://127.0.0.1:{server.port}/v1") as rlm:
            running = rlm.start("a small context", "Which words?")
            await asyncio.sleep(0.2)
            is_seen.clear()
            began = loop.time()
            asking = asyncio.ensure_future(running.result())
            await asyncio.sleep(0)
            asking.cancel()
            await asyncio.wait({asking})
            await is_seen.wait()
            took.append(seen[-1] - began)
    await server.close()
    return took


def cold_starts(quick: bool, before: Path | None) -> Iterator[Figure]:
    """Wall time of a whole ``ask`` over TLS, the first request of its process."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        certificate = str(Path(folder, "cert.pem"))
        subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
        curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
        command = ["openssl", "req", "-x509", *curve, "-days", "2", *subject]
        subprocess.run(
            [*command, "-keyout", f"{certificate}.key", "-out", certificate], check=True, **_TEXT
        )
        port = stack.enter_context(serving(certificate=certificate))
        model = f"vllm:m@https://localhost:{port}/v1"
        words = [sys.executable, "-m", "ramify", "ask", "Which words?", "--model", model]
        found: dict[str, list[float]] = {"now": [], "before": []}
        for _ in range(4 if quick else 12):
            for name, package in (("now", HERE.parent), ("before", before)):
                if package is None:
                    continue
                more = {"SSL_CERT_FILE": certificate, "RAMIFY_HOME": f"{folder}/{name}"}
                began = time.perf_counter()
                ended = subprocess.run(
                    [*words, "--quiet"], env=env_of(package, **more), cwd=folder, **_TEXT
                )
                if ended.returncode == 0 and ended.stdout.strip() == TEXT.strip():
                    found[name].append(time.perf_counter() - began)
                else:
                    print(f"{name}: {ended.stdout}{ended.stderr}", file=sys.stderr)
    now, then = (median(times[1:]) if len(times) > 1 else None for times in found.values())
    share = now / then if now and then else None
    against: dict[str, float | str] = {} if then is None else {"before (s)": then}
    if now is not None:
        against["now (s)"] = now
    yield Figure("an ask over TLS, its whole process, to the one before", share, "×", against, 1.0)


def cpu_times(quick: bool, before: Path | None) -> Iterator[Figure]:
    """The sides take turns, block by block, because a busy machine is slower at one moment than at
    the next. The share is the median over the turns."""
    turns = 60 if quick else 250
    with ExitStack() as stack:
        one = stack.enter_context(serving(1))
        forms: dict[str, tuple[Path | None, int, bool]] = {
            "whole": (HERE.parent, one, False),
            "before": (before, one, False),
            "one piece": (HERE.parent, one, True),
            "200 pieces": (HERE.parent, stack.enter_context(serving(NUM_PIECES)), True),
        }
        sides = {
            name: stack.enter_context(side(package, f"http://127.0.0.1:{port}/v1", stream))
            for name, (package, port, stream) in forms.items()
            if package is not None
        }
        for process in sides.values():
            block_of(process)  # opens connections
        found = {name: [1e6 * block_of(process)] for name, process in sides.items()}
        for turn in range(turns):
            for name in sorted(sides, reverse=bool(turn % 2)):
                found[name].append(1e6 * block_of(sides[name]))
        for process in sides.values():
            assert process.stdin is not None
            process.stdin.close()
    least = {name: min(times) for name, times in found.items()}
    against: dict[str, float | str] = {}
    share = None
    if "before" in found:
        against = {"before (µs)": least["before"]}
        pairs = zip(found["whole"], found["before"], strict=True)
        share = median(now / then for now, then in pairs)
    whole = {**against, "now (µs)": least["whole"]}
    yield Figure("CPU time of a request that is not streamed, to before", share, "×", whole, 1.1)
    for name in ("one piece", "200 pieces"):
        figure = f"CPU time of a request that is streamed in {name}"
        yield Figure(figure, least[name], "µs", against)


def measure(quick: bool) -> list[Figure]:
    """Return the figures of the transport."""
    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        seconds = runner.run(long_stream())
    name = "a reply that streams for 20 minutes: seconds until it is whole"
    figures = [Figure(name, seconds, "s", {}, least=STREAM_S)]
    took = asyncio.run(cancels(5 if quick else 20))
    figures.append(
        Figure("a cancelled run: until its stream is closed, the longest", max(took), "s", {}, 0.2)
    )
    with package_before() as before:
        figures += cpu_times(quick, before)
        figures += cold_starts(quick, before)
    return figures


def main() -> int:
    if sys.argv[1:2] == ["serve"]:
        asyncio.run(serve(int(sys.argv[2]), sys.argv[3]))
        return 0
    if sys.argv[1:2] == ["side"]:
        asyncio.run(requests(sys.argv[2], sys.argv[3] == "1"))
        return 0
    parser = argparse.ArgumentParser(description="Figures of the transport.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON, too")
    options = parser.parse_args()
    os.environ.update(quiet_env())
    figures = measure(options.quick)
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
