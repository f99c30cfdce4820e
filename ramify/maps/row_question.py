"""Builds the question that a map asks about a row.

It is either a fixed question with the row as its context, or a template that is filled in from the
row's columns.

    "Is this a complaint?"           question, and the row as context: the text of its only column,
                                     or all its columns by name
    "Is {subject} a complaint?"      the columns are put into the question; nothing else is shown
    a template with a long column    "Is context['subject'] …", and these columns as the context

Rows with the same question and context get the same digest, so that they are asked only once.
``row_answerer.py`` decides how a question is answered.
"""

from __future__ import annotations

import datetime
import math
import re
from collections.abc import Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec

from ramify.engine.question import Question
from ramify.errors import ConfigError, did_you_mean
from ramify.types.message import escape_surrogates

_FIELD = re.compile(r"\{\{|\}\}|\{([^\W\d][\w .-]*)\}")
_SPACED_FIELD = re.compile(r"(?<!\{)\{(\s[^{}]*|[^{}]*\s)\}(?!\})")
_BRACE = re.compile(r"[{}]")
_CHARS_AROUND = 40
"""Number of characters of a question that the error about one of its braces shows."""
_DIGEST_BYTES = 16
_encode = msgspec.json.Encoder(decimal_format="string").encode


class InvalidRowError(Exception):
    """Raised if no question can be asked about a row, for example because the row is empty.

    The message becomes the error of the row.
    """


class RowQuestionMaker:
    """Converts the rows of a table to questions for a model."""

    def __init__(
        self,
        text: str,
        columns: Sequence[str],
        shown: Sequence[str],
        question: Question,
        settings: bytes,
    ) -> None:
        """Prepare to make the question for each row of a table.

        ``text`` is a question, or a template with column names in braces. Raises ConfigError for a
        column that the table does not have, and for a brace without its counterpart.

        ``columns`` are all columns of the table, and ``shown`` are those that the model reads if
        ``text`` is not a template. ``question`` has the settings that all rows share. ``settings``
        is mixed into the digests of the rows, so that maps with other settings do not share
        answers.
        """
        _check_braces(text)
        self.text = text
        self.fields = tuple(
            dict.fromkeys(found[1] for found in _FIELD.finditer(text) if found[1] is not None)
        )
        """Columns in the template. Empty for a plain question."""
        for name in self.fields:
            if name not in columns:
                raise ConfigError(
                    f"the question names {{{name}}}, and the rows have no such column: "
                    f"{did_you_mean(name, columns)} (write {{{{ }}}} for braces)"
                )
        for spaced in _SPACED_FIELD.finditer(text):
            if (name := spaced[1].strip()) in columns:
                raise ConfigError(
                    f"the question has {spaced[0]!r}: write {{{name}}} without spaces"
                )
        for name in shown:
            if name not in columns:
                raise ConfigError(
                    f"the rows have no column '{name}': {did_you_mean(name, columns)}"
                )
        self.shown = self.fields or tuple(shown) or tuple(columns)
        """Columns that the model reads."""
        if not self.fields and _BRACE.search(_FIELD.sub("", text)) is None:
            # A template without columns: its braces are doubled, too.
            question = msgspec.structs.replace(question, text=_fill(text, {}))
        self._question = question
        self._settings = settings

    def question_and_digest(
        self, values: Mapping[str, Any], max_chars: int
    ) -> tuple[Question, bytes]:
        """Return the question about a table row, and the digest that identifies equal questions.

        If the filled-in template would exceed ``max_chars`` characters, the columns become the
        context instead. Raises InvalidRowError for a row without content.
        """
        if self.fields:
            text, context = self._fill_question(values, max_chars)
        else:
            text, context = self._question.text, self._context(values)
        question = self.make_question(text, context)
        key = blake2b(self._settings, digest_size=_DIGEST_BYTES)
        key.update(_encode((text, context)))
        return question, key.digest()

    def make_question(self, text: str, context: Any) -> Question:
        """Return the map's question with the given text and context."""
        return msgspec.structs.replace(self._question, text=text, context=context)

    def _fill_question(self, values: Mapping[str, Any], max_chars: int) -> tuple[str, Any]:
        texts = {name: _text(values.get(name)) for name in self.fields}
        if not any(text.strip() for text in texts.values()):
            raise InvalidRowError(f"the row has no value in {', '.join(self.fields)}")
        if len(self.text) + sum(map(len, texts.values())) <= max_chars:
            return escape_surrogates(_fill(self.text, texts)), None
        names = {name: f"context[{name!r}]" for name in self.fields}
        return escape_surrogates(_fill(self.text, names)), texts

    def _context(self, values: Mapping[str, Any]) -> Any:
        given = {name: _text(values.get(name)) for name in self.shown}
        texts = {name: text for name, text in given.items() if text}
        if not any(text.strip() for text in texts.values()):
            names = ", ".join(self.shown[:5])
            raise InvalidRowError(
                f"the row has no value in {names}" if names else "the row is empty"
            )
        return texts[self.shown[0]] if len(self.shown) == 1 else texts


def _check_braces(text: str) -> None:
    """Raise ConfigError if a single brace of a question has no counterpart.

    A pair of braces around anything but a column, such as an example in JSON, is plain text.
    """
    if _lone_brace(text) is None or (rest := _lone_brace(_FIELD.sub("", text))) is None:
        return
    where, brace = rest
    other = "}" if brace == "{" else "{"
    raise ConfigError(
        f"the question has a {brace} without its {other}, at {where!r}: write {{COLUMN}} for the "
        f"value of a column, or {2 * brace} for a brace"
    )


def _lone_brace(text: str) -> tuple[str, str] | None:
    """Return the first brace of a text that has no counterpart, after the text around it.

    Returns None if there is none.
    """
    opened: list[int] = []
    for found in _BRACE.finditer(text):
        if found[0] == "{":
            opened.append(found.start())
        elif opened:
            opened.pop()
        else:
            return text[max(0, found.end() - _CHARS_AROUND) : found.end()], "}"
    return (text[opened[0] : opened[0] + _CHARS_AROUND], "{") if opened else None


def _fill(template: str, texts: Mapping[str, str]) -> str:
    def piece(found: re.Match[str]) -> str:
        return found[0][0] if found[1] is None else texts[found[1]]

    return _FIELD.sub(piece, template)


def _text(value: Any) -> str:
    """Convert a table cell to text for the model.

    A missing value becomes an empty string, and other values become their usual text or JSON.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, str):
        return escape_surrogates(str(value))
    if isinstance(value, datetime.date | datetime.time | bool | int | float):
        return str(value)
    value = to_json_value(value)
    return escape_surrogates(value if isinstance(value, str) else _encode(value).decode())


def to_json_value(value: Any) -> Any:
    """Convert a table cell to plain data that JSON can represent.

    A value without a JSON form becomes text.
    """
    if value is None or type(value) in (str, int, float, bool):
        return value
    if hasattr(value, "item") and not isinstance(value, Mapping):  # a scalar of NumPy
        return to_json_value(value.item()) if getattr(value, "ndim", 0) == 0 else value.tolist()
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, RecursionError):
        pass
    try:
        if isinstance(value, Mapping):
            return {str(name): to_json_value(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [to_json_value(item) for item in value]
    except RecursionError:
        pass
    # A subclass of a date, such as the one of pandas, is unknown to msgspec.
    return value.isoformat() if isinstance(value, datetime.date) else str(value)
