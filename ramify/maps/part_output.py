"""The output of a map on a Ray cluster.

It is a folder in which each file holds the answers to one part of the rows, at most 500.

    OUT/_map.json                               whose answers these are (see ray_map.py)
    OUT/part-00000-000000.jsonl                 rows that were asked
    OUT/part-00000-000001.unfinished.jsonl      some of these were not, and say so in ``error``

The folder is local or a URL that pyarrow or fsspec can open. ``ray_row_partition.py`` divides the
rows into parts, and ``ray_source.py`` writes the file of each part.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.maps.map_output import ENDINGS, AddedAnswerColumns, open_output
from ramify.maps.open_row_source import open_paths
from ramify.maps.ray_row_partition import filesystem_of
from ramify.maps.row_source import RowSource

NOT_ASKED = "not asked:"
"""Beginning of the error message of a row about which no question was asked."""
UNFINISHED = ".unfinished"
"""Suffix of a part's file name, before the extension, if no question was asked about some of the
part's rows."""
_NAME = re.compile(r"part-\d{5}-\d{6}")


def is_part(name: str) -> bool:
    """Return True if a file name is the name of an output part, such as
    ``part-00000-000001.jsonl``."""
    return _NAME.match(name) is not None


def open_output_folder(out: str) -> PartedOutputFolder:
    """Open the output folder of a map at a path or URL.

    The extension of the folder's name determines the format of its files. Raises ConfigError if the
    extension is unknown or the path is a file, and SourceError if the URL cannot be opened.
    """
    ending = Path(out.rstrip("/")).suffix.lower() or ".jsonl"
    if ending not in ENDINGS:
        raise ConfigError(f"the output {out} has an unknown ending: give {', '.join(ENDINGS)}")
    filesystem, folder = filesystem_of(out)
    if "://" not in out and Path(folder).is_file():
        raise ConfigError(f"{out} is a file, and on a Ray cluster the output is a folder of parts")
    return PartedOutputFolder(filesystem, folder.rstrip("/"), ending)


class PartedOutputFolder(msgspec.Struct, frozen=True):
    """The output folder of a map on a Ray cluster.

    It contains one file for each part of the rows.
    """

    filesystem: Any
    """The pyarrow filesystem of the folder."""
    folder: str
    ending: str
    """Extension of the files: ``.jsonl``, ``.csv``, ``.tsv`` or ``.parquet``."""
    old: frozenset[str] = frozenset()
    """Files of parts that may lack some answers."""

    def rows_already_written(self, part: str) -> list[dict[str, Any]]:
        """Return the rows that an earlier invocation of the map wrote for an unfinished part.

        Returns an empty list if the part is complete or was never written.
        """
        names = (f"{part}{self.ending}", f"{part}{UNFINISHED}{self.ending}")
        name = next((each for each in names if each in self.old), "")
        return self.read_file_rows(name) if name else []

    def read_file_rows(self, name: str) -> list[dict[str, Any]]:
        """Read the rows of one file in the map's output folder."""
        with tempfile.TemporaryDirectory(prefix="ramify-part-") as folder:
            path = Path(folder) / f"part{self.ending}"
            with self.filesystem.open_input_file(f"{self.folder}/{name}") as file:
                path.write_bytes(file.read())
            return [row for row in open_paths([str(path)]).values() if isinstance(row, dict)]

    def encode(
        self, rows: list[dict[str, Any]], source: RowSource, added: AddedAnswerColumns
    ) -> bytes:
        """Encode rows as the contents of one file in the folder's format."""
        with tempfile.TemporaryDirectory(prefix="ramify-part-") as folder:
            path = Path(folder) / f"part{self.ending}"
            output = open_output(path, source, added)
            try:
                for number, row in enumerate(rows):
                    output.write_row(row, number)
                output.finish()
            finally:
                output.close()
            return path.read_bytes()
