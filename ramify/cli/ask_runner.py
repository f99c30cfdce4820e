"""Run the question of a ``ramify ask`` command, and determine the exit code of the command.

    run ──> start the RLM's run ──> show its events ──> print the answer ──> exit code
               ^
               └── Ctrl-C calls ``wrap_up``, then ``cancel``, and then raises KeyboardInterrupt

The options are in ``ask.py``, the progress display is in ``progress_display.py``, and
``rebuild_recorded_run.py`` restores the settings of a stored run.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import signal
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.cli import terminal_text
from ramify.cli.parser import ExitCode, exit_code_of_run
from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.run_event_printer import RunEventPrinter
from ramify.cli.stop_signals import add_signal_handler, enforce_run_deadlines
from ramify.cli.terminal_text import (
    StderrMessageWriter,
    format_duration,
    print_error,
    replace_fields_with_options,
    shorten_to_line,
)
from ramify.engine.answer_serialization import to_jsonable
from ramify.engine.question import RunOptions
from ramify.engine.rlm import RLM
from ramify.engine.run_handle import RunHandle
from ramify.engine.run_result import Result, why_unanswered
from ramify.errors import ModelError, ReplyFiltered
from ramify.types.end_reason import describe_ending
from ramify.types.event import AnyEvent, mode_and_reason
from ramify.types.message import Usage
from ramify.types.trajectory import Stop, Trajectory

if TYPE_CHECKING:
    from ramify.cli.live_run_view import LiveRunView


Start = Callable[[Callable[[AnyEvent], None]], RunHandle]
"""Function that starts a run. It takes a callback, which receives the run's events."""


class QuestionRunRequest(msgspec.Struct, frozen=True):
    """A question for a model, its loaded sources and the options of its run."""

    question: str
    loaded: Any
    """The ``LoadedContext`` with the sources of the question, as returned by ``load``; None if
    there are no sources."""
    options: RunOptions

    def start(self, rlm: RLM, on_event: Callable[[AnyEvent], None]) -> RunHandle:
        prompt = self.question if self.loaded is None else self.loaded
        query = None if self.loaded is None else self.question
        return rlm.start(prompt, query, self.options, on_event=on_event)


def run(rlm: RLM, asked: QuestionRunRequest, screen: ProgressDisplay, *, as_json: bool) -> ExitCode:
    return _run_and_report(
        lambda on_event: asked.start(rlm, on_event),
        rlm,
        screen,
        as_json,
        asked.options.answer_type is not None,
    )


def continue_run(
    run: str,
    screen: ProgressDisplay,
    *,
    as_json: bool,
    allow_weaker: bool,
    limits: dict[str, Any],
    models: dict[str, Any],
    fork: tuple[int, dict[str, str | None]] | None,
) -> ExitCode:
    """Continue or fork a stored run, and return the command's exit code.

    If the run has already ended, print its recorded answer. A run that was ended by a limit
    continues if that limit is now higher.

    ``limits`` and ``models`` replace recorded ones. ``fork`` is None, or the index of a turn with
    the options of ``RLM.start_fork``. In that case a new run starts from that turn instead.
    """
    from ramify.cli import rebuild_recorded_run
    from ramify.engine import rerun

    notes = screen.notes
    store, recorded = rebuild_recorded_run.load_recorded_run(run)
    started = recorded.questions[-1]
    now = msgspec.structs.replace(rerun.recorded_limits(recorded), **limits)
    is_over = (
        recorded.ended is not None and not rerun.is_limit_raised(recorded, now) and fork is None
    )
    if not is_over and fork is None:
        store.check_free(run)
    has_schema = bool(started.config.get("answer_schema"))
    rlm = rebuild_recorded_run.rebuild_rlm(
        started, store, limits=now, with_tools=not is_over, allow_weaker=allow_weaker
    )
    if fork is not None:
        turn, edit = fork
        call, code, prompt = edit["call"], edit["code"], edit["prompt"]
        asyncio.run(rlm.estimate_fork(run, turn, call=call, code=code, prompt=prompt, **models))
        of_call = f" of call {call}" if call else ""
        notes.say(f"continuing run {started.id} from turn {turn + 1}{of_call} as a new run")
        return _run_and_report(
            lambda on_event: rlm.start_fork(
                run, turn, call=call, code=code, prompt=prompt, on_event=on_event, **models
            ),
            rlm,
            screen,
            as_json,
            has_schema,
        )
    if is_over:
        how = f"; {remedy}" if (remedy := rerun.limit_hint(recorded)) else ""
        how += "; no model is asked, so --model is ignored" * bool(models)
        result = asyncio.run(rlm.aresume(run))
        what = "without an answer" if result.answer is None else "; this is its answer"
        text = f"run {started.id} has already ended{' ' * (result.answer is None)}{what}{how}"
        notes.say(replace_fields_with_options(text))
        screen.close_live_view()
        return _print(result, notes, as_json, has_schema, is_stored=True)
    notes.say(f"continuing run {started.id}: {terminal_text.shorten_to_line(started.question)}")
    return _run_and_report(
        lambda on_event: rlm.restart(run, on_event=on_event, **models),
        rlm,
        screen,
        as_json,
        has_schema,
    )


# --- running


def _run_and_report(
    start: Start, rlm: RLM, screen: ProgressDisplay, as_json: bool, has_schema: bool
) -> ExitCode:
    notes = screen.notes
    interrupts = RunInterrupts(notes)
    gc.freeze()  # start-up's objects live on; ``main`` disabled collection while they were made
    gc.enable()
    try:
        with enforce_run_deadlines("ramify ask --resume {run}", screen.close_live_view):
            result = asyncio.run(_run_watched(start, rlm, screen, interrupts))
    except asyncio.CancelledError:
        notes.say("ramify: stopped")
        return interrupts.code
    screen.close_live_view()
    return _print(result, notes, as_json, has_schema, is_stored=rlm.store is not None)


async def _run_watched(
    start: Start, rlm: RLM, screen: ProgressDisplay, interrupts: RunInterrupts
) -> Result:
    async with rlm:
        watcher = _watcher(rlm, screen)
        running = start(watcher.apply)
        with interrupts.handle_signals(running), watcher.watch_run(running):
            return await running.result()


def _watcher(rlm: RLM, screen: ProgressDisplay) -> RunEventPrinter | LiveRunView:
    lines = RunEventPrinter(screen.notes, screen)
    if screen.form != "live":
        return lines
    from ramify.cli.live_run_view import LiveRunView

    return LiveRunView(screen, lines, rlm.limits.max_seconds)


class RunInterrupts:
    """Handles Ctrl-C and SIGTERM while a run is in progress.

    The first Ctrl-C asks for the best answer so far. The second one, or SIGTERM, stops the run.
    """

    def __init__(self, notes: StderrMessageWriter) -> None:
        self.code = ExitCode.STOPPED
        self._notes = notes
        self._count = 0

    @contextlib.contextmanager
    def handle_signals(self, running: RunHandle) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        add_signal_handler(signal.SIGINT, lambda: self._handle_interrupt(running))
        add_signal_handler(signal.SIGTERM, lambda: self._handle_terminate(running))
        try:
            yield
        finally:
            loop.remove_signal_handler(signal.SIGINT)
            loop.remove_signal_handler(signal.SIGTERM)

    def _handle_interrupt(self, running: RunHandle) -> None:
        self._count += 1
        if self._count == 1:
            self._notes.say("ramify: finishing with the best answer so far; Ctrl-C again to stop")
            running.wrap_up()
            return
        running.cancel()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGINT)

    def _handle_terminate(self, running: RunHandle) -> None:
        self.code = ExitCode.TERMINATED
        running.cancel()


# --- printing


def _print(
    result: Result, notes: StderrMessageWriter, as_json: bool, has_schema: bool, *, is_stored: bool
) -> ExitCode:
    code = exit_code_of_run(result.stop, result.answer)
    run_id = result.run_id if is_stored else None
    is_written = True
    try:
        if as_json:
            _print_json(result, run_id)
        elif result.answer is not None:
            _print_answer(result, notes, has_schema)
        sys.stdout.flush()
    except BrokenPipeError:
        raise
    except OSError as error:  # a full disk: the answer was paid for, and is in the store
        terminal_text.discard_stdout()
        kept = f"; read it with: ramify show {run_id}" if run_id else ""
        print_error(f"the answer cannot be written to stdout: {error.strerror}{kept}")
        is_written = False
    if code is ExitCode.SUSPENDED:
        took = format_duration(result.trajectory.seconds)
        how = f"; continue with: ramify ask --resume {run_id}" if run_id else ""
        print_error(f"suspended after {took}: {result.error}{how}")
    elif result.answer is None or code is ExitCode.ERROR:
        print_error(_explain_no_answer(result))
        if result.partial:
            notes.say(f"its last message: {shorten_to_line(result.partial)}")
    elif result.error:
        notes.say(f"ramify: {replace_fields_with_options(result.error)}")
    failure = result.failure
    is_recorded = isinstance(failure, ReplyFiltered)  # a resume would replay the same failure
    if run_id and code is ExitCode.ERROR and isinstance(failure, ModelError) and not is_recorded:
        notes.say(
            f"continue this run with: ramify ask --resume {run_id}, and with --model NAME for "
            "another model"
        )
    notes.say(format_run_summary(result.trajectory, run_id))
    reason = result.trajectory.reason
    printed = result.error if result.answer is not None else why_unanswered(result)
    if result.stop is not Stop.FINAL and reason not in (printed or ""):
        notes.say(f"ended: {replace_fields_with_options(describe_ending(result.stop, reason, 0))}")
    return code if is_written else max(code, ExitCode.ERROR)


def _explain_no_answer(result: Result) -> str:
    """Explain why a run ended without an answer.

    If a limit ended the run, the explanation includes the last error.
    """
    why = why_unanswered(result)
    errors = [error for error in result.trajectory.errors if why not in error]
    return f"{why}; before that: {errors[-1]}" if errors and result.stop.is_truncated() else why


def _print_json(result: Result, run_id: str | None) -> None:
    """Print the result of a run as the JSON object that ``docs/cli.md`` describes.

    It always has all fields, in the same order.
    """
    mode, why = mode_and_reason(result.trajectory.metadata)
    fields = {
        "answer": to_jsonable(result.answer),
        "stop": result.stop,
        "error": why_unanswered(result) if result.answer is None else result.error,
        "partial": result.partial or None,
        "citations": result.citations,
        "mode": mode or None,
        "mode_reason": why or None,
        "usage": {name: getattr(result.usage, name) for name in Usage.__struct_fields__},
        "cost": result.cost,
        "seconds": result.trajectory.seconds,
        "run": run_id,
    }
    print(terminal_text.json_line(fields))


def _print_answer(result: Result, notes: StderrMessageWriter, has_schema: bool) -> None:
    """Print the answer unchanged, followed by its citations.

    If a JSON schema is set, the citations go to stderr, so that stdout remains valid JSON.
    """
    print(result.response)
    lines = [
        f"[{number}] {citation.source}:{citation.first_line}-{citation.last_line} "
        f"{f'({shorten_to_line(citation.place, 80)}) ' if citation.place else ''}"
        f"{terminal_text.shorten_to_line(citation.quote, 160)!r}"
        for number, citation in enumerate(result.citations, 1)
    ]
    if has_schema:  # stdout must stay JSON
        for line in lines:
            notes.say(line)
    elif lines:
        print("\n" + "\n".join(lines))


def format_run_summary(
    trajectory: Trajectory, run_id: str | None, unfinished: str = "running"
) -> str:
    """Summarise a run in one line.

    For a run that has not ended, the text ``unfinished`` replaces the stop reason.

    ``final · 3 turns, 12 requests · 45.2k tokens · $0.012 · 4.2 s · run 20260301-…``
    """
    usage = trajectory.usage
    turns = len(trajectory.root.turns) if trajectory.calls else 0
    bound = "at most " if usage.unknown_calls else ""
    is_plan = bool(trajectory.calls) and trajectory.root.kind == "strategy"
    num_turns = "" if is_plan else f"{terminal_text.pluralize(turns, 'turn')}, "
    parts = [
        str(trajectory.stop or unfinished),
        f"{num_turns}{terminal_text.pluralize(usage.calls, 'request')}",
        f"{bound}{terminal_text.format_count(usage.total_tokens)} tokens",
        bound * (trajectory.cost is not None) + terminal_text.format_dollars(trajectory.cost),
        terminal_text.format_duration(trajectory.seconds),
        *([f"run {run_id}"] if run_id else []),
    ]
    return " · ".join(parts)
