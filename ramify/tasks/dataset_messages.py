"""Converts dataset messages in the format of OpenAI's chat API to the messages of a model call.

    [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}, …]
    content may be a list of text parts; roles: system, developer, user, assistant, tool

This is used for the items of a task and for demonstrations. Images are rejected.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from ramify.types.message import Message, ToolCall


class _OpenAIChatFunction(msgspec.Struct):
    name: str
    arguments: Any = ""


class _OpenAIChatToolCall(msgspec.Struct):
    function: _OpenAIChatFunction
    id: str | None = None


class _TextPart(msgspec.Struct):
    text: str = ""
    type: str = "text"

    def __post_init__(self) -> None:
        if self.type != "text":
            raise ValueError(
                f"a part of a message has the type {self.type!r:.40}, and only text is read: leave "
                "it out, or describe it in a text part"
            )


class OpenAIChatMessage(msgspec.Struct):
    """One message of a dataset, in the format of OpenAI's chat API."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_OpenAIChatToolCall] | None = None
    tool_call_id: str | None = None
    weight: float | None = None
    """0 excludes this reply from training (demonstrations only)."""

    def to_message(self) -> Message:
        """Convert this message to a message of a model call."""
        content = self.content or ""
        return Message(
            "system" if self.role == "developer" else self.role,
            content if isinstance(content, str) else "".join(part.text for part in content),
            self.reasoning_content,
            tuple(_tool_call(index, each) for index, each in enumerate(self.tool_calls or ())),
            self.tool_call_id,
        )


def _tool_call(index: int, wire: _OpenAIChatToolCall) -> ToolCall:
    arguments: Any = wire.function.arguments
    if isinstance(arguments, Mapping):  # Parquet fills in the arguments of all other tools as None
        given = {name: value for name, value in arguments.items() if value is not None}
        arguments = msgspec.json.encode(given).decode()
    return ToolCall(wire.id or f"call_{index}", wire.function.name, str(arguments))


def convert_messages(given: Sequence[Any]) -> tuple[Message, ...]:
    """Convert chat messages, given as mappings, to messages of a model call.

    ``Message`` objects stay unchanged. Raises ValueError if a message is invalid.
    """
    return tuple(
        each if isinstance(each, Message) else msgspec.convert(each, OpenAIChatMessage).to_message()
        for each in given
    )
