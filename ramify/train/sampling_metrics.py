"""Compute metrics over all of a step's samples, including those not trained on.

    rollouts    ── rollout_sampling_metrics ────> rewards, lengths, ends, and the correlation of
                                                  reward and length
    replies     ── entropy_and_control_metrics ─> entropy, over all tokens that this policy sampled
    rows        ── advantage_metrics ───────────> advantages, and the share of tokens without loss
    a sample    ── PolicyUpdateProbe ───────────> the gaps between sampler and trainer, and between
                                                  the policies before and after the update
    scored rows ── store_logprob_gaps ──────────> the gap of each token, in rollouts that are saved

These metrics exist in every step, even in steps without a training signal, when they are needed
most. Losses, in contrast, cover only tokens that carry loss (``losses/total_loss.py``): they leave
out zero-variance groups, masked calls and calls without an advantage. This module defines the
formulas and selects the calls of the sample. ``training_guard.py`` decides what the numbers mean
for a run, and ``metrics.py`` has the metrics by depth and task.

The entropy is the mean of -log p over sampled tokens. Its expectation is the entropy of the
distribution that they were drawn from, at the tokens that the policy visits.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from statistics import fmean, pstdev
from typing import NamedTuple

import numpy as np

from ramify.evaluate.evaluation_report import RIGHT
from ramify.tasks.base import total
from ramify.train.advantages.base import RolloutAdvantages, TokenCredit
from ramify.train.advantages.credit_assignment import ends_in_cut_reply
from ramify.train.backends.base import ReferenceModel
from ramify.train.data.pack import copy_to_sequences, pack
from ramify.train.data.rollout_sequences import token_sequences
from ramify.types.training_sequences import Batch, Floats, TokenSequence
from ramify.types.trajectory import Call, Group, Stop, Trajectory

PROBED = 1 / 64
"""Share of a step's tokens that the probe recomputes, if that is at least ``MIN_PROBED``."""
MIN_PROBED = 32
"""Minimum number of sampled tokens that the probe recomputes, if the step has so many. In a mean
over fewer, a single token whose probability grew tenfold would look like a divergence."""
_MAX_LOG_RATIO = 20.0


def rollout_sampling_metrics(
    groups: Sequence[Group], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return metrics of all rollouts of a step: their rewards, their lengths and how they ended.

    ``weights`` are the task's weights of its named rewards.
    """
    trees = [tree for group in groups for tree in group.trajectories]
    if not trees:
        return {}
    lengths = [_length(tree) for tree in trees]
    is_cut = [_is_cut(tree) for tree in trees]
    finished = [length for length, cut in zip(lengths, is_cut, strict=True) if not cut]
    replies = [turn.reply for tree in trees for call in tree.calls for turn in call.turns]
    roots = [tree.root for tree in trees if tree.calls]
    found = {
        "length_min": float(min(lengths)),
        "length_max": float(max(lengths)),
        "truncated_rollouts": fmean(is_cut),
        "cut_replies": fmean(each.finish == "length" for each in replies) if replies else 0.0,
        "failed_share": fmean(not tree.rewards for tree in trees),
        "num_rollouts": float(len(trees)),
        "cell_errors": _cell_errors(roots),
    }
    children = [call for tree in trees for call in tree.calls if call.kind == "rlm" and call.depth]
    if children:
        found["num_children"] = float(len(children))
        found["dead_children"] = fmean(map(_is_dead, children))
    if finished:
        found["length_finished"] = fmean(finished)
    scored = [
        [
            (total(tree.rewards, weights), _length(tree))
            for tree in group.trajectories
            if tree.rewards
        ]
        for group in groups
    ]
    return found | _of_rewards([each for each in scored if each])


def _of_rewards(groups: Sequence[Sequence[tuple[float, int]]]) -> dict[str, float]:
    """Return statistics of the rollouts' rewards, such as their spread and correlation with length.

    They include the solve rates. Each group holds one pair (reward, length) for each scored
    rollout.
    """
    rewards = [reward for group in groups for reward, _ in group]
    if not rewards:
        return {}
    found = {
        "reward_std": pstdev(rewards),
        "reward_error": _reward_error([[reward for reward, _ in group] for group in groups]),
        "reward_min": min(rewards),
        "reward_max": max(rewards),
        "solve_all": fmean(all(reward >= RIGHT for reward, _ in group) for group in groups),
        "solve_none": fmean(all(reward < RIGHT for reward, _ in group) for group in groups),
    }
    return found | _metric_if_known("reward_length_corr", within_group_correlation(groups))


def _reward_error(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean reward, treating task items as a random sample.

    Rollouts of one item resemble each other, so groups, not rollouts, are the independent samples.
    A single group says nothing about other items, so its rollouts are the samples.
    """
    rewards = [reward for group in groups for reward in group]
    samples = groups if len(groups) > 1 else [[reward] for reward in rewards]
    if len(samples) == 1:
        return 0.0
    mean = fmean(rewards)
    squares = math.fsum(math.fsum(reward - mean for reward in each) ** 2 for each in samples)
    return math.sqrt(squares * len(samples) / (len(samples) - 1)) / len(rewards)


def within_group_correlation(groups: Sequence[Sequence[tuple[float, float]]]) -> float | None:
    """Return the correlation of two values per rollout within groups of rollouts.

    Each group's means are removed first. Returns None if one of the numbers never varies within a
    group.
    """
    left: list[float] = []
    right: list[float] = []
    for group in groups:
        for side, values in zip((left, right), zip(*group, strict=True), strict=True):
            mean = fmean(values)
            side += [value - mean for value in values]
    squares = math.fsum(a * a for a in left) * math.fsum(b * b for b in right)
    # Rounding can leave a tiny sum of squares although a number never varies.
    if squares <= 1e-18:
        return None
    return math.fsum(a * b for a, b in zip(left, right, strict=True)) / math.sqrt(squares)


def advantage_reward_correlation(
    groups: Sequence[Group], rollouts: Sequence[RolloutAdvantages], weights: Mapping[str, float]
) -> dict[str, float]:
    """Return the within-group correlation between the advantages of root calls and their rollouts'
    rewards.

    It is 1 if advantages simply follow the reward, and negative if credit has the wrong sign.
    ``rollouts`` are the rollouts that have advantages.
    """
    credit: dict[str, float] = {}
    for rollout in rollouts:
        root = rollout.trajectory.root.id
        values = [
            v for (id, _), each in rollout.credits.items() if id == root for v in each.advantages
        ]
        if values:
            credit[rollout.trajectory.id] = fmean(values)
    pairs = [
        [
            (credit.get(tree.id, 0.0), total(tree.rewards, weights))
            for tree in group.trajectories
            if tree.rewards
        ]
        for group in groups
        if any(tree.id in credit for tree in group.trajectories)
    ]
    return _metric_if_known(
        "advantage_reward_corr", within_group_correlation([pair for pair in pairs if pair])
    )


def entropy_and_control_metrics(
    groups: Sequence[Group], control_ids: Collection[int] = ()
) -> dict[str, float]:
    """Return the entropy of the sampled tokens, in nats, and the share of replies that contain a
    control token.

    Tokens without known log-probabilities are ignored. ``control_ids`` are special tokens that
    should end a reply or never occur in one.
    """
    replies = [turn.reply for _, call in _sampled_calls(groups) for turn in call.turns]
    replies = [each for each in replies if each.logprobs]
    num = sum(len(each.logprobs or ()) for each in replies)
    if not num:
        return {}
    control = frozenset(control_ids)
    return {
        "entropy": -math.fsum(sum(each.logprobs or ()) for each in replies) / num,
        "control_tokens": fmean(not control.isdisjoint(each.token_ids or ()) for each in replies),
    }


def advantage_metrics(rows: Sequence[TokenSequence], num_sampled: int) -> dict[str, float]:
    """Return advantage metrics over all ``num_sampled`` tokens sampled in a step.

    Tokens that are not in ``rows`` count with advantage 0. The metric ``masked`` is the share of
    tokens without policy-gradient loss.
    """
    values = [row.advantages[row.rl != 0] for row in rows]
    values = [each for each in values if len(each)]
    num = sum(map(len, values))
    if num_sampled < num or not num_sampled:
        return {}
    credit: Floats = np.concatenate(values) if values else np.zeros(0, np.float32)
    mean = float(credit.sum(dtype=np.float64)) / num_sampled
    square = float(np.square(credit, dtype=np.float64).sum()) / num_sampled
    # Tokens outside the rows have advantage 0, which may be the minimum or maximum.
    rest = [0.0] if num < num_sampled else []
    ends = [*rest, *([float(credit.min()), float(credit.max())] if num else [])]
    return {
        "advantage_mean": mean,
        "advantage_std": math.sqrt(max(0.0, square - mean * mean)),
        "advantage_min": min(ends),
        "advantage_max": max(ends),
        "masked": 1 - num / num_sampled,
    }


def num_sampled_tokens(groups: Sequence[Group]) -> int:
    """Return the number of sampled tokens that could be trained on.

    Replies of judges do not count.
    """
    return sum(
        len(turn.reply.token_ids or ()) for _, call in _sampled_calls(groups) for turn in call.turns
    )


class PolicyUpdateProbe(NamedTuple):
    """A sample of a step's calls with their log-probabilities before the policy update.

    Scoring the same calls after the update shows how far the policy moved.
    """

    rows: Sequence[TokenSequence]
    """The sampled calls. Their stream ``old_logprobs`` holds the trainer's log-probabilities before
    the update."""
    batches: Sequence[Batch]
    sampler: Floats
    """Log-probabilities given by the sampler. Shape [E], for the E scored tokens of all batches."""
    before: Floats
    """Log-probabilities given by the trainer before the update, [E]."""

    @classmethod
    def score_before_update(
        cls, rows: Sequence[TokenSequence], backend: ReferenceModel
    ) -> PolicyUpdateProbe | None:
        """Return a probe with the log-probabilities of ``rows`` under the policy before the update.

        Returns None if there are no rows.
        """
        batches = pack(rows, backend.packing) if rows else []
        if not batches:
            return None
        sampler = np.concatenate([batch.streams["sampler_logprobs"] for batch in batches])
        before = backend.logprobs(batches)
        copy_to_sequences(rows, batches, "old_logprobs", before)
        return cls(rows, batches, sampler, np.concatenate(before))

    @property
    def logprob_gap_metrics(self) -> dict[str, float]:
        """Return metrics of the gap between the sampler's and the trainer's log-probabilities, in
        nats."""
        gap = np.abs(self.before - self.sampler)
        return {
            "mismatch": float(gap.mean()),
            "mismatch_max": float(gap.max()),
            "mismatch_kl": kl(self.sampler, self.before),
        }

    def update_kl(self, backend: ReferenceModel) -> dict[str, float]:
        """Return how far the update moved the policy, as KL(before, after) in nats per token."""
        return {"post_kl": kl(self.before, np.concatenate(backend.logprobs(self.batches)))}


def store_logprob_gaps(groups: Sequence[Group], rows: Sequence[TokenSequence]) -> None:
    """Store how far the trainer's and the sampler's log-probabilities differ, for each sampled
    token.

    The differences go into the rollout's ``metadata["logprob_gaps"]``, so that saved rollouts show
    them.

    For example, ``{"0.1/2": [0.01, -0.2]}`` holds the tokens of turn 2 of call 0.1. Turns are
    missing if the trainer did not score all their tokens (by the stream ``old_logprobs``).
    """
    trees = {tree.id: tree for group in groups for tree in group.trajectories}
    for row in rows:
        id, _, place = row.name.rpartition("/call=")
        call, _, number = place.partition("/path=")
        if "old_logprobs" not in row.streams or id not in trees:
            continue
        tree = trees[id]
        gaps = row.streams["old_logprobs"] - row.sampler_logprobs
        noted = tree.metadata.setdefault("logprob_gaps", {})
        for span in tree.paths(tree.call(call))[int(number or 0)].spans:
            if row.rl[span.start : span.end].all():
                noted[f"{span.call}/{span.turn}"] = [
                    round(float(gap), 5) for gap in gaps[span.start : span.end]
                ]


def kl(drawn: Floats, other: Floats) -> float:
    """Estimate KL(drawn, other) from both log-probabilities of tokens sampled from ``drawn``.

    Uses the estimator k3, the mean of exp(d) - d - 1 with d = other - drawn, which is never
    negative.
    """
    d = np.clip(other.astype(np.float64) - drawn, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float((np.exp(d) - d - 1).mean())


def select_probe_sequences(
    groups: Sequence[Group], temperature: float | Callable[[Call], float], step: int
) -> list[TokenSequence]:
    """Select the calls to probe in a step, and return their sampled tokens as token sequences.

    A hash of their names selects the calls, so a resumed run selects the same ones.
    """
    known = [(tree, call) for tree, call in _sampled_calls(groups) if _has_logprobs(call)]
    budget = PROBED * sum(_size(call) for _, call in known)
    chosen: dict[str, RolloutAdvantages] = {}
    num_probed = 0
    for tree, call in sorted(known, key=lambda each: _key(step, *each)):
        # The minimum is probed even if it exceeds the budget.
        if num_probed >= MIN_PROBED and budget < _size(call):
            break
        budget -= _size(call)
        rollout = chosen.setdefault(tree.id, RolloutAdvantages(tree, {}))
        for index, turn in enumerate(call.turns):
            num = len(turn.reply.token_ids or ())
            if num:
                num_probed += num
                rollout.credits[call.id, index] = TokenCredit(
                    advantages=[0.0] * num, rl=[1.0] * num
                )
    return token_sequences(chosen.values(), temperature)


def _sampled_calls(groups: Sequence[Group]) -> Iterator[tuple[Trajectory, Call]]:
    """Yield each call that was sampled in the rollouts, together with its trajectory.

    Calls of judges are in the same trees and are skipped.
    """
    for group in groups:
        for tree in group.trajectories:
            for call in tree.calls:
                if call.kind != "judge":
                    yield tree, call


def _has_logprobs(call: Call) -> bool:
    replies = [turn.reply for turn in call.turns]
    return (
        call.fork is None
        and any(each.token_ids for each in replies)
        and all(each.logprobs is not None and each.token_ids is not None for each in replies)
    )


def _size(call: Call) -> int:
    """Return the number of prompt and reply tokens that a call's turns add to its token
    sequence."""
    replies = [turn.reply for turn in call.turns]
    return sum(len(each.prompt_ids or ()) + len(each.token_ids or ()) for each in replies)


def _key(step: int, tree: Trajectory, call: Call) -> bytes:
    return hashlib.blake2b(f"{step}/{tree.id}/{call.id}".encode(), digest_size=8).digest()


def _length(tree: Trajectory) -> int:
    return sum(
        len(turn.reply.token_ids or ())
        for call in tree.calls
        if call.kind != "judge"
        for turn in call.turns
    )


def _is_cut(tree: Trajectory) -> bool:
    """Return True if a limit cut off the root call or its last reply."""
    if not tree.calls:
        return False
    stop = tree.root.stop
    return (stop is not None and stop.is_truncated()) or ends_in_cut_reply(tree.root)


def _is_dead(call: Call) -> bool:
    """Return True if a call was cut off or failed, so that its parent got no answer from it."""
    stop = call.stop
    return stop is None or stop.is_truncated() or stop is Stop.ERROR or ends_in_cut_reply(call)


def _cell_errors(calls: Sequence[Call]) -> float:
    """Return the share of executed code cells that raised an error."""
    cells = [cell for call in calls for turn in call.turns for cell in turn.cells]
    return fmean(bool(cell.error) for cell in cells) if cells else 0.0


def _metric_if_known(name: str, value: float | None) -> dict[str, float]:
    return {} if value is None else {name: value}
