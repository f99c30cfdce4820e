"""Whole small runs with guards and with algorithms that need more than groups: critics, memory,
greedy rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.engine.limits import Limits
from ramify.errors import ConfigError
from ramify.sandbox.base import SandboxSpec
from ramify.train.advantages.by_task import PerTaskAlgorithm
from ramify.train.advantages.fork_estimators import BranchEstimator
from ramify.train.advantages.group_estimators import GRPO
from ramify.train.advantages.ppo import PPO
from ramify.train.advantages.rae import RAE
from ramify.train.advantages.reinforce_pp import ReinforcePP
from ramify.train.advantages.remax import ReMax
from ramify.train.advantages.sft import SFT
from ramify.train.branch_sampler import BranchOptions
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.config import (
    CriticSpec,
    EvaluateSpec,
    PolicySpec,
    Run,
    Schedule,
    TaskSpec,
    to_plain_data,
)
from ramify.train.config_overrides import override
from ramify.train.lineage import changes
from ramify.train.losses import Decoupled, ProxApprox
from ramify.train.losses.total_loss import LossSpec
from ramify.train.recipe import load_stored_run
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.training_guard import CollapseAlarms, TrainingGuardSpec
from ramify.types.trajectory import CallForkOrigin, Trajectory
from tests.shown import train
from tests.train.small import UNTRAINED, small, weights_of
from tests.train.test_loop import read_rows


@pytest.fixture(scope="module")
def base(tmp_path_factory: Any) -> str:
    """A policy created once by SFT; the runs of this file only do RL."""
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
    guard: TrainingGuardSpec | None = None,
    sample: dict[str, Any] | None = None,
    **rl: Any,
) -> Run:
    given = small(
        policy=PolicySpec(path=base, slots=16),
        warmup=None,
        sft=None,
        guard=guard or TrainingGuardSpec(alarms=UNTRAINED),
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


def check_resumes_identically(run: Run, out: Path) -> None:
    """Check that the run ends in the same state if it is resumed after its first step."""

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
def test_ppo_trains_with_shared_or_separate_critic(base: str, model: Any, tmp_path: Path) -> None:
    given = run(
        base, algorithm=PPO(lam=0.9, kl_reward=0.01), critic=CriticSpec(model=model), steps=2
    )
    if model == "own":  # a separate critic has the most state to save
        check_resumes_identically(given, tmp_path)
    else:
        train(given, tmp_path, say=pytest.fail)
    first = next(row.values for row in read_rows(tmp_path, "rl") if "value_loss" in row.values)
    assert first["value_loss"] > 0
    assert first["explained_variance"] == pytest.approx(0, abs=1e-6)  # initial values are all 0
    assert first["reward_kl"] == pytest.approx(0, abs=1e-6)  # the policy is still the reference
    assert first["zero_variance"] <= 1
    assert first["length_mean"] > 0


def test_algorithm_memory_is_stored_in_checkpoints(base: str, tmp_path: Path) -> None:
    check_resumes_identically(run(base, algorithm=RAE(decay=0.5), steps=2), tmp_path)
    memories = [read_state(path).memory["rlm@0"] for path in CheckpointStore(tmp_path).all()[1:3]]
    rewards = [row.values["reward"] for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert memories == pytest.approx(
        [0.5 * rewards[0], 0.25 * rewards[0] + 0.5 * rewards[1]], abs=1e-6
    )


def test_each_task_of_a_mixture_uses_its_own_algorithm(base: str, tmp_path: Path) -> None:
    part = {"task": "tests.train.small:even"}
    parts = {"a": part, "b": {**part, "reward": 0.5}, "c": {**part, "weight": 0}}
    algorithm = PerTaskAlgorithm(tasks={"a": SFT(min_reward=0.0), "b": GRPO()})
    given = msgspec.structs.replace(
        run(base, algorithm=algorithm, steps=2),
        task=TaskSpec(name="mixture", options={"parts": parts}),
        evaluate=EvaluateSpec(num=2, validation=2, final=("test_c",)),
    )
    check_resumes_identically(given, tmp_path)
    rows = [row.values for row in read_rows(tmp_path, "rl") if "learn_s" in row.values]
    for row in rows:
        assert row["ce_loss"] > 0
        assert row["loss"] == pytest.approx(row["ce_loss"] + row["rl_loss"])
        assert row["task.a/kept"] == row["task.a/groups"] == row["task.b/groups"] == 1
        both = (row["task.a/reward"] + row["task.b/reward"]) / 2
        assert row["reward"] == pytest.approx(both)
        assert {"task.a/pass@3", "task.b/groups_with_signal"} <= row.keys()
    last = [row.values for row in read_rows(tmp_path, "last")][-1]
    assert last["test_c/c"] == last["test_c/reward"]
    assert "b/rollout_tokens" in read_state(CheckpointStore(tmp_path).all()[-1]).memory
    before = load_stored_run(tmp_path)
    assert before.rl is not None
    assert before.rl.algorithm == algorithm
    changed = override(before, ["rl.algorithm.tasks.b=rloo", "rl.algorithm.tasks.a.children=false"])
    found = [str(change) for change in changes(to_plain_data(before), to_plain_data(changed))]
    assert sorted(found) == [
        "rl.algorithm.tasks.a.children True → False",
        "rl.algorithm.tasks.b.kl_over None → 'token'",
        "rl.algorithm.tasks.b.name 'grpo' → 'rloo'",
    ]


def test_remax_adds_a_greedy_rollout_to_each_group(base: str, tmp_path: Path) -> None:
    messages: list[str] = []
    given = run(base, algorithm=ReMax(), steps=1)
    train(
        msgspec.structs.replace(given, schedule=Schedule(save_rollouts_every=1)),
        tmp_path,
        say=messages.append,
    )
    assert messages == []
    (row,) = [row for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert row.values["loss"] != 0
    assert row.values["sampled_tokens"] == pytest.approx(
        6 * row.values["length_mean"]
    )  # greedy rollouts do not count


def forking(base: str, **changes: Any) -> Run:
    """Two rollouts per item, each of which forks into two lines before turn 1."""
    branch = BranchOptions(where=(1,), num=2, budget=2)
    rollout = RolloutOptions(group=2, concurrency=1, branch=branch)
    rl = {"algorithm": BranchEstimator(), "rollout": rollout, "steps": 1, **changes}
    return msgspec.structs.replace(
        run(base, sample={"minibatches": 1}, **rl),
        sandbox=SandboxSpec(provider="process", allow_weaker=True),
        schedule=Schedule(save_rollouts_every=1),
    )


def test_lines_of_rollouts_that_fork_are_learnt_from(base: str, tmp_path: Path) -> None:
    train(forking(base), tmp_path, say=pytest.fail)
    (row,) = [row for row in read_rows(tmp_path, "rl") if "reward" in row.values]
    assert row.values["loss"] != 0
    (path,) = (tmp_path / "rollouts").glob("*.jsonl")
    saved = [msgspec.json.decode(line, type=Trajectory) for line in path.read_bytes().splitlines()]
    num_gaps = 0
    for rollout in saved:
        assert [call.fork for call in rollout.calls] == [None, CallForkOrigin("0", 0)]
        lines = [sum(rollout.call_rewards[call.id].values()) for call in rollout.calls]
        assert sum(rollout.rewards.values()) == pytest.approx(sum(lines) / 2)
        assert len({len(call.turns) for call in rollout.calls}) == 2  # the turn before is shared
        advantages = rollout.metadata.get("advantages", {})
        gaps = rollout.metadata.get("logprob_gaps", {})
        for call in rollout.calls:
            for index, values in ((turn, gaps.get(f"{call.id}/{turn}")) for turn in range(9)):
                # Trainer and sampler have the same weights, so a gap is rounding.
                assert values is None or len(values) == len(call.turns[index].reply.token_ids or ())
                assert values is None or max(map(abs, values)) < 1e-3
        num_gaps += len(gaps)
        assert advantages.get("0/1", 0) == pytest.approx(lines[0] - lines[1])
        assert advantages.get("0:1/0", 0) == pytest.approx(lines[1] - lines[0])
    assert num_gaps


def test_a_run_that_cannot_fork_or_would_not_use_its_forks_is_refused(
    base: str, tmp_path: Path
) -> None:
    fitting = forking(base)
    for wrong, why in (
        (forking(base, rollout=RolloutOptions(group=2)), r"set rl\.rollout\.branch"),
        (forking(base, algorithm=GRPO()), "rl.algorithm=grpo does not compare"),
        (msgspec.structs.replace(fitting, limits=Limits(max_turns=1)), r"limits\.max_turns"),
        (
            msgspec.structs.replace(
                fitting, sandbox=SandboxSpec(provider="inprocess", allow_weaker=True)
            ),
            "use jail or process",
        ),
    ):
        with pytest.raises(ConfigError, match=why):
            train(wrong, tmp_path)


def test_reward_kl_reference_is_the_policy_at_the_start_of_rl(base: str, tmp_path: Path) -> None:
    train(
        run(base, algorithm=ReinforcePP(kl_reward=0.1), steps=2, sample={"minibatches": 1}),
        tmp_path,
    )
    kl = [row.values["reward_kl"] for row in read_rows(tmp_path, "rl") if "reward_kl" in row.values]
    assert kl[0] == pytest.approx(0, abs=1e-6)
    assert any(abs(value) > 1e-6 for value in kl[1:])


def test_old_logprobs_are_computed_at_the_start_of_the_step(base: str, tmp_path: Path) -> None:
    """For the first of two minibatches, old and current policy are equal; for the second they
    differ."""
    train(
        run(base, loss=LossSpec(policy=Decoupled()), steps=1, sample={"minibatches": 2}), tmp_path
    )
    (row,) = [row for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert row.values["approx_kl"] > 1e-9
    assert (
        row.values["mismatch_max"] < 1e-5
    )  # |old - sampler|: trainer and engine agree on the weights that sampled


def test_staleness_is_measured_and_passed_to_the_loss(base: str, tmp_path: Path) -> None:
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
    assert mismatch[0] < 1e-5  # sampled by a single policy version


def test_guard_ends_the_stage_also_for_a_resumed_run(base: str, tmp_path: Path) -> None:
    messages: list[str] = []
    given = run(base, guard=TrainingGuardSpec(max_kl=1e-12), steps=4)
    state = train(given, tmp_path, say=messages.append)
    (why,) = [each for each in messages if "the stage ends here" in each]
    assert "above guard.max_kl=1e-12 " not in why
    ended = read_state(CheckpointStore(tmp_path).all()[-1])
    assert (ended.stage_step, ended.stopped != "") == (1, True)
    assert ended.score is not None  # the last step of a stage is evaluated
    again = train(given, tmp_path, resume=tmp_path)
    assert (state.step, again.step) == (1, 1)


def test_patience_stops_the_run_and_keeps_the_best_checkpoint(base: str, tmp_path: Path) -> None:
    messages: list[str] = []
    given = run(base, guard=TrainingGuardSpec(patience=1, min_delta=2.0), steps=9)
    given = msgspec.structs.replace(given, schedule=Schedule(evaluate_every=1, keep_best=1))
    state = train(given, tmp_path, say=messages.append)
    assert state.step == 2
    assert "validation has not risen above" in messages[-1]
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    ours, theirs = (torch.load(best / "backend/backend.pt")["weights"], (tmp_path / "policy"))
    from ramify.models.weights import read_weights

    left = read_weights(theirs)
    assert all(torch.equal(ours[name], left[name]) for name in left)


def test_alarms_are_logged_and_appear_in_the_metrics(base: str, tmp_path: Path) -> None:
    messages: list[str] = []
    train(
        run(base, guard=TrainingGuardSpec(alarms=CollapseAlarms(length=1.0001, window=1)), steps=3),
        tmp_path,
        say=messages.append,
    )
    alarms = [each for each in messages if "length: rollouts have" in each]
    rows = [
        row.values.get("alarm_length", 0)
        for row in read_rows(tmp_path, "rl")
        if "learn_s" in row.values
    ]
    assert len(rows) == 3
    notes = [note for row in read_rows(tmp_path, "rl") for note in row.diagnoses]
    assert len([note for note in notes if note.name == "length"]) == len(alarms)
    assert len(alarms) == sum(now > before for before, now in zip([0, *rows], rows, strict=False))
