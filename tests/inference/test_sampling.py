"""Draws with known outcomes: the token that a number picks, its probability, the kept tokens."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from ramify.inference.local.generation_request import SamplingSettings, sample_tokens

# id           0    1    2    3
PROBABILITIES = [0.1, 0.4, 0.3, 0.2]
LOGITS = torch.tensor([[math.log(p) + 5.0 for p in PROBABILITIES]])
ALMOST_ONE = 1 - 2**-53


def draw_one(
    settings: SamplingSettings, uniform: float
) -> tuple[int, float, tuple[int, ...] | None]:
    drawn = sample_tokens(LOGITS, [settings], [uniform])
    return drawn.ids[0], round(math.exp(drawn.logprobs[0]), 6), drawn.kept[0]


@pytest.mark.parametrize(
    ("settings", "uniform", "expected"),
    [
        (SamplingSettings(), 0.0, (0, 0.1, None)),
        (SamplingSettings(), 0.09, (0, 0.1, None)),
        (SamplingSettings(), 0.11, (1, 0.4, None)),
        (SamplingSettings(), 0.79, (2, 0.3, None)),
        (SamplingSettings(), ALMOST_ONE, (3, 0.2, None)),
        (SamplingSettings(0.5), 0.03, (0, 0.033333, None)),  # squares: .01 .16 .09 .04 of .30
        (SamplingSettings(0.5), 0.04, (1, 0.533333, None)),
        (SamplingSettings(top_k=2), 0.57, (1, 0.571429, (1, 2))),  # .4 .3 of .7
        (SamplingSettings(top_k=2), 0.58, (2, 0.428571, (1, 2))),
        (SamplingSettings(top_p=0.39), ALMOST_ONE, (1, 1.0, (1,))),
        (SamplingSettings(top_p=0.41), ALMOST_ONE, (2, 0.428571, (1, 2))),
        (SamplingSettings(top_p=0.95), 0.5, (2, 0.3, (1, 2, 3, 0))),
        (
            SamplingSettings(top_p=0.5, top_k=3),
            0.99,
            (2, 0.428571, (1, 2)),
        ),  # top-k first: .444 .333 .222
        (SamplingSettings(top_p=1e-9), 0.9, (1, 1.0, (1,))),
        (SamplingSettings(0.0), 0.9, (1, 0.4, None)),
        (SamplingSettings(0.0, top_p=0.1), 0.9, (1, 0.4, None)),
    ],
)
def test_uniform_number_picks_the_expected_token(
    settings: SamplingSettings, uniform: float, expected: tuple[object, ...]
) -> None:
    assert draw_one(settings, uniform) == expected


def test_evenly_spaced_numbers_give_the_distribution() -> None:
    num = 1000
    uniforms = [(index + 0.5) / num for index in range(num)]
    drawn = sample_tokens(LOGITS.expand(num, -1), [SamplingSettings()] * num, uniforms)
    assert Counter(drawn.ids) == {0: 100, 1: 400, 2: 300, 3: 200}


def test_token_with_zero_probability_is_never_drawn() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert [
        sample_tokens(logits, [SamplingSettings()], [u]).ids[0]
        for u in (0.0, 0.49, 0.51, ALMOST_ONE)
    ] == [1, 1, 3, 3]


def test_ties_are_resolved_to_the_first_token() -> None:
    logits = torch.tensor([[1.0, 2.0, 2.0, 2.0]])
    assert sample_tokens(logits, [SamplingSettings(0.0)], [0.5]).ids == [1]
    assert sample_tokens(logits, [SamplingSettings(top_k=2)], [0.99]).kept == [(1, 2)]


def test_rows_are_sampled_independently() -> None:
    settings = [
        SamplingSettings(),
        SamplingSettings(0.0),
        SamplingSettings(0.7),
        SamplingSettings(top_p=0.6),
        SamplingSettings(2.0, top_k=5),
        SamplingSettings(0.0),
    ]
    logits = torch.randn(len(settings), 40, generator=torch.Generator().manual_seed(0))
    uniforms = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    together = sample_tokens(logits, settings, uniforms)
    alone = [
        sample_tokens(logits[i : i + 1], settings[i : i + 1], uniforms[i : i + 1])
        for i in range(len(settings))
    ]
    assert [(each.ids[0], each.kept[0]) for each in alone] == list(
        zip(together.ids, together.kept, strict=True)
    )
    assert together.logprobs == pytest.approx([each.logprobs[0] for each in alone], abs=1e-6)
