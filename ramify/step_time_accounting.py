"""Measure how much time a training step spends in each of its parts.

Code reports which part of the step it is working on, and a ``StepTimeAccount`` totals the wall and
CPU time of each part.

    with StepTimeAccount(): …            the account of this process; ``train/trainer.py`` opens it
    with WallAndCpuTimer("packing"): …   one thread works on a part; awaits nothing meanwhile
    with WallTimer("weight_sync"): …     a part is in progress, wherever: wall time alone
    account.take()                       the parts since the last call, in seconds

                 engine      ▄▄▄▄▄▄▄▄▄▄▄▄▄        ▄▄▄▄▄▄▄▄
                 event loop  ▄▄      ▄▄      ▄  ▄▄    ▄▄    ▄▄
    wall time                rr sampling    cc ro sampling  pp forward and backward …

Each moment of wall time counts for one part: the first of ``PARTS`` that is in progress; otherwise
``rollouts``, as far as the event loop worked, and ``waiting`` for the rest. CPU time is that of the
thread inside a block, without blocks inside it. What else the event loop computed is ``rollouts``,
CPU time of child processes is ``sessions``, and that of PyTorch's helper threads is divided over
the parts of ``COMPUTING`` in proportion to theirs. So both kinds add up to the step.

The account is global to the process, as progress is. Without one, a block costs one comparison. The
names of the metrics are in ``train/metrics.py``. Of other processes, only sessions are counted.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Literal, NamedTuple, get_args

Part = Literal[
    "packing",
    "optimizer",
    "forward_backward",
    "weight_sync",
    "credit",
    "journal",
    "sampling",
    "rendering",
    "sessions",
]
PARTS: tuple[Part, ...] = get_args(Part)
"""Names of the parts of a training step. If several are in progress at once, wall time counts for
the first of them in this order."""
COMPUTING: tuple[Part, ...] = ("forward_backward", "optimizer", "sampling", "weight_sync")
ROLLOUTS, WAITING = "rollouts", "waiting"
_account: StepTimeAccount | None = None
_innermost = threading.local()


class StepPartTimes(NamedTuple):
    """Wall and CPU seconds spent in each part of a training step.

    The times cover the period since ``StepTimeAccount.take_times`` was last called.
    """

    wall_s: dict[str, float]
    """Part -> wall time in seconds. The values add up to the elapsed time."""
    cpu_s: dict[str, float]
    """Part -> CPU time in seconds. The values add up to the CPU time of this process and of
    sessions.
    """


class StepTimeAccount:
    """Totals the wall and CPU time of each part of a training step.

    Open it and call ``take_times`` in the thread of the event loop.
    """

    def __init__(self, children_s: Callable[[], float] | None = None) -> None:
        """Create an account of the time spent on each part of a training step.

        It starts to measure when it is opened. ``children_s`` returns the CPU seconds of all
        sessions so far. Pass None if there are other child processes, whose time it would include.
        """
        self._children_s = children_s or (lambda: 0.0)
        self._lock = threading.Lock()
        self._active = dict.fromkeys(PARTS, 0)
        self._loop = 0
        self._loop_clock: int | None = None
        self._outer: StepTimeAccount | None = None
        self._at = time.monotonic()
        """Time of the last update of the account, in seconds of ``time.monotonic``."""
        self._loop_seen_s = 0.0
        """CPU time of the event loop's thread, in seconds, when the account last changed."""
        self._children_began_s = 0.0
        self._reset()

    def __enter__(self) -> StepTimeAccount:
        global _account
        self._outer, _account = _account, self
        self._loop = threading.get_ident()
        if hasattr(time, "pthread_getcpuclockid"):  # not on macOS
            self._loop_clock = time.pthread_getcpuclockid(self._loop)
        self._charge()
        self._reset()
        self._children_began_s = self._children_s()
        return self

    def __exit__(self, *_: object) -> None:
        global _account
        _account = self._outer

    def begin_part(self, part: Part) -> None:
        """Start counting the elapsed time towards a part of the training step.

        The same part may begin several times at once, and each begin needs its own ``end_part``.
        """
        with self._lock:
            self._charge()
            self._active[part] += 1

    def end_part(self, part: Part) -> None:
        with self._lock:
            self._charge()
            # 0 if it began before the account was opened.
            self._active[part] = max(0, self._active[part] - 1)

    def add_cpu_time(self, part: Part, cpu_s: float) -> None:
        """Add ``cpu_s`` seconds of the calling thread's CPU time to a part."""
        with self._lock:
            self._cpu[part] += cpu_s
            if threading.get_ident() == self._loop:
                self._in_blocks_s += cpu_s

    def take_times(self) -> StepPartTimes:
        """Return the time of each part since the last call, and reset all times to 0.

        The first call counts from when the account was opened.
        """
        with self._lock:
            self._charge()
            loop_s = time.thread_time() - self._loop_began_s
            process_s = time.process_time() - self._process_began_s
            wall, cpu = self._wall, {**self._cpu, ROLLOUTS: max(0.0, loop_s - self._in_blocks_s)}
            self._reset()
        before_s, self._children_began_s = self._children_began_s, self._children_s()
        rest_s, own_s = process_s - sum(cpu.values()), sum(cpu[part] for part in COMPUTING)
        for part in COMPUTING if own_s else ():
            cpu[part] += rest_s * cpu[part] / own_s
        if not own_s:
            cpu[ROLLOUTS] += rest_s
        cpu["sessions"] += max(0.0, self._children_began_s - before_s)
        return StepPartTimes(wall, cpu)

    def _reset(self) -> None:
        self._wall = dict.fromkeys((*PARTS, ROLLOUTS, WAITING), 0.0)
        self._cpu: dict[str, float] = dict.fromkeys(PARTS, 0.0)
        self._in_blocks_s = 0.0
        """CPU time of the event loop's thread, in seconds, that is already charged to parts of the
        step."""
        self._loop_began_s = time.thread_time()
        self._process_began_s = time.process_time()

    def _charge(self) -> None:
        """Credit the wall time since the last update to the current part of the training step."""
        now = time.monotonic()
        passed_s, self._at = now - self._at, now
        busy_s = 0.0
        if self._loop_clock is not None:
            loop_s = time.clock_gettime(self._loop_clock)
            busy_s, self._loop_seen_s = loop_s - self._loop_seen_s, loop_s
        part = next((part for part in PARTS if self._active[part]), None)
        if part is not None:
            self._wall[part] += passed_s
        else:
            busy_s = min(busy_s, passed_s)
            self._wall[ROLLOUTS] += busy_s
            self._wall[WAITING] += passed_s - busy_s


class WallTimer:
    """A context manager that adds the wall time of its block to one part of a training step.

    Only wall time is counted.
    """

    __slots__ = ("_account", "_part")

    def __init__(self, part: Part) -> None:
        self._part = part
        self._account: StepTimeAccount | None = None

    def __enter__(self) -> None:
        self._account = _account
        if self._account is not None:
            self._account.begin_part(self._part)

    def __exit__(self, *_: object) -> None:
        if self._account is not None:
            self._account.end_part(self._part)


class WallAndCpuTimer:
    """A context manager that adds its block's wall and CPU time to one part of a training step.

    CPU time is that of the calling thread. The block must not await anything, but may contain
    blocks of other parts.
    """

    __slots__ = ("_account", "_began_s", "_inner_s", "_outer", "_part")

    def __init__(self, part: Part) -> None:
        self._part = part
        self._account: StepTimeAccount | None = None
        self._inner_s = 0.0

    def __enter__(self) -> None:
        self._account = _account
        if self._account is None:
            return
        self._account.begin_part(self._part)
        self._outer: WallAndCpuTimer | None = getattr(_innermost, "block", None)
        _innermost.block = self
        self._began_s = time.thread_time()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._account is None:
            return
        spent_s = time.thread_time() - self._began_s
        _innermost.block = self._outer
        if self._outer is not None:
            self._outer._inner_s += spent_s
        self._account.end_part(self._part)
        self._account.add_cpu_time(self._part, spent_s - self._inner_s)


def begin_part(part: Part) -> None:
    """Start timing a part of the training step whose code a ``with`` block cannot enclose.

    Each begin needs its own ``end_part``.
    """
    if _account is not None:
        _account.begin_part(part)


def end_part(part: Part) -> None:
    if _account is not None:
        _account.end_part(part)
