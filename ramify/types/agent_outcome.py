"""Classify how an external agent ended its work on one task item.

An external agent is one that was not written with Ramify.
"""

from __future__ import annotations

import enum

AGENT_RECORD = "agent"
"""Key in ``Trajectory.metadata`` under which a rollout records how its agent ended."""


class AgentExitReason(enum.StrEnum):
    """The way in which an external agent's work ended, such as normally, by a crash or at its time
    limit.

    >>> train.AgentExitReason("hung") is train.AgentExitReason.HUNG
    True
    """

    ENDED = "ended"
    """The agent ended by itself with exit code 0. Rollouts with this outcome are always scored."""
    CRASHED = "crashed"
    """The agent ended with another exit code, by a signal, or with an exception. Its rollout is
    scored only with ``scores_crashes``."""
    HUNG = "hung"
    """The agent was stopped at its time limit."""
    NEVER_CALLED = "never_called"
    """The agent sent no request to its address."""
    OUTLIVED = "outlived"
    """The agent ended but left processes running, which were killed after a grace period."""
    CANCELLED = "cancelled"
    """The agent was stopped because its rollout was cancelled."""

    @property
    def is_failure(self) -> bool:
        """True if the agent's work ended in a failure, such as a crash.

        These are all outcomes except ``ENDED`` and ``CANCELLED``.
        """
        return self not in (AgentExitReason.ENDED, AgentExitReason.CANCELLED)
