"""Tar archives, plain or compressed by gzip, bzip2 or xz, and single compressed files.

The compressed bytes are unpacked as a stream through ``_BoundedStream``. No header and no skipped
member can therefore use more memory or time than the limits of the load allow.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import tarfile
import zlib
from typing import BinaryIO, cast

from ramify.sources.archive import check_count, check_ratio, is_hidden, member_name, read_member
from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile, read_file

_DAMAGED = (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error, ValueError)
_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma")
_BLOCK_BYTES = 1 << 20


def read(file: SourceFile, loading: SourceLoader) -> None:
    try:
        with _open(file.data) as unpacked:
            stream = _BoundedStream(unpacked, file, loading)
            head = stream.read(512)
            stream.give_back(head)
            if head[257:262] == b"ustar":
                _read_members(stream, file, loading)
            else:
                _read_single(stream, file, loading)
    except _DAMAGED as error:
        raise UnreadableSource("is a damaged archive", str(error) or type(error).__name__) from None


def _open(data: bytes) -> BinaryIO:
    raw = io.BytesIO(data)
    if data[:2] == b"\x1f\x8b":
        return cast("BinaryIO", gzip.open(raw))
    if data[:3] == b"BZh":
        return cast("BinaryIO", bz2.open(raw))
    if data[:6] == b"\xfd7zXZ\0":
        return cast("BinaryIO", lzma.open(raw))
    return raw


def _read_members(stream: _BoundedStream, file: SourceFile, loading: SourceLoader) -> None:
    num_members = 0
    # In stream mode, tarfile calls only read().
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            num_members += 1
            check_count(num_members, file.name)
            name = member_name(file.name, info.name)
            if info.isdir():
                continue
            if is_hidden(info.name):
                loading.leave_out(name, "hidden")
            elif info.isreg():
                member = archive.extractfile(info)
                read_member(name, member.read() if member else b"", loading)
            else:
                loading.problem(name, "is a link or a device, not a file")


def _read_single(stream: _BoundedStream, file: SourceFile, loading: SourceLoader) -> None:
    blocks = []
    while block := stream.read(_BLOCK_BYTES):
        blocks.append(block)
    name = file.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    inner = SourceFile(name, b"".join(blocks), inside=True)
    read_file(inner, loading)


class _BoundedStream:
    """Stream that counts its output against the limits of the load."""

    def __init__(self, stream: BinaryIO, file: SourceFile, loading: SourceLoader) -> None:
        self._stream = stream
        self._file = file
        self._loading = loading
        self._num_bytes = 0
        self._back = b""

    def read(self, size: int) -> bytes:
        back, self._back = self._back[:size], self._back[size:]
        if len(back) == size:
            return back
        data = self._stream.read(min(size - len(back), self._loading.room + 1))
        self._num_bytes += len(data)
        self._loading.spend(len(data), self._file.name)
        check_ratio(self._num_bytes, len(self._file.data), self._file.name)
        return back + data

    def give_back(self, data: bytes) -> None:
        """Push ``data`` back, to be read again."""
        self._back = data + self._back
