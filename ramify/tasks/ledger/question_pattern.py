"""Recognises ledger questions by their wording and by the rows in their contexts.

A context fits if its beginning is rows of user, label and quantity in one of the task's text
formats, or a document mark and such rows. ``task.py`` words the questions, and ``ledger_rows.py``
writes the rows.
"""

from __future__ import annotations

from typing import Any

from ramify.tasks.ledger.ledger_rows import FIELDS, FORMATS, LABELS, LedgerRowTextFormat
from ramify.tasks.ledger.task import MARKS, LedgerQuestion
from ramify.tasks.question_pattern import TaskQuestionPattern

_NUM_CHARS = 2_000
"""Number of characters at the beginning of a context that are inspected."""


def _is_ledger_question(question: str, context: Any) -> bool:
    asked = LedgerQuestion.parse(question)
    try:
        head = context[:_NUM_CHARS]
    except (TypeError, KeyError):  # a table, a dict of files, or no context
        return False
    if asked is None or not isinstance(head, str):
        return False
    is_whole = len(head) < _NUM_CHARS
    lines = head.rstrip("\n").split("\n") if is_whole else head.split("\n")[:-1]
    mark = lines[0] if lines and lines[0] in MARKS else None
    if (mark is not None) != asked.over_all:
        return False
    if mark is not None:
        lines = lines[1:]
        lines = lines[: lines.index(mark)] if mark in lines else lines
    return bool(lines) and any(_is_written_in(lines, form) for form in FORMATS)


def _is_written_in(lines: list[str], form: LedgerRowTextFormat) -> bool:
    header = form.separator.join(FIELDS[field] for field in form.field_order)
    if form.header and lines[0] != header:
        return False
    if any(line.count(form.separator) != len(FIELDS) - 1 for line in lines):
        return False
    try:
        rows = form.parse_rows("\n".join(lines))
    except ValueError:  # the quantity is not a number
        return False
    return bool(rows) and all(label in LABELS for _, label, _ in rows)


LEDGER_FORM = TaskQuestionPattern(
    "ledgers (rows of user, colour and quantity), with questions such as \"count rows of 'red'\", "
    "or \"count rows of 'red' in all docs\" if lines such as ### divide the rows into documents",
    _is_ledger_question,
)
