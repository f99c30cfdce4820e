"""Use a different algorithm for each task of a mixture (``tasks/mixture.py``).

    groups of a step ── by part ──> sums:   GRPO(reduction="token")   ┐  each as if it were alone
                                    papers: DrGRPO(credit="per_role") ┘  in the step
    loss of the step = Σ share(part) · loss(part)

Each part of the mixture is weighted by its share of the groups with a signal. If two groups of the
part ``sums`` and one of ``papers`` have a signal, the shares are 2/3 and 1/3. So every item counts
the same, whatever its task's algorithm divides by. If all parts use the same algorithm, the result
is the same as without ``by_task``. Statistics over a step (``normalise``, running means) are kept
separately for each task.

``TaskMixturePart`` says how often a task is sampled and by which factor its rewards are multiplied.
The policy loss is the same for the whole run (``rl.loss``).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.tasks.mixture import item_part_name
from ramify.train.advantages import ALGORITHMS
from ramify.train.advantages.base import (
    Algorithm,
    AlgorithmNeeds,
    OptimizerStepAdvantages,
    RolloutAdvantages,
    Stamps,
    TokenCredit,
    fill_missing_streams,
    finish_advantages,
    needs_of,
    with_saved_state,
)
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Group

_SUMS = ("groups_with_signal", "failed_rollouts")
"""Metrics that are counts, and therefore summed over tasks. All other metrics are averaged."""


class PerTaskAlgorithm(
    msgspec.Struct,
    frozen=True,
    forbid_unknown_fields=True,
    kw_only=True,
    tag_field="name",
    tag="by_task",
):
    """An RL algorithm that uses a different algorithm for each task of a mixture.

    Example:
        train.RlSpec(algorithm=train.PerTaskAlgorithm(tasks={"sums": train.GRPO(), "papers":
        train.RLOO()}))
    """

    tasks: dict[str, Any] = {}
    """Name of a part of the mixture -> its algorithm, by name or with options, as in
    ``rl.algorithm``."""
    other: Any = DrGRPO()
    """The algorithm for all parts that are not listed in ``tasks``."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """State of all algorithms under keys such as ``sums/rollout_tokens``."""

    def __post_init__(self) -> None:
        built = {name: ALGORITHMS.build(value) for name, value in self.tasks.items()}
        msgspec.structs.force_setattr(self, "tasks", built)
        msgspec.structs.force_setattr(self, "other", ALGORITHMS.build(self.other))
        for name, each in {**built, "other": self.other}.items():
            if not hasattr(each, "assign_advantages"):
                raise ConfigError(
                    f"by_task: {name} is {each!r:.40}, not an algorithm: give a name as in "
                    "rl.algorithm=grpo, or a mapping with name and options"
                )
            if isinstance(each, PerTaskAlgorithm) or hasattr(each, "outcome"):
                raise ConfigError(
                    f"by_task: {name} is {type(each).__name__}, which wraps other algorithms: give "
                    "each task an algorithm that wraps none"
                )

    def check(self, parts: Collection[str], trained: Collection[str]) -> None:
        """Raise ConfigError if the algorithms do not match the parts of the task mixture, or cannot
        share an optimizer step.

        ``parts`` has the names of all parts, and ``trained`` the names of those that are trained
        on.
        """
        for name in self.tasks:
            if name not in parts:
                raise ConfigError(
                    f"by_task: the mixture has no part '{name}': {did_you_mean(name, parts)}"
                )
            if name not in trained:
                raise ConfigError(
                    f"by_task: part '{name}' has weight 0, so no algorithm ever learns from it: "
                    "give it a weight in the mixture, or leave it out here"
                )
        with_critic = [name for name in trained if needs_of(self.of(name)).values]
        without = [name for name in trained if name not in with_critic]
        if with_critic and without:
            raise ConfigError(
                f"by_task: the algorithm of '{with_critic[0]}' has a critic and that of "
                f"'{without[0]}' has none, but they share each step of one model: give all tasks "
                "an algorithm with a critic (ppo), or none"
            )

        branching = [name for name in trained if needs_of(self.of(name)).branches]
        alone = [name for name in trained if name not in branching]
        if branching and alone:
            raise ConfigError(
                f"by_task: the algorithm of '{branching[0]}' compares the continuations of forked "
                f"rollouts and that of '{alone[0]}' does not, but either all rollouts fork or "
                "none do (rl.rollout.branch): give all tasks an estimator over forks, or none"
            )

    def of(self, part: str) -> Algorithm:
        """Return the algorithm for one task of the mixture, including the algorithm's saved
        state."""
        algorithm = self.tasks.get(part, self.other)
        prefix = f"{part}/"
        own = {
            name.removeprefix(prefix): value
            for name, value in self.memory.items()
            if name.startswith(prefix)
        }
        initial = getattr(algorithm, "memory", {})
        restored: Algorithm = with_saved_state(algorithm, {**initial, **own} if own else {})
        return restored

    @property
    def has_group_baseline(self) -> bool:
        return any(each.has_group_baseline for each in self._all_algorithms)

    @property
    def needs(self) -> AlgorithmNeeds:
        needs = [needs_of(each) for each in self._all_algorithms]
        return AlgorithmNeeds(
            any(each.greedy for each in needs),
            any(each.values for each in needs),
            any(each.branches for each in needs),
            frozenset[str]().union(*(each.streams for each in needs)),
        )

    @property
    def _all_algorithms(self) -> list[Algorithm]:
        return [*self.tasks.values(), self.other]

    def assign_advantages(
        self, groups: Sequence[Group], weights: Mapping[str, float], *, every_token: bool = False
    ) -> OptimizerStepAdvantages:
        by_part: dict[str, list[Group]] = defaultdict(list)
        for group in groups:
            by_part[item_part_name(group.task)].append(group)
        steps = {
            part: self.of(part).assign_advantages(own, weights, every_token=every_token)
            for part, own in by_part.items()
        }
        counts = {part: self._num_learnt(part, own, steps[part]) for part, own in by_part.items()}
        shares = {part: count / (sum(counts.values()) or 1) for part, count in counts.items()}
        scaled = {
            rollout.trajectory.id: _scale_weights(rollout, shares[part], step.denominators)
            for part, step in steps.items()
            for rollout in step.rollouts
        }
        order = (trajectory.id for group in groups for trajectory in group.trajectories)
        rollouts = [scaled[id] for id in order if id in scaled]
        fill_missing_streams(rollouts)
        reasons = [f"{part}: {step.no_signal}" for part, step in steps.items()]
        return OptimizerStepAdvantages(
            rollouts,
            {name: 1.0 for step in steps.values() for name in step.denominators},
            _combine_metrics(steps, by_part),
            "" if rollouts else "; ".join(reasons) or "the step has no group",
            [note for step in steps.values() for note in step.notes],
            {
                **self.memory,
                **{
                    f"{part}/{name}": value
                    for part, step in steps.items()
                    for name, value in step.memory.items()
                },
            },
        )

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        """Complete the advantages of each task's token sequences, using the algorithm of that task.

        Returns metrics.
        """
        by_part: dict[str, list[TokenSequence]] = defaultdict(list)
        for row in rows:
            by_part[item_part_name(row.item)].append(row)
        found = {part: finish_advantages(self.of(part), own) for part, own in by_part.items()}
        means = _means(found, {part: len(own) for part, own in by_part.items()})
        return means | _by_name(found)

    def _num_learnt(self, part: str, groups: Sequence[Group], step: OptimizerStepAdvantages) -> int:
        """Return how many groups of one task in the mixture contribute to the loss.

        These are the groups with a signal, or all groups if the task's algorithm keeps groups
        without one.
        """
        if getattr(self.of(part), "drop_zero_variance", True) is False:
            return sum(any(each.rewards for each in group.trajectories) for group in groups)
        learnt = {rollout.trajectory.id for rollout in step.rollouts}
        return sum(any(each.id in learnt for each in group.trajectories) for group in groups)


def _scale_weights(
    rollout: RolloutAdvantages, share: float, denominators: Mapping[str, float]
) -> RolloutAdvantages:
    """Rescale a rollout's token weights so that the losses of all mixture parts can simply be
    added.

    The weights are multiplied by the share of the rollout's part of the mixture, and divided by the
    denominators of that part.
    """
    factors = {name: share / value for name, value in denominators.items() if value}

    def weighed(name: str, weights: list[float]) -> list[float]:
        return [weight * factors[name] for weight in weights] if weights else []

    credits: Stamps = {
        turn: TokenCredit(
            advantages=credit.advantages,
            rl=weighed("rl", credit.rl),
            ce=weighed("ce", credit.ce),
            kd=weighed("kd", credit.kd),
            streams=credit.streams,
            given=credit.given * factors.get("ce", 0.0),
        )
        for turn, credit in rollout.credits.items()
    }
    return RolloutAdvantages(rollout.trajectory, credits)


def _combine_metrics(
    steps: Mapping[str, OptimizerStepAdvantages], by_part: Mapping[str, Sequence[Group]]
) -> dict[str, float]:
    """Combine the metrics of all tasks: sum the counts, and average other metrics over rollouts.

    The metrics of each single task are included.
    """
    found = {part: step.metrics for part, step in steps.items()}
    sizes = {
        part: sum(bool(each.rewards) for group in groups for each in group.trajectories)
        for part, groups in by_part.items()
    }
    sums = {
        name: sum(metrics[name] for metrics in found.values() if name in metrics)
        for name in _SUMS
        if any(name in metrics for metrics in found.values())
    }
    return _means(found, sizes) | sums | _by_name(found)


def _means(found: Mapping[str, Mapping[str, float]], sizes: Mapping[str, int]) -> dict[str, float]:
    """Return the mean of each metric over the tasks of a mixture, weighted by rollouts per task.

    A task that does not report a metric does not count for it. ``sizes`` holds the number of
    rollouts of each task.
    """
    means = {}
    for name in dict.fromkeys(name for metrics in found.values() for name in metrics):
        having = [(found[part][name], sizes[part]) for part in found if name in found[part]]
        total = sum(size for _, size in having)
        means[name] = sum(value * size for value, size in having) / total if total else 0.0
    return means


def _by_name(found: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    return {
        f"task.{part}/{name}": value
        for part, metrics in found.items()
        for name, value in metrics.items()
    }
