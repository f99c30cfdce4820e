"""Train low-rank adapters (LoRA, 2106.09685).

A weight matrix W becomes W + (alpha / rank) B A, where W is frozen and the small matrices A and B
are trained.

    attach(model, rank, alpha, targets)   from now on ``linear.weight`` returns that sum
    merged(model)                         the sums, under the original names of the matrices
    with without(model)                   inside, ``linear.weight`` returns W

B starts at zero, so the model is unchanged at first. An adapter is a parametrization of
``nn.Linear.weight``, so any module, ours or one from transformers, uses it without changes. A
policy is saved with its sums, and not with separate adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import LoraAdaptedMatrix, merge_adapter

_ORIGINAL = "parametrizations.weight.original"


class LoraParametrization(nn.Module):
    """A PyTorch parametrization that adds a low-rank adapter to a weight.

    The weight W becomes W + scale · B A, where A and B are the adapter's matrices.
    """

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale = alpha / rank
        self.is_off = False
        first = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.A = nn.Parameter(first.to(weight.device, torch.float32))
        self.B = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        if self.is_off:
            return weight
        return merge_adapter(weight, self.A, self.B, self.scale)


def attach(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> int:
    """Add a low-rank adapter to each targeted linear module of a model, and freeze all other
    weights.

    ``targets`` lists the last name parts of the modules, or ``all-linear`` for all except the
    output matrix. Returns the number of trained parameters. Raises ConfigError if no module has
    such a name.
    """
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    chosen = [
        module for name, module in model.named_modules() if is_adapter_target(name, module, targets)
    ]
    if not chosen:
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        raise ConfigError(
            f"lora.targets={targets}: no linear module has that name: choose from "
            f"{', '.join(sorted(linear))}"
        )
    for module in chosen:
        parametrize.register_parametrization(
            module, "weight", LoraParametrization(module.weight, rank, alpha, generator)
        )
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the merged tensor of each weight of a model with adapters.

    Each adapter is merged into the weight that it adapts.
    """
    for name, parameter in model.named_parameters():
        owner, _, _ = name.partition(".parametrizations.")
        if owner == name:
            yield name, parameter.detach()
        elif name.endswith(_ORIGINAL):
            yield f"{owner}.weight", cast(Tensor, model.get_submodule(owner).weight).detach()


def base_tensors_and_adapters(
    model: nn.Module,
) -> Iterator[tuple[str, Tensor, LoraAdaptedMatrix | None]]:
    """Yield each weight's name, base tensor, and a function that merges in its adapter.

    The function is None for a weight without an adapter.
    """
    for name, parameter in model.named_parameters():
        owner, _, _ = name.partition(".parametrizations.")
        if owner == name:
            yield name, parameter, None
        elif name.endswith(_ORIGINAL):
            yield (
                f"{owner}.weight",
                parameter,
                _adapted_matrix(model.get_submodule(owner), parameter),
            )


def _adapted_matrix(linear: nn.Module, base: Tensor) -> LoraAdaptedMatrix:
    (adapter,) = cast(nn.ModuleDict, linear.parametrizations)["weight"].children()
    assert isinstance(adapter, LoraParametrization)
    return LoraAdaptedMatrix(
        base.detach,
        lambda: (adapter.A.detach(), adapter.B.detach()),
        adapter.scale,
        base.dtype,
    )


@contextlib.contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the ``with`` block, so that the model computes as it did before
    they were added.

    Not thread-safe.
    """
    adapters = [module for module in model.modules() if isinstance(module, LoraParametrization)]
    for adapter in adapters:
        adapter.is_off = True
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.is_off = False


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraParametrization) for module in model.modules())


def is_adapter_target(name: str, module: nn.Module, targets: Sequence[str] | str) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    last = name.rpartition(".")[2]
    return last not in ("lm_head", "embed_out") if targets == "all-linear" else last in targets
