"""Opens a stored map as a table, wherever its rows are.

    open_map_table(path)     the table of one map
    MapTableCache            the tables of many, each read once

Not here: the rows in a journal (``map_table.py``), and those in the parts of an output
(``stored_ray_map_table.py``).
"""

from __future__ import annotations

from pathlib import Path

from ramify.maps.map_journal import read_header
from ramify.maps.map_table import StoredMap
from ramify.maps.stored_ray_map_table import RayMapOutputTable


def open_map_table(path: Path) -> StoredMap:
    """Return the map whose journal is at ``path``, up to date. Raises StoreError."""
    header = read_header(path)
    has_parts = header is not None and header.parts is not None
    return (RayMapOutputTable(path) if has_parts else StoredMap(path)).refresh()


class MapTableCache:
    """The maps of stores, each read once, and again only what was added."""

    def __init__(self) -> None:
        self._tables: dict[Path, StoredMap] = {}

    def of(self, path: Path) -> StoredMap:
        """Return the map whose journal is at ``path``, up to date. Raises StoreError."""
        table = self._tables.get(path)
        if table is None:
            table = self._tables[path] = open_map_table(path)
            return table
        return table.refresh()
