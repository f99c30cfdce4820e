"""Converts a context's tables and arrays to pandas and numpy objects, if importable.

    packages=("pandas",)   Table ──> pandas.DataFrame, BufferNdArray ──> numpy.ndarray
    packages=("numpy",)    BufferNdArray ──> numpy.ndarray

Columns of numbers use the buffers of the table without a copy. So do columns of text if pyarrow is
installed. Other columns are copied. The libraries are packages of the user, and are imported by
name when a table is decoded. The table itself is defined in ``tables.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Any

from .tables import BufferNdArray, ColumnValues, Table

_WIDTHS = {4: "decimal32", 8: "decimal64", 16: "decimal128", 32: "decimal256"}


def to_pandas_if_available(table: Table, packages: Sequence[str]) -> Any:
    """Convert a table to a pandas DataFrame if pandas is one of the packages that the session may
    import.

    Otherwise return it unchanged.
    """
    if "pandas" not in packages:
        return table
    pandas = import_module("pandas")

    columns = {name: _pandas_values(table[name]) for name in table.columns}
    return pandas.DataFrame(columns, copy=False, index=pandas.RangeIndex(len(table)))


def to_numpy_if_available(array: BufferNdArray, packages: Sequence[str]) -> Any:
    """Convert an array to a numpy array if numpy or pandas is one of the packages that the session
    may import.

    Otherwise return it unchanged.
    """
    if not {"numpy", "pandas"}.intersection(packages):
        return array
    numpy = import_module("numpy")

    return numpy.frombuffer(array.buffer, array.dtype).reshape(array.shape)


def _pandas_values(column: ColumnValues) -> Any:
    numpy = import_module("numpy")
    pandas = import_module("pandas")

    bits = column.buffers[0] if column.buffers else None
    if column.kind in ("number", "timestamp", "duration"):
        data = column.buffers[1]
        assert data is not None
        missing = None
        if bits is not None:
            given = numpy.unpackbits(numpy.frombuffer(bits, "u1"), bitorder="little")
            missing = given[: len(column)] == 0
        if column.kind != "number":
            is_moment = column.kind == "timestamp"
            unit, zone = column.info if is_moment else (column.info, "")
            values = numpy.frombuffer(data, f"<{'M8' if is_moment else 'm8'}[{unit}]")
            if missing is not None:
                values = values.copy()
                values[missing] = "NaT"
            if not zone:
                return values
            return pandas.Series(values).dt.tz_localize("UTC").dt.tz_convert(zone).array
        values = numpy.frombuffer(data, f"<{'f2' if column.info == 'e' else column.info}")
        if missing is None:
            return values
        if values.dtype.kind == "f":
            values = values.copy()
            values[missing] = numpy.nan
            return values
        return pandas.arrays.IntegerArray(values, missing)
    try:
        values = arrow_array(column)
    except ImportError:
        return column.tolist()
    if column.kind == "text":
        return pandas.array(values, dtype="str")
    return values.to_pandas()


def arrow_array(column: ColumnValues) -> Any:
    """Return a column as a pyarrow array that shares its buffers.

    The column must start at the beginning of its buffers.
    """
    pyarrow = import_module("pyarrow")

    kind = column.kind
    if kind == "coded":
        codes, values = map(arrow_array, column.children)
        return pyarrow.DictionaryArray.from_arrays(codes, values)
    children = [arrow_array(child) for child in column.children]
    buffers = [None if each is None else pyarrow.py_buffer(each) for each in column.buffers]
    if kind == "null":
        return pyarrow.nulls(len(column))
    type_ = _arrow_type(column, [child.type for child in children])
    return pyarrow.Array.from_buffers(type_, len(column), buffers, children=children)


def _arrow_type(column: ColumnValues, children: list[Any]) -> Any:
    pyarrow = import_module("pyarrow")

    info = column.info
    match column.kind:
        case "number":
            names = {"e": "float16", "f": "float32", "d": "float64"}
            sizes = {"b": 8, "h": 16, "i": 32, "q": 64}
            name = names.get(info)
            name = name or f"{'u' if info.isupper() else ''}int{sizes[info.lower()]}"
            return getattr(pyarrow, name)()
        case "bool":
            return pyarrow.bool_()
        case "text":
            return pyarrow.string() if info == "i" else pyarrow.large_string()
        case "bytes":
            return pyarrow.binary() if info == "i" else pyarrow.large_binary()
        case "date":
            return pyarrow.date32()
        case "timestamp":
            return pyarrow.timestamp(info[0], info[1] or None)
        case "time":
            return (pyarrow.time32 if info in ("s", "ms") else pyarrow.time64)(info)
        case "duration":
            return pyarrow.duration(info)
        case "decimal":
            width, scale, precision = info
            return getattr(pyarrow, _WIDTHS[width])(precision, scale)
        case "list":
            return (pyarrow.list_ if info == "i" else pyarrow.large_list)(children[0])
        case "fixed":
            return pyarrow.list_(children[0], info)
        case "struct":
            return pyarrow.struct(list(zip(info, children, strict=True)))
        case "map":
            (pair,) = children
            return pyarrow.map_(pair.field(0).type, pair.field(1).type)
    raise ValueError(f"unknown column kind {column.kind!r}")


def arrow_table(table: Table) -> Any:
    """Return a decoded table as a pyarrow table that shares its buffers."""
    pyarrow = import_module("pyarrow")

    arrays = [arrow_array(table[name]) for name in table.columns]
    return pyarrow.table(arrays, names=table.columns)
