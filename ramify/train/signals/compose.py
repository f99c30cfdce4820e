"""The composer: what rollouts were worth and what signals say, weighed into one advantage per
token.

    A = w_rl · A_outcome + Σ_i w_i(step) · term_i          term = clip(norm(reading)), on the trajectories of its route

    Hybrid(outcome=DrGRPO(), terms=(
        Term(signal="process", weight=0.3, norm="step_index"),
        Term(signal="teacher", weight=Anneal(1.0, 0.0, steps=50), clip=2.0, route="hinted"),
    ))

It is an algorithm that wraps one. The wrapped one says what each call's outcome is worth and what
each token weighs; terms are added to its advantages before silent groups are dropped. A term can go
into the loss instead (``into="loss"``): the component ``kd``, with the same weights. Signals have
read before (``signal_reader.py``); here is no model and no waiting.

A term's number is 0 wherever its signal says nothing, and on no given token. Defaults are those
that held up: see ``docs/signals.md`` for what the others do.
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
from ramify.train.algorithms.base import Algorithm, AssignedStep
from ramify.train.algorithms.dr_grpo import DrGRPO
from ramify.train.signals.base import Place, SignalScore
from ramify.train.signals.group_norm import Norm, early_first, normalised
from ramify.train.signals.rollout_trees import is_scored, sampled
from ramify.train.token_credit import AssignedRollout, Stamps
from ramify.types.trajectory import Group, Trajectory

Readings = Mapping[str, Mapping[str, SignalScore]]
"""Signal -> trajectory id -> what it found."""
Numbers = dict[Place, list[float]]
"""[N] per place, of one trajectory."""
OUTCOME = "outcome"


class AnnealSchedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A weight that goes from ``start`` to ``end`` in ``steps`` steps, and stays there."""

    start: float
    end: float = 0.0
    steps: int = 50
    after: int = 0
    """Steps at ``start`` before it begins."""
    shape: Literal["linear", "cosine"] = "linear"

    def __post_init__(self) -> None:
        if self.steps < 1 or self.after < 0:
            raise ConfigError(
                f"a weight is annealed over at least 1 step, not {self.steps}, after 0 or more: "
                f"{self.after}"
            )

    def at(self, step: int) -> float:
        """Anneal(1.0, 0.0, steps=4): 1, 0.75, 0.5, 0.25, 0, 0, …"""
        done = min(1.0, max(0.0, (step - self.after) / self.steps))
        left = 1 - done if self.shape == "linear" else (1 + math.cos(math.pi * done)) / 2
        return self.end + (self.start - self.end) * left


Weight = float | AnnealSchedule


def weight_at(weight: Weight, step: int) -> float:
    return weight.at(step) if isinstance(weight, AnnealSchedule) else weight


class HybridTerm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One signal's part."""

    signal: str
    """Its name in ``rl.signals``."""
    weight: Weight = 1.0
    norm: Norm = "none"
    """Of numbers on turns: see ``group_norm.py``."""
    plus_outcome: float = 0.0
    """Of the outcome's reward that is added to a turn's number before ``norm``: R = p + c·o, for
    step-wise advantages in place of the outcome's (with ``w_rl=0``)."""
    clip: float | None = None
    """C: numbers beyond ±C count as ±C. Unclipped gaps of a teacher made replies run into their
    limit."""
    route: Literal["all", "failed", "hinted"] = "all"
    """Which trajectories it acts on."""
    early: float = 0.0
    """γ of the weights that trust early tokens more; 0: all alike."""
    into: Literal["advantage", "loss"] = "advantage"
    """``loss``: a teacher's reading becomes the component ``kd``."""

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip > 0:
            raise ConfigError(
                f"term '{self.signal}': clip={self.clip} must be positive; null for none"
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
    """Implements ``Algorithm``."""

    outcome: Any = DrGRPO()
    """The algorithm that it wraps."""
    w_rl: Weight = 1.0
    terms: tuple[HybridTerm, ...] = ()
    observe: Weight = 0.0
    """α of cross-entropy on what was observed (ECHO, .1): the mean over the observed tokens of
    trained turns."""
    passed: float = 0.5
    """Least reward of a trajectory that did not fail, for ``route``."""

    def __post_init__(self) -> None:
        from ramify.train.algorithms import ALGORITHMS
        from ramify.train.signals.signal_registry import made

        if isinstance(self.outcome, str | Mapping):
            msgspec.structs.force_setattr(
                self, "outcome", made(self.outcome, ALGORITHMS, "algorithm")
            )
        if isinstance(self.outcome, Hybrid):
            raise ConfigError(
                "a hybrid wraps another algorithm, not a hybrid: add its terms to the one"
            )
        if getattr(getattr(self.outcome, "needs", None), "streams", None) and self.w_rl != 1.0:
            raise ConfigError(
                f"w_rl={self.w_rl} cannot weigh {type(self.outcome).__name__}, whose advantages "
                "are finished after the terms "
                "were added: leave it at 1 and weigh the terms"
            )

    @property
    def has_group_baseline(self) -> bool:
        return bool(self.outcome.has_group_baseline) and not self.terms

    def check(self, signals: Mapping[str, Any]) -> None:
        """Raises ConfigError for a term whose signal there is not, with the nearest."""
        for term in self.terms:
            if term.signal not in signals:
                known = nearest(term.signal, signals) if signals else "rl.signals is empty"
                raise ConfigError(f"unknown signal '{term.signal}' in a term: {known}")

    def wants(self, signal: str, step: int) -> bool:
        """Whether ``signal`` is to be read at ``step``: not where all its terms weigh 0 by then.
        One without a term is read for its metrics, or gives the outcome."""
        mine = [term for term in self.terms if term.signal == signal]
        return not mine or any(weight_at(term.weight, step) for term in mine)

    def given(self, readings: Readings, step: int) -> HybridAlgorithm:
        """The algorithm for one step, whose signals have read."""
        return HybridAlgorithm(self, readings, step)

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> AssignedStep:
        """As if no signal said anything."""
        return self.given({}, 0).assign_advantages(groups, weights, every_token=every_token)


class HybridAlgorithm:
    """Implements ``Algorithm``: a hybrid and what its signals found."""

    def __init__(self, hybrid: Hybrid, readings: Readings, step: int) -> None:
        self._hybrid, self._readings, self._step = hybrid, readings, step
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
        kept = [group for group in judged if self._teaches(group, weights, parts)]
        alpha = weight_at(hybrid.observe, self._step)
        whole: AssignedStep = _keeping_silent(hybrid.outcome).assign_advantages(
            kept, weights, every_token=True
        )
        rollouts = [
            self._composed(rollout, parts, alpha, every_token) for rollout in whole.rollouts
        ]
        rollouts = [rollout for rollout in rollouts if rollout.credits]
        _even_streams(rollouts)
        denominators = dict(whole.denominators)
        if any(credit.kd for rollout in rollouts for credit in rollout.credits.values()):
            denominators["kd"] = whole.denominators["rl"]
        num_observed = sum(_num_observed(rollout) for rollout in rollouts)
        if num_observed:
            denominators["ce"] = float(num_observed)
            metrics["observed_tokens"] = float(num_observed)
        no_signal = "" if rollouts else base.no_signal or "no signal said anything of any rollout"
        return msgspec.structs.replace(
            base, rollouts=rollouts, denominators=denominators, metrics=metrics, no_signal=no_signal
        )

    def _with_outcomes(self, group: Group) -> Group:
        """``group`` with the rewards that a signal gives instead of the task's."""
        found = self._readings.get(OUTCOME)
        if not found:
            return group
        replaced = []
        for each in group.trajectories:
            reading = found.get(each.id)
            value = reading.outcome if reading is not None else None
            rewards = {OUTCOME: value} if value is not None and math.isfinite(value) else {}
            replaced.append(msgspec.structs.replace(each, rewards=rewards))
        return msgspec.structs.replace(group, trajectories=replaced)

    def _teaches(self, group: Group, weights: Mapping[str, float], parts: Sequence[_Part]) -> bool:
        if any(part.says(each.id) for part in parts for each in group.trajectories):
            return True
        if not self._w_rl:
            return False
        alone: AssignedStep = self._hybrid.outcome.assign_advantages([group], weights)
        return not alone.no_signal

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
                    said = part.losses.get(trajectory.id, {}).get(place)
                    if said is not None:
                        kd = [a + part.weight * b for a, b in zip(kd, credit.rl, strict=True)]
                        streams |= said
                    continue
                values = part.numbers.get(trajectory.id, {}).get(place)
                if values is not None:
                    _check_length(trajectory, place, part.term.signal, len(values), num)
                    advantages = [
                        a + part.weight * b for a, b in zip(advantages, values, strict=True)
                    ]
            given = alpha if alpha and place[1] and credit.rl else 0.0
            if (known := reference.get(place)) is not None and credit.rl:
                _check_length(trajectory, place, "reference", len(known), num)
                streams["ref_logprobs"] = known
            is_unfinished = bool(
                credit.streams
            )  # an algorithm that goes on with its rows may yet give it an advantage
            if any(advantages) or any(kd) or given or credit.ce or every_token or is_unfinished:
                credits[place] = msgspec.structs.replace(
                    credit,
                    advantages=advantages if credit.rl else credit.advantages,
                    kd=kd if any(kd) else [],
                    streams=streams,
                    given=given,
                )
        return AssignedRollout(trajectory, credits)

    def _reference(self, id: str) -> dict[Place, list[float]]:
        """What signals computed on the way: of all turns of a call, or of none."""
        found = [readings[id].reference for readings in self._readings.values() if id in readings]
        return next((each for each in found if each), {})


class _RoutedScore(NamedTuple):
    """One trajectory's reading, on its route."""

    trajectory: Trajectory
    reading: SignalScore
    reward: float


class _Part:
    """One term at one step: its numbers by trajectory and place."""

    def __init__(self, term: HybridTerm, weight: float) -> None:
        self.term, self.weight = term, weight
        self.numbers: dict[str, Numbers] = {}
        self.losses: dict[str, dict[Place, dict[str, Any]]] = {}
        """Trajectory id -> place -> the streams of ``kd``."""

    def says(self, id: str) -> bool:
        found = self.numbers.get(id, {})
        return bool(self.losses.get(id)) or any(
            value != 0 for values in found.values() for value in values
        )

    def fill(
        self,
        groups: Sequence[Group],
        readings: Mapping[str, SignalScore],
        weights: Mapping[str, float],
        passed: float,
    ) -> dict[str, float]:
        """Work out the numbers of all groups; the term's metrics."""
        name = self.term.signal
        num, num_bad, num_hinted, gaps = 0, 0, 0, 0
        pairs: list[tuple[float, float]] = []
        for group in groups:
            said: list[_RoutedScore] = []
            for each in group.trajectories:
                reading = readings.get(each.id)
                num += 1
                if reading is None or not is_scored(each):
                    continue
                num_hinted += bool(reading.notes)
                if bad := _not_finite(reading):
                    each.errors.append(
                        f"signal '{name}' gave {bad}: the rollout goes on without it"
                    )
                    num_bad += 1
                    continue
                reward = total(each.rewards, weights)
                if reading.turns:
                    pairs.append((statistics.fmean(reading.turns.values()), reward))
                said.append(_RoutedScore(each, reading, reward))
            self._of_group(said, passed)
        values = [
            value for found in self.numbers.values() for row in found.values() for value in row
        ]
        gaps = sum(1 for value in values if value)
        self._check_loud(readings, values)
        found = {
            f"{name}/weight": self.weight,
            f"{name}/acts_on": (len(self.numbers) + len(self.losses)) / num if num else 0.0,
            f"{name}/hint_rate": num_hinted / num if num else 0.0,
            f"{name}/not_finite": float(num_bad),
        }
        if values:
            found[f"{name}/mean_abs"] = statistics.fmean(abs(value) for value in values)
            found[f"{name}/mean"] = statistics.fmean(values)
        if gaps and self.term.clip:
            found[f"{name}/clipped"] = sum(abs(value) >= self.term.clip for value in values) / gaps
        if (correlation := _correlation(pairs)) is not None:
            found[f"{name}/outcome_correlation"] = correlation
        return found

    def _of_group(self, said: Sequence[_RoutedScore], passed: float) -> None:
        term = self.term
        turns = _normalised(term, said)
        for (trajectory, reading, reward), numbers in zip(said, turns, strict=True):
            if term.route == "failed" and reward >= passed:
                continue
            if term.route == "hinted" and not reading.notes:
                continue
            if term.into == "loss":
                if streams := dict(_streams(trajectory, reading)):
                    self.losses[trajectory.id] = streams
                continue
            found = _spread(trajectory, numbers)
            for place, values in reading.tokens.items():
                _check_length(
                    trajectory, place, term.signal, len(values), _num_sampled(trajectory, place)
                )
                before = found.get(place, [0.0] * len(values))
                found[place] = [a + b for a, b in zip(before, values, strict=True)]
            if found:
                self.numbers[trajectory.id] = self._shaped(found)

    def _shaped(self, found: Numbers) -> Numbers:
        most, gamma = self.term.clip, self.term.early
        if most is not None:
            found = {
                place: [min(most, max(-most, value)) for value in row]
                for place, row in found.items()
            }
        if gamma:
            places = sorted(found)
            flat = iter(early_first([value for place in places for value in found[place]], gamma))
            found = {place: [next(flat) for _ in found[place]] for place in places}
        return found

    def _check_loud(self, readings: Mapping[str, SignalScore], values: Sequence[float]) -> None:
        """A teacher that scored tokens and moved none is off without a word: a weight or a mask is
        wrong somewhere."""
        if self.term.into == "loss" or not values or any(values):
            return
        if any(reading.tokens and reading.notes for reading in readings.values()):
            raise TrainError(
                f"signal '{self.term.signal}' scored {len(values)} hinted tokens and its term is 0 "
                "on all of them: the hint "
                "does not reach the teacher, or evidence, clip or route leave nothing of it"
            )


def _normalised(term: HybridTerm, said: Sequence[_RoutedScore]) -> list[dict[Place, float]]:
    """Numbers on turns, with the outcome added, compared within the group; step i of a call is
    compared with step i of the same call of others."""
    rows = [
        {place: value + term.plus_outcome * reward for place, value in reading.turns.items()}
        for _, reading, reward in said
    ]
    return normalised(rows, term.norm)


def _spread(trajectory: Trajectory, numbers: Mapping[Place, float]) -> Numbers:
    """Each turn's number on its sampled tokens."""
    found: Numbers = {}
    for call in trajectory.calls:
        for index, _, num in sampled(call):
            if (call.id, index) in numbers:
                found[call.id, index] = [numbers[call.id, index]] * num
    return found


def _streams(
    trajectory: Trajectory, reading: SignalScore
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """What ``kd`` needs at each place that was scored: candidates where there are some, else the
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
    """Give every stamp every stream, zeros where it has none of its own: all sequences of a step
    have the same."""
    widths: dict[str, int | None] = {}
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, rows in credit.streams.items():
                widths[name] = len(rows[0]) if rows and isinstance(rows[0], list) else None
    for rollout in rollouts:
        for credit in rollout.credits.values():
            for name, width in widths.items():
                if (
                    name not in credit.streams and name != "ref_logprobs"
                ):  # which the trainer computes where it is missing
                    num = len(credit)
                    credit.streams[name] = (
                        [0.0] * num if width is None else [[0.0] * width for _ in range(num)]
                    )


def _keeping_silent(algorithm: Algorithm) -> Algorithm:
    """``algorithm`` without its own dropping of silent groups, which have been dropped by then."""
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


def _num_sampled(trajectory: Trajectory, place: Place) -> int:
    return len(trajectory.call(place[0]).turns[place[1]].reply.token_ids or ())


def _check_length(trajectory: Trajectory, place: Place, signal: str, num: int, wanted: int) -> None:
    if num != wanted:
        raise TrainError(
            f"signal '{signal}', trajectory {trajectory.id}, call {place[0]}, turn {place[1]}: "
            f"{num} numbers for {wanted} "
            "sampled tokens; a signal gives one for each"
        )


def _not_finite(reading: SignalScore) -> str:
    """The first number of ``reading`` that is none, and where it stands."""
    for place, value in reading.turns.items():
        if not math.isfinite(value):
            return f"{value} for call {place[0]}, turn {place[1]}"
    for columns in (reading.tokens, reading.logprobs):
        for place, values in columns.items():
            if bad := [value for value in values if not math.isfinite(value)]:
                return f"{bad[0]} for a token of call {place[0]}, turn {place[1]}"
    return ""


def _correlation(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Between a trajectory's mean number and its reward; None where either is always the same."""
    if len(pairs) < 2 or any(len({pair[index] for pair in pairs}) < 2 for index in range(2)):
        return None
    return statistics.correlation(*zip(*pairs, strict=True))


def abstentions(readings: Mapping[str, SignalScore]) -> dict[str, float]:
    """Reason -> how many trajectories were passed over for it, and sums of what the signal
    counted."""
    found: Counter[str] = Counter()
    for reading in readings.values():
        if reading.abstained:
            found[f"abstained/{reading.abstained.replace(' ', '_')}"] += 1
        found.update({name: value for name, value in reading.counts.items() if value})
    return {name: float(value) for name, value in found.items()}
