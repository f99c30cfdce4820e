"""Muon for matrices that are sharded by rows.

    rows of all matrices ── all to all ── full matrices, each on one rank ── orthogonal
                         ── all to all ── rows

Momentum and the step itself work on rows. Only the orthogonalization needs full matrices. Matrix i
of a shape is full on rank i modulo the number of ranks, so that the work is shared and nothing is
computed twice.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from ramify.train.backends.muon import Muon, orthogonal


class ShardedMuon(Muon):
    """``Muon`` for parameters that FSDP2 has sharded by rows."""

    def _step(self, parameters: list[Tensor], group: dict[str, Any], scale: float) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        spread: list[Any] = list(parameters)
        rows = [self._rows(parameter, group["momentum"]) for parameter in spread]
        updates = _orthogonal(rows, spread[0].device_mesh, spread[0].shape[0])
        local = [parameter.to_local() for parameter in spread]
        torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            local,
            [parameter.to(local[0].dtype) for parameter in updates],
            alpha=-group["lr"] * scale,
        )

    def _rows(self, parameter: Any, beta: float) -> Tensor:
        """Like ``_momentum``, for this rank's rows; the state is sharded like the parameter."""
        gradient = parameter.grad
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].to_local()
        momentum.lerp_(gradient.to_local(), 1 - beta)
        update: Tensor = gradient.to_local().lerp(momentum, beta)
        return update


def _orthogonal(rows: list[Tensor], mesh: Any, num_rows: int) -> list[Tensor]:
    """``rows``: this rank's rows of several matrices with ``num_rows`` rows each. Returns the same
    rows of the orthogonalized matrices."""
    group = mesh.get_group(mesh.ndim - 1)
    num_ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    columns = rows[0].shape[1]
    size = -(-num_rows // num_ranks)
    heights = [max(0, min(num_rows - index * size, size)) for index in range(num_ranks)]
    owned = [len(range(index, len(rows), num_ranks)) for index in range(num_ranks)]
    order = [matrix for index in range(num_ranks) for matrix in range(index, len(rows), num_ranks)]
    sent = [count * heights[rank] * columns for count in owned]
    received = [owned[rank] * height * columns for height in heights]
    parts = _exchange(
        torch.cat([rows[matrix].flatten() for matrix in order]), sent, received, group
    )
    pieces = [
        part.view(owned[rank], height, columns)
        for part, height in zip(torch.split(parts, received), heights, strict=True)
    ]
    whole = torch.cat(pieces, 1)
    done = orthogonal(whole) if owned[rank] else whole
    back = torch.cat([piece.flatten() for piece in torch.split(done.to(rows[0].dtype), heights, 1)])
    flat = _exchange(back, received, sent, group).view(len(rows), heights[rank], columns)
    updates = [flat[0]] * len(rows)
    for place, matrix in enumerate(order):
        updates[matrix] = flat[place]
    return updates


def _exchange(
    values: Tensor, send_sizes: list[int], receive_sizes: list[int], group: Any
) -> Tensor:
    received = values.new_empty(sum(receive_sizes))
    dist.all_to_all_single(received, values, receive_sizes, send_sizes, group=group)
    return received
