"""The doctor: findings, what follows from them, early stopping, and limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.train.backends.base import OptimizerSpec
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.config import EvaluateSpec, RlSpec, Run, Schedule, TaskSpec
from ramify.train.findings import CollapseAlarms
from ramify.train.metrics import Diagnosis, read_metrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.score_failure_counts import summarise_errors
from ramify.train.training_guard import (
    TrainingGuardSpec,
    TrainingGuardState,
    check_evaluation,
    check_step,
    note_initial_score,
)
from ramify.types.trajectory import Trajectory
from tests.shown import train
from tests.train.small import _make, small

FINE = {
    "reward": 0.5,
    "reward_std": 0.2,
    "reward_error": 0.025,
    "reward_min": 0.0,
    "reward_max": 1.0,
    "num_rollouts": 64.0,
    "solve_all": 0.1,
    "solve_none": 0.1,
    "zero_variance": 0.2,
    "entropy": 1.0,
    "length_mean": 40.0,
    "truncated_rollouts": 0.1,
    "cut_replies": 0.1,
    "cell_errors": 0.2,
    "failed_share": 0.0,
    "clip_fraction": 0.01,
    "approx_kl": 0.001,
    "post_kl": 0.002,
    "mismatch_kl": 1e-5,
    "staleness_max": 0.0,
    "staleness_allowed": 0.0,
    "advantage_reward_corr": 1.0,
    "reward_length_corr": 0.1,
}


def steps(guard: TrainingGuardSpec, *changes: dict[str, float]) -> list[Any]:
    """Return the verdict on each step, with a checkpoint after each step."""
    memory, verdicts = TrainingGuardState(), []
    for change in changes:
        memory = msgspec.json.decode(msgspec.json.encode(memory), type=TrainingGuardState)
        verdicts.append(check_step(guard, memory, {**FINE, **change}))
    return verdicts


def names(verdicts: list[Any]) -> list[list[str]]:
    return [[each.name for each in verdict.found] for verdict in verdicts]


def evaluations(guard: TrainingGuardSpec, *rewards: float | None) -> list[Any]:
    memory = TrainingGuardState()
    values = [{} if each is None else {"validation/reward": each} for each in rewards]
    return [check_evaluation(guard, memory, each) for each in values]


def test_patience_stops_after_evaluations_without_improvement() -> None:
    verdicts = evaluations(
        TrainingGuardSpec(patience=2, min_delta=0.1), 0.3, 0.5, 0.55, None, 0.52, 0.7
    )
    assert [bool(each.stop) for each in verdicts] == [False, False, False, False, True, False]
    assert (
        verdicts[4].stop == "validation has not risen above 0.5 in 2 evaluations (guard.patience)"
    )
    assert not any(each.stop for each in evaluations(TrainingGuardSpec(), *[0.1] * 50))


def test_finding_is_reported_once_until_it_ceases() -> None:
    verdicts = steps(TrainingGuardSpec(), {}, {}, {"entropy": 0.05}, {"entropy": 0.05}, {}, LOW)
    assert names(verdicts) == [[], [], ["entropy_collapse"], [], [], ["entropy_collapse"]]
    assert verdicts[2].found[0].text == (
        "the entropy is 0.05, down from 1 at first: the policy no longer explores; lower "
        "rl.optim.lr, or set rl.loss.entropy or rl.loss.kl_beta"
    )
    alarms = [each.metrics.get("alarm_entropy_collapse") for each in verdicts]
    assert alarms == [None, None, 1, 1, 0, 1]
    assert not any(each.stop or each.rollback for each in verdicts)


LOW = {"entropy": 0.1}
SAME = {"zero_variance": 0.95}
SIGNS: list[tuple[dict[str, float], str, str]] = [
    (LOW, "entropy_collapse", "entropy"),
    ({"post_kl": 2.0}, "divergence", "kl"),
    ({"clip_fraction": 0.4}, "clipped", "clipped"),
    ({"length_mean": 130.0}, "length", "length"),
    ({"length_mean": 10.0}, "length", "length"),
    ({"truncated_rollouts": 0.9}, "truncation_spiral", "truncated"),
    ({"mismatch_kl": 0.2}, "sampler_mismatch", "mismatch_kl"),
    ({"staleness_max": 3.0}, "stale_engine", ""),
    ({"failed_share": 0.6}, "failed_rollouts", "failed"),
    ({"score_errors": 6.0, "scored_answers": 2.0}, "failing_score", "failed"),
    ({"failed_share": 0.6, "score_errors": 6.0, "scored_answers": 0.0}, "failing_score", "failed"),
    ({"advantage_reward_corr": -0.9}, "wrong_sign", ""),
    ({"reward_length_corr": 0.99}, "length_hacking", "length_corr"),
    ({"reward": 0.2}, "falling_reward", "reward"),
    ({"control_tokens": 0.7}, "wrong_template", ""),
    ({"dead_children": 0.95, "num_children": 20.0}, "dead_children", "truncated"),
    ({"helper/read": 0.0, "helper/abstained/no_vote": 8.0}, "judges_abstain", "abstained"),
    (SAME | {"solve_none": 1.0, "reward_max": 0.0}, "too_hard", "zero_variance"),
    (SAME | {"solve_all": 1.0, "reward_min": 1.0}, "too_easy", "zero_variance"),
    (SAME | {"reward_min": 0.5, "reward_max": 0.5}, "constant_reward", "zero_variance"),
    (SAME, "no_variance", "zero_variance"),
]


@pytest.mark.parametrize(("change", "name", "alarm"), SIGNS)
def test_each_finding_is_reported_and_can_be_disabled(
    change: dict[str, float], name: str, alarm: str
) -> None:
    """Within three steps after it begins, and alone."""
    given = [{}, {}, change, change, change]
    found = steps(TrainingGuardSpec(), *given)
    assert [each for step in names(found) for each in step] == [name]
    if alarm:
        off = TrainingGuardSpec(alarms=CollapseAlarms(**{alarm: None}))
        assert name not in [each for step in names(steps(off, *given)) for each in step]


@pytest.mark.parametrize(
    ("change", "name"),
    [({"cut_replies": 1.0}, "endless_replies"), ({"cell_errors": 1.0}, "failing_cells")],
)
def test_what_is_wrong_from_the_first_step_has_no_comparison(
    change: dict[str, float], name: str
) -> None:
    assert names(steps(TrainingGuardSpec(), change, change, change)) == [[], [name], []]
    assert names(steps(TrainingGuardSpec(), {}, change, change)) == [[], [], []]


EQUAL = {name: change for change, name, limit in SIGNS if limit == "zero_variance"}


@pytest.mark.parametrize("name", EQUAL)
def test_equal_rewards_say_nothing_if_the_score_of_other_answers_failed(name: str) -> None:
    for failed, found in ((15.0, []), (1.0, [name])):
        change = EQUAL[name] | {"score_errors": failed, "scored_answers": 17.0}
        verdicts = steps(TrainingGuardSpec(), {}, change, change, change)
        assert [each for step in names(verdicts) for each in step] == found


def test_fall_of_the_reward_within_noise_is_not_reported() -> None:
    """Eight items of eight rollouts each, whose mean reward has a standard error of 0.1."""
    peak, fallen = {"reward": 0.7, "reward_error": 0.1}, {"reward": 0.35, "reward_error": 0.1}
    assert names(steps(TrainingGuardSpec(), peak, fallen, fallen)) == [[], [], []]
    gone = fallen | {"reward": 0.1}
    assert names(steps(TrainingGuardSpec(), peak, gone, gone)) == [[], [], ["falling_reward"]]


def test_consequences_of_a_divergence_are_not_reported() -> None:
    after = {"entropy": 0.01, "truncated_rollouts": 1.0, "reward": 0.0, "cut_replies": 1.0}
    found = steps(TrainingGuardSpec(), {}, {"post_kl": 3.0}, after, after, after)
    assert names(found) == [[], ["divergence"], [], [], []]
    assert found[3].metrics["alarm_truncation_spiral"] == 1


def test_findings_of_another_policy_use_its_own_first_steps() -> None:
    """Its metrics have no length, and a step without signal may have no entropy."""
    guard = TrainingGuardSpec(max_kl=0.1)
    name = "policy.children/"
    found = steps(
        guard,
        {f"{name}approx_kl": 0.01},
        {f"{name}entropy": 2.0},
        {f"{name}entropy": 0.15, f"{name}approx_kl": 0.01},
        {f"{name}entropy": 2.0, f"{name}approx_kl": 0.2},
    )
    assert names(found) == [[], [], ["entropy_collapse"], ["max_kl"]]
    assert found[2].found[0].text.startswith("policy.children: the entropy is 0.15, down from 2")
    kl = "the KL is 0.2, above guard.max_kl=0.1"
    assert [each.stop for each in found] == ["", "", "", f"policy.children: {kl}"]


def test_kl_and_entropy_limits_stop_or_warn() -> None:
    limits: dict[str, Any] = {"max_kl": 0.1, "min_entropy": 0.5}
    changes = [{}, {"approx_kl": 0.2}, {"ref_kl": 0.3}, {}, {"entropy": 0.4}]
    for then in (None, "stop"):
        assert [each.stop for each in steps(TrainingGuardSpec(then=then, **limits), *changes)] == [
            "",
            "the KL is 0.2, above guard.max_kl=0.1",
            "the KL is 0.3, above guard.max_kl=0.1",
            "",
            "the entropy is 0.4, below guard.min_entropy=0.5",
        ]
    verdicts = steps(TrainingGuardSpec(then="warn", **limits), *changes)
    assert [each.stop for each in verdicts] == [""] * 5
    assert names(verdicts) == [[], ["max_kl"], [], [], ["min_entropy"]]


def test_what_follows_from_a_finding() -> None:
    hard = SAME | {"solve_none": 1.0, "reward_max": 0.0}
    for change, curable in (({"post_kl": 2.0}, True), (hard, False)):
        stop, back, warn = (
            steps(TrainingGuardSpec(then=then), {}, change, change)[1 if curable else 2]
            for then in ("stop", "rollback", "warn")
        )
        assert (bool(stop.stop), bool(stop.rollback)) == (True, False)
        assert (bool(back.stop), bool(back.rollback)) == (not curable, curable)
        assert (bool(warn.stop), bool(warn.rollback)) == (False, False)
        assert [each.diagnoses[0].action for each in (stop, back, warn)] == [
            "stop",
            "rollback" if curable else "stop",
            "warn",
        ]


def of_score(reward: float) -> dict[str, float]:
    ends = {"validation/reward_low": reward - 0.05, "validation/reward_high": reward + 0.05}
    return {"validation/reward": reward, **ends}


@pytest.mark.parametrize(
    ("rewards", "scores", "name"),
    [
        ([0.3, 0.5], [0.6, 0.4], "negated_reward"),
        ([-0.4, -0.4], [0.5, 0.5], "negated_reward"),
        ([0.5, 0.45], [0.6, 0.4], "falling_validation"),
        ([0.5, 0.6], [0.6, 0.55], ""),
    ],
)
def test_evaluation_is_compared_with_the_training_reward(
    rewards: list[float], scores: list[float], name: str
) -> None:
    memory = TrainingGuardState()
    note_initial_score(memory, of_score(scores[0]))
    for reward in rewards:
        check_step(TrainingGuardSpec(), memory, {**FINE, "reward": reward})
    found = check_evaluation(TrainingGuardSpec(), memory, of_score(scores[1]))
    assert [each.name for each in found.found] == ([name] if name else [])


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainingGuardSpec(patience=-1),
        lambda: CollapseAlarms(window=0),
        lambda: CollapseAlarms(length=0.5),
        lambda: CollapseAlarms(kl=0.0),
        lambda: TrainingGuardSpec(max_kl=-1),
        lambda: TrainingGuardSpec(rollback_lr=1.0),
        lambda: TrainingGuardSpec(max_rollbacks=0),
    ],
)
def test_invalid_guard_options_are_rejected(make: Any) -> None:
    with pytest.raises(ConfigError, match="guard"):
        make()


# --- whole runs


constant = DatasetTask("constant", generated("constant", _make), lambda answer, item: 0.5)


def run_of(task: str = "tests.train.small:even", steps: int = 4, **changes: Any) -> Run:
    return small(
        **{
            "task": TaskSpec(name=task, validate=False),
            "warmup": None,
            "evaluate": EvaluateSpec(num=2, final=()),
            "schedule": Schedule(evaluate_every=1),
            "rl": RlSpec(
                steps=steps,
                sample=RolloutBatchSpec(items=2),
                rollout=RolloutOptions(group=3, concurrency=1),
                optim=OptimizerSpec(lr=changes.pop("lr", 1e-3)),
            ),
            **changes,
        }
    )


def diagnoses(folder: Path) -> list[tuple[int, Diagnosis]]:
    return [(row.step, each) for row in read_metrics(folder) for each in row.diagnoses]


def test_finding_is_logged_and_stored_and_can_stop_the_run(tmp_path: Path) -> None:
    said: list[str] = []
    state = train(
        run_of("tests.train.test_run_doctor:constant", guard=TrainingGuardSpec(then="stop")),
        tmp_path,
        say=said.append,
    )
    assert state.stage_step == 2 if state.stage == 0 else True
    found = {note.name: note for _, note in diagnoses(tmp_path)}
    assert found["constant_reward"].action == "stop"
    assert "the reward 0.5, whatever they did" in found["constant_reward"].text
    assert any("constant_reward: all rollouts of the step" in each for each in said)
    assert (
        len(
            [row for row in read_metrics(tmp_path) if "learn_s" in row.values and row.stage == "rl"]
        )
        == 2
    )


def test_run_goes_back_to_its_best_checkpoint_with_a_smaller_rate(tmp_path: Path) -> None:
    """Once: then the limit of rollbacks stops it."""
    guard = TrainingGuardSpec(
        then="rollback", max_rollbacks=1, rollback_lr=0.25, alarms=CollapseAlarms(kl=1e-9)
    )
    said: list[str] = []
    train(run_of(guard=guard, steps=3), tmp_path, say=said.append)
    notes = [(note.name, note.action) for _, note in diagnoses(tmp_path)]
    assert ("rollback", "rollback") in notes
    assert ("divergence", "stop") in notes
    rates = [
        row.values["lr"]
        for row in read_metrics(tmp_path)
        if row.stage == "rl" and "lr" in row.values
    ]
    assert rates == [pytest.approx(0.25e-3)]
    state = read_state(CheckpointStore(tmp_path).all()[-1])
    assert (state.lr_scale, state.guard.rollbacks) == (0.25, 1)
    assert any("goes back to step" in each for each in said)


def test_run_whose_rollouts_all_fail_names_it(tmp_path: Path) -> None:
    with pytest.raises(TrainError, match=r"^step \d+ \(rl\): all 6 rollouts failed: 6 times: "):
        train(run_of("tests.train.small:failing"), tmp_path)
    ((_, note),) = diagnoses(tmp_path)
    assert (note.name, note.action) == ("failed_rollouts", "stop")
    assert "the grader is down" in note.text


UNSCORED = {"no_signal": 1.0, "score_errors": 2.0, "scored_answers": 1.0}


@pytest.mark.parametrize(
    ("given", "fails"),
    [
        ([UNSCORED], [True]),
        ([UNSCORED | {"scored_answers": 3.0}], [False]),
        ([{}, UNSCORED, UNSCORED, UNSCORED], [False, False, False, True]),
        ([{}, UNSCORED, UNSCORED, {}, UNSCORED], [False] * 5),
        # Single errors add up over the steps that taught nothing.
        (
            [UNSCORED | {"score_errors": 1.0, "scored_answers": 0.0}, {"no_signal": 1.0}] * 2,
            [False, False, True, True],
        ),
    ],
)
def test_score_that_fails_for_most_answers_ends_a_run_that_learns_nothing(
    given: list[dict[str, float]], fails: list[bool]
) -> None:
    assert [each.is_failure for each in steps(TrainingGuardSpec(), *given)] == fails
    assert not any(each.is_failure for each in steps(TrainingGuardSpec(then="warn"), *given))
    off = TrainingGuardSpec(alarms=CollapseAlarms(failed=None))
    assert not any(each.is_failure for each in steps(off, *given))


def _raises_for_most(item: Item, trajectory: Trajectory) -> float:
    if trajectory.id.endswith("rollout=0"):
        return 0.5
    return {"a": 1.0}["b"]


raising = DatasetTask(
    "raising", generated("raising", _make), TrajectoryRewardFunction(_raises_for_most)
)
WHY = r"its score raised KeyError: 'b', at \S+test_run_doctor\.py:\d+ \(_raises_for_most\)"


def test_run_whose_score_mostly_raises_says_so_at_its_first_step_and_fails(tmp_path: Path) -> None:
    said: list[str] = []
    with pytest.raises(
        TrainError,
        match=rf"^step \d+ \(rl\): nothing was learned from the first step, and the task's score "
        rf"failed for 4 of 4 answers: 4 of 6 rollouts could not be scored: 4 times: {WHY}; repair "
        rf"that, and continue with: ramify train --resume {tmp_path}$",
    ):
        train(run_of("tests.train.test_run_doctor:raising"), tmp_path, say=said.append)
    assert any(re.search(rf"4 of 6 rollouts could not be scored: 4 times: {WHY}$", s) for s in said)
    assert [(note.name, note.action) for _, note in diagnoses(tmp_path)] == [
        ("failing_score", "stop")
    ]
    (row,) = [row.values for row in read_metrics(tmp_path) if row.stage == "rl"]
    assert (row["score_errors"], row["failed_rollouts"], row["num_rollouts"]) == (4, 4, 6)


def test_run_counts_scores_that_fail_and_names_them_at_its_end(tmp_path: Path) -> None:
    said: list[str] = []
    run = run_of(
        "tests.train.test_run_doctor:raising", steps=2, guard=TrainingGuardSpec(then="warn")
    )
    train(run, tmp_path, say=said.append)
    assert said[-1].startswith("8 of 12 rollouts of this run could not be scored")


def test_errors_are_counted_by_kind() -> None:
    errors = [
        "task 't', item t/train/1: its score raised ValueError: no number in 'a', at r.py:4 (f)",
        "task 't', item t/train/2: its score raised ValueError: no number in 'b', at r.py:4 (f)",
        "the grader is down",
        *(f"cause {letter}" for letter in "xyz"),
    ]
    assert summarise_errors(errors[:3]) == f"2 times: {errors[0]}; once: the grader is down"
    assert summarise_errors(errors).endswith("; once: cause x; 2 other errors")
