"""What the commands that serve have in common: which options of ask they take, how they begin, and
what stops them."""

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
"""Options of ask: what a question may spend at most, by whom and where it is answered."""


def begin(given: dict[str, Any], command: str) -> tuple[dict[str, Any] | None, StderrNotes]:
    """The settings, and where to say things. None where no model is set, which was said then."""
    settings = fill(given, KINDS)
    notes = StderrNotes(bool(settings.get("quiet")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.say(f"ramify: warning: {line}")
    if not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", f"ramify {command}"))
        return None, notes
    return settings, notes


def on_stop(do: Callable[[], None]) -> None:
    """Call ``do`` for each Ctrl-C and each SIGTERM, as long as the running loop lasts."""
    for number in (signal.SIGINT, signal.SIGTERM):
        on_signal(number, do)
