"""Code in the format of another system is run, or answered with a hint."""

from __future__ import annotations

import pytest

from ramify import Stop
from ramify.engine.foreign_reply_syntax import parse_any_syntax
from ramify.engine.reply_action_parsing import FinalAnswerText, ParsedAction
from ramify.types.message import Message, Reply, ToolCall
from tests.engine.helpers import code, rlm

IN_FENCE = "next time write Python in a ```repl fence"
RUN = (f"code that was not in a ```repl fence was run; {IN_FENCE}",)
CALLED = (f"a tool call that was written as text was run as code; {IN_FENCE}",)
CALL = '{"name": "repl", "arguments": {"code": "print(1)"}}'
RUNS = {
    "a bare fence": ("```\nprint(1)\n```", RUN),
    "a fence of tool_code": ("```tool_code\nprint(1)\n```", RUN),
    "prompts in a bare fence": ("```\n>>> print(1)\n1\n```", RUN),
    "a tool call": (f"I look.\n<tool_call>\n{CALL}\n</tool_call>", CALLED),
    "a tool call that was not closed": (f"<tool_call>{CALL}", CALLED),
    "a tool call of Mistral": (f"[TOOL_CALLS][{CALL}]", CALLED),
    "a bare call": (CALL, CALLED),
    "a bare call behind words": (f"I look:\n\n  {CALL}\n", CALLED),
    "a bare call in a fence of JSON": (f"```json\n{CALL}\n```", CALLED),
    "a bare call with other names": (
        '<think>so</think>\n{\n  "name": "python",\n  "parameters": {"input": "print(1)"}\n}',
        CALLED,
    ),
    "a function in tags": (
        "<tool_call>\n<function=python>\n<parameter=code>\nprint(1)\n</parameter>\n</function>\n"
        "</tool_call>",
        CALLED,
    ),
    "an invocation in tags": (
        '<invoke name="execute_code"><parameter name="code">print(1)</parameter></invoke>',
        CALLED,
    ),
    "a tag of Llama": ("<|python_tag|>print(1)<|eom_id|>", CALLED),
    "harmony": (
        "<|channel|>analysis<|message|>Hm. FINAL(9)<|end|><|start|>assistant<|channel|>commentary "
        "to=python code<|message|>print(1)<|call|>",
        CALLED,
    ),
    "harmony with JSON": (
        "<|channel|>commentary to=functions.repl <|constrain|>json<|message|>"
        '{"code": "print(1)"}<|call|>',
        CALLED,
    ),
}


@pytest.mark.parametrize(("text", "notes"), RUNS.values(), ids=RUNS)
def test_unambiguous_foreign_code_is_run(text: str, notes: tuple[str, ...]) -> None:
    assert parse_any_syntax(Message("assistant", text)) == ParsedAction(
        ("print(1)",), ignored=notes
    )


def test_interpreter_prompts_in_a_fence_are_removed() -> None:
    text = code(">>> for i in [1]:\n...     print(i)\n...\n1\n>>> x = 2")
    action = parse_any_syntax(Message("assistant", text))
    assert action.codes == ("for i in [1]:\n    print(i)\n\nx = 2",)
    assert action.ignored == (
        "the prompts (>>>) and outputs between them were left out of the code",
    )


def test_final_answer_is_read_from_harmony_or_tool_call() -> None:
    harmony = "<|channel|>analysis<|message|>FINAL(9)<|end|><|channel|>final<|message|>FINAL(42)"
    assert parse_any_syntax(Message("assistant", harmony)).final == FinalAnswerText("42")
    call = '<tool_call>{"name": "final", "arguments": {"answer": 42}}</tool_call>'
    assert parse_any_syntax(Message("assistant", call)).final == FinalAnswerText("42")


HINTS = {
    "```bash\nls -la\n```": "a fence marked 'bash' was not run: the session has no shell",
    "```\n%time f()\n```": "%time is a command of IPython, which this session lacks",
    "```\n!ls\n```": "!ls is a shell command, and the session has no shell",
    "```\nprint(\u201ca\u201d)\n```": "the code has typographic quotes (\u201c)",
    "!ls": "!ls is a shell command, and the session has no shell",
    "print(len(context))": "code outside of a fence was not run",
    '<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call>': "a call of the tool "
    "'search' that was written as text was not made",
}


@pytest.mark.parametrize(("text", "hint"), HINTS.items(), ids=HINTS)
def test_ambiguous_text_gets_a_hint_and_is_not_an_answer(text: str, hint: str) -> None:
    """The model is asked again even after three turns with such a text."""
    with rlm([text, text, text, code("FINAL('right')")]) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer) == (Stop.FINAL, "right")
    seen = [turn.prompt[-1].content for turn in result.trajectory.root.turns[1:]]
    assert all(hint in text and "Nothing was run: the note says why" in text for text in seen)


IN_CELLS = {
    "%time print(1)": "%time is a command of IPython",
    "!ls": "!ls is a shell command",
    "print(\u2018a\u2019)": "the code has typographic quotes",
}


@pytest.mark.parametrize(("cell", "hint"), IN_CELLS.items(), ids=IN_CELLS)
def test_cell_with_foreign_syntax_gets_a_hint(cell: str, hint: str) -> None:
    with rlm([code(cell), code("FINAL(1)")]) as r:
        result = r.completion("text", "?")
    assert hint in result.trajectory.root.turns[1].prompt[-1].content


@pytest.mark.parametrize(
    "text",
    [
        "It is 42.",
        "Paris (France)",
        "The table:\n```\na  b\n1  2\n```",
        "```json\n{}\n```",
        "a -> b (50%)\n%5 of all",
        "<b>bold</b> and <|odd|>",
    ],
)
def test_plain_text_is_not_an_attempt_to_run_code(text: str) -> None:
    with rlm([text] * 3) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer, result.partial) == (Stop.NO_CODE, None, text)


def test_unknown_tool_call_is_not_an_answer() -> None:
    lost = Reply(Message("assistant", "Let me see", tool_calls=(ToolCall("1", "look", "{}"),)))
    with rlm([lost] * 3) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer) == (Stop.NO_CODE, None)


@pytest.mark.parametrize(
    "text", ["```\nprint(1)", f"<tool_call>{CALL}", "<|channel|>analysis to=python<|message|>f()"]
)
def test_code_of_a_truncated_message_is_not_run(text: str) -> None:
    assert parse_any_syntax(Message("assistant", text), is_cut=True).codes == ()
