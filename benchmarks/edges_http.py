"""Benchmarks of our HTTP servers among strangers: requests that never end, a burst on a machine with
few descriptors, and wrong keys.

    python benchmarks/edges.py --only http [--quick] [--json]

Each figure is taken from a real `ramify serve` or `ramify view` in another process. Not here: what
the limits are (ramify/http_server/) and their tests (tests/http_server/).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
from figures import Figure

ROOT = Path(__file__).parents[1]
FEW = 256
"""Descriptors of the server in the burst, as soft and as hard limit."""
CLIENTS = 220
NUM_REQUESTS = 600
HALF_HEADS = 300
UPLOADS = 50
UPLOAD_BYTES = 50_000_000
WRONG = 100
LONG = "red;3\nblue;4\n" * 2000
SCRIPT = [
    {"match": "How long is it?", "reply": "```repl\nprint(len(context))\n```"},
    {"match": "", "reply": "```repl\nFINAL(len(context))\n```"},
]


class ServerProcess(NamedTuple):
    """A server in another process."""

    url: str
    """Without a path."""
    key: str
    process: subprocess.Popen[bytes]
    folder: Path

    @property
    def bearer(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.key}"}

    def peak_bytes(self) -> int:
        """Largest resident memory since ``forget_peak``."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmHWM:\s+(\d+)", status)[1]) << 10  # type: ignore[index]

    def forget_peak(self) -> int:
        """Begin to measure the peak of the memory; return the memory of now."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")
        return self.peak_bytes()


@contextlib.contextmanager
def served(command: str, *options: str, descriptors: int = 0) -> Iterator[ServerProcess]:
    """Start ``ramify`` with ``command``; ``descriptors`` limits its open files."""

    def limit() -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "script.json").write_text(json.dumps(SCRIPT))
        (folder / "keys.toml").write_text(
            "\n".join(f'[k{i}]\nkey = "key-of-caller-{i}"' for i in range(UPLOADS))
        )
        environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "RAMIFY_HOME": str(folder / "store"),
            "XDG_CONFIG_HOME": str(folder),
        }
        (folder / "store" / "runs").mkdir(0o700, parents=True)
        errors = (folder / "stderr").open("wb")
        process = subprocess.Popen(
            [sys.executable, "-m", "ramify", command, "--port", "0", *options],
            cwd=folder,
            env=environ,
            stderr=errors,
            preexec_fn=limit,
        )
        try:
            said = _until_ready(folder / "stderr", process)
            url = re.search(r"http://127\.0\.0\.1:\d+", said)[0]  # type: ignore[index]
            key = re.search(r"token=(\S+)|key: (\S+)", said)
            yield ServerProcess(url, (key[1] or key[2]) if key else "", process, folder)
        finally:
            process.send_signal(signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(30)
            process.kill()
            process.wait()
            errors.close()


def _until_ready(path: Path, process: subprocess.Popen[bytes]) -> str:
    until = time.monotonic() + 120
    while time.monotonic() < until and process.poll() is None:
        said = path.read_text()
        if "Ctrl-C to stop" in said and said.endswith("\n"):
            time.sleep(0.2)  # the key is on the next line
            return path.read_text()
        time.sleep(0.05)
    raise RuntimeError(f"the server did not start: {path.read_text()}")


def question(number: int) -> dict[str, Any]:
    parts = [{"type": "text", "text": text} for text in (LONG, f"How long is it? ({number})")]
    return {"model": "any", "messages": [{"role": "user", "content": parts}]}


# --- a burst --------------------------------------------------------------------------------------


async def _burst(server: ServerProcess) -> tuple[Counter[int], int]:
    """Ask ``NUM_REQUESTS`` questions by ``CLIENTS`` clients, each again after a 429. Returns the
    number of responses by status, and of right answers."""
    statuses: Counter[int] = Counter()
    numbers = iter(range(NUM_REQUESTS))
    num_right = 0

    async def client() -> None:
        nonlocal num_right
        connector = aiohttp.TCPConnector(limit=1)
        wait = aiohttp.ClientTimeout(total=900)
        async with aiohttp.ClientSession(
            connector=connector, headers=server.bearer, timeout=wait
        ) as http:
            for number in numbers:
                while True:
                    async with http.post(
                        f"{server.url}/v1/chat/completions", json=question(number)
                    ) as answer:
                        statuses[answer.status] += 1
                        body = await answer.json()
                    if answer.status != 429:
                        break
                    await asyncio.sleep(float(answer.headers["retry-after"]))
                if answer.status == 200:
                    text = body["choices"][0]["message"]["content"]
                    num_right += text == str(len(LONG))

    done = await asyncio.gather(*(client() for _ in range(CLIENTS)), return_exceptions=True)
    for error in done:
        if isinstance(error, BaseException):
            statuses[0] += 1
            print(f"a client failed: {error!r}", file=sys.stderr)
    return statuses, num_right


def burst() -> Iterator[Figure]:
    options = ("--model", "scripted:script.json", "--no-direct")
    with served("serve", *options, descriptors=FEW) as server:
        statuses, num_right = asyncio.run(_burst(server))
    print(f"statuses of the burst: {dict(statuses)}", file=sys.stderr)
    what = f"{NUM_REQUESTS} requests by {CLIENTS} clients, {FEW} descriptors"
    failures = sum(num for status, num in statuses.items() if status not in (200, 429))
    yield Figure(f"{what}: answered with 500 or not at all", float(failures), "", {}, 0.0)
    yield Figure(
        f"{what}: answered in the end", float(num_right), "", {}, least=float(NUM_REQUESTS)
    )


# --- requests that never end ----------------------------------------------------------------------


async def attack(url: str) -> None:
    """Hold half heads and unfinished uploads until the standard input ends."""
    writers = await _half_heads(url)
    uploads = await asyncio.gather(*(_upload(url, number) for number in range(UPLOADS)))
    print("attacked", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    for writer in [*writers, *uploads]:
        writer.close()


async def _half_heads(url: str) -> list[asyncio.StreamWriter]:
    host, port = url.removeprefix("http://").split(":")
    writers = []
    for _ in range(HALF_HEADS):
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
        writers.append(writer)
    return writers


async def _upload(url: str, number: int) -> asyncio.StreamWriter:
    """Send all but the end of a large body, as far as the server reads it."""
    host, port = url.removeprefix("http://").split(":")
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer key-of-caller-{number}\r\nContent-Length: {UPLOAD_BYTES}\r\n"
        "\r\n".encode()
    )
    part = b" " * 1_000_000
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(20):
            for _ in range(UPLOAD_BYTES // len(part) - 1):
                writer.write(part)
                await writer.drain()
    return writer


async def _held(server: ServerProcess) -> tuple[float, float]:
    """(growth of the memory in MB, slowest answer for another client in seconds)"""
    body = {"model": "any", "messages": [{"role": "user", "content": "one"}]}
    headers = {"Authorization": "Bearer key-of-caller-0"}

    async def ask() -> float:
        begun = time.perf_counter()
        async with (
            aiohttp.ClientSession(headers=headers) as http,
            http.post(f"{server.url}/v1/chat/completions", json=body) as answer,
        ):
            await answer.read()
            if answer.status != 200:
                return float("inf")
        return time.perf_counter() - begun

    await ask()  # imports
    before = server.forget_peak()
    attacker = await asyncio.create_subprocess_exec(
        sys.executable, __file__, server.url, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert attacker.stdout is not None
    assert attacker.stdin is not None
    attacked = asyncio.ensure_future(attacker.stdout.readline())
    times = []
    while not attacked.done() or len(times) < 10:
        times.append(await ask())
        await asyncio.sleep(0.1)
    times += [await ask() for _ in range(5)]
    growth = (server.peak_bytes() - before) / 1e6
    attacker.stdin.close()
    await attacker.wait()
    return growth, max(times)


def held() -> Iterator[Figure]:
    options = ("--model", "scripted:script.json", "--keys", "keys.toml")
    with served("serve", *options) as server:
        growth, slowest = asyncio.run(_held(server))
    what = f"{HALF_HEADS} half heads, {UPLOADS} unfinished uploads of 50 MB"
    yield Figure(f"{what}: growth of the memory", growth, "MB", {}, 100.0)
    yield Figure(f"{what}: another client is answered within", slowest, "s", {}, 1.0)


# --- wrong keys -----------------------------------------------------------------------------------


async def _reject(server: ServerProcess, path: str) -> int:
    """Send wrong requests; return the number whose response is not one line with a remedy."""
    wrong = [
        ({}, 401, r"^no (API key|token): (send|open) "),
        ({"Authorization": "Bearer guessed"}, 401, r"^wrong (API key|token): (send|open) "),
        ({**server.bearer, "Host": "evil.example"}, 403, "send requests to http"),
        ({**server.bearer, "Origin": "http://evil.example"}, 403, "send requests from"),
    ]
    num_bad = 0
    async with aiohttp.ClientSession() as http:
        for _ in range(WRONG):
            for headers, status, remedy in wrong:
                async with http.get(f"{server.url}{path}", headers=headers) as answer:
                    text = (await answer.json())["error"]["message"]
                    is_right = answer.status == status and re.search(remedy, text)
                    num_bad += not (is_right and "\n" not in text)
    return num_bad


def rejected(quick: bool) -> Iterator[Figure]:
    served_as: dict[str, tuple[list[str], str]] = {
        "serve": (["--model", "scripted:script.json"], "/v1/models"),
        "view": ([], "/api/runs"),
    }
    if not quick:
        served_as["serve-policy"] = (["tiny"], "/v1/models")
    for command, (options, path) in served_as.items():
        with served(command, *options) as server:
            logs = [server.folder / "stderr", server.folder / "store" / "serve.log"]
            before = sum(_num_lines(log) for log in logs)
            num_bad = asyncio.run(_reject(server, path))
            num_lines = sum(_num_lines(log) for log in logs) - before
        what = f"{4 * WRONG} rejected requests to ramify {command}"
        yield Figure(f"{what}: without one line that says what to do", num_bad, "", {}, 0.0)
        yield Figure(f"{what}: lines in logs", num_lines, "", {}, 0.0)


def _num_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0


def measure(quick: bool) -> list[Figure]:
    return [*rejected(quick), *held(), *burst()]


if __name__ == "__main__":
    asyncio.run(attack(sys.argv[1]))
