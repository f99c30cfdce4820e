"""Parse command lines.

Each command declares its options in a table, and a usage error is reported in one line.

This module also defines the exit codes, and parses values with units such as ``30d`` and ``2GB``.

Start-up time and memory matter, so a plain command line is parsed here, and everything else, such
as ``--help`` or a wrong option, by the standard library's ``argparse`` in ``argument_parser.py``.
The usual frameworks take as long to import as a whole short question takes (see docs/log.md).
Options may come before, between or after the positional words. They cannot be abbreviated, and the
error for an unknown option suggests the nearest existing one.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from ramify.cli.settings import VALUE_FORMS
from ramify.cli.terminal_text import set_option_names, write_stderr
from ramify.errors import ConfigError, RunInUse, SourceError, UnknownRun
from ramify.logging import configure_console
from ramify.nearest_name import nearest_name
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.cli.argument_parser import RaisingArgumentParser


class ExitCode(enum.IntEnum):
    """The exit codes of ``ramify`` commands."""

    ANSWERED = 0
    ERROR = 1
    USAGE = 2
    CUT_SHORT = 3
    NO_ANSWER = 4
    SUSPENDED = 5
    STOPPED = 130
    BROKEN_PIPE = 141
    TERMINATED = 143


MEANINGS = {
    ExitCode.ANSWERED: "answered",
    ExitCode.ERROR: "failed; one line on stderr says why",
    ExitCode.USAGE: "usage error: a wrong option, setting, recipe or name; nothing was run",
    ExitCode.CUT_SHORT: "stopped by a limit or by Ctrl-C; the best answer so far was printed",
    ExitCode.NO_ANSWER: "ended without an answer",
    ExitCode.SUSPENDED: "suspended (no network, quota, key or disk space); continue with --resume",
    ExitCode.STOPPED: "stopped by a second Ctrl-C",
}


WRONG = (ConfigError, RunInUse, SourceError, UnknownRun)
"""Exception types for errors in the command itself, found before anything runs. The exit code is
then ``USAGE``."""


def exit_code_of_run(stop: Stop, answer: Any) -> ExitCode:
    """Return the exit code for a run, based on its stop reason and its answer."""
    if stop is Stop.ERROR:
        return ExitCode.ERROR
    if stop is Stop.SUSPENDED:
        return ExitCode.SUSPENDED
    if answer is None:
        return ExitCode.NO_ANSWER
    return ExitCode.CUT_SHORT if stop.is_truncated() else ExitCode.ANSWERED


def exit_codes_epilog() -> str:
    """Return the list of exit codes shown at the end of a command's ``--help``."""
    return "\n".join(
        ["exit codes:", *(f"  {code.value:<4}{meaning}" for code, meaning in MEANINGS.items())]
    )


_VERBOSE = "verbose"
_RECORDS = "print log records to stderr; -vv prints more"


class UsageError(Exception):
    """Raised if the command line is wrong: an unknown option, a bad value, or a missing
    argument."""


class CliOptionSpec(NamedTuple):
    """Declares one command-line option.

    A boolean option has two forms, such as ``--cite`` and ``--no-cite``.
    """

    name: str
    """Python name of the option, such as ``max_cost`` for ``--max-cost``."""
    kind: type
    """``str``, ``int`` or ``float``; ``bool`` for a switch; ``list`` for a repeatable string."""
    help: str
    metavar: str = ""
    short: str = ""
    """Short form, such as ``-m``."""
    has_no: bool = True
    """Whether a switch also has a ``--no-`` form, which undoes a setting from a file or a
    variable."""

    @property
    def long(self) -> str:
        return "--" + self.name.replace("_", "-")

    def add_to(self, parser: RaisingArgumentParser) -> None:
        from ramify.cli.argument_parser import RepeatableVerboseFlag, TwoFormSwitch

        names = [*filter(None, [self.short]), self.long]
        if self.kind is bool:
            action: Any = TwoFormSwitch if self.has_no else "store_true"
            action = RepeatableVerboseFlag if self.name == _VERBOSE else action
            parser.add_argument(*names, dest=self.name, action=action, default=None, help=self.help)
        elif self.kind is list:
            parser.add_argument(
                *names,
                dest=self.name,
                action="append",
                metavar=self.value_placeholder,
                help=self.help,
            )
        else:
            parser.add_argument(
                *names,
                dest=self.name,
                type=self.parse_value,
                metavar=self.value_placeholder,
                help=self.help,
            )

    def parse_value(self, text: str) -> Any:
        """Convert the text of a value to the option's type, or raise UsageError."""
        try:
            return self.kind(text)
        except ValueError:
            raise UsageError(f"{self.long} {text!r:.80} is not {VALUE_FORMS[self.kind]}") from None

    @property
    def long_forms(self) -> list[str]:
        """The option's long form and, for a switch that has one, its ``--no-`` form."""
        has_two = self.kind is bool and self.has_no
        return [self.long, f"--no-{self.long[2:]}"] if has_two else [self.long]

    @property
    def value_placeholder(self) -> str:
        """The placeholder for the option's value in ``--help``, such as ``FILE``."""
        return self.metavar or {int: "N", float: "X"}.get(self.kind, "NAME")


class SubcommandSpec(NamedTuple):
    """Declares one subcommand: its description, its arguments and options, and the function that
    runs it."""

    name: str
    about: str
    """Description for ``--help``; the first line is a summary."""
    run: Callable[..., int]
    """Function that runs the subcommand. It receives ``words`` and each option by name, and
    returns the exit code."""
    words: str = ""
    """Positional arguments for the usage line, such as ``QUESTION PATH…``; empty if none."""
    min_words: int = 0
    max_words: int | None = 0
    """Maximum number of positional arguments; None for any number."""
    options: Sequence[CliOptionSpec] = ()
    epilog: str = ""
    advise_on_option: Callable[[str, list[str]], str] | None = None
    """Function that returns advice on an unknown option, given all arguments of the command too, or
    "" if a similar option is to be suggested."""

    def call(self, arguments: list[str]) -> int:
        """Parse the arguments, run the command, and return its exit code.

        Raises UsageError for bad arguments.
        """
        values = self.parse(arguments)
        words = values.pop("words")
        # Records go to stderr as a command's own messages do.
        configure_console(write_stderr, values.pop("verbosity"))
        set_option_names({option.name: option.long for option in self.options})
        if len(words) < self.min_words:
            raise UsageError(f"missing argument: give {self.words}")
        if self.max_words is not None and len(words) > self.max_words:
            raise UsageError(f"unexpected argument '{words[self.max_words]}'")
        return self.run(words, **values)

    def parse(self, arguments: list[str]) -> dict[str, Any]:
        """Parse the arguments, and return the values of all options by name.

        The result also contains ``words`` and ``verbosity``. Raises UsageError for bad arguments.
        """
        values = parse_plain_arguments(self.options, arguments)
        if values is not None:
            return values
        end = arguments.index("--") if "--" in arguments else len(arguments)
        namespace, unknown = self.parser().parse_known_intermixed_args(arguments[:end])
        if unknown:
            known = [form for option in self.options for form in option.long_forms]
            advice = self.advise_on_option(unknown[0], arguments) if self.advise_on_option else ""
            if advice:
                raise UsageError(f"unknown option {unknown[0]}: {advice}")
            raise UsageError(unknown_option_message(unknown[0], [*known, "--verbose", "--help"]))
        namespace.words += arguments[end + 1 :]
        return vars(namespace)

    def parser(self) -> RaisingArgumentParser:
        """Return the ``argparse`` parser of this command, which also formats ``--help``."""
        from ramify.cli.argument_parser import HIDDEN, RaisingArgumentParser

        parser = RaisingArgumentParser(
            fail=_fail,
            prog=f"ramify {self.name}",
            description=self.about,
            epilog=self.epilog,
            usage=" ".join(filter(None, ["ramify", self.name, self.words, "[OPTIONS]"])),
        )
        parser.add_argument("words", nargs="*", help=HIDDEN)
        for option in self.options:
            option.add_to(parser)
        parser.set_defaults(verbosity=0)
        if all(option.name != _VERBOSE for option in self.options):
            parser.add_argument("-v", "--verbose", action="count", dest="verbosity", help=_RECORDS)
        return parser


def _fail(message: str) -> NoReturn:
    raise UsageError(message)


def parse_plain_arguments(
    options: Sequence[CliOptionSpec], arguments: Sequence[str]
) -> dict[str, Any] | None:
    """Parse a simple command line, in which options are not abbreviated and all values are plain.

    Each option is in its full or its short form. A plain value does not begin with a dash. Returns
    None for all other arguments.
    """
    forms = {form: option for option in options for form in (option.long, option.short) if form}
    values: dict[str, Any] = {option.name: None for option in options}
    words: list[str] = []
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("-") or argument == "-":
            words.append(argument)
            continue
        form, has_value, text = argument.partition("=")
        option = forms.get(form)
        if option is None or option.name == _VERBOSE or (has_value and form == option.short):
            return None
        if option.kind is bool:
            if has_value:
                return None
            values[option.name] = True
            continue
        if not has_value:
            text = next(rest, "-")
            if text.startswith("-"):
                return None
        try:
            value = text if option.kind is list else option.parse_value(text)
        except UsageError:
            return None
        values[option.name] = (
            [*(values[option.name] or ()), value] if option.kind is list else value
        )
    return {**values, "words": words, "verbosity": 0}


def unknown_option_message(given: str, known: Sequence[str]) -> str:
    """Describe an option that a command does not have, and suggest a similar one from ``known``.

    Options that are used more often come first in ``known``.
    """
    name = given.partition("=")[0]
    # An option that was split, such as --token into --token-file, is nearer than a similar word.
    close = [option for option in known if option.startswith(f"{name}-")]
    if not close:
        # So is the only one with a word in common: --key-file instead of --keys for --api-key.
        words = set(name.strip("-").split("-"))
        sharing = [option for option in known if words & set(option.strip("-").split("-"))]
        close = sharing if len(sharing) == 1 else [*filter(None, [_nearest_option(name, known)])]
    return f"unknown option {given}" + (f": did you mean {close[0]}?" if close else "")


def _nearest_option(name: str, known: Sequence[str]) -> str | None:
    """Return the option that is most like ``name``, apart from the dashes, which all have."""
    forms = {option.lstrip("-"): option for option in reversed(known)}
    close = nearest_name(name.lstrip("-"), [option.lstrip("-") for option in known])
    return None if close is None else forms[close]


_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 7 * 86400.0}
_BYTES = {
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
}
_MEASURE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_duration(text: str, option: str) -> float:
    """Parse a duration with a unit, and return it in seconds.

    The unit is required, because data older than a duration is deleted.

    >>> parse_duration("1.5h", "--older-than")
    5400.0
    """
    return _parse(text, option, _SECONDS, "30d, 12h or 90m")


def parse_size(text: str, option: str, *, default_unit: str = "b") -> int:
    """Parse a size with a unit, and return it in bytes.

    A number without a unit has ``default_unit``. If that is empty, the unit is required.

    >>> parse_size("2GB", "--memory")
    2000000000
    """
    return int(_parse(text, option, _BYTES, "2GB or 500MB", default_unit))


def _parse(
    text: str,
    option: str,
    units: dict[str, float] | dict[str, int],
    examples: str,
    default_unit: str = "",
) -> float:
    match = _MEASURE.fullmatch(text)
    unit = (match[2] or default_unit).lower() if match else ""
    if match is not None and not unit:
        raise ConfigError(f"{option} {text!r} has no unit: write it as {examples}")
    factor = units.get(unit)
    if match is None or factor is None:
        raise ConfigError(f"{option} {text!r} is not understood: write it as {examples}")
    return float(match[1]) * factor
