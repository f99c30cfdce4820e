"""Reads the files inside zip archives, tar archives and compressed files.

Each readable file in an archive becomes a text named ``archive.zip/member``. The formats are zip,
tar (plain, gzip, bzip2, xz or zstd) and single compressed files. ``seven_zip.py`` reads 7z
archives.

Nothing is written to disk, so the names of members are harmless; they are nevertheless normalized.
Limits: the bytes of the whole load (``SourceCollector.count_bytes``), a compression ratio that
ordinary text does not reach, and the number of members.
"""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import posixpath
import sys
import tarfile
import zipfile
import zlib
from typing import Any, BinaryIO, cast

from ramify.sources.file_kinds import InputFile, read_as, read_file
from ramify.sources.loaded_sources import (
    OversizedSourceError,
    SourceCollector,
    UnreadableSourceError,
    missing_library_advice,
)

MAX_MEMBERS = 100_000
MAX_RATIO = 250
"""Maximum ratio of unpacked to packed size beyond ``RATIO_FROM_BYTES``. Deflate can reach 1,032."""
RATIO_FROM_BYTES = 64 << 20
_BLOCK_BYTES = 1 << 20
_ZSTD_WINDOW_LOG = 27
"""Base-2 logarithm of the largest window that a zstd file may request: 128 MB of memory."""
MACROS = "its macros were not run"
_DOCUMENTS = {
    "word/document.xml": "docx",
    "ppt/presentation.xml": "pptx",
    "xl/workbook.xml": "xlsx",
}
"""Member of a zip archive -> kind of document. It identifies documents whose file name lacks the
usual suffix."""
_MARKUP = (".xml", ".xhtml", ".html", ".htm", ".rels", ".vml")


def member_name(archive: str, member: str) -> str:
    """Return the safe name that a file from an archive gets in the context.

    Parts such as ``..`` are removed. For example, ``/../etc/x`` in ``a.zip`` becomes
    ``a.zip/etc/x``.
    """
    return f"{archive}/{posixpath.normpath('/' + member.replace(chr(92), '/')).lstrip('/')}"


def is_hidden(member: str) -> bool:
    return member.startswith("__MACOSX/") or any(
        part.startswith(".") and part not in (".", "..") for part in member.split("/")
    )


def load_member(name: str, data: bytes, loading: SourceCollector, depth: int = 0) -> None:
    """Read one file that was unpacked from an archive, and add its contents to the context.

    The caller has already counted its bytes towards the limit.
    """
    try:
        read_file(InputFile(name, data, inside=True, depth=depth), loading)
    except OversizedSourceError:
        raise  # the whole archive is
    except UnreadableSourceError as error:
        loading.report_problem(name, str(error))


def check_ratio(num_bytes: int, packed_bytes: int) -> None:
    if num_bytes > RATIO_FROM_BYTES and num_bytes > MAX_RATIO * max(packed_bytes, 1):
        raise OversizedSourceError(
            f"unpacks to over {MAX_RATIO} times its size, as a zip bomb would",
            "unpack it yourself if you trust it",
        )


def checked_member_names(file: InputFile, what: str, loading: SourceCollector) -> list[str]:
    """Check the declared sizes of the files in a zip-based document, and return their names.

    Parts that are unpacked as text count towards the limit. A part is never unpacked beyond its
    declared size.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(file.data)) as archive:
            parts = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise UnreadableSourceError(f"is a damaged {what}", str(error)) from None
    check_count(len(parts))
    for part in parts:
        check_ratio(part.file_size, part.compress_size)
        if part.filename.endswith(_MARKUP):
            loading.count_bytes(part.file_size, file.name)
    return [part.filename for part in parts]


def has_macros(parts: list[str]) -> bool:
    return any(part.endswith("vbaProject.bin") for part in parts)


def check_count(num_members: int) -> None:
    if num_members > MAX_MEMBERS:
        raise OversizedSourceError(
            f"has over {MAX_MEMBERS:,} members", "unpack it and name the ones that matter"
        )


def read_zip(file: InputFile, loading: SourceCollector) -> None:
    try:
        archive = zipfile.ZipFile(io.BytesIO(file.data))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise UnreadableSourceError("is a damaged zip archive", str(error)) from None
    with archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        check_count(len(members))
        kinds = [_DOCUMENTS[each.filename] for each in members if each.filename in _DOCUMENTS]
        if kinds:
            return read_as(kinds[0], file, loading)
        num_bytes = 0
        for info in members:
            name = member_name(file.name, info.filename)
            if is_hidden(info.filename):
                loading.leave_out(name, "hidden")
                continue
            try:
                data = _unpack(archive, info, name, loading)
            except (
                zipfile.BadZipFile,
                NotImplementedError,
                RuntimeError,
                EOFError,
                zlib.error,
                OSError,
            ) as error:
                encrypted = info.flag_bits & 0x1
                loading.report_problem(
                    name, "is encrypted" if encrypted else f"cannot be unpacked: {error}"
                )
                continue
            num_bytes += len(data)
            check_ratio(num_bytes, len(file.data))  # many members of a common part are a bomb, too
            load_member(name, data, loading)


def _unpack(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, loading: SourceCollector
) -> bytes:
    """Unpack one file of an archive, and stop if its real size exceeds the limits.

    The size that the archive declares may be false.
    """
    data = bytearray()
    with archive.open(info) as member:
        while block := member.read(_BLOCK_BYTES):
            data += block
            loading.count_bytes(len(block), name)
            check_ratio(len(data), info.compress_size)
    return bytes(data)


_DAMAGED = (tarfile.TarError, OSError, EOFError, lzma.LZMAError, zlib.error, ValueError)
_SUFFIXES = (".gz", ".bz2", ".xz", ".lzma", ".zst")


def read_tar(file: InputFile, loading: SourceCollector) -> None:
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
        raise UnreadableSourceError(
            "is a damaged archive", str(error) or type(error).__name__
        ) from None


def _open(data: bytes) -> BinaryIO:
    raw = io.BytesIO(data)
    if data[:2] == b"\x1f\x8b":
        return cast("BinaryIO", gzip.open(raw))
    if data[:3] == b"BZh":
        return cast("BinaryIO", bz2.open(raw))
    if data[:6] == b"\xfd7zXZ\0":
        return cast("BinaryIO", lzma.open(raw))
    if data[:4] == b"\x28\xb5\x2f\xfd":
        return _open_zstd(raw)
    return raw


def _open_zstd(raw: BinaryIO) -> BinaryIO:
    try:
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
    except ImportError:
        raise UnreadableSourceError("is compressed with zstd", missing_library_advice()) from None
    return cast("BinaryIO", _ZstdStream(zstd, raw))


class _ZstdStream(contextlib.closing[Any]):
    """A stream that unpacks a zstd file.

    Damaged data raises OSError, as in other streams.
    """

    def __init__(self, zstd: Any, raw: BinaryIO) -> None:
        limit = {zstd.DecompressionParameter.window_log_max: _ZSTD_WINDOW_LOG}
        self._stream = zstd.open(raw, options=limit)
        self._error = zstd.ZstdError
        super().__init__(self._stream)

    def __enter__(self) -> Any:
        return self

    def read(self, size: int) -> bytes:
        try:
            data: bytes = self._stream.read(size)
        except self._error as error:
            raise OSError(str(error)) from None
        return data


def _read_members(stream: _BoundedStream, file: InputFile, loading: SourceCollector) -> None:
    num_members = 0
    # In stream mode, tarfile calls only read().
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            num_members += 1
            check_count(num_members)
            name = member_name(file.name, info.name)
            if info.isdir():
                continue
            if is_hidden(info.name):
                loading.leave_out(name, "hidden")
            elif info.isreg():
                member = archive.extractfile(info)
                load_member(name, member.read() if member else b"", loading)
            else:
                loading.report_problem(name, "is a link or a device, not a file")


def _read_single(stream: _BoundedStream, file: InputFile, loading: SourceCollector) -> None:
    blocks = []
    while block := stream.read(_BLOCK_BYTES):
        blocks.append(block)
    name = file.name
    for suffix in _SUFFIXES:
        name = name.removesuffix(suffix)
    inner = InputFile(name, b"".join(blocks), inside=True)
    read_file(inner, loading)


class _BoundedStream:
    """A stream of unpacked bytes that stops when the size limits are exceeded."""

    def __init__(self, stream: BinaryIO, file: InputFile, loading: SourceCollector) -> None:
        self._stream = stream
        self._file = file
        self._loading = loading
        self._num_bytes = 0
        self._back = b""

    def read(self, size: int) -> bytes:
        back, self._back = self._back[:size], self._back[size:]
        if len(back) == size:
            return back
        data = self._stream.read(min(size - len(back), self._loading.remaining_bytes + 1))
        self._num_bytes += len(data)
        self._loading.count_bytes(len(data), self._file.name)
        check_ratio(self._num_bytes, len(self._file.data))
        return back + data

    def give_back(self, data: bytes) -> None:
        """Return bytes to the stream, so that the next read yields them again."""
        self._back = data + self._back
