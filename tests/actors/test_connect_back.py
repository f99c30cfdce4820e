"""Channels of processes that connect back to a run, over real sockets."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from ramify.actors.child_process import ChildProcess, pythonpath_environment
from ramify.actors.connect_back import ConnectBackListener, WorkerConnectInfo
from ramify.actors.message_encoding import decode, encode
from ramify.actors.run_channel import LOOPBACK, AuthenticatedChannel, ChannelListener, connect
from ramify.errors import ConfigError

KEY = b"the key of this run"
TCP = "127.0.0.2"
"""Another address of this machine, which stands for one that other machines reach."""


class Word(msgspec.Struct, frozen=True):
    text: str


@pytest.fixture(params=[LOOPBACK, TCP], ids=["unix", "tcp"])
def listener(request: pytest.FixtureRequest) -> Iterator[ChannelListener]:
    with ChannelListener(request.param, key=KEY) as found:
        yield found


def reached(address: str) -> socket.socket:
    if address.startswith("/"):
        peer = socket.socket(socket.AF_UNIX)
        peer.connect(address)
        return peer
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)))


def sends(data: bytes) -> Callable[[str], None]:
    def join(address: str) -> None:
        with reached(address) as peer, contextlib.suppress(OSError):
            peer.sendall(data)
            while peer.recv(1000):
                pass

    return join


def has_another_key(address: str) -> None:
    with contextlib.suppress(OSError):
        connect(address, b"another key", Word("I am rank 1"), 5.0).close()


def repeats_the_nonce(address: str) -> None:
    """Sends back what it received, as an answer that needs no key."""
    with reached(address) as peer, contextlib.suppress(OSError):
        peer.sendall(peer.recv(1000) * 2)
        assert peer.recv(1000) == b""


@pytest.mark.parametrize(
    "stranger",
    [
        has_another_key,
        repeats_the_nonce,
        sends(b""),
        sends(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"\0" * 64),
        lambda address: reached(address).close(),
    ],
)
def test_stranger_is_not_accepted_and_delays_nobody(
    listener: ChannelListener, stranger: Callable[[str], None]
) -> None:
    """The silent one is still connected when the peer with the key is accepted."""
    threads = [threading.Thread(target=stranger, args=(listener.address,)) for _ in range(50)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    ours: list[AuthenticatedChannel] = []

    def join() -> None:
        ours.append(connect(listener.address, KEY, Word("I am rank 1")))

    joining = threading.Thread(target=join)
    joining.start()
    # A tenth of the time that a silent peer may take.
    channel, first = listener.accept(Word, 5.0)
    joining.join()
    assert first == Word("I am rank 1")
    with channel, ours[0]:
        channel.send(Word("go on"))
        assert ours[0].receive(Word) == Word("go on")
    with pytest.raises(TimeoutError):
        listener.accept(Word, 0.1)
    listener.close()
    for thread in threads:
        thread.join()


def test_hundreds_of_silent_strangers_make_room_for_one_peer(listener: ChannelListener) -> None:
    accepted: list[Word] = []

    def accept() -> None:
        channel, first = listener.accept(Word, 30.0)
        with channel:
            accepted.append(first)

    accepting = threading.Thread(target=accept)
    accepting.start()
    with contextlib.ExitStack() as stack:
        for _ in range(600):
            stack.enter_context(reached(listener.address))
        connect(listener.address, KEY, Word("last")).close()
        accepting.join()
    assert accepted == [Word("last")]


def test_nothing_is_sent_to_a_listener_without_the_key() -> None:
    with socket.create_server((TCP, 0)) as server:
        received = b""

        def pretend() -> None:
            nonlocal received
            peer, _ = server.accept()
            with peer:
                peer.sendall(b"n" * 32)
                received = peer.recv(1000)
                peer.sendall(b"p" * 32)
                received += peer.recv(1000)

        thread = threading.Thread(target=pretend)
        thread.start()
        host, port = server.getsockname()
        with pytest.raises(ConnectionRefusedError, match="does not have this run's key"):
            connect(f"{host}:{port}", KEY, Word("a secret"))
        thread.join()
    assert len(received) == 64
    assert KEY not in received
    assert b"secret" not in received


def test_socket_of_one_machine_is_in_a_private_folder_that_ends_with_it() -> None:
    with ConnectBackListener() as listener:
        folder = Path(listener.address).parent
        assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not folder.exists()


class Executed:
    def __reduce__(self) -> object:
        return pytest.fail, ("code of the other side was run",)


def test_message_of_another_type_is_an_error() -> None:
    import pickle

    one, other = socket.socketpair()
    with AuthenticatedChannel(one) as ours, AuthenticatedChannel(other) as theirs:
        theirs.send(WorkerConnectInfo("a", b"b", "c"))
        with pytest.raises(msgspec.MsgspecError):
            ours.receive(Word)
        pickled = pickle.dumps(Executed())
        other.sendall(len(pickled).to_bytes(8, "little") + pickled)
        with pytest.raises(msgspec.MsgspecError):
            ours.receive(Word)
        with pytest.raises(TypeError, match="a Executed cannot be sent in a message"):
            theirs.send(Executed())


def test_arrays_and_tensors_arrive_bit_by_bit() -> None:
    numpy, torch = pytest.importorskip("numpy"), pytest.importorskip("torch")
    tensors = [
        torch.tensor([1.5, float("nan"), -0.0], dtype=torch.bfloat16),
        torch.empty((0, 3)),
        torch.tensor(7),
        torch.arange(6).reshape(2, 3).t(),
    ]
    found = decode(encode(tensors), list[torch.Tensor])
    for ours, theirs in zip(found, tensors, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype == theirs.dtype
        assert encode(ours) == encode(theirs)
    array = numpy.arange(12, dtype=numpy.float32).reshape(3, 4)[:, ::2]
    (again,) = decode(encode([array]), list[object])
    assert again.tolist() == array.tolist()
    again[0, 0] = 5  # it may be written
    for bad in (("O", (1,), b"12345678"), ("<f4", (5,), b"1234"), ("system", (1,), b"1")):
        for code in (1, 2, 3):
            ext = msgspec.msgpack.Ext(code, msgspec.msgpack.encode(bad))
            with pytest.raises(msgspec.MsgspecError):
                decode(msgspec.msgpack.encode(ext), object)


CONNECTS = """
import os, sys
from ramify.actors.connect_back import connect_back
channel = connect_back()
channel.send([channel.receive(int) + 1, os.environ.copy(), sys.argv])
"""


def test_child_connects_back_and_its_environment_has_no_key() -> None:
    with ConnectBackListener() as listener:
        reached(listener.address).close()
        child = ChildProcess(
            [sys.executable, "-c", CONNECTS],
            environment=pythonpath_environment(),
            stdin=listener.create_ticket("it"),
        )
        channel, name = listener.accept(str, 60.0)
    with channel:
        channel.send(4)
        number, environment, arguments = channel.receive(tuple[int, dict[str, str], list[str]])
    assert (name, number) == ("it", 5)
    shown = repr([environment, arguments, os.environ.copy()])
    assert listener.key.hex() not in shown
    assert listener.address not in shown
    assert child.wait() == 0


def test_accept_stops_waiting_when_child_has_ended(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-m", "nonesuch"], log=tmp_path / "log")

    def look() -> None:
        if child.poll() is not None:
            raise ConfigError(child.exit_reason())

    with (
        ConnectBackListener() as listener,
        pytest.raises(ConfigError, match=r"ended with status 1; .*nonesuch"),
    ):
        listener.accept(str, 60.0, look)


def test_accept_times_out_without_connection() -> None:
    with (
        ConnectBackListener() as listener,
        pytest.raises(TimeoutError, match=r"no connection within 0\.2 s"),
    ):
        listener.accept(str, 0.2)
