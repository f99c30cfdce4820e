"""Threads: the event loop of the synchronous API, and a thread for each call of a user's function.

The event loop runs in one thread for the whole process. It works wherever the caller is, even
inside a running loop (a notebook). Ctrl-C cancels the work that is being waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ramify.errors import ConfigError

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
    cancelled."""
    if _is_here():
        work.close()
        raise ConfigError(
            "a callback that runs on the event loop cannot wait for it: use the async form, or a "
            "thread"
        )
    future = asyncio.run_coroutine_threadsafe(work, loop())
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def leave(work: Coroutine[Any, Any, object]) -> None:
    """Run ``work`` on the loop, if there is one, without waiting.

    For finalizers: the garbage collector may call one at any line, even in the loop's own thread,
    where waiting would deadlock.
    """
    if _loop is None or _loop.is_closed():
        work.close()
    else:
        asyncio.run_coroutine_threadsafe(work, _loop)


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
