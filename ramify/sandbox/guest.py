"""The guest: one live notebook namespace and its end of the wire. Runs in anyone's container.

Decides what a cell may count on (a true ``__main__``, echo, tracebacks, reserved names), how values and output travel,
and how code calls the host. Leaves out how the process came to be and what confines it: whoever starts a guest hands
it two file descriptors and calls ``Guest(...).serve()``. Standard library only, and importing it does nothing.

    frame = u32 length of the rest | u8 version | u32 header length | header (JSON) | blobs      (little endian)

    host:   run{id,code}  set{id,name,value}  get{id,name}  install{id,module,source}  ret{id,value}  err{id,kind,…}
            seed{id,seed} (no answer)  fork{id}+[wire, spool, shelf]
    guest:  hello  out{skip,…}  call{id,name,value}  done{id,value,error,…}  ok{id}  value{id,value}  failed{id,…}

``"blobs"`` in a header lists the lengths of the raw parts after it, or where it says ``"shelved": true``, on the shelf
of ``shelf.py``, of which ``"got"`` counts the times it was read; ``"tags": true`` says that ``value`` is not plain JSON.
Values are carried by exact type: None, bool, int, float, complex, str, bytes, list, tuple, dict, set, frozenset, date,
time, datetime, timedelta (a time zone as its offset), and OrderedDict, defaultdict and Counter as dict.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import codecs
import collections
import contextlib
import datetime
import gc
import io
import json
import linecache
import math
import os
import select
import signal
import struct
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

with contextlib.suppress(ImportError):
    import resource

Buffer = Any
"""bytes, bytearray or memoryview of bytes."""

# ------------------------------------------------------------------------------------------------ values

VERSION = 1
TAG = "$"
INLINE_CHARS = 4096
"""Longer strings travel as blobs."""
MAX_DEPTH = 100
"""Nesting of one value."""
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_FLAT_KINDS = {bool, type(None)}
_DICTS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}


class ProtocolError(Exception):
    """The other end sent something that the wire does not have."""


class CodecError(TypeError):
    """A value that is not carried: ``what`` is wrong with it, and ``path`` is where it sits, innermost step first."""

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        where = "value" + "".join(reversed(self.path[-8:]))
        return f"{self.what} at {where} cannot be carried between session and host: make it a plain value first"


def _type_name(kind: type) -> str:
    module = kind.__module__
    return kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class Encoder:
    """Values -> JSON-ready data; long strings and bytes are put aside in ``blobs``."""

    __slots__ = ("blobs", "chars", "defers", "tags")

    def __init__(self, defers: bool = False) -> None:
        """``defers``: ASCII text is put aside as it is, one byte a character, for whoever writes it piece by piece."""
        self.defers = defers
        self.blobs: list[Any] = []
        self.chars = 0
        """Characters of all strings met."""
        self.tags = False
        """Whether any part needs decoding beyond JSON."""

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is str:
            self.chars += len(value)
            if len(value) <= INLINE_CHARS and _is_utf8(value):
                return value
            deferred = self.defers and value.isascii()
            return self._tag("str", self._blob(value if deferred else value.encode("utf-8", "surrogatepass")))
        if kind is int:
            return value if _MIN_INT <= value <= _MAX_INT else self._tag("int", hex(value))
        if kind is float:
            return value if math.isfinite(value) else self._tag("float", repr(value))
        if value is None or kind is bool:
            return value
        if depth > MAX_DEPTH:
            raise CodecError(f"{_type_name(kind)} nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self._items(value, depth)
        if kind in _DICTS:
            return self._dict(value, depth)
        return self._rarer(value, kind, depth)

    def _tag(self, name: str, data: Any) -> dict[str, Any]:
        self.tags = True
        return {TAG: name, "v": data}

    def _blob(self, data: bytes | str) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _items(self, items: Any, depth: int) -> list[Any]:
        if len(items) > 16 and self._is_flat(items):
            return list(items)
        out: list[Any] = []
        try:
            for item in items:
                out.append(self.encode(item, depth + 1))
        except CodecError as error:
            error.path.append(f"[{len(out)}]")
            raise
        return out

    def _is_flat(self, items: Any) -> bool:
        """Whether all items can stand in JSON as they are, found out at C speed."""
        kinds = set(map(type, items))
        if kinds == {str}:
            if max(map(len, items)) > INLINE_CHARS or not _is_utf8("".join(items)):
                return False
            self.chars += sum(map(len, items))
            return True
        if kinds == {int}:
            return bool(min(items) >= _MIN_INT and max(items) <= _MAX_INT)
        if kinds == {float}:
            return all(map(math.isfinite, items))
        return kinds <= _FLAT_KINDS

    def _dict(self, value: dict[Any, Any], depth: int) -> Any:
        plain = set(map(type, value)) <= {str} and TAG not in value and _is_utf8("".join(value))
        key: Any = None
        try:
            if plain:
                self.chars += sum(map(len, value))
                out = {}
                for key, item in value.items():
                    out[key] = self.encode(item, depth + 1)
                return out
            pairs = []
            for key, item in value.items():
                pairs.append([self.encode(key, depth + 1), self.encode(item, depth + 1)])
            return self._tag("dict", pairs)
        except CodecError as error:
            error.path.append(f"[{_show_key(key)}]")
            raise

    def _rarer(self, value: Any, kind: type, depth: int) -> Any:
        if kind is tuple:
            return self._tag("tuple", self._items(value, depth))
        if kind in (set, frozenset):
            return self._tag(kind.__name__, self._items(_in_order(value), depth))
        if kind is bytes:
            return self._tag("bytes", self._blob(value))
        if kind is complex:
            return self._tag("complex", [self.encode(value.real), self.encode(value.imag)])
        if kind in (datetime.datetime, datetime.date, datetime.time):
            return self._tag(kind.__name__, [value.isoformat(), getattr(value, "fold", 0)])
        if kind is datetime.timedelta:
            return self._tag("timedelta", [value.days, value.seconds, value.microseconds])
        raise CodecError(f"a value of type {_type_name(kind)}")


def _in_order(items: Any) -> list[Any]:
    """A set's items in an order that does not depend on the process, where they have one."""
    try:
        return sorted(items)
    except TypeError:
        return list(items)


def _show_key(key: Any) -> str:
    """A dict key for an error's path: short, and safe whatever the key's repr does."""
    return repr(key)[:40] if type(key) in (str, int, float, bool, bytes, type(None)) else f"<{_type_name(type(key))}>"


class Decoder:
    """JSON data with tags -> values. Every blob is used once, so that a small header cannot stand for a huge value."""

    __slots__ = ("blobs",)

    def __init__(self, blobs: Sequence[Buffer]) -> None:
        self.blobs: list[Buffer | None] = list(blobs)

    def decode(self, data: Any) -> Any:
        try:
            return self._decode(data)
        except ProtocolError:
            raise
        except (LookupError, TypeError, ValueError, OverflowError, RecursionError, AttributeError) as error:
            raise ProtocolError(f"a value that does not decode: {type(error).__name__}: {str(error)[:200]}") from None

    def _decode(self, data: Any) -> Any:
        kind = type(data)
        if kind is list:
            return [self._decode(item) for item in data]
        if kind is dict:
            if TAG in data:
                return self._tagged(data[TAG], data["v"])
            return {key: self._decode(item) for key, item in data.items()}
        return data

    def _take(self, index: Any) -> Buffer:
        if type(index) is not int or not 0 <= index < len(self.blobs) or self.blobs[index] is None:
            raise ProtocolError(f"a value uses blob {index!r}, which is not there or was used before")
        blob, self.blobs[index] = self.blobs[index], None
        return blob

    def _tagged(self, tag: Any, data: Any) -> Any:
        if tag == "str":
            return str(self._take(data), "utf-8", "surrogatepass")
        if tag == "bytes":
            return bytes(self._take(data))
        if tag in ("tuple", "set", "frozenset"):
            return {"tuple": tuple, "set": set, "frozenset": frozenset}[tag](self._listed(data))
        if tag == "dict":
            return {self._decode(key): self._decode(item) for key, item in data}
        if tag == "int":
            return int(data, 16)
        if tag == "float":
            return {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}[data]
        if tag == "complex":
            real, imaginary = map(self._decode, data)
            return complex(real, imaginary)
        if tag in ("datetime", "date", "time"):
            text, fold = data
            moment = getattr(datetime, tag).fromisoformat(text)
            return moment.replace(fold=fold) if fold else moment
        if tag == "timedelta":
            days, seconds, microseconds = data
            return datetime.timedelta(days, seconds, microseconds)
        raise ProtocolError(f"a value with the unknown tag {str(tag)[:40]!r}")

    def _listed(self, data: Any) -> list[Any]:
        if type(data) is not list:
            raise ProtocolError(f"a value with a {type(data).__name__} where its items should be")
        return [self._decode(item) for item in data]


def encoded(blobs: Sequence[Any]) -> list[Buffer]:
    """The blobs of an encoder that defers, as bytes."""
    return [blob.encode() if isinstance(blob, str) else blob for blob in blobs]


def portable(value: Any) -> Any:
    """A copy of ``value`` as the other end would get it. Raises TypeError for what is not carried."""
    encoder = Encoder()
    try:
        data = encoder.encode(value)
    except CodecError as error:
        raise TypeError(str(error)) from None
    return Decoder(encoder.blobs).decode(data)


_to_json: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False, separators=(",", ":"), check_circular=False, allow_nan=False
).encode
_from_json = json.JSONDecoder().decode


def _json_bytes(header: Any) -> bytes:
    """``header`` as JSON; half a surrogate pair, as an error's text may hold, becomes its escape as text."""
    text = _to_json(header)
    try:
        return text.encode()
    except UnicodeEncodeError:
        shown = (f"\\\\u{ord(char):04x}" if "\ud800" <= char <= "\udfff" else char for char in text)
        return "".join(shown).encode()


_U32 = struct.Struct("<I")


def pack_value(value: Any) -> tuple[list[Buffer], int]:
    """A value on its own (a context, a blob of a store): its buffers, to be written one after the other, and the
    characters of its strings. The form is ``u32 header length | header | blobs``."""
    encoder = Encoder()
    header: dict[str, Any] = {"value": encoder.encode(value), "chars": encoder.chars}
    if encoder.tags:
        header["tags"] = True
    if encoder.blobs:
        header["blobs"] = [len(blob) for blob in encoder.blobs]
    text = _to_json(header).encode()
    return [_U32.pack(len(text)), text, *encoder.blobs], encoder.chars


def unpack_value(data: Buffer) -> tuple[Any, int]:
    """The value that ``pack_value`` wrote, and its characters."""
    view = memoryview(data)
    if len(view) < 4:
        raise ProtocolError("an encoded value of less than 4 bytes")
    end = 4 + _U32.unpack_from(view)[0]
    try:
        header = _from_json(str(view[4:end], "utf-8"))
        blobs = split_blobs(view, end, header.get("blobs", ()))
        value = Decoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]
        return value, header["chars"]
    except (ValueError, LookupError, AttributeError, RecursionError) as error:
        raise ProtocolError(f"an encoded value with a broken header: {error}") from None


def split_blobs(view: memoryview, start: int, lengths: Sequence[int]) -> list[memoryview]:
    """The blobs of ``view`` from ``start`` to its end."""
    blobs = []
    for length in lengths:
        if type(length) is not int or length < 0:
            raise ProtocolError(f"a blob of length {str(length)[:40]}")
        blobs.append(view[start : start + length])
        start += length
    if start != len(view):
        raise ProtocolError(f"blobs that end at byte {start} of {len(view)}")
    return blobs


# ------------------------------------------------------------------------------------------------ frames

PREFIX = struct.Struct("<IBI")
MAX_HEADER = 16 << 20
"""Bytes of a frame's JSON. Long text is not in it, so this is millions of small values."""
MAX_FRAME = 256 << 20
"""Bytes of a frame that a guest sends. Frames to a guest are bounded by its memory and by the prefix."""
_CHUNK = 1 << 16
_read, _readv, _write, _writev, _getpid = os.read, os.readv, os.write, os.writev, os.getpid
_signal: Any = sys.modules["_signal"]
"""The functions under ``signal``'s, which spend microseconds of every cell on making enums."""
_os_fork: Any = getattr(os, "fork", None)
_close, _dup2, _waitpid = os.close, os.dup2, os.waitpid
_clock, _get_ident = time.monotonic, threading.get_ident


def _random_state() -> Any:
    """The generator of ``random`` and where it is. A fork seeds it anew; a branch draws on from here, so that a run that
    is repeated draws the same."""
    generator = getattr(sys.modules.get("random"), "_inst", None)
    with contextlib.suppress(Exception):  # the session may have put anything there
        return generator and (generator, generator.getstate())
    return None


def frame(header: bytes, blobs: Sequence[Buffer] = ()) -> list[Buffer]:
    """The buffers of one frame."""
    rest = 5 + len(header) + sum(map(len, blobs))
    return [PREFIX.pack(rest, VERSION, len(header)) + header, *blobs]


def open_frame(view: memoryview) -> tuple[memoryview, int]:
    """Header bytes of a frame (given without its length), and where its blobs start."""
    version, size = view[0], _U32.unpack_from(view, 1)[0]
    if version != VERSION:
        raise ProtocolError(f"a frame of version {version}, where {VERSION} is spoken")
    if size > len(view) - 5:
        raise ProtocolError(f"a header of {size} bytes in a frame of {len(view)}")
    return view[5 : 5 + size], 5 + size


class Reader:
    """Bytes from a descriptor -> frames. A long frame gets a buffer of its own and is read straight into it."""

    def __init__(self, fd: int, receive: Any = None) -> None:
        """``receive``: ``recvmsg`` of a socket, where descriptors may come along."""
        self.fd = fd
        self.receive = receive
        self.fds: list[int] = []
        """Descriptors that came along and were not taken yet."""
        self.data = bytearray()
        self.have = 0

    def next(self) -> memoryview | None:
        """A whole frame without its length, or None where more must be read first."""
        if self.have < 4:
            return None
        end = 4 + _U32.unpack_from(self.data)[0]
        if end < 9:
            raise ProtocolError(f"a frame of {end - 4} bytes")
        if self.have < end:
            if end > _CHUNK and len(self.data) < end:
                whole = bytearray(end)
                whole[: self.have] = memoryview(self.data)[: self.have]
                self.data = whole
            return None
        view = memoryview(self.data)[4:end]
        if len(self.data) == end:
            self.data = bytearray()
        else:
            self.data = self.data[end : self.have]
        self.have = len(self.data)
        return view

    def fill(self) -> None:
        """Read once. Raises EOFError at the end of the stream."""
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
        data, ancillary, _, _ = self.receive(_CHUNK, 32)
        for _, _, packed in ancillary:
            self.fds += struct.unpack(f"{len(packed) // 4}i", packed[: len(packed) // 4 * 4])
        chunk: bytes = data
        return chunk


def write_all(fd: int, parts: list[Buffer]) -> None:
    """Every byte of ``parts``, in as few system calls as it takes."""
    if len(parts) > 1 and (len(parts) > 256 or sum(map(len, parts)) < _CHUNK):
        parts = [b"".join(parts)]
    while parts:
        count = _writev(fd, parts) if len(parts) > 1 else _write(fd, parts[0])
        while parts and count >= len(parts[0]):
            count -= len(parts.pop(0))
        if count:
            parts[0] = memoryview(parts[0])[count:]


# ------------------------------------------------------------------------------------------------ output


class Tail:
    """The last ``limit`` bytes of a stream, or a little more."""

    __slots__ = ("_limit", "_parts", "_size", "lost")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: collections.deque[Buffer] = collections.deque()
        self._size = 0
        self.lost = 0
        """Bytes before the tail that are gone."""

    def add(self, data: Buffer) -> None:
        self._parts.append(data)
        self._size += len(data)
        while self._size - len(self._parts[0]) >= self._limit:
            gone = len(self._parts.popleft())
            self._size -= gone
            self.lost += gone

    def take(self) -> tuple[bytes, int]:
        """The tail, and how many bytes before it were lost since the last ``take``. It is empty afterwards."""
        whole = b"".join(self._parts)
        tail = whole[-self._limit :]
        lost = self.lost + len(whole) - len(tail)
        self._parts.clear()
        self._size = self.lost = 0
        return tail, lost

    def drop(self) -> None:
        """Lose it all."""
        self.lost += self._size
        self._parts.clear()
        self._size = 0

    def __bytes__(self) -> bytes:
        return b"".join(self._parts)

    def __len__(self) -> int:
        return self._size


class HeadTail:
    """At most ``limit`` bytes of a stream: its first half and its last."""

    __slots__ = ("_half", "_head", "_tail")

    def __init__(self, limit: int) -> None:
        self._half = max(limit // 2, 1)
        self._head = bytearray()
        self._tail = Tail(self._half)

    def add(self, data: Buffer, skipped: int = 0) -> None:
        """Take more of the stream; ``skipped`` bytes right before it are already gone."""
        if skipped:
            self._tail.drop()
            self._tail.lost += skipped
        elif not len(self._tail) and not self._tail.lost:
            room = self._half - len(self._head)
            self._head += data[:room]
            data = data[room:]
        if len(data):
            self._tail.add(data)

    def text(self, chars: int) -> str:
        """What was kept, as text; a line between head and tail says how many of ``chars`` characters are not there."""
        tail = bytes(self._tail)
        if not self._tail.lost and len(tail) <= self._half:
            return (self._head + tail).decode("utf-8", "replace")
        head = _whole(bytes(self._head)).decode("utf-8", "replace")
        end = tail[-self._half :].lstrip(_CONTINUATION).decode("utf-8", "replace")
        return f"{head}\n[… {max(chars - len(head) - len(end), 0):,} characters left out …]\n{end}"


_CONTINUATION = bytes(range(0x80, 0xC0))


def _whole(data: bytes) -> bytes:
    """``data`` without a character that was cut off at its end."""
    body = data.rstrip(_CONTINUATION)
    if body and body[-1] >= 0xC0 and len(data) - len(body) < (1 if body[-1] < 0xE0 else 2 if body[-1] < 0xF0 else 3):
        return body[:-1]
    return data


class FileSpool:
    """Where descriptors 1 and 2 lead: a file without a name, in which all that is printed stands in its true order.

    What went to the host is cut off once it is long. Where the host holds the file too, nothing that a killed session
    had printed is lost: it reads on from ``at``."""

    def __init__(self, fd: int) -> None:
        self.fd = fd
        self.at = 0
        """Where in the file ``take`` goes on."""

    def write(self, data: bytes) -> None:
        while data:
            data = data[_write(self.fd, data) :]

    def take(self) -> Iterator[bytes]:
        """What was printed since the last time, in pieces."""
        end = os.lseek(self.fd, 0, os.SEEK_END)
        while self.at < end:
            data = os.pread(self.fd, min(end - self.at, _CHUNK), self.at)
            self.at += len(data)
            yield data
            end = os.lseek(self.fd, 0, os.SEEK_END)
        if self.at >= _CHUNK:
            os.ftruncate(self.fd, 0)
            self.at = 0

    def attach(self) -> None:
        """Make it descriptors 1 and 2, which a cell may have closed or sent elsewhere."""
        os.dup2(self.fd, 1)
        os.dup2(self.fd, 2)


class MemorySpool:
    """For a guest that shares its process with others: what Python code prints, and no more."""

    def __init__(self) -> None:
        self._parts: collections.deque[bytes] = collections.deque()
        self.at = 0

    def write(self, data: bytes) -> None:
        self._parts.append(data)

    def take(self) -> Iterator[bytes]:
        while self._parts:
            data = self._parts.popleft()
            self.at += len(data)
            yield data

    def attach(self) -> None:
        pass


class Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a session: both lead to one place, in order."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: str, put: Callable[[bytes], None], number: int) -> None:
        self.name = name
        self._put = put
        self._number = number
        self.buffer = _Bytes(put)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._put(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def reconfigure(self, **_: Any) -> None:
        """Accepted, as scripts for terminals call it; a session always prints UTF-8."""

    def close(self) -> None:
        """A session's streams stay open."""


class _Bytes(io.BufferedIOBase):
    """``sys.stdout.buffer``"""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._put(chunk)
        return len(chunk)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass


# ------------------------------------------------------------------------------------------------ cells

_COMPILE_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag
_CO_COROUTINE = 0x80
VALUE_CHARS = 100_000
"""Most of an echo, and of one exception's text."""
_HERE = __file__


def cut(text: str, limit: int) -> str:
    """``text``, or its head and tail with a note of what is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def safe_repr(value: Any) -> str:
    """``repr(value)`` of bounded length; never raises an Exception, and does not copy a long string to show it."""
    kind = type(value)
    if kind in (str, bytes) and len(value) > VALUE_CHARS:
        half = VALUE_CHARS // 2
        return f"{value[:half]!r} [… {len(value) - 2 * half:,} left out …] {value[-half:]!r}"
    try:
        return cut("".join([repr(value), ""]), VALUE_CHARS)
    except Exception as error:  # noqa: BLE001  (whatever a repr does, the cell goes on)
        return f"<{_type_name(kind)} whose repr raised {type(error).__name__}>"


def remember_source(name: str, source: str) -> None:
    """Let tracebacks and ``inspect`` find the lines of code that is in no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


_COMPILING = threading.Lock()
"""Python 3.11 counts how deep a tree is in one place for all threads: of two that make trees at once, one may be told that "AST
constructor recursion depth mismatch". Sessions of one process are threads of it."""


class Code:
    """A cell's code, compiled: everything but the last expression, and that expression."""

    __slots__ = ("body", "flags", "last")

    def __init__(self, source: str, name: str, flags: int) -> None:
        self.last = None
        with _COMPILING:
            tree = compile(source, name, "exec", flags | _COMPILE_FLAGS | ast.PyCF_ONLY_AST, True)
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
                self.body = self._compile(tree, name, flags)
                self.last = self._compile(last, name, flags | (self.body.co_flags & _FUTURES))
            else:
                self.body = self._compile(tree, name, flags)
        self.flags = flags | (self.body.co_flags & _FUTURES)

    @staticmethod
    def _compile(tree: Any, name: str, flags: int) -> types.CodeType:
        mode = "eval" if isinstance(tree, ast.Expression) else "exec"
        code: types.CodeType = compile(tree, name, mode, flags | _COMPILE_FLAGS, True)
        return code


def show_error(error: BaseException, hidden: set[str]) -> str:
    """The traceback as the cell's author should see it: without frames of ``hidden`` files."""
    shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    seen: set[int] = set()
    stack = [shown]
    while stack:
        part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        frames = [entry for entry in part.stack or () if entry.filename not in hidden]
        part.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        stack += [p for p in (part.__cause__, part.__context__) if p is not None]
        stack += getattr(part, "exceptions", None) or []
    return cut("".join(shown.format()).rstrip("\n"), VALUE_CHARS)


class HostError(Exception):
    """What a call to the host raises. ``kind`` names the class that the host meant; ``data`` holds its attributes."""

    def __init__(self, kind: str, message: str, data: dict[str, Any] | None = None) -> None:
        super().__init__(message)
        self.kind = kind
        self.data = data or {}


HostError.__module__ = "builtins"  # so that a traceback shows the bare name


# ------------------------------------------------------------------------------------------------ the guest

_Utf8 = codecs.getincrementaldecoder("utf-8")
_FLUSH_BYTES = 1 << 16
_FLUSH_S = 0.05
_MISSING = object()


class _Ticket:
    """Someone waiting for a frame. ``wake`` is released when the frame is there, or when it is their turn to read."""

    __slots__ = ("frame", "wake")

    def __init__(self) -> None:
        self.wake = threading.Lock()
        self.wake.acquire()
        self.frame: Any = None

    def rouse(self) -> None:
        with contextlib.suppress(RuntimeError):  # roused already
            self.wake.release()


class _Critical:
    """A stretch of the main thread in which an interrupt waits: half a frame must never be on the wire."""

    __slots__ = ("_main", "depth", "pending")

    def __init__(self) -> None:
        self._main = _get_ident()
        self.depth = 0
        self.pending = False

    def enter(self) -> int:
        """The depth before, for ``leave``. Levels are set, not counted, so that no interrupt can unbalance them."""
        if _get_ident() != self._main:
            return -1
        before = self.depth
        self.depth = before + 1
        return before

    def leave(self, before: int) -> None:
        if before < 0:
            return
        self.depth = before
        if self.pending and not before:
            self.pending = False
            raise KeyboardInterrupt

    def wait(self, blocking: Callable[[], object]) -> None:
        """Call something that holds nothing and may block: here an interrupt rises."""
        if _get_ident() != self._main:
            blocking()
            return
        before = self.depth
        try:
            self.leave(0)
            blocking()
        finally:
            self.depth = before

    def reset(self) -> None:
        self.depth = 0
        self.pending = False


class Guest:
    """A namespace and the wire to its host. Create and ``serve`` it in the same thread."""

    def __init__(
        self,
        read_fd: int,
        write_fd: int,
        spool: FileSpool | MemorySpool,
        *,
        max_output_bytes: int,
        owns_process: bool,
        memory_limits: tuple[int, int] | None = None,
        can_fork: bool = False,
        shelf: Any = None,
    ) -> None:
        """``memory_limits``: bytes of address space in a cell, and the little more that the guest has for itself, so
        that it can still speak when a cell has used up all it may have. ``can_fork``: the wire is a socket over which
        the host may hand it what a branch needs. ``shelf``: a ``shelf.Shelf``, where host and guest share one."""
        self._receive: Any = _receiver(read_fd) if can_fork else None
        self._reader = Reader(read_fd, self._receive)
        self._branches: list[int] = []
        self._write_fd = write_fd
        self._poll = select.poll()
        self._poll.register(read_fd, select.POLLIN)
        self._spool = spool
        self._shelf = shelf
        self._owns_process = owns_process
        self._pid = _getpid()
        self._critical = _Critical()
        self._sending = threading.Lock()
        self._leading = threading.Lock()
        self._command = _Ticket()
        self._calls: dict[int, _Ticket] = {}
        self._last_call = 0
        self._is_open = False  # a cell runs: calls to the host are answered
        self._live = False  # an interrupt may rise in the main thread
        self._max_output = max_output_bytes
        self._ended: tuple[HeadTail, int] = (HeadTail(2), 0)
        self._reset_output()
        self.stdout = Stream("<stdout>", self._put, 1)
        self.stderr = Stream("<stderr>", self._put, 2)
        self._loop: Any = None
        self._cells = 0
        self._flags = 0
        self._hidden = {_HERE}
        self._reserved: dict[str, Any] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._memory = memory_limits
        self.module = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.builtins: types.ModuleType = builtins
        """What cells see as ``builtins``; a guest that shares its process may be given another one."""
        self.namespace["__builtins__"] = builtins
        if owns_process:
            complete_builtins()
        self._builtins = dict(vars(builtins))
        self._recursion_limit = sys.getrecursionlimit()

    # -- serving

    def serve(self, *, rehearse: bool = False) -> None:
        """Answer the host until it closes the stream. ``rehearse``: nobody waits for us yet."""
        self._mend()
        self._send({"op": "hello", "pid": self._pid})
        if rehearse:
            self._rehearse()
        while True:
            try:
                header, blobs = self._next_command()
            except (EOFError, OSError):
                break
            except KeyboardInterrupt:
                continue  # it came too late for its cell
            self._obey(header, blobs)
            if self._branches:
                self._bury_branches()
        if self._loop is not None:
            self._loop.close()

    def _rehearse(self) -> None:
        """Write to the pages now that a first cell would have to be given copies of."""
        eval(Code("x = 1\nx", "<cell 0>", 0).body, {})

    def _obey(self, header: dict[str, Any], blobs: list[memoryview]) -> None:
        op, id = header["op"], header["id"]
        if op == "run":
            self._run(id, header["code"])
            return
        if op == "seed":
            import random

            random.seed(header["seed"])
            return
        try:
            if op == "set":
                self.bind(header["name"], self._value_of(header, blobs), header["reserved"])
            elif op == "context":
                self.bind("context", unpack_value(blobs[0])[0], True)
            elif op == "install":
                self.install(header["module"], header["source"])
            elif op == "get":
                self._send_get(id, header["name"])
                return
            else:
                raise ProtocolError(f"an unknown request {op!r}")
            self._send({"op": "ok", "id": id})
        except BaseException as error:  # noqa: BLE001  (the host decides what it means)
            self._send_failed(id, error, show_error(error, {_HERE}) if op == "install" else str(error))

    def _send_failed(self, id: int, error: BaseException, message: str) -> None:
        kind = "TypeError" if isinstance(error, CodecError) else type(error).__name__
        self._send({"op": "failed", "id": id, "kind": kind, "message": cut(message, 20_000)})

    def _value_of(self, header: dict[str, Any], blobs: list[memoryview]) -> Any:
        return Decoder(blobs).decode(header["value"]) if header.get("tags") else header["value"]

    def bind(self, name: str, value: Any, reserved: bool) -> None:
        """Bind a name for the host."""
        if reserved:
            self._reserved[name] = value
        else:
            self._reserved.pop(name, None)
        self.namespace[name] = value

    def _send_get(self, id: int, name: str) -> None:
        if name not in self.namespace:
            raise NameError(f"name '{name}' is not defined")
        encoder = Encoder()
        self._send({"op": "value", "id": id, "value": encoder.encode(self.namespace[name])}, encoder)

    def install(self, module: str, source: str) -> None:
        """Execute ``source`` as ``module``; bind what its ``__all__`` names."""
        made = types.ModuleType(module if self._owns_process else f"{module}@{id(self)}")
        made.__dict__.update(
            call_host=self.call_host, HostError=HostError, namespace=self.namespace, last_output=self.last_output,
            portable=portable,
        )  # fmt: skip
        name = f"<{module}>"
        remember_source(name, source)
        if self._owns_process:
            sys.modules[module] = made
        exec(compiled(source, name), made.__dict__)
        self._hidden.add(name)
        self._modules[module] = made
        for public in made.__dict__.get("__all__", ()):
            self.bind(public, getattr(made, public), True)

    # -- a cell

    def _run(self, id: int, code: str) -> None:
        self._cells += 1
        self._reset_output()
        self._critical.reset()
        self._is_open = True
        value = error = None
        self._allow_memory(0)
        try:
            value, error = self._execute(code, f"<cell {self._cells}>")
        except BaseException as late:  # noqa: BLE001  (an interrupt that hit between the cell and its report)
            error = type(late).__name__
        self._live = False
        self._allow_memory(1)
        self._critical.reset()
        if _getpid() != self._pid:
            self._leave_fork(error)
        self._end_cell(id, value, error)

    def _execute(self, source: str, name: str) -> tuple[str | None, str | None]:
        """Run a cell: (echo, error). All of it can be interrupted, also a repr or an exception's text."""
        try:
            self._live = True
            try:
                remember_source(name, source)
                code = Code(source, name, self._flags)
                self._flags = code.flags
                self._evaluate(code.body)
                return (self._echo(self._evaluate(code.last)) if code.last else None), None
            except BaseException as error:  # noqa: BLE001  (a cell may raise anything)
                return None, self._describe(error)
        finally:
            self._live = False

    def _evaluate(self, code: types.CodeType) -> Any:
        result = eval(code, self.namespace)
        return self._await(result) if code.co_flags & _CO_COROUTINE else result

    def _echo(self, value: Any) -> str | None:
        if value is None:
            return None
        self.namespace["_"] = value
        return safe_repr(value)

    def _await(self, coroutine: Any) -> Any:
        """A cell with ``await`` at its top: its event loop lives as long as the session."""
        import asyncio

        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        task = self._loop.create_task(coroutine)
        try:
            return self._loop.run_until_complete(task)
        finally:
            if not task.done():
                task.cancel()
                self._loop.run_until_complete(asyncio.wait([task], timeout=0.1))

    def _describe(self, error: BaseException) -> str | None:
        if isinstance(error, SystemExit):
            return None if error.code in (None, 0) else cut(f"SystemExit: {error.code}", VALUE_CHARS)
        self._allow_memory(1)
        if isinstance(error, MemoryError):
            error.__context__ = None  # the interpreter keeps few of them, and uses them again
        try:
            text: str | None = show_error(error, self._hidden)
        except Exception:  # noqa: BLE001  (an exception whose text cannot be made, or no memory for it)
            text = f"{type(error).__name__} (its traceback could not be shown)"
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            gc.collect()
        return text

    def _allow_memory(self, which: int) -> None:
        if self._memory is not None:
            resource.setrlimit(resource.RLIMIT_AS, (self._memory[which], self._memory[1]))

    def _end_cell(self, id: int, value: str | None, error: str | None) -> None:
        self._mend()
        with self._sending:
            parts = self._drain(final=True)
        self._ended = (self._kept, self._chars)
        encoder = Encoder()
        note, error = self._after_cell(encoder, error)
        restored = self._restore_names()
        with self._sending:
            parts += self._drain(final=True)
            self._is_open = False
            self._drop_calls()
            done = {"op": "done", "id": id, "value": value, "error": error, "restored": restored, "note": note}
            write_all(self._write_fd, parts + self._frame({**done, "chars": self._chars}, encoder))

    def _mend(self) -> None:
        """Undo what a cell may have done to the interpreter that would break the next one, or us."""
        if vars(builtins) != self._builtins:
            vars(builtins).update(self._builtins)
        self.namespace["__name__"] = "__main__"
        self.namespace["__builtins__"] = self.builtins
        if self._owns_process:
            self._mend_process()

    def _mend_process(self) -> None:
        self._spool.attach()
        sys.stdout = sys.__stdout__ = self.stdout  # type: ignore[misc,assignment]
        sys.stderr = sys.__stderr__ = self.stderr  # type: ignore[misc,assignment]
        sys.modules["__main__"] = self.module
        if sys.gettrace() is not None:
            sys.settrace(None)
        if sys.getprofile() is not None:
            sys.setprofile(None)
        if sys.getrecursionlimit() != self._recursion_limit:
            sys.setrecursionlimit(self._recursion_limit)
        _signal.signal(signal.SIGINT, self.on_interrupt)
        _signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))

    def _after_cell(self, encoder: Encoder, error: str | None) -> tuple[Any, str | None]:
        """What the modules' ``after_cell`` say, encoded. They see the names as the cell left them."""
        notes: dict[str, Any] = {}
        for name, module in self._modules.items():
            hook = module.__dict__.get("after_cell")
            if hook is None:
                continue
            try:
                notes[name] = encoder.encode(hook())
            except Exception as failure:  # noqa: BLE001  (shown to whoever wrote the cell, which may have caused it)
                notes[name] = None
                kind = "TypeError" if isinstance(failure, CodecError) else type(failure).__name__
                error = error or f"{kind}: {cut(str(failure), 2000)}"
        return notes or None, error

    def _restore_names(self) -> list[str]:
        namespace = self.namespace
        changed = [name for name, value in self._reserved.items() if namespace.get(name, _MISSING) is not value]
        for name in changed:
            namespace[name] = self._reserved[name]
        return changed

    def _leave_fork(self, error: str | None) -> None:
        """A process that the cell forked came to the cell's end: it is not the session."""
        if error:
            self._spool.write(error.encode("utf-8", "backslashreplace"))
        os._exit(1 if error else 0)

    # -- branches

    def _fork(self, id: int) -> None:
        """Go on in two processes from here; the branch has a wire and a spool of its own, and waits for what we wait
        for."""
        fds, self._reader.fds = self._reader.fds, []
        reason, pid = self._cannot_fork(fds), -1
        drawn = _random_state()
        if reason is None:
            try:
                pid = _os_fork()
            except OSError as error:
                reason = f"no process for a branch: {error.strerror}"
        if not pid:
            with contextlib.suppress(Exception):
                drawn and drawn[0].setstate(drawn[1])
            self._become_branch(*fds)
            return
        for fd in fds:
            _close(fd)
        if reason is None:
            self._branches.append(pid)
            self._send({"op": "ok", "id": id})
        else:
            self._send({"op": "failed", "id": id, "kind": "SandboxError", "message": reason})

    def _cannot_fork(self, fds: list[int]) -> str | None:
        assert isinstance(self._spool, FileSpool)
        self._bury_branches()
        if len(sys._current_frames()) > 1:
            return "threads are alive, which a branch would lack: wait for them, or use the batched calls instead"
        if self._loop is not None:
            if self._loop.is_running() or sys.modules["asyncio"].all_tasks(self._loop):
                return "an event loop has work: await its tasks first"
            self._loop.close()
            self._loop = None
        known = {self._reader.fd, self._write_fd, self._spool.fd, *fds}
        if self._shelf is not None:
            known.add(self._shelf.fd)
        count = sum(fd not in known for fd in _open_descriptors())
        if count:
            return f"files, pipes or sockets are open ({count}), which a branch would share: close them first"
        return None if len(fds) == (2 if self._shelf is None else 3) else "no descriptor is free"

    def _become_branch(self, wire: int, spool: int, shelf: int = -1) -> None:
        self._pid = _getpid()
        self._branches = []
        os.setsid()
        assert isinstance(self._spool, FileSpool)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))  # they are above what code may open
        places = [(wire, self._write_fd), (spool, self._spool.fd)]
        if self._shelf is not None:
            places.append((shelf, self._shelf.fd))
            self._shelf = type(self._shelf)(self._shelf.fd, is_host=False)
        for fd, place in places:
            _dup2(fd, place, inheritable=False)
            _close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        self._spool.at = 0
        self._spool.attach()
        self._reader = Reader(self._reader.fd, self._receive)
        self._send({"op": "hello", "pid": self._pid})

    def _bury_branches(self) -> None:
        for pid in self._branches[:]:
            with contextlib.suppress(OSError):
                if _waitpid(pid, os.WNOHANG)[0]:
                    self._branches.remove(pid)

    # -- interrupts

    def on_interrupt(self, *_: object) -> None:
        """The handler of SIGINT."""
        if _getpid() != self._pid:
            os._exit(130)
        if self.takes_interrupt():
            raise KeyboardInterrupt

    def takes_interrupt(self) -> bool:
        """Whether KeyboardInterrupt may rise in the guest's thread now. Within a frame it is kept for later."""
        if self._live and self._critical.depth:
            self._critical.pending = True
            return False
        return self._live

    # -- output

    def _reset_output(self) -> None:
        self._pending = 0
        self._chars = 0
        self._sent = 0
        self._count = _Utf8("replace").decode
        self._kept = HeadTail(16 * self._max_output)
        self._held = Tail(max(self._max_output // 2, 1))
        self._flushed = _clock()

    def _put(self, data: bytes) -> None:
        try:
            self._spool.write(data)
        except OSError:  # the file is full of what other processes wrote
            self._flush()
            self._spool.write(data)
        self._pending += len(data)
        if self._pending >= _FLUSH_BYTES or _clock() - self._flushed > _FLUSH_S:
            self._flush()

    def _flush(self) -> None:
        """Send what was printed so far, if a cell runs and nobody else is sending."""
        if not self._is_open or _getpid() != self._pid:
            return
        before = self._critical.enter()
        try:
            if self._sending.acquire(blocking=False):
                try:
                    if self._is_open:
                        write_all(self._write_fd, self._drain(final=False))
                finally:
                    self._sending.release()
        finally:
            self._critical.leave(before)

    def _drain(self, final: bool) -> list[Buffer]:
        """Take what was printed; the frames that the host gets of it now. ``_sending`` is held.

        Up to its limit the host gets everything; then the newest, at most every 50 ms and at the end."""
        self._pending = 0
        parts: list[Buffer] = []
        for data in self._spool.take():
            self._chars += len(self._count(data))
            self._kept.add(data)
            room = max(self._max_output - self._sent, 0)
            if room:
                parts += self._out(data[:room], 0, self._spool.at - len(data[room:]))
            if room < len(data):
                self._held.add(data[room:])
        now = _clock()
        if len(self._held) and (final or now - self._flushed > _FLUSH_S):
            parts += self._out(*self._held.take(), self._spool.at)
        self._flushed = now
        return parts

    def _out(self, data: bytes, skip: int, upto: int) -> list[Buffer]:
        self._sent += len(data)
        header = {"op": "out", "skip": skip, "chars": self._chars, "upto": upto, "blobs": [len(data)]}
        return self._frame(header, None, [data])

    def last_output(self) -> str:
        """What the last cell that ended had printed, up to 16 times what the host keeps. In ``after_cell``: this cell."""
        kept, chars = self._ended
        return kept.text(chars)

    # -- the wire

    def _frame(self, header: dict[str, Any], encoder: Encoder | None, blobs: Sequence[Buffer] = ()) -> list[Buffer]:
        if encoder is not None:
            blobs = encoder.blobs
            if encoder.tags:
                header["tags"] = True
            if blobs:
                header["blobs"] = [len(blob) for blob in blobs]
        shelf = self._shelf
        if shelf is not None:
            if encoder is not None and blobs and shelf.put(blobs, header["id"]):
                header["shelved"], blobs = True, ()
            elif encoder is not None and encoder.defers:
                blobs = encoded(blobs)
            if shelf.told != shelf.got:
                header["got"] = shelf.told = shelf.got
        text = _json_bytes(header)
        size = len(text) + sum(map(len, blobs))
        if len(text) > MAX_HEADER or size > MAX_FRAME:
            raise CodecError(f"{size:,} bytes (at most {MAX_FRAME:,}, {MAX_HEADER:,} of them outside long strings)")
        return frame(text, blobs)

    def _send(self, header: dict[str, Any], encoder: Encoder | None = None) -> None:
        parts = self._frame(header, encoder)
        with self._sending:
            write_all(self._write_fd, parts)

    def call_host(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the host from any thread of a running cell. Raises HostError."""
        if _getpid() != self._pid:
            raise HostError("RuntimeError", f"{name}() was called in a forked process; call it in the session itself")
        self._flush()
        ticket = _Ticket()
        before = self._critical.enter()
        try:
            self._post(name, [list(args), kwargs], ticket)
            self._wait(ticket)
        except CodecError as error:
            raise TypeError(str(error)) from None
        finally:
            self._forget(ticket)
            self._critical.leave(before)
        if ticket.frame is _MISSING:
            raise HostError("RuntimeError", f"{name}() was still waiting when its cell ended")
        header, blobs = ticket.frame
        if header["op"] == "err":
            raise HostError(header["kind"], header["message"], self._value_of(header, blobs))
        return self._value_of(header, blobs)

    def _post(self, name: str, arguments: Any, ticket: _Ticket) -> None:
        encoder = Encoder(defers=self._shelf is not None)
        value = encoder.encode(arguments)
        with self._sending:
            if not self._is_open:
                raise HostError("RuntimeError", f"{name}() was called after its cell had ended")
            self._last_call += 1
            parts = self._frame({"op": "call", "id": self._last_call, "name": name, "value": value}, encoder)
            self._calls[self._last_call] = ticket
            write_all(self._write_fd, parts)

    def _forget(self, ticket: _Ticket) -> None:
        if ticket.frame is None:  # interrupted
            for id, other in list(self._calls.items()):
                if other is ticket:
                    self._calls.pop(id, None)
            self._pass_on()

    def _drop_calls(self) -> None:
        for ticket in list(self._calls.values()):
            ticket.frame = _MISSING
            ticket.rouse()
        self._calls.clear()

    def _next_command(self) -> Any:
        self._wait(self._command)
        command, self._command.frame = self._command.frame, None
        return command

    def _wait(self, ticket: _Ticket) -> None:
        """Until ``ticket`` has its frame. One of those who wait reads for all; when it has its own it hands over."""
        while ticket.frame is None:
            if not self._leading.acquire(blocking=False):
                self._critical.wait(ticket.wake.acquire)
                continue
            try:
                while ticket.frame is None:
                    self._read_step(ticket)
            finally:
                self._leading.release()
                self._pass_on()

    def _read_step(self, mine: _Ticket) -> None:
        view = self._reader.next()
        if view is not None:
            self._dispatch(view, mine)
            return
        if self._live and not self._reader.have:
            self._critical.wait(self._poll.poll)
        try:
            self._reader.fill()
        except (EOFError, OSError):
            if self._owns_process:
                os._exit(0)  # the host is gone
            raise

    def _dispatch(self, view: memoryview, mine: _Ticket) -> None:
        text, end = open_frame(view)
        header = _from_json(str(text, "utf-8"))
        blobs: list[memoryview] = []
        if "blobs" in header:
            blobs = (
                self._shelf.take(header["blobs"]) if "shelved" in header else split_blobs(view, end, header["blobs"])
            )
        if header["op"] == "fork":
            self._fork(header["id"])
            return
        ticket: _Ticket | None = self._command
        is_answer = header["op"] in ("ret", "err")
        if is_answer:
            ticket = self._calls.pop(header["id"], None)  # None: its caller was interrupted
        if self._shelf is not None and (not is_answer or header["id"] == self._shelf.key):
            self._shelf.is_free = True
        if ticket is not None:
            ticket.frame = (header, blobs)
            if ticket is not mine:
                ticket.rouse()

    def _pass_on(self) -> None:
        """Let someone else who waits read the stream."""
        for ticket in [*self._calls.values(), self._command]:
            if ticket.frame is None:
                ticket.rouse()
                return


def _receiver(fd: int) -> Any:
    """``recvmsg`` of the socket ``fd``, which stays open as long as the process."""
    import socket

    end = socket.socket(fileno=fd)
    return end.recvmsg


def _open_descriptors() -> list[int]:
    """From 3 to the most that code may open."""
    poll = select.poll()
    numbers = range(3, min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1024))
    for fd in numbers:
        poll.register(fd, 0)
    closed = {fd for fd, event in poll.poll(0) if event & select.POLLNVAL}
    return [fd for fd in numbers if fd not in closed]


def complete_builtins() -> None:
    """What ``site`` adds to an interpreter and a server without it lacks."""

    def exit(code: Any = None) -> None:
        """End the cell."""
        raise SystemExit(code)

    added = vars(builtins)
    added.setdefault("exit", exit)
    added.setdefault("quit", exit)
    if "help" not in added:
        from _sitebuiltins import _Helper

        added["help"] = _Helper()


_COMPILED: dict[tuple[str, str], types.CodeType] = {}
"""Modules compiled ahead of time by whoever forks sessions."""


def compiled(source: str, name: str) -> types.CodeType:
    """The code of a module to install."""
    code = _COMPILED.get((source, name))
    return code if code is not None else compile(source, name, "exec", 0, True)


def precompile(source: str, name: str) -> None:
    """Compile a module once for every session that is forked after this."""
    _COMPILED[(source, name)] = compile(source, name, "exec", 0, True)
