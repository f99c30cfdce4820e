"""Shows model replies while they are still arriving.

While a web page follows a run, the process of the run writes the arriving text to the file
``RUN_ID.live`` beside the journal. The server of the page reads that file.

    page's server                            process that runs
    creates it, holds a shared lock ──────>  looks for it twice a second
    reads it            <──────────────────  overwrites it, at most four times a second
    closes              ──────────────────>  finds no lock, and deletes it

The system releases a lock when its process ends, so a run does not keep writing for a page that was
killed. The file is deleted by the last process that uses it: by the run at its end, or by a page
whose run was killed. If both were killed, ``prune`` deletes the file, or the next page empties it.

The file holds one line: the end of each reply, without secrets, and a checksum, since it may be
read while it is overwritten. It is not part of the record of the run, and no reader of journals
reads it. When the run writes is decided in ``engine/live_reply_writer.py``.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ramify.secret_redaction import SecretRedactor
from ramify.store.durable_files import FILE_MODE
from ramify.store.line_checksums import ChecksumChain, has_checksum
from ramify.types.message import escape_surrogates

MAX_CHARS = 4_000
"""Maximum number of characters of one reply in the file. Only the end of a longer reply is kept."""
MAX_ALL_CHARS = 64_000
"""Maximum number of characters of all replies in the file."""
_MAX_BYTES = 1 << 20
"""Maximum number of bytes that a reader reads."""
_FLAGS = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW


class ArrivingReply(msgspec.Struct, frozen=True):
    """The part of a model reply that has arrived so far."""

    call: str
    turn: int
    text: str
    reasoning: str = ""
    is_cut: bool = False
    """True if the beginning of the text is omitted."""


class _Snapshot(msgspec.Struct):
    replies: Sequence[ArrivingReply] = ()


class LiveReplyFile:
    """The file beside a journal that holds the replies that are still arriving.

    It is opened only when needed.
    """

    def __init__(self, journal: Path) -> None:
        self.path = live_reply_file_path(journal)
        self._fd: int | None = None

    def open_existing(self) -> None:
        """Open the existing file without locking it.

        Raises FileNotFoundError if it does not exist.
        """
        self._fd = os.open(self.path, _FLAGS)

    def close(self) -> None:
        """Close the file, and delete it if no other process uses it.

        Idempotent.
        """
        if self._fd is None:
            return
        fd, self._fd = self._fd, None
        with contextlib.suppress(OSError):
            if _is_alone(fd):
                self._unlink(fd)
            fcntl.flock(fd, fcntl.LOCK_UN)  # a process forked from this one may hold it, too
        os.close(fd)

    def _is_at_path(self, fd: int) -> bool:
        try:
            return os.path.samestat(os.fstat(fd), os.stat(self.path))
        except OSError:
            return False

    def _unlink(self, fd: int) -> None:
        if self._is_at_path(fd):
            os.unlink(self.path)


class LiveReplyFileWriter(LiveReplyFile):
    """Writes the arriving replies of a run to a file while a web page follows the run.

    Its methods raise OSError if a system call fails.
    """

    def __init__(self, journal: Path, secrets: SecretRedactor) -> None:
        super().__init__(journal)
        self._secrets = secrets
        self._written = b""

    def is_followed(self) -> bool:
        """Return True if a web page is following the run now.

        Also deletes a file that a killed page server left behind.
        """
        if self._fd is None:
            try:
                self.open_existing()
            except FileNotFoundError:
                return False
            self._written = b""
        assert self._fd is not None
        if _is_alone(self._fd) or not self._is_at_path(self._fd):
            self.close()
        return self._fd is not None

    def write(self, replies: Sequence[ArrivingReply]) -> None:
        """Replace the contents of the file with these replies, unless they are unchanged.

        Call this only after ``is_followed`` has returned True.
        """
        assert self._fd is not None
        most = max(1, min(MAX_CHARS, MAX_ALL_CHARS // max(1, len(replies))))
        line = msgspec.json.encode(
            _Snapshot([self._redacted_reply(reply, most) for reply in replies])
        )
        if line != self._written:
            sealed, _ = ChecksumChain().add_checksum(line + b"\n")
            os.pwrite(self._fd, sealed, 0)
            os.ftruncate(self._fd, len(sealed))
            self._written = line

    def delete(self) -> None:
        """Delete the file at the end of the run, when no more replies arrive."""
        if self._fd is not None:
            with contextlib.suppress(OSError):
                self._unlink(self._fd)
        self.close()

    def _redacted_reply(self, reply: ArrivingReply, most: int) -> ArrivingReply:
        text, reasoning = map(self._redact_text, (reply.text, reply.reasoning))
        is_cut = reply.is_cut or len(text) > most or len(reasoning) > most
        return ArrivingReply(reply.call, reply.turn, text[-most:], reasoning[-most:], is_cut)

    def _redact_text(self, text: str) -> str:
        """Return a partial reply with its secrets redacted, so that a web page can show it.

        Its last characters are removed if they could be the beginning of a secret.
        """
        return self._secrets.trim_partial_secret(self._secrets.redact(escape_surrogates(text)))


class LiveReplyFileReader(LiveReplyFile):
    """Reads the replies that are still arriving, for a web page that follows a run.

    The run writes them only while such a reader is open.
    """

    def __init__(self, journal: Path) -> None:
        super().__init__(journal)
        self._read_state: tuple[int, int] | None = None
        """Size and modification time of the file when it was last read; None before."""

    def read(self) -> Sequence[ArrivingReply] | None:
        """Return the replies that are arriving, or None if nothing has changed since the last call.

        The file is created if it does not exist. Without permission to create it, the result is
        always None.
        """
        try:
            if self._fd is not None and not self._is_at_path(self._fd):
                self.close()  # the run has ended; its conversation may continue
            if self._fd is None and not self._open():
                return None
            assert self._fd is not None
            stat = os.fstat(self._fd)
            state = (stat.st_size, stat.st_mtime_ns)
            if state == self._read_state or not stat.st_size:
                return None
            line, end, _ = os.pread(self._fd, _MAX_BYTES, 0).partition(b"\n")
            if not end or not has_checksum(line) or ChecksumChain().damage_reason(line):
                return None  # it is being overwritten: the next time
            self._read_state = state
            return msgspec.json.decode(line, type=_Snapshot).replies
        except (OSError, msgspec.DecodeError, UnicodeDecodeError):
            return None

    def _open(self) -> bool:
        """Open the file of arriving replies, and lock it to show that a page follows the run.

        Returns False if another process is deleting it.
        """
        fd = os.open(self.path, _FLAGS | os.O_CREAT, FILE_MODE)
        try:
            if _is_alone(fd):
                os.ftruncate(fd, 0)  # of a run that was killed
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            # The file may have been deleted and created again between opening and locking.
            if self._is_at_path(fd):
                self._fd, fd, self._read_state = fd, -1, None
        except BlockingIOError:
            pass
        finally:
            if fd >= 0:
                os.close(fd)
        return self._fd is not None


def live_reply_file_path(journal: Path) -> Path:
    """Return the path of the file beside ``journal`` that holds its arriving replies."""
    return journal.with_suffix(".live")


def delete_if_unfollowed(path: Path) -> None:
    """Delete the ``.live`` file at ``path``, unless a web page is following its run."""
    file = LiveReplyFile(path.with_suffix(".jsonl"))
    with contextlib.suppress(OSError):
        file.open_existing()
        file.close()


def _is_alone(fd: int) -> bool:
    """Return True if no other process holds a lock on this file of arriving replies.

    In that case, ``fd`` now holds an exclusive lock.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
