"""Summarise a training run for its page: one sentence per key fact, and the diagnosed alarms.

    curves of the run's last stage  ──> reward 0.09 → 0.11 over 3 steps · 9 % of rollouts failed · …
    diagnoses of the doctor         ──> alarm: wrong sign since step 2

A fact compares the last steps of the stage with its first ones, since single steps are noisy.
Alarms are the faults that the diagnosis recorded (``train/training_guard.py``). An alarm lasts
until its metric (``alarm_NAME``) is 0 again. An alarm of an evaluation has no such metric, so it
never ends. This module chooses which facts are shown, and their words and tones.
``train/findings.py`` defines which findings are faults.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from ramify.train.findings import finding_metric_names
from ramify.train.metrics import Diagnosis

Curves = Mapping[str, tuple[list[int], list[float]]]
"""Steps and values of each metric, by its name."""
COMPARED = 5
"""Maximum number of steps that are averaged at each end of a stage for the comparison."""
MAX_MARKS = 50
"""Maximum number of steps at which one alarm is marked. The latest are kept."""
_NOISE = 2.0
"""Mean rewards that differ by at most this many standard errors count as equal."""
_MANY_CUT, _MANY_FAILED, _FEW_SIGNALS = 0.3, 0.1, 0.3
"""Fractions from which a fact is shown as a warning: of truncated rollouts, of failed rollouts, and
(below it) of groups with a signal."""


class TrainingFact(msgspec.Struct, kw_only=True):
    """One sentence about a training run for its page, such as how the mean reward changed."""

    name: str
    text: str
    tone: str = ""
    """How the fact is highlighted: ``good``, ``warn`` or ``bad``. Empty: not highlighted."""
    metric: str = ""
    """Metric whose curve shows the fact."""


class TrainingAlarm(msgspec.Struct, kw_only=True):
    """A fault that the automatic diagnosis of a training run found.

    All occurrences of the same fault are one alarm.
    """

    name: str
    text: str
    """The diagnosis from the latest occurrence: the cause, and the option to change."""
    action: str
    steps: list[int]
    """Steps at which the fault began."""
    ceased: int | None = None
    """First step at which the fault was gone. None while it lasts."""
    metrics: list[str] = []
    """Metrics whose curves show the fault."""

    @property
    def summary(self) -> str:
        """Name and steps of the alarm, such as ``wrong sign since step 2``."""
        name, step = self.name.replace("_", " "), self.steps[-1]
        if self.ceased is None:
            return f"{name} since step {step:,}"
        return f"{name} at step {step:,} (cleared at step {self.ceased:,})"


def alarms(diagnoses: Sequence[tuple[int, Diagnosis]], curves: Curves) -> list[TrainingAlarm]:
    """Return a training run's alarms, with ongoing ones first.

    Ongoing and past alarms are each ordered by their first step. ``diagnoses`` must be in the order
    of their steps.
    """
    found: dict[tuple[str, str], TrainingAlarm] = {}
    for step, each in diagnoses:
        policy = each.text.partition(": ")[0] if each.text.startswith("policy.") else ""
        prefix = f"{policy}/" if policy else ""
        alarm = found.setdefault(
            (policy, each.name),
            TrainingAlarm(
                name=each.name,
                text="",
                action="",
                steps=[],
                metrics=[prefix + metric for metric in finding_metric_names(each.name)],
            ),
        )
        alarm.text, alarm.action = each.text, each.action
        alarm.steps = [*alarm.steps, step][-MAX_MARKS:]
        steps, values = curves.get(f"{prefix}alarm_{each.name}", ((), ()))
        ends = (at for at, on in zip(steps, values, strict=True) if at > step and not on)
        alarm.ceased = next(ends, None)
    return sorted(found.values(), key=lambda alarm: alarm.ceased is not None)


def last_stage_facts(
    curves: Curves, stages: Sequence[tuple[str, int]], found: Sequence[TrainingAlarm]
) -> list[TrainingFact]:
    """Summarise the last stage of a training run as a list of facts, such as how the mean reward
    changed.

    Empty before the first step.
    """
    if not stages:
        return []
    stage, start = stages[-1]
    own = {
        name: values
        for name, (steps, each) in curves.items()
        if (values := [value for step, value in zip(steps, each, strict=True) if step >= start])
    }
    return [*_facts(own, stage), *_validation_facts(curves), _alarm_fact(found)]


def _facts(own: Mapping[str, Sequence[float]], stage: str) -> Iterator[TrainingFact]:
    if "reward" in own:
        yield _of_reward(own)
    else:
        loss = next((name for name in ("loss", "ce_loss") if name in own), "")
        if loss:
            text = f"{_describe_change(loss, own[loss])} ({stage})"
            yield TrainingFact(name="loss", text=text, metric=loss)
    cut = _late_mean(own, "truncated_rollouts")
    if cut is not None:
        yield TrainingFact(
            name="cut",
            text=f"{_percent(cut)} of rollouts truncated" if cut else "no rollouts truncated",
            tone="warn" if cut >= _MANY_CUT else "",
            metric="truncated_rollouts",
        )
    failed = _late_mean(own, "failed_share")
    if failed:
        yield TrainingFact(
            name="failed",
            text=f"{_percent(failed)} of rollouts failed",
            tone="warn" if failed >= _MANY_FAILED else "",
            metric="failed_share",
        )
    if "groups_with_signal" in own and "items" in own:
        num = num_averaged_steps(len(own["items"]))
        having = math.fsum(own["groups_with_signal"][-num:])
        all_groups = math.fsum(own["items"][-num:])
        yield TrainingFact(
            name="signal",
            text=f"{having:.0f} of {all_groups:.0f} groups gave a learning signal",
            tone="warn" if having < _FEW_SIGNALS * all_groups else "",
            metric="groups_with_signal",
        )


def num_averaged_steps(num_steps: int) -> int:
    """Return how many steps to average at each end of a stage when comparing its start and end."""
    return max(1, min(COMPARED, num_steps // 3))


def _of_reward(own: Mapping[str, Sequence[float]]) -> TrainingFact:
    rewards = own["reward"]
    text, tone = _describe_change("reward", rewards), ""
    errors = own.get("reward_error", ())
    if 1 < len(rewards) == len(errors):
        num = num_averaged_steps(len(rewards))
        variances = [error**2 for error in errors]
        noise = math.sqrt(math.fsum([*variances[:num], *variances[-num:]])) / num
        rise = fmean(rewards[-num:]) - fmean(rewards[:num])
        if abs(rise) <= _NOISE * noise:
            text += " (within noise)"
        else:
            tone = "good" if rise > 0 else "bad"
    return TrainingFact(name="reward", text=text, tone=tone, metric="reward")


def _describe_change(name: str, values: Sequence[float]) -> str:
    if len(values) == 1:
        return f"{name} {_format_number(values[0])} in the first step"
    num = num_averaged_steps(len(values))
    first, last = fmean(values[:num]), fmean(values[-num:])
    return f"{name} {_format_number(first)} → {_format_number(last)} over {len(values):,} steps"


def _validation_facts(curves: Curves) -> Iterator[TrainingFact]:
    if "validation/reward" not in curves:
        return
    steps, values = curves["validation/reward"]
    nothing: tuple[list[int], list[float]] = ([], [])
    low = curves.get("validation/reward_low", nothing)[1]
    high = curves.get("validation/reward_high", nothing)[1]
    text = f"validation {_format_number(values[-1])}"
    if len(low) == len(high) == len(values):
        text += f" ({_format_number(low[-1])} to {_format_number(high[-1])})"
    best = max(range(len(values)), key=values.__getitem__)
    if values[best] > values[-1]:
        text += f", best {_format_number(values[best])} at step {steps[best]:,}"
    yield TrainingFact(name="validation", text=text, metric="validation/reward")


def _alarm_fact(found: Sequence[TrainingAlarm]) -> TrainingFact:
    lasts = any(alarm.ceased is None for alarm in found)
    names = ", ".join(alarm.summary for alarm in found)
    text = f"{'alarm' if len(found) == 1 else f'{len(found)} alarms'}: {names}"
    return TrainingFact(
        name="alarm",
        text=text if found else "no alarms",
        tone="bad" if lasts else "warn" if found else "good",
    )


def _late_mean(own: Mapping[str, Sequence[float]], name: str) -> float | None:
    """Return a metric's mean over the last few steps of a training stage.

    Returns None if the metric was not measured.
    """
    values = own.get(name)
    return fmean(values[-num_averaged_steps(len(values)) :]) if values else None


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.01 else "under 1 %"


def _format_number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
