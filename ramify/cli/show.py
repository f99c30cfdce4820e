"""The commands ``ramify show`` and ``ramify replay``.

``show`` prints a stored run as text, as one JSON object, or as its events. ``replay`` runs its code
again with the recorded replies, and reports differences.

    run 20260301-142501-…  2026-03-01 14:25
    final · 3 turns, 312 requests · 45.2k tokens · $0.12 · 14.2 s

    0 Which host failed first?  → db3  $0.12  14 s
    └ llm_query × 300: 297 done, 3 failed  $0.02  9 s

    0 openai:gpt-5 (rlm): Which host failed first?
      turn 1
        | print(context[:500])
        > 2026-03-01 …
        llm_query × 300: 297 done, 3 failed
      answer: db3
    ended: final, after 3 turns

Text from models and documents is stripped of escape sequences, except with ``--json`` and
``--events``, which are for programs. A replay calls no model and writes nothing; each difference
names its call, turn and cell. ``rebuild_recorded_run.py`` rebuilds the settings of the run.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import msgspec

from ramify.cli.parser import CliOptionSpec, ExitCode, SubcommandSpec, UsageError
from ramify.cli.settings import open_configured_store
from ramify.cli.show_path import (
    PathAndLine,
    map_at,
    parse_path_and_line,
    raise_unshowable_path,
    rollout_list_lines,
    rollouts_at,
    training_run_summary,
    trajectory_on_line,
)
from ramify.cli.stored_table_questions import (
    find_map,
    is_map_id,
    map_lines,
    question_events,
    question_row_line,
    trajectory_from_events,
)
from ramify.cli.terminal_text import (
    Line,
    StderrMessageWriter,
    call_tree_lines,
    format_dollars,
    format_duration,
    format_local_time,
    json_line,
    pluralize,
    shorten_to_line,
    styled_text,
    write_lines,
)
from ramify.errors import ConfigError, RamifyError, did_you_mean
from ramify.terminal_sanitizer import strip_control_characters
from ramify.types.end_reason import describe_ending
from ramify.types.event import mode_and_reason
from ramify.types.trajectory import Call, Cell, Stop, Trajectory, Turn, answer_text

_OUTPUT_LINES = 12
_NOTE = "[note] "
_PLAIN_SHOWN = 3
"""Maximum number of plain sub-calls of a code cell that are listed one by one. If there are
more, they are only counted."""


def show(
    words: list[str],
    call: str | None,
    turn: int | None,
    tree: bool | None,
    full: bool | None,
    json: bool | None,
    events: bool | None,
    pager: bool | None,
) -> int:
    run = words[0]
    store = open_configured_store()
    if turn is not None and (tree or json or events or turn < 1):
        raise UsageError(
            f"--turn {turn} must be at least 1, and cannot be combined with --tree, --json or "
            "--events"
        )
    if (given := parse_path_and_line(run)) is not None:
        rollout = trajectory_on_line(given)
        if rollout is None:
            _show_path(given, as_json=bool(json), full=bool(full), use_pager=pager is not False)
            return ExitCode.ANSWERED
        if events:
            raise UsageError(
                f"--events shows the journal of a run, and {run} is a rollout: remove --events"
            )
        _show_trajectory(
            rollout, call, turn, tree=bool(tree), full=bool(full), as_json=bool(json), pager=pager
        )
        return ExitCode.ANSWERED
    of_map = question_events(store, run) if is_map_id(run) else None
    if is_map_id(run) and of_map is None:
        table = find_map(store, run)
        if json:
            for row in table.question_rows:
                print(json_line(row))
        else:
            write_lines(map_lines(table, bool(full)), use_pager=pager is not False)
        return ExitCode.ANSWERED
    if events:
        for event in store.events(run) if of_map is None else of_map:
            print(json_line(event))
        return ExitCode.ANSWERED
    trajectory = store.load(run) if of_map is None else trajectory_from_events(of_map)
    _show_trajectory(
        trajectory,
        call,
        turn,
        tree=bool(tree),
        full=bool(full),
        as_json=bool(json),
        pager=pager,
        is_alive=of_map is None and store.stored(run).has_active_writer(),
        row=None if of_map is None else question_row_line(store, run),
    )
    return ExitCode.ANSWERED


def _show_path(given: PathAndLine, *, as_json: bool, full: bool, use_pager: bool) -> None:
    """Print the contents of a path: a file of rollouts, a training run or a map over a table.

    Raises UsageError for anything else, with the command that reads it.
    """
    if (table := map_at(given)) is not None:
        write_lines(map_lines(table, full), use_pager=use_pager)
        return
    rows = rollouts_at(given)
    if rows and as_json:
        for row in rows:
            print(json_line(row))
        return
    lines = list(rollout_list_lines(given.path, rows) if rows else training_run_summary(given.path))
    if not lines:
        raise_unshowable_path(given)
    write_lines(lines, use_pager=use_pager)


def _show_trajectory(
    trajectory: Trajectory,
    call: str | None,
    turn: int | None,
    *,
    tree: bool,
    full: bool,
    as_json: bool,
    pager: bool | None,
    is_alive: bool = False,
    row: str | None = None,
) -> None:
    if as_json:
        print(json_line(_call_of(trajectory, call) if call else trajectory))
        return
    lines: Iterator[Line]
    if turn is not None:
        lines = _turn_lines(trajectory, _call_of(trajectory, call or "0"), turn)
    elif call:
        lines = _conversation(trajectory, _call_of(trajectory, call))
    else:
        lines = _run_lines(trajectory, full, is_alive, only_tree=tree, row=row)
    write_lines(lines, use_pager=pager is not False)


def _run_lines(
    trajectory: Trajectory,
    full: bool,
    is_alive: bool,
    *,
    only_tree: bool,
    row: str | None = None,
) -> Iterator[Line]:
    from ramify.cli.ask_runner import format_run_summary

    yield f"run {trajectory.id}  {format_local_time(trajectory.started_at)}"
    yield format_run_summary(trajectory, None, "running" if is_alive else "interrupted")
    if trajectory.context:
        context = trajectory.context
        size = f"context: {context.kind}, {context.chars:,} characters"
        size += ", names included" * (context.kind == "dict")
        yield ", ".join(filter(None, (size, shorten_to_line(context.reference_text, 500))))
    if row is not None:
        yield row if full else shorten_to_line(row, 500)
    if gold := trajectory.metadata.get("gold"):
        yield f"expected: {shorten_to_line(str(gold), 200)}"
    mode, why = mode_and_reason(trajectory.metadata)
    if mode:
        yield f"mode {mode}" + f": {shorten_to_line(why, 500)}" * bool(why)
    yield from _strategy_lines(trajectory.metadata)
    yield ""
    yield from call_tree_lines(trajectory)
    below = _calls_below(trajectory)
    for root in trajectory.calls:
        if root.parent is None and not only_tree:
            yield from _call_lines(below, root, "", full)
    if trajectory.answered_by:
        yield from ("", f"the answer of {trajectory.answered_by} was chosen")
    for warning in trajectory.warnings:
        yield f"warning: {warning}"
    roots = [root for root in trajectory.calls if root.parent is None]
    turns = len(roots[-1].turns) if roots else 0
    reason = trajectory.reason or (roots[-1].error or "" if roots else "")
    for error in trajectory.errors:
        if not reason or not error.endswith(reason):  # the last line says it
            yield styled_text("bad", f"error: {error}")
    tone = "good" if trajectory.stop is Stop.FINAL else "warn"
    num_below = max(0, len(trajectory.calls) - len(roots))
    ended = describe_ending(trajectory.stop, reason, turns, is_alive, num_below=num_below)
    yield styled_text(tone, f"ended: {ended}")
    if trajectory.stop is Stop.SUSPENDED:
        yield f"continue with: ramify ask --resume {trajectory.id}"


def _strategy_lines(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield lines that describe the plan of a run, if the run was answered by a plan."""
    strategy = config.get("strategy") or {}
    if strategy.get("name") != "plan":
        return
    from ramify.plans.plan_strategy import PlanStrategy

    yield ""
    try:
        found = msgspec.convert(strategy, PlanStrategy)
    except (msgspec.ValidationError, RamifyError) as error:  # of another version
        yield f"plan: cannot be shown here ({shorten_to_line(str(error), 200)})"
        return
    yield "plan"
    yield from found.plan.picture().splitlines()


def _turn_lines(trajectory: Trajectory, call: Call, number: int) -> Iterator[str]:
    """Yield all lines of one turn: its new messages, its reply, and the output of its code
    cells."""
    if number > len(call.turns):
        raise ConfigError(
            f"call {call.id} has no turn {number}: it has {pluralize(len(call.turns), 'turn')}"
        )
    turn = call.turns[number - 1]
    yield f"{call.id} turn {number}{_format_usage(turn)}"
    for message in (*turn.prompt, turn.reply.message):
        yield f"--- {message.role} ---"
        yield message.content
    for index, cell in enumerate(turn.cells):
        yield f"--- cell {index + 1} ---"
        yield from _cell_lines(cell, "", True)
    made = [c for c in trajectory.children(call) if c.parent and c.parent.turn == number - 1]
    yield from _children_lines({}, [c for c in made if c.kind != "rlm"], "", True)
    yield from (f"{c.id} rlm: {shorten_to_line(c.question, 70)}" for c in made if c.kind == "rlm")


_CallsBelow = Mapping[str, Mapping[tuple[int, int], list[Call]]]
"""Call id -> (turn, cell) -> the sub-calls that this code cell made."""


def _calls_below(trajectory: Trajectory) -> _CallsBelow:
    below: dict[str, dict[tuple[int, int], list[Call]]] = {}
    for call in trajectory.calls:
        if (parent := call.parent) is not None:
            cells = below.setdefault(parent.call, {})
            cells.setdefault((parent.turn, parent.cell), []).append(call)
    return below


def _call_lines(below: _CallsBelow, call: Call, indent: str, full: bool) -> Iterator[str]:
    yield ""
    question = shorten_to_line(call.question, 160)
    yield f"{indent}{call.id} {call.model} ({call.kind}{_origin(call)}): {question}"
    cells = below.get(call.id, {})
    has_turns = call.kind == "rlm" or call.cause is not None
    if call.turns:  # the call that chose the mode came before them
        yield from _children_lines(below, cells.get((-1, 0), []), f"{indent}  ", full)
    for number, turn in enumerate(call.turns):
        if has_turns:
            yield f"{indent}  turn {number + 1}{_format_usage(turn)}"
        for index, cell in enumerate(turn.cells):
            yield from _cell_lines(cell, indent + "    ", full)
            subcalls = cells.get((number, index), [])
            yield from _children_lines(below, subcalls, indent + "    ", full)
        if not turn.cells and has_turns:
            yield from _format_block(turn.reply.message.content, f"{indent}    ", full)
        for note in _notes_after(call, number):
            yield f"{indent}    ! {note if full else shorten_to_line(note, 300)}"
    if not call.turns:  # of a strategy, which asks without turns
        children = [child for made in cells.values() for child in made]
        yield from _children_lines(below, children, f"{indent}    ", full)
    yield f"{indent}  {_describe_end(call, full)}"


def _notes_after(call: Call, turn: int) -> list[str]:
    """Return the notes that the model received about a turn, such as why its answer was rejected.

    The prompt of the next turn begins with them.
    """
    following = call.turns[turn + 1].prompt if turn + 1 < len(call.turns) else ()
    lines = [line for message in following for line in message.content.splitlines()]
    return [line.removeprefix(_NOTE) for line in lines if line.startswith(_NOTE)]


def _origin(call: Call) -> str:
    """Describe why an external agent's call began, and which call it was forked from.

    The text goes at the end of a line. It is empty for any other call.
    """
    cause = "" if call.cause is None else f", {call.cause}"
    if call.fork is None:
        return cause
    return cause + (
        f", from turn {call.fork.turn + 1} of {call.fork.call}"
        if call.fork.turn >= 0
        else f", sibling of {call.fork.call}"
    )


def _children_lines(
    below: _CallsBelow, subcalls: list[Call], indent: str, full: bool
) -> Iterator[str]:
    plain = [call for call in subcalls if call.kind not in ("rlm", "strategy")]
    for call in plain if full or len(plain) <= _PLAIN_SHOWN else []:
        yield _child_line(call, indent)
    if len(plain) > _PLAIN_SHOWN and not full:
        failed = sum(call.stop is Stop.ERROR for call in plain)
        what = "leaf" if plain[0].kind == "leaf" else "llm_query"
        yield f"{indent}{plain[0].id} … {plain[-1].id}: {what} × {len(plain):,}" + (
            f", {failed:,} failed" if failed else ""
        )
    for call in subcalls:
        if call.kind == "rlm":
            yield from _call_lines(below, call, indent, full)
        elif call.kind == "strategy":
            yield _child_line(call, indent)
            leaves = [leaf for made in below.get(call.id, {}).values() for leaf in made]
            yield from _children_lines(below, leaves, f"{indent}  ", full)


def _child_line(call: Call, indent: str) -> str:
    answer = shorten_to_line(call.error or answer_text(call.answer), 70)
    return f"{indent}{call.id} {call.kind}: {shorten_to_line(call.question, 70)} → {answer}"


def _cell_lines(cell: Cell, indent: str, full: bool) -> Iterator[str]:
    yield from _format_block(cell.code, f"{indent}| ", True)
    shown = "\n".join(
        filter(
            None,
            [cell.stdout.rstrip("\n"), f"=> {cell.value}" if cell.value else "", cell.error or ""],
        )
    )
    yield from _format_block(shown, f"{indent}> ", full)


def _format_block(text: str, prefix: str, full: bool) -> Iterator[str]:
    lines = strip_control_characters(text).rstrip("\n").split("\n") if text else []
    shown: Iterable[str] = lines
    if not full and len(lines) > _OUTPUT_LINES:
        shown = [
            *lines[: _OUTPUT_LINES - 3],
            f"… {len(lines) - _OUTPUT_LINES + 1:,} more lines: --full",
            *lines[-2:],
        ]
    for line in shown:
        yield prefix + (line if full or len(line) <= 300 else line[:299] + "…")


def _format_usage(turn: Turn) -> str:
    usage, cost = turn.reply.usage, turn.reply.cost
    price = f", {format_dollars(cost)}" if cost is not None else ""
    tokens = f"{usage.input_tokens:,} in, {usage.output_tokens:,} out"
    return f"  ({tokens}{price}, {format_duration(turn.reply.seconds)})"


def _describe_end(call: Call, full: bool) -> str:
    if call.stop is None:
        return "not ended"
    if call.stop is Stop.SUSPENDED and call.answer is None:
        return f"suspended, waiting for this to be fixed: {call.reason or call.error}"
    answer = answer_text(call.answer)
    shown = answer if full or call.parent is None else shorten_to_line(answer, 300)
    limit = "" if call.stop is Stop.FINAL else f" ({call.stop})"
    return (
        f"answer{limit}: {shown}"
        if call.answer is not None
        else ": ".join([f"no answer ({call.stop})", *([call.error] if call.error else [])])
    )


def _conversation(trajectory: Trajectory, call: Call) -> Iterator[str]:
    yield f"{call.id} {call.model} ({call.kind})"
    for message in trajectory.conversation(call):
        yield f"--- {message.role} ---"
        yield message.content
    yield f"--- {_describe_end(call, True)}"


def _call_of(trajectory: Trajectory, id: str) -> Call:
    known = [call.id for call in trajectory.calls]
    if id not in known:
        raise ConfigError(f"run {trajectory.id} has no call {id}: {did_you_mean(id, known[:20])}")
    return trajectory.call(id)


SHOW = SubcommandSpec(
    "show",
    "Show what happened in a run: its turns, code, output, sub-calls and answer.\n\n"
    "RUN is a run's id, the start of an id, the path of a journal, or last. The id of a map\n"
    "prints its rows, and MAP:7 shows question 7 of it. A file of rollouts, which training\n"
    "saves, prints one line for each, and FILE:7 shows the seventh; the folder of a training\n"
    "run prints its last figures.",
    show,
    "RUN",
    1,
    1,
    (
        CliOptionSpec(
            "call", str, "show only this call (such as 0.3), with its full prompts", "ID"
        ),
        CliOptionSpec("turn", int, "show only this turn in full, of --call or else the first call"),
        CliOptionSpec("tree", bool, "show only the tree of calls with their answers", has_no=False),
        CliOptionSpec("full", bool, "do not shorten outputs and answers", has_no=False),
        CliOptionSpec("json", bool, "print the trajectory as one JSON object", has_no=False),
        CliOptionSpec(
            "events", bool, "print the journal's events, one JSON object per line", has_no=False
        ),
        CliOptionSpec("pager", bool, "page a long output on a terminal (default: yes)"),
    ),
)


_MAX_DIFFERENCES = 10


def replay_run(words: list[str], json: bool | None, allow_weaker: bool | None) -> int:
    import asyncio

    from ramify.cli.rebuild_recorded_run import load_recorded_run, rebuild_rlm

    run = words[0]
    StderrMessageWriter().show_warnings_and_logs()
    store, recorded = load_recorded_run(run)
    rlm = rebuild_rlm(recorded.started, store, stand_ins=True, allow_weaker=bool(allow_weaker))

    async def repeat() -> Trajectory:
        async with rlm:
            return (await rlm.areplay(run)).trajectory

    new, old = asyncio.run(repeat()), store.load(run)
    changes = list(differences(old, new))
    if json:
        report = {"run": old.id, "same": not changes, "differences": changes}
        print(json_line(report))
    else:
        print(_verdict(old, changes))
    return ExitCode.ERROR if changes else ExitCode.ANSWERED


def differences(old: Trajectory, new: Trajectory) -> Iterator[str]:
    """Compare two runs of the same question, and yield a line for each code cell, call and
    answer that differs."""
    calls = {call.id: call for call in new.calls}
    for call in old.calls:
        replayed = calls.pop(call.id, None)
        if replayed is None:
            yield f"call {call.id} was not made again"
        else:
            yield from _call_differences(call, replayed)
    yield from (f"call {id} is new" for id in calls)
    if not _is_same(old.answer, new.answer):
        yield f"the answer was {_format_value(old.answer)} and is now {_format_value(new.answer)}"


def _call_differences(old: Call, new: Call) -> Iterator[str]:
    if len(old.turns) != len(new.turns):
        yield f"call {old.id} took {len(old.turns)} turns and now takes {len(new.turns)}"
    for turn, (old_turn, new_turn) in enumerate(zip(old.turns, new.turns, strict=False)):
        for cell, cells in enumerate(zip(old_turn.cells, new_turn.cells, strict=False)):
            for name in ("stdout", "value", "error"):
                before, after = (getattr(result, name) for result in cells)
                if before != after:
                    place = f"call {old.id}, turn {turn}, cell {cell}"
                    yield (
                        f"{place}: {name} was {_format_value(before)} "
                        f"and is now {_format_value(after)}"
                    )
    if old.stop != new.stop or not _is_same(old.answer, new.answer):
        yield (
            f"call {old.id} ended {old.stop} with {_format_value(old.answer)} "
            f"and now ends {new.stop} with {_format_value(new.answer)}"
        )


def _is_same(old: Any, new: Any) -> bool:
    """Return True if two answers are equal when written as JSON.

    A tuple becomes a list, and NaN becomes null.
    """
    return msgspec.json.encode(old) == msgspec.json.encode(new)


def _verdict(old: Trajectory, changes: list[str]) -> str:
    cells = sum(len(turn.cells) for call in old.calls for turn in call.turns)
    if not changes:
        return (
            f"same: {pluralize(len(old.calls), 'call')}, {pluralize(cells, 'cell')}, and the answer"
        )
    more = (
        [f"… and {len(changes) - _MAX_DIFFERENCES:,} more"]
        if len(changes) > _MAX_DIFFERENCES
        else []
    )
    return strip_control_characters(
        "\n".join(
            [
                f"different in {pluralize(len(changes), 'place')}:",
                *(f"  {line}" for line in changes[:_MAX_DIFFERENCES]),
                *more,
            ]
        )
    )


def _format_value(value: Any) -> str:
    return shorten_to_line(repr(value), 100)


REPLAY = SubcommandSpec(
    "replay",
    """\
Re-run a stored run's code against its recorded replies, and compare the results. No model is
called. The exit code is 0 if every result is the same, 1 if not.""",
    replay_run,
    "RUN",
    1,
    1,
    (
        CliOptionSpec("json", bool, "print one JSON object", has_no=False),
        CliOptionSpec(
            "allow_weaker", bool, "accept weaker isolation than the run had", has_no=False
        ),
    ),
)
COMMANDS = (SHOW, REPLAY)
