"""Collect the data for the pages of a training run and of an evaluation.

The page of a training run shows every metric over the steps and the saved rollouts. The page of an
evaluation shows scores with intervals and all attempts.

metrics.jsonl            {"names": {"reward": [[step, …], [value, …]], …}, "stages": […],
                          "clock": {…}, "verdict": […], "alarms": […], …}
    since a version      {"since": 40, "version": 41, "names": {"reward": [39, [40], [0.5]]}, …}:
                          the new points of each curve, from an index on, and what else changed
checkpoints/             "config": {"rl.optim.lr": "0.001", …}, from the latest one
rollouts/step-N.jsonl    the rollouts of one step, best first, and metrics for each depth

evaluate/evaluation_report.py computes the scores. This needs resampling, so scores are cached until
the record grows.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import secrets
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError, StoreError
from ramify.evaluate.evaluation_report import (
    RIGHT,
    EvaluationReport,
    difference,
    flipped_items,
    report,
)
from ramify.evaluate.matrix_report import failure_reason
from ramify.evaluate.run_evaluation import AttemptOutcome, EvaluationResult, read_evaluation
from ramify.evaluate.statistics import MeanEstimate, pass_at_k, score_with_interval
from ramify.store.journal import FileStoredRun, decode_line
from ramify.store.reviews import HumanRunReview, inter_rater_agreements, read_reviews_for_listing
from ramify.train.metrics import FILE, Diagnosis, StepMetrics, metrics_by_depth
from ramify.types.event import RunStarted
from ramify.types.trajectory import SCHEMA_VERSION, Trajectory, answer_text, cut
from ramify.viewer.run_catalog import RunCatalog
from ramify.viewer.run_overview import means_by_call
from ramify.viewer.training_verdict import alarms, last_stage_facts, num_averaged_steps

FINAL = ("first", "last", "best")
"""Stages of the evaluations before training (``first``), and of the last and the best checkpoint
after it. They are shown separately from the curves.
"""
MAX_ITEM_STEPS = 50
"""Maximum number of saved steps that are searched for an item, beginning with the latest."""
_STEP = re.compile(r"step-(\d+)\.jsonl")
_decoder = msgspec.json.Decoder(StepMetrics)
_trajectory = msgspec.json.Decoder(Trajectory)


class TrainingCurves:
    """The metrics that a training run has recorded so far.

    Call ``refresh`` to update them from the run's file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / FILE
        self.offset = 0
        self._inode = 0
        self._options: dict[str, str] = {}
        self._config_path: Path | None = None
        """Checkpoint from which ``_options`` were read."""
        self._unreadable = ""
        """Why the file cannot be read now. Empty if it can."""
        self._clear()

    def _clear(self) -> None:
        self.offset = 0
        self._num_lines = 0
        # A version of another server, or from before the file was replaced, is none of these.
        self._first_version = self.version = secrets.randbits(50)
        """Version before the first line of the file. ``version`` grows by one with each line."""
        self._looked_at = self.version
        """Version at which ``_others`` was last checked for changes."""
        self._others: dict[str, tuple[int, Any]] = {}
        """Everything the page shows in addition to the curves, by name: the version at which it
        last changed, and its value.
        """
        self.names: dict[str, tuple[list[int], list[float]]] = {}
        self._written: dict[str, list[int]] = {}
        """For each metric, by name, the version at which each of its points was read."""
        self.stages: list[tuple[str, int]] = []
        """Stages, each with its first step."""
        self.final: list[dict[str, Any]] = []
        """Evaluations before and after training, as {stage, step, values}."""
        self.at_s = 0.0
        self.step = 0
        self.problems: list[str] = []
        self.diagnoses: list[tuple[int, Diagnosis]] = []
        """Faults that the automatic diagnosis found, with their steps."""
        self.clock: dict[str, list[float]] = {"steps": [], "seconds": [], "tokens": []}
        """For each training step, its number, and the total training time in seconds and number of
        tokens at its end. The three lists have equal length.
        """
        self._ticked: list[int] = []
        """For each point of ``clock``, the version at which it was read."""

    def size_changed(self) -> bool:
        """Return True if the metrics file has changed since it was last read.

        This costs only one system call.
        """
        try:
            stat = self.path.stat()
        except OSError:
            return False
        return stat.st_size != self.offset or stat.st_ino != self._inode

    def num_unread_bytes(self) -> int:
        """Return the number of unread bytes in the metrics file."""
        try:
            return self.path.stat().st_size - self.offset
        except OSError:
            return 0

    def refresh(self) -> bool:
        """Read the lines that were added to the metrics file.

        Returns True if anything changed. A file that was truncated or replaced, for example by a
        resumed run, is read again from the start.
        """
        before = self._unreadable
        try:
            with self.path.open("rb") as file:
                stat = os.fstat(
                    file.fileno()
                )  # of this very file: its name may be another's by now
                if stat.st_ino != self._inode or stat.st_size < self.offset:
                    self._clear()
                    self._inode = stat.st_ino
                file.seek(self.offset)
                data = file.read()
            self._unreadable = ""
        except OSError as error:
            self._unreadable = f"cannot read {self.path}: {error.strerror}"
            return self._unreadable != before
        complete = data[: data.rfind(b"\n") + 1]
        self.offset += len(complete)
        for line in complete.split(b"\n"):
            if line.strip():
                self._add(line)
        return bool(complete) or self._unreadable != before

    def _add(self, line: bytes) -> None:
        self.version += 1
        self._num_lines += 1
        try:
            measured = _decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if len(self.problems) < 10:
                self.problems.append(
                    f"{self.path}, line {self._num_lines} is damaged and was skipped: {error}"
                )
            return
        self.step = measured.step
        self.at_s = measured.at_s
        if measured.stage in FINAL:
            self.final.append(
                {"stage": measured.stage, "step": measured.step, "values": measured.values}
            )
            if measured.stage != "first":
                return
        elif not self.stages or self.stages[-1][0] != measured.stage:
            self.stages.append((measured.stage, measured.step))
        self.diagnoses += [(measured.step, each) for each in measured.diagnoses]
        self._update_clock(measured)
        for name, value in measured.values.items():
            steps, values = self.names.setdefault(name, ([], []))
            written = self._written.setdefault(name, [])
            if steps and steps[-1] == measured.step:
                values[-1] = value
                written[-1] = self.version
            else:
                steps.append(measured.step)
                values.append(value)
                written.append(self.version)

    def _update_clock(self, measured: StepMetrics) -> None:
        clock = self.clock
        if clock["steps"] and clock["steps"][-1] == measured.step:
            return  # the evaluation after a step
        values = measured.values
        num = values.get("sampled_tokens", 0.0) + values.get("given_tokens", 0.0)
        before = clock["tokens"][-1] if clock["tokens"] else 0.0
        self._ticked.append(self.version)
        clock["steps"].append(measured.step)
        clock["seconds"].append(measured.at_s)
        clock["tokens"].append(before + (num or values.get("row_tokens", 0.0)))

    def data(self) -> dict[str, Any]:
        """Return all data that the page of the training run shows."""
        self._note_other_changes()
        others = {name: value for name, (_, value) in self._others.items()}
        return {"version": self.version, "names": self.names, "clock": self.clock, **others}

    def changes(self, since: int) -> dict[str, Any]:
        """Return the changes to the data since version ``since``.

        If that version is unknown, return all data.
        """
        if not self._first_version <= since <= self.version:
            return self.data()
        self._note_other_changes()
        names = {}
        for name, (steps, values) in self.names.items():
            first = bisect_right(self._written[name], since)
            if first < len(steps):
                names[name] = (first, steps[first:], values[first:])
        first = bisect_right(self._ticked, since)
        return {
            "since": since,
            "version": self.version,
            "names": names,
            "clock": {"first": first, **{name: all[first:] for name, all in self.clock.items()}},
            **{name: value for name, (at, value) in self._others.items() if at > since},
        }

    def _note_other_changes(self) -> None:
        """Detect changes in the data other than the curves, and record the version in which each
        occurred.

        Other files in the folder can change while the metrics get no new line; such a change is
        assigned to the next version.
        """
        at = max(self.version, self._looked_at + 1)
        for name, value in self._beside_curves().items():
            if name not in self._others or self._others[name][1] != value:
                self._others[name] = (at, value)
        self._looked_at = self.version

    def _beside_curves(self) -> dict[str, Any]:
        found = alarms(self.diagnoses, self.names)
        start = self.stages[-1][1] if self.stages else 0
        num_steps = sum(step >= start for step in self.clock["steps"])
        return {
            "name": self.folder.name,
            "folder": str(self.folder),
            "step": self.step,
            "at_s": self.at_s,
            "stages": list(self.stages),
            "final": list(self.final),
            "kept": sorted(rollout_files(self.folder)),
            "verdict": last_stage_facts(self.names, self.stages, found),
            "num_compared": num_averaged_steps(num_steps),
            "alarms": found,
            "config": self._config(),
            "problems": [*filter(None, [self._unreadable]), *self.problems],
        }

    def _config(self) -> dict[str, str]:
        """Return the latest checkpoint's options as JSON strings, keyed by dotted name.

        Empty if no checkpoint can be read.
        """
        path = max((self.folder / "checkpoints").glob("step-*/state.json"), default=None)
        if path != self._config_path:
            self._options, self._config_path = {}, path
            with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
                if path is not None:
                    state = msgspec.json.decode(path.read_bytes(), type=_StoredConfig)
                    self._options = dict(_flatten_options(state.config))
        return self._options


class _StoredConfig(msgspec.Struct):
    """The configuration in a checkpoint's state.

    Secrets were removed before it was stored.
    """

    config: dict[str, Any] = {}


def _flatten_options(options: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, value in options.items():
        if isinstance(value, dict) and value:
            yield from _flatten_options(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", msgspec.json.encode(value).decode()


def rollout_files(folder: Path) -> dict[int, Path]:
    """Return the files of saved rollouts, by training step."""
    files = {}
    for path in (folder / "rollouts").glob("step-*.jsonl"):
        if match := _STEP.fullmatch(path.name):
            files[int(match[1])] = path
    return files


def saved_rollouts(folder: Path, step: int, key: str) -> dict[str, Any]:
    """Return the saved rollouts of a training step, best first.

    ``key`` is the address of their file. Raises StoreError if no rollouts of that step were saved.
    """
    path = rollout_files(folder).get(step)
    if path is None:
        raise StoreError(
            f"{folder} has no saved rollouts of step {step}: schedule.save_rollouts_every sets how "
            "often they are saved"
        )
    problems: list[str] = []
    trajectories, rows = [], []
    for number, tree in _rollouts(path, problems):
        trajectories.append(tree)
        rows.append(_sample_data(tree, f"{key}:{number}"))
    # Rollouts without a reward, such as failed ones, come last.
    rows.sort(key=lambda row: math.inf if row["reward"] is None else -row["reward"])
    return {
        "step": step,
        "path": str(path),
        "rows": rows,
        "problems": problems,
        "depths": metrics_by_depth(trajectories, {}),
    }


def _rollouts(path: Path, problems: list[str], item: str = "") -> Iterator[tuple[int, Trajectory]]:
    """Yield the line number and the content of each saved rollout in a file.

    If ``item`` is given, only its rollouts are yielded. Unreadable lines are reported in
    ``problems``.
    """
    mark = msgspec.json.encode(item) if item else b""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if mark not in line:
                continue
            try:
                tree = _trajectory.decode(line)
            except (msgspec.DecodeError, UnicodeDecodeError, ValueError, RecursionError) as error:
                problems.append(f"{path}, line {number} is damaged and was skipped: {error}")
                continue
            if tree.schema_version > SCHEMA_VERSION:
                problems.append(
                    f"{path}, line {number} was written by a newer Ramify and was skipped"
                )
            elif not item or tree.task == item:
                yield number, tree


def rollouts_of_item(
    folder: Path, item: str, key_of: Callable[[Path], str | None]
) -> dict[str, Any]:
    """Return one task item's rollouts from the last ``MAX_ITEM_STEPS`` saved steps, grouped by
    step.

    ``key_of`` returns the address of a file. Raises StoreError if there are none.
    """
    steps: list[dict[str, Any]] = []
    problems: list[str] = []
    for step, path in sorted(rollout_files(folder).items())[-MAX_ITEM_STEPS:]:
        key = key_of(path) or ""
        rows = [_sample_data(tree, f"{key}:{at}") for at, tree in _rollouts(path, problems, item)]
        if rows:
            steps.append(
                {"step": step, "rows": sorted(rows, key=lambda row: (len(row["id"]), row["id"]))}
            )
    if not steps:
        raise StoreError(f"{folder} has no saved rollout of item {item!r}")
    return {"item": item, "steps": steps, "problems": problems[:MAX_PROBLEMS]}


def _advantage(tree: Trajectory) -> float | None:
    """Return the mean advantage over the turns of a rollout's root call.

    Returns None if training recorded no advantages.
    """
    means = means_by_call(tree.metadata.get("advantages"))
    return means.get(tree.root.id) if tree.calls else None


def _sample_data(tree: Trajectory, key: str) -> dict[str, Any]:
    return {
        "key": key,
        "id": tree.id,
        "task": tree.task,
        "question": cut(tree.question),
        "answer": cut(answer_text(tree.answer)),
        "stop": tree.stop,
        "reward": next(iter(tree.rewards.values()), None),
        "rewards": tree.rewards,
        "advantage": _advantage(tree),
        "num_calls": len(tree.calls),
        "depth": tree.depth,
        "tokens": tree.usage.total_tokens,
        "error": cut(tree.errors[0]) if tree.errors else "",
    }


MAX_ATTEMPTS = 20_000
"""Maximum number of attempts sent to a page."""
MAX_PROBLEMS = 10


class EvaluationReportCache:
    """The evaluation records of a ``RunCatalog``, whose reports are cached.

    Safe for use by several threads.
    """

    def __init__(self, library: RunCatalog) -> None:
        self._library = library
        self._known: dict[Path, tuple[tuple[int, int], EvaluationReport | None]] = {}
        self._questions: dict[Path, tuple[str, str]] = {}
        """For each run, by its journal, the question and the expected answer, which never
        change.
        """
        self._lock = threading.Lock()

    def page_data(self, key: str, other: str = "") -> dict[str, Any]:
        """Return the data shown on the page of the evaluation ``key``.

        If ``other`` is given, it includes a comparison with that evaluation. Raises StoreError for
        a record that does not exist or cannot be read.
        """
        path = self._library.find_evaluation_path(key)
        problems: list[str] = []
        evaluation = read_evaluation(path, problems)
        # Reversed, so that the first outcome of each item decides its position.
        first_index = {
            outcome.item: index for index, outcome in reversed(list(enumerate(evaluation.outcomes)))
        }
        order = sorted(
            evaluation.outcomes,
            key=lambda outcome: (first_index[outcome.item], outcome.attempt),
        )
        attempts = [self._attempt(outcome, path) for outcome in order[:MAX_ATTEMPTS]]
        compared, flipped = self._compare_with(evaluation, other) if other else (None, {})
        return {
            "key": key,
            "name": path.stem,
            "path": str(path),
            "plan": msgspec.structs.asdict(evaluation.plan),
            "num_made": len(evaluation.outcomes),
            "passes": _pass_at_k(evaluation),
            "report": self._cached_report(path, evaluation),
            "attempts": attempts,
            "compared": compared,
            "flips": flipped,
            "agreements": inter_rater_agreements(attempt["verdicts"] for attempt in attempts),
            "problems": problems[:MAX_PROBLEMS],
        }

    def _cached_report(self, path: Path, evaluation: EvaluationResult) -> EvaluationReport | None:
        """Return the report of an evaluation, from the cache if possible.

        Returns None before the first attempt.
        """
        stat = path.stat()
        stamp = (stat.st_size, stat.st_mtime_ns)
        with self._lock:
            known, figures = self._known.get(path, (None, None))
            if known != stamp:
                figures = report(evaluation) if evaluation.outcomes else None
                self._known[path] = (stamp, figures)
        return figures

    def _compare_with(
        self, evaluation: EvaluationResult, other: str
    ) -> tuple[dict[str, Any], dict[str, str]]:
        """Return the score difference from the evaluation ``other``, and the task items whose
        scores changed.

        An item changed if it improved or got worse.
        """
        path = self._library.find_evaluation_path(other)
        try:
            theirs = read_evaluation(path)
            figure, items = difference(evaluation, theirs)
        except ConfigError as error:
            return {"name": path.stem, "problem": str(error)}, {}
        about = {"name": path.stem, "difference": figure, "items": items}
        return about, flipped_items(evaluation, theirs)

    def _attempt(self, outcome: AttemptOutcome, record: Path) -> dict[str, Any]:
        reward = outcome.reward
        run = record.parent.parent / "runs" / f"{outcome.run}.jsonl" if outcome.run else None
        question, expected = self._question_and_expected(run) if run is not None else ("", "")
        review = read_reviews_for_listing(run)[outcome.run] if run is not None else HumanRunReview()
        return {
            "question": question,
            "expected": expected,
            "verdict": review.combined_verdict,
            "verdicts": review.verdicts,
            "labels": review.labels,
            "note": review.note,
            "item": outcome.item,
            "attempt": outcome.attempt,
            "kind": outcome.kind,
            "reward": reward,
            "right": reward is not None and reward >= RIGHT,
            "rewards": outcome.rewards,
            "answer": cut(outcome.answer or ""),
            "stop": outcome.stop,
            "error": cut(outcome.error),
            "reason": failure_reason(outcome),
            "turns": outcome.turns,
            "calls": outcome.calls,
            "tokens": outcome.usage.total_tokens,
            "cost": outcome.cost,
            "seconds": outcome.seconds,
            "run": self._library.key_of_evaluation_run(record, outcome.run),
        }

    def _question_and_expected(self, run: Path) -> tuple[str, str]:
        """Return the question and expected answer of a run, read from its journal ``run``.

        Both are empty if the journal cannot be read.
        """
        if run not in self._questions:
            journal = FileStoredRun(run)
            try:
                event = decode_line(next(journal.lines(), b""), journal, 1)
            except (RamifyError, OSError):
                return "", ""
            if not isinstance(event, RunStarted):
                return "", ""
            self._questions[run] = (cut(event.question), cut(str(event.config.get("gold") or "")))
        return self._questions[run]


def _pass_at_k(evaluation: EvaluationResult) -> list[tuple[int, MeanEstimate]]:
    """Return an evaluation's pass@k for each k up to the planned number of attempts.

    Only items with at least k scores count.
    """
    items: dict[str, list[bool]] = {}
    for outcome in evaluation.outcomes:
        if outcome.reward is not None:
            items.setdefault(outcome.item, []).append(outcome.reward >= RIGHT)
    passes = []
    for k in range(1, evaluation.plan.attempts + 1):
        scores = [
            pass_at_k(len(rights), sum(rights), k) for rights in items.values() if len(rights) >= k
        ]
        if scores:
            passes.append((k, score_with_interval(scores)))
    return passes
