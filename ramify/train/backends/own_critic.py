"""A critic that is a model of its own beside the policy, as one backend.

    forward_backward   the policy's by the loss, the critic's by ``loss.value`` alone, over the same batches
    values             the critic's
    all else           the policy's

Decides how the two are stepped and saved together. A critic on the policy's own trunk is
``SingleBackend(critic=True)``.
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
from ramify.train.loss import LossSpec
from ramify.train.pack import PackingSpec
from ramify.train.policy_losses import CriticOnlyLoss
from ramify.types.sequence import Batch, Floats

if TYPE_CHECKING:
    from torch import Tensor

_FOLDER = "critic"


class SeparateCritic:
    """Implements ``Backend``."""

    def __init__(self, policy: Backend, critic: Backend) -> None:
        """``critic`` has a value head, ``policy`` none."""
        self._policy, self._critic = policy, critic

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
            for each in (self._policy, self._critic):  # before either moves
                each.check_gradient()
            critic = self._critic.optim_step()
            return {**self._policy.optim_step(), "critic_grad_norm": critic["grad_norm"]}

    def check_gradient(self) -> None:
        with self._both_or_none():
            for each in (self._policy, self._critic):
                each.check_gradient()

    def clear_gradient(self) -> None:
        for each in (self._policy, self._critic):
            each.clear_gradient()

    @contextlib.contextmanager
    def _both_or_none(self) -> Iterator[None]:
        """Where one of them is refused, the other keeps nothing of the step."""
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
            each
            for each in (self._policy.save(folder), self._critic.save(folder / _FOLDER))
            if each is not None
        ]

        def wait() -> None:
            for each in waits:
                each()

        return wait if waits else None

    def load(self, folder: Path) -> None:
        self._policy.load(folder)
        self._critic.load(folder / _FOLDER)
