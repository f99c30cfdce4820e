"""Every loss and correction on the real backend: same loss and gradient however a step is cut,
packed, split or ordered.

A loss over whole sequences rejects split rows; for all others, splitting changes nothing.
"""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from ramify.errors import ConfigError, TrainError
from ramify.train.backends.base import OptimizerSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.backends.trained_model import PolicyWithSeparateCritic
from ramify.train.data.pack import PackingCostModel, PackingSpec, pack
from ramify.train.losses import (
    POLICY_LOSSES,
    ClipCov,
    CriticOnlyLoss,
    ImportanceSamplingLoss,
    KlCov,
    PpoClip,
)
from ramify.train.losses.corrections import (
    CORRECTIONS,
    GeometricMask,
    IcePop,
    Opsm,
    SequenceTis,
    WorstTokenMask,
)
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, TokenSequence
from tests.train.backends.small import policy, tree

FREE = PackingCostModel(pair=0.0, share=0.0, join=0.0)
TIGHT: dict[str, Any] = {
    "clip_cov": ClipCov(share=0.3, cov_low=0.01),
    "kl_cov": KlCov(share=0.3),
    "geometric_mask": GeometricMask(low=0.98, high=1.04),
    "icepop": IcePop(low=0.9, high=1.3, weigh=True),
    "sequence_tis": SequenceTis(cap=1.2),
    "worst_token_mask": WorstTokenMask(low=0.65, high=1.5),
    "opsm": Opsm(delta=0.0),
}
"""Losses and corrections with bounds tight enough that some of these tokens exceed them."""


@pytest.fixture(scope="module")
def rows() -> list[TokenSequence]:
    """Rows with old log-probabilities near the policy's, the sampler's near these, and all other
    streams that a loss may read."""
    found, backend, rng = tree(), SingleBackend(policy()), np.random.default_rng(1)
    batches = pack(found)
    for batch, logprobs in zip(batches, backend.logprobs(batches), strict=True):
        for index in batch.sequences:
            mine = batch.owners[:, 0] == index
            each, tokens = found[index], batch.owners[mine, 1]
            for name, scale in (
                ("old_logprobs", 0.2),
                ("ref_logprobs", 0.5),
                ("values", 0.3),
                ("returns", 1.0),
            ):
                column = np.zeros(len(each), np.float32)
                column[tokens] = rng.normal(
                    logprobs[mine] if name.endswith("logprobs") else 0.0, scale
                )
                each.streams[name] = column
            each.sampler_logprobs[tokens] = each.streams["old_logprobs"][tokens] + rng.normal(
                0, 0.2, mine.sum()
            )
            each.streams["staleness"] = (np.arange(len(each)) % 3).astype(np.float32)
    return found


def learn(
    batches: list[Batch], loss: LossSpec, *, critic: bool = False
) -> tuple[float, dict[str, torch.Tensor]]:
    backend = SingleBackend(policy(), critic=critic)
    measured = backend.forward_backward(batches, loss)
    found = {
        name: each.grad
        for name, each in backend.trained_modules.named_parameters()
        if each.grad is not None
    }
    return measured["loss"], found


def check_same(
    found: tuple[float, dict[str, torch.Tensor]], wanted: tuple[float, dict[str, torch.Tensor]]
) -> None:
    assert found[0] == pytest.approx(wanted[0], rel=2e-6, abs=1e-6)
    assert found[1].keys() == wanted[1].keys()
    for name, gradient in wanted[1].items():
        scale = max(float(gradient.abs().max()), 1e-6)
        assert float((found[1][name] - gradient).abs().max()) / scale < 2e-5, name


def split(rows: list[TokenSequence]) -> list[TokenSequence]:
    """Split each row after two thirds into two of the same name; the first part's tokens are
    context in the second."""
    found = []
    for row in rows:
        end = 2 * len(row) // 3
        for keeps in (np.arange(len(row)) < end, np.arange(len(row)) >= end):
            weights = {name: getattr(row, name) * keeps for name in ("rl", "ce")}
            found.append(msgspec.structs.replace(row, **weights))
    return found


LOSSES = [
    *(
        (name, LossSpec(policy=TIGHT.get(name, kind()), kl_beta=0.1, entropy=0.01))
        for name, kind in POLICY_LOSSES.items()
    ),
    *(
        (name, LossSpec(policy=PpoClip(), corrections=(TIGHT.get(name, kind()),)))
        for name, kind in CORRECTIONS.items()
    ),
]


@pytest.mark.parametrize("loss", [loss for _, loss in LOSSES], ids=[name for name, _ in LOSSES])
def test_loss_and_gradient_do_not_depend_on_packing(
    loss: LossSpec, rows: list[TokenSequence]
) -> None:
    critic = isinstance(loss.policy, CriticOnlyLoss)
    wanted = learn(pack(rows, PackingSpec(share=False)), loss, critic=critic)
    assert any(float(each.abs().max()) > 0 for each in wanted[1].values())
    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    small = pack(shuffled, PackingSpec(max_tokens=50, cost=FREE))
    assert len(small) > 3
    check_same(learn(small, loss, critic=critic), wanted)
    parts = pack(
        split(rows),
        PackingSpec(max_tokens=50, cost=FREE),
        pack(rows)[0].denominators,
        whole="call" if loss.is_over_sequences else None,
    )
    assert len(parts) > 3
    check_same(learn(parts, loss, critic=critic), wanted)


def test_every_correction_changes_the_loss(rows: list[TokenSequence]) -> None:
    """Otherwise the test above would prove little about them."""
    batches = pack(rows)
    plain = learn(batches, LossSpec(policy=PpoClip()))[0]
    for name, kind in CORRECTIONS.items():
        corrected = learn(
            batches, LossSpec(policy=PpoClip(), corrections=(TIGHT.get(name, kind()),))
        )[0]
        assert corrected != pytest.approx(plain, rel=1e-3), name
    assert learn(batches, LossSpec(policy=TIGHT["clip_cov"]))[0] != pytest.approx(plain, rel=1e-3)


def test_critic_learns_the_returns() -> None:
    """On the policy's trunk, and as a separate model that leaves the policy unchanged."""
    shared = SingleBackend(policy(), OptimizerSpec(lr=0.01), critic=True)
    own = PolicyWithSeparateCritic(
        SingleBackend(policy(), OptimizerSpec(lr=0.01)),
        SingleBackend(policy(), OptimizerSpec(lr=0.01), critic=True),
    )
    for backend in (shared, own):
        rows = tree()
        for row in rows:
            row.advantages[:] = 0
            row.ce = None
            row.streams["values"] = np.zeros(len(row), np.float32)
            row.streams["returns"] = np.where(
                row.rl != 0, 0.7 if row.name.startswith("fork") else -0.3, 0
            ).astype("f4")
        batches = pack(rows)
        first = [values for each in backend.values(batches) for values in each.tolist()]
        assert set(first) == {0.0}
        before = {name: each.clone() for name, each in backend.weights()}
        loss = LossSpec(
            policy=ImportanceSamplingLoss(),
            value=msgspec.convert({"clip": None}, type(LossSpec().value)),
        )
        missed = []
        for _ in range(12):
            missed.append(backend.forward_backward(batches, loss)["value_loss"])
            backend.optim_step()
        assert missed[-1] < 0.3 * missed[0]
        moved = any(not torch.equal(each, before[name]) for name, each in backend.weights())
        assert moved == (backend is shared)


@pytest.mark.parametrize("bad", ["policy", "critic"])
def test_infinite_gradient_of_policy_or_critic_stops_both(bad: str) -> None:
    """If either gradient is infinite, both models stay unchanged, count no step and drop their
    gradients."""
    policies, critics = (
        SingleBackend(policy(), OptimizerSpec(lr=0.01)),
        SingleBackend(policy(), OptimizerSpec(lr=0.01), critic=True),
    )
    own = PolicyWithSeparateCritic(policies, critics)
    rows = tree()
    for row in rows:
        row.ce = None
        row.streams["values"] = np.zeros(len(row), np.float32)
        row.streams["returns"] = np.where(row.rl != 0, 0.7, 0).astype(np.float32)
    batches, loss = pack(rows), LossSpec(policy=ImportanceSamplingLoss())
    own.forward_backward(batches, loss)
    before = [
        each.detach().clone()
        for one in (policies, critics)
        for each in one.trained_modules.parameters()
    ]
    broken = next(
        each
        for each in (policies if bad == "policy" else critics).trained_modules.parameters()
        if each.grad is not None
    )
    assert broken.grad is not None
    broken.grad.fill_(torch.inf)
    with pytest.raises(TrainError, match="the gradient of step 1 is not finite"):
        own.optim_step()
    now = [each for one in (policies, critics) for each in one.trained_modules.parameters()]
    assert all(torch.equal(each, was) for each, was in zip(now, before, strict=True))
    assert (policies.version, critics.version) == (0, 0)
    assert all(each.grad is None for each in now)
    own.forward_backward(batches, loss)
    assert own.optim_step()["critic_grad_norm"] > 0
    assert (policies.version, critics.version) == (1, 1)


def test_critic_is_saved_and_loaded_and_missing_critic_is_rejected(tmp_path: Any) -> None:
    backend = PolicyWithSeparateCritic(
        SingleBackend(policy()), SingleBackend(policy(), critic=True)
    )
    with torch.no_grad():
        backend.critic.value_head.weight.fill_(0.5)  # type: ignore[attr-defined]
    backend.save(tmp_path / "own")
    again = PolicyWithSeparateCritic(
        SingleBackend(policy(seed=1)), SingleBackend(policy(seed=1), critic=True)
    )
    again.load(tmp_path / "own")
    batches = pack(tree())
    assert [each.tolist() for each in again.values(batches)] == [
        each.tolist() for each in backend.values(batches)
    ]
    SingleBackend(policy(), critic=True).save(tmp_path / "shared")
    with pytest.raises(ConfigError, match="was saved with a critic, unlike this run"):
        SingleBackend(policy()).load(tmp_path / "shared")
    with pytest.raises(ConfigError, match="this backend has no critic"):
        SingleBackend(policy()).values(batches)
    with pytest.raises(ConfigError, match="the batch has no stream 'returns'"):
        SingleBackend(policy(), critic=True).forward_backward(batches, LossSpec())
