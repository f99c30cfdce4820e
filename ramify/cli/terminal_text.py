r"""Prepare text for a terminal: remove escape sequences, shorten lines, and format values.

This module also draws the tree of a run's calls. Messages to the user go to stderr; stdout is for
the answer.

Colors are spans of rich's ``Text``, never characters of a string. ``write_lines`` turns them into
escape sequences after it has cleaned the text. ``protect_terminal`` puts a
``SanitizingTerminalStream`` before every terminal, so that everything else that is printed is
cleaned, too. An answer in a pipe stays unchanged.

The tree shows question → answer → cost → time, in the colors of the page
(viewer/static/style.css):

    0 Sum the revenue of all twelve sheets  → 332628  $0.011  12.4 s
    ├ 0.0 …sheet 1  → 30102  $0.001  912 ms
    ├ 0.7 …sheet 8  → 1414  $0.001  804 ms  differs: sheet 8 returned 1,414; …
    └ llm_query × 500: 497 done, 3 failed  $0.02  9.10 s

``show.py`` prints turns and code, ``terminal_sanitizer.py`` defines which characters are removed,
and ``format_quantities.py`` formats numbers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import msgspec

from ramify.errors import DeprecatedSettingNameWarning
from ramify.format_quantities import format_count as format_count
from ramify.format_quantities import format_dollars as format_dollars
from ramify.format_quantities import format_duration as format_duration
from ramify.format_quantities import format_growing_duration as format_growing_duration
from ramify.format_quantities import pluralize as pluralize
from ramify.logging import ComponentLogger, current_console
from ramify.terminal_sanitizer import (
    SanitizingTerminalStream,
    escape_json_controls,
    strip_control_characters,
    strip_controls_to_line,
)
from ramify.types.trajectory import Stop, Trajectory

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType
    from rich.segment import Segment
    from rich.text import Text

    from ramify.types.run_call_node import RunCallNode

Line: TypeAlias = "str | Text"
"""A line to print. Only ``Text`` objects are printed in color."""
_log = ComponentLogger("cli")


def shorten_to_line(text: str, width: int = 80) -> str:
    """Shorten text to a single line of at most ``width`` characters.

    Escape sequences and line breaks are removed.
    """
    line = strip_controls_to_line(text[: 4 * width])
    return line if len(line) <= width else line[: width - 1] + "…"


def format_size(num_bytes: int) -> str:
    """Format a number of bytes with a unit: ``12 kB``, ``3.4 GB``."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if num_bytes >= factor:
            return f"{num_bytes / factor:.3g} {unit}"
    return f"{num_bytes} B"


def format_local_time(unix_time: float) -> str:
    """Format a Unix time as local date and time, to the minute.

    The time 0 becomes ``-``.
    """
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(unix_time)) if unix_time else "-"


class StderrMessageWriter:
    """Writes a command's messages for the user to stderr.

    ``quiet`` suppresses everything except errors. While a live view is drawn, ``above`` receives
    the lines instead.
    """

    def __init__(self, quiet: bool = False, verbose: bool = False) -> None:
        self.quiet = quiet
        self.verbose = verbose
        self.above: Callable[[str], None] | None = None

    def say(self, text: str) -> None:
        """Print a message, unless the user asked for quiet output."""
        if not self.quiet:
            # A terminal that was closed must not end the work that reports to it.
            with contextlib.suppress(OSError, ValueError):
                (self.above or write_stderr)(text)

    def warning(self, text: str) -> None:
        """Print a warning, and log it so that the next run's journal records it."""
        self.say(f"ramify: warning: {text}")
        _log.warning("warning", text)

    def print_verbose(self, text: str) -> None:
        """Print a message only if the user asked for verbose output."""
        if self.verbose:
            self.say(text)

    def show_warnings_and_logs(self) -> None:
        """From now on, print each log record and each Python warning as one line.

        This includes warnings about old names of Ramify's settings, which Python would hide by
        default.
        """
        if (console := current_console()) is not None:
            console.show = self.say
            console.hidden.add("warning")
        # Python hides a DeprecationWarning outside of __main__.
        warnings.simplefilter("default", DeprecatedSettingNameWarning)
        warnings.showwarning = lambda message, *_, **__: self.say(f"ramify: warning: {message}")


def protect_terminal() -> None:
    """Remove escape sequences from everything that this process prints on a terminal from now on.

    This includes the output of libraries.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream.isatty() and not isinstance(stream, SanitizingTerminalStream):
            setattr(sys, name, SanitizingTerminalStream(stream))


def write_stderr(text: str) -> None:
    """Print text to stderr, with escape sequences removed."""
    print(strip_control_characters(text), file=sys.stderr, flush=True)


def print_error(text: str) -> None:
    """Print an error to stderr as one line, even if its text has several lines.

    It names the options of this command where it would name fields.
    """
    write_stderr("ramify: " + replace_fields_with_options(strip_controls_to_line(text)))


def set_option_names(options: Mapping[str, str]) -> None:
    """Set the command-line option for each limit field, such as ``--max-turns`` for ``max_turns``.

    Other options are left out.
    """
    _option_of.clear()
    _option_of.update({name: options[name] for name in options if name.startswith("max_")})
    for field, name in (("memory_bytes", "memory"), ("patience_s", "patience")):
        if name in options:
            _option_of[field] = options[name]


def replace_fields_with_options(text: str) -> str:
    """Replace field names in an error or hint with the options of this command.

    ``4 of 4 turns were used: raise max_turns`` becomes ``4 of 4 turns were used: raise
    --max-turns``. The name of a reason why a run stopped stays, as in ``max_turns: 4 of 4 turns``.
    """
    if not _option_of:
        return text
    names = "|".join(sorted(_option_of, key=len, reverse=True))
    pattern = rf"\b(raise |lower |omit |sandbox |its )({names})\b(?! of depth)|\b()({names})(?==)"
    return re.sub(pattern, lambda m: (m[1] or "") + _option_of[m[2] or m[4]], text)


_option_of: dict[str, str] = {}
"""Name of a field -> the option of this process's command that sets it."""


def json_line(value: Any) -> str:
    """Encode a value as one line of JSON that is safe to print on a terminal."""
    try:
        return escape_json_controls(msgspec.json.encode(value)).decode()
    except UnicodeEncodeError:  # lone surrogates can only be written as escapes
        import json

        return json.dumps(msgspec.to_builtins(value))


def write_lines(lines: Iterable[Line], *, use_pager: bool = False) -> None:
    """Print lines to stdout, in color on a terminal unless NO_COLOR is set.

    If ``use_pager`` is True, lines that do not fit on the terminal are shown by the program in
    PAGER (default: less)."""
    if not isinstance(sys.stdout, SanitizingTerminalStream):
        for line in lines:
            print(strip_control_characters(str(line)))
        return
    printed = _format_plain if os.environ.get("NO_COLOR") else _format_colored
    if not use_pager:
        for line in lines:
            sys.stdout.write_trusted_line(printed(line) + "\n")
        return
    import shlex
    import shutil
    import subprocess

    text = "".join(printed(line) + "\n" for line in lines)
    command = shlex.split(os.environ.get("PAGER", "less -R"))
    fits = text.count("\n") <= shutil.get_terminal_size().lines
    if fits or not command or shutil.which(command[0]) is None:
        sys.stdout.write_trusted_line(text)
        return
    subprocess.run(command, input=text.encode("utf-8", "replace"), check=False)


def _format_plain(line: Line) -> str:
    return strip_control_characters(str(line))


def _format_colored(line: Line) -> str:
    if isinstance(line, str):
        return strip_control_characters(line)
    from rich.color import ColorSystem

    return "".join(
        segment.style.render(
            strip_control_characters(segment.text), color_system=ColorSystem.STANDARD
        )
        if segment.style
        else strip_control_characters(segment.text)
        for segment in line.render(rich_console())
    )


@functools.cache
def rich_console(*, stderr: bool = False) -> Console:
    """Return a ``rich`` console that draws on the terminal.

    Content must first pass through ``sanitized_renderable``.
    """
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    file = stream.terminal if isinstance(stream, SanitizingTerminalStream) else stream
    return Console(file=file, highlight=False, markup=False, emoji=False)


def sanitized_renderable(content: RenderableType) -> RenderableType:
    """Wrap content for a rich console, so that escape sequences in its text are removed when it
    is drawn."""
    return _Cleaned(content)


class _Cleaned:
    def __init__(self, content: RenderableType) -> None:
        self._content = content

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Segment]:
        for segment in console.render(self._content, options):
            yield segment._replace(text=strip_control_characters(segment.text))


def discard_stdout() -> None:
    """Discard all later output to stdout.

    Without this, Python would report the same write error again at exit.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


_STYLES = {
    "good": "green",
    "bad": "red",
    "warn": "yellow",
    "live": "cyan",
    "odd": "magenta",
    "quiet": "dim",
}
"""Terminal style for each meaning of a text, such as ``good`` or ``bad``."""
_TOGETHER = 8
"""Maximum number of plain sub-calls of one call that are listed one by one."""


def styled_text(meaning: str, text: str) -> Text:
    """Color ``text`` by its meaning, such as ``good`` or ``bad``."""
    from rich.text import Text

    return Text(strip_control_characters(text), _STYLES[meaning])


def call_tree_lines(trajectory: Trajectory) -> Iterator[Text]:
    """Yield the lines of a run's tree of calls.

    Each call is shown with its answer, and outliers are marked.
    """
    from ramify.types.call_tree import CallTree

    tree = CallTree()
    tree.build_from_trajectory(trajectory)
    below: dict[str, list[RunCallNode]] = {}
    roots = []
    for node in tree.order:
        if node.parent is None:
            roots.append(node)
        else:
            below.setdefault(node.parent.call, []).append(node)
    for root in roots:
        yield _row(root)
        yield from _branches(root, below, "")


def _branches(
    node: RunCallNode, below: dict[str, list[RunCallNode]], indent: str
) -> Iterator[Text]:
    entries = list(_group_calls(below.get(node.id, []), below))
    for index, entry in enumerate(entries):
        is_last = index == len(entries) - 1
        stem = indent + ("└ " if is_last else "├ ")
        if isinstance(entry, list):
            yield _join_parts(styled_text("quiet", stem), _format_group(entry))
            continue
        yield _join_parts(styled_text("quiet", stem), _row(entry))
        yield from _branches(entry, below, indent + ("  " if is_last else "│ "))


def _group_calls(nodes: Sequence[RunCallNode], below: dict[str, Any]) -> Iterator[Any]:
    """Yield the entries that the printed call tree shows for the sub-calls of a call.

    Many plain sub-calls are combined into one entry, but outliers and failures also get separate
    rows.
    """
    plain = [node for node in nodes if node.kind != "rlm" and node.id not in below]
    if len(plain) <= _TOGETHER:
        yield from nodes
        return
    yield plain
    yield from [node for node in plain if node.outlier][:_TOGETHER]
    hidden = {node.id for node in plain}
    yield from (node for node in nodes if node.id not in hidden)


def _row(node: RunCallNode) -> Text:
    if node.has_failed:
        answer, tone = node.error or node.reason or str(node.stop), "bad"
    elif node.stop is None:
        answer, tone = "not ended", "warn"
    else:
        answer = node.answer or "(empty)"
        tone = "odd" if node.outlier else "good" if node.stop is Stop.FINAL else "warn"
    asked = f"…{node.distinguishing_text}" if node.distinguishing_text else node.question
    parts: list[Line] = [f"{node.id} {shorten_to_line(asked, 60)}"]
    parts += [_join_parts("→ ", styled_text(tone, shorten_to_line(answer, 60)))]
    parts += [format_dollars(node.cost)] if node.cost is not None else []
    if node.ended_s is not None:
        parts.append(format_duration(max(0.0, node.ended_s - node.started_s)))
    if node.stop not in (None, Stop.FINAL, Stop.ERROR):
        parts.append(styled_text("warn", str(node.stop)))
    if node.outlier and not node.has_failed:
        parts.append(styled_text("odd", f"differs: {shorten_to_line(node.outlier, 80)}"))
    return _join_parts(*parts, between="  ")


def _join_parts(*parts: Line, between: str = "") -> Text:
    from rich.text import Text

    return Text(between).join(Text(part) if isinstance(part, str) else part for part in parts)


def _format_group(nodes: Sequence[RunCallNode]) -> Text:
    failed = sum(node.has_failed for node in nodes)
    done = sum(node.stop is not None for node in nodes) - failed
    costs = [node.cost for node in nodes if node.cost is not None]
    ends = [node.ended_s for node in nodes if node.ended_s is not None]
    name = {"lm": "llm_query"}.get(nodes[0].kind, nodes[0].kind)
    head = f"{name} × {len(nodes):,}: {done:,} done"
    parts: list[Line] = [
        _join_parts(head, styled_text("bad", f", {failed:,} failed")) if failed else head
    ]
    parts += [format_dollars(sum(costs))] if costs else []
    parts += [format_duration(max(0.0, max(ends) - nodes[0].started_s))] if ends else []
    return _join_parts(*parts, between="  ")
