"""Split, check and fill in command templates that a user writes, such as ``{python} my_agent.py
{question}``.

    "{python} my_agent.py {question}"  ──split──> words  ──filled──> arguments of a process

A command is split into words first and filled in afterwards, so that a question with spaces or
quotes is one argument, and no shell reads it. This module also lists the environment variables that
an untrusted program may get from this process: where programs and the home folder are, and the
language, but no key. Each caller defines its placeholders; ``child_process.py`` runs the command.
"""

from __future__ import annotations

import os
import shlex
import shutil
import string
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ramify.errors import ConfigError, did_you_mean

PASSED_ON = (
    "PATH",
    "HOME",
    "USER",
    "LOGNAME",
    "SHELL",
    "LANG",
    "LC_ALL",
    "LC_CTYPE",
    "TZ",
    "TMPDIR",
)
"""Environment variables of this process that are passed on to every untrusted program."""


def split_command(
    command: str | Sequence[str], placeholders: Collection[str], where: str
) -> list[str]:
    """Split a user's command into words, and check that it uses only the given placeholders.

    ``where`` is the beginning of each error message.

    Raises ConfigError if the command is empty, or has an unclosed quote or an unknown
    placeholder.
    """
    try:
        words = shlex.split(command) if isinstance(command, str) else list(command)
    except ValueError as error:
        raise ConfigError(f"{where}: command {command!r:.200}: {error}") from None
    if not words:
        raise ConfigError(f"{where}: command is empty")
    for word in words:
        _check_placeholders(word, placeholders, where)
    return words


def fill_placeholders(words: Sequence[str], values: Mapping[str, str]) -> list[str]:
    """Replace each placeholder in the words of a command with its value, and return the new
    words."""
    values = replace_null_characters(values)
    return [word.format_map(values) for word in words]


def replace_null_characters(values: Mapping[str, str]) -> dict[str, str]:
    """Replace null characters, which process arguments cannot contain, with U+FFFD."""
    return {
        name: value.replace("\0", "\N{REPLACEMENT CHARACTER}") for name, value in values.items()
    }


def absolute_path_if_file(word: str) -> str:
    """Return a command word as an absolute path if it names a file in the current folder.

    Other words are returned unchanged. This is needed because the command will run in another
    folder.
    """
    if "{" in word or os.path.isabs(word) or not os.path.isfile(word):
        return word
    if os.sep not in word and shutil.which(word) is not None:
        return word
    return str(Path(word).absolute())


def check_program_installed(word: str, where: str) -> None:
    """Raise ConfigError unless the first word of a command names a program that is installed on
    this machine."""
    if "{" not in word and shutil.which(word) is None:
        raise ConfigError(
            f"{where}: the program {word!r:.200} was not found: install it, or give its full path"
        )


def passed_environment() -> dict[str, str]:
    """Return this process's environment variables that untrusted programs may see
    (``PASSED_ON``)."""
    return {name: os.environ[name] for name in PASSED_ON if name in os.environ}


def _check_placeholders(word: str, known: Collection[str], where: str) -> None:
    """Raise ConfigError if a word contains an unknown placeholder, or one with a format such as
    ``{name:>8}``."""
    try:
        parts = list(string.Formatter().parse(word))
    except ValueError as error:
        raise ConfigError(
            f"{where}: command: {word!r:.200}: {error}; for a literal brace, write {{{{ or }}}}"
        ) from None
    for _, name, format, conversion in parts:
        if name is None:
            continue
        if name in known and (format or conversion):
            raise ConfigError(
                f"{where}: command: placeholder {{{name}}} cannot have a format or a conversion"
            )
        if name not in known:
            raise ConfigError(
                f"{where}: command has an unknown placeholder {{{name}}}: "
                f"{did_you_mean(name, known)}; for a literal brace, write {{{{ or }}}}"
            )
