"""Long replies are read outside of this process, with the same result."""

from __future__ import annotations

import asyncio

import pytest

from ramify.engine.nonblocking_reply_parsing import read_reply
from ramify.engine.prompt_scaffold import BARE, DEFAULT, RETOOL, Scaffold
from ramify.engine.reply_action_parsing import prose_of
from ramify.types.message import Message, ToolCall

LONG = "\n".join(f"line {n} of an explanation" for n in range(10_000))


@pytest.mark.parametrize("scaffold", [DEFAULT, BARE, RETOOL], ids=lambda each: each.name)
@pytest.mark.parametrize(
    "content",
    [
        LONG,
        f"{LONG}\n```repl\nx = 1\n```\nFINAL(x)",
        f"<think>{LONG}</think>\n```python\nprint('é 😀')\n```",
        f"<code>\n# {LONG[:120_000]!r}\n</code>",
        f"half \ud800 {LONG}",
    ],
)
@pytest.mark.parametrize("is_cut", [False, True])
def test_long_reply_is_read_like_a_short_one(
    scaffold: Scaffold, content: str, is_cut: bool
) -> None:
    message = Message("assistant", content)
    read = asyncio.run(read_reply(scaffold, message, is_cut))
    safe = Message("assistant", content.replace("\ud800", "\\ud800"))
    assert read.action == scaffold.read(safe, is_cut)
    assert read.prose == prose_of(safe.content)


def test_many_tool_calls_are_read_outside() -> None:
    calls = tuple(ToolCall(f"c{n}", "python", f'{{"code": "x = {n}"}}') for n in range(150))
    message = Message("assistant", "", tool_calls=calls)
    read = asyncio.run(read_reply(DEFAULT, message))
    assert read.action == DEFAULT.read(message)
    assert read.prose is not None


def test_short_reply_is_read_in_place() -> None:
    message = Message("assistant", "```repl\nx = 1\n```")
    read = asyncio.run(read_reply(DEFAULT, message))
    assert (read.action.codes, read.prose) == (("x = 1",), None)


@pytest.mark.parametrize("depth", [50_000, 200_000], ids=["in place", "outside"])
def test_arguments_that_are_nested_too_deeply_are_not_json(depth: int) -> None:
    call = ToolCall("a", "python", "[" * depth)
    read = asyncio.run(read_reply(DEFAULT, Message("assistant", "", tool_calls=(call,))))
    assert read.action.codes == ()
    assert "the arguments of tool call 'python' are not JSON" in read.action.ignored[0]
