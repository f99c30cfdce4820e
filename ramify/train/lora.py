"""Low-rank adapters: each chosen matrix W is trained as W + (alpha / rank) B A, with W held still
(LoRA, 2106.09685).

    attach(model, rank, alpha, targets)   from then on ``linear.weight`` is that sum, for whoever reads it
    merged(model)                         the sums under the names that the matrices had before
    with without(model)                   meanwhile it is W

B begins at zero, so that nothing changes at first. Written as a parametrization of
``nn.Linear.weight``, so that any module, ours or transformers', computes with it unawares. Leaves
out adapters on disk: a policy is saved with its sums.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ramify.errors import ConfigError
from ramify.inference.weight_sync.base import AdaptedMatrix, added

_ORIGINAL = "parametrizations.weight.original"


class LoraAdapter(nn.Module):
    """W -> W + scale · B A"""

    def __init__(self, weight: Tensor, rank: int, alpha: float, generator: torch.Generator) -> None:
        super().__init__()
        rows, columns = weight.shape
        self.scale, self.is_off = alpha / rank, False
        first = torch.randn(rank, columns, generator=generator) * columns**-0.5
        self.A = nn.Parameter(first.to(weight.device, torch.float32))
        self.B = nn.Parameter(torch.zeros(rows, rank, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        if self.is_off:
            return weight
        return added(weight, self.A, self.B, self.scale)


def attach(
    model: nn.Module,
    rank: int,
    alpha: float,
    targets: Sequence[str] | str = "all-linear",
    seed: int = 0,
) -> int:
    """Give every ``nn.Linear`` whose name's last part is in ``targets`` (``all-linear``: all but
    the output matrix) an adapter, and hold everything else still. Returns how many parameters are
    trained. Raises ConfigError where nothing has such a name."""
    generator = torch.Generator().manual_seed(seed)
    model.requires_grad_(False)
    chosen = [module for name, module in model.named_modules() if is_chosen(name, module, targets)]
    if not chosen:
        linear = {
            name.rpartition(".")[2]
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear)
        }
        raise ConfigError(
            f"lora.targets={targets}: no linear module is called so; there are "
            f"{', '.join(sorted(linear))}"
        )
    for module in chosen:
        parametrize.register_parametrization(
            module, "weight", LoraAdapter(module.weight, rank, alpha, generator)
        )
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def merged(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Name -> parameter, as the model without adapters would have them; of one without them, as it
    has them."""
    for name, parameter in model.named_parameters():
        owner, _, _ = name.partition(".parametrizations.")
        if owner == name:
            yield name, parameter.detach()
        elif name.endswith(_ORIGINAL):
            yield f"{owner}.weight", cast(Tensor, model.get_submodule(owner).weight).detach()


def unmerged(model: nn.Module) -> Iterator[tuple[str, Tensor, AdaptedMatrix | None]]:
    """As ``merged``, with nothing computed yet: (name, the parameter below, it with its adapter or
    None)."""
    for name, parameter in model.named_parameters():
        owner, _, _ = name.partition(".parametrizations.")
        if owner == name:
            yield name, parameter, None
        elif name.endswith(_ORIGINAL):
            yield f"{owner}.weight", parameter, _adapted(model.get_submodule(owner), parameter)


def _adapted(linear: nn.Module, base: Tensor) -> AdaptedMatrix:
    (adapter,) = cast(nn.ModuleDict, linear.parametrizations)["weight"].children()
    assert isinstance(adapter, LoraAdapter)
    return AdaptedMatrix(
        base.detach(), lambda: (adapter.A.detach(), adapter.B.detach()), adapter.scale
    )


@contextlib.contextmanager
def without(model: nn.Module) -> Iterator[None]:
    """The model as it was before ``attach``: nothing but the adapters has been trained. For one
    thread alone."""
    adapters = [module for module in model.modules() if isinstance(module, LoraAdapter)]
    for each in adapters:
        each.is_off = True
    try:
        yield
    finally:
        for each in adapters:
            each.is_off = False


def has_adapters(model: nn.Module) -> bool:
    return any(isinstance(module, LoraAdapter) for module in model.modules())


def is_chosen(name: str, module: nn.Module, targets: Sequence[str] | str) -> bool:
    if not isinstance(module, nn.Linear):
        return False
    last = name.rpartition(".")[2]
    return last not in ("lm_head", "embed_out") if targets == "all-linear" else last in targets
