"""A user's function in a thread of its own, which nobody waits for at the end: one that never
returns must hold up no more than whoever called it, neither the threads that the event loop shares
nor the end of the process."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
from collections.abc import Callable
from typing import Any


async def in_thread(work: Callable[..., Any], *args: Any) -> Any:
    """``work(*args)``. Given up where the wait is cancelled; the thread then ends by itself, or
    never."""
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
        except BaseException as raised:  # noqa: BLE001 -- raised again where it is waited for
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, value, error)

    threading.Thread(
        target=target, daemon=True, name=f"ramify {getattr(work, '__name__', 'task')}"
    ).start()
    return await done
