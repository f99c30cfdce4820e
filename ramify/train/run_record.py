"""Keep the record of a training run: the files in its folder, and the state needed to resume it.

    OUT/metrics.jsonl     one line per step and evaluation      OUT/checkpoints/   see checkpoint.py
    OUT/groups.jsonl      the outcome of each group             OUT/rollouts/      whole rollouts
    OUT/lineage.jsonl     see lineage.py                        OUT/reference/     the first policy
    OUT/policy.json       which checkpoint OUT/policy is

This module also keeps the counts and the clocks of a run, and decides which lines are dropped when
a run goes back to a checkpoint. A run starts at the first training item that no
demonstration used, and each group takes the next item. A group's number therefore occurs exactly
once, either in ``groups.jsonl`` or in the checkpoint's list of groups that had begun
(``CheckpointedProgress.pending``). ``read_group_records`` checks this. ``trainer.py`` decides when
something is written, and ``metrics.py`` defines the lines.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.errors import ConfigError
from ramify.log_handlers import RUN_LOG
from ramify.logging import ComponentLogger
from ramify.step_time_accounting import StepTimeAccount
from ramify.train.checkpoint import FOLDER, CheckpointedProgress, CheckpointStore, Write, read_state
from ramify.train.config import Schedule
from ramify.train.data.sft_data import append_trajectories
from ramify.train.lineage import LINEAGE, STAGES, LineageEntry, changes
from ramify.train.metrics import (
    FILE,
    GROUPS,
    METRICS,
    Diagnosis,
    MetricsFile,
    RolloutCpuMeter,
    RolloutGroupRecord,
    StepMetrics,
    descendant_cpu_s,
    read_metrics,
    step_time_metrics,
)
from ramify.train.recipe import with_defaults
from ramify.train.training_guard import TrainingGuardState
from ramify.types.trajectory import Group

_log = ComponentLogger("train")
_ROLLOUTS = "rollouts"


class RewardConfidenceInterval(NamedTuple):
    """A mean reward and the bounds of its 95 % confidence interval."""

    reward: float
    low: float
    high: float


class FinalPolicyInfo(msgspec.Struct, frozen=True):
    """The checkpoint that was chosen as the run's final policy, and its scores.

    The policy itself is in ``OUT/policy`` and this description in ``OUT/policy.json``.
    """

    checkpoint: str
    step: int
    last_step: int
    """Number of training steps of the whole run."""
    is_best: bool
    """True if this checkpoint scored best on the validation split."""
    scores: dict[str, RewardConfidenceInterval]
    """Score of each split, by the split's name. The validation score decided which checkpoint is
    best."""

    def __str__(self) -> str:
        kinds = [*(["best"] if self.is_best else []), *(["last"] if self._is_last else [])]
        scores = "; ".join(
            f"{split} {each.reward:.3f} ({each.low:.3f} to {each.high:.3f})"
            for split, each in self.scores.items()
        )
        which = " and ".join(kinds) or "chosen"
        return f"policy/ holds the {which} checkpoint, step {self.step} of {self.last_step}" + (
            f": {scores}" if scores else ""
        )

    @property
    def _is_last(self) -> bool:
        return self.step == self.last_step


class TrainingRunRecorder:
    """Records a training run in its folder: metrics, rollouts, checkpoints and configuration
    changes."""

    def __init__(
        self,
        out: Path,
        schedule: Schedule | None = None,
        *,
        config: Mapping[str, Any] | None = None,
        first_item: int = 0,
        listener: Callable[[StepMetrics], None] | None = None,
        measures: Sequence[Callable[[], Mapping[str, float]]] = (),
        meter: RolloutCpuMeter | None = None,
    ) -> None:
        """Create the recorder of the run in the folder ``out``.

        A new run starts at training item number ``first_item``. Each function in ``measures``
        returns further metrics for every step, such as the engines' own. Pass ``meter``, which
        measures CPU time, only if rollouts run entirely on this machine.
        """
        self.out = out
        self.schedule = schedule or Schedule()
        self.checkpoints = CheckpointStore(out, self.schedule.keep_last, self.schedule.keep_best)
        self.state = CheckpointedProgress(step=0, next_item=first_item, config=dict(config or {}))
        self._listener = listener
        self._measures = measures
        self._meter = meter
        self.account = StepTimeAccount(None if meter is None else descendant_cpu_s)
        """Accounts for the time of a step by activity. Sessions are counted only if a CPU meter was
        given, since only then are the child processes known to be sessions."""
        self._metrics: MetricsFile | None = None
        self._since = self._saved_at = time.monotonic()
        self._cpu_since = 0.0

    # --- the run's beginning

    def begin_fresh(self) -> None:
        """Begin a new run: create its folder, and delete any records that are already there."""
        self.out.mkdir(parents=True, exist_ok=True)
        self._delete_later_steps(-1)
        self.state.first_item = self.state.next_item

    def resume_from_checkpoint(self, checkpoint: Path) -> None:
        """Continue the run from ``checkpoint`` and delete all records of later steps.

        The checkpoint may belong to another run, in which case this run becomes a fork of it.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        config = self.state.config
        self.state = read_state(checkpoint)
        step = self.state.step
        is_fork = checkpoint.resolve().parent != self.checkpoints.folder.resolve()
        if is_fork:
            self._copy_lines(checkpoint)
        later = self.checkpoints.abandon_after(step)
        if later:
            _log.warning(
                "steps_abandoned",
                f"the run goes back to step {step}: {len(later)} checkpoints of later steps are "
                f"moved to {later[0].parent}",
                shown=True,
                step=step,
                checkpoints=len(later),
            )
        self._delete_later_steps(step)
        changed = changes(with_defaults(self.state.config), config)
        self.state.config = config
        if changed or is_fork:
            self._note_lineage(
                LineageEntry(
                    step=step, checkpoint=str(checkpoint), is_fork=is_fork, changes=changed
                )
            )

    def roll_back_to_checkpoint(self, checkpoint: Path, factor: float) -> None:
        """Return to an earlier checkpoint of this stage, and multiply the current learning rates by
        ``factor``."""
        present = self.state
        self.resume_from_checkpoint(checkpoint)
        self.state.lr_scale = present.lr_scale * factor
        self.state.guard.rollbacks = present.guard.rollbacks + 1

    def _note_lineage(self, entry: LineageEntry) -> None:
        """Record in the lineage file that the run was forked or that its configuration changed."""
        LINEAGE.append(self.out, [entry])
        _log.info("run_changed", f"the run continues {entry}", shown=True, step=entry.step)
        state = self.state
        stages = [name for name in STAGES if state.config.get(name) is not None]
        if entry.makes_scores_incomparable:
            state.score, state.scored_since = None, entry.step
        if state.stopped and entry.reopens_stage(stages[state.stage]):
            state.stopped, state.guard.since_best = "", 0

    def _copy_lines(self, checkpoint: Path) -> None:
        """Copy the metrics, group outcomes and lineage recorded by the run that wrote
        ``checkpoint``.

        The two runs share their history up to the checkpoint. Later lines are removed afterwards.
        """
        for lines in (METRICS, GROUPS, LINEAGE):
            source = checkpoint.resolve().parents[1] / lines.name
            if source.is_file():
                shutil.copyfile(source, self.out / lines.name)

    def open_metrics(self) -> None:
        """Open the metrics file, and resume the wall-clock and CPU clocks from the checkpoint's
        values."""
        self._metrics = MetricsFile(self.out, self._listener)
        self._saved_at = time.monotonic()
        self._since = time.monotonic() - self.state.seconds
        if self.state.cpu_s:
            self._cpu_since = time.process_time() - self.state.cpu_s

    def _delete_later_steps(self, step: int) -> None:
        """Delete the records of all steps after ``step``, because the run will repeat them."""
        for lines in (METRICS, GROUPS, LINEAGE):
            lines.drop_after_step(self.out, step)
        for path in (self.out / _ROLLOUTS).glob("step-[0-9]*.jsonl"):
            if int(path.stem.removeprefix("step-")) > step:
                path.unlink()

    def copy_reference(self, checkpoint: Path, name: str) -> None:
        """Copy the reference policy ``name`` from the run that wrote ``checkpoint``.

        Does nothing if the checkpoint belongs to this run, which already has the reference policy.
        """
        target = self.out / name
        if checkpoint.resolve().parent == self.checkpoints.folder.resolve():
            return
        shutil.rmtree(target, ignore_errors=True)
        source = next(
            (each / name for each in checkpoint.resolve().parents if (each / FOLDER).is_dir()),
            None,
        )
        if source is not None and source.is_dir():
            shutil.copytree(source, target)

    # --- each step

    def begin_next_stage(self) -> None:
        state = self.state
        state.stage += 1
        state.stage_step = 0
        state.stopped = ""
        state.memory = {}
        state.memories = {}
        state.guard = TrainingGuardState()
        state.lr_scale = 1.0

    def count_step(self, memory: dict[str, float], others: dict[str, dict[str, float]]) -> None:
        """Advance the step counters after a training step.

        ``memory`` is the state that the stage's algorithm keeps between steps. ``others`` holds the
        same for each additional policy, by name.
        """
        self.state.step += 1
        self.state.stage_step += 1
        self.state.score = None
        self.state.memory = memory
        self.state.memories = others

    def add_derived_metrics(self, values: dict[str, float]) -> dict[str, float]:
        """Add derived metrics to a step's ``values``, such as throughput and the engines' own
        metrics.

        They also include the share of time spent on each signal. Returns ``values``.
        """
        seconds = values.get("work_s", 0.0) + values["learn_s"]
        # Time spent on signals, in parallel to rollouts.
        for name in [name for name in values if name.endswith("/s")]:
            values[f"signal_share/{name.removesuffix('/s')}"] = (
                values[name] / seconds if seconds else 0.0
            )
        # Stages without rollouts count the tokens of their training rows instead.
        tokens = values.get("sampled_tokens", 0.0) + values.get("given_tokens", 0.0) or values.get(
            "row_tokens", 0.0
        )
        values["tokens_per_s"] = tokens / seconds if seconds else 0.0
        for measure in self._measures:
            values |= measure()
        return values

    def write_metrics(
        self,
        stage: str,
        values: Mapping[str, float],
        diagnoses: Sequence[Diagnosis] = (),
        *,
        is_step: bool = False,
    ) -> None:
        """Write one line of metrics, including any diagnosed faults.

        If ``is_step`` is True, the line also shows how the step's time was divided.
        """
        assert self._metrics is not None
        self._update_times()
        if is_step:
            values = {**values, **step_time_metrics(self.account.take_times())}
        self._metrics.write(
            self.state.step,
            stage,
            self.state.seconds,
            {**values, "cpu_s": self.state.cpu_s},
            diagnoses,
        )

    def write_rollouts(
        self, groups: Sequence[Group], records: Sequence[RolloutGroupRecord]
    ) -> None:
        """Write the outcomes of a step's rollout groups.

        Also write the full rollouts if the schedule asks for them at this step.
        """
        step = self.state.step
        GROUPS.append(self.out, [msgspec.structs.replace(record, step=step) for record in records])
        if groups and self.saves_rollouts(self.state.stage_step):
            path = self.out / _ROLLOUTS / f"step-{step:06d}.jsonl"
            path.parent.mkdir(exist_ok=True)
            path.unlink(missing_ok=True)
            append_trajectories(
                path, (trajectory for group in groups for trajectory in group.trajectories)
            )

    def saves_rollouts(self, stage_step: int) -> bool:
        """Return True if full rollouts are saved at this step of the stage."""
        every = self.schedule.save_rollouts_every
        return every is not None and stage_step % every == 0

    def restart_cpu_meter(self) -> None:
        """Restart the meter of the rollouts' CPU time.

        Does nothing if CPU time is not measured.
        """
        if self._meter is not None:
            self._meter.restart()

    def rollout_cpu_metrics(self, samples: bool) -> dict[str, float]:
        """Return the CPU time of a step's rollouts as metrics.

        The result is empty if the step has no rollouts (``samples`` is False) or CPU time is not
        measured.
        """
        return self._meter.measure_and_restart() if self._meter is not None and samples else {}

    def note_final_checkpoint(
        self, checkpoint: Path, final: Mapping[str, float], *, is_best: bool
    ) -> None:
        """Record which checkpoint became the final policy, and its scores.

        ``final`` holds the metrics of the final evaluation. ``is_best`` is True if the checkpoint
        scored best on the validation split.
        """
        state = read_state(checkpoint)
        validation: Mapping[str, float] = {}
        for row in read_metrics(self.out):
            is_same = row.step == state.step and row.stage not in ("last", "best")
            if is_same and "validation/reward" in row.values:
                validation = row.values
        scores = {
            split.removesuffix("/reward"): RewardConfidenceInterval(
                values[split], values[f"{split}_low"], values[f"{split}_high"]
            )
            for values in (validation, final)
            for split in values
            if split.endswith("/reward") and f"{split}_low" in values
        }
        kept = FinalPolicyInfo(checkpoint.name, state.step, self.state.step, is_best, scores)
        path = self.out / "policy.json"
        path.write_bytes(msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
        _log.info("policy_kept", str(kept), shown=True, step=state.step)
        self._note_score_errors()

    def _note_score_errors(self) -> None:
        """Log how many rollouts of the whole run could not be scored, if any."""
        rows = [row.values for row in read_metrics(self.out) if "score_errors" in row.values]
        failed = sum(row["score_errors"] for row in rows)
        if failed:
            num = sum(row.get("num_rollouts", 0.0) for row in rows)
            text = (
                f"{failed:,.0f} of {num:,.0f} rollouts of this run could not be scored, so nothing "
                f"was learned from them: score_errors in {FILE} counts them by step, and "
                f"{RUN_LOG} has the errors"
            )
            _log.warning("score_errors", text, shown=True, failed=failed, rollouts=num)

    def save_checkpoint(self, parts: Mapping[str, Write]) -> None:
        """Write a checkpoint of the run's state and of ``parts``, such as weights.

        Each part is a function that writes it.
        """
        self._update_times()
        self.checkpoints.save(self.state, parts)
        self._saved_at = time.monotonic()

    @property
    def is_time_to_save(self) -> bool:
        """True if ``schedule.checkpoint_every_s`` seconds have passed since the last checkpoint."""
        every_s = self.schedule.checkpoint_every_s
        return every_s is not None and time.monotonic() - self._saved_at >= every_s

    def _update_times(self) -> None:
        self.state.seconds = time.monotonic() - self._since
        self.state.cpu_s = time.process_time() - self._cpu_since


class RolloutGroupOutcomes(msgspec.Struct, frozen=True):
    """A summary of the outcomes of all rollout groups in a run.

    It shows whether any group was lost or repeated.
    """

    outcomes: dict[str, int]
    """Number of groups with each outcome."""
    pending: list[int]
    """Numbers of groups that had begun but had not been trained on at the last checkpoint."""
    duplicated: list[int]
    """Numbers that occur twice: the group was trained on twice, or begun again after training."""
    missing: list[int]
    """Numbers that do not occur: the group was skipped without a record."""

    @property
    def has_each_group_once(self) -> bool:
        """True if no group was lost or repeated."""
        return not self.duplicated and not self.missing


def read_group_records(folder: Path) -> RolloutGroupOutcomes:
    """Summarise the outcomes of all rollout groups up to the last checkpoint of the run in
    ``folder``.

    Later groups are not counted, because a resumed run repeats them. The summary is empty before
    the first checkpoint. Raises ConfigError if the folder does not hold a run.

    Example:
        train.read_group_records(Path("runs/tiny")).has_each_group_once
    """
    checkpoint = CheckpointStore(folder).latest()
    if checkpoint is None:
        if not any((folder / name).exists() for name in (GROUPS.name, METRICS.name, FOLDER)):
            raise ConfigError(
                f"{folder} does not hold a run: give the folder passed to `ramify train` as --out"
            )
        return RolloutGroupOutcomes({}, [], [], [])
    state = read_state(checkpoint)
    records = [record for record in GROUPS.read(folder) if record.step <= state.step]
    times = Counter([*(record.number for record in records), *state.pending])
    return RolloutGroupOutcomes(
        dict(Counter(record.outcome for record in records)),
        list(state.pending),
        sorted(number for number, num in times.items() if num > 1),
        [number for number in range(state.first_item, state.next_item) if not times[number]],
    )
