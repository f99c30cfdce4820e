"""How an agent that was written elsewhere ended its work on one item."""

from __future__ import annotations

import enum

AGENT_RECORD = "agent"
"""Key in ``Trajectory.metadata`` of the record of how the rollout's agent ended."""


class AgentOutcome(enum.StrEnum):
    """How an agent ended.

    >>> train.AgentOutcome("hung") is train.AgentOutcome.HUNG
    True
    """

    ENDED = "ended"
    """By itself, with exit code 0. Only this outcome is scored and learned from."""
    CRASHED = "crashed"
    """With another exit code, by a signal, or with an exception."""
    HUNG = "hung"
    """It was stopped after its time limit."""
    NEVER_CALLED = "never_called"
    """It sent no request to its address."""
    OUTLIVED = "outlived"
    """It left processes that still ran some time after it. They were ended."""
    CANCELLED = "cancelled"
    """It was stopped with its rollout."""

    @property
    def is_failure(self) -> bool:
        """True unless the agent ended by itself and well, or with its rollout."""
        return self not in (AgentOutcome.ENDED, AgentOutcome.CANCELLED)
