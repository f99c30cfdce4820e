"""Run a user's function in a separate thread that is never joined.

A function that never returns then blocks only its caller, not the event loop's thread pool or the
end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """Return ``work(*args)``. If the wait is cancelled, the result is discarded and the thread is
    left to end by itself."""
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
