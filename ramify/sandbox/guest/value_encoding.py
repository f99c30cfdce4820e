"""Encode the values that host and session exchange as JSON, with tags for types that JSON lacks.

Long strings and bytes are sent after the JSON as binary parts.

Values are supported by exact type: None, bool, int, float, complex, str, bytes, list, tuple, dict,
set, frozenset, date, time, datetime and timedelta. A time zone becomes its offset; an OrderedDict,
defaultdict or Counter becomes a dict, and a subclass of str its text. A session can also receive a
FileBackedText, as a reference to its file, and the tables and arrays of ``tables.py``, whose
buffers are sent without a copy. The module also limits the length of integers and the number of
keys with equal hashes. The layout of the bytes, and the limits that are checked before a value is
decoded, are in ``message_frames.py``. Data from the other end may be hostile: it decodes to a value
of these types or raises ProtocolError.
"""

from __future__ import annotations

import collections
import datetime
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from .dataframes import to_numpy_if_available, to_pandas_if_available
from .mapped_text import FileBackedText, TextOffsetIndex, read_count_table
from .tables import BufferNdArray, ColumnValues, Table

REFERRING_CALL = "rlm_query_batched"
"""Name of the only call to the host in which a session may refer to file-backed texts instead of
sending their contents. They become the contexts of child runs."""
MAX_INT_DIGITS = 4000
"""Maximum number of decimal digits of an integer. Python's own limit is 4,300."""
VALUE_CHARS = 100_000
"""Maximum length in characters of a displayed value or of one exception."""
MAX_EQUAL_HASHES = 2000
"""Maximum number of keys of one set or dict that share their hash with another key."""
_INT_END = 10**MAX_INT_DIGITS
_MAX_HEX = len(hex(-_INT_END))
_FEW_KEYS = 32
"""Sets and dicts up to this size are not checked, since their collisions cost little."""
_SALTED = {str, bytes}
"""Types whose hashes are salted, so that a session cannot predict them."""
_PIECE = 256
"""Number of keys that are hashed in one timed batch."""
_SLOW_S = 0.002
"""CPU time in seconds above which a batch counts as slow. It is twenty times the time of a batch
without hash collisions."""
_MAX_SLOW = 16


class ValueLimitError(ValueError):
    """Raised if a value that a session sends exceeds a limit.

    The message names the limit.
    """


def check_int_digits(value: int) -> int:
    if not -_INT_END < value < _INT_END:
        raise ValueLimitError(
            f"an integer of more than {MAX_INT_DIGITS:,} digits: give it in parts, or as text such "
            "as hex(n)"
        )
    return value


def parse_hex_int(digits: Any) -> int:
    """Parse an integer from the output of ``hex``.

    Raises ValueLimitError if there are too many digits, before the integer is created.
    """
    if len(digits) > _MAX_HEX:
        raise ValueLimitError(f"an integer of more than {MAX_INT_DIGITS:,} digits")
    return check_int_digits(int(digits, 16))


class HashFloodingGuard:
    """A check that protects the host from hash collision attacks.

    A session could choose keys with equal hashes, which make sets and dicts slow to build. One
    object checks all sets and dicts of one value.

    ``hash(n)`` is ``n`` modulo 2**61 - 1, and tuples and frozensets combine the hashes of their
    items. So a session can choose keys that collide: a set of 40,000 multiples of that number takes
    8 s to build.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_EQUAL_HASHES**2

    def check(self, keys: Any) -> None:
        """Raise ValueLimitError if too many keys of a received set or dict have equal hashes."""
        if len(keys) > _FEW_KEYS and not _SALTED.issuperset(map(type, keys)):
            key_list = list(keys)
            hashes: set[int] = set()
            self._check_key_collisions(
                key_list, lambda piece: hashes.update(map(hash, piece)), hashes
            )

    def fill_container(
        self, container: Any, keys: list[Any], values: list[Any] | None = None
    ) -> Any:
        """Add received keys or key-value pairs to an empty set or dict, and return that container.

        Raises ValueLimitError if too many hashes are equal, or if adding takes too long.
        """
        self.check(keys)
        add: Callable[[Any], Any] = container.update
        if len(keys) <= _FEW_KEYS:
            add(keys if values is None else zip(keys, values, strict=True))
        elif values is None:
            _in_pieces(add, keys)
        else:
            _in_pieces(add, list(zip(keys, values, strict=True)))
        return container

    def _check_key_collisions(
        self, keys: list[Any], add: Callable[[Any], Any], hashes: set[int]
    ) -> None:
        count = 0

        def add_and_count(piece: Iterable[Any]) -> None:
            nonlocal count
            add(piece)
            count = min(count + _PIECE, len(keys))
            if (count - len(hashes)) ** 2 > self._left:
                raise ValueLimitError(
                    f"a set or dict with more than {MAX_EQUAL_HASHES:,} keys of equal hashes: send "
                    "them as a list"
                )

        _in_pieces(add_and_count, keys)
        self._left -= (count - len(hashes)) ** 2


def _in_pieces(add: Callable[[Any], Any], items: list[Any]) -> None:
    """Add items to a set or dict in batches, and give up if hash collisions make this slow.

    Raises ValueLimitError in that case. Even keys with distinct hashes can collide in the hash
    table, which can only be detected by timing.
    """
    slow = 0
    for start in range(0, len(items), _PIECE):
        began = time.thread_time()
        add(items[start : start + _PIECE])
        slow += time.thread_time() - began > _SLOW_S
        if slow > _MAX_SLOW:
            raise ValueLimitError(
                "a set or dict of numbers or tuples whose hashes collide: send them as a list"
            )


Buffer = Any
"""bytes, bytearray or memoryview of bytes."""

TAG = "$"
INLINE_CHARS = 4096
"""Strings longer than this are sent as binary parts."""
MAX_DEPTH = 100
"""Maximum nesting of one value."""
_MIN_INT, _MAX_INT = -(2**63), 2**63 - 1
_FLAT_KINDS = {bool, type(None)}
_PLAIN_KINDS = {str, int, float, bool, type(None)}
_DICTS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}


class ProtocolError(Exception):
    """Raised if the other end of a connection has sent something that the protocol does not
    allow."""


class ValueEncodingError(TypeError):
    """Raised for a value that cannot be encoded.

    ``what`` describes the problem. ``path`` is the position of the unsupported part within the
    value, innermost step first.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self.what = what
        self.path: list[str] = []

    def __str__(self) -> str:
        where = "value" + "".join(reversed(self.path[-8:]))
        return (
            f"{self.what} at {where} cannot be carried between session and host: make it a plain "
            "value first"
        )


def type_name(kind: type) -> str:
    """Return the name of a type for an error message.

    The module is left out if it is ``builtins`` or ``__main__``.
    """
    module = kind.__module__
    return (
        kind.__qualname__ if module in ("builtins", "__main__") else f"{module}.{kind.__qualname__}"
    )


def _is_utf8(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class ValueEncoder:
    """An encoder that converts Python values to data that JSON can represent.

    It collects long strings and bytes in the list ``blobs`` instead.
    """

    __slots__ = ("_files", "_keys", "blobs", "chars", "defers", "has_buffers", "tags")

    def __init__(
        self,
        defers: bool = False,
        *,
        bounded: bool = False,
        files: dict[str, Any] | None = None,
    ) -> None:
        """Create an encoder for one value.

        ``defers``: leave long ASCII strings as ``str`` in ``blobs``, for a caller that encodes them
        piece by piece.
        ``bounded``: raise ValueLimitError if the host would refuse to decode the value. This is for
        values that a session sends.
        ``files``: a dict that collects the data of file-backed texts, keyed by the digest of the
        file. If it is None, such a text raises ValueEncodingError.
        """
        self.defers = defers
        self._files = files
        self._keys = HashFloodingGuard() if bounded else None
        self.blobs: list[Any] = []
        self.chars = 0
        """Number of characters in all strings so far."""
        self.tags = False
        """True if some part of the value needs a tag, because plain JSON cannot represent its
        type."""
        self.has_buffers = False
        """True if some of the blobs are buffers of tables or arrays."""

    def encode(self, value: Any, depth: int = 0) -> Any:
        kind = type(value)
        if kind is str:
            self.chars += len(value)
            if len(value) <= INLINE_CHARS and _is_utf8(value):
                return value
            deferred = self.defers and value.isascii()
            return self._tag(
                "str", self._add_blob(value if deferred else value.encode("utf-8", "surrogatepass"))
            )
        if kind is int:
            if _MIN_INT <= value <= _MAX_INT:
                return value
            return self._tag("int", hex(value if self._keys is None else check_int_digits(value)))
        if kind is float:
            return value if math.isfinite(value) else self._tag("float", repr(value))
        if value is None or kind is bool:
            return value
        if depth > MAX_DEPTH:
            raise ValueEncodingError(f"{type_name(kind)} nested deeper than {MAX_DEPTH} levels")
        if kind is list:
            return self._encode_items(value, depth)
        if kind in _DICTS:
            return self._encode_dict(value, depth)
        return self._encode_rare_kind(value, kind, depth)

    def _tag(self, name: str, data: Any) -> dict[str, Any]:
        self.tags = True
        return {TAG: name, "v": data}

    def _add_blob(self, data: Buffer | str) -> int:
        self.blobs.append(data)
        return len(self.blobs) - 1

    def _encode_items(self, items: Any, depth: int) -> list[Any]:
        if len(items) > 16 and self._is_flat(items):
            return list(items)
        out: list[Any] = []
        try:
            for item in items:
                out.append(self.encode(item, depth + 1))
        except ValueEncodingError as error:
            error.path.append(f"[{len(out)}]")
            raise
        return out

    def _is_flat(self, items: Any) -> bool:
        """Return True if all items can be written to JSON without tags or conversions.

        The check runs at C speed.
        """
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

    def _encode_dict(self, value: dict[Any, Any], depth: int) -> Any:
        plain = set(map(type, value)) <= {str} and TAG not in value and _is_utf8("".join(value))
        key: Any = None
        try:
            if plain:
                self.chars += sum(map(len, value))
                out = {}
                for key, item in value.items():
                    out[key] = self.encode(item, depth + 1)
                return out
            if self._keys is not None:
                self._keys.check(value)
            pairs = []
            for key, item in value.items():
                pairs.append([self.encode(key, depth + 1), self.encode(item, depth + 1)])
            return self._tag("dict", pairs)
        except ValueEncodingError as error:
            error.path.append(f"[{_show_key(key)}]")
            raise

    def _encode_rare_kind(self, value: Any, kind: type, depth: int) -> Any:
        if kind is tuple:
            return self._tag("tuple", self._encode_items(value, depth))
        if kind in (set, frozenset):
            if self._keys is not None:
                self._keys.check(value)
            return self._tag(kind.__name__, self._encode_items(_in_order(value), depth))
        if kind is bytes:
            return self._tag("bytes", self._add_blob(value))
        if kind is complex:
            return self._tag("complex", [self.encode(value.real), self.encode(value.imag)])
        if kind in (datetime.datetime, datetime.date, datetime.time):
            return self._tag(kind.__name__, [value.isoformat(), getattr(value, "fold", 0)])
        if kind is datetime.timedelta:
            return self._tag("timedelta", [value.days, value.seconds, value.microseconds])
        if kind is FileBackedText and self._files is not None:
            return self._encode_mapped_text(value.file)
        if kind in (Table, BufferNdArray):
            return self._encode_buffers(value)
        if issubclass(kind, str):
            return self.encode(str.__str__(value), depth)
        raise ValueEncodingError(f"a value of type {type_name(kind)}")

    def _encode_buffers(self, value: Any) -> Any:
        """Encode a table or an array without copying its data.

        The data buffers are added to ``blobs``. Raises ValueEncodingError in a session, which must
        send a plain list instead.
        """
        if self._keys is not None:
            remedy = "list(table[:n])" if type(value) is Table else "array[:n].tolist()"
            raise ValueEncodingError(
                f"a {type(value).__name__} (send the part that is needed: {remedy})"
            )
        self.has_buffers = True
        self.chars += value.num_chars
        if type(value) is Table:
            columns = [
                [name, self._encode_column(value[name].trim_buffers())] for name in value.columns
            ]
            return self._tag("table", [len(value), columns])
        data = [value.dtype, value.char, list(value.shape), self._add_blob(value.buffer)]
        return self._tag("array", data)

    def _encode_column(self, column: ColumnValues) -> list[Any]:
        blobs = [None if each is None else self._add_blob(each) for each in column.buffers]
        children = [self._encode_column(child) for child in column.children]
        return [column.kind, column.type, len(column), column.info, blobs, children]

    def _encode_mapped_text(self, file: TextOffsetIndex) -> Any:
        assert self._files is not None
        self._files[file.digest] = file.data
        if self._keys is not None:
            return self._tag("mapped", file.digest)
        self.chars += file.num_chars
        counts = [self._add_blob(counts) for counts in file.block_count_tables()]
        return self._tag("mapped", [file.digest, file.encoding, *counts])


def _in_order(items: Any) -> list[Any]:
    """Return the items of a set as a list, in sorted order if they can be compared.

    The order then does not depend on the process.
    """
    try:
        return sorted(items)
    except TypeError:
        return list(items)


def _show_key(key: Any) -> str:
    """Format a dict key for an error message about a part of a value.

    The message shows the path to the value that caused the error. The result is short, and an error
    in the key's own ``__repr__`` does no harm.
    """
    return (
        repr(key)[:40]
        if type(key) in (str, int, float, bool, bytes, type(None))
        else f"<{type_name(type(key))}>"
    )


class FileTextReference(NamedTuple):
    """The digest of a file-backed text, which a session sends to the host instead of the text."""

    digest: str


class ValueDecoder:
    """A decoder for values that a ``ValueEncoder`` has encoded.

    Each blob may be used only once, so that a small header cannot produce a huge value.
    """

    __slots__ = ("_files", "_keys", "_packages", "_refers", "blobs")

    def __init__(
        self,
        blobs: Sequence[Buffer],
        *,
        bounded: bool = False,
        files: Mapping[str, Any] | None = None,
        packages: Sequence[str] = (),
        refers: bool = False,
    ) -> None:
        """Create a decoder for one value.

        ``bounded``: raise ProtocolError if the value exceeds a limit. This is for values from a
        session.
        ``packages``: packages that the session may import; they decide which type a table is
        decoded to.
        ``files``: the data of file-backed texts, keyed by the digest of the file.
        ``refers``: decode a file-backed text that a session sends as a ``FileTextReference``.
        """
        self._files = files or {}
        self._refers = refers
        self.blobs: list[Buffer | None] = list(blobs)
        self._keys = HashFloodingGuard() if bounded else None
        self._packages = packages

    def decode(self, data: Any) -> Any:
        try:
            return self._decode(data)
        except ProtocolError:
            raise
        except ValueLimitError as error:
            raise ProtocolError(str(error)) from None
        except (
            LookupError,
            TypeError,
            ValueError,
            OverflowError,
            RecursionError,
            AttributeError,
            MemoryError,
        ) as error:
            raise ProtocolError(
                f"a value that does not decode: {type(error).__name__}: {str(error)[:200]}"
            ) from None

    def _decode(self, data: Any) -> Any:
        kind = type(data)
        if kind is list:
            if len(data) > 16 and _PLAIN_KINDS.issuperset(map(type, data)):
                return data
            return [self._decode(item) for item in data]
        if kind is dict:
            if TAG in data:
                return self._decode_tagged(data[TAG], data["v"])
            return {key: self._decode(item) for key, item in data.items()}
        return data

    def _take_blob(self, index: Any) -> Buffer:
        if type(index) is not int or not 0 <= index < len(self.blobs) or self.blobs[index] is None:
            raise ProtocolError(
                f"a value uses blob {index!r}, which is not there or was used before"
            )
        blob, self.blobs[index] = self.blobs[index], None
        return blob

    def _decode_tagged(self, tag: Any, data: Any) -> Any:
        if tag == "str":
            return str(self._take_blob(data), "utf-8", "surrogatepass")
        if tag == "bytes":
            return bytes(self._take_blob(data))
        if tag == "tuple":
            return tuple(self._decode_list(data))
        if tag in ("set", "frozenset"):
            items = self._decode_list(data)
            members = set(items) if self._keys is None else self._keys.fill_container(set(), items)
            return members if tag == "set" else frozenset(members)
        if tag == "dict":
            return self._decode_dict(data)
        if tag == "int":
            return int(data, 16) if self._keys is None else parse_hex_int(data)
        if tag == "float":
            return {"nan": float, "inf": float, "-inf": float}[data](data)
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
        if tag == "mapped" and self._refers and type(data) is str:
            return FileTextReference(data)
        if tag == "mapped" and self._files:
            digest, encoding, chars_at, lines_at = data
            counts = (
                read_count_table(self._take_blob(chars_at)),
                read_count_table(self._take_blob(lines_at)),
            )
            return FileBackedText(TextOffsetIndex(self._files[digest], *counts, encoding, digest))
        if tag in ("table", "array") and self._keys is None:
            return self._decode_buffers(tag, data)
        raise ProtocolError(f"a value with the unknown tag {str(tag)[:40]!r}")

    def _decode_dict(self, data: Any) -> dict[Any, Any]:
        if self._keys is None:
            return {self._decode(key): self._decode(item) for key, item in data}
        keys, values = [], []
        for key, item in data:
            keys.append(self._decode(key))
            values.append(self._decode(item))
        decoded: dict[Any, Any] = self._keys.fill_container({}, keys, values)
        return decoded

    def _decode_buffers(self, tag: str, data: Any) -> Any:
        """Decode a table or an array without copying its data.

        The result is a pandas or numpy object if the session may import these packages.
        """
        if tag == "array":
            dtype, char, shape, blob = data
            array = BufferNdArray(dtype, char, shape, memoryview(self._take_blob(blob)))
            return to_numpy_if_available(array, self._packages)
        length, columns = data
        table = Table({name: self._decode_column(each) for name, each in columns}, length)
        return to_pandas_if_available(table, self._packages)

    def _decode_column(self, data: Any) -> ColumnValues:
        kind, type_, length, info, blobs, children = data
        buffers = [None if each is None else memoryview(self._take_blob(each)) for each in blobs]
        return ColumnValues(
            kind, type_, length, info, buffers, [*map(self._decode_column, children)]
        )

    def _decode_list(self, data: Any) -> list[Any]:
        if type(data) is not list:
            raise ProtocolError(f"a value with a {type(data).__name__} where its items should be")
        items: list[Any] = self._decode(data)
        return items


def encode_text_blobs(blobs: Sequence[Any]) -> list[Buffer]:
    """Encode the strings in a list of blobs as bytes, and leave the other blobs unchanged.

    An encoder created with ``defers`` leaves long texts as str.
    """
    return [blob.encode() if isinstance(blob, str) else blob for blob in blobs]


def roundtrip_copy(value: Any) -> Any:
    """Return a copy of a value as it would arrive at the other end of the connection.

    Raises TypeError if the value cannot be encoded.
    """
    encoder = ValueEncoder()
    try:
        data = encoder.encode(value)
    except ValueEncodingError as error:
        raise TypeError(str(error)) from None
    return ValueDecoder(encoder.blobs).decode(data)
