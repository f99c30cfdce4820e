"""Corrupted files: checkpoints and saved policies are verified with checksums before use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from ramify.errors import StoreError
from ramify.models import folder_file_checksums
from ramify.models.load import load_policy, save_policy
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore, read_state, verify
from ramify.train.config import Schedule
from ramify.train.losses.total_loss import LossSpec
from ramify.train.policy_dependent_defaults import with_policy_defaults
from ramify.train.recipe import load_stored_run
from tests.packaged import TINY
from tests.shown import train
from tests.train.small import small, weights_of

BASE = msgspec.structs.replace(small().policy, tokenizer=str(TINY))
"""A policy with a tokenizer, so that no demonstrations are needed."""


def flip(path: Path, at: int | None = None) -> None:
    """Flip one bit in the middle of a file, or at an offset."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if at is None else at] ^= 1
    path.write_bytes(data)


def written(path: Path) -> Callable[[], None]:
    """Write a part in the background, as ranks write their shards."""
    path.mkdir()
    (path / "trainer.pt").write_bytes(b"random states")

    def wait() -> None:
        (path / "shards").mkdir()
        for rank in (0, 1):
            (path / f"shards/__{rank}_0.distcp").write_bytes(
                b"weights and moments of rank %d" % rank
            )
        (path / "shards/.metadata").write_bytes(b"names")

    return wait


FILES = (
    "backend/shards/.metadata",
    "backend/shards/__0_0.distcp",
    "backend/shards/__1_0.distcp",
    "backend/trainer.pt",
    "state.json",
)


@pytest.mark.parametrize("name", FILES)
def test_flipped_bit_is_detected_in_every_checkpoint_file(name: str, tmp_path: Path) -> None:
    checkpoints = CheckpointStore(tmp_path)
    older, latest = (
        checkpoints.save(CheckpointedProgress(step=step), {"backend": written}) for step in (1, 2)
    )
    checkpoints.wait_for_write()
    known = json.loads((latest / folder_file_checksums.FILE).read_bytes())["files"]
    assert sorted(known) == sorted(FILES)
    for checkpoint in (older, latest):
        verify(checkpoint)
    flip(latest / name, at=-9 if name == "state.json" else None)
    where = re.escape(str(latest / name))
    with pytest.raises(
        StoreError, match=rf"{where} is damaged: its sha256 .*--resume {re.escape(str(older))}\)"
    ):
        verify(latest)
    verify(older)
    flip(older / name, at=-9 if name == "state.json" else None)
    with pytest.raises(StoreError, match=r"is damaged: .*; start again in another folder"):
        verify(older)


def test_missing_or_truncated_files_are_detected(tmp_path: Path) -> None:
    latest = CheckpointStore(tmp_path).save(
        CheckpointedProgress(step=1), {"weights": lambda path: path.write_text("abc") and None}
    )
    (latest / "weights").write_text("ab")
    with pytest.raises(
        StoreError, match="weights is damaged: it has 2 bytes, but had 3 when written"
    ):
        verify(latest)
    (latest / "weights").unlink()
    with pytest.raises(StoreError, match="weights is damaged: it is missing"):
        verify(latest)
    (latest / folder_file_checksums.FILE).write_text("{")
    with pytest.raises(StoreError, match=r"checksums\.json is damaged: "):
        verify(latest)
    (latest / folder_file_checksums.FILE).unlink()
    with pytest.raises(StoreError, match=r"checksums\.json is missing; start again"):
        verify(latest)


def test_checksums_cover_files_larger_than_one_chunk(tmp_path: Path) -> None:
    for size in (0, 1, folder_file_checksums.CHUNK, folder_file_checksums.CHUNK + 1):
        with open(tmp_path / f"of-{size}", "wb") as file:
            file.truncate(size)
    folder_file_checksums.write(tmp_path)
    folder_file_checksums.check(tmp_path)
    last = tmp_path / f"of-{folder_file_checksums.CHUNK + 1}"
    with open(last, "r+b") as file:
        file.seek(folder_file_checksums.CHUNK)
        file.write(b"\1")
    with pytest.raises(StoreError, match=re.escape(f"{last} is damaged")):
        folder_file_checksums.check(tmp_path)


def test_run_does_not_resume_from_damaged_files(tmp_path: Path) -> None:
    """backend.pt holds weights, optimizer and random states; the reference is the model of the
    KL."""
    given = small(
        policy=BASE,
        warmup=None,
        sft=None,
        schedule=Schedule(evaluate_every=2, checkpoint_every=1, keep_last=9),
    )
    run = msgspec.structs.replace(
        given, rl=msgspec.structs.replace(given.rl, loss=LossSpec(kl_beta=0.1))
    )
    out = tmp_path / "out"
    train(run, out, say=pytest.fail)
    ended = weights_of(out)
    latest = CheckpointStore(out).all()[-2]
    damaged = (
        latest / "backend/backend.pt",
        latest / "policy/model.safetensors",
        out / "reference/model.safetensors",
    )
    for path in damaged:
        flip(path)
        with pytest.raises(StoreError, match=re.escape(f"{path} is damaged: its sha256")):
            train(run, out, resume=latest)
        flip(path)
    train(run, out, resume=latest)
    assert all(bool((ended[name] == each).all()) for name, each in weights_of(out).items())


def test_saved_policy_is_verified_when_loaded(tmp_path: Path) -> None:
    train(small(warmup=None, rl=None), tmp_path, say=pytest.fail)
    for folder in (tmp_path / "policy", CheckpointStore(tmp_path).all()[-1] / "policy"):
        weights = folder / "model.safetensors"
        policy = load_policy(folder)
        flip(weights, at=-5)
        with pytest.raises(StoreError, match=re.escape(f"{weights} is damaged: its sha256")):
            load_policy(folder)
        flip(weights, at=-5)
        load_policy(folder)
    save_policy(policy, tmp_path / "policy")  # overwriting drops the old checksums
    assert not (tmp_path / "policy" / folder_file_checksums.FILE).exists()
    load_policy(tmp_path / "policy")


def test_checkpoints_without_checksums_can_be_resumed(tmp_path: Path) -> None:
    run = small(policy=BASE, warmup=None, sft=None)
    train(run, tmp_path, say=pytest.fail)
    for checkpoint in CheckpointStore(tmp_path).all():
        (checkpoint / folder_file_checksums.FILE).unlink()
        state = json.loads((checkpoint / "state.json").read_bytes())
        del (
            state["checksums"],
            state["config"]["task"]["validate"],
            state["config"]["rl"]["rollout"]["direct"],
        )
        (checkpoint / "state.json").write_text(json.dumps(state))
        assert read_state(checkpoint).checksums == ""
    assert load_stored_run(tmp_path) == with_policy_defaults(run)
    train(run, tmp_path, resume=tmp_path, say=pytest.fail)
