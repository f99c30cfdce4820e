"""``sys.stdout`` and ``sys.stderr`` of a session.

Decides what a cell can do with them: they take text and bytes, cannot be closed, and always use
UTF-8. Not here: where the output goes (see ``output.py``).
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any


class Stream(io.TextIOBase):
    """``sys.stdout`` or ``sys.stderr`` of a session: both write to one place, in order."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, name: str, put: Callable[[bytes], None], number: int) -> None:
        self.name = name
        self._put = put
        self._number = number
        self.buffer = _Bytes(put)

    def write(self, text: str) -> int:
        if not isinstance(text, str):
            raise TypeError(f"write() argument must be str, not {type(text).__name__}")
        self._put(text.encode("utf-8", "backslashreplace"))
        return len(text)

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._number

    def reconfigure(self, **_: Any) -> None:
        """Accepted and ignored, since scripts for terminals call it; a session always prints
        UTF-8."""

    def close(self) -> None:
        """Do nothing: a session's streams stay open."""


class _Bytes(io.BufferedIOBase):
    """``sys.stdout.buffer``."""

    def __init__(self, put: Callable[[bytes], None]) -> None:
        self._put = put

    def write(self, data: Any) -> int:
        chunk = bytes(data)
        self._put(chunk)
        return len(chunk)

    def writable(self) -> bool:
        return True

    def close(self) -> None:
        pass
