"""A plain command line is parsed without ``argparse``, and with the same result."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ramify.cli import main as cli
from ramify.cli.parser import CliOptionSpec, SubcommandSpec, parse_plain_arguments


def arguments_of(option: CliOptionSpec) -> list[list[str]]:
    """Return the ways to give one option, as lists of arguments."""
    forms = [option.long, *filter(None, [option.short])]
    if option.kind is bool:
        return [[form] for form in forms] + [[form] for form in option.long_forms]
    values = {int: ("3", "12"), float: ("2", "0.5")}.get(option.kind, ("a", "b c"))
    once = [[form, value] for form in forms for value in values]
    return [*once, [f"{option.long}={values[0]}"], once[0] + once[-1]]


def with_argparse(spec: SubcommandSpec, arguments: list[str]) -> dict[str, object]:
    return vars(spec.parser().parse_known_intermixed_args(arguments)[0])


@pytest.mark.parametrize("name", [name for name in cli.COMMANDS if name != "mcp"])
def test_each_option_has_the_value_that_argparse_gives_it(name: str) -> None:
    spec = cli.load_subcommand(name)
    for option in spec.options:
        for given in arguments_of(option):
            for arguments in (given, ["a word", *given], [*given, "-", ""]):
                assert spec.parse(arguments) == with_argparse(spec, arguments), arguments


@pytest.mark.parametrize(
    "arguments",
    [
        ["--model"],
        ["--model", "-x"],
        ["--max-cost", "much"],
        ["--cite=yes"],
        ["-mNAME"],
        ["-vv"],
        ["--", "-q"],
        ["--help"],
        ["--mod", "a"],
    ],
)
def test_everything_else_is_left_to_argparse(arguments: list[str]) -> None:
    assert parse_plain_arguments(cli.load_subcommand("ask").options, arguments) is None


def test_a_plain_question_does_not_import_argparse() -> None:
    code = (
        "import sys\n"
        "from ramify.cli.main import run\n"
        "code = run(['ask', 'why', '--model', 'offline:none', '--max-turns', '2'])\n"
        "print(code, 'argparse' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert done.stdout.split()[-1] == "False", done.stdout + done.stderr
