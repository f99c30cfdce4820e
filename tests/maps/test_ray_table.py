"""What other commands know of a map on a Ray cluster, from its record and its parts."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ramify.errors import StoreError
from ramify.maps.map_journal import RAY_MAPS, MapJournalHeader, RayMapHeaderFields, TableMapStore
from ramify.maps.map_output import AddedAnswerColumns
from ramify.maps.map_table import row_to_run_events
from ramify.maps.part_output import open_output_folder
from ramify.maps.row_source import RowSource
from ramify.maps.shared_budget import TableMapSpending
from ramify.maps.stored_maps import open_map_table
from ramify.store.folder_store import Store
from ramify.types.message import Usage
from ramify.viewer.run_catalog import RunCatalog
from tests.cli.helpers import Shell

pytest.importorskip("pyarrow")
ID = "20261127-010203-map-0123456789"
ADDED = AddedAnswerColumns(None, "", ("id", "text"))


def stored(home: Path, out: Path) -> Path:
    """Write what a map on a cluster leaves: its header, its record and two parts, of which the
    second has a row that was not asked."""
    parts = RayMapHeaderFields("0123.json", ("text",), ADDED.answers, ADDED.error)
    header = MapJournalHeader(ID, "0123", "Is it urgent?", 5.0, "openai:m", str(out), parts=parts)
    journal = TableMapStore(home).create(header)
    journal.close()
    spent = TableMapSpending(Usage(100, 20, calls=4), 0.5, answered=2, failed=1)
    (home / RAY_MAPS).mkdir()
    (home / RAY_MAPS / "0123.json").write_text(msgspec.json.encode(spent).decode())
    out.mkdir()
    (out / "_map.json").write_text("{}")
    rows = [("yes", None), (None, "too hot"), ("no", None), (None, "not asked: the limit")]
    output, source = (
        open_output_folder(str(out)),
        RowSource("rows", ("id", "text"), None, lambda: iter(())),
    )
    for part in range(2):
        data = [
            {"id": n, "text": f"row {n}", **ADDED.added_values(*rows[n])}
            for n in range(2 * part, 2 * part + 2)
        ]
        unfinished = ".unfinished" * part
        name = f"part-00000-{part:06}{unfinished}.jsonl"
        (out / name).write_bytes(output.encode(data, source, ADDED))
    return journal.path


def test_it_is_listed_shown_and_deleted(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    home = Path(shell.env["RAMIFY_HOME"])
    path = stored(home, shell.folder / "urgent")
    head, line = [line.split("\t") for line in shell.run("runs", "--maps").out.splitlines()]
    found = dict(zip(head, line, strict=True))
    assert (found["map"], found["rows"], found["failed"]) == (ID, "3", "1")
    assert (found["requests"], found["cost"]) == ("4", "$0.50")
    shown = shell.run("show", ID).out.splitlines()
    assert shown[1] == "3 rows · 1 failed · 4 requests · $0.50"
    assert shown[5:] == [
        "1 row 1: row 1 → too hot",
        "0 row 0: row 0 → yes",
        "2 row 2: row 2 → no",
        "3 row 3: row 3 → (open)",
    ]
    row = shell.run("show", f"{ID}:1")
    assert row.code != 0
    assert "ran on a Ray cluster, whose output has the answers but not the replies" in row.err
    assert shell.run("runs", "rm", ID).code == 0
    assert not path.exists()
    assert list((home / RAY_MAPS).iterdir()) == []
    assert len(list((shell.folder / "urgent").glob("part-*"))) == 2


def test_its_rows_are_read_again_if_a_part_changes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    table = open_map_table(stored(tmp_path / "home", out))
    assert [row.state for row in table.question_rows] == ["answered", "failed", "answered", "open"]
    first = out / "part-00000-000000.jsonl"
    first.write_text(first.read_text().replace("yes", "maybe"))
    assert table.refresh().question_rows[0].answer == "maybe"
    with pytest.raises(StoreError, match="the answers but not the replies"):
        row_to_run_events(table, 0)
    first.write_text("")
    with pytest.raises(StoreError, match=f"^the parts of map {ID} cannot be read: .* has no rows"):
        _ = table.question_rows


def test_the_page_shows_it_without_runs(tmp_path: Path) -> None:
    stored(tmp_path / "home", tmp_path / "out")
    library = RunCatalog([Store(tmp_path / "home")])
    (found,) = library.map_summaries()
    assert (found["rows"], found["cost"], found["alive"]) == (3, 0.5, False)
    shown = library.map_detail(found["key"])["shown"]
    assert [(row["answer"], row["key"]) for row in shown][:2] == [("yes", ""), (None, "")]
