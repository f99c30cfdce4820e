"""Decides which texts are too large for memory, and adds them to a context as mapped files.

    file of a text kind, large ──one pass──> FileBackedText (characters and lines counted, hash)
    smaller, or of another kind ───────────> its reader (file_kinds.py)

A file is large if its size is at least ``mapped_bytes``. Once the texts in memory reach that size
together, each further file that is not tiny counts as large, so that the memory of a folder is
limited, too. A UTF-16 text is never large, since it has to be decoded.
``sandbox/guest/mapped_text.py`` defines what such a text can do, and ``sandbox/file_reference.py``
checks whether its file has changed.
"""

from __future__ import annotations

import os
import stat
from itertools import islice
from pathlib import Path

import msgspec

from ramify.format_quantities import pluralize
from ramify.sandbox.base import FileBackedText, map_text_file
from ramify.sources.file_kinds import HEAD_BYTES, bom_encoding, describe, is_binary, kind_of
from ramify.sources.loaded_sources import NOT_UTF8, SourceCollector, UnreadableSourceError

TINY_BYTES = 1 << 16
"""Files smaller than this many bytes are always read into memory."""
MAX_FILES = 20_000
"""Maximum number of files of a context that stay on disk. Linux limits the mapped areas of a
process to 65,530.
"""
_HEAD_CHARS = 100_000


def read_mapped(path: str, name: str, loading: SourceCollector, flags: int = os.O_NOFOLLOW) -> bool:
    """Add the text of a large file to the load without reading it into memory.

    Returns False if the file must be read in the ordinary way. Raises UnreadableSourceError for a
    type of file that has no reader.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    except OSError:
        return False  # the reader of small files reports this error
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode) or not is_large(status.st_size, loading):
            return False
        head = os.pread(fd, HEAD_BYTES, 0)
        if kind_of(name, head) != "text" or bom_encoding(head) not in ("", "utf-8"):
            return False
        if is_binary(head):
            raise UnreadableSourceError("is binary")
        loading.count_mapped(status.st_size, name)
        text = map_text_file(
            fd, os.path.realpath(path), lambda read: loading.show_progress(read, name)
        )
    finally:
        os.close(fd)
    kind, detail = _describe_mapped(name, text)
    note = "" if text.file.encoding == "utf-8" else NOT_UTF8
    if kind in ("csv", "jsonl"):
        from ramify.sources.session_tables import add_table

        detail = add_table(name, kind, Path(path), b"", detail, loading, is_utf8=not note)
    details = "; ".join(filter(None, (detail, note)))
    loading.add(name, text, kind, status.st_size, details)
    return True


def is_large(num_bytes: int, loading: SourceCollector) -> bool:
    """Return True if a text file of this size is too large for memory and becomes file-backed."""
    if not hasattr(os, "pread") or loading.num_mapped >= MAX_FILES:
        return False
    limit = loading.mapped_bytes
    if loading.loaded_bytes + num_bytes <= limit:
        return False
    return num_bytes >= min(TINY_BYTES, limit)


def _describe_mapped(name: str, text: FileBackedText) -> tuple[str, str]:
    """Return the kind and a short description of a file-backed text, without parsing all of it.

    The kind is ``"csv"``, for example. The number of rows is an estimate from the number of lines,
    because the text is not parsed.
    """
    kind, detail = describe(name, text[:_HEAD_CHARS])
    num_lines = len(text.splitlines())
    if kind == "csv":
        return (
            kind,
            f"{detail.rpartition('; ')[0]}; about {pluralize(max(0, num_lines - 1), 'row')}",
        )
    if kind == "jsonl":
        first = next((line for line in islice(text.splitlines(), 100) if line.strip()), "")
        try:
            record = msgspec.json.decode(first)
        except (msgspec.DecodeError, UnicodeEncodeError, RecursionError) as error:
            return kind, f"JSONL: {pluralize(num_lines, 'line')}; the first is not JSON: {error}"
        keys = describe(name, first)[1].partition(";")[2] if isinstance(record, dict) else ""
        return kind, f"JSONL: {pluralize(num_lines, 'record')}{f';{keys}' * bool(keys)}"
    return kind, "JSON" if kind == "json" else ""
