"""Compute statistics over attempts, with confidence intervals.

All functions are pure. Bootstraps resample items, but not the attempts within an item.

In formulas, n is the number of attempts at an item, c is how many of them are right, and k is the
k of pass@k.
"""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Hashable, Sequence
from statistics import NormalDist

import msgspec

from ramify.errors import ConfigError

DRAWS = 1000
"""Number of bootstrap resamples."""
LEVEL = 0.95
_NEAR = 0.01
"""Scores that differ by at most this much count as equal when the kind of confidence interval is
chosen."""
_MIN_COUNT = 5
"""Minimum number of differing items for a bootstrap. With fewer, most resamples contain the same
items."""


class MeanEstimate(msgspec.Struct, frozen=True):
    """A mean over task items with its 95 % confidence interval.

    >>> evaluate.MeanEstimate(0.5, low=0.3, high=0.7).high
    0.7
    """

    value: float
    low: float
    high: float
    """Upper end of the 95 % interval (``low`` is the lower end). With a single item, a bootstrap
    interval has no width."""


def pass_at_k(n: int, c: int, k: int) -> float:
    """Return the probability that at least one of k drawn attempts is right (pass@k).

    The k attempts are drawn without replacement from n attempts, of which c are right. The formula
    is ``1 - C(n-c, k) / C(n, k)`` (Chen et al. 2021, "Evaluating Large Language Models Trained on
    Code", eq. 1).

    >>> round(pass_at_k(16, 3, 8), 6)
    0.9
    """
    if not 0 <= c <= n:
        raise ConfigError(f"pass@k: {c} correct attempts out of {n} is impossible")
    if not 1 <= k <= n:
        raise ConfigError(
            f"pass@{k} needs at least {k} attempts at each item, but there are {n}: raise n or "
            "lower k"
        )
    return 1.0 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(answers: Sequence[Hashable | None], rewards: Sequence[float], k: int) -> float:
    """Return the reward of the answer that wins a majority vote among k attempts.

    If several answers are equally frequent, the earliest wins.

    With more than k attempts, the result is the mean over consecutive blocks of k; a remainder at
    the end is not used. An answer of None has no vote.

    >>> majority_at_k(["a", "b", "b", "c", "c", "a"], [1, 0, 0, 0, 0, 1], 3)
    0.0
    """
    if not 1 <= k <= len(answers):
        raise ConfigError(
            f"majority@{k} needs at least {k} attempts at each item, but there are {len(answers)}"
        )
    blocks = [slice(start, start + k) for start in range(0, len(answers) - k + 1, k)]
    return math.fsum(_majority(answers[block], rewards[block]) for block in blocks) / len(blocks)


def _majority(answers: Sequence[Hashable | None], rewards: Sequence[float]) -> float:
    counts = Counter(answer for answer in answers if answer is not None)
    if not counts:
        return 0.0
    # ``most_common`` lists equally frequent answers in order of appearance.
    return rewards[answers.index(counts.most_common(1)[0][0])]


def mean_with_interval(values: Sequence[float], seed: int = 0) -> MeanEstimate:
    """Return the mean of one value per task item, with its bootstrap interval (Efron 1979).

    The interval lies between the 2.5 and 97.5 per cent quantiles of ``DRAWS`` resampled means.
    Each is the mean of as many values as there are items, drawn with replacement.

    >>> evaluate.mean_with_interval([1.0, 1.0, 1.0]).low
    1.0
    """
    if not values:
        raise ConfigError("cannot take a mean over no items")
    mean = math.fsum(values) / len(values)
    if min(values) == max(values):
        return MeanEstimate(mean, mean, mean)
    rng = random.Random(seed)
    means = sorted(
        math.fsum(rng.choices(values, k=len(values))) / len(values) for _ in range(DRAWS)
    )
    tail = (1 - LEVEL) / 2
    return MeanEstimate(mean, quantile(means, tail), quantile(means, 1 - tail))


def share_with_interval(num: int, of: int) -> MeanEstimate:
    """Return the share of successful attempts with its 95 % Wilson score interval (1927).

    The attempts are independent. ``num`` of the ``of`` attempts succeeded. If fewer than five
    attempts succeeded or failed, the interval is the exact one of Clopper and Pearson (1934).

    >>> share_with_interval(0, 10).high        # 1 - 0.025 ** (1 / 10)
    0.30849...
    """
    if not 0 <= num <= of or not of:
        raise ConfigError(f"{num} successes in {of} attempts is impossible")
    share = num / of
    if min(num, of - num) < _MIN_COUNT:
        low = 0.0 if num == 0 else 1 - _upper_end(of - num, of)
        return MeanEstimate(share, low, 1.0 if num == of else _upper_end(num, of))
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = (share + z * z / (2 * of)) / (1 + z * z / of)
    half = z / (1 + z * z / of) * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    return MeanEstimate(share, centre - half, centre + half)


def _upper_end(num: int, of: int) -> float:
    """Return the upper end of the 95 % Clopper-Pearson interval of a success rate.

    This is the success rate at which ``num`` or fewer successes in ``of`` attempts have a
    probability of 2.5 %.
    """

    def at_most(share: float) -> float:
        return math.fsum(
            math.exp(
                math.lgamma(of + 1)
                - math.lgamma(k + 1)
                - math.lgamma(of - k + 1)
                + k * math.log(share)
                + (of - k) * math.log1p(-share)
            )
            for k in range(num + 1)
        )

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if at_most(middle) > (1 - LEVEL) / 2 else (low, middle)
    return high


def score_with_interval(values: Sequence[float], seed: int = 0) -> MeanEstimate:
    """Return the mean of one score per task item, with its 95 % interval.

    Scores lie between 0 and 1. The interval usually comes from resampling the items. If every score
    is 0 or 1, or all scores are equal, it is the interval of a proportion instead: resampling equal
    scores gives an interval of no width, as if four right answers out of four made the result
    certain. If nearly all scores are 0, or nearly all are 1 (fewer than five differ by more than 1
    %), the interval covers both of these intervals.

    >>> score_with_interval([1.0] * 4).low              # 0.025 ** (1 / 4)
    0.39763...
    """
    if not values:
        raise ConfigError("cannot take a mean over no items")
    is_alike = min(values) == max(values)
    is_share = set(values) <= {0.0, 1.0} or (is_alike and 0 < values[0] < 1)
    if not is_share and not (_are_scores(values) and _is_at_an_end(values)):
        return mean_with_interval(values, seed)
    total = math.fsum(values)
    low, high = (share_with_interval(n, len(values)) for n in _floor_and_ceiling(total))
    share = MeanEstimate(total / len(values), low.low, high.high)
    return share if is_share else _widen_interval(share, mean_with_interval(values, seed))


def _is_at_an_end(values: Sequence[float]) -> bool:
    """Return True if nearly all scores are 0, or nearly all of them are 1.

    At most four scores may differ from that value by more than 1 %.
    """
    return any(sum(abs(value - end) > _NEAR for value in values) < _MIN_COUNT for end in (0.0, 1.0))


def _floor_and_ceiling(total: float) -> tuple[int, int]:
    """Round a sum of scores both down and up to whole numbers.

    If the sum is a whole number up to rounding errors, both are that number.
    """
    nearest = round(total)
    return (nearest, nearest) if math.isclose(total, nearest) else (int(total), int(total) + 1)


def paired_difference(
    ours: Sequence[float], theirs: Sequence[float], seed: int = 0
) -> MeanEstimate:
    """Return by how much two systems' mean scores differ on the same task items.

    The result includes a 95 % interval. Items are compared in pairs, so items that are hard for
    both systems do not widen the interval.

    If every score is 0 or 1, the interval combines those of two proportions: how many items
    changed, and how many of the changed items got better. It contains the true difference in at
    least 95 % of cases, and excludes 0 exactly if the interval of the second proportion excludes
    one half. For other scores, the interval comes from resampling the items. If fewer than five
    items changed by more than 1 %, it covers both of these intervals.

    >>> evaluate.paired_difference([1.0, 1.0], [0.0, 1.0]).value
    0.5
    """
    if len(ours) != len(theirs):
        raise ConfigError(f"{len(ours)} items cannot be paired with {len(theirs)}")
    if ours and {*ours, *theirs} <= {0.0, 1.0}:
        return _estimate_change(
            sum(a > b for a, b in zip(ours, theirs, strict=True)),
            sum(a < b for a, b in zip(ours, theirs, strict=True)),
            len(ours),
        )
    changes = [a - b for a, b in zip(ours, theirs, strict=True)]
    better, worse = sum(each > _NEAR for each in changes), sum(each < -_NEAR for each in changes)
    if changes and better + worse < _MIN_COUNT and _are_scores(ours, theirs):
        return _widen_interval(
            mean_with_interval(changes, seed), _estimate_change(better, worse, len(changes))
        )
    return mean_with_interval(changes, seed)


def _widen_interval(figure: MeanEstimate, other: MeanEstimate) -> MeanEstimate:
    """Widen the confidence interval of an estimate to include another estimate's interval.

    The value remains that of the first estimate.
    """
    return MeanEstimate(figure.value, min(figure.low, other.low), max(figure.high, other.high))


def _are_scores(*sides: Sequence[float]) -> bool:
    return all(min(side) >= 0 and max(side) <= 1 for side in sides)


def _estimate_change(better: int, worse: int, num: int) -> MeanEstimate:
    """Estimate the mean change in score when each task item is scored either right or wrong.

    The result includes a confidence interval. ``better`` counts the items that became right,
    ``worse`` those that became wrong, and ``num`` all items.
    """
    changed = better + worse
    rate = share_with_interval(changed, num)
    if not changed:
        return MeanEstimate(0.0, -rate.high, rate.high)
    share = share_with_interval(better, changed)
    low, high = 2 * share.low - 1, 2 * share.high - 1
    return MeanEstimate(
        (better - worse) / num,
        low * (rate.low if low > 0 else rate.high),
        high * (rate.high if high > 0 else rate.low),
    )


def quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted numbers by linear interpolation.

    For example, ``share=0.5`` gives the median.

    >>> quantile([1.0, 2.0, 4.0], 0.75)
    3.0
    """
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])
