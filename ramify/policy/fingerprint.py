"""A short name for weights: equal for equal bits, on every device, and different if one bit or the order of rows changes.

Each parameter's bits are read as integers b_i, and Σ b_i · (2i + 1) is taken modulo 2^64; name, shape and precision go
into the hash with it. Integer sums do not depend on the order in which a device adds.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_CHUNK, _GPU_CHUNK = 1 << 16, 1 << 22
"""Numbers at once: on a CPU what stays in its cache."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def fingerprint(module: nn.Module) -> str:
    """Of all parameters; sixteen hexadecimal digits."""
    return fingerprint_of(module.named_parameters())


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Of named tensors, in whatever order they come."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda each: each[0]):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum(tensor.detach())}\n".encode())
    return digest.hexdigest()


def _sum(tensor: Tensor) -> int:
    bits = tensor.contiguous().view(_BITS[tensor.element_size()]).flatten()
    size = _CHUNK if bits.device.type == "cpu" else _GPU_CHUNK
    weights = torch.arange(min(size, max(bits.numel(), 1)), device=bits.device) * 2 + 1
    total = 0
    for start in range(0, bits.numel(), size):
        part = bits[start : start + size].to(torch.int64)
        total += 2 * start * int(part.sum())  # before it is multiplied in place
        total += int(part.mul_(weights[: part.numel()]).sum())
    return total % (1 << 64)
