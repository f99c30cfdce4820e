"""Sizes that a run cannot have, or that the task cannot fill, are reported before training."""

from __future__ import annotations

import warnings
from typing import Any

import msgspec
import pytest

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.tasks.base import DatasetTask, Item
from ramify.train.config import EvaluateSpec, PolicySpec, TaskSpec
from ramify.train.resolve_run import resolve
from tests.train.small import assemble, small


def few() -> DatasetTask:
    splits = {
        split: [Item(f"{split} {number}?", gold=1, id=f"{split}/{number}") for number in range(3)]
        for split in ("train", "validation", "test")
    }
    return DatasetTask("few", splits, lambda answer, item: 1.0 if answer == item.gold else 0.0)


def said(changes: dict[str, Any], **sample: Any) -> list[str]:
    """Return the warnings about a run with the task ``few``."""
    run = small(task=TaskSpec(name=f"{__name__}:few"), sft=None, **changes)
    assert run.rl is not None
    sample = msgspec.structs.replace(run.rl.sample, **sample)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        resolve(msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, sample=sample)))
    return [str(each.message) for each in caught]


def test_sizes_that_the_task_fills_are_not_mentioned() -> None:
    assert said({"evaluate": EvaluateSpec(num=3, validation=2)}, items=3) == []
    # The default is for tasks of any size.
    assert said({"evaluate": EvaluateSpec()}) == []


def test_more_items_than_the_task_has_are_reported() -> None:
    assert said({"evaluate": EvaluateSpec(num=9, validation=4)}, items=7) == [
        "rl.sample.items=7: the split train has 3 items, so each step asks some of them 3 times",
        "evaluate.num=9: there are fewer items (test 3), and all are used",
        "evaluate.validation=4: there are fewer items (validation 3), and all are used",
    ]


def test_more_minibatches_than_rollouts_are_refused() -> None:
    assert said({}, items=2, minibatches=6) == []
    with pytest.raises(ConfigError, match=r"minibatches=7 divide .* has at most 6: give at most"):
        said({}, items=2, minibatches=7)


def test_reply_longer_than_the_window_of_a_policy_from_scratch_is_refused() -> None:
    run = small(policy=PolicySpec(), limits=Limits(max_reply_tokens=100_000))
    with pytest.raises(ConfigError, match=r"max_reply_tokens=100000 leaves no room .* 512 tokens"):
        assemble(run)
