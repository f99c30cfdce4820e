"""A context, encoded once: what sessions are opened over, a store keeps by its digest, and children
share.

Decides where the bytes lie: a large context in an anonymous file of memory, which the fork server
maps, a small one in a bytes object, which goes over the wire. Leaves out who decodes it and when
(``process.py``), and the codec (``guest/values.py``).
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import itertools
import mmap
import os
import tempfile
from typing import Any

from ramify.errors import SandboxError
from ramify.sandbox.guest.frames import write_all
from ramify.sandbox.guest.packed import pack_value, unpack_value
from ramify.sandbox.guest.values import CodecError, ProtocolError, ValueDecoder, ValueEncoder

_serials = itertools.count()
LARGE_BYTES = 1 << 20
"""From here on, sessions over a context are forked from a process that has decoded it once."""


class SharedContext:
    """One value, ready for any number of sessions. Raises SandboxError for what no session can
    hold."""

    __slots__ = (
        "__weakref__",
        "_data",
        "_digest",
        "_fd",
        "chars",
        "kind",
        "nbytes",
        "serial",
        "value",
    )

    def __init__(self, value: Any) -> None:
        try:
            parts, chars = pack_value(value)
        except CodecError as error:
            raise SandboxError(str(error)) from None
        self._hold(value, parts, chars)

    def _hold(self, value: Any, parts: list[Any], chars: int) -> None:
        self.serial = next(_serials)
        """Tells this object from every other one of the process, also from later ones at its
        address."""
        self.value = value
        self.kind: str = type(value).__name__
        """Name of the Python type in the session."""
        self.chars = chars
        """Characters of all strings in it."""
        self.nbytes = sum(map(len, parts))
        """Length of the encoded form."""
        self._digest: str | None = None
        self._fd = -1
        self._data: bytes | mmap.mmap
        if self.nbytes < LARGE_BYTES:
            self._data = b"".join(parts)
        else:
            self._fd = anonymous_file("ramify-context")
            write_all(self._fd, list(parts))
            self._data = mmap.mmap(self._fd, self.nbytes, prot=mmap.PROT_READ)

    def __del__(self) -> None:
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)

    @property
    def fd(self) -> int | None:
        """A descriptor of the encoded form, where it is large. Valid as long as this object."""
        return self._fd if self._fd >= 0 else None

    @property
    def digest(self) -> str:
        """SHA-256 of the encoded form, hexadecimal; computed when it is first asked for."""
        if self._digest is None:
            self._digest = hashlib.sha256(self.buffer()).hexdigest()
        return self._digest

    def buffer(self) -> memoryview:
        """The encoded form, read-only."""
        return memoryview(self._data)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SharedContext:
        """The context whose ``buffer()`` was ``data``; its digest stays the same."""
        try:
            value, chars = unpack_value(data)
        except ProtocolError as error:
            raise SandboxError(f"a stored context that cannot be read: {error}") from None
        context = cls.__new__(cls)
        context._hold(value, [data], chars)
        return context

    def pack(self) -> dict[str, Any]:
        """The value as data that any JSON writer takes, for a journal; ``unpack`` is the way
        back."""
        encoder = ValueEncoder()
        packed: dict[str, Any] = {"value": encoder.encode(self.value)}
        if encoder.blobs:
            packed["blobs"] = [base64.b64encode(blob).decode() for blob in encoder.blobs]
        return packed

    @staticmethod
    def unpack(packed: Any) -> Any:
        """The value that ``pack`` wrote down."""
        try:
            blobs = [base64.b64decode(blob) for blob in packed.get("blobs", ())]
            return ValueDecoder(blobs).decode(packed["value"])
        except (AttributeError, LookupError, TypeError, ValueError, ProtocolError) as error:
            raise SandboxError(f"a recorded value that cannot be read: {error}") from None


def anonymous_file(name: str) -> int:
    """A file of memory without a name, or where the platform has none, one on disk that is unlinked
    already."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
