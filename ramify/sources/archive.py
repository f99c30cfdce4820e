"""Code shared by zip and tar: limits against decompression bombs, and names of members.

Nothing is written to disk, so a member's name cannot do harm; it is normalized anyway. Limits: the
bytes of the whole load (``SourceLoader.spend``), a compression ratio that ordinary text does not
reach, and the number of members.
"""

from __future__ import annotations

import posixpath

from ramify.errors import SourceError
from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile, read_file

MAX_MEMBERS = 100_000
MAX_RATIO = 250
"""Maximum ratio of unpacked to packed size beyond ``RATIO_FROM_BYTES``. Deflate can reach 1,032."""
RATIO_FROM_BYTES = 64 << 20


def member_name(archive: str, member: str) -> str:
    """Return the name of a member: ``("a.zip", "/../etc/x")`` -> ``"a.zip/etc/x"``."""
    return f"{archive}/{posixpath.normpath('/' + member.replace(chr(92), '/')).lstrip('/')}"


def is_hidden(member: str) -> bool:
    return member.startswith("__MACOSX/") or any(
        part.startswith(".") and part not in (".", "..") for part in member.split("/")
    )


def read_member(name: str, data: bytes, loading: SourceLoader) -> None:
    """Read one unpacked member, whose bytes have already been counted."""
    try:
        read_file(SourceFile(name, data, inside=True), loading)
    except UnreadableSource as error:
        loading.problem(name, str(error))


def check_ratio(num_bytes: int, packed_bytes: int, name: str) -> None:
    if num_bytes > RATIO_FROM_BYTES and num_bytes > MAX_RATIO * max(packed_bytes, 1):
        raise SourceError(
            f"{name} unpacks to over {MAX_RATIO} times its size, as a bomb would: unpack it "
            "yourself if you trust it"
        )


def check_count(num_members: int, archive: str) -> None:
    if num_members > MAX_MEMBERS:
        raise SourceError(
            f"{archive} has over {MAX_MEMBERS:,} members: unpack it and name the ones that matter"
        )
