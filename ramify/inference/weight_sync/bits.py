"""Where two tensors differ, by their bits. Equal bits are equal, also for NaN; the two zeros
differ.

Not here: what is sent of the difference (see ``delta.py``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

SAMPLE = 512
"""Values in a sample; only larger tensors are sampled."""
_RUNS = 32
"""Number of runs of neighbouring values in a sample."""
_KINDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(tensor: Tensor) -> Tensor:
    """The tensor's bits as integers, flat."""
    return tensor.contiguous().view(-1).view(_KINDS[tensor.element_size()])


def places(now_N: Tensor, had_N: Tensor) -> Tensor:
    """Positions at which the bits differ, in order. On a CPU, numpy takes a third of PyTorch's
    time."""
    if now_N.is_cuda:
        return (now_N != had_N).nonzero()[:, 0]
    return torch.from_numpy(np.flatnonzero(now_N.numpy() != had_N.numpy()))


def parts(now_N: Tensor, had_N: Tensor, lengths: Sequence[int]) -> list[int]:
    """Which parts differ; their ``lengths`` follow one after the other."""
    bounds = torch.tensor([0, *itertools.accumulate(lengths)], device=now_N.device)
    differing: list[int] = (
        torch.searchsorted(places(now_N, had_N), bounds).diff().nonzero()[:, 0].tolist()
    )
    return differing


def share(now_N: Tensor, had_N: Tensor) -> float:
    """Share of differing values in a sample."""
    return int(torch.count_nonzero(_sample(now_N) != _sample(had_N))) / SAMPLE


def _sample(bits_N: Tensor) -> Tensor:
    """Values from all over the tensor, in runs of neighbours: loading a page is expensive, and the
    values next to the first are then free."""
    return bits_N[: len(bits_N) // _RUNS * _RUNS].view(_RUNS, -1)[:, : SAMPLE // _RUNS]
