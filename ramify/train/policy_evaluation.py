"""Evaluate the policy during training.

The policy attempts the items of a split, and the results become metrics.

Scores only include attempts that could be judged. An attempt that failed for reasons outside the
policy (no session, a lost engine, an error in the score; see ``evaluate/attempt.py``) is counted in
``SPLIT/failed`` and excluded from every mean. If too many attempts failed, the others no longer
represent the split, so the score is omitted and cannot make a checkpoint the best one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

import msgspec

from ramify.engine.rlm import RLM
from ramify.evaluate.statistics import MeanEstimate, mean_with_interval, share_with_interval
from ramify.logging import ComponentLogger
from ramify.tasks.base import Item, Task, items_of, total
from ramify.tasks.mixture import TaskMixture
from ramify.tasks.text_env import REJECTED
from ramify.train.config import Run
from ramify.train.metrics import mixture_metrics, passes
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.types.trajectory import Group, Trajectory

_log = ComponentLogger("train")


async def evaluate(
    run: Run, task: Task, rlm: RLM, workers: RolloutWorkers | None, split: str, *, direct: bool
) -> dict[str, float]:
    """Evaluate the policy on the first task items of ``split``, and return its mean rewards.

    The mean reward is given overall, by kind of item and, for a mixture, by task. The score is left
    out if too many attempts failed. ``workers`` are the processes that run the rollouts; None: this
    process. ``direct``: whether a plain call answers a short input.
    """
    spec = run.evaluate
    options = msgspec.structs.replace(
        run.rl.rollout if run.rl is not None else RolloutOptions(),
        direct=direct,
        group=spec.attempts,
        temperature=spec.temperature,
    )
    rollouter = TaskRolloutRunner(rlm, task, options, seed=run.seed, rollout_worker=workers)
    split_items = items_of(task, split)
    num = spec.num if split != "validation" or spec.validation is None else spec.validation
    items = [split_items[index] for index in range(min(num, len(split_items)))]
    groups = await rollouter.groups(items, -1, f"evaluating {split}")
    values = report(split, items, groups, task.weights, max_failed=spec.max_failed)
    if isinstance(task, TaskMixture) and f"{split}/reward" in values:
        by_part = mixture_metrics(groups, task.weights)
        named = {part: f"task.{part}/reward" for part in task.tasks}
        values |= {
            f"{split}/{part}": by_part[name] for part, name in named.items() if name in by_part
        }
    return values


def report(
    split: str,
    items: Sequence[Item],
    groups: Sequence[Group],
    weights: Mapping[str, float],
    *,
    max_failed: float,
) -> dict[str, float]:
    """Return the mean reward of all scored rollouts as metrics, overall and by kind of task item.

    The overall mean has a 95 % confidence interval. The result also contains the metrics of the
    task's score, and pass@k for k up to n if there are n > 1 attempts per item. If the share of
    failed attempts exceeds ``max_failed``, it contains only the number of failures. Failures are
    logged.
    """
    trees = [trajectory for group in groups for trajectory in group.trajectories]
    failed = [trajectory for trajectory in trees if not trajectory.rewards]
    values = {f"{split}/failed": float(len(failed))}
    is_score = len(failed) < len(trees) and len(failed) <= max_failed * len(trees)
    if failed:
        _log.warning(
            "evaluation_failures",
            _failure_message(split, failed, len(trees), None if is_score else max_failed),
            shown=True,
            split=split,
            failed=len(failed),
            attempts=len(trees),
        )
    if not is_score:
        return values
    scores = [
        (item.kind, total(trajectory.rewards, weights))
        for item, group in zip(items, groups, strict=True)
        for trajectory in group.trajectories
        if trajectory.rewards
    ]
    reward = _estimate(
        [
            [total(trajectory.rewards, weights) for trajectory in group.trajectories]
            for group in _scored_attempts(groups)
        ]
    )
    values[f"{split}/reward"] = reward.value
    values |= {f"{split}/reward_low": reward.low, f"{split}/reward_high": reward.high}
    for kind in sorted({kind for kind, _ in scores if kind}):
        values[f"{split}/{kind}"] = fmean(value for item_kind, value in scores if item_kind == kind)
    values |= {f"{split}/pass@{k}": value for k, value in passes(groups, weights).items()}
    metrics = _metrics(split, trees)
    _note_no_actions(split, metrics)
    return values | metrics


def _note_no_actions(split: str, metrics: Mapping[str, float]) -> None:
    """Log a warning if the policy never produced a valid action in its environment, and so could
    not earn a reward."""
    rejected = metrics.get(f"{split}/metric {REJECTED}", 0.0)
    if rejected and not metrics.get(f"{split}/metric steps"):
        text = (
            f"{split}: no attempt did an action in its environment; {rejected:.3g} texts per "
            "attempt were not actions: say in the item's question what an action looks like, show "
            "it with demonstrations (sft.demos), or accept more in the task's `parse`"
        )
        _log.warning("no_actions", text, shown=True, split=split)


def _scored_attempts(groups: Sequence[Group]) -> Iterator[Group]:
    """Yield each rollout group with only those attempts that could be scored.

    Groups without any such attempt are left out.
    """
    for group in groups:
        judged = [trajectory for trajectory in group.trajectories if trajectory.rewards]
        if judged:
            yield msgspec.structs.replace(group, trajectories=judged)


def _estimate(rewards: Sequence[Sequence[float]]) -> MeanEstimate:
    """Estimate the mean reward over all attempts, and return it with its confidence interval.

    ``rewards`` holds the rewards of each item's attempts. If each item has one attempt with reward
    0 or 1, the interval is that of a proportion. Otherwise it comes from resampling the items' mean
    rewards.
    """
    every = [reward for attempts in rewards for reward in attempts]
    if len(every) == len(rewards) and set(every) <= {0.0, 1.0}:
        return share_with_interval(round(sum(every)), len(every))
    interval = mean_with_interval([fmean(attempts) for attempts in rewards])
    return MeanEstimate(fmean(every), interval.low, interval.high)


def _failure_message(
    split: str, failed: Sequence[Trajectory], num: int, passed: float | None
) -> str:
    """Return the text of a warning about failed attempts in an evaluation.

    ``passed`` is the maximum share of failures if that share was exceeded, and None otherwise.
    """
    first = next(
        (trajectory.errors[-1] for trajectory in failed if trajectory.errors),
        "no error was reported",
    )
    many = f"all {num:,}" if len(failed) == num else f"{len(failed):,} of {num:,}"
    effect = " and are left out of the score"
    if passed is not None:
        above = f", above evaluate.max_failed={passed:g}" if len(failed) < num else ""
        effect = f"{above}: this evaluation has no score"
    return (
        f"{split}: {many} attempts failed for reasons outside the policy{effect}; the first: "
        f"{first}"
    )


def _metrics(split: str, trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Return the mean of each of the task's metrics, over the rollouts that report that metric."""
    names = dict.fromkeys(name for trajectory in trajectories for name in trajectory.metrics)
    values = {
        name: [
            trajectory.metrics[name] for trajectory in trajectories if name in trajectory.metrics
        ]
        for name in names
    }
    return {f"{split}/metric {name}": fmean(column) for name, column in values.items()}
