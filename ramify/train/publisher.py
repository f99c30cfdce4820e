"""Publishing the policy: send its weights to the engine, save it, and restore a saved one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngines
    from ramify.inference.local.local_client import LocalClient
    from ramify.inference.weight_sync.base import WeightSource
    from ramify.models.load import Policy
    from ramify.train.backends.base import TrainedModel


class PolicyPublisher:
    """Interface of the training loop to the policy: publish it to the engine, save it, and load a
    saved one."""

    def __init__(
        self,
        trained: Policy,
        serving: Policy,
        client: LocalClient | HttpEngines,
        model: TrainedModel | None = None,
    ) -> None:
        """``model``: the model that is trained; None for ``trained`` itself."""
        self._trained = trained
        self._serving = serving
        self._client = client
        self._trained_model = model
        self._model = model if model is not None and not model.is_here else None
        self._is_loaded = False
        """True if the engine has a saved policy, which differs from the trained one."""

    @property
    def _shares(self) -> bool:
        return self._is_loaded or (self._model is None and self._trained is self._serving)

    @property
    def version(self) -> int:
        return self._trained.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights in the form that the engine needs."""
        from ramify.train.backends.lora import merged

        dtype = self._serving.dtype
        if self._is_loaded:
            return (
                (name, weight.detach()) for name, weight in self._serving.model.named_parameters()
            )
        weights = merged(self._trained.model) if self._model is None else self._model.weights()
        return ((name, weight.to(dtype)) for name, weight in weights)

    async def publish(self) -> None:
        """Send the trained weights to the engine as the next version."""
        from ramify.inference.local.local_client import LocalClient

        self._trained.version += 1
        if not isinstance(self._client, LocalClient):
            return await self._client.update(self._sources(), self._trained.version)
        weights = (
            self._serving.model
            if self._shares
            else await asyncio.to_thread(lambda: dict(self.weights()))
        )
        return await self._client.update(weights, self._trained.version)

    async def sleep(self) -> bool:
        """Let engines that share the trainer's devices release their memory until ``publish``;
        returns whether any do."""
        from ramify.inference.local.local_client import LocalClient

        return False if isinstance(self._client, LocalClient) else await self._client.sleep()

    def release_memory(self) -> None:
        """Free cached memory of the trainer, for engines on the same devices."""
        if self._trained_model is not None:
            self._trained_model.release_memory()

    async def rejoin(self) -> bool:
        """Send the last published weights to engines that came back; returns whether there were
        any."""
        from ramify.inference.local.local_client import LocalClient

        if isinstance(self._client, LocalClient):
            return False
        return await self._client.rejoin(self._sources(), self._trained.version)

    def _sources(self) -> list[WeightSource]:
        from ramify.inference.weight_sync.layout import source

        return [
            source(name, tensor, self._serving.dtype, make)
            for name, tensor, make in self._unmerged()
        ]

    def _unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Like ``lora.unmerged``, wherever the weights are."""
        from ramify.train.backends.lora import unmerged

        if self._model is not None and not self._is_loaded:
            return self._model.unmerged()
        return unmerged(self._serving.model if self._is_loaded else self._trained.model)

    def save(self, folder: Path) -> None:
        """Save the policy that the engine serves, in its precision; the trainer's is in the
        checkpoint. The saved default is temperature 0, for requests that do not set one: rollouts
        explore, but users want the likeliest answer."""
        from ramify.models.load import SamplingDefaults, save_policy
        from ramify.models.weights import load_weights

        if not self._shares:
            load_weights(self._serving.model, dict(self.weights()))
        save_policy(
            dataclasses.replace(self._serving, defaults=SamplingDefaults(temperature=0.0)), folder
        )

    def load(self, folder: Path) -> None:
        """Load a saved policy into the engine's copy."""
        from ramify.models.load import load_into

        load_into(self._serving, folder)
        self._is_loaded = True
