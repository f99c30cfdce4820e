"""``docs/cli.md`` is up to date: its commands parse, its options exist, and its tables match the
commands."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from ramify.cli.ask import KINDS
from ramify.cli.main import COMMANDS, load_subcommand, split
from ramify.cli.parser import ExitCode
from ramify.cli.settings import TABLES
from tests.cli.helpers import Shell
from tests.docs.pages import script

PAGE = (Path(__file__).parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
LINES = [
    line
    for kind, text in BLOCKS
    if kind == "bash"
    for line in text.splitlines()
    if "ramify" in line
]


@pytest.mark.parametrize("line", LINES)
def test_documented_commands_parse(line: str) -> None:
    words = shlex.split(line, comments=True)
    name, rest = split(words[words.index("ramify") + 1 :])
    spec = load_subcommand(name)
    given = spec.parse(rest)
    assert len(given["words"]) >= spec.min_words


def test_every_command_is_documented() -> None:
    shown = {
        split(shlex.split(line[line.index("ramify ") :], comments=True)[1:])[0] for line in LINES
    }
    assert shown == set(COMMANDS)


def test_option_tables_are_up_to_date() -> None:
    assert script("cli_page").written(PAGE) == PAGE, "run: python scripts/cli_page.py"


def test_every_documented_option_exists() -> None:
    known = {option.long for name in COMMANDS for option in load_subcommand(name).options}
    known |= {long.replace("--", "--no-", 1) for long in known}
    assert set(re.findall(r"--[a-z][a-z-]+[a-z]", re.sub(r"<!--.*?-->", "", PAGE))) <= known


def test_example_settings_file_has_known_keys_and_all_tables() -> None:
    (text,) = [text for kind, text in BLOCKS if kind == "toml"]
    shown = tomllib.loads(text)
    keys = {name.replace("_", "-") for name in KINDS}
    assert {key for key, value in shown.items() if not isinstance(value, dict)} <= keys
    assert {key: set(value) for key, value in shown.items() if isinstance(value, dict)} == {
        table: set(keys) for table, keys in TABLES.items()
    }


@pytest.mark.parametrize("name", COMMANDS)
def test_help_names_every_option(shell: Shell, name: str) -> None:
    done = shell.run(*name.split(), "--help")
    assert (done.code, done.err) == (ExitCode.ANSWERED, "")
    assert all(option.long in done.out for option in load_subcommand(name).options)
    assert max(map(len, done.out.splitlines())) <= 110


def test_help_lists_commands_and_version_is_printed(shell: Shell) -> None:
    overview = shell.run("--help")
    assert all(f"  {name} " in overview.out for name in COMMANDS)
    assert shell.run().out == overview.out
    assert re.fullmatch(r"ramify \d+\.\d+\.\d+\n", shell.run("--version").out)
