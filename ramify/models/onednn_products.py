"""Matrix products in fp32 with oneDNN, which is faster than PyTorch's default library on some CPUs.

PyTorch multiplies fp32 matrices by MKL, which is written for Intel's CPUs. oneDNN, which PyTorch
contains as well, uses all vector instructions of AMD's: 250 GFLOP/s instead of 115 on one core of
an EPYC 9005, and 130 instead of 105 without its widest instructions. On other CPUs products are
left to PyTorch (``is_faster_on_cpu``).

oneDNN compiles a kernel for each combination of sizes, which takes 0.2 to 0.4 ms, and keeps the
last 1,024. So callers choose few different numbers of rows (``rounded_rows``), and other products
are left to PyTorch. Starting a product takes 10 µs, as long as 16 rows of 128 x 256 take otherwise.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

LEAST_ROWS = 16
"""Minimum number of rows for which ``linear`` uses oneDNN. It is low, so that a batch that is split
over ranks is computed by the same kernel as the whole batch."""


_PACKED_FOR_ROWS = 64
"""Number of rows for which the layout of packed weights is optimized. Products with other numbers
of rows can use it, too."""


@functools.cache
def is_available() -> bool:
    """Return True if this build of PyTorch has the oneDNN operations that this module needs."""
    return torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_linear_pointwise")


@functools.cache
def is_faster_on_cpu() -> bool:
    """Return True if oneDNN's products are faster on this CPU than PyTorch's default ones.

    The answer is the same in every process, so that a resumed run computes the same numbers.
    """
    return is_available() and _vendor() == "AuthenticAMD"


def _vendor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return ""
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("vendor_id"))
    return next(found, "")


def rounded_rows(num: int) -> int:
    """Round a number of matrix rows up to one of a few sizes.

    Sizes below 1,024 become multiples of 64, and larger ones multiples of 128. Sizes below
    ``LEAST_ROWS`` are unchanged.
    """
    if num < LEAST_ROWS:
        return num
    step = 64 if num < 1024 else 128
    return -(-num // step) * step


def packed(weight_OI: Tensor) -> Tensor:
    """Return a weight in oneDNN's own layout, in which products of 64 rows take 3 to 9 % less time.

    Only the products of this module can use it.
    """
    return cast(Tensor, torch.ops.mkldnn._reorder_linear_weight(weight_OI, _PACKED_FOR_ROWS))


def product(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None = None) -> Tensor:
    """Return ``x @ weight.T + bias`` [N, O], computed with oneDNN and without gradients.

    Both matrices must be contiguous or transposes of contiguous ones. Other layouts are very slow.
    The weight may be ``packed``.
    """
    return cast(
        Tensor,
        torch.ops.mkldnn._linear_pointwise(x_NI, weight_OI, bias_O, "none", [], ""),
    )


def fused_linear_mul(x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor, factor_NO: Tensor) -> Tensor:
    """Return ``(x @ weight.T + bias) * factor`` [N, O], computed with oneDNN and without gradients.

    Layouts are those of ``product``.
    """
    return cast(
        Tensor,
        torch.ops.mkldnn._linear_pointwise.binary(x_NI, factor_NO, weight_OI, bias_O, "mul"),
    )


def product_and_sum(
    x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None, more_NO: Tensor
) -> Tensor:
    """Return ``x @ weight.T + bias + more`` [N, O], computed with oneDNN and without gradients.

    Layouts are those of ``product``.
    """
    return cast(
        Tensor,
        torch.ops.mkldnn._linear_pointwise.binary(x_NI, more_NO, weight_OI, bias_O, "add"),
    )


def linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Compute the same as ``F.linear``, with oneDNN if that is faster for these tensors."""
    if _is_supported(x, weight_OI):
        return cast(Tensor, _Linear.apply(x, weight_OI, bias_O))  # type: ignore[no-untyped-call]
    return F.linear(x, weight_OI, bias_O)


def _is_supported(x: Tensor, weight: Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and x.dim() == 2
        and len(x) >= LEAST_ROWS
        and len(x) == rounded_rows(len(x))
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and is_faster_on_cpu()
        and type(weight) in (Tensor, nn.Parameter)  # not sharded over ranks
        and not torch.is_autocast_enabled("cpu")
    )


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_NI: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
        ctx.save_for_backward(x_NI, weight_OI)
        return product(x_NI.contiguous(), weight_OI, bias_O)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NI, weight_OI = ctx.saved_tensors
        dy_NO = grads[0].contiguous()
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        return (
            product(dy_NO, weight_OI.t()) if needs_x else None,
            product(dy_NO.t(), x_NI.contiguous().t()) if needs_weight else None,
            dy_NO.sum(0) if needs_bias else None,
        )
