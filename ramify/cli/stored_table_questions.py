"""List, show and delete stored maps for ``ramify runs``, ``ramify show`` and ``ramify runs rm``.

A map is one question asked about each row of a table.

    ramify runs --maps           one line for each map
    ramify show MAP              statistics of a map, and its rows
    ramify show MAP:7            question 7 of a map, as a run

``ramify view`` shows the page of a map.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import msgspec

from ramify.cli.parser import UsageError
from ramify.cli.terminal_text import (
    Line,
    format_count,
    format_dollars,
    format_duration,
    format_local_time,
    json_line,
    pluralize,
    print_error,
    shorten_to_line,
    styled_text,
)
from ramify.errors import RunInUse, StoreError
from ramify.store.folder_store import Store

if TYPE_CHECKING:
    from ramify.maps.map_table import StoredTableMap, TableMapSummary
    from ramify.store.base import RunStore
    from ramify.types.event import AnyEvent
    from ramify.types.trajectory import Trajectory

_MARK = "-map-"
"""Text that occurs in every map id but in no run id."""
_COLUMNS = ("map", "when", "question", "model", "rows", "failed", "requests", "cost", "output")
_SHOWN_ROWS = 20
"""Number of rows that ``show`` prints without ``--full``. Rows with an error come first."""


def is_map_id(name: str) -> bool:
    """Return True if a name looks like the id of a map over a table, or of one of its questions."""
    return _MARK in name


def find_map(store: RunStore, name: str) -> StoredTableMap:
    """Open the stored map (one question asked about each table row) with the given id.

    Raises StoreError if the store has no such map.
    """
    from ramify.maps.map_journal import TableMapStore
    from ramify.maps.stored_maps import open_map_table

    path = TableMapStore(store.root).find_journal_path(name) if isinstance(store, Store) else None
    if path is None:
        raise StoreError(f"no map has the id {name}: ramify runs --maps lists them")
    return open_map_table(path)


def question_events(store: RunStore, name: str) -> list[AnyEvent] | None:
    """Return the events of one question of a map, given as ``MAP:7``.

    Returns None if the name has no question number. If the question was answered in a session, the
    events come from the journal of its run.
    """
    from ramify.maps.map_table import row_to_run_events

    id, colon, number = name.partition(":")
    if not colon:
        return None
    if not number.isdecimal():
        raise UsageError(f"{name}: give the number of a question, as in {id}:7")
    table = find_map(store, id)
    row = table.row_at(int(number))
    return list(store.events(row.run)) if row.run else row_to_run_events(table, row.number)


def question_row_line(store: RunStore, name: str) -> str:
    """Return the line that says which table row a question of a map is about, given as ``MAP:7``.

    If a direct call answered the question, the line has what the model read of the row.
    """
    from ramify.maps.map_table import context_as_line

    id, _, number = name.partition(":")
    table = find_map(store, id)
    row = table.row_at(int(number))
    lines = table.last_attempt_lines(row.number)
    first = next((each.first_request for each in lines if each.first_request is not None), None)
    text = context_as_line(first.context) if first is not None else ""
    return f"row {row.row} of the map" + f": {text}" * bool(text)


def trajectory_from_events(events: Iterable[AnyEvent]) -> Trajectory:
    """Combine the events of a run into its trajectory, the tree of calls with their turns."""
    from ramify.types.event import TrajectoryBuilder

    fold = TrajectoryBuilder()
    for event in events:
        fold.apply(event)
    return fold.trajectory


def print_maps(store: RunStore, *, as_json: bool) -> None:
    """Print a line for each stored map (one question per table row), newest first."""
    from ramify.maps.map_journal import TableMapStore
    from ramify.maps.stored_maps import open_map_table

    if not isinstance(store, Store):
        raise UsageError("--maps: this store has no folder, so it has no maps")
    if not as_json:
        print("\t".join(_COLUMNS))
    for path in TableMapStore(store.root).paths():
        try:
            figures = open_map_table(path).summary()
        except (StoreError, OSError) as error:
            print_error(str(error))
            continue
        if as_json:
            print(json_line(msgspec.structs.asdict(figures)))
        else:
            print("\t".join(_cells(figures)))


def remove_map(store: RunStore, name: str) -> int:
    """Delete a stored map, and return the number of bytes freed.

    The runs of its rows are kept, as are the partial results of a map on a Ray cluster. Raises
    RunInUse while the map is being written.
    """
    table = find_map(store, name)
    if table.is_alive:
        raise RunInUse(
            f"map {table.id} is being written by another process: stop that process first"
        )
    num_bytes = 0
    for path in table.stored_files():
        num_bytes += path.stat().st_size
        path.unlink()
    return num_bytes


def map_lines(table: StoredTableMap, full: bool) -> Iterator[Line]:
    """Yield the lines that ``ramify show`` prints about a map: its statistics and its first rows.

    If ``full`` is True, all rows are included.
    """
    figures = table.summary()
    yield f"map {figures.id}  {format_local_time(figures.started_at)}"
    yield " · ".join(
        [
            f"{_num_rows(figures)} {'row' if (figures.total or figures.rows) == 1 else 'rows'}",
            f"{figures.failed:,} failed",
            pluralize(figures.calls, "request"),
            format_dollars(figures.cost),
            "in progress" if figures.alive else "",
        ]
    ).removesuffix(" · ")
    yield f"question: {shorten_to_line(figures.question, 200)}"
    if figures.out:
        yield f"output: {figures.out}"
    if num := table.num_unaskable:
        num_rows = pluralize(num, "row")
        yield f"not asked: {num_rows}, empty or unreadable; see the errors in the output"
    yield ""
    rows = sorted(table.question_rows, key=lambda row: (not row.error, row.row))
    rows = rows if full else rows[:_SHOWN_ROWS]
    for row in rows:
        took = (
            f"  {format_dollars(row.cost)}  {format_duration(row.seconds)}"
            if table.has_runs
            else ""
        )
        equal = f"  ×{1 + row.equal}" if row.equal else ""
        head = f"{row.number} row {row.row}: {shorten_to_line(row.text, 60)} → "
        if row.error:
            yield styled_text("bad", f"{head}{shorten_to_line(row.error, 200)}")
        else:
            yield f"{head}{shorten_to_line(row.answer or '(open)', 60)}{took}{equal}"
    if len(rows) < len(table.question_rows):
        yield f"… {len(table.question_rows) - len(rows):,} more: --full, or ramify view"


def _num_rows(figures: TableMapSummary) -> str:
    of = "" if figures.total in (None, figures.rows) else f" of {figures.total:,}"
    return f"{figures.rows:,}{of}"


def _cells(figures: TableMapSummary) -> list[str]:
    return [
        figures.id,
        format_local_time(figures.started_at),
        shorten_to_line(figures.question, 100),
        figures.model,
        _num_rows(figures),
        str(figures.failed),
        format_count(figures.calls),
        format_dollars(figures.cost),
        shorten_to_line(figures.out, 200),
    ]
