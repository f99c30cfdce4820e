"""Arrange the processes (ranks) of a run in a mesh with one axis per kind of parallelism.

This module says what each axis splits, and checks that the sizes fit the model.

    ranks=8, replicas=2, tensor=2             experts=4 (the same ranks, seen by experts)

    replicate  0  shard 0  tensor 0 1         replicate 0   num_expert_shards 0   experts 0 1 2 3
                  shard 1  tensor 2 3         replicate 1   num_expert_shards 0   experts 0 1 2 3
    replicate  1  shard 0  tensor 4 5
                  shard 1  tensor 6 7         ranks = replicas x shard x tensor
                                                    = replicas x num_expert_shards x experts

Ranks of one ``tensor`` group compute the same batch, each with a part of every matrix. Ranks that
differ in another axis compute different batches; FSDP2 gathers the parts of a layer's weights along
``shard``. Experts are not split by ``tensor`` if there is an ``experts`` axis: each rank of it has
whole experts, and tokens travel to them. Sizes, names and plans are those of transformers'
``DistributedConfig``.

This module only computes, to find mistakes before anything is started. The device mesh and the
plans of a model are in ``tensor_parallel.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from ramify.errors import ConfigError

_HEADS = ("num_attention_heads", "num_key_value_heads")
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")
_EXPERT_WIDTH = "moe_intermediate_size"
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Configuration keys under which different model families store their number of experts."""


class DeviceMeshSizes(NamedTuple):
    """The number of ranks along each axis of a device mesh."""

    replicas: int
    shard: int
    tensor: int
    experts: int

    @classmethod
    def from_rank_count(
        cls, num_ranks: int, replicas: int, tensor: int, experts: int
    ) -> DeviceMeshSizes:
        """Compute the sizes of a mesh of ``num_ranks`` ranks.

        The number of shards follows from the other sizes. Raises ConfigError if the ranks cannot
        fill the mesh.
        """
        rest = replicas * tensor
        if num_ranks % rest:
            named = f"{replicas} replicas" + (f" x {tensor} tensor" if tensor > 1 else "")
            raise ConfigError(
                f"compute.shard: {num_ranks} ranks do not fit a mesh of {named}: "
                f"{num_ranks} = {rest} x {num_ranks // rest} + {num_ranks % rest}"
            )
        sizes = cls(replicas, num_ranks // rest, tensor, experts)
        inside = sizes.shard * sizes.tensor
        if sizes.experts > 1 and (inside % sizes.experts or sizes.experts % sizes.tensor):
            fit = [n for n in _divisors(inside) if n % sizes.tensor == 0]
            raise ConfigError(
                f"compute.shard.experts={sizes.experts} must be a multiple of "
                f"tensor={sizes.tensor} and divide the {inside} ranks of a replica ({num_ranks} / "
                f"{sizes.replicas}): use one of {', '.join(map(str, fit))}"
            )
        return sizes

    @property
    def num_expert_shards(self) -> int:
        """Number of ranks over which the weights of one set of experts are sharded."""
        return self.shard * self.tensor // self.experts

    @property
    def num_batches(self) -> int:
        """Number of different batches that the ranks process in parallel."""
        return self.replicas * self.shard

    @property
    def has_intra_layer_parallelism(self) -> bool:
        """True if several ranks compute each layer jointly rather than only sharding its
        weights."""
        return self.tensor > 1 or self.experts > 1

    def rank_coordinates(self, rank: int) -> str:
        """Return the coordinates of a rank in the mesh as text, such as ``shard 1, tensor 0``."""
        axes = {"replicate": self.replicas, "shard": self.shard, "tensor": self.tensor}
        found, rest = [], rank
        for name, size in reversed(axes.items()):
            rest, index = divmod(rest, size)
            found += [f"{name} {index}"] if size > 1 else []
        if self.experts > 1:
            found.insert(0, f"experts {rank % self.experts}")
        return ", ".join(reversed(found))


def check_model(
    config: Any,
    sizes: DeviceMeshSizes,
    tensor_plan: Mapping[str, str],
    expert_plan: Mapping[str, str],
) -> None:
    """Raise ConfigError if the layers of a Hugging Face model cannot be split over the mesh.

    The error names sizes that are not divisible and divisors that would fit. If the model class has
    no plan for splitting, the error says so. ``tensor_plan`` and ``expert_plan`` add rules from the
    recipe.
    """
    if not sizes.has_intra_layer_parallelism:
        return
    check_transformers_version()
    config = config.get_text_config()
    if sizes.tensor > 1:
        is_split = sizes.experts == 1
        widths = [each for each in _WIDTHS if is_split or each != _EXPERT_WIDTH]
        _check_divides("tensor", sizes.tensor, config, [*_HEADS, *widths])
        _check_plan("tensor", sizes.tensor, config, "base_model_tp_plan", tensor_plan)
    if sizes.experts > 1:
        if not any(getattr(config, name, None) for name in EXPERTS):
            raise ConfigError(
                f"compute.shard.experts={sizes.experts}, but {config.model_type} has no experts: "
                "leave it out"
            )
        _check_divides("experts", sizes.experts, config, EXPERTS)
        _check_plan("experts", sizes.experts, config, "base_model_ep_plan", expert_plan)


def _check_divides(axis: str, size: int, config: Any, names: Sequence[str]) -> None:
    counts = {name: getattr(config, name) for name in names if getattr(config, name, None)}
    fit = set.intersection(*(set(_divisors(count)) for count in counts.values()))
    for name, count in counts.items():
        if count % size:
            raise ConfigError(
                f"compute.shard.{axis}={size} does not divide {name}={count} of "
                f"{config.model_type} ({count} = {size} x {count // size} + {count % size}): use "
                f"one of {', '.join(map(str, sorted(fit)))}"
            )


def _check_plan(axis: str, size: int, config: Any, field: str, given: Mapping[str, str]) -> None:
    if given or getattr(config, field, None):
        return
    option, example = {
        "tensor": ("tensor_plan", "model.layers.*.mlp.up_proj=colwise"),
        "experts": ("expert_plan", "model.layers.*.mlp.experts=ep_dispatch_experts"),
    }[axis]
    raise ConfigError(
        f"compute.shard.{axis}={size}: {config.model_type} has no plan for it in transformers "
        f"({field}): give rules in compute.shard.{option}, such as {example}, or use {axis}=1"
    )


def check_transformers_version() -> None:
    """Raise ConfigError if the installed version of ``transformers`` cannot split layers."""
    if find_spec("transformers.distributed.expert_parallel") is None:
        import transformers

        raise ConfigError(
            "compute.shard.tensor and experts need transformers>=5.23, which has the plans; "
            f"this is {transformers.__version__}"
        )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
