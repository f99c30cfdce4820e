"""The tables of ``docs/cli.md``, written from the commands themselves: ``python -m
ramify.cli.reference``.

Between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` the page holds the options of command
NAME, or the exit codes. A test compares them.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from ramify.cli.exit_codes import MEANINGS
from ramify.cli.main import command
from ramify.cli.parser import OptionSpec

_PART = re.compile(r"(<!-- begin ([a-z -]+?) -->\n).*?(<!-- end \2 -->)", re.DOTALL)


def written(page: str) -> str:
    """``page`` with every part as the commands have it now."""
    return _PART.sub(lambda found: f"{found[1]}{part(found[2])}{found[3]}", page)


def part(name: str) -> str:
    if name == "exit codes":
        return _table(
            ("code", "meaning"), [(str(code.value), meaning) for code, meaning in MEANINGS.items()]
        )
    return _table(
        ("option", "what"), [(_name(option), option.help) for option in command(name).options]
    )


def _name(option: OptionSpec) -> str:
    names = [*filter(None, [option.short]), option.long]
    if option.kind is bool and option.has_no:
        names.append(f"--no-{option.long[2:]}")
    value = "" if option.kind is bool else f" {option.shown_as}".replace("|", "\\|")
    return ", ".join(f"`{name}{value}`" if name == option.long else f"`{name}`" for name in names)


def _table(head: tuple[str, str], rows: list[tuple[str, str]]) -> str:
    return "".join(f"| {left} | {right} |\n" for left, right in [head, ("---", "---"), *rows])


def main() -> None:
    path = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/cli.md")
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
