"""Parses what a model's reply asks for: code to run, a final answer, or neither.

The parser is tolerant and reports what it ignored. It accepts fences marked ``repl``, ``python`` or
``py``, a last fence that was never closed, fences inside strings of the code, native tool calls,
and ``FINAL(…)`` or ``FINAL_VAR(…)`` as text at the start of a line. Text inside
``<think>…</think>`` is not an action, nor is text before a ``</think>`` whose opening tag the
server removed. Fences may be indented, as in lists, and lines may end in CR LF.

    "Let me look.\\n```repl\\nprint(context[:9])\\n```" ->  codes=("print(context[:9])",)
    "FINAL(42)"                                        ->  final=FinalAnswer("42")
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

from ramify.clients.base import Tool
from ramify.types.message import Message, ToolCall

CODE_TOOL = "repl"
FINAL_TOOL = "final"
NATIVE_TOOLS = (
    Tool(
        CODE_TOOL,
        "Run Python in the live session and see its output.",
        {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    ),
    Tool(
        FINAL_TOOL,
        "Give the final answer.",
        {"type": "object", "properties": {"answer": {}}, "required": ["answer"]},
    ),
)

_LANGUAGES = {"repl", "python", "py", "python3", "ipython"}
_OPEN = re.compile(
    r"^(?P<indent>[ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(?P<fence>`{3,}|~{3,})[ \t]*"
    r"(?P<language>[\w.+-]*)[^\n`]*$",
    re.MULTILINE,
)
_THINK = re.compile(r"^[ \t]*<think>.*?(?:</think>|\Z)", re.DOTALL | re.MULTILINE)
_THOUGHT = re.compile(r"\A(?:(?!<think>).)*?^[ \t]*</think>[ \t]*$", re.DOTALL | re.MULTILINE)
_MAX_CLOSINGS = 100
"""Maximum number of candidates for the end of a fence that may be inside a string. Each candidate
parses the code again."""
_QUOTED = re.compile(
    r"""\s*[rRuUbBfF]?(\"\"\".*?\"\"\"|'''.*?'''|"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')\s*\)""",
    re.DOTALL,
)
_CUT = (
    "your message was cut at its limit of tokens, and the last {}, which was not closed, was not {}"
)
_VARIABLE = re.compile(r"FINAL_VAR\s*\([^()\n]*\)")
_FINAL = re.compile(r"^[ \t>*]*(?P<name>FINAL_VAR|FINAL)\s*\(", re.MULTILINE)


class FinalAnswer(msgspec.Struct, frozen=True):
    """A final answer given as text."""

    text: str
    variable: bool = False
    """True if ``text`` names a session variable that holds the answer."""
    as_is: bool = False
    """True if ``text`` is the answer itself, neither a variable name nor a Python literal."""

    def literal(self) -> object:
        """Return the value if the text is a Python literal, otherwise the text."""
        try:
            return ast.literal_eval(self.text)
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return self.text


_COMPUTES = (ast.Call, ast.Subscript, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)


def expressions(final: FinalAnswer | None) -> tuple[str, ...]:
    """Return a cell that computes the answer of ``FINAL(len(found))`` given as text; nothing if the
    text is a name, a literal or words."""
    if final is None or final.variable or final.as_is:
        return ()
    try:
        tree = ast.parse(final.text, mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return ()
    nodes = [*ast.walk(tree)]
    computes = any(isinstance(node, _COMPUTES) for node in nodes)
    has_names = any(isinstance(node, ast.Name) for node in nodes)
    return (f"FINAL({final.text})",) if computes and has_names else ()


class ParsedAction(msgspec.Struct, frozen=True):
    """The parsed content of one reply, in order of execution: run the codes, then answer."""

    codes: tuple[str, ...] = ()
    tool_call_ids: tuple[str, ...] = ()
    """Native tool calls of the reply, each of which needs an answer."""
    final: FinalAnswer | None = None
    ignored: tuple[str, ...] = ()
    """Notes for the model about what was not understood."""
    was_attempted: bool = False
    """True if nothing was understood, but the message tried to run something, so that its words are
    not an answer."""

    def is_in_our_form(self, text: str) -> bool:
        """True if the whole of ``text``, from which this was parsed, needs no other reading: it has
        code or an answer, and no marks of another system."""
        is_understood = bool(self.codes) or self.final is not None
        return is_understood and ">>>" not in text and "<|channel|>" not in text


def read_action(message: Message, is_cut: bool = False) -> ParsedAction:
    """Return the action that ``message`` asks for. If the reply ``is_cut`` (truncated at its token
    limit), an unclosed fence or ``FINAL(`` is ignored, because it may be incomplete."""
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


def prose_of(text: str) -> str:
    """Return the prose of ``text`` without code, thinking and ``FINAL_VAR(name)``, or the whole
    text if it contains none of these."""
    text = without_thinking(text)
    codes, prose, _ = _fenced(text)
    return _VARIABLE.sub("", prose if codes else text).strip()


def without_thinking(text: str) -> str:
    """Return ``text`` without its thinking blocks, and with plain newlines."""
    text = text.replace("\r\n", "\n")
    text = _THOUGHT.sub("", text) if "</think>" in text else text
    return _THINK.sub("", text)


def fences(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield (language, content, whether it was closed) of each fence that is not run."""
    position = 0
    while opening := _OPEN.search(text, position):
        start, language = min(opening.end() + 1, len(text)), opening["language"].lower()
        indent, is_code = len(opening["indent"]), language in _LANGUAGES
        body, position, closed = _body(text, start, opening["fence"], indent, is_code)
        if not is_code:
            yield language, body, closed


def _fenced(text: str, is_cut: bool = False) -> tuple[list[str], str, list[str]]:
    """Return (codes, the text outside all fences, what was ignored)."""
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
    """Return (content of the fence, index after it, whether it was closed)."""
    first = None
    for begin, end in itertools.islice(_closings(text, start, fence, indent), _MAX_CLOSINGS):
        first = first or (begin, end)
        body = _dedented(text[start:begin], indent)
        if not is_code or not _ends_inside_string(body):
            return body.rstrip("\n"), end, True
    if first:  # the string itself is unclosed, so the first closing fence is the best guess
        return _dedented(text[start : first[0]], indent).rstrip("\n"), first[1], True
    return _dedented(text[start:], indent).rstrip("\n"), len(text), False


def _closings(text: str, start: int, fence: str, indent: int) -> Iterator[tuple[int, int]]:
    pattern = re.compile(
        rf"^[ \t]{{0,{indent + 3}}}{re.escape(fence[0])}{{{len(fence)},}}[ \t]*$", re.MULTILINE
    )
    for match in pattern.finditer(text, start):
        yield match.start(), match.end()


def _dedented(body: str, indent: int) -> str:
    """Return ``body`` without the indentation of its fence, as Markdown does."""
    return re.sub(rf"^[ \t]{{1,{indent}}}", "", body, flags=re.MULTILINE) if indent else body


def _ends_inside_string(code: str) -> bool:
    """True if ``code`` ends inside a triple-quoted string, so that a fence there is text."""
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
    """Return the last ``FINAL(…)`` or ``FINAL_VAR(…)`` that begins a line, and whether one was
    ignored because ``is_cut`` left it incomplete."""
    final = None
    position = 0
    while match := _FINAL.search(prose, position):
        inside, position, closed = _balanced(prose, match.end())
        if is_cut and not closed:
            return final, True
        inside = inside.strip()
        if not inside:
            continue
        variable = match["name"] == "FINAL_VAR"
        final = FinalAnswer(inside.strip("\"'` ") if variable else inside, variable)
    return final, False


def _balanced(text: str, start: int) -> tuple[str, int, bool]:
    """Return (text from ``start`` to the closing parenthesis or to the end, index after it, whether
    it was closed)."""
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
    """Return (code, final, problem) of one native tool call."""
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
