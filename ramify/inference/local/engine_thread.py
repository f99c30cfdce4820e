"""The thread in which an engine lives: it steps while there is work, and runs calls from other
threads between two steps.

    asyncio ── call(f) ──▶ inbox ──▶ f()          between steps, in order of arrival
                                     engine.step()
            ◀── done(generation) ────┘            for each that ended, also if the engine failed

Everything that touches the model's weights runs in this thread, so a step never sees half of an
update.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from ramify.inference.local.engine import LocalEngine
from ramify.inference.local.generation import Generation

Result = TypeVar("Result")
Done = Callable[[Generation, BaseException | None], None]


class EngineThread:
    """Runs ``engine`` in a thread, which starts with the first call. It is a daemon thread, so it
    does not keep the program from exiting."""

    def __init__(self, engine: LocalEngine) -> None:
        self.engine = engine
        self._inbox: deque[Callable[[], None]] = deque()
        self._done: dict[Generation, Done] = {}
        self._wake = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._is_paused = False

    def call(self, function: Callable[[], Result]) -> Future[Result]:
        """Run ``function`` between two steps. Raises RuntimeError after ``close``."""
        future: Future[Result] = Future()

        def run() -> None:
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:  # noqa: BLE001 (raised by the caller)
                    future.set_exception(error)

        self._put(run)
        return future

    def add(self, generation: Generation, done: Done) -> None:
        """Queue ``generation``. ``done`` is called in the engine's thread when it has ended, or
        with the error that prevented it."""

        def run() -> None:
            try:
                self.engine.add(generation)
            except Exception as error:  # noqa: BLE001 (passed to the caller)
                done(generation, error)
            else:
                self._done[generation] = done

        self._put(run)

    def cancel(self, generation: Generation) -> None:
        """Remove ``generation`` before the next step; its ``done`` is not called."""

        def run() -> None:
            if self._done.pop(generation, None) is not None:
                self.engine.cancel(generation)

        if not self._is_closed:
            self._put(run)

    def pause(self, *, abort: bool = False) -> None:
        """Stop stepping until ``resume``. Running sequences keep their slots, and calls from
        other threads still run. With ``abort``, running sequences end at once with the end
        ``abort``, and their ``done`` is called."""
        with self._wake:
            self._is_paused = True
        if abort:
            self._put(self._abort)

    def resume(self) -> None:
        with self._wake:
            self._is_paused = False
            self._wake.notify()

    def close(self) -> None:
        """End the thread after its current step; sequences that have not ended by then fail.
        Idempotent."""
        with self._wake:
            self._is_closed = True
            self._wake.notify()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _put(self, run: Callable[[], None]) -> None:
        with self._wake:
            if self._is_closed:
                raise RuntimeError("this engine was closed")
            self._inbox.append(run)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="ramify-engine", daemon=True)
                self._thread.start()
            self._wake.notify()

    def _run(self) -> None:
        while True:
            with self._wake:
                while (
                    not self._inbox
                    and (self._is_paused or self.engine.is_idle)
                    and not self._is_closed
                ):
                    self._wake.wait()
                tasks, is_closed = list(self._inbox), self._is_closed
                self._inbox.clear()
            for task in tasks:
                task()
            if is_closed:
                self._fail(RuntimeError("the engine was closed"))
                return
            if not self._is_paused and not self.engine.is_idle:
                self._step()

    def _step(self) -> None:
        try:
            finished = self.engine.step()
        except Exception as error:  # noqa: BLE001 (passed to all callers)
            self._fail(error)
            return
        for generation in finished:
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, None)

    def _abort(self) -> None:
        for generation in self.engine.drain():
            generation.end = "abort"
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, None)

    def _fail(self, error: BaseException) -> None:
        for generation in self.engine.drain():
            done = self._done.pop(generation, None)
            if done is not None:
                done(generation, error)
