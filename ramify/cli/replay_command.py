"""``ramify replay``: re-run a stored run's cells against its recorded replies, and compare.

No model is called, nothing is paid, and nothing is written. Each difference names its call, turn
and cell.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec

from ramify.cli.exit_codes import ExitCode
from ramify.cli.parser import CommandSpec, OptionSpec
from ramify.cli.stderr_notes import StderrNotes
from ramify.cli.terminal_text import clean, many, one_line
from ramify.types.trajectory import Call, Trajectory

_SHOWN = 10


def replay(words: list[str], json: bool | None, allow_weaker: bool | None) -> int:
    run = words[0]
    from ramify.cli import resume

    StderrNotes().take_warnings()
    store, recorded = resume.find(run)
    rlm = resume.rebuild(recorded.started, store, stand_ins=True, allow_weaker=bool(allow_weaker))

    async def repeat() -> Trajectory:
        async with rlm:
            return (await rlm.areplay(run)).trajectory

    new, old = asyncio.run(repeat()), store.load(run)
    changes = list(differences(old, new))
    if json:
        report = {"run": old.id, "same": not changes, "differences": changes}
        print(msgspec.json.encode(report).decode())
    else:
        print(_verdict(old, changes))
    return ExitCode.ERROR if changes else ExitCode.ANSWERED


def differences(old: Trajectory, new: Trajectory) -> Iterator[str]:
    """Yield a line for each cell, call and answer that differs between the two runs."""
    calls = {call.id: call for call in new.calls}
    for call in old.calls:
        replayed = calls.pop(call.id, None)
        if replayed is None:
            yield f"call {call.id} was not made again"
        else:
            yield from _call_differences(call, replayed)
    yield from (f"call {id} is new" for id in calls)
    if old.answer != new.answer:
        yield f"the answer was {_shown(old.answer)} and is now {_shown(new.answer)}"


def _call_differences(old: Call, new: Call) -> Iterator[str]:
    if len(old.turns) != len(new.turns):
        yield f"call {old.id} took {len(old.turns)} turns and now takes {len(new.turns)}"
    for turn, (old_turn, new_turn) in enumerate(zip(old.turns, new.turns, strict=False)):
        for cell, cells in enumerate(zip(old_turn.cells, new_turn.cells, strict=False)):
            for name in ("stdout", "value", "error"):
                before, after = (getattr(result, name) for result in cells)
                if before != after:
                    place = f"call {old.id}, turn {turn}, cell {cell}"
                    yield f"{place}: {name} was {_shown(before)} and is now {_shown(after)}"
    if (old.answer, old.stop) != (new.answer, new.stop):
        yield (
            f"call {old.id} ended {old.stop} with {_shown(old.answer)} "
            f"and now ends {new.stop} with {_shown(new.answer)}"
        )


def _verdict(old: Trajectory, changes: list[str]) -> str:
    cells = sum(len(turn.cells) for call in old.calls for turn in call.turns)
    if not changes:
        return f"same: {many(len(old.calls), 'call')}, {many(cells, 'cell')}, and the answer"
    more = [f"… and {len(changes) - _SHOWN:,} more"] if len(changes) > _SHOWN else []
    return clean(
        "\n".join(
            [
                f"different in {many(len(changes), 'place')}:",
                *(f"  {line}" for line in changes[:_SHOWN]),
                *more,
            ]
        )
    )


def _shown(value: Any) -> str:
    return one_line(repr(value), 100)


COMMAND = CommandSpec(
    "replay",
    """\
Re-run a stored run's code against its recorded replies, and compare the results. No model is
called. The exit code is 0 if every result is the same, 1 if not.""",
    replay,
    "RUN",
    1,
    1,
    (
        OptionSpec("json", bool, "print one JSON object", has_no=False),
        OptionSpec("allow_weaker", bool, "accept weaker isolation than the run had", has_no=False),
    ),
)
