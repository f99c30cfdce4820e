"""Write the messages that a model receives after its first one.

They contain the results of its code, warnings, and the request for a final answer. Prompts only
grow, so everything that changes from turn to turn (the turn count, the remaining limits) is stated
here.

The texts of this file are part of the models' behavior: recorded runs and trained policies depend
on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.lazy_pattern import lazy_pattern
from ramify.sandbox.base import BufferNdArray, Table
from ramify.sandbox.guest.mapped_text import FileBackedText
from ramify.types.message import Message
from ramify.types.picture import picture_placeholder, picture_reference_digest
from ramify.types.trajectory import Cell, Stop

LAST_WORD = (
    "{reason} No more code will be run and no more calls can be made. Answer now with what you "
    "have: write "
    "FINAL(your answer) as text, the best answer that what you have seen supports."
)
LAST_CELL = (
    "{reason} No more calls can be made. Answer now with what you have, the best answer that what "
    "you have seen supports: write one last cell that calls FINAL(value), or FINAL(your answer) as "
    "text."
)
LAST_SESSION = "The session was lost {deaths} times."
NUDGE = (
    "Nothing was run: there was no code fence marked repl and no FINAL(…) in your message. Write "
    "code in a ```repl "
    "fence, or give the answer with FINAL(…). Words alone are not an answer."
)
NUDGE_AGAIN = (
    "Again nothing was run, and words alone are not an answer. To look at something, write code:\n"
    "\n"
    "```repl\n"
    "print(1 + 1)\n"
    "```\n"
    "\n"
    "If you know the answer, write it on a line of its own, for example:\n"
    "\n"
    'FINAL("the answer")\n'
    "\n"
    "After {more} without either, the run ends without an answer."
)
NOT_RUN = (
    "Nothing was run: the note says why. Write code in a ```repl fence, or give the answer with "
    "FINAL(…)."
)
SUMMARISE = (
    "The conversation is about to outgrow your window. Write a summary that lets you go on without "
    "it: the question, "
    "what you have found out with its evidence, which variables of the session hold what, what is "
    "still to be done. "
    "The session itself stays as it is. Write text only, no code."
)
REBUILT = (
    "What this cell did is lost. The cells before it were run again in a new session, with the "
    "answers that their calls "
    "had been given: their variables are back."
)
_NO_ROOM = (
    "\n[… {hidden:,} of {length:,} characters left out: your window has no room for them …]\n"
)
STARTED_ANEW = "A new session was started: `context` is there, your variables and imports are not."
NO_MODEL = "there is no model '{name}' in this run; there are: {known}"
NO_SOURCE = "there is no text source '{name}' in the context"
NO_TOOL = "there is no tool '{name}'"
DEFERRED = (
    "Your answer is noted, and put off by one turn: you had not seen the output above when you "
    "gave it. If it still stands, give it again with FINAL(…); otherwise go on."
)
CONTINUE = "Summary of the work so far (the session and its variables are as you left them):\n\n{summary}\n\nGo on."


def cut(text: str, max_chars: int, length: int, where: str) -> str:
    """Cut the middle out of a long string, leaving a note on how much was cut and where to find it.

    A text of at most ``max_chars`` characters is returned unchanged. ``length`` is the original
    length, in case ``text`` itself is already incomplete.

    >>> cut("abcdefghij", 4, 10, "in outputs[1]")
    'ab\\n[… 6 of 10 characters cut; the whole is in outputs[1] …]\\nij'
    """
    if length <= max_chars:
        return text
    head, tail = text[: max_chars - max_chars // 2], text[len(text) - max_chars // 2 :]
    hidden = length - len(head) - len(tail)
    return f"{head}\n[… {hidden:,} of {length:,} characters cut; the whole is {where} …]\n{tail}"


def shorten_message(message: Message, share: int, terse_chars: int) -> Message:
    """Return ``message`` with its content shortened to 1 / ``share`` of its length.

    The head and the tail remain, with a note on the original length. If ``terse_chars`` is not 0,
    only the head remains.

    >>> shorten_message(Message("user", "abcdefgh"), 4, 90).content
    'ab'
    """
    text = message.content
    if share == 1:
        return message
    if terse_chars:
        return msgspec.structs.replace(message, content=text[: len(text) // share])
    most = len(text) // share
    head, tail = text[: most - most // 2], text[len(text) - most // 2 :]
    mark = _NO_ROOM.format(hidden=len(text) - most, length=len(text))
    return (
        message
        if len(mark) + most >= len(text)
        else msgspec.structs.replace(message, content=head + mark + tail)
    )


def cell_report(cell: Cell) -> str:
    """Return the text that the model sees after one of its code cells has run.

    It contains the output, the value of the last expression and the error. The output must be
    truncated already.
    """
    parts = [cell.stdout.rstrip("\n")] if cell.stdout.strip() else []
    parts += [f"=> {cell.value}"] if cell.value is not None else []
    parts += [cell.error.rstrip("\n")] if cell.error else []
    if cell.restored:
        names = ", ".join(f"`{name}`" for name in cell.restored)
        parts.append(f"({names}: reserved, put back as it was; use another name)")
    return "\n".join(parts) or "(no output)"


NO_LAST_CELL = (Stop.DEADLINE, Stop.CANCELLED, Stop.ERROR)
"""Stop reasons after which no code runs in reply to the final request."""


def final_answer_request(stop: Stop, num_deaths: int) -> str:
    """Return the message that asks the model for its final answer.

    ``stop`` is the reason why the call ends, and ``num_deaths`` is the number of its sessions that
    died.
    """
    reasons = {
        Stop.CANCELLED: "You are asked to finish.",
        Stop.ERROR: LAST_SESSION.format(deaths=num_deaths),
    }
    text = LAST_WORD if stop in NO_LAST_CELL else LAST_CELL
    return text.format(reason=reasons.get(stop, f"The limit is reached ({stop})."))


def idle_reminder(num_idle: int, max_idle: int) -> str:
    """Return a reminder for a model that has sent ``num_idle`` messages in a row with neither code
    nor an answer.

    After ``max_idle`` such messages, the call ends.
    """
    left = max_idle - num_idle
    more = "one more message" if left == 1 else f"{left} more messages"
    return NUDGE if num_idle < 2 else NUDGE_AGAIN.format(more=more)


def saved_value_notes(note: Mapping[str, Any], has_failed: bool) -> list[str]:
    """Return notes that tell the model in which variables values of its last cell were saved.

    Saved values are replies that arrived before a failure, and values that the cell assigned to
    reserved names.
    """
    texts = []
    replies = note.get("replies")
    match replies:
        case {"name": str() as name, "num": int() as num, "arrived": int() as arrived} if arrived:
            if has_failed or arrived < num:
                texts.append(
                    f"{arrived} of the {num} replies to this cell's calls arrived; all are in the "
                    f"list `{name}`, in order" + (", None where one failed" * (arrived < num))
                )
    for name in note.get("kept") or ():
        texts.append(f"your value of `{name}` is in `own_{name}`")
    return texts


def observation_message(
    reports: Sequence[str], notes: Iterable[str], turn: int, max_turns: int, warnings: Iterable[str]
) -> str:
    """Return the message that the model receives after a turn's code has run.

    It contains the report of each cell, notes, warnings about limits, and the turn number ``turn``,
    which counts from 1.
    """
    body = (
        "\n".join(f"[cell {n} of {len(reports)}]\n{text}" for n, text in enumerate(reports, 1))
        if len(reports) > 1
        else "".join(reports)
    )
    extra = [f"[note] {note}" for note in notes]
    return "\n".join(
        [*([body] if body else []), *extra, *warnings, f"[turn {turn} of {max_turns}]"]
    )


def terse_cell_report(cell: Cell, max_chars: int) -> str:
    """Return a cell's output and error line, shortened to at most ``max_chars`` characters.

    The error line gets at least half of the space.

    >>> terse(Cell("", "ab\\n", "7", "Traceback …\\nValueError: no"), 90)
    'ab\\n7\\nValueError: no'
    """
    output = "\n".join(part for part in (cell.stdout.rstrip("\n"), cell.value) if part)
    if not cell.error:
        return output[:max_chars]
    error = _error_line(cell.error)
    output = f"{output}\n" if output else ""
    error = error[: max(max_chars // 2, max_chars - len(output))]
    return output[: max_chars - len(error) - 1].rstrip("\n") + "\n" * bool(output) + error


def _error_line(error: str) -> str:
    """Return the line of a traceback that names the error.

    It is the first line after the source lines.

    >>> _error_line("Traceback …\\n  File …\\nValueError: no\\nsecond line of the message")
    'ValueError: no'
    """
    lines = error.rstrip("\n").split("\n")
    places = [
        index
        for index, line in enumerate(lines[:-1])
        if line[:1] == " " or line.startswith("Traceback")
    ]
    return lines[places[-1] + 1 if places else 0]


_LAST = {"turns": 1, "calls": 2}
"""Maps each limit to the amount that is left when only one more turn is possible. For calls this is
2, because one call is reserved for the final reply."""


def low_limit_warnings(
    standing: Iterable[tuple[str, float, float]], told: dict[str, int]
) -> list[str]:
    """Return a warning for the model about each limit that is nearly used up.

    Each limit is mentioned when a quarter is left, when a tenth is left, and before the last turn.
    ``told`` stores the warnings already given, and is updated.
    """
    lines = []
    for name, spent, limit in standing:
        left = limit - spent
        if left <= _LAST.get(name, 0):
            level, remedy = 3, ": answer now with FINAL(…)"
        elif left <= 0.1 * limit:
            level, remedy = 2, ": finish soon"
        else:
            level, remedy = (1, "") if left <= 0.25 * limit else (0, "")
        if level > told.get(name, 0):
            told[name] = level
            if left > 0:
                lines.append(f"[limit] {_amount(left)} of {_amount(limit)} {name} left{remedy}")
    return lines


_LIMITS = lazy_pattern(
    r"^\[limit\] \S+ of \S+ \w+ left(; answer before they are gone|: finish soon|: answer now with "
    r"FINAL\(…\))?\n"
    r"|(?<=\[turn )\d+ of \d+(?=\]$)|(?<=You have )\d+(?= turns; each)"
    r"|You have [\d,]+ turns? \(each of your messages is one\)\. The run, .*"
    # Sizes that follow from the limits.
    r"|(?<=so put the text into it, at most )[\d,]+(?= characters)"
    r"|reads [\d,]+ characters and writes [\d,]+(?= tokens at most)|^size = \d+$",
    re.MULTILINE,
)


def strip_limit_text(message: Message) -> Message:
    """Return ``message`` without its run's limits, so that prompts of different runs can be
    compared."""
    return msgspec.structs.replace(message, content=_LIMITS.sub("", message.content))


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"


def count_context_chars(value: Any) -> int:
    """Count the characters of all values in a context, such as its strings."""
    if isinstance(value, str | bytes | FileBackedText):
        return len(value)
    if isinstance(value, Mapping):
        return sum(
            count_context_chars(key) + count_context_chars(item) for key, item in value.items()
        )
    if isinstance(value, list | tuple | set | frozenset):
        return sum(count_context_chars(item) for item in value)
    if isinstance(value, Table | BufferNdArray):
        return value.num_chars
    return len(str(value)) if value is not None else 0


def context_as_text(value: Any) -> str:
    """Return a context as plain text, for a model that receives it inside its prompt."""
    if isinstance(value, str):
        return value
    if picture_reference_digest(value) is not None:
        return picture_placeholder(value)
    if isinstance(value, FileBackedText):
        return value[:]
    if isinstance(value, Mapping):
        return "\n\n".join(f"=== {key} ===\n{context_as_text(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return "\n\n".join(
            f"=== {index} ===\n{context_as_text(item)}" for index, item in enumerate(value)
        )
    if isinstance(value, Table):
        rows = (value.columns, *value.rows())
        return "\n".join("\t".join(map(str, row)) for row in rows)
    return str(value.tolist() if isinstance(value, BufferNdArray) else value)


def plain_prompt(question: str, value: Any) -> str:
    """Return the prompt of a plain model call, which contains both the context and the question."""
    text = context_as_text(value) if value is not None else ""
    return f"{text}\n\nQuestion: {question}" if text.strip() else question
