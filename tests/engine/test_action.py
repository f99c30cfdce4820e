"""Reading a model's message: what is run, what is an answer, what is said to have been ignored."""

from __future__ import annotations

import json

import pytest

from ramify.engine.action import Action, Final, read_action
from ramify.types.message import Message, ToolCall

UNCLOSED = "the last code fence was not closed; it was run up to the end of the message"

CASES = {
    "repl fence": ("Look:\n```repl\nx = 1\n```\ndone", Action(codes=("x = 1",))),
    "python fence": ("```python\nx = 1\n```", Action(codes=("x = 1",))),
    "py fence with words behind": ("```py title=a\nx = 1\n```", Action(codes=("x = 1",))),
    "tildes": ("~~~python\nx = 1\n~~~", Action(codes=("x = 1",))),
    "two fences": ("```repl\na\n```\nthen\n```repl\nb\n```", Action(codes=("a", "b"))),
    "unclosed fence": ("```repl\nx = 1\ny = 2", Action(codes=("x = 1\ny = 2",), ignored=(UNCLOSED,))),
    "fence inside a string": (
        '```repl\ns = """\n```\ninner\n```\n"""\nprint(s)\n```',
        Action(codes=('s = """\n```\ninner\n```\n"""\nprint(s)',)),
    ),
    "unfinished string": ('```repl\ns = """\nabc\n```\nend', Action(codes=('s = """\nabc',))),
    "longer fence": ("````repl\ns = '''\n```\n'''\n````", Action(codes=("s = '''\n```\n'''",))),
    "other language": ("```js\nx\n```", Action(ignored=("a fence marked 'js' was not run; use ```repl",))),
    "no language": ("```\nx\n```", Action(ignored=("an unmarked fence was not run; use ```repl",))),
    "empty fence": ("```repl\n\n```", Action()),
    "text": ("I think it is 7.", Action()),
    "final": ("FINAL(42)", Action(final=Final("42"))),
    "final with parentheses": ("So:\nFINAL(f(x) and (y))\n", Action(final=Final("f(x) and (y)"))),
    "final string with a parenthesis": ('FINAL("a) b")', Action(final=Final('"a) b"'))),
    "final over lines": ("FINAL(one\ntwo)", Action(final=Final("one\ntwo"))),
    "final never closed": ("FINAL(one\ntwo", Action(final=Final("one\ntwo"))),
    "final in bold": ("**FINAL(x y)**", Action(final=Final("x y"))),
    "final var": ("FINAL_VAR('total')", Action(final=Final("total", variable=True))),
    "final in a sentence": ("I will call FINAL(x) later.", Action()),
    "final in a fence is code": ("```repl\nFINAL(3)\n```", Action(codes=("FINAL(3)",))),
    "thinking is no action": ("<think>\n```repl\nx\n```\nFINAL(1)</think>\nFINAL(2)", Action(final=Final("2"))),
    "thinking whose beginning the server kept": (
        "```repl\nx\n```\n</think>\n```repl\ny\n```",
        Action(codes=("y",)),
    ),
    "the word <think> in code": ("```repl\nx = '<think>'\n```\nFINAL(1)", Action(("x = '<think>'",), final=Final("1"))),
    "line ends of Windows": ("```repl\r\nx\r\n```\r\nSo:\r\nFINAL(1)\r\n", Action(("x",), final=Final("1"))),
    "fence in a list": (
        "10. Look:\n    ```repl\n    if x:\n        y\n    ```\n11. Then",
        Action(codes=("if x:\n    y",)),
    ),
    "fence behind a bullet": ("- ```repl\n  x\n  ```\nFINAL(1)", Action(("x",), final=Final("1"))),
    "many fences that are none of ours": (
        "```\n" * 20_000,
        Action(ignored=("an unmarked fence was not run; use ```repl",)),
    ),
    "final with nothing in it": ("FINAL()", Action()),
    "the last final counts": ("FINAL(1)\nno:\nFINAL(2)", Action(final=Final("2"))),
}


@pytest.mark.parametrize("name", CASES)
def test_text(name: str) -> None:
    text, action = CASES[name]
    assert read_action(Message("assistant", text)) == action


def test_native_tool_calls() -> None:
    def message(name: str, arguments: str) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall("c1", name, arguments),))

    ids = ("c1",)
    assert read_action(message("repl", json.dumps({"code": "x"}))) == Action(("x",), ids)
    assert read_action(message("final", json.dumps({"answer": "yes"}))) == Action((), ids, Final("yes"))
    assert read_action(message("final", json.dumps({"answer": [1]}))) == Action((), ids, Final("[1]"))
    assert read_action(message("search", "{}")).ignored == (
        "no tool 'search' with those arguments; there are repl(code) and final(answer)",
    )
    assert read_action(message("repl", "{")).ignored[0].startswith("the arguments of tool call 'repl' are not JSON")


def test_literals() -> None:
    texts = ["42", "'a'", "[1, 2]", "forty-two", "{'a': 1}", "(" * 1000]
    assert [Final(text).literal() for text in texts] == [42, "a", [1, 2], "forty-two", {"a": 1}, "(" * 1000]
