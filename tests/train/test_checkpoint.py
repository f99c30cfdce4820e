"""Checkpoints: atomic writes, retention, lookup for resuming, and rejection of unusable ones."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify.errors import ConfigError, StoreError
from ramify.train.checkpoint import (
    CheckpointedProgress,
    CheckpointStore,
    read_state,
    resolve_checkpoint,
)


def save(checkpoints: CheckpointStore, step: int, score: float | None = None) -> Path:
    return checkpoints.save(
        CheckpointedProgress(step=step, score=score, config={"seed": 1}),
        {"weights": lambda path: path.write_text(f"of {step}") and None},
    )


def names(checkpoints: CheckpointStore) -> list[str]:
    return [path.name for path in checkpoints.all()]


def test_last_and_best_checkpoints_are_kept(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.9)):
        save(checkpoints, step, score)
    assert names(checkpoints) == ["step-000002", "step-000004", "step-000005"]
    assert checkpoints.best() == tmp_path / "checkpoints/step-000002"
    assert checkpoints.latest() == tmp_path / "checkpoints/step-000005"
    assert (tmp_path / "checkpoints/step-000002/weights").read_text() == "of 2"
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == names(checkpoints)


def test_full_disk_during_torch_save_is_named(tmp_path: Path) -> None:
    """torch.save reports it as an internal failure of its archive."""
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)

    def full(path: Path) -> None:
        raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")

    with pytest.raises(StoreError, match=r"torch.save failed \(\d+ MiB are free on its disk\)"):
        checkpoints.save(CheckpointedProgress(step=2), {"backend": full})
    assert checkpoints.latest() == tmp_path / "checkpoints/step-000001"

    def broken(path: Path) -> None:
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else"):
        checkpoints.save(CheckpointedProgress(step=2), {"backend": broken})


def test_failed_save_leaves_earlier_checkpoints(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1)

    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"step-000002 cannot be written: .*No space left"):
        checkpoints.save(CheckpointedProgress(step=2), {"weights": full})
    assert checkpoints.latest() == tmp_path / "checkpoints/step-000001"
    save(checkpoints, 2)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "step-000001",
        "step-000002",
    ]


def test_background_save_appears_once_it_is_settled(tmp_path: Path) -> None:
    checkpoints, may_end = CheckpointStore(tmp_path), threading.Event()

    def begin(path: Path) -> Callable[[], None]:
        path.write_text("begun")

        def wait() -> None:
            may_end.wait()
            if path.parent.name.startswith(".step-000002"):
                raise OSError(28, "No space left on device")
            path.write_text("whole")

        return wait

    state = CheckpointedProgress(step=1, score=0.5)
    final = checkpoints.save(state, {"weights": begin})
    state.score = None  # the file holds the state as it was at the call
    assert not final.exists()
    may_end.set()
    assert checkpoints.best() == final
    assert (final / "weights").read_text() == "whole"
    checkpoints.save(CheckpointedProgress(step=2), {"weights": begin})
    with pytest.raises(StoreError, match=r"step-000002 cannot be written: .*No space left"):
        checkpoints.wait_for_write()
    assert checkpoints.all() == [final]


def test_repeated_step_replaces_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 1, 0.1)
    save(checkpoints, 1, 0.3)
    assert [read_state(path).score for path in checkpoints.all()] == [0.3]


KILLED = """
import os, pathlib, sys
from ramify.train.checkpoint import CheckpointStore
from tests.train.test_checkpoint import save
folder = pathlib.Path(sys.argv[1])
save(CheckpointStore(folder), 1, 0.1)
at, left = sys.argv[2], [int(sys.argv[3])]

def end(event, arguments):
    if event == at and str(arguments[0]).startswith(("step-", str(folder), "weights", "state")):
        left[0] -= 1
        if left[0] == 0:
            os._exit(9)

sys.addaudithook(end)
save(CheckpointStore(folder), 1, 0.3)
"""


@pytest.mark.parametrize(("event", "nth"), [("os.rename", 2), ("os.remove", 1), ("os.remove", 2)])
def test_kill_while_replacing_a_checkpoint_leaves_a_complete_one(
    tmp_path: Path, event: str, nth: int
) -> None:
    """Killed between the two renames, and while the old checkpoint is removed."""
    process = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), event, str(nth)], check=False
    )
    assert process.returncode == 9
    found = resolve_checkpoint(tmp_path)
    assert found.name == "step-000001"
    assert (found / "weights").read_text() == "of 1"
    assert read_state(found).score == (0.1 if event == "os.rename" else 0.3)
    checkpoints = CheckpointStore(tmp_path)
    save(checkpoints, 2)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == [
        "step-000001",
        "step-000002",
    ]


def test_resuming_from_earlier_step_moves_later_checkpoints_aside(tmp_path: Path) -> None:
    """Abandoned checkpoints do not count as latest, as best, or for retention."""
    for step, score in ((10, 0.4), (15, 0.9), (20, None)):
        save(CheckpointStore(tmp_path, keep_last=3), step, score)
    checkpoints = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    aside = checkpoints.abandon_after(10)
    assert aside == [
        tmp_path / "checkpoints/abandoned" / name for name in ("step-000015", "step-000020")
    ]
    assert [read_state(path).score for path in aside] == [0.9, None]
    assert (checkpoints.latest(), checkpoints.best()) == (tmp_path / "checkpoints/step-000010",) * 2
    for step in (16, 17):
        save(checkpoints, step, 0.1)
    assert names(checkpoints) == ["step-000010", "step-000016", "step-000017"]
    assert checkpoints.abandon_after(17) == []
    (again,) = checkpoints.abandon_after(16)
    assert again.parent == aside[0].parent


def test_checkpoints_are_sorted_by_step(tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path, keep_last=2)
    for step in (999_999, 1_000_000):
        save(checkpoints, step)
    assert names(checkpoints) == ["step-999999", "step-1000000"]


def test_find_returns_the_checkpoint_to_resume(tmp_path: Path) -> None:
    first, second = (save(CheckpointStore(tmp_path), step) for step in (1, 2))
    assert (resolve_checkpoint(tmp_path), resolve_checkpoint(first)) == (second, first)
    with pytest.raises(ConfigError, match="nothing to resume"):
        resolve_checkpoint(tmp_path / "other")
    (first / "state.json").write_text("{")
    with pytest.raises(StoreError, match="is not a checkpoint"):
        read_state(first)


def test_checkpoint_of_a_later_version_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 1, "schema_version": 99}')
    with pytest.raises(StoreError, match="newer version"):
        read_state(tmp_path)
