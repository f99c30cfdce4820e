"""Convert values of other libraries, such as DataFrames, arrays, data models and paths, to values
that a context can hold.

    pandas, polars, pyarrow, datasets, __arrow_c_stream__   Table, over the same buffers if possible
    numpy.ndarray                                           BufferNdArray, over the same buffer
    dataclass, pydantic and msgspec and attrs models        dict of their fields
    a path, several paths, a binary file                    what ``load`` reads
    a file that was opened as text                          its text

No library is imported here, since a value of a library exists only if the caller has imported it.
The exception is pyarrow (of the extra ``inputs``), which is needed for all columns except numbers.
An index of a DataFrame that is not the default one becomes columns. How a table reaches a session
is defined in ``sandbox/guest/tables.py``.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import enum
import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError, SourceError
from ramify.pip_install_command import install_command
from ramify.sandbox.base import BufferNdArray, ColumnValues, FileBackedText, Table

_LEAVES = {
    *(str, bytes, int, float, bool, complex, type(None), Table, BufferNdArray, FileBackedText),
    *(datetime.datetime, datetime.date, datetime.time, datetime.timedelta),
}
_LISTS = {list, tuple, set, frozenset}
_DICTS = {dict, collections.OrderedDict, collections.defaultdict, collections.Counter}
_NUMBERS = {"int8": "b", "int16": "h", "int32": "i", "int64": "q", "uint8": "B", "uint16": "H"}
_NUMBERS |= {"uint32": "I", "uint64": "Q", "float16": "e", "float32": "f", "float64": "d"}
_ARROW_NAMES = {"halffloat": "float16", "float": "float32", "double": "float64"}
_MAX_SMALL_BYTES = (1 << 31) - 1
"""Maximum size in bytes of the text in one Arrow array with 32-bit offsets. Larger arrays are
converted to Arrow's large types."""


def as_context(value: Any) -> Any:
    """Convert a value to a form that a sandboxed session can hold as its context.

    A suitable value is returned unchanged, a path is loaded with ``load``, and any other value is
    converted. Raises ConfigError for an unsupported value, and SourceError for an unreadable path.
    """
    if _is_path(value) or _are_paths(value):
        from ramify.sources.load_sources import load

        return load(value)
    try:
        converted = _to_plain_value(value)
    except MemoryError as error:  # a broadcast array is larger than its memory
        kind = type(value).__name__
        raise ConfigError(
            f"the context, a {kind}, does not fit into memory: give a part ({error})"
        ) from None
    return _read(value) if converted is value and _is_file(value) else converted


def needs_io(value: Any) -> bool:
    """Return True if ``as_context`` must read from disk or from a stream to convert the value."""
    return _is_path(value) or _are_paths(value) or _is_file(value)


def _is_path(value: Any) -> bool:
    return isinstance(value, os.PathLike)


def _are_paths(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(map(_is_path, value))


def _is_file(value: Any) -> bool:
    kind = type(value)
    return callable(getattr(kind, "read", None)) and not hasattr(kind, "__arrow_c_stream__")


def _read(file: Any) -> Any:
    """Read an open file from its current position to its end."""
    from ramify.sources.load_sources import MAX_BYTES, load

    shown = str(getattr(file, "name", type(file).__name__))
    try:
        is_binary = isinstance(file.read(0), bytes)
        if is_binary:
            at_start = not file.seekable() or file.tell() == 0
            name = getattr(file, "name", None)
            if at_start and isinstance(name, str) and os.path.isfile(name):
                return load([name])  # its name tells its kind
            try:
                return load(["-"], stdin=file)
            except SourceError as error:
                name = f"the file {shown}"
                raise SourceError(str(error).replace("standard input", name, 1)) from None
        text = file.read(MAX_BYTES + 1)
    except SourceError:
        raise
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"the context, the file {shown}, cannot be read: {error}: give its path, as "
            "pathlib.Path(…)"
        ) from None
    if len(text) > MAX_BYTES:
        raise ConfigError(
            f"the context, the file {shown}, is longer than {MAX_BYTES:,} characters: give a part"
        )
    return text


def _to_plain_value(value: Any) -> Any:
    """Recursively convert a value to plain Python values and Ramify's context types.

    Returns ``value`` itself if nothing needs conversion.
    """
    kind = type(value)
    if kind in _LEAVES:
        return value
    if kind in _LISTS:
        if _LEAVES.issuperset(map(type, value)):
            return value
        items = [_to_plain_value(item) for item in value]
        is_same = all(map(lambda a, b: a is b, items, value))
        return value if is_same else kind(items)
    if kind in _DICTS:
        if _LEAVES.issuperset(map(type, value.values())):
            return value
        pairs = {key: _to_plain_value(item) for key, item in value.items()}
        is_same = all(map(lambda a, b: a is b, pairs.values(), value.values()))
        return value if is_same else pairs
    found = _of_library(value)
    return _of_fields(value) if found is value else found


# --- objects with fields --------------------------------------------------------------------------


def _of_fields(value: Any) -> Any:
    """Convert an object with named fields, such as a dataclass, to plain Python values.

    Also convert less common plain values, such as enum members.
    """
    import dataclasses

    fields: Mapping[str, Any] | None = None
    if isinstance(value, type):
        return value
    if isinstance(value, enum.Enum):
        return _to_plain_value(value.value)
    if dataclasses.is_dataclass(value):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
    elif isinstance(value, msgspec.Struct):
        fields = {name: getattr(value, name) for name in value.__struct_fields__}
    elif hasattr(type(value), "model_fields") and hasattr(value, "model_dump"):
        extra = getattr(value, "model_extra", None) or {}
        shown = [name for name, field in type(value).model_fields.items() if not field.exclude]
        fields = {name: getattr(value, name) for name in shown} | extra
    elif hasattr(type(value), "__attrs_attrs__"):
        names = [each.name for each in type(value).__attrs_attrs__]
        fields = {name: getattr(value, name) for name in names}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        fields = value._asdict()
    if fields is not None:
        return {name: _to_plain_value(item) for name, item in fields.items()}
    if isinstance(value, decimal.Decimal):
        is_whole = value.is_finite() and value == value.to_integral_value()
        return int(value) if is_whole else float(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    base: Any
    for base in (str, bool, int, float, bytes):
        if isinstance(value, base):
            return base(value)
    if isinstance(value, Mapping):
        return {key: _to_plain_value(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_to_plain_value(item) for item in value]
    return value


# --- tables and arrays ----------------------------------------------------------------------------


def _of_library(value: Any) -> Any:
    """Convert a table, array or similar value from a data library such as pandas or numpy.

    The libraries are pandas, polars, pyarrow, datasets and numpy. Any other value is returned
    unchanged.
    """
    for name, convert in (
        ("pandas", _of_pandas),
        ("polars", _of_polars),
        ("pyarrow", _of_pyarrow),
        ("datasets", _of_datasets),
        ("numpy", _of_numpy),
    ):
        library = sys.modules.get(name)
        if library is not None and hasattr(library, "__version__"):
            found = convert(value, library)
            if found is not value:
                return found
    if hasattr(value, "__arrow_c_stream__") and not isinstance(value, type):
        return table_from_arrow(_import_pyarrow(value).table(value))
    return value


def _of_pandas(value: Any, pandas: Any) -> Any:
    if isinstance(value, pandas.Series):
        value = value.to_frame("values" if value.name is None else value.name)
    if isinstance(value, pandas.Index):
        value = value.to_frame(index=False)
    if not isinstance(value, pandas.DataFrame):
        return value
    index = value.index
    is_default = isinstance(index, pandas.RangeIndex) and index.start == 0 and index.step == 1
    columns = []
    if not is_default or index.name is not None:
        for level in range(index.nlevels):
            name = index.names[level]
            name = name if name is not None else "index" if index.nlevels == 1 else f"level_{level}"
            columns.append((name, index.get_level_values(level).to_series()))
    columns += [(label, value.iloc[:, at]) for at, label in enumerate(value.columns)]
    names = _unique_names([label for label, _ in columns])
    found = {
        name: _pandas_column(series, name) for name, (_, series) in zip(names, columns, strict=True)
    }
    return Table(found, len(value))


def _pandas_column(series: Any, name: str) -> ColumnValues:
    pandas = sys.modules["pandas"]
    if isinstance(series.dtype, pandas.SparseDtype):
        series = series.sparse.to_dense()
    if isinstance(series.dtype, pandas.PeriodDtype | pandas.IntervalDtype):
        series = series.astype("str")  # Arrow would store a month as its number
    if isinstance(series.dtype, sys.modules["numpy"].dtype) and series.dtype.kind in "iuf":
        return _number_column(series.to_numpy(copy=False))
    try:
        array = _import_pyarrow(series).array(series, from_pandas=True)
    except (ValueError, TypeError, NotImplementedError, OverflowError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"the context: column {name!r} has no single Arrow type ({reason}): convert it, as in "
            f"df[{name!r}].astype(str)"
        ) from None
    return column_from_arrow(array, name)


def _number_column(values: Any) -> ColumnValues:
    """Return a column that shares the memory of a numpy array.

    The array is copied only if its values are not contiguous.
    """
    kept = _to_contiguous(values)
    name = str(kept.dtype)
    return ColumnValues("number", name, len(kept), _NUMBERS[name], [None, _bytes_of(kept)])


def _to_contiguous(values: Any) -> Any:
    numpy = sys.modules["numpy"]
    return numpy.ascontiguousarray(values, values.dtype.newbyteorder("="))


def _bytes_of(values: Any) -> memoryview:
    return memoryview(values.reshape(-1).view("uint8")) if values.size else memoryview(b"")


def _of_polars(value: Any, polars: Any) -> Any:
    if isinstance(value, polars.LazyFrame):
        raise ConfigError("a context cannot be a polars.LazyFrame: give frame.collect()")
    if isinstance(value, polars.Series):
        value = value.to_frame()
    if not isinstance(value, polars.DataFrame):
        return value
    _import_pyarrow(value)
    for name, kind in value.schema.items():
        if kind == polars.Object:  # Arrow would get the addresses of the objects
            raise ConfigError(
                f"the context: column {name!r} has Python objects: convert it, as in "
                f"[str(item) for item in df[{name!r}]]"
            )
    return table_from_arrow(value.to_arrow())


def _of_pyarrow(value: Any, pyarrow: Any) -> Any:
    if isinstance(value, pyarrow.Array | pyarrow.ChunkedArray):
        return Table({"values": column_from_arrow(value, "values")}, len(value))
    if isinstance(value, pyarrow.RecordBatch):
        value = pyarrow.Table.from_batches([value])
    if isinstance(value, pyarrow.RecordBatchReader):
        value = value.read_all()
    return table_from_arrow(value) if isinstance(value, pyarrow.Table) else value


def _of_datasets(value: Any, datasets: Any) -> Any:
    if isinstance(value, datasets.Dataset):
        return table_from_arrow(value.with_format("arrow")[:])
    if isinstance(value, datasets.DatasetDict):
        return {name: _of_datasets(each, datasets) for name, each in value.items()}
    if isinstance(value, datasets.IterableDataset | datasets.IterableDatasetDict):
        raise ConfigError(
            "a context cannot be an IterableDataset, which has no size: give "
            "datasets.Dataset.from_list(list(dataset.take(n)))"
        )
    return value


def _of_numpy(value: Any, numpy: Any) -> Any:
    if isinstance(value, numpy.generic):
        return _to_plain_value(value.item())
    if not isinstance(value, numpy.ndarray):
        return value
    kind = value.dtype.kind
    if value.dtype.names is not None and value.ndim == 1:
        columns = {name: numpy.asarray(value[name]) for name in value.dtype.names}
        if all(str(each.dtype.newbyteorder("=")) in _NUMBERS for each in columns.values()):
            found = {name: _number_column(each) for name, each in columns.items()}
            return Table(found, len(value))
    is_number = kind == "b" or str(value.dtype.newbyteorder("=")) in _NUMBERS
    if is_number and value.ndim and not isinstance(value, numpy.ma.MaskedArray):
        kept = _to_contiguous(value)
        char = "?" if kind == "b" else _NUMBERS[str(kept.dtype)]
        return BufferNdArray(str(kept.dtype), char, kept.shape, _bytes_of(kept))
    if kind in "mM":
        value = value.astype(f"{kind}8[us]")
    return _to_plain_value(value.tolist())


def _unique_names(labels: Iterable[Any]) -> list[str]:
    """Convert column labels to strings, and rename repeated ones so that all are distinct."""
    names: dict[str, None] = {}
    for label in labels:
        name = ".".join(map(str, label)) if isinstance(label, tuple) else str(label)
        number, unique = 2, name
        while unique in names:
            unique, number = f"{name} ({number})", number + 1
        names[unique] = None
    return list(names)


# --- Arrow ----------------------------------------------------------------------------------------


def _import_pyarrow(value: Any) -> Any:
    try:
        import pyarrow
    except ImportError:
        raise ConfigError(
            f"a context that is a {type(value).__name__} needs pyarrow: {install_command('inputs')}"
        ) from None
    return pyarrow


def table_from_arrow(table: Any) -> Table:
    """Convert a pyarrow table to a ``Table`` that shares its memory.

    The chunks of a column are joined first if there are several.
    """
    names = _unique_names(table.column_names)
    columns = {
        name: column_from_arrow(table.column(number), name) for number, name in enumerate(names)
    }
    return Table(columns, table.num_rows)


def column_from_arrow(array: Any, name: str) -> ColumnValues:
    """Convert a pyarrow array to a column that shares its memory.

    Raises ConfigError, with the name of the column, if the array's type is not supported.
    """
    import pyarrow

    types, type_ = pyarrow.types, array.type
    if isinstance(array, pyarrow.ChunkedArray):
        return column_from_arrow(_join_chunks(array), name)
    if isinstance(array, pyarrow.ExtensionArray):
        return column_from_arrow(array.storage, name)
    cast = _cast_to(type_)
    if cast is not None:
        return column_from_arrow(array.cast(cast), name)
    if types.is_run_end_encoded(type_):
        import pyarrow.compute

        return column_from_arrow(pyarrow.compute.run_end_decode(array), name)
    if array.offset and not (types.is_integer(type_) or types.is_floating(type_)):
        array = pyarrow.concat_arrays([array])  # a copy that starts at its first value
    shown, length = _ARROW_NAMES.get(str(type_), str(type_)), len(array)
    if types.is_dictionary(type_):
        parts = [column_from_arrow(array.indices, name), column_from_arrow(array.dictionary, name)]
        return ColumnValues("coded", parts[1].type, length, None, [None], parts)
    if types.is_null(type_):
        return ColumnValues("null", shown, length, None, [None])
    buffers = [_view(buffer) for buffer in array.buffers()]
    if shown in _NUMBERS:
        return ColumnValues("number", shown, length, _NUMBERS[shown], buffers, start=array.offset)
    if types.is_boolean(type_):
        return ColumnValues("bool", shown, length, None, buffers)
    if types.is_string(type_) or types.is_large_string(type_):
        char = "q" if types.is_large_string(type_) else "i"
        return ColumnValues("text", "text", length, char, buffers)
    if types.is_binary(type_) or types.is_large_binary(type_):
        char = "q" if types.is_large_binary(type_) else "i"
        return ColumnValues("bytes", "bytes", length, char, buffers)
    if types.is_date32(type_):
        return ColumnValues("date", "date", length, "i", buffers)
    if types.is_timestamp(type_):
        info = [type_.unit, type_.tz or ""]
        return ColumnValues("timestamp", shown, length, info, buffers)
    if types.is_time(type_) or types.is_duration(type_):
        kind = "time" if types.is_time(type_) else "duration"
        return ColumnValues(kind, shown, length, type_.unit, buffers)
    if types.is_decimal(type_):
        info = [type_.bit_width // 8, type_.scale, type_.precision]
        return ColumnValues("decimal", shown, length, info, buffers)
    if types.is_list(type_) or types.is_large_list(type_):
        char = "q" if types.is_large_list(type_) else "i"
        child = column_from_arrow(array.values, name)
        return ColumnValues("list", f"list of {child.type}", length, char, buffers[:2], [child])
    if types.is_fixed_size_list(type_):
        child = column_from_arrow(array.values, name)
        size, shown = type_.list_size, f"list of {type_.list_size} {child.type}"
        return ColumnValues("fixed", shown, length, size, buffers[:1], [child])
    if types.is_map(type_):
        pair = [column_from_arrow(array.keys, name), column_from_arrow(array.items, name)]
        child = ColumnValues("struct", "pair", len(pair[0]), ["key", "value"], [None], pair)
        return ColumnValues("map", shown, length, "i", buffers[:2], [child])
    if types.is_struct(type_):
        fields = [type_.field(number).name for number in range(type_.num_fields)]
        children = [
            column_from_arrow(array.field(number), name) for number in range(type_.num_fields)
        ]
        return ColumnValues("struct", shown, length, fields, buffers[:1], children)
    raise ConfigError(
        f"the context: column {name!r} has the type {shown}, which no session can hold: convert it "
        "to text or numbers first"
    )


def _join_chunks(array: Any) -> Any:
    """Join the chunks of a pyarrow column into a single array.

    A single chunk is not copied.
    """
    import pyarrow

    if array.num_chunks == 1:
        return array.chunk(0)
    if not array.num_chunks:
        return pyarrow.array([], array.type)
    types, type_ = pyarrow.types, array.type
    if types.is_dictionary(type_):
        array = array.unify_dictionaries()
    if array.nbytes > _MAX_SMALL_BYTES and (types.is_string(type_) or types.is_binary(type_)):
        is_text = types.is_string(type_)
        array = array.cast(pyarrow.large_string() if is_text else pyarrow.large_binary())
    return pyarrow.concat_arrays(array.chunks)


def _cast_to(type_: Any) -> Any:
    """Return the pyarrow type to which an array must be cast before its conversion, or None.

    None means that no cast is needed.
    """
    import pyarrow

    types = pyarrow.types
    if types.is_string_view(type_):
        return pyarrow.large_string()
    if types.is_binary_view(type_):
        return pyarrow.large_binary()
    if types.is_fixed_size_binary(type_) and not types.is_decimal(type_):
        return pyarrow.binary()
    if types.is_date64(type_):
        return pyarrow.date32()
    if types.is_list_view(type_):
        return pyarrow.list_(type_.value_type)
    if types.is_large_list_view(type_):
        return pyarrow.large_list(type_.value_type)
    return None


def _view(buffer: Any) -> memoryview | None:
    """Return a pyarrow buffer's bytes as a memoryview, or None for None."""
    if buffer is None:
        return None
    return memoryview(buffer).cast("B") if buffer.size else memoryview(b"")
