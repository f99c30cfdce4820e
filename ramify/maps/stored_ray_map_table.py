"""Presents a map that ran on a Ray cluster as a table.

The rows are read from the files in the map's output folder.

    maps/ID.jsonl               its header: what was asked, and where the parts are
    ray_maps/KEY.json           what is spent, and how many rows have an answer
    OUT/part-00000-000000.jsonl its rows

The store does not have the model's replies for such a map, so its rows cannot be opened as runs,
and only the total cost is known. Listing the maps does not read the output files, which
``ray_source.py`` writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from ramify.errors import SourceError, StoreError
from ramify.maps.map_journal import RAY_MAPS, MapJournalHeader, MapJournalLine, RayMapHeaderFields
from ramify.maps.map_table import MAX_CHARS, MapQuestionResult, StoredTableMap, TableMapSummary
from ramify.maps.part_output import NOT_ASKED, is_part, open_output_folder
from ramify.maps.shared_budget import TableMapSpending, read_spending
from ramify.pip_install_command import install_command
from ramify.types.trajectory import answer_text, cut

MAX_ROWS = 100_000
"""Maximum number of rows that are read from the output."""


class RayMapOutputTable(StoredTableMap):
    """A map that ran on a Ray cluster, presented as a table.

    Its rows are read from the files in the output folder.
    """

    has_runs = False

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._read: tuple[object, ...] = ()
        """(name, size in bytes, modification time) of each part as of the last read."""

    @property
    def question_rows(self) -> list[MapQuestionResult]:
        """Return the rows that the map has written so far, at most 100,000.

        Raises StoreError if the output cannot be read.
        """
        try:
            import pyarrow.fs as arrow_fs
        except ModuleNotFoundError:
            raise StoreError(
                f"the parts of map {self.id} need pyarrow: {install_command('ray')}"
            ) from None
        header, parts = self._header_and_parts()
        try:
            output = open_output_folder(header.out)
            selector = arrow_fs.FileSelector(output.folder, allow_not_found=True)
            files = sorted(
                (info.base_name, info.size, info.mtime_ns)
                for info in output.filesystem.get_file_info(selector)
                if is_part(info.base_name) and info.base_name.endswith(output.ending)
            )
            if self._read != (*files,):
                found = (row for name, *_ in files for row in output.read_file_rows(name))
                self._rows = list(_table_rows(islice(found, MAX_ROWS), parts))
                self._read = (*files,)
        except (OSError, SourceError) as error:
            raise StoreError(f"the parts of map {self.id} cannot be read: {error}") from None
        return self._rows

    def stored_files(self) -> list[Path]:
        return [self.path, *(path for path in [self._spending_path()] if path.exists())]

    def summary(self) -> TableMapSummary:
        header, _ = self._header_and_parts()
        spent = read_spending(str(self._spending_path())) or TableMapSpending()
        num = spent.answered + spent.failed
        return TableMapSummary(
            id=self.id,
            question=header.question,
            model=header.model,
            started_at=header.started_at,
            out=header.out,
            total=None,
            rows=num,
            failed=spent.failed,
            questions=num,
            calls=spent.usage.calls,
            cost=spent.cost,
            alive=self.is_alive,
        )

    def last_attempt_lines(self, number: int) -> list[MapJournalLine]:
        raise StoreError(
            f"map {self.id} ran on a Ray cluster, whose output has the answers but not the "
            f"replies: see it with ramify show {self.id}"
        )

    def _spending_path(self) -> Path:
        _, parts = self._header_and_parts()
        return self.path.parents[1] / RAY_MAPS / parts.record

    def _header_and_parts(self) -> tuple[MapJournalHeader, RayMapHeaderFields]:
        if self.header is None or self.header.parts is None:
            raise StoreError(f"{self.path} does not say where the parts of the map are")
        return self.header, self.header.parts


def _table_rows(
    rows: Iterator[Mapping[str, Any]], parts: RayMapHeaderFields
) -> Iterator[MapQuestionResult]:
    for number, row in enumerate(rows):
        text = " ".join(answer_text(row[name]) for name in parts.shown if row.get(name) is not None)
        error = str(row.get(parts.error) or "")
        error = "" if error.startswith(NOT_ASKED) else error
        has_answer = not row.get(parts.error)
        values = {name: row.get(name) for name in parts.answers}
        answer = values if len(values) > 1 else next(iter(values.values()))
        yield MapQuestionResult(
            number,
            number,
            cut(" ".join(text.split()), MAX_CHARS),
            cut(answer_text(answer), MAX_CHARS) if has_answer else None,
            cut(error, 2 * MAX_CHARS),
        )
