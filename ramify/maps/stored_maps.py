"""Opens any stored map as a table, whether its rows are in a journal or in the output folder of a
Ray cluster.

    open_map_table(path)     the table of one map
    OpenMapTableCache        the tables of many, each read once

Rows in a journal are read by ``map_table.py``, and rows in the output files of a Ray cluster by
``stored_ray_map_table.py``.
"""

from __future__ import annotations

from pathlib import Path

from ramify.maps.map_journal import read_header
from ramify.maps.map_table import StoredTableMap
from ramify.maps.stored_ray_map_table import RayMapOutputTable


def open_map_table(path: Path) -> StoredTableMap:
    """Open the map with the journal at ``path``, and read its current rows.

    Raises StoreError if the journal cannot be read.
    """
    header = read_header(path)
    has_parts = header is not None and header.parts is not None
    return (RayMapOutputTable(path) if has_parts else StoredTableMap(path)).refresh()


class OpenMapTableCache:
    """A cache of stored maps that were opened as tables.

    Each journal is read once, and afterwards only its new lines.
    """

    def __init__(self) -> None:
        self._tables: dict[Path, StoredTableMap] = {}

    def get_table(self, path: Path) -> StoredTableMap:
        """Return the up-to-date table of a stored map, given the path of its journal.

        Opens the map at the first call. Raises StoreError if the journal cannot be read.
        """
        table = self._tables.get(path)
        if table is None:
            table = self._tables[path] = open_map_table(path)
            return table
        return table.refresh()
