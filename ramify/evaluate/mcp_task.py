"""Wrap a task so that its sessions can call the tools of MCP servers.

    TaskWithMcpTools(task, "uvx mcp-server-git")                    servers of each rollout
    TaskWithMcpTools(task, "https://host/mcp", lifetime="process")  one connection for all rollouts

Servers with the lifetime ``rollout`` start before each rollout and end after it, for whatever
reason it ended, so that no rollout sees what another one left behind in them. Servers with the
lifetime ``process`` start with the first rollout and are shared by all until the process ends or
``close`` is called; they suit servers that keep no state or are slow to start. Each rollout worker
is a process with separate servers. The connection itself is made by ``engine/mcp_tools.py``.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from ramify.engine.mcp_tools import McpTools, redacted_server, require_mcp_sdk
from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import Item, RolloutInitialState, Score, Task
from ramify.tasks.batch_scoring import batch_scores, is_batch_scored
from ramify.types.trajectory import Trajectory

_LIFETIMES = ("rollout", "process")


class TaskWithMcpTools:
    """A task that adds the tools of MCP servers to the sessions of another task.

    Implements ``Task``.

    Example:
        evaluate.TaskWithMcpTools(my_task, "uvx mcp-server-git", lifetime="process", timeout_s=60)
    """

    def __init__(
        self,
        task: Task,
        *servers: str,
        lifetime: Literal["rollout", "process"] = "rollout",
        timeout_s: float = 300.0,
        start_s: float = 120.0,
    ) -> None:
        """Wrap a task, so that its sessions can call the tools of the given MCP servers.

        Each server is a command or a URL. ``timeout_s`` limits each tool call, and ``start_s`` the
        start of each server. Raises ConfigError if no server is given or ``lifetime`` is unknown.
        """
        if not servers:
            raise ConfigError(f"task '{task.name}' names no MCP server: give a command or a URL")
        if lifetime not in _LIFETIMES:
            raise ConfigError(
                f"task '{task.name}': lifetime={lifetime!r} of its MCP servers is not 'rollout' or "
                "'process'"
            )
        require_mcp_sdk("MCP servers")
        self.name, self.splits, self.weights = task.name, task.splits, task.weights
        self._task = task
        self._servers = servers
        self._lifetime = lifetime
        self._timeout_s, self._start_s = timeout_s, start_s
        self._shared: McpTools | None = None
        self._opening = threading.Lock()

    async def prepare(self, item: Item) -> RolloutInitialState:
        """Prepare the wrapped task for an item, and add the tools of the MCP servers to its
        session.

        Raises ConfigError if a server cannot be used, or if one of its tools has the name of a tool
        of the task.
        """
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
        return is_batch_scored(self._task, item)

    def score_step(
        self, rollouts: Sequence[tuple[Item, Trajectory]]
    ) -> Sequence[Score | RamifyError]:
        return batch_scores(self._task, rollouts)

    def close(self) -> None:
        """Stop the MCP servers that all rollouts share.

        Calling this method twice is harmless, and the next rollout starts the servers again.
        """
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

    def _with_tools(self, start: RolloutInitialState, tools: McpTools) -> RolloutInitialState:
        both: Sequence[str] = sorted({*start.tools} & {*tools})
        if both:
            shown = ", ".join(map(redacted_server, self._servers))
            raise ConfigError(
                f"task '{self.name}' and its MCP servers ({shown}) both have a tool '{both[0]}': "
                "rename the task's"
            )
        start.tools = {**start.tools, **tools}
        return start


def _close(tools: McpTools) -> None:
    """Close the servers of a rollout, in a separate thread if an event loop is running.

    Closing waits for the servers, which would block the loop when a rollout is cancelled.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        tools.close()
    else:
        threading.Thread(target=tools.close, name="ramify mcp").start()
