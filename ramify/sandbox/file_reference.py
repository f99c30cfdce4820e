"""Reads files that a context refers to by path, and checks that they have not changed.

Their contents are not copied.

    path ──hash_and_count_text──> FileReference (path, size, time, SHA-256) + counts for an index
                              │
                              └─> FileReferenceReader[a:b]   bytes, unless the file has changed

A file may grow while it is in use, as a log does; only the part that was read at first is then
used. A file that became shorter, or that was written to without growing, counts as changed, and
reading it is an error. What sessions can do with such a text is defined in
``guest/mapped_text.py``, and mapping the file into memory is done by ``providers/process.py``.
"""

from __future__ import annotations

import codecs
import os
import stat
from array import array
from collections.abc import Callable

import msgspec

from ramify.errors import SourceError
from ramify.types.trajectory import FileReference

_PIECE_BYTES = 1 << 22
_CONTINUATIONS = bytes(range(0x80, 0xC0))
"""The byte values that continue a multi-byte character in UTF-8."""


class TextBlockOffsets(msgspec.Struct, frozen=True):
    """A text file's encoding, and its character and line counts up to the start of each block.

    All are found in one pass over the file.
    """

    encoding: str
    """``utf-8``, or ``cp1252`` if the bytes are not valid UTF-8."""
    start: int
    """Length of the byte order mark, in bytes."""
    chars_at: array[int]
    """Number of characters that begin before each block, followed by the total. Empty if every
    character has one byte."""
    lines_at: array[int]
    """Number of line ends before each block, followed by the total."""


class FileReferenceReader:
    """A reader for one file that a context refers to.

    It opens the file again for each read, so a context may refer to more files than a process can
    keep open.
    """

    __slots__ = ("reference", "start")

    def __init__(self, reference: FileReference, start: int = 0) -> None:
        """Create a reader for the file that ``reference`` describes.

        ``start`` is the byte offset of the text: 0, or the length of the byte order mark.
        """
        self.reference = reference
        self.start = start

    def __len__(self) -> int:
        return self.reference.num_bytes - self.start

    def __getitem__(self, place: slice) -> bytes:
        low, high, _ = place.indices(len(self))
        fd = self.open_unchanged()
        try:
            parts, at, end = [], low + self.start, high + self.start
            while at < end and (part := os.pread(fd, min(end - at, 1 << 30), at)):
                parts.append(part)
                at += len(part)
            return b"".join(parts)
        finally:
            os.close(fd)

    def check_unchanged(self) -> None:
        """Raise SourceError if the file is missing or has changed since it was first read."""
        os.close(self.open_unchanged())

    def open_unchanged(self) -> int:
        """Open the file after checking that it is unchanged, and return its descriptor.

        Raises SourceError if the file is missing or has changed since it was first read.
        """
        fd = _open(self.reference)
        now = os.fstat(fd)
        if not _may_be_same(self.reference, now):
            os.close(fd)
            raise _changed_file_error(self.reference, now)
        return fd


def check_content_unchanged(reference: FileReference) -> FileReference:
    """Raise SourceError if a file is missing or its content has changed.

    Otherwise return its reference with the current modification time. The content is hashed again
    only if the size or the time differs.
    """
    fd = _open(reference)
    try:
        now = os.fstat(fd)
        if (now.st_size, now.st_mtime_ns) == (reference.num_bytes, reference.mtime_ns):
            return reference
        if now.st_size < reference.num_bytes or _digest(fd, reference) != reference.digest:
            raise _changed_file_error(reference, now)
        return msgspec.structs.replace(reference, mtime_ns=now.st_mtime_ns)
    finally:
        os.close(fd)


def hash_and_count_text(
    fd: int,
    path: str,
    block_bytes: int,
    on_bytes: Callable[[int], object] = lambda num_bytes: None,
) -> tuple[FileReference, TextBlockOffsets]:
    """Hash an open text file and count its characters and line ends, in one pass.

    The counts are recorded at the start of each block. ``on_bytes`` is called with the number of
    bytes read so far.
    """
    import hashlib
    from concurrent.futures import ThreadPoolExecutor

    before = os.fstat(fd)
    size = before.st_size
    start = len(codecs.BOM_UTF8) if os.pread(fd, 3, 0) == codecs.BOM_UTF8 else 0
    digest = hashlib.sha256(os.pread(fd, start, 0))
    chars_at, lines_at = array("Q", [0]), array("Q", [0])
    decoder = codecs.getincrementaldecoder("utf-8")()
    is_utf8 = is_ascii = True
    at = start
    with ThreadPoolExecutor(1, "ramify-hash") as hashing:
        hashed = hashing.submit(lambda: None)
        while at < size:
            piece = _read(fd, at, min(_PIECE_BYTES, size - at))
            if not piece:
                raise SourceError(f"{path} became shorter while it was read: load it again")
            hashed.result()
            hashed = hashing.submit(digest.update, piece)
            at += len(piece)
            is_plain = piece.isascii()
            is_ascii = is_ascii and is_plain
            # A piece of ASCII is valid, unless the previous one ended in the middle of a character.
            if is_utf8 and (not is_plain or decoder.getstate()[0]):
                try:
                    decoder.decode(piece, at >= size)
                except UnicodeDecodeError:
                    is_utf8 = False
            for begin in range(0, len(piece), block_bytes):
                block = piece[begin : begin + block_bytes]
                lines_at.append(lines_at[-1] + block.count(b"\n"))
                if is_utf8:
                    leads = block if is_plain else block.translate(None, _CONTINUATIONS)
                    chars_at.append(chars_at[-1] + len(leads))
            on_bytes(at)
        hashed.result()
    # Use the time from before the pass, so that a write during the pass counts as a change.
    reference = FileReference(os.path.abspath(path), size, before.st_mtime_ns, digest.hexdigest())
    counts = TextBlockOffsets(
        "utf-8" if is_utf8 else "cp1252",
        start,
        chars_at if is_utf8 and not is_ascii else array("Q"),
        lines_at,
    )
    return reference, counts


def _open(reference: FileReference) -> int:
    try:
        fd = os.open(reference.path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise SourceError(
            f"{reference.path} cannot be read again: {error.strerror}; the run refers to it: put "
            "it back, or ask again in a new run"
        ) from None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise SourceError(
            f"{reference.path} is no longer a file, but the run refers to it: put the former file "
            "back, or ask again in a new run"
        )
    return fd


def _read(fd: int, at: int, num_bytes: int) -> bytes:
    """Read ``num_bytes`` from the file, or fewer at its end.

    This repeats ``pread``, because a single call may return fewer bytes even in the middle of a
    file, which would shift all later blocks.
    """
    parts: list[bytes] = []
    while num_bytes > 0 and (part := os.pread(fd, num_bytes, at)):
        parts.append(part)
        at, num_bytes = at + len(part), num_bytes - len(part)
    return b"".join(parts)


def _may_be_same(reference: FileReference, now: os.stat_result) -> bool:
    """Return True if a file's size and modification time suggest that its recorded data is
    unchanged.

    A longer file counts as the same, because data may only have been appended.
    """
    if now.st_size == reference.num_bytes:
        return now.st_mtime_ns == reference.mtime_ns
    return now.st_size > reference.num_bytes


def _changed_file_error(reference: FileReference, now: os.stat_result) -> SourceError:
    size = (
        f"it has {now.st_size:,} bytes, not {reference.num_bytes:,}"
        if now.st_size != reference.num_bytes
        else "it was written to"
    )
    return SourceError(
        f"{reference.path} has changed since it was read ({size}), and it is used by reference: "
        "put the former file back, or ask as a new run"
    )


def _digest(fd: int, reference: FileReference) -> str:
    import hashlib

    digest = hashlib.sha256()
    for at in range(0, reference.num_bytes, _PIECE_BYTES):
        digest.update(_read(fd, at, min(_PIECE_BYTES, reference.num_bytes - at)))
    return digest.hexdigest()
