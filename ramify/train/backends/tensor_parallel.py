"""Split the layers and experts of a ``transformers`` model over ranks (tensor and expert
parallelism).

The plans come from the model's class.

    TensorParallelPlan.from_model(model)
                                  name of a module or parameter -> style ("colwise", "rowwise", …)
      .with_adapters(names)       the same, for linear modules that peft has wrapped
    RankMesh.split_layers(model, plan)
                                  on the meta device: parameters become this rank's parts, modules
                                  exchange what they need in their forward and backward passes

The styles and what they exchange are transformers' own (``transformers.distributed``). ``mesh.py``
checks which sizes fit, and ``sharding.py`` stores the parts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ramify.actors.rank_group_authentication import AuthenticatedGroupFactory
from ramify.errors import ConfigError
from ramify.train.backends.base import FsdpSpec
from ramify.train.backends.mesh import DeviceMeshSizes, check_model
from ramify.train.backends.sharded_lora import AdapterSpec, target_module_names

_PARTIAL = "replicated_with_grad_allreduce"
_ADAPTED = {"colwise": "lora_B", "colwise_gather_output": "lora_B", "rowwise": "lora_A"}
"""Map each style of splitting a linear layer to the adapter matrix that is split with the layer.
The other adapter matrix is whole on every rank and needs its whole gradient.
"""


class TensorParallelPlan(NamedTuple):
    """A plan for splitting the layers of one model over ranks.

    It maps the name of a module or parameter to a style of splitting.
    """

    tensor: dict[str, str]
    experts: dict[str, str]
    packed: dict[str, int]
    """Map each parameter that joins two matrices to the dimension along which they are joined. It
    does not depend on the mesh.
    """

    @classmethod
    def from_model(cls, model: Any, sizes: DeviceMeshSizes, shard: FsdpSpec) -> TensorParallelPlan:
        """Return the plan for a ``transformers`` model.

        It consists of the rules that the model's class defines and of the recipe's additional
        rules. Raises ConfigError if a rule is invalid.
        """
        packed = _packed_dimensions(model)
        if not sizes.has_intra_layer_parallelism:
            return cls({}, {}, packed)
        from transformers.distributed.configuration_utils import DistributedConfig

        given = DistributedConfig(
            tp_size=sizes.tensor,
            tp_plan=shard.tensor_plan or None,
            fsdp_size=sizes.shard,
            ep_size=sizes.experts,
            ep_plan=shard.expert_plan or None,
        )
        # A class lists rules for all of its variants, which transformers would warn about.
        logging.getLogger("transformers.distributed.mixin").setLevel(logging.ERROR)
        try:
            tensor, experts, _ = model._resolve_parallel_plans(given)
        except ValueError as error:
            raise ConfigError(f"compute.shard: {str(error).splitlines()[0]}") from None
        # A tied matrix has two names; it is split once, under the first.
        named = {name for name, _ in model.named_parameters()}
        tied = {name for name, _ in model.named_parameters(remove_duplicate=False)} - named
        return cls(
            {name: each for name, each in tensor.items() if name not in tied}, experts, packed
        )

    def with_adapters(self, names: Sequence[str]) -> TensorParallelPlan:
        """Return the plan for the same model with low-rank adapters on the linear modules
        ``names``.

        Raises ConfigError if a module is split in a way that does not work with an adapter.
        """
        tensor: dict[str, str] = {}
        adapted = set(names)
        for name, style in self.tensor.items():
            owner, is_weight = (name, False) if name in adapted else (name.rpartition(".")[0], True)
            if owner not in adapted:
                tensor[name] = style
                continue
            if style not in _ADAPTED:
                raise ConfigError(
                    f"policy.lora: compute.shard.tensor splits '{owner}' as '{style}', which is "
                    f"not supported for adapters (only {', '.join(_ADAPTED)} are): leave it out "
                    "of lora.targets, or use tensor=1"
                )
            factor = f"{owner}.{_ADAPTED[style]}.default"
            if is_weight:
                tensor[f"{owner}.base_layer.{name.rpartition('.')[2]}"] = style
                tensor[f"{factor}.weight"] = style
            else:
                tensor[f"{owner}.base_layer"] = tensor[factor] = style
        return TensorParallelPlan(tensor, self.experts, self.packed)

    @staticmethod
    def check(config: Any, shard: FsdpSpec, num_ranks: int, adapted: AdapterSpec | None) -> None:
        """Raise ConfigError if a Hugging Face model, or its adapters, cannot be split over the
        ranks.

        The check starts no process and allocates no memory.
        """
        from ramify.train.backends.meta_model import build_meta_model

        sizes = shard.mesh(num_ranks)
        check_model(config, sizes, shard.tensor_plan, shard.expert_plan)
        if sizes.has_intra_layer_parallelism:
            model = build_meta_model(config, splits_layers=True)
            plan = TensorParallelPlan.from_model(model, sizes, shard)
            plan.with_adapters([] if adapted is None else target_module_names(model, adapted))

    @property
    def expert_modules(self) -> list[str]:
        """Names of the modules that hold experts and dispatch tokens to them."""
        return [name for name, style in self.experts.items() if style == "ep_dispatch_experts"]


class RankMesh:
    """The device mesh of all ranks.

    Layers and experts divide the same ranks along different axes.
    """

    def __init__(
        self, device: str, sizes: DeviceMeshSizes, members: AuthenticatedGroupFactory
    ) -> None:
        """Create the process groups of the mesh for devices of the kind ``device``.

        All ranks must do so at the same time, through ``members``.
        """
        from torch.distributed.device_mesh import init_device_mesh

        def mesh(shape: tuple[int, ...], *names: str) -> Any:
            return members.create_mesh(
                lambda: init_device_mesh(device, shape, mesh_dim_names=names), device
            )

        self.sizes = sizes
        if (
            sizes.has_intra_layer_parallelism
        ):  # its warning that a tensor is gathered along two axes
            logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
        self._layers = mesh(
            (sizes.replicas, sizes.shard, sizes.tensor), "replicate", "shard", "tensor"
        )
        self._experts = self._layers
        if sizes.experts > 1:
            shape = sizes.replicas, sizes.num_expert_shards, sizes.experts
            self._experts = mesh(shape, "replicate", "expert_shard", "experts")

    def storage_mesh(self, axis: str = "shard") -> Any:
        """Return the part of the mesh over which FSDP2 distributes the rows of tensors.

        ``axis`` is ``shard``, or ``expert_shard`` for the weights of experts.
        """
        mesh = self._layers if axis == "shard" else self._experts
        return mesh["replicate", axis] if self.sizes.replicas > 1 else mesh[axis]

    def split_layers(self, model: nn.Module, plan: TensorParallelPlan) -> None:
        """Split the layers of a model on the meta device according to ``plan``.

        Afterwards the model's parameters are only this rank's shards.
        """
        if plan.tensor:
            from transformers.distributed.tensor_parallel import apply_tensor_parallelism

            tensor = self._layers["tensor"]
            # transformers' own style may count earlier batches twice (see ``_sum_gradients``).
            partial = [name for name, style in plan.tensor.items() if style == _PARTIAL]
            own = {name: each for name, each in plan.tensor.items() if name not in partial}
            apply_tensor_parallelism(model, tensor, own)
            for name, module in model.named_modules():
                if name in partial:
                    _sum_gradients(module, tensor.get_group())
        if plan.experts:
            from transformers.distributed.expert_parallel import apply_expert_parallelism

            apply_expert_parallelism(
                model, self._experts["experts"], self._layers["tensor"], plan.experts
            )
            for name in plan.expert_modules if plan.tensor else ():
                _own_output(model.get_submodule(name))


def _packed_dimensions(model: Any) -> dict[str, int]:
    """Find the parameters that join two matrices, such as the gate and up projections of experts.

    Returns the dimension along which the matrices are joined, by parameter name.
    """
    rules = {
        name: style
        for name, style in (getattr(model, "_tp_plan", None) or {}).items()
        if style.startswith("packed_")
    }
    if not rules or not hasattr(model, "_expand_parallel_plan"):
        return {}
    sizes = {name: parameter.dim() for name, parameter in model.named_parameters()}
    return {
        # A matrix is [..., out, in]: packed_colwise joins along out, the other along in.
        name: sizes[name] - (2 if style == "packed_colwise" else 1)
        for name, style in model._expand_parallel_plan(rules).items()
        if name in sizes
    }


def _own_output(module: nn.Module) -> None:
    """Make a module return a copy of its output, so that FSDP2 notices the module's backward pass.

    The output may be a view of a gathered tensor. FSDP2 notices a module's backward pass by a hook
    on its output, and misses it if a caller added to such a view in place.
    """
    forward = module.forward
    module.forward = lambda *args, **kwargs: forward(*args, **kwargs).clone()


def _sum_gradients(module: nn.Module, group: Any) -> None:
    """Make a module sum the gradients of its parameters over the ranks of ``group``.

    Every rank holds the whole parameters, but computes only the part of the gradient that comes
    from its own heads.

    Each batch's gradient is summed here once. The style of transformers instead sums the
    accumulated gradient, so with weights that stay gathered over a step it would count earlier
    batches twice.
    """
    forward, hooked = module.forward, dict[str, Tensor]()

    def total(gradient: Tensor) -> Tensor:
        # A hook must not change its argument, and all_reduce writes in place.
        summed = gradient.contiguous().clone()
        torch.distributed.all_reduce(summed, group=group)
        return summed

    def summing(*args: Any, **kwargs: Any) -> Any:
        # In each pass: FSDP2 gives a module other parameter objects when it gathers weights.
        for name, parameter in module.named_parameters(recurse=False):
            if (
                torch.is_grad_enabled()
                and parameter.requires_grad
                and hooked.get(name) is not parameter
            ):
                parameter.register_hook(total)  # type: ignore[no-untyped-call]
                hooked[name] = parameter
        return forward(*args, **kwargs)

    wrapped: Callable[..., Any] = summing
    module.forward = wrapped
