"""Log-probabilities of entries, without ever holding the logits of all of them.

    h_ED ── chunk ── logits [n, V] ── / temperature ── kept ids only ── log-softmax at the targets

The output matrix is applied at entries alone, in chunks whose logits are computed again in the
backward pass once they are more than ``max_elements`` together: memory is bounded by a chunk and
not by the vocabulary. Numbers are fp32 from the logits on. Legend: E entries, n of a chunk, D
width, V vocabulary, j targets per entry.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

NEVER = -1e30
"""Logit of an id outside the kept set; finite, so that zero times it is zero."""

Logits = Callable[[Tensor], Tensor]
"""[n, D] -> fp32 [n, V]"""


class HeadRequest(NamedTuple):
    """What to compute at each entry."""

    targets: Tensor
    """[E, j] ids."""
    temperature: Tensor | None = None
    """[E]; None where it is 1 everywhere."""
    kept: tuple[Tensor, Tensor] | None = None
    """Offsets [E + 1] and ids: the kept set of entry e is ``ids[offsets[e] : offsets[e + 1]]``;
    empty for all."""
    entropy: Literal["no", "value", "gradient"] = "no"


def entry_logprobs(
    h_ED: Tensor, logits: Logits, asked: HeadRequest, num_ids: int, max_elements: int
) -> tuple[Tensor, Tensor]:
    """(log-probabilities [E, j], entropies [E] in nats, zeros where not asked for). ``num_ids`` is
    V."""
    num = len(h_ED)
    size = max(1, max_elements // num_ids)
    if num <= size:
        return _chunk(h_ED, logits, asked)
    parts = []
    for start in range(0, num, size):
        part = _part(asked, start, min(start + size, num))
        parts.append(
            checkpoint(
                _chunk,
                h_ED[start : start + size],
                logits,
                part,
                use_reentrant=False,
                preserve_rng_state=False,
            )
        )
    logprobs, entropies = zip(*cast("list[tuple[Tensor, Tensor]]", parts), strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunk(h_nD: Tensor, logits: Logits, asked: HeadRequest) -> tuple[Tensor, Tensor]:
    z_nV = logits(h_nD)
    if asked.temperature is not None:
        z_nV = z_nV / asked.temperature[:, None]
    if asked.kept is not None:
        z_nV = z_nV.masked_fill(_left_out(*asked.kept, z_nV.shape[1]), NEVER)
    total_n1 = z_nV.logsumexp(-1, keepdim=True)
    logprobs = z_nV.gather(1, asked.targets) - total_n1
    if asked.entropy == "no":
        return logprobs, torch.zeros_like(total_n1[:, 0])
    with torch.set_grad_enabled(asked.entropy == "gradient" and torch.is_grad_enabled()):
        entropy = total_n1[:, 0] - ((z_nV - total_n1).exp() * z_nV).sum(-1)
    return logprobs, entropy


def _left_out(offsets: Tensor, ids: Tensor, num_ids: int) -> Tensor:
    """[n, V] whether the sampler had cut the id off; nowhere for an entry with an empty set."""
    sizes = offsets.diff()
    rows = torch.repeat_interleave(torch.arange(len(sizes), device=ids.device), sizes)
    left_out = (sizes > 0)[:, None].repeat(1, num_ids)
    left_out[rows, ids[offsets[0] : offsets[-1]]] = False
    return left_out


def _part(asked: HeadRequest, start: int, end: int) -> HeadRequest:
    temperature = None if asked.temperature is None else asked.temperature[start:end]
    kept = None if asked.kept is None else (asked.kept[0][start : end + 1], asked.kept[1])
    return HeadRequest(asked.targets[start:end], temperature, kept, asked.entropy)
