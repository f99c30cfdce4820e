"""Reading a journal: complete, cut off, still being written, or damaged.

A last line without a newline is incomplete and is skipped. Anything else that cannot be read is an
error that names the file and the line.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import msgspec

from ramify.errors import StoreError
from ramify.store.journal import writer
from ramify.types.event import AnyEvent
from ramify.types.trajectory import SCHEMA_VERSION

_BLOCK_BYTES = 1 << 20
_MANY_BYTES = 1 << 18
_RETRIES = 3
"""How often in a row a follower retries an unreadable line while the writer lives."""
_decoder: msgspec.json.Decoder[AnyEvent] = msgspec.json.Decoder(AnyEvent)


class _Version(msgspec.Struct):
    schema_version: int = 0


def lines(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The complete lines from ``offset``, without their newlines."""
    try:
        with open(path, "rb", buffering=_BLOCK_BYTES) as file:
            file.seek(offset)
            for line in file:
                if not line.endswith(b"\n"):
                    return
                yield line[:-1]
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def blocks(path: Path, offset: int = 0) -> Iterator[bytes]:
    """The same lines with their newlines, many at a time, for faster decoding."""
    try:
        with open(path, "rb") as file:
            file.seek(offset)
            while block := file.read(_MANY_BYTES) + file.readline():
                complete = block[: block.rfind(b"\n") + 1]
                if complete:
                    yield complete
                if len(complete) < len(block):
                    return  # the rest of this line is not written yet
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error


def read_events(path: Path) -> Iterator[AnyEvent]:
    """The events of the journal at ``path``, in order."""
    for number, line in enumerate(lines(path), start=1):
        yield decode_line(line, path, number)


def decode_line(line: bytes, path: Path, number: int) -> AnyEvent:
    """The event in a line. Raises StoreError, which names the file and the line."""
    if line.startswith(b'{"type":"RunStarted"'):
        check_version(line, path)
    try:
        return _decoder.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise StoreError(
            f"{path}, line {number} is damaged: {error}; the events before it can be read"
        ) from error


def check_version(line: bytes, path: Path) -> None:
    """Raise StoreError if a newer version of Ramify wrote the run that begins with this line."""
    try:
        version = msgspec.json.decode(line, type=_Version).schema_version
    except (msgspec.DecodeError, RecursionError):
        return  # decoding the whole line gives a better error
    if version > SCHEMA_VERSION:
        raise StoreError(
            f"{path} was written by a newer Ramify (schema {version}; this one reads up to "
            f"{SCHEMA_VERSION}): "
            "pip install -U ramify"
        )


async def follow(path: Path, poll_s: float = 0.1) -> AsyncIterator[AnyEvent]:
    """All events from the first, and new ones as they arrive, until everything is read and the
    writer has exited.

    Between two questions of a conversation the writer lives, so following continues. An unreadable
    line is retried a few times, in case the writer was just working on it. Raises StoreError if it
    stays unreadable, or if the journal was replaced.
    """
    import asyncio  # slow to import, and only used here

    offset, number, failures, inode = 0, 0, 0, 0
    while True:
        alive = writer(path) is not None  # first: its last lines are still read below
        try:
            inode = _same_file(path, inode, offset)
            for line in lines(path, offset):
                event = decode_line(line, path, number + 1)
                offset, number, failures = offset + len(line) + 1, number + 1, 0
                yield event
        except StoreError:
            failures += 1
            if not alive or failures > _RETRIES:
                raise
        else:
            if not alive:
                return
        await asyncio.sleep(poll_s)


def _same_file(path: Path, inode: int, offset: int) -> int:
    """The inode of ``path``. Raises StoreError if it is not ``inode``, or if the file is shorter
    than what was already read."""
    try:
        stat = path.stat()
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    if inode not in (0, stat.st_ino) or stat.st_size < offset:
        raise StoreError(
            f"{path} was cut or replaced while it was followed: follow it again from its beginning"
        )
    return stat.st_ino
