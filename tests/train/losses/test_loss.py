"""Each loss formula on a small batch, compared with the same formula written out in fp64 numpy.

The five tokens are chosen so that every formula meets all its cases: a ratio that is high, low or
within bounds, with an advantage of either sign.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError
from ramify.train.losses import (
    POLICY_LOSSES,
    BaseLossFormula,
    Cispo,
    ClipCov,
    CriticOnlyLoss,
    Decoupled,
    DppoKl,
    DppoTv,
    DualClip,
    Gmpo,
    Gspo,
    ImportanceSamplingLoss,
    KlCov,
    MaskedImportanceSamplingLoss,
    PolicyLossInputs,
    PpoClip,
    ProxApprox,
    Sapo,
    importance_ratio,
)
from ramify.train.losses.base import SequenceSums, clipped_surrogate, is_clipped
from ramify.train.losses.total_loss import (
    BatchLossInputs,
    LossSpec,
    LossTally,
    compute,
    kl_estimate,
    loss_per_entry,
)

P_NOW = np.array([0.9, 0.30, 0.50, 0.10, 0.40])
P_OLD = np.array([0.5, 0.50, 0.45, 0.02, 0.40])
P_SAMPLER = np.array([0.6, 0.55, 0.50, 0.02, 0.45])
A = np.array([1.0, -2.0, 0.5, -1.0, 3.0])
R, RHO = P_NOW / P_OLD, P_NOW / P_SAMPLER  # r = 1.8, 0.6, 1.11, 5, 1;  rho = 1.5, 0.55, 1, 5, 0.89
L, OLD, M = np.log(P_NOW), np.log(P_OLD), np.log(P_SAMPLER)
CHOSEN = [0, 1, 1, 0, 0]
LAG = np.array([0, 1, 3, 0, 1])


def of_sequence(values: np.ndarray) -> np.ndarray:
    """Return the mean over each token's sequence: tokens 0 to 2 are one, 3 and 4 another."""
    return np.repeat([values[:3].mean(), values[3:].mean()], [3, 2])


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


S = np.exp(
    of_sequence(L - OLD)
)  # GSPO's ratios 1.0627 and 2.2361; only the second exceeds the bounds 0.8 and 1.2
TAU = np.where(A > 0, 1.0, 1.05)
MEAN_A = of_sequence(A)  # -1/6, 1
BOUNDED = np.where(MEAN_A > 0, np.minimum(L - OLD, 0.4), np.maximum(L - OLD, -0.4))
G = np.exp(of_sequence(BOUNDED))
NEAR = M + LAG / (LAG + 1) * (L - M)  # prox_approx: sampler, halfway, three quarters
W_NEAR, R_NEAR = np.exp(NEAR - M), np.exp(L - NEAR)
PPO = [-1.28, 0.8 * 2, -R[2] * 0.5, 5.0, -3.0]
PPO_SLOPES = [0.0, 0.0, -R[2] * 0.5, 5.0, -3.0]
W_OLD = np.minimum(P_OLD / P_SAMPLER, 0.9)
SIGN = np.sign(L - OLD)
DPPO_KL = P_SAMPLER * np.log(P_SAMPLER / P_NOW) + (1 - P_SAMPLER) * np.log(
    (1 - P_SAMPLER) / (1 - P_NOW)
)


def tokens(now: np.ndarray = L) -> PolicyLossInputs:
    given = (now, np.log(P_OLD), M, A)
    leaf, *others = (torch.tensor(each, dtype=torch.float64) for each in given)
    whole = SequenceSums(torch.tensor([0, 0, 0, 1, 1]), 2, torch.ones(5) > 0)
    staleness = torch.tensor([0.0, 1.0, 3.0, 0.0, 1.0], dtype=torch.float64)
    return PolicyLossInputs(
        leaf.requires_grad_(),
        *others,
        whole=whole,
        chosen=torch.tensor(CHOSEN) > 0,
        staleness=staleness,
    )


CASES: list[tuple[Any, list[float], list[float]]] = [
    # (loss, value per token, derivative by l per token); d r / d l = r
    (
        PpoClip(),
        [-1.28, 0.8 * 2, -R[2] * 0.5, 5.0, -3.0],
        [0.0, 0.0, -R[2] * 0.5, 5.0, -3.0],
    ),
    (
        DualClip(bound=3.0),
        [-1.28, 0.8 * 2, -R[2] * 0.5, 3.0, -3.0],
        [0.0, 0.0, -R[2] * 0.5, 0.0, -3.0],
    ),
    (
        Cispo(),
        [-1.28 * L[0], 0.8 * 2 * L[1], -R[2] * 0.5 * L[2], 1.28 * L[3], -3.0 * L[4]],
        [-1.28, 0.8 * 2, -R[2] * 0.5, 1.28, -3.0],
    ),
    (
        Cispo(anchor="sampler", clip_low=0.2, clip_high=4.0),
        [-1.5 * L[0], 0.8 * 2 * L[1], -0.5 * L[2], 5.0 * L[3], -RHO[4] * 3 * L[4]],
        [-1.5, 0.8 * 2, -0.5, 5.0, -RHO[4] * 3],
    ),
    (
        DppoTv(pull=0.0),  # p - q = 0.3, -0.25, 0, 0.08, -0.05: the first two are masked
        [0.0, 0.0, -0.5, 5.0, -RHO[4] * 3],
        [0.0, 0.0, -0.5, 5.0, -RHO[4] * 3],
    ),
    (
        DppoTv(delta=0.5, pull=0.1),
        (-RHO * A + 0.1 * (L - M) ** 2).tolist(),
        (-RHO * A + 0.2 * (L - M)).tolist(),
    ),
    (ImportanceSamplingLoss(), (-RHO * A).tolist(), (-RHO * A).tolist()),
    (
        # The first sequence is within bounds; in the second only A < 0 has a slope.
        Gspo(clip_low=0.2, clip_high=0.3),
        [-S[0] * 1, S[1] * 2, -S[2] * 0.5, S[3], -1.3 * 3],
        [-S[0] * 1, S[1] * 2, -S[2] * 0.5, S[3], 0.0],
    ),
    (
        Gmpo(),  # a token's slope is 1/n of its sequence's sum, 0 if it is clipped
        (-MEAN_A * G).tolist(),
        (-MEAN_A * G * np.array([1, 0, 1, 0, 1])).tolist(),
    ),
    (
        MaskedImportanceSamplingLoss(),  # rho = 1.5, .55, 1, 5, .89 within (.8, 1.28)
        [0.0, 0.0, -0.5 * L[2], 0.0, -RHO[4] * 3 * L[4]],
        [0.0, 0.0, -0.5, 0.0, -RHO[4] * 3],
    ),
    (
        Sapo(),
        (-4 / TAU * sigmoid(TAU * (R - 1)) * A).tolist(),
        (-4 * sigmoid(TAU * (R - 1)) * (1 - sigmoid(TAU * (R - 1))) * A * R).tolist(),
    ),
    (
        # q log(q/p) + (1-q) log((1-q)/(1-p)) = .311, .135, 0, .051, .005; p > q except in the
        # second and the last
        DppoKl(),
        [0.0, 0.0, -0.5, 5.0, -RHO[4] * 3],
        [0.0, 0.0, -0.5, 5.0, -RHO[4] * 3],
    ),
    (
        ClipCov(),
        [PPO[0], 0.0, 0.0, PPO[3], PPO[4]],
        [PPO_SLOPES[0], 0.0, 0.0, PPO_SLOPES[3], PPO_SLOPES[4]],
    ),
    (
        KlCov(beta=0.5),
        (-R * A + 0.5 * np.abs(L - OLD) * CHOSEN).tolist(),
        (-R * A + 0.5 * SIGN * CHOSEN).tolist(),
    ),
    (
        Decoupled(cap=0.9),  # exp(o - m) = .83, .91, .9, 1, .89
        (W_OLD * PPO).tolist(),
        (W_OLD * PPO_SLOPES).tolist(),
    ),
    (
        ProxApprox(),  # r = 1.5, .74, 1, 5, .94: clipped around the sampler if nothing is stale
        (W_NEAR * -np.minimum(R_NEAR * A, R_NEAR.clip(0.8, 1.28) * A)).tolist(),
        (W_NEAR * [0.0, 0.0, -R_NEAR[2] * 0.5, 5.0, -R_NEAR[4] * 3]).tolist(),
    ),
    (CriticOnlyLoss(), [0.0] * 5, [0.0] * 5),
]


@pytest.mark.parametrize(
    ("loss", "values", "slopes"), CASES, ids=lambda each: getattr(type(each), "__name__", "")
)
def test_policy_loss_values_and_slopes(loss: Any, values: list[float], slopes: list[float]):
    given = tokens()
    found = loss.per_token(given)
    np.testing.assert_allclose(found.detach(), values, rtol=1e-12, atol=1e-12)
    (slope,) = torch.autograd.grad(found.sum(), given.now)
    np.testing.assert_allclose(slope, slopes, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("loss", "clipped"),
    [
        (PpoClip(), [1, 1, 0, 0, 0]),
        (DualClip(), [1, 1, 0, 1, 0]),
        (Cispo(), [1, 1, 0, 1, 0]),
        (DppoTv(), [1, 1, 0, 0, 0]),
        (ImportanceSamplingLoss(), [0, 0, 0, 0, 0]),
        (Gspo(clip_low=0.2, clip_high=0.3), [0, 0, 0, 0, 1]),
        (Gmpo(), [0, 1, 0, 1, 0]),
        (MaskedImportanceSamplingLoss(), [1, 1, 0, 1, 0]),
        (Sapo(), [0, 0, 0, 0, 0]),
        (DppoKl(), [1, 1, 0, 0, 0]),
        (ClipCov(), [1, 1, 1, 0, 0]),
        (KlCov(), [0, 0, 0, 0, 0]),
        (Decoupled(), [1, 1, 0, 0, 0]),
        (ProxApprox(), [1, 1, 0, 0, 0]),
    ],
)
def test_clipped_tokens_per_policy_loss(loss: Any, clipped: list[int]):
    assert loss.clipped(tokens()).int().tolist() == clipped


@pytest.mark.parametrize("advantage", [-2.0, -0.5, 0.5, 2.0])
def test_tokens_are_clipped_if_the_surrogate_is_flat(advantage: float):
    """Both bounds, 0.75 and 1.5, still have a slope. An advantage of 0 has none anywhere, and
    nothing is cut off."""
    r = torch.tensor([0.5, 0.75, 1.0, 1.5, 2.0], dtype=torch.float64, requires_grad=True)
    given = torch.full_like(r, advantage)
    loss = clipped_surrogate(r, given, 0.25, 0.5)
    wanted = [-min(x * advantage, min(max(x, 0.75), 1.5) * advantage) for x in r.tolist()]
    assert loss.tolist() == wanted
    (slope,) = torch.autograd.grad(loss.sum(), r)
    assert is_clipped(r, given, 0.25, 0.5).tolist() == (slope == 0).tolist()
    assert not is_clipped(r, torch.zeros_like(r), 0.25, 0.5).any()


def test_extreme_ratios_give_finite_losses_and_gradients():
    far = tokens(np.array([50.0, -50.0, 300.0, -300.0, 0.0]) + L)
    for name, kind in POLICY_LOSSES.items():
        found = kind().per_token(far)
        (slope,) = torch.autograd.grad(found.sum(), far.now)
        assert bool(torch.isfinite(found).all()), name
        assert bool(torch.isfinite(slope).all()), name


def test_log_ratios_are_clamped_at_twenty():
    now = torch.tensor([30.0, 20.0, 19.0, 0.0, -19.0, -20.0, -30.0], dtype=torch.float64)
    logs = importance_ratio(now, torch.zeros_like(now)).log()
    assert logs.tolist() == pytest.approx([20.0, 20.0, 19.0, 0.0, -19.0, -20.0, -20.0])


@pytest.mark.parametrize("name", POLICY_LOSSES)
def test_policy_losses_are_built_and_stored_by_name(name: str):
    assert msgspec.convert({"policy": {"name": name}}, LossSpec).policy == POLICY_LOSSES[name]()
    assert msgspec.to_builtins(LossSpec(policy=POLICY_LOSSES[name]()))["policy"]["name"] == name
    with pytest.raises(ConfigError, match=f"policy loss '{name}': .* unknown field `nonsense`"):
        msgspec.convert({"policy": {"name": name, "nonsense": 1}}, LossSpec)


def test_kl_estimators_and_their_gradients():
    now, ref = (
        torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (L, np.log(P_OLD))
    )
    d = np.log(P_OLD) - L
    values = {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1, "k3+": np.exp(d) - d - 1}
    slopes = {"k1": np.ones(5), "k2": -d, "k3": 1 - np.exp(d), "k3+": -d}
    for kind, wanted in values.items():
        found = kl_estimate(kind, now, ref.detach())  # type: ignore[arg-type]
        np.testing.assert_allclose(found.detach(), wanted, rtol=1e-12, atol=1e-12)
        (slope,) = torch.autograd.grad(found.sum(), now)
        np.testing.assert_allclose(slope, slopes[kind], rtol=1e-12, atol=1e-12)
    far = kl_estimate("k3", torch.tensor([-40.0, 40.0]), torch.zeros(2))
    assert far.tolist() == [10.0, 10.0]


def entries(**changed: Any) -> BatchLossInputs:
    streams = {
        "advantages": A,
        "sampler_logprobs": M,
        "old_logprobs": np.log(P_OLD),
        "rl": [0.5, 0.5, 1.0, 0.0, 0.25],
    } | changed.pop("streams", {})
    fields: dict[str, Any] = {
        "logprobs": torch.tensor(L, requires_grad=True),
        "streams": {
            name: torch.tensor(np.asarray(each, np.float64)) for name, each in streams.items()
        },
        "denominators": {"rl": 10.0},
    }
    return BatchLossInputs(**(fields | changed))


def test_each_loss_component_is_divided_by_its_own_denominator():
    """rl: importance sampling with weights .5 .5 1 0 .25 over 10; ce: weights 0 0 2 1 0 over 4."""
    given = entries(streams={"ce": [0, 0, 2.0, 1.0, 0]}, denominators={"rl": 10.0, "ce": 4.0})
    loss = LossSpec(policy=ImportanceSamplingLoss())
    found, tally = compute(loss, given)
    rl = -(RHO * A * [0.5, 0.5, 1.0, 0.0, 0.25]).sum() / 10
    ce = -(L * [0, 0, 2, 1, 0]).sum() / 4
    assert found.item() == pytest.approx(rl + ce, rel=1e-12)
    measured = tally.metrics()
    assert (measured["rl_loss"], measured["ce_loss"], measured["loss"]) == pytest.approx(
        (rl, ce, rl + ce)
    )
    assert loss_per_entry(loss, given).sum().item() == pytest.approx(rl + ce, rel=1e-12)


def test_kl_and_entropy_use_the_policy_gradient_weights():
    entropy = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    given = entries(streams={"ref_logprobs": np.log(P_OLD)}, entropy=entropy)
    found, tally = compute(
        LossSpec(policy=ImportanceSamplingLoss(), kl_beta=0.1, kl="k2", entropy=0.01), given
    )
    k2 = (np.log(P_OLD) - L) ** 2 / 2
    weight = np.array([0.5, 0.5, 1.0, 0.0, 0.25])
    assert found.item() == pytest.approx(
        (weight * (-RHO * A + 0.1 * k2 - 0.01 * entropy.numpy())).sum() / 10
    )
    assert tally.metrics()["ref_kl"] == pytest.approx(k2[weight > 0].mean())
    assert tally.metrics()["entropy"] == pytest.approx((1 + 2 + 3 + 5) / 4)
    with pytest.raises(ConfigError, match="the batch has no 'ref_logprobs'"):
        compute(LossSpec(kl_beta=0.1), entries())


def test_loss_metrics_cover_tokens_with_weight():
    """Metrics cover the four tokens with weight: all but the fourth."""
    _, tally = compute(LossSpec(policy=PpoClip()), entries())
    _, twice = compute(LossSpec(policy=PpoClip()), entries())
    twice.merge(tally)
    weighs = np.array([0, 1, 2, 4])
    r, rho = R[weighs], RHO[weighs]
    mismatch = abs(np.log(P_OLD) - M)[weighs]
    for found in (tally.metrics(), twice.metrics()):
        assert found["clip_fraction"] == pytest.approx(2 / 4)
        assert found["approx_kl"] == pytest.approx((r - 1 - np.log(r)).mean())
        assert found["mismatch"] == pytest.approx(mismatch.mean())
        assert found["mismatch_max"] == pytest.approx(mismatch.max())
        assert found["ess"] == pytest.approx(rho.sum() ** 2 / (rho**2).sum() / 4)
    assert twice.metrics()["loss"] == pytest.approx(2 * tally.metrics()["loss"])
    assert LossTally().metrics() == {"loss": 0.0}


@pytest.mark.parametrize("plain", [False, True])
def test_nan_sampler_logprob_makes_mismatch_metrics_nan(plain: bool):
    """If the sampler's log-probability of a weighted token is NaN, the loss against the old ones
    stays finite and both mismatch metrics are NaN, whichever batch comes first; a NaN at a token
    without weight has no effect."""

    def tally(bad: int | None) -> Any:
        given = entries()
        sampler = given.streams["sampler_logprobs"].clone()
        if bad is not None:
            sampler[bad] = torch.nan
        loss, found = compute(
            LossSpec(policy=PpoClip()),
            given._replace(streams={**given.streams, "sampler_logprobs": sampler}),
        )
        assert torch.isfinite(loss)
        return found.to_serializable() if plain else found

    for first, second in ((1, None), (None, 1)):
        whole = LossTally()
        whole.merge(tally(first))
        whole.merge(tally(second))
        measured = whole.metrics()
        assert math.isnan(measured["mismatch"])
        assert math.isnan(measured["mismatch_max"])
    unweighted = []
    for bad in (3, None):
        whole = LossTally()
        whole.merge(tally(bad))
        unweighted.append(whole.metrics())
    assert unweighted[0] == unweighted[1]


def test_sums_over_sequences_ignore_entries_without_weight() -> None:
    """entry 0 1 2 | 3 4 | 5: entries 1 and 5 have no weight, whatever their values."""
    owner, weighs = torch.tensor([0, 0, 0, 1, 1, 2]), torch.tensor([1, 0, 1, 1, 1, 0]) > 0
    sums = SequenceSums(owner, 3, weighs)
    values = torch.tensor([1.0, math.nan, 2.0, 4.0, 6.0, math.inf])
    assert sums.sum(values).tolist() == [3, 3, 3, 10, 10, 0]
    assert sums.mean(values).tolist() == [1.5, 1.5, 1.5, 5, 5, 0]
    flags = torch.tensor([0, 1, 0, 0, 1, 1]) > 0
    assert sums.any(flags).tolist() == [False, False, False, True, True, False]
    lone = sums._replace(weighs=torch.tensor([1, 0, 0, 0, 0, 0]) > 0)
    assert lone.mean(values).tolist() == [1, 1, 1, 0, 0, 0]


def test_metrics_ignore_entries_without_weight_whatever_their_values() -> None:
    given = entries()
    logprobs = given.logprobs.detach().clone()
    logprobs[3] = math.nan  # the entry without weight
    _, found = compute(LossSpec(policy=PpoClip()), given._replace(logprobs=logprobs))
    _, wanted = compute(LossSpec(policy=PpoClip()), given)
    assert found.metrics() == pytest.approx(wanted.metrics())
    tally = LossTally()
    values, has_weight = torch.tensor([1.0, 2.0, math.nan]), torch.tensor([True, True, False])
    tally.add_mean("x", values, has_weight)
    assert tally.metrics()["x"] == 1.5


def test_tallying_metrics_does_not_read_device_tensors():
    """Meta tensors have no values, so reading one would fail."""
    found = LossTally()
    for _ in range(2):
        now, old, sampler, advantages = torch.zeros(4, 5, device="meta").unbind()
        clipped = torch.zeros(5, dtype=torch.bool, device="meta")
        found.add_policy_metrics(PolicyLossInputs(now, old, sampler, advantages), clipped, ~clipped)


def test_sampler_is_the_anchor_without_old_logprobs():
    given = entries()
    streams = {name: each for name, each in given.streams.items() if name != "old_logprobs"}
    found, tally = compute(LossSpec(policy=PpoClip()), given._replace(streams=streams))
    clipped = -np.minimum(RHO * A, RHO.clip(0.8, 1.28) * A)
    assert found.item() == pytest.approx((clipped * [0.5, 0.5, 1.0, 0.0, 0.25]).sum() / 10)
    assert tally.metrics()["mismatch"] == pytest.approx(abs(L - M)[[0, 1, 2, 4]].mean())


def test_distillation_by_teacher_top_ids_and_by_sampled_token():
    """Two tokens with the teacher's top two ids: the sum over them of p_T (log p_T - log p)."""
    teacher, ours = np.array([[0.7, 0.2], [0.5, 0.5]]), np.array([[0.6, 0.3], [0.9, 0.1]])
    given = BatchLossInputs(
        logprobs=torch.tensor(L[:2], requires_grad=True),
        streams={
            "kd": torch.tensor([1.0, 2.0]),
            "teacher_logprobs": torch.tensor(np.log(teacher)),
            "sampler_logprobs": torch.tensor(M[:2]),
        },
        denominators={"kd": 3.0},
        teacher_ids_logprobs=torch.tensor(np.log(ours)),
    )
    kl = (teacher * np.log(teacher / ours)).sum(1)
    assert compute(LossSpec(), given)[0].item() == pytest.approx((kl * [1, 2]).sum() / 3)
    sampled = torch.tensor(np.log([0.5, 0.6]))
    by_sample = given._replace(
        teacher_ids_logprobs=None, streams={**given.streams, "teacher_logprobs": sampled}
    )
    gap = sampled.numpy() - L[:2]
    value = (-gap * RHO[:2] + 1e-3 * (L - M)[:2] ** 2) * [1, 2] / 3
    assert compute(LossSpec(), by_sample)[0].item() == pytest.approx(value.sum())
    no_teacher = {name: each for name, each in given.streams.items() if name != "teacher_logprobs"}
    with pytest.raises(ConfigError, match="no stream 'teacher_logprobs'"):
        compute(LossSpec(), given._replace(streams=no_teacher))


def test_non_finite_entry_without_weight_is_ignored():
    broken = L.copy()
    broken[3] = -math.inf
    given = entries(logprobs=torch.tensor(broken, requires_grad=True))
    found, _ = compute(LossSpec(policy=ImportanceSamplingLoss()), given)
    assert math.isfinite(found.item())


def test_invalid_loss_options_are_rejected():
    with pytest.raises(ConfigError, match=r"kl_beta=-1 cannot be negative"):
        LossSpec(kl_beta=-1.0)
    with pytest.raises(ConfigError, match="'then' is neither 'old' nor 'sampler'"):
        Cispo(anchor="then")


def test_formula_of_a_plug_in_cannot_be_changed_after_its_bounds_were_checked():
    class Bounded(BaseLossFormula, tag="bounded"):
        high: float = 2.0

    with pytest.raises(AttributeError):
        Bounded().high = -1.0
