"""Add low-rank adapters to sharded models, with ``peft``.

The base weights are frozen, and only the adapter matrices A and B are trained.

    inject(model, lora)          on the meta device, before the model is sharded
    begin(...)                   A random by seed, B zero: same initial values as ``lora.py``
    without(model)               the base model: a reference that needs no extra memory
    save(folder, lora, tensors)  in the format of peft and of inference servers

Only A and B differ from the base, so only they are optimized, checkpointed, and sent between ranks
for a weight sync.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.pip_install_command import install_command
from ramify.train.backends.lora import is_adapter_target

_A, _B, _BASE = "lora_A.default.weight", "lora_B.default.weight", "base_layer.weight"


class AdapterSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The rank, the scale and the target modules of low-rank adapters."""

    rank: int
    alpha: float
    targets: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    seed: int = 0


def need_peft() -> None:
    if find_spec("peft") is None:
        raise ConfigError(f"adapters on the backend fsdp need peft: {install_command('lora')}")


def target_module_names(model: nn.Module, lora: AdapterSpec) -> list[str]:
    """Return the names of the linear modules that ``lora.targets`` selects, in model order.

    Raises ConfigError if no module matches.
    """
    linear = {
        name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
    }
    matches = [
        name for name, module in linear.items() if is_adapter_target(name, module, lora.targets)
    ]
    if not matches:
        names = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ConfigError(
            f"lora.targets={lora.targets}: no linear module has that name: choose from {names}"
        )
    return matches


def inject(model: nn.Module, lora: AdapterSpec, names: Sequence[str]) -> None:
    """Add a low-rank adapter to each of the named modules of a model, and freeze all other
    weights."""
    need_peft()
    from peft import inject_adapter_in_model

    model.requires_grad_(False)
    inject_adapter_in_model(_config(lora, names), model, low_cpu_mem_usage=True)


def initial_weights(
    lora: AdapterSpec, names: Sequence[str], shapes: Mapping[str, torch.Size]
) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the initial values of the matrices A and B of every adapter.

    ``names`` and ``shapes`` are those of the weight matrices that get an adapter.
    """
    generator = torch.Generator().manual_seed(lora.seed)
    for name in names:
        rows, columns = shapes[name]
        yield f"{name}.{_A}", torch.randn(lora.rank, columns, generator=generator) * columns**-0.5
        yield f"{name}.{_B}", torch.zeros(rows, lora.rank)


def base_parameter_name(name: str) -> str:
    """Return the name that a parameter has in the model without adapters."""
    return name.replace("base_layer.", "")


def is_adapter(name: str) -> bool:
    return name.endswith((_A, _B))


def adapter_matrix_names(name: str) -> tuple[str, str]:
    """Return the names of the adapter matrices A and B of a weight matrix, given its name in the
    model without adapters."""
    owner = name.removesuffix(".weight")
    return f"{owner}.{_A}", f"{owner}.{_B}"


@contextmanager
def adapters_disabled(model: nn.Module) -> Iterator[None]:
    """Disable the adapters inside the ``with`` block, so that the model computes with its base
    weights."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    for layer in layers:  # peft's own switch would also change requires_grad
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def save(
    folder: Path, lora: AdapterSpec, names: Sequence[str], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write adapters to a folder in the format of ``peft``, as ``adapter_config.json`` and
    ``adapter_model.safetensors``."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    renamed = {
        f"base_model.model.{name.replace('.default', '')}": tensor.contiguous()
        for name, tensor in tensors
    }
    save_file(renamed, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    _config(lora, names).save_pretrained(folder)


def _config(lora: AdapterSpec, names: Sequence[str]) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # peft takes any number
        target_modules=list(names),
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )
