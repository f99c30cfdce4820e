"""The event loop that runs async reward functions.

The first async reward starts its daemon thread.

    reward thread ── run_coroutine(reward(answer, item)) ──> loop thread ──> result or error

All rewards share the loop, so an async client of the user can keep its connections from one answer
to the next. If an abandoned coroutine still blocks the loop, later rewards get a new loop. Time
limits are applied by ``score_with_timeout.py``.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_STEP_S = 0.2
"""Seconds between wake-ups of a waiting thread. The interval is short because only a running thread
can be stopped.
"""
_ANSWER_S = 1.0
"""Seconds without a response after which the event loop counts as blocked."""
_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None
_process = 0


def run_coroutine(work: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine on the event loop for rewards, and wait for its result.

    Do not call this on that loop: it would wait for itself.
    """
    loop = _running_loop()
    future = asyncio.run_coroutine_threadsafe(work, loop)
    try:
        return _result(future)
    except BaseException:
        if not future.done():
            future.cancel()
            _forget_if_blocked(loop)
        raise


def _result(future: Future[_T]) -> _T:
    while True:
        try:
            return future.result(_STEP_S)
        except TimeoutError:
            if future.done():  # the coroutine's own error
                raise


def _running_loop() -> asyncio.AbstractEventLoop:
    global _loop, _process
    with _lock:
        if _loop is None or _process != os.getpid():
            _loop, _process = asyncio.new_event_loop(), os.getpid()
            threading.Thread(
                target=_loop.run_forever, daemon=True, name="ramify async rewards"
            ).start()
        return _loop


def _forget_if_blocked(loop: asyncio.AbstractEventLoop) -> None:
    global _loop
    answered = threading.Event()
    loop.call_soon_threadsafe(answered.set)
    if not answered.wait(_ANSWER_S):
        with _lock:
            if _loop is loop:
                _loop = None
