"""Functions of the caller's that a run may ask to have called: ``tools`` of a request,
``tool_calls`` of its answer.

    tools ──> Offer: the answer is a text (or meets the response format), or {"tool_calls": [{"name": …, "arguments": {…}}]}
Decides how they are told of, in words that any model reads, and that arguments are checked against their schemas before the
caller sees them. The functions run at the caller's: a run ends by asking for them, and the next request, which has the whole
conversation, is a run of its own. Functions of the operator's, which run here in the middle of a run, are ``--mcp``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.engine.typed import AnswerType, TypeMismatch, answer_type, parse_json
from ramify.errors import ConfigError
from ramify.serve.web import RequestRejected

_MOST = 128
"""Functions of one request, as OpenAI has it."""


class OfferedFunction(msgspec.Struct, frozen=True):
    """One function that is offered."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; None: it takes none."""


class RequestedToolCall(msgspec.Struct, frozen=True):
    """One call that is asked for."""

    name: str
    arguments: dict[str, Any]

    def written(self) -> str:
        return msgspec.json.encode(self.arguments).decode()


class ToolCallAnswer(msgspec.Struct, frozen=True):
    """An answer that asks for calls."""

    tool_calls: tuple[RequestedToolCall, ...]


class ToolOffer(AnswerType, frozen=True):
    """The answer is a text or a value, or calls of functions."""

    functions: tuple[OfferedFunction, ...]
    must_call: bool
    of_value: AnswerType | None
    """What an answer that is none must meet; None: a text."""

    @property
    def enforced(self) -> None:
        """Providers enforce no choice between a text and a value."""
        return None

    def read(self, text: str) -> Any:
        try:
            value = parse_json(text)
        except TypeMismatch:
            if self.must_call or self.of_value is not None:
                raise
            return text.strip()
        is_call = isinstance(value, dict) and [*value] == ["tool_calls"]
        return self.convert(
            value if is_call or self.must_call or self.of_value is not None else text.strip()
        )

    def instruction(self) -> str:
        lines = [
            f"- {each.name}: {' '.join((each.description or 'no description').split())} "
            f"Arguments: {json.dumps(each.parameters or {'type': 'object'})}"
            for each in self.functions
        ]
        answer = (
            "a text"
            if self.of_value is None
            else f"a value of this JSON schema: {json.dumps(self.of_value.schema)}"
        )
        otherwise = (
            "At least one must be called."
            if self.must_call
            else f"Otherwise the answer is {answer}."
        )
        return "\n".join(
            [
                "Whoever asks has these functions. They are not in your session; they are called "
                "for you once you are done:",
                *lines,
                'To have some called, let the final answer be {"tool_calls": [{"name": "…", "arguments": {…}}]} and nothing '
                f"else: their results come with the next question. {otherwise}",
            ]
        )

    def alone(self) -> str:
        return f"{self.instruction()} Reply with the answer alone."


def offer_of(
    tools: Sequence[OfferedFunction],
    choice: Any,
    parallel: bool,
    schema: dict[str, Any] | None,
    schema_field: str,
) -> ToolOffer | None:
    """What a request offers; None where nothing may be called. Raises Rejected that names the
    field."""
    named = _named(choice)
    if choice == "none" or (not tools and named is None and choice != "required"):
        return None
    if not tools:
        raise RequestRejected(
            "there are no tools to choose from: give some, or leave tool_choice out",
            param="tool_choice",
        )
    names = [each.name for each in tools]
    if len(set(names)) < len(names) or len(names) > _MOST or not all(names):
        raise RequestRejected(
            f"{len(names)} tools: give at most {_MOST}, each with a name of its own", param="tools"
        )
    if named is not None and named not in names:
        raise RequestRejected(
            f"there is no tool {named!r:.80}: give one of {', '.join(names)}", param="tool_choice"
        )
    usable = tuple(each for each in tools if named in (None, each.name))
    try:
        of_value = answer_type(schema, trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param=schema_field) from None
    try:
        calls = answer_type(_schema(usable, parallel), trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param="tools") from None
    assert calls is not None
    must_call = named is not None or choice == "required"

    def convert(value: Any) -> Any:
        is_call = isinstance(value, dict) and [*value] == ["tool_calls"]
        if is_call or must_call:
            return msgspec.convert(calls.convert(value), ToolCallAnswer)
        if of_value is not None:
            return of_value.convert(value)
        return value if isinstance(value, str) else answer_text(value)

    return ToolOffer(calls.schema, convert, usable, must_call, of_value)


def new_id() -> str:
    """Of one call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def answer_text(value: Any) -> str:
    """A value as the text that is asked for: a session's answer may well be a number."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise TypeMismatch(f"a value of type {type(value).__name__} is no text ({error})") from None


def _named(choice: Any) -> str | None:
    """The one function that a choice names, in either API's words."""
    if choice is None or choice in ("auto", "none", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str):
            return name
    raise RequestRejected(
        f"tool_choice={choice!r:.100} is not supported: give auto, none, required or one function",
        param="tool_choice",
    )


def _schema(functions: Sequence[OfferedFunction], parallel: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": each.name},
                "arguments": each.parameters or {"type": "object"},
            },
        }
        for each in functions
    ]
    listed = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        **({} if parallel else {"maxItems": 1}),
    }
    return {
        "type": "object",
        "required": ["tool_calls"],
        "additionalProperties": False,
        "properties": {"tool_calls": listed},
    }
