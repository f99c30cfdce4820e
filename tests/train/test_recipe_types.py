"""Recipes are Python: types that constructors do not check are checked before a run starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.train import GRPO, DrGRPO, train
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Schedule
from ramify.train.config_redaction import check_field_types
from ramify.train.losses.total_loss import LossSpec
from ramify.train.recipe import load_recipe
from ramify.train.rollouts.rollouter import RolloutOptions
from tests.train.small import small

WRONG: Any = GRPO
"""A class instead of an instance."""
BAD_NAME: Any = "adam"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"rl": RlSpec(optim=OptimizerSpec(kind=BAD_NAME))},
            r"rl.optim.kind='adam': Invalid enum value 'adam': did you mean 'adamw'\? known: adamw",
        ),
        (
            {"rl": RlSpec(optim=OptimizerSpec(schedule=BAD_NAME))},
            "rl.optim.schedule='adam': .* known: constant, cosine, linear",
        ),
        ({"rl": RlSpec(steps=2.5)}, "rl.steps=2.5: Expected `int`, got `float`"),  # type: ignore[arg-type]
        (
            {"rl": RlSpec(algorithm=DrGRPO(reduction=BAD_NAME))},
            "rl.algorithm.reduction='adam': .* known: call, constant, group",
        ),
        ({"rl": RlSpec(algorithm=WRONG)}, r"rl.algorithm is the class GRPO: give an instance, GRP"),
        ({"rl": RlSpec(loss=LossSpec(kl=BAD_NAME))}, r"rl.loss.kl='adam': .* known: k1, k2, k3"),
        ({"evaluate": EvaluateSpec(final=BAD_NAME)}, "evaluate.final='adam': Expected `array`"),
        ({"task": "my.py:task"}, "task='my.py:task': Expected `object`, got `str`"),
        ({"seed": None}, "seed=None: Expected `int`, got `null`"),
        ({"rl": {"steps": 3}}, r"^rl is a mapping: give RlSpec\(…\) with its fields$"),
        ({"task": "my.py:task"}, r"got `str`: give TaskSpec\(name=…\)$"),
    ],
)
def test_value_of_wrong_type_is_named_before_the_run(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(small(**changes), tmp_path / "run")


def test_correct_types_pass_the_check() -> None:
    check_field_types(small())
    check_field_types(small(evaluate=EvaluateSpec(final=["test"])))  # type: ignore[arg-type]


def test_algorithms_can_be_given_by_name() -> None:
    assert RlSpec(algorithm="grpo", loss=LossSpec(policy="gspo")).algorithm == GRPO()
    with pytest.raises(ConfigError, match=r"unknown algorithm 'grpoo': did you mean 'grpo'\?"):
        RlSpec(algorithm="grpoo")


def test_error_in_a_recipe_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text("from ramify import train\n\ndef run():\n    return train.RlSpec(steps='3')\n")
    with pytest.raises(
        ConfigError,
        match=r"recipe.py cannot be executed in line 4: RlSpec.steps='3': Expected `int`",
    ):
        load_recipe(path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RolloutOptions(top_p=0.0), "rl.rollout.top_p=0 must be above 0 and at most 1"),
        (lambda: RolloutOptions(top_k=-1), "rl.rollout.top_k=-1 must be at least 1"),
        (lambda: RolloutOptions(top_k=0), "rl.rollout.top_k=0 must be at least 1"),
        (lambda: Schedule(keep_last=-1), r"schedule\.keep_last=-1 must be at least 1$"),
        (lambda: PolicySpec(path="x", slots=-3), "policy.slots=-3 must be above 0"),
    ],
)
def test_numbers_out_of_range_are_rejected(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "train.RlSpec(learning_rate=1)",
            "RlSpec has no field 'learning_rate': did you mean 'rl.optim.lr', which is OptimizerSpec\\(lr=…\\)",
        ),
        ("train.OptimizerSpec(learning_rate=1)", r"did you mean 'lr'\? known: betas, eps"),
        ("train.Run(nam='x')", "Run has no field 'nam': did you mean 'name'"),
        ("train.GRPO(credi='root')", "GRPO has no field 'credi': did you mean 'credit'"),
        (
            "train.PolicySpec('tiny')",
            r"PolicySpec takes its fields by name, as in PolicySpec\(path=…\): cache_bytes, device",
        ),
        ("train.Run(policy='tiny')", r"Run.policy='tiny': .*: give PolicySpec\(path=…\)$"),
        (
            "train.Run(policy=train.PolicySpec(path='x'), threads='1')",
            r"Run.threads='1': Expected `int | null`",
        ),
        ("train.grpo()", r"AttributeError: .*: did you mean 'GRPO'\?$"),
        ("dict(**train.RlSpec)", r"TypeError\(.*; RAMIFY_DEBUG=1 shows where"),
    ],
)
def test_wrong_call_in_a_recipe_says_what_to_write(code: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.py"
    path.write_text(f"from ramify import train\n\ndef run():\n    return [{code}][0]\n")
    with pytest.raises(ConfigError, match=rf"cannot be executed in line 4: .*{message}"):
        load_recipe(path)
