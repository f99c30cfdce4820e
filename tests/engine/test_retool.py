r"""ReTool's protocol: parsing a reply, the response to it, and a whole conversation in the jail."""

from __future__ import annotations

import json

import msgspec
import pytest

from ramify import SandboxSpec, Scaffold, Stop
from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.engine.retool_protocol import CORRECTION, SILENT, parse_reply, restore_closing_tag
from ramify.errors import ConfigError
from ramify.types.message import Message, ToolCall
from tests.engine.helpers import client, rlm


def call(code: str, name: str = "code_interpreter") -> str:
    return (
        "<tool_call>\n" + json.dumps({"name": name, "arguments": {"code": code}}) + "\n</tool_call>"
    )


TAGGED = "<tool_call>\n<function=code_interpreter>\n<parameter=code>\nprint(2)\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "codes", "answer"),
    [
        ("Let me see. <code>print(1)</code>", ("print(1)",), None),
        ("<code>\n```python\nprint(1)\n```\n</code>", ("print(1)",), None),
        ("<code>\n  x = '```'\n</code>", ("  x = '```'",), None),
        ("<code>a()</code> and <code>b()</code>", ("a()", "b()"), None),
        ("<code>unclosed()", ("unclosed()",), None),
        ("```python\nprint(1)\n```", ("print(1)",), None),
        (call("print(1)"), ("print(1)",), None),
        (call("x = 1\nprint(x)").replace("\\n", "\n"), ("x = 1\nprint(x)",), None),
        (
            '<tool_call>{"name": "code_interpreter", "arguments": "{\\"code\\": \\"x\\"}"}</tool_call>',
            ("x",),
            None,
        ),
        (TAGGED, ("print(2)",), None),
        (r"So it is \boxed{34}.", (), "34"),
        (r"Answer: \boxed{\frac{1}{\sqrt{2}}}", (), r"\frac{1}{\sqrt{2}}"),
        (r"first \boxed{1}, no: \boxed{2}", (), "2"),
        (r"maybe \boxed{1}; check: <code>x</code>", ("x",), None),
        (r"<code>x</code> gives \boxed{1}", (), "1"),
        (r"<think>\boxed{9}</think> not yet", (), None),
        (r"\boxed{1", (), None),
        ("it is 34", (), None),
        ("<tool_call>{oops}</tool_call>", (), None),
        (call("x", "search"), (), None),
    ],
)
def test_code_and_answer_are_parsed_from_a_reply(
    text: str, codes: tuple[str, ...], answer: str | None
) -> None:
    action = parse_reply(Message("assistant", text))
    assert (action.codes, action.final and action.final.text) == (codes, answer)


def test_native_calls_are_parsed_and_malformed_ones_noted() -> None:
    calls = (
        ToolCall("a", "code_interpreter", '{"code": "```py\\nx\\n```"}'),
        ToolCall("b", "code_interpreter", '{"kode": 1}'),
        ToolCall("c", "search", "{}"),
    )
    action = parse_reply(Message("assistant", r"\boxed{1} is a guess", tool_calls=calls))
    assert (action.codes, action.final, action.tool_call_ids) == (("x",), None, ("a", "b", "c"))
    assert action.ignored == (
        "the arguments of code_interpreter are not JSON with a text under 'code'",
        "there is no tool 'search'",
    )


def test_closing_tag_cut_off_by_a_stop_text_is_restored() -> None:
    assert restore_closing_tag("<code>1+1", ("</code>", "</tool_call>")) == "<code>1+1</code>"
    assert (
        restore_closing_tag("<code>1</code> <tool_call>{", ("</code>", "</tool_call>"))
        == "<code>1</code> <tool_call>{</tool_call>"
    )
    assert restore_closing_tag("<code>1</code>", ("</code>",)) == "<code>1</code>"
    assert restore_closing_tag("no tag", ("</code>", "\n\n")) == "no tag"


def test_conversation_survives_every_kind_of_failure() -> None:
    """A malformed call, an error, no output, a time-out and too much output do not end it. Code
    runs exactly as written, so that a multi-line string keeps its indentation."""
    model = client(
        [
            "<tool_call>{oops</tool_call>",
            "I think that it is 34.",
            "<code>1/0</code>",
            '<code>import time\nx = 7\ntext = """a\n  b"""</code>',
            "<code>while True: time.sleep(0.01)</code>",
            "<code>print('y'*5000)</code>",
            "<code>x * 6 if text == 'a\\n  b' else text</code>",
            r"It is \boxed{42}.",
        ]
    )
    with rlm(
        model,
        scaffold="retool",
        sandbox=SandboxSpec(cell_s=5.0, grace_s=60.0),
        limits={"max_turns": 9},
    ) as r:
        result = r.completion("What is 6*7?")
    assert (result.answer, result.stop) == ("42", Stop.FINAL)
    first, *rest = [
        message for message in model.requests[-1].messages if message.role != "assistant"
    ]
    assert first.role == "system"
    assert "<code>" in first.content
    assert rest[0] == Message("user", "What is 6*7?\n\nPut the final answer into \\boxed{}.")
    shown = [message.content for message in rest[1:]]
    why = " (a tool call could not be read: it is JSON with 'name' and 'arguments')"
    assert shown[:2] == [CORRECTION.format(why=why), CORRECTION.format(why="")]
    assert shown[2].startswith("<interpreter>\nTraceback")
    assert shown[2].endswith("ZeroDivisionError: division by zero\n</interpreter>")
    assert shown[3] == f"<interpreter>\n{SILENT}\n</interpreter>"
    assert "KeyboardInterrupt" in shown[4]
    assert "(the cell was stopped after 5 s of work" in shown[4]
    assert "characters cut; the whole is in outputs" in shown[5]
    assert len(shown[5]) < 1200
    assert shown[6] == "<interpreter>\n42\n</interpreter>"
    assert model.requests[0].sampling.stop == ("</code>",)
    assert not any("[turn" in text for text in shown)


def test_every_native_call_gets_an_answer() -> None:
    def two(*codes: str) -> Message:
        each = [
            ToolCall(f"c{n}", "code_interpreter", json.dumps({"code": code}))
            for n, code in enumerate(codes)
        ]
        return Message("assistant", "", tool_calls=tuple(each))

    model = client([two("print(1)", "print(2)"), two("1/0", "print(2)"), r"\boxed{3}"])
    with rlm(model, scaffold="retool_native") as r:
        assert r.completion("1+2?").answer == "3"
    assert [tool.name for tool in model.requests[0].tools] == ["code_interpreter"]
    answers = [(m.tool_call_id, m.content) for m in model.requests[-1].messages if m.role == "tool"]
    assert answers[:2] == [
        ("c0", "<interpreter>\n1\n</interpreter>"),
        ("c1", "<interpreter>\n2\n</interpreter>"),
    ]
    assert "ZeroDivisionError" in answers[2][1]
    assert "cells 2 to 2 were not run" in answers[2][1]
    assert answers[3] == ("c1", "(reported with the first call)")


def test_reply_without_box_is_not_an_answer() -> None:
    """The last reply is not taken for an answer, and a limit requests no last word."""
    model = client(["The answer is 42."] * 9)
    with rlm(model, scaffold="retool", limits={"max_turns": 3}) as r:
        result = r.completion("What is 6*7?")
    assert (result.answer, result.stop, len(model.requests)) == (None, Stop.MAX_TURNS, 3)


def test_variable_name_in_a_box_is_plain_text() -> None:
    with rlm([r"<code>x = 5</code>", r"\boxed{x}"], scaffold="retool") as r:
        assert r.completion("Which letter?").answer == "x"


def test_invented_interpreter_output_is_dropped() -> None:
    """If a server ignores stop texts, output that the model invents after its code is dropped."""
    invented = "<code>print(1)</code>\n<interpreter>\n999\n</interpreter>\nSo"
    model = client([invented, r"\boxed{1}"])
    with rlm(model, scaffold="retool") as r:
        result = r.completion("?")
    assert model.requests[-1].messages[-1].content == "<interpreter>\n1\n</interpreter>"
    assert result.trajectory.root.turns[0].cells[0].stdout == "1\n"


def test_contradictory_scaffold_is_refused_and_native_one_round_trips() -> None:
    with pytest.raises(ConfigError, match="has its own reply format"):
        Scaffold(protocol="retool", raw_code=True)
    again = msgspec.json.decode(msgspec.json.encode(SCAFFOLDS["retool_native"]), type=Scaffold)
    assert again == SCAFFOLDS["retool_native"]
