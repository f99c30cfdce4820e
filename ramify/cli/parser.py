"""The command line as data: options in a table, and a parser that says what is wrong in one line.

On the standard library's ``argparse``, since starting up counts: the frameworks on top of it take
as long to read an option as a whole short question takes (see ``docs/log.md``). Options may stand
before, between and after the words; they are never abbreviated; an unknown one is answered with the
nearest that exists.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Sequence
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

WIDTH = 100


class UsageError(Exception):
    """The command was called wrongly."""


class OptionSpec(NamedTuple):
    """One option; of a switch there are two, ``--cite`` and ``--no-cite``."""

    name: str
    """As a Python name: ``max_cost`` is ``--max-cost``."""
    kind: type
    """``str``, ``int``, ``float``, ``bool`` for a switch, ``list`` for texts that may be given
    several times."""
    help: str
    metavar: str = ""
    short: str = ""
    """``-m``"""
    has_no: bool = True
    """A switch that can be turned off, since a file or a variable may have turned it on."""

    @property
    def long(self) -> str:
        return "--" + self.name.replace("_", "-")

    def add_to(self, parser: argparse.ArgumentParser) -> None:
        names = [*filter(None, [self.short]), self.long]
        if self.kind is bool:
            action: Any = argparse.BooleanOptionalAction if self.has_no else "store_true"
            parser.add_argument(*names, dest=self.name, action=action, default=None, help=self.help)
        elif self.kind is list:
            parser.add_argument(
                *names, dest=self.name, action="append", metavar=self.shown_as, help=self.help
            )
        else:
            parser.add_argument(
                *names, dest=self.name, type=self.kind, metavar=self.shown_as, help=self.help
            )

    @property
    def shown_as(self) -> str:
        """What stands for its value in help."""
        return self.metavar or {int: "N", float: "X"}.get(self.kind, "NAME")


class CommandSpec(NamedTuple):
    """How one command is called, and what it does."""

    name: str
    about: str
    """What it does; the first line says it in short."""
    run: Callable[..., int]
    """Takes ``words`` and each option by name; returns the exit code."""
    words: str = ""
    """``QUESTION PATH…``; empty where there are none."""
    min_words: int = 0
    max_words: int | None = 0
    """None: any number."""
    options: Sequence[OptionSpec] = ()
    epilog: str = ""

    def call(self, arguments: list[str]) -> int:
        """Read ``arguments`` and run. Raises UsageError."""
        given = vars(self.parser().read(arguments, {option.long for option in self.options}))
        words = given.pop("words")
        if len(words) < self.min_words:
            raise UsageError(f"give {self.words}")
        if self.max_words is not None and len(words) > self.max_words:
            raise UsageError(f"'{words[self.max_words]}' is one word too many")
        return self.run(words, **given)

    def parser(self) -> CommandParser:
        parser = CommandParser(
            prog=f"ramify {self.name}",
            description=self.about,
            epilog=self.epilog,
            allow_abbrev=False,
            formatter_class=_Format,
            usage=" ".join(filter(None, ["ramify", self.name, self.words, "[OPTIONS]"])),
        )
        parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
        for option in self.options:
            option.add_to(parser)
        return parser


class CommandParser(argparse.ArgumentParser):
    """Raises where ``argparse`` would print and exit."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message.removeprefix("argument "))

    def read(self, arguments: list[str], known: Iterable[str]) -> argparse.Namespace:
        end = arguments.index("--") if "--" in arguments else len(arguments)
        found, rest = self.parse_known_intermixed_args(arguments[:end])
        if rest:
            raise UsageError(unknown_option(rest[0], known))
        found.words += arguments[end + 1 :]
        return found


class _Format(argparse.RawDescriptionHelpFormatter):
    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=32, width=WIDTH)


def unknown_option(given: str, known: Iterable[str]) -> str:
    close = get_close_matches(given.partition("=")[0], known, n=1)
    return f"unknown option {given}" + (f": did you mean {close[0]}?" if close else "")
