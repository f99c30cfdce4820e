"""Manage all the policies that a run trains through a single object.

Most runs train only one policy; ``Run.policies`` adds others.

    trainer.py ── begin, learn, publish, save, restore ──> Learners ── for each policy ──> Learner

Other policies learn from their own calls in the same rollouts. Each of them has its own part of the
stage (``TrainingStage.others``) and of a step's data (``StepData.others``). The policies learn in a
fixed order, beginning with ``Run.policy``, and none is published before all have learned. How one
policy learns is in ``learner.py``, and when in ``trainer.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from ramify.logging import ComponentLogger
from ramify.train.checkpoint import Write, verify
from ramify.train.learner import EngineWeightState, Learner
from ramify.train.metrics import staleness
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.stages import StepData, TrainingStage
from ramify.train.stall_watchdog import WatchedTrainingThread

_log = ComponentLogger("train")
T = TypeVar("T")


class Learners:
    """The learners of all policies that a run trains.

    Each operation applies to every policy in turn.
    """

    def __init__(self, learners: Sequence[Learner], record: TrainingRunRecorder) -> None:
        """Combine the given learners, one per trained policy.

        The first must be the learner of the main policy, ``Run.policy``.
        """
        self._all = learners
        self._record = record

    @property
    def thread(self) -> WatchedTrainingThread:
        """The thread in which all policies are trained."""
        return self._all[0].publisher.thread

    @property
    def has_begun(self) -> bool:
        """True if the current training stage has begun."""
        return self._all[0].publisher.backend is not None

    def _learners_in_stage(self, stage: TrainingStage) -> list[tuple[Learner, TrainingStage]]:
        """Return the learner and the stage settings of each policy that is trained in ``stage``."""
        main, *others = self._all
        own = stage.others
        return [(main, stage), *((each, own[each.name]) for each in others if each.name in own)]

    def _learners_with_data(
        self, stage: TrainingStage, work: StepData
    ) -> Iterator[tuple[Learner, TrainingStage, StepData]]:
        """Yield the learner, the stage settings and the data of each policy that learns in this
        step."""
        for learner, own in self._learners_in_stage(stage):
            if not learner.name:
                yield learner, own, work
            elif learner.name in work.others:
                yield learner, own, work.others[learner.name]

    async def _in_torch(self, work: Callable[..., T], *arguments: object) -> T:
        return await self.thread.run(self._record.state.step + 1, work, *arguments)

    # --- a stage

    async def begin_stage(self, stage: TrainingStage) -> None:
        """Begin ``stage`` with new optimizers, unless it was restored from a checkpoint and
        continues.

        Loads the reference policies if the loss needs them.
        """
        state, is_new = self._record.state, not self.has_begun
        for learner, own in self._learners_in_stage(stage):
            if is_new:
                await self._in_torch(learner.begin_stage, own)
            if "ref_logprobs" in own.streams:
                loading = partial(learner.load_reference, is_new=not state.stage_step)
                await self._in_torch(loading, self._record.out)

    def end_stage(self) -> None:
        """End the current stage and release the training backends of all policies."""
        for learner in self._all:
            learner.publisher.backend = None

    def restore_algorithm_state(self, stage: TrainingStage) -> None:
        """Restore the state that the algorithms of ``stage`` keep between steps.

        It is read from the run's record.
        """
        for learner, own in self._learners_in_stage(stage):
            own.memory = dict(self._record.state.algorithm_state(learner.name))

    # --- a step

    def log_data_notes(self, stage: TrainingStage, work: StepData, where: str) -> dict[str, float]:
        """Log the messages about a step's data, and warn about policies that cannot learn from it.

        Returns metrics that mark these policies.
        """
        values: dict[str, float] = {}
        about = {"step": self._record.state.step + 1, "stage": stage.name}
        for learner, _, own in self._learners_with_data(stage, work):
            whose = f"{where}, {learner.name}" if learner.name else where
            for note in own.notes:
                _log.warning("step_note", f"{whose}: {note}", shown=True, **about)
            if own.no_signal:
                text = f"{whose} has nothing to learn from: {own.no_signal}"
                _log.warning("no_signal", text, shown=True, **about)
                values |= learner.prefixed_metrics({"no_signal": 1.0})
        return values

    @contextlib.asynccontextmanager
    async def weight_update_context(
        self, stage: TrainingStage, work: StepData
    ) -> AsyncIterator[dict[str, float]]:
        """Return a context manager that must wrap any change to the weights.

        Meanwhile, no engine rejoins, and engines on the trainer's devices sleep. Its value is a
        dict of metrics with the staleness of the sampled tokens and the time until the engines
        slept.
        """
        values: dict[str, float] = {}
        async with contextlib.AsyncExitStack() as stack:
            for learner, _, own in self._learners_with_data(stage, work):
                await stack.enter_async_context(learner.publisher.changing)
                version = learner.publisher.policy.version
                values |= learner.prefixed_metrics(
                    staleness(learner.mask_other_calls(work.groups), version)
                )
                if own.parts or own.groups:
                    values |= learner.prefixed_metrics(
                        await learner.publisher.put_engines_to_sleep()
                    )
            yield values

    async def learn(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Train every policy on its own data of a step, and return the metrics."""
        values: dict[str, float] = {}
        for learner, own_stage, own in self._learners_with_data(stage, work):
            measured = dict(own.metrics) if learner.name else {}
            measured |= await self._train_learner(learner, own_stage, own)
            values |= learner.prefixed_metrics(measured)
        return values

    async def _train_learner(
        self, learner: Learner, stage: TrainingStage, work: StepData
    ) -> dict[str, float]:
        values: dict[str, float] = {}
        probe = None
        if stage.samples:
            step = self._record.state.step + 1
            probe = await self._in_torch(learner.sample_update_probe, stage, work, step)
        if work.parts:
            values |= await self._in_torch(learner.compute_loss_inputs, stage, work)
        if stage.samples:
            values |= learner.metrics_before_update(work, probe)
            if self._record.saves_rollouts(self._record.state.stage_step + 1):
                learner.store_logprob_gaps(work, probe)
        values |= _over_parts(
            [await self._in_torch(learner.learn, stage, part) for part in work.parts]
        )
        if stage.samples:
            values |= await self._in_torch(learner.metrics_after_update, stage, work, probe)
        return values

    def count_step(self, stage: TrainingStage, work: StepData) -> None:
        """Record that a training step is complete, and store what the algorithms keep between
        steps."""
        memories = {
            learner.name: own.memory for learner, _, own in self._learners_with_data(stage, work)
        }
        self._record.count_step(memories.pop(""), memories)

    async def publish_step(self, stage: TrainingStage, work: StepData) -> None:
        """Send the weights changed by a step to the engines, if ``stage`` samples from the engines.

        Call it inside the context ``weight_update_context``.
        """
        for learner, _, own in self._learners_with_data(stage, work):
            publisher = learner.publisher
            if stage.samples and (own.parts or publisher.phase is EngineWeightState.ASLEEP):
                await publisher.publish()

    def check_ids_match_engines(self, stage: TrainingStage, work: StepData) -> None:
        """Check that the token ids in the step's rollouts are the ones that the engines
        returned."""
        for learner, _, _ in self._learners_with_data(stage, work):
            check = learner.publisher.check
            if check is not None and work.groups:
                check.check_ids_from_engine(work.groups)

    # --- the engines

    async def publish(self) -> None:
        """Send the newest weights to all engines that do not have them yet."""
        for learner in self._all:
            async with learner.publisher.changing:
                await learner.publisher.publish()

    async def publish_resumed(self) -> None:
        """Publish the weights of a resumed run, because its engines may hold other weights."""
        for learner in self._all:
            await learner.publisher.policy.publish()

    async def publish_restored(self, stage: TrainingStage) -> None:
        """Publish the weights of ``stage`` after they were reset to a checkpoint."""
        for learner, _ in self._learners_in_stage(stage):
            learner.publisher.mark_weights_changed()
            await learner.publisher.publish()

    # --- checkpoints: all but the last two are called in the training thread

    def checkpoint_writers(self, stage: TrainingStage) -> dict[str, Write]:
        """Return functions that write the policies' checkpoint files, keyed by path in the
        checkpoint."""
        parts: dict[str, Write] = {}
        for learner, _ in self._learners_in_stage(stage):
            parts |= learner.checkpoint_writers()
        return parts

    def restore(self, stage: TrainingStage, checkpoint: Path, *, is_open: bool) -> None:
        """Restore the weights of all policies from ``checkpoint``.

        If the stage continues (``is_open``), their optimizers are restored too.
        """
        lr_scale = self._record.state.lr_scale if is_open else 1.0
        for learner, own in self._learners_in_stage(stage):
            learner.restore(own, checkpoint, is_open=is_open, lr_scale=lr_scale)

    def inherit_references(self, checkpoint: Path) -> None:
        """Copy the reference policies from the run that wrote ``checkpoint`` to this run's
        folder."""
        for learner in self._all:
            self._record.copy_reference(checkpoint, learner.paths.reference)

    async def load(self, checkpoint: Path) -> None:
        """Load the policies of ``checkpoint``.

        The next call of ``publish`` sends them to the engines.
        """
        for learner in self._all:
            await self._in_torch(verify, checkpoint, f"{learner.paths.policy}/")
            await learner.publisher.load_saved_policy(checkpoint / learner.paths.policy)

    async def save_policies(self) -> None:
        """Save the current policies in the run's folder."""
        for learner in self._all:
            folder = self._record.out / learner.paths.policy
            await self._in_torch(learner.save_policy, folder)


def _over_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a training step's minibatches into the metrics of the whole step.

    Counts are summed, and other metrics are averaged over the minibatches that report them. The
    mismatch between trainer and sampler comes from the first minibatch, because its update already
    changes the weights.
    """
    combined: dict[str, float] = {}
    for name in dict.fromkeys(name for part in measured for name in part):
        values = [part[name] for part in measured if name in part]
        if name in ("batches", "packed_tokens", "row_tokens"):
            combined[name] = sum(values)
        elif not name.startswith("mismatch"):
            combined[name] = sum(values) / len(values)
        elif name in measured[0]:
            combined[name] = measured[0][name]
    return combined
