"""Parsing a model's message into code to run, a final answer, and notes about ignored parts."""

from __future__ import annotations

import json

import pytest

from ramify.engine.action import FinalAnswer, ParsedAction, read_action
from ramify.types.message import Message, ToolCall

UNCLOSED = "the last code fence was not closed; it was run up to the end of the message"

CASES = {
    "repl fence": ("Look:\n```repl\nx = 1\n```\ndone", ParsedAction(codes=("x = 1",))),
    "python fence": ("```python\nx = 1\n```", ParsedAction(codes=("x = 1",))),
    "py fence with words behind": ("```py title=a\nx = 1\n```", ParsedAction(codes=("x = 1",))),
    "tildes": ("~~~python\nx = 1\n~~~", ParsedAction(codes=("x = 1",))),
    "two fences": ("```repl\na\n```\nthen\n```repl\nb\n```", ParsedAction(codes=("a", "b"))),
    "unclosed fence": (
        "```repl\nx = 1\ny = 2",
        ParsedAction(codes=("x = 1\ny = 2",), ignored=(UNCLOSED,)),
    ),
    "fence inside a string": (
        '```repl\ns = """\n```\ninner\n```\n"""\nprint(s)\n```',
        ParsedAction(codes=('s = """\n```\ninner\n```\n"""\nprint(s)',)),
    ),
    "unfinished string": ('```repl\ns = """\nabc\n```\nend', ParsedAction(codes=('s = """\nabc',))),
    "longer fence": (
        "````repl\ns = '''\n```\n'''\n````",
        ParsedAction(codes=("s = '''\n```\n'''",)),
    ),
    "other language": (
        "```js\nx\n```",
        ParsedAction(ignored=("a fence marked 'js' was not run; use ```repl",)),
    ),
    "no language": (
        "```\nx\n```",
        ParsedAction(ignored=("an unmarked fence was not run; use ```repl",)),
    ),
    "empty fence": ("```repl\n\n```", ParsedAction()),
    "text": ("I think it is 7.", ParsedAction()),
    "final": ("FINAL(42)", ParsedAction(final=FinalAnswer("42"))),
    "final with parentheses": (
        "So:\nFINAL(f(x) and (y))\n",
        ParsedAction(final=FinalAnswer("f(x) and (y)")),
    ),
    "final string with a parenthesis": ('FINAL("a) b")', ParsedAction(final=FinalAnswer('"a) b"'))),
    "final over lines": ("FINAL(one\ntwo)", ParsedAction(final=FinalAnswer("one\ntwo"))),
    "final never closed": ("FINAL(one\ntwo", ParsedAction(final=FinalAnswer("one\ntwo"))),
    "final in bold": ("**FINAL(x y)**", ParsedAction(final=FinalAnswer("x y"))),
    "final var": ("FINAL_VAR('total')", ParsedAction(final=FinalAnswer("total", variable=True))),
    "final in a sentence": ("I will call FINAL(x) later.", ParsedAction()),
    "final in a fence is code": ("```repl\nFINAL(3)\n```", ParsedAction(codes=("FINAL(3)",))),
    "thinking is no action": (
        "<think>\n```repl\nx\n```\nFINAL(1)</think>\nFINAL(2)",
        ParsedAction(final=FinalAnswer("2")),
    ),
    "thinking whose beginning the server kept": (
        "```repl\nx\n```\n</think>\n```repl\ny\n```",
        ParsedAction(codes=("y",)),
    ),
    "the word <think> in code": (
        "```repl\nx = '<think>'\n```\nFINAL(1)",
        ParsedAction(("x = '<think>'",), final=FinalAnswer("1")),
    ),
    "line ends of Windows": (
        "```repl\r\nx\r\n```\r\nSo:\r\nFINAL(1)\r\n",
        ParsedAction(("x",), final=FinalAnswer("1")),
    ),
    "fence in a list": (
        "10. Look:\n    ```repl\n    if x:\n        y\n    ```\n11. Then",
        ParsedAction(codes=("if x:\n    y",)),
    ),
    "fence behind a bullet": (
        "- ```repl\n  x\n  ```\nFINAL(1)",
        ParsedAction(("x",), final=FinalAnswer("1")),
    ),
    "many fences that are none of ours": (
        "```\n" * 20_000,
        ParsedAction(ignored=("an unmarked fence was not run; use ```repl",)),
    ),
    "final with nothing in it": ("FINAL()", ParsedAction()),
    "the last final counts": ("FINAL(1)\nno:\nFINAL(2)", ParsedAction(final=FinalAnswer("2"))),
}


@pytest.mark.parametrize("name", CASES)
def test_action_is_parsed_from_text(name: str) -> None:
    text, action = CASES[name]
    assert read_action(Message("assistant", text)) == action


def test_action_is_parsed_from_native_tool_calls() -> None:
    def message(name: str, arguments: str) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall("c1", name, arguments),))

    ids = ("c1",)
    assert read_action(message("repl", json.dumps({"code": "x"}))) == ParsedAction(("x",), ids)
    assert read_action(message("final", json.dumps({"answer": "yes"}))) == ParsedAction(
        (), ids, FinalAnswer("yes")
    )
    assert read_action(message("final", json.dumps({"answer": [1]}))) == ParsedAction(
        (), ids, FinalAnswer("[1]")
    )
    assert read_action(message("search", "{}")).ignored == (
        "no tool 'search' with those arguments; there are repl(code) and final(answer)",
    )
    assert (
        read_action(message("repl", "{"))
        .ignored[0]
        .startswith("the arguments of tool call 'repl' are not JSON")
    )


def test_literal_final_answers_are_evaluated() -> None:
    texts = ["42", "'a'", "[1, 2]", "forty-two", "{'a': 1}", "(" * 1000]
    assert [FinalAnswer(text).literal() for text in texts] == [
        42,
        "a",
        [1, 2],
        "forty-two",
        {"a": 1},
        "(" * 1000,
    ]
