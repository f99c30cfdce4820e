"""Keeping what was reached: when a stage ends early, and what is told of it while it goes wrong.

    evaluation  ── patience ──> stop        the validation reward has not risen by min_delta for so many evaluations
    step        ── limits ──> stop or warn  KL above, entropy below what the run's author set
    step        ── alarms ──> warn          what a collapse looks like before the reward shows it

An alarm is said once, when it begins, and again only after it has ceased; while it lasts its metric
(``alarm_entropy`` …) is 1. What entropy and length are measured against is the mean of the stage's
first steps. Decides from numbers alone, so that a resumed run decides alike: what is remembered is
plain data in the checkpoint. Leaves out which checkpoint is best (``checkpoint.py``) and the
learning rate's course (``OptimizerSpec.schedule``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from ramify.errors import ConfigError


class CollapseAlarms(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When a step counts as a sign of collapse. 0 switches one off."""

    zero_variance: float = 0.9
    """Share of groups in which all rollouts came to the same reward, at or above which next to
    nothing is learnt."""
    entropy: float = 0.1
    """Of what it was at first, at or below which the policy tries nothing new."""
    length: float = 3.0
    """How many times longer, or shorter, than at first rollouts may be."""
    clipped: float = 0.3
    """Share of tokens whose gradient was cut off."""
    window: int = 5
    """Steps of a stage that are averaged to say what it was at first; alarms begin after them."""

    def __post_init__(self) -> None:
        if (
            self.window < 1
            or min(self.zero_variance, self.entropy, self.clipped) < 0
            or 0 < self.length <= 1
        ):
            raise ConfigError(
                f"guard.alarms: window={self.window} must be at least 1, length={self.length} "
                "above 1 or 0, the others not "
                "negative"
            )


class TrainingGuard(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What ends a stage of rollouts before its last step."""

    patience: int = 0
    """Evaluations on the validation stream, one after the other, without a new best, after which
    the stage is over; 0: it goes on. The best checkpoint is what is left in any case."""
    min_delta: float = 0.0
    """By how much the best has to be beaten."""
    max_kl: float = 0.0
    """Most that a step's ``approx_kl`` (of the policy to that of the step's start), or its
    ``ref_kl`` where the loss has one, may be; 0: any."""
    min_entropy: float = 0.0
    """Least entropy of sampled tokens, in nats; 0: any."""
    then: Literal["stop", "warn"] = "stop"
    """What follows from ``max_kl`` and ``min_entropy``."""
    alarms: CollapseAlarms = CollapseAlarms()

    def __post_init__(self) -> None:
        if min(self.patience, self.min_delta, self.max_kl, self.min_entropy) < 0:
            raise ConfigError(
                "guard: patience, min_delta, max_kl and min_entropy cannot be negative"
            )


class GuardState(msgspec.Struct, kw_only=True):
    """What a guard remembers of a stage."""

    best: float | None = None
    """Validation reward."""
    since_best: int = 0
    """Evaluations after it."""
    num: int = 0
    """Steps in ``first``."""
    first: dict[str, float] = {}
    """Name -> sum over the stage's first steps."""
    on: list[str] = []
    """Alarms that last."""


class GuardVerdict(msgspec.Struct):
    """What follows from one step or evaluation."""

    metrics: dict[str, float]
    says: list[str]
    stop: str = ""
    """Why the stage is over; empty where it is not."""


def after_evaluation(
    guard: TrainingGuard, memory: GuardState, reward: float | None
) -> GuardVerdict:
    """``memory`` is brought up to date."""
    if reward is None:
        return GuardVerdict({}, [])
    if memory.best is None or reward > memory.best + guard.min_delta:
        memory.best, memory.since_best = reward, 0
    else:
        memory.since_best += 1
    if not guard.patience or memory.since_best < guard.patience:
        return GuardVerdict({}, [])
    why = f"validation has not risen above {memory.best:.4g} in {memory.since_best} evaluations (guard.patience)"
    return GuardVerdict({}, [], why)


def after_step(
    guard: TrainingGuard, memory: GuardState, values: Mapping[str, float]
) -> GuardVerdict:
    """``memory`` is brought up to date."""
    told = GuardVerdict({}, [])
    for name, is_on, why in _signs(guard.alarms, memory, values):
        told.metrics[f"alarm_{name}"] = float(is_on)
        if is_on and name not in memory.on:
            told.says.append(f"alarm: {why}")
        memory.on = [*(each for each in memory.on if each != name), *([name] if is_on else [])]
    _remember(guard.alarms, memory, values)
    passed = dict(_limits(guard, values))
    for name, why in passed.items():
        if guard.then == "stop":
            told.stop = why
        elif name not in memory.on:
            told.says.append(f"warning: {why}")
    memory.on = [*(each for each in memory.on if each not in ("max_kl", "min_entropy")), *passed]
    return told


def _limits(guard: TrainingGuard, values: Mapping[str, float]) -> Iterator[tuple[str, str]]:
    """(limit, why it is passed)"""
    kl = max((values[name] for name in ("approx_kl", "ref_kl") if name in values), default=0.0)
    if guard.max_kl and kl > guard.max_kl:
        yield "max_kl", f"the KL is {kl:.4g}, above guard.max_kl={guard.max_kl:g}"
    entropy = values.get("entropy")
    if guard.min_entropy and entropy is not None and entropy < guard.min_entropy:
        yield (
            "min_entropy",
            f"the entropy is {entropy:.4g}, below guard.min_entropy={guard.min_entropy:g}",
        )


def _signs(
    alarms: CollapseAlarms, memory: GuardState, values: Mapping[str, float]
) -> Iterator[tuple[str, bool, str]]:
    """(alarm, whether it is on, why), of what was measured."""
    share = values.get("zero_variance")
    if alarms.zero_variance and share is not None:
        why = f"in {share:.0%} of groups all rollouts came to the same reward: next to nothing is learnt"
        yield "zero_variance", share >= alarms.zero_variance, why
    clipped = values.get("clip_fraction")
    if alarms.clipped and clipped is not None:
        yield (
            "clipped",
            clipped >= alarms.clipped,
            f"the gradient of {clipped:.0%} of tokens was cut off",
        )
    if memory.num < alarms.window:
        return
    first = {name: total / memory.num for name, total in memory.first.items()}
    entropy, length = values.get("entropy"), values.get("length_mean")
    if alarms.entropy and entropy is not None and first.get("entropy", 0) > 0:
        why = f"the entropy is {entropy:.3g}, and was {first['entropy']:.3g} at first: the policy tries nothing new"
        yield "entropy", entropy <= alarms.entropy * first["entropy"], why
    if alarms.length and length is not None and first.get("length_mean", 0) > 0:
        times = length / first["length_mean"]
        why = f"rollouts have {length:.4g} tokens, and had {first['length_mean']:.4g} at first"
        yield "length", not 1 / alarms.length < times < alarms.length, why


def _remember(alarms: CollapseAlarms, memory: GuardState, values: Mapping[str, float]) -> None:
    names = ("entropy", "length_mean")
    if memory.num < alarms.window and all(
        name in values for name in names
    ):  # a silent step has no entropy
        memory.num += 1
        memory.first = {name: memory.first.get(name, 0.0) + values[name] for name in names}
