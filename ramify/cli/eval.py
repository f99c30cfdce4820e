"""``ramify eval``: a model on a task, and what it came to. ``evaluate/`` does it; this reads, shows
and goes on.

ramify eval ledger --model openai:gpt-5-mini --items 50 --n 4 ramify eval my_task.py:task
chars=100000 --model …         a task of one's own, with an option that it takes ramify eval
questions.jsonl question=q gold=a reward=f1 --model …
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import KINDS, NO_MODEL, SETTINGS, make_rlm, mcp_tools, open_store, sandbox_spec
from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec, OptionSpec, UsageError
from ramify.cli.progress_screen import ProgressScreen, form_of
from ramify.cli.settings import fill, unknown_variables
from ramify.cli.stderr_notes import StderrNotes, error_line, write
from ramify.cli.telemetry import exporting
from ramify.cli.terminal_text import dollars
from ramify.progress import ProgressTask, report_progress

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.evaluate.record import EvaluationRecord
    from ramify.evaluate.report import EvaluationReport
    from ramify.evaluate.run import AttemptOutcome, Evaluation, EvaluationPlan
    from ramify.tasks.base import Task
    from ramify.train.metrics import StepMetrics
    from ramify.train.trackers.base import RunTrackers
    from ramify.types.trajectory import Trajectory

_OUTPUT = ("store", "json", "quiet", "verbose", "progress")
"""Settings that do not decide what an attempt comes to."""
OF_AN_EVALUATION = (
    OptionSpec("split", str, "of the task (default: test)"),
    OptionSpec("items", int, "how many of the split, its first (default: 100)"),
    OptionSpec("n", int, "attempts at each item (default: 1)"),
    OptionSpec("k", int, "of pass@k and majority@k (default: n)"),
    OptionSpec("seed", int, "of sampling (default: 0)"),
    OptionSpec("concurrency", int, "attempts at once (default: 16)"),
    OptionSpec(
        "validate",
        bool,
        "prove first that right answers score 1 and wrong ones do not (default: yes)",
    ),
    OptionSpec(
        "resume",
        str,
        "go on with an evaluation that was cut off, as it began; last is the latest",
        "ID",
    ),
    OptionSpec(
        "against", str, "also the difference from another evaluation, over the same items", "ID"
    ),
    OptionSpec(
        "track",
        list,
        "also send the figures to tensorboard, wandb, mlflow, trackio or module:Class; repeat it",
    ),
)
_PLANNED = ("split", "items", "n", "seed", "validate")
_NOT_HERE = ("cite", "cache")
_DIRECT = OptionSpec(
    "direct",
    bool,
    "answer by one plain call what fits easily (default: no, each attempt has a session)",
)
_SETTINGS = tuple(
    _DIRECT if option.name == "direct" else option
    for option in SETTINGS
    if option.name not in _NOT_HERE
)
_KINDS = {name: kind for name, kind in KINDS.items() if name not in _NOT_HERE}


def evaluate(
    words: list[str],
    k: int | None,
    resume: str | None,
    against: str | None,
    track: list[str] | None,
    **given: Any,
) -> int:
    about = {
        option.name: given.pop(option.name) for option in OF_AN_EVALUATION if option.name in given
    }
    concurrency = about.pop("concurrency")
    concurrency = 16 if concurrency is None else concurrency
    if resume is not None:
        _refuse_more(words, {**about, **given})
    settings = {name: value for name, value in fill(given, KINDS).items() if name in _KINDS}
    notes = StderrNotes(bool(settings.get("quiet")), bool(settings.get("verbose")))
    notes.take_warnings()
    for line in unknown_variables(KINDS):
        notes.say(f"ramify: warning: {line}")
    if resume is None and not words:
        raise UsageError("say which task: ramify eval TASK [OPTION=VALUE…]")
    if resume is None and not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", "ramify eval"))
        return ExitCode.USAGE
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency}: give at least 1")
    if resume is not None and settings.get("store") is False:
        raise UsageError("--resume goes on with what is stored: leave out --no-store")
    with (
        exporting(notes),
        ProgressScreen(notes, form_of(settings.get("progress"), notes)) as screen,
    ):
        return _Command(settings, screen, k, against, concurrency, track or []).run(
            words, resume, about
        )


class _Command:
    """One evaluation from the command line."""

    def __init__(
        self,
        settings: dict[str, Any],
        screen: ProgressScreen,
        k: int | None,
        against: str | None,
        concurrency: int,
        track: list[str],
    ) -> None:
        self._settings, self._screen, self._notes, self._k, self._against = (
            settings,
            screen,
            screen.notes,
            k,
            against,
        )
        self._concurrency = concurrency
        self._store = open_store(settings)
        self._trackers: RunTrackers | None = None
        if track:
            from ramify.train.trackers.base import RunTrackers

            self._trackers = RunTrackers(track, {}, self._notes.say)

    def run(self, words: list[str], resume: str | None, about: dict[str, Any]) -> ExitCode:
        from ramify.evaluate.record import EvaluationRecords
        from ramify.evaluate.report import check_k, check_same_items

        records = EvaluationRecords(self._store.root) if self._store is not None else None
        other = self._other(records)
        record = records.reopen(resume) if records is not None and resume is not None else None
        plan = record.plan if record is not None else self._plan(words, about)
        if self._k is not None:
            check_k(self._k, plan.attempts)
        if other is not None:
            check_same_items(plan, other.plan)
        task = _task(
            plan, bool(about.get("validate", True) is not False and resume is None), self._notes
        )
        if record is None and records is not None:
            record = records.create(plan)
        try:
            with self._tracked(plan, record, resume is not None):
                return self._evaluated(task, plan, record, other)
        finally:
            if record is not None:
                record.close()

    def _tracked(
        self, plan: EvaluationPlan, record: EvaluationRecord | None, is_resumed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """The trackers, open from the beginning, so that what is wrong with one is known before
        anything is spent."""
        if self._trackers is None:
            return contextlib.nullcontext()
        id = record.id if record is not None else time.strftime("%Y%m%d-%H%M%S")
        name, config = f"eval {plan.task}/{plan.split} {plan.model}", msgspec.to_builtins(plan)
        return self._trackers.opened(
            name, Path("runs/evaluations") / id, config, 0 if is_resumed else None
        )

    def _other(self, records: Any) -> Evaluation | None:
        """The evaluation to compare with, read before anything is spent."""
        if self._against is None:
            return None
        if records is None:
            raise UsageError("--against compares with what is stored: leave out --no-store")
        found: Evaluation = records.load(self._against)
        return found

    def _plan(self, words: list[str], about: dict[str, Any]) -> EvaluationPlan:
        from ramify.evaluate.run import EvaluationPlan

        fields = {
            "split": about["split"],
            "items": about["items"],
            "attempts": about["n"],
            "seed": about["seed"],
        }
        settings = {
            name: value for name, value in self._settings.items() if name not in (*_OUTPUT, "model")
        }
        settings.setdefault(
            "direct", False
        )  # a plan without it is older, and was begun with direct calls
        if settings.get("mcp"):
            from ramify.engine.mcp_tools import recorded

            settings["mcp"] = [recorded(server) for server in settings["mcp"]]
        return EvaluationPlan(
            model=self._settings["model"],
            task=words[0],
            options=dict(map(_option, words[1:])),
            settings=settings,
            **{name: value for name, value in fields.items() if value is not None},
        )

    def _evaluated(
        self,
        task: Task,
        plan: EvaluationPlan,
        record: EvaluationRecord | None,
        other: Evaluation | None,
    ) -> ExitCode:
        settings = {**plan.settings, "model": plan.model}
        given = self._settings.get("mcp") or settings.get(
            "mcp"
        )  # in the plan without the values of variables
        with mcp_tools({"mcp": given}) as tools:
            rlm = make_rlm(settings, sandbox_spec(settings), self._store, tools)
            return self._attempted(rlm, task, plan, record, other)

    def _attempted(
        self,
        rlm: RLM,
        task: Task,
        plan: EvaluationPlan,
        record: EvaluationRecord | None,
        other: Evaluation | None,
    ) -> ExitCode:
        from ramify.clients.base import Sampling
        from ramify.evaluate.run import evaluate

        num = min(plan.items, len(task.splits.get(plan.split, ()))) * plan.attempts
        done = len(record.outcomes) if record is not None else 0
        with report_progress(f"evaluating {plan.split}", num, "attempts", first=done) as work:
            progress = _Progress(self._screen, work, num, record)
            evaluating = evaluate(
                rlm,
                task,
                plan,
                sampling=Sampling(temperature=plan.settings.get("temperature")),
                record=record,
                concurrency=self._concurrency,
                on_outcome=progress,
                direct=plan.settings.get("direct") is not False,
            )
            return self._run(evaluating, progress, record, other)

    def _run(
        self,
        evaluating: Coroutine[Any, Any, Evaluation],
        progress: _Progress,
        record: EvaluationRecord | None,
        other: Evaluation | None,
    ) -> ExitCode:
        try:
            found = asyncio.run(evaluating)
        except KeyboardInterrupt:
            again = (
                f"; go on with it: ramify eval --resume {record.id}" if record is not None else ""
            )
            self._notes.say(f"ramify: stopped after {progress.done:,} attempts{again}")
            return ExitCode.STOPPED
        self._screen.clear()
        return self._shown(found, record, other)

    def _shown(
        self, found: Evaluation, record: EvaluationRecord | None, other: Evaluation | None
    ) -> ExitCode:
        from ramify.evaluate.report import difference, report, table

        figures = report(found, k=self._k)
        is_judged = figures.failed < figures.attempts
        against = difference(found, other) if other is not None and is_judged else None
        id = record.id if record is not None else None
        if self._trackers is not None:
            self._trackers(_measured(figures))
        if self._settings.get("json"):
            named = (
                None
                if against is None
                else {"evaluation": self._against, "items": against[1], "average": against[0]}
            )
            data = msgspec.to_builtins(figures)
            print(msgspec.json.encode({"evaluation": id, **data, "against": named}).decode())
        else:
            print(table(figures))
            if against is not None:
                figure, num = against
                print(
                    f"average less that of {self._against}: {figure.value:+.3f} [{figure.low:+.3f} "
                    f"{figure.high:+.3f}] "
                    f"over {num:,} items"
                )
            if id is not None:
                self._notes.say(f"evaluation {id}")
        if is_judged:
            return ExitCode.ANSWERED
        error_line(
            f"no attempt could be judged: all {figures.attempts:,} failed, the first with: "
            f"{figures.first_error}"
        )
        return ExitCode.ERROR


def _measured(figures: EvaluationReport) -> StepMetrics:
    """The figures as trackers take them: ``{"all/average": 0.81, "all/pass@4": 0.9, "cost": 0.12,
    …}``"""
    from ramify.train.metrics import StepMetrics

    values: dict[str, float | None] = {
        "attempts": figures.attempts,
        "failed": figures.failed,
        "cost": figures.spent.cost,
        "input_tokens": figures.spent.input_tokens,
        "output_tokens": figures.spent.output_tokens,
        "seconds_mean": figures.spent.seconds_mean,
        **{f"rewards/{name}": value for name, value in figures.rewards.items()},
        **{f"metrics/{name}": value for name, value in figures.metrics.items()},
    }
    for row in figures.rows:
        shown = (
            ("average", row.average),
            (f"pass@{figures.k}", row.passes),
            (f"majority@{figures.k}", row.majority),
        )
        values |= {
            f"{row.kind}/{name}": None if figure is None else figure.value for name, figure in shown
        }
    return StepMetrics(
        0, "eval", 0.0, {name: float(value) for name, value in values.items() if value is not None}
    )


class _Progress:
    """Says how far it is: on the bar, or in lines each tenth; and each attempt to those who asked
    for more."""

    def __init__(
        self, screen: ProgressScreen, work: ProgressTask, num: int, record: EvaluationRecord | None
    ) -> None:
        before = record.outcomes if record is not None else []
        self.done = len(before)
        self._screen, self._notes, self._work, self._num = screen, screen.notes, work, num
        self._right, self._failed = sum(each.reward or 0.0 for each in before), 0
        """Sum of rewards, and how many attempts have none."""
        self._cost = sum(each.cost or 0.0 for each in before)

    def __call__(self, outcome: AttemptOutcome, trajectory: Trajectory) -> None:
        self.done += 1
        self._right += outcome.reward or 0.0
        self._failed += outcome.reward is None
        self._cost += outcome.cost or 0.0
        worth = "failed: " + outcome.error if outcome.reward is None else f"{outcome.reward:g}"
        if self._notes.verbose:
            self._notes.say(
                f"{outcome.item} attempt {outcome.attempt}: {worth} {outcome.run}".rstrip()
            )
        self._screen.event(
            "attempt",
            item=outcome.item,
            attempt=outcome.attempt,
            reward=outcome.reward,
            error=outcome.error,
            run=outcome.run,
        )
        self._work.at(self.done, self._note())
        is_tenth = (
            10 * self.done // self._num > 10 * (self.done - 1) // self._num and self._num >= 10
        )
        if self._screen.form == "lines" and is_tenth:
            self._notes.say(f"{self.done:,} of {self._num:,} attempts, {self._note()}")

    def _note(self) -> str:
        failed = f" · {self._failed:,} failed" if self._failed else ""
        cost = f" · {dollars(self._cost)}" if self._cost else ""
        scored = self.done - self._failed
        return (f"average {self._right / scored:.3f}" if scored else "no average") + failed + cost


def _task(plan: EvaluationPlan, validates: bool, notes: StderrNotes) -> Task:
    from ramify.tasks.base import items_of, task_of
    from ramify.tasks.validate import validate

    sys.path[:0] = [""] * ("" not in sys.path)  # a module in this folder, as with python -m
    task = task_of(plan.task, **plan.options)
    items_of(task, plan.split)
    if validates:
        skipped = validate(task, [plan.split], num=min(4, plan.items))
        if skipped:
            notes.say(f"ramify: {skipped}")
    return task


def _option(word: str) -> tuple[str, Any]:
    """``chars=1000`` -> ("chars", 1000): the value as JSON where it is some, otherwise as text."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"'{word}' is no option of a task: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _refuse_more(words: list[str], given: dict[str, Any]) -> None:
    """A resumed evaluation goes on as it began: only what concerns the output may be said again."""
    known = (*_SETTINGS, *OF_AN_EVALUATION)
    named = [
        option.long
        for option in known
        if given.get(option.name) is not None and option.name not in _OUTPUT
    ]
    named = [name for name in named if name != "--concurrency"]
    if words or named:
        raise UsageError(
            "--resume: it goes on as it began; leave out "
            f"{', '.join(['TASK'] * bool(words) + named)}"
        )


COMMAND = CommandSpec(
    "eval",
    """\
Evaluate a model on TASK: ledger, needle, programs, toolmath, one of your own (file.py:name or
module:name), or rows of a .jsonl or .parquet file or of hf:NAME. OPTION=VALUE goes to the task.
Attempts are runs like those of ask, with the same settings; figures go to stdout. A stored
evaluation can be gone on with (--resume) and compared (--against).""",
    evaluate,
    "TASK OPTION=VALUE…",
    max_words=None,
    options=(*OF_AN_EVALUATION, *_SETTINGS),
)
