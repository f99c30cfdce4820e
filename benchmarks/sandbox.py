"""Benchmarks of the jail against an earlier version, a minimal confined loop, code in this process,
a bare Python, bubblewrap, and an IPython kernel.

    python benchmarks/sandbox.py            print a table; medians of interleaved rounds
    python benchmarks/sandbox.py --quick    fewer rounds and a short soak, within two minutes on two
                                            cores
    python benchmarks/sandbox.py --json     also print the figures as JSON on the last line; see
                                            engine.py

The figures of ``versions`` take turns in one run, and the least of each counts: this version, the
one before the review of the jail (commit BEFORE, in a separate worktree; ``--before FOLDER`` names
an existing one), and the loop of ``sandbox_minimal.py``. The minimum of each counts.

Absolute times depend on the machine and its load, so quote ratios. Promised rates are shown as time
per unit: 10,000 cells/s are 100 µs each. The exit code is 1 if a figure misses its limit.
`--provider process` measures sessions without isolation.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import peers
from engine import present, ratio
from figures import Figure, show
from sandbox_minimal import MinimalServer, MinimalSession
from sandbox_peers import (
    bare_loop,
    bare_subprocess,
    bubblewrap,
    in_process,
    ipykernel,
)

from ramify.sandbox.base import (
    Sandbox,
    SandboxSpec,
    Session,
    SharedContextValue,
    open_sandbox,
    provider_spec,
)

MB = 1_000_000
Figures = AsyncIterator[Figure]


class Bench(NamedTuple):
    """Inputs shared by all figures."""

    spec: SandboxSpec
    quick: bool
    soak: int
    """Number of lifecycles in the soak test."""
    before: str | None = None
    """Checkout of the earlier version; None: make one."""

    def times(self, full: int) -> int:
        return max(full // 5, 3) if self.quick else full

    @asynccontextmanager
    async def sandbox(self, **changes: Any) -> AsyncIterator[Sandbox]:
        """Yield a sandbox that has already opened its first session."""
        fields = {name: getattr(self.spec, name) for name in self.spec.__struct_fields__}
        made = open_sandbox(provider_spec({**fields, **changes}))
        try:
            await (await made.open()).close()
            yield made
        finally:
            await made.close()


async def answer(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else None


async def run(session: Session, code: str = "x = 1") -> str | None:
    cell = (await session.run(code, answer=answer)).cell
    if cell.error:
        raise RuntimeError(cell.error)
    return cell.value


HOST = "__all__ = ['host']\ndef host(*args):\n    return call_host('host', *args)\n"


async def timed(work: Callable[[], Awaitable[Any]]) -> float:
    began = time.perf_counter()
    await work()
    return time.perf_counter() - began


def middle(values: Sequence[float | None], scale: float) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) * scale if known else None


def least(values: Sequence[float | None]) -> float | None:
    return min((value for value in values if value is not None), default=None)


# --- from start to the first cell -----------------------------------------------------------------


async def first_cell(b: Bench) -> Figures:
    found: dict[str, list[float | None]] = {
        name: [] for name in ("jail", "exec here", "subprocess", "bubblewrap")
    }
    sessions: list[Session] = []
    async with b.sandbox(pool=0) as sandbox:

        async def create() -> None:
            sessions.append(await sandbox.open())
            await run(sessions[-1])

        for _ in range(b.times(100)):
            found["jail"].append(await timed(create))
            await sessions.pop().close()
            found["exec here"].append(in_process())
            found["subprocess"].append(await asyncio.to_thread(bare_subprocess))
            found["bubblewrap"].append(await asyncio.to_thread(bubblewrap))
    kernel = await asyncio.to_thread(ipykernel, 2 if b.quick else 5, 20)
    ms = {name: middle(values, 1e3) for name, values in found.items()}
    ms["ipykernel"] = middle(kernel.first_s, 1e3) if kernel else None
    ours, bwrap = ms.pop("jail"), ms["bubblewrap"]
    yield Figure("a session and its first cell, no pool", ours, "ms", present(**ms))
    yield Figure(
        "the same, to bubblewrap + Python", ratio(ours, bwrap), "×", {}, 1 / 6 if bwrap else None
    )
    yield Figure("the same from the pool", await from_pool(b), "ms", {}, 1.0)
    async with b.sandbox() as sandbox:
        session = await sandbox.open()
        laps, bare = [], []
        with bare_loop() as ask:
            for _ in range(b.times(5000)):
                laps.append(await timed(lambda: run(session)))
                bare.append(in_bare_loop(ask))
    against = {"bare loop": median(bare) * 1e6} | present(
        ipykernel=middle(kernel.cell_s, 1e6) if kernel else None
    )
    yield Figure("`x = 1`, there and back", middle(laps, 1e6), "µs", against, 60)


def in_bare_loop(ask: Callable[[bytes], bytes]) -> float:
    began = time.perf_counter()
    ask(b"x = b'1'")
    return time.perf_counter() - began


async def from_pool(b: Bench) -> float | None:
    laps = []
    async with b.sandbox(pool=4) as sandbox:
        for _ in range(b.times(100)):
            await asyncio.sleep(0.03)  # until the pool is full again
            began = time.perf_counter()
            session = await sandbox.open()
            await run(session)
            laps.append(time.perf_counter() - began)
            await session.close()
    return middle(laps, 1e3)


# --- many sessions --------------------------------------------------------------------------------


async def many_sessions(b: Bench) -> Figures:
    count, cells = 64, b.times(500)

    async def work(session: Session) -> None:
        for _ in range(cells):
            await run(session)

    async with b.sandbox() as sandbox:
        sessions = [await sandbox.open() for _ in range(count)]
        laps = [
            await timed(lambda: asyncio.gather(*map(work, sessions)))
            for _ in range(2 if b.quick else 3)
        ]
    each = min(laps) / (count * cells)
    yield Figure(
        f"a cell, 64 sessions on one loop ({1 / each:,.0f} cells/s)", each * 1e6, "µs", {}, 100
    )


async def lifecycle(sandbox: Sandbox) -> None:
    session = await sandbox.open()
    for code in ("x = 1", "x += 1", "print(x)"):
        await run(session, code)
    await session.close()


async def lifecycles(sandbox: Sandbox, count: int, at_once: int = 4) -> None:
    async def work(share: int) -> None:
        for _ in range(share):
            await lifecycle(sandbox)

    await asyncio.gather(*(work(count // at_once) for _ in range(at_once)))


async def throughput(b: Bench) -> Figures:
    count = b.times(2000)
    async with b.sandbox() as sandbox:
        seconds = await timed(lambda: lifecycles(sandbox, count)) / count
    yield Figure(
        f"a lifecycle: open, 3 cells, close ({1 / seconds:,.0f}/s)", seconds * 1e3, "ms", {}, 5
    )


async def soak(b: Bench) -> Figures:
    async with b.sandbox() as sandbox:
        await lifecycles(sandbox, 100)
        before = await settled_resources()
        seconds = await timed(lambda: lifecycles(sandbox, b.soak))
        after = await settled_resources()
    print(
        f"soak: {b.soak:,} lifecycles in {seconds:.0f} s; before {before}, after {after}",
        file=sys.stderr,
    )
    for name in before:
        value = float(max(after[name] - before[name], 0))
        yield Figure(
            f"{b.soak:,} lifecycles: {name} left",
            value,
            "",
            {},
            10.0 if name == "MB of the host" else 0,
        )


async def settled_resources() -> dict[str, int]:
    """Return the resource counts of this process once the pool is full and dead processes are
    reaped."""
    await asyncio.sleep(1)
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    mounts = {pid: _mounts(pid) for pid in _below(os.getpid())}
    return {
        "processes": len(mounts),
        "descriptors": len(links),
        "memory files": sum("memfd:" in link for link in links),
        "mounts": _mounts("self") + max(mounts.values(), default=0),
        "MB of the host": _resident_mb(),
    }


def _resident_mb() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") // MB


def _below(root: int) -> list[int]:
    tree: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                tree[int(entry.name)] = int(
                    (entry / "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
    found = {root}
    while more := {pid for pid, parent in tree.items() if parent in found} - found:
        found |= more
    return sorted(found - {root})


def _mounts(pid: int | str) -> int:
    try:
        return len(Path(f"/proc/{pid}/mountinfo").read_text().splitlines())
    except OSError:
        return 0


# --- forks and what is shared ---------------------------------------------------------------------


async def forks(b: Bench) -> Figures:
    ms: dict[int, float | None] = {}
    async with b.sandbox(pool=0, memory_bytes=4 << 30) as sandbox:
        if not sandbox.caps.fork:
            return
        for size in (0, 100 * MB, 500 * MB):
            session = await sandbox.open()
            await run(session, f"text = 'a' * {size}")
            laps = []
            for _ in range(b.times(50)):
                began = time.perf_counter()
                branch = await session.fork()
                laps.append(time.perf_counter() - began)
                await branch.close()
            ms[size] = middle(laps, 1e3)
            await session.close()
    yield Figure("fork of a live session, empty", ms[0], "ms", {})
    yield Figure("fork of a live session with a 100 MB string", ms[100 * MB], "ms", {}, 3)
    yield Figure("the same with 500 MB, to 100 MB", ratio(ms[500 * MB], ms[100 * MB]), "×", {}, 1.5)


async def children_share(b: Bench) -> Figures:
    context = SharedContextValue("some text of some length " * (100 * MB // 25))
    async with b.sandbox(pool=0) as sandbox:
        sessions = [await sandbox.open(context=context) for _ in range(20)]
        for session in sessions:
            await run(session, "context.count('text')")
        private = [_private_mb(session) for session in sessions]
    known = [value for value in private if value is not None]
    if not known:
        print("the memory of sessions cannot be read by this user: run it as root", file=sys.stderr)
    yield Figure(
        "20 children over a 100 MB context: memory of each", max(known, default=None), "MB", {}, 2
    )  # type: ignore[type-var]


def _private_mb(session: Session) -> float | None:
    """Return the memory of a session's process in pages that no other process shares."""
    try:
        info = Path(f"/proc/self/fdinfo/{session.pidfd}")  # type: ignore[attr-defined]
        fields = info.read_text().splitlines()
        pid = next(int(line.split()[1]) for line in fields if line.startswith("Pid:"))
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return (
            sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) * 1024 / MB
        )
    except (OSError, AttributeError, StopIteration):
        return None


# --- calls ----------------------------------------------------------------------------------------


CALLS = """
import time
laps, data = [], {data}
for _ in range({times}):
    began = time.perf_counter()
    _r = host(data)
    laps.append(time.perf_counter() - began)
sorted(laps)[len(laps) // 2]
"""


async def call_s(session: Session, data: str, times: int) -> float:
    """Return the median seconds of a host call, measured in the session."""
    return float(await run(session, CALLS.format(data=data, times=times)) or 0)


GROUPS = 16
"""Number of groups of laps, of which the fastest counts: for up to 70 ms at a time, the kernel lets
both ends of a connection share a core, which doubles their time."""
CALL_TO_BARE_LOOP = 70 / 109
"""Promised time of a call, in round trips of the bare loop: these depend on the machine."""


async def callbacks(b: Bench) -> Figures:
    async with b.sandbox() as sandbox:
        session = await sandbox.open()
        await session.install("host_names", HOST)
        with bare_loop() as ask:
            bare = 1e6 * min(
                median(in_bare_loop(ask) for _ in range(b.times(5000) // 4)) for _ in range(GROUPS)
            )
        small = min([await call_s(session, "'small'", b.times(2000) // 4) for _ in range(GROUPS)])
        large = await call_s(session, "'a' * 1_000_000", b.times(100))
    against = {"bare loop": bare}
    floor = CALL_TO_BARE_LOOP * bare
    yield Figure("a call to the host and back", small * 1e6, "µs", against, floor)
    yield Figure("the same with 1 MB each way", large * 1e3, "ms", {}, 1)


# --- interleaved versions -------------------------------------------------------------------------

BEFORE = "9829596"
"""The last commit before the review of the jail."""
ROOT = Path(__file__).resolve().parents[1]
MEASUREMENTS = {
    "first": 15,
    "close": 15,
    "pool": 15,
    "cell": 15,
    "sessions": 15,
    "fork": 15,
    "forks_in_a_row": 5,
    "forks_at_once": 5,
    "memory": 2,
}
"""Measurement of ``sandbox_side.py`` -> rounds."""


class Version:
    """One version of the product, in a separate process."""

    def __init__(self, tree: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sandbox_side.py"))],
            env={**os.environ, "PYTHONPATH": tree},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._read()

    def measure(self, name: str) -> float | None:
        assert self._process.stdin is not None
        self._process.stdin.write(name + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("a version of the product ended in the middle of a measurement")
        return json.loads(line)

    def close(self) -> None:
        self._process.communicate()


@contextlib.contextmanager
def earlier_tree(given: str | None) -> Iterator[str | None]:
    """Yield a checkout of the earlier version, or None, and print why, if there is none."""
    if given is not None:
        yield given
        return
    with tempfile.TemporaryDirectory(prefix="before-") as folder:
        tree = str(Path(folder, "tree"))
        git = ["git", "-C", str(ROOT), "worktree"]
        made = subprocess.run(
            [*git, "add", "-q", "--detach", tree, BEFORE],
            capture_output=True,
            text=True,
            check=False,
        )
        if made.returncode:
            print(f"commit {BEFORE} cannot be compared: {made.stderr.strip()}", file=sys.stderr)
            yield None
            return
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", tree], check=False)


def minimal(server: MinimalServer, session: MinimalSession, name: str) -> float | None:
    """Return the same measurement for the minimal loop, if it has one."""
    if name in ("first", "close"):
        began = time.perf_counter()
        made = server.open()
        made.run("x = 1")
        ended = time.perf_counter()
        made.close()
        return ended - began if name == "first" else time.perf_counter() - ended
    if name == "cell":
        groups = []
        for _ in range(GROUPS):
            laps = []
            for _ in range(200):
                began = time.perf_counter()
                session.run("x = 1")
                laps.append(time.perf_counter() - began)
            groups.append(median(laps))
        return min(groups)
    return None


def minima_by_side(b: Bench, tree: str | None) -> dict[str, dict[str, float | None]]:
    """Return the minimum of each measurement, by side: other load only adds time."""
    sides: dict[str, Callable[[str], float | None]] = {}
    with contextlib.ExitStack() as stack:
        for side, place in {"this": str(ROOT), "before": tree}.items():
            if place is not None:
                sides[side] = (version := Version(place)).measure
                stack.callback(version.close)
        server = MinimalServer()
        stack.callback(server.close)
        session = server.open()
        stack.callback(session.close)
        sides["minimal"] = lambda name: minimal(server, session, name)
        sides["bubblewrap"] = lambda name: bubblewrap() if name == "first" else None
        found: dict[str, dict[str, float | None]] = {}
        for name, rounds in MEASUREMENTS.items():
            laps: dict[str, list[float | None]] = {side: [] for side in sides}
            for number in range(max(rounds // 3, 2) if b.quick else rounds):
                for side in sorted(sides, reverse=bool(number % 2)):
                    laps[side].append(sides[side](name))
            found[name] = {side: least(values) for side, values in laps.items()}
        return found


async def versions(b: Bench) -> Figures:
    with earlier_tree(b.before) as tree:
        found = await asyncio.to_thread(minima_by_side, b, tree)

    def times(name: str, other: str, floor: float, *, base: str = "") -> Figure:
        values = found[name]
        value = ratio(values.get("this"), found[base or name].get(other))
        shown = {side: each * 1e3 for side, each in values.items() if each is not None}
        known = present(**{f"{side} (ms)": each for side, each in shown.items()})
        if value is None:
            print(f"{name}, to {other}: not measured, {other} is not here", file=sys.stderr)
        return Figure(f"{name}, to {base or other}", value, "×", known, floor if value else None)

    yield times("cell", "minimal", 1.3)
    yield times("first", "minimal", 1.1)
    yield times("first", "bubblewrap", 0.2)
    yield times("pool", "before", 0.75)
    yield times("close", "before", 0.1)
    yield times("fork", "before", 1.0)
    yield times("forks_at_once", "this", 1.0, base="forks_in_a_row")
    yield times("sessions", "before", 1 / 1.3)
    memory = found["memory"]
    if memory["this"] is None:
        print("the memory of sessions cannot be read by this user: run it as root", file=sys.stderr)
    against = present(before=memory.get("before"))
    yield Figure("memory of a child over a 100 MB context", memory["this"], "MB", against, 2)


FIGURES: dict[str, Callable[[Bench], Figures]] = {
    figure.__name__: figure
    for figure in (
        versions,
        first_cell,
        many_sessions,
        throughput,
        forks,
        children_share,
        callbacks,
        soak,
    )
}


REASONS = {
    "a call to the host and back": "host and guest stay awake for each other only while a second core "
    "is free; otherwise each is woken up",
    "first, to minimal": "the host wakes up for the process, for its listener, for its hello and for "
    "the cell, and the guest copies 90 pages in its first cell",
    "first, to bubblewrap": "the minimal loop, which builds the same walls and nothing else, already "
    "needs about 0.2",
    "pool, to before": "the host's CPU time is about .7 of before; a first cell copies 25 pages where "
    "it copied 47, and waits for the same two wake-ups",
    "close, to before": "the rest are system calls: the kill, and closing a socket, two memory "
    "files and the listener",
    "fork, to before": "the page tables of 100 MB are most of it; both processes get a new socket and "
    "new files (60 µs), and the host checks threads, session, descriptors and seals (45 µs) and "
    "waits for each process to take its socket",
    "forks_at_once, to forks_in_a_row": "forks of one session run one after the other",
    "memory of a child over a 100 MB context": "600 pages: 250 for the walls, 85 for the fork, 90 "
    "for the first cell; Python writes to the reference count of each object that it uses",
}
"""Figure that misses its limit -> the reason; see ``docs/log-archive.md``, 2026-11-23."""
UNKNOWN = "no reason is known: run it again on a quiet machine"


async def measure(bench: Bench, names: Sequence[str]) -> list[Figure]:
    figures = []
    for name in names:
        async for figure in FIGURES[name](bench):
            print(f"{figure.name}: {figure.value} {figure.unit}", file=sys.stderr)
            figures.append(figure)
    return figures


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of the jail beside those of others.")
    parser.add_argument(
        "--quick", action="store_true", help="fewer rounds; within two minutes on two cores"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--soak", type=int, metavar="N", help="lifecycles of the soak (100,000; quick: 1,000)"
    )
    parser.add_argument("--provider", default="jail", help="provider of the sessions (jail)")
    parser.add_argument("--before", metavar="FOLDER", help=f"a checkout of {BEFORE}")
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=FIGURES, help=f"of: {', '.join(FIGURES)}"
    )
    peers.add_option(parser)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    bench = Bench(
        SandboxSpec(provider=options.provider),
        options.quick,
        options.soak or (1000 if options.quick else 100_000),
        options.before,
    )
    without = options.without_peers
    figures = list(peers.check(without, peers.BESIDE, "ipykernel", "jupyter_client"))
    figures += peers.check_command(without, "bubblewrap", "bwrap")
    figures += asyncio.run(measure(bench, options.only or list(FIGURES)))
    show(figures)
    for figure in figures:
        if figure.holds is False:
            print(f"{figure.name}: {REASONS.get(figure.name, UNKNOWN)}")
    if options.json:
        reasons = {
            each.name: REASONS.get(each.name, UNKNOWN) for each in figures if each.holds is False
        }
        figures_json = [each.as_json() | {"reason": reasons.get(each.name)} for each in figures]
        print(json.dumps({"figures": figures_json}))
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
