"""Faults of an estimator, a credit or a loss of one's own: each is named, and none is silent. A run
with such parts is resumed without its recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train.config import RlSpec, to_plain_data
from ramify.train.execute import train
from ramify.train.losses.total_loss import LossSpec
from ramify.train.metrics import read_metrics
from ramify.train.recipe import load_stored_run
from tests.train.small import small

PLUGIN = """
import torch
from ramify.train import GroupAlgorithmOptions, BaseLossFormula

class Group(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="group"):
    def compare(self, returns, lengths=()):
        return [1.0 - 2.0 * (place % 2) for place in range(len(returns))]

class Untagged(GroupAlgorithmOptions, frozen=True, kw_only=True):
    def compare(self, returns, lengths=()):
        return [1.0 - 2.0 * (place % 2) for place in range(len(returns))]

class Short(Group, frozen=True, kw_only=True, tag_field="name", tag="short"):
    def compare(self, returns, lengths=()):
        return [1.0]

class NotFinite(Group, frozen=True, kw_only=True, tag_field="name", tag="nan"):
    def compare(self, returns, lengths=()):
        return [float("nan")] * len(returns)

class Raises(Group, frozen=True, kw_only=True, tag_field="name", tag="raises"):
    def compare(self, returns, lengths=()):
        raise ValueError("broken")

class Empty(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="empty"):
    pass

def no_numbers(trees, baseline, gamma):
    return [{} for tree in trees]

class Loss(BaseLossFormula, frozen=True, kw_only=True, tag="loss"):
    def per_token(self, tokens):
        return -tokens.now * tokens.advantages

    def clipped(self, tokens):
        return torch.zeros_like(tokens.now, dtype=torch.bool)

class Mean(Loss, frozen=True, kw_only=True, tag="mean"):
    def per_token(self, tokens):
        return super().per_token(tokens).mean()

class Detached(Loss, frozen=True, kw_only=True, tag="detached"):
    def per_token(self, tokens):
        return super().per_token(tokens).detach()

class NoClipped(BaseLossFormula, frozen=True, kw_only=True, tag="no_clipped"):
    def per_token(self, tokens):
        return -tokens.now * tokens.advantages

class Nothing:
    pass
"""


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    path = tmp_path / "plug.py"
    path.write_text(PLUGIN)
    return str(path)


def rl(**changes: Any) -> RlSpec:
    run = small()
    assert run.rl is not None
    algorithm: Any = changes.pop("algorithm", {"name": "dr_grpo"})
    return msgspec.structs.replace(run.rl, steps=1, algorithm=algorithm, **changes)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Short", r"Short.compare\(\) gave \[1.0\] for the returns .*: give a finite number for"),
        ("NotFinite", r"NotFinite.compare\(\) gave \[nan, nan, nan\] for the returns"),
    ],
)
def test_non_finite_or_missing_advantages_are_refused(
    name: str, message: str, plugin: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small(warmup=None, rl=rl(algorithm=f"{plugin}:{name}")), tmp_path / "run")


def test_credit_that_leaves_out_calls_is_refused(plugin: str, tmp_path: Path) -> None:
    algorithm = msgspec.structs.replace(
        RlSpec().algorithm, credit=f"{plugin}:no_numbers", drop_zero_variance=False
    )
    with pytest.raises(ConfigError, match="no_numbers' gave call 0 the advantage None: give each"):
        train(small(warmup=None, rl=rl(algorithm=algorithm)), tmp_path / "run")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Mean", r"Mean.per_token\(\) gave shape \[\] for \d+ tokens: give a value for each token"),
        ("Detached", r"Detached.per_token\(\) has no gradient: it must depend on tokens.now"),
    ],
)
def test_loss_without_gradient_or_per_token_shape_is_refused(
    name: str, message: str, plugin: str, tmp_path: Path
) -> None:
    run = small(
        warmup=None,
        rl=rl(algorithm=f"{plugin}:Group", loss=LossSpec(policy=f"{plugin}:{name}")),
    )
    with pytest.raises(ConfigError, match=message):
        train(run, tmp_path / "run")


def test_part_without_required_methods_is_refused_at_the_start(plugin: str) -> None:
    with pytest.raises(ConfigError, match=r"rl.loss.policy: NoClipped has no method clipped\(\)"):
        LossSpec(policy=f"{plugin}:NoClipped")
    with pytest.raises(
        ConfigError, match=r"rl.algorithm: Nothing has no method assign_advantages\(\)"
    ):
        RlSpec(algorithm=f"{plugin}:Nothing")
    with pytest.raises(ConfigError, match=r"Empty has no formula: define compare\(\)"):
        RlSpec(algorithm=f"{plugin}:Empty")


@pytest.mark.parametrize("name", ["Group", "Untagged"])
def test_run_with_user_parts_resumes_without_its_recipe(
    name: str, plugin: str, tmp_path: Path
) -> None:
    spec = rl(algorithm=f"{plugin}:{name}", loss=LossSpec(policy=f"{plugin}:Loss"))
    run = small(warmup=None, rl=spec)
    assert to_plain_data(run)["rl"]["algorithm"]["name"] == f"{plugin}:{name}"
    train(run, tmp_path / "run")
    again = load_stored_run(tmp_path / "run", ["rl.steps=2"])
    assert again.rl is not None
    assert type(again.rl.algorithm).__name__ == name
    assert type(again.rl.loss.policy).__name__ == "Loss"
    train(again, tmp_path / "run", resume=tmp_path / "run")
    steps = [row.step for row in read_metrics(tmp_path / "run") if "rl_loss" in row.values]
    assert steps == sorted(set(steps))
    assert len(steps) == 2
