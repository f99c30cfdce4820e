"""Parsing a model's message into code to run, a final answer, and notes about ignored parts."""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import time
import tokenize
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ramify.engine.prompt_scaffold import DEFAULT, RETOOL
from ramify.engine.python_lexer import closing_parenthesis_index
from ramify.engine.reply_action_parsing import FinalAnswerText, ParsedAction, parse_action, prose_of
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
    "final": ("FINAL(42)", ParsedAction(final=FinalAnswerText("42"))),
    "final with parentheses": (
        "So:\nFINAL(f(x) and (y))\n",
        ParsedAction(final=FinalAnswerText("f(x) and (y)")),
    ),
    "final string with a parenthesis": (
        'FINAL("a) b")',
        ParsedAction(final=FinalAnswerText('"a) b"')),
    ),
    "final over lines": ("FINAL(one\ntwo)", ParsedAction(final=FinalAnswerText("one\ntwo"))),
    "final never closed": ("FINAL(one\ntwo", ParsedAction(final=FinalAnswerText("one\ntwo"))),
    "final in bold": ("**FINAL(x y)**", ParsedAction(final=FinalAnswerText("x y"))),
    "final var": (
        "FINAL_VAR('total')",
        ParsedAction(final=FinalAnswerText("total", variable=True)),
    ),
    "final in a sentence": ("I will call FINAL(x) later.", ParsedAction()),
    "final in a fence is code": ("```repl\nFINAL(3)\n```", ParsedAction(codes=("FINAL(3)",))),
    "thinking is no action": (
        "<think>\n```repl\nx\n```\nFINAL(1)</think>\nFINAL(2)",
        ParsedAction(final=FinalAnswerText("2")),
    ),
    "thinking whose beginning the server kept": (
        "```repl\nx\n```\n</think>\n```repl\ny\n```",
        ParsedAction(codes=("y",)),
    ),
    "the word <think> in code": (
        "```repl\nx = '<think>'\n```\nFINAL(1)",
        ParsedAction(("x = '<think>'",), final=FinalAnswerText("1")),
    ),
    "line ends of Windows": (
        "```repl\r\nx\r\n```\r\nSo:\r\nFINAL(1)\r\n",
        ParsedAction(("x",), final=FinalAnswerText("1")),
    ),
    "fence in a list": (
        "10. Look:\n    ```repl\n    if x:\n        y\n    ```\n11. Then",
        ParsedAction(codes=("if x:\n    y",)),
    ),
    "fence behind a bullet": (
        "- ```repl\n  x\n  ```\nFINAL(1)",
        ParsedAction(("x",), final=FinalAnswerText("1")),
    ),
    "many fences that are none of ours": (
        "```\n" * 20_000,
        ParsedAction(ignored=("an unmarked fence was not run; use ```repl",)),
    ),
    "final with nothing in it": ("FINAL()", ParsedAction()),
    "the last final counts": ("FINAL(1)\nno:\nFINAL(2)", ParsedAction(final=FinalAnswerText("2"))),
}


@pytest.mark.parametrize("name", CASES)
def test_action_is_parsed_from_text(name: str) -> None:
    text, action = CASES[name]
    assert parse_action(Message("assistant", text)) == action


def test_action_is_parsed_from_native_tool_calls() -> None:
    def message(name: str, arguments: str) -> Message:
        return Message("assistant", "", tool_calls=(ToolCall("c1", name, arguments),))

    ids = ("c1",)
    assert parse_action(message("repl", json.dumps({"code": "x"}))) == ParsedAction(("x",), ids)
    assert parse_action(message("final", json.dumps({"answer": "yes"}))) == ParsedAction(
        (), ids, FinalAnswerText("yes")
    )
    assert parse_action(message("final", json.dumps({"answer": [1]}))) == ParsedAction(
        (), ids, FinalAnswerText("[1]")
    )
    assert parse_action(message("search", "{}")).ignored == (
        "no tool 'search' with those arguments; there are repl(code) and final(answer)",
    )
    assert (
        parse_action(message("repl", "{"))
        .ignored[0]
        .startswith("the arguments of tool call 'repl' are not JSON")
    )


def test_literal_final_answers_are_evaluated() -> None:
    texts = ["42", "'a'", "[1, 2]", "forty-two", "{'a': 1}", "(" * 1000]
    assert [FinalAnswerText(text).parsed_value() for text in texts] == [
        42,
        "a",
        [1, 2],
        "forty-two",
        {"a": 1},
        "(" * 1000,
    ]


# --- values, read back as they were written -------------------------------------------------------

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.text(alphabet="()[]{}\"'\\#`~ \n,:FINAL<think>/r1)")
)
JSON_VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.text() | st.integers() | st.binary() | st.tuples(st.integers(), st.text())
PYTHON_VALUES = st.recursive(
    SCALARS | st.binary() | st.complex_numbers(allow_nan=False, allow_infinity=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.tuples(inner)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.sets(KEYS, max_size=4)
    ),
    max_leaves=8,
)


def is_same(a: Any, b: Any) -> bool:
    """Equal, where NaN equals NaN and True is not 1."""
    if type(a) is not type(b):
        return False
    if isinstance(a, float):
        return repr(a) == repr(b)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(is_same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(map(is_same, a.values(), b.values()))
    return bool(a == b)


def in_prose(written: str) -> list[str]:
    """Messages that give the answer ``written`` as text."""
    return [
        f"FINAL({written})",
        f"So it is clear (more or less).\n\nFINAL({written}) (approximately, 1) and 2))",
        f"It's done:\n**FINAL( {written} )**\nThat's it.",
        f"> FINAL({written},)\nDon't (ask",
        f"<think>\nFINAL(0)\n```repl\nx = '''\n</think>\nFINAL({written})",
        f"```repl\nFINAL(0)\n</think>\n\nFINAL({written})",
        f"First FINAL(x), then\nFINAL(1)\nNo, wait:\nFINAL(\n    {written}\n)\n",
        f"```json\n[1, (]\n```\nFINAL({written})\n```text\nFINAL(2)\n```",
    ]


@given(PYTHON_VALUES, st.integers(0, 7))
def test_what_repr_writes_is_read_back(value: Any, form: int) -> None:
    final = parse_action(Message("assistant", in_prose(repr(value))[form])).final
    assert final is not None
    assert is_same(final.parsed_value(), value)


@given(JSON_VALUES, st.integers(0, 7), st.booleans(), st.sampled_from([None, 2]))
def test_what_json_writes_is_read_back(
    value: Any, form: int, ascii: bool, indent: int | None
) -> None:
    written = json.dumps(value, ensure_ascii=ascii, indent=indent)
    final = parse_action(Message("assistant", in_prose(written)[form])).final
    assert final is not None
    assert is_same(final.parsed_value(), value)


@given(PYTHON_VALUES, st.sampled_from(["```repl", "```python", "~~~py", "- ````repl"]))
def test_code_in_a_fence_is_complete(value: Any, opening: str) -> None:
    mark = re.search("`+|~+", opening)[0]  # type: ignore[index]
    indent = "  " if opening.startswith("-") else ""
    cell = f"x = {value!r}\nprint(x)  # it's ({mark}\nFINAL(x)"
    body = "\n".join(indent + line for line in cell.split("\n"))
    message = f"Here it's:\n{opening}\n{body}\n{indent}{mark}\nDon't `stop`.\n"
    assert parse_action(Message("assistant", message)).codes == (cell,)


BLOCKS = ("```", "</think>", "<think>", "FINAL(3)", "```repl", "it's", ")", "\\", "# x", "text")


@given(st.lists(st.sampled_from(BLOCKS), max_size=12), st.sampled_from(['"""', "'''"]))
def test_a_string_over_lines_ends_neither_fence_nor_thinking(lines: list[str], quotes: str) -> None:
    text = "\n".join(lines).replace("\\", "\\\\")
    cell = f"s = {quotes}\n{text}\n{quotes}\nFINAL(s)"
    for before in ("", "It's (so):\n", "<think>\n```repl\n</think>\n"):
        action = parse_action(Message("assistant", f"{before}```repl\n{cell}\n```\nDone."))
        assert (action.codes, action.final) == ((cell,), None)
        answer = parse_action(Message("assistant", f"{before}FINAL({quotes}\n{text}\n{quotes})"))
        assert answer.codes == ()
        assert answer.final is not None
        assert answer.final.parsed_value() == ast.literal_eval(f"{quotes}\n{text}\n{quotes}")


@given(PYTHON_VALUES | JSON_VALUES, st.integers(0, 7), st.floats(0, 1))
def test_a_reply_that_was_cut_is_no_final_answer(value: Any, form: int, share: float) -> None:
    for written in (repr(value), f"[{value!r}, 2]"):
        whole = in_prose(written)[form]
        cut = Message("assistant", whole[: int(share * len(whole))])
        assert parse_action(cut, is_cut=True).final is None


@given(st.text(alphabet="ab_1 \t\n()[]{}'\"\\#rRbBfu,.+=`"))
def test_calls_end_where_the_tokenizer_says(text: str) -> None:
    """Only where Python's tokenizer accepts the text, and finds no broken token."""
    source = f"f({text}\n)"
    end = position = None
    starts = [0, *itertools.accumulate(len(line) for line in source.splitlines(keepends=True))]
    depth = 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(source).readline):
            assert token.type != tokenize.ERRORTOKEN
            depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token.string, 0)
            position = starts[token.start[0] - 1] + token.start[1]
            if token.string in (")", "]", "}") and depth == 0 and end is None:
                end = position
        ast.parse(source)
    except (tokenize.TokenError, SyntaxError, AssertionError, ValueError):
        return
    assert closing_parenthesis_index(source, 2) == end


# --- hostile text ---------------------------------------------------------------------------------

HOSTILE = [
    "FINAL( # )\n",
    "FINAL([)\n",
    "FINAL(\n",
    "FINAL('''",
    'FINAL("\\',
    "```repl\n",
    '```repl\n"""\n```\n',
    '```repl\n\\"""\n```\n',
    "```a`",
    "`",
    "~~~~\n",
    "<think>",
    "</think>\n",
    "```repl\n</think>\n",
    "```repl\n<think>\n",
    "<think></think>\n```repl\n</think>\n",
    "- " * 9,
    "1. \t",
    "\n",
    " ",
    "\\",
    '"',
    "'\\\n\"\\\n",
    "(",
    "[{",
    ">>> ",
    "<|channel|>a",
    "<|channel|>a<|message|>",
    "<tool_call>{",
    "<function=f>",
    "<parameter=a>",
    "<function=f><parameter=a>",
    '{"name":\n',
    '{"name": "repl", "arguments": {"code": "x"}}\n',
    "!\n",
    "%a",
    "print(",
    "a",
    "\\boxed{",
    "\\boxed ",
    "<code>",
    "<tool_call><function=a></parameter> ",
]


@pytest.mark.parametrize("unit", HOSTILE)
def test_time_is_proportional_to_the_length(unit: str) -> None:
    """Eight times the text takes at most some 30 times as long: 64 would be quadratic."""

    def cost(num_chars: int) -> float:
        text = unit * (num_chars // len(unit) + 1)
        took = []
        for _ in range(3):
            began = time.process_time()
            for read in (DEFAULT.read, RETOOL.read):
                read(Message("assistant", f"{text}\nFINAL(1"), is_cut=False)
                read(Message("assistant", f"x{text}"), is_cut=True)
            prose_of(text)
            took.append(time.process_time() - began)
        return min(took)

    assert cost(80_000) < 30 * cost(10_000) + 0.02


def test_a_cell_whose_only_answer_is_json_is_that_answer() -> None:
    action = parse_action(Message("assistant", '```repl\nFINAL({"found": true, "n": null})\n```'))
    assert action.codes == ()
    assert action.final is not None
    assert action.final.parsed_value() == {"found": True, "n": None}
    computed = "```repl\ntrue = 1\nFINAL([true])\n```"
    assert parse_action(Message("assistant", computed)).codes == ("true = 1\nFINAL([true])",)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("42", 42),
        ("3.5", 3.5),
        ("3.10", "3.10"),
        ("1e5", "1e5"),
        ("007", "007"),
        ("1_000", "1_000"),
        ("None", "None"),
        ("null", "null"),
        ("true", True),
        ("[1, 2]", [1, 2]),
        ('"5"', "5"),
        ("web-3", "web-3"),
        ("It's (so)", "It's (so)"),
    ],
)
def test_untyped_answers_lose_nothing(text: str, value: Any) -> None:
    assert is_same(FinalAnswerText(text).inferred_value(), value)


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        ('FINAL(["1) Alice", "2) Bob"])', '["1) Alice", "2) Bob"]'),
        ("FINAL(3) (approx)", "3"),
        ("FINAL(It's 5) and it's so :)", "It's 5"),
        ("FINAL(Issue #5 (open))\n1) next", "Issue #5 (open)"),
        ("FINAL(the cells [a, b)", "the cells [a, b"),
        ('FINAL("open (quote) said)', '"open (quote) said'),
        ("FINAL(:-) ok)", ":-"),
        ("FINAL(\\frac{1}{2} \\(x\\))", "\\frac{1}{2} \\(x\\)"),
    ],
)
def test_words_are_read_by_counting(text: str, inside: str) -> None:
    assert parse_action(Message("assistant", text)).final == FinalAnswerText(inside)
