"""The view server: good and bad files, access control, and updates while a run grows."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from ramify import Store
from ramify.errors import ConfigError
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.run_lookup import detect_file_kind
from ramify.viewer.run_overview import COLUMNS
from ramify.viewer.view_server import STATIC, ViewServer
from tests.data.golden import JOURNAL
from tests.viewer import golden
from tests.viewer.conftest import World
from tests.viewer.requests import Get, calls_of, get_json, with_server

# --- good runs
# ---------------------------------------------------------------------------------------------------------


def test_run_list_covers_stores_files_and_training_folders(world: World) -> None:
    found = get_json([world.store, world.trainings], "/api/runs")
    keys = [run["key"] for run in found["runs"]]
    assert {world.tree, world.plain, world.other, world.hostile} < set(keys)
    assert found["problems"] == []
    rollouts = {
        run["key"]: run.get("reward") for run in found["runs"] if "/rollouts/" in run["key"]
    }
    assert rollouts["p1/base/rollouts/step-000020.jsonl:1"] == 1.0
    assert rollouts["p1/base/rollouts/step-000020.jsonl:2"] == 0.0
    assert [each["key"] for each in found["trainings"]] == ["p1/base", "p1/second"]
    tree = next(run for run in found["runs"] if run["key"] == world.tree)
    assert (tree["question"], tree["depth"], tree["num_calls"], tree["stop"]) == (
        golden.QUESTION,
        2,
        32,
        "final",
    )


def test_run_columns_match_those_that_page_reads(world: World) -> None:
    found = get_json([world.store], "/api/run", key=world.tree)
    assert set(found["columns"]) == {*COLUMNS, "parent", "reward", "advantage", "gap"}
    made = re.search(
        r"function callAt\(of, at\) \{(.*?)\n\}", (STATIC / "run.js").read_text(), re.DOTALL
    )
    assert made is not None
    assert set(re.findall(r"(\w+): of\.\1\[at\]", made[1])) == set(found["columns"])
    assert found["columns"]["fork"] is None  # all equal: sent once
    calls = calls_of(found)
    assert [call["id"] for call in calls if call["parent"] == 0][:3] == ["0.0", "0.1", "0.2"]
    assert [call["stop"] for call in calls].count("error") == 2
    assert len(calls[0]["spans"]) == 8  # four turns, each with a request and a reply
    assert calls[0]["spans"] == sorted(calls[0]["spans"])
    assert found["head"]["limits"]["max_cost"] == 0.5


def test_call_endpoint_lists_every_turn(world: World) -> None:
    call = get_json([world.store], "/api/call", key=world.tree, id="0")
    assert [turn["reused"] for turn in call["turns"]] == [0, 3, 5, 7]
    assert [bool(turn["cells"][0]["error"]) for turn in call["turns"]] == [
        False,
        True,
        False,
        False,
    ]
    assert call["answer"] == '{"host":"web-5","at":"2026-03-01T12:00:05","why":"disk full"}'
    later = get_json([world.store], "/api/call", **{"key": world.tree, "id": "0", "from": 2})
    assert [turn["index"] for turn in later["turns"]] == [2, 3]


def test_request_endpoint_returns_every_message(world: World) -> None:
    found = get_json([world.store], "/api/request", key=world.tree, id="0", turn=2)
    messages = (
        Store(world.store)
        .load(world.tree)
        .conversation(Store(world.store).load(world.tree).root, 2)
    )
    assert found["body"]["model"] == "reader"
    assert [(each["role"], each["content"]) for each in found["body"]["messages"]] == [
        (message.role, message.content) for message in messages[:-1]
    ]
    assert found["key_variable"] == "SCRIPTED_API_KEY"


def test_long_texts_are_cut_unless_full_text_is_requested(tmp_path: Path) -> None:
    store = Store(tmp_path)
    run = golden.plain(store, "What is " + "a" * 30_000, "b" * 30_000)

    async def ask(get: Get, _: ViewServer) -> None:
        cut = await get("/api/call", key=run, id="0")
        assert (len(cut["answer"]["text"]), cut["answer"]["chars"]) == (20_000, 30_000)
        whole = await get("/api/call", key=run, id="0", full=1)
        assert whole["answer"] == "b" * 30_000

    with_server([tmp_path], ask)


def test_golden_journal_through_every_endpoint() -> None:
    async def ask(get: Get, _: ViewServer) -> None:
        run = await get("/api/run", key="p0/")
        assert run["columns"]["id"] == ["0", "0.0", "0.1", "0.2", "1"]
        assert run["head"]["problems"] == []
        lost = await get("/api/call", key="p0/", id="0.1")
        assert [note["kind"] for note in lost["notes"]] == ["attempt", "note"]
        compacted = await get("/api/call", key="p0/", id="0")
        assert compacted["turns"][2]["reused"] == 1
        second = await get("/api/call", key="p0/", id="1")
        assert second["fork"] == {"call": "0", "turn": 3}
        tokens = await get("/api/tokens", key="p0/", id="0.0", turn=0)
        assert (tokens["given"], tokens["sampled"], tokens["versions"]) == (
            [1, 5, 9],
            [7, 8, 2],
            [4, 4, 5],
        )
        assert tokens["scores"] == {"gap": [0.25, -1.5, 0.0]}
        (used,) = compacted["turns"][1]["tools"]
        assert (used["name"], used["result"], used["error"]) == ("sql", '[[1,"a"],[2,null]]', "")
        (mark,) = compacted["turns"][1]["marks"]
        assert (mark["by"], mark["values"], mark["text"]) == (
            "process",
            {"process": 0.5},
            "asks about both parts at once",
        )
        assert (await get("/api/call", key="p0/", id="0.2"))["rewards"] == {"correct": 0.0}
        assert (run["head"]["rewards"], run["columns"]["reward"]) == (
            {"correct": 1.0},
            [1.0, None, None, 0.0, None],
        )
        assert (await get("/api/runs"))["runs"][0]["rewards"] == {"correct": 1.0}
        (hit, *_) = (await get("/api/search", key="p0/", q="HOST-7 AT"))["found"]
        assert (hit["call"], hit["where"]) == ("0", "user")

    with_server([JOURNAL], ask)


def test_tokens_show_advantages_recorded_by_training(world: World) -> None:
    async def ask(get: Get, _: ViewServer) -> None:
        key = "p0/base/rollouts/step-000020.jsonl:1"
        first = await get("/api/tokens", key=key, id="0", turn=0)
        assert set(first["advantages"]) == {0.5}
        assert (first["gaps"][:2], len(first["gaps"])) == ([0.6, -0.01], len(first["sampled"]))
        second = await get("/api/tokens", key=key, id="0", turn=1)
        assert second["advantages"][:3] == [0.1, -0.2, 0.0]
        assert second["gaps"] is None  # the trainer did not score it
        assert set(second["versions"]) == {3}
        columns = (await get("/api/run", key=key))["columns"]
        mean = sum(second["advantages"]) / len(second["advantages"])
        assert columns["advantage"][:2] == [pytest.approx((0.5 + mean) / 2), None]
        assert columns["gap"][0] == pytest.approx(sum(map(abs, first["gaps"])) / len(first["gaps"]))

    with_server([world.trainings], ask)


def test_training_has_curves_and_samples(world: World) -> None:
    async def ask(get: Get, _: ViewServer) -> None:
        found = await get("/api/training", key="p0/base")
        assert found["stages"] == [["sft", 1], ["rl", 11]]
        assert found["names"]["reward"][0] == list(range(11, 41))
        assert found["kept"] == [20, 30, 40]
        assert [each["stage"] for each in found["final"]] == ["last"]
        samples = await get("/api/samples", key="p0/base", step=20)
        assert [row["reward"] for row in samples["rows"]] == [1.0, 0.5, 0.0]
        run = await get("/api/run", key=samples["rows"][0]["key"])
        assert run["head"]["rewards"] == {"correct": 1.0}
        depths = {(each["depth"], each["kind"]): each["calls"] for each in samples["depths"]}
        assert depths[0, "rlm"] == 3
        assert (await get("/api/samples", key="p0/base", step=7))["error"]["message"].endswith(
            "sets how often they are saved"
        )

    with_server([world.trainings], ask)


# --- bad files
# ---------------------------------------------------------------------------------------------------------


def bad_files(folder: Path) -> dict[str, str]:
    """File -> part of the problem that is reported for it."""
    whole = JOURNAL.read_bytes()
    lines = whole.splitlines(keepends=True)
    (folder / "torn.jsonl").write_bytes(whole[:-40])
    (folder / "damaged.jsonl").write_bytes(
        b"".join([*lines[:9], b'{"type":"Replied","call":"0","oops\n', *lines[9:]])
    )
    (folder / "newer.jsonl").write_bytes(
        whole.replace(b'"schema_version":2', b'"schema_version":99', 1)
    )
    (folder / "unknown.jsonl").write_bytes(b"".join([lines[0], *lines[2:]]))
    (folder / "notes.jsonl").write_text("these are my notes\n")
    (folder / "other.jsonl").write_text('{"a": 1}\n')
    (folder / "empty.jsonl").write_text("")
    return {
        "torn.jsonl": "ends in the middle of a line",
        "damaged.jsonl": "line 10 is damaged",
        "newer.jsonl": "was written by a newer Ramify (schema 99; this one reads up to 2)",
        "unknown.jsonl": "line 2 is inconsistent with earlier lines",
        "notes.jsonl": "its first line is not JSON",
        "other.jsonl": "its first line is neither a RunStarted event, nor a trajectory",
        "empty.jsonl": "is empty",
    }


def test_each_bad_file_is_reported_and_the_rest_is_shown(tmp_path: Path) -> None:
    expected = bad_files(tmp_path)
    (tmp_path / "good.jsonl").write_bytes(JOURNAL.read_bytes())

    async def ask(get: Get, _: ViewServer) -> None:
        rows = {run["key"]: run for run in (await get("/api/runs"))["runs"]}
        assert len(rows) == 8
        assert rows["p0/good.jsonl"].get("problem") is None
        assert all(
            rows[f"p0/{name}"]["problem"]
            for name in ("newer.jsonl", "notes.jsonl", "other.jsonl", "empty.jsonl")
        )
        for name, words in expected.items():
            run = await get("/api/run", key=f"p0/{name}")
            (problem,) = run["head"]["problems"]
            assert words in problem
            assert str(tmp_path / name) in problem
        assert (await get("/api/run", key="p0/damaged.jsonl"))["num"] == 5
        assert (await get("/api/run", key="p0/torn.jsonl"))["num"] == 5

    with_server([tmp_path], ask)


def test_call_texts_can_be_loaded_later(tmp_path: Path) -> None:
    golden.journal_of(300, tmp_path / "run.jsonl")

    async def ask(get: Get, _: ViewServer) -> None:
        whole = await get("/api/run", key="p0/run.jsonl")
        first = await get("/api/run", key="p0/run.jsonl", texts=100)
        rest = await get("/api/texts", key="p0/run.jsonl", **{"from": 100})
        assert (whole["texts"], first["texts"]) == (300, 100)
        known, calls = calls_of(whole), calls_of(first)
        for name in ("question", "answer"):
            assert [call[name] for call in calls[:100]] + rest[name] == [
                call[name] for call in known
            ]
            assert {call[name] for call in calls[100:]} == {""}
        assert calls[250] | {"question": "", "answer": ""} == known[250] | {
            "question": "",
            "answer": "",
        }
        assert (
            "is not a number"
            in (await get("/api/run", key="p0/run.jsonl", texts="all"))["error"]["message"]
        )

    with_server([tmp_path], ask)


@pytest.mark.parametrize(
    ("broken", "words"), [(b"", "is damaged"), (b'{"type":"Noted","call":"0.9"', "is damaged")]
)
def test_one_bad_line_of_thousands_is_named(tmp_path: Path, broken: bytes, words: str) -> None:
    """Many lines are decoded at once; the bad one is still identified, and the others are
    shown."""
    path = golden.journal_of(500, tmp_path / "run.jsonl")
    lines = path.read_bytes().split(b"\n")
    num_lines = len(lines) - 1
    lines[1799] = broken
    path.write_bytes(b"\n".join(lines))

    async def ask(get: Get, _: ViewServer) -> None:
        payload = await get("/api/run", key="p0/run.jsonl")
        assert f"line 1800 {words}" in payload["head"]["problems"][0]
        assert payload["head"]["version"] == num_lines

    with_server([tmp_path], ask)


def test_pipes_cycles_and_huge_lines_do_not_hang(tmp_path: Path) -> None:
    """A pipe; a call that continues itself, and one that is its own parent; endless brackets; a
    huge line."""
    lines = JOURNAL.read_bytes().splitlines(keepends=True)
    os.mkfifo(tmp_path / "pipe.jsonl")
    call = b'{"type":"CallStarted","id":"0","kind":"rlm","model":"m","depth":0,"question":"q",%s}\n'
    (tmp_path / "fork.jsonl").write_bytes(lines[0] + call % b'"fork":{"call":"0","turn":0}')
    (tmp_path / "own.jsonl").write_bytes(
        lines[0] + call % b'"parent":{"call":"0","turn":0,"cell":0}'
    )
    deep = (
        b'{"type":"CallEnded","id":"0","stop":"final","answer":'
        + b"[" * 100_000
        + b"]" * 100_000
        + b"}\n"
    )
    (tmp_path / "deep.jsonl").write_bytes(lines[0] + lines[1] + deep)
    huge = b'{"type":"Noted","call":"0","text":"' + b"x" * 5_000_000 + b'"}\n'
    (tmp_path / "huge.jsonl").write_bytes(lines[0] + lines[1] + huge)
    (tmp_path / "role.jsonl").write_bytes(
        JOURNAL.read_bytes().replace(b'"role":"assistant"', b'"role":"robot"', 1)
    )

    async def ask(get: Get, _: ViewServer) -> None:
        assert "is not a regular file" in (await get("/api/runs"))["problems"][0]["text"]
        assert (
            "is not a regular file"
            in (await get("/api/run", key="p0/pipe.jsonl"))["error"]["message"]
        )
        assert (
            "which does not precede it"
            in (await get("/api/call", key="p0/fork.jsonl", id="0"))["error"]["message"]
        )
        assert (await get("/api/run", key="p0/own.jsonl"))["columns"]["parent"] == -1
        assert (
            "line 3 is damaged"
            in (await get("/api/run", key="p0/deep.jsonl"))["head"]["problems"][0]
        )
        assert (
            len((await get("/api/call", key="p0/huge.jsonl", id="0"))["notes"][0]["text"]) == 20_000
        )
        assert (await get("/api/run", key="p0/role.jsonl"))["num"] == 5
        assert (
            "line 4 is damaged: Invalid enum"
            in (await get("/api/call", key="p0/role.jsonl", id="0"))["error"]["message"]
        )
        assert (await get("/api/call", key="p0/role.jsonl", id="0.0"))["answer"] == "no failure"

    with_server([tmp_path], ask)


def test_damaged_evaluation_is_shown_as_far_as_readable(world: World, tmp_path: Path) -> None:
    record = (world.evaluated / "evaluations" / f"{world.evaluation}.jsonl").read_bytes()
    lines = record.splitlines(keepends=True)
    (tmp_path / "damaged.jsonl").write_bytes(
        b"".join([*lines[:3], b'{"oops\n', *lines[3:], b'{"type":"outc'])
    )
    (tmp_path / "begun.jsonl").write_bytes(lines[0])

    async def ask(get: Get, _: ViewServer) -> None:
        damaged = await get("/api/evaluation", key="p0/damaged.jsonl")
        assert (damaged["num_made"], len(damaged["problems"])) == (8, 1)
        assert "line 4 is damaged and was skipped" in damaged["problems"][0]
        assert [[k, each["value"]] for k, each in damaged["passes"]] == [[1, 0.75], [2, 1.0]]
        assert {each["run"] for each in damaged["attempts"]} == {None}  # its store is elsewhere
        assert (await get("/api/evaluation", key="p0/begun.jsonl"))["report"] is None
        (problem,) = (await get("/api/run", key="p0/begun.jsonl"))["head"]["problems"]
        assert "open the Evaluations page" in problem
        compared = await get("/api/evaluation", key="p0/damaged.jsonl", other="p0/begun.jsonl")
        assert "no scored item in common" in compared["compared"]["problem"]

    with_server([tmp_path], ask)
    found = get_json(
        [world.evaluated], "/api/evaluation", key=f"p0/evaluations/{world.evaluation}.jsonl"
    )
    assert world.scored in {each["run"] for each in found["attempts"]}
    whole, *kinds = found["report"]["rows"]
    assert (
        whole["average"]["value"],
        whole["average"]["low"] < 0.75 < whole["average"]["high"],
    ) == (0.75, True)
    assert [(row["kind"], row["average"]["value"]) for row in kinds] == [
        ("even", 1.0),
        ("odd", 0.5),
    ]


def test_missing_paths_runs_calls_and_parameters_are_errors(tmp_path: Path, world: World) -> None:
    with pytest.raises(ConfigError, match="is neither a file nor a folder"):
        RunCatalog([tmp_path / "nothing"])
    (tmp_path / "texts").mkdir()
    (problem,) = get_json([tmp_path / "texts"], "/api/runs")["problems"]
    assert "contains no runs" in problem["text"]

    async def ask(get: Get, _: ViewServer) -> None:
        assert "has no 'a\\x00b'" in (await get("/api/run", key="p0/a\0b"))["error"]["message"]
        assert (
            "is not a number"
            in (await get("/api/call", key=world.tree, id="0", **{"from": "9" * 5000}))["error"][
                "message"
            ]
        )
        assert "found no run 'nope'" in (await get("/api/run", key="nope"))["error"]["message"]
        assert (
            "has no call '7.7'"
            in (await get("/api/call", key=world.tree, id="7.7"))["error"]["message"]
        )
        assert (await get("/api/run"))["error"]["message"] == "/api/run needs ?key="
        assert (
            "is not a number"
            in (await get("/api/tokens", key=world.tree, id="0", turn="x"))["error"]["message"]
        )

    with_server([world.store], ask)


def test_bad_line_of_trajectory_file_does_not_affect_others(world: World, tmp_path: Path) -> None:
    good = (
        (world.trainings / "base/rollouts/step-000020.jsonl")
        .read_bytes()
        .splitlines(keepends=True)[0]
    )
    (tmp_path / "mixed.jsonl").write_bytes(good + b'{"id": "x", "calls": 3}\n' + good)
    rows = get_json([tmp_path], "/api/runs")["runs"]
    assert [bool(row.get("problem")) for row in sorted(rows, key=lambda row: str(row["key"]))] == [
        False,
        True,
        False,
    ]


def test_damaged_metrics_line_is_reported_and_the_rest_is_shown(
    world: World, tmp_path: Path
) -> None:
    lines = (world.trainings / "base/metrics.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_bytes(b"".join([*lines[:5], b"{oops}\n", *lines[5:]]))
    found = get_json([tmp_path], "/api/training", key="p0/")
    assert "metrics.jsonl, line 6 is damaged" in found["problems"][0]
    assert found["step"] == 40


def test_kind_of_file_is_detected(tmp_path: Path) -> None:
    record = tmp_path / "eval.jsonl"
    record.write_text('{"type":"plan","model":"m"}\n')
    assert detect_file_kind(record) == "evaluation"
    assert detect_file_kind(JOURNAL) == "journal"
