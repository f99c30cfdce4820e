"""Configuration overrides from the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.group_estimators import GRPO, DrGRPO
from ramify.train.config import Run
from ramify.train.config_fields import OTHER_NAMES, fields
from ramify.train.config_overrides import override
from ramify.train.losses import Cispo, PpoClip
from ramify.train.recipe import load_recipe

CHOICES = {"algorithm": ALGORITHMS}


class Optim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    lr: float = 1e-3
    name: Literal["adamw", "muon"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.98)
    clip: float | None = None

    def __post_init__(self) -> None:
        if self.lr <= 0:
            raise ConfigError(f"lr is {self.lr}")


class Config(msgspec.Struct, frozen=True):
    optim: Optim = Optim()
    algorithm: Any = DrGRPO()
    options: dict[str, Any] = {}
    sft: Optim | None = None
    name: str = "tiny"
    policy: PpoClip | Cispo = PpoClip()
    steps: int = 4


def overridden(*assignments: str) -> Config:
    return override(Config(), assignments, CHOICES)


def test_values_are_converted_to_the_type_of_their_field() -> None:
    found = overridden(
        "optim.lr=1e-5",
        "optim.name=muon",
        "optim.betas=[0.8, 0.9]",
        "optim.clip=0.5",
        "steps=8",
        "name=12",
    )
    assert found == Config(Optim(1e-5, "muon", (0.8, 0.9), 0.5), steps=8, name="12")
    assert overridden("optim.clip=0.5", "optim.clip=null") == Config()


def test_maps_take_any_key() -> None:
    assert overridden("options.rows=40", "options.a.b=x").options == {"rows": 40, "a": {"b": "x"}}


class Pair(msgspec.Struct, frozen=True):
    low: int = 0
    high: int = 1
    optim: Optim = Optim()

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ConfigError(f"low={self.low} is not below high={self.high}")


@pytest.mark.parametrize("order", [("low=5", "high=6"), ("high=6", "low=5")])
def test_interdependent_fields_can_be_set_in_any_order(order: tuple[str, ...]) -> None:
    assert override(Pair(), order) == Pair(5, 6)


def test_override_error_names_the_assignments_that_cause_it() -> None:
    with pytest.raises(ConfigError, match=r"^override low=5: low=5 is not below high=1"):
        override(Pair(), ["optim.lr=0.1", "low=5"])
    with pytest.raises(ConfigError, match=r"^override low=-3 high=-4: low=-3 is not below high=-4"):
        override(Pair(), ["low=-3", "optim.lr=0.1", "high=-4"])


def test_last_of_several_assignments_wins() -> None:
    assert overridden("steps=3", "steps=5").steps == 5
    assert overridden("algorithm=grpo", "algorithm.credit=root", "algorithm=dr_grpo") == Config()
    assert overridden("options={}", "options.a=1", "options.a=2").options == {"a": 2}


def test_classes_are_chosen_by_name() -> None:
    assert overridden("algorithm=grpo", "algorithm.credit=root").algorithm == GRPO(credit="root")
    for path in (
        "ramify.train.advantages.group_estimators.GRPO",
        "ramify.train.advantages.group_estimators:GRPO",
        "ramify.train.algorithms.grpo:GRPO",  # the path of an earlier version
    ):
        assert overridden(f"algorithm={path}").algorithm == GRPO()
    assert overridden("policy=cispo", "policy.clip_low=0.1").policy == Cispo(clip_low=0.1)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        (
            "optim.beta=1",
            r"optim.beta=1: no field 'beta': did you mean 'betas'\? known: betas, clip, lr, name",
        ),
        ("optm.lr=1", r"no field 'optm': did you mean 'optim'\?"),
        ("optim.lr=fast", "optim.lr=fast: Expected `float`, got `str`"),
        ("optim.name=sgd", "Invalid enum value 'sgd': known: adamw, muon"),
        (
            "optim.name=adam",
            r"Invalid enum value 'adam': did you mean 'adamw'\? known: adamw, muon",
        ),
        ("sft={'lr': 1}", "this is not JSON .*; names and texts take double quotes"),
        (
            'sft={"lrr": 1}',
            r"unknown field `lrr`: did you mean 'lr'\? known: betas, clip, lr, name",
        ),
        ('sft={"name": "x"}', r"'x' - at `\$.name`: known: adamw, muon"),
        ("optim.lr=-1", r"optim.lr=-1: lr is -1.0"),
        ("steps=2.5", "Expected `int`"),
        ("sft.lrr=1", r"no field 'lrr': did you mean 'lr'\?"),
        ("steps", "'steps' is not an override"),
        ("algorithm=gpro", r"unknown algorithm 'gpro': did you mean 'grpo'\?"),
        (
            "algorithm=no.such.Thing",
            "algorithm 'no.such.Thing' cannot be loaded: No module named 'no'",
        ),
        ("algorithm=math:hypot2", "has no attribute 'hypot2'"),
        ("algorithm=operator:neg", "algorithm 'operator:neg': .* takes exactly one argument"),
        ("algorithm.credit=rout", r"unknown credit 'rout': did you mean 'root'\?"),
    ],
)
def test_invalid_override_is_rejected_with_its_field(assignment: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        overridden(assignment)


def run_of(recipe: str = "recipes/tiny.py") -> Run:
    return load_recipe(Path(__file__).parents[2] / recipe)


@pytest.mark.parametrize(
    ("assignment", "suggested"),
    [
        ("rl.learning_rate=1", "rl.optim.lr"),
        ("rl.lr=1", "rl.optim.lr"),
        ("optimizer.lr=1", "rl.optim.lr"),
        ("device=cpu", "policy.device"),
        ("group=8", "rl.rollout.group"),
        ("rl.temperature=1", "rl.rollout.temperature"),
        ("batch_size=8", "rl.sample.items"),
        ("rl.loss.beta=0.1", "kl_beta"),
        ("max_turns=3", "limits.max_turns"),
        ("evaluate.every=3", "schedule.evaluate_every"),
        ("rl.optm.lr=1", "optim"),
        ("rl.rollout.grup=1", "group"),
        ("rl.rollouts.group=1", "rollout"),
        ("model=x", "policy.path"),
        ("sandbox.timeout=3", "cell_s"),
    ],
)
def test_wrong_field_suggests_one_of_the_whole_tree(assignment: str, suggested: str) -> None:
    with pytest.raises(ConfigError, match=rf": did you mean '{re.escape(suggested)}'[? ]"):
        override(run_of(), [assignment])


def test_names_of_other_trainers_stand_for_fields_that_exist() -> None:
    names = {f".{each.name}" for each in fields(Run)}
    known = [ours for ours in OTHER_NAMES if any(each.endswith(f".{ours}") for each in names)]
    assert known == list(OTHER_NAMES)


def test_fields_of_a_section_that_was_not_set_create_it() -> None:
    assert overridden("sft.lr=0.5").sft == Optim(lr=0.5)


class _WithSection(msgspec.Struct, frozen=True):
    optim: Optim | None = Optim(lr=0.5)


def test_section_that_was_removed_is_not_set_again_from_defaults() -> None:
    """Otherwise what the recipe had set in it would be lost without a word."""
    assert override(_WithSection(), ["optim=null"]).optim is None
    with pytest.raises(ConfigError) as raised:
        override(_WithSection(), ["optim=null", "optim.clip=3"])
    assert str(raised.value) == (
        "override optim=null optim.clip=3: the first removes the section with all that the recipe "
        "sets in it: remove optim=null to change the recipe's optim"
    )
    assert override(_WithSection(None), ["optim.clip=3"]).optim == Optim(clip=3)
