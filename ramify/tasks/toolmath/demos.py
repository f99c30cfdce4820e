r"""ReTool's demonstrations (JoeYing/ReTool-SFT) as conversations of our own protocol.

    {"messages": [{"role": "user", "content": "… *user question:* What is 7! ? Remember to place the final answer …"},
                  {"role": "assistant", "content": "Let me compute. <code>```python¶print(5040)¶```</code>
                                                    <interpreter>5040</interpreter> So <answer>\boxed{5040}</answer>"}]}

    user        What is 7! ? (as the scaffold asks)
    assistant   Let me compute. <code>…</code>      or the same as a native call
    tool        <interpreter>…</interpreter>        given, never learnt
    assistant   So \boxed{5040}

A row is one text with everything in it; here it is cut into what the model says and what comes
back, so that only the former is learnt. Rows that do not have this form (tags that do not match, no
answer, code that nothing came back for) are left out, and the caller is told how many.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from ramify.errors import ConfigError
from ramify.tasks.data import rows_of
from ramify.tasks.scoring.boxed import last_boxed
from ramify.tasks.toolmath.problem_rows import bare_question
from ramify.types.message import Message, ToolCall

TOOL_NAME = "code_interpreter"
"""As the engine's protocol calls it."""
_QUESTION = re.compile(r"\*+user question:\*+\s*", re.IGNORECASE)
_FORM = re.compile(r"\s*Remember to place the final answer.*\Z", re.DOTALL)
_ROUND = re.compile(
    r"<code>\s*(?P<code>.*?)\s*</code>\s*<interpreter>\n?(?P<shown>.*?)\n?</interpreter>", re.DOTALL
)
_FENCE = re.compile(r"\A```(?:python|py)?[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter|answer)>")


class ToolMathScaffold(Protocol):
    """What the engine's ``Scaffold`` decides of a conversation."""

    @property
    def native_tools(self) -> bool: ...

    def system_prompt(self, *, depth: int, children: bool, tools: str, limits: str) -> str: ...

    def first_message(self, question: str, context: object) -> str: ...


class ToolMathDemonstration(msgspec.Struct, frozen=True):
    """One demonstration; see ``train.sft.Conversation``."""

    item: str
    messages: tuple[Message, ...]
    correct: bool = True
    """Those that were published were filtered by their answers."""
    call: str = "0"


def demonstrations(
    source: Any,
    rules: ToolMathScaffold,
    num: int | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[list[ToolMathDemonstration]]:
    """The demonstrations of a file, its first ``num`` rows. Raises ConfigError where no row has the
    form."""
    rows = rows_of(source)
    most = len(rows) if num is None else min(num, len(rows))
    left_out, first = 0, ""
    for number in range(most):
        try:
            yield [ToolMathDemonstration(f"retool/{number}", conversation(rows[number], rules))]
        except ValueError as error:
            left_out, first = left_out + 1, first or f"row {number}: {error}"
    if left_out == most:
        raise ConfigError(f"none of {most} rows is a demonstration of ReTool's form; {first}")
    if left_out:
        say(
            f"{left_out} of {most} demonstrations are left out, since they have another form; the "
            f"first, {first}"
        )


def conversation(row: Mapping[str, Any], rules: ToolMathScaffold) -> tuple[Message, ...]:
    """The messages of one row. Raises ValueError, saying what is wrong with it."""
    said = {each.get("role"): each.get("content") for each in _messages(row)}
    question, solution = said.get("user"), said.get("assistant")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise ValueError("it needs a message of the user and one of the assistant")
    system = rules.system_prompt(depth=0, children=False, tools="", limits="")
    first = Message("user", rules.first_message(asked(question), ""))
    return (
        *([Message("system", system)] if system else []),
        first,
        *_turns(solution, rules.native_tools),
    )


def _messages(row: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    messages = row.get("messages")
    if (
        isinstance(messages, str)
        or not isinstance(messages, Sequence)
        or not all(isinstance(m, Mapping) for m in messages)
    ):
        raise ValueError(f"it has no list of messages; its columns are {', '.join(map(str, row))}")
    return messages


def asked(text: str) -> str:
    """The problem in the first message, without the instructions around it."""
    return bare_question(_FORM.sub("", _QUESTION.split(text, maxsplit=1)[-1]))


def _turns(solution: str, native: bool) -> Iterator[Message]:
    end = 0
    for number, found in enumerate(_ROUND.finditer(solution)):
        yield from _round(
            solution[end : found.start()], found["code"], found["shown"], f"call_{number}", native
        )
        end = found.end()
    conclusion = _ANSWER.sub(lambda found: found[1], solution[end:]).strip()
    if not last_boxed(conclusion, None):
        raise ValueError("it ends without a boxed answer")
    yield Message("assistant", _clean(conclusion))


def _round(thought: str, code: str, shown: str, id: str, native: bool) -> Iterator[Message]:
    fence = _FENCE.match(code)
    code, thought = fence[1] if fence is not None else code, _clean(thought).strip()
    if not code.strip():
        raise ValueError("a block of code is empty")
    observed = f"<interpreter>\n{_clean(shown)}\n</interpreter>"
    if native:
        arguments = json.dumps({"code": code}, ensure_ascii=False)
        yield Message("assistant", thought, tool_calls=(ToolCall(id, TOOL_NAME, arguments),))
        yield Message("tool", observed, tool_call_id=id)
        return
    yield Message("assistant", f"{thought}\n<code>\n{code}\n</code>".lstrip("\n"))
    yield Message("user", observed)


def _clean(text: str) -> str:
    """``text``, which must have no tag left in it."""
    stray = _TAG.search(text)
    if stray is not None:
        raise ValueError(f"{stray[0]} has no partner")
    return text
