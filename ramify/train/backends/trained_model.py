"""Train a model in this process, on one device.

The inference engine may sample from the same model. This module also combines the policy with a
critic that is a separate model.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path

import msgspec
import torch
from torch import Tensor, nn

from ramify.errors import ConfigError, TrainError
from ramify.models.load import Policy, load_policy
from ramify.train.backends.base import Backend, OptimizerSpec, TrainerComputeSpec, resolve_precision
from ramify.train.backends.lora import (
    adapters_disabled,
    base_tensors_and_adapters,
    has_adapters,
    merged_weights,
)
from ramify.train.backends.single_device import SingleBackend
from ramify.train.backends.torchrun_rendezvous import RankInfo
from ramify.train.data.pack import PackingSpec
from ramify.train.losses import CriticOnlyLoss
from ramify.train.losses.total_loss import LossSpec
from ramify.types.training_sequences import Batch, Floats


class InProcessTrainedModel:
    """The model that a run trains, in this process and on one device."""

    is_here = True

    def __init__(self, policy: Policy, compute: TrainerComputeSpec, dumps: Path) -> None:
        self._policy = policy
        self._dumps = dumps
        # Decided once: the first backend converts the policy's weights to fp32.
        self._compute = resolve_precision(compute, policy.dtype, policy.device.type)
        self._backend: SingleBackend | None = None

    @staticmethod
    def check(compute: TrainerComputeSpec, device: str) -> None:
        """Raise ConfigError if several ranks were configured or started.

        This backend uses one rank, and all others would wait forever.
        """
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
    ) -> SingleBackend | PolicyWithSeparateCritic:
        if own is None:
            self._backend = SingleBackend(
                self._policy, optim, self._compute, dumps=self._dumps, critic=True
            )
            return self._backend
        copied = dataclasses.replace(self._policy, model=copy.deepcopy(self._policy.model))
        critic = SingleBackend(copied, own, self._compute, dumps=self._dumps, critic=True)
        return PolicyWithSeparateCritic(self.backend(optim), critic)

    def reference(self, folder: Path, is_base: bool) -> SingleBackend | AdapterFreeReference:
        if is_base and self._backend is not None and has_adapters(self._policy.model):
            return AdapterFreeReference(self._policy.model, self._backend)
        policy = load_policy(folder, self._policy.dtype, self._policy.device)
        return SingleBackend(policy, None, self._compute, dumps=self._dumps)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self._policy.model)

    def base_tensors_and_adapters(
        self,
    ) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        return base_tensors_and_adapters(self._policy.model)

    def release_memory(self) -> None:
        if self._policy.device.type == "cuda":
            torch.cuda.empty_cache()

    def close(self) -> None:
        """Do nothing, because this model starts no processes."""


class AdapterFreeReference:
    """A reference model that is the trained model with its adapters disabled.

    No second model is needed. Call it only in the training thread.
    """

    def __init__(self, model: nn.Module, trained: SingleBackend) -> None:
        self._model = model
        self._trained = trained

    @property
    def packing(self) -> PackingSpec:
        return self._trained.packing

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        with adapters_disabled(self._model):
            return self._trained.logprobs(batches)


_FOLDER = "critic"


class PolicyWithSeparateCritic:
    """A training backend for a policy and a critic that are separate models.

        forward_backward     train the policy on the loss, and the critic on ``loss.value`` alone,
                             with the same batches
        values               ask the critic
        logprobs, weights    ask the policy

    Steps and checkpoints cover both models.
    """

    def __init__(self, policy: Backend, critic: Backend) -> None:
        """Combine the backends of a policy and a critic.

        Only the critic's backend has a value head.
        """
        self._policy = policy
        self.critic = critic

    @property
    def packing(self) -> PackingSpec:
        return self._policy.packing

    @property
    def version(self) -> int:
        return self._policy.version

    def forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        with self._both_or_none():
            return self._forward_backward(batches, loss)

    def _forward_backward(self, batches: Many[Batch], loss: LossSpec) -> dict[str, float]:
        measured = self._policy.forward_backward(batches, loss)
        reinforced = [
            msgspec.structs.replace(batch, denominators={"rl": batch.denominators["rl"]})
            for batch in batches
            if "rl" in batch.denominators
        ]
        learnt = self.critic.forward_backward(
            reinforced, LossSpec(policy=CriticOnlyLoss(), value=loss.value)
        )
        return {**measured, "value_loss": learnt.get("value_loss", 0.0)}

    def optim_step(self) -> dict[str, float]:
        with self._both_or_none():
            for backend in (self._policy, self.critic):  # before either moves
                backend.check_gradient()
            critic = self.critic.optim_step()
            return {**self._policy.optim_step(), "critic_grad_norm": critic["grad_norm"]}

    def check_gradient(self) -> None:
        with self._both_or_none():
            for backend in (self._policy, self.critic):
                backend.check_gradient()

    def clear_gradient(self) -> None:
        for backend in (self._policy, self.critic):
            backend.clear_gradient()

    @contextlib.contextmanager
    def _both_or_none(self) -> Iterator[None]:
        """Clear both models' gradients if the ``with`` block raises TrainError."""
        try:
            yield
        except TrainError:
            self.clear_gradient()
            raise

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self._policy.logprobs(batches)

    def values(self, batches: Many[Batch]) -> list[Floats]:
        return self.critic.values(batches)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._policy.load_weights(weights)

    def save(self, folder: Path) -> Callable[[], None] | None:
        waits = [
            wait_for
            for wait_for in (self._policy.save(folder), self.critic.save(folder / _FOLDER))
            if wait_for is not None
        ]

        def wait() -> None:
            for wait_for in waits:
                wait_for()

        return wait if waits else None

    def load(self, folder: Path) -> None:
        self._policy.load(folder)
        self.critic.load(folder / _FOLDER)
