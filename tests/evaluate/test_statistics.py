"""Statistics against hand calculations, against enumeration of all subsets, and against numpy."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from ramify.errors import ConfigError
from ramify.evaluate.statistics import (
    DRAWS,
    MeanEstimate,
    majority_at_k,
    mean_with_interval,
    paired_difference,
    pass_at_k,
    quantile,
    score_with_interval,
    share_with_interval,
)


@pytest.mark.parametrize(
    ("num", "of", "low", "high"),
    [
        (50, 100, 0.403832, 0.596168),  # Wilson
        (967, 1024, 0.928561, 0.956790),
        (3, 100, 0.006230, 0.085176),  # Clopper and Pearson, from a table of the beta distribution
        (97, 100, 0.914824, 0.993770),
        (0, 10, 0.0, 0.308497),
        (10, 10, 0.691503, 1.0),
    ],
)
def test_share_interval_matches_reference_values(
    num: int, of: int, low: float, high: float
) -> None:
    found = share_with_interval(num, of)
    assert found.value == num / of
    assert (found.low, found.high) == pytest.approx((low, high), abs=1e-6)


def test_share_of_zero_attempts_is_refused() -> None:
    with pytest.raises(ConfigError, match="0 successes in 0 attempts is impossible"):
        share_with_interval(0, 0)


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (16, 3, 8, 0.9),  # 1 - C(13,8)/C(16,8) = 1 - 1287/12870
        (4, 1, 1, 0.25),
        (4, 1, 2, 0.5),
        (4, 2, 2, 5 / 6),
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (10, 9, 2, 1.0),  # too few wrong ones to fill two
        (200, 1, 100, 0.5),
    ],
)
def test_pass_at_k_matches_hand_calculation(n: int, c: int, k: int, expected: float) -> None:
    assert pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_is_the_mean_over_all_subsets() -> None:
    for n in range(1, 7):
        for c, k in itertools.product(range(n + 1), range(1, n + 1)):
            attempts = [1] * c + [0] * (n - c)
            subsets = list(itertools.combinations(attempts, k))
            assert pass_at_k(n, c, k) == pytest.approx(
                sum(map(max, subsets)) / len(subsets), abs=1e-12
            )


@pytest.mark.parametrize(("n", "c", "k"), [(4, 1, 5), (4, 1, 0), (4, 5, 1), (4, -1, 1)])
def test_invalid_pass_at_k_arguments_are_refused(n: int, c: int, k: int) -> None:
    with pytest.raises(ConfigError, match=r"pass@"):
        pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "rewards", "k", "expected"),
    [
        (["a", "b", "b"], [1, 0, 0], 3, 0.0),
        (["a", "b", "a"], [1, 0, 1], 3, 1.0),
        (["a", "b"], [1, 0], 2, 1.0),  # of two equals the earlier
        (["b", "a"], [0, 1], 2, 0.0),
        ([None, None, "a"], [0, 0, 1], 3, 1.0),  # no answer has no vote
        ([None, None], [0, 0], 2, 0.0),
        (
            ["a", "b", "b", "a", "a", "b"],
            [1, 0, 0, 1, 1, 0],
            3,
            0.5,
        ),  # blocks: a b b -> b, a a b -> a
        (
            ["a", "a", "b", "b", "b"],
            [1, 1, 0, 0, 0],
            2,
            0.5,
        ),  # blocks: a a -> a, b b -> b; the last b is left over
        (["a", "b"], [0.25, 0.5], 1, 0.375),
    ],
)
def test_majority_at_k_matches_hand_calculation(
    answers: list[str | None], rewards: list[float], k: int, expected: float
) -> None:
    assert majority_at_k(answers, rewards, k) == pytest.approx(expected)


def test_majority_at_k_needs_k_attempts() -> None:
    with pytest.raises(
        ConfigError, match="majority@3 needs at least 3 attempts at each item, but there are 2"
    ):
        majority_at_k(["a", "b"], [1, 0], 3)


def test_quantiles_match_numpy() -> None:
    numpy = pytest.importorskip("numpy")
    values = sorted(random.Random(1).uniform(-5, 5) for _ in range(37))
    for share in (0.0, 0.025, 0.5, 0.77, 0.975, 1.0):
        assert quantile(values, share) == pytest.approx(
            float(numpy.quantile(values, share)), abs=1e-12
        )


def test_interval_equals_bootstrap_quantiles() -> None:
    """The resampling is repeated here, one item at a time."""
    values = [0.0, 1.0, 1.0, 0.5, 0.0, 1.0]
    rng = random.Random(3)
    means = sorted(sum(rng.choices(values, k=6)) / 6 for _ in range(DRAWS))
    assert mean_with_interval(values, seed=3) == MeanEstimate(
        3.5 / 6, quantile(means, 0.025), quantile(means, 0.975)
    )
    assert mean_with_interval(values, seed=3) == mean_with_interval(values, seed=3)
    many = [random.Random(8).random() for _ in range(9)] + [0.1 * i for i in range(9)]
    assert mean_with_interval(many, seed=4) != mean_with_interval(many, seed=3)


def test_interval_width_matches_theory() -> None:
    """400 coins with 100 heads give 0.25 +- 1.96·sqrt(0.25·0.75/400) = 0.25 +- 0.0424."""
    figure = mean_with_interval([1.0] * 100 + [0.0] * 300)
    assert figure.value == 0.25
    assert figure.low == pytest.approx(0.25 - 0.0424, abs=0.006)
    assert figure.high == pytest.approx(0.25 + 0.0424, abs=0.006)


@pytest.mark.slow
def test_interval_has_its_nominal_coverage() -> None:
    rng = random.Random(0)
    held = 0
    for trial in range(300):
        figure = mean_with_interval([float(rng.random() < 0.3) for _ in range(100)], seed=trial)
        held += figure.low <= 0.3 <= figure.high
    assert 0.90 < held / 300 < 0.98


def test_interval_of_one_item_and_of_none() -> None:
    assert mean_with_interval([0.5]) == MeanEstimate(0.5, 0.5, 0.5)
    assert mean_with_interval([1.0, 1.0]) == MeanEstimate(1.0, 1.0, 1.0)
    with pytest.raises(ConfigError, match="cannot take a mean over no items"):
        mean_with_interval([])


def test_score_of_alike_items_has_an_exact_interval() -> None:
    """Four of four says less than forty of forty, and neither is certain."""
    four, forty = (score_with_interval([1.0] * num) for num in (4, 40))
    assert (four.value, four.high) == (1.0, 1.0)
    assert four.low == pytest.approx(0.025 ** (1 / 4))
    assert four.low < forty.low < 1.0
    assert score_with_interval([0.0] * 4).high == pytest.approx(1 - four.low)
    assert score_with_interval([0.0, 1.0, 1.0]) == share_with_interval(2, 3)
    half = score_with_interval([0.5] * 3)
    assert (half.low, half.high) == (share_with_interval(1, 3).low, share_with_interval(2, 3).high)
    assert score_with_interval([0.5, 1.0, 0.0]) == mean_with_interval([0.5, 1.0, 0.0])
    with pytest.raises(ConfigError, match="cannot take a mean over no items"):
        score_with_interval([])


def test_score_that_is_nearly_always_0_or_1_is_not_certain() -> None:
    """Partial scores next to 0 or 1, of which a resampling would make an interval of no width."""
    low = score_with_interval([0.0] * 9 + [1e-9])
    assert low.value == pytest.approx(0, abs=1e-9)
    assert low.high >= share_with_interval(0, 10).high
    high = score_with_interval([1.0] * 9 + [0.999])
    assert high.low <= share_with_interval(9, 10).low
    # With enough items in between, resampling is right.
    spread = [0.0] * 20 + [0.25, 0.5, 0.75, 0.3, 0.6]
    assert score_with_interval(spread) == mean_with_interval(spread)
    change = paired_difference([0.5] + [0.2] * 9, [0.5] * 1 + [0.2] * 8 + [0.7])
    assert change.low < -0.1 < 0 < change.high
    assert paired_difference([1e-9] + [0.0] * 3, [0.0] * 4).high >= 0.5


def test_difference_of_right_and_wrong_items_agrees_with_the_sign_test() -> None:
    """Five that got better of five that changed have p = 0.0625, six have p = 0.031."""
    five, six = (paired_difference([1.0] * 10, [0.0] * n + [1.0] * (10 - n)) for n in (5, 6))
    assert five.low < 0 < six.low
    assert five.value == 0.5 < five.high < 1.0
    none = paired_difference([1.0] * 4, [1.0] * 4)
    assert (none.value, none.low) == (0.0, -none.high)
    assert none.high == pytest.approx(share_with_interval(0, 4).high)
    worse = paired_difference([0.0] * 6, [1.0] * 6)
    assert (worse.value, worse.low) == (-1.0, -1.0)
    assert worse.high < 0


def test_a_paired_difference_is_narrower_than_two_intervals() -> None:
    """Both find the same items hard: ours is better by exactly 0.1 on each."""
    hard = [random.Random(5).random() for _ in range(1)] + [i / 50 for i in range(50)]
    ours, theirs = [x + 0.1 for x in hard], hard
    paired = paired_difference(ours, theirs)
    assert paired.value == pytest.approx(0.1)
    assert paired.low == pytest.approx(0.1, abs=1e-9)
    alone = mean_with_interval(ours)
    assert alone.high - alone.low > 0.1
    with pytest.raises(ConfigError, match="2 items cannot be paired with 1"):
        paired_difference([1.0, 2.0], [1.0])
    assert math.isclose(paired_difference([1.0, 0.0], [0.0, 0.0]).value, 0.5)
