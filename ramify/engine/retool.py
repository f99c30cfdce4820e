r"""ReTool's protocol (2504.11536): a model thinks, runs Python where it needs it, and ends with a
boxed answer.

    think … <code>print(2**10 % 7)</code>                    a cell; what it printed comes back between <interpreter> tags
    think … <tool_call>{"name": "code_interpreter", …}       the same as a native call, also where a server left it as text
    think … ```python …```                                   the same, where there is neither
    think … \boxed{2}                                        the answer, where nothing after it is to be run

Whatever cannot be read is answered with what the forms are, and the conversation goes on. Errors,
time-outs and silence are observations like any other. Decides what a reply asks for and how it is
answered; the loop is ``rlm_loop.py``, the text that says all this to a model is in the scaffolds of
this name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from ramify.clients.base import Tool
from ramify.engine.action import FinalAnswer, ParsedAction, read_action, without_thinking
from ramify.tasks.scoring.boxed import last_boxed
from ramify.types.message import Message, ToolCall
from ramify.types.trajectory import Cell

TOOL_NAME = "code_interpreter"
TOOL = Tool(
    TOOL_NAME,
    "Run Python in a live session and see what it prints.",
    {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python source"}},
        "required": ["code"],
    },
)
CORRECTION = (
    "That was neither code that can be run nor an answer{why}. To run Python, write it between "
    "<code> and </code>, or call "
    f"the tool {TOOL_NAME} with it. When you know the answer, write it as \\boxed{{{{answer}}}}."
)
SILENT = "(it ran and printed nothing: print what you want to see)"
_HALF = "the message was cut at its limit of tokens, and code in it that was not closed was not run"
_NAMES = (TOOL_NAME, "python", "repl")
_CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = re.compile(r"\A\s*(`{3,})[ \t]*(?:python|py)?[ \t]*\n(.*?)\n?[ \t]*\1`*\s*\Z", re.DOTALL)
_XML = re.compile(
    r"\s*<function=(\w+)>\s*(?:<parameter=code>\n?(.*?)\n?</parameter>\s*)?(?:</function>)?\s*",
    re.DOTALL,
)


def read(message: Message, is_cut: bool = False) -> ParsedAction:
    """What a reply asks for: an answer, or one piece of code or several. An answer counts where no
    code follows it. Of one that ``is_cut`` at its limit, code that was not closed is not run."""
    text = without_thinking(message.content)
    ids = tuple(call.id for call in message.tool_calls)
    codes, problems = _from_calls(message.tool_calls)
    if not ids:
        found, problems, end = _from_text(text, is_cut)
        box = last_boxed(text[end:], None)
        if box:
            return ParsedAction(final=FinalAnswer(box, as_is=True))
        codes = found
    return ParsedAction(tuple(codes), ids, None, tuple(problems))


def _from_calls(calls: Iterable[ToolCall]) -> tuple[list[str], list[str]]:
    """(codes, what was wrong) of native calls."""
    codes: list[str] = []
    problems: list[str] = []
    for call in calls:
        code = _argument(call.arguments)
        if call.name not in _NAMES:
            problems.append(f"there is no tool '{call.name}'")
        elif code is None:
            problems.append(f"the arguments of {call.name} are not JSON with a text under 'code'")
        else:
            codes.append(_bare(code))
    return codes, problems


def _from_text(text: str, is_cut: bool) -> tuple[list[str], list[str], int]:
    """(codes, what was wrong, where the last of them ends) of a reply without native calls."""
    calls = list(_CALL.finditer(text))
    if calls:
        read = [_of_call(found[1]) for found in calls]
        problems = (
            []
            if all(read)
            else ["a tool call could not be read: it is JSON with 'name' and 'arguments'"]
        )
        return [_bare(code) for code in read if code], problems, calls[-1].end()
    blocks = [found for found in _CODE.finditer(text) if found[1].strip()]
    if blocks:
        half = is_cut and not blocks[-1][0].endswith("</code>")
        whole = blocks[:-1] if half else blocks
        return [_bare(found[1]) for found in whole], [_HALF] * half, blocks[-1].end()
    fenced = read_action(Message("assistant", text), is_cut)
    end = text.rfind("```") + 3 if fenced.codes else 0
    return list(fenced.codes), [_HALF] * (is_cut and not fenced.codes and "```" in text), end


def _of_call(body: str) -> str | None:
    """The code of a call that was left as text: JSON, also with bare newlines in its strings, or
    tags."""
    tags = _XML.fullmatch(body)
    if tags is not None:
        return tags[2] if tags[1] in _NAMES else None
    try:
        call = json.loads(body.strip(), strict=False)
    except ValueError:
        return None
    if not isinstance(call, dict) or call.get("name") not in _NAMES:
        return None
    arguments = call.get("arguments")
    return _argument(arguments if isinstance(arguments, str) else json.dumps(arguments))


def _argument(arguments: str) -> str | None:
    try:
        given = json.loads(arguments, strict=False)
    except ValueError:
        return None
    code = given.get("code") if isinstance(given, dict) else None
    return code if isinstance(code, str) and code.strip() else None


def _bare(code: str) -> str:
    """``code`` without a fence around all of it, and without the newlines around it."""
    fence = _FENCE.match(code)
    return fence[2] if fence is not None else code.strip("\n")


def report(cell: Cell) -> str:
    """What is shown of one execution."""
    parts = [cell.stdout.rstrip("\n")] if cell.stdout.strip() else []
    parts += [cell.value] if cell.value is not None else []
    parts += [cell.error.rstrip("\n")] if cell.error else []
    return "\n".join(parts) or SILENT


def observation(
    action: ParsedAction, reports: Sequence[str], notes: Iterable[str]
) -> list[Message]:
    """The messages after a turn: what its cells did, or what was wrong with it."""
    told = list(dict.fromkeys(notes))
    if not action.codes:
        texts = [CORRECTION.format(why=f" ({'; '.join(told)})" if told else "")]
    else:
        texts = [f"<interpreter>\n{each}\n</interpreter>" for each in _with_notes(reports, told)]
    if not action.tool_call_ids:
        return [Message("user", "\n".join(texts))]
    first, *rest = action.tool_call_ids  # each call needs an answer
    several = len(texts) == len(action.tool_call_ids)
    told_first = texts[0] if several else "\n".join(texts)
    others = texts[1:] if several else ["(reported with the first call)"] * len(rest)
    return [
        Message("tool", told_first, tool_call_id=first),
        *(Message("tool", text, tool_call_id=id) for id, text in zip(rest, others, strict=True)),
    ]


def _with_notes(reports: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    """``reports``, the last with what there is to say besides, as of a time-out."""
    shown = list(reports) or [SILENT]
    yield from shown[:-1]
    yield "\n".join([shown[-1], *(f"({note})" for note in notes)])


def closed(content: str, stop: Iterable[str]) -> str:
    """``content`` with the tag that a stop text took off its end, as in ``<code>1+1`` stopped at
    ``</code>``."""
    for text in stop:
        opening = f"<{text[2:]}" if text.startswith("</") else ""
        if opening and content.count(opening) > content.count(text):
            return content + text
    return content
