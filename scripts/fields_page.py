"""Generator of ``docs/fields.md``, the reference of a training run's fields:
``python scripts/fields_page.py [--check]``.

The page has a table for each configuration class, between ``<!-- begin -->`` and ``<!-- end -->``,
from the same list as ``ramify train --fields``. With ``--check`` nothing is written, and an
outdated page is an error.
"""

from __future__ import annotations

import sys
from pathlib import Path

from ramify.cli.list_train_fields import field_table_cells
from ramify.train.config import Run
from ramify.train.config_fields import ConfigField, class_summary, fields, public_path

PAGE = Path(__file__).parents[1] / "docs/fields.md"
_BEGIN, _END = "<!-- begin -->\n", "<!-- end -->"


def written(page: str) -> str:
    """Return ``page`` with its tables generated again."""
    before, _, rest = page.partition(_BEGIN)
    return f"{before}{_BEGIN}{tables()}{_END}{rest.partition(_END)[2]}"


def tables() -> str:
    """Return a table for each class, in the order in which the fields of a run reach them."""
    every = list(fields(Run))
    places: dict[type, list[str]] = {Run: []}
    rows: dict[type, dict[str, ConfigField]] = {}
    for each in every:
        if each.section is not None:
            places.setdefault(each.section, []).append(each.name)
        rows.setdefault(each.owner, {}).setdefault(each.name.rpartition(".")[2], each)
    return "".join(_table(kind, where, rows[kind]) for kind, where in places.items())


def _table(kind: type, where: list[str], rows: dict[str, ConfigField]) -> str:
    title = ", ".join(f"`{each}`" for each in where) if where else "The run itself"
    lines = [f"## {title}", f"`{public_path(kind)}`: {class_summary(kind).replace('``', '`')}", ""]
    lines += ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name, each in rows.items():
        _, _, default, type_words, _, meaning = field_table_cells(each)
        default = f"`{default}`" if default else "must be given"
        row = (f"`{name}`", type_words, default, meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |")
    return "\n".join([*lines, "", ""])


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    new = written(page)
    if "--check" in sys.argv[1:]:
        if new != page:
            sys.exit("docs/fields.md is outdated: run python scripts/fields_page.py")
        return
    PAGE.write_text(new, encoding="utf-8")


if __name__ == "__main__":
    main()
