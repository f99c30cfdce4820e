"""What is said of long work, by those who do it."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from ramify.progress import ProgressState, report_progress, subscribe
from ramify.sources.load_sources import load


def test_work_is_told_from_beginning_to_end() -> None:
    told: list[ProgressState] = []
    with (
        subscribe(told.append),
        contextlib.suppress(ValueError),
        report_progress("counting", 3, "items") as work,
    ):
        work.more()
        work.at(2, note="b")
        raise ValueError("it ends in the middle")
    assert [(each.done, each.note, each.is_over) for each in told] == [
        (0, "", False),
        (1, "", False),
        (2, "b", False),
        (2, "b", True),
    ]
    assert {(each.what, each.total, each.unit) for each in told} == {("counting", 3, "items")}
    work.more()
    assert len(told) == 4  # no subscriber is left


def test_every_thread_is_heard_and_pieces_are_told_apart() -> None:
    told: list[ProgressState] = []

    def work() -> None:
        with report_progress("there"):
            pass

    with subscribe(told.append), report_progress("here"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert [each.what for each in told] == ["here", "there", "there", "here"]
    assert told[0].id == told[3].id != told[1].id == told[2].id


def test_reading_says_how_much(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x" * 1000)
    (tmp_path / "b.txt").write_text("y" * 500)
    told: list[ProgressState] = []
    with subscribe(told.append):
        load(tmp_path)
    assert [(each.done, each.note, each.is_over) for each in told] == [
        (0, "", False),
        (1000, "a.txt", False),
        (1500, "b.txt", False),
        (1500, "b.txt", True),
    ]
    assert {(each.what, each.unit) for each in told} == {("reading", "bytes")}


def test_loading_a_policy_says_how_much() -> None:
    pytest.importorskip("torch")
    from ramify.inference.base import TINY
    from ramify.models.load import load_policy

    told: list[ProgressState] = []
    with subscribe(told.append):
        policy = load_policy(TINY)
    last = told[-1]
    assert (last.what, last.unit, last.is_over, last.done) == ("loading", "bytes", True, last.total)
    assert last.done > policy.num_parameters  # bytes, two or more to each
