"""Reads Arrow, pandas, polars and ``datasets`` tables row by row, and adds answer columns.

    frame ──> RowSource(columns=("id", "text"), …)
    table.extend([0, 2], {"answer": ["yes", "no"], "error": [None, None]}, {"answer": "string"})
          ──> rows 0 and 2 of the frame, with two more columns

The given columns are never rebuilt from Python values, so they keep their types: categories, time
zones, small integers, missing values. Each library is imported only if one of its tables is given.
Files and lists are read by ``open_row_source.py``.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ramify.errors import SourceError
from ramify.maps.row_source import BATCH, RowSource, UnreadableRow

ARROW_TYPES = {"string": "string", "integer": "int64", "number": "float64", "boolean": "bool"}
"""Type in a JSON schema -> type in Arrow."""
_PANDAS_TYPES = {"integer": "Int64", "number": "float64", "boolean": "boolean"}
_POLARS_TYPES = {"string": "String", "integer": "Int64", "number": "Float64", "boolean": "Boolean"}
Columns = Mapping[str, Sequence[Any]]
Types = Mapping[str, str | None]
"""Column name -> JSON schema type of the column, or None if it has several types."""


def dataframe_row_source(rows: Any) -> RowSource | None:
    """Return an Arrow, pandas, polars or ``datasets`` table as a row source.

    Returns None if ``rows`` is something else. Raises SourceError if the table cannot be read row
    by row.
    """
    if hasattr(rows, "collect_schema") and hasattr(rows, "collect"):
        raise SourceError("rows cannot be read from a LazyFrame: give rows.collect()")
    if hasattr(rows, "to_batches") and hasattr(rows, "schema"):
        return _arrow_source(rows)
    if hasattr(rows, "iter_rows") and hasattr(rows, "columns"):
        return _polars_source(rows)
    if hasattr(rows, "itertuples") and hasattr(rows, "iloc"):
        return _pandas_source(rows)
    if hasattr(rows, "features") and hasattr(rows, "column_names"):
        return _dataset_source(rows)
    return None


def _columns_of(names: Sequence[Any], kind: str) -> tuple[str, ...]:
    texts = tuple(map(str, names))
    if not texts:
        raise SourceError(f"the {kind} has no columns: give at least one")
    if len(set(texts)) < len(texts):
        twice = next(name for name in texts if texts.count(name) > 1)
        raise SourceError(f"the {kind} has two columns named '{twice}': rename one of them")
    return texts


# --- Arrow


def _arrow_source(table: Any) -> RowSource:
    if not hasattr(table, "num_rows"):
        raise SourceError(f"rows cannot be read from a {type(table).__name__}: give its to_table()")
    columns = _columns_of(table.schema.names, "Arrow table")

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        for batch in table.to_batches(max_chunksize=BATCH):
            yield from batch.to_pylist()

    def extend(numbers: Sequence[int], new: Columns, types: Types) -> Any:
        found = table if len(numbers) == len(table) else table.take(numbers)
        added = columns_to_arrow(new, types)
        for name in added.column_names:
            found = found.append_column(name, added[name])
        return found

    return RowSource(
        "the Arrow table", columns, table.num_rows, values, schema=table.schema, extend=extend
    )


def columns_to_arrow(columns: Columns, types: Types) -> Any:
    """Convert columns to an Arrow table.

    A column without a single JSON type gets the Arrow type of its values, or becomes text if its
    values have several types.
    """
    import pyarrow

    def array(name: str, values: Sequence[Any]) -> Any:
        kind = ARROW_TYPES.get(str(types.get(name)))
        try:
            made = pyarrow.array(values, type=kind and pyarrow.type_for_alias(kind))
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, pyarrow.ArrowNotImplementedError):
            texts = [None if value is None else str(value) for value in values]
            made = pyarrow.array(texts, type=pyarrow.string())
        return made.cast(pyarrow.string()) if pyarrow.types.is_null(made.type) else made

    return pyarrow.table({name: array(name, values) for name, values in columns.items()})


# --- pandas


def _pandas_source(frame: Any) -> RowSource:
    if getattr(frame.columns, "nlevels", 1) > 1:
        raise SourceError("the DataFrame has several levels of column names: join them into one")
    columns = _columns_of(frame.columns, "DataFrame")

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        for start in range(0, len(frame), BATCH):
            chunk = frame.iloc[start : start + BATCH]
            # NaN, NaT and NA are missing values alike.
            chunk = chunk.astype(object).where(chunk.notna(), None)
            for record in chunk.itertuples(index=False, name=None):
                yield dict(zip(columns, record, strict=True))

    def extend(numbers: Sequence[int], new: Columns, types: Types) -> Any:
        pandas = importlib.import_module("pandas")
        found = frame if len(numbers) == len(frame) else frame.iloc[numbers]
        series = {
            name: pandas.Series(
                values, index=found.index, dtype=_PANDAS_TYPES.get(str(types.get(name)), object)
            )
            for name, values in new.items()
        }
        return found.assign(**series)

    return RowSource("the DataFrame", columns, len(frame), values, extend=extend)


# --- polars


def _polars_source(frame: Any) -> RowSource:
    def extend(numbers: Sequence[int], new: Columns, types: Types) -> Any:
        polars = importlib.import_module("polars")
        found = frame if len(numbers) == len(frame) else frame[numbers]
        series = []
        for name, values in new.items():
            kind = _POLARS_TYPES.get(str(types.get(name)))
            kind = "String" if all(value is None for value in values) else kind
            dtype = None if kind is None else getattr(polars, kind)
            series.append(polars.Series(name, values, dtype=dtype, strict=False))
        return found.with_columns(series)

    return RowSource(
        "the DataFrame",
        _columns_of(frame.columns, "DataFrame"),
        len(frame),
        lambda: frame.iter_rows(named=True),
        extend=extend,
    )


# --- datasets


def _dataset_source(rows: Any) -> RowSource:
    columns = _columns_of(rows.column_names or (), "dataset")
    labels = {
        name: feature.int2str
        for name, feature in (rows.features or {}).items()
        if hasattr(feature, "int2str")
    }

    def values() -> Iterator[dict[str, Any] | UnreadableRow]:
        for row in rows:
            for name, name_of in labels.items():
                label = row.get(name)
                if label is not None and label >= 0:
                    row[name] = name_of(int(label))
            yield row

    def extend(numbers: Sequence[int], new: Columns, types: Types) -> Any:
        datasets = importlib.import_module("datasets")
        found = rows if len(numbers) == len(rows) else rows.select(numbers)
        added = datasets.Dataset(columns_to_arrow(new, types))
        if not numbers:  # tables without rows are left out when tables are joined
            features = datasets.Features({**found.features, **added.features})
            return datasets.Dataset.from_dict({name: [] for name in features}, features=features)
        return datasets.concatenate_datasets([found, added], axis=1)

    # A dataset that is read as a stream has no length, and cannot get columns from a list.
    is_stream = not hasattr(rows, "__len__")
    return RowSource(
        "the dataset",
        columns,
        None if is_stream else len(rows),
        values,
        extend=None if is_stream else extend,
    )
