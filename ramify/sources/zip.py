"""Zip archives: each readable member becomes a text named ``archive.zip/member``."""

from __future__ import annotations

import io
import zipfile
import zlib

from ramify.sources.archive import check_count, check_ratio, is_hidden, member_name, read_member
from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile

_BLOCK_BYTES = 1 << 20


def read(file: SourceFile, loading: SourceLoader) -> None:
    try:
        archive = zipfile.ZipFile(io.BytesIO(file.data))
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as error:
        raise UnreadableSource("is a damaged zip archive", str(error)) from None
    with archive:
        members = [info for info in archive.infolist() if not info.is_dir()]
        check_count(len(members), file.name)
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
                loading.problem(
                    name, "is encrypted" if encrypted else f"cannot be unpacked: {error}"
                )
                continue
            read_member(name, data, loading)


def _unpack(
    archive: zipfile.ZipFile, info: zipfile.ZipInfo, name: str, loading: SourceLoader
) -> bytes:
    """Unpack a member block by block, because the size that the archive states may be false."""
    data = bytearray()
    with archive.open(info) as member:
        while block := member.read(_BLOCK_BYTES):
            data += block
            loading.spend(len(block), name)
            check_ratio(len(data), info.compress_size, name)
    return bytes(data)
