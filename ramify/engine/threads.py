"""Threads: the event loop of the synchronous API, and a thread for each call of a user's function.

The event loop runs in one thread for the whole process. It works wherever the caller is, even
inside a running loop (a notebook). Ctrl-C cancels the work that is being waited for. If that work
blocks the loop past its deadline, the caller gets the error and later work gets another loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import Any, TypeVar, cast

from ramify.engine import loop_watch
from ramify.errors import ConfigError, LoopBlocked

T = TypeVar("T")

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """Return the loop, starting it at the first call."""
    global _loop
    with _lock:
        if _loop is None or _loop.is_closed():
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="ramify", daemon=True).start()
        return _loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` on the loop and return its result. If the wait is interrupted, ``work`` is
    cancelled. Raises LoopBlocked if ``work`` blocks the loop past its deadline."""
    if _is_here():
        work.close()
        raise ConfigError(
            "a callback that runs on the event loop cannot wait for it: use the async form, or a "
            "thread"
        )
    used, answer = loop(), Future[T]()

    def release(error: LoopBlocked) -> None:
        _abandon(used)
        _settle(answer, None, error)

    context = contextvars.copy_context()
    context.run(loop_watch.on_blocked.set, release)
    future = context.run(asyncio.run_coroutine_threadsafe, work, used)
    future.add_done_callback(lambda done: _copy(done, answer))
    try:
        return answer.result()
    except BaseException:
        future.cancel()
        raise


def _copy(done: Future[T], answer: Future[T]) -> None:
    if done.cancelled():
        _settle(answer, None, CancelledError())
    else:
        error = done.exception()
        _settle(answer, None if error else done.result(), error)


def _settle(answer: Future[T], value: T | None, error: BaseException | None) -> None:
    """Give ``answer`` its outcome, unless it has one."""
    with contextlib.suppress(InvalidStateError):
        if error is not None:
            answer.set_exception(error)
        else:
            answer.set_result(cast("T", value))


def _abandon(blocked: asyncio.AbstractEventLoop) -> None:
    """Leave a blocked loop to its thread: later work gets another one."""
    global _loop
    with _lock:
        if _loop is blocked:
            _loop = None


def leave(work: Coroutine[Any, Any, object], on: asyncio.AbstractEventLoop | None = None) -> None:
    """Run ``work`` on the loop (or ``on`` another one), if there is one, without waiting.

    For finalizers: the garbage collector may call one at any line, even in the loop's own thread,
    where waiting would deadlock.
    """
    used = on or _loop
    if used is None or used.is_closed():
        work.close()
    else:
        asyncio.run_coroutine_threadsafe(work, used)


class PinnedLoop:
    """What the synchronous API keeps open on the loop between calls. After a call that blocked its
    loop, the next one opens it again on another loop."""

    def __init__(
        self, pin: Callable[[], object], unpin: Callable[[], Coroutine[Any, Any, object]]
    ) -> None:
        """``pin`` and ``unpin`` are called on the loop."""
        self._pin = pin
        self._unpin = unpin
        self._pinned: asyncio.AbstractEventLoop | None = None

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """``run``, with everything open."""
        if self._pinned is not _loop or _loop is None:
            try:
                run(self._open())
            except BaseException:
                work.close()
                raise
        return run(work)

    async def _open(self) -> None:
        self._pin()
        self._pinned = asyncio.get_running_loop()

    def close(self, *, waits: bool = True) -> bool:
        """Close what is open, and return whether anything was. A blocked loop does so later."""
        pinned, self._pinned = self._pinned, None
        if pinned is not None and pinned is _loop and waits:
            run(self._unpin())
        elif pinned is not None:
            leave(self._unpin(), pinned)
        return pinned is not None


def _is_here() -> bool:
    try:
        return asyncio.get_running_loop() is _loop
    except RuntimeError:
        return False


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Run a user's function in a separate thread that is never joined, and return its result.

    A function that never returns then blocks only its caller, not the event loop's thread pool or
    the end of the process. If the wait is cancelled, the result is discarded.
    """
    loop, context = asyncio.get_running_loop(), contextvars.copy_context()
    done: asyncio.Future[Any] = loop.create_future()

    def settle(value: Any, error: BaseException | None) -> None:
        if done.done():
            return
        if error is None:
            done.set_result(value)
        else:
            done.set_exception(
                RuntimeError(repr(error)) if isinstance(error, StopIteration) else error
            )

    def target() -> None:
        value, error = None, None
        try:
            value = context.run(work, *args)
        except BaseException as raised:  # noqa: BLE001 -- raised again by the waiting caller
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed, so no caller is waiting
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(
        target=target, daemon=True, name=f"ramify {getattr(work, '__name__', 'task')}"
    ).start()
    return await done
