"""A backend with a critic that is a separate model.

    forward_backward   policy: the loss; critic: ``loss.value`` only, over the same batches
    values             the critic's
    all others         the policy's

Decides how the two models are stepped and saved together. Not here: a critic on the policy's own
trunk (``SingleBackend(critic=True)``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from ramify.errors import TrainError
from ramify.train.backends.base import Backend
from ramify.train.data.pack import PackingSpec
from ramify.train.losses import CriticOnlyLoss
from ramify.train.losses.loss import LossSpec
from ramify.types.sequence import Batch, Floats

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "critic"


class SeparateCritic:
    """Implements ``Backend`` for a policy and a separate critic."""

    def __init__(self, policy: Backend, critic: Backend) -> None:
        """``critic`` has a value head, ``policy`` does not."""
        self._policy = policy
        self._critic = critic

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
        learnt = self._critic.forward_backward(
            reinforced, LossSpec(policy=CriticOnlyLoss(), value=loss.value)
        )
        return {**measured, "value_loss": learnt.get("value_loss", 0.0)}

    def optim_step(self) -> dict[str, float]:
        with self._both_or_none():
            for backend in (self._policy, self._critic):  # before either moves
                backend.check_gradient()
            critic = self._critic.optim_step()
            return {**self._policy.optim_step(), "critic_grad_norm": critic["grad_norm"]}

    def check_gradient(self) -> None:
        with self._both_or_none():
            for backend in (self._policy, self._critic):
                backend.check_gradient()

    def clear_gradient(self) -> None:
        for backend in (self._policy, self._critic):
            backend.clear_gradient()

    @contextlib.contextmanager
    def _both_or_none(self) -> Iterator[None]:
        """If one model raises TrainError, clear the gradients of both."""
        try:
            yield
        except TrainError:
            self.clear_gradient()
            raise

    def logprobs(self, batches: Many[Batch]) -> list[Floats]:
        return self._policy.logprobs(batches)

    def values(self, batches: Many[Batch]) -> list[Floats]:
        return self._critic.values(batches)

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return self._policy.weights()

    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        self._policy.load_weights(weights)

    def save(self, folder: Path) -> Callable[[], None] | None:
        waits = [
            wait_for
            for wait_for in (self._policy.save(folder), self._critic.save(folder / _FOLDER))
            if wait_for is not None
        ]

        def wait() -> None:
            for wait_for in waits:
                wait_for()

        return wait if waits else None

    def load(self, folder: Path) -> None:
        self._policy.load(folder)
        self._critic.load(folder / _FOLDER)
