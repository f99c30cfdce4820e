"""Answers with citations that are checked against the context.

With ``cite=True``, the model answers ``{"answer": …, "citations": [{"source", "first_line",
"last_line", "quote"}]}``. A citation is valid only if its source exists, its lines exist and its
quote occurs in them. Otherwise the model is shown the problem. White space may differ between quote
and text, but nothing else.

    context {"a.txt": "one\\ntwo words\\n"}
    source "a.txt", lines 2-2, quote "two  words"   -> valid
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from ramify.engine import observe
from ramify.engine.typed import AnswerType, TypeMismatch, answer_type

T = TypeVar("T")

INSTRUCTION = (
    'Give FINAL a dict: {"answer": your answer, "citations": [{"source": a key of `context` ("context" if it is one '
    'text), "first_line": n, "last_line": m, "quote": the words themselves}]}. Lines count from 1. Cite every '
    "claim; each quote is checked against those lines."
)


class Citation(msgspec.Struct, frozen=True):
    """One place in the context that supports the answer.

    Example:
        Citation(source="server.log", first_line=3, last_line=3, quote="web-3 ERROR")
    """

    source: str
    """Key of the context; ``"context"`` if the context is a single text."""
    first_line: int
    """Counted from 1."""
    last_line: int
    """Inclusive."""
    quote: str


class CitedAnswer(msgspec.Struct, Generic[T], frozen=True):
    """An answer and its citations."""

    answer: T
    citations: tuple[Citation, ...]


def cited_type(kind: Any, context: Any) -> AnswerType:
    """Return the check for ``kind`` with citations into ``context``."""
    inner = answer_type(kind)
    outer = answer_type(CitedAnswer[Any])
    assert outer is not None
    schema = dict(outer.schema)
    if inner is not None:
        schema["properties"] = {**schema["properties"], "answer": inner.schema}

    def convert(value: Any) -> Any:
        cited: CitedAnswer[Any] = outer.convert(value)
        if not cited.citations:
            raise TypeMismatch("there are no citations; give at least one")
        for index, citation in enumerate(cited.citations):
            problem = unsupported(citation, context)
            if problem:
                raise TypeMismatch(f"citation {index}: {problem}")
        return (
            msgspec.structs.replace(cited, answer=inner.convert(cited.answer)) if inner else cited
        )

    return AnswerType(schema, convert)


def unsupported(citation: Citation, context: Any) -> str | None:
    """Return why ``citation`` is not valid in ``context``, or None if it is."""
    text = _source(citation.source, context)
    if text is None:
        return observe.NO_SOURCE.format(name=citation.source)
    # Split as editors and grep count lines; splitlines() recognizes more line ends than they do.
    lines = text.removesuffix("\n").split("\n")
    place = f"lines {citation.first_line}-{citation.last_line} of '{citation.source}'"
    if not 1 <= citation.first_line <= citation.last_line <= len(lines):
        return f"{place} does not exist: it has {len(lines)} lines"
    quote = " ".join(citation.quote.split())
    if not quote:
        return "the quote is empty"
    passage = " ".join(" ".join(lines[citation.first_line - 1 : citation.last_line]).split())
    if quote not in passage:
        return f"the quote {citation.quote[:80]!r} is not in {place}"
    return None


def _source(name: str, context: Any) -> str | None:
    if isinstance(context, str):
        return context if name == "context" else None
    if isinstance(context, Mapping):
        value = context.get(
            name, next((item for key, item in context.items() if str(key) == name), None)
        )
        return value if isinstance(value, str) else None
    if isinstance(context, list | tuple) and name.isdecimal() and int(name) < len(context):
        value = context[int(name)]
        return value if isinstance(value, str) else None
    return None
