"""Token-level arithmetic for an optimizer step: discounted returns, statistics and normalisation.

Returns are discounted within a call, statistics cover all tokens, and per-turn numbers are
normalised within a group. The sampled tokens of a call are treated as one sequence. Observations
and later prompts between them are skipped, and so are the boundaries of the rows that hold them.
Discounting steps from one sampled token to the next.

    row a                            . . x x . .
    row b, same call, history cut    . . x            one series of three tokens: x x x

Functions on per-turn numbers take and return one mapping from step index to number for each
trajectory:

    step_index   for each step index, over the trajectories of the group:
                 (R - mean) / (std + 1e-6), with the population std

A step index that only one trajectory has gives 0, since there is nothing to compare it with (a
public implementation keeps the raw number, which is then the largest of all). Equal numbers also
give 0.

Legend: N tokens of a call or of a step.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ramify.errors import TrainError
from ramify.types.training_sequences import call_of

if TYPE_CHECKING:
    from ramify.types.training_sequences import Ints, TokenSequence

Doubles = npt.NDArray[np.float64]

_TINY = 1e-8
"""Added to a variance before taking the square root."""


class SampledCallTokens(NamedTuple):
    """The sampled tokens of one call that have a policy-gradient weight, in order."""

    parts: list[tuple[TokenSequence, Ints]]
    """Pairs of a token sequence and the indices of its sampled tokens."""

    def per_token_values(self, name: str) -> Doubles:
        """Return the values [N] of the stream (per-token array) ``name`` at this call's tokens.

        ``name`` may be ``advantages``. Raises TrainError if a token sequence lacks the stream.
        """
        return np.concatenate(
            [_column(row, name)[tokens].astype(np.float64) for row, tokens in self.parts]
        )

    def write_stream(self, name: str, values: Doubles) -> None:
        """Write ``values`` [N] to the stream (per-token array) ``name`` at this call's tokens.

        ``name`` may be ``advantages``. A new stream is 0 at all other tokens.
        """
        start = 0
        for row, tokens in self.parts:
            if name != "advantages" and name not in row.streams:
                row.streams[name] = np.zeros(len(row), np.float32)
            column = row.advantages if name == "advantages" else row.streams[name]
            column[tokens] = values[start : start + len(tokens)]
            start += len(tokens)


def tokens_by_call(rows: Sequence[TokenSequence]) -> Iterator[SampledCallTokens]:
    """Group the sampled tokens of the token sequences ``rows`` by call.

    The calls are in order of first appearance.
    """
    by_call: dict[str, list[tuple[TokenSequence, Ints]]] = {}
    for row in rows:
        tokens = np.flatnonzero(row.rl)
        if len(tokens):
            by_call.setdefault(call_of(row.name), []).append((row, tokens))
    return map(SampledCallTokens, by_call.values())


def returns_to_go(rewards: Doubles, gamma: float) -> Doubles:
    """Compute the discounted returns-to-go G_t = r_t + γ G_{t+1} of a series of rewards.

    rewards 1, 0, 2 with γ = 0.5: returns 1.5, 1, 2"""
    returns = rewards.copy()
    for index in range(len(returns) - 2, -1, -1):
        returns[index] += gamma * returns[index + 1]
    return returns


def gae(rewards: Doubles, values: Doubles, gamma: float, lam: float) -> Doubles:
    """Compute advantages by generalised advantage estimation (1506.02438).

    The advantage is Â_t = δ_t + γλ Â_{t+1} with δ_t = r_t + γ V_{t+1} - V_t, where r is the reward
    and V the critic's value. The value after the last token is 0.
    """
    deltas = rewards + gamma * np.append(values[1:], 0.0) - values
    return returns_to_go(deltas, gamma * lam)


def turn_start_indices(turns: Doubles) -> Ints:
    """Return the index of the first token of each turn, given the turn of every token.

    For example, turns 0, 0, 1, 3, 3 give 0, 2, 3.
    """
    changes: Ints = np.flatnonzero(np.diff(turns)) + 1
    return np.concatenate([np.zeros(1, np.int64), changes])


def whiten(values: Doubles, epsilon: float | None = None) -> Doubles:
    """Subtract the mean of ``values``, and divide by their unbiased standard deviation.

    The result is 0 if all values are equal.

    ``epsilon`` is added to the standard deviation. If it is None, 1e-8 is added to the variance
    instead.
    """
    if len(values) < 2:
        return np.zeros_like(values)
    variance = values.var(ddof=1)
    std = np.sqrt(variance + _TINY) if epsilon is None else np.sqrt(variance) + epsilon
    whitened: Doubles = (values - values.mean()) / std if std else np.zeros_like(values)
    return whitened


def whiten_all(parts: Sequence[list[float]], epsilon: float | None = None) -> None:
    """Normalise all numbers in several lists together, in place, to mean 0 and standard deviation
    1."""
    if not parts:
        return
    together = np.concatenate([np.asarray(part, np.float64) for part in parts])
    whitened = whiten(together, epsilon).tolist()
    start = 0
    for part in parts:
        part[:] = whitened[start : start + len(part)]
        start += len(part)


def subtract_kl_penalty(
    rows: Sequence[TokenSequence],
    beta: float,
    gamma: float,
    *,
    normalise: bool,
    epsilon: float | None = None,
) -> dict[str, float]:
    """Subtract a KL penalty from the advantages of a step, and then normalise them if requested.

    Returns the metric ``reward_kl``.

    The penalty of a token is β (o - ref), where o and ref are its log-probabilities under the old
    and the reference policy. Discounted by γ, the penalty also applies to the tokens before it in
    its call. ``reward_kl`` is the mean of o - ref.
    """
    charges: list[Doubles] = []
    calls = list(tokens_by_call(rows))
    for line in calls:
        charges.append(
            line.per_token_values("old_logprobs") - line.per_token_values("ref_logprobs")
        )
        line.write_stream(
            "advantages",
            line.per_token_values("advantages") + returns_to_go(-beta * charges[-1], gamma),
        )
    if normalise:
        normalise_advantages(calls, epsilon)
    num = sum(map(len, charges))
    return {"reward_kl": sum(float(charge.sum()) for charge in charges) / num if num else 0.0}


def normalise_advantages(calls: Sequence[SampledCallTokens], epsilon: float | None = None) -> None:
    """Normalise the advantages of all tokens in ``calls`` together, to mean 0 and standard
    deviation 1.
    """
    if not calls:
        return
    whitened = whiten(
        np.concatenate([line.per_token_values("advantages") for line in calls]), epsilon
    )
    start = 0
    for line in calls:
        num = sum(len(tokens) for _, tokens in line.parts)
        line.write_stream("advantages", whitened[start : start + num])
        start += num


def _column(row: TokenSequence, name: str) -> npt.NDArray[np.float32]:
    if name == "advantages":
        return row.advantages
    if name not in row.streams:
        raise TrainError(
            f"sequence {row.name} has no stream '{name}', which the algorithm needs to finish its "
            "advantages"
        )
    return row.streams[name]


K = TypeVar("K", bound=Hashable)
Norm = Literal["none", "group", "step_index"]


def normalise_by_step(rows: Sequence[Mapping[K, float]]) -> list[dict[K, float]]:
    """Normalise per-step numbers across trajectories, separately for each step index.

    Subtracts the mean over the trajectories, and divides by the standard deviation.

    ``rows`` has one mapping from step index to number for each trajectory.

    For example, three trajectories have [2, 2], [-2, 0, -2] and [0, -2]. Step 0 becomes 1.2247,
    -1.2247 and 0, and so does step 1. Step 2, which only one trajectory has, becomes 0.
    """
    buckets: dict[K, list[float]] = defaultdict(list)
    for row in rows:
        for step, value in row.items():
            buckets[step].append(value)
    return [
        {step: _standardize_value(value, buckets[step]) for step, value in row.items()}
        for row in rows
    ]


def subtract_group_mean(rows: Sequence[Mapping[K, float]]) -> list[dict[K, float]]:
    """Subtract the mean over a rollout group from each per-turn number.

    The group's mean is the mean of the trajectories' own means, so long trajectories weigh no more
    than short ones.

    [1, 1], [0]: means 1 and 0, so 0.5, 0.5 and -0.5
    """
    means = [statistics.fmean(row.values()) for row in rows if row]
    if len(means) < 2:
        return [dict.fromkeys(row, 0.0) for row in rows]
    centre = statistics.fmean(means)
    return [{step: value - centre for step, value in row.items()} for row in rows]


def normalise_turn_values(rows: Sequence[Mapping[K, float]], norm: Norm) -> list[dict[K, float]]:
    """Normalise per-turn numbers of several trajectories by the method called ``norm``.

    Each trajectory has one mapping from turn to number.
    """
    if norm == "step_index":
        return normalise_by_step(rows)
    return subtract_group_mean(rows) if norm == "group" else [dict(row) for row in rows]


def weight_early_tokens(values: Sequence[float], gamma: float) -> list[float]:
    """Scale advantages so that early tokens get more weight (2606.22600):
    A_j · (1 + γ (1 - Σ_{l<j} |A_l| / Σ |A|)).

    1, 1, 2 with γ = 0.5: 1.5, 1.375, 2.5"""
    total = sum(abs(value) for value in values)
    if not gamma or not total:
        return list(values)
    weighted, before = [], 0.0
    for value in values:
        weighted.append(value * (1 + gamma * (1 - before / total)))
        before += abs(value)
    return weighted


def _standardize_value(value: float, bucket: Sequence[float]) -> float:
    if len(bucket) < 2 or min(bucket) == max(bucket):
        return 0.0
    return (value - statistics.fmean(bucket)) / (statistics.pstdev(bucket) + 1e-6)
