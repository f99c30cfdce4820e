"""``ramify eval``: evaluate a model on a task, show progress, and print the results.

    ramify eval ledger --model openai:gpt-5-mini --items 50 --n 4
    ramify eval my_task.py:task chars=100000 --model …         your own task and one of its options
    ramify eval questions.jsonl question=q gold=a reward=f1 --model …

Not here: the evaluation itself (see ramify/evaluate/).
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import (
    KINDS,
    NO_MODEL,
    OF_SOURCES,
    SETTINGS,
    check_prices,
    make_rlm,
    mcp_tools,
    open_folder,
    open_notes,
    read_instructions,
    read_scaffold,
    sandbox_spec,
)
from ramify.cli.parser import CommandSpec, ExitCode, OptionSpec, UsageError
from ramify.cli.progress_screen import ProgressScreen, form_of
from ramify.cli.settings import fill
from ramify.cli.stop_signals import ends_if_blocked
from ramify.cli.telemetry import exporting
from ramify.cli.terminal_text import StderrNotes, dollars, error_line, json_line, many, write
from ramify.logging import RoomLogger, run_log
from ramify.progress import ProgressTask, report_progress
from ramify.types.trajectory import Stop, Trajectory

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.evaluate.evaluation_report import EvaluationReport
    from ramify.evaluate.run import AttemptOutcome, Evaluation, EvaluationPlan, EvaluationRecord
    from ramify.tasks.base import Task
    from ramify.train.metrics import StepMetrics
    from ramify.train.trackers.base import RunTrackers

_log = RoomLogger("evaluate")
OUTPUT_SETTINGS = ("store", "json", "quiet", "verbose", "progress")
"""Settings that do not affect the result of an attempt."""
OF_AN_EVALUATION = (
    OptionSpec("split", str, "split of the task (default: test)"),
    OptionSpec("items", int, "number of items, from the start of the split (default: 100)"),
    OptionSpec("n", int, "attempts per item (default: 1)"),
    OptionSpec("k", int, "k of pass@k and majority@k (default: n)"),
    OptionSpec("seed", int, "sampling seed (default: 0)"),
    OptionSpec("concurrency", int, "concurrent attempts (default: 16)"),
    OptionSpec(
        "validate",
        bool,
        "first check that right answers score 1 and wrong ones do not (default: yes)",
    ),
    OptionSpec(
        "resume",
        str,
        "continue an interrupted evaluation with its original settings; last is the latest",
        "ID",
    ),
    OptionSpec(
        "against",
        str,
        "also report the difference from another evaluation of the same items",
        "ID",
    ),
    OptionSpec(
        "track",
        list,
        "also send results to tensorboard, wandb, mlflow, trackio or module:Class; repeat for more",
    ),
)
_NOT_HERE = ("cite", "cache", *OF_SOURCES)
_DIRECT = OptionSpec(
    "direct",
    bool,
    "answer with one plain call if the input is small enough (default: no, always use a session)",
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
    plan_options = {
        option.name: given.pop(option.name) for option in OF_AN_EVALUATION if option.name in given
    }
    concurrency = plan_options.pop("concurrency")
    concurrency = 16 if concurrency is None else concurrency
    if resume is not None:
        _refuse_settings(words, {**plan_options, **given})
    settings = {name: value for name, value in fill(given, KINDS).items() if name in _KINDS}
    notes = open_notes(settings, KINDS)
    if resume is None and not words:
        raise UsageError("no task: ramify eval TASK [OPTION=VALUE…]")
    if resume is None and not settings.get("model"):
        write(NO_MODEL.replace("ramify ask", "ramify eval"))
        return ExitCode.USAGE
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency}: give at least 1")
    if resume is not None and settings.get("store") is False:
        raise UsageError("--resume needs the store: remove --no-store")
    with (
        exporting(notes),
        ProgressScreen(notes, form_of(settings.get("progress"), notes)) as screen,
    ):
        names = [name.strip() for name in (settings.get("scaffold") or "").split(",")]
        if len(names) > 1:
            if resume is not None or against is not None or track:
                raise UsageError(
                    "several scaffolds are compared with each other: remove --resume, --against "
                    "and --track"
                )
            return _compare(names, settings, screen, k, concurrency, words, plan_options)
        return _Command(settings, screen, k, against, concurrency, track or []).run(
            words, resume, plan_options
        )


def _compare(
    names: list[str],
    settings: dict[str, Any],
    screen: ProgressScreen,
    k: int | None,
    concurrency: int,
    words: list[str],
    plan_options: dict[str, Any],
) -> int:
    """Evaluate the same items with each scaffold, and compare each with the first."""
    for name in names:  # a wrong one is an error before any money is spent
        read_scaffold(name, settings["model"])
    if len({*names}) < len(names):
        raise UsageError(f"--scaffold {','.join(names)}: name each scaffold once")
    first: tuple[str, Evaluation] | None = None
    for name in names:
        one = {**settings, "scaffold": name}
        command = _Command(one, screen, k, None, concurrency, [], is_compared=True, baseline=first)
        code = command.run(words, None, plan_options)
        if code is not ExitCode.ANSWERED:
            return code
        plan_options = {**plan_options, "validate": False}  # the task was checked
        if first is None and command.evaluation is not None:
            first = name, command.evaluation
    return ExitCode.ANSWERED


@contextlib.contextmanager
def evaluation_log(record: EvaluationRecord | None) -> Iterator[None]:
    """Keep a log beside the results: ``ID.log``."""
    if record is None:
        yield
        return
    with run_log(record.path.with_suffix(".log"), record.id) as log:
        log.begin()
        _log.info("run_started", f"evaluating {record.plan.model} on {record.plan.task}")
        yield
        _log.info("run_ended", f"{len(record.outcomes)} attempts are recorded")


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
        *,
        is_compared: bool = False,
        baseline: tuple[str, Evaluation] | None = None,
    ) -> None:
        """``is_compared`` is True if several scaffolds are evaluated. ``baseline`` is then the name
        and the evaluation of the first."""
        self.evaluation: Evaluation | None = None
        """The finished evaluation."""
        self._is_compared = is_compared
        self._other = None if baseline is None else baseline[1]
        against = against if baseline is None else baseline[0]
        self._settings = settings
        self._screen = screen
        self._notes = screen.notes
        self._k = k
        self._against = against
        self._concurrency = concurrency
        self._store = open_folder(settings, "ramify eval")
        self._trackers: RunTrackers | None = None
        if track:
            from ramify.train.trackers.base import RunTrackers

            self._trackers = RunTrackers(track, {})

    def run(self, words: list[str], resume: str | None, plan_options: dict[str, Any]) -> ExitCode:
        from ramify.evaluate.evaluation_report import check_k, check_same_items
        from ramify.evaluate.run import EvaluationRecords

        records = EvaluationRecords(self._store.root) if self._store is not None else None
        other = self._baseline(records)
        record = records.reopen(resume) if records is not None and resume is not None else None
        plan = record.plan if record is not None else self._plan(words, plan_options)
        if self._k is not None:
            check_k(self._k, plan.attempts)
        if other is not None:
            check_same_items(plan, other.plan)
        task = task_for(
            plan,
            bool(plan_options.get("validate", True) is not False and resume is None),
            self._notes,
        )
        if record is None and records is not None:
            record = records.create(plan)
        try:
            with evaluation_log(record), self._tracked(plan, record, resume is not None):
                return self._evaluated(task, plan, record, other)
        finally:
            if record is not None:
                record.close()

    def _tracked(
        self, plan: EvaluationPlan, record: EvaluationRecord | None, is_resumed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Open the trackers at the start, so that their errors appear before any money is spent."""
        if self._trackers is None:
            return contextlib.nullcontext()
        id = record.id if record is not None else time.strftime("%Y%m%d-%H%M%S")
        name, config = f"eval {plan.task}/{plan.split} {plan.model}", msgspec.to_builtins(plan)
        return self._trackers.opened(
            name, Path("runs/evaluations") / id, config, 0 if is_resumed else None
        )

    def _baseline(self, records: Any) -> Evaluation | None:
        """Load the evaluation to compare with, before any money is spent."""
        if self._against is None or self._other is not None:
            return self._other
        if records is None:
            raise UsageError("--against reads a stored evaluation: remove --no-store")
        evaluation: Evaluation = records.load(self._against)
        return evaluation

    def _plan(self, words: list[str], plan_options: dict[str, Any]) -> EvaluationPlan:
        from ramify.evaluate.run import EvaluationPlan

        fields = {
            "split": plan_options["split"],
            "items": plan_options["items"],
            "attempts": plan_options["n"],
            "seed": plan_options["seed"],
        }
        settings = {
            name: value
            for name, value in self._settings.items()
            if name not in (*OUTPUT_SETTINGS, "model")
        }
        if settings.get("instructions"):
            settings["instructions"] = read_instructions(settings["instructions"])
        if settings.get("examples"):
            settings["examples"] = str(Path(settings["examples"]).expanduser().absolute())
        # Written out because plans of older versions lack it and used direct calls.
        settings.setdefault("direct", False)
        if settings.get("mcp"):
            from ramify.engine.mcp_tools import recorded

            settings["mcp"] = [recorded(server) for server in settings["mcp"]]
        return EvaluationPlan(
            model=self._settings["model"],
            task=words[0],
            options=dict(map(task_option, words[1:])),
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
        check_prices(settings, settings.get("max_cost"))
        # The plan's copy of the servers lacks the values of environment variables.
        servers = self._settings.get("mcp") or settings.get("mcp")
        with mcp_tools({"mcp": servers}) as tools:
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
            progress = EvaluationProgress(self._screen, work, num, record)
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
        progress: EvaluationProgress,
        record: EvaluationRecord | None,
        other: Evaluation | None,
    ) -> ExitCode:
        command = f"ramify eval --resume {record.id}" if record is not None else ""
        try:
            with ends_if_blocked(command, self._screen.clear):
                evaluation = asyncio.run(evaluating)
        except KeyboardInterrupt:
            hint = f"; continue with: {command}" if command else ""
            self._notes.say(f"ramify: stopped after {progress.done:,} attempts{hint}")
            return ExitCode.STOPPED
        self._screen.clear()
        self.evaluation = evaluation
        return self._shown(evaluation, record, other)

    def _shown(
        self, evaluation: Evaluation, record: EvaluationRecord | None, other: Evaluation | None
    ) -> ExitCode:
        from ramify.evaluate.evaluation_report import difference, flips, report, table

        figures = report(evaluation, k=self._k)
        is_judged = figures.failed < figures.attempts
        against = difference(evaluation, other) if other is not None and is_judged else None
        id = record.id if record is not None else None
        if self._trackers is not None:
            self._trackers(_measured(figures))
        if self._settings.get("json"):
            comparison = (
                None
                if against is None
                else {"evaluation": self._against, "items": against[1], "average": against[0]}
            )
            data = msgspec.to_builtins(figures)
            if self._is_compared:
                data["scaffold"] = self._settings["scaffold"]
            print(json_line({"evaluation": id, **data, "against": comparison}))
        else:
            if self._is_compared:
                print(f"scaffold {self._settings['scaffold']}")
            print(table(figures))
            if against is not None:
                figure, num = against
                print(
                    f"average minus that of {self._against}: {figure.value:+.3f} "
                    f"[{figure.low:+.3f} {figure.high:+.3f}] over {many(num, 'item')}"
                )
                flipped = Counter(flips(evaluation, other).values()) if other is not None else {}
                if flipped:
                    print(f"{flipped['better']:,} of them got better, {flipped['worse']:,} worse")
            if id is not None:
                self._notes.say(f"evaluation {id}")
        num = sum(outcome.stop is Stop.SUSPENDED for outcome in evaluation.outcomes)
        if num and id is not None:
            self._notes.say(
                f"ramify: {many(num, 'attempt')} suspended and left out; continue with: "
                f"ramify eval --resume {id}"
            )
        if is_judged:
            return ExitCode.ANSWERED
        error_line(
            f"no attempt was scored: all {figures.attempts:,} failed, the first with: "
            f"{figures.first_error}"
        )
        return ExitCode.SUSPENDED if num and id is not None else ExitCode.ERROR


def _measured(figures: EvaluationReport) -> StepMetrics:
    """Convert a report to metrics for trackers.

    For example ``{"all/average": 0.81, "all/pass@4": 0.9, "cost": 0.12, …}``.
    """
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


class EvaluationProgress:
    """Progress reporter: updates the bar, or prints a line at each tenth of the attempts.

    With ``--verbose`` it also prints a line for each attempt.
    """

    def __init__(
        self, screen: ProgressScreen, work: ProgressTask, num: int, record: EvaluationRecord | None
    ) -> None:
        earlier = record.outcomes if record is not None else []
        self.done = len(earlier)
        self._screen = screen
        self._notes = screen.notes
        self._work = work
        self._num = num
        self._reward_sum = sum(outcome.reward or 0.0 for outcome in earlier)
        self._failed = 0
        """Attempts without a reward."""
        self._cost = sum(outcome.cost or 0.0 for outcome in earlier)

    def __call__(self, outcome: AttemptOutcome, trajectory: Trajectory) -> None:
        self.done += 1
        self._reward_sum += outcome.reward or 0.0
        self._failed += outcome.reward is None
        self._cost += outcome.cost or 0.0
        score = "failed: " + outcome.error if outcome.reward is None else f"{outcome.reward:g}"
        if self._notes.verbose:
            self._notes.say(
                f"{outcome.item} attempt {outcome.attempt}: {score} {outcome.run}".rstrip()
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
        average = f"average {self._reward_sum / scored:.3f}" if scored else "no average"
        return average + failed + cost


def task_for(plan: EvaluationPlan, validates: bool, notes: StderrNotes) -> Task:
    """Return the task of ``plan``, after the checks of ``ramify eval``."""
    from ramify.tasks.base import items_of, task_of
    from ramify.tasks.validation import validate

    # Find modules in the current folder, as with python -m.
    sys.path[:0] = [""] * ("" not in sys.path)
    task = task_of(plan.task, **plan.options)
    items_of(task, plan.split)
    if validates:
        skipped = validate(task, [plan.split], num=min(4, plan.items))
        if skipped:
            notes.say(f"ramify: {skipped}")
    return task


def task_option(word: str) -> tuple[str, Any]:
    """``chars=1000`` -> ("chars", 1000). A value that is not valid JSON is kept as text."""
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"'{word}' is not a task option: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _refuse_settings(words: list[str], given: dict[str, Any]) -> None:
    """Reject settings next to ``--resume``, except those about output and concurrency."""
    known = (*_SETTINGS, *OF_AN_EVALUATION)
    refused = [
        option.long
        for option in known
        if given.get(option.name) is not None and option.name not in OUTPUT_SETTINGS
    ]
    refused = [name for name in refused if name != "--concurrency"]
    if words or refused:
        raise UsageError(
            "--resume continues the evaluation with its original settings: remove "
            f"{', '.join(['TASK'] * bool(words) + refused)}"
        )


COMMAND = CommandSpec(
    "eval",
    """\
Evaluate a model on TASK: ledger, needle, programs, toolmath, your own task (file.py:name or
module:name), the rows of a .jsonl file, a .parquet file or a data set (hf:NAME), or a taskset of
verifiers (verifiers:ID), played by that library. OPTION=VALUE
sets an option of the task.

Each attempt is a run like those of ask, with the same settings. Results go to stdout. A stored
evaluation can be continued with --resume and compared with --against.""",
    evaluate,
    "TASK OPTION=VALUE…",
    max_words=None,
    options=(*OF_AN_EVALUATION, *_SETTINGS),
)
