"""Format a table that lists the kind, size and contents of each loaded source.

Files that were not loaded are listed below it, with the reason.

    source      kind  size    contents
    orders.csv  csv   1.2 MB  CSV: 3 columns a, b, c; 1,200 rows
    report.pdf  pdf   80 kB   PDF: 12 pages
    not loaded (1), is binary: x.bin

Many sources are grouped by suffix. The sentences about sources that were not read come from
``LoadedContext.warnings``.
"""

from __future__ import annotations

from collections.abc import Sequence

from ramify.cli.terminal_text import format_size, replace_fields_with_options
from ramify.format_quantities import pluralize
from ramify.sources.loaded_sources import LoadedContext, LoadedSourceInfo
from ramify.terminal_sanitizer import strip_control_characters

MAX_ROWS = 12
"""Maximum number of rows. If there are more sources, each row totals those with the same suffix."""
_MAX_NAME_CHARS = 48
_HEAD = ("source", "kind", "size", "contents")


def source_table(loaded: LoadedContext) -> list[str]:
    """Format the loaded sources as a table, and return its lines.

    A single source takes one line without a header.
    """
    items = loaded.items
    warnings = map(replace_fields_with_options, loaded.warnings())
    if len(items) == 1:
        return [*loaded.describe_items(), *warnings]
    if len(items) <= MAX_ROWS:
        rows = [_row(item) for item in items]
    else:
        groups: dict[tuple[str, str], list[LoadedSourceInfo]] = {}
        for item in items:
            stem, _, suffix = item.name.rpartition("/")[2].rpartition(".")
            groups.setdefault((f".{suffix}" if stem else "other", item.kind), []).append(item)
        by_size = sorted(groups.items(), key=lambda each: -sum(i.num_bytes for i in each[1]))
        rows = [
            _row(of[0]) if len(of) == 1 else _total_cells(f"{len(of):,} {suffix}", kind, of)
            for (suffix, kind), of in by_size[:MAX_ROWS]
        ]
        others = [item for _, of in by_size[MAX_ROWS:] for item in of]
        if others:
            rows.append(_total_cells(f"{len(others):,} others", "", others))
        rows.append(_total_cells(f"{len(items):,} sources", "", items))
    return [*_align_columns([_HEAD, *rows]), *warnings]


def _row(item: LoadedSourceInfo) -> tuple[str, ...]:
    name = (
        item.name if len(item.name) <= _MAX_NAME_CHARS else f"…{item.name[1 - _MAX_NAME_CHARS :]}"
    )
    contents = item.contents or pluralize(item.chars, "character")
    return name, item.kind, format_size(item.num_bytes), contents


def _total_cells(name: str, kind: str, items: Sequence[LoadedSourceInfo]) -> tuple[str, ...]:
    chars = pluralize(sum(item.chars for item in items), "character")
    return name, kind, format_size(sum(item.num_bytes for item in items)), chars


def _align_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align the columns of a table by padding all cells except those of the last column."""
    plain = [[strip_control_characters(cell).replace("\n", " ") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*plain, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in plain
    ]
