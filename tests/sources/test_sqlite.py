"""A database: its schema as context, and a tool that can only read, with limits."""

from __future__ import annotations

import sqlite3
import threading
import time
import zipfile
from pathlib import Path

import pytest

from ramify.errors import SourceError
from ramify.sources.load_sources import load
from ramify.sources.sqlite_process import query_with_timeout
from ramify.sources.sqlite_query import run_query


def make(path: Path, num_rows: int = 5, mode: str = "delete") -> Path:
    database = sqlite3.connect(path)
    with database:
        database.execute(f"PRAGMA journal_mode = {mode}")
        database.execute("CREATE TABLE hosts (id INTEGER PRIMARY KEY, name TEXT, raw BLOB)")
        database.execute('CREATE TABLE "odd ""name" (x)')
        database.execute("CREATE VIEW names AS SELECT name FROM hosts")
        database.executemany(
            "INSERT INTO hosts (name, raw) VALUES (?, ?)",
            ((f"host-{n}", b"\0" * 9) for n in range(num_rows)),
        )
    database.close()
    return path


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return make(tmp_path / "shop.db")


def test_context_is_schema_with_row_counts_and_samples(path: Path):
    loaded = load([path])
    assert loaded.context == (
        "SQLite database 'shop.db'. Query it with sql(\"SELECT …\", db='shop.db').\n\n"
        "CREATE TABLE hosts (id INTEGER PRIMARY KEY, name TEXT, raw BLOB);\n-- 5 rows, the first:\n"
        "--   (1, 'host-0', <9 bytes>)\n--   (2, 'host-1', <9 bytes>)\n--   (3, 'host-2', <9 "
        "bytes>)\n\n"
        "CREATE VIEW names AS SELECT name FROM hosts;\n-- 5 rows, the first:\n"
        "--   ('host-0')\n--   ('host-1')\n--   ('host-2')\n\n"
        'CREATE TABLE "odd ""name" (x);\n-- 0 rows'
    )
    assert loaded.items[0].detail == "SQLite: 3 tables"
    assert loaded.items[0].num_bytes == path.stat().st_size
    assert list(loaded.tools) == ["sql", "tables"]


@pytest.mark.parametrize("source", ["pipe", "archive"])
def test_database_that_is_not_a_file_is_refused_with_advice(
    source: str, path: Path, tmp_path: Path
):
    says = r"is an SQLite database: save it as a separate file and name that file"
    if source == "pipe":
        with path.open("rb") as stream, pytest.raises(SourceError, match=says):
            load(["-"], stdin=stream)
        return
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.write(path, "shop.db")
    with pytest.raises(SourceError, match=says):
        load(tmp_path / "a.zip")


def test_sql_tool_returns_rows(path: Path):
    sql = load([path]).tools["sql"]
    assert sql("SELECT id, name FROM hosts WHERE id < ?", (3,)) == [(1, "host-0"), (2, "host-1")]
    assert sql("SELECT count(*) FROM hosts WHERE name = :n", {"n": "host-4"}, db="shop.db") == [
        (1,)
    ]
    assert sql(
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION SELECT n+1 FROM c WHERE n<3) SELECT n FROM c"
    ) == [
        (1,),
        (2,),
        (3,),
    ]
    assert [row[1] for row in sql("PRAGMA table_info(hosts)")] == ["id", "name", "raw"]


@pytest.mark.parametrize(
    "query",
    [
        "DELETE FROM hosts",
        "INSERT INTO hosts (name) VALUES ('x')",
        "UPDATE hosts SET name = 'x'",
        "CREATE TABLE t (x)",
        "CREATE TEMP TABLE t (x)",
        "DROP TABLE hosts",
        "ATTACH DATABASE '/tmp/other.db' AS other",
        "VACUUM INTO '/tmp/copy.db'",
        "PRAGMA query_only = 0",
        "PRAGMA writable_schema = 1",
        "PRAGMA journal_mode = wal",
        "BEGIN IMMEDIATE",
        "SELECT load_extension('x')",
    ],
)
def test_queries_that_write_are_refused(path: Path, query: str):
    before = path.read_bytes()
    with pytest.raises(
        (PermissionError, ValueError),
        match=r"sql: (only reading is allowed here|not authorized|.*)",
    ):
        run_query(path, query)
    assert path.read_bytes() == before
    assert [file.name for file in path.parent.iterdir()] == ["shop.db"]


def test_forbidden_query_raises_permission_error(path: Path):
    with pytest.raises(
        PermissionError, match=r"sql: only reading is allowed here \(not authorized\)"
    ):
        run_query(path, "DELETE FROM hosts")


def test_invalid_query_error_names_the_problem(path: Path):
    for query, params, message in (
        ("SELEC 1", (), 'sql: near "SELEC": syntax error'),
        ("SELECT * FROM nope", (), "sql: no such table: nope"),
        ("SELECT ?", (), "sql: Incorrect number of bindings supplied"),
        ("SELECT 1; SELECT 2", (), "sql: You can only execute one statement at a time"),
    ):
        with pytest.raises(ValueError, match=message):
            run_query(path, query, params)


def test_an_endless_query_is_stopped(path: Path):
    began = time.perf_counter()
    with pytest.raises(TimeoutError, match=r"sql: stopped after 0\.2 s: narrow it"):
        run_query(
            path,
            "WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c) SELECT max(n) FROM c",
            (),
            0.2,
        )
    assert time.perf_counter() - began < 60


def test_too_many_rows_or_bytes_are_refused(tmp_path: Path):
    path = make(tmp_path / "big.db", 20_000)
    with pytest.raises(
        ValueError,
        match="sql: more than 10,000 rows: aggregate in SQL, or page with LIMIT and OFFSET",
    ):
        run_query(path, "SELECT * FROM hosts")
    assert len(run_query(path, "SELECT id FROM hosts LIMIT 10000")) == 10_000
    with pytest.raises(ValueError, match="sql: more than 32 MB of rows: select fewer columns"):
        run_query(path, "SELECT zeroblob(10000000) FROM hosts LIMIT 10")
    with pytest.raises(ValueError, match="sql: string or blob too big"):
        run_query(path, "SELECT zeroblob(900000000)")


def test_multiple_databases_are_selected_by_name(tmp_path: Path):
    make(tmp_path / "a.db", 1)
    make(tmp_path / "sub.db", 2)
    (tmp_path / "notes.txt").write_text("n")
    loaded = load([tmp_path])
    assert set(loaded.context) == {"a.db", "notes.txt", "sub.db"}
    sql = loaded.tools["sql"]
    assert [sql("SELECT count(*) FROM hosts", db=name) for name in ("a.db", "sub.db")] == [
        [(1,)],
        [(2,)],
    ]
    both = "SELECT (SELECT count(*) FROM hosts), (SELECT count(*) FROM sub_hosts)"
    assert sql(both) == [(1, 2)]  # in DuckDB's dialect, over all files
    with pytest.raises(ValueError, match=r"sql: db='x': name one of"):
        sql("SELECT 1", db="x")


def test_threads_can_query_concurrently(path: Path):
    sql = load([path]).tools["sql"]
    answers: list[list[tuple[int]]] = []
    threads = [
        threading.Thread(
            target=lambda: answers.extend(sql("SELECT count(*) FROM hosts") for _ in range(20))
        )
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [[(5,)]] * 160


def test_database_with_active_writer_can_be_read(tmp_path: Path):
    path = make(tmp_path / "live.db", mode="wal")
    writer = sqlite3.connect(path)
    try:
        writer.execute("BEGIN IMMEDIATE")
        writer.execute("INSERT INTO hosts (name) VALUES ('new')")
        loaded = load([tmp_path])
        assert loaded.tools["sql"]("SELECT count(*) FROM hosts") == [(5,)]
        writer.commit()
        assert loaded.tools["sql"]("SELECT count(*) FROM hosts") == [(6,)]
        assert {name.rpartition(".")[2] for name in loaded.left_out["part of a database"]} == {
            "db-shm",
            "db-wal",
        }
        assert loaded.problems == []
    finally:
        writer.close()


def test_a_damaged_database_is_named(tmp_path: Path):
    path = make(tmp_path / "shop.db", 1000)
    data = bytearray(path.read_bytes())
    data[40:200] = b"\xff" * 160
    path.write_bytes(data)
    with pytest.raises(SourceError, match=r"shop\.db is an SQLite database that cannot be read: "):
        load([path])


def test_endless_view_does_not_block_load(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.sources.sqlite._COUNT_S", 0.1)
    database = sqlite3.connect(path)
    with database:
        database.execute(
            "CREATE VIEW forever AS WITH RECURSIVE c(n) AS (SELECT 1 UNION ALL SELECT n+1 FROM c) "
            "SELECT max(n) FROM c"
        )
    database.close()
    context = load([path]).context
    assert "-- too many rows to count quickly" in context
    assert "-- 5 rows, the first:" in context


def test_hung_query_step_is_killed_and_next_query_works(path: Path):
    never = "SELECT instr(zeroblob(20000000), CAST(zeroblob(9000000) || x'01' AS BLOB))"
    assert query_with_timeout(path, "SELECT count(*) FROM hosts") == [(5,)]
    with pytest.raises(TimeoutError, match="one of its functions takes too long"):
        query_with_timeout(path, never, limit_s=0.2, grace_s=0.2)
    assert query_with_timeout(path, "SELECT name FROM hosts WHERE id = :i", {"i": 2}) == [
        ("host-1",)
    ]
    with pytest.raises(PermissionError, match="only reading"):
        query_with_timeout(path, "DROP TABLE hosts")
    big = query_with_timeout(
        path,
        "WITH RECURSIVE c(n) AS (SELECT 1 UNION SELECT n + 1 FROM c WHERE n < 9999) SELECT n, "
        "hex(n) FROM c",
    )
    assert len(big) == 9999
