"""How an external agent, one that was not written with Ramify, ended its work on one task item."""

from __future__ import annotations

import enum

AGENT_RECORD = "agent"
"""Key in ``Trajectory.metadata`` of the record of how the rollout's agent ended."""


class AgentOutcome(enum.StrEnum):
    """The way in which an external agent ended its work.

    >>> train.AgentOutcome("hung") is train.AgentOutcome.HUNG
    True
    """

    ENDED = "ended"
    """The agent ended by itself with exit code 0. Only such a rollout is always scored."""
    CRASHED = "crashed"
    """The agent ended with another exit code, by a signal, or with an exception. Such a rollout is
    scored only with ``scores_crashes``."""
    HUNG = "hung"
    """The agent was stopped at its time limit."""
    NEVER_CALLED = "never_called"
    """The agent sent no request to its address."""
    OUTLIVED = "outlived"
    """The agent left processes that still ran some time after it, and that were ended then."""
    CANCELLED = "cancelled"
    """The agent was stopped together with its rollout."""

    @property
    def is_failure(self) -> bool:
        """True for all outcomes except ``ENDED`` and ``CANCELLED``, so the agent did not end as it
        should."""
        return self not in (AgentOutcome.ENDED, AgentOutcome.CANCELLED)
