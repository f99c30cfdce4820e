"""Custom estimators, losses and credits in a recipe, by decorator or dotted path."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.plugins import PluginRegistry
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.advantage_pipeline import GroupAlgorithmOptions
from ramify.train.advantages.credit_assignment import CREDITS, CreditNode, Numbers
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore
from ramify.train.config import to_plain_data
from ramify.train.losses import POLICY_LOSSES, BaseLossFormula, PolicyLossInputs, PpoClip
from ramify.train.losses.total_loss import LossSpec
from ramify.train.recipe import load_recipe, load_stored_run
from tests.train.small import small

RECIPE = '''
import msgspec
from tests.train.small import small
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.losses import POLICY_LOSSES, BaseLossFormula
from ramify.train.advantages.credit_assignment import CREDITS

@ALGORITHMS.register("twice")
class Twice(DrGRPO, frozen=True, kw_only=True, tag="twice"):
    """Dr.GRPO, doubled."""
    times: float = 2.0

@POLICY_LOSSES.register("plain")
class Plain(BaseLossFormula, frozen=True, kw_only=True, tag="plain"):
    """-A l"""
    scale: float = 1.0
    def per_token(self, tokens):
        return -self.scale * tokens.advantages * tokens.now
    def clipped(self, tokens):
        return tokens.now > 0

@CREDITS.register("nothing")
def nothing(trees, baseline, gamma):
    return [dict.fromkeys(tree, 0.0) for tree in trees]

def run():
    return small()
'''


@pytest.fixture
def mine(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "mine.py"
    path.write_text(RECIPE)
    yield path
    sys.modules.pop("mine", None)
    for table in (ALGORITHMS, POLICY_LOSSES, CREDITS):
        table.reset()


def test_recipe_registers_its_own_classes_by_decorator(mine: Path, tmp_path: Path) -> None:
    words = [
        "rl.algorithm=twice",
        "rl.algorithm.times=3",
        "rl.algorithm.credit=nothing",
        "rl.loss.policy=plain",
    ]
    run = load_recipe(mine, [*words, "rl.loss.policy.scale=0.5"])
    run = load_recipe(mine, [*words, "rl.loss.policy.scale=0.5"])  # read twice, as by a resumed run
    assert run.rl is not None
    assert (run.rl.algorithm.times, run.rl.algorithm.credit, run.rl.loss.policy.scale) == (
        3,
        "nothing",
        0.5,
    )
    CheckpointStore(tmp_path).save(CheckpointedProgress(step=1, config=to_plain_data(run)), {})
    assert load_stored_run(tmp_path) == run


def flat(trees: Sequence[Mapping[str, CreditNode]], baseline: Any, gamma: float) -> list[Numbers]:
    return [dict.fromkeys(tree, 1.0) for tree in trees]


class Own(BaseLossFormula, frozen=True, kw_only=True, tag=f"{__name__}:Own"):
    """-A l"""

    def per_token(self, tokens: PolicyLossInputs) -> Any:
        return -tokens.advantages * tokens.now

    def clipped(self, tokens: PolicyLossInputs) -> Any:
        return tokens.now > 0


def test_file_that_is_imported_twice_registers_once(
    mine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recipe imports its neighbour as a module; a task names the same file as file.py:name."""
    monkeypatch.syspath_prepend(mine.parent)
    recipe = mine.with_name("recipe_beside.py")
    recipe.write_text("from mine import Twice, run\n")
    load_recipe(recipe)
    again = ALGORITHMS.resolve(f"{mine}:Twice")
    assert again.__name__ == ALGORITHMS.resolve("twice").__name__ == "Twice"
    assert again.__module__ != "mine"
    other = mine.with_name("other.py")
    other.write_text(RECIPE)
    with pytest.raises(ConfigError, match="algorithm 'twice' is taken by"):
        load_recipe(other)


def test_dotted_path_needs_no_registration() -> None:
    assert CREDITS.resolve(DrGRPO(credit=f"{__name__}:flat").credit) is flat
    loss = msgspec.convert({"policy": f"{__name__}:Own"}, LossSpec)
    assert loss.policy == Own()
    assert msgspec.convert(msgspec.to_builtins(loss), LossSpec) == loss


@pytest.mark.parametrize(
    ("table", "name", "message"),
    [
        (ALGORITHMS, "gpro", r"unknown algorithm 'gpro': did you mean 'grpo'\?"),
        (POLICY_LOSSES, "pop_clip", r"unknown policy loss 'pop_clip': did you mean 'ppo_clip'\?"),
        (CREDITS, "rout", r"unknown credit 'rout': did you mean 'root'\?"),
        (CREDITS, "no.such", r"credit 'no\.such' cannot be loaded: No module named 'no'"),
    ],
)
def test_unknown_name_gives_the_nearest_known_one(
    table: PluginRegistry, name: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        table.resolve(name)


def test_overrides_of_a_run_suggest_the_nearest_name() -> None:
    from ramify.train.config import CHOICES
    from ramify.train.config_overrides import override

    for word, message in [
        ("rl.loss.policy=gsop", "did you mean 'gspo'"),
        ("rl.algorithm=GDP", "did you mean 'gdpo'"),
        ("rl.algorithm=REINFORCE_P", "did you mean 'reinforce_pp'"),
        ("rl.loss.policy.name=x", "no field 'name'"),
        ("rl.algorithm.credit=per_rule", "did you mean 'per_role'"),
        ('rl.loss.corrections=["token_tsi"]', "did you mean 'token_tis'"),
    ]:
        with pytest.raises(ConfigError, match=message):
            override(small(), [word], CHOICES)
    run = override(
        small(),
        ["rl.loss.policy=gspo", 'rl.loss.corrections=[{"name":"token_tis","cap":3}]'],
        CHOICES,
    )
    assert run.rl is not None
    assert list(msgspec.to_builtins(run.rl.loss)["corrections"]) == [
        {"name": "token_tis", "cap": 3.0}
    ]


def test_unusable_classes_and_taken_names_are_not_registered() -> None:
    with pytest.raises(
        ConfigError,
        match=r"'grpo' is taken by ramify\.train\.advantages\.group_estimators:GRPO: choose another name",
    ):

        @ALGORITHMS.register("grpo")
        class Mine(GroupAlgorithmOptions, frozen=True, kw_only=True, tag_field="name", tag="grpo"):
            """Another."""

    with pytest.raises(
        ConfigError, match=r"must be a msgspec\.Struct with tag_field='name', tag='other'"
    ):
        POLICY_LOSSES.register("other")(PpoClip)
    with pytest.raises(ConfigError, match="has no key 'name': give one of"):
        POLICY_LOSSES.build({"clip_low": 1})


@pytest.mark.parametrize("name", [":", "mine.py", "module:", "."])
def test_reference_without_an_object_name_is_rejected(name: str) -> None:
    with pytest.raises(ConfigError, match=r"names no object: write module:name or file\.py:name$"):
        ALGORITHMS.resolve(name)
