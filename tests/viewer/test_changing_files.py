"""Runs and training folders that are viewed while they are written, damaged, cut or replaced: the
page always catches up."""

from __future__ import annotations

import asyncio
import os
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Store
from ramify.cli.show import show
from ramify.store.journal import FileRunJournal, FileStoredRun
from ramify.store.run_summary import summarise
from ramify.train.metrics import (
    GROUPS,
    Diagnosis,
    MetricsFile,
    RolloutGroupRecord,
    StepMetrics,
    read_metrics,
)
from ramify.types.message import Message
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.run_lookup import LocatedRun
from ramify.viewer.run_overview import overview_update, run_overview
from ramify.viewer.training_and_evaluation_pages import TrainingCurves
from ramify.viewer.view_server import ViewServer
from ramify.viewer.watched_run import WatchedRun
from tests.data.golden import JOURNAL
from tests.engine.helpers import code, rlm
from tests.viewer import golden
from tests.viewer.requests import messages, session

LINES = JOURNAL.read_bytes().splitlines(keepends=True)


def watched(path: Path) -> WatchedRun:
    return WatchedRun(LocatedRun("r", FileStoredRun(path)))


def shown(run: WatchedRun) -> dict[str, object]:
    """Picture of a run without the fields that identify its file."""
    found = run_overview(run)
    return found | {"head": found["head"] | {"path": "", "alive": False}}


def whole() -> dict[str, object]:
    run = watched(JOURNAL)
    run.refresh()
    return shown(run)


@pytest.fixture
def live(tmp_path: Path) -> FileRunJournal:
    """A journal that this process writes, still empty."""
    return Store(tmp_path).create("r")


def append(path: Path, data: bytes) -> None:
    with path.open("ab", buffering=0) as file:
        file.write(data)


@pytest.mark.parametrize("piece", [1, 97, 4096])
def test_run_written_in_pieces_is_shown_completely(live: FileRunJournal, piece: int) -> None:
    run, data = watched(live.path), b"".join(LINES)
    data = data[: 20 * piece] if piece == 1 else data
    for at in range(0, len(data), piece):
        append(live.path, data[at : at + piece])
        if run.size_changed():
            run.refresh()
        assert (run.problem, run.damage, run.torn, run.is_alive) == ("", "", "", True)
    if piece > 1:
        assert shown(run) == whole()
    live.close()


def test_no_reader_reports_damage_at_any_byte_of_a_growing_journal(
    tmp_path: Path, live: FileRunJournal, capsys: pytest.CaptureFixture[str]
) -> None:
    def script(messages: tuple[Message, ...]) -> str:
        return code("FINAL(llm_query('é?'))") if messages[0].role == "system" else "ja"

    store = Store(tmp_path / "origin")
    with rlm(script, store=store) as made:
        data = store.path(made.completion("text", "?").run_id).read_bytes()
    growing, answers, kept = watched(live.path), set[object](), Store(tmp_path)
    for byte in range(len(data)):
        append(live.path, data[byte : byte + 1])
        num = data[: byte + 1].count(b"\n")
        growing.refresh()
        fresh = watched(live.path)
        fresh.refresh()
        for run in (growing, fresh):
            assert (run.version, run.problem, run.damage, run.torn) == (num, "", "", "")
        answers.add(kept.load("r").answer)
        assert summarise(FileStoredRun(live.path)).problem is None
        if byte % 64 == 0 or data[byte : byte + 1] == b"\n":
            assert show([str(live.path)], *[None] * 7) == 0
            said = capsys.readouterr()
            assert "damaged" not in said.out + said.err
    assert answers == {None, "ja"}
    live.close()


def test_run_read_during_writes_is_never_damaged(live: FileRunJournal) -> None:
    data = b"".join(LINES)

    def write() -> None:
        for at in range(0, len(data), 61):
            append(live.path, data[at : at + 61])

    run, writing = watched(live.path), threading.Thread(target=write)
    writing.start()
    while run.offset < len(data):
        run.refresh()
        assert (run.problem, run.damage) == ("", "")
    writing.join()
    assert shown(run) == whole()
    live.close()


def test_damaged_line_of_live_run_is_skipped_and_reported(live: FileRunJournal) -> None:
    run = watched(live.path)
    append(live.path, b"".join(LINES[:9]) + b'{"type":"Replied","oops\n')
    run.refresh()
    assert run.damage == ""  # its writer may be at work there
    assert run.size_changed()
    run.refresh()
    assert f"{live.path}, line 10 is damaged and was skipped: " in run.damage
    append(live.path, b"".join(LINES[9:]))
    assert run.size_changed()
    changed = run.refresh()
    assert not run.size_changed()
    assert overview_update(run, changed)["head"]["problems"] == [run.damage]
    assert (run.problem, len(run.tree.order), run.tree.run_data.stop) == ("", 5, "final")
    live.close()
    run.refresh()
    assert run.is_alive is False
    assert (
        run.call_detail("0").call.stop == "final"
    )  # lines after the damage have the right offsets


def test_damage_repaired_by_writer_is_not_reported(live: FileRunJournal) -> None:
    run = watched(live.path)
    append(live.path, b"".join(LINES[:9]))
    size = live.path.stat().st_size
    append(live.path, b"\0" * 40 + b"\n")
    run.refresh()
    os.truncate(live.path, size)
    append(live.path, b"".join(LINES[9:]))
    run.refresh()
    assert shown(run) == whole()
    live.close()


def test_lines_that_depend_on_missing_line_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join([LINES[0], *LINES[2:]]))
    run = watched(path)
    run.refresh()
    assert f"{path}, line 2 is inconsistent with earlier lines and was skipped: no " in run.damage
    assert run.damage.endswith(" more were skipped after it")
    assert run.version == len(LINES) - 1


@pytest.mark.parametrize("how", ["cut", "replaced"])
def test_cut_or_replaced_file_is_read_from_the_start(tmp_path: Path, how: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_bytes(b"".join(LINES))
    run = watched(path)
    run.refresh()
    if how == "replaced":
        golden.journal_of(300, tmp_path / "new.jsonl").replace(path)
    else:
        path.write_bytes(b"".join(LINES[:5]))
    assert run.size_changed()
    run.refresh()
    fresh = watched(path)
    fresh.refresh()
    assert run.generation == fresh.generation + 1
    again = shown(run)
    assert again | {"head": again["head"] | {"generation": 0}} == shown(fresh)  # type: ignore[operator]


def test_temporarily_missing_file_is_read_when_it_returns(tmp_path: Path) -> None:
    path, aside = tmp_path / "r.jsonl", tmp_path / "aside"
    path.write_bytes(b"".join(LINES[:5]))
    run = watched(path)
    run.refresh()
    path.rename(aside)
    run.refresh()
    assert run.problem == f"cannot read {path}: No such file or directory"
    aside.rename(path)
    append(path, b"".join(LINES[5:]))
    assert run.size_changed()
    run.refresh()
    assert shown(run) == whole()


def test_empty_file_becomes_run_once_written(tmp_path: Path) -> None:
    path = tmp_path / "r.jsonl"
    path.touch()
    run = watched(path)
    run.refresh()
    assert "is empty: not a run (yet)" in run.problem
    for part in (LINES[0][:20], LINES[0][20:], b"".join(LINES[1:])):
        append(path, part)
        assert run.size_changed()
        run.refresh()
    assert shown(run) == whole()


def test_follower_receives_damage_later_lines_and_end(
    tmp_path: Path,
) -> None:
    store = Store(tmp_path)
    live = store.create("r")

    async def main() -> list[dict[str, Any]]:
        append(live.path, b"".join(LINES[:9]))
        heads: list[dict[str, Any]] = []
        then = {
            9: lambda: append(live.path, b"oops\n" + LINES[9][:30]),
            10: lambda: append(live.path, LINES[9][30:] + b"".join(LINES[10:])),
            num: live.close,
        }
        async with (
            ViewServer(RunCatalog([tmp_path])) as server,
            session(server) as http,
        ):
            url = f"http://127.0.0.1:{server.port}/api/events"
            async with http.get(url, params={"key": "r", "version": 0}) as response:
                async for message in messages(response):
                    heads.append(message["head"])
                    if not heads[-1]["alive"]:
                        return heads
                    then.pop(heads[-1]["version"], lambda: None)()  # the same head may arrive twice
        return []

    num = len(LINES) + 1
    heads = asyncio.run(asyncio.wait_for(main(), 100))
    damage = f"{live.path}, line 10 is damaged and was skipped: "
    said = [
        (head["version"], head["alive"], *(each[: len(damage)] for each in head["problems"]))
        for head in heads
    ]
    assert list(dict.fromkeys(said)) == [
        (9, True),
        (10, True, damage),
        (num, True, damage),
        (num, False, damage),
    ]


# --- trainings
# -----------------------------------------------------------------------------------------------------------

STEP = StepMetrics(1, "rl", 1.0, {"reward": 0.5})


def test_curves_wait_for_whole_lines_and_recover_from_errors(tmp_path: Path) -> None:
    curves, path = TrainingCurves(tmp_path), tmp_path / "metrics.jsonl"
    assert curves.refresh() is True
    assert curves.data()["problems"] == [f"cannot read {path}: No such file or directory"]
    assert curves.refresh() is False  # reported once
    line = msgspec.json.encode(STEP) + b"\n"
    for at in range(len(line)):
        append(path, line[at : at + 1])
        curves.refresh()
    append(path, b"\xc3\n" + line.replace(b'"step":1', b'"step":2'))
    curves.refresh()
    data = curves.data()
    assert (data["names"], len(data["problems"])) == ({"reward": ([1, 2], [0.5, 0.5])}, 1)
    assert f"{path}, line 2 is damaged and was skipped" in data["problems"][0]


def test_training_page_has_what_the_doctor_found(tmp_path: Path) -> None:
    found = Diagnosis(name="too_hard", text="no attempt is right: …", action="stop")
    MetricsFile(tmp_path).write(3, "rl", 1.0, {"reward": 0.0}, [found])
    curves = TrainingCurves(tmp_path)
    curves.refresh()
    (alarm,) = curves.data()["alarms"]
    assert (alarm.name, alarm.text, alarm.action, alarm.steps) == (
        "too_hard",
        found.text,
        "stop",
        [3],
    )


def test_torn_lines_in_training_folder_are_skipped_without_data_loss(
    tmp_path: Path,
) -> None:
    account = RolloutGroupRecord(number=1, item="é", version=None, outcome="lost", rollouts=[])
    for name in ("metrics.jsonl", "groups.jsonl"):
        (tmp_path / name).write_bytes(b'{"item":"\xff"}\n' + b"[" * 5000 + b'\n{"item":"\xc3')
    metrics = MetricsFile(tmp_path)
    metrics.write(1, "rl", 1.0, {"reward": 0.5})
    GROUPS.append(tmp_path, [msgspec.structs.replace(account, step=1)])
    assert list(read_metrics(tmp_path)) == [STEP]
    assert list(GROUPS.read(tmp_path)) == [msgspec.structs.replace(account, step=1)]
