"""From how weights lie in training to how an engine has them: adapters added, shards gathered,
precision changed.

    sources(module, dtype)      one tensor at a time; nothing is made before the carrier asks for it

Names and shapes are those of a checkpoint in Hugging Face's layout, which engines load by
themselves into whatever layout they compute in (fused, split over GPUs, packed). An output matrix
that is tied to the embeddings is one tensor; each engine ties its own, and the canary sees one that
did not.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from ramify.inference.weight_sync.base import AdaptedMatrix, WeightSource

Lazy = Callable[[], Tensor]
"""A tensor that is made when it is asked for."""
_WHOLE = (Tensor, nn.Parameter)
"""Types of tensors that are not spread over ranks."""


def sources(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[WeightSource]:
    """Of named parameters, each to be had in ``dtype``. A sharded one (DTensor) is gathered when it
    is asked for: all ranks have to ask, in the same order."""
    return [source(name, tensor, dtype) for name, tensor in named]


def source(name: str, tensor: Tensor, dtype: torch.dtype, make: Lazy | None = None) -> WeightSource:
    """Of one parameter; with ``make``, of what is computed from it (an adapter added) and has its
    shape."""
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
    """The same as long as nobody writes into a parameter that is held still; None for others. Of
    one that is trained torch's own count cannot be believed: its fused AdamW writes and does not
    count (2.13)."""
    if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
        return None
    local = tensor if type(tensor) in _WHOLE else getattr(tensor, "_local_tensor", tensor)
    return (id(tensor), local.data_ptr(), local._version)


def _full(made: Tensor | Lazy, dtype: torch.dtype) -> Tensor:
    tensor = made if isinstance(made, Tensor) else made()
    gather = None if type(tensor) in _WHOLE else getattr(tensor, "full_tensor", None)
    whole: Tensor = (gather() if callable(gather) else tensor).detach()
    return whole if whole.dtype == dtype else whole.to(dtype)
