"""What an evaluation during training comes to, by name.

A score is of attempts that could be judged. One that failed for reasons not the policy's own (no
session, an engine that went, a score that raised; see ``evaluate/attempt.py``) is counted in
``SPLIT/failed`` and left out of every mean; where too many did, the others are not the split any
more, and there is no score: no checkpoint can become the best by it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from ramify.tasks.base import Item, total
from ramify.train.metrics import passes
from ramify.types.trajectory import Group, Trajectory


def report(
    split: str,
    items: Sequence[Item],
    groups: Sequence[Group],
    weights: Mapping[str, float],
    *,
    max_failed: float,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Mean reward of the rollouts that were scored, and of those by kind of item. With n > 1 at
    each item also pass@k up to k = n, and in any case the metrics of the task's score. Where more
    than the share ``max_failed`` failed, only how many. ``say`` is told of failures."""
    trees = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for trajectory in trees if not trajectory.rewards]
    found = {f"{split}/failed": float(len(failed))}
    is_score = len(failed) < len(trees) and len(failed) <= max_failed * len(trees)
    if failed:
        say(_told(split, failed, len(trees), None if is_score else max_failed))
    if not is_score:
        return found
    worth = [
        (item.kind, total(trajectory.rewards, weights))
        for item, group in zip(items, groups, strict=True)
        for trajectory in group.trajectories
        if trajectory.rewards
    ]
    found[f"{split}/reward"] = fmean(value for _, value in worth)
    for kind in sorted({kind for kind, _ in worth if kind}):
        found[f"{split}/{kind}"] = fmean(value for each, value in worth if each == kind)
    found |= {f"{split}/pass@{k}": value for k, value in passes(groups, weights).items()}
    return found | _metrics(split, trees)


def _told(split: str, failed: Sequence[Trajectory], num: int, passed: float | None) -> str:
    """``passed``: the share that is too much; None where it is not."""
    first = next((each.errors[-1] for each in failed if each.errors), "no error was said")
    many = f"all {num:,}" if len(failed) == num else f"{len(failed):,} of {num:,}"
    what = " and are left out of the score"
    if passed is not None:
        above = f", above evaluate.max_failed={passed:g}" if len(failed) < num else ""
        what = f"{above}: this evaluation has no score"
    return f"{split}: {many} attempts failed for reasons not the policy's own{what}; the first: {first}"


def _metrics(split: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Mean of each metric over the rollouts that have it."""
    names = dict.fromkeys(name for each in trajectories for name in each.metrics)
    values = {
        name: [each.metrics[name] for each in trajectories if name in each.metrics]
        for name in names
    }
    return {f"{split}/metric {name}": fmean(each) for name, each in values.items()}
