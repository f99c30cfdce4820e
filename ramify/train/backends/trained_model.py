"""A model trained in this process, on one device: the policy's own model, which the engine may also
sample from.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from pathlib import Path

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.models.load import Policy, load
from ramify.train.backends.base import ComputeSpec, OptimizerSpec
from ramify.train.backends.launch import RankInfo
from ramify.train.backends.lora import has_adapters, merged, unmerged, without
from ramify.train.backends.own_critic import SeparateCritic
from ramify.train.backends.precision import decided
from ramify.train.backends.single import SingleBackend
from ramify.train.data.pack import PackingSpec
from ramify.types.sequence import Batch, Floats


class LocalTrainedModel:
    """Implements ``TrainedModel`` on one device."""

    is_here = True

    def __init__(self, policy: Policy, compute: ComputeSpec, dumps: Path) -> None:
        self._policy = policy
        self._dumps = dumps
        # Decided once: the first backend converts the policy's weights to fp32.
        self._compute = decided(compute, policy.dtype, policy.device.type)
        self._backend: SingleBackend | None = None

    @staticmethod
    def check(compute: ComputeSpec, device: str) -> None:
        """Raise ConfigError if several ranks were configured or started: all except one would wait
        forever."""
        started = RankInfo.of_environment()
        if started is not None and started.size > 1:
            raise ConfigError(
                f"torchrun started {started.size} processes, but compute.backend=single trains in "
                "one: set compute.backend=fsdp"
            )
        if (compute.shard.ranks or 1) > 1:
            raise ConfigError(
                f"compute.shard.ranks={compute.shard.ranks}, but compute.backend=single trains in "
                "one process: set compute.backend=fsdp, or leave ranks out"
            )

    def backend(self, optim: OptimizerSpec) -> SingleBackend:
        self._backend = SingleBackend(self._policy, optim, self._compute, dumps=self._dumps)
        return self._backend

    def with_critic(
        self, optim: OptimizerSpec, own: OptimizerSpec | None
    ) -> SingleBackend | SeparateCritic:
        if own is None:
            self._backend = SingleBackend(
                self._policy, optim, self._compute, dumps=self._dumps, critic=True
            )
            return self._backend
        copied = dataclasses.replace(self._policy, model=copy.deepcopy(self._policy.model))
        critic = SingleBackend(copied, own, self._compute, dumps=self._dumps, critic=True)
        return SeparateCritic(self.backend(optim), critic)

    def reference(self, folder: Path, is_base: bool) -> SingleBackend | AdapterFreeReference:
        if is_base and self._backend is not None and has_adapters(self._policy.model):
            return AdapterFreeReference(self._policy.model, self._backend)
        policy = load(folder, self._policy.dtype, self._policy.device)
        return SingleBackend(policy, None, self._compute, dumps=self._dumps)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged(self._policy.model)

    def unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        return unmerged(self._policy.model)

    def release_memory(self) -> None:
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Does nothing: nothing was started."""


class AdapterFreeReference:
    """The model without its adapters, as a reference that needs no second model. Call it in the
    training thread."""

    def __init__(self, model: nn.Module, trained: SingleBackend) -> None:
        self._model = model
        self._trained = trained

    @property
    def packing(self) -> PackingSpec:
        return self._trained.packing

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        with without(self._model):
            return self._trained.logprobs(batches)
