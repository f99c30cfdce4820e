"""The one training loop: stage after stage, step after step, from work to a newer policy.

    source.work(step)                                  the groups that are whole first, of rollouts that go on meanwhile
        ▼
    rest ─ prepare: old, reference, values of rows     engines on the trainer's devices sleep; in one thread of its own
    pack ─ forward_backward ─ optim_step (each part)
        ▼
    publish ─ self-checks ─ source.newer(step + 1)     engines wake, and go on with newer weights; further groups may begin
        ▼
    evaluate ─ checkpoint                              then the next step, unless a guard ends the stage

Synchronous training is ``max_staleness = 0``: rollouts of step k begin once step k-1 is over.
Decides the order of things and what is written down when. Leaves out where work comes from
(``stages.py``, ``group_queue.py``), credit, losses, and devices.
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
from ramify.models import checksums
from ramify.progress import on_heartbeat, report_progress, subscribe
from ramify.train import cpu_seconds
from ramify.train import group_records as group_file
from ramify.train import metrics as metric_file
from ramify.train.backends.base import Backend, ReferenceModel
from ramify.train.checkpoint import FOLDER, CheckpointState, CheckpointStore, read_state, verify
from ramify.train.guards import (
    GuardState,
    GuardVerdict,
    TrainingGuard,
    after_evaluation,
    after_step,
)
from ramify.train.metrics import MetricsFile, StepMetrics
from ramify.train.pack import attach, describe, pack
from ramify.train.selfcheck import SelfCheck
from ramify.train.sft_data import write
from ramify.train.signals.scorer import REFERENCE
from ramify.train.stages import Minibatch, StepData, StepSource, TrainingStage
from ramify.train.watchdog import RunWatchdog, SerialThread, StallError
from ramify.types.sequence import Batch, Floats, TokenSequence
from ramify.types.trajectory import Group

T = TypeVar("T")
STALL_S = 1800.0
"""How long a run may stand still."""
_ROLLOUTS = "rollouts"


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How often a run does what it does besides learning. Steps are those of a stage."""

    evaluate_every: int = 5
    """Steps of a sampling stage between evaluations on the validation stream; 0: only at the
    stage's end."""
    checkpoint_every: int = 0
    """Steps between checkpoints, besides those after an evaluation, the first of all among them,
    and at the end of each stage; 0: none besides."""
    save_rollouts_every: int = 0
    """Steps between those whose rollouts are kept, whole, in OUT/rollouts, to be looked at or
    learnt from (``sft.trajectories``); 0: none."""
    keep_last: int = 2
    keep_best: int = 1


class PolicyHandle(Protocol):
    """What the loop does with a policy besides learning; see ``build/policy_publisher.py``."""

    @property
    def version(self) -> int:
        """Of the weights that were published last, as the engine tells it of each token."""
        ...

    async def publish(self) -> None:
        """Let the engine answer with the weights as they are now."""
        ...

    async def sleep(self) -> bool:
        """Let engines that share the trainer's devices give their memory back until ``publish``;
        whether any do."""
        ...

    def release_memory(self) -> None:
        """Give back to the devices what the trainer keeps of their memory and does not use."""
        ...

    def save(self, folder: Path) -> None:
        """In Hugging Face's layout."""
        ...

    def load(self, folder: Path) -> None:
        """Take over the weights that were saved."""
        ...


Evaluate = Callable[[str], Awaitable[Mapping[str, float]]]
"""A split -> its metrics, under its name: ``{"validation/reward": 0.8}``."""


class TrainingLoop:
    """One run in progress."""

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
        say: Callable[[str], None] = print,
        inform: Callable[[str], None] = print,
        watch: RunWatchdog | None = None,
    ) -> None:
        """``first`` and ``final`` are splits that are reported before rollouts and at the end.
        ``reference_of`` makes a backend of a saved policy, which a KL is measured to. ``say`` is
        told in a sentence what a person should know, as that a step had no signal; ``inform`` gets
        what is worth knowing where all is well, as how many roots will be recursive. ``watch``
        bounds every wait."""
        self.out, self._stages, self._backend_of, self._policy = out, stages, backend_of, policy
        self._schedule = schedule = schedule or Schedule()
        self._guard = guard or TrainingGuard()
        self._evaluate, self._first, self._final = evaluate, first, final
        self._check, self._reference_of = check, reference_of
        self._reference: ReferenceModel | None = None
        self._say, self._inform = say, inform
        self.checkpoints = CheckpointStore(out, schedule.keep_last, schedule.keep_best)
        self.state = CheckpointState(step=0, config=dict(config or {}))
        self._listener = listener
        self._metrics: MetricsFile | None = None
        self._backend: Backend | None = None
        self._source: StepSource | None = None
        self._is_published = self._is_resting = False
        self._is_begun = False
        """Whether the run goes on within a stage, whose beginning was measured and kept before."""
        self._torch = SerialThread("ramify-train")
        self.watch = watch or RunWatchdog(out, STALL_S)
        self.measures: Callable[[], Mapping[str, float]] = dict
        """What engines tell of themselves at each step."""
        self.meter: cpu_seconds.CpuMeter | None = None
        """Where all parts of a rollout share the processors of this machine."""
        self._spent: cpu_seconds.CpuSeconds | None = None
        self._weights = asyncio.Lock()
        """Held while weights change, and until the engine has them."""
        self._since, self._cpu_since = time.monotonic(), 0.0

    # --- the run
    # -------------------------------------------------------------------------------------------------

    async def run(self, resume: Path | None = None) -> CheckpointState:
        """From the beginning, or from the checkpoint ``resume``, to the end. Returns where it
        stands then."""
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
                with contextlib.suppress(
                    StoreError
                ):  # a run that came to its end has waited before
                    self.checkpoints.settle()

    async def _run(self, resume: Path | None) -> CheckpointState:
        if resume is not None:
            await self._in_torch(self._go_back_to, resume)
            await self._policy.publish()  # the engine may hold weights of its own
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
            self._reference = await self._in_torch(self._kept_reference)
        is_new, self._is_begun = not self._is_begun, False
        if stage.samples and is_new:
            also = await self._roots(stage)
            for split in ("validation", *self._first):
                await self.evaluate(split, "first", also)
                also = {}
            await self._in_torch(
                self._save
            )  # what rollouts began with is the best, where they make it worse
        with report_progress(
            stage.name, stage.num_steps, "steps", first=self.state.stage_step
        ) as told:
            async with contextlib.aclosing(self._works(stage)) as works:
                async for work in works:
                    await self._step(stage, work)
                    told.at(self.state.stage_step)
                    if self.state.stopped:
                        break
        self._begin_next_stage()
        self._backend = None

    async def _roots(self, stage: TrainingStage) -> dict[str, float]:
        """Say, before the first rollout, how many roots will be recursive; the same as metrics."""
        counting = stage.roots(self.state.next_item)
        count = await self.watch.bounded("counting the roots that will be recursive", counting)
        if count is None:
            return {}
        self._inform(f"{stage.name}: {count.sentence()}")
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
        """The work of each step that is left. What is to come goes on meanwhile, as far as
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
                    meter.restart()  # else rollouts went on while the last step was learnt from
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
            self._say(f"{where}: {note}")
        if work.no_signal:
            self._say(f"{where} has nothing to learn from: {work.no_signal}")
            values["silent"] = 1.0
        async with self._weights:
            if work.parts:
                values |= await self._rest()
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
            values |= self._told(after_step(self._guard, state.guard, values), where)
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
            self._keep(work.groups)
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
            told = after_evaluation(self._guard, self.state.guard, self.state.score)
            self._told(told, f"step {self.state.step} ({stage.name})")
            is_last = bool(self.state.stopped)
        if (
            is_evaluated
            or is_last
            or (schedule.checkpoint_every and done % schedule.checkpoint_every == 0)
        ):
            self.state.next_item, self.state.pending = self._source.state()
            await self._in_torch(self._save)

    def _told(self, told: GuardVerdict, where: str) -> dict[str, float]:
        """Say what a guard has to say; its metrics."""
        for sentence in told.says:
            self._say(f"{where}: {sentence}")
        if told.stop:
            self._say(f"{where}: the stage ends here: {told.stop}")
            self.state.stopped = told.stop
        return told.metrics

    # --- learning
    # ------------------------------------------------------------------------------------------------

    def _prepare(self, stage: TrainingStage, work: StepData) -> dict[str, float]:
        """What is to be known of a work's rows before the first of its parts is learnt from; in the
        torch thread."""
        backend = self._backend
        assert backend is not None
        rows = [row for part in work.parts for row in part.rows]
        if "staleness" in stage.streams:
            self._attach_lag(rows)
        if "ref_logprobs" in stage.streams:
            assert self._reference is not None
            missing = [
                row for row in rows if "ref_logprobs" not in row.streams
            ]  # a signal may have computed some
            if missing:
                _attach(missing, self._reference, "ref_logprobs", self._reference.logprobs)
        if "old_logprobs" in stage.streams:
            _attach(rows, backend, "old_logprobs", backend.logprobs)
        if "values" in stage.streams:
            _attach(rows, backend, "values", backend.values)
        return stage.finish(rows)

    def _attach_lag(self, rows: Sequence[TokenSequence]) -> None:
        """The stream ``staleness``: by how many versions the policy that is trained is newer than
        those that sampled the tokens."""
        for row in rows:
            if row.versions is not None:
                row.streams["staleness"] = np.where(
                    row.versions >= 0, self._policy.version - row.versions, 0
                ).astype(np.float32)

    def _learn(self, stage: TrainingStage, part: Minibatch) -> dict[str, float]:
        """One optimizer step; in the torch thread."""
        backend = self._backend
        assert backend is not None
        batches = pack(part.rows, backend.packing, part.denominators)
        if self._check is not None:
            self._check.weights(part.rows, batches)
        measured = backend.forward_backward(batches, stage.loss)
        measured |= backend.optim_step()
        self._is_published = False
        return {**measured, **describe(batches, part.rows)}

    def _kept_reference(self) -> ReferenceModel:
        """The policy that rollouts began with, which is kept beside the checkpoints."""
        folder = self.out / REFERENCE
        if not self.state.stage_step:
            self._keep_policy(folder)
        elif not folder.is_dir():
            raise TrainError(
                f"{folder} is not there: it is the policy that rollouts began with, which the run "
                "has a KL to; copy it from "
                "the run that the checkpoint is of"
            )
        checksums.check(folder)
        if self._reference_of is None:
            raise TrainError(
                "the run has a KL to a reference policy, and nothing was given that makes one"
            )
        return self._reference_of(folder)

    def _keep_policy(self, folder: Path) -> None:
        """Save the policy as it is with checksums, which are compared where it is loaded."""
        checksums.drop(folder)
        self._policy.save(folder)
        checksums.write(folder)

    async def _rest(self) -> dict[str, float]:
        """Let engines that share the trainer's devices sleep until weights are published again; how
        long that took."""
        started = time.monotonic()
        resting = self.watch.bounded(
            f"letting the engines sleep before step {self.state.step + 1}", self._policy.sleep()
        )
        if not await resting:
            return {}
        self._is_resting, self._is_published = True, False
        return {"sleep_s": time.monotonic() - started}

    async def _publish(self) -> None:
        """Let the engine answer with the newest weights, and check that it does."""
        if self._is_published:
            return
        if self._is_resting:
            await self._in_torch(self._policy.release_memory)
            self._is_resting = False
        await self.watch.bounded(
            f"giving the engine the weights after step {self.state.step}", self._policy.publish()
        )
        self._is_published = True
        self.state.version += 1
        await self._checked()

    async def _checked(self) -> None:
        if self._check is not None and self._backend is not None:
            checking = self._check.engine(self._backend, self._in_torch)
            await self.watch.bounded(f"checking the engine after step {self.state.step}", checking)

    async def rejoin(self, give: Callable[[], Awaitable[bool]]) -> None:
        """An engine is back: have it given the weights of now by ``give``, between two steps, and
        check it as the others. What fails here ends the run."""
        try:
            async with self._weights:
                if await give():
                    await self._checked()
        except Exception as error:  # noqa: BLE001 (raised where the run waits)
            self.watch.fail(error)

    # --- what is written down
    # ------------------------------------------------------------------------------------

    async def evaluate(
        self, split: str, stage: str, also: Mapping[str, float] | None = None
    ) -> Mapping[str, float]:
        """Measure the policy as it is on ``split``. On the validation stream it becomes the run's
        score, if there is one. ``also`` is written down in the same row."""
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
        """The final splits, for the policy at the end (``last``) and for the best on the validation
        stream (``best``), which is the one that is left in OUT/policy. That may be the one that
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
        await self._in_torch(self._keep_policy, self.out / "policy")

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
        for name in [
            name for name in values if name.endswith("/s")
        ]:  # how long a signal was at it, beside rollouts
            values[f"signal_share/{name.removesuffix('/s')}"] = (
                values[name] / seconds if seconds else 0.0
            )
        tokens = values.get("sampled_tokens", 0.0) + values.get("given_tokens", 0.0) or values.get(
            "row_tokens", 0.0
        )
        values["tokens_per_s"] = tokens / seconds if seconds else 0.0

    def _keep(self, groups: Sequence[Group]) -> None:
        path = self.out / _ROLLOUTS / f"step-{self.state.step:06d}.jsonl"
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        write(path, (trajectory for group in groups for trajectory in group.trajectories))

    def _save(self) -> None:
        backend, state = self._backend, self.state
        assert backend is not None
        self._tick()
        kept = self._stages[state.stage].kept if state.stage_step else {}
        others = {name: each.save for name, each in kept.items()}
        self.checkpoints.save(
            state, {"backend": backend.save, "policy": self._policy.save, **others}
        )

    def _go_back_to(self, checkpoint: Path) -> None:
        """Stand where ``checkpoint`` was written; in the torch thread."""
        config = self.state.config
        self.state = read_state(checkpoint)
        self.state.config = config
        later = self.checkpoints.abandon_after(self.state.step)
        if later:
            self._say(
                f"the run goes back to step {self.state.step}: {len(later)} checkpoints of later "
                "steps are set aside "
                f"in {later[0].parent}"
            )
        self._cut(self.state.step)
        stage = self._stages[self.state.stage]
        backend = self._backend_of(stage)
        backend.load(checkpoint / "backend")
        if self.state.stage_step < stage.num_steps and not self.state.stopped:
            self._backend, self._is_begun = backend, True
            for name, kept in stage.kept.items() if self.state.stage_step else ():
                kept.load(checkpoint / name)
            self._bring_reference(checkpoint)
        else:  # the stage was over; the next begins with an optimizer of its own
            self._begin_next_stage()

    def _bring_reference(self, checkpoint: Path) -> None:
        """Take over the reference of another run, which ``checkpoint`` is of: rollouts did not
        begin here."""
        ours = self.out / REFERENCE
        if checkpoint.resolve().parent == self.checkpoints.folder.resolve():
            return
        shutil.rmtree(ours, ignore_errors=True)
        theirs = next(
            (each / REFERENCE for each in checkpoint.resolve().parents if (each / FOLDER).is_dir()),
            None,
        )
        if theirs is not None and theirs.is_dir():
            shutil.copytree(theirs, ours)

    def _cut(self, step: int) -> None:
        """Drop what was written down of later steps: they will be done, and measured, again."""
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
    """Give ``rows`` the stream ``name``, by ``ask`` over batches made for ``backend``."""
    batches = pack(rows, backend.packing)
    attach(rows, batches, name, ask(batches))


def _over_parts(measured: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Means over those optimizer steps of one step that have a number; sums of what is counted. How
    far trainer and sampler are apart is told of the first alone, since after it the weights have
    moved."""
    found: dict[str, float] = {}
    for name in dict.fromkeys(name for each in measured for name in each):
        values = [each[name] for each in measured if name in each]
        if name in ("batches", "packed_tokens", "row_tokens"):
            found[name] = sum(values)
        elif not name.startswith("mismatch"):
            found[name] = sum(values) / len(values)
        elif name in measured[0]:
            found[name] = measured[0][name]
    return found
