"""Maps on Ray: two nodes on this machine, one of them killed in the middle, and the overhead of Ray
Data against the local form.

    python benchmarks/map_ray.py [--quick] [--only lost|overhead] --json

Nodes are raylets of ``ray.cluster_utils``; the model is a scripted HTTP server on loopback. Ray's
own start takes seconds to minutes on a busy machine, so the overhead is the ratio of the times from
the first request to the last, with instant replies; the start is a separate figure.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from ramify import testing
from ramify.actors.ray_cluster import patch_ray_loopback
from ramify.maps.ray_row_partition import PART_ROWS

NUM_LOST, KILL_AT = 3000, 900
IN_FLIGHT = 16
_STORE_BYTES = 80 << 20
T = TypeVar("T")


def write_rows(path: Path, num: int) -> Path:
    path.write_text(
        "".join(json.dumps({"id": n, "text": f"the word is w{n}"}) + "\n" for n in range(num))
    )
    return path


def word_of(messages: Any) -> str:
    return str(messages[-1].content.split("word is ")[-1].split()[0].strip("\"'.,}"))


def command(rows: Path, out: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "ramify", "map", "Which word?", str(rows), "--out", str(out)]
    words += ["--column", "text", "--model", "openai:m", "--quiet"]
    return [*words, "--max-concurrency", str(IN_FLIGHT), *options]


def answers_of(out: Path) -> list[dict[str, Any]]:
    """Return the rows of the parts, in their order."""
    paths = sorted(out.glob("part-*")) if out.is_dir() else [out]
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def environment(home: Path, url: str, address: str = "") -> dict[str, str]:
    more = {"RAY_ADDRESS": address} if address else {}
    return {
        **os.environ,
        **more,
        "RAMIFY_HOME": str(home),
        "OPENAI_API_KEY": "sk-0123456789",
        "OPENAI_BASE_URL": url,
        "OMP_NUM_THREADS": "1",
    }


def started(start: Callable[[], T]) -> T:
    """Start a node, again if Ray gives up: it waits for 30 s, which a busy machine may need."""
    for _ in range(5):
        try:
            return start()
        except Exception as error:
            if "timed out during startup" not in str(error):
                raise
    return start()


async def lost_node(folder: Path, *, max_calls: int = 10**6) -> dict[str, Any]:
    """Map on two nodes and kill one of them. Returns what was seen."""
    asked: Counter[str] = Counter()
    kill = asyncio.Event()

    def reply(messages: Any) -> str:
        word = word_of(messages)
        asked[word] += 1
        if asked.total() >= KILL_AT:
            kill.set()
        return word

    rows, out = write_rows(folder / "rows.jsonl", NUM_LOST), folder / "out"
    async with testing.ScriptedServer(reply, keep=False, latency_s=0.05) as server:
        # The nodes, and so the workers, have the environment of this process.
        os.environ.update(environment(folder / "home", server.url))
        patch_ray_loopback()
        from ray.cluster_utils import Cluster

        node = {
            "num_cpus": 1,
            "object_store_memory": _STORE_BYTES,
            "include_dashboard": False,
            "node_ip_address": "127.0.0.1",
        }
        # In the main thread, since Ray installs handlers of signals.
        cluster = started(lambda: Cluster(initialize_head=True, head_node_args=node))
        try:
            second = started(lambda: cluster.add_node(**node))
            process = await asyncio.create_subprocess_exec(
                *command(rows, out, "--placement", "ray", "--workers", "2", "--json"),
                "--max-calls",
                str(max_calls),
                env=environment(folder / "home", server.url, cluster.address),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
            )
            waits = asyncio.create_task(kill.wait())
            done = asyncio.create_task(process.communicate())
            await asyncio.wait([waits, done], return_when=asyncio.FIRST_COMPLETED)
            was_running = not done.done()
            cluster.remove_node(second, allow_graceful=False)
            stdout, stderr = await done
            waits.cancel()
        finally:
            cluster.shutdown()
    printed = stdout.decode().strip().splitlines()
    return {
        "code": process.returncode,
        "was_running": was_running,
        "ids": [row["id"] for row in answers_of(out)] if out.is_dir() else [],
        "is_right": all(row["answer"] == f"w{row['id']}" for row in answers_of(out)),
        "result": json.loads(printed[-1]) if printed else {},
        "stderr": stderr.decode()[-2000:],
        "asked": asked.total(),
        "asked_twice": sum(num > 1 for num in asked.values()),
    }


async def overhead(folder: Path, num: int) -> dict[str, tuple[float, float]]:
    """Return form -> (seconds of a row, between the first request that the server sees and the
    last; seconds from the command to the first request)."""
    times: list[float] = []

    def reply(messages: Any) -> str:
        times.append(time.monotonic())
        return word_of(messages)

    found = {}
    rows = write_rows(folder / "rows.jsonl", num)
    async with testing.ScriptedServer(reply, keep=False) as server:
        for name, options in (
            ("local", ()),
            ("1 worker", ("--placement", "ray", "--workers", "1")),
            ("2 workers", ("--placement", "ray", "--workers", "2")),
        ):
            times.clear()
            out = folder / (name.replace(" ", "-") + ("" if options else ".jsonl"))
            began_s = time.monotonic()
            process = await asyncio.create_subprocess_exec(
                *command(rows, out, *options), env=environment(folder / "home", server.url)
            )
            assert await process.wait() == 0
            assert len(times) == num
            found[name] = (times[-1] - times[0]) / (num - 1), times[0] - began_s
    return found


def figure(name: str, value: float, unit: str, against: str, floor: float, holds: bool) -> Any:
    return {
        "name": name, "value": value, "unit": unit, "against": against, "floor": floor,
        "holds": holds,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("lost", "overhead"))
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory(prefix="map") as name:
        folder = Path(name)
        if given.only != "overhead":
            seen = asyncio.run(lost_node(folder))
            print({key: value for key, value in seen.items() if key != "ids"}, file=sys.stderr)
            once = seen["ids"] == list(range(NUM_LOST)) and seen["is_right"]
            again = seen["asked"] - NUM_LOST
            # The killed node's worker had one part in progress, and one that was not written.
            most = 2 * PART_ROWS + IN_FLIGHT
            figures += [
                figure("node killed in the middle", seen["was_running"], "", "", 1,
                       seen["was_running"]),
                figure("each row exactly once", once, "", "", 1, once),
                figure("calls again", again, "calls", "two parts and those in flight", most,
                       again <= most),
            ]  # fmt: skip
        if given.only != "lost":
            found = asyncio.run(overhead(folder, 5000 if given.quick else 20_000))
            print(found, file=sys.stderr)
            for form in ("1 worker", "2 workers"):
                ratio = found[form][0] / found["local"][0]
                start_s = found[form][1] - found["local"][1]
                figures += [
                    figure(f"seconds per row, Ray Data with {form}", round(ratio, 2), "times",
                           "the local form", 0, True),
                    figure(f"start of Ray Data with {form}", round(start_s, 1), "s",
                           "the local form's", 0, True),
                ]  # fmt: skip
    print(json.dumps({"figures": figures}))


if __name__ == "__main__":
    main()
