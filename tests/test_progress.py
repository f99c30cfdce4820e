"""Progress reports of long-running work."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from ramify.progress import ProgressState, subscribe, track_progress
from ramify.sources.load_sources import load


def test_progress_is_reported_from_start_to_end() -> None:
    states: list[ProgressState] = []
    with (
        subscribe(states.append),
        contextlib.suppress(ValueError),
        track_progress("counting", 3, "items") as work,
    ):
        work.advance()
        work.set_progress(2, note="b")
        raise ValueError("it ends in the middle")
    assert [(each.done, each.note, each.is_over) for each in states] == [
        (0, "", False),
        (1, "", False),
        (2, "b", False),
        (2, "b", True),
    ]
    assert {(each.what, each.total, each.unit) for each in states} == {("counting", 3, "items")}
    work.advance()
    assert len(states) == 4  # no subscriber is left


def test_progress_of_threads_is_reported_with_distinct_ids() -> None:
    states: list[ProgressState] = []

    def work() -> None:
        with track_progress("there"):
            pass

    with subscribe(states.append), track_progress("here"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [each.what for each in states] == ["here", "there", "there", "here"]
    assert states[0].id == states[3].id != states[1].id == states[2].id


def test_loading_sources_reports_bytes(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("y" * 500)
    states: list[ProgressState] = []
    with subscribe(states.append):
        load(tmp_path)
    assert [(each.done, each.note, each.is_over) for each in states] == [
        (0, "", False),
        (1000, "a.txt", False),
        (1500, "b.txt", False),
        (1500, "b.txt", True),
    ]
    assert {(each.what, each.unit) for each in states} == {("reading", "bytes")}


def test_loading_policy_reports_bytes() -> None:
    pytest.importorskip("torch")
    from ramify.models.load import load_policy
    from tests.packaged import TINY

    states: list[ProgressState] = []
    with subscribe(states.append):
        policy = load_policy(TINY)
    last = states[-1]
    assert (last.what, last.unit, last.is_over, last.done) == ("loading", "bytes", True, last.total)
    assert last.done > policy.num_parameters  # bytes, two or more to each
