"""Decides the precision of the trainer's matrix products: the same as the engine's.

    checkpoint and kind of device  ->  policy.dtype, used by the engine (models/load.py)
    compute.precision=auto         ->  bf16 if the policy has 16 bits, else fp32

So ``auto`` is fp32 on every CPU unless policy.dtype=bfloat16, and on a GPU follows the checkpoint.
It does not depend on which precision a processor is fast at: otherwise the same run would compute
different numbers on another machine. Not here: how bf16 products are computed (``single.py``,
``sharding.py``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import msgspec

from ramify.train.backends.base import ComputeSpec

if TYPE_CHECKING:
    import torch

ROUNDING = 2.0**-5
"""For bf16: the largest difference between two log-probabilities of a path by rounding alone, as a
share of the path's largest. This is eight units in the last place (bf16 has 8 bits); three were
measured."""


def decided(compute: ComputeSpec, dtype: torch.dtype, device: str) -> ComputeSpec:
    """``compute`` with ``precision`` set to fp32 or bf16, for a policy loaded as ``dtype``."""
    if compute.precision != "auto":
        return compute
    is_half = dtype.itemsize == 2
    precision: Literal["fp32", "bf16"] = "bf16" if is_half and _has_bf16(device) else "fp32"
    return msgspec.structs.replace(compute, precision=precision)


def _has_bf16(device: str) -> bool:
    """Whether the device supports bf16: every CPU does, but not every GPU."""
    import torch

    return device != "cuda" or torch.cuda.is_bf16_supported()
