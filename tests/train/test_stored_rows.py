"""Rows of supervised fine-tuning are made once: a resumed run asks no demonstrator and tokenizes
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ramify.engine.prompt_scaffold import scaffold_of
from ramify.tasks.base import task_of
from ramify.train.backends.base import OptimizerSpec
from ramify.train.data.sft_data import DEMOS
from ramify.train.data.sft_row_cache import ROWS_FILE, read_rows, write_rows
from ramify.train.sft_training_data import demonstrate
from ramify.types.message import Message
from ramify.types.training_sequences import TokenSequence
from tests.docs.world import scripted
from tests.shown import train
from tests.train.small import small
from tests.train.test_loop import read_rows as read_metrics_rows


def sequence(name: str, length: int, ce: bool) -> TokenSequence:
    numbers = np.arange(length, dtype=np.float32)
    return TokenSequence(
        name=name,
        item=f"item {name}",
        token_ids=np.arange(length, dtype=np.int64),
        mask=numbers > 1,
        sampler_logprobs=-numbers,
        advantages=numbers,
        rl=numbers,
        ce=numbers if ce else None,
    )


@pytest.mark.parametrize("ce", [True, False])
def test_rows_are_read_as_they_were_written(ce: bool, tmp_path: Path) -> None:
    path = tmp_path / ROWS_FILE
    rows = [sequence("a", 3, ce), sequence("b", 1, ce), sequence("c", 5, ce)]
    assert read_rows(path, "key") is None
    write_rows(path, rows, "key")
    found = read_rows(path, "key")
    assert found is not None
    for row, again in zip(rows, found, strict=True):
        for name in TokenSequence.__struct_fields__:
            mine, other = getattr(row, name), getattr(again, name)
            if isinstance(mine, np.ndarray):
                assert mine.dtype == other.dtype
                assert mine.tolist() == other.tolist()
            else:
                assert mine == other
    assert read_rows(path, "another key") is None
    path.write_bytes(path.read_bytes()[:100])
    assert read_rows(path, "key") is None


@pytest.fixture
def counted(tmp_path: Path) -> Iterator[Path]:
    """A file with a line for each time that demonstrations were made."""
    calls = tmp_path / "calls"
    ledger = DEMOS.resolve("ledger")

    @DEMOS.register("counted")
    def make(*args: Any, **options: Any) -> Any:
        with calls.open("a") as file:
            file.write("made\n")
        return ledger(*args, **options)

    yield calls
    DEMOS.reset()


def run_of(steps: int) -> Any:
    run = small()
    sft = msgspec.structs.replace(run.sft, demos="counted")
    rl = msgspec.structs.replace(run.rl, steps=steps, optim=OptimizerSpec(lr=1e-3))
    return msgspec.structs.replace(run, sft=sft, rl=rl)


def test_resumed_run_makes_no_demonstrations(counted: Path, tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    train(run_of(4), whole)
    assert counted.read_text() == "made\n"
    train(run_of(2), out)
    train(run_of(4), out, resume=out)
    assert counted.read_text() == "made\n" * 2
    losses = [
        [
            row.values["rl_loss"]
            for row in read_metrics_rows(folder, "rl")
            if "rl_loss" in row.values
        ]
        for folder in (whole, out)
    ]
    assert losses[0] == losses[1]
    assert losses[0]


def answer(messages: tuple[Message, ...]) -> str:
    return "FINAL(0)"


def test_model_is_asked_once_for_its_demonstrations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, scaffold = task_of("ledger"), scaffold_of("tiny")
    with scripted(answer) as url:
        monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
        monkeypatch.setenv("OPENAI_BASE_URL", url)
        sizes = []
        for num in (3, 3, 5):
            shown = demonstrate(task, "openai:gpt-5-mini", num, scaffold, store=tmp_path / "store")
            assert [each.task for each in shown] == [
                f"ledger/train/{number}" for number in range(num)
            ]
            assert all(each.rewards for each in shown)
            sizes.append(len(list((tmp_path / "store/runs").iterdir())))
    assert sizes == [3, 3, 5]
