"""Log-probabilities of entries, without holding all of their logits at once.

    h_ED ── chunk ── logits [n, V] ── / temperature ── sampling support ── log-softmax of targets

The output matrix is applied only at entries, in chunks. If all logits together exceed
``max_elements``, each chunk's logits are recomputed in the backward pass, so that memory is bounded
by a chunk and not by the vocabulary. All numbers from the logits on are fp32.

Legend: E entries, n entries of a chunk, D width, V vocabulary, j targets per entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from ramify.models.fixed_shapes import BLOCK, in_blocks

NEVER = -1e30
"""Logit of an id outside the sampling support; finite, so that zero times it is zero."""

Logits = Callable[[Tensor], Tensor]
"""[n, D] -> fp32 [n, V]"""


class HeadRequest(NamedTuple):
    """What to compute at each entry."""

    targets: Tensor
    """[E, j] ids."""
    temperature: Tensor | None = None
    """[E]; None if it is 1 everywhere."""
    kept: tuple[Tensor, Tensor] | None = None
    """Offsets [E + 1] and ids: the sampling support of entry e is ``ids[offsets[e] : offsets[e +
    1]]``; empty if all ids were allowed."""
    entropy: Literal["no", "value", "gradient"] = "no"


def entry_logprobs(
    h_ED: Tensor,
    logits: Logits,
    request: HeadRequest,
    num_ids: int,
    max_elements: int,
    *,
    fixed: bool = False,
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [E, j], entropies [E] in nats, which are zeros if not requested).
    ``num_ids`` is V. ``fixed``: in fixed shapes, as the engine of a deterministic run."""
    num = len(h_ED)
    size = BLOCK if fixed else max(1, max_elements // num_ids)
    if num <= size and not fixed:
        return _chunk(h_ED, logits, request)
    if fixed and num <= max(1, max_elements // num_ids):
        pairs = [
            _fixed_chunk(h_ED[at : at + size], logits, _part(request, at, min(at + size, num)))
            for at in range(0, num, size)
        ]
        return torch.cat([each for each, _ in pairs]), torch.cat([each for _, each in pairs])
    parts = []
    for start in range(0, num, size):
        part = _part(request, start, min(start + size, num))
        parts.append(
            checkpoint(
                _fixed_chunk if fixed else _chunk,
                h_ED[start : start + size],
                logits,
                part,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    logprobs, entropies = zip(*cast("list[tuple[Tensor, Tensor]]", parts), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(h_nD: Tensor, logits: Logits, request: HeadRequest) -> tuple[Tensor, Tensor]:
    z_nV = logits(h_nD)
    if request.temperature is not None:
        z_nV = z_nV / request.temperature[:, None]
    if request.kept is not None:
        z_nV = z_nV.masked_fill(_outside_support(*request.kept, z_nV.shape[1]), NEVER)
    total_n1 = z_nV.logsumexp(-1, keepdim=True)
    logprobs = z_nV.gather(1, request.targets) - total_n1
    return logprobs, _entropy(z_nV, total_n1, request)


def _fixed_chunk(h_nD: Tensor, logits: Logits, request: HeadRequest) -> tuple[Tensor, Tensor]:
    """``_chunk`` of at most ``BLOCK`` entries, as a whole block."""
    num = len(h_nD)
    z_nV = in_blocks(logits, h_nD)
    if request.temperature is not None:
        z_nV = z_nV / request.temperature[:, None]
    if request.kept is not None:
        z_nV = z_nV.masked_fill(_outside_support(*request.kept, z_nV.shape[1]), NEVER)
    logprobs_nV = in_blocks(lambda z: z.log_softmax(-1), z_nV)
    entropy = _entropy(logprobs_nV, logprobs_nV.new_zeros(num, 1), request)
    return logprobs_nV.gather(1, request.targets), entropy


def _entropy(z_nV: Tensor, total_n1: Tensor, request: HeadRequest) -> Tensor:
    """[n] of logits and their log-sum-exps; zeros if not requested."""
    if request.entropy == "no":
        return torch.zeros_like(total_n1[:, 0])
    with torch.set_grad_enabled(request.entropy == "gradient" and torch.is_grad_enabled()):
        return total_n1[:, 0] - ((z_nV - total_n1).exp() * z_nV).sum(-1)


def _outside_support(offsets: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """[n, V] whether the id is outside the entry's sampling support; all False if that is empty."""
    sizes = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=ids.device), sizes)
    outside = (sizes > 0)[:, None].repeat(1, num_ids)
    outside[rows, ids[offsets[0] : offsets[-1]]] = False
    return outside


def _part(request: HeadRequest, start: int, end: int) -> HeadRequest:
    temperature = None if request.temperature is None else request.temperature[start:end]
    kept = None if request.kept is None else (request.kept[0][start : end + 1], request.kept[1])
    return HeadRequest(request.targets[start:end], temperature, kept, request.entropy)
