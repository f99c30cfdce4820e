"""The command ``ramify eval``: evaluate a model on a task, show progress, and print the results.

    ramify eval ledger --model openai:gpt-5-mini --items 50 --n 4
    ramify eval my_task.py:task chars=100000 --model …         your own task and one of its options
    ramify eval questions.jsonl question=q gold=a reward=f1 --model …
    ramify eval niah,oolong --lengths 8k,64k --models A,B --modes direct,free    a matrix

The evaluation itself is in ``ramify/evaluate/``; ``eval_matrix.py`` runs a matrix, which compares
several models, lengths or modes.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections import Counter
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli.ask import (
    KINDS,
    NO_MODEL,
    OF_SOURCES,
    SETTINGS,
    check_models_ready,
    check_prices_known,
    connect_mcp_tools,
    make_message_writer,
    make_rlm,
    note_offline_models,
    open_folder_store,
    read_instructions,
    read_scaffold,
    sandbox_spec,
)
from ramify.cli.eval_matrix import EvalMatrixCommand, EvalMatrixOptions
from ramify.cli.evaluation_progress import EvaluationProgressReporter, write_evaluation_log
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings, named_models
from ramify.cli.stop_signals import enforce_run_deadlines
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import (
    StderrMessageWriter,
    json_line,
    pluralize,
    print_error,
    write_stderr,
)
from ramify.progress import track_progress
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.evaluate.evaluation_matrix import EvalMatrixPlan
    from ramify.evaluate.evaluation_report import EvaluationReport
    from ramify.evaluate.run_evaluation import (
        EvaluationFileWriter,
        EvaluationPlan,
        EvaluationResult,
    )
    from ramify.tasks.base import Task
    from ramify.train.metrics import StepMetrics
    from ramify.train.trackers.base import RunTrackers

OUTPUT_SETTINGS = ("store", "json", "quiet", "verbose", "progress")
"""Settings that do not affect the result of an attempt."""
OF_AN_EVALUATION = (
    CliOptionSpec("split", str, "split of the task (default: test)"),
    CliOptionSpec(
        "items",
        int,
        "number of items from the start of the split, per family in a matrix (default: 100)",
    ),
    CliOptionSpec("n", int, "attempts per item (default: 1)"),
    CliOptionSpec("k", int, "k of pass@k and majority@k (default: n)"),
    CliOptionSpec("seed", int, "sampling seed (default: 0)"),
    CliOptionSpec("concurrency", int, "concurrent attempts (default: 16)"),
    CliOptionSpec(
        "validate",
        bool,
        "first check that right answers score 1 and wrong ones do not (default: yes)",
    ),
    CliOptionSpec(
        "resume",
        str,
        "continue an interrupted evaluation with its original settings; last is the latest",
        "ID",
    ),
    CliOptionSpec(
        "against",
        str,
        "also report the difference from another evaluation of the same items",
        "ID",
    ),
    CliOptionSpec(
        "track",
        list,
        "also send results to tensorboard, wandb, mlflow, trackio or module:Class; repeat for more",
    ),
)
OF_A_MATRIX = (
    CliOptionSpec("lengths", str, "context lengths in tokens, such as 8k,64k,512k", "LENGTHS"),
    CliOptionSpec("models", str, "models to compare, separated by commas", "MODELS"),
    CliOptionSpec(
        "modes",
        str,
        "ways to answer, separated by commas: free (a session; the default), plan (a ready plan), "
        "direct (one plain call; the default for policies that were trained so), auto (one of "
        "them, chosen for each question)",
        "MODES",
    ),
    CliOptionSpec("mode", str, "one way to answer (see --modes)", "MODE"),
    CliOptionSpec(
        "with",
        list,
        "another system to compare on the same items, its model use metered: rlms, droste, dspy, "
        "or a command '… {question} {context_file}'; repeat for more",
        "SYSTEM",
    ),
    CliOptionSpec("html", str, "also write the matrix to a self-contained HTML file", "FILE"),
    CliOptionSpec(
        "dry_run",
        bool,
        "print the number of attempts and the most that they may cost; ask nothing",
        has_no=False,
    ),
    CliOptionSpec("yes", bool, "start a matrix without asking for confirmation", has_no=False),
    CliOptionSpec(
        "placement",
        str,
        "where attempts are made: local, or ray (joins RAY_ADDRESS if set)",
        "local|ray",
    ),
    CliOptionSpec(
        "workers",
        int,
        "workers with --placement ray (default: one for each CPU of the cluster)",
    ),
)
_NOT_HERE = ("cite", "cache", *OF_SOURCES)
_DIRECT = CliOptionSpec(
    "direct",
    bool,
    "answer with one plain call if the input is small enough (default: no, always use a session, "
    "unless the policy was trained with plain calls)",
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
    lengths: str | None,
    models: str | None,
    modes: str | None,
    mode: str | None,
    html: str | None,
    dry_run: bool | None,
    yes: bool | None,
    placement: str | None,
    workers: int | None,
    **given: Any,
) -> int:
    if placement not in (None, "local", "ray"):
        raise UsageError(f"--placement {placement} is unknown: give local or ray")
    if workers is not None and (placement != "ray" or workers < 1):
        raise UsageError("--workers needs --placement ray, and must be at least 1")
    if mode is not None and modes is not None:
        raise UsageError("--mode and --modes set the same thing: give only one")
    axes = {"lengths": lengths, "models": models, "modes": modes or mode}
    systems: list[str] | None = given.pop("with")
    plan_options = {
        option.name: given.pop(option.name) for option in OF_AN_EVALUATION if option.name in given
    }
    concurrency = plan_options.pop("concurrency")
    concurrency = 16 if concurrency is None else concurrency
    if resume is not None:
        _refuse_settings(words, {**plan_options, **axes, "with": systems, **given})
    settings = {
        name: value for name, value in fill_missing_settings(given, KINDS).items() if name in _KINDS
    }
    notes = make_message_writer(settings, KINDS)
    if resume is None and not words:
        raise UsageError("no task: ramify eval TASK [OPTION=VALUE…]")
    if resume is None and not (models or settings.get("model")):
        write_stderr(NO_MODEL.replace("ramify ask", "ramify eval"))
        return ExitCode.USAGE
    if concurrency < 1:
        raise UsageError(f"--concurrency {concurrency}: give at least 1")
    if resume is not None and settings.get("store") is False:
        raise UsageError("--resume needs the store: remove --no-store")
    stored = _stored_matrix(settings, resume) if resume is not None else None
    is_matrix = (
        stored is not None
        or any(value is not None for value in (*axes.values(), systems))
        or len(_split_names(settings.get("scaffold"))) > 1
        or (resume is None and "," in words[0])
        or (resume is None and placement == "ray")
    )
    _refuse_others(is_matrix, {"--against": against, "--track": track}, html, dry_run, yes)
    with (
        span_export_context(notes),
        ProgressDisplay(notes, choose_display_form(settings.get("progress"), notes)) as screen,
    ):
        if not is_matrix:
            if resume is None:
                check_models_ready(settings)
                note_offline_models(settings, notes)
            return _Command(settings, screen, k, against, concurrency, track or []).run(
                words, resume, plan_options
            )
        options = EvalMatrixOptions(
            k, concurrency, html, bool(dry_run), bool(yes), placement == "ray", workers
        )
        if stored is not None:
            return EvalMatrixCommand(settings, screen, options).resume(stored)
        return _evaluate_matrix(words, axes, systems or [], settings, screen, options, plan_options)


def _stored_matrix(settings: dict[str, Any], id: str) -> EvalMatrixPlan | None:
    """Load the stored plan of an evaluation matrix (several models, lengths or modes) by its id.

    Returns None if the id belongs to a single evaluation.
    """
    from ramify.evaluate.evaluation_matrix import EvaluationMatrixStore

    store = open_folder_store(settings, "ramify eval")
    return None if store is None else EvaluationMatrixStore(store.root).find(id)


def _refuse_others(
    is_matrix: bool,
    of_one: dict[str, object],
    html: str | None,
    dry_run: bool | None,
    yes: bool | None,
) -> None:
    """Raise UsageError for options that this kind of evaluation does not support.

    Some options apply only to a single evaluation, others only to a matrix, which compares several
    settings.
    """
    of_matrix = {"--html": html, "--dry-run": dry_run, "--yes": yes}
    refused = [name for name, value in (of_one if is_matrix else of_matrix).items() if value]
    if refused and is_matrix:
        raise UsageError(
            "the rows of a matrix are compared with each other: remove " + " and ".join(refused)
        )
    if refused:
        raise UsageError(
            f"{' and '.join(refused)}: only for a matrix: add --lengths, --models or --modes, or "
            "give several suites or scaffolds"
        )


def _evaluate_matrix(
    words: list[str],
    axes: dict[str, str | None],
    systems: list[str],
    settings: dict[str, Any],
    screen: ProgressDisplay,
    options: EvalMatrixOptions,
    plan_options: dict[str, Any],
) -> int:
    """Evaluate every combination of the given suites, lengths, models, modes and scaffolds."""
    from ramify.evaluate.evaluation_matrix import EvalMatrixAxes, parse_length

    suites, *rest = words
    models = _split_names(axes["models"] or settings["model"])
    scaffolds = _split_names(settings.get("scaffold"))
    for model in models:  # a wrong one is an error before any money is spent
        for scaffold in scaffolds:
            read_scaffold(scaffold, model)
    first = {**settings, "model": models[0]}
    wanted = EvalMatrixAxes(
        suites=tuple(_split_names(suites)),
        lengths=tuple(map(parse_length, _split_names(axes["lengths"]))),
        models=tuple(models),
        modes=tuple(_split_names(axes["modes"]))
        or ("direct" if all(map(_was_trained_direct, models)) else "free",),
        systems=tuple(systems),
        scaffolds=tuple(scaffolds) if len(scaffolds) > 1 else (),
        split=plan_options["split"],
        base=_plan_of("", rest, first, plan_options),
    )
    validates = plan_options.get("validate") is not False
    return EvalMatrixCommand(settings, screen, options).run_new(wanted, validates)


def _split_names(given: str | None) -> list[str]:
    """Split a comma-separated list: ``a, b`` becomes ["a", "b"]."""
    return [name for part in (given or "").split(",") if (name := part.strip())]


class _Command:
    """Runs a single evaluation, not a matrix of evaluations, for ``ramify eval``."""

    def __init__(
        self,
        settings: dict[str, Any],
        screen: ProgressDisplay,
        k: int | None,
        against: str | None,
        concurrency: int,
        track: list[str],
    ) -> None:
        self._settings = settings
        self._screen = screen
        self._notes = screen.notes
        self._k = k
        self._against = against
        self._concurrency = concurrency
        self._store = open_folder_store(settings, "ramify eval")
        self._trackers: RunTrackers | None = None
        if track:
            from ramify.train.trackers.base import RunTrackers

            self._trackers = RunTrackers(track, {})

    def run(self, words: list[str], resume: str | None, plan_options: dict[str, Any]) -> ExitCode:
        from ramify.evaluate.evaluation_report import check_k, check_same_items
        from ramify.evaluate.run_evaluation import EvaluationStore

        records = EvaluationStore(self._store.root) if self._store is not None else None
        other = self._load_baseline(records)
        record = records.reopen(resume) if records is not None and resume is not None else None
        plan = (
            record.plan
            if record is not None
            else _plan_of(words[0], words[1:], self._settings, plan_options)
        )
        if self._k is not None:
            check_k(self._k, plan.attempts)
        task = open_task(plan)
        if record is None:
            plan = plan_with_split(plan, task, plan_options["split"])
        if other is not None:
            check_same_items(plan, other.plan)
        if resume is None and plan_options["validate"] is not False:
            validate_task_scoring(task, plan, self._notes)
        if record is None and records is not None:
            record = records.create(plan)
        try:
            what = f"{plan.model} on {plan.task}"
            path = None if record is None else record.path
            with (
                write_evaluation_log(path, what),
                self._open_trackers(plan, record, resume is not None),
            ):
                return self._evaluate_plan(task, plan, record, other)
        finally:
            if record is not None:
                record.close()

    def _open_trackers(
        self, plan: EvaluationPlan, record: EvaluationFileWriter | None, is_resumed: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Open the experiment trackers before the evaluation spends any money.

        Their errors then appear early.
        """
        if self._trackers is None:
            return contextlib.nullcontext()
        id = record.id if record is not None else time.strftime("%Y%m%d-%H%M%S")
        name, config = f"eval {plan.task}/{plan.split} {plan.model}", msgspec.to_builtins(plan)
        return self._trackers.open_all(
            name, Path("runs/evaluations") / id, config, 0 if is_resumed else None
        )

    def _load_baseline(self, records: Any) -> EvaluationResult | None:
        """Load the stored evaluation that the option ``--against`` names.

        This happens before any money is spent. Returns None if the option is not given.
        """
        if self._against is None:
            return None
        if records is None:
            raise UsageError("--against reads a stored evaluation: remove --no-store")
        evaluation: EvaluationResult = records.load(self._against)
        return evaluation

    def _evaluate_plan(
        self,
        task: Task,
        plan: EvaluationPlan,
        record: EvaluationFileWriter | None,
        other: EvaluationResult | None,
    ) -> ExitCode:
        settings = {**plan.settings, "model": plan.model}
        check_prices_known(settings, settings.get("max_cost"))
        # The plan's copy of the servers lacks the values of environment variables.
        servers = self._settings.get("mcp") or settings.get("mcp")
        with connect_mcp_tools({"mcp": servers}) as tools:
            rlm = make_rlm(settings, sandbox_spec(settings), self._store, tools)
            return self._run_attempts(rlm, task, plan, record, other)

    def _run_attempts(
        self,
        rlm: RLM,
        task: Task,
        plan: EvaluationPlan,
        record: EvaluationFileWriter | None,
        other: EvaluationResult | None,
    ) -> ExitCode:
        from ramify.clients.base import Sampling
        from ramify.evaluate.run_evaluation import evaluate

        num = min(plan.items, len(task.splits.get(plan.split, ()))) * plan.attempts
        done = len(record.outcomes) if record is not None else 0
        with track_progress(f"evaluating {plan.split}", num, "attempts", first=done) as work:
            earlier = record.outcomes if record is not None else ()
            progress = EvaluationProgressReporter(self._screen, work, num, earlier)
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
        evaluating: Coroutine[Any, Any, EvaluationResult],
        progress: EvaluationProgressReporter,
        record: EvaluationFileWriter | None,
        other: EvaluationResult | None,
    ) -> ExitCode:
        command = f"ramify eval --resume {record.id}" if record is not None else ""
        try:
            with enforce_run_deadlines(command, self._screen.close_live_view):
                evaluation = asyncio.run(evaluating)
        except KeyboardInterrupt:
            hint = f"; continue with: {command}" if command else ""
            self._notes.say(f"ramify: stopped after {pluralize(progress.done, 'attempt')}{hint}")
            return ExitCode.STOPPED
        self._screen.close_live_view()
        return self._print_report(evaluation, record, other)

    def _print_report(
        self,
        evaluation: EvaluationResult,
        record: EvaluationFileWriter | None,
        other: EvaluationResult | None,
    ) -> ExitCode:
        from ramify.evaluate.evaluation_report import difference, flipped_items, report, table

        figures = report(evaluation, k=self._k)
        is_judged = figures.failed < figures.attempts
        against = difference(evaluation, other) if other is not None and is_judged else None
        id = record.id if record is not None else None
        if self._trackers is not None:
            self._trackers(_to_metrics(figures))
        if self._settings.get("json"):
            comparison = (
                None
                if against is None
                else {"evaluation": self._against, "items": against[1], "average": against[0]}
            )
            data = msgspec.to_builtins(figures)
            print(json_line({"evaluation": id, **data, "against": comparison}))
        else:
            print(table(figures))
            if against is not None:
                figure, num = against
                print(
                    f"average minus that of {self._against}: {figure.value:+.3f} "
                    f"[{figure.low:+.3f} {figure.high:+.3f}] over {pluralize(num, 'item')}"
                )
                flipped = (
                    Counter(flipped_items(evaluation, other).values()) if other is not None else {}
                )
                if flipped:
                    print(f"{flipped['better']:,} of them got better, {flipped['worse']:,} worse")
            if id is not None:
                self._notes.say(f"evaluation {id}")
        num = sum(outcome.stop is Stop.SUSPENDED for outcome in evaluation.outcomes)
        if num and id is not None:
            self._notes.say(
                f"ramify: {pluralize(num, 'attempt')} suspended and left out; continue with: "
                f"ramify eval --resume {id}"
            )
        if is_judged:
            return ExitCode.ANSWERED
        print_error(
            f"no attempt was scored: all {figures.attempts:,} failed, the first with: "
            f"{figures.first_error}"
        )
        return ExitCode.SUSPENDED if num and id is not None else ExitCode.ERROR


def _to_metrics(figures: EvaluationReport) -> StepMetrics:
    """Convert an evaluation report to metrics for experiment trackers.

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


def _plan_of(
    task: str, options: list[str], settings: dict[str, Any], plan_options: dict[str, Any]
) -> EvaluationPlan:
    from ramify.evaluate.run_evaluation import EvaluationPlan

    fields = {
        "split": plan_options["split"],
        "items": plan_options["items"],
        "attempts": plan_options["n"],
        "seed": plan_options["seed"],
    }
    kept = {
        name: value for name, value in settings.items() if name not in (*OUTPUT_SETTINGS, "model")
    }
    if kept.get("instructions"):
        kept["instructions"] = read_instructions(kept["instructions"])
    if kept.get("examples"):
        kept["examples"] = str(Path(kept["examples"]).expanduser().absolute())
    # Written out because plans of older versions lack it and used direct calls.
    kept.setdefault("direct", _was_trained_direct(settings["model"]))
    if kept.get("mcp"):
        from ramify.engine.mcp_tools import redacted_server

        kept["mcp"] = [redacted_server(server) for server in kept["mcp"]]
    return EvaluationPlan(
        model=settings["model"],
        task=task,
        options=dict(map(parse_task_option, options)),
        settings=kept,
        **{name: value for name, value in fields.items() if value is not None},
    )


def _was_trained_direct(model: str) -> bool:
    """Return True if a policy was trained to answer in a single call, without a Python session.

    ``model`` is the name of a model, or an alias of the configuration file.
    """
    from ramify.engine.prompt_scaffold import trained_policy_settings

    return trained_policy_settings(named_models().get(model, model)).direct


def open_task(plan: EvaluationPlan) -> Task:
    """Load the task that an evaluation plan names.

    Modules in the current folder can be used as well, as with ``python -m``.
    """
    from ramify.tasks.base import task_of

    sys.path[:0] = [""] * ("" not in sys.path)
    return task_of(plan.task, **plan.options)


def plan_with_split(plan: EvaluationPlan, task: Task, given: str | None) -> EvaluationPlan:
    """Return a copy of an evaluation plan with the split that ``--split`` names.

    By default, the task chooses its split.
    """
    from ramify.evaluate.run_evaluation import choose_split

    return msgspec.structs.replace(plan, split=choose_split(task, given))


def validate_task_scoring(task: Task, plan: EvaluationPlan, notes: StderrMessageWriter) -> None:
    """Check on a few task items that the task tells correct answers from wrong ones.

    Correct answers must score 1, and wrong ones must not.
    """
    from ramify.tasks.validation import validate

    skipped = validate(task, [plan.split], num=min(4, plan.items))
    if skipped:
        notes.say(f"ramify: {skipped}")


def parse_task_option(word: str) -> tuple[str, Any]:
    """Parse an option of a task: ``chars=1000`` becomes ("chars", 1000).

    A value that is not valid JSON is kept as text. Raises UsageError for any other form.
    """
    name, equals, value = word.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"'{word}' is not a task option: write NAME=VALUE")
    try:
        return name, msgspec.json.decode(value)
    except msgspec.DecodeError:
        return name, value


def _refuse_settings(words: list[str], given: dict[str, Any]) -> None:
    """Raise UsageError if ``--resume`` is combined with a setting that a resumed evaluation cannot
    change.

    Settings about output and concurrency are allowed.
    """
    known = (*_SETTINGS, *OF_AN_EVALUATION, *OF_A_MATRIX)
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


COMMAND = SubcommandSpec(
    "eval",
    """\
Evaluate a model on TASK: a suite (`ramify plugins task` lists them), your own task (file.py:name or
module:name), the rows of a .jsonl file, a .parquet file or a data set (hf:NAME), or a taskset of
verifiers (verifiers:ID), played by that library. OPTION=VALUE sets an option of the task.

Each attempt is a run like those of ask, with the same settings. Results go to stdout. A stored
evaluation can be continued with --resume and compared with --against.

With --lengths, --models, --modes, --with, or several tasks or scaffolds, separated by commas, it is
a matrix: each is combined with each other, and each combination has a row.""",
    evaluate,
    "TASK OPTION=VALUE…",
    max_words=None,
    options=(*OF_AN_EVALUATION, *OF_A_MATRIX, *_SETTINGS),
)
