"""The verdict on a training run: its sentences, and when an alarm lasts."""

from __future__ import annotations

from pathlib import Path

import pytest

from ramify.train.findings import (
    CollapseAlarms,
    StageMetricHistory,
    finding_metric_names,
    step_findings,
)
from ramify.train.metrics import Diagnosis, MetricsFile
from ramify.viewer.training_and_evaluation_pages import TrainingCurves


def shown(folder: Path) -> tuple[list[str], TrainingCurves]:
    curves = TrainingCurves(folder)
    curves.refresh()
    return [fact.text for fact in curves.data()["verdict"]], curves


def found(name: str) -> Diagnosis:
    return Diagnosis(name=name, text=f"this is {name}: change an option")


def test_verdict_compares_last_steps_with_first(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    for step, reward in enumerate((0.09, 0.1, 0.11), start=1):
        values = {
            "reward": reward,
            "reward_std": 0.3,
            "reward_error": 0.075,
            "num_rollouts": 16.0,
            "truncated_rollouts": 0.58,
            "failed_share": 0.25,
            "groups_with_signal": 3.0,
            "items": 4.0,
            "row_tokens": 100.0,
        }
        metrics.write(step, "rl", 2.0 * step, values)
    texts, curves = shown(tmp_path)
    assert texts == [
        "reward 0.09 → 0.11 over 3 steps (within noise)",
        "58 % of rollouts truncated",
        "25 % of rollouts failed",
        "3 of 4 groups gave a learning signal",
        "no alarms",
    ]
    tones = [fact.tone for fact in curves.data()["verdict"]]
    assert tones == ["", "warn", "warn", "", "good"]
    assert curves.data()["clock"] == {
        "steps": [1, 2, 3],
        "seconds": [2.0, 4.0, 6.0],
        "tokens": [100.0, 200.0, 300.0],
    }


@pytest.mark.parametrize(("reward", "tone"), [(0.9, "good"), (0.1, "bad"), (0.5, "")])
def test_change_of_reward_beyond_noise_has_a_tone(tmp_path: Path, reward: float, tone: str) -> None:
    metrics = MetricsFile(tmp_path)
    for step, value in enumerate((0.5, 0.5, reward), start=1):
        values = {"reward": value, "reward_std": 0.3, "reward_error": 0.0375}
        metrics.write(step, "rl", 1.0, values)
    _, curves = shown(tmp_path)
    assert curves.data()["verdict"][0].tone == tone


def test_verdict_is_on_the_last_stage(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    assert shown(tmp_path)[0] == []
    metrics.write(1, "sft", 1.0, {"loss": 9.0})
    assert shown(tmp_path)[0] == ["loss 9 in the first step (sft)", "no alarms"]
    metrics.write(2, "sft", 2.0, {"loss": 3.0})
    metrics.write(2, "first", 2.0, {"validation/reward": 0.4, "validation/reward_low": 0.2,
                                    "validation/reward_high": 0.6})  # fmt: skip
    metrics.write(3, "rl", 3.0, {"reward": 0.5, "loss": 0.1})
    metrics.write(3, "rl", 3.0, {"validation/reward": 0.3, "validation/reward_low": 0.1,
                                 "validation/reward_high": 0.5})  # fmt: skip
    assert shown(tmp_path)[0] == [
        "reward 0.5 in the first step",
        "validation 0.3 (0.1 to 0.5), best 0.4 at step 2",
        "no alarms",
    ]


def test_alarm_lasts_until_its_metric_is_zero(tmp_path: Path) -> None:
    metrics = MetricsFile(tmp_path)
    metrics.write(1, "rl", 1.0, {"reward": 0.5, "alarm_divergence": 1.0}, [found("divergence")])
    assert shown(tmp_path)[0][-1] == "alarm: divergence since step 1"
    metrics.write(2, "rl", 2.0, {"reward": 0.5, "alarm_divergence": 0.0}, [found("wrong_sign")])
    metrics.write(3, "rl", 3.0, {"reward": 0.5, "policy.judge/alarm_length": 1.0}, [
        Diagnosis(name="length", text="policy.judge: too long: change it")
    ])  # fmt: skip
    metrics.write(4, "rl", 4.0, {"reward": 0.5, "policy.judge/alarm_length": 0.0})
    texts, curves = shown(tmp_path)
    assert texts[-1] == (
        "3 alarms: wrong sign since step 2, divergence at step 1 (cleared at step 2), "
        "length at step 3 (cleared at step 4)"
    )
    lasting, *ceased = curves.data()["alarms"]
    assert (lasting.ceased, [alarm.ceased for alarm in ceased]) == (None, [2, 4])
    assert [alarm.metrics for alarm in ceased] == [["post_kl"], ["policy.judge/length_mean"]]


def test_every_finding_has_metrics_that_show_it() -> None:
    class Everything(dict[str, float]):
        def __missing__(self, name: str) -> float:
            return 1.0

        def __contains__(self, name: object) -> bool:
            return True

    names = [
        name
        for name, _ in step_findings(Everything(), StageMetricHistory({}, {}), CollapseAlarms())
    ]
    unshown = {name for name in names if not finding_metric_names(name)}
    assert unshown == {"judges_abstain"}  # has metrics under the names of signals
    others = ("negated_reward", "falling_validation", "max_kl", "min_entropy")
    assert all(finding_metric_names(name) for name in others)
    assert finding_metric_names("unknown") == ()
