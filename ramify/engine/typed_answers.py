"""Turn the required type of an answer into a schema for the model and a validator of its answer.

``answer_type=`` accepts a msgspec ``Struct``, a dataclass, a pydantic model, any type that msgspec
supports (``list[int]``, ``dict[str, float]``, a ``Literal``), or a JSON schema. The model is shown
the schema. Its answer is checked, and if it does not match, the model is shown the error.

With ``cite=True``, the model answers ``{"answer": …, "citations": [{"source", "first_line",
"last_line", "quote"}]}``. A citation is valid only if its source exists, its lines exist and its
quote occurs in them. White space may differ between quote and text, but nothing else.

    context {"a.txt": "one\\ntwo words\\n"}
    source "a.txt", lines 2-2, quote "two  words"   -> valid
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from ramify.engine import observation_messages
from ramify.engine.reply_action_parsing import FinalAnswerText
from ramify.errors import ConfigError
from ramify.sandbox.guest.mapped_text import FileBackedText
from ramify.sources.document_parts import place_at_line
from ramify.sources.loaded_sources import DocumentPartLocation

T = TypeVar("T")

_CHOOSES = {"type", "enum", "const", "anyOf", "oneOf", "allOf", "$ref"}
"""Schema keywords that restrict which JSON types may occur."""

CITE_INSTRUCTION = (
    'Give FINAL a dict: {"answer": your answer, "citations": [{"source": a key of `context` ("context" if it is one '
    'text), "first_line": n, "last_line": m, "quote": the words themselves}]}. Lines count from 1. Cite every '
    "claim; each quote is checked against those lines."
)
_FENCED = re.compile(r"```(?:json)?[^\S\n]*\n(.*?)```", re.DOTALL)


class TypeMismatch(Exception):
    """Raised if a value does not match the required type.

    The message names the position and the reason, and is shown to the model.
    """


class AnswerSchema(msgspec.Struct, frozen=True):
    """The required type of an answer: a JSON schema for the model and a function that checks the
    answer.

    The check also converts the answer.
    """

    schema: dict[str, Any]
    """JSON schema that the model sees."""
    convert: Callable[[Any], Any]
    """Converts a plain value (dicts, lists, text, …) to the typed one. Raises TypeMismatch."""

    def parse_answer(self, text: str) -> Any:
        """Parse a reply as a value of the required type.

        The reply is parsed as JSON, as JSON in a Markdown fence, or as plain text if the text
        matches the type, as ``Paris`` matches a string.
        """
        try:
            return self.convert(parse_json(text))
        except TypeMismatch:
            if not self.schema.keys() & _CHOOSES:  # every text would fit
                raise
            try:
                return self.convert(text.strip())
            except TypeMismatch:
                pass
            raise

    def convert_prose(self, text: str) -> Any:
        """Try to read a typed answer from prose that was not marked as an answer.

        Return None if it is not a value of this type, or if any text would match the type.
        """
        with contextlib.suppress(TypeMismatch):
            value = self.parse_answer(text)
            try:
                self.convert("I will look at the data first.")
            except TypeMismatch:
                return value
        return None

    def literal_value(self, text: str) -> Any:
        """Return the value that the text inside ``FINAL(…)`` denotes, before it is converted.

        Tries a Python literal, a literal inside a quoted string, and plain text. If none matches
        the type, return the literal, so that the mismatch can be reported.
        """
        value = FinalAnswerText(text).parsed_value()
        quoted = FinalAnswerText(value).parsed_value() if isinstance(value, str) else value
        for reading in (value, quoted, text):
            try:
                self.convert(reading)
            except TypeMismatch:
                continue
            return reading
        return value

    @property
    def enforceable_schema(self) -> dict[str, Any] | None:
        """The JSON schema that a provider can enforce for a plain reply, or None."""
        return self.schema

    def instruction(self) -> str:
        return f"The answer must be a value of this JSON schema:\n{json.dumps(self.schema)}"

    def json_only_instruction(self) -> str:
        """Return the instruction that a reply must consist only of the answer as JSON."""
        return f"{self.instruction()} Reply with the JSON value alone."


def to_answer_schema(kind: Any, *, trusted: bool = True) -> AnswerSchema:
    """Return the answer type for ``kind``, which is a Python type or a JSON schema.

    Raises ConfigError if it is neither, or if an untrusted schema exceeds the limits of
    ``json_schema_checking.py``.
    """
    if isinstance(kind, AnswerSchema):
        return kind
    if isinstance(kind, Mapping):
        return _of_schema(dict(kind), trusted)
    if _is_pydantic(kind):
        return AnswerSchema(kind.model_json_schema(), _pydantic_converter(kind.model_validate))
    if any(map(_is_pydantic, _contained_types(kind))):
        adapter = sys.modules["pydantic"].TypeAdapter(kind)
        return AnswerSchema(adapter.json_schema(), _pydantic_converter(adapter.validate_python))
    try:
        schema = _inline_top_reference(msgspec.json.schema(kind))
    except TypeError as error:
        why = " ".join(str(error).split())
        raise ConfigError(
            f"answer_type {kind!r} is not understood ({why}): give a msgspec, pydantic or "
            "dataclass type, a type such as "
            "list[int], or a JSON schema as a dict"
        ) from None
    return AnswerSchema(schema, _msgspec_converter(kind))


def parse_json(text: str) -> Any:
    """Return the JSON value in a model's reply.

    The JSON may be in a Markdown fence, alone, or surrounded by text. Raises TypeMismatch if there
    is none.
    """
    fences = _FENCED.findall(text)
    bare = text[min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=0) :].strip()
    error: Exception
    for candidate in (
        text.strip(),
        *fences[::-1],
        bare[: max(bare.rfind("}"), bare.rfind("]")) + 1],
    ):
        try:
            return json.loads(candidate)
        except (ValueError, RecursionError) as failure:  # RecursionError: very deep nesting
            error = failure
    raise TypeMismatch(f"the reply is not JSON ({error})")


def _of_schema(schema: dict[str, Any], trusted: bool) -> AnswerSchema:
    from ramify.engine.json_schema_checking import JsonSchema, SchemaCheckTooLong

    checked = JsonSchema(schema, trusted=trusted)

    def convert(value: Any) -> Any:
        plain = _to_plain_data(value)
        try:
            failure = checked.find_mismatch(plain)
        except SchemaCheckTooLong:
            raise TypeMismatch(
                "checking the value against this schema takes too many steps: give a smaller "
                "value, or nest fewer $ref and anyOf"
            ) from None
        if failure is not None:
            raise TypeMismatch(failure)
        return _check_writable(plain)

    return AnswerSchema(schema, convert)


def _msgspec_converter(kind: Any) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(_check_writable(_to_plain_data(value)), kind)
        except msgspec.ValidationError as error:
            raise TypeMismatch(str(error)) from None
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise _uncheckable_error(error) from None

    return convert


def _is_pydantic(kind: Any) -> bool:
    return hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate")


def _contained_types(kind: Any) -> Iterator[Any]:
    """Yield the types nested at any depth inside ``kind``.

    For ``list[A | None]``, these include ``A`` and ``None``.
    """
    for part in typing.get_args(kind):
        yield part
        yield from _contained_types(part)


def _pydantic_converter(validate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return validate(_check_writable(_to_plain_data(value)))
        except ValueError as error:  # pydantic's ValidationError is one
            raise TypeMismatch(str(error)[:1000]) from None
        except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise _uncheckable_error(
                error
            ) from None  # a validator that does not expect such a value

    return convert


def _uncheckable_error(error: Exception) -> TypeMismatch:
    return TypeMismatch(f"the value cannot be checked ({type(error).__name__}: {str(error)[:300]})")


def _check_writable(plain: Any) -> Any:
    """Check that ``plain`` can be written as JSON, and return it unchanged.

    Raises TypeMismatch otherwise, for example for an integer with thousands of digits.
    """
    if type(plain) is str:
        return plain
    try:
        msgspec.json.decode(msgspec.json.encode(plain))
    except UnicodeEncodeError:  # a lone surrogate, which a journal writes as an escape
        pass
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise _uncheckable_error(error) from None
    return plain


def _to_plain_data(value: Any) -> Any:
    """Convert ``value`` to plain data that can be written as JSON.

    Tuples and sets become lists, and keys that are not text become text. Raises TypeMismatch if the
    value cannot be converted.
    """
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
        raise TypeMismatch(
            f"a value of type {type(value).__name__} has no JSON form ({error})"
        ) from None


def _inline_top_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """Replace a top-level ``$ref`` of a schema with the definition that it names.

    msgspec writes such a reference for a Struct, but providers require an object at the top level.
    """
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    definitions = dict(schema.get("$defs", {}))
    if not name or name not in definitions or f"#/$defs/{name}" in json.dumps(definitions):
        return schema
    top = definitions.pop(name)
    return {**top, "$defs": definitions} if definitions else dict(top)


class Citation(msgspec.Struct, frozen=True, omit_defaults=True):
    """A quoted passage of the context that supports the answer.

    Example:
        Citation(source="server.log", first_line=3, last_line=3, quote="web-3 ERROR")
    """

    source: str
    """Key of the cited text in the context; ``"context"`` if the context is a single text."""
    first_line: int
    """First cited line, counted from 1."""
    last_line: int
    """Last cited line (inclusive)."""
    quote: str
    place: str = ""
    """Position of the first line in a document: ``page 3``, ``slide 2, Risks``. Not written by the
    model."""


class CitedAnswer(msgspec.Struct, Generic[T], frozen=True):
    """An answer with the citations that support it."""

    answer: T
    citations: tuple[Citation, ...]


def cited_type(
    kind: Any, context: Any, places: Mapping[str, Sequence[DocumentPartLocation]] = {}
) -> AnswerSchema:
    """Return the type of an answer whose citations are checked against ``context``.

    ``kind`` is the type of the answer itself. ``places`` describes the structure of each document,
    such as its pages, so that a citation can name its page.
    """
    import copy

    inner = None if kind is None else to_answer_schema(kind)
    outer = to_answer_schema(CitedAnswer[Any])
    schema = copy.deepcopy(outer.schema)
    del schema["$defs"]["Citation"]["properties"]["place"]
    if inner is not None:
        schema["properties"] = {**schema["properties"], "answer": inner.schema}

    def convert(value: Any) -> Any:
        cited: CitedAnswer[Any] = outer.convert(value)
        if not cited.citations:
            raise TypeMismatch("there are no citations; give at least one")
        for index, citation in enumerate(cited.citations):
            problem = citation_error(citation, context)
            if problem:
                raise TypeMismatch(f"citation {index}: {problem}")
        return CitedAnswer(
            inner.convert(cited.answer) if inner else cited.answer,
            tuple(
                msgspec.structs.replace(
                    each, place=place_at_line(places.get(each.source, ()), each.first_line)
                )
                for each in cited.citations
            ),
        )

    return AnswerSchema(schema, convert)


def citation_error(citation: Citation, context: Any) -> str | None:
    """Return the reason why ``context`` does not support ``citation``, or None if it does."""
    text = _source(citation.source, context)
    if text is None:
        return observation_messages.NO_SOURCE.format(name=citation.source)
    # Split as editors and grep count lines; splitlines() recognizes more line ends than they do.
    lines = text.removesuffix("\n").split("\n") if isinstance(text, str) else text.splitlines()
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


def _source(name: str, context: Any) -> str | FileBackedText | None:
    if isinstance(context, str | FileBackedText):
        return context if name == "context" else None
    if isinstance(context, Mapping):
        value = context.get(
            name, next((item for key, item in context.items() if str(key) == name), None)
        )
        return value if isinstance(value, str | FileBackedText) else None
    if isinstance(context, list | tuple) and name.isdecimal() and int(name) < len(context):
        value = context[int(name)]
        return value if isinstance(value, str | FileBackedText) else None
    return None
