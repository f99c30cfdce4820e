"""Answers with citations that were checked against the context.

Asked for with ``cite=True``, the model answers ``{"answer": …, "citations": [{"source",
"first_line", "last_line", "quote"}]}``. A citation counts only if its source exists, its lines are
there and its quote stands in them; otherwise the model is shown what is wrong. White space may
differ between quote and text; nothing else may.

    context {"a.txt": "one\\ntwo words\\n"}:   source "a.txt", lines 2-2, quote "two  words"   -> holds
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import msgspec

from ramify.engine.typed import AnswerType, TypeMismatch, answer_type

T = TypeVar("T")

INSTRUCTION = (
    'Give FINAL a dict: {"answer": your answer, "citations": [{"source": a key of `context` ("context" if it is one '
    'text), "first_line": n, "last_line": m, "quote": the words themselves}]}. Lines count from 1. Cite every '
    "claim; each quote is checked against those lines."
)


class Citation(msgspec.Struct, frozen=True):
    """One place in the context that the answer rests on."""

    source: str
    """Key of the context; ``"context"`` where it is one text."""
    first_line: int
    """From 1."""
    last_line: int
    """Inclusive."""
    quote: str


class CitedAnswer(msgspec.Struct, Generic[T], frozen=True):
    """An answer and what it rests on."""

    answer: T
    citations: tuple[Citation, ...]


def cited_type(kind: Any, context: Any) -> AnswerType:
    """The check for ``kind`` with citations into ``context``."""
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
    """Why ``citation`` does not hold in ``context``; None if it does."""
    text = _source(citation.source, context)
    if text is None:
        return f"there is no text source '{citation.source}' in the context"
    lines = text.removesuffix("\n").split(
        "\n"
    )  # as editors and grep count; splitlines() knows more ends than they do
    place = f"lines {citation.first_line}-{citation.last_line} of '{citation.source}'"
    if not 1 <= citation.first_line <= citation.last_line <= len(lines):
        return f"{place} does not exist: it has {len(lines)} lines"
    wanted = " ".join(citation.quote.split())
    if not wanted:
        return "the quote is empty"
    if wanted not in " ".join(
        " ".join(lines[citation.first_line - 1 : citation.last_line]).split()
    ):
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
