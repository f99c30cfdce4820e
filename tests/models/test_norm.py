"""Our RMSNorm and its backward pass against PyTorch's in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from ramify.models.dense import rms_norm


@pytest.mark.parametrize("shape", [(5, 8), (3, 4, 16), (1, 1)])
def test_rms_norm_and_gradients_match_pytorch(shape: tuple[int, ...]):
    rng = torch.Generator().manual_seed(0)
    x, dy = (torch.randn(shape, generator=rng) for _ in range(2))
    weight = 1 + torch.rand(shape[-1], generator=rng)
    exact = [each.double().requires_grad_() for each in (x, weight)]
    wanted = F.rms_norm(exact[0], weight.shape, exact[1], 1e-5)
    ours = [x.requires_grad_(), weight.requires_grad_()]
    found = rms_norm(*ours, 1e-5)
    torch.testing.assert_close(found, wanted.float())
    grads = torch.autograd.grad(wanted, exact, dy.double())
    for ours_grad, grad in zip(torch.autograd.grad(found, ours, dy), grads, strict=True):
        torch.testing.assert_close(ours_grad, grad.float(), rtol=1e-5, atol=1e-5)


def test_rms_norm_is_equal_with_and_without_gradients():
    """The engine computes without gradients, the trainer with them."""
    x, weight = torch.randn(7, 32), torch.rand(32)
    with torch.no_grad():
        plain = rms_norm(x, weight, 1e-6)
    assert torch.equal(rms_norm(x, weight, 1e-6), plain)
