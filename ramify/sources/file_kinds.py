"""Detect the kind of a file by its first bytes and its name, and select the reader for that kind.

The module also decodes bytes to text, and describes tables and records in one line.

A reader is a function with the parameters ``(file, loading)`` that returns nothing. Its module is
imported on first use.

A text is decoded as UTF-8, UTF-16 or UTF-32 if it has a byte order mark, otherwise as UTF-8 and, if
that fails, as Windows-1252, which is stated in the file's description. A file with a NUL byte near
its start, or with many control characters, is binary. Line endings are preserved.
"""

from __future__ import annotations

import codecs
import importlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ramify.format_quantities import pluralize
from ramify.sources.csv_records import csv_delimiter
from ramify.sources.loaded_sources import (
    MISNAMED,
    NOT_UTF8,
    SourceCollector,
    UnreadableSourceError,
    count_with_names,
)

HEAD_BYTES = 8192
"""Number of leading bytes that determine the kind of a file."""


class InputFile(msgspec.Struct):
    """One input file of any origin: its name and its bytes."""

    name: str
    data: bytes
    path: Path | None = None
    """Path of the file on disk; None for standard input and archive members."""
    inside: bool = False
    """True for an archive member, so that archives within archives are not opened."""
    is_named: bool = False
    """True if the user named this file itself, and not its folder."""
    depth: int = 0
    """Nesting depth of an attachment: the number of email messages around it."""


Reader = Callable[[InputFile, SourceCollector], None]

READERS: dict[str, str] = {
    "text": "ramify.sources.file_kinds:read",
    "pdf": "ramify.sources.documents:read_pdf",
    "picture": "ramify.sources.pictures:read",
    "sqlite": "ramify.sources.sqlite:read",
    "parquet": "ramify.sources.table_files:read_parquet",
    "arrow": "ramify.sources.table_files:read_arrow",
    "duckdb": "ramify.sources.table_files:read_duckdb",
    "xlsx": "ramify.sources.table_files:read_xlsx",
    "zip": "ramify.sources.archives:read_zip",
    "tar": "ramify.sources.archives:read_tar",
    "packed": "ramify.sources.archives:read_tar",  # gzip, bzip2, xz, zstd: a tar or a single file
    "7z": "ramify.sources.seven_zip:read",
    "docx": "ramify.sources.documents:read_docx",
    "pptx": "ramify.sources.documents:read_pptx",
    "odt": "ramify.sources.documents:read_odt",
    "epub": "ramify.sources.documents:read_epub",
    "html": "ramify.sources.documents:read_html",
    "eml": "ramify.sources.documents:read_eml",
    "mbox": "ramify.sources.documents:read_mbox",
    "msg": "ramify.sources.documents:read_msg",
    "notebook": "ramify.sources.notebook:read",
}
"""Kind of file -> module and function of its reader."""

_MAGIC = {
    b"SQLite format 3\0": "sqlite",
    b"%PDF-": "pdf",
    b"\x89PNG\r\n": "picture",
    b"\xff\xd8\xff": "picture",
    b"PAR1": "parquet",
    b"ARROW1\0\0": "arrow",
    b"FEA1": "arrow",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b\x08": "packed",
    b"\xfd7zXZ\0": "packed",
    b"\x28\xb5\x2f\xfd": "packed",
    b"7z\xbc\xaf'\x1c": "7z",
}
_FOREIGN = {
    b"GIF8": "a GIF image",
    b"\x7fELF": "a compiled program",
    b"Rar!\x1a\x07": "a RAR archive: unpack it first",
    b"\xd0\xcf\x11\xe0": "an old Office document: save it as text or PDF",
}
_ZIP, _OLE = b"PK\x03\x04", b"\xd0\xcf\x11\xe0"
_PACKED_KINDS = {
    "xlsx": "xlsx",
    "xlsm": "xlsx",
    "docx": "docx",
    "docm": "docx",
    "pptx": "pptx",
    "pptm": "pptx",
    "ppsx": "pptx",
    "odt": "odt",
    "epub": "epub",
}
"""Suffix of a document format based on zip -> kind of the document."""
_MIME_KINDS = {
    b"mimetypeapplication/epub+zip": "epub",
    b"mimetypeapplication/vnd.oasis.opendocument.text": "odt",
}
"""Name and content of the first member of a zip-based document, which begin at byte 30 -> kind of
the document."""
_TEXT_KINDS = {
    "html": "html",
    "htm": "html",
    "xhtml": "html",
    "eml": "eml",
    "mbox": "mbox",
    "ipynb": "notebook",
}
"""Suffix of a text-based document format -> kind of the document."""
_PACKED = "zip tar gz tgz bz2 xz zst 7z"
_BINARY = "pdf png jpg jpeg webp parquet arrow feather sqlite duckdb"
_NEVER_TEXT = frozenset(_PACKED_KINDS).union(_PACKED.split(), _BINARY.split())
"""Suffixes of formats whose files are never plain text."""
_OFFICE = (".ods", ".odp")
PICTURE_SUFFIXES = (".png", ".jpg", ".jpeg", ".webp")
BINARY_SUFFIXES = frozenset(
    f".{suffix}"
    for group in (
        "pyc pyo so o a dylib dll exe class wasm",
        "png jpg jpeg gif webp ico bmp tiff mp3 mp4 wav ogg mov avi ttf otf woff woff2",
        "npy npz pt safetensors",
    )
    for suffix in group.split()
)
"""Suffixes of binary files, which are skipped when a folder is read."""


def read_file(file: InputFile, loading: SourceCollector) -> None:
    """Read a file with the reader for its kind, and add its contents to the context.

    Raises UnreadableSourceError if the kind is not supported.
    """
    kind = kind_of(file.name, file.data[:HEAD_BYTES])
    if file.inside and kind in ("zip", "tar", "packed"):
        raise UnreadableSourceError("is an archive within an archive", "unpack the outer one first")
    if file.inside and kind == "picture":
        raise UnreadableSourceError("is a picture in an archive", "unpack it, and name the picture")
    read_as(kind, file, loading)


def read_as(kind: str, file: InputFile, loading: SourceCollector) -> None:
    module, _, name = READERS[kind].partition(":")
    reader: Reader = getattr(importlib.import_module(module), name)
    reader(file, loading)


def kind_of(name: str, head: bytes) -> str:
    """Return the kind of a file, given its name and its first bytes.

    For example, ``a.csv.gz`` has the kind ``"packed"`` if its first bytes are those of a gzip file.
    """
    if head[8:12] == b"DUCK":
        return "duckdb"
    stem, _, suffix = name.lower().rpartition("/")[2].rpartition(".")
    suffix = suffix if stem else ""
    if suffix in _PACKED_KINDS:
        if head.startswith(_ZIP):
            return _PACKED_KINDS[suffix]
        if head.startswith(_OLE):
            what = "workbook" if _PACKED_KINDS[suffix] == "xlsx" else "document"
            raise UnreadableSourceError(f"is an encrypted {what}", "save it without a password")
    if suffix == "msg" and head.startswith(_OLE):
        return "msg"
    if head.startswith(_ZIP):
        for mime, kind in _MIME_KINDS.items():
            if head[30 : 30 + len(mime)] == mime:
                return kind
    if name.lower().endswith(_OFFICE) and head[:2] == b"PK":
        raise UnreadableSourceError("is an office document", "save it as text or PDF")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "picture"
    for magic, description in _FOREIGN.items():
        if head.startswith(magic):
            raise UnreadableSourceError(f"is {description}")
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "packed"
    if head[257:262] == b"ustar":
        return "tar"
    if suffix in _TEXT_KINDS:
        return _TEXT_KINDS[suffix]
    if not suffix and head.lstrip()[:14].lower().startswith((b"<!doctype html", b"<html")):
        return "html"
    return "text"


def read_regular(
    path: str, name: str, loading: SourceCollector, flags: int = os.O_NOFOLLOW
) -> bytes:
    """Return the bytes of a regular file on disk.

    A database is queried and not loaded, so only its first bytes are returned.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableSourceError("is a pipe, a socket or a device")
        head = os.pread(fd, 16, 0)
        if head == b"SQLite format 3\0" or head.startswith((b"PAR1", b"ARROW1\0\0", b"FEA1")):
            return head
        if head[8:12] == b"DUCK":
            return head
        loading.count_bytes(status.st_size, name)
        with open(fd, "rb", buffering=0, closefd=False) as file:
            return file.read()
    finally:
        os.close(fd)


_MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # checked first: it begins with the UTF-16 mark
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_CONTROLS = bytes(set(range(32)) - set(b"\t\n\v\f\r\x1b\b"))
_MAX_CONTROLS = 0.02
_MAX_PARSED_CHARS = 20_000_000
"""Size in characters above which a table or JSON file is described by its first line only."""


def read(file: InputFile, loading: SourceCollector) -> None:
    text, note = decode(file.data)
    kind, detail = describe(file.name, text)
    stem, _, suffix = file.name.lower().rpartition("/")[2].rpartition(".")
    if text and stem and suffix in _NEVER_TEXT:
        detail = f"{MISNAMED} .{suffix}"
    if kind in ("csv", "jsonl") and loading.has_tools:
        from ramify.sources.session_tables import add_text_table

        detail = add_text_table(file.name, kind, file.path, text, detail, loading)
    details = "; ".join(filter(None, (detail, note)))
    loading.add(file.name, text, kind, len(file.data), details)


def bom_encoding(head: bytes) -> str:
    """Return the encoding that the byte order mark of a file indicates, or "" without such a
    mark."""
    return next((encoding for mark, encoding in _MARKS if head.startswith(mark)), "")


def is_binary(head: bytes) -> bool:
    """Return True if the first bytes of a file show that it is not a text file.

    Such bytes are text neither in UTF-8 nor in a single-byte encoding.
    """
    num_controls = len(head) - len(head.translate(None, _CONTROLS))
    return b"\0" in head or num_controls > _MAX_CONTROLS * len(head)


def decode(data: bytes) -> tuple[str, str]:
    """Decode the bytes of a file.

    Returns the text, with a note if its encoding is not UTF-8. Raises UnreadableSourceError for
    binary data.
    """
    for mark, encoding in _MARKS:
        if data.startswith(mark):
            try:
                return data[len(mark) :].decode(
                    encoding
                ), "" if encoding == "utf-8" else f"from {encoding.upper()}"
            except UnicodeDecodeError:
                break
    if is_binary(data[:HEAD_BYTES]):
        raise UnreadableSourceError("is binary")
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError:
        return data.decode("cp1252", "replace"), NOT_UTF8


def describe(name: str, text: str) -> tuple[str, str]:
    """Return the kind of a file's text, such as ``"csv"``, and a one-line description of its
    contents.

    The description is, for example, ``"CSV: 3 columns a, b, c; 1,200 rows"``. Plain text has the
    kind ``"text"`` and no description.
    """
    suffix = name.lower().rpartition(".")[2]
    if suffix in ("csv", "tsv", "tab"):
        return "csv", _describe_csv(name, text)
    if suffix in ("jsonl", "ndjson"):
        return "jsonl", _describe_jsonl(text)
    if suffix == "json":
        return "json", _describe_json(text)
    return "text", ""


def _describe_csv(name: str, text: str) -> str:
    import csv

    first = text[: text.find("\n") + 1] or text
    delimiter = csv_delimiter(name, first)
    quoted = '"' in text
    if len(text) > _MAX_PARSED_CHARS and quoted:
        columns, num_rows = (
            next(csv.reader([first], delimiter=delimiter), []),
            f"about {pluralize(text.count(chr(10)), 'row')}",
        )
    elif quoted:
        rows = csv.reader(text.splitlines(keepends=True), delimiter=delimiter)
        try:
            columns, num_rows = next(rows, []), pluralize(sum(1 for row in rows if row), "row")
        except csv.Error as error:
            return f"CSV, damaged at line {rows.line_num}: {error}"
    else:
        columns, num_rows = (
            first.strip("\r\n").split(delimiter),
            pluralize(max(0, _count_lines(text) - 1), "row"),
        )
    return f"CSV: {count_with_names(columns, 'column')}; {num_rows}"


def _describe_jsonl(text: str) -> str:
    first = next((line for line in text[:1_000_000].splitlines() if line.strip()), "")
    try:
        record = msgspec.json.decode(first)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return f"JSONL: {pluralize(_count_lines(text), 'line')}; the first is not JSON: {error}"
    keys = f"; {count_with_names(list(record), 'key')}" if isinstance(record, dict) else ""
    return f"JSONL: {pluralize(_count_lines(text), 'record')}{keys}"


def _describe_json(text: str) -> str:
    if len(text) > _MAX_PARSED_CHARS:
        return "JSON"
    try:
        value = msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
        return f"JSON that does not parse: {error}"
    if isinstance(value, dict):
        return f"JSON: an object; {count_with_names(list(value), 'key')}"
    return f"JSON: a list of {len(value):,}" if isinstance(value, list) else "JSON: one value"


def _count_lines(text: str) -> int:
    """Return the number of non-empty lines in a text file."""
    if "\n\n" in text or "\r" in text or text[:1] == "\n":
        return sum(1 for line in text.split("\n") if line.strip())
    return text.count("\n") + (not text.endswith("\n") and text != "")
