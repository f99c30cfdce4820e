"""Algorithms that need more than groups, and guards, through whole small runs: critics, memory,
greedy rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.train.advantages.by_task import ByTask
from ramify.train.advantages.group_estimators import GRPO
from ramify.train.advantages.ppo import PPO
from ramify.train.advantages.rae import RAE
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.advantages.remax import ReMax
from ramify.train.advantages.sft import SFT
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.config import (
    CriticSpec,
    EvaluateSpec,
    PolicySpec,
    Run,
    Schedule,
    TaskSpec,
    plain,
)
from ramify.train.guards import CollapseAlarms, TrainingGuard
from ramify.train.lineage import changes
from ramify.train.losses import Decoupled, ProxApprox
from ramify.train.losses.loss import LossSpec
from ramify.train.override import override
from ramify.train.recipe import stored
from tests.shown import train
from tests.train.small import small, weights_of
from tests.train.test_loop import read_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> str:
    """A policy that was made once; these runs are of rollouts alone."""
    out = tmp_path_factory.mktemp("base")
    given = small(warmup=None, rl=None)
    sft = msgspec.structs.replace(given.sft, num=8)
    train(
        msgspec.structs.replace(
            given, sft=sft, evaluate=msgspec.structs.replace(given.evaluate, final=())
        ),
        out,
    )
    return str(out / "policy")


def run(
    base: str,
    *,
    guard: TrainingGuard | None = None,
    sample: dict[str, Any] | None = None,
    **rl: Any,
) -> Run:
    given = small(
        policy=PolicySpec(path=base, slots=16),
        warmup=None,
        sft=None,
        guard=guard or TrainingGuard(),
    )
    evaluate = msgspec.structs.replace(given.evaluate, final=())
    spec = msgspec.structs.replace(
        given.rl, sample=msgspec.structs.replace(given.rl.sample, **(sample or {})), **rl
    )
    return msgspec.structs.replace(
        given,
        rl=spec,
        evaluate=evaluate,
        schedule=Schedule(evaluate_every=9, checkpoint_every=1, keep_last=9),
    )


def resumed_is_the_same(run: Run, out: Path) -> None:
    """Resumed from the checkpoint after its first step, it ends in the same state."""

    def end() -> tuple[Any, list[dict[str, float | None]]]:
        values = [row.values for row in read_rows(out, "rl")]
        return weights_of(out), [
            {name: each.get(name) for name in ("loss", "reward", "value_loss")} for each in values
        ]

    train(run, out, say=pytest.fail)
    weights, values = end()
    train(run, out, resume=CheckpointStore(out).all()[1])
    again, same_values = end()
    assert same_values == values
    assert all(torch.equal(again[name], weights[name]) for name in weights)


@pytest.mark.parametrize("model", ["shared", "own"])
def test_ppo_learns_with_a_critic(base: str, model: Any, tmp_path: Path) -> None:
    given = run(
        base, algorithm=PPO(lam=0.9, kl_reward=0.01), critic=CriticSpec(model=model), steps=2
    )
    if model == "own":  # with a value head in it, it has all that there is to be saved
        resumed_is_the_same(given, tmp_path)
    else:
        train(given, tmp_path, say=pytest.fail)
    first = next(row.values for row in read_rows(tmp_path, "rl") if "value_loss" in row.values)
    assert first["value_loss"] > 0
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)  # it begins at 0 everywhere
    assert first["reward_kl"] == pytest.approx(0, abs=1e-6)  # and the policy as its own reference
    assert first["zero_variance"] <= 1
    assert first["length_mean"] > 0


def test_what_an_algorithm_remembers_goes_into_the_checkpoint(base: str, tmp_path: Path) -> None:
    resumed_is_the_same(run(base, algorithm=RAE(decay=0.5), steps=2), tmp_path)
    memories = [read_state(path).memory["rlm@0"] for path in CheckpointStore(tmp_path).all()[1:3]]
    rewards = [row.values["reward"] for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert memories == pytest.approx(
        [0.5 * rewards[0], 0.25 * rewards[0] + 0.5 * rewards[1]], abs=1e-6
    )


def test_each_task_of_a_mixture_has_its_algorithm(base: str, tmp_path: Path) -> None:
    part = {"task": "tests.train.small:even"}
    parts = {"a": part, "b": {**part, "reward": 0.5}, "c": {**part, "weight": 0}}
    algorithm = ByTask(tasks={"a": SFT(min_reward=0.0), "b": GRPO()})
    given = msgspec.structs.replace(
        run(base, algorithm=algorithm, steps=2),
        task=TaskSpec(name="mixture", options={"parts": parts}),
        evaluate=EvaluateSpec(num=2, validation=2, final=("test_c",)),
    )
    resumed_is_the_same(given, tmp_path)
    rows = [row.values for row in read_rows(tmp_path, "rl") if "learn_s" in row.values]
    for row in rows:
        assert row["ce_loss"] > 0
        assert row["loss"] == pytest.approx(row["ce_loss"] + row["rl_loss"])
        assert row["task.a/kept"] == row["task.a/groups"] == row["task.b/groups"] == 1
        assert row["reward"] == pytest.approx(row["task.b/reward"])  # sft reports none
        assert {"task.a/pass@3", "task.b/groups_with_signal"} <= row.keys()
    last = [row.values for row in read_rows(tmp_path, "last")][-1]
    assert last["test_c/c"] == last["test_c/reward"]
    assert "b/rollout_tokens" in read_state(CheckpointStore(tmp_path).all()[-1]).memory
    before = stored(tmp_path)
    assert before.rl is not None
    assert before.rl.algorithm == algorithm
    changed = override(before, ["rl.algorithm.tasks.b=rloo", "rl.algorithm.tasks.a.children=false"])
    found = [str(change) for change in changes(plain(before), plain(changed))]
    assert found == [
        "rl.algorithm.tasks.a.children True → False",
        "rl.algorithm.tasks.b.name 'grpo' → 'rloo'",
    ]


def test_remax_rolls_out_greedily_beside_each_group(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    given = run(base, algorithm=ReMax(), steps=1)
    train(
        msgspec.structs.replace(given, schedule=Schedule(save_rollouts_every=1)),
        tmp_path,
        say=said.append,
    )
    assert said == []
    (row,) = [row for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert row.values["loss"] != 0
    assert row.values["sampled_tokens"] == pytest.approx(
        6 * row.values["length_mean"]
    )  # the greedy ones do not count


def test_a_kl_in_the_reward_is_to_the_policy_that_rollouts_began_with(
    base: str, tmp_path: Path
) -> None:
    train(
        run(base, algorithm=ReinforcePP(kl_reward=0.1), steps=2, sample={"minibatches": 1}),
        tmp_path,
    )
    kl = [row.values["reward_kl"] for row in read_rows(tmp_path, "rl") if "reward_kl" in row.values]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert any(abs(value) > 1e-6 for value in kl[1:])


def test_old_log_probabilities_are_those_of_the_steps_start(base: str, tmp_path: Path) -> None:
    """The first of two minibatches sees itself; the second sees a policy that has moved on."""
    train(
        run(base, loss=LossSpec(policy=Decoupled()), steps=1, sample={"minibatches": 2}), tmp_path
    )
    (row,) = [row for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert row.values["approx_kl"] > 1e-9
    assert (
        row.values["mismatch_max"] < 1e-5
    )  # |o - m|: trainer and engine agree about the rollouts' own weights


def test_stale_rollouts_are_counted_and_known_to_the_loss(base: str, tmp_path: Path) -> None:
    sample = {"minibatches": 1, "max_staleness": 1}
    train(run(base, loss=LossSpec(policy=ProxApprox()), steps=3, sample=sample), tmp_path)
    staleness = [
        row.values["staleness"] for row in read_rows(tmp_path, "rl") if "staleness" in row.values
    ]
    assert staleness[0] == 0
    assert all(0 <= value <= 1 for value in staleness)
    assert max(staleness) > 0
    mismatch = [
        row.values["mismatch_max"]
        for row in read_rows(tmp_path, "rl")
        if "mismatch_max" in row.values
    ]
    assert mismatch[0] < 1e-5  # sampled by one policy, although the trainer was at work


def test_a_guard_ends_the_stage_and_a_resumed_run_knows_it(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    given = run(base, guard=TrainingGuard(max_kl=1e-12), steps=4)
    state = train(given, tmp_path, say=said.append)
    (why,) = [each for each in said if "the stage ends here" in each]
    assert "above guard.max_kl=1e-12 " not in why
    ended = read_state(CheckpointStore(tmp_path).all()[-1])
    assert (ended.stage_step, ended.stopped != "") == (1, True)
    assert ended.score is not None  # the last step of a stage is evaluated
    again = train(given, tmp_path, resume=tmp_path)
    assert (state.step, again.step) == (1, 1)


def test_patience_leaves_the_best_checkpoint(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    given = run(base, guard=TrainingGuard(patience=1, min_delta=2.0), steps=9)
    given = msgspec.structs.replace(given, schedule=Schedule(evaluate_every=1, keep_best=1))
    state = train(given, tmp_path, say=said.append)
    assert state.step == 2
    assert "validation has not risen above" in said[-1]
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    ours, theirs = (torch.load(best / "backend/backend.pt")["weights"], (tmp_path / "policy"))
    from ramify.models.weights import read_weights

    left = read_weights(theirs)
    assert all(torch.equal(ours[name], left[name]) for name in left)


def test_alarms_are_said_live_and_measured(base: str, tmp_path: Path) -> None:
    said: list[str] = []
    train(
        run(base, guard=TrainingGuard(alarms=CollapseAlarms(length=1.0001, window=1)), steps=3),
        tmp_path,
        say=said.append,
    )
    alarms = [each for each in said if "alarm: rollouts have" in each]
    rows = [
        row.values["alarm_length"]
        for row in read_rows(tmp_path, "rl")
        if "alarm_length" in row.values
    ]
    assert len(rows) == 2
    assert len(alarms) == sum(now > before for before, now in zip([0, *rows], rows, strict=False))
