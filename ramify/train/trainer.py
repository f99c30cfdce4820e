"""The one trainer: stage by stage, step by step, from data to a newer policy.

    source.work(step)                               the first complete groups; others continue
        ▼
    sleep ─ prepare: old, reference, values         engines on the trainer's devices sleep
    pack ─ forward_backward ─ optim_step            for each minibatch, in one torch thread
        ▼
    publish ─ self-checks ─ source.newer(step + 1)  engines wake; new groups may begin
        ▼
    evaluate ─ checkpoint                           then the next step, unless a guard ends it

Synchronous training is ``max_staleness = 0``: rollouts of step k begin after step k-1. Decides the
order of operations. Not here: where data comes from (``stages.py``), when engines have the weights
(``publisher.py``), what is written (``run_record.py``), credit (``advantages/``), losses
(``losses/``) and devices (``backends/``).
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from ramify.errors import StoreError, TrainError
from ramify.logging import RoomLogger
from ramify.models import checksums
from ramify.progress import on_heartbeat, report_progress, subscribe
from ramify.train import metrics as metric_file
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.checkpoint import CheckpointState, verify
from ramify.train.data.pack import attach, describe, pack
from ramify.train.guards import GuardVerdict, TrainingGuard, after_evaluation, after_step
from ramify.train.publisher import Publisher
from ramify.train.run_record import RunRecord
from ramify.train.signals.scorer import REFERENCE
from ramify.train.stages import Minibatch, StepData, StepSource, TrainingStage
from ramify.train.watchdog import RunStopped, StallError
from ramify.types.sequence import Batch, Floats, TokenSequence

_log = RoomLogger("train")
T = TypeVar("T")


class SplitEvaluator(NamedTuple):
    """How a run evaluates its policy."""

    of: Callable[[str], Awaitable[Mapping[str, float]]]
    """Split -> its metrics, prefixed with its name: ``{"validation/reward": 0.8}``."""
    first: Sequence[str] = ()
    """Splits to report before rollouts begin, in addition to ``validation``."""
    final: Sequence[str] = ()
    """Splits to report at the end, for the last and the best policy."""
    keep: Literal["best", "last"] = "best"
    """Which of the two OUT/policy holds at the end."""


class Trainer:
    """One training run in progress."""

    def __init__(
        self,
        record: RunRecord,
        publisher: Publisher,
        stages: Sequence[TrainingStage],
        backend_of: Callable[[TrainingStage], Backend],
        evaluation: SplitEvaluator,
        *,
        guard: TrainingGuard | None = None,
        reference_of: Callable[[Path], ReferenceModel] | None = None,
    ) -> None:
        """``reference_of`` loads a saved policy as the reference of a KL."""
        self.record = record
        self.publisher = publisher
        self._stages = stages
        self._backend_of = backend_of
        self._evaluation = evaluation
        self._guard = guard or TrainingGuard()
        self._reference_of = reference_of
        self._reference: ReferenceModel | None = None
        self._source: StepSource | None = None
        self._thread = publisher.thread
        self._watch = publisher.thread.watch

    @property
    def state(self) -> CheckpointState:
        return self.record.state

    # --- the run

    def stop(self, by: str) -> None:
        """End the run, for the reason ``by``, when the step that is learning is over and saved:
        ``run`` raises RunStopped. Rollouts and evaluations in progress are cut off. Call it in the
        event loop's thread."""
        self._watch.stop(by)

    async def run(self, resume: Path | None = None) -> CheckpointState:
        """Train from the beginning, or from the checkpoint ``resume``, to the end. Returns the
        final state."""
        try:
            with subscribe(lambda _: self._watch.moved()), on_heartbeat(self._watch.moved):
                state = await self._run(resume)
        except StallError:
            self._thread.close(is_stalled=True)
            raise
        except BaseException:
            self._close()
            raise
        self._close()
        return state

    def _close(self) -> None:
        self._thread.close(is_stalled=False)
        # A run that reached its end has waited, and raised, before.
        with contextlib.suppress(StoreError):
            self.record.checkpoints.settle()

    async def _run(self, resume: Path | None) -> CheckpointState:
        if resume is not None:
            await self._thread.run(self.state.step + 1, self._restore, resume)
            await self.publisher.policy.publish()  # the engine may hold other weights
        else:
            self.record.begin()
        self.record.open()
        while self.state.stage < len(self._stages):
            await self._run_stage(self._stages[self.state.stage])
        await self._report()
        return self.state

    async def _run_stage(self, stage: TrainingStage) -> None:
        # A run that resumes within a stage has its backend, first evaluation and checkpoint.
        is_new = self.publisher.backend is None
        if is_new:
            self.publisher.backend = await self._in_torch(self._backend_of, stage)
        if "ref_logprobs" in stage.streams:
            self._reference = await self._in_torch(self._load_reference)
        if stage.samples and is_new:
            also = await self._roots(stage)
            for split in ("validation", *self._evaluation.first):
                await self.evaluate(split, "first", also)
                also = {}
            # If rollouts make the policy worse, the one they began with is the best.
            await self._in_torch(self._save)
        try:
            await self._run_steps(stage)
        except RunStopped:
            await self._save_steps_so_far()
            raise
        self.record.begin_next_stage()
        self.publisher.backend = None

    async def _run_steps(self, stage: TrainingStage) -> None:
        with report_progress(
            stage.name, stage.num_steps, "steps", first=self.state.stage_step
        ) as progress:
            async with contextlib.aclosing(self._works(stage)) as works:
                async for work in works:
                    await self._step(stage, work)
                    progress.at(self.state.stage_step)
                    if self.state.stopped:
                        break

    async def _save_steps_so_far(self) -> None:
        """Save where the run was stopped: after the last whole step of the stage, if it has one."""
        state = self.state
        if state.stage_step and self._source is not None:
            state.next_item, state.pending = self._source.state()
            await self._in_torch(self._save)
            await self._in_torch(self.record.checkpoints.settle)

    async def _roots(self, stage: TrainingStage) -> dict[str, float]:
        """Report, before the first rollout, how many roots will be recursive. Returns this as
        metrics."""
        counting = stage.roots(self.state.next_item)
        what = "counting the roots that will be recursive"
        count = await self._watch.bounded(what, counting, can_stop=True)
        if count is None:
            return {}
        _log.info("roots", f"{stage.name}: {count.sentence()}", shown=True, stage=stage.name)
        return count.metrics()

    async def _works(self, stage: TrainingStage) -> AsyncGenerator[StepData, None]:
        """The data of each remaining step. Later rollouts continue meanwhile, as far as
        ``max_staleness`` allows."""
        state = self.state
        if state.memory:
            stage.memory = dict(state.memory)
        async with stage.source(state.next_item, state.pending) as source:
            self._source = source
            if state.is_due:
                await self._at_intervals(stage)
            for step in range(state.stage_step, stage.num_steps if not state.stopped else 0):
                started = time.monotonic()
                if stage.samples and (not stage.max_staleness or step == state.stage_step == 0):
                    # Otherwise rollouts continued during the last step's learning.
                    self.record.restart_meter()
                what = f"the work of {self._where(stage)}"
                work = await self._watch.bounded(what, source.work(step), can_stop=True)
                work.metrics["work_s"] = time.monotonic() - started
                work.metrics.update(self.record.cpu_metrics(stage.samples))
                yield work

    async def _step(self, stage: TrainingStage, work: StepData) -> None:
        record, state, source = self.record, self.state, self._source
        assert source is not None
        started = time.monotonic()
        values = dict(work.metrics) | metric_file.staleness(work.groups, self._version)
        where = self._where(stage)
        if self._report_notes(stage, work, where):
            values["silent"] = 1.0
        async with self.publisher.changing:
            if work.parts:
                values |= await self.publisher.sleep()
                values |= await self._in_torch(self._prepare, stage, work)
            values |= _over_parts(
                [await self._in_torch(self._learn, stage, part) for part in work.parts]
            )
            values["learn_s"] = time.monotonic() - started
            record.count_step(work.memory)
            if stage.samples and work.parts:
                await self.publisher.publish()
        values = record.measured(values)
        if stage.samples:
            values |= self._report_verdict(after_step(self._guard, state.guard, values), where)
        record.write(stage.name, values)
        check = self.publisher.check
        if check is not None and work.groups:
            check.ids(work.groups)
        record.write_rollouts(work.groups, work.accounts)
        if not state.stopped:
            source.newer(state.stage_step)
        state.is_due = True
        await self._at_intervals(stage)

    def _report_notes(self, stage: TrainingStage, work: StepData, where: str) -> str:
        """Report what is remarkable about the data of a step. Returns why it has no signal."""
        about = {"step": self.state.step + 1, "stage": stage.name}
        for note in work.notes:
            _log.warning("step_note", f"{where}: {note}", shown=True, **about)
        if work.no_signal:
            text = f"{where} has nothing to learn from: {work.no_signal}"
            _log.warning("no_signal", text, shown=True, **about)
        return work.no_signal

    @property
    def _version(self) -> int:
        return self.publisher.policy.version

    def _where(self, stage: TrainingStage) -> str:
        return f"step {self.state.step + 1} ({stage.name})"

    async def _at_intervals(self, stage: TrainingStage) -> None:
        done, schedule = self.state.stage_step, self.record.schedule
        is_last = done == stage.num_steps or bool(self.state.stopped)
        is_evaluated = stage.samples and (
            is_last or (schedule.evaluate_every and done % schedule.evaluate_every == 0)
        )
        assert self._source is not None
        if is_evaluated or (is_last and self.state.stage + 1 == len(self._stages)):
            with self._source.paused():
                await self.evaluate("validation", stage.name)
        if is_evaluated and done < stage.num_steps and not self.state.stopped:
            verdict = after_evaluation(self._guard, self.state.guard, self.state.score)
            self._report_verdict(verdict, f"step {self.state.step} ({stage.name})")
            is_last = bool(self.state.stopped)
        self.state.is_due = False
        if (
            is_evaluated
            or is_last
            or self.record.is_time_to_save
            or (schedule.checkpoint_every and done % schedule.checkpoint_every == 0)
        ):
            self.state.next_item, self.state.pending = self._source.state()
            await self._in_torch(self._save)

    def _report_verdict(self, verdict: GuardVerdict, where: str) -> dict[str, float]:
        """Report a guard's verdict. Returns its metrics."""
        for sentence in verdict.says:
            _log.warning("guard", f"{where}: {sentence}", shown=True, step=self.state.step)
        if verdict.stop:
            text = f"{where}: the stage ends here: {verdict.stop}"
            _log.warning("stage_stopped", text, shown=True, step=self.state.step)
            self.state.stopped = verdict.stop
        return verdict.metrics

    # --- learning, in the torch thread

    def _prepare(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Compute the streams that the rows of a step need before its first minibatch."""
        backend = self.publisher.backend
        assert backend is not None
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

    def _attach_staleness(self, rows: Sequence[TokenSequence]) -> None:
        """Attach the stream ``staleness``: how many versions the sampling policy lags behind the
        trained one, per token."""
        for row in rows:
            if row.versions is not None:
                row.streams["staleness"] = np.where(
                    row.versions >= 0, self._version - row.versions, 0
                ).astype(np.float32)

    def _learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """One optimizer step."""
        backend = self.publisher.backend
        assert backend is not None
        whole_calls = stage.loss.is_over_sequences
        batches = pack(part.rows, backend.packing, part.denominators, whole_calls=whole_calls)
        if self.publisher.check is not None:
            self.publisher.check.weights(part.rows, batches)
        measured = backend.forward_backward(batches, stage.loss)
        measured |= backend.optim_step()
        self.publisher.learned()
        return {**measured, **describe(batches, part.rows)}

    def _load_reference(self) -> ReferenceModel:
        """The policy that rollouts began with, saved next to the checkpoints."""
        folder = self.record.out / REFERENCE
        if not self.state.stage_step:
            self._save_policy(folder)
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
        return self._reference_of(folder)

    def _save_policy(self, folder: Path) -> None:
        """Save the current policy with checksums, which are verified when it is loaded."""
        checksums.drop(folder)
        self.publisher.policy.save(folder)
        checksums.write(folder)

    def _save(self) -> None:
        backend, state = self.publisher.backend, self.state
        assert backend is not None
        saved = self._stages[state.stage].kept if state.stage_step else {}
        others = {name: each.save for name, each in saved.items()}
        self.record.save({"backend": backend.save, "policy": self.publisher.policy.save, **others})

    def _restore(self, checkpoint: Path) -> None:
        """Restore the state of ``checkpoint``."""
        self.record.go_back(checkpoint)
        stage = self._stages[self.state.stage]
        backend = self._backend_of(stage)
        backend.load(checkpoint / "backend")
        is_open = self.state.stage_step < stage.num_steps or self.state.is_due
        if is_open and not self.state.stopped:
            self.publisher.backend = backend
            for name, part in stage.kept.items() if self.state.stage_step else ():
                part.load(checkpoint / name)
            self.record.copy_reference(checkpoint)
        else:  # the stage was over; the next one begins with a new optimizer
            self.record.begin_next_stage()

    async def _in_torch(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._thread.run(self.state.step + 1, work, *arguments)

    # --- evaluating

    async def evaluate(
        self, split: str, stage: str, also: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """Evaluate the current policy on ``split``. The validation reward becomes the run's score,
        if there is one. ``also`` is written in the same row."""
        async with self.publisher.changing:
            await self.publisher.publish()
        started = time.monotonic()
        evaluating = self._evaluation.of(split)
        values = dict(await self._watch.bounded(f"evaluating {split}", evaluating, can_stop=True))
        values |= {"evaluate_s": time.monotonic() - started, **(also or {})}
        if split == "validation":
            self.state.score = values.get("validation/reward")
        self.record.write(stage, values)
        self.record.restart_meter()
        return values

    async def _report(self) -> None:
        """Evaluate the final splits for the last policy (``last``) and for the best on the
        validation stream (``best``). One of them is left in OUT/policy (``evaluate.keep``); the
        best may be the policy that rollouts began with."""
        checkpoints = self.record.checkpoints
        found = {"last": checkpoints.latest(), "best": checkpoints.best()}
        if found["best"] in (None, found["last"]):
            del found["best"]
        keep = self._evaluation.keep if self._evaluation.keep in found else "last"
        scores: dict[str, float] = {}
        # The kept one comes last: its weights are saved.
        for name, checkpoint in sorted(found.items(), key=lambda each: each[0] == keep):
            if checkpoint is None:
                continue
            await self._in_torch(verify, checkpoint, "policy/")
            await self.publisher.load(checkpoint / "policy")
            scores = {}
            for split in self._evaluation.final:
                scores |= await self.evaluate(split, name)
        await self._in_torch(self._save_policy, self.record.out / "policy")
        if (kept := found[keep]) is not None:
            self.record.note_kept(kept, scores, is_best=kept == checkpoints.best())


def _attach(
    rows: Sequence[TokenSequence],
    backend: ReferenceModel,
    name: str,
    ask: Callable[[Sequence[Batch]], Sequence[Floats]],
) -> None:
    """Attach the stream ``name`` to ``rows``, by applying ``ask`` to batches packed for
    ``backend``."""
    batches = pack(rows, backend.packing)
    attach(rows, batches, name, ask(batches))


def _over_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Combine the metrics of a step's optimizer steps: sums of counts, and means of the rest over
    those that have a number. The mismatch of trainer and sampler is that of the first optimizer
    step, since it moves the weights."""
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
