"""Where two tensors differ, by their bits: equal bits are equal, also those of NaN and of the two
zeros.

Leaves out what is sent of it (``delta.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLE = 512
"""Values of a sample; a tensor has to have more."""
_RUNS = 32
"""That they lie in."""
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """As integers, flat."""
    return tensor.contiguous().view(-1).view(_KINDS[tensor.element_size()])


def places(now_N: Tensor, had_N: Tensor) -> Tensor:
    """Where bits differ, in order. numpy finds them in a third of PyTorch's time on a CPU."""
    if now_N.is_cuda:
        return (now_N != had_N).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(now_N.numpy() != had_N.numpy()))


def parts(now_N: Tensor, had_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Which parts, of these lengths one after the other, differ."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=now_N.device)
    found: list[int] = (
        torch.searchsorted(places(now_N, had_N), bounds).diff().nonzero()[:, 0].tolist()
    )
    return found


def share(now_N: Tensor, had_N: Tensor) -> float:
    """Of a sample of the bits: how many differ."""
    return int(torch.count_nonzero(_sample(now_N) != _sample(had_N))) / SAMPLE


def _sample(bits_N: Tensor) -> Tensor:
    """Some from all over, in runs of neighbours: a page is dear, and the values beside the first
    are not."""
    return bits_N[: len(bits_N) // _RUNS * _RUNS].view(_RUNS, -1)[:, : SAMPLE // _RUNS]
