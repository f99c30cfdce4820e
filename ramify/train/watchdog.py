"""Every wait of a training run ends: with what was waited for, or with an error that says what
stood where.

    await watch.bounded("learning", work)      its value; TrainError where nothing moves for ``stall_s``
    watch.moved()                              something did: a reply came, a rollout ended, a batch of a step was computed
    watch.fail(error)                          whoever waits now, or next, gets this error instead

What stands is told by a thread of its own, so that it is also told where the event loop itself
stands. It writes all stacks (threads, tasks, and what ``others`` say, as ranks do) to
OUT/stalled.txt, ends the wait, and, where the event loop does not react, raises the error in its
thread. Leaves out waits that have bounds of their own, which are shorter: a reply, a cell, a
rollout, a judge, a step of a weight update, a rank.
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
"""In the places that only wait for others, which an error leaves out."""
_GRACE_S = 10.0
"""How long the event loop may take to notice that a wait was ended, and what was waited for to be
given up."""


class StallError(TrainError):
    """Nothing moved. Threads that stand cannot be ended from here: the process may have to be."""


class _Wait:
    """One wait that goes on."""

    def __init__(self, what: str, task: asyncio.Future[Any], thread: str) -> None:
        self.what, self.task, self.thread = what, task, thread
        self.loop = task.get_loop()
        self.loop_thread = threading.get_ident()
        self.since = time.monotonic()
        self.ended: asyncio.Future[None] = self.loop.create_future()
        """Has the error that ends the wait."""
        self.is_told = False
        """Whether it was said to stand."""


class RunWatchdog:
    """Looks after the waits of one run; ``close`` ends its thread."""

    def __init__(
        self,
        out: Path,
        stall_s: float,
        *,
        others: Callable[[], str] | None = None,
        on_stall: Callable[[str], None] | None = None,
    ) -> None:
        """``others``: stacks of other processes, as text. ``on_stall`` is told, in the watching
        thread, before anything is ended."""
        self._out, self._stall_s, self._others, self._on_stall = out, stall_s, others, on_stall
        self._waits: set[_Wait] = set()
        self._moved = time.monotonic()
        self._failed: BaseException | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def moved(self) -> None:
        """What is waited for gets on."""
        self._moved = time.monotonic()

    def fail(self, error: BaseException) -> None:
        """End every wait, and each that begins from now on, with ``error``. For the thread of the
        event loop."""
        self._failed = self._failed or error
        for wait in self._waits:
            _end(wait, self._failed)

    async def bounded(self, what: str, work: Awaitable[T], *, thread: str = "") -> T:
        """What ``work`` gives. ``what`` says in errors what was being done; ``thread`` begins the
        name of the thread that does it, where it is not the event loop's. Where nobody waits for it
        any more, ``work`` is cancelled."""
        task = asyncio.ensure_future(work)
        wait = _Wait(what, task, thread)
        self._begin(wait)
        try:
            if self._failed is not None:
                raise self._failed
            both: list[asyncio.Future[Any]] = [task, wait.ended]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if (
                wait.ended.done()
            ):  # and whoever was told so counts on it, even if a value came at last
                wait.ended.result()
            return task.result()
        finally:
            self._waits.discard(wait)
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
            self._thread = threading.Thread(target=self._look, name="ramify-watch", daemon=True)
            self._thread.start()

    # --- in the watching thread
    # ----------------------------------------------------------------------------------

    def _look(self) -> None:
        while not self._closing.wait(min(1.0, self._stall_s / 4)):
            now = time.monotonic()
            for wait in tuple(self._waits):
                if not wait.is_told and now - max(wait.since, self._moved) > self._stall_s:
                    self._stalled(wait)
                    break

    def _stalled(self, wait: _Wait) -> None:
        moved, stack = self._moved, _stack_of(wait)
        place = self._write(wait)
        if (
            wait not in self._waits or self._moved != moved
        ):  # while others were asked where they stand
            place.unlink()
            return
        wait.is_told = True
        error = StallError(
            f"{wait.what} stands still: nothing moved for {self._stall_s:g} s. It stands at "
            f"{_last(stack)}. All stacks are in "
            f"{place}; `ramify train --resume {self._out}` goes on from the last checkpoint"
        )
        if self._on_stall is not None:
            self._on_stall(str(error))
        wait.loop.call_soon_threadsafe(_end, wait, error)
        until = time.monotonic() + min(_GRACE_S, self._stall_s)
        while wait in self._waits and time.monotonic() < until:
            time.sleep(0.02)
        if wait in self._waits:  # the event loop stands itself
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(wait.loop_thread), ctypes.py_object(StallError)
            )
        self.moved()  # what else is waited for may have stood for this alone

    def _write(self, wait: _Wait) -> Path:
        path = self._out / FILE
        parts = [
            f"{wait.what}: nothing moved for {self._stall_s:g} s\n",
            *_threads(),
            *_tasks(wait.loop),
        ]
        if self._others is not None:
            parts.append(self._others())
        path.write_text("\n".join(parts))
        return path


class SerialThread:
    """A thread that carries work out in order, and that nobody has to wait for at the end of the
    process."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._work: list[tuple[Callable[[], Any], Future[Any]]] = []
        self._wake = threading.Condition()
        self._is_closed = False
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[..., T], *arguments: Any) -> T:
        """What ``work`` gives. Work that was begun ends, whether or not anybody waits."""
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
        """Do no more, and wait for the end of what is being done."""
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
            except BaseException as error:  # noqa: BLE001 (rises where the result is asked for)
                future.set_exception(error)
            del work, future


def _end(wait: _Wait, error: BaseException) -> None:
    if not wait.ended.done():
        wait.ended.set_exception(error)


# --- where things stand
# --------------------------------------------------------------------------------------------------


def _threads() -> Iterator[str]:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        yield f"thread {names.get(ident, ident)}\n{''.join(traceback.format_stack(frame))}"


def _tasks(loop: asyncio.AbstractEventLoop) -> Iterator[str]:
    for task in _all_tasks(loop):
        yield f"task {task.get_name()}\n{''.join(_lines(task))}"


def _all_tasks(loop: asyncio.AbstractEventLoop) -> set[asyncio.Task[Any]]:
    for _ in range(10):  # tasks may begin meanwhile
        try:
            return asyncio.all_tasks(loop)
        except RuntimeError:
            continue
    return set()


def _lines(task: asyncio.Task[Any]) -> Iterator[str]:
    """Each coroutine that waits for the next, and at last what it waits for."""
    waiting: Any = task.get_coro()
    while (frame := getattr(waiting, "cr_frame", None)) is not None:
        yield f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}\n'
        waiting = waiting.cr_await
    if waiting is not None:
        yield f"  waits for {type(waiting).__name__}\n"


def _stack_of(wait: _Wait) -> list[str]:
    """Of the thread that does the work; of the coroutine that waits, where it is the event loop's
    and that one goes on."""
    frames = sys._current_frames()
    for thread in threading.enumerate():
        if wait.thread and thread.name.startswith(wait.thread) and thread.ident in frames:
            return traceback.format_stack(frames[thread.ident])
    loops = traceback.format_stack(frames[wait.loop_thread]) if wait.loop_thread in frames else []
    if loops and "selectors.py" not in loops[-1]:  # it is not idle
        return loops
    return list(_lines(wait.task)) if isinstance(wait.task, asyncio.Task) else loops


def _last(stack: list[str]) -> str:
    places = [line for line in stack if line.lstrip().startswith("File ")]
    places = [line for line in places if not any(each in line for each in _WAITING)] or places
    return " ".join(places[-1].split()) if places else "a place that cannot be told"
