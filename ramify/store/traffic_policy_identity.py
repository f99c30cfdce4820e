"""The file that says whose recorded traffic a store holds: ``STORE/traffic.json``.

Not here: what it holds (``types/traffic.py``), and who records (``serve/traffic_recorder.py``).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from ramify.errors import ConfigError
from ramify.types.traffic import PolicyArchitectureIdentity

_FILE = "traffic.json"


def read_identity(store: Path) -> PolicyArchitectureIdentity | None:
    """The policy whose traffic the store in this folder holds; None for any other store. Raises
    ConfigError for a damaged file."""
    path = store / _FILE
    try:
        return msgspec.json.decode(path.read_bytes(), type=PolicyArchitectureIdentity)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"{path} does not name a policy: {error}; delete the store") from None


def write_identity(store: Path, identity: PolicyArchitectureIdentity) -> None:
    """Record in a folder that its store contains the traffic of the policy ``identity``."""
    (store / _FILE).write_bytes(msgspec.json.format(msgspec.json.encode(identity)) + b"\n")
