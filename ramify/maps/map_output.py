"""Writes the output of a map, which asks one question about every row of a table.

Each output row has the columns of the input row, followed by the answer and the error.

    {"id": 7, "text": "…", "answer": "yes", "error": null}
    {"id": 8, "text": "…", "urgent": true, "topic": "printer", "error": null}    object schema

If the answer's JSON schema is an object with properties, each property becomes a column; any other
answer is in the column ``answer``. Rows are written in table order to ``FILE.partial``, which is
renamed to ``FILE`` when all rows are in it, so ``FILE`` is always complete. Which rows are asked is
decided in ``map_run.py``.
"""

from __future__ import annotations

import abc
import contextlib
import csv
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine.typed_answers import AnswerSchema
from ramify.errors import ConfigError, StoreError
from ramify.maps.dataframes import ARROW_TYPES
from ramify.maps.row_question import to_json_value
from ramify.maps.row_source import Row, RowSource

_BATCH = 5000
"""Number of rows in one row group of a Parquet file."""
_WRITE_BYTES = 1 << 18
ENDINGS = (".jsonl", ".ndjson", ".csv", ".tsv", ".parquet")


class AddedAnswerColumns:
    """The answer and error columns that a map adds to its table."""

    def __init__(self, kind: AnswerSchema | None, prefix: str, taken: Sequence[str]) -> None:
        """Derive the names and types of a map's new columns from the type of its answers.

        Each new name begins with ``prefix``, and ``taken`` lists the existing columns. Raises
        ConfigError if a new name is already taken.
        """
        properties = (kind.schema.get("properties") if kind else None) or {}
        is_object = kind is not None and kind.schema.get("type") == "object" and properties
        self.fields: tuple[str, ...] = tuple(properties) if is_object else ()
        """Properties of the answer that become columns. Empty if the answer is a single column."""
        schemas = properties if is_object else {"answer": kind.schema if kind else {}}
        self.types = {
            f"{prefix}{name}": schema.get("type") if isinstance(schema, Mapping) else None
            for name, schema in schemas.items()
        }
        """Column -> type in the JSON schema."""
        if kind is None:
            self.types[f"{prefix}answer"] = "string"
        self.answers = tuple(self.types)
        self.error = f"{prefix}error"
        self.names = (*self.answers, self.error)
        for name in self.names:
            if name in taken:
                raise ConfigError(
                    f"the rows have a column '{name}' already: give another name to the new "
                    f"columns with prefix (--prefix ramify_)"
                )

    def added_values(self, answer: Any, error: str | None) -> dict[str, Any]:
        """Return one row's values for the answer and error columns that the map adds.

        They are keyed by column name.
        """
        if not self.fields:
            return {self.answers[0]: answer, self.error: error}
        found = answer if isinstance(answer, Mapping) else {}
        columns = {
            name: found.get(field) for name, field in zip(self.answers, self.fields, strict=True)
        }
        return {**columns, self.error: error}

    def arrow_array(self, name: str, values: Sequence[Any]) -> Any:
        """Return the values of an answer or error column as an Arrow array.

        Its type comes from the JSON schema of the answer, even if all values are missing. Values
        other than text, numbers and booleans become JSON text.
        """
        import pyarrow

        given = self.types.get(name)
        kinds = [kind for kind in given if kind != "null"] if isinstance(given, list) else [given]
        alias = ARROW_TYPES.get(str(kinds[0])) if len(kinds) == 1 else None
        if alias is None and name != self.error:
            values = [_json(value) for value in values]
        return pyarrow.array(values, pyarrow.type_for_alias(alias or "string"), from_pandas=True)


class MapOutputWriter(abc.ABC):
    """The destination to which a map writes the rows of its table, in order.

    It is either a file or a table in memory.
    """

    table: Any = None
    """The table in memory, or None if the output is a file."""

    @abc.abstractmethod
    def write_row(self, row: dict[str, Any], number: int) -> None:
        """Write the row at position ``number`` of the table to the map's output.

        Raises StoreError if the row cannot be written.
        """

    @abc.abstractmethod
    def finish(self) -> None:
        """Complete the map's output after the last row has been written."""

    def discard(self) -> None:  # noqa: B027 -- a table in memory leaves nothing
        """Delete the output that has been written so far.

        The output must still be closed.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """Close all open files of the map's output.

        The output file keeps its temporary name if ``finish`` has not been called.
        """


class _Table(MapOutputWriter):
    """The output of a map that is collected in memory.

    It extends the given table with new columns if possible, and otherwise is a list of rows.
    """

    def __init__(self, source: RowSource, added: AddedAnswerColumns) -> None:
        self._rows: list[dict[str, Any]] = []
        self._numbers: list[int] = []
        self._new: dict[str, list[Any]] = {name: [] for name in added.names}
        self._types = {**added.types, added.error: "string"}
        self._extend = source.extend

    def write_row(self, row: dict[str, Any], number: int) -> None:
        if self._extend is None:
            self._rows.append(row)
            return
        self._numbers.append(number)
        for name, values in self._new.items():
            values.append(row[name])

    def finish(self) -> None:
        extend = self._extend
        self.table = self._rows if extend is None else extend(self._numbers, self._new, self._types)

    def close(self) -> None:
        pass


class _File(MapOutputWriter):
    """The output file of a map, which appears at its destination only when it is complete.

    It is written under a temporary name in the same folder and then renamed.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.partial = path.with_name(f"{path.name}.partial")

    def discard(self) -> None:
        self.partial.unlink(missing_ok=True)

    def finish(self) -> None:
        try:
            self._end()
            with open(self.partial, "rb") as file:
                os.fsync(file.fileno())
            os.replace(self.partial, self.path)
        except OSError as error:
            raise self._write_error(error) from None

    @abc.abstractmethod
    def _end(self) -> None:
        """Write the remaining rows to the output file, and close it."""

    def _write_error(self, error: OSError) -> StoreError:
        # The text of an error from Arrow is longer than that of its number.
        why = os.strerror(error.errno).lower() if error.errno else str(error)
        return StoreError(
            f"cannot write {self.path}: {why}; the answers are in the map's journal: make room, "
            "and give the same command again"
        )


class _Jsonl(_File):
    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._file = open(self.partial, "wb", buffering=_WRITE_BYTES)  # noqa: SIM115 -- closed below
        self._encode = msgspec.json.Encoder(decimal_format="string").encode

    def write_row(self, row: dict[str, Any], number: int) -> None:
        try:
            line = self._encode(row)
        except (TypeError, UnicodeEncodeError):
            line = self._encode(_escape_surrogates(to_json_value(row)))
        try:
            self._file.write(line + b"\n")
        except OSError as error:
            raise self._write_error(error) from None

    def _end(self) -> None:
        self._file.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _Csv(_File):
    def __init__(self, path: Path, names: Sequence[str]) -> None:
        super().__init__(path)
        self._file = open(  # noqa: SIM115 -- closed below
            self.partial, "w", buffering=_WRITE_BYTES, newline="", encoding="utf-8",
            errors="backslashreplace",
        )  # fmt: skip
        self._names = list(names)
        delimiter = "\t" if path.suffix == ".tsv" else ","
        self._writer = csv.DictWriter(self._file, self._names, delimiter=delimiter)
        self._writer.writeheader()

    def write_row(self, row: dict[str, Any], number: int) -> None:
        try:
            self._writer.writerow({name: _cell(value) for name, value in row.items()})
        except OSError as error:
            raise self._write_error(error) from None
        except ValueError:
            raise _other_column(row, self._names) from None

    def _end(self) -> None:
        self._file.close()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._file.close()


class _Parquet(_File):
    def __init__(
        self, path: Path, names: Sequence[str], source: RowSource, added: AddedAnswerColumns
    ):
        super().__init__(path)
        try:
            import pyarrow
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise ConfigError(
                f"{path} needs pyarrow: pip install pyarrow, or write JSONL or CSV"
            ) from None
        self._pyarrow = pyarrow
        self._parquet = parquet
        self._names = list(names)
        self._added = added
        self._source = source
        self._rows: list[dict[str, Any]] = []
        self._schema: Any = None
        self._writer: Any = None

    def write_row(self, row: dict[str, Any], number: int) -> None:
        if not row.keys() <= set(self._names):
            raise _other_column(row, self._names)
        self._rows.append(row)
        if len(self._rows) >= _BATCH:
            self._flush()

    def _flush(self) -> None:
        arrow, rows, self._rows = self._pyarrow, self._rows, []
        columns = {name: [row.get(name) for row in rows] for name in self._names}
        try:
            if self._schema is None:
                self._schema = self._schema_of(columns)
            batch = arrow.table(
                [
                    self._added.arrow_array(field.name, columns[field.name])
                    if field.name in self._added.names
                    else arrow.array(columns[field.name], type=field.type, from_pandas=True)
                    for field in self._schema
                ],
                schema=self._schema,
            )
        except (arrow.ArrowInvalid, arrow.ArrowTypeError) as error:
            raise ConfigError(
                f"{self.path}: a value does not fit the type of its column, which the first "
                f"{_BATCH:,} rows decide ({error}): write JSONL"
            ) from None
        try:
            if self._writer is None:
                self._writer = self._parquet.ParquetWriter(self.partial, self._schema)
            self._writer.write_table(batch)
        except OSError as error:
            raise self._write_error(error) from None

    def _schema_of(self, columns: Mapping[str, list[Any]]) -> Any:
        arrow, given = self._pyarrow, self._source.schema
        fields = []
        for name in self._names:
            if name in self._added.names:
                fields.append(arrow.field(name, self._added.arrow_array(name, ()).type))
            elif given is not None:
                fields.append(given.field(name))
            else:
                kind = arrow.array(columns[name], from_pandas=True).type
                kind = arrow.string() if arrow.types.is_null(kind) else kind
                fields.append(arrow.field(name, kind))
        return arrow.schema(fields)

    def _end(self) -> None:
        if self._rows or self._writer is None:
            self._flush()
        self._writer.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


def open_output(out: Path | None, source: RowSource, added: AddedAnswerColumns) -> MapOutputWriter:
    """Open the destination to which a map writes its output rows.

    The extension of the file name ``out`` determines the format. Without a file name, rows are
    collected in memory. Raises ConfigError if the extension is unknown or the file cannot be
    written.
    """
    if out is None:
        return _Table(source, added)
    names = (*source.kept_columns, *added.names)
    try:
        match out.suffix.lower():
            case ".jsonl" | ".ndjson":
                return _Jsonl(out)
            case ".csv" | ".tsv":
                return _Csv(out, names)
            case ".parquet":
                return _Parquet(out, names, source, added)
    except OSError as error:
        raise ConfigError(f"cannot write {out}: {error.strerror}") from None
    if str(out) == "-":
        raise ConfigError(
            f"the output must be a file, not -: give a name that ends in {', '.join(ENDINGS)}"
        )
    raise ConfigError(f"the output {out} has an unknown ending: give {', '.join(ENDINGS)}")


def output_row(
    row: Row, source: RowSource, added: AddedAnswerColumns, answer: Any, error: str | None
) -> dict[str, Any]:
    """Return one row of a map's output: the input columns, the answer and the error.

    Only the input columns that are kept are included.
    """
    if source.kept is None and row.values:
        kept = row.values
    else:
        kept = {name: row.values.get(name) for name in source.kept_columns}
    return {**kept, **added.added_values(answer, error)}


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, str | int | float):
        return value
    return _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else msgspec.json.encode(to_json_value(value)).decode()


def _escape_surrogates(value: Any) -> Any:
    """Return the value with lone surrogates replaced by escape sequences, because UTF-8 cannot
    represent them."""
    match value:
        case str():
            return value.encode("utf-8", "backslashreplace").decode()
        case dict():
            return {
                _escape_surrogates(key): _escape_surrogates(item) for key, item in value.items()
            }
        case list() | tuple():
            return [_escape_surrogates(item) for item in value]
        case _:
            return value


def _other_column(row: Mapping[str, Any], names: Sequence[str]) -> ConfigError:
    other = next((name for name in row if name not in names), "?")
    return ConfigError(
        f"a row has a column '{other}' that the first rows do not have: write JSONL, which can "
        "hold it"
    )
