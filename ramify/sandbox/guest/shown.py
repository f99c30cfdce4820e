"""Values and errors as text for the author of a cell.

Decides the maximum length of the text, and that a traceback shows the frames of the cell and of the
code it called, but not the guest's. Not here: where the text goes (see ``notebook.py``).
"""

from __future__ import annotations

import os
import traceback
from collections.abc import Collection
from typing import Any

from .values import type_name

VALUE_CHARS = 100_000
"""Maximum length of an echo and of one exception's text."""
_HERE = os.path.dirname(__file__) + os.sep
"""Folder of the guest's own files."""


def cut(text: str, limit: int) -> str:
    """Return ``text``, or its head and tail with a note on how much is missing."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def safe_repr(value: Any) -> str:
    """Return ``repr(value)`` with bounded length. Never raises an Exception, and never copies a
    long string."""
    kind = type(value)
    if kind in (str, bytes) and len(value) > VALUE_CHARS:
        half = VALUE_CHARS // 2
        shown = f"{value[:half]!r} [… {len(value) - 2 * half:,} left out …] {value[-half:]!r}"
        return shown if len(shown) <= VALUE_CHARS + 100 else cut(shown, VALUE_CHARS)
    try:
        return cut("".join([repr(value), ""]), VALUE_CHARS)
    except Exception as error:  # noqa: BLE001  (whatever a repr does, the cell continues)
        return f"<{type_name(kind)} whose repr raised {type(error).__name__}>"


def text_of(error: BaseException) -> str:
    """Return ``str(error)``, which may fail for an exception class defined in a cell."""
    try:
        return "".join([str(error), ""])
    except BaseException as worse:  # noqa: BLE001  (whatever it does, the session continues)
        return f"(its text cannot be had: {type(worse).__name__})"


def show_error(error: BaseException, hidden: Collection[str] = ()) -> str:
    """Return the traceback for the cell's author: without frames of the guest and of ``hidden``
    files."""
    shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    visited: set[int] = set()
    stack = [shown]
    while stack:
        part = stack.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        frames = [
            entry
            for entry in part.stack or ()
            if not (entry.filename.startswith(_HERE) or entry.filename in hidden)
        ]
        part.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        stack += [p for p in (part.__cause__, part.__context__) if p is not None]
        stack += getattr(part, "exceptions", None) or []
    return cut("".join(shown.format()).rstrip("\n"), VALUE_CHARS)
