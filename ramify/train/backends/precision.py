"""Decides the precision in which the trainer multiplies matrices: that of the engine.

    checkpoint and kind of device  ->  policy.dtype, in which the engine computes (models/load.py)
    compute.precision=auto         ->  bf16 if the policy has 16 bits, else fp32

So `auto` is fp32 on every CPU unless policy.dtype=bfloat16, and on a GPU follows the checkpoint.
It never asks what a processor is fast at: the same run would learn other numbers elsewhere.
Not here: how bf16 products are made (``single.py``, ``sharding.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from ramify.train.backends.base import ComputeSpec

if TYPE_CHECKING:
    import torch

ROUNDING = 2.0**-5
"""In bf16, the largest difference of two log-probabilities of a path by rounding alone, as a share
of the path's largest: eight units in the last place (bf16 has 8 bits); three were measured."""


def decided(compute: ComputeSpec, dtype: torch.dtype, device: str) -> ComputeSpec:
    """``compute`` with ``precision`` fp32 or bf16, for a policy that was loaded as ``dtype``."""
    if compute.precision != "auto":
        return compute
    is_half = dtype.itemsize == 2
    precision: Literal["fp32", "bf16"] = "bf16" if is_half and _has_bf16(device) else "fp32"
    return msgspec.structs.replace(compute, precision=precision)


def _has_bf16(device: str) -> bool:
    """False on a GPU that cannot compute in bf16 at all; every CPU can."""
    import torch

    return device != "cuda" or torch.cuda.is_bf16_supported()
