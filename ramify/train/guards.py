"""Guards that end a stage early, and alarms that warn of a collapse.

    evaluation  ── patience ──> stop        no validation gain of min_delta for N evaluations
    step        ── limits ──> stop or warn  KL above, or entropy below, the configured limit
    step        ── alarms ──> warn          signs of a collapse before the reward shows it

An alarm is reported when it begins, and again only after it has ceased. While it lasts, its metric
(``alarm_entropy`` …) is 1. Entropy and length are compared with their mean over the stage's first
steps. All decisions depend only on numbers, so a resumed run decides the same way: the guard's
state is plain data in the checkpoint. Not here: which checkpoint is best (``checkpoint.py``), and
the learning-rate schedule (``OptimizerSpec.schedule``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.train.config_fields import check_optional


class CollapseAlarms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Thresholds that mark a step as a sign of collapse. None switches an alarm off."""

    zero_variance: float | None = 0.9
    """Share of groups whose rollouts all have the same reward, from which on next to nothing is
    learned."""
    entropy: float | None = 0.1
    """Entropy relative to the first steps, from which on the policy no longer explores."""
    length: float | None = 3.0
    """Factor by which rollouts may become longer or shorter than in the first steps."""
    clipped: float | None = 0.3
    """Share of tokens with a clipped gradient."""
    window: int = 5
    """Number of steps at the start of a stage that are averaged as the baseline; the alarms for
    entropy and length begin after them."""

    def __post_init__(self) -> None:
        thresholds = {"zero_variance": self.zero_variance, "clipped": self.clipped}
        thresholds |= {"entropy": self.entropy, "length": self.length}
        check_optional("guard.alarms", "no alarm", **thresholds)
        if self.window < 1 or (self.length is not None and self.length <= 1):
            raise ConfigError(
                f"guard.alarms: window={self.window} must be at least 1, length={self.length} "
                "above 1"
            )


class TrainingGuard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Conditions that end a stage of rollouts before its last step."""

    patience: int | None = None
    """End the stage after this many consecutive evaluations on the validation stream without a new
    best; None: never. The best checkpoint is kept in any case."""
    min_delta: float = 0.0
    """Smallest improvement that counts as a new best."""
    max_kl: float | None = None
    """Upper limit of a step's ``approx_kl`` (to the policy at the step's start), and of its
    ``ref_kl`` if the loss has one; None: no limit."""
    min_entropy: float | None = None
    """Lower limit of the entropy of sampled tokens, in nats; None: no limit."""
    then: Literal["stop", "warn"] = "stop"
    """What to do if ``max_kl`` or ``min_entropy`` is violated."""
    alarms: CollapseAlarms = CollapseAlarms()

    def __post_init__(self) -> None:
        limits = {"max_kl": self.max_kl, "min_entropy": self.min_entropy}
        check_optional("guard", "no limit", **limits, patience=self.patience)
        if self.min_delta < 0:
            raise ConfigError(f"guard.min_delta={self.min_delta:g} cannot be negative")


class GuardState(msgspec.Struct, kw_only=True):
    """State of a guard within a stage."""

    best: float | None = None
    """Best validation reward."""
    since_best: int = 0
    """Evaluations since the best one."""
    num: int = 0
    """Number of steps in ``first``."""
    first: dict[str, float] = {}
    """Name -> sum over the stage's first steps."""
    on: list[str] = []
    """Alarms and limits that are currently violated."""
    policies: dict[str, GuardState] = {}
    """Name of another policy of the run -> state of its guard."""


class GuardVerdict(msgspec.Struct):
    """A guard's result for one step or evaluation."""

    metrics: dict[str, float]
    says: list[str]
    stop: str = ""
    """Why the stage ends; empty if it continues."""


def after_evaluation(
    guard: TrainingGuard, memory: GuardState, reward: float | None
) -> GuardVerdict:
    """Check the patience after an evaluation; updates ``memory``."""
    if reward is None:
        return GuardVerdict({}, [])
    if memory.best is None or reward > memory.best + guard.min_delta:
        memory.best, memory.since_best = reward, 0
    else:
        memory.since_best += 1
    if guard.patience is None or memory.since_best < guard.patience:
        return GuardVerdict({}, [])
    why = (
        f"validation has not risen above {memory.best:.4g} in {memory.since_best} evaluations "
        "(guard.patience)"
    )
    return GuardVerdict({}, [], why)


def after_step(
    guard: TrainingGuard, memory: GuardState, values: Mapping[str, float]
) -> GuardVerdict:
    """Check alarms and limits of each policy after a step; updates ``memory``. Metrics of another
    policy than the run's begin with ``policy.NAME/``."""
    verdict = _after_step(guard, memory, values)
    for name in dict.fromkeys(key.split("/")[0] for key in values if key.startswith("policy.")):
        state = memory.policies.setdefault(name.removeprefix("policy."), GuardState())
        prefix = f"{name}/"
        own = {key.removeprefix(prefix): values[key] for key in values if key.startswith(prefix)}
        found = _after_step(guard, state, own)
        verdict.metrics |= {prefix + key: value for key, value in found.metrics.items()}
        verdict.says += [f"{name}: {text}" for text in found.says]
        if found.stop and not verdict.stop:
            verdict.stop = f"{name}: {found.stop}"
    if values.get("frozen/exhausted"):
        verdict.stop = (
            "the run's budget of the frozen models is used up (frozen.run_cost, run_calls)"
        )
    return verdict


def _after_step(
    guard: TrainingGuard, memory: GuardState, values: Mapping[str, float]
) -> GuardVerdict:
    """Check one policy; ``values``: its metrics."""
    verdict = GuardVerdict({}, [])
    for name, is_on, why in _signs(guard.alarms, memory, values):
        verdict.metrics[f"alarm_{name}"] = float(is_on)
        if is_on and name not in memory.on:
            verdict.says.append(f"alarm: {why}")
        memory.on = [*(alarm for alarm in memory.on if alarm != name), *([name] if is_on else [])]
    _remember(guard.alarms, memory, values)
    violated = dict(_limits(guard, values))
    for name, why in violated.items():
        if guard.then == "stop":
            verdict.stop = why
        elif name not in memory.on:
            verdict.says.append(f"warning: {why}")
    memory.on = [
        *(alarm for alarm in memory.on if alarm not in ("max_kl", "min_entropy")),
        *violated,
    ]
    return verdict


def _limits(guard: TrainingGuard, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """(limit, reason) for each limit that is violated."""
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


def _signs(
    alarms: CollapseAlarms, memory: GuardState, values: Mapping[str, float]
) -> Iterator[tuple[str, bool, str]]:
    """(alarm, whether it is on, reason) for each alarm that can be judged from ``values``."""
    zero_variance = values.get("zero_variance")
    if alarms.zero_variance is not None and zero_variance is not None:
        why = (
            f"in {zero_variance:.0%} of groups all rollouts have the same reward: next to nothing "
            "is learned"
        )
        yield "zero_variance", zero_variance >= alarms.zero_variance, why
    clipped = values.get("clip_fraction")
    if alarms.clipped is not None and clipped is not None:
        yield (
            "clipped",
            clipped >= alarms.clipped,
            f"the gradient of {clipped:.0%} of tokens was clipped",
        )
    if memory.num < alarms.window:
        return
    first = {name: total / memory.num for name, total in memory.first.items()}
    entropy, length = values.get("entropy"), values.get("length_mean")
    if alarms.entropy is not None and entropy is not None and first.get("entropy", 0) > 0:
        why = (
            f"the entropy is {entropy:.3g}, and was {first['entropy']:.3g} at first: the policy "
            "no longer explores"
        )
        yield "entropy", entropy <= alarms.entropy * first["entropy"], why
    if alarms.length is not None and length is not None and first.get("length_mean", 0) > 0:
        times = length / first["length_mean"]
        why = f"rollouts have {length:.4g} tokens, and had {first['length_mean']:.4g} at first"
        yield "length", not 1 / alarms.length < times < alarms.length, why


def _remember(alarms: CollapseAlarms, memory: GuardState, values: Mapping[str, float]) -> None:
    # A step without signal has no entropy, and the metrics of another policy have no length.
    if memory.num < alarms.window and "entropy" in values:
        memory.num += 1
        names = [name for name in ("entropy", "length_mean") if name in values]
        memory.first = {name: memory.first.get(name, 0.0) + values[name] for name in names}
