"""Muon where every rank has some rows of each matrix.

    rows of every matrix ── all to all ── whole matrices, each on one rank ── orthogonal ── all to all ── rows

Momentum and the step itself go by rows; only the orthogonal part needs a matrix whole, and matrix i
of a shape is whole on rank i modulo the ranks, so that the work is shared and nothing is computed
twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ramify.train.backends.muon import Muon, orthogonal


class ShardedMuon(Muon):
    """``Muon`` of parameters that FSDP2 has spread by rows."""

    def _step(self, parameters: list[Tensor], group: dict[str, Any], scale: float) -> None:
        assert all(isinstance(each, DTensor) for each in parameters)
        spread: list[Any] = list(parameters)
        rows = [self._rows(each, group["momentum"]) for each in spread]
        updates = _orthogonal(rows, spread[0].device_mesh, spread[0].shape[0])
        local = [each.to_local() for each in spread]
        torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            local, [each.to(local[0].dtype) for each in updates], alpha=-group["lr"] * scale
        )

    def _rows(self, parameter: Any, beta: float) -> Tensor:
        """As ``_momentum``, of this rank's rows; the state is spread as the parameter is."""
        gradient = parameter.grad
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].to_local()
        momentum.lerp_(gradient.to_local(), 1 - beta)
        update: Tensor = gradient.to_local().lerp(momentum, beta)
        return update


def _orthogonal(rows: list[Tensor], mesh: Any, num_rows: int) -> list[Tensor]:
    """``rows``: this rank's of each of some matrices with ``num_rows`` rows. Those of their
    orthogonal forms."""
    group = mesh.get_group(mesh.ndim - 1)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    columns = rows[0].shape[1]
    size = -(-num_rows // num_ranks)
    heights = [max(0, min(num_rows - index * size, size)) for index in range(num_ranks)]
    owned = [len(range(index, len(rows), num_ranks)) for index in range(num_ranks)]
    order = [each for index in range(num_ranks) for each in range(index, len(rows), num_ranks)]
    away = [count * heights[rank] * columns for count in owned]
    here = [owned[rank] * height * columns for height in heights]
    parts = _exchange(torch.cat([rows[each].flatten() for each in order]), away, here, group)
    pieces = [
        part.view(owned[rank], height, columns)
        for part, height in zip(torch.split(parts, here), heights, strict=True)
    ]
    whole = torch.cat(pieces, 1)
    done = orthogonal(whole) if owned[rank] else whole
    back = torch.cat([piece.flatten() for piece in torch.split(done.to(rows[0].dtype), heights, 1)])
    flat = _exchange(back, here, away, group).view(len(rows), heights[rank], columns)
    found = [flat[0]] * len(rows)
    for place, each in enumerate(order):
        found[each] = flat[place]
    return found


def _exchange(values: Tensor, given: list[int], taken: list[int], group: Any) -> Tensor:
    found = values.new_empty(sum(taken))
    dist.all_to_all_single(found, values, taken, given, group=group)
    return found
