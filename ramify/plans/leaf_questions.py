"""Leaves: bounded questions that a plan asks a model.

A leaf is one small question to a model, whose input and answer have limited sizes and whose answer
has a type.

    Leaf("Label the record.", {"enum": ["spam", "ham"]}, each=True)
        part with 3 records ──> prompt, records "1: …", "2: …", "3: …" ──> ["spam", "ham", "ham"]

This module decides the prompt of a leaf, how its reply is checked, and the maximum size of both.
The request is sent, recorded and paid for in ``engine/leaf_calls.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.engine.plain_call import with_answer_format
from ramify.engine.typed_answers import AnswerSchema, TypeMismatch, to_answer_schema
from ramify.errors import ConfigError
from ramify.plans.text_parts import BYTES_PER_TOKEN, ContextPart, num_bytes, shortened
from ramify.plans.value_types import PlanValueType, check_field_values, list_of, type_of_schema

REPLY_BYTES_PER_TOKEN = 6
"""Maximum bytes of an answer per reply token. English has four to five."""
QUESTION = "{question}"
"""Placeholder for the user's question in a prompt."""
_BETWEEN = "\n\n---\n\n"
_MORE_TOKENS = 32
"""Extra reply tokens for a list with a value for each record, in addition to the tokens of the
values."""


class Leaf(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="leaf"):
    """A bounded question that a plan asks a model in one call.

    The sizes of the input and of the answer are limited.

    >>> plans.Leaf("Is the passage about money?", {"type": "boolean"}).type.kind
    'boolean'
    """

    prompt: str
    """Text of the question, in which ``{question}`` is replaced by the user's question."""
    schema: Any = None
    """JSON schema of the answer, or a type such as ``bool``; None for text."""
    tokens: int = 4000
    """Maximum size in tokens of the value that the model reads, without the prompt. Three bytes
    count as one token."""
    reply_tokens: int = 512
    """Maximum number of tokens in a reply. With ``each``, the limit applies to each value."""
    each: bool = False
    """True to ask for one value for each record of a part."""
    label: str = "leaf"
    """Short name for diagrams and records."""

    def __post_init__(self) -> None:
        check_field_values(self, f"leaf {self.label!r:.60}")
        if not self.prompt.strip():
            raise ConfigError("a leaf has an empty prompt: say what to ask")
        for name in ("tokens", "reply_tokens"):
            value = getattr(self, name)
            if value < 1:
                raise ConfigError(f"leaf '{self.label}': {name}={value!r:.40}: give 1 or more")
        if self.schema is not None:
            schema = to_answer_schema(self.schema).schema
            _base_schema(schema)  # reports a schema that is not valid
            msgspec.structs.force_setattr(self, "schema", schema)
            if schema.get("enum") == []:
                raise ConfigError(f"leaf '{self.label}' has no labels: give at least one")

    @property
    def type(self) -> PlanValueType:
        """Return the type of the answer to this question.

        With ``each``, this is the type of one value.
        """
        return PlanValueType("text") if self.schema is None else type_of_schema(self.schema)

    @property
    def max_answer_bytes(self) -> int:
        """Return the maximum size of the answer to this question in bytes.

        With ``each``, this is the maximum size of one value.
        """
        return REPLY_BYTES_PER_TOKEN * self.reply_tokens

    @property
    def read_bytes(self) -> int:
        """Return the maximum size in bytes of the value that one model call reads."""
        return BYTES_PER_TOKEN * self.tokens

    def answer_type_for(self, given: PlanValueType, step: str) -> PlanValueType:
        """Return the type of this question's answer for an input of type ``given``.

        Raises ConfigError if the question cannot be asked about such an input. The error names the
        plan step ``step``.
        """
        if given.kind == "part" and given.tokens > self.tokens:
            raise ConfigError(
                f"{step}: leaf '{self.label}' reads at most {self.tokens:,} tokens, but a part "
                f"may have {given.tokens:,}: raise its tokens, or split into smaller parts"
            )
        if not self.each:
            return self.type
        if given.kind not in ("part", "any") or (given.kind == "part" and not given.has_records):
            raise ConfigError(
                f"{step}: leaf '{self.label}' gives one value for each record, but {given} has no "
                "records: split by lines, records or sentences"
            )
        return list_of(self.type)

    def request_prompt(self, question: str, given: Any, *, is_preview: bool = False) -> str:
        """Return the prompt that asks this question about a value, for example a part of a text."""
        asked = self.prompt.replace(QUESTION, question)
        return f"{asked}\n\n{self._format_item(given, is_preview)}"

    def _format_item(self, given: Any, is_preview: bool) -> str:
        if not isinstance(given, ContextPart):
            return render_for_prompt(given)
        if self.each:
            text = given.numbered()
        else:
            text = given.preview if is_preview and given.preview else given.text
        return f"[{given.place}]\n{text}"

    def answer_kind(self, given: Any) -> AnswerSchema | None:
        """Return the type and limits of the answer for a particular input, or None for plain
        text."""
        if self.schema is None:
            return None
        if self.each and isinstance(given, ContextPart):
            return _each_kind(self, len(given.records))
        return _answer_schema(self)

    def max_reply_tokens(self, given: Any) -> int:
        """Return the maximum number of reply tokens for a question about this value."""
        if self.each and isinstance(given, ContextPart):
            return _MORE_TOKENS + self.reply_tokens * max(1, len(given.records))
        return self.reply_tokens

    def request_text(self, question: str, given: Any, *, is_preview: bool = False) -> str:
        """Return the full text of the model request that asks this question about a value.

        It includes instructions for the format of the answer.
        """
        prompt = self.request_prompt(question, given, is_preview=is_preview)
        return with_answer_format(prompt, self.answer_kind(given))


def render_for_prompt(value: Any) -> str:
    """Convert a value to text for a prompt.

    Strings stay as they are, lists of strings are joined with separators, and other values become
    JSON.
    """
    if isinstance(value, str):
        return value
    if isinstance(value, ContextPart):
        return f"[{value.place}]\n{value.text}"
    if (
        isinstance(value, Sequence)
        and value
        and all(isinstance(v, str | ContextPart) for v in value)
    ):
        return _BETWEEN.join(map(render_for_prompt, value))
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return "\n".join(msgspec.json.encode(each).decode() for each in value)
    return msgspec.json.encode(value).decode()


BETWEEN_BYTES = num_bytes(_BETWEEN)


@functools.lru_cache(256)
def _parse_schema(schema: bytes) -> AnswerSchema:
    # A plan may come from a file, a journal or a session, so its schemas are bounded in size and
    # in the time of their checks.
    return to_answer_schema(msgspec.json.decode(schema), trusted=False)


def _base_schema(schema: Any) -> AnswerSchema:
    try:
        return _parse_schema(msgspec.json.encode(schema))
    except (TypeError, UnicodeEncodeError, RecursionError) as error:
        raise ConfigError(
            f"the schema of a leaf cannot be written as JSON ({error}): use only plain JSON values"
        ) from None


def _answer_schema(leaf: Leaf) -> AnswerSchema:
    base, most = _base_schema(leaf.schema), leaf.max_answer_bytes

    def convert(value: Any) -> Any:
        found = base.convert(value)
        _check_size(found, most)
        return found

    return AnswerSchema(base.schema, convert)


def _each_kind(leaf: Leaf, num: int) -> AnswerSchema:
    """Return the answer type of a question that is asked about each of ``num`` records.

    It is a list of exactly that many values.
    """
    base, most = _base_schema(leaf.schema), leaf.max_answer_bytes
    schema = {"type": "array", "items": base.schema, "minItems": num, "maxItems": num}

    def convert(value: Any) -> Any:
        if not isinstance(value, list | tuple):
            raise TypeMismatch(f"the value is a {type(value).__name__}, not a list")
        if len(value) != num:
            raise TypeMismatch(f"there are {len(value)} values, and {num} records: give one each")
        found = [base.convert(each) for each in value]
        for each in found:
            _check_size(each, most)
        return found

    return AnswerSchema(schema, convert)


def _check_size(value: Any, most: int) -> None:
    size = json_num_bytes(value)
    if size > most:
        raise TypeMismatch(f"the value has {size:,} bytes, and at most {most:,} are allowed")


def json_num_bytes(value: Any) -> int:
    """Return the size of a value in bytes when written as JSON.

    A string is counted with its escapes but without quotes, because it may become a key of a JSON
    object.
    """
    size = len(msgspec.json.encode(value))
    return size - 2 if isinstance(value, str) else size


def truncate_text(text: str, most: int) -> str:
    """Truncate text to at most ``most`` bytes, both in UTF-8 and as a JSON string."""
    text = shortened(text, most)
    while (size := json_num_bytes(text)) > most:
        text = shortened(text, min(num_bytes(text) - 1, num_bytes(text) * most // size))
    return text
