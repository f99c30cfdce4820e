"""Reading what a model wants to do from what it wrote: code to run, a final answer, or neither.

Tolerant, and says what it ignored. Understood are fences marked ``repl``, ``python`` or ``py``, a
last fence that was never closed, fences inside strings of the code, native tool calls, and
``FINAL(…)`` / ``FINAL_VAR(…)`` as text at the start of a line. What stands inside
``<think>…</think>`` is not an action, nor what stands before a ``</think>`` whose beginning the
server kept. Fences may be indented, as in lists; lines may end as on Windows.

    "Let me look.\\n```repl\\nprint(context[:9])\\n```"   ->  Action(codes=("print(context[:9])",))
    "FINAL(42)"                                        ->  Action(final=Final(text="42"))
"""

from __future__ import annotations

import ast
import io
import itertools
import json
import re
import tokenize
from collections.abc import Iterator

import msgspec

from ramify.types.message import Message, ToolCall

CODE_TOOL = "repl"
FINAL_TOOL = "final"

_LANGUAGES = {"repl", "python", "py", "python3", "ipython"}
_OPEN = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*(?P<language>[\w.+-]*)[^\n`]*$",
    re.MULTILINE,
)
_THINK = re.compile(r"^[ \t]*<think>.*?(?:</think>|\Z)", re.DOTALL | re.MULTILINE)
_THOUGHT = re.compile(r"\A(?:(?!<think>).)*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_CLOSINGS = 100
"""Fences tried as the end of one that may lie in a string: each try reads the code again."""
_QUOTED = re.compile(
    r"""\s*[rRuUbBfF]?(\"\"\".*?\"\"\"|'''.*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*\)""",
    re.DOTALL,
)
_CUT = (
    "your message was cut at its limit of tokens, and the last {}, which was not closed, was not {}"
)
_FINAL = re.compile(r"^[ \t>*]*(?P<name>FINAL_VAR|FINAL)\s*\(", re.MULTILINE)


class FinalAnswer(msgspec.Struct, frozen=True):
    """A final answer given as text."""

    text: str
    variable: bool = False
    """``text`` names a variable of the session that holds the answer."""
    as_is: bool = False
    """``text`` is the answer: neither a name nor a literal of Python."""

    def literal(self) -> object:
        """The value where the text is a Python literal, otherwise the text."""
        try:
            return ast.literal_eval(self.text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return self.text


class ParsedAction(msgspec.Struct, frozen=True):
    """What one reply asks for, in the order it is done: run the codes, then answer."""

    codes: tuple[str, ...] = ()
    tool_call_ids: tuple[str, ...] = ()
    """Native tool calls of the reply, which each need an answer."""
    final: FinalAnswer | None = None
    ignored: tuple[str, ...] = ()
    """What was not understood, for the model to read."""


def read_action(message: Message, is_cut: bool = False) -> ParsedAction:
    """The action that ``message`` asks for. Of one that ``is_cut`` at its limit, no fence and no
    ``FINAL(`` counts that was not closed: it may be half of what was meant."""
    codes, prose, ignored = _fenced(without_thinking(message.content), is_cut)
    final, is_half = _final_text(prose, is_cut)
    ignored += [_CUT.format("FINAL(…)", "taken")] if is_half else []
    for call in message.tool_calls:
        code, answer, problem = _native(call)
        codes += [code] if code is not None else []
        final = answer or final
        ignored += [problem] if problem else []
    return ParsedAction(
        tuple(codes),
        tuple(call.id for call in message.tool_calls),
        final,
        tuple(dict.fromkeys(ignored)),
    )


def said(text: str) -> str:
    """What ``text`` says beside its code and thinking: the whole of it where it has no code to
    run."""
    text = without_thinking(text)
    codes, prose, _ = _fenced(text)
    return (prose if codes else text).strip()


def without_thinking(text: str) -> str:
    """``text`` without what stands in thinking blocks, and with plain newlines."""
    text = text.replace("\r\n", "\n")
    text = _THOUGHT.sub("", text) if "</think>" in text else text
    return _THINK.sub("", text)


def _fenced(text: str, is_cut: bool = False) -> tuple[list[str], str, list[str]]:
    """(codes, the text outside all fences, what was ignored)."""
    codes: list[str] = []
    prose: list[str] = []
    ignored: list[str] = []
    position = 0
    while opening := _OPEN.search(text, position):
        prose.append(text[position : opening.start()])
        body_start = min(opening.end() + 1, len(text))
        language = opening["language"].lower()
        is_code = language in _LANGUAGES
        body, position, closed = _body(
            text, body_start, opening["fence"], len(opening["indent"]), is_code
        )
        if is_code and not closed and is_cut:
            ignored.append(_CUT.format("code fence", "run"))
        elif is_code and body.strip():
            codes.append(body)
            if not closed:
                ignored.append(
                    "the last code fence was not closed; it was run up to the end of the message"
                )
        elif not is_code:
            ignored.append(
                f"a fence marked '{language}' was not run; use ```repl"
                if language
                else "an unmarked fence was not run; use ```repl"
            )
    prose.append(text[position:])
    return codes, "\n".join(prose), ignored


def _body(text: str, start: int, fence: str, indent: int, is_code: bool) -> tuple[str, int, bool]:
    """(the fence's content, where the text goes on, whether it was closed)."""
    first = None
    for begin, end in itertools.islice(_closings(text, start, fence, indent), _MAX_CLOSINGS):
        first = first or (begin, end)
        body = _dedented(text[start:begin], indent)
        if not is_code or not _ends_inside_string(body):
            return body.rstrip("\n"), end, True
    if first:  # the string itself is what is unclosed: the first fence is the best guess
        return _dedented(text[start : first[0]], indent).rstrip("\n"), first[1], True
    return _dedented(text[start:], indent).rstrip("\n"), len(text), False


def _closings(text: str, start: int, fence: str, indent: int) -> Iterator[tuple[int, int]]:
    pattern = re.compile(
        rf"^[ \t]{{0,{indent + 3}}}{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$", re.MULTILINE
    )
    for match in pattern.finditer(text, start):
        yield match.start(), match.end()


def _dedented(body: str, indent: int) -> str:
    """``body`` without the indentation that its fence has, as Markdown has it."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", body, flags=re.MULTILINE) if indent else body


def _ends_inside_string(code: str) -> bool:
    """Whether ``code`` breaks off inside a triple-quoted string, so that a fence there is text."""
    if '"""' not in code and "'''" not in code:
        return False
    try:
        for _ in tokenize.generate_tokens(io.StringIO(code).readline):
            pass
    except tokenize.TokenError as error:
        reason = str(error.args[0])
        return "multi-line string" in reason or "triple-quoted" in reason
    except SyntaxError:
        return False
    return False


def _final_text(prose: str, is_cut: bool) -> tuple[FinalAnswer | None, bool]:
    """(The last ``FINAL(…)`` or ``FINAL_VAR(…)`` that begins a line, whether one was left out that
    ``is_cut`` halved)."""
    found = None
    position = 0
    while match := _FINAL.search(prose, position):
        inside, position, closed = _balanced(prose, match.end())
        if is_cut and not closed:
            return found, True
        inside = inside.strip()
        if not inside:
            continue
        variable = match["name"] == "FINAL_VAR"
        found = FinalAnswer(inside.strip("\"'` ") if variable else inside, variable)
    return found, False


def _balanced(text: str, start: int) -> tuple[str, int, bool]:
    """(The text from ``start`` to the parenthesis that closes it, or to the end; where that ends;
    whether it closes)."""
    quoted = _QUOTED.match(text, start)
    if quoted:  # parentheses inside a string do not count
        return text[start : quoted.end() - 1], quoted.end(), True
    depth = 1
    for index in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[index], 0)
        if depth == 0:
            return text[start:index], index + 1, True
    return text[start:], len(text), False


def _native(call: ToolCall) -> tuple[str | None, FinalAnswer | None, str | None]:
    """(code, final, problem) of one native tool call."""
    try:
        arguments = json.loads(call.arguments or "{}")
    except ValueError as error:
        return None, None, f"the arguments of tool call '{call.name}' are not JSON ({error})"
    if not isinstance(arguments, dict):
        return None, None, f"the arguments of tool call '{call.name}' are not an object"
    if call.name == FINAL_TOOL:
        answer = arguments.get("answer", arguments.get("value"))
        if answer is None:
            return None, None, f"tool call '{FINAL_TOOL}' has no 'answer'"
        return None, FinalAnswer(answer if isinstance(answer, str) else repr(answer)), None
    code = arguments.get("code", arguments.get("input"))
    if call.name in _LANGUAGES and isinstance(code, str):
        return code, None, None
    return (
        None,
        None,
        f"no tool '{call.name}' with those arguments; there are {CODE_TOOL}(code) and "
        f"{FINAL_TOOL}(answer)",
    )
