"""Generator of the tables in ``docs/cli.md``: ``python scripts/cli_page.py``.

The page holds the options of command NAME, or the exit codes, between ``<!-- begin NAME -->`` and
``<!-- end NAME -->``. Options that a command shares with ``ask`` share one row. A test
checks that the tables are up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

from ramify.cli.main import load_subcommand
from ramify.cli.parser import MEANINGS, CliOptionSpec

_PART = re.compile(r"(<!-- begin ([a-z -]+?) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def written(page: str) -> str:
    """Return ``page`` with every table generated again from the commands."""
    return _PART.sub(lambda match: f"{match[1]}{part(match[2])}{match[3]}", page)


def part(name: str) -> str:
    """Table of one command's options, or of the exit codes."""
    if name == "exit codes":
        return _table(
            ("code", "meaning"), [(str(code.value), meaning) for code, meaning in MEANINGS.items()]
        )
    options = load_subcommand(name).options
    shared = (
        []
        if name == "ask"
        else [each for each in options if each in load_subcommand("ask").options]
    )
    rows = [(_name(option), option.help) for option in options if option not in shared]
    if shared:
        rows.append((", ".join(f"`{each.long}`" for each in shared), "as for [`ask`](#ask)"))
    return _table(("option", "meaning"), rows)


def _name(option: CliOptionSpec) -> str:
    names = [*filter(None, [option.short]), option.long]
    if option.kind is bool and option.has_no:
        names.append(f"--no-{option.long[2:]}")
    value = "" if option.kind is bool else f" {option.value_placeholder}".replace("|", "\\|")
    return ", ".join(f"`{name}{value}`" if name == option.long else f"`{name}`" for name in names)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "".join(f"| {left} | {right} |\n" for left, right in [head, ("---", "---"), *rows])


def main() -> None:
    path = Path(__file__).parents[1] / "docs/cli.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
