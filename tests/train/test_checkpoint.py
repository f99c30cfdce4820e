"""Checkpoints: atomic, kept or dropped as asked, found again, and refused where they do not fit."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from ramify.errors import ConfigError, StoreError
from ramify.train.checkpoint import Checkpoints, State, check_config, find, read_state


def save(checkpoints: Checkpoints, step: int, score: float | None = None) -> Path:
    return checkpoints.save(
        State(step=step, score=score, config={"seed": 1}),
        {"weights": lambda path: path.write_text(f"of {step}") and None},
    )


def names(checkpoints: Checkpoints) -> list[str]:
    return [path.name for path in checkpoints.all()]


def test_the_last_and_the_best_stay(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep_last=2, keep_best=1)
    for step, score in ((1, 0.2), (2, 0.9), (3, None), (4, 0.5), (5, 0.9)):
        save(checkpoints, step, score)
    assert names(checkpoints) == ["step-000002", "step-000004", "step-000005"]
    assert checkpoints.best() == tmp_path / "checkpoints/step-000002"
    assert checkpoints.latest() == tmp_path / "checkpoints/step-000005"
    assert (tmp_path / "checkpoints/step-000002/weights").read_text() == "of 2"
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == names(checkpoints)


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)

    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match=r"step-000002 cannot be written: .*No space left"):
        checkpoints.save(State(step=2), {"weights": full})
    assert checkpoints.latest() == tmp_path / "checkpoints/step-000001"
    save(checkpoints, 2)
    assert sorted(path.name for path in checkpoints.folder.iterdir()) == ["step-000001", "step-000002"]


def test_a_save_that_goes_on_by_itself_is_there_once_it_is_waited_for(tmp_path: Path) -> None:
    checkpoints, may_end = Checkpoints(tmp_path), threading.Event()

    def begin(path: Path) -> Callable[[], None]:
        path.write_text("begun")

        def wait() -> None:
            may_end.wait()
            if path.parent.name.startswith(".step-000002"):
                raise OSError(28, "No space left on device")
            path.write_text("whole")

        return wait

    state = State(step=1, score=0.5)
    final = checkpoints.save(state, {"weights": begin})
    state.score = None  # what is written is the state as it was
    assert not final.exists()
    may_end.set()
    assert checkpoints.best() == final
    assert (final / "weights").read_text() == "whole"
    checkpoints.save(State(step=2), {"weights": begin})
    with pytest.raises(StoreError, match=r"step-000002 cannot be written: .*No space left"):
        checkpoints.settle()
    assert checkpoints.all() == [final]


def test_a_step_that_is_done_again_replaces_its_checkpoint(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1, 0.1)
    save(checkpoints, 1, 0.3)
    assert [read_state(path).score for path in checkpoints.all()] == [0.3]


def test_what_is_to_be_resumed_is_found(tmp_path: Path) -> None:
    first, second = (save(Checkpoints(tmp_path), step) for step in (1, 2))
    assert (find(tmp_path), find(first)) == (second, first)
    with pytest.raises(ConfigError, match="nothing to resume"):
        find(tmp_path / "other")
    (first / "state.json").write_text("{")
    with pytest.raises(StoreError, match="is not a checkpoint"):
        read_state(first)


def test_the_first_difference_is_named() -> None:
    state = State(step=7, config={"seed": 1, "optim": {"lr": 0.1, "decay": 0.5}, "eval": {"num": 8}})
    check_config(state, state.config)
    check_config(state, {**state.config, "eval": {"num": 64}}, free=("eval.",))
    with pytest.raises(ConfigError, match=r"step 7 is of another config: optim.lr was 0.1 and is now 0.2"):
        check_config(state, {"seed": 1, "optim": {"lr": 0.2, "decay": 0.1}, "eval": {"num": 8}})
    with pytest.raises(ConfigError, match=r"optim.momentum was None and is now 0.9"):
        check_config(state, {**state.config, "optim": {"lr": 0.1, "decay": 0.5, "momentum": 0.9}})


def test_a_checkpoint_of_a_later_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "state.json").write_text('{"step": 1, "schema_version": 99}')
    with pytest.raises(StoreError, match="later version"):
        read_state(tmp_path)
