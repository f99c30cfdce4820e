"""The composer: add what signals say to the outcome's advantages, one number per token.

    A = w_rl · A_outcome + Σ_i w_i(step) · term_i
        term = clip(norm(score)), on the trajectories of its route

    Hybrid(outcome=DrGRPO(), terms=(
        HybridTerm(signal="process", weight=0.3, norm="step_index"),
        HybridTerm(signal="teacher", weight=AnnealSchedule(1.0, 0.0, steps=50), clip=2.0,
                   route="hinted"),
    ))

``Hybrid`` is an algorithm that wraps another. The wrapped one gives each call its outcome advantage
and each token its weight. Terms are added to its advantages before zero-variance groups are
dropped. With ``into="loss"`` a term becomes the loss component ``kd`` instead, with the same token
weights. By now the signals have run (``signal_reader.py``), so this file never calls a model and
never waits.

A term is 0 wherever its signal gives no number, and on all tokens that were not sampled. The
defaults are the settings that worked best: ``docs/signals.md`` reports the alternatives.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from ramify.errors import ConfigError, TrainError, nearest
from ramify.tasks.base import total
from ramify.train.advantages.base import Algorithm, AssignedRollout, AssignedStep, Stamps
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.advantages.group_norm import Norm, early_first, normalised
from ramify.train.advantages.rollout_trees import is_scored, sampled
from ramify.train.signals.base import SignalScore, TurnId
from ramify.types.trajectory import Group, Trajectory

Readings = Mapping[str, Mapping[str, SignalScore]]
"""Signal -> trajectory id -> its score."""
Numbers = dict[TurnId, list[float]]
"""[N] numbers per turn, of one trajectory."""
OUTCOME = "outcome"


class AnnealSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight that goes from ``start`` to ``end`` over ``steps`` steps and then stays there."""

    start: float
    end: float = 0.0
    steps: int = 50
    after: int = 0
    """Number of steps at ``start`` before annealing begins."""
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.after < 0:
            raise ConfigError(
                f"a weight is annealed over at least 1 step, not {self.steps}, and after 0 or "
                f"more: {self.after}"
            )

    def at(self, step: int) -> float:
        """AnnealSchedule(1.0, 0.0, steps=4): 1, 0.75, 0.5, 0.25, 0, 0, …"""
        done = min(1.0, max(0.0, (step - self.after) / self.steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.end + (self.start - self.end) * left


Weight = float | AnnealSchedule


def weight_at(weight: Weight, step: int) -> float:
    """The value of a constant or annealed weight at ``step``."""
    return weight.at(step) if isinstance(weight, AnnealSchedule) else weight


class HybridTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One signal's contribution to the advantages or to the loss."""

    signal: str
    """The signal's name in ``rl.signals``."""
    weight: Weight = 1.0
    norm: Norm = "none"
    """How numbers on turns are normalised: see ``group_norm.py``."""
    plus_outcome: float = 0.0
    """c: share of the outcome's reward that is added to a turn's number before ``norm``,
    R = p + c·o, for step-wise advantages that replace the outcome's (with ``w_rl=0``)."""
    clip: float | None = None
    """C: numbers are clipped to ±C. With unclipped teacher gaps, replies grew to their length
    limit."""
    route: Literal["all", "failed", "hinted"] = "all"
    """Which trajectories the term applies to."""
    early: float = 0.0
    """γ of weights that emphasise early tokens; 0: all tokens weigh the same."""
    into: Literal["advantage", "loss"] = "advantage"
    """``loss``: a teacher's scores become the loss component ``kd``."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                f"term '{self.signal}': clip={self.clip} must be positive; null for no clipping"
            )
        if self.early < 0:
            raise ConfigError(f"term '{self.signal}': early={self.early} cannot be negative")


class Hybrid(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="hybrid",
):
    """An outcome algorithm plus weighted signal terms; implements ``Algorithm``."""

    outcome: Any = DrGRPO()
    """The wrapped algorithm."""
    w_rl: Weight = 1.0
    terms: tuple[HybridTerm, ...] = ()
    observe: Weight = 0.0
    """α of cross-entropy on observations (ECHO uses 0.1): the mean over the observed tokens of
    trained turns."""
    passed: float = 0.5
    """For ``route``: minimum reward of a trajectory that did not fail."""

    def __post_init__(self) -> None:
        from ramify.train.advantages import ALGORITHMS

        if isinstance(self.outcome, str | Mapping):
            msgspec.structs.force_setattr(self, "outcome", ALGORITHMS.build(self.outcome))
        if isinstance(self.outcome, Hybrid):
            raise ConfigError(
                "a hybrid wraps another algorithm, not a hybrid: add its terms to this one"
            )
        if getattr(getattr(self.outcome, "needs", None), "streams", None) and self.w_rl != 1.0:
            raise ConfigError(
                f"w_rl={self.w_rl} cannot weigh {type(self.outcome).__name__}, whose advantages "
                "are finished after the terms were added: leave it at 1 and weigh the terms"
            )

    @property
    def has_group_baseline(self) -> bool:
        return bool(self.outcome.has_group_baseline) and not self.terms

    def check(self, signals: Mapping[str, Any]) -> None:
        """Raise ConfigError, with the nearest name, for a term whose signal does not exist."""
        for term in self.terms:
            if term.signal not in signals:
                known = nearest(term.signal, signals) if signals else "rl.signals is empty"
                raise ConfigError(f"unknown signal '{term.signal}' in a term: {known}")

    def wants(self, signal: str, step: int) -> bool:
        """Whether ``signal`` is to be read at ``step``: not if all its terms weigh 0 by then. A
        signal without a term is read for its metrics, or gives the outcome."""
        terms = [term for term in self.terms if term.signal == signal]
        return not terms or any(weight_at(term.weight, step) for term in terms)

    def with_readings(self, readings: Readings, step: int) -> HybridAlgorithm:
        """The algorithm of one step, with the scores of its signals."""
        return HybridAlgorithm(self, readings, step)

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        """Assign advantages as if no signal gave any number."""
        return self.with_readings({}, 0).assign_advantages(groups, weights, every_token=every_token)


class HybridAlgorithm:
    """A hybrid together with its signals' scores of one step; implements ``Algorithm``."""

    def __init__(self, hybrid: Hybrid, readings: Readings, step: int) -> None:
        self._hybrid = hybrid
        self._readings = readings
        self._step = step
        self._w_rl = weight_at(hybrid.w_rl, step)

    @property
    def has_group_baseline(self) -> bool:
        return self._hybrid.has_group_baseline

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        hybrid = self._hybrid
        judged = [self._with_outcomes(group) for group in groups]
        base: AssignedStep = hybrid.outcome.assign_advantages(
            judged, weights, every_token=every_token
        )
        parts = [
            part
            for term in hybrid.terms
            if (part := _Part(term, weight_at(term.weight, self._step))).weight != 0
        ]
        metrics = dict(base.metrics)
        for part in parts:
            metrics |= part.fill(
                judged, self._readings.get(part.term.signal, {}), weights, hybrid.passed
            )
        # The wrapped algorithm must not drop a group in which only a term has a signal.
        kept = [group for group in judged if self._teaches(group, weights, parts)]
        alpha = weight_at(hybrid.observe, self._step)
        assigned: AssignedStep = _keeping_zero_variance(hybrid.outcome).assign_advantages(
            kept, weights, every_token=True
        )
        rollouts = [
            self._composed(rollout, parts, alpha, every_token) for rollout in assigned.rollouts
        ]
        rollouts = [rollout for rollout in rollouts if rollout.credits]
        _even_streams(rollouts)
        denominators = dict(assigned.denominators)
        if any(credit.kd for rollout in rollouts for credit in rollout.credits.values()):
            denominators["kd"] = assigned.denominators["rl"]
        num_observed = sum(_num_observed(rollout) for rollout in rollouts)
        if num_observed:
            denominators["ce"] = float(num_observed)
            metrics["observed_tokens"] = float(num_observed)
        no_signal = "" if rollouts else base.no_signal or "no signal gave a number for any rollout"
        return msgspec.structs.replace(
            base, rollouts=rollouts, denominators=denominators, metrics=metrics, no_signal=no_signal
        )

    def _with_outcomes(self, group: Group) -> Group:
        """``group`` with the rewards that the signal ``outcome`` gives instead of the task's."""
        outcomes = self._readings.get(OUTCOME)
        if not outcomes:
            return group
        replaced = []
        for trajectory in group.trajectories:
            reading = outcomes.get(trajectory.id)
            value = reading.outcome if reading is not None else None
            rewards = {OUTCOME: value} if value is not None and math.isfinite(value) else {}
            replaced.append(msgspec.structs.replace(trajectory, rewards=rewards))
        return msgspec.structs.replace(group, trajectories=replaced)

    def _teaches(self, group: Group, weights: Mapping[str, float], parts: Sequence[_Part]) -> bool:
        if any(part.acts_on(trajectory.id) for part in parts for trajectory in group.trajectories):
            return True
        if not self._w_rl:
            return False
        assigned: AssignedStep = self._hybrid.outcome.assign_advantages([group], weights)
        return not assigned.no_signal

    def _composed(
        self, rollout: AssignedRollout, parts: Sequence[_Part], alpha: float, every_token: bool
    ) -> AssignedRollout:
        trajectory = rollout.trajectory
        reference = self._reference(trajectory.id)
        credits: Stamps = {}
        for place, credit in rollout.credits.items():
            num = len(credit.rl) or len(credit)
            advantages = [self._w_rl * value for value in credit.advantages] or [0.0] * num
            kd, streams = [0.0] * num, dict(credit.streams)
            for part in parts:
                if part.term.into == "loss":
                    streams_of_kd = part.losses.get(trajectory.id, {}).get(place)
                    if streams_of_kd is not None:
                        kd = [a + part.weight * b for a, b in zip(kd, credit.rl, strict=True)]
                        streams |= streams_of_kd
                    continue
                values = part.numbers.get(trajectory.id, {}).get(place)
                if values is not None:
                    _check_length(trajectory, place, part.term.signal, len(values), num)
                    advantages = [
                        a + part.weight * b for a, b in zip(advantages, values, strict=True)
                    ]
            observed = alpha if alpha and place[1] and credit.rl else 0.0
            if (logprobs := reference.get(place)) is not None and credit.rl:
                _check_length(trajectory, place, "reference", len(logprobs), num)
                streams["ref_logprobs"] = logprobs
            # An algorithm that still finishes its rows may yet give this turn an advantage.
            is_unfinished = bool(credit.streams)
            if any(advantages) or any(kd) or observed or credit.ce or every_token or is_unfinished:
                credits[place] = msgspec.structs.replace(
                    credit,
                    advantages=advantages if credit.rl else credit.advantages,
                    kd=kd if any(kd) else [],
                    streams=streams,
                    given=observed,
                )
        return AssignedRollout(trajectory, credits)

    def _reference(self, id: str) -> dict[TurnId, list[float]]:
        """Reference log-probabilities that a signal computed anyway: of all turns of a call, or of
        none."""
        candidates = [
            readings[id].reference for readings in self._readings.values() if id in readings
        ]
        return next((reference for reference in candidates if reference), {})


class _RoutedScore(NamedTuple):
    """One trajectory's score and reward."""

    trajectory: Trajectory
    reading: SignalScore
    reward: float


class _Part:
    """One term at one step: its numbers by trajectory and turn."""

    def __init__(self, term: HybridTerm, weight: float) -> None:
        self.term = term
        self.weight = weight
        self.numbers: dict[str, Numbers] = {}
        self.losses: dict[str, dict[TurnId, dict[str, Any]]] = {}
        """Trajectory id -> turn -> the streams of ``kd``."""

    def acts_on(self, id: str) -> bool:
        """Whether the term gives trajectory ``id`` a non-zero number or a loss."""
        numbers = self.numbers.get(id, {})
        return bool(self.losses.get(id)) or any(
            value != 0 for values in numbers.values() for value in values
        )

    def fill(
        self,
        groups: Sequence[Group],
        readings: Mapping[str, SignalScore],
        weights: Mapping[str, float],
        passed: float,
    ) -> dict[str, float]:
        """Compute the numbers for all groups; returns the term's metrics."""
        name = self.term.signal
        num, num_bad, num_hinted, num_nonzero = 0, 0, 0, 0
        pairs: list[tuple[float, float]] = []
        for group in groups:
            scored: list[_RoutedScore] = []
            for trajectory in group.trajectories:
                reading = readings.get(trajectory.id)
                num += 1
                if reading is None or not is_scored(trajectory):
                    continue
                num_hinted += bool(reading.notes)
                if bad := _not_finite(reading):
                    trajectory.errors.append(
                        f"signal '{name}' gave {bad}: the rollout is used without it"
                    )
                    num_bad += 1
                    continue
                reward = total(trajectory.rewards, weights)
                if reading.turns:
                    pairs.append((statistics.fmean(reading.turns.values()), reward))
                scored.append(_RoutedScore(trajectory, reading, reward))
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

    def _add_group(self, scored: Sequence[_RoutedScore], passed: float) -> None:
        term = self.term
        turns = _normalised(term, scored)
        for (trajectory, reading, reward), numbers in zip(scored, turns, strict=True):
            if term.route == "failed" and reward >= passed:
                continue
            if term.route == "hinted" and not reading.notes:
                continue
            if term.into == "loss":
                if streams := dict(_streams(trajectory, reading)):
                    self.losses[trajectory.id] = streams
                continue
            by_turn = _on_tokens(trajectory, numbers)
            for place, values in reading.tokens.items():
                _check_length(
                    trajectory, place, term.signal, len(values), _num_sampled(trajectory, place)
                )
                before = by_turn.get(place, [0.0] * len(values))
                by_turn[place] = [a + b for a, b in zip(before, values, strict=True)]
            if by_turn:
                self.numbers[trajectory.id] = self._shaped(by_turn)

    def _shaped(self, by_turn: Numbers) -> Numbers:
        bound, gamma = self.term.clip, self.term.early
        if bound is not None:
            by_turn = {
                place: [min(bound, max(-bound, value)) for value in row]
                for place, row in by_turn.items()
            }
        if gamma:
            places = sorted(by_turn)
            flat = iter(early_first([value for place in places for value in by_turn[place]], gamma))
            by_turn = {place: [next(flat) for _ in by_turn[place]] for place in places}
        return by_turn

    def _check_effect(self, readings: Mapping[str, SignalScore], values: Sequence[float]) -> None:
        """Raise TrainError if a teacher scored hinted tokens and changed none: a weight or a mask
        must be wrong."""
        if self.term.into == "loss" or not values or any(values):
            return
        if any(reading.tokens and reading.notes for reading in readings.values()):
            raise TrainError(
                f"signal '{self.term.signal}' scored {len(values)} hinted tokens and its term is 0 "
                "on all of them: the hint does not reach the teacher, or evidence, clip or route "
                "removes everything"
            )


def _normalised(term: HybridTerm, scored: Sequence[_RoutedScore]) -> list[dict[TurnId, float]]:
    """Numbers on turns, with the outcome added, normalised within the group. Turn i of a call is
    compared with turn i of the same call of other trajectories."""
    rows = [
        {place: value + term.plus_outcome * reward for place, value in reading.turns.items()}
        for _, reading, reward in scored
    ]
    return normalised(rows, term.norm)


def _on_tokens(trajectory: Trajectory, numbers: Mapping[TurnId, float]) -> Numbers:
    """Each turn's number, repeated for each of its sampled tokens."""
    by_turn: Numbers = {}
    for call in trajectory.calls:
        for index, _, num in sampled(call):
            if (call.id, index) in numbers:
                by_turn[call.id, index] = [numbers[call.id, index]] * num
    return by_turn


def _streams(
    trajectory: Trajectory, reading: SignalScore
) -> Iterator[tuple[TurnId, dict[str, Any]]]:
    """The streams of ``kd`` for each scored turn: candidate tokens if there are any, else the
    sampled tokens."""
    for place, logprobs in reading.logprobs.items():
        num = _num_sampled(trajectory, place)
        top = reading.top.get(place)
        _check_length(
            trajectory, place, "teacher", len(top.ids if top is not None else logprobs), num
        )
        if top is None:
            yield place, {"teacher_logprobs": logprobs}
            continue
        streams: dict[str, Any] = {"teacher_ids": top.ids, "teacher_logprobs": top.teacher}
        if top.student:
            streams["student_logprobs"] = top.student
        yield place, streams


def _even_streams(rollouts: Sequence[AssignedRollout]) -> None:
    """Give every ``TokenCredit`` every stream, filled with zeros if it has none, because all
    sequences of a step must have the same streams."""
    widths: dict[str, int | None] = {}
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, rows in credit.streams.items():
                widths[name] = len(rows[0]) if rows and isinstance(rows[0], list) else None
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, width in widths.items():
                # The trainer computes ``ref_logprobs`` itself if they are missing.
                if name not in credit.streams and name != "ref_logprobs":
                    num = len(credit)
                    credit.streams[name] = (
                        [0.0] * num if width is None else [[0.0] * width for _ in range(num)]
                    )


def _keeping_zero_variance(algorithm: Algorithm) -> Algorithm:
    """``algorithm`` without its own zero-variance filter, which has been applied already."""
    if (
        isinstance(algorithm, msgspec.Struct)
        and "drop_zero_variance" in algorithm.__struct_fields__
    ):
        return msgspec.structs.replace(algorithm, drop_zero_variance=False)
    return algorithm


def _num_observed(rollout: AssignedRollout) -> int:
    turns = {
        (call.id, index): turn
        for call in rollout.trajectory.calls
        for index, turn in enumerate(call.turns)
    }
    return sum(
        len(turns[place].reply.prompt_ids or ())
        for place, credit in rollout.credits.items()
        if credit.given
    )


def _num_sampled(trajectory: Trajectory, place: TurnId) -> int:
    return len(trajectory.call(place[0]).turns[place[1]].reply.token_ids or ())


def _check_length(
    trajectory: Trajectory, place: TurnId, signal: str, num: int, wanted: int
) -> None:
    if num != wanted:
        raise TrainError(
            f"signal '{signal}', trajectory {trajectory.id}, call {place[0]}, turn {place[1]}: "
            f"{num} numbers for {wanted} sampled tokens; a signal gives one for each"
        )


def _not_finite(reading: SignalScore) -> str:
    """The first non-finite number of ``reading``, and which turn it belongs to; empty if none."""
    for place, value in reading.turns.items():
        if not math.isfinite(value):
            return f"{value} for call {place[0]}, turn {place[1]}"
    for columns in (reading.tokens, reading.logprobs):
        for place, values in columns.items():
            if bad := [value for value in values if not math.isfinite(value)]:
                return f"{bad[0]} for a token of call {place[0]}, turn {place[1]}"
    return ""


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Correlation between a trajectory's mean number and its reward; None if either is constant."""
    if len(pairs) < 2 or any(len({pair[index] for pair in pairs}) < 2 for index in range(2)):
        return None
    return statistics.correlation(*zip(*pairs, strict=True))


def abstentions(readings: Mapping[str, SignalScore]) -> dict[str, float]:
    """Reason -> how many trajectories the signal abstained on for it, and sums of what the signal
    counted."""
    totals: Counter[str] = Counter()
    for reading in readings.values():
        if reading.abstained:
            totals[f"abstained/{reading.abstained.replace(' ', '_')}"] += 1
        totals.update({name: value for name, value in reading.counts.items() if value})
    return {name: float(value) for name, value in totals.items()}
