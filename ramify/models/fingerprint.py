"""A short fingerprint of weights: equal for equal bits, on every device, and different if one bit
or the order of rows changes.

A parameter's bytes are read as 64-bit integers w_i, padded with zeros, and Σ w_i · (2i + 1) is
taken modulo 2^64. Name, shape and precision are hashed together with this sum. Integer sums do not
depend on the order in which a device adds. With i = W r + c the sum is Σ_c (2c + 1) Σ_r w_rc + 2W
Σ_r r Σ_c w_rc: sums of rows and columns, at the speed of memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

_COLUMNS = 1024
_ROWS, _GPU_ROWS = 128, 8192
"""Rows summed at a time; on a CPU as many as fit into its cache."""
_WORD = 8
"""Bytes."""


def fingerprint(module: nn.Module) -> str:
    """Fingerprint of all parameters; sixteen hexadecimal digits."""
    return fingerprint_of(module.named_parameters())


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """Fingerprint of named tensors, independent of their order."""
    digest = hashlib.blake2b(digest_size=8)
    for name, tensor in sorted(tensors, key=lambda item: item[0]):
        digest.update(
            f"{name} {tuple(tensor.shape)} {tensor.dtype} {_sum(tensor.detach())}\n".encode()
        )
    return digest.hexdigest()


def _sum(tensor: Tensor) -> int:
    bytes_N = tensor.contiguous().flatten().view(torch.uint8)
    line = _COLUMNS * _WORD
    num_rows = len(bytes_N) // line
    total = _sum_of_lines(bytes_N[: num_rows * line], 0)
    if rest := len(bytes_N) - num_rows * line:
        last = torch.zeros(line, dtype=torch.uint8, device=tensor.device)
        last[:rest] = bytes_N[num_rows * line :]
        total += _sum_of_lines(last, num_rows)
    return total % (1 << 64)


def _sum_of_lines(bytes_N: Tensor, first: int) -> int:
    """Weighted sum of whole rows, the first of which is row ``first``."""
    if bytes_N.storage_offset() % _WORD:
        bytes_N = bytes_N.clone()
    words_RC, device = bytes_N.view(torch.int64).view(-1, _COLUMNS), bytes_N.device
    columns_C, rows = torch.zeros(_COLUMNS, dtype=torch.int64, device=device), 0
    at_once = _ROWS if device.type == "cpu" else _GPU_ROWS
    for start in range(0, len(words_RC), at_once):
        part_RC = words_RC[start : start + at_once]
        numbers_R = torch.arange(len(part_RC), device=device) + (first + start)
        columns_C += part_RC.sum(0)
        rows += int((part_RC.sum(1) * numbers_R).sum())
    odd_C = 2 * torch.arange(_COLUMNS, device=device) + 1
    return int((columns_C * odd_C).sum()) + 2 * _COLUMNS * rows
