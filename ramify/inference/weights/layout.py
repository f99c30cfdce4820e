"""From how weights lie in training to how an engine has them: adapters added, shards gathered, precision changed.

    sources(module, dtype)      one tensor at a time; nothing is made before the carrier asks for it

Names and shapes are those of a checkpoint in Hugging Face's layout, which engines load by themselves into whatever layout
they compute in (fused, split over GPUs, packed). An output matrix that is tied to the embeddings is one tensor; each engine
ties its own, and the canary sees one that did not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from functools import partial

import torch
from torch import Tensor

from ramify.inference.weights.base import Source


def sources(named: Iterable[tuple[str, Tensor]], dtype: torch.dtype) -> list[Source]:
    """Of named parameters, each to be had in ``dtype``. A sharded one (DTensor) is gathered when it is asked for: all
    ranks have to ask, in the same order."""
    found = []
    for name, tensor in named:
        kind = dtype if tensor.is_floating_point() else tensor.dtype
        found.append(Source(name, tuple(tensor.shape), kind, stamp_of(tensor), partial(_full, tensor, dtype)))
    return found


def stamp_of(tensor: Tensor) -> Hashable:
    """The same as long as nobody writes into ``tensor`` in place; None where torch does not count."""
    local = getattr(tensor, "_local_tensor", tensor)
    try:
        return (id(tensor), local.data_ptr(), local._version)
    except RuntimeError:  # made in inference mode
        return None


def _full(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    gather = getattr(tensor, "full_tensor", None)
    whole: Tensor = (gather() if callable(gather) else tensor).detach()
    return whole.to(dtype) if whole.is_floating_point() else whole
