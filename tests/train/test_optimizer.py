"""Our AdamW against torch's own, to the bit, and from torch's to ours in the middle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ramify.train.backends.optimizer import AdamW

SETTINGS: dict[str, Any] = {"lr": 0.01, "betas": (0.8, 0.95), "eps": 1e-6}
SHAPES = ((6, 4), (6,), (3, 5))


def numbers(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in SHAPES]


def groups() -> list[dict[str, Any]]:
    """One that decays and one that does not."""
    made = [nn.Parameter(each) for each in numbers(0)]
    return [{"params": made[:1], "weight_decay": 0.1}, {"params": made[1:], "weight_decay": 0.0}]


def ours() -> Any:
    return AdamW(groups(), **SETTINGS)


def torchs() -> Any:
    return torch.optim.AdamW(groups(), **SETTINGS, fused=True)


def stepped(optimizer: Any, steps: range) -> list[Tensor]:
    """The parameters after the gradients of ``steps``; the last parameter has one at every second step."""
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for step in steps:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for parameter, gradient in zip(parameters, numbers(1 + step), strict=True):
            parameter.grad = gradient
        if step % 2:
            parameters[-1].grad = None
        optimizer.step()
    return [each.detach() for each in parameters]


def test_steps_are_those_of_torch() -> None:
    for mine, theirs in zip(stepped(ours(), range(5)), stepped(torchs(), range(5)), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("first", [ours, torchs])
def test_what_is_saved_goes_on(first: Any) -> None:
    wanted = stepped(torchs(), range(6))
    begun, goes_on = first(), ours()
    middle = stepped(begun, range(3))
    with torch.no_grad():
        for parameter, value in zip((p for g in goes_on.param_groups for p in g["params"]), middle, strict=True):
            parameter.copy_(value)
    goes_on.load_state_dict(begun.state_dict())
    stepped(begun, range(3, 4))  # what was saved is a copy
    for found, each in zip(stepped(goes_on, range(3, 6)), wanted, strict=True):
        assert torch.equal(found, each)


def test_a_saved_form_of_other_groups_is_refused() -> None:
    other = AdamW([{"params": [nn.Parameter(torch.zeros(2))], "weight_decay": 0.0}], **SETTINGS)
    with pytest.raises(ValueError, match=r"the saved optimizer has groups of \[1\] parameters, this one of \[1, 2\]"):
        ours().load_state_dict(other.state_dict())
