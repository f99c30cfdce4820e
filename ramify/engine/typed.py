"""Typed answers: a type or JSON schema in, a check and a schema out.

``answer_type=`` takes a msgspec ``Struct``, a dataclass, a pydantic model, any type that msgspec knows (``list[int]``,
``dict[str, float]``, a ``Literal``), or a JSON schema. The model is shown the schema; what it gives is checked, and
where it does not fit, the error is shown to it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ramify.errors import ConfigError

_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)


class Mismatch(Exception):
    """A value does not fit its type; ``str()`` says where and why, for the model to read."""


class AnswerType(msgspec.Struct, frozen=True):
    """A checked type of answer."""

    schema: dict[str, Any]
    """What the model is shown."""
    convert: Callable[[Any], Any]
    """A plain value (dicts, lists, text …) to the typed one. Raises Mismatch."""

    def read(self, text: str) -> Any:
        """The typed value that a reply's text holds: all of it, a JSON fence in it, or the text itself for a string."""
        try:
            value = parse_json(text)
        except Mismatch:
            if self.schema.get("type") != "string":
                raise
            value = text.strip()
        return self.convert(value)

    def instruction(self) -> str:
        return f"The answer must be a value of this JSON schema:\n{json.dumps(self.schema)}"


def answer_type(kind: Any) -> AnswerType | None:
    """The check for ``kind``. Raises ConfigError for what is neither a type nor a valid JSON schema."""
    if kind is None or isinstance(kind, AnswerType):
        return kind
    if isinstance(kind, Mapping):
        return _of_schema(dict(kind))
    if hasattr(kind, "model_json_schema") and hasattr(kind, "model_validate"):
        return AnswerType(kind.model_json_schema(), _pydantic(kind))
    try:
        schema = _inlined(msgspec.json.schema(kind))
    except TypeError as error:
        raise ConfigError(
            f"answer_type {kind!r} is not understood ({error}): give a msgspec, pydantic or dataclass type, a type such "
            "as list[int], or a JSON schema as a dict"
        ) from None
    return AnswerType(schema, _msgspec(kind))


def parse_json(text: str) -> Any:
    """The JSON value in a model's reply, in a fence or bare."""
    fences = _FENCED.findall(text)
    bare = text[min((i for i in (text.find("{"), text.find("[")) if i >= 0), default=0) :].strip()
    for candidate in (text.strip(), *fences[::-1], bare[: max(bare.rfind("}"), bare.rfind("]")) + 1]):
        try:
            return json.loads(candidate)
        except ValueError as failure:
            error = failure
    raise Mismatch(f"the reply is not JSON ({error})")


def _of_schema(schema: dict[str, Any]) -> AnswerType:
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path) or "its top"
        raise ConfigError(f"the JSON schema is not valid at {where}: {error.message}") from None
    validator = kind(schema)

    def convert(value: Any) -> Any:
        plain = _plain(value)
        failure = jsonschema.exceptions.best_match(validator.iter_errors(plain))
        if failure is not None:
            raise Mismatch(f"at {failure.json_path}: {failure.message[:500]}")
        return plain

    return AnswerType(schema, convert)


def _msgspec(kind: Any) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return msgspec.convert(_plain(value), kind)
        except msgspec.ValidationError as error:
            raise Mismatch(str(error)) from None

    return convert


def _pydantic(kind: Any) -> Callable[[Any], Any]:
    def convert(value: Any) -> Any:
        try:
            return kind.model_validate(_plain(value))
        except ValueError as error:  # pydantic's ValidationError is one
            raise Mismatch(str(error)[:1000]) from None

    return convert


def _plain(value: Any) -> Any:
    """``value`` as JSON would have it: tuples and sets as lists, other keys than text as text."""
    try:
        return msgspec.to_builtins(value, str_keys=True)
    except (TypeError, ValueError) as error:
        raise Mismatch(f"a value of type {type(value).__name__} has no JSON form ({error})") from None


def _inlined(schema: dict[str, Any]) -> dict[str, Any]:
    """msgspec puts a Struct behind a ``$ref`` at the top; providers want the object itself there."""
    name = str(schema.get("$ref", "")).removeprefix("#/$defs/")
    definitions = dict(schema.get("$defs", {}))
    if not name or name not in definitions or f"#/$defs/{name}" in json.dumps(definitions):
        return schema
    top = definitions.pop(name)
    return {**top, "$defs": definitions} if definitions else dict(top)
