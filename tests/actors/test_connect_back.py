"""Authentication of processes that connect back to a run, over real sockets."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Callable
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client
from pathlib import Path
from typing import Any

import pytest

from ramify.actors.child_process import ChildProcess, import_path
from ramify.actors.connect_back import Listener, authenticate
from ramify.errors import ConfigError

KEY = b"the key of this run"
Address = tuple[str, int]


def connects_with_key(key: bytes, word: object) -> Callable[[Address], None]:
    def join(address: Address) -> None:
        try:
            with Client(address, authkey=key) as connection:
                connection.send(word)
                connection.recv()
        except (AuthenticationError, EOFError, OSError):
            pass

    return join


def stays_silent(address: Address) -> None:
    with socket.create_connection(address) as peer:
        peer.recv(1000)
        peer.recv(1000)


def sends_http_request(address: Address) -> None:
    with socket.create_connection(address) as peer:
        peer.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        peer.recv(1000)


def disconnects_at_once(address: Address) -> None:
    socket.create_connection(address).close()


@pytest.mark.parametrize(
    ("behave", "expected"),
    [
        (connects_with_key(KEY, (1, "talk")), (1, "talk")),
        (connects_with_key(b"another key", (1, "talk")), None),
        (stays_silent, None),
        (sends_http_request, None),
        (disconnects_at_once, None),
    ],
)
def test_only_peer_with_the_key_is_authenticated_and_others_do_not_block(
    behave: Callable[[Address], None], expected: Any
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=behave, args=(server.getsockname(),))
        thread.start()
        joined = authenticate(server.accept()[0], KEY, 2.0)
        if joined is not None:
            joined[0].send("go on")
            joined[0].close()
        thread.join()
    assert (joined[1] if joined is not None else None) == expected


CONNECTS = """
from ramify.actors.child_process import ChildProcess, import_path
from ramify.actors.connect_back import connect_back
connection = connect_back()
connection.send(connection.recv() + 1)
"""


def test_child_connects_back_despite_other_connections() -> None:
    with Listener() as listener:
        disconnects_at_once(listener.address)
        environment = {**import_path(), **listener.environment("it")}
        child = ChildProcess([sys.executable, "-c", CONNECTS], environment=environment)
        connection, name = listener.accept(60.0)
    with connection:
        connection.send(4)
        assert (name, connection.recv()) == ("it", 5)
    assert child.wait() == 0


def test_accept_stops_waiting_when_child_has_ended(tmp_path: Path) -> None:
    child = ChildProcess([sys.executable, "-m", "nonesuch"], log=tmp_path / "log")

    def look() -> None:
        if child.poll() is not None:
            raise ConfigError(child.exit_reason())

    with (
        Listener() as listener,
        pytest.raises(ConfigError, match=r"ended with status 1; .*nonesuch"),
    ):
        listener.accept(60.0, look)


def test_accept_times_out_without_connection() -> None:
    with Listener() as listener, pytest.raises(TimeoutError, match=r"no connection within 0\.2 s"):
        listener.accept(0.2)
