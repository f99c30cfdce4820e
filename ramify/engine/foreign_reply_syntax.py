"""Parse model replies that contain code in another system's format.

Models sometimes write such code out of habit. If the meaning is certain, the code is run and a note
says how to write it. Otherwise a note names the mistake, and the message does not count as an
answer in words.

    "```\nprint(1)\n```"                                      ->  codes=("print(1)",) and a note
    '<tool_call>{"name": "repl", "arguments": {"code": "f()"}}</tool_call>'      ->  codes=("f()",)
    "```bash\nls\n```"                                        ->  was_attempted, and a note

The session's own formats are parsed by ``reply_action_parsing.py``.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.engine.reply_action_parsing import (
    CODE_TOOL,
    FINAL_TOOL,
    ParsedAction,
    answer_from_tool_argument,
    parse_action,
    unexecuted_code_fences,
    without_thinking,
)
from ramify.lazy_pattern import lazy_pattern
from ramify.types.message import Message

_WRITE = "write Python in a ```repl fence"
_RUN_AS_CODE = f"code that was not in a ```repl fence was run; next time {_WRITE}"
_TOOL_AS_TEXT = f"a tool call that was written as text was run as code; next time {_WRITE}"
_NO_TOOL = f"a call of the tool '{{}}' that was written as text was not made; {_WRITE}"
_NO_SHELL = f"a fence marked '{{}}' was not run: the session has no shell; {_WRITE}"
_NOT_FENCED = f"code outside of a fence was not run; {_WRITE}"
_PROMPTS = "the prompts (>>>) and outputs between them were left out of the code"

_SHELLS = {"bash", "sh", "shell", "zsh", "console", "terminal", "powershell", "cmd", "bat"}
_MOST_FENCES = 100
_BARE = {"", "code", "tool_code", "ipython3", "jupyter", "pycon", "python2"}
"""Languages of a code fence whose content is run if it is Python."""
_DOES_SOMETHING = (
    ast.Call,
    ast.Assign,
    ast.AugAssign,
    ast.AnnAssign,
    ast.Import,
    ast.ImportFrom,
    ast.FunctionDef,
    ast.For,
    ast.While,
)
_MARKS = lazy_pattern(
    r"```|~~~|<\|?tool_call|<function|<invoke|<\||\[TOOL_CALLS\]|^[ \t]*+(>>>|!\w|%)|\w\("
    r"|^[ \t]*+\{",
    re.M,
)
_BARE_CALL = lazy_pattern(r"^[ \t]*+(?=\{\s*+\"(?:name|arguments|parameters)\"\s*+:)", re.M)
_MOST_BARE_CALLS = 16
_MAX_CODE_CHARS = 1_000_000
"""A text longer than this is not checked for being code."""
_SESSION_CALL = lazy_pattern(r"\s*(print|llm_query|rlm_query|llm_query_batched|SHOW_VARS)\(")
_PYTHON_TAG = "<|python_tag|>"
_HARMONY = lazy_pattern(
    r"<\|channel\|>(?P<channel>\w++)(?P<head>[^<]*+)(?:<\|constrain\|>[^<]*+)?<\|message\|>"
    r"(?P<body>.*?)(?P<end><\|(?:end|call|return|start|channel)\|>|\Z)",
    re.DOTALL,
)
_TOOL_CALL = lazy_pattern(
    r"(?:<\|?tool_calls?\|?>|\[TOOL_CALLS\])\s*(?P<body>[\[{<].*?)"
    r"(?P<end></tool_calls?>|<\|/?tool_calls?\|?>|\Z)",
    re.DOTALL,
)
_INVOKED = lazy_pattern(
    r"<(?:function=|invoke name=[\"']?)(?P<name>[\w.-]++)[\"']?>\s*+(?P<body>.*?)"
    r"(?P<end></function>|</invoke>|\Z)",
    re.DOTALL,
)
_PARAMETER = lazy_pattern(r"<parameter(?:=| name=[\"']?)(?P<name>\w++)[\"']?>\n?")
_RUNS_CODE = lazy_pattern(r"repl|python|code|interpreter|exec|run")
_COMMAND = lazy_pattern(r"^[ \t]*(>>> |!\w|%%?(time|timeit|run|pip|bash|sh|cd|ls|load)\b)", re.M)


def parse_any_syntax(message: Message, is_cut: bool = False) -> ParsedAction:
    """Parse a model's message, even if its code is in the format of another system."""
    if "<|channel|>" in message.content:
        message, calls = _without_harmony(message, is_cut)
    else:
        calls = []
    action = _without_prompts(parse_action(message, is_cut))
    if action.codes or action.final:
        return action
    if action.tool_call_ids:
        return msgspec.structs.replace(action, was_attempted=True)
    if not calls and not _MARKS.search(message.content):
        return action
    text = without_thinking(message.content)
    if _PYTHON_TAG in text and not is_cut:
        calls = [
            (CODE_TOOL, _parse_json_or_text(text.partition(_PYTHON_TAG)[2].partition("<|e")[0]))
        ]
    calls = calls or list(_tool_calls(text, is_cut))
    return _of_calls(action, calls) if calls else _of_text(action, text, is_cut)


def syntax_hint(code: str, error: str) -> str | None:
    """Return a hint for the model if ``code`` failed because of a habit from another system.

    An example is a shell command. Returns None if ``error``, the error of the cell, has another
    cause.
    """
    if not re.search(r"^(SyntaxError|IndentationError)", error, re.M):
        return None
    if re.search(r"^[ \t]*+>>> ", code, re.M):
        return "the code has the prompts of a terminal (>>>): remove prompts and outputs"
    if magic := re.search(r"^[ \t]*+(%%?\w+)", code, re.M):
        return f"{magic[1]} is a command of IPython, which this session lacks: remove it"
    if shell := re.search(r"^[ \t]*+!\s*+(\w+)", code, re.M):
        return f"!{shell[1]} is a shell command, and the session has no shell: use Python (os, re)"
    if quote := re.search("[\u201c\u201d\u2018\u2019]", code):
        return f"the code has typographic quotes ({quote[0]}): use \" or '"
    return None


def _of_calls(action: ParsedAction, calls: list[tuple[str, Any]]) -> ParsedAction:
    """Extend the parsed ``action`` with the tool calls that the model wrote as text.

    ``calls`` holds the name and the arguments of each.
    """
    codes, notes, final = [], [], None
    for name, given in calls:
        arguments = given if isinstance(given, dict) else {"code": given}
        code = next((arguments[key] for key in ("code", "input", "script") if key in arguments), "")
        if name == FINAL_TOOL and "answer" in arguments:
            answer = arguments["answer"]
            final = answer_from_tool_argument(answer)
        elif isinstance(code, str) and code.strip() and _RUNS_CODE.search(name):
            codes.append(code)
            notes.append(_TOOL_AS_TEXT)
        else:
            notes.append(_NO_TOOL.format(name[:60]))
    # The fence of a call was not run, but its code was.
    others = [note for note in action.ignored if not codes or "fence" not in note]
    return msgspec.structs.replace(
        action,
        codes=tuple(codes),
        final=final,
        ignored=(*others, *dict.fromkeys(notes)),
        was_attempted=not codes and final is None,
    )


def _of_text(action: ParsedAction, text: str, is_cut: bool) -> ParsedAction:
    """Find the action that a message asks for if its code is not in a marked code fence.

    Unmarked fences are run if they contain Python. Otherwise, the action gets a note that names the
    model's mistake.
    """
    found = list(itertools.islice(unexecuted_code_fences(text), _MOST_FENCES))
    bare = [body for mark, body, closed in found if mark in _BARE and (closed or not is_cut)]
    codes = [code for body in bare if _is_code(code := _strip_prompts(body))]
    if codes:
        return ParsedAction(tuple(codes), ignored=(_RUN_AS_CODE,))
    shells = [mark for mark, _, _ in found if mark in _SHELLS]
    if shells:
        others = tuple(note for note in action.ignored if f"'{shells[0]}'" not in note)
        notes = (_NO_SHELL.format(shells[0]), *others)
        return msgspec.structs.replace(action, ignored=notes, was_attempted=True)
    hints = [hint for body in bare if (hint := syntax_hint(body, "SyntaxError"))]
    is_bare = _SESSION_CALL.match(text) is not None and _is_code(text)
    if not found and (_COMMAND.search(text) or is_bare):
        hints = [syntax_hint(text, "SyntaxError") or "", _NOT_FENCED]
    if not hints:
        return action
    notes = (*action.ignored, *filter(None, hints))
    return msgspec.structs.replace(action, ignored=notes, was_attempted=True)


def _is_code(text: str) -> bool:
    """Return True if ``text`` is Python code that has an effect, such as a call or an
    assignment."""
    if len(text) > _MAX_CODE_CHARS:
        return False
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return any(isinstance(node, _DOES_SOMETHING) for node in ast.walk(tree))


def _without_prompts(action: ParsedAction) -> ParsedAction:
    codes = tuple(map(_strip_prompts, action.codes))
    if codes == action.codes:
        return action
    return msgspec.structs.replace(action, codes=codes, ignored=(*action.ignored, _PROMPTS))


def _strip_prompts(code: str) -> str:
    """Return the code of a pasted interpreter session, without its ``>>>`` prompts and its output.

    Code that does not begin with a prompt is returned unchanged.
    """
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if not first.startswith(">>> "):
        return code
    return "\n".join(line[4:] for line in lines if line.startswith((">>> ", "... ", "...")))


def _without_harmony(message: Message, is_cut: bool) -> tuple[Message, list[tuple[str, Any]]]:
    """Extract the text and the tool calls from a message in OpenAI's Harmony format.

    Returns ``message`` with the text of all its channels except the reasoning, and a list of the
    tool calls in it.
    """
    texts: list[str] = []
    calls: list[tuple[str, Any]] = []
    for part in _HARMONY.finditer(message.content):
        to = re.search(r"to=(?:functions\.)?([\w.-]+)", part["head"])
        if to and (part["end"] or not is_cut):
            calls.append((to[1], _parse_json_or_text(part["body"])))
        elif not to and part["channel"] != "analysis":
            texts.append(part["body"])
    if not texts and not calls:
        return message, []
    return msgspec.structs.replace(message, content="\n".join(texts)), calls


def _tool_calls(text: str, is_cut: bool) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each tool call that a text contains in a known
    notation."""
    found = itertools.chain(_TOOL_CALL.finditer(text), _INVOKED.finditer(text))
    has_call = False
    for call in found:
        has_call = True
        body = call["body"].strip()
        if is_cut and not call["end"]:
            continue
        if "name" in call.re.groupindex:  # <function=NAME> or <invoke name="NAME">
            yield call["name"], dict(_parameters(body))
        elif not body.startswith("<"):
            parsed = _parse_json_or_text(body)
            for one in parsed if isinstance(parsed, list) else [parsed]:
                fields = one if isinstance(one, dict) else {}
                given = fields.get("arguments", fields.get("parameters", {}))
                given = _parse_json_or_text(given) if isinstance(given, str) else given
                yield str(fields.get("name", CODE_TOOL)), given
    if not has_call:
        yield from _bare_calls(text)


def _parameters(body: str) -> Iterator[tuple[str, str]]:
    """Yield the name and the value of each ``<parameter>`` tag in the body of a tool call."""
    position = 0
    while opening := _PARAMETER.search(body, position):
        end = body.find("</parameter>", opening.end())
        if end < 0:
            return
        yield opening["name"], body[opening.end() : end].removesuffix("\n")
        position = end


def _bare_calls(text: str) -> Iterator[tuple[str, Any]]:
    """Yield the name and the arguments of each tool call that is written as a bare JSON object."""
    position = num = 0
    while (start := _BARE_CALL.search(text, position)) and num < _MOST_BARE_CALLS:
        position, num = start.end() + 1, num + 1
        try:
            call, position = json.JSONDecoder(strict=False).raw_decode(text, start.end())
        except (ValueError, RecursionError):
            continue
        given = call.get("arguments", call.get("parameters"))
        given = _parse_json_or_text(given) if isinstance(given, str) else given
        if isinstance(call.get("name"), str) and isinstance(given, dict):
            yield call["name"], given


def _parse_json_or_text(text: str) -> Any:
    """Parse ``text`` as JSON.

    If it is not JSON, return it unchanged.
    """
    try:
        return json.JSONDecoder(strict=False).raw_decode(text.strip())[0]
    except (ValueError, RecursionError):
        return text
