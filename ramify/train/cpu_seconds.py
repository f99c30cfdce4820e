"""Records the CPU time of each step's rollouts in the run's folder, in ``processors.jsonl``.

    {"step": 12, "cores": 2, "loop_s": 1.31, "sessions_s": 2.74,
     "engine": [{"sequences": 32, "reads": false, …}]}

For runs whose engine is in the trainer's process, where all parts share the same cores. The time of
a step then depends on how much CPU each part needs; ``cluster/`` predicts it from this file. Not
here: learning (``metrics.jsonl``), and work between rollouts, such as evaluations and checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import msgspec

from ramify.inference.local.step_timing import StepTiming
from ramify.train.run_lines import RunLines

FILE = "processors.jsonl"


class CpuSeconds(msgspec.Struct, frozen=True, kw_only=True):
    """CPU seconds of the rollouts of one step."""

    step: int = 0
    """Same as in ``metrics.jsonl``."""
    cores: int
    """Cores that this process may use."""
    loop_s: float
    """CPU time of the event loop's thread: requests, replies, session frames."""
    sessions_s: float
    """CPU time of all child processes, where sessions run."""
    engine: list[StepTiming]


CPU_SECONDS = RunLines(FILE, CpuSeconds)


class CpuMeter:
    """Measures CPU time between calls of ``restart`` and ``spent``. Call it in the event loop's
    thread."""

    def __init__(self, paces: Callable[[], list[StepTiming]]) -> None:
        """``paces`` returns the cost of the engine's steps since its last call."""
        self._paces = paces
        self._loop_s = 0.0
        self._sessions_s = 0.0

    def restart(self) -> None:
        """Start measuring now."""
        self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), below_s()

    def spent(self) -> CpuSeconds:
        """CPU time since the last call; starts measuring again."""
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
    """Number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def below_s() -> float:
    """CPU seconds of all descendant processes, including children that have ended and were waited
    for; 0 if the system does not report it."""
    ticks, children = {}, defaultdict(list)
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            fields = path.read_text().rpartition(")")[2].split()
            number = int(path.parent.name)
            ticks[number] = sum(map(int, fields[11:15]))
            children[int(fields[1])].append(number)
    total, remaining = 0, [os.getpid()]
    while remaining:
        for number in children[remaining.pop()]:
            total += ticks[number]
            remaining.append(number)
    return total / os.sysconf("SC_CLK_TCK") if total else 0.0
