"""Benchmarks of maps: one question over many rows against a scripted HTTP server on loopback.

    python benchmarks/map.py                100,000 rows, ten kills
    python benchmarks/map.py --quick        10,000 rows, two kills: within five minutes on two cores
    python benchmarks/map.py --rows 20000 --kills 3
    python benchmarks/map.py --json         also print, as the last line, {"figures": [{"name",
                                            "value", "unit", "against", "floor", "least", "holds"}, …]}

A map and a bare loop of ``aiohttp`` that reads, asks and writes the same rows run one after the
other, each in its own process, against a server in a third; compared are the CPU times of the two
clients, without their imports. Rows per second depend on the machine and on what else runs on it.
A map of the same rows with ``batch=True`` is killed once while its batch is at the provider, against a
server that speaks the batch API; a hundredth of its rows is refused, and its memory is compared with
that after a tenth of the rows. Memory is that of the process: its largest size after a tenth of the rows, less its size there. The
estimate is the mean of two, from samples in other stores right before the map and right after it:
what else runs on the machine changes the rate, and a sample cannot know what will run later. The
exit code is 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from figures import Figure, show

QUESTION = "Is this a complaint?"
CONCURRENCY = 64
PRICE = "$1 in, $2 out per million tokens"
MB = 1 << 20


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of maps.")
    parser.add_argument("--quick", action="store_true", help="10,000 rows and two kills")
    parser.add_argument("--rows", type=int, help="number of rows")
    parser.add_argument("--kills", type=int, help="number of kills")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--side", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        side, url, folder = options.side
        print(json.dumps(SIDES[side](url, Path(folder))))
        return 0
    num_rows = options.rows or (10_000 if options.quick else 100_000)
    num_kills = (2 if options.quick else 10) if options.kills is None else options.kills
    with tempfile.TemporaryDirectory() as folder:
        found = [
            *speed(Path(folder), num_rows),
            *kills(Path(folder), num_rows, num_kills),
            *batches(Path(folder), num_rows),
        ]
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


# --- figures


def speed(folder: Path, num_rows: int) -> Iterator[Figure]:
    write_rows(folder / "rows.jsonl", num_rows)
    with served(folder) as url:
        bare, before, ours, after = (
            run_side(side, url, folder) for side in ("bare", "sample", "map", "sample")
        )
    assert (ours["answered"], ours["stop"]) == (num_rows, "done"), ours
    bare_us, ours_us = (1e6 * side["cpu_s"] / num_rows for side in (bare, ours))
    yield Figure(
        f"rows per second, {num_rows:,} rows",
        round(num_rows / ours["wall_s"]),
        "rows/s",
        {"aiohttp alone": round(num_rows / bare["wall_s"])},
        least=2000,
    )
    yield Figure(
        "CPU time of a map",
        round(ours_us / bare_us, 3),
        "× aiohttp alone",
        {"µs per row, map": round(ours_us), "µs per row, aiohttp": round(bare_us)},
        floor=1.3,
    )
    yield Figure(
        "memory after the first tenth", round(ours["grown_bytes"] / MB, 1), "MB", {}, floor=50
    )
    yield Figure(
        "journal beside the texts",
        round(ours["journal_bytes"] / num_rows, 1),
        "bytes per row",
        {},
        floor=200,
    )
    for name, actual in (("dollars", ours["cost"]), ("seconds", ours["wall_s"])):
        found = [sample[name] for sample in (before, after)]
        yield Figure(
            f"estimate of the {name}, from {before['num']:,} rows",
            round(abs((found[0] + found[1]) / 2 / actual - 1), 3),
            "of the whole map's, as error",
            {"before": round(found[0], 6), "after": round(found[1], 6), "map": round(actual, 6)},
            floor=0.2,
        )


def kills(folder: Path, num_rows: int, num_kills: int) -> Iterator[Figure]:
    rows, out, home = folder / "rows.jsonl", folder / "killed.jsonl", folder / "killed"
    seed = random.Random(0)
    marks = sorted(seed.randrange(1, num_rows) for _ in range(num_kills))
    command = [sys.executable, "-m", "ramify", "map", QUESTION, str(rows), "--out", str(out)]
    command += ["--column", "text", "--quiet", "--max-concurrency", str(CONCURRENCY)]
    with served(folder) as url:
        environ = {
            **os.environ,
            "RAMIFY_HOME": str(home),
            "OPENAI_API_KEY": "sk-0123456789",
            "OPENAI_BASE_URL": url,
            "RAMIFY_MODEL": "openai:m",
        }
        num_killed = 0
        for mark in [*marks, None]:
            process = subprocess.Popen(command, env=environ, stdout=subprocess.DEVNULL)
            while mark is not None and process.poll() is None and num_served(url) < mark:
                time.sleep(0.02)
            if mark is not None and process.poll() is None:
                process.send_signal(signal.SIGKILL)
                num_killed += 1
            process.wait()
        sent = num_served(url)
    answers = [json.loads(line)["id"] for line in out.read_text().splitlines()]
    paid, usage = paid_replies(home)
    yield Figure(
        f"rows that are missing, twice or out of order, {num_killed} kills",
        sum(a != b for a, b in zip(answers, range(num_rows), strict=False))
        + abs(len(answers) - num_rows),
        "rows",
        {"rows": len(answers)},
        floor=0,
    )
    yield Figure(
        "recorded replies that were paid twice",
        sum(count - 1 for count in paid.values()),
        "replies",
        {},
        floor=0,
    )
    yield Figure(
        "requests that were in flight at a kill and sent again",
        sent - num_rows,
        "requests",
        {"at most, by concurrency": num_killed * CONCURRENCY},
        floor=num_killed * CONCURRENCY,
    )
    yield Figure(
        "requests that the map counts, less those that the server answered",
        usage - sent,
        "requests",
        {},
        least=0,
    )


def batches(folder: Path, num_rows: int) -> Iterator[Figure]:
    """A map in batches: killed after the upload, then collected; and a tenth of it, for memory."""
    home = folder / "batched"
    with process_with_url([sys.executable, __file__, "--side", "provider", "", str(folder)]) as url:
        tenth = run_side("tenth", url, folder)
        killed = subprocess.Popen(
            [sys.executable, __file__, "--side", "batch", url, str(folder)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        # The server answers a batch some seconds after it was created.
        while killed.poll() is None and len(batches_of(url)) < 2:
            time.sleep(0.02)
        was_running = killed.poll() is None
        killed.kill()
        killed.wait()
        whole = run_side("batch", url, folder)
        (asked_again,) = (sum(batches_of(url).values()) - num_rows - tenth["rows"],)
    rows = [json.loads(line) for line in (folder / "batch.jsonl").read_text().splitlines()]
    refused = num_refused(num_rows)
    paid, _ = paid_replies(home)
    yield Figure(
        f"batched rows that are missing, twice or wrong, {refused:,} of {num_rows:,} refused, "
        f"{int(was_running)} kill",
        sum(
            row["id"] != number or (row["error"] is None) == is_refused(number)
            for number, row in enumerate(rows)
        )
        + abs(len(rows) - num_rows),
        "rows",
        {"answered": whole["answered"], "failed": whole["failed"]},
        floor=0,
    )
    yield Figure(
        "batched rows that were uploaded or paid twice",
        asked_again + sum(count - 1 for count in paid.values()),
        "rows",
        {},
        floor=0,
    )
    yield Figure(
        "memory of a batched map, beyond that of a tenth of its rows",
        round((whole["peak_bytes"] - tenth["peak_bytes"]) / MB, 1),
        "MB",
        {"whole": round(whole["peak_bytes"] / MB), "tenth": round(tenth["peak_bytes"] / MB)},
    )
    yield Figure(
        "CPU time of a batched row, collected after a kill",
        round(1e6 * whole["cpu_s"] / num_rows),
        "µs",
        {},
    )


def is_refused(number: int) -> bool:
    return number % 100 == 7


def num_refused(num_rows: int) -> int:
    return sum(is_refused(number) for number in range(num_rows))


def batches_of(url: str) -> dict[str, int]:
    """Return id -> requests of each batch that the provider has."""
    request = urllib.request.Request(f"{url}/batches?limit=100")
    request.add_header("Authorization", "Bearer sk-0123456789")
    with urllib.request.urlopen(request) as reply:
        found = json.load(reply)["data"]
    return {batch["id"]: batch["request_counts"]["total"] for batch in found}


def paid_replies(home: Path) -> tuple[Counter[tuple[int, int]], int]:
    """Return (question, turn) -> its replies, and the requests that the map counts as paid."""
    from ramify.maps.map_journal import TableMapStore, read_lines
    from ramify.maps.map_journal_state import MapJournalState

    ((path, _),) = TableMapStore(home).headers()
    replies = ((line.r.number, line.r.turn) for _, line in read_lines(path) if line.r is not None)
    return Counter(replies), MapJournalState.read(path).usage.calls


# --- sides, each in its own process


def bare(url: str, folder: Path) -> dict[str, Any]:
    """The same rows by a loop of aiohttp."""
    import aiohttp

    async def loop(rows: Iterator[str], out: TextIO) -> None:
        connector = aiohttp.TCPConnector(limit=CONCURRENCY)
        async with aiohttp.ClientSession(connector=connector) as session:

            async def worker() -> None:
                for line in rows:
                    row = json.loads(line)
                    prompt = f"{row['text']}\n\nQuestion: {QUESTION}"
                    body = {
                        "model": "m",
                        "messages": [{"role": "user", "content": prompt}],
                        "max_tokens": 8192,
                    }
                    async with session.post(f"{url}/chat/completions", json=body) as reply:
                        answer = await reply.json()
                    row["answer"] = answer["choices"][0]["message"]["content"]
                    out.write(json.dumps(row) + "\n")

            await asyncio.gather(*(worker() for _ in range(CONCURRENCY)))

    began, cpu_s = time.perf_counter(), time.process_time()
    with open(folder / "rows.jsonl") as rows, open(folder / "bare.jsonl", "w") as out:
        asyncio.run(loop(rows, out))
    return {"wall_s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu_s}


def mapped(url: str, folder: Path) -> dict[str, Any]:
    """A whole map, with its store and its output."""
    import ramify

    num_rows = sum(1 for _ in open(folder / "rows.jsonl"))  # noqa: SIM115
    memory: list[int] = []
    asked(url, folder, folder / "warm", sample=1)  # imports what a map needs

    def listen(state: ramify.ProgressState) -> None:
        if state.what == "map" and state.done % 100 == 0 and state.done >= num_rows / 10:
            memory.append(resident_bytes())

    began, cpu_s = time.perf_counter(), time.process_time()
    with ramify.subscribe(listen):
        result = asked(url, folder, folder / "home", out=folder / "out.jsonl")
    wall_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu_s
    (path,) = (folder / "home" / "maps").glob("*.jsonl")
    texts = header = 0
    with open(path, "rb") as journal:
        header = len(journal.readline())
    with open(folder / "out.jsonl") as rows:
        for line in rows:
            row = json.loads(line)
            texts += len(row["text"]) + len(row["answer"])
    return {
        "wall_s": wall_s,
        "cpu_s": cpu_s,
        "answered": result.num_answered,
        "stop": result.stop,
        "cost": result.cost,
        "grown_bytes": max(memory) - memory[0],
        "journal_bytes": path.stat().st_size - texts - header,
    }


def sampled(url: str, folder: Path) -> dict[str, Any]:
    """The estimate from a sample."""
    num_rows = sum(1 for _ in open(folder / "rows.jsonl"))  # noqa: SIM115
    num = max(1000, num_rows // 50)
    with tempfile.TemporaryDirectory(dir=folder) as home:
        whole = asked(url, folder, Path(home), sample=num).estimate
    return {
        "num": whole.num_sampled,
        "seconds": 3600 * whole.hours.value,
        "dollars": whole.cost.value,
    }


def batched(url: str, folder: Path) -> dict[str, Any]:
    """A whole map in batches. Continues it if it was killed."""
    return measured_batch(url, folder, folder / "batched", "rows.jsonl", "batch.jsonl")


def batched_tenth(url: str, folder: Path) -> dict[str, Any]:
    """A tenth of the map in batches, to compare its memory."""
    with open(folder / "rows.jsonl") as rows, open(folder / "tenth.jsonl", "w") as tenth:
        tenth.writelines(line for line in rows if json.loads(line)["id"] % 10 == 0)
    return measured_batch(url, folder, folder / "batched_tenth", "tenth.jsonl", "batch_10.jsonl")


def measured_batch(url: str, folder: Path, home: Path, rows: str, out: str) -> dict[str, Any]:
    cpu_s = time.process_time()
    result = asked(url, folder, home, rows=rows, out=folder / out, batch=True)
    assert result.stop == "done", result.reason
    return {
        "rows": result.num_rows,
        "answered": result.num_answered,
        "failed": result.num_failed,
        "cpu_s": time.process_time() - cpu_s,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def provider(url: str, folder: Path) -> dict[str, Any]:
    """Serve the batch APIs until the process is stopped."""
    from ramify import testing

    def reply(messages: Any) -> Any:
        number = int(messages[-1].content.split(":")[0].split()[1])
        return testing.refused(text="no such ticket") if is_refused(number) else "yes"

    async def serve() -> None:
        async with testing.FakeBatchApiServer(reply, holds=True) as server:
            print(server.url, flush=True)
            while True:
                await asyncio.sleep(2.0)
                await server.finish()

    asyncio.run(serve())
    return {}


SIDES = {
    "bare": bare,
    "map": mapped,
    "sample": sampled,
    "batch": batched,
    "tenth": batched_tenth,
    "provider": provider,
}


def asked(url: str, folder: Path, home: Path, rows: str = "rows.jsonl", **options: Any) -> Any:
    import ramify

    model = ramify.Model("openai:m", base_url=url, api_key="sk-0123456789", price=PRICE)
    limits = ramify.Limits(max_concurrency=CONCURRENCY)
    store = ramify.Store(home)
    options = {"columns": ["text"], "max_cost": 1e6, "limits": limits, "store": store, **options}
    return ramify.map(QUESTION, folder / rows, model, **options)


def run_side(side: str, url: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, __file__, "--side", side, url, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- inputs


def write_rows(path: Path, num: int) -> None:
    """Write tickets of 60 to 300 characters."""
    seed = random.Random(1)
    words = [
        "the",
        "printer",
        "on",
        "floor",
        "two",
        "does",
        "not",
        "work",
        "since",
        "Monday",
        "and",
        "nobody",
        "answers",
    ]
    with open(path, "w") as file:
        for number in range(num):
            text = f"Ticket {number}: {' '.join(seed.choices(words, k=seed.randrange(10, 50)))}"
            file.write(json.dumps({"id": number, "text": text}) + "\n")


@contextmanager
def served(folder: Path) -> Iterator[str]:
    """Serve instant replies in another process; gives the base URL."""
    script = folder / "script.json"
    script.write_text('[{"match": ".", "reply": "yes"}]')
    with process_with_url([sys.executable, "-m", "ramify.testing", "serve", str(script)]) as url:
        yield url


@contextmanager
def process_with_url(command: list[str]) -> Iterator[str]:
    """Run a server in another process, which prints its URL first."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()
        process.stdout.close()


def num_served(url: str) -> int:
    """Requests that the server has answered."""
    with urllib.request.urlopen(f"{url.removesuffix('/v1')}/served") as reply:
        return int(json.load(reply)["answered"])


if __name__ == "__main__":
    sys.exit(main())
