"""Define the stored record of an agent's rollout, and the object that reward functions receive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from ramify.tasks.base import Item
from ramify.types.agent_outcome import AgentExitReason
from ramify.types.trajectory import Trajectory

MAX_OUTPUT_CHARS = 1 << 16
"""Maximum number of characters kept from the end of each output of an agent."""


class AgentExitRecord(msgspec.Struct, kw_only=True):
    """A stored record of how an agent's rollout ended, such as its outcome and exit code.

    It is stored in ``Trajectory.metadata``.
    """

    outcome: AgentExitReason
    exit_code: int | None = None
    """Exit code of the process, negative for a signal. A function has 0, or 1 after an exception.
    None if the agent was stopped."""
    output: str = ""
    """The end of what a command printed; empty for a function."""
    error_output: str = ""
    """The end of what a command wrote to stderr, or the traceback of a function's exception."""
    seconds: float = 0.0
    """Seconds from the agent's start to its end."""
    num_requests: int = 0
    """Number of requests that reached the model endpoint, including refused ones."""
    num_left: int = 0
    """Number of processes that the agent left behind."""
    folder: str = ""
    """The agent's working folder; empty once the reward is known."""


class AgentRun(msgspec.Struct, frozen=True, kw_only=True):
    """A finished rollout of an agent, which is the argument of the reward function.

    Example:
        def score(run: AgentRun) -> float:
            return float((run.folder / "answer.txt").read_text() == run.item.gold)
    """

    item: Item
    """The item, with its gold answer and its metadata."""
    answer: Any
    """The return value of a function. For a command, its output without surrounding whitespace."""
    exit_code: int
    """Exit code of the command, negative for a signal. A function has 0, or 1 after an
    exception."""
    output: str
    """The last characters that the command printed (at most ``MAX_OUTPUT_CHARS``)."""
    error_output: str
    """The last characters that the command wrote to stderr (at most ``MAX_OUTPUT_CHARS``). If a
    function raised an exception, the traceback."""
    folder: Path
    """Working folder with the agent's files. It is deleted after the reward."""
    trajectory: Trajectory
    """The tree of the agent's calls, with every request and reply."""
    seconds: float
    """Seconds from the agent's start to its end."""


def output_tail(text: str) -> str:
    """Return the last ``MAX_OUTPUT_CHARS`` characters of an agent's output."""
    return text[-MAX_OUTPUT_CHARS:]
