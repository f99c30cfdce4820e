r"""Implement the ReTool protocol (arXiv 2504.11536), in which a model runs Python and boxes its
answer.

    think … <code>print(2**10 % 7)</code>        a cell; its output comes back in <interpreter> tags
    think … <tool_call>{"name": "code_interpreter", …}     the same as a native call, even as text
    think … ```python …```                       the same, if the reply has neither
    think … \boxed{2}                            the answer, if no code follows it

A reply that cannot be parsed is answered with a description of the formats, and the conversation
continues. Errors, time-outs and empty outputs are ordinary observations. This module decides how
replies are parsed and answered. The loop is in ``rlm_call.py``, and the prompts that explain the
protocol to the model are in the scaffolds of this name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence

from ramify.clients.base import Tool
from ramify.engine.reply_action_parsing import (
    FinalAnswerText,
    ParsedAction,
    parse_action,
    without_thinking,
)
from ramify.lazy_pattern import lazy_pattern
from ramify.types.boxed_answer import last_boxed
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
_CODE = lazy_pattern(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
_CALL = lazy_pattern(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FENCE = lazy_pattern(r"\s*+(`{3,}+)[ \t]*+(?:python|py)?[ \t]*+\n")
_XML = lazy_pattern(
    r"\s*+<function=(\w++)>\s*+(?:<parameter=code>\n?(.*?)\n?</parameter>\s*+)?"
    r"(?:</function>)?+\s*+",
    re.DOTALL,
)


def parse_reply(message: Message, is_cut: bool = False) -> ParsedAction:
    """Parse a reply in the ReTool format into code blocks or a final answer.

    A boxed answer counts only if no code follows it. If ``is_cut`` is True, the reply was
    truncated, and unclosed code is not run.
    """
    text = without_thinking(message.content)
    ids = tuple(call.id for call in message.tool_calls)
    codes, problems = _from_calls(message.tool_calls)
    if not ids:
        codes, problems, end = _from_text(text, is_cut)
        box = last_boxed(text[end:], None)
        if box:
            return ParsedAction(final=FinalAnswerText(box, as_is=True))
    return ParsedAction(tuple(codes), ids, None, tuple(problems))


def _from_calls(calls: Iterable[ToolCall]) -> tuple[list[str], list[str]]:
    """Return the code of each native tool call, and a one-line explanation of each invalid call."""
    codes: list[str] = []
    problems: list[str] = []
    for call in calls:
        code = _parse_code_argument(call.arguments)
        if call.name not in _NAMES:
            problems.append(f"there is no tool '{call.name}'")
        elif code is None:
            problems.append(f"the arguments of {call.name} are not JSON with a text under 'code'")
        else:
            codes.append(_strip_fence(code))
    return codes, problems


def _from_text(text: str, is_cut: bool) -> tuple[list[str], list[str], int]:
    """Parse the text of a reply without native tool calls.

    Return the pieces of code, one line per problem, and the index at which the last piece of code
    ends.
    """
    calls = list(_CALL.finditer(text))
    if calls:
        read = [_of_call(call[1]) for call in calls]
        problems = (
            []
            if all(read)
            else ["a tool call could not be read: it is JSON with 'name' and 'arguments'"]
        )
        return [_strip_fence(code) for code in read if code], problems, calls[-1].end()
    blocks = [block for block in _CODE.finditer(text) if block[1].strip()]
    if blocks:
        half = is_cut and not blocks[-1][0].endswith("</code>")
        complete = blocks[:-1] if half else blocks
        return [_strip_fence(block[1]) for block in complete], [_HALF] * half, blocks[-1].end()
    fenced = parse_action(Message("assistant", text), is_cut)
    end = text.rfind("```") + 3 if fenced.codes else 0
    return list(fenced.codes), [_HALF] * (is_cut and not fenced.codes and "```" in text), end


def _of_call(body: str) -> str | None:
    """Return the code of a tool call that the model wrote as text.

    The text has XML tags or is JSON. JSON strings may contain raw newlines. Return None if the call
    is invalid.
    """
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
    return _parse_code_argument(arguments if isinstance(arguments, str) else json.dumps(arguments))


def _parse_code_argument(arguments: str) -> str | None:
    try:
        parsed = json.loads(arguments, strict=False)
    except ValueError:
        return None
    code = parsed.get("code") if isinstance(parsed, dict) else None
    return code if isinstance(code, str) and code.strip() else None


def _strip_fence(code: str) -> str:
    """Remove surrounding newlines, or an enclosing Markdown fence, from ``code``."""
    fence, end = _FENCE.match(code), code.rstrip()
    if fence is not None and len(end) > fence.end():
        body = end.rstrip("`")
        if len(end) - len(body) >= len(fence[1]):
            return body.rstrip(" \t").removesuffix("\n")[fence.end() :]
    return code.strip("\n")


def report(cell: Cell) -> str:
    """Return the text that the model sees after its code has run.

    It contains the output, the value of the last expression and the error.
    """
    parts = [cell.stdout.rstrip("\n")] if cell.stdout.strip() else []
    parts += [cell.value] if cell.value is not None else []
    parts += [cell.error.rstrip("\n")] if cell.error else []
    return "\n".join(parts) or SILENT


def observation(
    action: ParsedAction, reports: Sequence[str], notes: Iterable[str]
) -> list[Message]:
    """Return the messages that the model receives after one of its turns.

    They contain the output of its code, or an explanation if its reply contained neither code nor
    an answer.
    """
    unique_notes = list(dict.fromkeys(notes))
    if not action.codes:
        texts = [CORRECTION.format(why=f" ({'; '.join(unique_notes)})" if unique_notes else "")]
    else:
        shown = _with_notes(reports, unique_notes)
        texts = [f"<interpreter>\n{text}\n</interpreter>" for text in shown]
    if not action.tool_call_ids:
        return [Message("user", "\n".join(texts))]
    first, *rest = action.tool_call_ids  # each call needs an answer
    several = len(texts) == len(action.tool_call_ids)
    first_text = texts[0] if several else "\n".join(texts)
    others = texts[1:] if several else ["(reported with the first call)"] * len(rest)
    return [
        Message("tool", first_text, tool_call_id=first),
        *(Message("tool", text, tool_call_id=id) for id, text in zip(rest, others, strict=True)),
    ]


def _with_notes(reports: Sequence[str], notes: Sequence[str]) -> Iterator[str]:
    """Yield the report of each code block, and append the notes to the last one.

    Notes, such as a time-out, are appended to the last report.
    """
    shown = list(reports) or [SILENT]
    yield from shown[:-1]
    yield "\n".join([shown[-1], *(f"({note})" for note in notes)])


def restore_closing_tag(content: str, stop: Iterable[str]) -> str:
    """Return ``content`` with the closing tag that a stop string cut off, if one is missing.

    Servers remove a tag that was used as a stop string, as when ``<code>1+1`` stopped at
    ``</code>``.
    """
    for text in stop:
        opening = f"<{text[2:]}" if text.startswith("</") else ""
        if opening and content.count(opening) > content.count(text):
            return content + text
    return content
