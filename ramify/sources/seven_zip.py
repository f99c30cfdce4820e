"""Reads 7z archives, which py7zr (extra ``inputs``) unpacks in the process of
``document_process.py``.

Nothing is written to disk. Other archives are read by ``archives.py``.
"""

from __future__ import annotations

import importlib.util
import io
from typing import Any

from ramify.sources.archives import check_count, check_ratio, is_hidden, load_member, member_name
from ramify.sources.document_process import ConvertedDocument, convert_document
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import (
    SourceCollector,
    UnreadableSourceError,
    missing_library_advice,
)

MAX_UNPACKED_BYTES = 1 << 30
"""Maximum total size in bytes of all files in an archive, which are unpacked in memory."""


def read(file: InputFile, loading: SourceCollector) -> None:
    if importlib.util.find_spec("py7zr") is None:
        raise UnreadableSourceError("is a 7-Zip archive", missing_library_advice())
    found = convert_document("7z", "a 7-Zip archive", file, loading)
    check_count(len(found.members))
    total = 0
    for member, data in found.members:
        total += len(data)
        check_ratio(total, len(file.data))
        loading.count_bytes(len(data), file.name)
        name = member_name(file.name, member)
        if is_hidden(member):
            loading.leave_out(name, "hidden")
        else:
            load_member(name, data, loading)


def convert(data: bytes) -> ConvertedDocument:
    """Unpack a 7z archive in memory, and convert the files in it.

    Runs in the process of ``document_process.py``.
    """
    import py7zr
    from py7zr.io import BytesIOFactory

    with py7zr.SevenZipFile(io.BytesIO(data)) as archive:
        if archive.needs_password():
            raise UnreadableSourceError("is an encrypted archive", "unpack it first")
        members = [each for each in archive.list() if each.is_file]
        size = sum(each.uncompressed for each in members)
        if size > MAX_UNPACKED_BYTES:
            raise UnreadableSourceError(
                f"unpacks to {size / 1e6:,.0f} MB, more than {MAX_UNPACKED_BYTES / 1e6:,.0f} MB",
                "unpack it first",
            )
        factory: Any = BytesIOFactory(MAX_UNPACKED_BYTES)
        archive.extract(targets=[each.filename for each in members], factory=factory)
    unpacked = []
    for name, stream in factory.products.items():
        stream.seek(0)
        unpacked.append((name, bytes(stream.read())))
    return ConvertedDocument("", "", members=unpacked)
