"""Open authenticated connections between the processes of a run, on one or several machines.

    listener ── nonce a ──────────────────────────────────────> peer
             <─ nonce b, HMAC(key, "peer", a, b) ──────────────
             ── HMAC(key, "listener", a, b) ──────────────────>
             <═ frames: length, message (``message_encoding.py``) ══════>

Both sides prove that they have the key before anything else is sent; the key itself is never sent.
Processes on one machine use a Unix socket, in a folder that only their user can enter. Processes on
several machines use a TCP port, to which any process may connect. Peers are authenticated
concurrently, so a silent, slow or unauthorized peer does not delay the others.

``connect_back.py`` brings the key to a started process. Frames are neither encrypted nor signed:
between machines, an attacker who controls the network can read and change them.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import selectors
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec

from ramify.actors.message_encoding import decode, encode
from ramify.errors import ConfigError

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
PROOF_S = 10.0
"""Time limit in seconds for a peer to prove that it has the key and to send its first frame."""
_NONCE = _PROOF = 32
_LENGTH = 8
_MAX_FIRST = 1 << 16
"""Maximum size in bytes of a peer's first frame."""
_MAX_PENDING = 256
"""Maximum number of peers that are authenticated at the same time. Another peer displaces the
oldest one."""
_LOOK_S = 0.5
_POLL_S = 0.01
_MAX_PATH = 100
"""Length in bytes that every system allows for the path of a Unix socket."""


class AuthenticatedChannel:
    """An authenticated connection over which two processes exchange messages.

    Several threads may send at the same time, but only one may receive.
    """

    def __init__(self, peer: socket.socket, key: bytes = b"") -> None:
        peer.settimeout(None)
        self.key = key
        """The key that both sides have proved to have."""
        self._peer = peer
        self._sending = threading.Lock()

    def send(self, message: Any) -> None:
        """Send one message to the process at the other end of the channel.

        Raises OSError if the peer is gone.
        """
        data = encode(message)
        with self._sending:
            self._peer.sendall(len(data).to_bytes(_LENGTH, "little"))
            self._peer.sendall(data)

    def receive(self, kind: type[T] | Any) -> T:
        """Wait for the next message, and decode it as the type ``kind``.

        Raises EOFError if the peer has closed the channel, and MsgspecError if the message has
        another type.
        """
        length = int.from_bytes(self._receive_exactly(_LENGTH), "little")
        found: T = decode(self._receive_exactly(length), kind)
        return found

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Wait up to ``timeout_s`` seconds for a message, or for the peer to close the channel.

        Returns True if either happens. Raises OSError if this side has closed the channel.
        """
        if self._peer.fileno() < 0:
            raise OSError("the channel is closed")
        poll = select.poll()
        poll.register(self._peer, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    @property
    def is_ended(self) -> bool:
        """True if either side has closed the channel and every message has been received."""
        try:
            return self._peer.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def shutdown(self) -> None:
        """Shut down the connection in both directions without closing its socket.

        This wakes every thread that is sending or receiving on it.
        """
        with contextlib.suppress(OSError):
            self._peer.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket of this end of the connection.

        Calling this again has no effect.
        """
        self._peer.close()

    def __enter__(self) -> AuthenticatedChannel:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _receive_exactly(self, length: int) -> memoryview:
        data = memoryview(bytearray(length))
        at = 0
        while at < length:
            count = self._peer.recv_into(data[at:])
            if not count:
                raise EOFError
            at += count
        return data


class ChannelListener:
    """Accepts connections from processes that have the run's key, and returns them as channels."""

    def __init__(self, host: str = LOOPBACK, port: int = 0, *, key: bytes = b"") -> None:
        """Start to listen for connections from other processes of the run.

        ``host`` is the address at which other processes reach this one.

        On a loopback address, a Unix socket is used if the system supports it, and ``port`` is
        ignored. If no ``key`` is given, a new one is generated.
        """
        self.key = key or secrets.token_bytes(32)
        self._folder = ""
        if host == LOOPBACK and hasattr(socket, "AF_UNIX"):
            # Systems limit the length of a Unix socket's path, so a deep temporary folder is not
            # used.
            root = tempfile.gettempdir()
            self._folder = tempfile.mkdtemp(
                prefix="ramify-", dir=root if len(root) < _MAX_PATH // 2 else "/tmp"
            )
            path = os.path.join(self._folder, "socket")
            self._server = socket.socket(socket.AF_UNIX)
            self._server.bind(path)
            self._server.listen(_MAX_PENDING)
            self.address = path
        else:
            self._server = socket.create_server((host, port), backlog=_MAX_PENDING)
            self.address = f"{host}:{self._server.getsockname()[1]}"
        self._server.setblocking(False)
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ)
        self._pending: list[_Proof] = []

    def accept(
        self, kind: type[T] | Any, wait_s: float, look: Callable[[], None] = lambda: None
    ) -> tuple[AuthenticatedChannel, T]:
        """Accept the next connection from a process that has the run's key.

        Returns its channel and its first message, decoded as the type ``kind``.

        ``look`` is called while waiting. It should raise an error if the peer's process has ended.
        Raises TimeoutError after ``wait_s`` seconds.
        """
        until = time.monotonic() + wait_s
        looked = time.monotonic()
        while True:
            ready = self._selector.select(max(0.0, min(_LOOK_S, until - time.monotonic())))
            for key, _ in ready:
                if key.data is None:  # the listening socket
                    self._take_peers()
                elif (first := self._advance_authentication(key.data)) is not None:
                    with contextlib.suppress(msgspec.MsgspecError):
                        message: T = decode(first, kind)
                        return AuthenticatedChannel(key.data.peer, self.key), message
                    # It has the key, but sent another kind of message. It is not pending any more.
                    key.data.peer.close()
            now = time.monotonic()
            for proof in [each for each in self._pending if now > each.until]:
                self._drop(proof)
            # Look at intervals even under a flood of unauthorized connections.
            if not ready or now - looked > _LOOK_S:
                looked = now
                look()
            if now >= until:
                raise TimeoutError(f"no connection within {wait_s:g} s")

    def close(self) -> None:
        for proof in list(self._pending):
            self._drop(proof)
        self._selector.close()
        self._server.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _take_peers(self) -> None:
        for _ in range(_MAX_PENDING):
            try:
                peer, _ = self._server.accept()
            except OSError:  # no other peer waits, or it has disconnected
                return
            if len(self._pending) >= _MAX_PENDING:
                self._drop(self._pending[0])
            proof = _Proof(peer, self.key)
            self._pending.append(proof)
            self._selector.register(peer, selectors.EVENT_READ, proof)

    def _advance_authentication(self, proof: _Proof) -> bytes | None:
        """Continue a peer's authentication with the data that has arrived from it.

        Returns the peer's first message, or None if data is missing or the peer was dropped.
        """
        try:
            first = proof.advance()
        except (OSError, EOFError):
            self._drop(proof)
            return None
        if first is not None:
            self._pending.remove(proof)
            self._selector.unregister(proof.peer)
        return first

    def _drop(self, proof: _Proof) -> None:
        self._pending.remove(proof)
        self._selector.unregister(proof.peer)
        proof.peer.close()


class _Proof:
    """The handshake in which a listener checks that a connected peer has the run's key.

    It ends with the peer's first message.
    """

    def __init__(self, peer: socket.socket, key: bytes) -> None:
        self.peer = peer
        self.until = time.monotonic() + PROOF_S
        self._key = key
        self._nonce = secrets.token_bytes(_NONCE)
        self._received = b""
        self._is_proved = False
        peer.setblocking(False)
        with contextlib.suppress(OSError):
            peer.send(self._nonce)

    def advance(self) -> bytes | None:
        """Continue the handshake with newly arrived data.

        Returns the peer's first message once it is complete, and None before that. Raises EOFError
        or OSError if the peer has disconnected or has another key.
        """
        # Never read beyond the frame: the next byte belongs to the channel.
        while (missing := self._num_missing_bytes()) > 0:
            try:
                block = self.peer.recv(missing)
            except BlockingIOError:
                return None
            if not block:
                raise EOFError
            self._received += block
            if not self._is_proved and len(self._received) == _NONCE + _PROOF:
                self._check()
        return self._received[_LENGTH:]

    def _num_missing_bytes(self) -> int:
        if not self._is_proved:
            return _NONCE + _PROOF - len(self._received)
        if len(self._received) < _LENGTH:
            return _LENGTH - len(self._received)
        length = int.from_bytes(self._received[:_LENGTH], "little")
        if length > _MAX_FIRST:
            raise EOFError
        return _LENGTH + length - len(self._received)

    def _check(self) -> None:
        theirs, proof = self._received[:_NONCE], self._received[_NONCE:]
        if not hmac.compare_digest(proof, _proof(self._key, b"peer", self._nonce, theirs)):
            raise EOFError
        self.peer.send(_proof(self._key, b"listener", self._nonce, theirs))
        self._received, self._is_proved = b"", True


def connect(address: str, key: bytes, first: Any, wait_s: float = PROOF_S) -> AuthenticatedChannel:
    """Connect to a listener, check that it has the run's key, and send the first message.

    Raises OSError if no listener answers at the address, or if it has another key.
    """
    peer = _open_connection(address, wait_s)
    try:
        nonce = _read(peer, _NONCE)
        ours = secrets.token_bytes(_NONCE)
        peer.sendall(ours + _proof(key, b"peer", nonce, ours))
        if not hmac.compare_digest(_read(peer, _PROOF), _proof(key, b"listener", nonce, ours)):
            raise ConnectionRefusedError(
                f"the process at {address} does not have this run's key: give both the same key, "
                "or correct the address"
            )
        channel = AuthenticatedChannel(peer, key)
        channel.send(first)
        return channel
    except BaseException:
        peer.close()
        raise


def _open_connection(address: str, wait_s: float) -> socket.socket:
    if not address.startswith("/"):
        host, _, port = address.rpartition(":")
        peer = socket.create_connection((host, int(port)), wait_s)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return peer
    peer, until = socket.socket(socket.AF_UNIX), time.monotonic() + wait_s
    try:
        peer.settimeout(wait_s)
        while True:
            try:
                peer.connect(address)
                return peer
            except BlockingIOError:  # many others connect at the same time
                if time.monotonic() > until:
                    raise
                time.sleep(_POLL_S)
    except BaseException:
        peer.close()
        raise


def _read(peer: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        block = peer.recv(length - len(data))
        if not block:
            raise ConnectionResetError("the other process closed the connection")
        data += block
    return data


def _proof(key: bytes, role: bytes, listener_nonce: bytes, peer_nonce: bytes) -> bytes:
    return hmac.digest(key, b"ramify " + role + listener_nonce + peer_nonce, "sha256")


# --- the key of a run whose processes another launcher starts

KEY, KEY_FILE = "RAMIFY_RUN_KEY", "RAMIFY_RUN_KEY_FILE"
_LEAST_KEY = 16


def run_key_from_environment() -> bytes | None:
    """Return the run's key from the environment, or from the file that the environment names.

    The variables are ``RAMIFY_RUN_KEY`` and ``RAMIFY_RUN_KEY_FILE``; the file takes precedence.
    Returns None if neither is set.

    Raises ConfigError if the key is too short, if the file is empty or cannot be read, or if
    other users can access the file.
    """
    text = os.environ.get(KEY, "")
    if path := os.environ.get(KEY_FILE, ""):
        try:
            text = Path(path).read_text().strip()
            is_open = Path(path).stat().st_mode & 0o077
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{KEY_FILE}={path} cannot be read: {error}") from None
        if is_open:
            raise ConfigError(
                f"{KEY_FILE}={path} is accessible to other users: run chmod 600 {path}"
            )
        if not text:
            raise ConfigError(f"{KEY_FILE}={path} is empty: make a key with openssl rand -hex 32")
    if not text:
        return None
    if len(text) < _LEAST_KEY:
        raise ConfigError(
            f"{KEY} has {len(text)} characters, fewer than {_LEAST_KEY}: make one with openssl "
            "rand -hex 32"
        )
    return text.encode()
