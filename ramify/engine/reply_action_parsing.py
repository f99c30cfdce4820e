"""Parse a model's reply to find out what it asks for: code to run, a final answer, or neither.

The parser is tolerant and reports what it ignored. It accepts fences marked ``repl``, ``python`` or
``py``, a last fence that was never closed, fences inside strings of the code, native tool calls,
and ``FINAL(…)`` or ``FINAL_VAR(…)`` as text at the start of a line. Text inside
``<think>…</think>`` is not an action, nor is text before a ``</think>`` whose opening tag the
server removed. Fences may be indented, as in lists, and lines may end in CR LF.

    "Let me look.\\n```repl\\nprint(context[:9])\\n```" ->  codes=("print(context[:9])",)
    "FINAL(42)"                                        ->  final=FinalAnswerText("42")
"""

from __future__ import annotations

import ast
import functools
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from ramify.clients.base import Tool
from ramify.engine.python_lexer import StringLiteralLocator, closing_parenthesis_index
from ramify.lazy_pattern import lazy_pattern
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
_FINAL = lazy_pattern(r"^[ \t>*]*+(?P<name>FINAL_VAR|FINAL)\s*+\(", re.MULTILINE)
_MARK = lazy_pattern(
    r"^(?:"
    r"(?P<indent>[ \t]*+(?:(?:[-*+]|\d{1,9}+[.)])[ \t]++)?)(?P<fence>`{3,}+|~{3,}+)[ \t]*+"
    r"(?P<language>[\w.+-]*+)[^\n`]*+$"
    r"|[ \t]*+(?P<think><think>)"
    r"|(?P<thought>[ \t]*+</think>[ \t]*+$)"
    r"|[ \t>*]*+(?P<final>FINAL(?:_VAR)?\s*+\()"
    r")",
    re.MULTILINE,
)
"""Matches what ends a section of prose: a code fence, a thinking tag or a final answer. The strings
in an answer may also contain these, and must be skipped."""
_MAY_BE_MARK = lazy_pattern(r"\n(?=[ \t]*+[`~<*+\d-])")
_PAREN = lazy_pattern(r"[()]")
_MAX_TRIES = 16
"""Maximum number of ``FINAL(`` calls with invalid Python that are parsed. Later ones are read by
counting parentheses, because each parse may read to the end of the text."""
_MAX_LITERAL_CHARS = 4_000_000
"""A text longer than this is read as JSON or kept as text, because its syntax tree would need a
hundred times the memory."""
_CONSTANTS: dict[str, Any] = {
    "true": True,
    "false": False,
    "null": None,
    **dict.fromkeys(("NaN", "nan"), float("nan")),
    **dict.fromkeys(("Infinity", "inf"), float("inf")),
}
"""Names of constants in JSON and in ``repr`` -> their Python values."""
_JSON_WORD = lazy_pattern(r"\b(?:true|false|null|NaN|Infinity)\b")
_CUT = (
    "your message was cut at its limit of tokens, and the last {}, which was not closed, was not {}"
)
_CUT_FINAL = (
    "your message was cut at its limit of tokens, so its FINAL(…) was not taken: give it again, "
    "in a shorter message"
)
_VARIABLE = lazy_pattern(r"FINAL_VAR\s*+\([^()\n]*+\)")


class FinalAnswerText(msgspec.Struct, frozen=True):
    """A final answer that a model gave as text in its reply, such as ``FINAL(42)``."""

    text: str
    variable: bool = False
    """True if ``text`` is the name of a session variable that holds the answer."""
    as_is: bool = False
    """True if ``text`` is the answer itself, and is not read as a variable name or a Python
    literal."""

    def parsed_value(self) -> Any:
        """Parse the answer's text as JSON or as a Python literal, and return the value.

        Text that is neither is returned unchanged.

        >>> FinalAnswerText('{"a": [true, NaN]}').literal(), FinalAnswerText("{1: (2,)}").literal()
        ({'a': [True, nan]}, {1: (2,)})
        """
        try:
            return json.loads(self.text.removesuffix(","))
        except (ValueError, RecursionError):
            pass
        argument = _parse_final_argument(self.text)
        try:
            return self.text if argument is None else ast.literal_eval(_Constants().visit(argument))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return self.text

    def inferred_value(self) -> Any:
        """Return the value of the answer's text for a question without an answer type.

        The text is read as JSON or as a Python literal, with two exceptions that stay text:
        ``None`` or ``null``, and a number that Python or JSON would write differently, such as 3.10
        or 1e5.
        """
        value = self.parsed_value()
        if value is None:
            return self.text
        is_number = type(value) in (int, float)
        is_exact = not is_number or self.text in (str(value), json.dumps(value))
        return value if is_exact else self.text


class _Constants(ast.NodeTransformer):
    """Replaces the names of JSON constants in a syntax tree, such as ``true``, with Python
    values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(_CONSTANTS[node.id]) if node.id in _CONSTANTS else node


def _parse_final_argument(text: str) -> ast.expr | None:
    """Parse the text inside ``FINAL(…)`` as a Python expression.

    Several arguments become a tuple. Returns None if the text is not valid Python.
    """
    if (
        len(text) > _MAX_LITERAL_CHARS
        or closing_parenthesis_index(f"{text}\n)", 0) != len(text) + 1
    ):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about invalid escapes, such as "\d"
            call = ast.parse(f"_({text}\n)", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    if not isinstance(call, ast.Call) or call.keywords or not call.args:
        return None
    return call.args[0] if len(call.args) == 1 else ast.Tuple(call.args, ast.Load())


_COMPUTES = (ast.Call, ast.Subscript, ast.ListComp, ast.DictComp, ast.GeneratorExp, ast.JoinedStr)


def final_expression_code(final: FinalAnswerText | None) -> tuple[str, ...]:
    """Return code that evaluates a final answer written as an expression: ``FINAL(len(found))``.

    The result is a tuple with one piece of code. It is empty if the answer is a name, a literal or
    plain words.
    """
    if final is None or final.variable or final.as_is:
        return ()
    argument = _parse_final_argument(final.text)
    if argument is None:
        return ()
    nodes = [*ast.walk(argument)]
    computes = any(isinstance(node, _COMPUTES) for node in nodes)
    has_names = any(isinstance(node, ast.Name) for node in nodes)
    return (f"FINAL({final.text}\n)",) if computes and has_names else ()


class ParsedAction(msgspec.Struct, frozen=True):
    """The actions that a model's reply asks for: code to run, then a final answer."""

    codes: tuple[str, ...] = ()
    tool_call_ids: tuple[str, ...] = ()
    """Ids of the reply's native tool calls. Each of them needs a response."""
    final: FinalAnswerText | None = None
    ignored: tuple[str, ...] = ()
    """Notes to the model about parts of its reply that were not understood."""
    was_attempted: bool = False
    """True if nothing was understood although the message tried to run something. Its text is
    then not an answer."""

    def is_in_expected_form(self, text: str) -> bool:
        """Return True if a reply uses Ramify's own format.

        It then contains code or an answer in the expected form, and no syntax of another system.
        ``text`` is the reply from which this action was parsed.
        """
        is_understood = bool(self.codes) or self.final is not None
        return is_understood and ">>>" not in text and "<|channel|>" not in text


def parse_action(message: Message, is_cut: bool = False) -> ParsedAction:
    """Parse a model's message into the code to run and the final answer.

    ``is_cut`` is True if the reply was truncated at its token limit. Then an unclosed last code
    fence and every ``FINAL(…)`` in the text are ignored, because the missing rest could have
    changed them."""
    codes, prose, ignored = _extract_code(message.content, is_cut)
    final, is_closed = _final_text(prose)
    if len(codes) == 1 and final is None and (final := _json_answer(codes[0])):
        codes = []
    if final is not None and is_cut:
        final = None
        ignored.append(_CUT_FINAL if is_closed else _CUT.format("FINAL(…)", "taken"))
    for call in message.tool_calls:
        code, answer, problem = _parse_tool_call(call)
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
    """Return the prose of a reply, leaving out its code, its thinking and ``FINAL_VAR(name)``.

    A reply with none of these is returned whole.
    """
    codes, prose, _ = _extract_code(text)
    return _VARIABLE.sub("", prose if codes else without_thinking(text)).strip()


def without_thinking(text: str) -> str:
    """Remove the thinking blocks from a reply, and normalise its line endings."""
    text = text.replace("\r\n", "\n")
    if "<think>" not in text and "</think>" not in text:
        return text
    return "".join(part.text for part in _split_reply(text))


def unexecuted_code_fences(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield the code fences of a reply that will not be run, such as unmarked ones.

    Each is a tuple of the language, the content, and whether the fence was closed.
    """
    for part in _split_reply(text):
        if part.fence is not None and not part.is_code:
            yield part.language, part.body, part.closed


class _Part(NamedTuple):
    """A part of a reply outside its thinking blocks: prose or a code fence."""

    text: str
    fence: re.Match[str] | None = None
    """Match of the line that opens the code fence; None if the part is prose."""
    body: str = ""
    """Content of the code fence, without its indentation."""
    closed: bool = True

    @property
    def language(self) -> str:
        return str(self.fence["language"]).lower() if self.fence is not None else ""

    @property
    def is_code(self) -> bool:
        return self.language in _LANGUAGES


def _split_reply(text: str) -> list[_Part]:
    """Split a reply into its prose and its code fences, in order.

    Thinking is dropped.
    """
    parts: list[_Part] = []
    start = position = 0
    has_thought, num_tries = False, 0
    while mark := _MARK.search(text, position):
        position = mark.end()
        if mark["final"]:
            if num_tries < _MAX_TRIES:
                num_tries += 1
                position = _end_of_strings(text, position)
        elif mark["thought"] is not None:
            if not has_thought:  # the server removed the opening tag
                parts, start = [], position
        elif mark["think"]:
            parts.append(_Part(text[start : mark.start()]))
            start = position = _end_of_thought(text, position)
            has_thought = True
        else:
            parts.append(_Part(text[start : mark.start()]))
            fence, start, is_thought, has_thought = _parse_fence(text, mark, has_thought)
            if is_thought:
                parts = []
            else:
                parts.append(fence)
            position = start
    parts.append(_Part(text[start:]))
    return parts


def _end_of_thought(text: str, start: int) -> int:
    end = text.find("</think>", start)
    return len(text) if end < 0 else end + len("</think>")


def _end_of_strings(text: str, start: int) -> int:
    """Find where to resume the search for code fences and tags after an opening ``FINAL(``.

    ``start`` is the index just after the parenthesis. String literals inside the call are skipped
    if they contain lines that look like a fence or a tag. Returns ``start`` if there are none, or
    if the call is not valid Python.
    """
    newline = text.find("\n", start)
    end = closing_parenthesis_index(text, start) if newline >= 0 else None
    if end is None or end < newline:
        return start
    scanner, last = StringLiteralLocator(text, start), start
    for line in _MAY_BE_MARK.finditer(text, start, end):
        if scanner.is_inside(line.end()):
            last = line.end() + 1
    return last


def _parse_fence(
    text: str, opening: re.Match[str], has_thought: bool
) -> tuple[_Part, int, bool, bool]:
    """Parse the code fence whose first line matched ``opening``.

    Returns four values: the fence; the index after it; whether the fence turned out to be part of
    the model's thinking; and whether a thinking block has been seen so far."""
    start = position = checked = min(opening.end() + 1, len(text))
    kept = [text[opening.start() : start]]
    body: list[str] = []
    is_code = opening["language"].lower() in _LANGUAGES
    ends = _fence_marks(opening["fence"][0], len(opening["fence"]), len(opening["indent"]))
    scanner: StringLiteralLocator | None = None
    closed = False
    while mark := ends.search(text, position):
        position = mark.end()
        # A closing line inside a string is code. The scanner is slow, so most code goes without it.
        if is_code and (scanner is not None or _may_span(text, checked, mark.start())):
            scanner = scanner or StringLiteralLocator(text, start)
            if scanner.is_inside(mark.start()):
                continue
        checked = mark.start()
        if mark["thought"] is not None and not has_thought:
            return _Part(""), position, True, has_thought
        if mark["think"]:
            body.append(text[start : mark.start()])
            start = position = _end_of_thought(text, position)
            scanner = None
            has_thought = True
        elif mark["close"] is not None:
            body.append(text[start : mark.start()])
            kept += [*body, text[mark.start() : position]]
            closed = True
            break
    if not closed:
        body.append(text[start:])
        kept += body
        position = len(text)
    content = _dedent_body("".join(body), len(opening["indent"])).rstrip("\n")
    return _Part("".join(kept), opening, content, closed), position, False, has_thought


def _may_span(text: str, start: int, end: int) -> bool:
    """Return True if a section of code may contain a multi-line string.

    This is rare.
    """
    return (
        text.find('"""', start, end) >= 0
        or text.find("'''", start, end) >= 0
        or text.find("\\\n", start, end) >= 0
    )


@functools.lru_cache(64)
def _fence_marks(character: str, num: int, indent: int) -> re.Pattern[str]:
    """Return a pattern for lines that can end a code fence: closing fences and thinking tags.

    ``num`` is how often the fence's opening line repeats ``character``.
    """
    return re.compile(
        rf"^(?:(?P<close>[ \t]{{0,{indent + 3}}}+{re.escape(character)}{{{num},}}+[ \t]*+$)"
        r"|[ \t]*+(?P<think><think>)|(?P<thought>[ \t]*+</think>[ \t]*+$))",
        re.MULTILINE,
    )


def _extract_code(text: str, is_cut: bool = False) -> tuple[list[str], str, list[str]]:
    """Split a reply into the code in its fences and the text outside them.

    Returns the code of each fence, the text outside all fences and thinking, and notes about the
    parts that were ignored.
    """
    codes: list[str] = []
    prose: list[str] = []
    ignored: list[str] = []
    for part in _split_reply(text.replace("\r\n", "\n")):
        if part.fence is None:
            prose.append(part.text)
        elif part.is_code and not part.closed and is_cut:
            ignored.append(_CUT.format("code fence", "run"))
        elif part.is_code and part.body.strip():
            codes.append(part.body)
            if not part.closed:
                ignored.append(
                    "the last code fence was not closed; it was run up to the end of the message"
                )
        elif not part.is_code:
            ignored.append(
                f"a fence marked '{part.language}' was not run; use ```repl"
                if part.language
                else "an unmarked fence was not run; use ```repl"
            )
    return codes, "\n".join(prose), ignored


def _dedent_body(body: str, indent: int) -> str:
    """Remove the indentation of a code fence from its content, as Markdown does."""
    return re.sub(rf"^[ \t]{{1,{indent}}}+", "", body, flags=re.MULTILINE) if indent else body


def _final_text(prose: str) -> tuple[FinalAnswerText | None, bool]:
    """Find the last ``FINAL(…)`` or ``FINAL_VAR(…)`` that starts a line.

    Returns it, or None, and whether its parenthesis was closed.
    """
    final, is_closed = None, True
    position = num_tries = 0
    while match := _FINAL.search(prose, position):
        end = closing_parenthesis_index(prose, match.end()) if num_tries < _MAX_TRIES else None
        if end is None or "#" in prose[match.end() : end]:
            num_tries += 1
            counted = _counted_end(prose, match.end())
            # In words, a # begins no comment.
            is_python = (
                end is not None and _parse_final_argument(prose[match.end() : end]) is not None
            )
            end = end if is_python else counted
        assert end is not None
        inside, position = prose[match.end() : end].strip(), end + 1
        if inside:
            is_closed = end < len(prose)
            variable = match["name"] == "FINAL_VAR"
            final = FinalAnswerText(inside.strip("\"'` ") if variable else inside, variable)
    return final, is_closed


def _counted_end(text: str, start: int) -> int:
    """Find the closing parenthesis by counting all parentheses, including those in strings.

    ``start`` is the index just after the opening one. Returns the index of the closing one, or the
    length of the text if there is none.
    """
    depth = 1
    for parenthesis in _PAREN.finditer(text, start):
        depth += 1 if parenthesis[0] == "(" else -1
        if depth == 0:
            return parenthesis.start()
    return len(text)


def _json_answer(code: str) -> FinalAnswerText | None:
    """Return the answer if ``code`` is only a ``FINAL(…)`` call whose argument is JSON but not
    Python.

    An example is ``FINAL({"found": true})``. Returns None otherwise.
    """
    match = _FINAL.match(code)
    if match is None or match["name"] != "FINAL" or not _JSON_WORD.search(code, match.end()):
        return None
    end = closing_parenthesis_index(code, match.end())
    if end is None or code[end + 1 :].strip():
        return None
    try:
        json.loads(inside := code[match.end() : end].strip())
    except (ValueError, RecursionError):
        return None
    return FinalAnswerText(inside)


def _parse_tool_call(call: ToolCall) -> tuple[str | None, FinalAnswerText | None, str | None]:
    """Parse a native tool call into code to run or a final answer.

    Returns the code to run, the final answer, and an explanation if the call is invalid. Exactly
    one of the three is set.
    """
    try:
        arguments = json.loads(call.arguments or "{}")
    except (ValueError, RecursionError) as error:
        return None, None, f"the arguments of tool call '{call.name}' are not JSON ({error})"
    if not isinstance(arguments, dict):
        return None, None, f"the arguments of tool call '{call.name}' are not an object"
    if call.name == FINAL_TOOL:
        answer = arguments.get("answer", arguments.get("value"))
        if answer is None:
            return None, None, f"tool call '{FINAL_TOOL}' has no 'answer'"
        return None, answer_from_tool_argument(answer), None
    code = arguments.get("code", arguments.get("input"))
    if call.name in _LANGUAGES and isinstance(code, str):
        return code, None, None
    return (
        None,
        None,
        f"no tool '{call.name}' with those arguments; there are {CODE_TOOL}(code) and "
        f"{FINAL_TOOL}(answer)",
    )


def answer_from_tool_argument(value: Any) -> FinalAnswerText:
    """Convert the argument of a final-answer tool call to a ``FinalAnswerText``.

    A text that would be parsed as another value is quoted.
    """
    if isinstance(value, str) and FinalAnswerText(value).parsed_value() == value:
        return FinalAnswerText(value)
    return FinalAnswerText(repr(value))
