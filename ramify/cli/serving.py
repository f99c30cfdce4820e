"""Shared start-up and shutdown of the serving commands (``serve``, ``mcp``, ``serve-policy``).

It decides which options of ``ask`` a server takes, reads its settings, and installs its handlers of
Ctrl-C and SIGTERM.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from typing import Any

from ramify.cli.ask import KINDS, NO_MODEL, SETTINGS
from ramify.cli.settings import fill, unknown_variables
from ramify.cli.stderr_notes import StderrNotes, write
from ramify.cli.stop_signals import on_signal

_OF_ONE_QUESTION = ("cite", "cache", "json", "verbose", "progress")
LIMITS = tuple(option for option in SETTINGS if option.name not in _OF_ONE_QUESTION)
"""Options of ``ask`` that a server takes: its models, limits and sandbox."""


def begin(given: dict[str, Any], command: str) -> tuple[dict[str, Any] | None, StderrNotes]:
    """Read the settings and create the notes. Settings are None if no model is set (reported)."""
    settings = fill(given, KINDS)
    notes = StderrNotes(bool(settings.get("quiet")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.warning(line)
    if not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", f"ramify {command}"))
        return None, notes
    return settings, notes


def on_stop(do: Callable[[], None]) -> None:
    """Call ``do`` for each Ctrl-C and each SIGTERM, while the current event loop runs."""
    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(number, do)
