"""Execute a training run, stage by stage and step by step.

Each step gets data, updates the policy and publishes the new weights.

    source.work(step)                               the first complete groups; others continue
        ▼
    sleep ─ prepare: old, reference, values         engines on the trainer's devices sleep
    pack ─ forward_backward ─ optim_step            for each minibatch, in one torch thread
        ▼
    publish ─ self-checks ─ note_new_weights        engines wake; new groups may begin
        ▼
    evaluate ─ checkpoint                           then the next step, unless a guard ends it

Training is synchronous if ``max_staleness`` is 0: rollouts of step k then begin after step k-1.
This module determines the order of operations. ``stages.py`` supplies the data. ``learner.py``
updates a policy and sends its weights to the engines, and ``policy_learners.py`` does so for
several policies. ``run_record.py`` writes the files. ``advantages/`` computes credit, ``losses/``
computes losses, and ``backends/`` gives access to devices.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from ramify.errors import StoreError
from ramify.logging import ComponentLogger
from ramify.progress import on_heartbeat, subscribe, track_progress
from ramify.step_time_accounting import WallAndCpuTimer
from ramify.train.checkpoint import CheckpointedProgress, Write, read_state
from ramify.train.learner import Learner
from ramify.train.metrics import Diagnosis
from ramify.train.policy_learners import Learners
from ramify.train.run_record import TrainingRunRecorder
from ramify.train.score_failure_counts import ScoreFailureCounts
from ramify.train.stages import RolloutsFailed, StageDataSource, StepData, TrainingStage
from ramify.train.stall_watchdog import StallError, StoppedBySignal
from ramify.train.training_guard import (
    TrainingGuardSpec,
    TrainingGuardVerdict,
    check_evaluation,
    check_step,
    note_initial_score,
)

_log = ComponentLogger("train")
T = TypeVar("T")


class PolicyEvaluationPlan(NamedTuple):
    """The evaluation plan of a training run: the evaluation function, the splits, and the policy to
    keep."""

    of: Callable[[str], Awaitable[Mapping[str, float]]] | None
    """Evaluates a split and returns its metrics, prefixed with its name: ``{"validation/reward":
    0.8}``. None: nothing is evaluated."""
    first: Sequence[str] = ()
    """Splits to evaluate before rollouts begin, in addition to ``validation``."""
    final: Sequence[str] = ()
    """Splits to evaluate at the end, with both the last and the best policy."""
    keep: Literal["best", "last"] = "best"
    """Which policy OUT/policy holds at the end, the best or the last."""


class Trainer:
    """Executes one training run to completion, from the start or from a checkpoint."""

    def __init__(
        self,
        record: TrainingRunRecorder,
        learners: Sequence[Learner],
        stages: Sequence[TrainingStage],
        evaluation: PolicyEvaluationPlan,
        *,
        guard: TrainingGuardSpec | None = None,
    ) -> None:
        """Create a trainer of the policies in ``learners``, which runs the given training stages.

        ``learners`` holds one learner for each trained policy. The first belongs to ``Run.policy``.
        """
        self.record = record
        self._learners = Learners(learners, record)
        self._stages = stages
        self._evaluation = evaluation
        self._guard = guard or TrainingGuardSpec()
        self._source: StageDataSource | None = None
        self._rollback = ""
        """Why the stage must return to its best checkpoint. Empty if it need not."""
        self._thread = self._learners.thread
        self._watch = self._thread.watch

    @property
    def state(self) -> CheckpointedProgress:
        return self.record.state

    # --- the run

    def stop(self, by: str) -> None:
        """Stop the run because of the signal ``by``, so that ``run`` raises StoppedBySignal.

        A training step that has begun to learn is first completed and saved. Rollouts and
        evaluations in progress are cancelled. Call this in the event loop's thread.
        """
        self._watch.interrupt_waits(by)

    async def run(self, resume: Path | None = None) -> CheckpointedProgress:
        """Train to the end of the run, starting from the checkpoint ``resume`` if one is given.

        Returns the run's final state.
        """
        try:
            with (
                self.record.account,
                subscribe(lambda _: self._watch.report_progress()),
                on_heartbeat(self._watch.report_progress),
            ):
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
            self.record.checkpoints.wait_for_write()

    async def _run(self, resume: Path | None) -> CheckpointedProgress:
        if resume is not None:
            await self._thread.run(self.state.step + 1, self._restore, resume)
            await self._learners.publish_resumed()
        else:
            self.record.begin_fresh()
        self.record.open_metrics()
        self._report_steps(is_resumed=resume is not None)
        while self.state.stage < len(self._stages):
            await self._run_stage(self._stages[self.state.stage])
        await self._evaluate_final()
        return self.state

    def _report_steps(self, *, is_resumed: bool) -> None:
        """Log which training steps belong to which stage.

        Steps are counted from 1 through all stages, in the log, the metrics, the checkpoints and
        the progress bar.
        """
        last, parts = 0, []
        for stage in self._stages:
            first, last = last + 1, last + stage.num_steps
            parts.append(
                f"{first:,} to {last:,} {stage.name}" if last > first else f"{first:,} {stage.name}"
            )
        text = f"{last:,} steps: {', '.join(parts)}"
        done = self.state.step
        text += f"; {done:,} are done" if is_resumed else ""
        _log.info("steps", text, shown=True, steps=last, step=done)

    async def _run_stage(self, stage: TrainingStage) -> None:
        # A run that resumes within a stage has its backend, first evaluation and checkpoint.
        is_new = not self._learners.has_begun
        await self._learners.begin_stage(stage)
        if stage.samples and is_new:
            also = await self._count_recursive_roots(stage)
            for split in ("validation", *self._evaluation.first):
                values = await self.evaluate(split, "first", also)
                if split == "validation":
                    note_initial_score(self.state.guard, values)
                also = {}
            # If rollouts make the policy worse, the one they began with is the best.
            await self._in_torch(self._save)
        try:
            await self._run_steps(stage)
            while self._rollback:
                await self._roll_back(stage)
                await self._run_steps(stage)
        except StoppedBySignal:
            await self._save_steps_so_far()
            raise
        self.record.begin_next_stage()
        self._learners.end_stage()

    async def _run_steps(self, stage: TrainingStage) -> None:
        with track_progress(
            stage.name, sum(each.num_steps for each in self._stages), "steps", first=self.state.step
        ) as progress:
            async with contextlib.aclosing(self._iter_step_data(stage)) as works:
                async for work in works:
                    await self._step(stage, work)
                    progress.set_progress(self.state.step)
                    if self.state.stopped or self._rollback:
                        break

    async def _save_steps_so_far(self) -> None:
        """Save a checkpoint after the last complete step of the current stage, if there is one.

        Used when a run is stopped early.
        """
        state = self.state
        if state.stage_step and self._source is not None:
            self._note_position(self._source)
            await self._in_torch(self._save)
            await self._in_torch(self.record.checkpoints.wait_for_write)

    async def _count_recursive_roots(self, stage: TrainingStage) -> dict[str, float]:
        """Count how many root calls will be recursive, and return the counts as metrics.

        The counts are logged before the first rollout.
        """
        counting = stage.count_planned_root_modes(self.state.next_item)
        what = "counting the roots that will be recursive"
        count = await self._watch.await_with_stall_limit(what, counting, can_stop=True)
        if count is None:
            return {}
        _log.info("roots", f"{stage.name}: {count.sentence()}", shown=True, stage=stage.name)
        return count.metrics()

    async def _iter_step_data(self, stage: TrainingStage) -> AsyncGenerator[StepData, None]:
        """Yield the training data of each remaining step of ``stage``.

        Meanwhile, rollouts of later steps continue within the limit set by ``max_staleness``.
        """
        state = self.state
        self._learners.restore_algorithm_state(stage)
        async with stage.open_data_source(state.next_item, state.pending) as source:
            self._source = source
            self.record.account.take_times()  # what was before is not part of a step
            if state.is_due:
                await self._at_intervals(stage)
                if self._rollback:
                    return
            for step in range(state.stage_step, stage.num_steps if not state.stopped else 0):
                started = time.monotonic()
                if stage.samples and (not stage.max_staleness or step == state.stage_step == 0):
                    # Otherwise rollouts continued during the last step's learning.
                    self.record.restart_cpu_meter()
                what = f"the work of {self._step_label(stage)}"
                try:
                    work = await self._watch.await_with_stall_limit(
                        what, source.step_data(step), can_stop=True
                    )
                except RolloutsFailed as error:
                    text = f"{self._step_label(stage)}: {error}"
                    note = Diagnosis(name="failed_rollouts", text=text, action="stop")
                    self.record.write_metrics(stage.name, {"failed_share": 1.0}, [note])
                    raise RolloutsFailed(text + self._repair_advice) from error
                work.metrics["work_s"] = time.monotonic() - started
                work.metrics.update(self.record.rollout_cpu_metrics(stage.samples))
                yield work

    async def _step(self, stage: TrainingStage, work: StepData) -> None:
        record, state, source = self.record, self.state, self._source
        assert source is not None
        started = time.monotonic()
        where = self._step_label(stage)
        values = {**work.metrics, **self._learners.log_data_notes(stage, work, where)}
        async with self._learners.weight_update_context(stage, work) as measured:
            values |= measured
            values |= await self._learners.learn(stage, work)
            values["learn_s"] = time.monotonic() - started
            self._learners.count_step(stage, work)
            await self._learners.publish_step(stage, work)
        values = record.add_derived_metrics(values)
        verdict: TrainingGuardVerdict | None = None
        if stage.samples:
            verdict = check_step(self._guard, state.guard, values)
            values |= verdict.metrics
            self._report_verdict(verdict, where)
        with WallAndCpuTimer("journal"):
            diagnoses = [] if verdict is None else verdict.diagnoses
            record.write_metrics(stage.name, values, diagnoses, is_step=True)
            record.write_rollouts(work.groups, work.accounts)
        if verdict is not None and verdict.is_failure:
            unscored = ScoreFailureCounts.from_groups(work.groups)
            raise RolloutsFailed(f"{where}: {verdict.stop}: {unscored}{self._repair_advice}")
        with WallAndCpuTimer("credit"):
            self._learners.check_ids_match_engines(stage, work)
        if self._rollback:
            return
        if not state.stopped:
            source.note_new_weights(state.stage_step)
        state.is_due = True
        await self._at_intervals(stage)

    def _note_position(self, source: StageDataSource) -> None:
        """Record for the next checkpoint which task items have begun and which were skipped."""
        self.state.next_item, self.state.pending = source.data_position()
        self.record.write_rollouts([], source.take_skipped())

    @property
    def _repair_advice(self) -> str:
        """Advice on how to continue after a repair, for an error message about failed rollouts."""
        if self.record.checkpoints.latest() is None:
            return ""
        return f"; repair that, and continue with: ramify train --resume {self.record.out}"

    def _step_label(self, stage: TrainingStage) -> str:
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
                measured = await self.evaluate("validation", stage.name)
        if is_evaluated and not self.state.stopped:
            where = f"step {self.state.step} ({stage.name})"
            verdict = check_evaluation(self._guard, self.state.guard, measured)
            if is_last:  # the stage is over in any case
                verdict.stop = verdict.rollback = ""
            self._report_verdict(verdict, where)
            if verdict.found:
                self.record.write_metrics(stage.name, {}, verdict.diagnoses)
            is_last = is_last or bool(self.state.stopped)
        self.state.is_due = False
        if self._rollback:
            return
        if (
            is_evaluated
            or is_last
            or self.record.is_time_to_save
            or (schedule.checkpoint_every and done % schedule.checkpoint_every == 0)
        ):
            self._note_position(self._source)
            await self._in_torch(self._save)

    def _report_verdict(self, verdict: TrainingGuardVerdict, where: str) -> None:
        """Log the faults that the training guard found, and record whether the stage stops or rolls
        back."""
        step = self.state.step
        for name, text, *_ in verdict.found:
            _log.warning("diagnosis", f"{where}: {name}: {text}", shown=True, step=step)
        if verdict.stop and not verdict.is_failure:
            text = f"{where}: the stage ends here: {verdict.stop}"
            _log.warning("stage_stopped", text, shown=True, step=step)
            self.state.stopped = verdict.stop
        self._rollback = verdict.rollback

    async def _roll_back(self, stage: TrainingStage) -> None:
        """Continue ``stage`` from its best checkpoint with smaller learning rates."""
        checkpoints, here = self.record.checkpoints, self.state.stage
        found = [each for each in (checkpoints.best(), *reversed(checkpoints.all())) if each]
        checkpoint = next(each for each in found if read_state(each).stage == here)
        why, self._rollback = self._rollback, ""
        step = self.state.step
        self.record.roll_back_to_checkpoint(checkpoint, self._guard.rollback_lr)
        text = (
            f"step {step} ({stage.name}): the run goes back to step {self.state.step} with "
            f"{self.state.lr_scale:g} times the configured learning rate (guard.then=rollback): "
            f"{why}"
        )
        _log.warning("rollback", text, shown=True, step=self.state.step)
        note = Diagnosis(name="rollback", text=text, action="rollback")
        self.record.write_metrics(stage.name, {}, [note])
        await self._in_torch(self._restore_stage, stage, checkpoint)
        await self._learners.publish_restored(stage)
        await self._in_torch(self._save)  # a run that is killed now continues with the smaller rate

    # --- checkpoints, in the torch thread

    def _save(self) -> None:
        stage = self._stages[self.state.stage]
        saved = stage.extra_state if self.state.stage_step else {}
        parts: dict[str, Write] = {name: each.save for name, each in saved.items()}
        parts |= self._learners.checkpoint_writers(stage)
        with WallAndCpuTimer("journal"):
            self.record.save_checkpoint(parts)

    def _restore(self, checkpoint: Path) -> None:
        self.record.resume_from_checkpoint(checkpoint)
        stage = self._stages[self.state.stage]
        is_open = self.state.stage_step < stage.num_steps or self.state.is_due
        is_open = is_open and not self.state.stopped
        if is_open:
            self._restore_stage(stage, checkpoint)
            self._learners.inherit_references(checkpoint)
            return
        self._learners.restore(stage, checkpoint, is_open=False)
        self.record.begin_next_stage()  # the next one begins with a new optimizer

    def _restore_stage(self, stage: TrainingStage, checkpoint: Path) -> None:
        """Restore the policies and the extra state of ``stage`` from ``checkpoint``."""
        self._learners.restore(stage, checkpoint, is_open=True)
        for name, part in stage.extra_state.items() if self.state.stage_step else ():
            part.load(checkpoint / name)

    async def _in_torch(self, work: Callable[..., T], *arguments: object) -> T:
        return await self._thread.run(self.state.step + 1, work, *arguments)

    # --- evaluating

    async def evaluate(
        self, split: str, stage: str, also: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """Evaluate the current policy on ``split`` and return the metrics.

        On the validation split, the reward also becomes the run's score. ``also`` holds further
        metrics to write in the same record.
        """
        if self._evaluation.of is None:
            return {}
        await self._learners.publish()
        started = time.monotonic()
        evaluating = self._evaluation.of(split)
        values = dict(
            await self._watch.await_with_stall_limit(
                f"evaluating {split}", evaluating, can_stop=True
            )
        )
        values |= {"evaluate_s": time.monotonic() - started, **(also or {})}
        if split == "validation":
            self.state.score = values.get("validation/reward")
        self.record.write_metrics(stage, values)
        self.record.restart_cpu_meter()
        self.record.account.take_times()  # an evaluation is not part of a step
        return values

    async def _evaluate_final(self) -> None:
        """Evaluate the last and the best policy on the final splits, and save one of them.

        The policy is saved to OUT/policy. ``evaluate.keep`` chooses which one is saved. The metrics
        are recorded as ``last`` and ``best``. The best policy is chosen on the validation split and
        may be the initial one.
        """
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
            await self._learners.load(checkpoint)
            scores = {}
            for split in self._evaluation.final:
                scores |= await self.evaluate(split, name)
        await self._learners.save_policies()
        if (kept := found[keep]) is not None:
            self.record.note_final_checkpoint(kept, scores, is_best=kept == checkpoints.best())
