"""Train one policy of a run.

The policy learns from the data of each step, and its new weights are sent to the inference engines.

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
``Learner`` except ``paths`` are called in the training thread. The order of the operations is
decided in ``trainer.py``, weights are transferred by ``inference/weight_sync``, and engines are
checked in ``engine_consistency_checks.py``.
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
from ramify.models import folder_file_checksums
from ramify.step_time_accounting import WallAndCpuTimer, WallTimer
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.call_depth_models import mask_other_calls
from ramify.train.checkpoint import Write
from ramify.train.data.pack import copy_to_sequences, pack, packing_statistics
from ramify.train.engine_consistency_checks import EngineConsistencyChecks
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.sampling_metrics import (
    PolicyUpdateProbe,
    advantage_metrics,
    entropy_and_control_metrics,
    num_sampled_tokens,
    store_logprob_gaps,
)
from ramify.train.signals.teacher_logprobs import REFERENCE
from ramify.train.stages import Minibatch, StepData, TrainingStage
from ramify.train.stall_watchdog import WatchedTrainingThread
from ramify.types.training_sequences import Batch, Floats, TokenSequence
from ramify.types.trajectory import Group

if TYPE_CHECKING:
    from torch import Tensor

    from ramify.inference.http.http_engines import HttpEngineClient
    from ramify.inference.local.local_client import LocalClient
    from ramify.inference.weight_sync.base import LazyExportWeight
    from ramify.models.load import Policy
    from ramify.train.backends.base import TrainableModel

    Weights = Iterable[tuple[str, Tensor]]

_log = ComponentLogger("train")
T = TypeVar("T")


class PolicyPaths(NamedTuple):
    """The paths of one policy's files, relative to the run's folder or to a checkpoint."""

    policy: str
    backend: str
    reference: str
    """The policy with which rollouts began."""


def policy_paths_of(name: str) -> PolicyPaths:
    """Return the paths at which a policy is stored in a run's folder and in its checkpoints.

    ``name`` is the policy's name in ``Run.policies``, or empty for ``Run.policy``.
    """
    if not name:
        return PolicyPaths("policy", "backend", REFERENCE)
    return PolicyPaths(f"policies/{name}", f"backends/{name}", f"{REFERENCE}-{name}")


class Learner:
    """Trains one of the policies of a training run.

    It holds the training backend, the reference policy for a KL penalty, and the publisher that
    sends new weights to the engines.
    """

    def __init__(
        self,
        publisher: WeightPublisher,
        backend_of: Callable[[TrainingStage], Backend],
        *,
        reference_of: Callable[[Path], ReferenceModel] | None = None,
        source: Callable[[], Weights] | None = None,
        model: str = "",
        control_ids: Collection[int] = (),
    ) -> None:
        """Create the learner of the policy that ``publisher`` sends to the engines.

        ``backend_of`` creates the training backend of a stage.

        ``reference_of`` loads a saved policy as the reference of a KL penalty. ``source`` returns
        the initial weights of a policy that starts as a copy of another one. The policy learns from
        calls that were answered under the name ``model``, or from all calls if that is empty.
        ``control_ids`` are special tokens that no reply should contain.
        """
        self.publisher = publisher
        self.paths = policy_paths_of(publisher.name)
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

    def mask_other_calls(self, groups: Sequence[Group]) -> Sequence[Group]:
        """Return a copy of ``groups`` with token ids only in the calls from which this policy
        learns."""
        return mask_other_calls(groups, self._model) if self._model else groups

    def prefixed_metrics(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return a copy of ``values`` whose metric names show which of the run's policies they
        belong to.

        The names of an additional policy get the prefix ``policy.NAME/``, and those of the main
        policy stay unchanged.
        """
        prefix = f"policy.{self.name}/" if self.name else ""
        return {prefix + name: each for name, each in values.items()}

    def begin_stage(self, stage: TrainingStage) -> None:
        """Begin the training stage ``stage`` with a new backend and a new optimizer."""
        backend = self._backend_of(stage)
        if self._source is not None:
            backend.load_weights(dict(self._source()))
        self.publisher.backend = backend

    def restore(
        self, stage: TrainingStage, checkpoint: Path, *, is_open: bool, lr_scale: float = 1.0
    ) -> None:
        """Restore this policy's weights from ``checkpoint``.

        If the stage continues (``is_open``), its optimizer is restored too, with ``lr_scale`` times
        the configured learning rate.
        """
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
        """Save this learner's current policy to ``folder``.

        Its checksums are verified when it is loaded.
        """
        folder_file_checksums.drop(folder)
        self.publisher.policy.save(folder)
        folder_file_checksums.write(folder)

    def checkpoint_writers(self) -> dict[str, Write]:
        """Return functions that write this policy's part of a checkpoint, keyed by path in the
        checkpoint."""
        assert self.publisher.backend is not None
        return {
            self.paths.backend: self.publisher.backend.save,
            self.paths.policy: self.publisher.policy.save,
        }

    def load_reference(self, out: Path, *, is_new: bool) -> None:
        """Load the reference policy, which is the policy as it was when rollouts began.

        It is stored next to the checkpoints. ``is_new`` is True if rollouts begin now, so that the
        policy must be saved first. Raises TrainError if it is missing.
        """
        folder = out / self.paths.reference
        if is_new:
            self.save_policy(folder)
        elif not folder.is_dir():
            raise TrainError(
                f"{folder} is missing: it holds the initial policy, which the run's KL needs as "
                "its reference; copy it from the run that wrote the checkpoint"
            )
        folder_file_checksums.check(folder)
        if self._reference_of is None:
            raise TrainError(
                "the run has a KL to a reference policy, but no reference_of to load it with"
            )
        self._reference = self._reference_of(folder)

    def compute_loss_inputs(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Compute the per-token values that a step's loss needs before the first minibatch.

        Examples are old and reference log-probabilities. Returns metrics.
        """
        backend = self.publisher.backend
        assert backend is not None
        with WallAndCpuTimer("forward_backward"):
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
        return stage.add_loss_inputs(rows)

    def sample_update_probe(
        self, stage: TrainingStage, work: StepData, step: int
    ) -> PolicyUpdateProbe | None:
        """Score a sample of the step's calls with this policy, before the update changes it.

        The effect of the update can then be measured on the same calls. Returns None if nothing was
        sampled.
        """
        assert self.publisher.backend is not None
        with WallAndCpuTimer("forward_backward"):
            rows = stage.select_probe_sequences(self.mask_other_calls(work.groups), step)
            return PolicyUpdateProbe.score_before_update(rows, self.publisher.backend)

    def metrics_before_update(
        self, work: StepData, probe: PolicyUpdateProbe | None
    ) -> dict[str, float]:
        """Return metrics of the tokens that this policy sampled in a step, measured before the
        update.

        Call it after ``compute_loss_inputs``, which completes the advantages.
        """
        with WallAndCpuTimer("credit"):
            own = self.mask_other_calls(work.groups)
            rows = [row for part in work.parts for row in part.rows]
            measured = entropy_and_control_metrics(own, self._control_ids) | advantage_metrics(
                rows, num_sampled_tokens(own)
            )
            return measured if probe is None else measured | probe.logprob_gap_metrics

    def store_logprob_gaps(self, work: StepData, probe: PolicyUpdateProbe | None) -> None:
        """Store the gaps between trainer and sampler log-probabilities in a step's rollouts.

        Only tokens that the trainer has scored, for the loss or for ``probe``, have a gap. Call it
        after ``compute_loss_inputs``.
        """
        with WallAndCpuTimer("credit"):
            rows = [row for part in work.parts for row in part.rows]
            store_logprob_gaps(work.groups, [*rows, *(probe.rows if probe is not None else ())])

    def metrics_after_update(
        self, stage: TrainingStage, work: StepData, probe: PolicyUpdateProbe | None
    ) -> dict[str, float]:
        """Return metrics of a step's update, measured after the policy has been updated.

        If there was nothing to learn from, they only show the learning rate and that the policy did
        not change.
        """
        backend = self.publisher.backend
        assert backend is not None
        if not work.parts:
            # Its rate says what a step would have done.
            lr = self._lr_scale * stage.optim.lr_at(backend.version)
            still = {"lr": lr, "grad_norm": 0.0}
            return still if probe is None else {**still, "post_kl": 0.0}
        with WallAndCpuTimer("forward_backward"):
            return {} if probe is None else probe.update_kl(backend)

    def _attach_staleness(self, rows: Sequence[TokenSequence]) -> None:
        """Store each token's staleness in the token sequences ``rows``.

        Staleness is the number of versions by which the sampling policy lags behind the trained
        one.
        """
        for row in rows:
            if row.versions is not None:
                row.streams["staleness"] = np.where(
                    row.versions >= 0, self.publisher.policy.version - row.versions, 0
                ).astype(np.float32)

    def learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """Make one optimizer step on a minibatch, and return its metrics."""
        backend = self.publisher.backend
        assert backend is not None
        whole = stage.loss.sequence if stage.loss.is_over_sequences else None
        with WallAndCpuTimer("packing"):
            batches = pack(part.rows, backend.packing, part.denominators, whole=whole)
            if self.publisher.check is not None:
                self.publisher.check.check_packed_loss_weights(part.rows, batches)
        with WallAndCpuTimer("forward_backward"):
            measured = backend.forward_backward(batches, stage.loss)
        with WallAndCpuTimer("optimizer"):
            measured |= backend.optim_step()
        self.publisher.mark_weights_changed()
        if stage.samples and "entropy" in measured:  # ``entropy`` is that of all sampled tokens
            measured["loss_entropy"] = measured.pop("entropy")
        with WallAndCpuTimer("packing"):
            return {**measured, **packing_statistics(batches, part.rows)}


def _attach(
    rows: Sequence[TokenSequence],
    backend: ReferenceModel,
    name: str,
    ask: Callable[[Sequence[Batch]], Sequence[Floats]],
) -> None:
    """Compute a per-token array, such as old log-probabilities, and attach it to the sequences
    ``rows``.

    The array is called ``name``. The rows are packed into batches for ``backend``, and ``ask``
    returns one array of values for each batch.
    """
    with WallAndCpuTimer("packing"):
        batches = pack(rows, backend.packing)
    copy_to_sequences(rows, batches, name, ask(batches))


# --- publishing


class EngineWeightState(enum.Enum):
    """The state of the inference engines: answering with the newest weights, with older ones, or
    asleep."""

    CURRENT = "current"
    """The engines answer with the newest weights."""
    BEHIND = "behind"
    """The engines answer with weights that are older than the trained ones."""
    ASLEEP = "asleep"
    """The engines have released their memory to the trainer and do not answer."""


class WeightPublisher:
    """Sends the weights of a policy to its engines, and checks that the engines use these
    weights."""

    def __init__(
        self,
        policy: PolicyWeightTransfer,
        record: TrainingRunRecorder,
        thread: WatchedTrainingThread,
        check: EngineConsistencyChecks | None = None,
        name: str = "",
    ) -> None:
        """Create the publisher of ``policy``.

        ``name`` is the policy's name in ``Run.policies``, or empty for the main policy,
        ``Run.policy``. The run's record counts only publications of the main policy.
        """
        self.name = name
        self.policy = policy
        self.thread = thread
        self.check = check
        self.phase = EngineWeightState.BEHIND
        self.backend: Backend | None = None
        """The backend of the current stage. Its log-probabilities are compared with those of the
        engines."""
        self.changing = asyncio.Lock()
        """A lock that is held from the moment the weights change until the engines have received
        them."""
        self._record = record

    def mark_weights_changed(self) -> None:
        """Mark the engines' weights as outdated after the policy has learned."""
        if self.phase is EngineWeightState.CURRENT:
            self.phase = EngineWeightState.BEHIND

    async def put_engines_to_sleep(self) -> dict[str, float]:
        """Put engines on the trainer's devices to sleep until weights are next published.

        Returns the duration as a metric, or an empty dict if no engine sleeps.
        """
        with WallTimer("weight_sync"):
            return await self._sleep()

    async def _sleep(self) -> dict[str, float]:
        started = time.monotonic()
        sleeping = self.thread.watch.await_with_stall_limit(
            f"letting the engines sleep before step {self._record.state.step + 1}",
            self.policy.put_engines_to_sleep(),
        )
        if not await sleeping:
            return {}
        self.phase = EngineWeightState.ASLEEP
        return {"sleep_s": time.monotonic() - started}

    async def publish(self) -> None:
        """Send the newest weights to the engines, and check that the engines use them.

        Does nothing if they already have them.
        """
        with WallTimer("weight_sync"):
            await self._publish()

    async def _publish(self) -> None:
        if self.phase is EngineWeightState.CURRENT:
            return
        state = self._record.state
        if self.phase is EngineWeightState.ASLEEP:
            await self.thread.run(state.step + 1, self.policy.release_trainer_memory)
            self.phase = EngineWeightState.BEHIND
        started = time.monotonic()
        await self.thread.watch.await_with_stall_limit(
            f"publishing the weights after step {state.step}", self.policy.publish()
        )
        self.phase = EngineWeightState.CURRENT
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

    async def sync_rejoined_engines(self, give: Callable[[], Awaitable[bool]]) -> None:
        """Send the current weights to an engine that reconnected between steps, and check the
        engine.

        ``give`` sends the weights and returns False if no engine came back. An error here ends the
        run.
        """
        try:
            async with self.changing:
                if await give():
                    await self._check_engine()
        except Exception as error:  # noqa: BLE001 (raised again in the run's next wait)
            self.thread.watch.fail_waits(error)

    async def load_saved_policy(self, folder: Path) -> None:
        """Load a saved policy from ``folder``, to publish it in place of the trained weights.

        The next call of ``publish`` sends it to the engines.
        """
        await self.thread.run(self._record.state.step + 1, self.policy.load, folder)
        self.mark_weights_changed()

    async def _check_engine(self) -> None:
        if self.check is not None and self.backend is not None:
            step = self._record.state.step

            def in_thread(work: Callable[..., T], *arguments: Any) -> Awaitable[T]:
                return self.thread.run(step + 1, _as_weight_sync(work), *arguments)

            checking = self.check.check_engines(self.backend, in_thread)
            await self.thread.watch.await_with_stall_limit(
                f"checking the engine after step {step}", checking
            )


def _as_weight_sync(work: Callable[..., T]) -> Callable[..., T]:
    """Wrap ``work`` so that its duration counts as weight sync in a step's time breakdown."""

    @functools.wraps(work)
    def counted(*arguments: Any) -> T:
        with WallAndCpuTimer("weight_sync"):
            return work(*arguments)

    return counted


class PolicyWeightTransfer:
    """Transfers trained weights to the engines, and saves and loads the policy."""

    def __init__(
        self,
        trained: Policy,
        serving: Policy,
        client: LocalClient | HttpEngineClient,
        model: TrainableModel,
    ) -> None:
        """Connect the trained weights with the engines that use them.

        ``trained`` is the policy that the trainer changes, and ``serving`` is the policy that the
        engine serves. ``model`` holds the trained weights, in this process or sharded over ranks.
        """
        from ramify.inference.local.local_client import LocalClient

        self._trained = trained
        self._serving = serving
        self._client = client
        self._engines = None if isinstance(client, LocalClient) else client
        """The engines outside this process. None if the engine is in this process."""
        self._model = model
        self._is_loaded = False
        """True if the engine has a saved policy that differs from the trained one."""
        self._saved: Path | None = None
        """Folder of the loaded policy, if this process has no weights."""

    @property
    def _is_bare(self) -> bool:
        """True if this process holds no weights, because only ranks and engines have them."""
        return self._serving.device.type == "meta"

    @property
    def _shares_weights(self) -> bool:
        return self._is_loaded or (self._model.is_here and self._trained is self._serving)

    @property
    def version(self) -> int:
        """The version number of the last published weights.

        The engine reports it with each token.
        """
        return self._trained.version

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return the name and tensor of each current weight, in the precision that the engine
        needs."""
        if self._saved is None and self._shares_weights:
            return (
                (name, weight.detach()) for name, weight in self._serving.model.named_parameters()
            )
        dtype = self._serving.dtype
        if self._saved is not None:
            return ((name, make().to(dtype)) for name, _, make in self._stored_parameters())
        return ((name, weight.to(dtype)) for name, weight in self._model.weights())

    async def publish(self) -> None:
        """Send the current weights to the engines as the next version."""
        self._trained.version += 1
        if self._engines is not None:
            return await self._engines.update(self._lazy_weights(), self._trained.version)
        weights = (
            self._serving.model
            if self._shares_weights
            else await asyncio.to_thread(lambda: dict(self.weights()))
        )
        return await self._client.update(weights, self._trained.version)

    async def put_engines_to_sleep(self) -> bool:
        """Make engines that share the trainer's devices release their memory until ``publish``.

        Returns True if there are such engines.
        """
        return self._engines is not None and await self._engines.sleep()

    def release_trainer_memory(self) -> None:
        """Free the trainer's cached memory, so that engines on the same devices can use it."""
        self._model.release_memory()

    async def sync_rejoined_engines(self) -> bool:
        """Send the last published weights to engines that came back.

        Returns True if there were any such engines.
        """
        if self._engines is None:
            return False
        return await self._engines.update_returned_engines(
            self._lazy_weights(), self._trained.version
        )

    def _lazy_weights(self) -> list[LazyExportWeight]:
        from ramify.inference.weight_sync.base import to_checkpoint_names, to_lazy_weight

        given = [
            to_lazy_weight(name, tensor, self._serving.dtype, make)
            for name, tensor, make in self._unmerged_parameters()
        ]
        loads = self._engines is not None and self._engines.uses_checkpoint_tensor_names
        return list(to_checkpoint_names(self._serving.model, given)) if loads else given

    def _unmerged_parameters(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor] | None]]:
        """Iterate over the parameters without merging LoRA adapters into them.

        Each item is a name, a tensor and a function that computes the full value. The function
        merges a LoRA adapter or reads the saved tensor. It is None if the tensor already has the
        full value.
        """
        from ramify.train.backends.lora import base_tensors_and_adapters

        if self._saved is not None:
            return self._stored_parameters()
        return (
            base_tensors_and_adapters(self._serving.model)
            if self._is_loaded
            else self._model.base_tensors_and_adapters()
        )

    def _stored_parameters(self) -> Iterator[tuple[str, Tensor, Callable[[], Tensor]]]:
        """Yield the saved policy's parameters, each with a function that reads its tensor from
        disk."""
        from ramify.models.stored_weights import stored_tensors

        assert self._saved is not None
        stored = stored_tensors(self._saved, self._serving.model)
        for name, parameter in self._serving.model.named_parameters():
            yield name, parameter, partial(stored[name].__getitem__, ...)

    def _export(self, folder: Path) -> None:
        """Write configuration and weights to ``folder``, one tensor at a time to limit memory
        use."""
        from ramify.train.backends.safetensors_export import export_model

        tensors = (
            self._stored_parameters()
            if self._saved is not None
            else self._model.base_tensors_and_adapters()
        )
        shapes = {name: tuple(each.shape) for name, each, _ in tensors}
        serving = self._serving
        export_model(folder, serving.config, serving.model, shapes, self.weights(), serving.dtype)

    def save(self, folder: Path) -> None:
        """Save the policy in the precision that the engines use.

        The checkpoint keeps the trainer's precision. The saved default temperature is 0: rollouts
        explore, but users who set no temperature want the likeliest answer.
        """
        from ramify.models.load import SamplingDefaults, save_policy
        from ramify.models.weights import load_weights

        if not self._shares_weights and not self._is_bare:
            load_weights(self._serving.model, dict(self.weights()))
        save_policy(
            dataclasses.replace(self._serving, defaults=SamplingDefaults(temperature=0.0)),
            folder,
            write=self._export if self._is_bare else None,
        )

    def load(self, folder: Path) -> None:
        """Load a saved policy from ``folder``, to be published instead of the trained weights."""
        from ramify.models.load import load_into

        if self._is_bare:
            self._saved = folder
        else:
            load_into(self._serving, folder)
        self._is_loaded = True
