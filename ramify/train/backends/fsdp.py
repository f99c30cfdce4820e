"""The ``fsdp`` backend, which shards one model over several processes.

This file is the side of rank 0, the process that runs the training loop.

    FsdpRanks ── spread ──> FsdpModel ── backend ──> FsdpBackend (``fsdp_model.py``)

Losses are divided by the counts of the whole step, and gradients are sums over ranks, so both
equal those of the ``single`` backend. A model and its training are in ``fsdp_model.py``, sharding
is in ``sharding.py``, what a rank does is in ``rank.py``, and failures of ranks are handled by
``rank_group.py``.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from torch import Tensor

from ramify.actors.launcher import Launcher
from ramify.actors.rank_group import RankGroup
from ramify.models.load import Policy, default_dtype
from ramify.models.stored_weights import stored_tensors
from ramify.models.weights import check_weights
from ramify.train.backends import launch
from ramify.train.backends.base import Backend, OptimizerSpec, TrainerComputeSpec, resolve_precision
from ramify.train.backends.fsdp_model import (
    FsdpBackend,
    FsdpModel,
    FsdpModelSpec,
    ShardedReference,
    Source,
    check_optimizer,
)
from ramify.train.backends.meta_model import build_meta_model
from ramify.train.backends.sharded_lora import AdapterSpec
from ramify.train.backends.tensor_parallel import TensorParallelPlan
from ramify.train.backends.trained_model import PolicyWithSeparateCritic


class FsdpRanks:
    """The processes (ranks) of a training run, which hold the shards of its models."""

    def __init__(
        self,
        compute: TrainerComputeSpec,
        device: str = "cpu",
        *,
        dumps: Path | None = None,
        hosts: Launcher | None = None,
    ) -> None:
        """Start the ranks on ``hosts`` or on this machine, or join those that torchrun started.

        The folder ``dumps`` receives batches with a non-finite loss and the stack traces of stuck
        ranks. Raises ConfigError, before it starts anything, if ``compute.shard`` does not fit this
        machine.
        """
        self.compute = compute
        self.device = device
        self.dumps = dumps or Path()
        self._joined = launch.start_ranks(compute.shard, device, self.dumps, hosts)
        self._num_models = 0
        self._end = weakref.finalize(self, _leave, self._joined)

    @property
    def rank_group(self) -> RankGroup:
        rank_group: RankGroup = self._joined.rank_group
        return rank_group

    @property
    def rank_models(self) -> Any:
        """The model shards that this process holds, one per model."""
        return self._joined.rank

    def shard_model(
        self,
        config: Any,
        source: Source,
        lora: AdapterSpec | None = None,
        compute: TrainerComputeSpec | None = None,
        *,
        critic: bool = False,
        holds_base: bool = False,
    ) -> FsdpModel:
        """Shard a model over the ranks, given its Hugging Face configuration and a source of
        weights.

        Raises ConfigError, which names the first tensor that does not fit.

        ``compute`` overrides the ranks' options, except their number. ``critic`` adds a value head,
        initialized to 0. ``holds_base`` keeps the weights that adapters are added to in this
        process too, so that only adapters have to be gathered.
        """
        compute = compute or self.compute
        TensorParallelPlan.check(config, compute.shard, self.rank_group.size, lora)
        check_source_tensors(config, source)
        self._num_models += 1
        compute = resolve_precision(compute, default_dtype(config, self.device), self.device)
        parts = FsdpModelSpec(config, source, lora, compute, critic, holds_base)
        return FsdpModel(self._joined, self.dumps, f"model {self._num_models}", parts)

    def close(self) -> None:
        self._end()


class ShardedTrainedModel:
    """The model that a run trains, sharded over several processes (ranks).

    The policy object in this process is a separate copy for the inference engine. It gets new
    weights whenever they are published.
    """

    is_here = False

    def __init__(
        self,
        policy: Policy,
        compute: TrainerComputeSpec,
        dumps: Path,
        *,
        lora: AdapterSpec | None = None,
        source: Source,
        critic: bool = False,
        hosts: Launcher | None = None,
        device: str | None = None,
    ) -> None:
        """Start the ranks, and shard a copy of ``policy``'s model over them.

        ``policy`` may get other weights afterwards. ``critic`` adds a value head, for
        ``with_critic``. ``device`` is the kind of device the ranks use; None takes the policy's.
        """
        device = device or policy.device.type
        compute = resolve_precision(compute, policy.dtype, device)
        self._ranks = FsdpRanks(compute, device, dumps=dumps, hosts=hosts)
        try:
            has_all = policy.device.type != "meta"  # the engine of this process has them anyway
            self._model = self._ranks.shard_model(
                policy.config, source, lora, critic=critic, holds_base=has_all
            )
        except BaseException:
            self._ranks.close()
            raise
        self._backend: FsdpBackend | None = None

    @staticmethod
    def check(compute: TrainerComputeSpec, device: str, *, elsewhere: bool = False) -> None:
        """Raise ConfigError if the ranks cannot be started.

        Pass ``elsewhere=True`` if some ranks run on other machines.
        """
        launch.check_ranks(compute.shard, device, elsewhere=elsewhere)

    @staticmethod
    def check_model(
        config: Any,
        compute: TrainerComputeSpec,
        device: str,
        lora: AdapterSpec | None,
        optims: Many[OptimizerSpec],
    ) -> None:
        """Raise ConfigError if the model, its adapters or one of its optimizers cannot be split
        over the mesh of ranks."""
        shard = compute.shard
        TensorParallelPlan.check(config, shard, launch.num_ranks(shard, device), lora)
        for optim in optims:
            check_optimizer(optim, shard)

    def backend(self, optim: OptimizerSpec) -> FsdpBackend:
        self._backend = self._model.create_backend(optim)
        return self._backend

    def with_critic(self, optim: OptimizerSpec, own: OptimizerSpec | None) -> Backend:
        if own is None:
            self._backend = self._model.create_backend(optim, critic=True)
            return self._backend
        # Adapters are summed up first; without them each rank copies its own part.
        source = self._model if self._model.lora is None else dict(self.weights())
        model = self._ranks.shard_model(self._model.config, source, self._model.lora, critic=True)
        return PolicyWithSeparateCritic(self.backend(optim), model.create_backend(own, critic=True))

    def reference(self, folder: Path, is_base: bool) -> ShardedReference | FsdpBackend:
        if is_base and self._model.lora is not None and self._backend is not None:
            return self._backend.base_reference()
        return self._ranks.shard_model(self._model.config, folder).create_backend()

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._model.weights()

    def base_tensors_and_adapters(
        self,
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        return self._model.lazy_weights_and_adapters()

    def stack_traces(self) -> str:
        """Return the stack traces of all other ranks, as text."""
        return self._ranks.rank_group.rank_stack_traces()

    def release_memory(self) -> None:
        self._ranks.rank_group.call("release_memory")

    def close(self) -> None:
        self._ranks.close()


def check_source_tensors(config: Any, source: Source) -> None:
    """Raise ConfigError if a source of weights does not have the tensors that the model of
    ``config`` needs.

    The error names the first tensor that does not fit.
    """
    model = build_meta_model(config)
    if isinstance(source, Path):
        check_weights(model, stored_tensors(source, model), str(source))
    elif not isinstance(source, FsdpModel):
        check_weights(model, source, "the given weights")


def _leave(joined: launch.JoinedRanks) -> None:
    launch.stop_ranks(joined)
