"""Who connects to a run, over real sockets."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError, Pipe
from multiprocessing.connection import Client, Connection
from typing import Any

import msgspec
import pytest

from ramify.train.handshake import authenticate
from ramify.train.placement.rollout_worker import WorkerMessage, receive

KEY = b"the key of this run"
Address = tuple[str, int]


def joins(key: bytes, word: object) -> Callable[[Address], None]:
    def join(address: Address) -> None:
        try:
            with Client(address, authkey=key) as connection:
                connection.send(word)
                connection.recv()
        except (AuthenticationError, EOFError, OSError):
            pass

    return join


def zero_variance(address: Address) -> None:
    with socket.create_connection(address) as peer:
        peer.recv(1000)
        peer.recv(1000)


def shouts(address: Address) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        peer.recv(1000)


def leaves(address: Address) -> None:
    socket.create_connection(address).close()


@pytest.mark.parametrize(
    ("who", "said"),
    [
        (joins(KEY, (1, "talk")), (1, "talk")),
        (joins(b"another key", (1, "talk")), None),
        (zero_variance, None),
        (shouts, None),
        (leaves, None),
    ],
)
def test_who_has_the_key_is_heard_and_nobody_else_is_waited_for(
    who: Callable[[Address], None], said: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=who, args=(server.getsockname(),))
        thread.start()
        joined = authenticate(server.accept()[0], KEY, 2.0)
        if joined is not None:
            joined[0].send("go on")
            joined[0].close()
        thread.join()
    assert (joined[1] if joined is not None else None) == said


def test_what_a_runner_says_is_decoded_and_never_unpickled() -> None:
    class Pickled:
        def __reduce__(self) -> Any:
            return pytest.fail, ("code of the other side was run",)

    ours, theirs = Pipe()
    assert isinstance(ours, Connection)
    told = WorkerMessage("done", 3, b"{}", (-(2**62), 7))
    theirs.send_bytes(msgspec.msgpack.encode(told))
    assert receive(ours) == told
    theirs.send_bytes(pickle.dumps(Pickled()))
    with pytest.raises(msgspec.MsgspecError):
        receive(ours)
