"""One algorithm per task of a mixture: whole steps by hand, and compared with each one alone.

item    rollout   reward   tokens
sums:0  s0 s1     1, 0     2, 4
sums:1  s2 s3     1, 1     3, 3      (zero variance)
texts:0 t0 t1     3, 1     5, 1
texts:1 t2 t3     0, 4     2, 2
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from ramify.errors import ConfigError
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.base import (
    OptimizerStepAdvantages,
    finish_advantages,
    needs_of,
    with_saved_state,
)
from ramify.train.advantages.by_task import PerTaskAlgorithm
from ramify.train.advantages.group_estimators import GRPO, RLOO, DrGRPO
from ramify.train.advantages.ppo import PPO
from ramify.train.advantages.rae import RAE
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.advantages.sft import SFT
from ramify.train.config import PolicySpec, Run, Schedule, TaskSpec
from ramify.train.config_overrides import override
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.other_trainer_presets import with_preset
from ramify.train.recipe import CHOICES
from ramify.train.signals.signal_composition import Hybrid
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group
from tests.shown import train
from tests.train.small import small
from tests.train.trees import call, tree

ITEMS: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {
    "sums:0": ((1, 0), (2, 4)),
    "texts:0": ((3, 1), (5, 1)),
    "sums:1": ((1, 1), (3, 3)),
    "texts:1": ((0, 4), (2, 2)),
}
"""Item id -> (rewards of its rollouts, numbers of their tokens)"""


def groups(*parts: str) -> list[Group]:
    """Return the groups of the given tasks, or of all tasks if none is given."""
    found, number = [], dict.fromkeys(("sums", "texts"), 0)
    for item, (rewards, sizes) in ITEMS.items():
        part, rollouts = item.partition(":")[0], []
        for reward, size in zip(rewards, sizes, strict=True):
            rollout = tree(call("0", size), reward=reward)
            id = f"{part[0]}{number[part]}"
            rollouts.append(msgspec.structs.replace(rollout, id=id, task=item))
            number[part] += 1
        if not parts or part in parts:
            found.append(Group(item, rollouts))
    return found


def loss_shares(assigned: OptimizerStepAdvantages) -> dict[str, list[float]]:
    """Rollout -> weight of each of its tokens' log-probabilities in the step's loss."""
    found: dict[str, list[float]] = {}
    for rollout in assigned.rollouts:
        for credit in rollout.credits.values():
            rl = credit.rl or [0.0] * len(credit)
            ce = credit.ce or [0.0] * len(credit)
            advantages = credit.advantages or [0.0] * len(credit)
            found[rollout.trajectory.id] = [
                a * w / assigned.denominators.get("rl", 1) + v / assigned.denominators.get("ce", 1)
                for a, w, v in zip(advantages, rl, ce, strict=True)
            ]
    return found


def test_step_of_two_tasks_matches_hand_computation() -> None:
    """sums: group mean, per rollout; 1 of 3 groups with a signal, divided by 2 rollouts.
    texts: leave-one-out mean, per token; 2 of 3 groups, divided by 10 tokens."""
    sums, texts = DrGRPO(reduction="rollout"), RLOO(reduction="token")
    step = PerTaskAlgorithm(tasks={"sums": sums, "texts": texts}).assign_advantages(groups(), {})
    third = 1 / 3
    assert loss_shares(step) == {
        "s0": pytest.approx([third / 2 * 0.5 / 2] * 2),
        "s1": pytest.approx([third / 2 * -0.5 / 4] * 4),
        "t0": pytest.approx([2 * third / 10 * 2] * 5),
        "t1": pytest.approx([2 * third / 10 * -2]),
        "t2": pytest.approx([2 * third / 10 * -4] * 2),
        "t3": pytest.approx([2 * third / 10 * 4] * 2),
    }
    assert list(loss_shares(step)) == ["s0", "s1", "t0", "t1", "t2", "t3"]
    assert step.metrics == {
        "reward": pytest.approx(11 / 8),
        "groups_with_signal": 3.0,
        "zero_variance": pytest.approx(1 / 4),
        "failed_rollouts": 0.0,
        "calls_per_rollout": 1.0,
        "loss_rollout_tokens": 2.75,
        "task.sums/reward": 0.75,
        "task.sums/groups_with_signal": 1.0,
        "task.sums/zero_variance": 0.5,
        "task.sums/failed_rollouts": 0.0,
        "task.sums/calls_per_rollout": 1.0,
        "task.sums/loss_rollout_tokens": 3.0,
        "task.texts/reward": 2.0,
        "task.texts/groups_with_signal": 2.0,
        "task.texts/zero_variance": 0.0,
        "task.texts/failed_rollouts": 0.0,
        "task.texts/calls_per_rollout": 1.0,
        "task.texts/loss_rollout_tokens": 2.5,
    }


@pytest.mark.parametrize(
    "sums",
    [GRPO(reduction="group"), DrGRPO(drop_zero_variance=False), ReinforcePP(), RAE(), SFT()],
    ids=lambda each: type(each).__name__,
)
def test_each_task_has_the_loss_of_its_algorithm_used_alone(sums: Any) -> None:
    """Scaled by the task's share of the step: 2 of 4 groups, or 1 of 3 if one was dropped."""
    both = PerTaskAlgorithm(tasks={"sums": sums}, other=RLOO()).assign_advantages(groups(), {})
    num = 1 if isinstance(sums, GRPO) else 2
    for part, algorithm, share in (("sums", sums, num), ("texts", RLOO(), 2)):
        alone = algorithm.assign_advantages(groups(part), {})
        assert {id: values for id, values in loss_shares(both).items() if id[0] == part[0]} == {
            id: pytest.approx([value * share / (num + 2) for value in values], abs=1e-12)
            for id, values in loss_shares(alone).items()
        }


@pytest.mark.parametrize("name", ["dr_grpo", "grpo", "rloo", "maxrl", "opo", "pass_at_k"])
@pytest.mark.parametrize("reduction", ["constant", "rollout", "group", "prompt"])
def test_same_algorithm_for_every_task_equals_that_algorithm_used_alone(
    name: str, reduction: str
) -> None:
    """With one L for all tasks; otherwise each task has its own."""
    algorithm = ALGORITHMS.build({"name": name, "reduction": reduction, "rollout_tokens": 10})
    alone = algorithm.assign_advantages(groups(), {})
    by_task = PerTaskAlgorithm(other=algorithm).assign_advantages(groups(), {})
    assert loss_shares(by_task) == {
        id: pytest.approx(values, abs=1e-12) for id, values in loss_shares(alone).items()
    }
    for metric in alone.metrics:
        assert by_task.metrics[metric] == pytest.approx(alone.metrics[metric])


def test_finish_computes_advantages_separately_per_task() -> None:
    """Critics that differ in λ; REINFORCE++ with a KL in the reward next to RLOO without one."""

    def finished(algorithm: Any, *parts: str) -> dict[str, list[float]]:
        rows = token_sequences(algorithm.assign_advantages(groups(*parts), {}).rollouts)
        for row in rows:
            numbers = np.arange(len(row), dtype=np.float32)
            row.streams |= {"values": numbers / 8, "old_logprobs": -numbers}
            row.streams["ref_logprobs"] = -numbers / 2
        metrics = finish_advantages(algorithm, rows)
        assert len(parts) == 1 or set(metrics) >= {
            f"task.{part}/{name}" for part, name in metric_names
        }
        return {rollout_id(row): row.advantages.tolist() for row in rows}

    metric_names = [("sums", "explained_variance"), ("texts", "explained_variance")]
    sums, texts = PPO(lam=0.5), PPO(lam=0.9, normalise=False)
    both = finished(PerTaskAlgorithm(tasks={"sums": sums, "texts": texts}, other=PPO()))
    assert both == finished(sums, "sums") | finished(texts, "texts")
    metric_names = [("sums", "reward_kl")]
    charged = ReinforcePP(kl_reward=0.1)
    both = finished(PerTaskAlgorithm(tasks={"sums": charged}, other=RLOO()))
    assert both == finished(charged, "sums") | finished(RLOO(), "texts")


def rollout_id(row: TokenSequence) -> str:
    return row.name.partition("/")[0]


def test_kl_reduction_of_one_task_does_not_affect_another() -> None:
    charged = RLOO(reduction="token", kl_reduction="rollout")
    step = PerTaskAlgorithm(tasks={"sums": charged}).assign_advantages(groups(), {})
    kl = {r.trajectory.id: c.streams["kl_share"] for r in step.rollouts for c in r.credits.values()}
    assert kl["t0"] == [1.0] * 5
    assert kl["s0"] == [pytest.approx(3 / 2)] * 2  # 6 tokens of 2 rollouts, this one has 2 of them


def test_each_task_has_its_own_memory() -> None:
    algorithm = PerTaskAlgorithm(
        tasks={"texts": RAE(decay=0.5, memory={"rlm@0": 1.0})}, other=RAE()
    )
    first = algorithm.assign_advantages(groups(), {})
    assert first.memory == {
        "sums/rlm@0": pytest.approx(0.05 * 0.75),
        "sums/rollout_tokens": 3.0,
        "sums/rollout_tokens_steps": 1.0,
        "texts/rlm@0": 1.5,
        "texts/rollout_tokens": 2.5,
        "texts/rollout_tokens_steps": 1.0,
    }
    again = with_saved_state(algorithm, first.memory).assign_advantages(groups("texts"), {})
    [t0] = [each for each in again.rollouts if each.trajectory.id == "t0"]
    assert t0.credits["0", 0].advantages == [1.5] * 5
    assert again.memory["sums/rlm@0"] == first.memory["sums/rlm@0"]


def test_no_signal_message_names_the_tasks() -> None:
    equal = [group for group in groups() if group.task == "sums:1"]
    step = PerTaskAlgorithm().assign_advantages(equal, {})
    assert step.no_signal == "sums: in each of 1 groups all rollouts did equally well"
    assert PerTaskAlgorithm().assign_advantages([], {}).no_signal == "the step has no group"


# --- training runs

PARTS = {
    "a": {"task": "tests.train.small:even"},
    "b": {"task": "tests.train.small:even", "reward": 0.5},
    "c": {"task": "tests.train.small:even", "weight": 0},
}


def mixture_run(algorithm: Any, **rl: Any) -> Run:
    given = small(task=TaskSpec(name="mixture", options={"parts": PARTS}))
    assert given.rl is not None
    spec = msgspec.structs.replace(given.rl, algorithm=algorithm, steps=2, **rl)
    assert given.sft is not None
    return msgspec.structs.replace(
        given,
        rl=spec,
        sft=msgspec.structs.replace(given.sft, num=6),
        evaluate=msgspec.structs.replace(given.evaluate, final=("test_c",)),
        schedule=Schedule(evaluate_every=None),
    )


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        (PerTaskAlgorithm(tasks={"d": GRPO()}), r"the mixture has no part 'd'"),
        (PerTaskAlgorithm(tasks={"c": GRPO()}), r"part 'c' has weight 0"),
        (PerTaskAlgorithm(tasks={"a": PPO()}), r"'a' has a critic and that of 'b' has none"),
    ],
)
def test_algorithms_that_do_not_fit_the_mixture_are_rejected(
    algorithm: Any, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        train(mixture_run(algorithm), tmp_path)
    assert not list(tmp_path.glob("checkpoints/*"))


def test_single_task_and_nested_algorithms_are_rejected(tmp_path: Path) -> None:
    one = small(policy=PolicySpec(path="tiny"), sft=None, warmup=None)
    with pytest.raises(ConfigError, match="is one task: set task"):
        train(override(one, ["rl.algorithm=by_task"], CHOICES), tmp_path)
    for wrong in (
        lambda: PerTaskAlgorithm(tasks={"a": Hybrid()}),
        lambda: PerTaskAlgorithm(other=PerTaskAlgorithm()),
        lambda: PerTaskAlgorithm(tasks={"a": "gpro"}),
        lambda: PerTaskAlgorithm(tasks={"a": 3}),
        lambda: PerTaskAlgorithm(other=None),
        lambda: PerTaskAlgorithm(tasks={"a": {"reduction": "token"}}),
        lambda: Hybrid(outcome=PerTaskAlgorithm()),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_preset_sets_algorithm_of_unlisted_tasks() -> None:
    run = with_preset(mixture_run(PerTaskAlgorithm(tasks={"a": SFT()})), "trl")
    assert run.rl is not None
    algorithm = run.rl.algorithm
    assert (algorithm.tasks, type(algorithm.other)) == ({"a": SFT()}, GRPO)
    assert not needs_of(algorithm).values
