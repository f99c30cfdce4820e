"""Reads files that contain tables: Parquet, Arrow and Feather, DuckDB and xlsx.

The context gets the schema with the first rows as text; for a workbook, the text is all its sheets,
as tab-separated lines. Macros are not run, and formulas are not computed. ``session_tables.py``
defines how the rows are queried.
"""

from __future__ import annotations

from ramify.format_quantities import pluralize
from ramify.sources.archives import MACROS, checked_member_names, has_macros
from ramify.sources.file_kinds import InputFile
from ramify.sources.loaded_sources import (
    DocumentPartLocation,
    SourceCollector,
    UnreadableSourceError,
    missing_library_advice,
)
from ramify.sources.queryable_tables import TableInfo
from ramify.sources.session_tables import add_file_tables, describe_table, has_duckdb

_WHAT = {
    "parquet": "Parquet",
    "arrow": "Arrow",
    "duckdb": "DuckDB",
    "xlsx": "xlsx",
}


def read_parquet(file: InputFile, loading: SourceCollector) -> None:
    _read(file, "parquet", loading)


def read_arrow(file: InputFile, loading: SourceCollector) -> None:
    _read(file, "arrow", loading)


def read_duckdb(file: InputFile, loading: SourceCollector) -> None:
    _read(file, "duckdb", loading)


def read_xlsx(file: InputFile, loading: SourceCollector) -> None:
    parts = checked_member_names(file, "xlsx file", loading)
    infos = _infos(file, "xlsx", loading)
    if not infos:
        raise UnreadableSourceError("is a workbook without cells", "name one that has some")
    notes = [f"sheet {info.source.member}: {info.note}" for info in infos if info.note]
    notes += [MACROS] if has_macros(parts) else []
    detail = f"xlsx: {len(infos)} sheet{'s' * (len(infos) != 1)}"
    sheets, places, line = [], [], 1
    for info in infos:
        sheets.append(f"# Sheet {info.source.member}\n{info.text}")
        places.append(DocumentPartLocation(line, f"sheet {info.source.member}"))
        line += sheets[-1].count("\n") + 2
    text = "\n\n".join(sheets)
    loading.add(file.name, text, "xlsx", len(file.data), "; ".join([detail, *notes]), places)


def _read(file: InputFile, kind: str, loading: SourceCollector) -> None:
    infos = _infos(file, kind, loading)
    if not infos:
        raise UnreadableSourceError(
            f"is a {_WHAT[kind]} file without tables", "name one that has some"
        )
    head = f"{_WHAT[kind]} file {file.name!r}. Query it with sql("
    head += f'"SELECT … FROM {infos[0].source.name}").\n\n'
    size = file.path.stat().st_size if file.path is not None else len(file.data)
    text = head + "\n\n".join(map(describe_table, infos))
    loading.add(file.name, text, kind, size, f"{_WHAT[kind]}: {_summary(infos)}")


def _infos(file: InputFile, kind: str, loading: SourceCollector) -> list[TableInfo]:
    if kind != "xlsx" and not loading.has_tools:
        raise UnreadableSourceError(
            f"is {'an' if kind == 'arrow' else 'a'} {_WHAT[kind]} file, which only sql reads",
            "send its rows as CSV or JSONL",
        )
    if not has_duckdb():
        raise UnreadableSourceError(
            f"is {'an' if kind in 'arrow xlsx' else 'a'} {_WHAT[kind]} file",
            missing_library_advice(),
        )
    return add_file_tables(file.name, kind, file.path, file.data, loading)


def _summary(infos: list[TableInfo]) -> str:
    if len(infos) > 1:
        return pluralize(len(infos), "table")
    columns = pluralize(len(infos[0].columns), "column")
    return f"{columns}; {pluralize(infos[0].num_rows, 'row')}"
