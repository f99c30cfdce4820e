"""The format of recorded traffic, that is, of conversations with a served policy. It defines how a
store names the policy that replied, and how it marks the facts about each turn.

    STORE/traffic.json     the policy, as ``PolicyArchitectureIdentity``
    ScoreAdded of a turn   by ``traffic``: how it was sampled, which of its tokens were redacted
                           by ``feedback``, or a scorer: rewards of the turn by name

This module is shared by the server that records (``serve/traffic_recorder.py``) and the training
that reads (``train/traffic.py``).
"""

from __future__ import annotations

import msgspec

from ramify.types.message import Message
from ramify.types.trajectory import Call, Fork, Trajectory

TASK = "traffic"
"""Task of a recorded conversation."""
RECORDER = "traffic"
"""Author of how a turn was recorded."""
FEEDBACK = "feedback"
"""Author and reward of what the user of a reply said about it."""
REDACTED = "redacted"
"""Token numbers of a turn: 1 for each sampled token that was redacted. None if none was."""
TEMPERATURE = "temperature"
"""Number of a turn: the temperature that it was sampled at."""
NEXT_MESSAGE = "next_message"
"""Name in a rollout's ``metadata`` of what the user wrote after the reply."""


class PolicyArchitectureIdentity(msgspec.Struct, frozen=True):
    """The tokenizer and the architecture of a policy, recorded beside its token ids. The policy's
    weights may change without changing this identity."""

    name: str
    """Path or name that it was loaded from; shown to people."""
    vocabulary: str
    """Digest of the vocabulary: the text of every id."""
    architecture: str
    """``qwen3 of 596,049,920 parameters``"""

    def difference(self, other: PolicyArchitectureIdentity) -> str:
        """Return a description of how the policy ``other`` differs from this one. The text is empty
        if both have the same tokenizer and architecture, so that token ids and log-probabilities of
        one can be used for the other."""
        if self.vocabulary != other.vocabulary:
            return f"another tokenizer ({self.name}; here it is {other.name})"
        if self.architecture != other.architecture:
            return f"another base model ({self.architecture}; here it is {other.architecture})"
        return ""


def next_user_message(run: Trajectory, call: Call, turn: int) -> Message | None:
    """Return the message that the user wrote after the reply of turn ``turn``, or None if no such
    message was recorded."""
    following = [call.turns[turn + 1]] if turn + 1 < len(call.turns) else []
    forks = [each for each in run.calls if each.turns and each.fork == Fork(call.id, turn)]
    following += [each.turns[0] for each in forks]
    messages = (message for each in following for message in each.prompt)
    return next((message for message in messages if message.role == "user"), None)
