"""Let the ranks that ``torchrun`` started find rank 0, also after a restart.

No other process can join the group.

    all ranks on one machine     a ticket file in a folder that only this user can enter; rank 0
                                 writes a new one in each attempt
    ranks on several machines    rank 0's address, signed with the run's key, in torchrun's own
                                 store; or MASTER_ADDR:MASTER_PORT itself, if no agent keeps a store
                                 there. The key comes from RAMIFY_RUN_KEY or RAMIFY_RUN_KEY_FILE

torchrun gives its workers no common secret, and its store accepts everybody who reaches it. A
stranger can write an address into that store, but it is only believed with the run's signature. An
address of an earlier attempt leads to a process that has ended: a rank then looks again.
"""

from __future__ import annotations

import hmac
import os
import re
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.actors.connect_back import ConnectBackListener, WorkerConnectInfo
from ramify.actors.message_encoding import decode, encode
from ramify.actors.run_channel import KEY, KEY_FILE, run_key_from_environment
from ramify.errors import ConfigError, TrainError
from ramify.store.durable_files import make_folder
from ramify.store.folder_store import default_root

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_RESTARTS = "TORCHELASTIC_RESTART_COUNT"
_PUBLISHED = "ramify/rank 0"
_STORE_S = 120.0


class RankInfo(NamedTuple):
    """The settings that torchrun gave to a process: its rank, the number of ranks and the store's
    address."""

    rank: int
    size: int
    local_rank: int
    """Index of this rank on its machine, which selects its GPU."""
    address: str
    port: int
    is_local: bool
    """True if all ranks are on this machine."""

    @classmethod
    def of_environment(cls) -> RankInfo | None:
        """Read the environment variables that torchrun sets.

        Returns None if torchrun did not start this process.
        """
        if any(name not in os.environ for name in _VARIABLES):
            return None
        rank, size, address, port = (os.environ[name] for name in _VARIABLES)
        is_local = os.environ.get("LOCAL_WORLD_SIZE", "1") == size
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        return cls(int(rank), int(size), local_rank, address, int(port), is_local)


class TorchrunAddressExchange:
    """Publishes rank 0's address so that the ranks started by the same torchrun can find it."""

    def __init__(self, world: RankInfo) -> None:
        """Prepare to publish or find the address of rank 0.

        Raises ConfigError if ranks are on several machines and no secret key is set.
        """
        self._world = world
        self._key = run_key_from_environment()
        if not world.is_local and self._key is None:
            raise ConfigError(
                "torchrun started ranks on several machines, which must authenticate each other: "
                f"set {KEY}, or {KEY_FILE} to a private file, to the same secret for all of them "
                "(openssl rand -hex 32)"
            )

    def listen(self) -> ConnectBackListener:
        """Listen for the other ranks of this attempt, and publish the address.

        Only rank 0 calls this.
        """
        world = self._world
        if world.is_local:
            listener = ConnectBackListener()
            ticket = encode(WorkerConnectInfo(listener.address, listener.key, "0"))
            new = self._file.with_suffix(".new")
            with open(os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                file.write(ticket)
            new.replace(self._file)
            return listener
        assert self._key is not None
        host = socket.gethostbyname(world.address)
        if not _is_agents():
            return ConnectBackListener(host, world.port, key=self._key)
        listener = ConnectBackListener(host, key=self._key)
        signature = _signature(self._key, listener.address)
        self._connect_store().set(_PUBLISHED, f"{listener.address} {signature}")
        return listener

    def find_rank_zero_address(self) -> WorkerConnectInfo | None:
        """Return the published address of rank 0, or None if there is none yet.

        The address may be left from an earlier attempt. All ranks except rank 0 call this.
        """
        world = self._world
        if world.is_local:
            try:
                return decode(self._file.read_bytes(), WorkerConnectInfo)
            except (FileNotFoundError, msgspec.MsgspecError):
                return None
        assert self._key is not None
        address = self._published_address() if _is_agents() else f"{world.address}:{world.port}"
        return WorkerConnectInfo(address, self._key, "") if address else None

    def has_earlier_attempt(self) -> bool:
        """Return True if rank 0 of an earlier attempt began to wait for the other ranks.

        By then it had passed its checks. torchrun's restart count does not show this, because it
        differs between machines.
        """
        is_restarted = os.environ.get(_RESTARTS, "0") not in ("", "0")
        if self._world.is_local:
            return is_restarted and self._file.exists()
        return bool(self._published_address()) if _is_agents() else is_restarted

    def withdraw_address(self) -> None:
        """Remove the address that ``listen`` published.

        Rank 0 calls this when no further attempt follows.
        """
        if self._world.is_local:
            self._file.unlink(missing_ok=True)

    @property
    def _file(self) -> Path:
        run = os.environ.get("TORCHELASTIC_RUN_ID", "")
        name = re.sub(r"\W", "_", f"{run}-{self._world.port}")
        return make_folder(default_root() / "torchrun") / name

    def _published_address(self) -> str:
        """Return rank 0's address from torchrun's store.

        Returns an empty string if the store has no address with a valid signature of this run.
        """
        assert self._key is not None
        store = self._connect_store()
        if not store.check([_PUBLISHED]):
            return ""
        text = store.get(_PUBLISHED).decode(errors="replace")
        address, _, signature = text.partition(" ")
        is_ours = hmac.compare_digest(signature.encode(), _signature(self._key, address).encode())
        return address if is_ours else ""

    def _connect_store(self) -> Any:
        from torch._C._distributed_c10d import TCPStore

        world = self._world
        try:
            return TCPStore(
                world.address,
                world.port,
                world.size,
                False,
                timedelta(seconds=_STORE_S),
                wait_for_workers=False,
            )
        except Exception as error:  # torch raises several types
            raise TrainError(
                f"rank {world.rank} cannot reach torchrun's store at {world.address}:{world.port}: "
                f"{str(error).splitlines()[0]}"
            ) from error


def _is_agents() -> bool:
    """Return True if the store at MASTER_ADDR belongs to torchrun's agent, and so outlives this
    process.
    """
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _signature(key: bytes, address: str) -> str:
    return hmac.digest(key, b"ramify rank 0 at " + address.encode(), "sha256").hex()
