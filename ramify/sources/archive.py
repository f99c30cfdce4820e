"""What zip and tar share: bounds against bombs, names of members, and what becomes of each member.

Nothing is ever written, so a member's name can do no harm; it is tidied all the same. Bounds: the
bytes of the whole load (``SourceLoader.spend``), a ratio that no honest text reaches, and a number
of members.
"""

from __future__ import annotations

import posixpath

from ramify.errors import SourceError
from ramify.sources.base import SourceLoader, UnreadableSource
from ramify.sources.file_kinds import SourceFile, read_file

MAX_MEMBERS = 100_000
MAX_RATIO = 250
"""Unpacked over packed, where more than ``RATIO_FROM_BYTES`` come out. Deflate reaches 1,032."""
RATIO_FROM_BYTES = 64 << 20


def member_name(archive: str, member: str) -> str:
    """``("a.zip", "/../etc/x")`` -> ``"a.zip/etc/x"``"""
    return f"{archive}/{posixpath.normpath('/' + member.replace(chr(92), '/')).lstrip('/')}"


def is_hidden(member: str) -> bool:
    return member.startswith("__MACOSX/") or any(
        part.startswith(".") and part not in (".", "..") for part in member.split("/")
    )


def read_member(name: str, data: bytes, loading: SourceLoader) -> None:
    """One unpacked member; its bytes have been counted."""
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
