"""Scores that hang, exit or block their event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import RamifyError
from ramify.tasks.base import DatasetTask, Item
from ramify.tasks.score_with_timeout import score_with_timeout
from ramify.tasks.validation import answer_only_trajectory, validate

ITEM = Item("How many?", gold=7, id="t/test/0")


def score(reward: Any, timeout_s: float = 30) -> dict[str, float]:
    task = DatasetTask("t", {"test": [ITEM]}, reward)
    return dict(score_with_timeout(task, ITEM, answer_only_trajectory(ITEM, 7), timeout_s).rewards)


def test_endless_score_is_named_with_its_line_and_stopped() -> None:
    ended = threading.Event()

    def endless(answer: Any, item: Item) -> float:
        try:
            while True:
                pass
        finally:
            ended.set()

    with pytest.raises(
        RamifyError,
        match=r"^task 't', item t/test/0: its score took more than 0.2 s, "
        r"at .*test_run_score.py:\d+ \(endless\); it was stopped \(a run's limit is rl\.rollout\.grace_s\)$",
    ):
        score(endless, 0.2)
    assert ended.wait(30)


def test_check_of_a_task_has_the_limit_of_its_run() -> None:
    def endless(answer: Any, item: Item) -> float:
        while True:
            pass

    task = DatasetTask("t", {"test": [ITEM]}, endless)
    with pytest.raises(RamifyError, match=r"its score took more than 0\.2 s, at .*\(endless\)"):
        validate(task, score_s=0.2)


def test_endless_coroutine_is_cancelled() -> None:
    cancelled = threading.Event()

    async def endless(answer: Any, item: Item) -> float:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.set()
        return 1.0

    with pytest.raises(RamifyError, match=r"its score took more than 0\.2 s"):
        score(endless, 0.2)
    assert cancelled.wait(30)


def test_coroutine_that_blocks_its_loop_blocks_no_later_score() -> None:
    release, given_up = threading.Event(), threading.Event()

    async def blocking(answer: Any, item: Item) -> float:
        release.wait()
        return 1.0

    async def quick(answer: Any, item: Item) -> float:
        return 0.5

    with pytest.raises(RamifyError, match=r"its score took more than 0\.2 s"):
        score(blocking, 0.2)
    try:
        until = time.monotonic() + 60
        while not given_up.is_set() and time.monotonic() < until:
            try:
                assert score(quick, 1) == {"correct": 0.5}
                given_up.set()
            except RamifyError:
                continue  # the blocked loop is still being waited for
        assert given_up.is_set()
    finally:
        release.set()


def test_exit_of_the_process_in_a_score_is_named() -> None:
    def leave(answer: Any, item: Item) -> float:
        os._exit(3)

    with pytest.raises(
        RamifyError,
        match=r"its score raised SystemExit: os._exit\(3\), which would have ended the whole run",
    ):
        score(leave)
    with pytest.raises(RamifyError, match="which would have ended the whole run"):
        validate(DatasetTask("t", {"test": [ITEM]}, leave))


def test_exit_works_elsewhere(tmp_path: Path) -> None:
    """In a child that a score forks, and outside scores."""
    script = tmp_path / "exits.py"
    script.write_text(
        """\
import os
from tests.tasks.test_run_score import score

def fork(answer, item):
    child = os.fork()
    if child == 0:
        os._exit(5)
    return float(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

print(score(fork), flush=True)
os._exit(6)
"""
    )
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (6, "{'correct': 5.0}\n"), done.stderr
