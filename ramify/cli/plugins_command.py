"""The command ``ramify plugins``: list each name that can be chosen and the package that provides
it.

The names are those of models, sandboxes, tasks and so on. ``ramify/plugins.py`` finds the plugins.
"""

from __future__ import annotations

import shutil
import sys

from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.terminal_text import json_line, shorten_to_line
from ramify.errors import did_you_mean
from ramify.plugins import PluginEntry, PluginRegistry, registries
from ramify.terminal_sanitizer import strip_controls_to_line


def plugins(words: list[str], json: bool | None) -> int:
    found = list(registries())
    kinds = {each.kind: each for each in found}
    kind = " ".join(words)
    if words and kind not in kinds:
        if words[0] in kinds:
            raise UsageError(f"unexpected argument '{words[1]}'")
        raise UsageError(f"unknown kind '{kind}': {did_you_mean(kind, kinds)}")
    chosen = [kinds[kind]] if words else found
    entries = [
        entry
        for each in chosen
        for entry in (each.entries() if isinstance(each, PluginRegistry) else [each])
    ]
    if json:
        for entry in entries:
            print(json_line(entry._asdict()))
        return ExitCode.ANSWERED
    widths = [max(map(len, column)) for column in zip(*map(_cells, entries), strict=True)][:3]
    for entry in entries:
        print(_row(entry, widths) if sys.stdout.isatty() else "\t".join(_cells(entry)))
    return ExitCode.ANSWERED


def _cells(entry: PluginEntry) -> list[str]:
    about = f"broken: {entry.error}" if entry.error else entry.about
    return [
        shorten_to_line(entry.kind),
        shorten_to_line(entry.name, 40),
        shorten_to_line(entry.origin, 40),
        strip_controls_to_line(about),
    ]


def _row(entry: PluginEntry, widths: list[int]) -> str:
    """Format a plugin as one line, truncated to the width of the terminal.

    The error of a broken plugin is never cut.
    """
    *cells, about = _cells(entry)
    line = "  ".join([*(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)), ""])
    room = max(shutil.get_terminal_size().columns - len(line), 8)
    return line + (about if entry.error else shorten_to_line(about, room))


COMMAND = SubcommandSpec(
    "plugins",
    "List everything that can be chosen by name: its kind, its name, the package that it comes\n"
    "from, and what it is. In a pipe, columns are separated by tabs.",
    plugins,
    "[KIND]",
    0,
    3,  # some kinds have several words
    options=(CliOptionSpec("json", bool, "print one JSON object per line", has_no=False),),
)
