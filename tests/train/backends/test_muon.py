"""Muon compared with torch's Muon and with plain float64 algebra."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ramify.train.backends.optimizers import Muon, orthogonalize

SHAPES = ((8, 8), (6, 12), (12, 6), (6, 12))


def matrices(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def naive(matrix: Tensor) -> Tensor:
    """Five Newton–Schulz steps on one matrix, in float64."""
    x = matrix.double()
    x = x / x.norm()
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x


def test_orthogonalised_singular_values_are_near_one() -> None:
    for matrix in matrices(0):
        values = torch.linalg.svdvals(orthogonalize(matrix[None])[0])
        assert 0.3 < values.min() < values.max() < 1.3


def test_orthogonal_matches_plain_float64_algebra() -> None:
    for matrix in matrices(1):
        expected = naive(matrix) if matrix.shape[0] <= matrix.shape[1] else naive(matrix.T).T
        torch.testing.assert_close(
            orthogonalize(matrix[None])[0].double(), expected, atol=1e-4, rtol=0
        )


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_muon_matches_torch_up_to_bf16_rounding(decay: float) -> None:
    ours, theirs = ([torch.nn.Parameter(each.clone()) for each in matrices(2)] for _ in range(2))
    mine = Muon(ours, lr=0.01, momentum=0.9, weight_decay=decay)
    other = torch.optim.Muon(
        theirs, lr=0.01, momentum=0.9, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        for a, b, gradient in zip(ours, theirs, matrices(3 + step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        mine.step()
        other.step()
    for a, b, start in zip(ours, theirs, matrices(2), strict=True):
        assert (a - b).norm() < 0.03 * (b - start).norm()


def test_momentum_is_restored_from_the_state_dict() -> None:
    first, second = ([torch.nn.Parameter(each.clone()) for each in matrices(4)] for _ in range(2))
    steady, broken = Muon(first, lr=0.01), Muon(second, lr=0.01)
    for step in range(4):
        if step == 2:
            saved = broken.state_dict()
            broken = Muon(second, lr=0.01)
            broken.load_state_dict(saved)
        for a, b, gradient in zip(first, second, matrices(5 + step), strict=True):
            a.grad, b.grad = gradient.clone(), gradient.clone()
        steady.step()
        broken.step()
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_parameters_without_gradient_stay_unchanged() -> None:
    parameters = [torch.nn.Parameter(each.clone()) for each in matrices(6)]
    parameters[1].grad = torch.ones_like(parameters[1])
    Muon(parameters, lr=0.1, weight_decay=0.5).step()
    moved = [not torch.equal(a, b) for a, b in zip(parameters, matrices(6), strict=True)]
    assert moved == [False, True, False, False]
