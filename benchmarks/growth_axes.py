"""The axes along which ``growth.py`` makes work larger, each with the work of one size.

    a run       turns  children  sub_calls  depth  context  output
    a journal   resume  show  view  listing

``python benchmarks/growth_axes.py AXIS SIZE FOLDER`` does the work of one size and prints what it
cost as JSON; ``… journals SIZE FOLDER`` writes what the second kind reads. Models are scripted in
the same process, so no server and no network is measured. Each work checks its result. Not here:
sizes, and how cost grows with them.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import ramify
from ramify.testing import ScriptedClient
from ramify.types.message import Message, Reply, Usage

ENDED, KILLED = "20260301-000000-ended", "20260301-000001-killed"
EVENTS_OF_CALL = 4
_LOG = "2026-03-01 12:00:00 host-1 an entry of a log that says one thing or another\n"
_SCAFFOLD = ramify.Scaffold(name="growth", system="Use FINAL. {{tools}}{{limits}}", direct_chars=0)


class Cost(NamedTuple):
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """CPU time of this process and all that it started."""
    mb: float = 0.0
    """By how much this process grew at most, and the size of the largest one that it started."""


class ForgetfulClient(ScriptedClient):
    """Does not keep requests, which a real client does not do either."""

    async def complete(self, request: Any) -> Any:
        self.requests.clear()
        return await super().complete(request)


def cell(code: str) -> Reply:
    """Return a reply with code. It states its usage: the scripted model would otherwise count the
    tokens of the whole conversation in each turn, which took most of the time of 1,000 turns."""
    return Reply(
        Message("assistant", f"```repl\n{code}\n```"),
        Usage(input_tokens=9, output_tokens=9, calls=1),
    )


def engine(script: Any, folder: Path, **limits: Any) -> ramify.RLM:
    return ramify.RLM(
        ForgetfulClient(script, window=10**9),
        store=ramify.Store(folder),
        scaffold=_SCAFFOLD,
        limits=ramify.Limits(max_tokens=10**12, max_calls=10**7, max_turns=10**6, **limits),
    )


# --- a run


def turns(size: int) -> Any:
    """A root with ``size`` turns, each with a cell that prints a line."""
    return lambda messages: cell(f"FINAL({size})" if len(messages) > 2 * size - 1 else "print(1)")


def children(size: int) -> Any:
    """A cell that makes ``size`` children, each with a separate session."""
    code = f"FINAL(sum(rlm_query_batched(['the part'] * {size})))"
    return lambda messages: cell("FINAL(1)" if "the part" in str(messages[-1]) else code)


def sub_calls(size: int) -> Any:
    """A cell that makes ``size`` plain calls."""
    code = f"""\
found = 0
for first in range(0, {size}, 10_000):
    found += len(llm_query_batched(['part'] * min(10_000, {size} - first)))
FINAL(found)"""
    return lambda messages: cell(code) if messages[0].role == "system" else "1"


def depth(size: int) -> Any:
    """A chain of ``size`` children, each made by the one before."""
    left = iter([cell("FINAL(1 + rlm_query('deeper'))")] * (size - 1))
    return lambda messages: next(left, cell("FINAL(1)"))


def context(size: int) -> Any:
    """A cell that reads the last line of a context of ``size`` characters."""
    return [cell("context[-9:].strip(); FINAL(len(context))")]


def output(size: int) -> Any:
    """A cell that prints ``size`` characters in lines."""
    return [cell(f"for line in range({size} // 64): print('x' * 63)"), cell(f"FINAL({size})")]


RUNS: dict[str, tuple[Callable[[int], Any], dict[str, int]]] = {
    "turns": (turns, {}),
    "children": (children, {}),
    "sub_calls": (sub_calls, {"max_concurrency": 1000}),
    "depth": (depth, {"max_depth": 1000}),
    "context": (context, {}),
    "output": (output, {}),
}
"""Axis -> script of a run of some size, and its limits."""


def run(axis: str, size: int, folder: Path) -> Cost:
    """The cost of a run, after one of size 1 in the same process."""
    script, limits = RUNS[axis]
    for each in (1, size):
        text = _LOG * (each // len(_LOG) + 1) if axis == "context" else "c"
        expected = len(text) if axis == "context" else each
        with measured() as costs, engine(script(each), folder, **limits) as rlm:
            answer = rlm.completion(text, "How many?").answer
        assert answer == expected, answer
    return costs[0]


# --- a journal


def journals(size: int, folder: Path) -> Cost:
    """Write a run of ``size`` events, and the same as a killed process leaves it."""
    num_calls = size // EVENTS_OF_CALL
    with engine(sub_calls(num_calls), folder, max_concurrency=1000) as rlm:
        assert rlm.completion("c", "How many?").answer == num_calls
    (journal,) = (folder / "runs").glob("*.jsonl")
    lines = journal.read_bytes().splitlines(keepends=True)
    for name, kept in ((ENDED, lines), (KILLED, lines[:-3])):
        with journal.with_name(f"{name}.jsonl").open("wb") as file:
            file.writelines(kept)
    journal.unlink()
    return Cost()


def resume(size: int, folder: Path) -> Cost:
    """The cost of resuming the killed run, in which every call has its reply."""
    journal = folder / "runs" / f"{KILLED}.jsonl"
    num_bytes = journal.stat().st_size
    with measured() as costs, engine([], folder, max_concurrency=1000) as rlm:
        assert rlm.resume(KILLED).answer == size // EVENTS_OF_CALL
    os.truncate(journal, num_bytes)  # killed again, for the next round
    return costs[0]


def show(size: int, folder: Path) -> Cost:
    with measured() as costs, _command(folder, "show", ENDED) as process:
        _, problem = process.communicate()
        assert process.returncode == 0, problem
    return costs[0]


def listing(size: int, folder: Path) -> Cost:
    """The cost of a list of which no summary is stored."""
    (folder / "index.sqlite").unlink(missing_ok=True)
    with measured() as costs, _command(folder, "runs", "list") as process:
        _, problem = process.communicate()
        assert process.returncode == 0, problem
    return costs[0]


def view(size: int, folder: Path) -> Cost:
    """The cost of the list, and of a run's page with the texts of all calls."""
    words = ("view", "--port", "0", "--open-to-this-machine")
    with measured() as costs, _command(folder, *words) as process:
        assert process.stderr is not None
        address = process.stderr.readline().split()[1].partition("#")[0] + "api/"
        with urllib.request.urlopen(f"{address}runs") as response:
            rows = json.load(response)["runs"]
        (key,) = (quote(row["key"], safe="") for row in rows if row["id"] == ENDED)
        for path in (
            f"run?texts=200&key={key}",
            f"texts?from=200&key={key}",
            f"call?id=0&key={key}",
        ):
            with urllib.request.urlopen(address + path) as response:
                while response.read(1 << 16):
                    pass
        process.terminate()
    return costs[0]


def _command(folder: Path, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "ramify", *words],
        env={**os.environ, "RAMIFY_HOME": str(folder)},
        text=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


# --- cost


@contextmanager
def measured() -> Iterator[list[Cost]]:
    """Put the cost of the block into the list. What it started ends within it."""
    costs: list[Cost] = []
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins at what is used now
    resident, wall_s, cpu_s = _memory_mb("VmRSS"), time.perf_counter(), _cpu_s()
    yield costs
    wall_s, cpu_s = time.perf_counter() - wall_s, _cpu_s() - cpu_s
    largest = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    costs.append(Cost(wall_s, cpu_s, _memory_mb("VmHWM") - resident + largest))


def _cpu_s() -> float:
    """CPU time of this process and of those that it started and that have ended."""
    return sum(
        usage.ru_utime + usage.ru_stime
        for usage in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def _memory_mb(name: str) -> float:
    (line,) = (
        line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )
    return int(line.split()[1]) / 1024


JOURNALS: dict[str, Callable[[int, Path], Cost]] = {
    "resume": resume,
    "show": show,
    "view": view,
    "listing": listing,
}


def main() -> None:
    axis, size, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    work = {"journals": journals, **JOURNALS}.get(axis)
    cost = work(size, folder) if work else run(axis, size, folder)
    print(json.dumps(cost._asdict()))


if __name__ == "__main__":
    main()
