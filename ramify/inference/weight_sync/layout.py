"""Conversion of the training layout into what an engine needs: adapters added, shards gathered,
precision changed.

    sources(module, dtype)      one tensor at a time, computed when the weight sync asks for it

Names and shapes are those of a checkpoint in Hugging Face's layout. Engines load it into their own
compute layout (fused, split over GPUs, packed). An output matrix that is tied to the embeddings is
one tensor; each engine ties its own, and the canary detects one that did not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from ramify.inference.weight_sync.base import AdaptedMatrix, WeightSource

Lazy = Callable[[], Tensor]
"""Returns a tensor that is computed when it is called."""
_WHOLE = (Tensor, nn.Parameter)
"""Types of tensors that are not sharded over ranks."""


def sources(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[WeightSource]:
    """Weight sources of named parameters, in precision ``dtype``. A sharded parameter (DTensor) is
    gathered on demand: all ranks have to request the same tensors in the same order."""
    return [source(name, tensor, dtype) for name, tensor in named]


def source(name: str, tensor: Tensor, dtype: torch.dtype, make: Lazy | None = None) -> WeightSource:
    """Weight source of one parameter; with ``make``, of a tensor of the same shape that is computed
    from it (an adapter added)."""
    kind = dtype if tensor.is_floating_point() else tensor.dtype
    stamp = stamp_of(tensor) if make is None else None
    adapted = make if isinstance(make, AdaptedMatrix) else None
    return WeightSource(
        name,
        tuple(tensor.shape),
        kind,
        stamp,
        partial(_full, tensor if make is None else make, kind),
        adapted,
    )


def stamp_of(tensor: Tensor) -> Hashable:
    """Change marker of a frozen parameter, equal as long as nothing writes into it; None for other
    parameters. Torch's version counter is not reliable for trained ones: its fused AdamW writes
    without counting (2.13)."""
    if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
        return None
    local = tensor if type(tensor) in _WHOLE else getattr(tensor, "_local_tensor", tensor)
    return (id(tensor), local.data_ptr(), local._version)


def _full(tensor_or_lazy: Tensor | Lazy, dtype: torch.dtype) -> Tensor:
    tensor = tensor_or_lazy if isinstance(tensor_or_lazy, Tensor) else tensor_or_lazy()
    gather = None if type(tensor) in _WHOLE else getattr(tensor, "full_tensor", None)
    whole: Tensor = (gather() if callable(gather) else tensor).detach()
    return whole if whole.dtype == dtype else whole.to(dtype)
