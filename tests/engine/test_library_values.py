"""DataFrames, arrays, models, paths and open files as contexts of ``completion``."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import io
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pydantic
import pytest

import ramify
from ramify.errors import ConfigError, SourceError
from ramify.sandbox.base import SandboxSpec
from ramify.types.message import Message
from tests.engine.helpers import client, code, rlm

FRAME = pd.DataFrame(
    {
        "region": ["north", "south", None, "north", "Zürich"],
        "units": [3, 5, 8, 13, 21],
        "price": [1.5, float("nan"), 2.5, 3.5, 4.5],
        "day": pd.date_range("2024-02-28", periods=5),
        "when": pd.date_range("2024-02-28 12:00", periods=5, tz="Europe/Berlin"),
        "kind": pd.Categorical(["a", "b", "a", "b", "a"]),
        "ok": [True, False, True, True, False],
        "maybe": pd.array([1, None, 3, None, 5], dtype="Int64"),
    }
)
ROW = {
    "region": "south",
    "units": 5,
    "day": datetime.datetime(2024, 2, 29),
    "when": datetime.datetime(2024, 2, 29, 11, tzinfo=datetime.UTC),
    "kind": "b",
    "ok": False,
    "maybe": None,
}
PANDAS = SandboxSpec(packages=("pandas",))


def answers(context: Any, *cells: str, **options: Any) -> list[Any]:
    """What the expressions ``cells`` are in a session over ``context``."""
    with rlm([code(f"FINAL([{', '.join(cells)}])")], **options) as r:
        result = r.completion(context, "?")
    assert isinstance(result.answer, list), result.partial
    return result.answer


# --- tables ---------------------------------------------------------------------------------------


def test_data_frame_is_a_table_without_pandas_in_the_session() -> None:
    columns, count, row, part, total, rows = answers(
        FRAME,
        "context.columns",
        "len(context)",
        "context[1]",
        "list(context[3:])[1]['region']",
        "sum(context['units'])",
        "sum(1 for row in context.rows())",
    )
    assert (columns, count, part, total, rows) == (list(FRAME.columns), 5, "Zürich", 50, 5)
    price = row.pop("price")
    assert (row, price != price) == (ROW, True)


def test_data_frame_is_a_data_frame_if_the_session_has_pandas() -> None:
    kind, total, types, region, missing = answers(
        FRAME,
        "type(context).__name__",
        "int(context.units.sum())",
        "{name: str(kind) for name, kind in context.dtypes.items()}",
        "context.groupby('region').units.sum().to_dict()",
        "[int(context[name].isna().sum()) for name in context]",
        sandbox=PANDAS,
    )
    assert (kind, total, missing) == ("DataFrame", 50, [1, 0, 1, 0, 0, 0, 0, 2])
    expected = {name: str(each) for name, each in FRAME.dtypes.items()}
    assert types == expected
    assert region == {"north": 16, "south": 5, "Zürich": 21}


def test_session_can_change_its_data_frame_and_no_other_sees_it() -> None:
    frame = pd.DataFrame({"x": np.arange(300_000)})
    change = "context.loc[0, 'x'] = 99"
    child = "FINAL(int(context.x[0]))"
    script = [code(f"{change}\nFINAL([int(context.x[0]), rlm_query('?')])"), code(child)]
    with rlm(script, sandbox=PANDAS) as r:
        assert r.completion(frame, "?").answer == [99, 0]
    assert frame.x[0] == 0


@pytest.mark.parametrize("has_pandas", [False, True])
def test_model_is_told_what_the_context_is(has_pandas: bool) -> None:
    model = client([code("FINAL(1)")])
    with rlm(model, scaffold="default", sandbox=PANDAS if has_pandas else None) as r:
        r.completion(FRAME, "How many?")
    system, first = (message.content for message in model.requests[0].messages)
    name = "pandas DataFrame" if has_pandas else "Table"
    assert f"`context` is a {name} of 5 rows and 8 columns: 'region' (text), 'units'" in first
    assert "('south', 5, nan, datetime.datetime(2024, 2, 29, 0, 0)" in first
    assert f"the data, a {name}" in system
    assert ("`context[i]` (a dict)" in first) is not has_pandas
    assert "sql(query" in system
    assert "Tables for sql(), in DuckDB's dialect: context;" in first


@pytest.mark.parametrize("has_pandas", [False, True])
@pytest.mark.parametrize("context", [FRAME, np.eye(3), {"t": FRAME, "n": "x"}])
def test_first_look_and_worked_example_run(context: Any, has_pandas: bool) -> None:
    from ramify.engine.prompt_facts import ContextFacts, PromptFacts
    from ramify.engine.prompt_text import batch_example, context_facts, inspection_example
    from ramify.sandbox.base import SharedContextValue
    from ramify.sources.convert_to_context import as_context

    shared = SharedContextValue(as_context(context))
    facts = context_facts(shared.value, shared.chars, packages=("pandas",) if has_pandas else ())
    assert isinstance(facts, ContextFacts)
    look = inspection_example(PromptFacts(context=facts))
    with rlm([code(look), code("FINAL('seen')")], sandbox=PANDAS if has_pandas else None) as r:
        result = r.completion(context, "?")
    (cell,) = result.trajectory.root.turns[0].cells
    assert (cell.error, result.answer) == (None, "seen")
    assert batch_example(PromptFacts(context=facts)) == ""


@pytest.mark.parametrize(
    "context",
    [
        pl.DataFrame({"x": [1, 2, None], "s": ["a", None, "ü"]}),
        pa.table({"x": [1, 2, None], "s": ["a", None, "ü"]}),
        pa.table({"x": [9, 1, 2, None], "s": ["z", "a", None, "ü"]}).slice(1),
        pa.record_batch({"x": [1, 2, None], "s": ["a", None, "ü"]}),
        pa.concat_tables(
            [pa.table({"x": [1], "s": ["a"]}), pa.table({"x": [2, None], "s": [None, "ü"]})]
        ),
    ],
    ids=["polars", "arrow", "slice", "batch", "chunks"],
)
def test_tables_of_other_libraries(context: Any) -> None:
    rows = [{"x": 1, "s": "a"}, {"x": 2, "s": None}, {"x": None, "s": "ü"}]
    assert answers(context, "list(context)", "sql('SELECT sum(x) FROM context')") == [rows, [(3,)]]


def test_dataset_is_a_table() -> None:
    datasets = pytest.importorskip("datasets")
    data = datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [0, 1, 1]})
    (rows,) = answers(data.select([2, 0]), "list(context)")
    assert rows == [{"text": "c", "label": 1}, {"text": "a", "label": 0}]
    (names,) = answers(datasets.DatasetDict({"train": data}), "len(context['train'])")
    assert names == 3


def test_nested_columns_keep_their_values() -> None:
    columns = {
        "list": pa.array([[1, 2], None, []]),
        "struct": pa.array([{"x": 1, "y": "a"}, {"x": None, "y": "b"}, None]),
        "map": pa.array([[("k", 1)], None, []], pa.map_(pa.string(), pa.int64())),
        "pair": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2)),
        "price": pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("-2")]),
        "time": pa.array([datetime.time(1, 2), None, datetime.time(3)]),
        "span": pa.array([datetime.timedelta(1), None, datetime.timedelta(0, 3)]),
        "bytes": pa.array([b"a", None, b""]),
        "half": pa.array([1.5, None, 2], pa.float16()),
        "none": pa.nulls(3),
        "view": pa.array(["a", None, "bb"], pa.string_view()),
    }
    table = pa.table({"number": [7, 8, 9], **columns})
    for part in (table, table.slice(1)):
        (rows,) = answers(part, "list(context)")
        expected = part.to_pylist()
        for row in expected:
            row["price"] = None if row["price"] is None else float(row["price"])
        assert rows == expected
    (lists,) = answers(
        table, "[None if x is None else x.tolist() for x in context['list']]", sandbox=PANDAS
    )
    assert lists == [[1, 2], None, []]


def test_index_and_names_become_columns() -> None:
    frame = pd.DataFrame(
        [[1, 2], [3, 4]],
        index=pd.MultiIndex.from_tuples([("a", 1), ("b", 2)], names=["who", None]),
        columns=pd.MultiIndex.from_tuples([("x", "low"), ("x", "high")]),
    )
    rows, columns = answers(frame, "list(context.rows())", "context.columns")
    assert columns == ["who", "level_1", "x.low", "x.high"]
    assert rows == [("a", 1, 1, 2), ("b", 2, 3, 4)]
    periods = pd.DataFrame({"p": pd.period_range("2024", periods=1, freq="M"), "context": 1})
    periods = periods.assign(tools=pd.arrays.SparseArray([0]), manifest=3)
    row = {"p": "2024-01", "context": 1, "tools": 0, "manifest": 3}
    assert answers(periods, "context[0]") == [row]
    twice = pd.DataFrame([[1, 2]], columns=["x", "x"])
    assert answers(twice, "context[0]") == [{"x": 1, "x (2)": 2}]
    assert answers(pd.Series([1, 2], name="n"), "list(context['n'])") == [[1, 2]]


# --- sql ------------------------------------------------------------------------------------------


def test_sql_reads_tables_of_a_context_in_place() -> None:
    frame = pd.DataFrame({"k": np.arange(400_000) % 4, "s": [f"row {n}" for n in range(400_000)]})
    context = {"sales": frame, "Group": FRAME, "note": "a text"}
    found, joined, names, keys = answers(
        context,
        "sql('SELECT k, count(*) FROM sales GROUP BY k ORDER BY k')",
        "sql('SELECT count(*) FROM sales, Group_ WHERE k = units')",
        "[each['name'] for each in tables]",
        "[each['key'] for each in tables]",
    )
    assert found == [(0, 100_000), (1, 100_000), (2, 100_000), (3, 100_000)]
    assert joined == [(100_000,)]
    assert (names, keys) == (["sales", "Group_"], ["sales", "Group"])


def test_sql_of_a_context_opens_nothing_else(tmp_path: Path) -> None:
    secret = tmp_path / "secret.csv"
    secret.write_text("a\n1\n")
    with rlm([code(f"sql(\"SELECT * FROM read_csv('{secret}')\")"), code("FINAL(1)")]) as r:
        result = r.completion(FRAME, "?")
    assert "PermissionError" in (result.trajectory.root.turns[0].cells[0].error or "")


# --- arrays and objects ---------------------------------------------------------------------------


def test_array_of_numbers() -> None:
    array = np.arange(12, dtype="int32").reshape(3, 4)
    shape, row, item, part = answers(
        array, "context.shape", "context[1].tolist()", "context[2, 3]", "context[1:].tolist()"
    )
    assert (shape, row, item, part) == ((3, 4), [4, 5, 6, 7], 11, array[1:].tolist())
    (total,) = answers(
        array.T, "int((context * 2).sum())", sandbox=SandboxSpec(packages=("numpy",))
    )
    assert total == 132
    assert answers(np.array(["a", "b"]), "context") == [["a", "b"]]
    assert answers(np.array([True, False]), "context.tolist()") == [[True, False]]
    moments = np.array(["2024-01-01T12", "NaT"], "M8[s]")
    assert answers(moments, "context") == [[datetime.datetime(2024, 1, 1, 12), None]]


@dataclasses.dataclass
class Part:
    name: str
    price: decimal.Decimal
    near: list[Part] = dataclasses.field(default_factory=list)


class Order(pydantic.BaseModel):
    id: int
    rows: list[dict[str, Any]]
    place: Path = Path("a/b")


def test_objects_are_dicts_of_their_fields() -> None:
    part = Part("bolt", decimal.Decimal("1.5"), [Part("nut", decimal.Decimal(2))])
    order = Order(id=3, rows=[{"n": 1}])
    given = {"part": part, "orders": [order], "frame": pd.DataFrame({"x": [1, 2]})}
    found, first, total = answers(
        given, "context['part']", "context['orders'][0]", "sum(context['frame']['x'])"
    )
    assert found == {
        "name": "bolt",
        "price": 1.5,
        "near": [{"name": "nut", "price": 2, "near": []}],
    }
    assert (first, total) == ({"id": 3, "rows": [{"n": 1}], "place": "a/b"}, 3)


# --- paths and files ------------------------------------------------------------------------------


def test_paths_and_files_are_read(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\n")
    (tmp_path / "b.log").write_text("three\n")
    assert answers(log, "context") == ["one\ntwo\n"]
    assert answers(tmp_path, "sorted(context)") == [["a.log", "b.log"]]
    assert answers([log, tmp_path / "b.log"], "len(context)") == [2]
    with log.open() as text, log.open("rb") as binary:
        text.readline()
        assert answers(text, "context") == ["two\n"]
        assert answers(binary, "context") == ["one\ntwo\n"]
    assert answers(io.BytesIO(b"in memory"), "context") == ["in memory"]
    assert answers(io.StringIO("a text"), "context") == ["a text"]
    with rlm([code("FINAL(context)")]) as r, pytest.raises(SourceError, match=r"no\.log"):
        r.completion(tmp_path / "no.log", "?")


def test_conversation_reads_an_open_file_once(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\ntwo\n")
    script = [code("FINAL(len(context))")] * 2
    with rlm(script) as r, log.open() as file, r.conversation(file) as talk:
        assert [talk.ask("?").answer, talk.ask("?").answer] == [8, 8]


def test_item_of_a_task_has_a_table() -> None:
    start = ramify.tasks.RolloutInitialState(context=FRAME, messages=[Message("user", "Before.")])
    (count,) = answers(start, "len(context)")
    assert count == 5


# --- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (pd.DataFrame({"x": [1, "a"]}), r"column 'x' has no single Arrow type .*astype\(str\)"),
        (pl.DataFrame({"x": [1]}).lazy(), r"give frame.collect\(\)"),
        (
            pl.DataFrame({"o": pl.Series([object()], dtype=pl.Object)}),
            "'o' has Python objects: conv",
        ),
        (np.broadcast_to(1.0, (10**6, 10**6)), r"ndarray, does not fit into memory: give a part"),
        ({"key": pydantic.SecretStr("hush")}, r"SecretStr at value\['key'\] cannot be carried"),
        (pd.DataFrame(), "the context is empty"),
        (object(), "cannot be given to a session: a value of type object"),
    ],
)
def test_values_without_a_form_are_refused(context: Any, message: str) -> None:
    with rlm([code("FINAL(1)")]) as r, pytest.raises(ConfigError, match=message):
        r.completion(context, "?")


def test_field_that_a_model_excludes_is_not_given() -> None:
    class Login(pydantic.BaseModel):
        user: str
        password: str = pydantic.Field(exclude=True)

    assert answers(Login(user="ann", password="hush"), "context") == [{"user": "ann"}]


def test_error_names_the_file_that_was_opened(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"ab\0\1")
    with (tmp_path / "a.bin").open("rb") as file, rlm([code("FINAL(1)")]) as r:
        file.read(1)
        with pytest.raises(SourceError, match=r"^the file .*a\.bin is binary: convert it to text"):
            r.completion(file, "?")


def test_closed_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    with (tmp_path / "a").open() as file:
        pass
    with rlm([]) as r, pytest.raises(ConfigError, match="cannot be read: I/O operation on closed"):
        r.completion(file, "?")


def test_child_gets_rows_but_not_a_second_table() -> None:
    script = [
        code("rlm_query('?', context=context[:2])"),
        code("FINAL(rlm_query('?', context=list(context.rows(0, 2))))"),
        code("FINAL(len(context))"),
    ]
    with rlm(script) as r:
        result = r.completion(pd.DataFrame({"x": [1, 2, 3]}), "?")
    assert "list(table[:n])" in (result.trajectory.root.turns[0].cells[0].error or "")
    assert result.answer == 2


# --- recorded -------------------------------------------------------------------------------------


def test_run_over_a_table_is_replayed_from_its_store(tmp_path: Path) -> None:
    store = ramify.Store(tmp_path)
    cell = "FINAL([sum(context['units']), sql('SELECT max(units) FROM context')[0][0]])"
    with rlm([code(cell)], store=store) as r:
        result = r.completion(FRAME, "?")
    assert result.answer == [50, 21]
    assert result.trajectory.context is not None
    assert result.trajectory.context.kind == "Table"
    with rlm([], store=store) as r:
        again = r.replay(result.trajectory.id)
    assert again.answer == [50, 21]
    assert again.trajectory.context == result.trajectory.context
