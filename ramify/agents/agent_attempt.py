"""Run one rollout of an agent, enforce its time limits, and record how it ended.

The agent gets a folder and an API key.

    new folder ─ key ─ agent starts ──▶ first request ──▶ agent ends ──▶ key ends ──▶ reward
                          │ first_request_s  │ max_seconds    │ exit code
                          └ never_called     └ hung           └ crashed, outlived

A rollout whose outcome is a failure has no reward, and nothing is learned from it. The reason is
one line, with the end of the agent's stderr. Rewards are computed in ``agent_task.py``; agents are
started and ended in ``run_function_agent.py`` and ``agent_command.py``.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import msgspec

from ramify.agents.agent_job import (
    AgentRolloutInput,
    create_rollout_folder,
    hide_answer_fields,
    remove_folder,
    write_item_file,
)
from ramify.agents.agent_result import AgentExitRecord
from ramify.engine.external_conversations import RunModelClient
from ramify.errors import RamifyError
from ramify.evaluate.agent_model_server import AgentModelAccess, AgentModelServer
from ramify.secret_redaction import MARK
from ramify.tasks.base import Item
from ramify.types.agent_outcome import AGENT_RECORD, AgentExitReason

_QUOTED = 400
"""Maximum number of characters of stderr that an error quotes."""


class RunningAgent(Protocol):
    """An agent at work on a task item, as a separate process or as a function in this process."""

    ended: asyncio.Future[None]
    """Completed when the agent has ended. The other fields are final from then on."""
    answer: Any
    """The agent's answer."""
    exit_code: int | None
    """Exit code of the agent; None if it was stopped."""
    output: str
    """The end of what the agent printed."""
    error_output: str
    """The end of what the agent wrote to stderr."""
    num_left: int
    """Number of processes that the agent left behind."""

    def current_code_position(self) -> str:
        """Return the line of code that the agent is running, as the end of an error message.

        For example ``, at agent.py:12 (solve)``. Returns an empty string if the line is unknown.
        """
        ...

    async def terminate(self) -> None:
        """End the agent and everything that it started.

        Calling this again has no effect.
        """
        ...


StartAgent = Callable[[AgentRolloutInput], Awaitable[RunningAgent]]
"""Function that starts the agent of one rollout. Raises RamifyError if that fails."""


class AgentTimeLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits for an agent's rollout, and whether crashed rollouts are scored."""

    max_seconds: float
    """Maximum time in seconds from the start of the agent to its end."""
    first_request_s: float
    """Maximum time in seconds from the start of the agent to its first model request."""
    scores_crashes: bool = False
    """Whether an agent that crashed gets a reward, like one that ended normally."""


class AgentAttempt:
    """One rollout of an agent on one item of a task."""

    def __init__(self, where: str, item: Item, start: StartAgent, limits: AgentTimeLimits) -> None:
        """Prepare one rollout of an agent on the task item ``item``.

        ``where`` names the task and the item at the start of every error message. ``start`` starts
        the agent.
        """
        self._where = where
        self._item = item
        self._start = start
        self._limits = limits
        self._record: AgentExitRecord | None = None
        self._remove: weakref.finalize[Any, Any] | None = None

    async def run(self, conversations: RunModelClient) -> Any:
        """Run the agent on its task item until it ends, and return its answer.

        Raises RamifyError if the agent crashes, exceeds a time limit, or never calls a model.
        """
        endpoint = await conversations.get_or_open_shared(AgentModelServer, AgentModelServer)
        folder = create_rollout_folder()
        # The reward deletes it earlier. This is for a rollout that is never scored.
        self._remove = weakref.finalize(self, remove_folder, folder)
        seat = AgentModelAccess(conversations, "")
        began = time.monotonic()
        with endpoint.temporary_seat_key(seat) as key:
            job = self._create_job(endpoint, key, folder)
            try:
                agent = await self._start(job)
            except RamifyError as error:
                raise RamifyError(f"{self._where}: {error}") from None
            outcome, place = AgentExitReason.CANCELLED, ""
            try:
                outcome = await self._await_outcome(agent, seat)
                place = agent.current_code_position()
            finally:
                await _end_agent(agent)
                self._record = AgentExitRecord(
                    outcome=outcome,
                    exit_code=agent.exit_code,
                    output=agent.output.replace(key, MARK),
                    error_output=agent.error_output.replace(key, MARK),
                    seconds=time.monotonic() - began,
                    num_requests=seat.num_requests,
                    num_left=agent.num_left,
                )
        is_scored = outcome is AgentExitReason.ENDED or (
            outcome is AgentExitReason.CRASHED and self._limits.scores_crashes
        )
        if not is_scored:
            raise RamifyError(f"{self._where}: {self._reason(self._record, seat, place)}")
        self._record.folder = str(job.folder)
        answer = agent.answer
        return answer.replace(key, MARK) if isinstance(answer, str) else answer

    def trajectory_metadata(self, answer: Any) -> Mapping[str, Any]:
        """Return the metadata to store with the rollout's trajectory.

        The metadata records how the agent ended. Call this once, after the rollout.
        """
        is_scored = self._record is not None and self._record.folder
        if self._remove is not None and not is_scored:
            self._remove()
        if self._record is None:
            return {}
        return {AGENT_RECORD: msgspec.to_builtins(self._record)}

    def _create_job(self, endpoint: AgentModelServer, key: str, folder: Path) -> AgentRolloutInput:
        base_url = endpoint.url()
        return AgentRolloutInput(
            item=hide_answer_fields(self._item),
            item_file=write_item_file(self._item, folder),
            folder=folder / "work",
            base_url=base_url,
            anthropic_base_url=base_url.removesuffix("/v1"),
            api_key=key,
        )

    async def _await_outcome(self, agent: RunningAgent, seat: AgentModelAccess) -> AgentExitReason:
        """Wait until the agent ends or reaches a time limit, and return how its rollout ended."""
        limits = self._limits
        first_s = min(limits.first_request_s, limits.max_seconds)
        await asyncio.wait([agent.ended], timeout=first_s)
        if not agent.ended.done() and not seat.num_requests:
            return AgentExitReason.NEVER_CALLED
        await asyncio.wait([agent.ended], timeout=limits.max_seconds - first_s)
        if not agent.ended.done():
            return AgentExitReason.HUNG
        if agent.exit_code != 0:
            return AgentExitReason.CRASHED
        if not seat.num_requests:
            return AgentExitReason.NEVER_CALLED
        return AgentExitReason.OUTLIVED if agent.num_left else AgentExitReason.ENDED

    def _reason(self, record: AgentExitRecord, seat: AgentModelAccess, place: str) -> str:
        limits = self._limits
        match record.outcome:
            case AgentExitReason.CRASHED:
                code = record.exit_code or 0
                how = (
                    f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
                )
                text = f"the agent crashed: it {how}"
            case AgentExitReason.HUNG:
                text = f"the agent hung: it was stopped after {limits.max_seconds:g} s{place}"
            case AgentExitReason.NEVER_CALLED if record.exit_code is None:
                text = (
                    f"the agent never called its address within {limits.first_request_s:g} s"
                    f"{place}, and was stopped: let it use OPENAI_BASE_URL or ANTHROPIC_BASE_URL, "
                    "or raise first_request_s"
                )
            case AgentExitReason.NEVER_CALLED:
                text = (
                    "the agent ended without calling its address: let it use OPENAI_BASE_URL or "
                    "ANTHROPIC_BASE_URL"
                )
            case _:
                text = (
                    f"the agent ended, and {record.num_left} of its processes still ran; they were "
                    "ended: let it wait for its children"
                )
        if seat.last_refusal:
            text += f"; its last refused request: {seat.last_refusal:.300}"
        lines = [line.strip() for line in record.error_output.splitlines() if line.strip()]
        return f"{text}; its stderr ends: {' | '.join(lines)[-_QUOTED:] or '(it is empty)'}"


async def _end_agent(agent: RunningAgent) -> None:
    """End the agent and wait for it to exit, even if the rollout is being cancelled."""
    ending = asyncio.ensure_future(agent.terminate())
    try:
        await asyncio.shield(ending)
    except asyncio.CancelledError:
        await ending
        raise
