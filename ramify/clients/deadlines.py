"""Apply timeouts to many concurrent requests with a single timer.

    with deadlines.at(now_s + 600) as deadline:      TimeoutError after 600 s
        deadline.reschedule(now_s + 900)

``asyncio.timeout`` creates an event-loop timer for each block, so the loop's heap holds one for
each request of the last minutes. Timeouts of requests are long, nearly all of them end early, and a
later one seldom falls due before an earlier one. So one timer, which is set for the earliest of
them, is enough: it is set again when it fires. Callers decide how long a request may take.
"""

from __future__ import annotations

import asyncio
import math
from types import TracebackType


class TimeoutScheduler:
    """Cancels tasks that exceed their timeouts.

    One scheduler serves many tasks of an event loop with a single timer.
    """

    def __init__(self) -> None:
        self._open: set[TimeoutScope] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = math.inf
        """Event-loop time at which the timer fires; infinite without one."""

    def timeout_at(self, when_s: float) -> TimeoutScope:
        """Return a context manager that raises TimeoutError at the event-loop time ``when_s``."""
        return TimeoutScope(self, when_s)

    def close(self) -> None:
        """Stop the scheduler by cancelling its timer.

        Calling this again has no effect.
        """
        if self._timer is not None:
            self._timer.cancel()
        self._timer, self._timer_s = None, math.inf

    def add(self, deadline: TimeoutScope) -> None:
        """Add a timeout to those that the timer watches.

        If it is the earliest one, the timer is set to it.
        """
        self._open.add(deadline)
        if deadline.when_s < self._timer_s:
            self._set_timer(deadline.when_s)

    def remove(self, deadline: TimeoutScope) -> None:
        """Stop watching a timeout, because its ``with`` block has ended."""
        self._open.discard(deadline)

    def _set_timer(self, when_s: float) -> None:
        self.close()
        if when_s < math.inf:
            self._timer_s = when_s
            self._timer = asyncio.get_running_loop().call_at(when_s, self._fire)

    def _fire(self) -> None:
        # A loop may call a timer early, by the resolution of its clock.
        now_s = max(asyncio.get_running_loop().time(), self._timer_s)
        self._timer, self._timer_s = None, math.inf
        late = [deadline for deadline in self._open if deadline.when_s <= now_s]
        for deadline in late:
            self._open.discard(deadline)
            deadline.expire()
        self._set_timer(min((deadline.when_s for deadline in self._open), default=math.inf))


class TimeoutScope:
    """A context manager that applies a timeout to its ``with`` block, like ``asyncio.timeout_at``.

    Entering and leaving the block never waits.
    """

    __slots__ = ("_cancelling", "_deadlines", "_is_late", "_task", "when_s")

    def __init__(self, deadlines: TimeoutScheduler, when_s: float) -> None:
        self.when_s = when_s
        self._deadlines = deadlines
        self._is_late = False
        self._cancelling = 0
        self._task: asyncio.Task[object] | None = None

    def reschedule(self, when_s: float) -> None:
        """Move the timeout to another event-loop time.

        This has no effect if the timeout has already expired.
        """
        self.when_s = when_s
        if self._task is not None and not self._is_late:
            self._deadlines.add(self)

    def expire(self) -> None:
        """Cancel the task that runs the ``with`` block, because the timeout has expired."""
        assert self._task is not None
        self._is_late = True
        self._task.cancel()

    def __enter__(self) -> TimeoutScope:
        task = asyncio.current_task()
        assert task is not None
        self._task, self._cancelling = task, task.cancelling()
        self._deadlines.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        task, self._task = self._task, None
        if not self._is_late:
            self._deadlines.remove(self)
            return
        assert task is not None
        # If another task cancelled this one, too, that is what ended it.
        if task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise TimeoutError from error
