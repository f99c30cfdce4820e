"""Where the processors' time of each step's rollouts went, in one file of the run's folder:
``processors.jsonl``.

    {"step": 12, "cores": 2, "loop_s": 1.31, "sessions_s": 2.74, "engine": [{"sequences": 32, "reads": false, …}]}

For runs whose engine is in the trainer's process, where all of them share the same cores: how long
a step takes there depends on how much of the processors each wants, which ``cluster/`` reads off
this. Leaves out learning, which is in ``metrics.jsonl``, and what happens between rollouts:
evaluations, checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from ramify.inference.local.step_timing import StepTiming

FILE = "processors.jsonl"


class CpuSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """Processor seconds of the rollouts of one step."""

    step: int = 0
    """As in ``metrics.jsonl``."""
    cores: int
    """That this process may use."""
    loop_s: float
    """Of the thread with the event loop: requests, replies, sessions' frames."""
    sessions_s: float
    """Of all processes below this one, where sessions are."""
    engine: list[StepTiming]


class CpuMeter:
    """Measures from one ``restart`` or ``spent`` to the next. For the thread of the event loop."""

    def __init__(self, paces: Callable[[], list[StepTiming]]) -> None:
        """``paces``: what the engine's steps cost since they were asked for last."""
        self._paces = paces
        self._loop_s, self._sessions_s = 0.0, 0.0

    def restart(self) -> None:
        """What was before does not count."""
        self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), below_s()

    def spent(self) -> CpuSeconds:
        """Since then; it begins anew."""
        loop_s, sessions_s = self._loop_s, self._sessions_s
        engine = self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), below_s()
        return CpuSeconds(
            cores=num_cores(),
            loop_s=self._loop_s - loop_s,
            sessions_s=max(0.0, self._sessions_s - sessions_s),
            engine=engine,
        )


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def below_s() -> float:
    """Processor seconds of all processes below this one, those that have ended and were waited for
    among them; 0 where the system does not tell."""
    took, below = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            took[number] = sum(map(int, fields[11:15]))
            below[int(fields[1])].append(number)
    found, inside = 0, [os.getpid()]
    while inside:
        for number in below[inside.pop()]:
            found += took[number]
            inside.append(number)
    return found / os.sysconf("SC_CLK_TCK") if found else 0.0


# --- the file
# ------------------------------------------------------------------------------------------------------------


def write(folder: Path, spent: CpuSeconds) -> None:
    """Add a line, with one write."""
    line = msgspec.json.encode(spent) + b"\n"
    with (folder / FILE).open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # what was cut off by a kill must not swallow the next line
                line = b"\n" + line
        file.write(line)


def read(folder: Path) -> Iterator[CpuSeconds]:
    """The lines of a run's folder, in order; a torn one is skipped, and there may be none."""
    path = folder / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield msgspec.json.decode(line, type=CpuSeconds)


def cut(folder: Path, step: int) -> None:
    """Drop what was measured after ``step``; atomic."""
    path = folder / FILE
    if path.exists():
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(
            b"".join(
                msgspec.json.encode(each) + b"\n" for each in read(folder) if each.step <= step
            )
        )
        fresh.replace(path)
