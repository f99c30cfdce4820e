"""Tables and arrays that are part of a context.

Their values are not copied, but stay in the buffers in which they arrive.

    host: a DataFrame ─convert_to_context.py─> Table ─value_encoding.py─> buffers in a memory file
    session: the mapped file ─value_encoding.py─> Table, or with pandas a DataFrame (dataframes.py)

A column has Arrow's memory layout, so that pandas, pyarrow and DuckDB can use its buffers directly.
The classes here decode a value each time it is read. They define what a session without pandas can
do with a table, and use the standard library only. Buffers may come from a hostile session, so
reading outside of a buffer raises an exception. DataFrames are converted to tables by
``convert_to_context.py``.

    kind        buffers (after the validity bits)       info
    number      values                                  format character of ``struct``
    bool        bits
    text bytes  offsets, data                           "i" or "q", for offsets of 32 or 64 bits
    date        days                                    "i"
    timestamp   counts                                  [unit, time zone or ""]
    time        counts                                  unit: s, ms, us, ns
    duration    counts                                  unit
    decimal     integers                                [width in bytes, scale, precision]
    list        offsets; child: the items               "i" or "q"
    fixed       child: the items                        number of items
    struct      children: the fields                    their names
    map         offsets; child: a struct of two fields  "i"
    coded       children: codes, values
    null
"""

from __future__ import annotations

import array
import datetime
import itertools
import math
import struct
from collections.abc import Iterator, Sequence
from typing import Any

_PIECE = 4096
"""Number of rows that are decoded at once when a column is iterated over."""
_SHOWN_ROWS = 5
_SHOWN_CHARS = 60
_VALUE_CHARS = 12
"""Assumed length in characters of a value that is not text. It serves to estimate the text length
of tables and arrays."""
_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
_SIZES = {char: struct.calcsize(f"<{char}") for char in "bBhHiIqQefd"}
_EPOCH = datetime.datetime(1970, 1, 1)
_DAY_ZERO = _EPOCH.toordinal()
_DATA = {"number": 1, "bool": 1, "text": 2, "bytes": 2, "date": 1, "timestamp": 1}
_DATA |= {"time": 1, "duration": 1, "decimal": 1, "list": 1, "map": 1}
"""Kind of column -> number of data buffers after the validity bits. Unlisted kinds have none."""
_CHILDREN = {"list": 1, "map": 1, "fixed": 1, "coded": 2}


class ColumnValues(Sequence[Any]):
    """A column of a table, used like a list of its values.

    It supports ``len(c)``, ``c[3]``, ``c[10:20]`` (a list) and ``for value in c``.
    """

    __slots__ = ("_length", "_start", "_values", "buffers", "children", "info", "kind", "type")

    def __init__(
        self,
        kind: str,
        type: str,
        length: int,
        info: Any,
        buffers: Sequence[memoryview | None],
        children: Sequence[ColumnValues] = (),
        start: int = 0,
    ) -> None:
        """Create a column whose values are read from existing buffers, without a copy.

        ``type`` is the Arrow name of the type, such as ``int64``. ``start`` is the index of the
        first value in the buffers.
        """
        self.kind = kind
        self.type = type
        self.info = info
        self.buffers = list(buffers)
        self.children = list(children)
        self._start = start
        self._length = length
        self._values: list[Any] | None = None  # of the codes of a "coded" column
        self._check()

    def _check(self) -> None:
        """Raise ValueError if the column lacks a buffer or a child column, or has a negative
        length."""
        children = _CHILDREN.get(self.kind, len(self.info) if self.kind == "struct" else 0)
        if len(self.buffers) != 1 + _DATA.get(self.kind, 0) or len(self.children) != children:
            raise ValueError(f"a column of kind {self.kind!r:.20} without all its buffers")
        if self._length < 0 or self._start < 0:
            raise ValueError("a column of a negative length")

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self._length, _PIECE):
            yield from self.values(start, min(start + _PIECE, self._length))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step == 1:
                return self.values(start, max(start, stop))
            return [self[each] for each in range(start, stop, step)]
        position = index + self._length if index < 0 else index
        if not 0 <= position < self._length:
            raise IndexError(f"row {index} of {self._length:,}")
        return self.values(position, position + 1)[0]

    def __repr__(self) -> str:
        head = ", ".join(_short_repr(value) for value in self[:_SHOWN_ROWS])
        more = ", …" if self._length > _SHOWN_ROWS else ""
        return f"Column of {self._length:,} values, {self.type}: [{head}{more}]"

    def tolist(self) -> list[Any]:
        return self.values(0, self._length)

    def values(self, start: int, stop: int) -> list[Any]:
        """Decode the values of a range of rows."""
        if start == stop:
            return []
        start, stop = start + self._start, stop + self._start
        found = self._decode_values(start, stop)
        if self.buffers and (bits := self.buffers[0]) is not None:
            are_valid = _unpack_bits(bits, start, stop)
            found = [
                value if valid else None for value, valid in zip(found, are_valid, strict=True)
            ]
        return found

    def _decode_values(self, start: int, stop: int) -> list[Any]:
        kind, info = self.kind, self.info
        match kind:
            case "number":
                return self._numbers(1, info, start, stop)
            case "bool":
                return _unpack_bits(self.buffers[1], start, stop)
            case "text" | "bytes":
                return self._texts(start, stop)
            case "date":
                return [_date(days) for days in self._numbers(1, info, start, stop)]
            case "timestamp":
                unit, zone = info
                return [
                    _datetime_from_count(count, unit, bool(zone))
                    for count in self._numbers(1, "q", start, stop)
                ]
            case "time":
                char = "i" if info in ("s", "ms") else "q"
                return [
                    _time_from_count(count, info) for count in self._numbers(1, char, start, stop)
                ]
            case "duration":
                return [_duration(count, info) for count in self._numbers(1, "q", start, stop)]
            case "decimal":
                return [*self._decimals(start, stop)]
            case "list" | "map":
                return self._lists(self._numbers(1, info, start, stop + 1))
            case "fixed":
                return self._lists([info * each for each in range(start, stop + 1)])
            case "struct":
                rows = zip(*(child.values(start, stop) for child in self.children), strict=True)
                return [dict(zip(info, row, strict=True)) for row in rows]
            case "coded":
                codes, values = self.children
                if self._values is None:
                    self._values = values.tolist()
                known = self._values
                return [None if code is None else known[code] for code in codes.values(start, stop)]
            case _:
                return [None] * (stop - start)

    def _numbers(self, buffer: int, char: str, start: int, stop: int) -> list[Any]:
        view, size = self.buffers[buffer], _SIZES[char]
        part = view[start * size : stop * size] if view is not None else b""
        if len(part) != (stop - start) * size:
            raise IndexError("a column that is shorter than its table")
        return list(struct.unpack(f"<{stop - start}{char}", part))

    def _texts(self, start: int, stop: int) -> list[Any]:
        offsets = self._numbers(1, self.info, start, stop + 1)
        base = offsets[0]
        data = bytes(self.buffers[2][base : offsets[-1]]) if self.buffers[2] is not None else b""
        pairs = itertools.pairwise(offsets)
        if self.kind == "bytes":
            return [data[at - base : end - base] for at, end in pairs]
        if data.isascii():
            text = data.decode()
            return [text[at - base : end - base] for at, end in pairs]
        return [data[at - base : end - base].decode("utf-8", "replace") for at, end in pairs]

    def _decimals(self, start: int, stop: int) -> Iterator[int | float]:
        width, scale, _ = self.info
        data = self.buffers[1][start * width : stop * width] if self.buffers[1] is not None else b""
        for at in range(0, (stop - start) * width, width):
            number = int.from_bytes(data[at : at + width], "little", signed=True)
            whole, rest = divmod(number, 10**scale) if scale > 0 else (number * 10**-scale, 0)
            yield whole if not rest else number / 10**scale

    def _lists(self, offsets: list[int]) -> list[list[Any]]:
        base, child = offsets[0], self.children[0]
        items = child.values(base, offsets[-1])
        found = [items[at - base : end - base] for at, end in itertools.pairwise(offsets)]
        if self.kind == "map":
            return [[tuple(pair.values()) for pair in pairs] for pairs in found]
        return found

    # --- sending

    def sliced(self, start: int, stop: int) -> ColumnValues:
        """Return a range of rows as a column that shares the same buffers."""
        return ColumnValues(
            self.kind,
            self.type,
            stop - start,
            self.info,
            self.buffers,
            self.children,
            self._start + start,
        )

    def trim_buffers(self) -> ColumnValues:
        """Return a copy of the column whose buffers contain only the column's values.

        They contain nothing before the first value and nothing after the last.
        """
        start, stop, kind, info = self._start, self._start + self._length, self.kind, self.info
        bits = self.buffers[0] if self.buffers else None
        buffers: list[memoryview | None] = [_cut_bits(bits, start, stop)]
        children = self.children
        if kind in ("text", "bytes", "list", "map"):
            size, view = _SIZES[info], self.buffers[1]
            if view is None or len(view) < (stop + 1) * size:
                offsets: memoryview = memoryview(bytes(size * (self._length + 1)))
            else:
                offsets = view[start * size : (stop + 1) * size]
            first, last = (struct.unpack_from(f"<{info}", offsets, at)[0] for at in (0, -size))
            if first:
                moved = (each - first for (each,) in struct.iter_unpack(f"<{info}", offsets))
                offsets = memoryview(array.array(info, moved)).cast("B")
            buffers.append(offsets)
            if kind in ("list", "map"):
                children = [self.children[0].sliced(first, last).trim_buffers()]
            else:
                data = self.buffers[2]
                buffers.append(memoryview(b"") if data is None else data[first:last])
        elif kind == "bool":
            buffers.append(_cut_bits(self.buffers[1], start, stop))
        elif kind in _DATA:
            width = info[0] if kind == "decimal" else _SIZES[self._number_format_char()]
            view = self.buffers[1]
            buffers.append(memoryview(b"") if view is None else view[start * width : stop * width])
        elif kind == "fixed":
            children = [self.children[0].sliced(start * info, stop * info).trim_buffers()]
        elif kind == "struct":
            children = [child.sliced(start, stop).trim_buffers() for child in children]
        elif kind == "coded":
            children = [children[0].sliced(start, stop).trim_buffers(), children[1].trim_buffers()]
        return ColumnValues(kind, self.type, self._length, info, buffers, children)

    def _number_format_char(self) -> str:
        if self.kind in ("number", "date"):
            return str(self.info)
        return "i" if self.kind == "time" and self.info in ("s", "ms") else "q"

    @property
    def num_chars(self) -> int:
        """The approximate number of characters that all values would have if written as text."""
        if self.kind == "text" and self._length and self.buffers[1] is not None:
            size = _SIZES[self.info]
            ends = [
                struct.unpack_from(f"<{self.info}", self.buffers[1], at * size)[0]
                for at in (self._start, self._start + self._length)
            ]
            return int(ends[1] - ends[0]) + self._length
        return _VALUE_CHARS * self._length


class Table:
    """A table with named columns.

    It supports ``t.columns``, ``t.types``, ``len(t)``, ``t["name"]`` (a column, which is a
    sequence), ``t[3]`` (a row, a dict), ``t[10:20]`` (a table) and ``for row in t``.
    """

    __slots__ = ("_columns", "_length")

    def __init__(self, columns: dict[str, ColumnValues], length: int) -> None:
        if any(len(column) != length for column in columns.values()):
            raise ValueError("columns of different lengths")
        self._columns = columns
        self._length = length

    @property
    def columns(self) -> list[str]:
        return list(self._columns)

    @property
    def types(self) -> dict[str, str]:
        """The type of each column, by column name."""
        return {name: column.type for name, column in self._columns.items()}

    @property
    def num_chars(self) -> int:
        """The approximate number of characters that all values would have if written as text."""
        return sum(column.num_chars for column in self._columns.values())

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index not in self._columns:
                raise KeyError(f"no column {index!r}: the columns are {self.columns}")
            return self._columns[index]
        if isinstance(index, slice):
            start, stop, step = index.indices(self._length)
            if step != 1:
                raise ValueError(
                    "a slice of a table must have the step 1: take rows in a loop instead"
                )
            stop = max(start, stop)
            columns = {name: each.sliced(start, stop) for name, each in self._columns.items()}
            return Table(columns, stop - start)
        if not isinstance(index, int):
            raise TypeError(
                f"a table is indexed by a row's number, a slice, or a column's name, not by a "
                f"{type(index).__name__}"
            )
        return {name: column[index] for name, column in self._columns.items()}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        names = self.columns
        for row in self.rows():
            yield dict(zip(names, row, strict=True))

    def __contains__(self, name: object) -> bool:
        return name in self._columns

    def rows(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[Any, ...]]:
        """Iterate over the rows as tuples."""
        start, stop, _ = slice(start, stop).indices(self._length)
        for at in range(start, stop, _PIECE):
            parts = [each.values(at, min(at + _PIECE, stop)) for each in self._columns.values()]
            yield from (zip(*parts, strict=True) if parts else [()] * (min(at + _PIECE, stop) - at))

    def __repr__(self) -> str:
        columns = ", ".join(f"{name} ({kind})" for name, kind in self.types.items())
        lines = [f"Table of {self._length:,} rows: {columns}"]
        lines += [
            f"  ({', '.join(map(_short_repr, row))})"
            for row in self.rows(0, min(_SHOWN_ROWS, len(self)))
        ]
        return "\n".join(lines + ["  …"] * (self._length > _SHOWN_ROWS))


class BufferNdArray(Sequence[Any]):
    """An array of numbers with any number of dimensions.

    It supports ``a.shape``, ``a.dtype``, ``len(a)``, ``a[3]``, ``a[3, 4]``, ``a[2:5]`` (an array),
    ``for item in a`` and ``a.tolist()``.
    """

    __slots__ = ("_char", "buffer", "dtype", "shape")

    def __init__(self, dtype: str, char: str, shape: Sequence[int], buffer: memoryview) -> None:
        """Create an array whose numbers are read from a buffer in row-major (C) order.

        ``char`` is their format character in the module ``struct``. Raises ValueError if the
        buffer's size does not fit the shape.
        """
        self.dtype = dtype
        self._char = char
        self.shape = tuple(shape)
        self.buffer = buffer
        if min(self.shape, default=0) < 0 or len(buffer) != math.prod(self.shape) * self.item_size:
            raise ValueError(f"an array of shape {self.shape} in {len(buffer):,} bytes")

    @property
    def item_size(self) -> int:
        return struct.calcsize(f"<{self._char}")

    @property
    def char(self) -> str:
        return self._char

    def __len__(self) -> int:
        return self.shape[0] if self.shape else 0

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, tuple):
            found: Any = self
            for each in index:
                found = found[each]
            return found
        step = math.prod(self.shape[1:]) * self.item_size
        if isinstance(index, slice):
            start, stop, stride = index.indices(len(self))
            if stride != 1:
                return [self[each] for each in range(start, stop, stride)]
            stop = max(start, stop)
            return self._part((stop - start, *self.shape[1:]), start * step, stop * step)
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"index {index} of {len(self):,}")
        part = self._part(self.shape[1:], position * step, (position + 1) * step)
        return part if part.shape else part.tolist()

    def _part(self, shape: Sequence[int], start: int, stop: int) -> BufferNdArray:
        return BufferNdArray(self.dtype, self._char, shape, self.buffer[start:stop])

    def tolist(self) -> Any:
        """Return the numbers as nested lists, or a single number if the array has no dimensions."""
        if not self.shape:
            return struct.unpack(f"<{self._char}", self.buffer)[0]
        if len(self.shape) == 1:
            return list(struct.unpack(f"<{len(self)}{self._char}", self.buffer))
        return [part.tolist() for part in self]

    @property
    def num_chars(self) -> int:
        return _VALUE_CHARS * math.prod(self.shape)

    def __repr__(self) -> str:
        shown: Any = self
        while isinstance(shown, BufferNdArray) and len(shown.shape) > 1 and len(shown):
            shown = shown[0]
        items = ", ".join(map(repr, shown[:_SHOWN_ROWS])) if self.shape else repr(self.tolist())
        dots = ", …" if math.prod(self.shape) > _SHOWN_ROWS else ""
        return f"BufferNdArray of {self.dtype}, shape {self.shape}: [{items}{dots}]"


for _class in (ColumnValues, Table, BufferNdArray):
    _class.__module__ = "builtins"  # a session shows their names without a module


def _unpack_bits(bits: memoryview | None, start: int, stop: int) -> list[bool]:
    if bits is None or len(bits) * 8 < stop:
        raise IndexError("a column that is shorter than its table")
    first = start // 8
    number = int.from_bytes(bits[first : (stop + 7) // 8], "little") >> (start - 8 * first)
    digits = format(number & ((1 << (stop - start)) - 1), f"0{stop - start}b")
    return [digit == "1" for digit in reversed(digits)]


def _cut_bits(bits: memoryview | None, start: int, stop: int) -> memoryview | None:
    if bits is None:
        return None
    if start % 8 == 0:
        return bits[start // 8 : (stop + 7) // 8]
    number = int.from_bytes(bits[start // 8 : (stop + 7) // 8], "little") >> (start % 8)
    number &= (1 << (stop - start)) - 1
    return memoryview(number.to_bytes((stop - start + 7) // 8, "little"))


def _date(days: int) -> datetime.date | str:
    try:
        return datetime.date.fromordinal(_DAY_ZERO + days)
    except (ValueError, OverflowError):
        return f"day {days} since 1970-01-01"


def _datetime_from_count(count: int, unit: str, has_zone: bool) -> datetime.datetime | str:
    """Convert a count of time units since 1970 to a datetime, truncated to microseconds.

    The result is in UTC if the column has a time zone.
    """
    try:
        found = _EPOCH + datetime.timedelta(microseconds=count * 10**6 // _PER_SECOND[unit])
    except OverflowError:
        return f"{count} {unit} since 1970-01-01"
    return found.replace(tzinfo=datetime.timezone.utc) if has_zone else found  # noqa: UP017


def _time_from_count(count: int, unit: str) -> datetime.time | str:
    micros = count * 10**6 // _PER_SECOND[unit]
    return (_EPOCH + datetime.timedelta(microseconds=micros % (86_400 * 10**6))).time()


def _duration(count: int, unit: str) -> datetime.timedelta | str:
    try:
        return datetime.timedelta(microseconds=count * 10**6 // _PER_SECOND[unit])
    except OverflowError:
        return f"{count} {unit}"


def _short_repr(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "…"
