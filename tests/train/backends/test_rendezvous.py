"""Ranks of torchrun find rank 0, attempt after attempt, and believe nothing that a stranger wrote."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ramify.actors.connect_back import ConnectBackListener, WorkerConnectInfo
from ramify.actors.rank_key_value_store import KeyValueStoreClient, KeyValueStoreServer
from ramify.actors.run_channel import AuthenticatedChannel, connect
from ramify.errors import ConfigError, TrainError
from ramify.train.backends.torchrun_rendezvous import RankInfo, TorchrunAddressExchange

KEY = "a key that all machines were given"


@pytest.fixture
def agent_store(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The store of torchrun's agent, which accepts everybody."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    monkeypatch.setenv("RAMIFY_RUN_KEY", KEY)
    return store


def member(rank: int, port: int, is_local: bool) -> TorchrunAddressExchange:
    return TorchrunAddressExchange(RankInfo(rank, 2, rank, "127.0.0.1", port, is_local))


def joins(ticket: WorkerConnectInfo, listener: ConnectBackListener) -> int:
    """Connect with a ticket; returns what the listener hears."""
    joining = threading.Thread(target=lambda: connect(ticket.address, ticket.key, 1).close())
    joining.start()
    channel, rank = listener.accept(int, 30.0)
    with channel:
        joining.join()
    return rank


def test_several_machines_find_rank_0_of_each_attempt_by_its_signature(agent_store: Any) -> None:
    first, other = (member(rank, agent_store.port, False) for rank in (0, 1))
    assert other.find_rank_zero_address() is None
    assert not first.has_earlier_attempt()
    agent_store.set("ramify/rank 0", "127.0.0.1:9 " + "0" * 64)  # a stranger's
    assert other.find_rank_zero_address() is None
    assert not first.has_earlier_attempt()
    addresses = []
    for _ in range(2):
        with first.listen() as listener:
            ticket = other.find_rank_zero_address()
            assert ticket is not None
            assert (ticket.address, ticket.key) == (listener.address, KEY.encode())
            assert joins(ticket, listener) == 1
            addresses.append(ticket.address)
        assert first.has_earlier_attempt()
    assert len(set(addresses)) == 2
    signed = agent_store.get("ramify/rank 0").decode()
    assert KEY not in signed
    agent_store.set("ramify/rank 0", signed.replace("/socket", "/another"))
    assert other.find_rank_zero_address() is None


def test_one_machine_meets_in_a_private_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAMIFY_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    first, other = (member(rank, 29500, True) for rank in (0, 1))
    assert other.find_rank_zero_address() is None
    with first.listen() as listener:
        (file,) = (tmp_path / "home/torchrun").iterdir()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
        ticket = other.find_rank_zero_address()
        assert ticket is not None
        assert joins(ticket, listener) == 1
    assert not first.has_earlier_attempt()
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert first.has_earlier_attempt()
    first.withdraw_address()
    assert not first.has_earlier_attempt()
    assert other.find_rank_zero_address() is None


def test_several_machines_need_a_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ConfigError, match=r"torchrun started ranks on several machines.*set RAMIFY_RUN_KEY"
    ):
        member(0, 1, False)
    monkeypatch.setenv("RAMIFY_RUN_KEY", "short")
    with pytest.raises(ConfigError, match="RAMIFY_RUN_KEY has 5 characters, fewer than 16"):
        member(0, 1, False)
    monkeypatch.delenv("RAMIFY_RUN_KEY")
    file = tmp_path / "key"
    monkeypatch.setenv("RAMIFY_RUN_KEY_FILE", str(file))
    with pytest.raises(ConfigError, match="cannot be read"):
        member(0, 1, False)
    file.touch(0o600)
    with pytest.raises(ConfigError, match="is empty: make a key"):
        member(0, 1, False)
    file.write_text(KEY + "\n")
    file.chmod(0o644)
    with pytest.raises(ConfigError, match="is accessible to other users: run chmod 600"):
        member(0, 1, False)
    file.chmod(0o600)
    assert member(1, 1, False).find_rank_zero_address().key == KEY.encode()  # type: ignore[union-attr]


# --- the store of a group


def stores(
    look: Callable[[], None] = lambda: None,
) -> tuple[KeyValueStoreServer, KeyValueStoreClient, AuthenticatedChannel]:
    import socket

    ours, theirs = (AuthenticatedChannel(each) for each in socket.socketpair())
    return KeyValueStoreServer([ours], look), KeyValueStoreClient(theirs), theirs


def test_store_has_the_operations_of_torch() -> None:
    host, other, channel = stores()
    prefixed = torch.distributed.PrefixStore("a", other)
    try:
        host.store.set("a/x", "1")
        assert prefixed.get("x") == b"1"
        assert prefixed.check(["x"])
        assert not prefixed.check(["x", "y"])
        assert [prefixed.add("n", 2), host.store.add("a/n", 3)] == [2, 5]
        assert prefixed.compare_set("c", "", "first") == b"first"
        assert host.store.compare_set("a/c", "first", "second") == b"second"
        assert prefixed.delete_key("c")
        threading.Timer(0.3, host.store.set, ("a/late", b"2")).start()
        prefixed.wait(["late"], timedelta(seconds=30))
        with pytest.raises(torch.distributed.DistStoreError, match=r"timed out after 0\.1 s"):
            prefixed.wait(["never"], timedelta(seconds=0.1))
    finally:
        host.close()
        channel.close()


def test_wait_fails_with_the_reason_once_a_rank_has_ended() -> None:
    def look() -> None:
        raise TrainError("rank 1 did not start: it ended with status 3")

    host, other, channel = stores(look)
    began = time.monotonic()
    with pytest.raises(torch.distributed.DistStoreError, match="rank 1 did not start: it ended"):
        host.store.wait(["never"], timedelta(seconds=600))
    assert time.monotonic() - began < 300
    host.close()
    with pytest.raises(
        torch.distributed.DistNetworkError, match="rank 0, which hosts the rendezvous store"
    ):
        other.check(["x"])
    channel.close()


# --- the connections of a group

MEMBER = """
import os, sys
from datetime import timedelta
import torch
from torch import distributed as dist
from ramify.actors.rank_group_authentication import verify_members
from ramify.errors import TrainError
rank, path, key = int(sys.argv[1]), sys.argv[2], sys.argv[3].encode()
gloo = dist.ProcessGroupGloo
options = gloo._Options()
options._timeout, options._devices = timedelta(seconds=60), [gloo.create_device(interface="lo")]
group = gloo(dist.FileStore(path, 3), rank, 3, options)
try:
    verify_members(group, key)
    total = torch.ones(1)
    group.allreduce([total]).wait()
    print("proved", float(total))
except TrainError as error:
    print(error)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.parametrize("keys", ["aaa", "aab"])
def test_group_proves_its_key_over_every_connection(keys: str, tmp_path: Path) -> None:
    """A member without the key got into the group, as one that gloo took for another rank does."""
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, str(rank), str(tmp_path / "store"), key],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            text=True,
        )
        for rank, key in enumerate(keys)
    ]
    told = [each.communicate(timeout=250)[0].strip() for each in members]
    if keys == "aaa":
        assert told == ["proved 3.0"] * 3
    else:
        refused = "another program connected as rank 2 without this run's key"
        assert all(text.startswith(refused) for text in told[:2]), told
        assert "without this run's key" in told[2]
