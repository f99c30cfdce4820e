"""What an evaluation during training comes to, by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

from ramify.tasks.base import Item, total
from ramify.train.metrics import passes
from ramify.types.trajectory import Group, Trajectory


def report(
    split: str, items: Sequence[Item], groups: Sequence[Group], weights: Mapping[str, float]
) -> dict[str, float]:
    """Mean reward of all rollouts and of those by kind of item; a failed one counts 0. With n > 1 at each item also
    pass@k up to k = n, and in any case the metrics of the task's score."""
    worth = [
        (item.kind, total(trajectory.rewards, weights))
        for item, group in zip(items, groups, strict=True)
        for trajectory in group.trajectories
    ]
    found = {f"{split}/reward": fmean(value for _, value in worth)}
    for kind in sorted({kind for kind, _ in worth if kind}):
        found[f"{split}/{kind}"] = fmean(value for each, value in worth if each == kind)
    found |= {f"{split}/pass@{k}": value for k, value in passes(groups, weights, failed_are_wrong=True).items()}
    found |= _metrics(split, [each for group in groups for each in group.trajectories])
    failed = sum(not trajectory.rewards for group in groups for trajectory in group.trajectories)
    return {**found, f"{split}/failed": float(failed)}


def _metrics(split: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric over the rollouts that have it."""
    names = dict.fromkeys(name for each in trajectories for name in each.metrics)
    values = {name: [each.metrics[name] for each in trajectories if name in each.metrics] for name in names}
    return {f"{split}/metric {name}": fmean(each) for name, each in values.items()}
