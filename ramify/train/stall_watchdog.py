"""Put a time limit on everything that a training run waits for.

The run then ends either with its result or with an error that says what was stuck and where.

    await watch.bounded("learning", work)   its result; TrainError without progress for ``stall_s``
    watch.moved()                           report progress: a reply, a rollout, a batch, …
    watch.fail(error)                       raise this error in the current waits and all later ones
    watch.interrupt_waits("SIGTERM")        StoppedBySignal in those waits that may be cut off
    await torch.run(step, work, …)          the same for work in the thread that changes weights

A separate thread detects stalls, so that it also notices if the event loop itself is stuck. It
writes the stacks of all threads, tasks and other processes to OUT/stalled.txt and ends the wait.
If the event loop does not react, the thread raises the error in the loop's thread. Waits with
shorter time limits (a reply, a cell, a rollout, a judge, a step of a weight update, a rank) are
limited elsewhere.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from ramify.errors import TrainError

T = TypeVar("T")
FILE = "stalled.txt"
_WAITING = (f"{os.sep}asyncio{os.sep}", f"{os.sep}threading.py")
"""Parts of file paths of code that only waits for other code. Errors omit such stack frames."""
_GRACE_S = 10.0
"""Seconds that the event loop has to notice that a wait was ended and to cancel the work."""


class StallError(TrainError):
    """Raised if a training run makes no progress for too long.

    Python cannot stop stuck threads, so the process may have to be killed.
    """


class StoppedBySignal(TrainError):
    """Raised if a signal such as SIGTERM asked the training run to stop.

    The completed steps are saved.
    """

    def __init__(self, by: str) -> None:
        super().__init__(f"the run was ended by {by}")
        self.by = by
        """Name of the signal, such as ``SIGTERM``."""


class _Wait:
    """A wait that the watchdog monitors, such as the wait for a weight update.

    It has a description, the awaited task and the name of the thread that does the work.
    """

    def __init__(
        self, what: str, task: asyncio.Future[Any], thread: str, *, can_stop: bool
    ) -> None:
        self.what = what
        self.can_stop = can_stop
        self.task = task
        self.thread = thread
        self.loop = task.get_loop()
        self.loop_thread = threading.get_ident()
        self.since = time.monotonic()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        """A future that receives the error that ends the wait."""
        self.is_reported = False
        """True if the wait was reported as stalled."""


class StallWatchdog:
    """Watches all waits of one training run from a separate thread.

    A wait ends with an error if the run makes no progress.
    """

    def __init__(
        self,
        out: Path,
        stall_s: float,
        *,
        others: Callable[[], str] | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        """Create a watchdog that ends waits after ``stall_s`` seconds without progress.

        ``others`` returns the stacks of other processes as text. On a stall, ``on_stall`` is called
        in the watching thread before any wait is ended.
        """
        self._out = out
        self._stall_s = stall_s
        self._others = others
        self._on_stall = on_stall
        self._waits: set[_Wait] = set()
        self._moved = time.monotonic()
        self._failed: BaseException | None = None
        self._stopped_by = ""
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def report_progress(self) -> None:
        """Report to the watchdog that the run has made progress."""
        self._moved = time.monotonic()

    def fail_waits(self, error: BaseException) -> None:
        """End all current and later waits of the run by raising ``error`` in them.

        Call this in the event loop's thread.
        """
        self._failed = self._failed or error
        for wait in self._waits:
            _fail_wait(wait, self._failed)

    def interrupt_waits(self, by: str) -> None:
        """End all current and later waits that have ``can_stop`` set, by raising StoppedBySignal in
        them.

        ``by`` is the signal's name. Call this in the event loop's thread.
        """
        self._stopped_by = by
        for wait in self._waits:
            if wait.can_stop and not wait.task.done():
                _fail_wait(wait, StoppedBySignal(by))

    async def await_with_stall_limit(
        self, what: str, work: Awaitable[T], *, thread: str = "", can_stop: bool = False
    ) -> T:
        """Await ``work`` and return its result, or raise an error if the run stalls.

        Raises TrainError if the run makes no progress for ``stall_s`` seconds.

        ``what`` describes the work in error messages. ``thread`` is the prefix of the name of the
        thread that does the work, or empty if the event loop's thread does it. ``can_stop`` is True
        if a call of ``interrupt_waits`` may end the wait early. A wait that ends early cancels
        ``work``.
        """
        task = asyncio.ensure_future(work)
        wait = _Wait(what, task, thread, can_stop=can_stop)
        self._begin(wait)
        try:
            if self._failed is not None:
                raise self._failed
            if can_stop and self._stopped_by:
                raise StoppedBySignal(self._stopped_by)
            both: list[asyncio.Future[Any]] = [task, wait.ended]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            # A reported stall is raised even if the result arrived at the last moment.
            if wait.ended.done() and not (
                task.done() and isinstance(wait.ended.exception(), StoppedBySignal)
            ):
                wait.ended.result()
            return task.result()
        finally:
            self._waits.discard(wait)
            # Retrieve the error, or asyncio logs that it was never retrieved.
            if not wait.ended.cancel():
                wait.ended.exception()
            if not task.done():
                task.cancel()
                await asyncio.wait([task], timeout=_GRACE_S)

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(_GRACE_S)

    def _begin(self, wait: _Wait) -> None:
        self._waits.add(wait)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._watch_waits, name="ramify-watch", daemon=True
            )
            self._thread.start()

    # --- in the watching thread

    def _watch_waits(self) -> None:
        while not self._closing.wait(min(1.0, self._stall_s / 4)):
            now = time.monotonic()
            for wait in tuple(self._waits):
                if not wait.is_reported and now - max(wait.since, self._moved) > self._stall_s:
                    self._report_stall(wait)
                    break

    def _report_stall(self, wait: _Wait) -> None:
        moved, stack = self._moved, _stack_of(wait)
        place = self._write_report(wait)
        # Progress may have been made while the stacks were collected.
        if wait not in self._waits or self._moved != moved:
            place.unlink()
            return
        wait.is_reported = True
        error = StallError(
            f"{wait.what} is stuck: no progress for {self._stall_s:g} s. It is at "
            f"{_last_place(stack)}. "
            f"All stacks are in {place}; `ramify train --resume {self._out}` continues from the "
            "last checkpoint"
        )
        if self._on_stall is not None:
            self._on_stall(str(error))
        wait.loop.call_soon_threadsafe(_fail_wait, wait, error)
        until = time.monotonic() + min(_GRACE_S, self._stall_s)
        while wait in self._waits and time.monotonic() < until:
            time.sleep(0.02)
        if wait in self._waits:  # the event loop itself is stuck
            # Python has no public way to raise in another thread. C code is not interrupted.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(wait.loop_thread), ctypes.py_object(StallError)
            )
        self.report_progress()  # other waits may have been held up by this one

    def _write_report(self, wait: _Wait) -> Path:
        path = self._out / FILE
        parts = [
            f"{wait.what}: no progress for {self._stall_s:g} s\n",
            *_thread_stacks(),
            *_task_stacks(wait.loop),
        ]
        if self._others is not None:
            parts.append(self._others())
        path.write_text("\n".join(parts))
        return path


class SerialThread:
    """A daemon thread that runs submitted jobs one after another.

    It does not keep the process from exiting.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in this thread and return its result.

        Work that has begun is completed even if the caller is cancelled.
        """
        future: Future[T] = Future()
        with self._wake:
            if self._is_closed:
                raise RuntimeError(f"the thread {self.name} has ended")
            self._work.append((lambda: work(*arguments), future))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                self._thread.start()
            self._wake.notify()
        return await asyncio.wrap_future(future)

    def close(self, timeout_s: float | None = None) -> None:
        """Accept no more work, and wait until the current work is done.

        Queued work is cancelled.
        """
        with self._wake:
            self._is_closed = True
            self._wake.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while True:
            with self._wake:
                while not self._work and not self._is_closed:
                    self._wake.wait()
                if self._is_closed:
                    for _, future in self._work:
                        future.cancel()
                    return
                work, future = self._work.pop(0)
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 (raised where the result is awaited)
                future.set_exception(error)
            # Do not keep the result alive while waiting for more work.
            del work, future


class WatchedTrainingThread:
    """The thread in which all weight updates run, watched for stalls.

    The watchdog ends a wait for this thread if the run makes no progress.
    """

    def __init__(self, watch: StallWatchdog, name: str = "ramify-train") -> None:
        self.watch = watch
        self._thread = SerialThread(name)

    async def run(self, step: int, work: Callable[..., T], *arguments: Any) -> T:
        """Run ``work`` in the training thread and return its result.

        ``step`` is the number of the training step, from 1, for error messages. Raises StallError
        if the run makes no progress.
        """
        name = getattr(work, "__name__", "work").strip("_")
        running = self._thread.run(work, *arguments)
        return await self.watch.await_with_stall_limit(
            f"'{name}' in step {step}", running, thread=self._thread.name
        )

    def close(self, *, is_stalled: bool) -> None:
        """Wait until the current work is done and stop the watchdog.

        If the thread is stuck, it is not waited for.
        """
        self._thread.close(0 if is_stalled else None)
        self.watch.close()


def _fail_wait(wait: _Wait, error: BaseException) -> None:
    if not wait.ended.done():
        wait.ended.set_exception(error)


# --- stacks


def _thread_stacks() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"


def _task_stacks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in _all_tasks(loop):
        yield f"task {task.get_name()}\n{''.join(_task_stack_lines(task))}"


def _all_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    for _ in range(10):  # tasks may begin meanwhile
        try:
            return asyncio.all_tasks(loop)
        except RuntimeError:
            continue
    return set()


def _task_stack_lines(task: asyncio.Task[Any]) -> Iterator[str]:
    """Yield the stack of an asyncio task as lines of text.

    The coroutines come first, from the outermost to the innermost, and then the object that the
    innermost one waits for.
    """
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        code = frame.f_code
        yield f'  File "{code.co_filename}", line {frame.f_lineno}, in {code.co_name}\n'
        waiting = waiting.cr_await
    if waiting is not None:
        yield f"  waits for {type(waiting).__name__}\n"


def _stack_of(wait: _Wait) -> list[str]:
    """Return the stack of the thread that ``wait`` is waiting for, as printable lines.

    If the work runs in an idle event loop, return the stack of the waiting coroutine instead.
    """
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if wait.thread and thread.name.startswith(wait.thread) and thread.ident in frames:
            return traceback.format_stack(frames[thread.ident])
    loops = traceback.format_stack(frames[wait.loop_thread]) if wait.loop_thread in frames else []
    if loops and "selectors.py" not in loops[-1]:  # the loop is not idle
        return loops
    return list(_task_stack_lines(wait.task)) if isinstance(wait.task, asyncio.Task) else loops


def _last_place(stack: list[str]) -> str:
    places = [line for line in stack if line.lstrip().startswith("File ")]
    places = [line for line in places if not any(part in line for part in _WAITING)] or places
    return " ".join(places[-1].split()) if places else "an unknown place"
