"""Divides input files into parts of at most 500 rows for Ray Data.

The files are local paths, or URLs that pyarrow or fsspec can open.

    tickets.jsonl (file 0) ──> RowFiles ──> part-00000-000000: rows 0 to 499       one block each
                                            part-00000-000001: rows 500 to 999
    contracts/    (folder) ──> 500 texts are a part

The name of a part consists of the number of its file and its position in the file. If a part is
read again, by another worker or after the map was restarted, it has the same rows and the same
name. Ray Data opens the files, retries, and distributes the reading over the nodes. Rows are read
by the same code as without Ray (``open_row_source.py``), because Arrow's JSON reader would change
dates and columns of mixed types. ``ray_worker.py`` answers the rows of a part.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ramify.errors import SourceError
from ramify.maps.open_row_source import (
    ENDINGS,
    csv_columns,
    csv_rows,
    jsonl_columns,
    jsonl_rows,
)
from ramify.maps.row_source import RowSource, UnreadableRow
from ramify.sources.url_recognition import redact_url_for_display

PART_ROWS = 500
"""Maximum number of rows in a part. If a worker is lost, all questions of its current part are
asked again."""
PART_BYTES = 8 << 20
"""Encoded size in bytes at which a part is closed, so that further rows go to the next part."""
_FORMATS = "a .jsonl, .csv, .tsv or .parquet file, or a folder of text files"
_encode = msgspec.json.Encoder(decimal_format="string").encode


class MapInputFile(msgspec.Struct, frozen=True):
    """An input file of a map, with its path, format and size."""

    path: str
    """Path on the file's filesystem."""
    kind: str
    """Format: ``jsonl``, ``csv``, ``parquet`` or ``text``."""
    size: int
    """Size in bytes."""


class RowFiles(msgspec.Struct, frozen=True):
    """The files that contain the input rows of a map.

    They have the same columns and are on the same filesystem.
    """

    name: str
    """The files as the user named them, for error messages."""
    files: tuple[MapInputFile, ...]
    columns: tuple[str, ...]
    filesystem: Any
    """The pyarrow filesystem of the files."""
    base: str = ""
    """Folder that contains the text files."""

    @property
    def is_texts(self) -> bool:
        return self.files[0].kind == "text"

    @property
    def empty_row_source(self) -> RowSource:
        """Return an empty table that has the columns of the input files."""
        if self.is_texts:
            shown, kept = ("text",), ("file",)
            return RowSource(self.name, self.columns, None, lambda: iter(()), shown, kept)
        return RowSource(self.name, self.columns, None, lambda: iter(()))


def filesystem_of(url: str) -> tuple[Any, str]:
    """Resolve a path or URL to a pyarrow filesystem and a path within it.

    Raises SourceError if the URL cannot be opened or contains a password.
    """
    import pyarrow.fs as arrow_fs

    if "://" not in url:
        return arrow_fs.LocalFileSystem(), str(Path(url).expanduser().absolute())
    if urlsplit(url).password:
        raise SourceError(
            f"{redact_url_for_display(url)} contains a key, which would be sent to the "
            "workers and recorded: "
            "set the provider's environment variables on all nodes instead"
        )
    try:
        return arrow_fs.FileSystem.from_uri(url)  # type: ignore[no-any-return]
    except Exception as arrow_error:  # noqa: BLE001 (an unknown scheme, or settings that lack)
        try:
            import fsspec  # type: ignore[import-untyped]

            found, path = fsspec.core.url_to_fs(url)
        except Exception as error:  # noqa: BLE001 (each filesystem raises its own classes)
            scheme = url.partition("://")[0]
            why = " ".join(str(error if "fsspec" in str(error) else arrow_error).split())[:200]
            raise SourceError(
                f"{url} cannot be opened: {why}; for {scheme}://, install the package that fsspec "
                "names, on all nodes"
            ) from None
        return arrow_fs.PyFileSystem(arrow_fs.FSSpecHandler(found)), path


def row_files_of_urls(urls: Sequence[str]) -> RowFiles:
    """Find the files at the given paths or URLs, and read their column names.

    The files stay in the given order. Raises SourceError if a file cannot be read or the columns
    differ.
    """
    opened = [_open_files(url) for url in urls]
    filesystem = opened[0].filesystem
    for found in opened[1:]:
        if found.filesystem.type_name != filesystem.type_name or found.is_texts:
            raise SourceError(
                f"{found.name} and {opened[0].name} cannot be read together: map them separately"
            )
        if set(found.columns) != set(opened[0].columns):
            differing = sorted(set(found.columns) ^ set(opened[0].columns))
            raise SourceError(
                f"{found.name} has other columns than {opened[0].name} "
                f"({', '.join(differing[:5])}): map files with different columns separately"
            )
    return msgspec.structs.replace(
        opened[0],
        name=", ".join(found.name for found in opened),
        files=tuple(file for found in opened for file in found.files),
    )


def _open_files(url: str) -> RowFiles:
    import pyarrow.fs as arrow_fs

    filesystem, path = filesystem_of(url)
    try:
        info = filesystem.get_file_info(path)
        if info.type == arrow_fs.FileType.NotFound:
            raise SourceError(f"{url} does not exist: give {_FORMATS}")
        if info.type == arrow_fs.FileType.Directory:
            return _list_folder(url, filesystem, path)
        kind = ENDINGS.get(Path(path).suffix.lower())
        if kind == "sqlite":
            raise SourceError(
                f"{url}: SQLite cannot be read on a cluster: remove --placement ray, or export the "
                "table to JSONL"
            )
        if kind is None:
            raise SourceError(f"{url} is not a table of rows: give {_FORMATS}")
        file = MapInputFile(path, kind, info.size)
        with filesystem.open_input_file(path) as opened:
            columns = _columns(opened, file, url)
    except OSError as error:
        raise SourceError(f"{url} cannot be read: {error.strerror or error}") from None
    return RowFiles(url, (file,), columns, filesystem)


def _list_folder(url: str, filesystem: Any, path: str) -> RowFiles:
    import pyarrow.fs as arrow_fs

    base = path.rstrip("/")
    found = sorted(
        (info.path, info.size)
        for info in filesystem.get_file_info(arrow_fs.FileSelector(base, recursive=True))
        if info.type == arrow_fs.FileType.File and "/." not in info.path[len(base) :]
    )
    if not found:
        raise SourceError(f"the folder {url} has no files")
    files = tuple(MapInputFile(name, "text", size) for name, size in found)
    return RowFiles(url, files, ("file", "text"), filesystem, base)


def _columns(file: Any, row_file: MapInputFile, name: str) -> tuple[str, ...]:
    import pyarrow

    match row_file.kind:
        case "parquet":
            import pyarrow.parquet as parquet

            try:
                return tuple(parquet.ParquetFile(file).schema_arrow.names)
            except pyarrow.ArrowInvalid as error:
                raise SourceError(f"{name} is not a Parquet file: {error}") from None
        case "csv":
            return csv_columns(_text_reader(file), name)
        case _:
            return jsonl_columns(jsonl_rows(_buffered_reader(file), name), name)


def _buffered_reader(file: Any) -> io.BufferedReader:
    return io.BufferedReader(file, 1 << 20)


def _text_reader(file: Any) -> io.TextIOWrapper:
    return io.TextIOWrapper(
        _buffered_reader(file), newline="", encoding="utf-8-sig", errors="replace"
    )


# --- parts


class EncodedRowChunk(msgspec.Struct, frozen=True):
    """A part of the input rows, at most 500, encoded for sending to a worker."""

    name: str
    """Name such as ``part-00000-000003``: the number of the file, and the number of the part within
    it."""
    rows: bytes
    """JSON list of the rows, in which an unreadable row is represented by its error text. Parquet
    files use an Arrow stream instead, and text files a JSON list of paths."""
    kind: str
    """Format of the rows, as in ``MapInputFile``."""

    def row_source(self, files: RowFiles) -> RowSource:
        """Return the input rows of this part as a table."""
        if self.kind == "parquet":
            import pyarrow

            arrow = pyarrow.ipc.open_stream(self.rows).read_all()
            values, schema = arrow.to_pylist(), arrow.schema
        elif self.kind == "text":
            values = [_text_row(files, path) for path in msgspec.json.decode(self.rows)]
            schema = None
        else:
            decoded, schema = msgspec.json.decode(self.rows), None
            values = [UnreadableRow(row) if isinstance(row, str) else row for row in decoded]
        return msgspec.structs.replace(
            files.empty_row_source, total=len(values), values=lambda: iter(values), schema=schema
        )


def _text_row(files: RowFiles, path: str) -> dict[str, Any] | UnreadableRow:
    name = path[len(files.base) :].lstrip("/")
    try:
        with files.filesystem.open_input_file(path) as file:
            return {"file": name, "text": file.read().decode("utf-8-sig")}
    except UnicodeDecodeError:
        return UnreadableRow(f"{name} is not text in UTF-8", {"file": name})
    except OSError as error:
        return UnreadableRow(f"{name} cannot be read: {error.strerror or error}", {"file": name})


def part_name(file: int, number: int) -> str:
    return f"part-{file:05}-{number:06}"


def read_row_partitions(
    file: Any, row_file: MapInputFile, number: int
) -> Iterator[EncodedRowChunk]:
    """Yield the rows of an open input file in parts of at most 500 rows.

    ``number`` is the index of the file among the map's files.
    """
    if row_file.kind == "parquet":
        yield from _arrow_parts(file, number)
        return
    name = Path(row_file.path).name
    values = (
        csv_rows(_text_reader(file), name)
        if row_file.kind == "csv"
        else jsonl_rows(_buffered_reader(file), name)
    )
    chunk: list[bytes] = []
    size, index = 0, 0
    for value in values:
        # The error of a row that cannot be read is a text.
        data = _encode(value.error if isinstance(value, UnreadableRow) else value)
        chunk.append(data)
        size += len(data)
        if len(chunk) >= PART_ROWS or size >= PART_BYTES:
            yield EncodedRowChunk(part_name(number, index), _json_list(chunk), row_file.kind)
            chunk, size, index = [], 0, index + 1
    if chunk:
        yield EncodedRowChunk(part_name(number, index), _json_list(chunk), row_file.kind)


def _json_list(values: Sequence[bytes]) -> bytes:
    return b"[" + b",".join(values) + b"]"


def _arrow_parts(file: Any, number: int) -> Iterator[EncodedRowChunk]:
    import pyarrow
    import pyarrow.parquet as parquet

    with parquet.ParquetFile(file) as opened:
        for index, batch in enumerate(opened.iter_batches(batch_size=PART_ROWS)):
            sink = pyarrow.BufferOutputStream()
            with pyarrow.ipc.new_stream(sink, batch.schema) as writer:
                writer.write_batch(batch)
            yield EncodedRowChunk(part_name(number, index), sink.getvalue().to_pybytes(), "parquet")


def split_text_files(files: RowFiles) -> Iterator[EncodedRowChunk]:
    """Divide the files of a text folder into parts for workers on a Ray cluster.

    Each part contains only paths, because the workers read the files themselves.
    """
    paths, index = iter(files.files), 0
    while chunk := list(islice(paths, PART_ROWS)):
        names = _encode([file.path for file in chunk])
        yield EncodedRowChunk(part_name(0, index), names, "text")
        index += 1
