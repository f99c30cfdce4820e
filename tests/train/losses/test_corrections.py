"""Corrections for the mismatch of sampler and trainer: factors by hand, and effect on a loss.

token       0      1      2    |   3      4        in two sequences
o - m     log 4  log 2  log 1/4 | log 1.01 0        sums log 2, log 1.01; means log 2^(1/3), log 1.01^(1/2)
o - l       1      0     -0.4   |  0.1    0.3       means 0.2, 0.2
m - l     -0.386 -0.693  0.986  |  0.090  0.3       means -0.031, 0.195
A           1     -1      1     |  -1     1
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError
from ramify.train.losses import ImportanceSamplingLoss, PolicyLossInputs, PpoClip
from ramify.train.losses.base import SequenceSums
from ramify.train.losses.corrections import (
    CORRECTIONS,
    GeometricMask,
    IcePop,
    Opsm,
    SequenceTis,
    TokenTis,
    WorstTokenMask,
)
from ramify.train.losses.total_loss import BatchLossInputs, LossSpec, compute

OLD = np.array([-1.0, -2.0, -1.5, -0.5, -3.0])
SAMPLER = OLD - np.log([4, 2, 0.25, 1.01, 1])
NOW = OLD - np.array([1, 0, -0.4, 0.1, 0.3])
A = np.array([1.0, -1.0, 1.0, -1.0, 1.0])
OWNER = torch.tensor([0, 0, 0, 1, 1])


def tokens(weighs: Any = (1, 1, 1, 1, 1)) -> PolicyLossInputs:
    now, old, sampler, advantages = (
        torch.tensor(each, dtype=torch.float64) for each in (NOW, OLD, SAMPLER, A)
    )
    return PolicyLossInputs(
        now, old, sampler, advantages, SequenceSums(OWNER, 2, torch.tensor(weighs) > 0)
    )


@pytest.mark.parametrize(
    ("correction", "factors"),
    [
        (TokenTis(), [2, 2, 0.25, 1.01, 1]),
        (TokenTis(cap=3.0), [3, 2, 0.25, 1.01, 1]),
        (SequenceTis(), [2, 2, 2, 1.01, 1.01]),
        (SequenceTis(cap=1.5), [1.5, 1.5, 1.5, 1.01, 1.01]),
        (IcePop(), [1, 1, 0, 1, 1]),
        (IcePop(high=3.0, weigh=True), [0, 2, 0, 1.01, 1]),
        (GeometricMask(), [0, 0, 0, 1, 1]),
        (GeometricMask(low=0.9, high=1.3), [1, 1, 1, 1, 1]),
        (WorstTokenMask(), [1, 1, 1, 1, 1]),
        (WorstTokenMask(low=0.3, high=100.0), [0, 0, 0, 1, 1]),
        (Opsm(delta=0.15), [1, 1, 1, 0, 1]),
        (Opsm(delta=-0.05), [1, 0, 1, 0, 1]),
        (Opsm(), [1, 1, 1, 1, 1]),
    ],
    ids=lambda each: getattr(type(each), "__name__", ""),
)
def test_correction_factors(correction: Any, factors: list[float]) -> None:
    np.testing.assert_allclose(correction.factor(tokens()), factors, rtol=1e-9)


def test_tokens_without_weight_do_not_count_for_their_sequence() -> None:
    """Without its third token the first sequence has two tokens, a gap of log 8 and a mean m - l of
    -0.54."""
    weighs = (1, 1, 0, 1, 1)
    assert SequenceTis(cap=9.0).factor(tokens(weighs))[0].item() == pytest.approx(8)
    assert WorstTokenMask(low=0.3).factor(tokens(weighs))[:2].tolist() == [1, 1]
    assert Opsm(delta=-0.5).factor(tokens(weighs))[1].item() == 1


def entries(**streams: Any) -> BatchLossInputs:
    columns = {"advantages": A, "sampler_logprobs": SAMPLER, "rl": np.ones(5), **streams}
    given = {
        name: torch.tensor(np.asarray(each), dtype=torch.float64) for name, each in columns.items()
    }
    return BatchLossInputs(
        torch.tensor(NOW, requires_grad=True), given, {"rl": 5.0}, sequences=(OWNER, 2)
    )


def test_corrections_multiply_only_the_policy_loss() -> None:
    """r A is multiplied by the factors, the KL is not; masked tokens stay in the denominator of
    5."""
    loss = LossSpec(
        policy=PpoClip(clip_low=0.9, clip_high=9.0),
        corrections=(TokenTis(), IcePop()),
        kl_beta=0.1,
        kl="k2",
    )
    found, tally = compute(loss, entries(old_logprobs=OLD, ref_logprobs=OLD))
    r, factor = np.exp(NOW - OLD), np.array([2, 2, 0, 1.01, 1])
    assert found.item() == pytest.approx((-r * A * factor + 0.05 * (NOW - OLD) ** 2).sum() / 5)
    assert tally.metrics()["corrected_away"] == pytest.approx(
        0.1
    )  # one of two corrections masked one of five tokens
    found.backward()


def test_corrections_need_old_logprobs_from_the_trainer() -> None:
    loss = LossSpec(corrections=(TokenTis(),))
    with pytest.raises(
        ConfigError, match=r"no stream 'old_logprobs'; attach it, or set loss\.old=now"
    ):
        compute(loss, entries())
    at_once = msgspec.structs.replace(loss, old="now", policy=ImportanceSamplingLoss())
    gap = np.minimum(np.exp(NOW - SAMPLER), 2.0)
    assert compute(at_once, entries())[0].item() == pytest.approx(
        (-np.exp(NOW - SAMPLER) * A * gap).sum() / 5
    )
    with pytest.raises(
        ConfigError, match=r"loss\.old=sampler: corrections and decoupled losses compare"
    ):
        LossSpec(corrections=(TokenTis(),), old="sampler")


@pytest.mark.parametrize(
    ("loss", "minibatches", "old"),
    [
        (LossSpec(policy=PpoClip()), 1, "sampler"),
        (LossSpec(policy=PpoClip()), 2, "pass"),
        (LossSpec(policy=PpoClip(), old="sampler"), 2, "sampler"),
        (LossSpec(policy=ImportanceSamplingLoss()), 2, "sampler"),
        (LossSpec(policy=ImportanceSamplingLoss(), corrections=(IcePop(),)), 1, "now"),
        (LossSpec(policy=ImportanceSamplingLoss(), corrections=(IcePop(),)), 4, "pass"),
        (LossSpec(policy=ImportanceSamplingLoss(), corrections=(Opsm(),)), 4, "sampler"),
    ],
)
def test_source_of_old_logprobs_depends_on_loss_and_minibatches(
    loss: LossSpec, minibatches: int, old: str
) -> None:
    assert loss.for_minibatches(minibatches).old == old


@pytest.mark.parametrize("old", ["now", "sampler", "pass"])
def test_opsm_masks_the_same_tokens_for_every_source_of_old_logprobs(
    old: Any,
) -> None:
    """Only the fourth token has A < 0 and is in a sequence that moved by more than 0.15."""
    loss = LossSpec(policy=ImportanceSamplingLoss(), corrections=(Opsm(delta=0.15),), old=old)
    _, tally = compute(loss, entries(**({"old_logprobs": OLD} if old == "pass" else {})))
    assert tally.metrics()["corrected_away"] == pytest.approx(0.2)


@pytest.mark.parametrize("name", CORRECTIONS)
def test_corrections_are_built_and_stored_by_name(name: str) -> None:
    made = CORRECTIONS[name]()
    for given in (name, {"name": name}, f"ramify.train.losses.corrections:{type(made).__name__}"):
        assert msgspec.convert({"corrections": [given]}, LossSpec).corrections == (made,)
    assert msgspec.to_builtins(LossSpec(corrections=(made,)))["corrections"][0]["name"] == name
    with pytest.raises(ConfigError, match=r"unknown correction 'icepot': did you mean 'icepop'\?"):
        LossSpec(corrections=("icepot",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policy": {"name": "ppo_clip", "clip_low": -1}}, "ppo_clip: clip_low=-1 cannot be neg"),
        ({"policy": {"name": "gspo", "clip_high": float("nan")}}, "gspo: clip_high=nan cannot be"),
        ({"corrections": [{"name": "token_tis", "cap": -2}]}, "token_tis: cap=-2 cannot be neg"),
        ({"corrections": [{"name": "icepop", "low": 9}]}, "icepop: low=9 must not be above high=5"),
        ({"kl_beta": float("nan")}, "loss.kl_beta=nan cannot be negative"),
    ],
)
def test_invalid_clip_and_correction_bounds_are_rejected(options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LossSpec(**options)


def test_equal_bounds_are_accepted() -> None:
    given = msgspec.convert({"corrections": [{"name": "icepop", "low": 1, "high": 1}]}, LossSpec)
    assert given.corrections == (IcePop(low=1.0, high=1.0),)
