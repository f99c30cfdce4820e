"""Demonstrations from a file of conversations: rows of JSONL or Parquet with ``messages``.

    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}],
     "reward": 1.0}

The replies of the assistant are learned, except those with ``"weight": 0``. ``reward``, or
``rewards`` by name, is what ``sft.algorithm.min_reward`` compares with. Messages are learned as
they are: the first one should be in the form that the scaffold gives a rollout. An error names the
row. Not here: how conversations are tokenized (``sft_data.py``) and packed (``pack.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Literal

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.data import rows_of
from ramify.types.message import Message, Reply, ToolCall
from ramify.types.trajectory import Call, Stop, Trajectory, Turn


class _Function(msgspec.Struct):
    name: str
    arguments: Any = ""


class _ToolCall(msgspec.Struct):
    function: _Function
    id: str | None = None


class _TextPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class _WireMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[_TextPart] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None
    weight: float | None = None


class _Row(msgspec.Struct):
    messages: list[_WireMessage]
    reward: float | None = None
    rewards: dict[str, float | None] | None = None


def message_demonstrations(source: Any, num: int) -> Iterator[Trajectory]:
    """The first ``num`` rows of ``source`` as demonstrations. Raises ConfigError for a row in
    another form, and SourceError for a file that cannot be read."""
    for number, row in enumerate(islice(iter(rows_of(source)), num)):
        try:
            yield _trajectory(f"{number}", msgspec.convert(row, _Row))
        except (msgspec.ValidationError, ValueError) as error:
            columns = ", ".join(map(str, row))
            raise ConfigError(
                f"sft.demos={source}, row {number}: not a conversation: {error}; it has the "
                f"columns {columns}, and needs messages, each with role and content"
            ) from None


def _trajectory(id: str, row: _Row) -> Trajectory:
    messages = [_message(each) for each in row.messages]
    learned = [each.role == "assistant" and each.weight != 0 for each in row.messages]
    if not any(learned) or learned[0]:
        raise ValueError(
            "its first message is the assistant's" if any(learned) else "it has no reply to learn"
        )
    call = Call("0", "rlm", "demonstrator", 0, messages[0].content)
    call.turns = list(_turns(messages, learned))
    call.stop = Stop.FINAL
    given = row.rewards or ({} if row.reward is None else {"reward": row.reward})
    rewards = {name: value for name, value in given.items() if value is not None}
    question = next((each.content for each in messages if each.role == "user"), "")
    return Trajectory(
        f"demo/{id}", question, task=id, calls=[call], stop=Stop.FINAL, rewards=rewards
    )


def _turns(messages: Sequence[Message], learned: Sequence[bool]) -> Iterator[Turn]:
    begin = 0
    for index, message in enumerate(messages):
        if learned[index]:
            yield Turn(begin, tuple(messages[begin:index]), Reply(message))
            begin = index + 1


def _message(wire: _WireMessage) -> Message:
    content = wire.content or ""
    return Message(
        "system" if wire.role == "developer" else wire.role,
        content if isinstance(content, str) else "".join(part.text for part in content),
        wire.reasoning_content,
        tuple(_tool_call(index, each) for index, each in enumerate(wire.tool_calls or ())),
        wire.tool_call_id,
    )


def _tool_call(index: int, wire: _ToolCall) -> ToolCall:
    arguments: Any = wire.function.arguments
    if isinstance(arguments, Mapping):  # Parquet gives every column of any call
        given = {name: value for name, value in arguments.items() if value is not None}
        arguments = msgspec.json.encode(given).decode()
    return ToolCall(wire.id or f"call_{index}", wire.function.name, str(arguments))
