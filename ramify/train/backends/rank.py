"""Define the code that each rank (process) of a distributed training run executes.

The rank holds its shard of each model and executes operations that all ranks run together. The
verbs are called in this order:

    make ── (put …) ── stage ──┬── add, optim_step
                               ├── logprobs
                               ├── gather, put
                               └── save, load

Each verb runs on every rank at the same time, with the rank's own batches. Rank 0 is called by its
own process, the others over a connection (``rank_group.py``). A verb either succeeds on every
rank, or raises one of our errors on every rank, after which the next verb may follow. Any other
exception ends all ranks.

Every rank runs as many batches as the rank with the most. A rank without batches left computes
``idle`` ones (a token without weight), so that it takes part in collective operations.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from ramify.actors.rank_group_authentication import AuthenticatedGroupFactory
from ramify.actors.rank_monitor import RankProgress
from ramify.errors import ConfigError
from ramify.models.load import Policy
from ramify.models.stored_weights import stored_tensors
from ramify.train.backends import sharded_checkpoint, sharded_lora
from ramify.train.backends.activation_memory import max_tokens_in_memory
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.meta_model import build_meta_model
from ramify.train.backends.sharded_lora import AdapterSpec
from ramify.train.backends.sharding import FsdpWeightSharding
from ramify.train.backends.single_device import VALUE_HEAD, SingleBackend, value_head
from ramify.train.backends.tensor_parallel import RankMesh, TensorParallelPlan
from ramify.train.losses.total_loss import LossSpec, LossTally, SerializableLossTally
from ramify.types.training_sequences import Batch, Floats


class ModelConfigText(msgspec.Struct, frozen=True):
    """A Hugging Face model configuration as JSON text, which can be sent to other ranks.

    They parse the text as transformers parses ``config.json``.
    """

    text: str
    """The configuration as JSON, as in ``config.json``."""
    attention: str | None
    """The implementation of attention, which ``config.json`` does not store."""

    @classmethod
    def from_config(cls, config: Any) -> ModelConfigText:
        """Convert a model configuration to JSON text.

        Raises ConfigError if parsing the text would give a different configuration.
        """
        stored = cls(
            config.to_json_string(use_diff=False), getattr(config, "_attn_implementation", None)
        )
        if stored.restore_config().to_dict() != config.to_dict():
            raise ConfigError(
                f"a {type(config).__name__} changes when it is saved to config.json and loaded "
                "again: it cannot be sent to other ranks"
            )
        return stored

    def restore_config(self) -> Any:
        from transformers import AutoConfig

        fields = msgspec.json.decode(self.text)
        config = AutoConfig.for_model(fields.pop("model_type"), **fields)
        if self.attention is not None:
            config._attn_implementation = self.attention
        return config


class ShardedModelSpec(NamedTuple):
    """The specification of a model that all ranks create together.

    Each rank creates only its own shard.
    """

    config: ModelConfigText
    compute: TrainerComputeSpec
    folder: str
    """Folder from which each rank reads its shard. If it is empty, rank 0 sends the weights with
    ``store_weight_shards``."""
    lora: AdapterSpec | None
    dumps: str
    """Folder that receives batches with a non-finite loss."""
    critic: bool = False
    """Whether to add a value head, initialized to 0."""


class _Model:
    """One model on this rank."""

    def __init__(
        self,
        making: ShardedModelSpec,
        config: Any,
        model: nn.Module,
        names: list[str],
        sharded: FsdpWeightSharding,
    ) -> None:
        self.making = making
        self.model = model
        self.names = names
        self.sharded = sharded
        self.policy = Policy(
            model,
            None,  # type: ignore[arg-type]
            None,  # type: ignore[arg-type]
            config,
            0,
            "sharded",
        )
        self.single: SingleBackend | None = None

    @property
    def backend(self) -> SingleBackend:
        assert self.single is not None, "no stage has begun"
        return self.single


class RankModelWorker:
    """One rank's shards of all models of a training run, by model name.

    Rank 0 calls the methods of this class on all ranks.
    """

    def __init__(
        self,
        index: int,
        size: int,
        device: torch.device,
        timeout_s: float,
        pulse: RankProgress,
        members: AuthenticatedGroupFactory,
    ) -> None:
        self.index = index
        self.size = size
        self.device = device
        self._pulse = pulse
        self._models: dict[str, _Model] = {}
        self._members = members
        self._saving = members.create_group(
            lambda: dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s)), "cpu"
        )
        self._pending: sharded_checkpoint.PendingCheckpointWrite | None = None

    def model(self, key: str) -> _Model:
        return self._models[key]

    @property
    def pending_write(self) -> sharded_checkpoint.PendingCheckpointWrite:
        """The latest write of a checkpoint, which may still be in progress."""
        assert self._pending is not None
        return self._pending

    def backend_of(self, key: str) -> SingleBackend:
        """Return the backend that trains the model ``key`` on this rank."""
        return self._models[key].backend

    # --- verbs: models

    def make(self, key: str, making: ShardedModelSpec) -> None:
        """Create this rank's shard of a model.

        Without a folder of weights to read from, only the adapters and the value head are
        initialized.
        """
        shard = making.compute.shard
        mesh_sizes = shard.mesh(self.size)
        config = making.config.restore_config()
        model = build_meta_model(config, splits_layers=mesh_sizes.has_intra_layer_parallelism)
        plan = TensorParallelPlan.from_model(model, mesh_sizes, shard)
        names: list[str] = []
        if making.lora is not None:
            names = sharded_lora.target_module_names(model, making.lora)
            plan = plan.with_adapters(names)
            sizes = {name: cast(Tensor, model.get_submodule(name).weight).shape for name in names}
            sharded_lora.inject(model, making.lora, names)
        if making.critic:
            with torch.device("meta"):
                model.add_module(VALUE_HEAD, value_head(config.hidden_size))
        mesh = RankMesh(self.device.type, mesh_sizes, self._members)
        sharded = FsdpWeightSharding(
            model, mesh, plan, self.device, making.compute, self._pulse.tick
        )
        made = self._models[key] = _Model(making, config, model, names, sharded)
        values: dict[str, Any] = {}
        if making.folder:
            base = {
                name: sharded_lora.base_parameter_name(name)
                for name in self._base_tensor_names(made)
            }
            stored = stored_tensors(Path(making.folder), model, list(base.values()))
            values = {name: stored[own] for name, own in base.items()}
        if making.lora is not None:
            values |= dict(sharded_lora.initial_weights(making.lora, names, sizes))
        values |= {
            name: torch.zeros(each.shape)
            for name, each in sharded.parameters.items()
            if is_of_critic(name)
        }
        sharded.load_shard(values)

    def store_weight_shards(self, key: str, named: list[tuple[str, Tensor | None]]) -> None:
        """Receive full weights from rank 0 and store this rank's shards of them.

        The names are those of the model without adapters.
        """
        made = self._models[key]
        made.sharded.reshard()
        here = {
            sharded_lora.base_parameter_name(name): name for name in self._base_tensor_names(made)
        }
        for name, tensor in named:
            made.sharded.scatter_weight(here[name], tensor)

    def copy_weights(self, key: str, source: str) -> None:
        """Copy the weights of another model to the model ``key``.

        Both must have the same mesh, and the source must have no adapters.
        """
        made, other = self._models[key].sharded, self._models[source].sharded
        made.reshard()
        with torch.no_grad():
            for name, parameter in other.parameters.items():
                if not is_of_critic(name):
                    cast(Tensor, made.parameters[name]).copy_(parameter)
            for name, buffer in other.buffers.items():
                made.buffers[name].copy_(buffer)

    def gather(self, key: str, names: list[str], gradients: bool) -> list[Tensor] | None:
        """Gather the full tensors of the named weights, or of their gradients, on rank 0.

        Rank 0 returns them; the other ranks take part and return None.
        """
        found = []
        for name in names:
            tensor = self._models[key].sharded.gather(name, gradients)
            if self.index == 0:
                found.append(tensor)
        return found if self.index == 0 else None

    def release_memory(self) -> None:
        """Return unused memory of this rank's GPU to the device."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def drop(self, key: str) -> None:
        self._models.pop(key, None)

    def begin_stage(self, key: str, optim: OptimizerSpec, critic: bool) -> None:
        """Prepare a model for a training stage, with a fresh optimizer.

        ``critic`` also trains the value head.
        """
        made = self._models[key]
        compute = made.making.compute
        dumps = Path(made.making.dumps) / (f"rank-{self.index}" if self.index else "")
        plain = TrainerComputeSpec(
            max_tokens=compute.max_tokens
            or max_tokens_in_memory(
                made.policy.config, self.device, compute.recompute, compute.precision
            ),
            precision="fp32",
            compile=compute.compile,
            recompute=compute.recompute,
            max_logits=compute.max_logits,
            share=compute.share,
        )
        made.single = SingleBackend(
            made.policy, optim, plain, dumps=dumps, spread=made.sharded, critic=critic
        )

    # --- verbs: learning

    def accumulate_gradient(
        self, key: str, batches: list[Batch | None], formula: dict[str, Any], idle: Batch
    ) -> SerializableLossTally:
        """Add the gradient of this rank's batches to the accumulated gradient.

        None in the list marks a batch that only other ranks have. The rank then computes the batch
        ``idle`` instead, because all ranks must run the same operations. ``formula`` is the loss as
        plain data, made by ``LossSpec.stored``.
        """
        made, tally, loss = self._models[key], LossTally(), LossSpec.restored(formula)
        made.backend.prepare_expert_loads(
            [idle if batch is None else batch for batch in batches], loss
        )
        for index, batch in enumerate(batches):
            made.sharded.announce_last_backward(index + 1 == len(batches))
            measured = made.backend.add(idle if batch is None else batch, loss)
            if batch is not None:
                tally.merge(measured)
            self._pulse.tick()
        return tally.to_serializable()

    def optim_step(self, key: str) -> dict[str, float]:
        return self.backend_of(key).optim_step()

    def check_gradient(self, key: str) -> None:
        self.backend_of(key).check_gradient()

    def clear_gradient(self, key: str) -> None:
        self.backend_of(key).clear_gradient()

    def logprobs(
        self, key: str, batches: list[Batch | None], idle: Batch, base: bool
    ) -> list[Floats]:
        """Return the log-probabilities of each batch's E tokens with a loss weight, as arrays of
        shape [E].

        Where the list has None, the rank computes the batch ``idle`` to stay in step with the
        others, and returns nothing for it. ``base`` disables the model's adapters.
        """
        made = self._models[key]
        with sharded_lora.adapters_disabled(made.model) if base else nullcontext():
            found = [
                made.backend.logprobs([idle if batch is None else batch])[0] for batch in batches
            ]
        return [each for each, batch in zip(found, batches, strict=True) if batch is not None]

    def values(self, key: str, batches: list[Batch | None], idle: Batch) -> list[Floats]:
        """Return the critic's values for each batch's E tokens with a loss weight, as arrays of
        shape [E].

        Batches that are None give no result.
        """
        backend = self.backend_of(key)
        found = [backend.values([idle if batch is None else batch])[0] for batch in batches]
        return [each for each, batch in zip(found, batches, strict=True) if batch is not None]

    # --- verbs: checkpoints

    def save(
        self, key: str, folder: str, asynchronous: bool
    ) -> sharded_checkpoint.RankRandomStates:
        """Write this rank's shard of a checkpoint, and return the rank's random state.

        If writing continues in the background, call ``wait`` before using the checkpoint.
        """
        self.wait()
        single = self.backend_of(key)
        weights, optimizers = single.trained_parameters_and_optimizer
        trained = sharded_checkpoint.ShardedTrainingState(
            weights, optimizers, self._models[key].sharded.packed
        )
        self._pending = sharded_checkpoint.save(Path(folder), trained, self._saving, asynchronous)
        return sharded_checkpoint.torch_random_state(self.device)

    def wait(self) -> None:
        """Wait until all ranks have completed the last ``save``.

        Raises StoreError if it failed on any rank.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def load(
        self,
        key: str,
        folder: str,
        num_steps: int,
        random: list[sharded_checkpoint.RankRandomStates],
    ) -> None:
        self.wait()
        made = self._models[key]
        made.sharded.reshard()
        trained = sharded_checkpoint.ShardedTrainingState(
            *made.backend.trained_parameters_and_optimizer, made.sharded.packed
        )
        sharded_checkpoint.load(Path(folder), trained, self._saving)
        made.backend.set_num_steps(num_steps)
        if self.index < len(random):
            sharded_checkpoint.set_random_state(self.device, random[self.index])

    def _base_tensor_names(self, made: _Model) -> list[str]:
        """Return the names of the base model's tensors, without those of adapters and the value
        head."""
        everything = [*made.sharded.parameters, *made.sharded.buffers]
        return [
            name
            for name in everything
            if not sharded_lora.is_adapter(name) and not is_of_critic(name)
        ]


def is_of_critic(name: str) -> bool:
    """Return True if a parameter belongs to the critic's value head.

    Such parameters are not part of the policy.
    """
    return name.startswith(f"{VALUE_HEAD}.")


def idle_batch(batch: Batch) -> Batch:
    """Return a dummy batch for an idle rank: one token without loss weight.

    A rank computes it when it has no batch left, to stay in step with other ranks. It has streams
    and denominators of the same names as ``batch``.
    """
    streams: dict[str, Any] = {
        name: np.zeros_like(column[:1]) for name, column in batch.streams.items()
    }
    streams["temperature"] = np.ones_like(batch.streams["temperature"][:1])
    zero = np.zeros(1, np.int64)
    return Batch(
        token_ids=zero,
        positions=zero,
        segments=[type(batch.segments[0])(0, 1, -1)],
        sources=zero,
        targets=zero,
        streams=streams,
        denominators=batch.denominators,
        sequences={0: "idle"},
        owners=np.zeros((1, 2), np.int64),
        token_weights=np.zeros(1, np.float32),
    )


def distribute_batches(batches: Many[Batch], num_ranks: int) -> list[list[int]]:
    """Assign batches to ranks, and return the indices of each rank's batches.

    Batches are assigned greedily, the longest first, each to the rank with the fewest tokens so
    far.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [0] * num_ranks
    for index in sorted(range(len(batches)), key=lambda index: (-len(batches[index]), index)):
        rank = min(range(num_ranks), key=lambda rank: (loads[rank], rank))
        shares[rank].append(index)
        loads[rank] += len(batches[index])
    return shares
