r"""Convert the demonstrations of ReTool (JoeYing/ReTool-SFT) to Ramify's message format.

    {"messages": [
        {"role": "user", "content": "… *user question:* What is 7! ? Remember to place the final
        …"},
        {"role": "assistant", "content": "Let me compute. <code>```python¶print(5040)¶```</code>
                                          <interpreter>5040</interpreter>
                                          So <answer>\boxed{5040}</answer>"}]}

    user        What is 7! ? (in the scaffold's format)
    assistant   Let me compute. <code>…</code>      or the same code as a native tool call
    tool        <interpreter>…</interpreter>        not trained on
    assistant   So \boxed{5040}

A row of the file is a single text. It is split into the model's replies and the tool's output,
because only the replies are trained on. Rows in another form (unmatched tags, no answer, code
without output) are skipped, and their number is reported.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.extras.studies.toolmath.task import bare_question
from ramify.logging import ComponentLogger
from ramify.tasks.base import DemonstrationPromptFormat, Task
from ramify.tasks.data import rows_of
from ramify.types.boxed_answer import last_boxed
from ramify.types.message import Message, ToolCall

_log = ComponentLogger("tasks")
TOOL_NAME = "code_interpreter"
"""Name of the tool in the engine's protocol."""
_QUESTION = re.compile(r"\*+user question:\*+\s*", re.IGNORECASE)
_FORM = re.compile(r"\s*Remember to place the final answer.*\Z", re.DOTALL)
_ROUND = re.compile(
    r"<code>\s*(?P<code>.*?)\s*</code>\s*<interpreter>\n?(?P<shown>.*?)\n?</interpreter>", re.DOTALL
)
_FENCE = re.compile(r"\A```(?:python|py)?[ \t]*\n(.*?)\n?```\Z", re.DOTALL)
_ANSWER = re.compile(r"<answer>\s*(.*?)\s*</answer>", re.DOTALL)
_TAG = re.compile(r"</?(?:code|interpreter|answer)>")


class ToolMathDemonstration(msgspec.Struct, frozen=True):
    """A demonstration that solves one math problem, as a conversation with a Python tool.

    It has the fields of ``train.sft.Conversation``.
    """

    item: str
    messages: tuple[Message, ...]
    correct: bool = True
    """Always True, because the published demonstrations were filtered by their answers."""
    call: str = "0"


def retool_demos(
    task: Task, num: int, seed: int, texts: DemonstrationPromptFormat, source: str = ""
) -> Iterator[list[ToolMathDemonstration]]:
    """Yield demonstrations from the first ``num`` rows of a ReTool file, for fine-tuning.

    A recipe selects this function by ``sft.demos=retool``. Raises ConfigError if ``source`` names
    no file.
    """
    if not source:
        raise ConfigError(
            "sft.demos=retool needs a file: give sft.options.source=ReTool-SFT.parquet (or .jsonl)"
        )
    return demonstrations(source, texts, num)


def demonstrations(
    source: Any,
    texts: DemonstrationPromptFormat,
    num: int | None = None,
) -> Iterator[list[ToolMathDemonstration]]:
    """Yield the demonstrations in a ReTool file.

    Only the first ``num`` rows are read, or all rows if None. Rows in another format are skipped
    and logged. Raises ConfigError if no row fits.
    """
    rows = rows_of(source)
    num_rows = len(rows) if num is None else min(num, len(rows))
    skipped, first = 0, ""
    for number in range(num_rows):
        try:
            yield [ToolMathDemonstration(f"retool/{number}", row_to_messages(rows[number], texts))]
        except ValueError as error:
            skipped, first = skipped + 1, first or f"row {number}: {error}"
    if skipped == num_rows:
        raise ConfigError(f"none of {num_rows} rows is a demonstration in ReTool's form; {first}")
    if skipped:
        _log.warning(
            "demonstrations_left_out",
            f"{skipped} of {num_rows} demonstrations are left out because they have another form; "
            f"the first is {first}",
            shown=True,
            left_out=skipped,
            of=num_rows,
        )


def row_to_messages(
    row: Mapping[str, Any], texts: DemonstrationPromptFormat
) -> tuple[Message, ...]:
    """Convert a row of a ReTool file to the messages of a conversation.

    Raises ValueError with the reason if the row is in another format.
    """
    contents = {message.get("role"): message.get("content") for message in _messages(row)}
    question, solution = contents.get("user"), contents.get("assistant")
    if not isinstance(question, str) or not isinstance(solution, str):
        raise ValueError("it needs a message of the user and one of the assistant")
    first = Message("user", texts.first_message(extract_problem(question), ""))
    return (
        *([Message("system", texts.system)] if texts.system else []),
        first,
        *_turns(solution, texts.native_tools),
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


def extract_problem(text: str) -> str:
    """Return the math problem that the first message of a demonstration poses.

    The instructions around it are dropped.
    """
    return bare_question(_FORM.sub("", _QUESTION.split(text, maxsplit=1)[-1]))


def _turns(solution: str, native: bool) -> Iterator[Message]:
    end = 0
    for number, match in enumerate(_ROUND.finditer(solution)):
        yield from _round_messages(
            solution[end : match.start()], match["code"], match["shown"], f"call_{number}", native
        )
        end = match.end()
    conclusion = _ANSWER.sub(lambda match: match[1], solution[end:]).strip()
    if not last_boxed(conclusion, None):
        raise ValueError("it ends without a boxed answer")
    yield Message("assistant", _check_tags(conclusion))


def _round_messages(
    thought: str, code: str, shown: str, id: str, native: bool
) -> Iterator[Message]:
    fence = _FENCE.match(code)
    code, thought = fence[1] if fence is not None else code, _check_tags(thought).strip()
    if not code.strip():
        raise ValueError("a block of code is empty")
    observed = f"<interpreter>\n{_check_tags(shown)}\n</interpreter>"
    if native:
        arguments = json.dumps({"code": code}, ensure_ascii=False)
        yield Message("assistant", thought, tool_calls=(ToolCall(id, TOOL_NAME, arguments),))
        yield Message("tool", observed, tool_call_id=id)
        return
    yield Message("assistant", f"{thought}\n<code>\n{code}\n</code>".lstrip("\n"))
    yield Message("user", observed)


def _check_tags(text: str) -> str:
    """Check that every tag in a demonstration's text has a matching tag, and return the text
    unchanged.

    Raises ValueError if it contains a tag without its partner.
    """
    stray = _TAG.search(text)
    if stray is not None:
        raise ValueError(f"{stray[0]} has no matching tag")
    return text
