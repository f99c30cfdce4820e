"""The root-mean-square norm, with a custom backward pass on a CPU.

    y = x r weight,  r = 1 / sqrt(mean(x²) + eps)          g = dy weight
    dweight = sum over rows of dy x r                      dx = r (g - x r mean(g x r))

PyTorch has a kernel for the forward pass, which is used here, but splits its backward pass into a
dozen operations; on 2,000 rows of 128 this one takes a third of the time. On other devices PyTorch
has a kernel for both.

Legend: D size of the last dimension.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

_HAS_KERNEL = hasattr(torch.ops.aten, "_fused_rms_norm")


def rms_norm(x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """``x`` [..., D], normalized over its last dimension; both tensors have the same type."""
    if (
        _HAS_KERNEL
        and x.device.type == "cpu"
        and torch.is_grad_enabled()
        and x.dtype == torch.float32
    ):
        return cast(Tensor, _RmsNorm.apply(x, weight_D, eps))  # type: ignore[no-untyped-call]
    return F.rms_norm(x, weight_D.shape, weight_D, eps)


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        y, r = torch.ops.aten._fused_rms_norm(x, weight_D.shape, weight_D, eps)
        ctx.save_for_backward(x, r, weight_D)
        return cast(Tensor, y)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grads
        x, r, weight_D = ctx.saved_tensors
        share_ND = (dy * x).mul_(r).flatten(0, -2)
        # Sums as products with a vector: on a CPU this is faster, over rows and over the last
        # dimension.
        dweight_D = share_ND.t().mv(torch.ones(len(share_ND)))
        mean = share_ND.mv(weight_D).mul_(-1 / x.shape[-1]).view(r.shape)
        dx = (dy * weight_D).addcmul_(x, mean.mul_(r)).mul_(r)
        return dx, dweight_D, None
