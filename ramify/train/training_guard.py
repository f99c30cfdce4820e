"""Watch the metrics of every step and evaluation of a run.

The guard reports faults and the option to change, and stops the run or rolls it back if necessary.

    step        ── findings ──> report, and stop, roll back or only warn (``guard.then``)
    step        ── limits ────> the same for max_kl and min_entropy, which the user sets
    step        ── a score that fails for most answers, while nothing is learned ──> an error
    evaluation  ── patience ──> stop        no validation gain of min_delta for N evaluations

A finding (a detected fault) is logged, and becomes a diagnosis in the step's line of
``metrics.jsonl``, which the web page and trackers show. It is reported when it begins, and again
only if it returns after it has ceased. From then on, its metric (``alarm_divergence`` …) is 1 while
it lasts and 0 otherwise.

Decisions depend only on numbers, and the state is plain data in the checkpoint, so a resumed run
decides the same way. The findings are defined in ``findings.py``, the best checkpoint is chosen in
``checkpoint.py``, a run is rolled back by ``trainer.py``, and stalls, which no metric shows, are
detected in ``stall_watchdog.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.train.config_redaction import check_none_or_positive
from ramify.train.findings import (
    BASELINE,
    CONSEQUENCES,
    RECENT,
    WATCHED,
    CollapseAlarms,
    StageMetricHistory,
    TrainingFault,
    ValidationScore,
    evaluation_findings,
    is_mostly_unscored,
    step_findings,
)
from ramify.train.metrics import Diagnosis

Action = Literal["stop", "rollback", "warn"]
_MOST_IDLE = 3
"""The run ends after this many consecutive steps without a training signal if scoring failed for
most answers. If the stage has learned nothing yet, one such step is enough."""
_AFTER_DIVERGENCE = 5
"""Steps after a divergence in which its consequences are not reported."""


class TrainingGuardSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Options for how to react to detected faults and when to end a rollout stage early.

    >>> train.TrainingGuardSpec(then="rollback").rollback_lr
    0.5
    """

    patience: int | None = None
    """End the stage after this many consecutive evaluations on the validation stream without a new
    best; None: never. The best checkpoint is kept in any case."""
    min_delta: float = 0.0
    """Smallest improvement that counts as a new best."""
    max_kl: float | None = None
    """Upper limit of a step's ``approx_kl`` (to the policy at the step's start), and of its
    ``ref_kl`` if the loss has one; None: no limit."""
    min_entropy: float | None = None
    """Lower limit of the policy's entropy at sampled tokens, in nats; None: no limit."""
    then: Action | None = None
    """What follows from a finding, and from a violation of ``max_kl`` or ``min_entropy``. ``stop``
    ends the stage. ``rollback`` continues from the best checkpoint with a smaller learning rate if
    that may help, and stops otherwise. ``warn`` only reports. None: limits stop the stage, since
    you have set them, and findings are reported. Unless it is ``warn``, the run ends with an error
    if the task's score fails for most answers and nothing is learned."""
    rollback_lr: float = 0.5
    """Factor by which each rollback multiplies the learning rate."""
    max_rollbacks: int = 3
    """Maximum number of rollbacks in a stage. After them, the stage is stopped."""
    alarms: CollapseAlarms = CollapseAlarms()

    def __post_init__(self) -> None:
        limits = {"max_kl": self.max_kl, "min_entropy": self.min_entropy}
        check_none_or_positive("guard", "no limit", **limits, patience=self.patience)
        if self.min_delta < 0:
            raise ConfigError(f"guard.min_delta={self.min_delta:g} cannot be negative")
        if not 0 < self.rollback_lr < 1 or self.max_rollbacks < 1:
            raise ConfigError(
                f"guard: rollback_lr={self.rollback_lr:g} is a factor between 0 and 1, and "
                f"max_rollbacks={self.max_rollbacks} at least 1"
            )


class TrainingGuardState(msgspec.Struct, kw_only=True):
    """State that the guard keeps during a stage to detect collapse or divergence of training."""

    best: float | None = None
    """Best validation reward."""
    since_best: int = 0
    """Evaluations since the best one."""
    num: int = 0
    """Number of steps in ``first``."""
    first: dict[str, float] = {}
    """Sum of each metric over the stage's first steps, by name."""
    on: list[str] = []
    """Names of findings and exceeded limits that were reported and are still present."""
    streaks: dict[str, int] = {}
    """Map each finding of this stage to the number of consecutive steps, up to the last one, that
    showed it."""
    recent: dict[str, list[float]] = {}
    """Map the name of a metric to its values in the last steps."""
    peak: tuple[float, float] | None = None
    """Highest mean reward of a step, and its standard error."""
    has_learned: bool = False
    """Whether some step of the stage had something to learn from."""
    num_idle: int = 0
    """Number of consecutive steps, up to the last one, that had nothing to learn from."""
    num_unscored: float = 0.0
    """Number of rollouts for which the task's score failed, in the steps counted by
    ``num_idle``."""
    num_scored: float = 0.0
    """Number of rollouts that have an answer and a reward, in the steps counted by ``num_idle``."""
    since_divergence: int | None = None
    """Steps since the last divergence; None if there was none."""
    best_score: ValidationScore | None = None
    """The best evaluation."""
    rollbacks: int = 0
    """Number of rollbacks in this stage."""
    policies: dict[str, TrainingGuardState] = {}
    """State of the guard of each additional policy of the run, by the policy's name."""


class TrainingGuardVerdict(msgspec.Struct):
    """The guard's verdict on a training step or evaluation: its findings and their consequence.

    The stage continues, stops or goes back to a checkpoint.
    """

    metrics: dict[str, float]
    found: list[TrainingFault] = []
    """Findings that begin with this step."""
    stop: str = ""
    """Why the stage ends; empty if it continues."""
    rollback: str = ""
    """Reason to go back to the best checkpoint; empty if the stage does not go back."""
    is_failure: bool = False
    """True if the stage stops because of an error, and the run with it."""

    @property
    def action(self) -> Action:
        return "stop" if self.stop else "rollback" if self.rollback else "warn"

    @property
    def diagnoses(self) -> list[Diagnosis]:
        return [
            Diagnosis(name=each.name, text=each.text, action=self.action) for each in self.found
        ]


def note_initial_score(memory: TrainingGuardState, values: Mapping[str, float]) -> None:
    """Record the score before the first step as the baseline for later evaluations."""
    memory.best_score = ValidationScore.from_metrics(values, None, 0.0)


def check_evaluation(
    guard: TrainingGuardSpec, memory: TrainingGuardState, values: Mapping[str, float]
) -> TrainingGuardVerdict:
    """Check the metrics of an evaluation on the validation split, update ``memory``, and return the
    verdict."""
    reward = values.get("validation/reward")
    if reward is None:
        return TrainingGuardVerdict({})
    verdict = TrainingGuardVerdict({}, _of_evaluation(guard.alarms, memory, values))
    _act(guard, memory, verdict)
    if memory.best is None or reward > memory.best + guard.min_delta:
        memory.best, memory.since_best = reward, 0
    else:
        memory.since_best += 1
    if guard.patience is not None and memory.since_best >= guard.patience and not verdict.stop:
        verdict.stop = (
            f"validation has not risen above {memory.best:.4g} in {memory.since_best} evaluations "
            "(guard.patience)"
        )
    return verdict


def _of_evaluation(
    alarms: CollapseAlarms, memory: TrainingGuardState, values: Mapping[str, float]
) -> list[TrainingFault]:
    trained = next(reversed(memory.recent.get("reward", [])), None)
    error = next(reversed(memory.recent.get("reward_error", [])), 0.0)
    score = ValidationScore.from_metrics(values, trained, error)
    if score is None:
        return []
    found = list(evaluation_findings(score, memory.best_score, alarms))
    if memory.best_score is None or score.reward > memory.best_score.reward:
        memory.best_score = score
    return found


def check_step(
    guard: TrainingGuardSpec, memory: TrainingGuardState, values: Mapping[str, float]
) -> TrainingGuardVerdict:
    """Check the metrics of every policy after a training step, update ``memory``, and return the
    verdict.

    Metrics of additional policies begin with ``policy.NAME/``.
    """
    verdict = _after_step(guard, memory, values)
    for name in dict.fromkeys(key.split("/")[0] for key in values if key.startswith("policy.")):
        state = memory.policies.setdefault(name.removeprefix("policy."), TrainingGuardState())
        prefix = f"{name}/"
        own = {key.removeprefix(prefix): values[key] for key in values if key.startswith(prefix)}
        other = _after_step(guard, state, own)
        verdict.metrics |= {prefix + key: value for key, value in other.metrics.items()}
        verdict.found += [each._replace(text=f"{name}: {each.text}") for each in other.found]
        verdict.stop = verdict.stop or (other.stop and f"{name}: {other.stop}")
        verdict.rollback = verdict.rollback or (other.rollback and f"{name}: {other.rollback}")
    if values.get("frozen/exhausted"):
        verdict.stop = (
            "the run's budget of the frozen models is used up (frozen.run_cost, run_calls)"
        )
    return verdict


def _after_step(
    guard: TrainingGuardSpec, memory: TrainingGuardState, values: Mapping[str, float]
) -> TrainingGuardVerdict:
    """Check the metrics of one policy after a step, update the policy's state in ``memory``, and
    return the verdict."""
    verdict = TrainingGuardVerdict({}, [])
    history = StageMetricHistory(_baseline_metrics(memory), memory.recent)
    is_seen = False
    for name, finding in step_findings(values, history, guard.alarms):
        is_seen |= finding is not None
        if finding is None:
            if name in memory.streaks:
                memory.streaks[name] = 0
        else:
            memory.streaks[name] = memory.streaks.get(name, 0) + 1
        is_on = finding is not None and memory.streaks[name] >= finding.num_steps
        if name in memory.streaks:
            verdict.metrics[f"alarm_{name}"] = float(is_on)
        if finding is not None and is_on and name not in memory.on:
            verdict.found.append(finding)
        memory.on = [*(each for each in memory.on if each != name), *([name] if is_on else [])]
    _note_divergence(memory, verdict)
    _update_baseline(guard.alarms, memory, values, is_seen=is_seen)
    violated = dict(_violated_limits(guard, values))
    new = [
        TrainingFault(name, why, is_curable=True)
        for name, why in violated.items()
        if name not in memory.on
    ]
    memory.on = [
        *(name for name in memory.on if name not in ("max_kl", "min_entropy")),
        *violated,
    ]
    if guard.then in (None, "stop") and violated:
        verdict.stop = next(iter(violated.values()))
    verdict.found += new
    _act(guard, memory, verdict)
    _check_scores(guard, memory, values, verdict)
    return verdict


def _check_scores(
    guard: TrainingGuardSpec,
    memory: TrainingGuardState,
    values: Mapping[str, float],
    verdict: TrainingGuardVerdict,
) -> None:
    """Decide whether the run ends because most answers cannot be scored and the policy is not
    learning.

    Further steps would not change that.
    """
    if not values.get("no_signal"):
        memory.has_learned = True
        memory.num_idle, memory.num_unscored, memory.num_scored = 0, 0.0, 0.0
        return
    memory.num_idle += 1
    memory.num_unscored += values.get("score_errors", 0.0)
    memory.num_scored += values.get("scored_answers", 0.0)
    is_clear = memory.num_idle >= _MOST_IDLE or not memory.has_learned
    if (
        guard.then != "warn"
        and is_clear
        and memory.num_unscored > 1
        and is_mostly_unscored(memory.num_unscored, memory.num_scored, guard.alarms.failed)
    ):
        verdict.is_failure = True
        failed, num = memory.num_unscored, memory.num_unscored + memory.num_scored
        steps = "the first step" if memory.num_idle == 1 else f"{memory.num_idle} steps in a row"
        verdict.stop = (
            f"nothing was learned from {steps}, and the task's score failed for {failed:.0f} of "
            f"{num:.0f} answers"
        )


def _note_divergence(memory: TrainingGuardState, verdict: TrainingGuardVerdict) -> None:
    """Note a recent divergence, and remove the findings that it explains from ``verdict``."""
    if memory.streaks.get("divergence"):
        memory.since_divergence = 0
    elif memory.since_divergence is not None:
        memory.since_divergence += 1
    since = memory.since_divergence
    if since is not None and since <= _AFTER_DIVERGENCE:
        verdict.found = [each for each in verdict.found if each.name not in CONSEQUENCES]


def _act(
    guard: TrainingGuardSpec, memory: TrainingGuardState, verdict: TrainingGuardVerdict
) -> None:
    """Decide from the findings in ``verdict`` whether the run stops or rolls back."""
    if not verdict.found or guard.then in (None, "warn") or verdict.stop:
        return
    why = verdict.found[0].text
    is_curable = all(each.is_curable for each in verdict.found)
    if guard.then == "rollback" and is_curable and memory.rollbacks < guard.max_rollbacks:
        verdict.rollback = why
    else:
        verdict.stop = why


def _violated_limits(
    guard: TrainingGuardSpec, values: Mapping[str, float]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each guard limit that a training step violates, and an explanation."""
    kl = max((values[name] for name in ("approx_kl", "ref_kl") if name in values), default=0.0)
    if guard.max_kl is not None and kl > guard.max_kl:
        yield "max_kl", f"the KL is {kl:.4g}, above guard.max_kl={guard.max_kl:g}"
    entropy = values.get("entropy")
    least = guard.min_entropy
    if least is not None and entropy is not None and entropy < least:
        yield (
            "min_entropy",
            f"the entropy is {entropy:.4g}, below guard.min_entropy={least:g}",
        )


def _baseline_metrics(memory: TrainingGuardState) -> dict[str, float]:
    """Return the stage's baseline metrics: averages over its first steps and its peak reward.

    The peak reward comes with its standard error.
    """
    first = {name: total / memory.num for name, total in memory.first.items()} if memory.num else {}
    if memory.peak is not None:
        first |= {"peak_reward": memory.peak[0], "peak_error": memory.peak[1]}
    return first


def _update_baseline(
    alarms: CollapseAlarms,
    memory: TrainingGuardState,
    values: Mapping[str, float],
    *,
    is_seen: bool,
) -> None:
    names = [name for name in BASELINE if name in values]
    # What was wrong from the beginning stays the comparison until something else is seen.
    if memory.num < alarms.window and names and (not is_seen or not memory.num):
        memory.num += 1
        memory.first = {name: memory.first.get(name, 0.0) + values[name] for name in names}
    for name in WATCHED:
        if name in values:
            memory.recent[name] = [*memory.recent.get(name, []), values[name]][-RECENT:]
    score = memory.best_score
    if score is not None and score.trained is None and "reward" in values:
        memory.best_score = score._replace(trained=values["reward"])
    if "reward" in values and "reward_error" in values:
        error = values["reward_error"]
        memory.recent["reward_error"] = [error]
        if memory.peak is None or values["reward"] > memory.peak[0]:
            memory.peak = (values["reward"], error)
