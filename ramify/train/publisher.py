"""Publishing the policy: its weights on their way to the engines, and which the engines have.

                  a step of learning
        CURRENT ─────────────────────> BEHIND
           ▲  ▲        publish            │ sleep, before learning on the same devices
           │  └───────────────────────────┤
           └──────────── publish ──── ASLEEP

Decides when weights are sent, that engines wake before it, and that they are checked after it. Not
here: how weights travel (``inference/weight_sync``), and what is compared (``selfcheck.py``).
"""

from __future__ import annotations

import asyncio
import dataclasses
import enum
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from ramify.logging import RoomLogger
from ramify.train.backends.base import Backend
from ramify.train.run_record import RunRecord
from ramify.train.selfcheck import SelfCheck
from ramify.train.watchdog import WatchedThread

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngines
    from ramify.inference.local.local_client import LocalClient
    from ramify.inference.weight_sync.base import WeightSource
    from ramify.models.load import Policy
    from ramify.train.backends.base import TrainedModel


_log = RoomLogger("train")
T = TypeVar("T")


class PolicyHandle(Protocol):
    """What a run does with the policy except training it."""

    @property
    def version(self) -> int:
        """Version of the weights published last, as the engine reports it for each token."""
        ...

    async def publish(self) -> None:
        """Send the current weights to the engine."""
        ...

    async def sleep(self) -> bool:
        """Have engines on the trainer's devices release their memory until ``publish``. Returns
        whether there are any."""
        ...

    def release_memory(self) -> None:
        """Return device memory that the trainer caches but does not use."""
        ...

    def save(self, folder: Path) -> None:
        """Write the policy in Hugging Face's layout."""
        ...

    def load(self, folder: Path) -> None:
        """Load weights that ``save`` wrote."""
        ...


class EnginePhase(enum.Enum):
    """What the engines do, and which weights they have."""

    CURRENT = "current"
    """They answer with the newest weights."""
    BEHIND = "behind"
    """They answer with older weights than those that are trained."""
    ASLEEP = "asleep"
    """They have released their memory to the trainer and do not answer."""


class Publisher:
    """Publishes the policy of a run, and checks that the engines use it."""

    def __init__(
        self,
        policy: PolicyHandle,
        record: RunRecord,
        thread: WatchedThread,
        check: SelfCheck | None = None,
        name: str = "",
    ) -> None:
        """``name``: that of the policy in ``Run.policies``; empty for ``Run.policy``, whose
        publications the run counts."""
        self.name = name
        self.policy = policy
        self.thread = thread
        self.check = check
        self.phase = EnginePhase.BEHIND
        self.backend: Backend | None = None
        """The backend of the current stage, with which engines are compared."""
        self.changing = asyncio.Lock()
        """Held while weights change, until the engines have them."""
        self._record = record

    def learned(self) -> None:
        """Note that the weights have changed."""
        if self.phase is EnginePhase.CURRENT:
            self.phase = EnginePhase.BEHIND

    async def sleep(self) -> dict[str, float]:
        """Have engines on the trainer's devices sleep until weights are published. Returns how long
        that took."""
        started = time.monotonic()
        sleeping = self.thread.watch.bounded(
            f"letting the engines sleep before step {self._record.state.step + 1}",
            self.policy.sleep(),
        )
        if not await sleeping:
            return {}
        self.phase = EnginePhase.ASLEEP
        return {"sleep_s": time.monotonic() - started}

    async def publish(self) -> None:
        """Publish the newest weights to the engine, and check that it uses them."""
        if self.phase is EnginePhase.CURRENT:
            return
        state = self._record.state
        if self.phase is EnginePhase.ASLEEP:
            await self.thread.run(state.step + 1, self.policy.release_memory)
            self.phase = EnginePhase.BEHIND
        started = time.monotonic()
        await self.thread.watch.bounded(
            f"publishing the weights after step {state.step}", self.policy.publish()
        )
        self.phase = EnginePhase.CURRENT
        state.version += not self.name
        engine = f"the engine of {self.name}" if self.name else "the engine"
        _log.info(
            "weight_sync",
            f"{engine} has version {self.policy.version} of the weights",
            version=self.policy.version,
            step=state.step,
            seconds=time.monotonic() - started,
        )
        await self._check_engine()

    async def rejoin(self, give: Callable[[], Awaitable[bool]]) -> None:
        """Give an engine that is back the current weights (``give``) between two steps, and check
        it like the others. An error here ends the run."""
        try:
            async with self.changing:
                if await give():
                    await self._check_engine()
        except Exception as error:  # noqa: BLE001 (raised again in the run's next wait)
            self.thread.watch.fail(error)

    async def load(self, folder: Path) -> None:
        """Load a saved policy, to publish it next."""
        await self.thread.run(self._record.state.step + 1, self.policy.load, folder)
        self.learned()

    async def _check_engine(self) -> None:
        if self.check is not None and self.backend is not None:
            step = self._record.state.step

            def in_thread(work: Callable[..., T], *arguments: Any) -> Awaitable[T]:
                return self.thread.run(step + 1, work, *arguments)

            checking = self.check.engine(self.backend, in_thread)
            await self.thread.watch.bounded(f"checking the engine after step {step}", checking)


class PolicyWeights:
    """The trained weights in the form that the engine needs: sent, saved and loaded again."""

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
        self._saved: Path | None = None
        """Folder of that policy, if this process has no weights."""

    @property
    def _is_bare(self) -> bool:
        """Whether this process has no weights: ranks and engines have them."""
        return self._serving.device.type == "meta"

    @property
    def _shares(self) -> bool:
        return self._is_loaded or (self._model is None and self._trained is self._serving)

    @property
    def version(self) -> int:
        return self._trained.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights in the form that the engine needs."""
        from ramify.train.backends.lora import merged

        if self._saved is not None:
            dtype = self._serving.dtype
            return ((name, make().to(dtype)) for name, _, make in self._stored())
        if self._shares:
            return (
                (name, weight.detach()) for name, weight in self._serving.model.named_parameters()
            )
        dtype = self._serving.dtype
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
        from ramify.inference.weight_sync.base import as_checkpoint, source

        given = [
            source(name, tensor, self._serving.dtype, make)
            for name, tensor, make in self._unmerged()
        ]
        loads = getattr(self._client, "loads_checkpoints", False)
        return list(as_checkpoint(self._serving.model, given)) if loads else given

    def _unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Like ``lora.unmerged``, wherever the weights are."""
        from ramify.train.backends.lora import unmerged

        if self._saved is not None:
            return self._stored()
        if self._model is not None and not self._is_loaded:
            return self._model.unmerged()
        return unmerged(self._serving.model if self._is_loaded else self._trained.model)

    def _stored(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """The tensors of the saved policy, read when they are needed."""
        from ramify.models.stored_weights import stored_tensors

        assert self._saved is not None
        stored = stored_tensors(self._saved, self._serving.model)
        for name, parameter in self._serving.model.named_parameters():
            yield name, parameter, partial(stored[name].__getitem__, ...)

    def _export(self, folder: Path) -> None:
        """Write configuration and weights, one tensor at a time."""
        from ramify.train.backends.write_checkpoint import export_model

        assert self._model is not None
        tensors = self._stored() if self._saved is not None else self._model.unmerged()
        shapes = {name: tuple(each.shape) for name, each, _ in tensors}
        serving = self._serving
        export_model(folder, serving.config, serving.model, shapes, self.weights(), serving.dtype)

    def save(self, folder: Path) -> None:
        """Save the policy that the engine serves, in its precision; the trainer's is in the
        checkpoint. The saved default is temperature 0, for requests that do not set one: rollouts
        explore, but users want the likeliest answer."""
        from ramify.models.load import SamplingDefaults, save_policy
        from ramify.models.weights import load_weights

        if not self._shares and not self._is_bare:
            load_weights(self._serving.model, dict(self.weights()))
        save_policy(
            dataclasses.replace(self._serving, defaults=SamplingDefaults(temperature=0.0)),
            folder,
            write=self._export if self._is_bare else None,
        )

    def load(self, folder: Path) -> None:
        """Load a saved policy into the engine's copy."""
        from ramify.models.load import load_into

        if self._is_bare:
            self._saved = folder
        else:
            load_into(self._serving, folder)
        self._is_loaded = True
