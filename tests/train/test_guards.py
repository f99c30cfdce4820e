"""Guards: early stopping of a stage, alarms, and limits."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.train.guards import (
    CollapseAlarms,
    GuardState,
    TrainingGuard,
    after_evaluation,
    after_step,
)

FINE = {
    "zero_variance": 0.2,
    "entropy": 1.0,
    "length_mean": 40.0,
    "clip_fraction": 0.01,
    "approx_kl": 0.001,
}


def steps(guard: TrainingGuard, *changes: dict[str, float]) -> list[Any]:
    """Return the verdict on each step, with a checkpoint after each step."""
    memory, verdicts = GuardState(), []
    for change in changes:
        memory = msgspec.json.decode(msgspec.json.encode(memory), type=GuardState)
        verdicts.append(after_step(guard, memory, {**FINE, **change}))
    return verdicts


def test_patience_stops_after_evaluations_without_improvement() -> None:
    memory, guard = GuardState(), TrainingGuard(patience=2, min_delta=0.1)
    verdicts = [
        after_evaluation(guard, memory, reward) for reward in (0.3, 0.5, 0.55, None, 0.4, 0.6)
    ]
    assert [bool(each.stop) for each in verdicts] == [False, False, False, False, True, True]
    assert (
        verdicts[4].stop == "validation has not risen above 0.5 in 2 evaluations (guard.patience)"
    )
    endless = GuardState()
    assert not any(after_evaluation(TrainingGuard(), endless, 0.1).stop for _ in range(50))


def test_alarm_is_reported_once_until_it_clears() -> None:
    quick = TrainingGuard(alarms=CollapseAlarms(window=2))
    verdicts = steps(quick, {}, {}, {"entropy": 0.05}, {"entropy": 0.05}, {}, {"entropy": 0.1})
    assert [each.says for each in verdicts] == [
        [],
        [],
        ["alarm: the entropy is 0.05, and was 1 at first: the policy no longer explores"],
        [],
        [],
        ["alarm: the entropy is 0.1, and was 1 at first: the policy no longer explores"],
    ]
    assert [each.metrics.get("alarm_entropy") for each in verdicts] == [None, None, 1, 1, 0, 1]
    assert not any(each.stop for each in verdicts)


@pytest.mark.parametrize(
    ("change", "alarm"),
    [
        (
            {"zero_variance": 0.95},
            "alarm: in 95% of groups all rollouts have the same reward: next to nothing is learned",
        ),
        ({"clip_fraction": 0.4}, "alarm: the gradient of 40% of tokens was clipped"),
        ({"length_mean": 130.0}, "alarm: rollouts have 130 tokens, and had 40 at first"),
        ({"length_mean": 10.0}, "alarm: rollouts have 10 tokens, and had 40 at first"),
    ],
)
def test_each_alarm_is_raised_and_can_be_disabled(change: dict[str, float], alarm: str) -> None:
    assert steps(TrainingGuard(alarms=CollapseAlarms(window=1)), {}, change)[-1].says == [alarm]
    off = CollapseAlarms(window=1, zero_variance=None, entropy=None, length=None, clipped=None)
    assert steps(TrainingGuard(alarms=off), {}, change)[-1].says == []


def test_steps_without_signal_do_not_count_for_the_alarm_baseline() -> None:
    memory, zero_variance = GuardState(), {"zero_variance": 1.0, "length_mean": 4.0}
    after_step(TrainingGuard(), memory, zero_variance)
    assert (memory.num, memory.first) == (0, {})


def test_alarms_of_another_policy_use_its_own_first_steps() -> None:
    """Its metrics have no length, and a step without signal has no entropy either."""
    guard = TrainingGuard(alarms=CollapseAlarms(window=1), max_kl=0.1)
    name = "policy.children/"
    found = steps(
        guard,
        {f"{name}approx_kl": 0.01},
        {f"{name}entropy": 2.0},
        {f"{name}entropy": 0.15, f"{name}approx_kl": 0.01},
        {f"{name}entropy": 2.0, f"{name}approx_kl": 0.2},
    )
    why = "the entropy is 0.15, and was 2 at first: the policy no longer explores"
    assert [each.says for each in found] == [[], [], [f"policy.children: alarm: {why}"], []]
    assert [each.metrics.get(f"{name}alarm_entropy") for each in found] == [None, None, 1, 0]
    kl = "the KL is 0.2, above guard.max_kl=0.1"
    assert [each.stop for each in found] == ["", "", "", f"policy.children: {kl}"]


def test_kl_and_entropy_limits_stop_or_warn() -> None:
    stop, warn = (
        TrainingGuard(max_kl=0.1, min_entropy=0.5),
        TrainingGuard(max_kl=0.1, min_entropy=0.5, then="warn"),
    )
    changes = [{}, {"approx_kl": 0.2}, {"ref_kl": 0.3}, {}, {"entropy": 0.4}]
    assert [each.stop for each in steps(stop, *changes)] == [
        "",
        "the KL is 0.2, above guard.max_kl=0.1",
        "the KL is 0.3, above guard.max_kl=0.1",
        "",
        "the entropy is 0.4, below guard.min_entropy=0.5",
    ]
    verdicts = steps(warn, *changes)
    assert [each.stop for each in verdicts] == [""] * 5
    assert [each.says for each in verdicts] == [
        [],
        ["warning: the KL is 0.2, above guard.max_kl=0.1"],
        [],
        [],
        ["warning: the entropy is 0.4, below guard.min_entropy=0.5"],
    ]


@pytest.mark.parametrize(
    "make",
    [
        lambda: TrainingGuard(patience=-1),
        lambda: CollapseAlarms(window=0),
        lambda: CollapseAlarms(length=0.5),
        lambda: TrainingGuard(max_kl=-1),
    ],
)
def test_invalid_guard_options_are_rejected(make: Any) -> None:
    with pytest.raises(ConfigError, match="guard"):
        make()
