"""Detection of a file's kind, by its first bytes and then by its name, and the reader of each kind.

A reader is a function ``(file, loading) -> None``, whose module is imported on first use.
"""

from __future__ import annotations

import os
import pkgutil
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ramify.sources.base import SourceLoader, UnreadableSource

HEAD_BYTES = 8192
"""Number of first bytes that determine the kind of a file."""


class SourceFile(msgspec.Struct):
    """Bytes of one file from any source."""

    name: str
    data: bytes
    path: Path | None = None
    """Path of the file on disk; None for standard input and archive members."""
    inside: bool = False
    """True for an archive member. Archives within archives are not opened."""


Reader = Callable[[SourceFile, SourceLoader], None]

READERS: dict[str, str] = {
    "text": "ramify.sources.decode_text:read",
    "pdf": "ramify.sources.pdf:read",
    "sqlite": "ramify.sources.sqlite:read",
    "zip": "ramify.sources.archives:read_zip",
    "tar": "ramify.sources.archives:read_tar",
    "packed": "ramify.sources.archives:read_tar",  # gzip, bzip2, xz: a tar or a single file
}
"""Kind -> place of its reader."""

_MAGIC = {
    b"SQLite format 3\0": "sqlite",
    b"%PDF-": "pdf",
    b"PK\x03\x04": "zip",
    b"PK\x05\x06": "zip",
    b"\x1f\x8b\x08": "packed",
    b"\xfd7zXZ\0": "packed",
}
_FOREIGN = {
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"\x7fELF": "a compiled program",
    b"\x28\xb5\x2f\xfd": "packed by zstd: unpack it first",
    b"7z\xbc\xaf'\x1c": "a 7-Zip archive: unpack it first",
    b"Rar!\x1a\x07": "a RAR archive: unpack it first",
    b"\xd0\xcf\x11\xe0": "an old Office document: save it as text or PDF",
    b"PAR1": "a Parquet file: export it as CSV or JSONL",
}
_OFFICE = (".docx", ".xlsx", ".pptx", ".odt", ".ods", ".odp")
BINARY_SUFFIXES = frozenset(
    f".{suffix}"
    for group in (
        "pyc pyo so o a dylib dll exe class wasm",
        "png jpg jpeg gif webp ico bmp tiff mp3 mp4 wav ogg mov avi ttf otf woff woff2",
        "npy npz pt safetensors parquet",
    )
    for suffix in group.split()
)
"""Suffixes of binary files, which are not opened when a folder is read."""


def read_file(file: SourceFile, loading: SourceLoader) -> None:
    """Read ``file`` according to its kind. Raises UnreadableSource for an unsupported kind."""
    kind = kind_of(file.name, file.data[:HEAD_BYTES])
    if file.inside and kind in ("zip", "tar", "packed"):
        raise UnreadableSource("is an archive within an archive", "unpack the outer one first")
    reader: Reader = pkgutil.resolve_name(READERS[kind])
    reader(file, loading)


def kind_of(name: str, head: bytes) -> str:
    """Return the kind of a file: ``("a.csv.gz", b"\\x1f\\x8b…")`` -> ``"packed"``."""
    if name.lower().endswith(_OFFICE) and head[:2] == b"PK":
        raise UnreadableSource("is an office document", "save it as text or PDF")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    for magic, description in _FOREIGN.items():
        if head.startswith(magic):
            raise UnreadableSource(f"is {description}")
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "packed"
    if head[257:262] == b"ustar":
        return "tar"
    return "text"


def read_regular(path: str, name: str, loading: SourceLoader, flags: int = os.O_NOFOLLOW) -> bytes:
    """Return the bytes of a regular file. For a database, return only its first bytes, because it
    is queried and not loaded."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise UnreadableSource("is a pipe, a socket or a device")
        with open(fd, "rb", buffering=0, closefd=False) as file:
            head = file.read(16)
            if head == b"SQLite format 3\0":
                return head
            loading.spend(status.st_size, name)
            return head + file.read()
    finally:
        os.close(fd)
