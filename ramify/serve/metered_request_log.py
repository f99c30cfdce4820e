"""The log file of the metering proxy.

It has one line of JSON for each request, and stores each message only once.

    {"type":"message","id":"9f3a…","message":{"role":"user","content":"…"}}
    {"type":"request","seat":"oolong/test/3","number":1,"status":200,"messages":["9f3a…"],…}

A conversation sends all its messages again with each request. They are stored once and referred to
by a digest, so that the file grows only with what is new. Only its owner can read the file. It
contains no keys, since it holds what a request says and not its headers.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import msgspec

from ramify.clients.base import Request
from ramify.errors import StoreError
from ramify.store.durable_files import FILE_MODE, make_folder, write_all
from ramify.types.message import Message, Reply, Usage

_encode = msgspec.json.Encoder().encode


class LoggedMessage(msgspec.Struct, frozen=True, tag="message"):
    """A log line that stores a message the first time a request contains it."""

    id: str
    message: Message


class MeterLogEntry(msgspec.Struct, frozen=True, tag="request", omit_defaults=True, kw_only=True):
    """A line of the log about one answered or refused request."""

    seat: str
    number: int
    """Number of the request within the caller's account, from 1."""
    at: float
    """Unix time of the answer, in seconds."""
    status: int
    """HTTP status of the answer; 499 if the caller disconnected first."""
    asked_tokens: int
    """Maximum length of the reply that the caller requested, in tokens."""
    max_tokens: int = 0
    """Maximum length of the reply that the proxy requested from the model, in tokens; 0 if nothing
    was sent."""
    messages: tuple[str, ...] = ()
    """Ids of the messages in the prompt."""
    reply: Message | None = None
    usage: Usage = Usage()
    cost: float | None = None
    """Cost in dollars; None if unknown."""
    seconds: float = 0.0
    error: str = ""


class MeterLogWriter:
    """Writes a metering proxy's log file: one line for each request and each new message."""

    def __init__(self, path: Path) -> None:
        """Open the log file of the metering proxy for appending.

        Raises StoreError if that fails.
        """
        self.path = path
        make_folder(path.parent)
        try:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, FILE_MODE)
        except OSError as error:
            raise StoreError(f"the record {path} cannot be opened: {error.strerror}") from None
        self._known: set[bytes] = set()
        """Digests of the messages that this process has already written."""

    def add(
        self,
        seat: str,
        number: int,
        asked: Request,
        sent: Request | None,
        *,
        status: int,
        reply: Reply | None,
        usage: Usage,
        cost: float | None,
        seconds: float,
        error: str,
    ) -> None:
        """Append one request and its outcome to the proxy's log.

        ``asked`` is the request as the caller sent it. ``sent`` is the request that the model got,
        or None if nothing was sent.
        """
        lines = bytearray()
        ids = tuple(self._id_of(message, lines) for message in asked.messages)
        entry = MeterLogEntry(
            seat=seat,
            number=number,
            at=time.time(),
            status=status,
            asked_tokens=asked.sampling.max_tokens,
            max_tokens=0 if sent is None else sent.sampling.max_tokens,
            messages=ids,
            reply=None if reply is None else reply.message,
            usage=usage,
            cost=cost,
            seconds=seconds,
            error=error,
        )
        write_all(self._fd, bytes(lines + _encode(entry) + b"\n"), self.path)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _id_of(self, message: Message, lines: bytearray) -> str:
        """Return the id of a message in the log, after writing the message if it is new.

        For a new message, also add the line that stores it to ``lines``.
        """
        digest = hashlib.blake2b(_encode(message), digest_size=16).digest()
        if digest not in self._known:
            self._known.add(digest)
            lines += _encode(LoggedMessage(digest.hex(), message)) + b"\n"
        return digest.hex()
