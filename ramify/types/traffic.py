"""What recorded traffic says about itself: whose conversations a store holds, and the names of what
is known about a turn.

    STORE/traffic.json     the policy, as ``PolicyIdentity``
    ScoreAdded of a turn   by ``traffic``: how it was sampled, which of its tokens were redacted
                           by ``feedback``, or a scorer: rewards of the turn by name

Shared by the server that records (``serve/traffic_recorder.py``) and the training that reads
(``train/traffic.py``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import ConfigError

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
_FILE = "traffic.json"


class PolicyIdentity(msgspec.Struct, frozen=True):
    """The tokenizer and the architecture of a policy, as recorded beside its token ids. Its weights
    may change."""

    name: str
    """Path or name that it was loaded from; shown to people."""
    vocabulary: str
    """Digest of the vocabulary: the text of every id."""
    architecture: str
    """``qwen3 of 596,049,920 parameters``"""

    def difference(self, other: PolicyIdentity) -> str:
        """How ``other`` differs; empty if ids and log-probabilities of one can be used for the
        other."""
        if self.vocabulary != other.vocabulary:
            return f"another tokenizer ({self.name}; here it is {other.name})"
        if self.architecture != other.architecture:
            return f"another base model ({self.architecture}; here it is {other.architecture})"
        return ""


def read_identity(store: Path) -> PolicyIdentity | None:
    """The policy whose traffic the store in this folder holds; None for any other store. Raises
    ConfigError for a damaged file."""
    path = store / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PolicyIdentity)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not name a policy: {error}; delete the store") from None


def write_identity(store: Path, identity: PolicyIdentity) -> None:
    """Mark the store in this folder as one of the traffic of ``identity``."""
    (store / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(identity)) + b"\n")
