"""One policy that a run trains: it learns from the data of a step, and the engines get its weights.

    prepare    compute the streams that the rows need: old, reference, values
    learn      pack ─ forward_backward ─ optim_step, for each minibatch
    publish    send the weights to the engines, and check that they use them
    save       its backend and its policy, as parts of a checkpoint

What the engines have:

                  a step of learning
        CURRENT ─────────────────────> BEHIND
           ▲  ▲        publish            │ sleep, before learning on the same devices
           │  └───────────────────────────┤
           └──────────── publish ──── ASLEEP

A run has one learner for ``Run.policy`` and one for each of ``Run.policies``. All functions of
``Learner`` but ``paths`` are called in the training thread. Not here: the order of all this
(``trainer.py``), how weights travel (``inference/weight_sync``), and what is compared
(``selfcheck.py``).
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import enum
import functools
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ramify.errors import TrainError
from ramify.logging import ComponentLogger
from ramify.models import checksums
from ramify.time_account import under_way, working
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.checkpoint import Write
from ramify.train.data.pack import attach, describe, pack
from ramify.train.depth_models import own_calls
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.sampling_metrics import (
    UpdateProbe,
    note_gaps,
    num_sampled,
    of_credit,
    of_tokens,
)
from ramify.train.selfcheck import EngineConsistencyChecks
from ramify.train.signals.scorer import REFERENCE
from ramify.train.stages import Minibatch, StepData, TrainingStage
from ramify.train.watchdog import WatchedTrainingThread
from ramify.types.sequence import Batch, Floats, TokenSequence
from ramify.types.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngines
    from ramify.inference.local.local_client import LocalClient
    from ramify.inference.weight_sync.base import LazyWeight
    from ramify.models.load import Policy
    from ramify.train.backends.base import TrainedModel

    Weights = Iterable[tuple[str, Tensor]]

_log = ComponentLogger("train")
T = TypeVar("T")


class PolicyPaths(NamedTuple):
    """Paths of one policy's parts, relative to the run's folder or to a checkpoint."""

    policy: str
    backend: str
    reference: str
    """The policy that rollouts began with."""


def paths_of(name: str) -> PolicyPaths:
    """Return where a run's folder and its checkpoints store a policy. ``name`` is the policy's name
    in ``Run.policies``, or empty for ``Run.policy``."""
    if not name:
        return PolicyPaths("policy", "backend", REFERENCE)
    return PolicyPaths(f"policies/{name}", f"backends/{name}", f"{REFERENCE}-{name}")


class Learner:
    """One policy that is trained: its backend, its reference policy and the publisher of its
    weights."""

    def __init__(
        self,
        publisher: Publisher,
        backend_of: Callable[[TrainingStage], Backend],
        *,
        reference_of: Callable[[Path], ReferenceModel] | None = None,
        source: Callable[[], Weights] | None = None,
        model: str = "",
        control_ids: Collection[int] = (),
    ) -> None:
        """``reference_of`` loads a saved policy as the reference of a KL. ``source`` returns the
        initial weights of a policy that starts as a copy of another one. The policy answers calls
        under the name ``model``, or all trained calls if that is empty. ``control_ids`` are special
        tokens that no reply should contain."""
        self.publisher = publisher
        self.paths = paths_of(publisher.name)
        self._backend_of = backend_of
        self._reference_of = reference_of
        self._reference: ReferenceModel | None = None
        self._lr_scale = 1.0
        self._source = source
        self._model = model
        self._control_ids = control_ids

    @property
    def name(self) -> str:
        return self.publisher.name

    def own(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return a copy of ``groups`` in which only this policy's calls have token ids."""
        return own_calls(groups, self._model) if self._model else groups

    def measured(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return ``values`` with metric names that tell policies apart: they have the prefix
        ``policy.NAME/``, except for ``Run.policy``."""
        prefix = f"policy.{self.name}/" if self.name else ""
        return {prefix + name: each for name, each in values.items()}

    def begin(self, stage: TrainingStage) -> None:
        """Begin ``stage``, with a new optimizer."""
        backend = self._backend_of(stage)
        if self._source is not None:
            backend.load_weights(dict(self._source()))
        self.publisher.backend = backend

    def restore(
        self, stage: TrainingStage, checkpoint: Path, *, is_open: bool, lr_scale: float = 1.0
    ) -> None:
        """Restore the weights, and the optimizer if the stage continues (``is_open``), with
        ``lr_scale`` times the configured learning rate."""
        self._lr_scale = lr_scale
        scaled = stage
        if lr_scale != 1:
            scaled = copy.copy(stage)
            scaled.optim = msgspec.structs.replace(stage.optim, lr=stage.optim.peak_lr * lr_scale)
        backend = self._backend_of(scaled)
        backend.load(checkpoint / self.paths.backend)
        if is_open:
            self.publisher.backend = backend

    def save_policy(self, folder: Path) -> None:
        """Save the current policy with checksums, which are verified when it is loaded."""
        checksums.drop(folder)
        self.publisher.policy.save(folder)
        checksums.write(folder)

    def parts(self) -> dict[str, Write]:
        """What a checkpoint holds of this policy."""
        assert self.publisher.backend is not None
        return {
            self.paths.backend: self.publisher.backend.save,
            self.paths.policy: self.publisher.policy.save,
        }

    def load_reference(self, out: Path, *, is_new: bool) -> None:
        """Load the policy that rollouts began with, which is stored next to the checkpoints.
        ``is_new`` is True if rollouts begin now, so that it must be saved first."""
        folder = out / self.paths.reference
        if is_new:
            self.save_policy(folder)
        elif not folder.is_dir():
            raise TrainError(
                f"{folder} is missing: it is the policy that rollouts began with, the reference "
                "of the run's KL; copy it from the run that wrote the checkpoint"
            )
        checksums.check(folder)
        if self._reference_of is None:
            raise TrainError(
                "the run has a KL to a reference policy, but no reference_of to load it with"
            )
        self._reference = self._reference_of(folder)

    def prepare(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Compute the streams that the rows of a step need before its first minibatch."""
        backend = self.publisher.backend
        assert backend is not None
        with working("forward_backward"):
            return self._prepare(backend, stage, work)

    def _prepare(self, backend: Backend, stage: TrainingStage, work: StepData) -> dict[str, float]:
        rows = [row for part in work.parts for row in part.rows]
        if "staleness" in stage.streams:
            self._attach_staleness(rows)
        if "ref_logprobs" in stage.streams:
            assert self._reference is not None
            # A signal may have computed some of them.
            missing = [row for row in rows if "ref_logprobs" not in row.streams]
            if missing:
                _attach(missing, self._reference, "ref_logprobs", self._reference.logprobs)
        if "old_logprobs" in stage.streams:
            _attach(rows, backend, "old_logprobs", backend.logprobs)
        if "values" in stage.streams:
            _attach(rows, backend, "values", backend.values)
        return stage.finish(rows)

    def probe(self, stage: TrainingStage, work: StepData, step: int) -> UpdateProbe | None:
        """Score a sample of the step's calls with the policy before it learns. None if there is no
        sample."""
        assert self.publisher.backend is not None
        with working("forward_backward"):
            rows = stage.probed(self.own(work.groups), step)
            return UpdateProbe.taken(rows, self.publisher.backend)

    def measured_before(self, work: StepData, probe: UpdateProbe | None) -> dict[str, float]:
        """Metrics of all tokens that this policy sampled for a step, before it learns from them.
        Call it after ``prepare``, which completes the advantages."""
        with working("credit"):
            own = self.own(work.groups)
            rows = [row for part in work.parts for row in part.rows]
            measured = of_tokens(own, self._control_ids) | of_credit(rows, num_sampled(own))
            return measured if probe is None else measured | probe.mismatch

    def note_gaps(self, work: StepData, probe: UpdateProbe | None) -> None:
        """Store the gaps between trainer and sampler in the rollouts of a step, at the tokens that
        were scored before it: those of ``old_logprobs``, and of ``probe``. Call it after
        ``prepare``."""
        with working("credit"):
            rows = [row for part in work.parts for row in part.rows]
            note_gaps(work.groups, [*rows, *(probe.rows if probe is not None else ())])

    def measured_after(
        self, stage: TrainingStage, work: StepData, probe: UpdateProbe | None
    ) -> dict[str, float]:
        """Metrics of the update that a step made, or of a step without one."""
        backend = self.publisher.backend
        assert backend is not None
        if not work.parts:
            # Its rate says what a step would have done.
            lr = self._lr_scale * stage.optim.lr_at(backend.version)
            still = {"lr": lr, "grad_norm": 0.0}
            return still if probe is None else {**still, "post_kl": 0.0}
        with working("forward_backward"):
            return {} if probe is None else probe.moved(backend)

    def _attach_staleness(self, rows: Sequence[TokenSequence]) -> None:
        """Attach the stream ``staleness``: how many versions the sampling policy lags behind the
        trained one, per token."""
        for row in rows:
            if row.versions is not None:
                row.streams["staleness"] = np.where(
                    row.versions >= 0, self.publisher.policy.version - row.versions, 0
                ).astype(np.float32)

    def learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """Make one optimizer step."""
        backend = self.publisher.backend
        assert backend is not None
        whole = stage.loss.sequence if stage.loss.is_over_sequences else None
        with working("packing"):
            batches = pack(part.rows, backend.packing, part.denominators, whole=whole)
            if self.publisher.check is not None:
                self.publisher.check.weights(part.rows, batches)
        with working("forward_backward"):
            measured = backend.forward_backward(batches, stage.loss)
        with working("optimizer"):
            measured |= backend.optim_step()
        self.publisher.learned()
        if stage.samples and "entropy" in measured:  # ``entropy`` is that of all sampled tokens
            measured["loss_entropy"] = measured.pop("entropy")
        with working("packing"):
            return {**measured, **describe(batches, part.rows)}


def _attach(
    rows: Sequence[TokenSequence],
    backend: ReferenceModel,
    name: str,
    ask: Callable[[Sequence[Batch]], Sequence[Floats]],
) -> None:
    """Compute a per-token stream, such as old log-probabilities, and attach it to ``rows`` under
    ``name``. The rows are packed into batches for ``backend``; ``ask`` maps these batches to one
    array of values per batch."""
    with working("packing"):
        batches = pack(rows, backend.packing)
    attach(rows, batches, name, ask(batches))


# --- publishing


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
        policy: EnginePolicyWeights,
        record: TrainingRunRecorder,
        thread: WatchedTrainingThread,
        check: EngineConsistencyChecks | None = None,
        name: str = "",
    ) -> None:
        """``name`` is the name of the policy in ``Run.policies``. It is empty for ``Run.policy``;
        only its publications are counted in the run's record."""
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
        with under_way("weight_sync"):
            return await self._sleep()

    async def _sleep(self) -> dict[str, float]:
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
        with under_way("weight_sync"):
            await self._publish()

    async def _publish(self) -> None:
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
                return self.thread.run(step + 1, _as_weight_sync(work), *arguments)

            checking = self.check.engine(self.backend, in_thread)
            await self.thread.watch.bounded(f"checking the engine after step {step}", checking)


def _as_weight_sync(work: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``work`` so that its time counts as weight sync in the account of the step's time."""

    @functools.wraps(work)
    def counted(*arguments: Any) -> T:
        with working("weight_sync"):
            return work(*arguments)

    return counted


class EnginePolicyWeights:
    """The trained weights in the form that the engine needs: sent, saved and loaded again."""

    def __init__(
        self,
        trained: Policy,
        serving: Policy,
        client: LocalClient | HttpEngines,
        model: TrainedModel,
    ) -> None:
        """``trained`` is the policy that the trainer changes, and ``serving`` is the one that the
        engine serves. ``model`` holds the trained weights, which may be in this process or sharded
        over ranks."""
        from ramify.inference.local.local_client import LocalClient

        self._trained = trained
        self._serving = serving
        self._client = client
        self._engines = None if isinstance(client, LocalClient) else client
        """The engines outside of this process; None if it is the one here."""
        self._model = model
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
        return self._is_loaded or (self._model.is_here and self._trained is self._serving)

    @property
    def version(self) -> int:
        """Version of the weights published last, as the engine reports it for each token."""
        return self._trained.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The trained weights in the form that the engine needs."""
        if self._saved is None and self._shares:
            return (
                (name, weight.detach()) for name, weight in self._serving.model.named_parameters()
            )
        dtype = self._serving.dtype
        if self._saved is not None:
            return ((name, make().to(dtype)) for name, _, make in self._stored())
        return ((name, weight.to(dtype)) for name, weight in self._model.weights())

    async def publish(self) -> None:
        """Send the trained weights to the engine as the next version."""
        self._trained.version += 1
        if self._engines is not None:
            return await self._engines.update(self._sources(), self._trained.version)
        weights = (
            self._serving.model
            if self._shares
            else await asyncio.to_thread(lambda: dict(self.weights()))
        )
        return await self._client.update(weights, self._trained.version)

    async def sleep(self) -> bool:
        """Let engines that share the trainer's devices release their memory until ``publish``;
        returns whether any do."""
        return self._engines is not None and await self._engines.sleep()

    def release_memory(self) -> None:
        """Free cached memory of the trainer, for engines on the same devices."""
        self._model.release_memory()

    async def rejoin(self) -> bool:
        """Send the last published weights to engines that came back; returns whether there were
        any."""
        if self._engines is None:
            return False
        return await self._engines.rejoin(self._sources(), self._trained.version)

    def _sources(self) -> list[LazyWeight]:
        from ramify.inference.weight_sync.base import as_checkpoint, source

        given = [
            source(name, tensor, self._serving.dtype, make)
            for name, tensor, make in self._unmerged()
        ]
        loads = getattr(self._engines, "loads_checkpoints", False)
        return list(as_checkpoint(self._serving.model, given)) if loads else given

    def _unmerged(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Return the trained weights, one triple per parameter: its name, the parameter, and a
        function that computes its full value (it merges a LoRA adapter, or reads the saved tensor).
        The function is None if the parameter holds its value already."""
        from ramify.train.backends.lora import unmerged

        if self._saved is not None:
            return self._stored()
        return unmerged(self._serving.model) if self._is_loaded else self._model.unmerged()

    def _stored(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """The tensors of the saved policy, read when they are needed."""
        from ramify.models.stored_weights import stored_tensors

        assert self._saved is not None
        stored = stored_tensors(self._saved, self._serving.model)
        for name, parameter in self._serving.model.named_parameters():
            yield name, parameter, partial(stored[name].__getitem__, ...)

    def _export(self, folder: Path) -> None:
        """Write configuration and weights, one tensor at a time."""
        from ramify.train.backends.safetensors_export import export_model

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
