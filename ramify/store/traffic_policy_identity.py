"""Reads and writes the file ``traffic.json`` in a store of recorded traffic.

It identifies the policy, that is, the served model that produced the traffic.

The contents of the file are defined in ``types/recorded_traffic.py``. Traffic is recorded by
``serve/traffic_recorder.py``.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import ConfigError
from ramify.types.recorded_traffic import TokenizerAndArchitecture

_FILE = "traffic.json"


def read_identity(store: Path) -> TokenizerAndArchitecture | None:
    """Return the identity of the policy that produced a store's recorded traffic.

    Returns None if the store holds no recorded traffic. Raises ConfigError if the file is damaged.
    """
    path = store / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=TokenizerAndArchitecture)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"{path} does not name a policy: {error}; restore it, or use another folder"
        ) from None


def write_identity(store: Path, identity: TokenizerAndArchitecture) -> None:
    """Mark a store as one that holds the recorded traffic of this policy."""
    (store / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(identity)) + b"\n")
