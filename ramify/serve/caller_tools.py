"""Client functions that an answer may call: ``tools`` in a request, ``tool_calls`` in its answer.

    tools ──> AnswerOrToolCallType ──> answer ─┬─ a text, or a value of the response format
                                               └─ {"tool_calls": [{"name": …, "arguments": {…}}]}

This file decides how the functions are described to the model, in words that any model can follow,
and checks the arguments against their schemas before the client sees them. The functions run at the
client: a run ends with the calls, and the next request, which has the whole conversation, is a new
run. Not here: functions of the server's operator that run during a run (the option ``--mcp``).
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.engine.typed import AnswerType, TypeMismatch, answer_type, parse_json
from ramify.errors import ConfigError
from ramify.http_server.rejections import RequestRejected

_MOST = 128
"""Maximum number of functions in a request, the same as OpenAI's."""


class ClientFunctionTool(msgspec.Struct, frozen=True):
    """Client function that an answer may call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, which form an object; None if it takes no arguments."""


class RequestedToolCall(msgspec.Struct, frozen=True):
    """One function call in an answer."""

    name: str
    arguments: dict[str, Any]

    def written(self) -> str:
        """Arguments as JSON text."""
        return msgspec.json.encode(self.arguments).decode()


class ToolCallsAsAnswer(msgspec.Struct, frozen=True):
    """Answer that consists of function calls."""

    tool_calls: tuple[RequestedToolCall, ...]


class AnswerOrToolCallType(AnswerType, frozen=True):
    """Answer type that accepts a text, a value of the response format, or function calls."""

    functions: tuple[ClientFunctionTool, ...]
    must_call: bool
    of_value: AnswerType | None
    """Type of an answer without function calls; None for a text."""

    @property
    def enforced(self) -> None:
        """Always None: providers cannot enforce a choice between a text and a value."""
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
            f"- {function.name}: {' '.join((function.description or 'no description').split())} "
            f"Arguments: {json.dumps(function.parameters or {'type': 'object'})}"
            for function in self.functions
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
                'To have some called, let the final answer be {"tool_calls": [{"name": "…", '
                '"arguments": {…}}]} and nothing '
                f"else: their results come with the next question. {otherwise}",
            ]
        )

    def alone(self) -> str:
        return f"{self.instruction()} Reply with the answer alone."


def offer_of(
    tools: Sequence[ClientFunctionTool],
    choice: Any,
    parallel: bool,
    schema: dict[str, Any] | None,
    schema_field: str,
) -> AnswerOrToolCallType | None:
    """Return the functions that a request offers; None if none may be called.

    Raises RequestRejected, which names the wrong field.
    """
    named = _named(choice)
    if choice == "none" or (not tools and named is None and choice != "required"):
        return None
    if not tools:
        raise RequestRejected(
            "tool_choice needs tools: give some, or remove tool_choice",
            param="tool_choice",
        )
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names) or len(names) > _MOST or not all(names):
        raise RequestRejected(
            f"{len(names)} tools: give at most {_MOST}, each with a unique name", param="tools"
        )
    if named is not None and named not in names:
        raise RequestRejected(
            f"unknown tool {named!r:.80}: give one of {', '.join(names)}", param="tool_choice"
        )
    usable = tuple(tool for tool in tools if named in (None, tool.name))
    try:
        of_value = None if schema is None else answer_type(schema, trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param=schema_field) from None
    try:
        calls = answer_type(_schema(usable, parallel), trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param="tools") from None
    must_call = named is not None or choice == "required"

    def convert(value: Any) -> Any:
        is_call = isinstance(value, dict) and [*value] == ["tool_calls"]
        if is_call or must_call:
            return msgspec.convert(calls.convert(value), ToolCallsAsAnswer)
        if of_value is not None:
            return of_value.convert(value)
        return value if isinstance(value, str) else answer_text(value)

    return AnswerOrToolCallType(calls.schema, convert, usable, must_call, of_value)


def new_id() -> str:
    """New id for a function call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def answer_text(value: Any) -> str:
    """Convert a value to JSON text, because a session may answer with a number, for example."""
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise TypeMismatch(f"a value of type {type(value).__name__} is no text ({error})") from None


def _named(choice: Any) -> str | None:
    """Name of the function that ``tool_choice`` requires, in either API's format, or None."""
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


def _schema(functions: Sequence[ClientFunctionTool], parallel: bool) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "required": ["name", "arguments"],
            "additionalProperties": False,
            "properties": {
                "name": {"const": function.name},
                "arguments": function.parameters or {"type": "object"},
            },
        }
        for function in functions
    ]
    array = {
        "type": "array",
        "minItems": 1,
        "items": {"anyOf": calls},
        **({} if parallel else {"maxItems": 1}),
    }
    return {
        "type": "object",
        "required": ["tool_calls"],
        "additionalProperties": False,
        "properties": {"tool_calls": array},
    }
