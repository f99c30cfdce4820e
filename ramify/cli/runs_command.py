"""The command ``ramify runs`` and its subcommands, which work on stored runs.

The subcommands are ``review``, ``score``, ``check``, ``repair``, ``rm`` and ``prune``.
``ramify/store/folder_store.py`` reads and writes the files of the store.
"""

from __future__ import annotations

import asyncio
import getpass
import shlex
import sys
from collections import Counter
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Literal, NamedTuple, cast

import msgspec

from ramify.cli.parser import (
    CliOptionSpec,
    ExitCode,
    SubcommandSpec,
    UsageError,
    parse_duration,
    parse_size,
)
from ramify.cli.settings import open_configured_folder_store, open_configured_store
from ramify.cli.stored_table_questions import find_map, is_map_id, print_maps, remove_map
from ramify.cli.terminal_text import (
    format_count,
    format_dollars,
    format_duration,
    format_local_time,
    format_size,
    json_line,
    pluralize,
    rich_console,
    sanitized_renderable,
    shorten_to_line,
)
from ramify.nearest_name import nearest_name
from ramify.store.journal import NOTHING_KEPT
from ramify.store.repair import JournalCheckResult
from ramify.store.reviews import UNSCORED, Verdict
from ramify.store.run_filter import corrected_reward, parse_run_filter
from ramify.store.run_summary import RunSummary

if TYPE_CHECKING:
    from ramify.evaluate.traffic_scores import TrafficScoringCounts
    from ramify.store.base import RunStore

_SHORT = len("20260301-142501-5gk0x7m")
"""Length of the part of a run id that a table shows. That part is unique; the rest consists of
words from the question."""
_DROPPED_FIRST = ("when", "tokens", "calls", "model", "seconds", "answer")
"""Columns that are dropped on a narrow terminal, in this order. The cost and the stop reason are
never dropped."""
_COLUMNS = ("run", "when", "question", "model", "stop", "calls", "tokens", "cost", "seconds")
_VERDICTS = ("right", "wrong", "not-sure", "none")
_MOST_SHOWN = 20
"""Number of runs that are listed by default."""
_BY_REFERENCE = "by reference"
"""Name of the column that counts the files that a run refers to without storing a copy."""


def runs(words: list[str], limit: int | None, json: bool | None, maps: bool | None = None) -> int:
    if maps:
        if words:
            raise UsageError(
                "--maps cannot be filtered: remove the filter, or browse maps in ramify view"
            )
        print_maps(open_configured_store(), as_json=bool(json))
        return ExitCode.ANSWERED
    folds = not words and limit is None and not json and sys.stdout.isatty()
    limit = _MOST_SHOWN if limit is None else limit
    if limit < 0:
        raise UsageError(f"--limit {limit}: give 0 (for all) or more")
    wanted = parse_run_filter(" ".join(words))
    if folds:
        _draw_folded(open_configured_store().runs())
        return ExitCode.ANSWERED
    stored = open_configured_store().runs(None if words else limit or None)
    summaries = wanted.apply(stored)
    if words and not summaries:
        print(f"none of {pluralize(len(stored), 'run')} matches {' '.join(words)}", file=sys.stderr)
        for line in wanted.unknown_values(stored):
            print(line, file=sys.stderr)
        if subcommand := nearest_name(words[0], _SUBCOMMANDS):
            meant = shlex.join(["ramify", "runs", subcommand, *words[1:]])
            print(f"did you mean: {meant}", file=sys.stderr)
    if wanted.group:
        _print_groups(wanted.groups(summaries), wanted.group, as_json=bool(json))
        return ExitCode.ANSWERED
    summaries = summaries[: limit or None]
    if json:
        for summary in summaries:
            print(json_line(_as_dict(summary)))
    elif sys.stdout.isatty():
        _draw(summaries)
    else:
        print("\t".join([*_COLUMNS, _BY_REFERENCE]))
        for summary in summaries:
            print("\t".join([*_cells(summary, 200), _format_num_files(summary)]))
    return ExitCode.ANSWERED


def review(
    words: list[str],
    label: list[str] | None,
    note: str | None,
    score: list[str] | None,
    verdict: str | None,
    person: str | None,
) -> int:
    store = open_configured_store()
    run = store.find(words[0])
    known = store.review(run)
    if person is not None and verdict is None:
        raise UsageError("--person says who gives a verdict: add --verdict, or remove --person")
    if label is None and note is None and score is None and verdict is None:
        print(msgspec.json.format(json_line(known), indent=1))
        return ExitCode.ANSWERED
    labels, rewards = list(known.labels), dict(known.rewards)
    for each in label or ():
        name = each.removeprefix("-")
        labels = [old for old in labels if old != name] + ([name] if name == each else [])
    for each in score or ():
        name, sign, value = each.partition("=")
        try:
            if not sign:
                raise ValueError
            rewards.pop(name, None)
            rewards |= {name: float(value)} if value else {}
        except ValueError:
            raise UsageError(
                f"--score {each}: give NAME=NUMBER, or NAME= for the recorded score"
            ) from None
    saved = msgspec.structs.replace(
        known,
        labels=tuple(labels),
        note=known.note if note is None else note,
        rewards=rewards,
    )
    if verdict is not None:
        if verdict not in _VERDICTS:
            raise UsageError(f"--verdict {verdict}: give {', '.join(_VERDICTS)}")
        reward = next(iter(store.load(run).rewards), UNSCORED)
        said = None if verdict == "none" else cast("Verdict", verdict.replace("-", " "))
        saved = saved.with_verdict(person or getpass.getuser(), said, reward)
    store.write_review(run, saved)
    print(f"reviewed {run}")
    return ExitCode.ANSWERED


def score(
    words: list[str],
    correction: list[str] | None,
    judge: str | None,
    max_cost: float | None,
    by: str | None,
) -> int:
    given = [bool(correction), bool(judge), bool(by)]
    if sum(given) != 1:
        raise UsageError("score by one of --correction PATTERN, --judge MODEL and --by FILE:NAME")
    if max_cost is not None and not judge:
        raise UsageError("--max-cost needs --judge MODEL: add it")
    from ramify.evaluate import traffic_scores
    from ramify.plugins import PluginRegistry
    from ramify.store.folder_store import Store
    from ramify.store.traffic_policy_identity import read_identity

    folder = Path(words[0]).expanduser()
    if read_identity(folder) is None:
        raise UsageError(
            f"{folder} is not a store of recorded traffic: give the folder of --record"
        )
    store = Store(folder)
    if by:
        done = traffic_scores.score_stored_conversations(
            store, PluginRegistry("function", "ramify.scores", {}).resolve(by), by
        )
    elif correction:
        rule = traffic_scores.regex_correction_rule(correction)
        done = asyncio.run(traffic_scores.score_corrections(store, rule, "correction"))
    else:
        done = asyncio.run(
            _judge_corrections(store, str(judge), 1.0 if max_cost is None else max_cost)
        )
    what = "conversation" if by else "reply"
    plural = "conversations" if by else "replies"
    text = f"scored {done.num_scored:,} {what if done.num_scored == 1 else plural}"
    if not by:
        text += f", {done.num_corrections:,} of them corrected by the user"
    if done.num_undecided:
        text += f"; {done.num_undecided:,} could not be decided"
    if done.num_busy:
        text += (
            f"; {pluralize(done.num_busy, 'conversation')} in use by a server: score again later"
        )
    print(text)
    return ExitCode.ANSWERED


async def _judge_corrections(store: RunStore, model: str, max_cost: float) -> TrafficScoringCounts:
    from ramify.clients.rate_limited_requests import RateLimitedClientPool
    from ramify.evaluate.traffic_scores import UserCorrectionDetector, score_corrections

    pool = RateLimitedClientPool()
    try:
        judge = UserCorrectionDetector(pool.client(model), max_cost)
        return await score_corrections(store, judge, f"judge {model}")
    finally:
        await pool.close()


def check(words: list[str], all: bool | None) -> int:
    if bool(words) == bool(all):
        raise UsageError("give a RUN to check, or --all")
    store = open_configured_folder_store("ramify runs check")
    paths = [store.path(name) for name in words or [run.id for run in store.runs()]]
    num_damaged = 0
    for path in paths:
        found = store.check(path)
        num_damaged += not found.is_whole
        if not words and found.is_whole:
            continue  # of all runs, only those with damage are named
        print(f"{found.id}: {_verdict(found)}")
        for damage in found.damage:
            reason = shorten_to_line(damage.reason, 200)
            print(f"  line {damage.number} (byte {damage.offset:,}): {reason}")
        if found.num_damaged > len(found.damage):
            print(f"  and {pluralize(found.num_damaged - len(found.damage), 'more damaged line')}")
        for text in found.lost_contexts:
            print(f"  {text}")
        if found.damage and found.damage[0].number == 1:
            print(f"  {NOTHING_KEPT}; delete it: ramify runs rm {found.id}")
        elif found.num_damaged:
            print(f"  keep what is before the damage: ramify runs repair {found.id}")
    if not words:
        print(f"{pluralize(len(paths), 'run')} checked, {num_damaged} damaged")
    return ExitCode.ERROR if num_damaged else ExitCode.ANSWERED


def _verdict(found: JournalCheckResult) -> str:
    if not found.num_lines:
        state = "nothing is recorded"
    elif found.num_damaged:
        state = f"damaged at {pluralize(found.num_damaged, 'line')} of {found.num_lines:,}"
    else:
        state = f"{pluralize(found.num_lines, 'line')}, whole"
    if found.num_checked < found.num_lines:
        num = found.num_lines - found.num_checked
        state += f"; {num:,} have no checksum, so only their form was checked"
    if found.torn_bytes:
        state += f"; {found.torn_bytes:,} bytes of an incomplete last line"
    return f"{state}; {found.stop or ('running' if found.is_written else 'not ended')}"


def repair(words: list[str]) -> int:
    store = open_configured_folder_store("ramify runs repair")
    if not store.check(words[0]).num_damaged:
        print(f"{store.path(words[0]).stem} is whole: there is nothing to repair")
        return ExitCode.ANSWERED
    done = store.repair(words[0])
    damage = done.damage
    print(f"line {damage.number} is damaged: {shorten_to_line(damage.reason, 200)}")
    replies = f"{done.num_lost_replies:,} later repl{'y' if done.num_lost_replies == 1 else 'ies'}"
    print(f"kept {pluralize(done.num_kept, 'line')}; {replies} will be asked again")
    print(f"the journal as it was: {done.backup}")
    print(f"continue: ramify ask --resume {done.id}")
    return ExitCode.ANSWERED


def rm(words: list[str]) -> int:
    store = open_configured_store()
    maps = [find_map(store, name).id for name in words if is_map_id(name)]
    # Look up every run before deleting any.
    ids = [store.find(name) for name in words if not is_map_id(name)]
    for id in dict.fromkeys(maps):
        print(f"deleted {id} ({format_size(remove_map(store, id))})")
    for id in dict.fromkeys(ids):
        print(f"deleted {id} ({format_size(store.remove(id))})")
    return ExitCode.ANSWERED


def prune(words: list[str], older_than: str | None, keep: int | None, max_size: str | None) -> int:
    if keep is not None and keep < 0:
        raise UsageError(f"--keep {keep}: give 0 or more")
    if keep is None and older_than is None and max_size is None:
        raise UsageError("nothing to prune by: give --older-than AGE, --keep N or --max-size SIZE")
    store = open_configured_folder_store("ramify runs prune")
    before = store.size()
    removed = store.prune(
        None if older_than is None else parse_duration(older_than, "--older-than"),
        keep,
        None if max_size is None else parse_size(max_size, "--max-size", default_unit=""),
    )
    for id in removed.runs:
        print(f"deleted {id}")
    for id in removed.evaluations:
        print(f"deleted evaluation {id}")
    after = store.size()
    evaluations = (
        f" and {pluralize(len(removed.evaluations), 'evaluation')}" if removed.evaluations else ""
    )
    freed = f"{format_size(max(before - after, 0))} freed, {format_size(after)} left"
    print(f"{pluralize(len(removed.runs), 'run')}{evaluations} deleted, {freed}")
    return ExitCode.ANSWERED


def _as_dict(summary: RunSummary) -> dict[str, object]:
    """Convert a run's summary to a dictionary with all of its fields.

    Fields with default values are included.
    """
    fields = {name: getattr(summary, name) for name in summary.__struct_fields__}
    fields["usage"] = {
        name: getattr(summary.usage, name) for name in summary.usage.__struct_fields__
    }
    return {"run": fields.pop("id"), **fields}


def _cells(summary: RunSummary, width: int) -> list[str]:
    state = "running" if summary.alive else "damaged" if summary.problem else "interrupted"
    return [
        summary.id,
        format_local_time(summary.started_at),
        shorten_to_line(summary.question, width),
        shorten_to_line(summary.model),
        str(summary.stop or state),
        f"{summary.num_calls:,}",
        format_count(summary.usage.total_tokens),
        "unknown" if summary.cost is None else format_dollars(summary.cost),
        format_duration(summary.seconds),
    ]


def _draw_folded(summaries: list[RunSummary]) -> None:
    """Print the newest runs started by a user, and one line for each task with evaluation runs.

    If there are no directly started runs, print the newest of all.
    """
    asked = [run for run in summaries if not run.task]
    if not asked:
        return _draw(summaries[:_MOST_SHOWN])
    _draw(asked[:_MOST_SHOWN])
    if len(asked) > _MOST_SHOWN:
        print(f"and {len(asked) - _MOST_SHOWN:,} older: ramify runs --limit 0")
    for task, num in Counter(run.task for run in summaries if run.task).most_common():
        value = f'"{task}"' if " " in task else task
        command = shlex.join(["ramify", "runs", f"task={value}"])
        print(
            f"and {pluralize(num, 'run')} of the evaluation of "
            f"{shorten_to_line(task, 60)}: {command}"
        )
    return None


class _GroupRow(NamedTuple):
    """Statistics for a group of stored runs that share the value of one field."""

    value: str
    runs: int
    median_cost: float | None
    median_seconds: float
    mean_reward: float | None


def _group_row(value: str, members: list[RunSummary]) -> _GroupRow:
    costs = [run.cost for run in members if run.cost is not None]
    rewards = [reward for run in members if (reward := corrected_reward(run)) is not None]
    return _GroupRow(
        value,
        len(members),
        median(costs) if costs else None,
        median(run.seconds for run in members),
        fmean(rewards) if rewards else None,
    )


def _print_groups(groups: list[tuple[str, list[RunSummary]]], field: str, *, as_json: bool) -> None:
    rows = [_group_row(value, members) for value, members in groups]
    if as_json:
        for row in rows:
            figures = row._asdict()
            print(json_line({field: figures.pop("value"), **figures}))
        return
    cells = [[field, "runs", "median cost", "median time", "mean reward"]]
    for row in rows:
        cells.append(
            [
                shorten_to_line(row.value or "none", 40),
                f"{row.runs:,}",
                "unknown" if row.median_cost is None else format_dollars(row.median_cost),
                format_duration(row.median_seconds),
                "" if row.mean_reward is None else f"{row.mean_reward:.3f}",
            ]
        )
    if not sys.stdout.isatty():
        for each in cells:
            print("\t".join(each))
        return
    widths = [max(len(each[column]) for each in cells) for column in range(len(cells[0]))]
    for name, *texts in cells:
        aligned = [text.rjust(width) for text, width in zip(texts, widths[1:], strict=True)]
        print("  ".join([name.ljust(widths[0]), *aligned]).rstrip())


def _format_num_files(summary: RunSummary) -> str:
    return pluralize(summary.num_files, "file") if summary.num_files else ""


def _draw(summaries: list[RunSummary]) -> None:
    from rich.table import Table
    from rich.text import Text

    rows = [_cells(summary, 60) for summary in summaries]
    rows = [[row[0][:_SHORT], row[1][5:], *row[2:]] for row in rows]  # the id has the year
    rows = [
        [*row, "" if summary.answer is None else shorten_to_line(summary.answer, 60)]
        for row, summary in zip(rows, summaries, strict=True)
    ]
    names = [*_COLUMNS, "answer"]
    if any(summary.num_files for summary in summaries):
        names.append(_BY_REFERENCE)
        rows = [
            [*row, _format_num_files(summary)] for row, summary in zip(rows, summaries, strict=True)
        ]
    widths = [
        {"question": 18, "model": 12, "answer": 16}.get(name)
        or max([len(name), *(len(row[index]) for row in rows)])
        for index, name in enumerate(names)
    ]
    terminal = rich_console()
    for name in _DROPPED_FIRST:
        if sum(widths) + 2 * len(widths) <= terminal.width:
            break
        at = names.index(name)
        del names[at], widths[at]
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    free = max(0, terminal.width - sum(widths) - 2 * len(widths))
    shares = {"question": 0.6, "answer": 0.4} if "answer" in names else {"question": 1.0}
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name, least in zip(names, widths, strict=True):
        justify: Literal["left", "right"] = (
            "right" if name in ("calls", "tokens", "cost", "seconds") else "left"
        )
        width = least + min(int(free * shares.get(name, 0)), 60)
        table.add_column(name, justify=justify, no_wrap=True, overflow="ellipsis", width=width)
    for row in rows:
        table.add_row(*map(Text, row))
    terminal.print(sanitized_renderable(table))


COMMANDS = (
    SubcommandSpec(
        "runs",
        """\
List stored runs, newest first, or those that match FILTER, such as 'when:yesterday stop:error' or
'sort:cost model:qwen' (docs/view.md has its fields). In a terminal without FILTER, the runs of
evaluations are one line for each task. In a pipe, columns are separated by tabs.""",
        runs,
        "[FILTER]",
        0,
        None,
        options=(
            CliOptionSpec("limit", int, "number of runs to list; 0 lists all (default: 20)"),
            CliOptionSpec("json", bool, "print one JSON object per line", has_no=False),
            CliOptionSpec("maps", bool, "list stored maps instead", has_no=False),
        ),
    ),
    SubcommandSpec(
        "runs review",
        """\
Label a run, note something about it, or correct its scores. The review is stored beside the run,
which stays as it is. Without options, it is printed.""",
        review,
        "RUN",
        1,
        1,
        options=(
            CliOptionSpec("label", list, "add a label; --label=-NAME removes it", "NAME"),
            CliOptionSpec("note", str, "replace the note", "TEXT"),
            CliOptionSpec(
                "score", list, "correct a score; NAME= restores the recorded one", "NAME=NUMBER"
            ),
            CliOptionSpec(
                "verdict",
                str,
                "mark the answer right, wrong or not-sure; none withdraws the mark",
                "VERDICT",
            ),
            CliOptionSpec(
                "person", str, "who gives the verdict (default: the current user)", "NAME"
            ),
        ),
    ),
    SubcommandSpec(
        "runs score",
        """\
Score the recorded conversations of STORE (serve-policy --record), to train from. A reply is
accepted unless the user's next message corrects it: by a pattern, or by a judge model with a fixed
prompt (docs/traffic.md). Or score whole conversations by a function of yours.""",
        score,
        "STORE",
        1,
        1,
        options=(
            CliOptionSpec(
                "correction",
                list,
                "treat the user's next message as a correction if it matches this regular "
                "expression; repeat for more",
                "PATTERN",
            ),
            CliOptionSpec("judge", str, "model that decides what is a correction", "MODEL"),
            CliOptionSpec("max_cost", float, "maximum cost of the judge in dollars (default: 1)"),
            CliOptionSpec(
                "by",
                str,
                "function of a trajectory that returns a number, or rewards by name",
                "FILE:NAME",
            ),
        ),
    ),
    SubcommandSpec(
        "runs check",
        """\
Check stored runs for damage: lines that were changed, are missing or in another order, and contexts
that are lost. With --all, all runs are checked, and the damaged ones are named. The exit code is 1
if there is damage.""",
        check,
        "[RUN]",
        0,
        1,
        options=(CliOptionSpec("all", bool, "check all runs", has_no=False),),
    ),
    SubcommandSpec(
        "runs repair",
        """\
Cut a damaged run before the damage, so that it can be resumed from there. Says how many later
replies will be asked again. The damaged file is kept.""",
        repair,
        "RUN",
        1,
        1,
    ),
    SubcommandSpec(
        "runs rm",
        "Delete runs, and stored data that no other run uses. The id of a map deletes the map.",
        rm,
        "RUN…",
        1,
        None,
    ),
    SubcommandSpec(
        "runs prune",
        """\
Delete old runs and evaluations, and stored data that nothing else uses. Runs in progress are kept.
With --keep alone, all except the newest N are deleted.""",
        prune,
        options=(
            CliOptionSpec(
                "older_than",
                str,
                "delete runs that ended more than AGE ago, such as 30d or 12h",
                "AGE",
            ),
            CliOptionSpec(
                "keep", int, "always keep the newest N runs, and the newest N evaluations"
            ),
            CliOptionSpec(
                "max_size",
                str,
                "delete the oldest runs until the store is this small: 2GB, 500MB",
                "SIZE",
            ),
        ),
    ),
)
_SUBCOMMANDS = tuple(command.name.split()[1] for command in COMMANDS[1:])
