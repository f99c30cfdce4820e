"""Combine the scores of training signals with the outcome reward.

Each token's advantage becomes the outcome's advantage plus weighted terms that are computed from
the signals.

    A = w_rl · A_outcome + Σ_i w_i(step) · term_i
        term = clip(norm(score)), on the trajectories of its route

``Hybrid`` is an algorithm that wraps another. The wrapped algorithm gives each call its outcome
advantage and each token its weight. The terms are added to these advantages before zero-variance
groups are dropped. With ``into="loss"`` a term becomes the loss component ``kd`` instead, with the
same token weights. The signals have already run by then (``signal_runner.py``), so this module
never calls a model and never waits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.train.advantages.base import (
    Algorithm,
    OptimizerStepAdvantages,
    RolloutAdvantages,
    Stamps,
    fill_missing_streams,
)
from ramify.train.advantages.by_task import PerTaskAlgorithm
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.signals.base import SignalScore, TurnId
from ramify.train.signals.signal_term import (
    OUTCOME,
    HybridAdvantageTermValues,
    HybridTerm,
    Readings,
    Weight,
    check_length,
    weight_at,
)
from ramify.types.trajectory import Group


class Hybrid(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="hybrid",
):
    """An algorithm that adds weighted signal terms to the advantages of an outcome algorithm.

    Implements ``Algorithm``.
    """

    outcome: Any = DrGRPO()
    """The wrapped algorithm."""
    w_rl: Weight = 1.0
    terms: tuple[HybridTerm, ...] = ()
    observe: Weight = 0.0
    """Weight of a cross-entropy loss on observed tokens, such as tool output (ECHO uses 0.1). It
    is averaged over the observed tokens of trained turns.
    """
    passed: float = 0.5
    """For ``HybridTerm.route``: minimum reward at which a trajectory counts as passed."""

    def __post_init__(self) -> None:
        from ramify.train.advantages import ALGORITHMS

        if isinstance(self.outcome, str | Mapping):
            msgspec.structs.force_setattr(self, "outcome", ALGORITHMS.build(self.outcome))
        if isinstance(self.outcome, Hybrid):
            raise ConfigError(
                "a hybrid wraps another algorithm, not a hybrid: add its terms to this one"
            )
        if isinstance(self.outcome, PerTaskAlgorithm):
            raise ConfigError(
                "a hybrid adds its terms to one algorithm, and by_task has several: choose one of "
                "the two"
            )
        if getattr(getattr(self.outcome, "needs", None), "streams", None) and self.w_rl != 1.0:
            raise ConfigError(
                f"w_rl={self.w_rl} cannot weigh {type(self.outcome).__name__}, which computes its "
                "advantages only after the terms are added: leave it at 1 and weigh the terms"
            )

    @property
    def has_group_baseline(self) -> bool:
        return bool(self.outcome.has_group_baseline) and not self.terms

    def check(self, signals: Mapping[str, Any]) -> None:
        """Raise ConfigError if a term refers to a signal that does not exist.

        The error suggests the nearest name.
        """
        for term in self.terms:
            if term.signal not in signals:
                known = did_you_mean(term.signal, signals) if signals else "rl.signals is empty"
                raise ConfigError(f"unknown signal '{term.signal}' in a term: {known}")

    def needs_signal(self, signal: str, step: int) -> bool:
        """Return True if a signal must be computed at the given step.

        It can be skipped if it has terms and all of them have weight 0. A signal without a term is
        always computed, since it supplies metrics or the outcome.
        """
        terms = [term for term in self.terms if term.signal == signal]
        return not terms or any(weight_at(term.weight, step) for term in terms)

    def with_readings(self, readings: Readings, step: int) -> BoundHybridAlgorithm:
        """Bind this hybrid algorithm to the scores of its signals in one training step, and return
        the result.

        It combines the outcome with the scores (``readings``) that the signals gave in that step.
        """
        return BoundHybridAlgorithm(self, readings, step)

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        """Assign advantages from the outcome alone, without any signal's scores."""
        return self.with_readings({}, 0).assign_advantages(groups, weights, every_token=every_token)


class BoundHybridAlgorithm:
    """A hybrid algorithm together with the scores that its signals gave in one training step.

    Implements ``Algorithm``.
    """

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
    ) -> OptimizerStepAdvantages:
        hybrid = self._hybrid
        judged = [self._with_outcomes(group) for group in groups]
        # Metrics and the reason for no signal come from the wrapped algorithm alone.
        base: OptimizerStepAdvantages = hybrid.outcome.assign_advantages(
            judged, weights, every_token=every_token
        )
        parts = [
            part
            for term in hybrid.terms
            if (part := HybridAdvantageTermValues(term, weight_at(term.weight, self._step))).weight
            != 0
        ]
        metrics = dict(base.metrics)
        for part in parts:
            metrics |= part.compute(
                judged, self._readings.get(part.term.signal, {}), weights, hybrid.passed
            )
        # The wrapped algorithm must not drop a group in which only a term has a signal.
        kept = [group for group in judged if self._has_group_signal(group, weights, parts)]
        alpha = weight_at(hybrid.observe, self._step)
        assigned: OptimizerStepAdvantages = _keeping_zero_variance(
            hybrid.outcome
        ).assign_advantages(kept, weights, every_token=True)
        rollouts = [
            self._compose_rollout(rollout, parts, alpha, every_token)
            for rollout in assigned.rollouts
        ]
        rollouts = [rollout for rollout in rollouts if rollout.credits]
        fill_missing_streams(rollouts)
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
        """Return a copy of ``group`` whose rewards come from the ``outcome`` signal, not from the
        task.

        A rollout to which that signal gave no outcome gets no reward. If the signal did not run,
        the group is returned unchanged.
        """
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

    def _has_group_signal(
        self, group: Group, weights: Mapping[str, float], parts: Sequence[HybridAdvantageTermValues]
    ) -> bool:
        if any(
            part.has_effect_on_trajectory(trajectory.id)
            for part in parts
            for trajectory in group.trajectories
        ):
            return True
        if not self._w_rl:
            return False
        assigned: OptimizerStepAdvantages = self._hybrid.outcome.assign_advantages([group], weights)
        return not assigned.no_signal

    def _compose_rollout(
        self,
        rollout: RolloutAdvantages,
        parts: Sequence[HybridAdvantageTermValues],
        alpha: float,
        every_token: bool,
    ) -> RolloutAdvantages:
        trajectory = rollout.trajectory
        reference = self._reference_logprobs(trajectory.id)
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
                    check_length(trajectory, place, part.term.signal, len(values), num)
                    advantages = [
                        a + part.weight * b for a, b in zip(advantages, values, strict=True)
                    ]
            observed = alpha if alpha and place[1] and credit.rl else 0.0
            if (logprobs := reference.get(place)) is not None and credit.rl:
                check_length(trajectory, place, "reference", len(logprobs), num)
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
        return RolloutAdvantages(trajectory, credits)

    def _reference_logprobs(self, id: str) -> dict[TurnId, list[float]]:
        """Return the log-probabilities of a trajectory's tokens under the reference policy, by
        turn.

        They cover all turns of a call or none. Returns an empty dict if no signal has computed any.
        """
        candidates = [
            readings[id].reference for readings in self._readings.values() if id in readings
        ]
        return next((reference for reference in candidates if reference), {})


def _keeping_zero_variance(algorithm: Algorithm) -> Algorithm:
    """Return a copy of ``algorithm`` that keeps groups in which all rollouts have equal rewards.

    They were already filtered out here.
    """
    if (
        isinstance(algorithm, msgspec.Struct)
        and "drop_zero_variance" in algorithm.__struct_fields__
    ):
        return msgspec.structs.replace(algorithm, drop_zero_variance=False)
    return algorithm


def _num_observed(rollout: RolloutAdvantages) -> int:
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


def signal_metrics(readings: Mapping[str, SignalScore]) -> dict[str, float]:
    """Return metrics of one signal: how often it abstained for each reason, and the sums of its
    ``counts``.

    ``readings`` holds its scores by trajectory.
    """
    totals: Counter[str] = Counter()
    for reading in readings.values():
        if reading.abstained:
            totals[f"abstained/{reading.abstained.replace(' ', '_')}"] += 1
        totals.update({name: value for name, value in reading.counts.items() if value})
    return {name: float(value) for name, value in totals.items()}
