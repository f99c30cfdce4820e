"""The command ``ramify map``: ask the same question about each row of a table.

    arguments ──> rows      settings ──> RLM with the limits of a row ──> TableMapRun ──> exit code
                  Ctrl-C: the first starts no more rows, the second cancels those in progress

The settings of a model, a session and a prompt are those of ``ask`` (see ``ask.py``). The questions
are asked in ``ramify/maps``.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli import terminal_text
from ramify.cli.ask import (
    KINDS,
    MODE,
    NO_MODEL,
    NOT_OF_MODE,
    OF_SOURCES,
    SETTINGS,
    check_mode,
    check_models_ready,
    connect_mcp_tools,
    make_message_writer,
    make_rlm,
    note_offline_models,
    open_folder_store,
    open_store,
    read_schema,
    sandbox_spec,
)
from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.progress_display import ProgressDisplay, choose_display_form
from ramify.cli.settings import fill_missing_settings
from ramify.cli.stop_signals import add_signal_handler
from ramify.cli.telemetry import span_export_context
from ramify.cli.terminal_text import StderrMessageWriter, pluralize, print_error, write_stderr
from ramify.logging import hold_warnings_for_next_run
from ramify.maps.api import total_map_limits
from ramify.maps.estimate import MIN_FOR_INTERVAL, EstimatedAmount
from ramify.maps.map_run import MapResult, TableMapRun, TableMapSpec
from ramify.maps.open_row_source import open_paths

if TYPE_CHECKING:
    from ramify.engine.rlm import RLM
    from ramify.maps.ray_map import RayMapRun

_OF_ROWS = ("max_cost", "max_calls", "max_tokens", "max_seconds")
"""Limits of ``ask`` that a map has twice: for all of its rows, and for each row. In ``ask`` they
apply to the single question."""
_NOT_HERE = (
    *("branches", "cite", "cache"),
    *OF_SOURCES,
    *_OF_ROWS,
)
"""Settings of ``ramify ask`` that ``ramify map`` does not have, or that mean something else in
it."""
OPTIONS = (
    CliOptionSpec("out", str, "output: .jsonl, .csv, .tsv or .parquet", "FILE", "-o"),
    CliOptionSpec(
        "placement",
        str,
        "where rows are answered: local, or ray (joins RAY_ADDRESS if set; FILE is then a folder)",
        "local|ray",
    ),
    CliOptionSpec(
        "workers",
        int,
        "workers with --placement ray (default: up to one for each CPU of the cluster)",
    ),
    MODE,
    CliOptionSpec("answer_schema", str, "JSON schema that each answer must match", "FILE|JSON"),
    CliOptionSpec(
        "column", list, "column that the model reads (default: all); repeat for more", "NAME"
    ),
    CliOptionSpec("table", str, "table of a SQLite file", "NAME"),
    CliOptionSpec("prefix", str, "text before the names of the new columns", "TEXT"),
    CliOptionSpec(
        "try", int, "answer only N rows, print them, and estimate the cost of the whole map"
    ),
    CliOptionSpec(
        "estimate",
        bool,
        "estimate the cost, time and workers from --try N rows (default: 100)",
        has_no=False,
    ),
    CliOptionSpec(
        "batch",
        bool,
        "use the batch API of OpenAI or Anthropic: half the price, within a day",
        has_no=False,
    ),
    CliOptionSpec(
        "batch_rows", int, "maximum number of rows of one batch (default: the provider's)"
    ),
    CliOptionSpec("retry_failed", bool, "retry rows that failed", has_no=False),
    CliOptionSpec("strict", bool, "stop at the first row with an error", has_no=False),
    CliOptionSpec(
        "max_cost", float, "maximum cost of all rows in dollars (default: 5, if prices are known)"
    ),
    CliOptionSpec("max_calls", int, "maximum number of model requests of all rows"),
    CliOptionSpec("max_tokens", int, "maximum total tokens of all rows, input plus output"),
    CliOptionSpec("row_max_cost", float, "maximum cost of one row in dollars"),
    CliOptionSpec("row_max_calls", int, "maximum number of requests of one row (default: 1000)"),
    CliOptionSpec("row_max_tokens", int, "maximum total tokens of one row (default: 20000000)"),
    CliOptionSpec("row_max_seconds", float, "maximum time of one row, in seconds (default: 1800)"),
    *(option for option in SETTINGS if option.name not in _NOT_HERE),
)
_CODES = {
    "limit": ExitCode.CUT_SHORT,
    "stopped": ExitCode.CUT_SHORT,
    "suspended": ExitCode.SUSPENDED,
    "failed": ExitCode.ERROR,
}


def run(
    words: list[str],
    out: str | None = None,
    answer_schema: str | None = None,
    column: list[str] | None = None,
    table: str | None = None,
    prefix: str | None = None,
    retry_failed: bool | None = None,
    strict: bool | None = None,
    estimate: bool | None = None,
    placement: str | None = None,
    workers: int | None = None,
    batch: bool | None = None,
    batch_rows: int | None = None,
    mode: str | None = None,
    **given: Any,
) -> int:
    """Run ``ramify map``: answer the same question about each row of a table."""
    if mode is not None:
        check_mode(mode, given)
    if placement not in (None, "local", "ray"):
        raise UsageError(f"--placement {placement} is unknown: give local or ray")
    if workers is not None and placement != "ray":
        raise UsageError("--workers needs --placement ray")
    sample = given.pop("try", None)
    prints_rows = sample is not None
    sample = 100 if estimate and sample is None else sample
    of_row = {name: given.pop(f"row_{name}") for name in _OF_ROWS}
    settings = fill_missing_settings(given, KINDS)
    hold_warnings_for_next_run()
    notes = make_message_writer(settings, KINDS)
    form = choose_display_form(settings.get("progress"), notes)
    if len(words) < 2:
        raise UsageError("no rows: ramify map QUESTION ROWS… --out FILE")
    if out is None and sample is None:
        raise UsageError("no output: give --out FILE, with the ending .jsonl, .csv or .parquet")
    if not settings.get("model"):
        write_stderr(NO_MODEL.replace("ramify ask", "ramify map"))
        return ExitCode.USAGE
    question, *paths = words
    request = TableMapSpec(
        question=question,
        answer_type=read_schema(answer_schema),
        columns=tuple(column or ()),
        prefix=prefix or "",
        out=None if out is None else Path(out).expanduser(),
        budget=total_map_limits(
            *(settings.get(name) for name in ("max_calls", "max_tokens", "max_cost"))
        ),
        retry_failed=bool(retry_failed),
        strict=bool(strict),
        sample=sample,
        batch=bool(batch),
        batch_rows=batch_rows,
    )
    settings = {n: v for n, v in settings.items() if n not in NOT_OF_MODE.get(mode or "", ())}
    row_settings = {**settings, **of_row, "branches": 1, "mode": mode}
    if placement == "ray":
        if batch:
            raise UsageError("--batch cannot be combined with --placement ray: remove one")
        if table is not None or settings.get("mcp"):
            name = "--mcp" if settings.get("mcp") else "--table"
            raise UsageError(f"{name} has no effect on other machines: remove --placement ray")
        run_on_ray = _ray_run(row_settings, paths, request, out, workers)
        with span_export_context(notes), ProgressDisplay(notes, form, has_lines=True) as screen:
            result, code = _until_the_end(run_on_ray, notes, screen)
        if result is None:
            return code
        return _report(result, notes, as_json=bool(settings.get("json")), stopped_by=code)
    check_models_ready(row_settings)
    note_offline_models(settings, notes)
    source = open_paths(paths, table)
    with (
        span_export_context(notes),
        ProgressDisplay(notes, form, has_lines=True) as screen,
        connect_mcp_tools(settings) as tools,
    ):
        rlm = make_rlm(row_settings, sandbox_spec(settings), open_store(settings), tools, mode)
        result, code = _until_the_end(TableMapRun(rlm, source, request), notes, screen)
    if result is None:
        return code
    as_json = bool(settings.get("json"))
    if sample is not None and not as_json:
        _print_sample(result, prints_rows=prints_rows)
    return _report(result, notes, as_json=as_json, stopped_by=code)


def _until_the_end(
    map_run: TableMapRun | RayMapRun, notes: StderrMessageWriter, screen: ProgressDisplay
) -> tuple[MapResult | None, ExitCode]:
    """Run a map (one question per table row) until it ends or the user stops it.

    Returns the result, which is None if the map was cancelled, and the exit code if the map was
    stopped.
    """
    interrupts = _MapInterrupts(map_run, notes)
    try:
        result = asyncio.run(interrupts.watched())
    except asyncio.CancelledError:
        screen.close_live_view()
        notes.say("ramify: stopped; the same command continues the map")
        return None, interrupts.code
    screen.close_live_view()
    return result, interrupts.code


def _ray_run(
    settings: dict[str, Any],
    paths: list[str],
    request: TableMapSpec,
    out: str | None,
    workers: int | None,
) -> RayMapRun:
    from ramify.maps.ray_map import RayMapRun

    if out is None or request.sample is not None:
        raise UsageError("--try and --estimate run only on this machine: remove --placement ray")
    store = open_folder_store(settings, "map --placement ray")
    if store is None:
        raise UsageError("--placement ray tracks spending in the store: remove --no-store")
    return RayMapRun(partial(_worker_rlm, settings), paths, request, out, store, workers)


def _worker_rlm(settings: dict[str, Any]) -> RLM:
    """Create an RLM in a worker process, using the API keys in its environment."""
    return make_rlm(settings, sandbox_spec(settings), None, mode=settings["mode"])


class _MapInterrupts:
    """Handles Ctrl-C and SIGTERM while a map (one question per table row) is running.

    After the first signal no further row is started. A second Ctrl-C cancels the rows in progress.
    """

    def __init__(self, map_run: TableMapRun | RayMapRun, notes: StderrMessageWriter) -> None:
        self.code = ExitCode.CUT_SHORT
        self._run = map_run
        self._notes = notes
        self._count = 0

    async def watched(self) -> MapResult:
        with self._catch_signals(asyncio.current_task()):
            return await self._run.run()

    @contextlib.contextmanager
    def _catch_signals(self, task: asyncio.Task[Any] | None) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        add_signal_handler(signal.SIGINT, lambda: self._handle_interrupt(task))
        add_signal_handler(signal.SIGTERM, self._handle_terminate)
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    def _handle_interrupt(self, task: asyncio.Task[Any] | None) -> None:
        self._count += 1
        if self._count == 1:
            self._notes.say("ramify: waiting for the rows in progress; Ctrl-C again to stop now")
            self._run.stop_gracefully("it was stopped by Ctrl-C")
            return
        self.code = ExitCode.STOPPED
        if task is not None:
            task.cancel()

    def _handle_terminate(self) -> None:
        self.code = ExitCode.TERMINATED
        self._run.stop_gracefully("it was stopped by SIGTERM")


def _print_sample(result: MapResult, *, prints_rows: bool) -> None:
    """Print the answers for a sample of rows as JSON lines, and estimate the cost and time of
    the whole table."""
    for row in result.table or () if prints_rows else ():
        print(terminal_text.json_line(row))
    whole = result.estimate
    if whole is None:
        return
    parts = [
        f"{pluralize(whole.num_rows, 'row')}, {pluralize(whole.num_questions, 'question')}",
        "cost unknown" if whole.cost is None else _with_interval(whole.cost, _dollars),
    ]
    if whole.is_batch:
        parts.append("in batches, each within a day")
    else:
        parts += [
            f"{_with_interval(whole.hours, _hours)} with one worker",
            f"{pluralize(whole.workers_for_an_hour, 'worker')} for an hour",
        ]
    sampled = pluralize(whole.num_sampled, "question")
    is_few = whole.num_sampled < min(MIN_FOR_INTERVAL, whole.num_questions)
    interval = "too few for an interval" if is_few else "95 %"
    print(f"all: {' · '.join(parts)}; from {sampled}, {interval}")


def _with_interval(amount: EstimatedAmount, form: Callable[[float], str]) -> str:
    if amount.low is None or amount.high is None:
        return f"about {form(amount.value)}"
    return f"{form(amount.value)} ({form(amount.low)} to {form(amount.high)})"


def _hours(hours: float) -> str:
    return terminal_text.format_duration(3600 * hours)


def _dollars(amount: float) -> str:
    return f"${amount:,.0f}" if amount >= 100 else terminal_text.format_dollars(amount)


def _report(
    result: MapResult, notes: StderrMessageWriter, *, as_json: bool, stopped_by: ExitCode
) -> ExitCode:
    if as_json:
        fields = {**msgspec.structs.asdict(result), "usage": msgspec.to_builtins(result.usage)}
        fields["estimate"] = msgspec.to_builtins(result.estimate)
        fields["map"] = fields.pop("id")
        del fields["table"]
        print(terminal_text.json_line(fields))
    elif result.out:
        print(result.out)
    sys.stdout.flush()
    notes.say(format_map_summary(result))
    if result.stop == "done":
        if result.num_failed:
            print_error(_failed_rows(result))
            return ExitCode.NO_ANSWER
        return ExitCode.ANSWERED
    higher = " with a higher limit" if result.stop == "limit" else ""
    collects = "collects them and " if result.num_waiting else ""
    print_error(f"{result.reason}; the same command{higher} {collects}continues the map")
    return stopped_by if result.stop == "stopped" else _CODES[result.stop]


def _failed_rows(result: MapResult) -> str:
    rows = f"{pluralize(result.num_failed, 'row')} of {result.num_rows:,}"
    parts = [f"{rows} failed, with the reason in their error column"]
    if num := result.num_unaskable:
        parts.append(f"{num:,} of them, empty or unreadable, cannot be asked")
    if num := result.num_failed - result.num_unaskable:
        which = f"the other {num:,}" if result.num_unaskable else "them"
        parts.append(f"the same command with --retry-failed asks {which} again")
    return "; ".join(parts)


def format_map_summary(result: MapResult) -> str:
    """Summarise a finished map (one question per table row) in one line of text.

    For example ``10,000 rows · 9,990 answered, 10 failed · 10,004 requests · 1.2M tokens · $0.41 ·
    52 s``.
    """
    usage = result.usage
    counts = [f"{result.num_answered:,} answered"]
    counts += [f"{result.num_failed:,} failed"] if result.num_failed else []
    counts += [f"{result.num_missing:,} not asked"] if result.num_missing else []
    counts += [f"{result.num_waiting:,} in batches"] if result.num_waiting else []
    bound = "at most " if usage.unknown_calls else ""
    again, earlier = result.num_paid_again, result.num_earlier_requests
    when = f", {'all' if earlier == usage.calls else f'{earlier:,}'} earlier"
    is_repeated = result.stop == "done" and usage.calls == earlier > 0
    parts = [
        *(["nothing was sent, since no row was left to ask"] if is_repeated else []),
        pluralize(result.num_rows, "row"),
        ", ".join(counts),
        *([f"{pluralize(again, 'request')} paid again for lost workers"] if again else []),
        pluralize(usage.calls, "request") + when * bool(earlier),
        f"{bound}{terminal_text.format_count(usage.total_tokens)} tokens",
        bound * (result.cost is not None) + terminal_text.format_dollars(result.cost),
        terminal_text.format_duration(result.seconds),
        f"map {result.id}",
    ]
    return " · ".join(parts)


COMMAND = SubcommandSpec(
    "map",
    """\
Ask QUESTION of each row of ROWS: a JSONL, CSV, Parquet or SQLite file, a folder of text files, or
several of them with the same columns. The row is the context; or QUESTION is a template over
columns, as in "Is {subject} a complaint?".

FILE, which is printed, gets the rows in their order, with the answers as new columns and an error
column. Equal rows are asked once. After Ctrl-C, a kill or a full disk, the same command continues
at the rows that are missing, and pays nothing twice. With --placement ray, FILE is a folder of
parts, and a lost worker's parts are asked again. The exit code is 0 if every row has an answer,
4 if some have an error, 3 after a limit or Ctrl-C, and 5 if a person must remove a cause first.""",
    run,
    "QUESTION ROWS…",
    max_words=None,
    options=OPTIONS,
)
