"""Serve a run's sources to its page: the files and web pages that its context was read from.

The page shows a table of them, excerpts of their texts, and the citations of the answer.

The table comes from the run's record (``sources.loaded_sources.LoadedSourcesRecord``). The texts
are read from the stored context, if it is small enough to be decoded for a page.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.engine.typed_answers import CitedAnswer
from ramify.errors import SandboxError, SourceError, StoreError
from ramify.sandbox.base import SharedContextValue
from ramify.sandbox.guest.mapped_text import FileBackedText
from ramify.sources.loaded_sources import LoadedSourcesRecord
from ramify.store.stored_run import StoredRun
from ramify.types.trajectory import ContextRef, Trajectory, answer_text
from ramify.viewer.watched_run import WatchedRun

MAX_CHARS = 250_000_000
"""Maximum size, in characters, of a stored context that a page shows. Contexts read from their
original files are not limited."""
NUM_LINES = 200
"""Number of lines of a text to send at once."""
MAX_LINE_CHARS = 2_000
_BEFORE = 8
"""Number of lines to show before the requested line."""


def answer_and_citations(trajectory: Trajectory) -> tuple[str, list[dict[str, Any]]]:
    """Return the text of the answer and its citations.

    The list is empty if the run was not asked to cite.
    """
    if trajectory.metadata.get("cite") and trajectory.answer is not None:
        try:
            cited = msgspec.convert(trajectory.answer, CitedAnswer[Any])
        except msgspec.ValidationError:
            return answer_text(trajectory.answer), []
        names = cited.citations[0].__struct_fields__ if cited.citations else ()
        return answer_text(cited.answer), [
            {name: getattr(each, name) for name in names} for each in cited.citations
        ]
    return answer_text(trajectory.answer), []


def sources(run: WatchedRun) -> dict[str, Any]:
    """Return a table of the files and web pages that a run's context was read from.

    The field ``key`` of a row is the name under which the context holds the source's text. Raises
    StoreError if the record of the sources cannot be read.
    """
    try:
        read = msgspec.convert(run.tree.run_data.metadata.get("read") or {}, LoadedSourcesRecord)
    except msgspec.ValidationError as error:
        raise StoreError(f"the record of the sources cannot be read: {error}") from None
    context = run.tree.run_data.context
    is_single = context is not None and context.kind == "str"
    return {
        "items": [
            {
                "key": "context" if is_single else item.name,
                "name": item.name,
                "kind": item.kind,
                "bytes": item.num_bytes,
                "chars": item.chars,
                "detail": item.detail,
            }
            for item in read.items
        ],
        "num_items": read.num_items,
        "problems": [{"name": each.name, "reason": each.reason} for each in read.problems],
        "num_problems": read.num_problems,
        "left_out": [
            {"reason": reason, "names": names, "num": read.num_left_out.get(reason, len(names))}
            for reason, names in read.left_out.items()
        ],
    }


def source_excerpt(run: WatchedRun, key: str, line: int) -> dict[str, Any]:
    """Return ``NUM_LINES`` lines of one text in a run's context, starting shortly before ``line``.

    ``key`` is the name of the text. Raises StoreError if there is no such text.
    """
    context = run.tree.run_data.context
    if context is None:
        raise StoreError("the run has no context")
    if context.chars > MAX_CHARS and not context.files:
        raise StoreError(
            f"the context has {context.chars:,} characters, but a page shows only contexts of up "
            f"to {MAX_CHARS:,}"
        )
    value = _context(run.source, context)
    text = value.get(key) if isinstance(value, dict) else value if key == "context" else None
    if isinstance(value, list) and key.isdecimal() and int(key) < len(value):
        text = value[int(key)]
    lines: Any
    if isinstance(text, FileBackedText):
        lines = text.splitlines()
    elif isinstance(text, str):
        lines = text.removesuffix("\n").split("\n")
    else:
        raise StoreError(f"the context has no text {key!r}")
    first = max(1, min(line - _BEFORE, len(lines) - NUM_LINES + 1)) if line > 1 else 1
    shown = lines[first - 1 : first - 1 + NUM_LINES]
    return {
        "key": key,
        "first": first,
        "num_lines": len(lines),
        "lines": [
            each if len(each) <= MAX_LINE_CHARS else f"{each[:MAX_LINE_CHARS]} …" for each in shown
        ],
    }


def _context(run: StoredRun, context: ContextRef) -> Any:
    """Load the value of a context from a stored run.

    Raises StoreError if it cannot be read.
    """
    try:
        return SharedContextValue.from_encoded(run.blob(context.digest), context.files).value
    except (SandboxError, SourceError) as error:
        raise StoreError(str(error)) from None
