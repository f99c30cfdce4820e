"""Run an evaluation matrix: all combinations of several task suites, text lengths, models and
answer modes.

The command is ``ramify eval SUITES --lengths … --models … --modes …``.

    axes ──> plan ──> windows and prices of the models ──> cost estimate ──> confirmation
         ──> attempts ──> table, JSONL, HTML

This module checks a matrix before any money is spent, and prints its results. The cells of a matrix
(its combinations) are defined in ``ramify/evaluate/evaluation_matrix.py``, and the options in
``eval.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from ramify.cli.ask import (
    check_prices_known,
    connect_mcp_tools,
    make_rlm,
    open_folder_store,
    sandbox_spec,
)
from ramify.cli.eval_metering_proxies import (
    EvalMatrixMeteringProxies,
    check_settings_comparable,
    open_meters,
)
from ramify.cli.evaluation_progress import EvaluationProgressReporter, write_evaluation_log
from ramify.cli.parser import ExitCode, UsageError
from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.stop_signals import enforce_run_deadlines
from ramify.cli.terminal_text import format_dollars, json_line, pluralize, print_error
from ramify.progress import track_progress
from ramify.types.trajectory import Stop

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.evaluate.evaluation_matrix import EvalMatrixAxes, EvalMatrixEstimate, EvalMatrixPlan
    from ramify.evaluate.matrix_report import EvalMatrixReport
    from ramify.evaluate.run_evaluation import (
        AttemptOutcome,
        AttemptRunner,
        EvaluationFileWriter,
        EvaluationPlan,
        EvaluationResult,
        EvaluationSetup,
        RlmAttemptRunner,
    )
    from ramify.store.folder_store import Store


class EvalMatrixOptions(NamedTuple):
    """Options of an evaluation matrix that do not affect its results.

    An example is the number of concurrent attempts. A matrix is all combinations of several models,
    lengths and modes.
    """

    k: int | None
    concurrency: int
    html: str | None
    """File to which the HTML report is written."""
    is_dry_run: bool
    is_confirmed: bool
    """True if the command starts without asking for confirmation."""
    on_ray: bool = False
    """True if the attempts run on a Ray cluster."""
    workers: int | None = None
    """Number of workers on the Ray cluster."""
    command: str = "ramify eval"
    """Command that messages suggest, with ``--resume`` and an id added, for resuming the matrix."""
    show: Callable[[EvalMatrixPlan, Mapping[str, Sequence[AttemptOutcome]]], None] | None = None
    """Function that prints the results; None prints a table. If it is set and the user cannot be
    asked for confirmation on a terminal, nothing starts without ``--yes``."""


class _NotConfirmed(Exception):
    """Raised to end the command if the user declines to start the evaluation or asked for a dry
    run."""


class EvalMatrixCommand:
    """Runs an evaluation matrix of suites, lengths, models and answer modes for the command line.

    It starts a new matrix or resumes a stored one.
    """

    def __init__(
        self, settings: dict[str, Any], screen: ProgressDisplay, options: EvalMatrixOptions
    ) -> None:
        self._settings = settings
        self._screen = screen
        self._notes = screen.notes
        self._options = options
        self._store = open_folder_store(settings, options.command)
        if options.html is not None and not Path(options.html).expanduser().parent.is_dir():
            raise UsageError(f"--html {options.html}: its folder does not exist")
        self._rlms: dict[bytes, RLM] = {}
        """Settings -> the RLM that answers with them."""

    def run_new(self, axes: EvalMatrixAxes, validates: bool) -> ExitCode:
        """Begin a new evaluation matrix and run it to its end.

        If ``validates`` is True, first check that correct answers to some items score 1.
        """
        from ramify.evaluate.evaluation_matrix import EvalMatrixTaskCache, make_matrix_plan
        from ramify.evaluate.evaluation_report import check_k
        from ramify.tasks.validation import validate

        if self._options.k is not None:
            check_k(self._options.k, axes.base.attempts)
        # Find modules in the current folder, as with python -m.
        sys.path[:0] = [""] * ("" not in sys.path)
        tasks = EvalMatrixTaskCache()
        plan = make_matrix_plan(axes, tasks)
        if validates:
            shortest = min(axes.lengths, default=None)
            for cell in plan.cells:
                is_first = cell.place["model"] == axes.models[0] and cell.mode == axes.modes[0]
                if is_first and cell.context_tokens == shortest:
                    skipped = validate(
                        tasks.get_or_create(cell.plan),
                        [cell.plan.split],
                        num=min(2, cell.plan.items),
                    )
                    if skipped:
                        self._notes.say(f"ramify: {skipped}")
        return self._run(plan, tasks, is_new=True)

    def begin_plan(self, plan: EvalMatrixPlan) -> ExitCode:
        """Run a new evaluation matrix whose combinations are already planned."""
        from ramify.evaluate.evaluation_matrix import EvalMatrixTaskCache

        return self._run(plan, EvalMatrixTaskCache(), is_new=True)

    def resume(self, plan: EvalMatrixPlan) -> ExitCode:
        """Resume a stored matrix that is incomplete, and print its results."""
        from ramify.evaluate.evaluation_matrix import EvalMatrixTaskCache
        from ramify.evaluate.evaluation_report import check_k

        if self._options.k is not None:
            check_k(self._options.k, plan.first_cell_plan.attempts)
        sys.path[:0] = [""] * ("" not in sys.path)
        return self._run(plan, EvalMatrixTaskCache(), is_new=False)

    def _run(self, plan: EvalMatrixPlan, tasks: Any, *, is_new: bool) -> ExitCode:
        from ramify.evaluate.evaluation_matrix import EvaluationMatrixStore

        for model in dict.fromkeys(cell.plan.model for cell in plan.cells):
            settings = {**plan.first_cell_plan.settings, "model": model}
            check_prices_known(settings, settings.get("max_cost"))
        if plan.has_systems:
            check_settings_comparable(plan.first_cell_plan.settings)
        records = None if self._store is None else EvaluationMatrixStore(self._store.root)
        with contextlib.ExitStack() as stack:
            opened: dict[str, EvaluationFileWriter] = {}
            if records is not None and not is_new:
                opened = {
                    cell.record: stack.enter_context(
                        contextlib.closing(records.open_cell_record(cell))
                    )
                    for cell in plan.cells
                    if not self._options.is_dry_run or records.has_cell_record(cell)
                }
            # The plan's copy of the servers lacks the values of environment variables.
            servers = self._settings.get("mcp") or plan.first_cell_plan.settings.get("mcp")
            tools = stack.enter_context(connect_mcp_tools({"mcp": servers}))
            progress: list[EvaluationProgressReporter] = []

            async def whole() -> tuple[EvaluationResult, ...]:
                from ramify.evaluate.run_evaluation import run_evaluations

                await self._confirm_start(plan, tools, opened)
                if records is not None and is_new:
                    records.create(plan)
                    for cell in plan.cells:
                        opened[cell.record] = stack.enter_context(
                            contextlib.closing(records.open_cell_record(cell))
                        )
                path = None if records is None else records.path(plan.id)
                with (
                    write_evaluation_log(path, f"the matrix {plan.id}"),
                    self._progress(plan, opened) as shown,
                ):
                    progress.append(shown)
                    root = None if self._store is None else self._store.root
                    async with open_meters(plan, root) as meters:
                        jobs = list(self._jobs(plan, tasks, tools, opened, shown, meters))
                        return await run_evaluations(jobs, concurrency=self._options.concurrency)

            command = "" if records is None else self._resume_command(plan)
            try:
                with enforce_run_deadlines(command, self._screen.close_live_view):
                    evaluations = asyncio.run(whole())
            except _NotConfirmed:
                return ExitCode.ANSWERED
            except KeyboardInterrupt:
                hint = f"; continue with: {command}" if command and progress else ""
                num = progress[0].done if progress else 0
                self._notes.say(f"ramify: stopped after {pluralize(num, 'attempt')}{hint}")
                return ExitCode.STOPPED
            self._screen.close_live_view()
            return self._print_report(plan, evaluations, is_stored=records is not None)

    def _rlm(self, plan: EvaluationPlan, tools: Any) -> RLM:
        """Return the RLM that answers the questions of one cell (combination) of the matrix.

        Cells that differ only in their answer mode share an RLM and its rate limit.
        """
        is_direct = plan.settings["mode"] == "direct"
        settings = _settings_of(plan)
        # A plain call has no tools.
        key = msgspec.json.encode(
            ({**settings, "mode": "", "with": ""}, is_direct and bool(tools)),
            order="deterministic",
        )
        if key not in self._rlms:
            own = None if is_direct else tools
            self._rlms[key] = make_rlm(settings, sandbox_spec(settings), self._store, own)
        return self._rlms[key]

    async def _confirm_start(
        self, plan: EvalMatrixPlan, tools: Any, opened: dict[str, EvaluationFileWriter]
    ) -> None:
        """Print the number of attempts and their probable cost, and ask the user whether to start.

        Raises ConfigError if a model cannot be used, and _NotConfirmed if the evaluation should not
        start.
        """
        from ramify.engine.limits import DEFAULT_MAX_COST
        from ramify.evaluate.answer_modes import root_model_spec
        from ramify.evaluate.evaluation_matrix import estimate_remaining_cost

        rooms = {}
        for cell in plan.cells:
            if cell.plan.model not in rooms:
                rooms[cell.plan.model] = await root_model_spec(self._rlm(cell.plan, tools))
        left = {}
        for cell in plan.cells:
            record = opened.get(cell.record)
            made = len(record.outcomes) if record is not None else 0
            left[cell.record] = max(0, cell.plan.items * cell.plan.attempts - made)
        limit = plan.first_cell_plan.settings.get("max_cost") or DEFAULT_MAX_COST
        found = estimate_remaining_cost(plan, rooms, limit, left)
        shown = _in_words(found)
        if self._options.is_dry_run:
            print(json_line({"matrix": msgspec.to_builtins(found)}) if self._is_json else shown)
            raise _NotConfirmed
        self._notes.say(f"ramify: {shown}")
        is_asked = not self._options.is_confirmed and found.attempts
        if is_asked and self._options.show is not None and not sys.stdin.isatty():
            self._notes.say("nothing was sent; to begin, add --yes")
            raise _NotConfirmed
        if is_asked and sys.stdin.isatty() and sys.stderr.isatty() and not _is_confirmed():
            raise _NotConfirmed

    def _resume_command(self, plan: EvalMatrixPlan) -> str:
        return f"{self._options.command} --resume {plan.id}"

    @property
    def _is_json(self) -> bool:
        return bool(self._settings.get("json"))

    @contextlib.contextmanager
    def _progress(
        self, plan: EvalMatrixPlan, opened: dict[str, EvaluationFileWriter]
    ) -> Iterator[EvaluationProgressReporter]:
        num = sum(cell.plan.items * cell.plan.attempts for cell in plan.cells)
        earlier = [outcome for record in opened.values() for outcome in record.outcomes]
        with track_progress("evaluating", num, "attempts", first=len(earlier)) as work:
            yield EvaluationProgressReporter(self._screen, work, num, earlier)

    def _jobs(
        self,
        plan: EvalMatrixPlan,
        tasks: Any,
        tools: Any,
        opened: dict[str, EvaluationFileWriter],
        progress: EvaluationProgressReporter,
        meters: EvalMatrixMeteringProxies,
    ) -> Iterator[EvaluationSetup]:
        from ramify.evaluate.run_evaluation import EvaluationSetup

        makes: dict[tuple[int, str], AttemptRunner] = {}
        on_ray = self._on_ray(plan, tools) if self._options.on_ray else None
        for cell in plan.cells:
            rlm = self._rlm(cell.plan, tools)
            key = id(rlm), cell.mode
            if key not in makes:
                runs = cell_attempt_maker(cell.plan, rlm)
                makes[key] = on_ray or meters.attempt_maker(cell, rlm, runs)
            yield EvaluationSetup(
                cell.plan,
                tasks.get_or_create(cell.plan),
                opened.get(cell.record),
                makes[key],
                progress,
            )

    def _on_ray(self, plan: EvalMatrixPlan, tools: Any) -> AttemptRunner:
        from ramify.evaluate.ray_attempts import RayAttemptRunner

        if plan.has_systems:
            raise UsageError("--with compares systems on this machine: remove --placement ray")
        if tools:
            raise UsageError("--mcp has no effect on other machines: remove --placement ray")
        return RayAttemptRunner(
            attempt_maker_in_worker,
            None if self._store is None else self._store.root,
            concurrency=self._options.concurrency,
            workers=self._options.workers,
        )

    def _print_report(
        self, plan: EvalMatrixPlan, evaluations: tuple[EvaluationResult, ...], *, is_stored: bool
    ) -> ExitCode:
        from ramify.evaluate.matrix_report import compute_matrix_report, matrix_table

        outcomes = {
            cell.record: done.outcomes for cell, done in zip(plan.cells, evaluations, strict=True)
        }
        if self._options.show is not None:
            self._options.show(plan, outcomes)
            return self._print_missing(plan, evaluations, is_stored=is_stored)
        found = compute_matrix_report(plan, outcomes, k=self._options.k)
        if self._options.html is not None:
            from ramify.viewer.eval_matrix_page import matrix_html

            self._write(Path(self._options.html).expanduser(), matrix_html(found, outcomes))
        if self._is_json:
            for row in _rows(found):
                print(json_line(row))
        else:
            print(matrix_table(found))
        if plan.has_systems:
            self._show_money(plan, outcomes)
        if is_stored:
            self._notes.say(f"matrix {plan.id}")
        return self._print_missing(plan, evaluations, is_stored=is_stored)

    def _print_missing(
        self, plan: EvalMatrixPlan, evaluations: tuple[EvaluationResult, ...], *, is_stored: bool
    ) -> ExitCode:
        """Print how many attempts of the matrix are missing, or that no attempt was scored.

        Returns the exit code.
        """
        everything = [outcome for done in evaluations for outcome in done.outcomes]
        num = sum(outcome.stop is Stop.SUSPENDED for outcome in everything)
        if num and is_stored:
            self._notes.say(
                f"ramify: {pluralize(num, 'attempt')} suspended and left out; continue with: "
                f"{self._resume_command(plan)}"
            )
        if any(outcome.reward is not None for outcome in everything):
            return ExitCode.ANSWERED
        first = next((outcome.error for outcome in everything if outcome.error), "")
        print_error(
            f"no attempt was scored: all {len(everything):,} failed, the first with: {first}"
        )
        return ExitCode.SUSPENDED if num and is_stored else ExitCode.ERROR

    def _write(self, path: Path, page: bytes) -> None:
        try:
            path.write_bytes(page)
        except OSError as error:
            # The attempts are paid for, so their figures are printed anyway.
            self._notes.warning(f"the page {path} cannot be written: {error.strerror}")
        else:
            self._notes.say(f"page {path}")

    def _show_money(
        self, plan: EvalMatrixPlan, outcomes: Mapping[str, Sequence[AttemptOutcome]]
    ) -> None:
        """Print how well each compared system scores at different cost budgets per attempt."""
        from ramify.evaluate.score_budget_curves import (
            format_budget_tables,
            matrix_score_by_budget,
            score_by_budget_tables,
        )

        rows = matrix_score_by_budget(plan, outcomes)
        if self._is_json:
            for row in (each for each in rows if each.points):
                points = msgspec.to_builtins(row.points)
                print(json_line({"matrix": plan.id, **row.place, "money": points}))
        elif lines := format_budget_tables(score_by_budget_tables(rows)):
            print("\n" + "\n".join(lines))


def _is_confirmed() -> bool:
    """Ask the user on the terminal whether to start the evaluation.

    Returns True if the user agrees.
    """
    print("begin? [Y/n] ", end="", file=sys.stderr, flush=True)
    # The handler of asyncio would only cancel a task, which does not run while this waits.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return sys.stdin.readline().strip().lower() in ("", "y", "yes")
    finally:
        signal.signal(signal.SIGINT, before)


def cell_attempt_maker(plan: EvaluationPlan, rlm: RLM) -> RlmAttemptRunner:
    """Return an object that makes the attempts of one cell (combination) of an evaluation matrix.

    Each attempt uses ``rlm`` with the cell's mode and temperature.
    """
    from ramify.clients.base import Sampling
    from ramify.evaluate.answer_modes import mode_function
    from ramify.evaluate.attempt import attempt
    from ramify.evaluate.run_evaluation import RlmAttemptRunner

    sampling = Sampling(temperature=plan.settings.get("temperature"))
    # The mode of another system is its name.
    mode = attempt if plan.settings.get("with") else mode_function(plan.settings["mode"])
    return RlmAttemptRunner(rlm, sampling, mode)


def attempt_maker_in_worker(plan: EvaluationPlan, store: Store | None) -> RlmAttemptRunner:
    """Return an object that makes the attempts of one matrix cell inside a worker process.

    The RLM is created in that process, with the API keys of its environment.
    """
    settings = _settings_of(plan)
    return cell_attempt_maker(plan, make_rlm(settings, sandbox_spec(settings), store))


def _settings_of(plan: EvaluationPlan) -> dict[str, Any]:
    """Return the ``RLM`` settings for one cell (combination) of an evaluation matrix.

    The setting ``direct`` is cleared, because each mode decides whether a plain call may answer the
    question.
    """
    return {**plan.settings, "model": plan.model, "direct": None}


def _rows(report: EvalMatrixReport) -> Iterator[dict[str, Any]]:
    """Yield each row of a matrix report as a dict of its combination and its metrics."""
    for row in report.rows:
        data = msgspec.to_builtins(row)
        place = data.pop("place")
        yield {"matrix": report.plan.id, **place, "k": report.k, **data}


def _in_words(found: EvalMatrixEstimate) -> str:
    unfit = f", of which {found.unfit:,} do not fit and ask nothing" if found.unfit else ""
    cost = (
        "their cost is unknown, since a model has no known price"
        if found.max_cost is None
        else f"at most {format_dollars(found.max_cost)}"
    )
    return f"{pluralize(found.attempts, 'attempt')}{unfit}; {cost}"
