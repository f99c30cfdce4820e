"""Run an agent that is a Python function, in this process.

An async function runs on the event loop of the rollout, which it must not block. Any other function
has its own thread, in which it is stopped at its next Python instruction. A function that
waits outside Python cannot be stopped and is abandoned; its key is no longer valid by then.
``agent_attempt.py`` applies the time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import traceback
from collections.abc import Callable
from typing import Any

from ramify.agents.agent_job import AgentRolloutInput
from ramify.agents.agent_result import output_tail
from ramify.tasks.async_reward_loop import run_coroutine
from ramify.tasks.stoppable_thread import StoppableThread, ThreadStoppedError

_END_S = 1.0
"""Seconds that a cancelled async function may take to end."""


def _call_function(function: Callable[[AgentRolloutInput], Any], job: AgentRolloutInput) -> Any:
    """Call an agent's function and return its result.

    If the function returns a coroutine, the coroutine is first run to completion.
    """
    answer = function(job)
    return run_coroutine(answer) if inspect.iscoroutine(answer) else answer


class AgentFunctionRun:
    """An agent that runs as a Python function in this process, for one rollout; implements
    ``RunningAgent``."""

    def __init__(
        self, function: Callable[[AgentRolloutInput], Any], job: AgentRolloutInput
    ) -> None:
        """Run the agent's function in an asyncio task if it is async, and otherwise in a thread."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = loop.create_future()
        self.answer: Any = None
        self.exit_code: int | None = None
        self.output = ""
        self.error_output = ""
        self.num_left = 0
        self._thread: StoppableThread | None = None
        self._task: asyncio.Task[Any] | None = None
        if inspect.iscoroutinefunction(function):
            self._task = loop.create_task(function(job))
            self._task.add_done_callback(lambda _: self._settle())
        else:

            def end() -> None:
                with contextlib.suppress(RuntimeError):  # the loop is closed
                    loop.call_soon_threadsafe(self._settle)

            self._thread = StoppableThread(
                lambda: _call_function(function, job), "ramify agent", end
            )

    def current_code_position(self) -> str:
        """Return the line of code that the function is running, as the end of an error message.

        For example ``, at agent.py:12 (solve)``. Returns an empty string if the line is unknown.
        """
        return self._thread.running_line() if self._thread is not None else ""

    async def terminate(self) -> None:
        """Stop the function if it is still running.

        Calling this again has no effect.
        """
        if self.ended.done():
            return
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task], timeout=_END_S)
        elif self._thread is not None:
            self._thread.stop()

    def _settle(self) -> None:
        if self.ended.done():
            return
        try:
            if self._task is not None:
                self.answer = self._task.result()
            elif self._thread is not None:
                self.answer = self._thread.result()
            self.exit_code = 0
        except (ThreadStoppedError, asyncio.CancelledError):
            pass  # the caller stopped it
        except SystemExit as error:
            self.exit_code = error.code if isinstance(error.code, int) else int(bool(error.code))
            self.error_output = "" if isinstance(error.code, int | None) else str(error.code)
        except BaseException as error:  # noqa: BLE001 -- a user's function may raise anything
            self.exit_code = 1
            self.error_output = output_tail("".join(traceback.format_exception(error)))
        self.ended.set_result(None)
