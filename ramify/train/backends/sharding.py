"""Shard a model over a mesh of processes (ranks) with FSDP2 (``fully_shard``).

The model is created on the meta device, so that no rank ever holds all of its weights.

    build_meta_model ── adapters ── split layers and experts (``mesh.py``)
            ── fully_shard: each layer, rest
            ── allocate this rank's part ── fill, tensor by tensor

    mesh of 6 ranks, 2 replicas       shard ──>
                           replicate  0 1 2      each row of ranks holds the model once, each rank
                               │      3 4 5      a third of the rows of every tensor; gradients are
                               v                 summed along rows, then over replicas

Gradients are sums over ranks, not means: losses are already divided by the counts of the whole
step. What is computed with the weights is in ``single_device.py``, and ``rank_group.py`` calls it.
Mixed precision, offloading and NCCL need GPUs; gloo on CPUs uses the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from ramify.train.backends.activation_memory import layers_of
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.optimizers import Muon, orthogonalize, sum_of_squares
from ramify.train.backends.single_device import VALUE_HEAD
from ramify.train.backends.tensor_parallel import RankMesh, TensorParallelPlan

T = TypeVar("T")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ShardedMuon(Muon):
    """The Muon optimizer for parameters whose rows FSDP2 distributes over ranks.

        rows of all matrices ── all to all ── full matrices, each on one rank ── orthogonal
                             ── all to all ── rows

    Momentum and the step itself work on rows. Only the orthogonalization needs full matrices.
    Matrix i of a shape is full on rank i modulo the number of ranks, so that the work is shared and
    nothing is computed twice."""

    def _step(self, parameters: list[Tensor], group: dict[str, Any], scale: float) -> None:
        assert all(isinstance(parameter, DTensor) for parameter in parameters)
        spread: list[Any] = list(parameters)
        rows = [self._update_local_momentum(parameter, group["momentum"]) for parameter in spread]
        updates = _orthogonalize_rows(rows, spread[0].device_mesh, spread[0].shape[0])
        local = [parameter.to_local() for parameter in spread]
        torch._foreach_mul_(local, 1 - group["lr"] * group["weight_decay"])
        torch._foreach_add_(
            local,
            [parameter.to(local[0].dtype) for parameter in updates],
            alpha=-group["lr"] * scale,
        )

    def _update_local_momentum(self, parameter: Any, beta: float) -> Tensor:
        """Compute the Nesterov momentum of the gradient for this rank's rows of a matrix.

        The optimizer's state is sharded like the parameter.
        """
        gradient = parameter.grad
        state = self.state[parameter]
        if not state:
            state["momentum"] = torch.zeros_like(gradient)
        momentum = state["momentum"].to_local()
        momentum.lerp_(gradient.to_local(), 1 - beta)
        update: Tensor = gradient.to_local().lerp(momentum, beta)
        return update


class FsdpWeightSharding:
    """A model sharded over ranks with FSDP2.

    Its parameters hold only the rows of this rank.
    """

    muon_class = ShardedMuon

    def __init__(
        self,
        model: nn.Module,
        mesh: RankMesh,
        plan: TensorParallelPlan,
        device: torch.device,
        compute: TrainerComputeSpec,
        tick: Callable[[], None],
    ) -> None:
        """Shard ``model``, which is on the meta device, and allocate memory for this rank's shard.

        The values are undefined until ``scatter_weight`` or ``load_shard`` sets them. ``tick`` is
        called whenever a layer is entered, which shows other ranks that this rank makes progress.
        """
        self.device = device
        self.packed = plan.packed
        """Map each parameter that joins two matrices to the dimension along which they are joined.
        """
        self._shard = shard = compute.shard
        self._copies = mesh.sizes.tensor  # ranks that compute the same batch
        tied = dict(model.named_parameters(remove_duplicate=False))
        mesh.split_layers(model, plan)
        _tie_again(model, tied)
        layers = layers_of(model)
        self._root = _Root(model)
        everywhere: dict[str, Any] = {
            "mesh": mesh.storage_mesh(),
            "offload_policy": CPUOffloadPolicy() if shard.offload else OffloadPolicy(),
        }
        options = {"mp_policy": self._precision(compute), **everywhere}
        for name in plan.expert_modules:
            own = {**options, "mesh": mesh.storage_mesh("expert_shard")}
            fully_shard(
                model.get_submodule(name), reshard_after_forward=shard.gather == "layer", **own
            )
        for layer in layers:
            fully_shard(layer, reshard_after_forward=shard.gather == "layer", **options)
            layer.register_forward_pre_hook(lambda *_: tick(), prepend=True)
        head = getattr(model, VALUE_HEAD, None)
        if head is not None:  # the critic's values are fp32, as on one device
            fully_shard(head, reshard_after_forward=shard.gather == "layer", **everywhere)
        fully_shard(self._root, **options)
        self._sharded: list[FSDPModule] = [
            each for each in self._root.modules() if isinstance(each, FSDPModule)
        ]
        for each in self._sharded:
            each.set_gradient_divide_factor(1.0)
            each.set_force_sum_reduction_for_comms(True)
        _give_memory(self._root, torch.device("cpu") if shard.offload else device, device)
        self.parameters = dict(model.named_parameters())
        """Map the name of each parameter to this rank's rows."""
        self.buffers = {
            name: each
            for name, each in model.state_dict().items()
            if name not in _parameter_names(model)
        }
        """Map the name of each buffer that checkpoints store to its full tensor, which every rank
        holds."""

    # --- OptimizerWeightAccess

    def run_with_weights(self, work: Callable[[], T]) -> T:
        found = cast(T, self._root(work))
        if not torch.is_grad_enabled():  # no backward pass will free the gathered weights
            self.reshard()
        return found

    def all_ranks_agree(self, is_well: bool) -> bool:
        flag = torch.tensor(float(is_well), device=self.device)
        dist.all_reduce(flag, dist.ReduceOp.MIN)
        return bool(flag)

    def sum_over_ranks(self, tensor: Tensor) -> Tensor:
        summed = tensor.clone()
        dist.all_reduce(summed)
        return summed / self._copies

    def global_norm(self, tensors: Many[Tensor]) -> float:
        total = torch.zeros((), dtype=torch.float64)
        for num, parts in _by_copies(tensors).items():
            total = total + sum_of_squares(parts).cpu() / num
        total = total.to(self.device)
        dist.all_reduce(total)
        return float(total.sqrt())

    def scale(self, tensors: Many[Tensor], factor: float) -> None:
        torch._foreach_mul_([_to_local(each) for each in tensors], factor)

    # --- when weights are gathered

    def announce_last_backward(self, is_last: bool) -> None:
        """Tell FSDP2 whether the next backward pass is the last one for the current batches.

        With the option ``gather="step"``, gradients are summed over ranks only after the last pass.
        """
        if self._shard.gather == "step":
            for each in self._sharded:
                each.set_requires_gradient_sync(is_last, recurse=False)
                each.set_reshard_after_backward(is_last, recurse=False)
            cast(FSDPModule, self._root).set_is_last_backward(is_last)

    def reshard(self) -> None:
        """Free the weights that were gathered from other ranks, and keep only this rank's rows.

        Call this after weights have changed, because FSDP2 would otherwise keep using the gathered
        values.
        """
        for each in self._sharded:
            each.reshard()

    # --- weights

    def load_shard(self, weights: Mapping[str, Any]) -> None:
        """Set this rank's shard of the weights from full tensors.

        Of tensors on disk, only the shard is read.
        """
        with torch.no_grad():
            for name, tensor in weights.items():
                if name in self.buffers:
                    self.buffers[name].copy_(tensor[...])
                else:
                    parameter = self.parameters[name]
                    _to_local(parameter).copy_(local_shard(parameter, tensor))

    def scatter_weight(self, name: str, tensor: Tensor | None) -> None:
        """Send a full tensor from rank 0 to all ranks, each of which stores its shard.

        The other ranks pass None.
        """
        mine = self.parameters[name] if name in self.parameters else self.buffers[name]
        whole = torch.empty(mine.shape, dtype=mine.dtype, device=self.device)
        if tensor is not None:
            whole.copy_(tensor)
        dist.broadcast(whole, 0)
        self.load_shard({name: whole})

    def gather(self, name: str, gradient: bool = False) -> Tensor:
        """Gather a full tensor, or its gradient, from all ranks and return it on the CPU.

        Every rank must call this method.
        """
        parameter = self.parameters[name]
        found = parameter.grad if gradient else parameter.detach()
        found = torch.zeros_like(parameter) if found is None else found
        return cast(DTensor, found.detach().to(self.device)).full_tensor().cpu()

    def _precision(self, compute: TrainerComputeSpec) -> MixedPrecisionPolicy:
        if compute.precision != "bf16":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=_DTYPES[compute.shard.reduce]
        )


class _Root(nn.Module):
    """A wrapper module whose forward pass calls a given function with the model.

    FSDP2 then treats everything that the function does as one forward pass, including its use of
    the output matrix. Parameters keep their names.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[], Any]) -> Any:
        return work()


def _give_memory(root: nn.Module, parameters: torch.device, buffers: torch.device) -> None:
    """Allocate uninitialized memory for this rank's shard of a module's weights.

    Tied parameters stay tied.
    """
    fresh: dict[nn.Parameter, nn.Parameter] = {}
    for module in root.modules():
        for name, old in module._parameters.items():
            if old is not None:
                if old not in fresh:
                    fresh[old] = nn.Parameter(
                        torch.empty_like(old, device=parameters), requires_grad=old.requires_grad
                    )
                module._parameters[name] = fresh[old]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(buffers)


def _parameter_names(model: nn.Module) -> set[str]:
    return {name for name, _ in model.named_parameters(remove_duplicate=False)}


def local_shard(parameter: Tensor, whole: Any) -> Tensor:
    """Return this rank's shard of a full tensor in memory or in a safetensors file.

    ``parameter`` is the sharded parameter that the shard is for.
    """
    if not isinstance(parameter, DTensor):
        return cast(Tensor, whole[...])
    if parameter.device_mesh.ndim > 1 and any(
        not each.is_replicate() for each in parameter.placements[:-1]
    ):
        from transformers.distributed.sharding_utils import DtensorShardOperation

        return cast(Tensor, DtensorShardOperation(parameter).shard_tensor(whole))
    if parameter.placements[-1].is_replicate():
        return cast(Tensor, whole[...])
    return cast(Tensor, whole[_local_row_range(parameter)])


def _local_row_range(parameter: DTensor) -> slice:
    """Return the range of rows of a parameter that this rank holds.

    FSDP2 divides rows as ``torch.chunk`` does.
    """
    mesh, num_rows = parameter.device_mesh, parameter.shape[0]
    size = -(-num_rows // mesh.size(mesh.ndim - 1))
    index = mesh.get_local_rank(mesh.ndim - 1)
    return slice(min(index * size, num_rows), min((index + 1) * size, num_rows))


def _by_copies(tensors: Many[Tensor]) -> dict[int, list[Tensor]]:
    """Group this rank's tensor shards by the number of ranks that hold a copy of each shard."""
    found: dict[int, list[Tensor]] = {}
    for each in tensors:
        parts = 1
        if isinstance(each, DTensor):
            mesh = each.device_mesh
            sizes = [mesh.size(dim) for dim in range(mesh.ndim)]
            for size, placement in zip(sizes, each.placements, strict=True):
                parts *= 1 if placement.is_replicate() else size
        found.setdefault(dist.get_world_size() // parts, []).append(_to_local(each))
    return found


def _tie_again(model: nn.Module, before: Mapping[str, nn.Parameter]) -> None:
    """Re-tie parameters that were tied before layers were split over ranks.

    Splitting replaces the parameter under only one of its names.
    """
    after = dict(model.named_parameters(remove_duplicate=False))
    first: dict[nn.Parameter, str] = {}
    for name, parameter in before.items():
        kept = first.setdefault(parameter, name)
        if kept != name and after[kept] is not after[name]:
            owner, _, leaf = name.rpartition(".")
            model.get_submodule(owner)._parameters[leaf] = after[kept]


def _to_local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _orthogonalize_rows(rows: list[Tensor], mesh: Any, num_rows: int) -> list[Tensor]:
    """Orthogonalize several matrices whose rows are distributed over ranks.

    ``rows`` has this rank's rows of each matrix, and ``num_rows`` is the total number of rows of
    one matrix. Returns the same rows of the results.
    """
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
    done = orthogonalize(whole) if owned[rank] else whole
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
