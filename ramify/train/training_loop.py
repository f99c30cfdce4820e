"""The one training loop: stage by stage, step by step, from data to a newer policy.

    source.work(step)                               the first complete groups; others continue
        ▼
    sleep ─ prepare: old, reference, values         engines on the trainer's devices sleep
    pack ─ forward_backward ─ optim_step            for each minibatch, in one torch thread
        ▼
    publish ─ self-checks ─ source.newer(step + 1)  engines wake; new groups may begin
        ▼
    evaluate ─ checkpoint                           then the next step, unless a guard ends it

Synchronous training is ``max_staleness = 0``: rollouts of step k begin after step k-1. Decides the
order of operations, and what is written when. Not here: where data comes from (``stages.py``,
``group_queue.py``), credit assignment (``algorithms/``), losses (``loss.py``), and devices
(``backends/``).
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np

from ramify.errors import StoreError, TrainError
from ramify.logging import RoomLogger
from ramify.models import checksums
from ramify.progress import on_heartbeat, report_progress, subscribe
from ramify.train import cpu_seconds
from ramify.train import group_records as group_file
from ramify.train import metrics as metric_file
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.checkpoint import FOLDER, CheckpointState, CheckpointStore, read_state, verify
from ramify.train.data.pack import attach, describe, pack
from ramify.train.data.sft_data import write
from ramify.train.guards import (
    GuardState,
    GuardVerdict,
    TrainingGuard,
    after_evaluation,
    after_step,
)
from ramify.train.metrics import MetricsFile, StepMetrics
from ramify.train.optional_fields import check_optional
from ramify.train.selfcheck import SelfCheck
from ramify.train.signals.scorer import REFERENCE
from ramify.train.stages import Minibatch, StepData, StepSource, TrainingStage
from ramify.train.watchdog import RunWatchdog, SerialThread, StallError
from ramify.types.sequence import Batch, Floats, TokenSequence
from ramify.types.trajectory import Group

_log = RoomLogger("train")
T = TypeVar("T")
STALL_S = 1800.0
"""Default of ``Run.stall_s``: the longest time in seconds without progress."""
_ROLLOUTS = "rollouts"


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a run evaluates and saves. Steps are counted within a stage."""

    evaluate_every: int | None = 5
    """Steps between evaluations on the validation stream, in a stage with rollouts; None: only at
    the end of the stage."""
    checkpoint_every: int | None = None
    """Steps between checkpoints, in addition to those after each evaluation (including the first)
    and at the end of each stage; None: no others."""
    save_rollouts_every: int | None = None
    """Steps between complete saves of a step's rollouts in OUT/rollouts, to look at or learn from
    (``sft.trajectories``); None: no saves."""
    keep_last: int = 2
    keep_best: int = 1

    def __post_init__(self) -> None:
        check_optional("schedule", "never", checkpoint_every=self.checkpoint_every)
        check_optional("schedule", "never", save_rollouts_every=self.save_rollouts_every)
        check_optional("schedule", "only at the stage's end", evaluate_every=self.evaluate_every)


class PolicyHandle(Protocol):
    """What the loop does with the policy except training it; see ``train/publisher.py``."""

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


Evaluate = Callable[[str], Awaitable[Mapping[str, float]]]
"""Split -> its metrics, prefixed with its name: ``{"validation/reward": 0.8}``."""


class TrainingLoop:
    """One training run in progress."""

    def __init__(
        self,
        out: Path,
        stages: Sequence[TrainingStage],
        backend_of: Callable[[TrainingStage], Backend],
        policy: PolicyHandle,
        evaluate: Evaluate,
        *,
        first: Sequence[str] = (),
        final: Sequence[str] = (),
        schedule: Schedule | None = None,
        guard: TrainingGuard | None = None,
        config: Mapping[str, Any] | None = None,
        check: SelfCheck | None = None,
        reference_of: Callable[[Path], ReferenceModel] | None = None,
        listener: Callable[[StepMetrics], None] | None = None,
        watch: RunWatchdog | None = None,
    ) -> None:
        """``first`` and ``final`` are splits to report before rollouts and at the end.
        ``reference_of`` loads a saved policy as the reference of a KL. ``watch``
        bounds every wait."""
        self.out = out
        self._stages = stages
        self._backend_of = backend_of
        self._policy = policy
        self._schedule = schedule = schedule or Schedule()
        self._guard = guard or TrainingGuard()
        self._evaluate = evaluate
        self._first = first
        self._final = final
        self._check = check
        self._reference_of = reference_of
        self._reference: ReferenceModel | None = None
        self.checkpoints = CheckpointStore(out, schedule.keep_last, schedule.keep_best)
        self.state = CheckpointState(step=0, config=dict(config or {}))
        self._listener = listener
        self._metrics: MetricsFile | None = None
        self._backend: Backend | None = None
        self._source: StepSource | None = None
        self._is_published = self._is_asleep = False
        self._resumes_in_stage = False
        """Whether the run resumes within a stage whose first evaluation and checkpoint are done."""
        self._torch = SerialThread("ramify-train")
        self.watch = watch or RunWatchdog(out, STALL_S)
        self.measures: Callable[[], Mapping[str, float]] = dict
        """Returns the engines' own metrics at each step."""
        self.meter: cpu_seconds.CpuMeter | None = None
        """Set if all parts of a rollout share the CPUs of this machine."""
        self._spent: cpu_seconds.CpuSeconds | None = None
        self._weights = asyncio.Lock()
        """Held while weights change, until the engine has them."""
        self._since = time.monotonic()
        self._cpu_since = 0.0

    # --- the run

    async def run(self, resume: Path | None = None) -> CheckpointState:
        """Train from the beginning, or from the checkpoint ``resume``, to the end. Returns the
        final state."""
        self.out.mkdir(parents=True, exist_ok=True)
        is_stalled = False
        try:
            with subscribe(lambda _: self.watch.moved()), on_heartbeat(self.watch.moved):
                return await self._run(resume)
        except StallError:
            is_stalled = True
            raise
        finally:
            if self._metrics is not None:
                self._metrics.close()
            self._torch.close(0 if is_stalled else None)
            self.watch.close()
            if not is_stalled:
                # A run that reached its end has waited, and raised, before.
                with contextlib.suppress(StoreError):
                    self.checkpoints.settle()

    async def _run(self, resume: Path | None) -> CheckpointState:
        if resume is not None:
            await self._in_torch(self._restore, resume)
            await self._policy.publish()  # the engine may hold other weights
        else:
            self._cut(-1)
            self.state.first_item = self.state.next_item
        self._metrics = MetricsFile(self.out, self._listener)
        self._since = time.monotonic() - self.state.seconds
        self._cpu_since = time.process_time() - self.state.cpu_s if resume is not None else 0.0
        while self.state.stage < len(self._stages):
            await self._run_stage(self._stages[self.state.stage])
        await self._report()
        return self.state

    async def _run_stage(self, stage: TrainingStage) -> None:
        if self._backend is None:
            self._backend = await self._in_torch(self._backend_of, stage)
        if "ref_logprobs" in stage.streams:
            self._reference = await self._in_torch(self._load_reference)
        is_new, self._resumes_in_stage = not self._resumes_in_stage, False
        if stage.samples and is_new:
            also = await self._roots(stage)
            for split in ("validation", *self._first):
                await self.evaluate(split, "first", also)
                also = {}
            # If rollouts make the policy worse, the one they began with is the best.
            await self._in_torch(self._save)
        with report_progress(
            stage.name, stage.num_steps, "steps", first=self.state.stage_step
        ) as progress:
            async with contextlib.aclosing(self._works(stage)) as works:
                async for work in works:
                    await self._step(stage, work)
                    progress.at(self.state.stage_step)
                    if self.state.stopped:
                        break
        self._begin_next_stage()
        self._backend = None

    async def _roots(self, stage: TrainingStage) -> dict[str, float]:
        """Report, before the first rollout, how many roots will be recursive. Returns this as
        metrics."""
        counting = stage.roots(self.state.next_item)
        count = await self.watch.bounded("counting the roots that will be recursive", counting)
        if count is None:
            return {}
        _log.info("roots", f"{stage.name}: {count.sentence()}", shown=True, stage=stage.name)
        return count.metrics()

    def _begin_next_stage(self) -> None:
        state = self.state
        state.stage, state.stage_step, state.stopped, state.memory, state.guard = (
            state.stage + 1,
            0,
            "",
            {},
            GuardState(),
        )

    async def _works(self, stage: TrainingStage) -> AsyncGenerator[StepData, None]:
        """The data of each remaining step. Later rollouts continue meanwhile, as far as
        ``max_staleness`` allows."""
        if self.state.memory:
            stage.memory = dict(self.state.memory)
        async with stage.source(self.state.next_item, self.state.pending) as source:
            self._source = source
            for step in range(self.state.stage_step, stage.num_steps):
                started = time.monotonic()
                meter = self.meter if stage.samples else None
                if meter is not None and (
                    not stage.max_staleness or step == self.state.stage_step == 0
                ):
                    meter.restart()  # otherwise rollouts continued during the last step's learning
                work = await self.watch.bounded(
                    f"the work of {self._where(stage)}", source.work(step)
                )
                work.metrics["work_s"] = time.monotonic() - started
                self._spent = meter.spent() if meter is not None else None
                yield work

    async def _step(self, stage: TrainingStage, work: StepData) -> None:
        state, source = self.state, self._source
        assert source is not None
        started = time.monotonic()
        values = dict(work.metrics) | metric_file.staleness(work.groups, self._policy.version)
        where = self._where(stage)
        for note in work.notes:
            _log.warning(
                "step_note", f"{where}: {note}", shown=True, step=state.step + 1, stage=stage.name
            )
        if work.no_signal:
            text = f"{where} has nothing to learn from: {work.no_signal}"
            _log.warning("no_signal", text, shown=True, step=state.step + 1, stage=stage.name)
            values["silent"] = 1.0
        async with self._weights:
            if work.parts:
                values |= await self._sleep()
                values |= await self._in_torch(self._prepare, stage, work)
            values |= _over_parts(
                [await self._in_torch(self._learn, stage, part) for part in work.parts]
            )
            values["learn_s"] = time.monotonic() - started
            state.step, state.stage_step, state.score = state.step + 1, state.stage_step + 1, None
            state.memory = work.memory
            if stage.samples and work.parts:
                await self._publish()
        self._count(values)
        values |= self.measures()
        if stage.samples:
            values |= self._report_verdict(after_step(self._guard, state.guard, values), where)
        self._write(stage.name, values)
        group_file.write(self.out, work.accounts, state.step)
        if self._spent is not None:
            cpu_seconds.write(self.out, msgspec.structs.replace(self._spent, step=state.step))
        if self._check is not None and work.groups:
            self._check.ids(work.groups)
        if (
            work.groups
            and self._schedule.save_rollouts_every
            and state.stage_step % self._schedule.save_rollouts_every == 0
        ):
            self._save_rollouts(work.groups)
        if not state.stopped:
            source.newer(state.stage_step)
        await self._at_intervals(stage)

    def _where(self, stage: TrainingStage) -> str:
        return f"step {self.state.step + 1} ({stage.name})"

    async def _at_intervals(self, stage: TrainingStage) -> None:
        done, schedule = self.state.stage_step, self._schedule
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
        if (
            is_evaluated
            or is_last
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

    # --- learning

    def _prepare(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """Compute the streams that the rows of a step need before its first minibatch. Runs in the
        torch thread."""
        backend = self._backend
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
                    row.versions >= 0, self._policy.version - row.versions, 0
                ).astype(np.float32)

    def _learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """One optimizer step. Runs in the torch thread."""
        backend = self._backend
        assert backend is not None
        batches = pack(part.rows, backend.packing, part.denominators)
        if self._check is not None:
            self._check.weights(part.rows, batches)
        measured = backend.forward_backward(batches, stage.loss)
        measured |= backend.optim_step()
        self._is_published = False
        return {**measured, **describe(batches, part.rows)}

    def _load_reference(self) -> ReferenceModel:
        """The policy that rollouts began with, saved next to the checkpoints."""
        folder = self.out / REFERENCE
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
        self._policy.save(folder)
        checksums.write(folder)

    async def _sleep(self) -> dict[str, float]:
        """Have engines on the trainer's devices sleep until weights are published. Returns how long
        that took."""
        started = time.monotonic()
        sleeping = self.watch.bounded(
            f"letting the engines sleep before step {self.state.step + 1}", self._policy.sleep()
        )
        if not await sleeping:
            return {}
        self._is_asleep, self._is_published = True, False
        return {"sleep_s": time.monotonic() - started}

    async def _publish(self) -> None:
        """Publish the newest weights to the engine, and check that it uses them."""
        if self._is_published:
            return
        if self._is_asleep:
            await self._in_torch(self._policy.release_memory)
            self._is_asleep = False
        started = time.monotonic()
        await self.watch.bounded(
            f"publishing the weights after step {self.state.step}", self._policy.publish()
        )
        self._is_published = True
        self.state.version += 1
        _log.info(
            "weight_sync",
            f"the engine has version {self._policy.version} of the weights",
            version=self._policy.version,
            step=self.state.step,
            seconds=time.monotonic() - started,
        )
        await self._check_engine()

    async def _check_engine(self) -> None:
        if self._check is not None and self._backend is not None:
            checking = self._check.engine(self._backend, self._in_torch)
            await self.watch.bounded(f"checking the engine after step {self.state.step}", checking)

    async def rejoin(self, give: Callable[[], Awaitable[bool]]) -> None:
        """Give an engine that is back the current weights (``give``) between two steps, and check
        it like the others. An error here ends the run."""
        try:
            async with self._weights:
                if await give():
                    await self._check_engine()
        except Exception as error:  # noqa: BLE001 (raised again in the run's next wait)
            self.watch.fail(error)

    # --- what is written

    async def evaluate(
        self, split: str, stage: str, also: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """Evaluate the current policy on ``split``. The validation reward becomes the run's score,
        if there is one. ``also`` is written in the same row."""
        async with self._weights:
            await self._publish()
        started = time.monotonic()
        values = dict(await self.watch.bounded(f"evaluating {split}", self._evaluate(split)))
        values |= {"evaluate_s": time.monotonic() - started, **(also or {})}
        if split == "validation":
            self.state.score = values.get("validation/reward")
        self._write(stage, values)
        if self.meter is not None:
            self.meter.restart()
        return values

    async def _report(self) -> None:
        """Evaluate the final splits for the last policy (``last``) and for the best on the
        validation stream (``best``). The best policy is left in OUT/policy; it may be the one that
        rollouts began with."""
        best, last = self.checkpoints.best(), self.checkpoints.latest()
        for name, checkpoint in (("last", last), ("best", best)):
            if checkpoint is None:
                continue
            await self._in_torch(verify, checkpoint, "policy/")
            await self._in_torch(self._policy.load, checkpoint / "policy")
            self._is_published = False
            if name == "best" and best == last:
                continue
            for split in self._final:
                await self.evaluate(split, name)
        await self._in_torch(self._save_policy, self.out / "policy")

    def _write(self, stage: str, values: Mapping[str, float]) -> None:
        assert self._metrics is not None
        self._tick()
        self._metrics.write(
            self.state.step, stage, self.state.seconds, {**values, "cpu_s": self.state.cpu_s}
        )

    def _tick(self) -> None:
        self.state.seconds = time.monotonic() - self._since
        self.state.cpu_s = time.process_time() - self._cpu_since

    def _count(self, values: dict[str, float]) -> None:
        seconds = values.get("work_s", 0.0) + values["learn_s"]
        # Time spent on signals, in parallel to rollouts.
        for name in [name for name in values if name.endswith("/s")]:
            values[f"signal_share/{name.removesuffix('/s')}"] = (
                values[name] / seconds if seconds else 0.0
            )
        tokens = values.get("sampled_tokens", 0.0) + values.get("given_tokens", 0.0) or values.get(
            "row_tokens", 0.0
        )
        values["tokens_per_s"] = tokens / seconds if seconds else 0.0

    def _save_rollouts(self, groups: Sequence[Group]) -> None:
        path = self.out / _ROLLOUTS / f"step-{self.state.step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        write(path, (trajectory for group in groups for trajectory in group.trajectories))

    def _save(self) -> None:
        backend, state = self._backend, self.state
        assert backend is not None
        self._tick()
        saved = self._stages[state.stage].kept if state.stage_step else {}
        others = {name: each.save for name, each in saved.items()}
        self.checkpoints.save(
            state, {"backend": backend.save, "policy": self._policy.save, **others}
        )

    def _restore(self, checkpoint: Path) -> None:
        """Restore the state of ``checkpoint``. Runs in the torch thread."""
        config = self.state.config
        self.state = read_state(checkpoint)
        self.state.config = config
        later = self.checkpoints.abandon_after(self.state.step)
        if later:
            _log.warning(
                "steps_abandoned",
                f"the run goes back to step {self.state.step}: {len(later)} checkpoints of later "
                f"steps are moved to {later[0].parent}",
                shown=True,
                step=self.state.step,
                checkpoints=len(later),
            )
        self._cut(self.state.step)
        stage = self._stages[self.state.stage]
        backend = self._backend_of(stage)
        backend.load(checkpoint / "backend")
        if self.state.stage_step < stage.num_steps and not self.state.stopped:
            self._backend, self._resumes_in_stage = backend, True
            for name, part in stage.kept.items() if self.state.stage_step else ():
                part.load(checkpoint / name)
            self._copy_reference(checkpoint)
        else:  # the stage was over; the next one begins with a new optimizer
            self._begin_next_stage()

    def _copy_reference(self, checkpoint: Path) -> None:
        """Copy the reference policy of the run that wrote ``checkpoint``, if it is another run:
        rollouts did not begin in this one."""
        target = self.out / REFERENCE
        if checkpoint.resolve().parent == self.checkpoints.folder.resolve():
            return
        shutil.rmtree(target, ignore_errors=True)
        source = next(
            (each / REFERENCE for each in checkpoint.resolve().parents if (each / FOLDER).is_dir()),
            None,
        )
        if source is not None and source.is_dir():
            shutil.copytree(source, target)

    def _cut(self, step: int) -> None:
        """Drop records of steps after ``step``: the run will repeat them."""
        for cut in (metric_file.cut, group_file.cut, cpu_seconds.cut):
            cut(self.out, step)
        for path in (self.out / _ROLLOUTS).glob("step-[0-9]*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    async def _in_torch(self, work: Callable[..., T], *arguments: Any) -> T:
        name = getattr(work, "__name__", "work").strip("_")
        what = f"'{name}' in step {self.state.step + 1}"
        return await self.watch.bounded(
            what, self._torch.run(work, *arguments), thread=self._torch.name
        )


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
