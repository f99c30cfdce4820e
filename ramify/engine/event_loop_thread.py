"""Event loop of the synchronous API: one loop in one thread for the whole process.

It works wherever the caller is, even inside a running loop (a notebook). Ctrl-C cancels the work
that is being waited for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
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
