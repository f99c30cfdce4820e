"""``ramify replay``: run a stored run's cells again against its recorded replies, and say whether
all came out the same.

No model is asked and nothing is paid or written. What differs is named by call, turn and cell.
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
    found = list(differences(old, new))
    if json:
        print(
            msgspec.json.encode({"run": old.id, "same": not found, "differences": found}).decode()
        )
    else:
        print(_verdict(old, found))
    return ExitCode.ERROR if found else ExitCode.ANSWERED


def differences(old: Trajectory, new: Trajectory) -> Iterator[str]:
    """A line for each cell, call and answer that came out otherwise."""
    calls = {call.id: call for call in new.calls}
    for call in old.calls:
        resume = calls.pop(call.id, None)
        if resume is None:
            yield f"call {call.id} was not made again"
        else:
            yield from _in_call(call, resume)
    yield from (f"call {id} is new" for id in calls)
    if old.answer != new.answer:
        yield f"the answer was {_shown(old.answer)} and is {_shown(new.answer)}"


def _in_call(old: Call, new: Call) -> Iterator[str]:
    if len(old.turns) != len(new.turns):
        yield f"call {old.id} took {len(old.turns)} turns and now {len(new.turns)}"
    for turn, (before, now) in enumerate(zip(old.turns, new.turns, strict=False)):
        for cell, (was, is_) in enumerate(zip(before.cells, now.cells, strict=False)):
            for name in ("stdout", "value", "error"):
                if getattr(was, name) != getattr(is_, name):
                    place = f"call {old.id}, turn {turn}, cell {cell}"
                    yield f"{place}: {name} was {_shown(getattr(was, name))} and is {_shown(getattr(is_, name))}"
    if (old.answer, old.stop) != (new.answer, new.stop):
        yield f"call {old.id} ended {old.stop} with {_shown(old.answer)} and now {new.stop} with {_shown(new.answer)}"


def _verdict(old: Trajectory, found: list[str]) -> str:
    cells = sum(len(turn.cells) for call in old.calls for turn in call.turns)
    if not found:
        return f"same: {many(len(old.calls), 'call')}, {many(cells, 'cell')}, and the answer"
    more = [f"… and {len(found) - _SHOWN:,} more"] if len(found) > _SHOWN else []
    return clean(
        "\n".join(
            [
                f"different in {many(len(found), 'place')}:",
                *(f"  {line}" for line in found[:_SHOWN]),
                *more,
            ]
        )
    )


def _shown(value: Any) -> str:
    return one_line(repr(value), 100)


COMMAND = CommandSpec(
    "replay",
    "Run a stored run's code again against its recorded replies, and compare. No model is asked. "
    "Exit code 0\n"
    "if everything came out the same, 1 if not.",
    replay,
    "RUN",
    1,
    1,
    (
        OptionSpec("json", bool, "print one JSON object", has_no=False),
        OptionSpec("allow_weaker", bool, "accept less isolation than the run had", has_no=False),
    ),
)
