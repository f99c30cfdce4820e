"""Comparison of a sharded model with one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec
from ramify.train.backends.fsdp import FsdpRanks
from ramify.train.backends.fsdp_model import FsdpBackend, FsdpModel
from ramify.train.backends.single_device import SingleBackend
from ramify.train.losses import DppoTv
from ramify.train.losses.total_loss import LossSpec
from tests.train.backends.small import CONFIG, policy

LOSS = LossSpec(policy=DppoTv(pull=0.1), entropy=0.01)


FP32 = TrainerComputeSpec(precision="fp32")


def shard(**fields: Any) -> TrainerComputeSpec:
    own = {name: fields.pop(name) for name in ("recompute",) if name in fields}
    return TrainerComputeSpec(precision="fp32", shard=FsdpSpec(ranks=2, **fields), **own)


def spread(ranks: FsdpRanks, compute: TrainerComputeSpec | None = None) -> FsdpModel:
    return ranks.shard_model(CONFIG, policy().model.state_dict(), compute=compute)


def check_gradients(model: FsdpModel, single: SingleBackend) -> None:
    """Compare the full gradient to 1e-5 of its norm, and each tensor to 1e-4 of its norm."""
    ours = dict(model.gradients())
    wanted = {name: each.grad for name, each in single.model.named_parameters()}
    assert list(ours) == list(wanted)
    apart = {name: float((gradient - wanted[name]).norm()) for name, gradient in ours.items()}
    norms = {name: float(each.norm()) for name, each in wanted.items()}
    assert np.linalg.norm(list(apart.values())) <= 1e-5 * np.linalg.norm(list(norms.values()))
    for name, norm in norms.items():
        assert apart[name] <= 1e-4 * norm, name


def check_steps(
    model: FsdpModel, fsdp: FsdpBackend, single: SingleBackend, batches: Any, num: int
) -> None:
    for step in range(num):
        ours, theirs = (each.forward_backward(batches, LOSS) for each in (fsdp, single))
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4)
        if step in (0, num - 1):
            check_gradients(model, single)
        ours, theirs = fsdp.optim_step(), single.optim_step()
        assert ours == pytest.approx(theirs, rel=1e-5)
