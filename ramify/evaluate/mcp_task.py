"""A task whose sessions have the tools of MCP servers.

    McpTask(task, "uvx mcp-server-git")                          servers of each rollout
    McpTask(task, "https://host/mcp", lifetime="process")        one connection for all rollouts

Servers of a rollout start before it and end, with their children, when it has ended for any reason,
so that no rollout sees what another one left in them. Servers of the process start with the first
rollout and end with the process, or with ``close``: use them if they keep no state, or are slow to
start. Rollout workers are processes, each with its own. Not here: the connection
(``engine/mcp_tools.py``).
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ramify.engine.mcp_tools import McpTools, need_extra, recorded
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item, Score, Task, TaskStart
from ramify.tasks.batch_scoring import is_scored_by_step, step_scores
from ramify.types.trajectory import Trajectory

_LIFETIMES = ("rollout", "process")


class McpTask:
    """Adds the tools of MCP servers to the sessions of another task. Implements ``Task``.

    Example:
        evaluate.McpTask(my_task, "uvx mcp-server-git", lifetime="process", timeout_s=60)
    """

    def __init__(
        self,
        task: Task,
        *servers: str,
        lifetime: Literal["rollout", "process"] = "rollout",
        timeout_s: float = 300.0,
        start_s: float = 120.0,
    ) -> None:
        """``servers`` are as for ``McpTools``. ``timeout_s`` limits each call of a tool, and
        ``start_s`` the start of each server. Raises ConfigError."""
        if not servers:
            raise ConfigError(f"task '{task.name}' names no MCP server: give a command or a URL")
        if lifetime not in _LIFETIMES:
            raise ConfigError(
                f"task '{task.name}': lifetime={lifetime!r} of its MCP servers is not 'rollout' or "
                "'process'"
            )
        need_extra("MCP servers")
        self.name, self.splits, self.weights = task.name, task.splits, task.weights
        self._task = task
        self._servers = servers
        self._lifetime = lifetime
        self._timeout_s, self._start_s = timeout_s, start_s
        self._shared: McpTools | None = None
        self._opening = threading.Lock()

    async def prepare(self, item: Item) -> TaskStart:
        """The initial state of ``task``, with the servers' tools. Raises ConfigError for a server
        that cannot be used, and for a tool with the name of one of the task's."""
        start = await self._task.prepare(item)
        if self._lifetime == "process":
            return self._with_tools(start, await asyncio.to_thread(self._open_shared))
        tools = await asyncio.to_thread(self._open)
        try:
            start = self._with_tools(start, tools)
        except BaseException:
            await asyncio.to_thread(tools.close)
            raise
        on_end = start.on_end

        def end(answer: Any) -> Mapping[str, Any]:
            try:
                return on_end(answer) if on_end is not None else {}
            finally:
                _close(tools)

        start.on_end = end
        return start

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        return self._task.score(item, trajectory)

    def is_scored_by_step(self, item: Item) -> bool:
        return is_scored_by_step(self._task, item)

    def score_step(
        self, rollouts: Sequence[tuple[Item, Trajectory]]
    ) -> Sequence[Score | RamifyError]:
        return step_scores(self._task, rollouts)

    def close(self) -> None:
        """End the servers of the process. Idempotent; the next rollout starts them again."""
        with self._opening:
            if self._shared is not None:
                self._shared.close()
            self._shared = None

    def _open(self) -> McpTools:
        return McpTools(*self._servers, timeout_s=self._timeout_s, start_s=self._start_s)

    def _open_shared(self) -> McpTools:
        with self._opening:
            if self._shared is None:
                self._shared = self._open()
            return self._shared

    def _with_tools(self, start: TaskStart, tools: McpTools) -> TaskStart:
        both: Sequence[str] = sorted({*start.tools} & {*tools})
        if both:
            shown = ", ".join(map(recorded, self._servers))
            raise ConfigError(
                f"task '{self.name}' and its MCP servers ({shown}) both have a tool '{both[0]}': "
                "rename the task's"
            )
        start.tools = {**start.tools, **tools}
        return start


def _close(tools: McpTools) -> None:
    """Close the servers of ``tools``. When a rollout is cancelled, this runs on the event loop,
    which must not wait for a server, so a thread closes them."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        tools.close()
    else:
        threading.Thread(target=tools.close, name="ramify mcp").start()
