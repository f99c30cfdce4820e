"""Compute one term of a hybrid algorithm, which combines several training signals.

The scores of one signal are weighted, normalised and clipped, and then assigned to tokens.

    scores ── route ──> trajectories ── norm ──> numbers per turn ── clip · w(step) ──> per token

``signal_composition.py`` adds the terms to the outcome's advantages.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import total
from ramify.train.advantages.credit_assignment import has_usable_reward, sampled_turns
from ramify.train.advantages.token_arithmetic import (
    Norm,
    normalise_turn_values,
    weight_early_tokens,
)
from ramify.train.signals.base import SignalScore, TurnId
from ramify.types.trajectory import Group, Trajectory

Readings = Mapping[str, Mapping[str, SignalScore]]
"""Scores by signal name and then by trajectory id."""
Numbers = dict[TurnId, list[float]]
"""The numbers of one trajectory: each turn maps to a list with one number per sampled
token, [N].
"""
OUTCOME = "outcome"


class AnnealSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight that changes from ``start`` to ``end`` over ``steps`` training steps and then stays
    there."""

    start: float
    end: float = 0.0
    steps: int = 50
    after: int = 0
    """Number of steps at ``start`` before annealing begins."""
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.after < 0:
            raise ConfigError(
                "a weight needs steps of at least 1 and after of at least 0, but got "
                f"steps={self.steps} and after={self.after}"
            )

    def at(self, step: int) -> float:
        """Return the weight at training step ``step``.

        Example:
            AnnealSchedule(1.0, 0.0, steps=4)    # at steps 0, 1, 2, …: 1, 0.75, 0.5, 0.25, 0, 0, …
        """
        done = min(1.0, max(0.0, (step - self.after) / self.steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.end + (self.start - self.end) * left


Weight = float | AnnealSchedule


def weight_at(weight: Weight, step: int) -> float:
    """Return the value of a constant or annealed weight at training step ``step``."""
    return weight.at(step) if isinstance(weight, AnnealSchedule) else weight


class HybridTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A term of a hybrid algorithm: the contribution of one signal to the advantages or to the
    loss."""

    signal: str
    """The signal's name in ``rl.signals``."""
    weight: Weight = 1.0
    norm: Norm = "none"
    """How numbers of turns are normalised (see ``token_arithmetic.py``)."""
    plus_outcome: float = 0.0
    """Factor c by which the outcome's reward o is added to a turn's number p before ``norm``: R = p
    + c·o. Use it with ``w_rl=0``, if step-wise advantages replace those of the outcome."""
    clip: float | None = None
    """Clip the signal's numbers to the range from -``clip`` to ``clip``. None: no clipping, which
    for teachers made replies grow to their length limit."""
    route: Literal["all", "failed", "hinted"] = "all"
    """Trajectories that the term applies to. ``failed``: those with a reward below
    ``Hybrid.passed``. ``hinted``: those for which the signal has notes, such as a hint."""
    early: float = 0.0
    """Strength γ of the emphasis on early tokens. 0: all tokens weigh the same."""
    into: Literal["advantage", "loss"] = "advantage"
    """What the term contributes to. ``advantage``: it is added to the advantages. ``loss``: a
    teacher's scores become the loss component ``kd``.
    """

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                f"term '{self.signal}': clip={self.clip} must be positive; null for no clipping"
            )
        if self.early < 0:
            raise ConfigError(f"term '{self.signal}': early={self.early} cannot be negative")


class ScoredTrajectory(NamedTuple):
    """A trajectory, its reward, and the score that one signal gave to it."""

    trajectory: Trajectory
    reading: SignalScore
    reward: float


class HybridAdvantageTermValues:
    """The values that one hybrid term adds in one training step, as per-token numbers or loss
    inputs."""

    def __init__(self, term: HybridTerm, weight: float) -> None:
        self.term = term
        self.weight = weight
        self.numbers: dict[str, Numbers] = {}
        self.losses: dict[str, dict[TurnId, dict[str, Any]]] = {}
        """Inputs of the distillation loss ``kd``, by trajectory id and turn."""

    def has_effect_on_trajectory(self, id: str) -> bool:
        """Return True if the term affects the trajectory with this id.

        It does so by adding a non-zero number to an advantage, or by adding a loss.
        """
        numbers = self.numbers.get(id, {})
        return bool(self.losses.get(id)) or any(
            value != 0 for values in numbers.values() for value in values
        )

    def compute(
        self,
        groups: Sequence[Group],
        readings: Mapping[str, SignalScore],
        weights: Mapping[str, float],
        passed: float,
    ) -> dict[str, float]:
        """Compute the values of the term for all ``groups`` and return metrics about them."""
        name = self.term.signal
        num, num_bad, num_hinted, num_nonzero = 0, 0, 0, 0
        pairs: list[tuple[float, float]] = []
        for group in groups:
            scored: list[ScoredTrajectory] = []
            for trajectory in group.trajectories:
                reading = readings.get(trajectory.id)
                num += 1
                if reading is None or not has_usable_reward(trajectory):
                    continue
                num_hinted += bool(reading.notes)
                if bad := first_non_finite(reading):
                    trajectory.errors.append(
                        f"signal '{name}' gave {bad}: the rollout is used without it"
                    )
                    num_bad += 1
                    continue
                reward = total(trajectory.rewards, weights)
                if reading.turns:
                    pairs.append((statistics.fmean(reading.turns.values()), reward))
                scored.append(ScoredTrajectory(trajectory, reading, reward))
            self._add_group(scored, passed)
        values = [
            value for numbers in self.numbers.values() for row in numbers.values() for value in row
        ]
        num_nonzero = sum(1 for value in values if value)
        self._check_effect(readings, values)
        metrics = {
            f"{name}/weight": self.weight,
            f"{name}/acts_on": (len(self.numbers) + len(self.losses)) / num if num else 0.0,
            f"{name}/hint_rate": num_hinted / num if num else 0.0,
            f"{name}/not_finite": float(num_bad),
        }
        if values:
            metrics[f"{name}/mean_abs"] = statistics.fmean(abs(value) for value in values)
            metrics[f"{name}/mean"] = statistics.fmean(values)
        if num_nonzero and self.term.clip:
            num_clipped = sum(abs(value) >= self.term.clip for value in values)
            metrics[f"{name}/clipped"] = num_clipped / num_nonzero
        if (correlation := _correlation(pairs)) is not None:
            metrics[f"{name}/outcome_correlation"] = correlation
        return metrics

    def _add_group(self, scored: Sequence[ScoredTrajectory], passed: float) -> None:
        term = self.term
        turns = _normalise_in_group(term, scored)
        for (trajectory, reading, reward), numbers in zip(scored, turns, strict=True):
            if term.route == "failed" and reward >= passed:
                continue
            if term.route == "hinted" and not reading.notes:
                continue
            if term.into == "loss":
                if streams := dict(_distillation_inputs(trajectory, reading)):
                    self.losses[trajectory.id] = streams
                continue
            by_turn = broadcast_to_tokens(trajectory, numbers)
            for place, values in reading.tokens.items():
                check_length(
                    trajectory,
                    place,
                    term.signal,
                    len(values),
                    num_sampled_tokens(trajectory, place),
                )
                before = by_turn.get(place, [0.0] * len(values))
                by_turn[place] = [a + b for a, b in zip(before, values, strict=True)]
            if by_turn:
                self.numbers[trajectory.id] = self._shape_values(by_turn)

    def _shape_values(self, by_turn: Numbers) -> Numbers:
        bound, gamma = self.term.clip, self.term.early
        if bound is not None:
            by_turn = {
                place: [min(bound, max(-bound, value)) for value in row]
                for place, row in by_turn.items()
            }
        if gamma:
            places = sorted(by_turn)
            flat = iter(
                weight_early_tokens([value for place in places for value in by_turn[place]], gamma)
            )
            by_turn = {place: [next(flat) for _ in by_turn[place]] for place in places}
        return by_turn

    def _check_effect(self, readings: Mapping[str, SignalScore], values: Sequence[float]) -> None:
        """Raise TrainError if the hybrid term is 0 on every token that a teacher scored after a
        hint.

        The cause is then an error in the hint, a mask or an option of the term.
        """
        if self.term.into == "loss" or not values or any(values):
            return
        if any(reading.tokens and reading.notes for reading in readings.values()):
            raise TrainError(
                f"signal '{self.term.signal}' scored {len(values)} hinted tokens and its term is 0 "
                "on all of them: the hint does not reach the teacher, or evidence, clip or route "
                "removes everything"
            )


def _normalise_in_group(
    term: HybridTerm, scored: Sequence[ScoredTrajectory]
) -> list[dict[TurnId, float]]:
    """Return each turn's score plus the outcome reward, normalised within the group of rollouts.

    A turn is compared with the same turn of the same call in the other trajectories.
    """
    rows = [
        {place: value + term.plus_outcome * reward for place, value in reading.turns.items()}
        for _, reading, reward in scored
    ]
    return normalise_turn_values(rows, term.norm)


def broadcast_to_tokens(trajectory: Trajectory, numbers: Mapping[TurnId, float]) -> Numbers:
    """Repeat each turn's value for every token that was sampled in it."""
    by_turn: Numbers = {}
    for call in trajectory.calls:
        for index, _, num in sampled_turns(call):
            if (call.id, index) in numbers:
                by_turn[call.id, index] = [numbers[call.id, index]] * num
    return by_turn


def num_sampled_tokens(trajectory: Trajectory, place: TurnId) -> int:
    return len(trajectory.call(place[0]).turns[place[1]].reply.token_ids or ())


def check_length(trajectory: Trajectory, place: TurnId, signal: str, num: int, wanted: int) -> None:
    if num != wanted:
        raise TrainError(
            f"signal '{signal}', trajectory {trajectory.id}, call {place[0]}, turn {place[1]}: "
            f"{num} numbers for {wanted} sampled tokens; a signal gives one for each"
        )


def first_non_finite(reading: SignalScore) -> str:
    """Describe the first number in a signal's score that is not finite, and name its turn.

    Returns an empty string if all numbers are finite.
    """
    for place, value in reading.turns.items():
        if not math.isfinite(value):
            return f"{value} for call {place[0]}, turn {place[1]}"
    for columns in (reading.tokens, reading.logprobs):
        for place, values in columns.items():
            if bad := [value for value in values if not math.isfinite(value)]:
                return f"{bad[0]} for a token of call {place[0]}, turn {place[1]}"
    return ""


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return the correlation between a hybrid term's mean value per trajectory and the reward.

    ``pairs`` has both numbers for each trajectory. Returns None if either is constant.
    """
    if len(pairs) < 2 or any(len({pair[index] for pair in pairs}) < 2 for index in range(2)):
        return None
    return statistics.correlation(*zip(*pairs, strict=True))


def _distillation_inputs(
    trajectory: Trajectory, reading: SignalScore
) -> Iterator[tuple[TurnId, dict[str, Any]]]:
    """Yield the inputs of the distillation loss ``kd`` for each scored turn.

    These are log-probabilities of candidate tokens if the teacher returned any, and otherwise of
    the sampled tokens.
    """
    for place, logprobs in reading.logprobs.items():
        num = num_sampled_tokens(trajectory, place)
        top = reading.top.get(place)
        check_length(
            trajectory, place, "teacher", len(top.ids if top is not None else logprobs), num
        )
        if top is None:
            yield place, {"teacher_logprobs": logprobs}
            continue
        streams: dict[str, Any] = {"teacher_ids": top.ids, "teacher_logprobs": top.teacher}
        if top.student:
            streams["student_logprobs"] = top.student
        yield place, streams
