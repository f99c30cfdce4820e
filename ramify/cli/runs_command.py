"""``ramify runs``: list what is stored, remove runs, prune the store."""

from __future__ import annotations

import sys
from typing import Literal

import msgspec

from ramify.cli.exit_codes import ExitCode
from ramify.cli.parse_units import parse_age, parse_size
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError
from ramify.cli.terminal_text import clean, count, dollars, many, moment, one_line, seconds, size
from ramify.store.index import RunSummary
from ramify.store.store import Store

_SHORT = len("20260301-142501-5gk0x7m")
"""The part of an id that is shown in a table: unique, and enough to name the run by. What follows
are the question's words."""
_COLUMNS = ("run", "when", "question", "model", "stop", "calls", "tokens", "cost", "seconds")


def runs(words: list[str], limit: int | None, json: bool | None) -> int:
    limit = 20 if limit is None else limit
    if limit < 0:
        raise UsageError(f"--limit {limit}: give 0, for all, or more")
    found = Store().runs(limit or None)
    if json:
        for summary in found:
            print(msgspec.json.encode(_as_dict(summary)).decode())
    elif sys.stdout.isatty():
        _draw(found)
    else:
        print("\t".join(_COLUMNS))
        for summary in found:
            print("\t".join(_cells(summary, 200)))
    return ExitCode.ANSWERED


def rm(words: list[str]) -> int:
    store = Store()
    paths = [store.path(each) for each in words]  # all are found before any is deleted
    for path in dict.fromkeys(paths):
        freed = store.remove(path.stem)
        print(f"deleted {path.stem} ({size(freed)})")
    return ExitCode.ANSWERED


def prune(words: list[str], older_than: str | None, keep: int | None, max_size: str | None) -> int:
    if keep is not None and keep < 0:
        raise UsageError(f"--keep {keep}: give 0 or more")
    if keep is None and not older_than and not max_size:
        raise UsageError("say what may go: --older-than AGE, --keep N or --max-size SIZE")
    store = Store()
    before = store.size()
    removed = store.prune(
        parse_age(older_than, "--older-than") if older_than else None,
        keep,
        parse_size(max_size, "--max-size") if max_size else None,
    )
    for id in removed.runs:
        print(f"deleted {id}")
    for id in removed.evaluations:
        print(f"deleted evaluation {id}")
    after = store.size()
    evaluations = (
        f" and {many(len(removed.evaluations), 'evaluation')}" if removed.evaluations else ""
    )
    freed = f"{size(max(before - after, 0))} freed, {size(after)} left"
    print(f"{many(len(removed.runs), 'run')}{evaluations} deleted, {freed}")
    return ExitCode.ANSWERED


def _as_dict(summary: RunSummary) -> dict[str, object]:
    """Every field, also those that have their default."""
    fields = {name: getattr(summary, name) for name in summary.__struct_fields__}
    fields["usage"] = {
        name: getattr(summary.usage, name) for name in summary.usage.__struct_fields__
    }
    return {"run": fields.pop("id"), **fields}


def _cells(summary: RunSummary, width: int) -> list[str]:
    state = "running" if summary.alive else "damaged" if summary.problem else "cut off"
    return [
        summary.id,
        moment(summary.started_at),
        one_line(summary.question, width),
        clean(summary.model),
        str(summary.stop or state),
        f"{summary.usage.calls:,}",
        count(summary.usage.total_tokens),
        dollars(summary.cost),
        seconds(summary.seconds),
    ]


def _draw(found: list[RunSummary]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(summary, 60) for summary in found]
    rows = [[row[0][:_SHORT], row[1][5:], *row[2:]] for row in rows]  # the year is in the id
    table = Table(box=None, header_style="bold", pad_edge=False)
    for index, name in enumerate(_COLUMNS):
        least = {"question": 20, "model": 12}.get(name) or max(
            [len(name), *(len(row[index]) for row in rows)]
        )
        justify: Literal["left", "right"] = (
            "right" if name in ("calls", "tokens", "cost", "seconds") else "left"
        )
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", min_width=least)
    for row in rows:
        table.add_row(*map(Text, row))
    Console(highlight=False).print(table)


COMMANDS = (
    CommandSpec(
        "runs",
        "List stored runs, newest first. Piped, the columns are separated by tabs.",
        runs,
        options=(
            OptionSpec("limit", int, "how many (default: 20; 0 is all)"),
            OptionSpec("json", bool, "one JSON object a line", has_no=False),
        ),
    ),
    CommandSpec("runs rm", "Delete runs, and what only they hold.", rm, "RUN…", 1, None),
    CommandSpec(
        "runs prune",
        """\
Delete old runs and evaluations, and what only they hold. What is being written stays. With --keep alone all
but the newest go.""",
        prune,
        options=(
            OptionSpec("older_than", str, "delete what ended longer ago: 30d, 12h", "AGE"),
            OptionSpec(
                "keep", int, "keep this many newest runs in any case, and as many evaluations"
            ),
            OptionSpec(
                "max_size", str, "delete the oldest until the store fits: 2GB, 500MB", "SIZE"
            ),
        ),
    ),
)
