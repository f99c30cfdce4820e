"""The part of command-line parsing that needs the standard library's ``argparse``.

These are ``--help``, usage errors, and arguments that ``parser.py`` does not parse itself.

``parser.py`` imports this module only for such a command line, because ``argparse`` and the parser
of a command with many options take 0.8 MB of memory. Which options a command has, and what a usage
error says, is decided there.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

WIDTH = 100
"""Width of ``--help`` in columns."""
HIDDEN = argparse.SUPPRESS
"""Help text of an argument that ``--help`` does not list."""
TwoFormSwitch = argparse.BooleanOptionalAction
"""Action of a switch that has two forms, such as ``--cite`` and ``--no-cite``."""


class RepeatableVerboseFlag(argparse.BooleanOptionalAction):
    """A ``--verbose`` switch that can be repeated.

    Once, it prints the command's own messages. Repeated, it also makes the log more verbose.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        super().__call__(parser, namespace, values, option_string)
        is_on = getattr(namespace, self.dest)
        namespace.verbosity = namespace.verbosity + 1 if is_on else 0


class RaisingArgumentParser(argparse.ArgumentParser):
    """An argument parser that reports errors through a function instead of exiting the process."""

    def __init__(self, *, fail: Callable[[str], NoReturn], **settings: Any) -> None:
        """Create a parser with the settings of ``argparse.ArgumentParser``.

        ``fail`` raises the exception for an error message.
        """
        super().__init__(**settings, allow_abbrev=False, formatter_class=_Format)
        self._fail = fail

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        self._fail(message.replace(": expected one argument", " needs a value"))


class _Format(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=WIDTH)
