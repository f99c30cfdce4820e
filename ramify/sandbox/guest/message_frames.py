"""The layout and limits of frames, the messages between host and guest.

A frame is a JSON header followed by binary parts ("blobs"). Long blobs are passed through shared
memory buffers instead.

This module defines the layout, how much is read or written at once, the maximum size of a frame,
and the limits on its JSON, which are checked before it is decoded. The guest checks what it is
about to send, so that a cell gets an exception. The host checks the same again, since a hostile
guest checks nothing. Each limit keeps the host's work on one frame to some tens of milliseconds.
The content of headers is described in the package's docstring, and values are encoded by
``value_encoding.py``.

    frame = u32 length of the rest | u8 version | u32 header length | header (JSON) | blobs
            (all little endian)

A packed value, such as a context or a blob of a store, is ``u32 header length | header | blobs``.
If it has tables or arrays, each blob begins at a multiple of ``ALIGNMENT``.

A socket passes a megabyte in pieces of 200 kB, with a context switch for each piece; a memory file
that both processes hold passes it at once. The file has a fixed size and two halves, one for each
writer:

    [0, HALF)         written by the guest     read by the host once it answers the call or
                                               sends the next request
    [HALF, 2 HALF)    written by the host      read by the guest as often as it reports in ``got``

A half may be written again after its content was read. Until then, and if the blobs are smaller
than ``MIN_BYTES`` or larger than a half, they are sent in their frame. Neither end reads the file
through a mapping: reading copies, so data cannot change after it was checked.
"""

from __future__ import annotations

import binascii
import itertools
import json
import mmap
import os
import re
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from .value_encoding import (
    Buffer,
    ProtocolError,
    ValueDecoder,
    ValueEncoder,
    ValueEncodingError,
    ValueLimitError,
)

MAX_ITEMS = 500_000
"""Maximum number of items in one frame, summed over all its lists and dicts."""
MAX_CONTAINERS = 50_000
"""Maximum number of containers in one frame. A tuple, set, date or long string also counts as one.
"""
MAX_KEYS = 100_000
"""Maximum number of keys in one frame, summed over all dicts with only text keys."""
MAX_NESTING = 320
"""Maximum nesting depth of a frame's JSON. Each of a value's ``MAX_DEPTH`` levels takes up to three
levels of JSON."""
MAX_BLOBS = 20_000
"""Maximum number of long strings and bytes values in one frame."""
MAX_FRAME_OUTPUT = 1 << 20
"""Maximum number of bytes of a cell's output in one frame."""
_STRING = rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)'
"""Pattern that matches one JSON string, or an unterminated one, in linear time."""
_WHOLE_STRINGS = rb'[^"]*+(?:"(?:[^"\\]++|\\.)*+"[^"]*+)*+'
"""Regular expression that matches as many complete JSON strings as possible, with the text between
them."""
_PIECE_BYTES = 1 << 18
_STEP = bytes(1 if char in b"[{" else 0 for char in range(256))
_NO_BRACKETS = bytes(char for char in range(256) if char not in b"[]{}")


def check_json_complexity(text: bytes) -> None:
    """Raise ValueLimitError if JSON text has too many items, containers or keys, or is nested too
    deeply.

    The text is scanned a few times at C speed and never decoded.
    """
    opens = text.count(b"[") + text.count(b"{")
    commas = text.count(b",")
    if opens <= MAX_NESTING and opens + commas <= MAX_KEYS:
        return
    # Brackets and commas inside strings do not count, but skipping each string takes time.
    if text.count(b'"') - text.count(b'\\"') > 2 * MAX_ITEMS:
        raise ValueLimitError(
            f"a value with more than {MAX_ITEMS:,} strings: at most {MAX_ITEMS:,} items at once"
        )
    bare = _strip_string_literals(text)
    items, containers = _count_values_and_containers(bare)
    if items > MAX_ITEMS:
        raise ValueLimitError(f"a value with {items:,} items: at most {MAX_ITEMS:,} at once")
    if containers > MAX_CONTAINERS:
        raise ValueLimitError(
            f"a value with {containers:,} lists, dicts and the like: at most {MAX_CONTAINERS:,} at "
            "once"
        )
    if (keys := bare.count(b":")) > MAX_KEYS:
        raise ValueLimitError(f"a value with {keys:,} keys of dicts: at most {MAX_KEYS:,} at once")
    if containers > MAX_NESTING and _nesting(bare) > MAX_NESTING:
        raise ValueLimitError(f"a value nested deeper than {MAX_NESTING} levels of JSON")


def _strip_string_literals(text: bytes) -> bytes:
    """Remove string literals from JSON text.

    The text is processed in pieces so that other threads can run in between.
    """
    string = re.compile(_STRING, re.DOTALL)
    whole_strings = re.compile(_WHOLE_STRINGS, re.DOTALL)
    parts, at = [], 0
    while at < len(text):
        end = whole_strings.match(text, at, at + _PIECE_BYTES).end()  # type: ignore[union-attr]
        if end == at:  # a long string begins here
            end = string.match(text, at).end()  # type: ignore[union-attr]
        else:
            parts.append(string.sub(b"", text[at:end]))
        at = end
    return b"".join(parts)


def json_complexity(text: bytes) -> tuple[int, int, int]:
    """Count the items and containers of JSON text, and measure its nesting depth.

    An empty container counts as one item.
    """
    bare = _strip_string_literals(text)
    return *_count_values_and_containers(bare), _nesting(bare)


def _count_values_and_containers(bare: bytes) -> tuple[int, int]:
    containers = bare.count(b"[") + bare.count(b"{")
    return containers + bare.count(b","), containers


def _nesting(bare: bytes) -> int:
    steps = bare.translate(_STEP, _NO_BRACKETS)
    return max(itertools.accumulate(1 if step else -1 for step in steps), default=0)


def check_blob_count(count: int) -> None:
    if count > MAX_BLOBS:
        raise ValueLimitError(
            f"a value with {count:,} long strings and bytes values: at most {MAX_BLOBS:,} at once"
        )


VERSION = 1
PREFIX = struct.Struct("<IBI")
MAX_HEADER = 16 << 20
"""Maximum size of a frame's JSON header in bytes. Long text is sent outside the header."""
MAX_FRAME = 256 << 20
"""Maximum size in bytes of a frame from a guest. Frames to a guest are limited only by the range of
the length prefix."""
LINE_BYTES = 45_000
"""Number of bytes that one line of base64 encodes."""
ALIGNMENT = 64
"""Alignment of the buffers in a packed value, in bytes, as Arrow recommends."""
_MAX_VECTOR = 256
"""Maximum number of buffers that one system call writes. Linux allows 1,024."""
_CHUNK = 1 << 16
_RIGHTS_BYTES = 16 + 4 * 253
"""Size in bytes of the ancillary data with which a socket message passes 253 file descriptors, the
maximum in one message."""
U32 = struct.Struct("<I")
_read, _write = os.read, os.write
_readv: Any = getattr(os, "readv", None)
_writev: Any = getattr(os, "writev", None)
"""``os.writev``, saved before any cell runs so that a cell cannot replace it. None on Windows,
where no guest runs."""

to_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
).encode
from_json = json.JSONDecoder().decode


def json_bytes(header: Any) -> bytes:
    """Encode a frame's header as JSON.

    A lone surrogate, which the text of an error may contain, becomes a plain-text escape sequence.
    """
    text = to_json(header)
    try:
        return text.encode()
    except UnicodeEncodeError:
        escaped = (
            f"\\\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in text
        )
        return "".join(escaped).encode()


def encode_cell_done(
    id: int, value: str | None, error: str | None, restored: list[str], chars: int
) -> bytes:
    """Encode the header that reports the end of a cell for which no hook returned a value.

    A hook is a function that an installed module runs after each cell. This takes a third of the
    time of ``json_bytes``.
    """
    shown = "null" if value is None else to_json(value)
    failed = "null" if error is None else to_json(error)
    names = to_json(restored) if restored else "[]"
    text = (
        f'{{"op":"done","id":{id},"value":{shown},"error":{failed},"restored":{names},'
        f'"note":null,"chars":{chars}}}'
    )
    try:
        return text.encode()
    except UnicodeEncodeError:  # a lone surrogate
        return json_bytes(json.loads(text))


def check_size(header: bytes, blobs: Sequence[Any]) -> None:
    """Raise ValueLimitError if a message's header and binary parts are too large to send.

    The host would refuse such a frame.
    """
    size = len(header) + sum(map(len, blobs))
    if len(header) > MAX_HEADER or size > MAX_FRAME:
        raise ValueLimitError(
            f"a value of {size:,} bytes: at most {MAX_FRAME:,} at once, {MAX_HEADER:,} of them "
            "outside long strings"
        )
    check_blob_count(len(blobs))
    if len(header) > MAX_NESTING:
        check_json_complexity(header)


def frame(header: bytes, blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    """Build a frame from an encoded header and binary parts, and return it as a list of buffers to
    write."""
    length = 5 + len(header) + sum(map(len, blobs))
    return [PREFIX.pack(length, VERSION, len(header)) + header, *blobs]


def split_frame(view: memoryview) -> tuple[memoryview, int]:
    """Return the header bytes of a frame and the offset at which its binary parts begin.

    ``view`` is the frame without its length prefix. Raises ProtocolError if the version or the
    header's length is wrong.
    """
    version, size = view[0], U32.unpack_from(view, 1)[0]
    if version != VERSION:
        raise ProtocolError(f"a frame has version {version}, but {VERSION} is needed")
    if size > len(view) - 5:
        raise ProtocolError(f"a header of {size} bytes in a frame of {len(view)}")
    return view[5 : 5 + size], 5 + size


def slice_blobs(
    view: memoryview, start: int, lengths: Sequence[int], alignment: int = 1
) -> list[memoryview]:
    """Split the rest of a buffer, from byte ``start`` on, into blobs of the given lengths.

    Raises ProtocolError if the lengths do not add up to the size of the buffer.
    """
    blobs = []
    for length in lengths:
        if type(length) is not int or length < 0:
            raise ProtocolError(f"invalid blob length {str(length)[:40]}")
        blobs.append(view[start : start + length])
        start += length + -length % alignment
    if start != len(view):
        raise ProtocolError(f"the blobs end at byte {start}, but the frame at byte {len(view)}")
    return blobs


class MessageFrameReader:
    """Assembles message frames from bytes that it reads itself or that its caller passes to it.

    A long frame is read straight into a separate buffer.
    """

    __slots__ = ("data", "fd", "fds", "have", "receive")

    def __init__(self, fd: int = -1, receive: Any = None) -> None:
        """Create a reader of the frames that arrive over a connection.

        ``fd``: the descriptor to read from. ``receive``: the ``recvmsg`` method of a socket over
        which descriptors may arrive.
        """
        self.fd = fd
        self.receive = receive
        self.fds: list[int] = []
        """Descriptors that have arrived and that no caller has taken yet."""
        self.data = bytearray()
        self.have = 0

    def next(self) -> memoryview | None:
        """Return the next complete frame, or None if more bytes must be read first.

        The frame comes without its length prefix.
        """
        if self.have < 4:
            return None
        end = 4 + U32.unpack_from(self.data)[0]
        if end < 9:
            raise ProtocolError(f"a frame of {end - 4} bytes is too short")
        if self.have < end:
            if end > _CHUNK and len(self.data) < end:
                buffer = bytearray(end)
                buffer[: self.have] = memoryview(self.data)[: self.have]
                self.data = buffer
            return None
        view = memoryview(self.data)[4:end]
        if len(self.data) == end:
            self.data = bytearray()
        else:
            self.data = self.data[end : self.have]
        self.have = len(self.data)
        return view

    def num_missing_bytes(self) -> int:
        """Return the number of bytes that are still missing from the frame being read.

        If the length prefix is incomplete, count the missing bytes of the prefix.
        """
        end = 4 if self.have < 4 else 4 + U32.unpack_from(self.data)[0]
        return end - self.have

    def feed(self, chunk: bytes) -> None:
        """Add bytes that the caller has already read from the connection."""
        self.data[self.have : self.have + len(chunk)] = chunk
        self.have += len(chunk)

    def fill(self) -> None:
        """Read more data from the descriptor with one system call.

        Raises EOFError at the end of the stream.
        """
        if len(self.data) > self.have:
            count = _readv(self.fd, [memoryview(self.data)[self.have :]])
        else:
            chunk = _read(self.fd, _CHUNK) if self.receive is None else self._receive()
            count = len(chunk)
            self.data += chunk
        if not count:
            raise EOFError
        self.have += count

    def _receive(self) -> bytes:
        data, ancillary, _, _ = self.receive(_CHUNK, _RIGHTS_BYTES)
        for _, _, packed in ancillary:
            self.fds += struct.unpack(f"{len(packed) // 4}i", packed[: len(packed) // 4 * 4])
        chunk: bytes = data
        return chunk


def to_base64_lines(data: bytes) -> bytes:
    """Encode bytes as lines of base64, for a stream that can only carry text."""
    starts = range(0, len(data), LINE_BYTES)
    return b"".join(binascii.b2a_base64(data[at : at + LINE_BYTES]) for at in starts)


def write_all(fd: int, parts: list[Buffer]) -> None:
    """Write all buffers to a descriptor, in as few system calls as possible."""
    if len(parts) > 1 and sum(map(len, parts)) < _CHUNK:
        parts = [b"".join(parts)]
    for start in range(0, len(parts), _MAX_VECTOR):
        _write_vector(fd, parts[start : start + _MAX_VECTOR])


def _write_vector(fd: int, parts: list[Buffer]) -> None:
    while parts:
        count = _writev(fd, parts) if len(parts) > 1 else _write(fd, parts[0])
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = memoryview(parts[0])[count:]


def pack_value(
    value: Any, files: dict[str, Any] | None = None, *, defers: bool = False
) -> tuple[list[Any], int]:
    """Encode a single value to bytes.

    Returns a list of buffers to write one after the other, and the total length of the value's
    strings in characters. The format is ``u32 header length | header | blobs``.

    ``files``: a dict that collects the data of file-backed texts, keyed by the digest of the file.
    ``defers``: leave long ASCII strings in the list as they are, which saves a copy of them;
    ``text_in_pieces`` encodes them.
    """
    encoder = ValueEncoder(files=files, defers=defers)
    header: dict[str, Any] = {"value": encoder.encode(value), "chars": encoder.chars}
    if encoder.tags:
        header["tags"] = True
    if encoder.blobs:
        header["blobs"] = [len(blob) for blob in encoder.blobs]
    if not encoder.has_buffers:
        text = to_json(header).encode()
        return [U32.pack(len(text)), text, *encoder.blobs], encoder.chars
    header["aligned"] = True
    text = to_json(header).encode()
    text += b" " * (-(U32.size + len(text)) % ALIGNMENT)
    parts: list[Any] = [U32.pack(len(text)), text]
    for blob in encoder.blobs:
        parts.append(blob)
        if rest := -len(blob) % ALIGNMENT:
            parts.append(bytes(rest))
    return parts, encoder.chars


def unpack_value(
    data: Buffer, files: Mapping[str, Any] | None = None, packages: Sequence[str] = ()
) -> tuple[Any, int]:
    """Decode a value that ``pack_value`` has encoded.

    Returns the value and the total length of its strings in characters. Raises ProtocolError if the
    data is malformed.

    ``files`` holds the data of file-backed texts, keyed by the digest of the file. ``packages``
    decides to which types tables and arrays are decoded. Their buffers are not copied from
    ``data``.
    """
    view = memoryview(data)
    if len(view) < 4:
        raise ProtocolError("an encoded value of less than 4 bytes")
    end = 4 + U32.unpack_from(view)[0]
    try:
        header = from_json(str(view[4:end], "utf-8"))
        alignment = ALIGNMENT if header.get("aligned") else 1
        blobs = slice_blobs(view, end, header.get("blobs", ()), alignment)
        value = header["value"]
        if header.get("tags"):
            value = ValueDecoder(blobs, files=files, packages=packages).decode(value)
        return value, header["chars"]
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"an encoded value with a broken header: {error}") from None


def has_aligned_buffers(data: Buffer) -> bool:
    """Return True if an encoded value contains tables or arrays.

    Their buffers are aligned within the encoded data.
    """
    end = U32.size + U32.unpack_from(data)[0]
    tail = bytes(data[max(U32.size, end - 2 * ALIGNMENT) : end])
    return tail.rstrip().endswith(b',"aligned":true}')


def copy_as_sent_to_host(value: Any) -> Any:
    """Return the copy of a value that the host would receive, after checking its types and limits.

    Raises TypeError if a type is not supported, and ValueError if the value exceeds a limit.
    """
    encoder = ValueEncoder(bounded=True)
    try:
        data = encoder.encode(value)
        check_size(json_bytes(data), encoder.blobs)
    except ValueEncodingError as error:
        raise TypeError(str(error)) from None
    except ValueLimitError as error:
        raise ValueError(str(error)) from None
    return ValueDecoder(encoder.blobs).decode(data)


MIN_BYTES = 1 << 16
HALF_BYTES = 8 << 20
_F_ADD_SEALS, _SEALS = 1033, 0x2 | 0x4
"""Seals that keep the shared memory file from shrinking or growing. The jail later seals it against
writing, too."""
_MAX_PARTS = 64
_PIECE = 1 << 16
"""Number of characters of a text that are encoded at once, to avoid allocating a large buffer."""


class ReusableBuffer:
    """A buffer that is reused for many messages and grows as needed.

    Allocating memory for each message would cost more than copying the data.
    """

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def view(self, size: int) -> memoryview:
        if len(self._data) < size:
            self._data = bytearray(size)
        return memoryview(self._data)[:size]


class HostGuestSharedMemory:
    """One end of a shared memory file through which a host and a session exchange long values.

    Each end writes to one half of the file and reads from the other half.
    """

    __slots__ = (
        "_at",
        "_from",
        "_is_used",
        "_scratch",
        "fd",
        "got",
        "is_free",
        "key",
        "owed",
        "put_count",
        "reported",
    )

    def __init__(self, fd: int, *, is_host: bool, scratch: ReusableBuffer | None = None) -> None:
        """Open one end of a shared memory file, either for the host or for the session.

        ``scratch`` is a buffer into which ``take`` reads; the blobs are then valid only until the
        buffer is used again. Without it, each ``take`` allocates memory.
        """
        self.fd = fd
        self._scratch = scratch
        self._at = HALF_BYTES if is_host else 0
        self._from = 0 if is_host else HALF_BYTES
        self._is_used = False
        self.is_free = True
        """True once the other end has read everything that this end wrote."""
        self.owed: int | None = None
        """On the host, id of the guest's message whose blobs were read and which is not answered
        yet; until then, the guest must not write to the buffers again. Otherwise, a few bytes on
        the socket would suffice to make the host hold another half file of data."""
        self.key = -1
        """Id of the message whose blobs this end wrote last, as given to ``try_put``."""
        self.put_count = 0
        """Number of times this end has written blobs."""
        self.got = 0
        """Number of times this end has read blobs."""
        self.reported = 0
        """Last value of ``got`` that was reported to the other end."""

    def try_put(self, blobs: Sequence[Any], key: int) -> bool:
        """Try to write blobs (bytes or ASCII text) to shared memory for the other end to read.

        Returns False and writes nothing if they are too short to be worthwhile, if they do not fit,
        or if the other end has not yet read the previous ones.
        """
        if not self.is_free or not MIN_BYTES <= sum(map(len, blobs)) <= HALF_BYTES:
            return False
        at = self._at
        for part in _pieces(blobs):
            view = memoryview(part)
            while view:
                count = os.pwrite(self.fd, view, at)
                view, at = view[count:], at + count
        self.is_free, self._is_used, self.key = False, True, key
        self.put_count += 1
        return True

    def take(self, lengths: Sequence[int]) -> list[memoryview]:
        """Read blobs of the given lengths that the other end wrote.

        Raises ValueError if the file holds less data.
        """
        size = sum(lengths)
        if not 0 <= size <= HALF_BYTES:
            raise ValueError(f"{size:,} bytes do not fit in the shared buffer of {HALF_BYTES:,}")
        if self._scratch is None:
            data = memoryview(os.pread(self.fd, size, self._from))
        else:
            data = self._scratch.view(size)
            data = data[: os.preadv(self.fd, [data], self._from)]
        if len(data) < size:
            raise ValueError(
                f"{len(data):,} bytes in a shared buffer, where {size:,} were announced"
            )
        self.got += 1
        self._is_used = True
        blobs, at = [], 0
        for length in lengths:
            blobs.append(data[at : at + length])
            at += length
        return blobs

    def release_memory(self) -> None:
        """Free the shared file's memory, if the other end has read everything written to it."""
        if self._is_used and self.is_free:
            self._is_used = False
            with mmap.mmap(self.fd, 2 * HALF_BYTES) as mapped:  # no page of it is read
                mapped.madvise(mmap.MADV_REMOVE)

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _pieces(blobs: Sequence[Any]) -> Iterator[Any]:
    if len(blobs) > _MAX_PARTS:
        yield b"".join(blob.encode() if isinstance(blob, str) else blob for blob in blobs)
        return
    yield from text_in_pieces(blobs)


def text_in_pieces(blobs: Iterable[Any]) -> Iterator[Buffer]:
    """Yield the blobs of an encoded value as buffers, and encode long strings piece by piece.

    Each ASCII text becomes several buffers of limited length; other blobs are yielded unchanged.
    """
    for blob in blobs:
        if isinstance(blob, str):
            yield from (blob[at : at + _PIECE].encode() for at in range(0, len(blob), _PIECE))
        else:
            yield blob


def create_shared_memory_file() -> int:
    """Create the file that holds the shared memory buffers, and return its descriptor.

    Returns -1 if the platform has no memory files.
    """
    if sys.platform != "linux":
        return -1
    import fcntl  # not on Windows

    fd = os.memfd_create("ramify-shared", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 2 * HALF_BYTES)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except BaseException:
        os.close(fd)
        raise
    return fd
