"""A context that is encoded once: sessions are opened over it, a store keeps it by its digest, and
child runs share it.

Decides where the bytes are stored: a large context in an anonymous memory file, which the fork
server maps; a small one in a bytes object, which is sent to the session. Not here: where and when
it is decoded (see ``process.py``), and the codec (see ``guest/values.py``).
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
"""From this size on, sessions over a context are forked from a process that has decoded it once."""


class SharedContext:
    """One value, encoded for any number of sessions. Raises SandboxError for a value that no
    session can hold."""

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
        """Distinguishes this object from every other one in this process, even from a later one at
        the same address."""
        self.value = value
        self.kind: str = type(value).__name__
        """Name of the value's Python type in the session."""
        self.chars = chars
        """Total number of characters in all its strings."""
        self.nbytes = sum(map(len, parts))
        """Length of the encoded form in bytes."""
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
        """File descriptor of the encoded form if it is large, else None. Valid as long as this
        object."""
        return self._fd if self._fd >= 0 else None

    @property
    def digest(self) -> str:
        """Hexadecimal SHA-256 of the encoded form; computed on first use."""
        if self._digest is None:
            self._digest = hashlib.sha256(self.buffer()).hexdigest()
        return self._digest

    def buffer(self) -> memoryview:
        """Return the encoded form, read-only."""
        return memoryview(self._data)

    @classmethod
    def decode(cls, data: bytes | memoryview) -> SharedContext:
        """Return the context whose ``buffer()`` was ``data``; its digest is the same."""
        try:
            value, chars = unpack_value(data)
        except ProtocolError as error:
            raise SandboxError(f"a stored context cannot be read: {error}") from None
        context = cls.__new__(cls)
        context._hold(value, [data], chars)
        return context

    def pack(self) -> dict[str, Any]:
        """Return the value as data for any JSON writer, such as a journal; ``unpack`` reverses
        it."""
        encoder = ValueEncoder()
        packed: dict[str, Any] = {"value": encoder.encode(self.value)}
        if encoder.blobs:
            packed["blobs"] = [base64.b64encode(blob).decode() for blob in encoder.blobs]
        return packed

    @staticmethod
    def unpack(packed: Any) -> Any:
        """Return the value from which ``pack`` made ``packed``."""
        try:
            blobs = [base64.b64decode(blob) for blob in packed.get("blobs", ())]
            return ValueDecoder(blobs).decode(packed["value"])
        except (AttributeError, LookupError, TypeError, ValueError, ProtocolError) as error:
            raise SandboxError(f"a recorded value cannot be read: {error}") from None


def anonymous_file(name: str) -> int:
    """Create an anonymous memory file and return its descriptor; on platforms without memory files,
    a file on disk that is already unlinked."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    with tempfile.TemporaryFile(prefix=name) as file:
        return os.dup(file.fileno())
