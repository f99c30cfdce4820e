"""Which kind a file is, by its first bytes and then by its name; and who reads that kind.

A reader is a function ``(file, loading) -> None`` in a module of its own, imported when its kind is
first met.
"""

from __future__ import annotations

import importlib
import os
import stat
from collections.abc import Callable
from pathlib import Path

import msgspec

from ramify.sources.base import SourceLoader, UnreadableSource

HEAD_BYTES = 8192
"""Enough of a file to tell its kind."""


class SourceFile(msgspec.Struct):
    """One file's bytes, wherever they came from."""

    name: str
    data: bytes
    path: Path | None = None
    """Where it stands by itself on disk; None for standard input and members of archives."""
    inside: bool = False
    """Whether it came out of an archive: archives in archives are not opened."""


Reader = Callable[[SourceFile, SourceLoader], None]

READERS: dict[str, str] = {
    "text": "ramify.sources.decode_text",
    "pdf": "ramify.sources.pdf",
    "sqlite": "ramify.sources.sqlite",
    "zip": "ramify.sources.zip",
    "tar": "ramify.sources.tar",
    "packed": "ramify.sources.tar",  # gzip, bzip2, xz: of a tar or of one file
}
"""Kind -> the module whose ``read`` reads it."""

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
"""Not worth opening where a folder is full of them."""


def read_file(file: SourceFile, loading: SourceLoader) -> None:
    """Read ``file`` as the kind that it is; Unreadable where it is none of ours."""
    kind = kind_of(file.name, file.data[:HEAD_BYTES])
    if file.inside and kind in ("zip", "tar", "packed"):
        raise UnreadableSource("is an archive within an archive", "unpack the outer one first")
    reader: Reader = importlib.import_module(READERS[kind]).read
    reader(file, loading)


def kind_of(name: str, head: bytes) -> str:
    """``("a.csv.gz", b"\\x1f\\x8b…")`` -> ``"packed"``"""
    if name.lower().endswith(_OFFICE) and head[:2] == b"PK":
        raise UnreadableSource("is an office document", "save it as text or PDF")
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            raise UnreadableSource(f"is {what}")
    if head[:3] == b"BZh" and head[4:10] == b"1AY&SY":
        return "packed"
    if head[257:262] == b"ustar":
        return "tar"
    return "text"


def read_regular(path: str, name: str, loading: SourceLoader, flags: int = os.O_NOFOLLOW) -> bytes:
    """The bytes of a regular file; only the first of a database, which is asked and not loaded."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UnreadableSource("is a pipe, a socket or a device")
        with open(fd, "rb", buffering=0, closefd=False) as file:
            head = file.read(16)
            if head == b"SQLite format 3\0":
                return head
            loading.spend(found.st_size, name)
            return head + file.read()
    finally:
        os.close(fd)
