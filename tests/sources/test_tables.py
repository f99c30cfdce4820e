"""Tables in files: what ``tables`` lists, what ``sql`` returns, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sqlite3
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import openpyxl
import pyarrow
import pyarrow.feather
import pyarrow.parquet
import pytest

from ramify.errors import SourceError
from ramify.sources.duckdb_process import query_tables
from ramify.sources.load_sources import LoadedContext, load
from ramify.sources.queryable_tables import TableLocation


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind, each written by its own tool."""
    folder = tmp_path_factory.mktemp("tables")
    people = pyarrow.table({"id": [1, 2, 3], "team": ["a", "b", "a"]})
    pyarrow.parquet.write_table(people, folder / "people.parquet")
    pyarrow.feather.write_feather(people, folder / "teams.feather")
    with duckdb.connect(folder / "shop.duckdb") as database:
        database.execute("CREATE TABLE orders (id INT, price DECIMAL(9, 2))")
        database.execute("INSERT INTO orders VALUES (1, 2.5), (2, 3)")
    book = openpyxl.Workbook()
    book.active.title = "Cities"
    book.active.append(["id", "city", "next"])
    book.active.append([1, "Bonn", "=A2+1"])
    book.create_sheet("order").append([1, 2])
    book.save(folder / "book.xlsx")
    with sqlite3.connect(folder / "hosts.db") as old:
        old.execute("CREATE TABLE hosts (id INTEGER, name TEXT)")
        old.executemany("INSERT INTO hosts VALUES (?, ?)", [(1, "h1"), (2, "h2")])
    old.close()
    (folder / "sales.csv").write_text("id;amount\n1;5\n2;7\n")
    (folder / "events.jsonl").write_text('{"id": 1, "tag": {"x": 2}}\n{"id": 2, "tag": null}\n')
    (folder / "bad.parquet").write_bytes(b"PAR1" + b"x" * 100 + b"PAR1")
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedContext:
    return load([folder])


@pytest.fixture(scope="module")
def sql(loaded: LoadedContext) -> Callable[..., Any]:
    return loaded.tools["sql"]


def test_tables_are_listed_with_columns_rows_and_samples(loaded: LoadedContext):
    listed = {each["name"]: each for each in loaded.tools["tables"]}
    assert sorted(listed) == sorted(
        ["Cities", "order_", "events", "hosts", "orders", "people", "sales", "teams"]
    )
    assert listed["sales"] == {
        "name": "sales",
        "file": "sales.csv",
        "columns": {"id": "BIGINT", "amount": "BIGINT"},
        "rows": 2,
        "samples": [(1, 5), (2, 7)],
    }
    assert listed["orders"]["columns"] == {"id": "INTEGER", "price": "DECIMAL(9,2)"}
    assert listed["hosts"]["columns"] == {"id": "BIGINT", "name": "VARCHAR"}
    assert listed["Cities"]["samples"] == [(1, "Bonn", None)]
    assert "Tables for sql(), in DuckDB's dialect" in loaded.manifest()


def test_raw_text_stays_and_binary_tables_have_their_schema(loaded: LoadedContext):
    assert isinstance(loaded.context, dict)
    assert loaded.context["sales.csv"] == "id;amount\n1;5\n2;7\n"
    assert "people (id BIGINT, team VARCHAR)\n-- 3 rows" in loaded.context["people.parquet"]
    assert "# Sheet Cities\nid\tcity\tnext\n1\tBonn" in loaded.context["book.xlsx"]


def test_one_query_joins_all_files(sql: Callable[..., Any]):
    assert sql(
        "SELECT p.team, o.price, h.name, s.amount, e.tag.x, t.team, c.city FROM people p JOIN "
        "orders o USING (id) JOIN hosts h USING (id) JOIN sales s USING (id) JOIN events e USING "
        "(id) JOIN teams t USING (id) JOIN Cities c USING (id) WHERE p.id = ?",
        [1],
    ) == [("a", 2.5, "h1", 5, 2, "a", "Bonn")]


def test_named_sqlite_database_has_its_own_dialect(sql: Callable[..., Any]):
    assert sql("PRAGMA table_info(hosts)", db="hosts.db")[0][1] == "id"
    with pytest.raises(ValueError, match=r"db='x': name one of 'hosts\.db'"):
        sql("SELECT 1", db="x")


def test_damaged_files_and_missing_values_are_reported(loaded: LoadedContext, folder: Path):
    assert any("bad.parquet" in problem.name for problem in loaded.problems)
    assert any("1 formula without a stored value" in item.detail for item in loaded.items)
    with pytest.raises(SourceError, match="damaged parquet file"):
        load([folder / "bad.parquet"])


@pytest.mark.parametrize(
    ("text", "detail", "columns"),
    [
        (
            "Report\n\nregion,amount\nNorth,10\nSouth,20\n",
            "CSV: 2 columns region, amount; 2 rows; the first 2 lines not in the table",
            ["region", "amount"],
        ),
        (
            "1,2\n3,4\n",
            "CSV: 2 columns column0, column1; 2 rows; no header line",
            ["column0", "column1"],
        ),
        ("a,a\n1,2\n", "CSV: 2 columns a, a_1; 1 row", ["a", "a_1"]),
        ("a,b\n1,2,\n3,4,\n", "CSV: 2 columns a, b; 2 rows", ["a", "b"]),
        ('"a,b"\n1\n2\n', "CSV: 1 column a,b; 2 rows", ["a,b"]),
    ],
)
def test_description_of_csv_names_the_columns_that_sql_finds(
    text: str, detail: str, columns: list[str], tmp_path: Path
):
    (tmp_path / "t.csv").write_text(text)
    for loaded in (load(tmp_path / "t.csv"), load(tmp_path / "t.csv", mapped_bytes=1)):
        (table,) = loaded.tools["tables"]
        assert loaded.items[0].detail == detail
        assert list(table["columns"]) == columns
        assert (detail in loaded.manifest(), loaded.warnings()) == (True, [])


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a,b\n1,2\n3\n4,5\n", "record 3 has 1 field, and the header has 2"),
        ('id,note\n1,ok\n2,say "hi, there\n', "record 3 has 3 fields, and the header has 2"),
        ('id,note\n1,"x,y\n2,z\n', "its quotes do not match"),
        ("a,b\n1\n2,3\n4,5\n6,7\n", "record 2 has 1 field, and the header has 2"),
        ("a,b\n" + "1,2\n" * 3000 + "1,2,3\n", "record 3,002 has 3 fields, and the header has 2"),
    ],
)
def test_csv_with_irregular_records_is_no_table_and_says_which(
    text: str, reason: str, tmp_path: Path
):
    (tmp_path / "t.csv").write_text(text)
    for loaded in (load(tmp_path / "t.csv"), load(tmp_path / "t.csv", mapped_bytes=1)):
        assert "sql" not in loaded.tools
        assert loaded.items[0].detail.endswith(f"; not a table for sql ({reason})")
        assert loaded.warnings() == [f"not a table for sql (1), {reason}: t.csv"]


def test_warning_names_csv_files_of_a_large_folder_that_are_no_tables(tmp_path: Path):
    for number in range(20):
        (tmp_path / f"{number}.csv").write_text("a,b\n1,2\n" + "3\n" * (number in (7, 9)))
    reason = "record 3 has 1 field, and the header has 2"
    loaded = load(tmp_path)
    assert loaded.describe()[1:] == [f"not a table for sql (2), {reason}: 7.csv, 9.csv"]
    assert len(loaded.tools["tables"]) == 18


def test_tables_without_the_extra_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n')
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loaded = load(tmp_path)
    assert "sql" not in loaded.tools
    assert [item.detail for item in loaded.items] == [
        "CSV: 2 columns a, b; 1 row; not a table for sql (the extra inputs is not installed)",
        "JSONL: 1 record; 1 key a; not a table for sql (the extra inputs is not installed)",
    ]
    (warning,) = loaded.warnings()
    assert "pip install" in warning
    assert warning.endswith(": a.csv, b.jsonl")
    assert "pip install" not in loaded.manifest()  # it may name a folder of the host


def test_model_reads_about_a_missing_extra_only_beside_sql(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for loaded in (load(tmp_path), load(tmp_path / "a.csv")):
        assert "2 columns a, b; 1 row" in loaded.manifest()
        assert "extra inputs" not in loaded.manifest()
    with sqlite3.connect(tmp_path / "b.db") as database:
        database.execute("CREATE TABLE t (x)")
    database.close()
    beside_sql = load(tmp_path)
    assert "sql" in beside_sql.tools
    assert "not a table for sql (the extra inputs is not installed)" in beside_sql.manifest()


@pytest.mark.parametrize("mapped_bytes", [1, 1 << 30])
def test_wrong_record_is_named_without_the_extra_too(
    mapped_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "a.csv").write_text("a,b\n1,2\n3\n")
    (tmp_path / "b.jsonl").write_text('{"a": 1}\n{"a":\n')
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert load(tmp_path, mapped_bytes=mapped_bytes).warnings() == [
        "not a table for sql (1), record 3 has 1 field, and the header has 2: a.csv",
        "not a table for sql (1), line 2 is not JSON: b.jsonl",
    ]


@pytest.mark.parametrize("name", ["book", "book.bak", "book.txt", "book.xls", "book.XLSX.1"])
def test_workbook_is_read_whatever_its_name(name: str, folder: Path, tmp_path: Path):
    shutil.copy(folder / "book.xlsx", tmp_path / name)
    loaded = load(tmp_path / name)
    assert loaded.items[0].kind == "xlsx"
    assert "# Sheet Cities\nid\tcity\tnext\n1\tBonn" in loaded.context
    assert loaded.tools["sql"]("SELECT city FROM Cities") == [("Bonn",)]


def test_names_in_a_file_are_data_and_no_sql(tmp_path: Path):
    """Names of files and columns with quotes, as an attacker may write them."""
    (tmp_path / "sales.csv").write_text("amount\n5\n")
    attack = "x'}); CREATE OR REPLACE VIEW sales AS SELECT 666 AS amount; --"
    (tmp_path / "z1.csv").write_text(f'"{attack}","say ""hi""",day\n1,2,13.02.2026\n')
    (tmp_path / "z2'\"; --.csv").write_text("a\tb\n'1'\t'2'\n")
    loaded = load([tmp_path])
    sql = loaded.tools["sql"]
    assert sql("SELECT * FROM sales") == [(5,)]
    assert list(loaded.tools["tables"][1]["columns"]) == [attack, 'say "hi"', "day"]
    assert sql("SELECT * FROM z1") == [(1, 2, "2026-02-13")]
    assert [len(table["columns"]) for table in loaded.tools["tables"]] == [1, 3, 2]
    assert not any("not a table" in item.detail for item in loaded.items)


def test_errors_name_no_path_of_the_host(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text('{"a": 1}\n{"a":\n')
    (tmp_path / "b.parquet").write_bytes(b"PAR1" + b"x" * 100)
    (tmp_path / "c.csv").write_text("a,b\n1,2\n")
    loaded = load([tmp_path])
    said = loaded.manifest() + "\n".join(loaded.describe())
    assert "not a table for sql (line 2 is not JSON)" in said
    assert "No magic bytes found at end of file 'b.parquet'" in said
    assert str(tmp_path) not in said


@pytest.mark.parametrize(
    "query",
    [
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM read_text('/etc/passwd')",
        "SELECT * FROM read_blob('/proc/self/environ')",
        "SELECT * FROM glob('/etc/*')",
        "SELECT * FROM '/etc/passwd'",
        "SELECT * FROM parquet_metadata('/etc/passwd')",
        "SELECT * FROM read_parquet('https://127.0.0.1/x')",
        "SELECT getenv('HOME')",
        "SELECT * FROM enable_logging(storage='file', storage_path='/tmp')",
        "SELECT * FROM query('COPY sales TO ''/tmp/out''')",
        "COPY sales TO '/tmp/out.csv'",
        "ATTACH '/tmp/x.db'",
        "INSTALL httpfs",
        "LOAD httpfs",
        "SET memory_limit = '90GB'",
        "PRAGMA enable_profiling",
        "CREATE TABLE t (x INT)",
        "DROP VIEW sales",
        "WITH x AS (DELETE FROM hosts RETURNING *) SELECT * FROM x",
        "SELECT 1; SELECT 2",
        "SELECT * FROM msgspec",
        "EXPORT DATABASE '/tmp/x'",
        "",
    ],
)
def test_sql_reaches_nothing_but_the_tables(query: str, sql: Callable[..., Any]):
    with pytest.raises((PermissionError, ValueError), match=r"^sql: "):
        sql(query)
    assert sql("SELECT count(*) FROM hosts") == [(2,)]


def test_results_are_bounded(sql: Callable[..., Any]):
    with pytest.raises(ValueError, match=r"more than 10,000 rows"):
        sql("SELECT * FROM range(1000000000)")
    with pytest.raises(ValueError, match=r"more than 32 MB"):
        sql("SELECT repeat('x', 100000) FROM range(1000)")
    with pytest.raises(ValueError, match=r"memory|ended the process"):
        sql("SELECT range(1000000000)")


@pytest.mark.parametrize(
    "query",
    [
        "SELECT sum(a.range * b.range % 7) FROM range(10000000) a, range(10000000) b",
        "SELECT a.range FROM range(100000) a, range(100000) b ORDER BY hash(a.range, b.range)",
        "SELECT a.range FROM range(100000) a, range(100000) b",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT max(n) FROM t",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM t) SELECT n FROM t",
        "WITH RECURSIVE t(s) AS (SELECT 'x' UNION ALL SELECT s || s FROM t) SELECT s FROM t",
        "WITH RECURSIVE t(n) AS (SELECT 1 UNION ALL SELECT t.n FROM t, range(9)) SELECT count(*) FROM t",
    ],
)
def test_joins_and_recursion_without_end_are_stopped(query: str, tmp_path: Path):
    (tmp_path / "sales.csv").write_text("id,n\n1,2\n")
    tables = [TableLocation("sales", str(tmp_path / "sales.csv"), "csv")]
    with pytest.raises((TimeoutError, ValueError), match=r"^sql: .*(stopped|more than|ended)"):
        query_tables(tables, query, limit_s=0.5)
    assert query_tables(tables, "SELECT n FROM sales") == [(2,)]


def test_file_that_changes_while_it_is_read_is_refused(folder: Path, tmp_path: Path):
    path = tmp_path / "people.parquet"
    shutil.copy(folder / "people.parquet", path)
    is_over = threading.Event()

    def replace_again_and_again() -> None:
        while not is_over.is_set():
            shutil.copy(folder / "people.parquet", tmp_path / "next")
            os.replace(tmp_path / "next", path)

    writer = threading.Thread(target=replace_again_and_again)
    writer.start()
    try:
        with pytest.raises(
            SourceError, match=r"people\.parquet changed while it was read: load it"
        ):
            load([path])
    finally:
        is_over.set()
        writer.join()


def test_file_that_changes_between_queries_is_noticed(tmp_path: Path):
    (tmp_path / "sales.csv").write_text("id,n\n1,2\n")
    (tmp_path / "more.csv").write_text("id,n\n1,2\n")
    sql = load([tmp_path]).tools["sql"]
    assert sql("SELECT n FROM sales") == [(2,)]
    (tmp_path / "sales.csv").write_text("id,n\n1,2\n3,4\n")
    with pytest.raises(ValueError, match=r"sales\.csv has changed since it was loaded"):
        sql("SELECT n FROM sales")


def test_sqlite_table_is_copied_again_after_a_change(tmp_path: Path):
    (tmp_path / "sales.csv").write_text("id,n\n1,2\n")
    database = sqlite3.connect(tmp_path / "a.db")
    database.execute("CREATE TABLE hosts (id)")
    database.commit()
    sql = load([tmp_path]).tools["sql"]
    assert sql("SELECT count(*) FROM hosts, sales") == [(0,)]
    database.execute("INSERT INTO hosts VALUES (1)")
    database.commit()
    database.close()
    assert sql("SELECT count(*) FROM hosts, sales") == [(1,)]


def test_tables_of_an_archive_are_queryable(folder: Path, tmp_path: Path):
    import zipfile

    with zipfile.ZipFile(tmp_path / "all.zip", "w") as archive:
        archive.write(folder / "people.parquet", "people.parquet")
        archive.write(folder / "sales.csv", "sales.csv")
    sql = load([tmp_path / "all.zip"]).tools["sql"]
    assert sql("SELECT sum(amount) FROM sales JOIN people USING (id)") == [(12,)]


def test_encrypted_workbook_is_named_as_such(tmp_path: Path):
    (tmp_path / "a.xlsx").write_bytes(b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + b"\0" * 600)
    with pytest.raises(SourceError, match="encrypted workbook: save it without a password"):
        load([tmp_path / "a.xlsx"])
