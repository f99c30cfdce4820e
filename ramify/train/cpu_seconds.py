"""CPU time of each step's rollouts, as metrics of the step.

    cpu/loop_s, cpu/sessions_s, cpu/engine_s   seconds of CPU; cpu/cores: cores that they share
    batch16.decode/steps                       steps of the engine with 9 to 16 sequences
    batch16.prefill/cpu_s, …/tokens, …/read    the same for steps that also read prompt tokens

For runs whose engine is in the trainer's process, where all parts share the same cores. CPU time is
the same on a busy machine. Not here: learning, and work between rollouts, such as evaluations and
checkpoints.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

from ramify.inference.local.step import StepTiming


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

    def spent(self) -> dict[str, float]:
        """Metrics of the time since the last call; starts measuring again."""
        loop_s, sessions_s = self._loop_s, self._sessions_s
        engine = self._paces()
        self._loop_s, self._sessions_s = time.thread_time(), below_s()
        return {
            "cpu/cores": float(num_cores()),
            "cpu/loop_s": self._loop_s - loop_s,
            "cpu/sessions_s": max(0.0, self._sessions_s - sessions_s),
            "cpu/engine_s": sum(each.cpu_s for each in engine),
            **{name: value for each in engine for name, value in batch_metrics(each)},
        }


def batch_metrics(timing: StepTiming) -> Iterator[tuple[str, float]]:
    """The metrics of one kind of engine step."""
    prefix = f"batch{timing.sequences}.{'prefill' if timing.reads else 'decode'}"
    yield f"{prefix}/steps", float(timing.steps)
    yield f"{prefix}/tokens", float(timing.tokens)
    yield f"{prefix}/cpu_s", timing.cpu_s
    if timing.reads:
        yield f"{prefix}/read", float(timing.read)


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
