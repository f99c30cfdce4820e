"""Client-side functions that the model may call in its answer.

They are the ``tools`` of a request and the ``tool_calls`` of an answer.

    tools ──> AnswerOrToolCallSchema ──> answer ─┬─ a text, or a value of the response format
                                               └─ {"tool_calls": [{"name": …, "arguments": {…}}]}

This module describes the functions to the model, in words that any model can follow, and checks the
arguments against their schemas before the client sees them. The functions run at the client: a run
ends with the calls, and the next request, which has the whole conversation, is a new run. The
option ``--mcp`` is for functions of the server's operator, which run during a run.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.engine.typed_answers import AnswerSchema, TypeMismatch, parse_json, to_answer_schema
from ramify.errors import ConfigError
from ramify.http_server.rejections import RequestRejected

_MOST = 128
"""Maximum number of functions in a request, as in OpenAI's API."""


class ClientFunctionTool(msgspec.Struct, frozen=True):
    """A function in the client's program that the model may ask the client to call."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of its arguments, an object; None if it takes no arguments."""


class RequestedToolCall(msgspec.Struct, frozen=True):
    """One call of a client's function that an answer requests."""

    name: str
    arguments: dict[str, Any]

    def arguments_json(self) -> str:
        """Return the arguments of the call as JSON text."""
        return msgspec.json.encode(self.arguments).decode()


class ClientToolCalls(msgspec.Struct, frozen=True):
    """An answer that consists of calls to the client's functions instead of a text."""

    tool_calls: tuple[RequestedToolCall, ...]


class AnswerOrToolCallSchema(AnswerSchema, frozen=True):
    """An answer type that lets the model call the client's functions instead of answering.

    The answer may be text or a value of the response format.
    """

    functions: tuple[ClientFunctionTool, ...]
    must_call: bool
    of_value: AnswerSchema | None
    """Type of an answer without function calls; None for a text."""

    @property
    def enforceable_schema(self) -> None:
        """None, because no model provider can enforce a choice between an answer and function
        calls.

        Providers cannot enforce a choice between a text and a value.
        """
        return None

    def parse_answer(self, text: str) -> Any:
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

    def json_only_instruction(self) -> str:
        return f"{self.instruction()} Reply with the answer alone."


def tool_call_answer_type(
    tools: Sequence[ClientFunctionTool],
    choice: Any,
    parallel: bool,
    schema: dict[str, Any] | None,
    schema_field: str,
) -> AnswerOrToolCallSchema | None:
    """Return an answer type that lets the model call the functions that the client offers.

    Returns None if the answer may call none of them.

    Raises RequestRejected, which names the invalid field.
    """
    named = _required_function(choice)
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
        of_value = None if schema is None else to_answer_schema(schema, trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param=schema_field) from None
    try:
        calls = to_answer_schema(_calls_schema(usable, parallel), trusted=False)
    except ConfigError as error:
        raise RequestRejected(str(error), param="tools") from None
    must_call = named is not None or choice == "required"

    def convert(value: Any) -> Any:
        is_call = isinstance(value, dict) and [*value] == ["tool_calls"]
        if is_call or must_call:
            return msgspec.convert(calls.convert(value), ClientToolCalls)
        if of_value is not None:
            return of_value.convert(value)
        return value if isinstance(value, str) else answer_json(value)

    return AnswerOrToolCallSchema(calls.schema, convert, usable, must_call, of_value)


def new_call_id() -> str:
    """Return a new random id for a function call."""
    return f"call_{uuid.uuid4().hex[:24]}"


def answer_json(value: Any) -> str:
    """Convert an answer to JSON text.

    A session may answer with a value other than text, such as a number. Raises TypeMismatch if the
    value cannot be converted.
    """
    try:
        return msgspec.json.encode(value).decode()
    except (TypeError, UnicodeEncodeError) as error:
        raise TypeMismatch(
            f"a value of type {type(value).__name__} is not text ({error})"
        ) from None


def _required_function(choice: Any) -> str | None:
    """Return the name of the function that the request's ``tool_choice`` requires.

    It accepts the formats of both APIs. Returns None if it requires no specific function.
    """
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


def _calls_schema(functions: Sequence[ClientFunctionTool], parallel: bool) -> dict[str, Any]:
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
