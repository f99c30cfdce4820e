"""Define the format of recorded traffic: conversations between users and a served policy.

A store of traffic names the policy that replied, and marks how each turn was recorded.

    STORE/traffic.json     the policy, as ``TokenizerAndArchitecture``
    ScoreAdded of a turn   by ``traffic``: how it was sampled, which of its tokens were redacted
                           by ``feedback``, or a scorer: rewards of the turn by name

This module is shared by the server that records (``serve/traffic_recorder.py``) and the training
that reads (``train/traffic_training.py``).
"""

from __future__ import annotations

import msgspec

from ramify.types.message import Message
from ramify.types.trajectory import Call, CallForkOrigin, Trajectory

TASK = "traffic"
"""Task name of a recorded conversation."""
RECORDER = "traffic"
"""Author of the annotations that say how a turn was recorded."""
FEEDBACK = "feedback"
"""Author and reward name of a user's feedback on a reply."""
REDACTED = "redacted"
"""Name of the per-token values that mark redacted tokens: 1 for each sampled token that was
redacted. A turn without redacted tokens has no such values.
"""
TEMPERATURE = "temperature"
"""Name under which a turn's sampling temperature is stored."""
NEXT_MESSAGE = "next_message"
"""Key in a rollout's ``metadata`` under which the user's next message after the reply is stored."""


class TokenizerAndArchitecture(msgspec.Struct, frozen=True):
    """The tokenizer and architecture of a policy, stored with recorded token ids.

    The policy's weights may change without changing this identity.
    """

    name: str
    """Path or name that the policy was loaded from, for display."""
    vocabulary: str
    """Digest of the vocabulary, which is the text of every token id."""
    architecture: str
    """Description of the architecture, such as ``qwen3 of 596,049,920 parameters``."""

    def difference(self, other: TokenizerAndArchitecture) -> str:
        """Describe how the policy ``other`` differs from this one.

        Returns an empty string if both have the same tokenizer and architecture, so that token ids
        and log-probabilities of one can be used for the other.
        """
        if self.vocabulary != other.vocabulary:
            return f"another tokenizer ({self.name}; here it is {other.name})"
        if self.architecture != other.architecture:
            return f"another base model ({self.architecture}; here it is {other.architecture})"
        return ""


def next_user_message(run: Trajectory, call: Call, turn: int) -> Message | None:
    """Return the message that the user wrote after the reply of turn ``turn``.

    Returns None if no such message was recorded.
    """
    following = [call.turns[turn + 1]] if turn + 1 < len(call.turns) else []
    forks = [
        each for each in run.calls if each.turns and each.fork == CallForkOrigin(call.id, turn)
    ]
    following += [each.turns[0] for each in forks]
    messages = (message for each in following for message in each.prompt)
    return next((message for message in messages if message.role == "user"), None)
