"""What became of each group of rollouts, one line for each in the run's folder: ``groups.jsonl``.

    {"step": 7, "number": 57, "item": "ledger/train/57", "version": 6, "outcome": "learnt", "rollouts": ["…"], "failed": []}

A group is the attempts at one item, and is known by the item's running number: the first item of a
run is the first of its training split that no demonstration used up, and each group takes the next.
A line is written in the step that learnt from the group or gave it up, and cut off again where a
run goes back to a checkpoint before that step. With what the checkpoint says of groups that had
begun (``State.pending``) the numbers add up: each from the first to the last stands once, either
here or there. ``accounts`` checks that. Leaves out what a group's rollouts said (``OUT/rollouts``).
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.types.trajectory import Group

FILE = "groups.jsonl"

Outcome = Literal["learnt", "silent", "lost", "spare"]
"""``learnt``: tokens of it had an advantage. ``silent``: none had, or it was given up for another
as nothing could be learnt from it. ``lost``: none of its rollouts came to a reward. ``spare``: more
had been begun than the step needed."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one group."""

    step: int = 0
    """Optimizer steps of the whole run once this was over, as in ``metrics.jsonl``."""
    number: int
    """Of the item, running."""
    item: str
    """Its id."""
    version: int | None
    """The oldest that sampled any of its tokens; None where that is not known."""
    outcome: Outcome
    rollouts: list[str]
    """Ids of those that came to a reward."""
    failed: list[str] = []
    """Ids of the others, those that were given up among them."""


class GroupRecords(msgspec.Struct, frozen=True):
    """What a run's folder says of its groups."""

    outcomes: dict[str, int]
    """Outcome -> number of groups."""
    pending: list[int]
    """Begun, and not yet learnt from when the last checkpoint was written."""
    duplicated: list[int]
    """Numbers that stand twice: learnt from twice, or begun again after they were learnt from."""
    missing: list[int]
    """Numbers that stand nowhere: skipped in silence."""

    @property
    def balanced(self) -> bool:
        """Nothing trained twice, nothing skipped."""
        return not self.duplicated and not self.missing


def account(
    number: int, group: Group, learnt: Collection[str] | None, given_up: Sequence[str] = ()
) -> GroupRecord:
    """``learnt``: ids of the step's rollouts that taught something; None where the group was more
    than was needed. ``given_up``: ids of rollouts that the group goes on without."""
    scored = [each.id for each in group.trajectories if each.rewards]
    outcome: Outcome = "spare" if learnt is None else "silent"
    if not scored:
        outcome = "lost"
    elif learnt and not set(learnt).isdisjoint(scored):
        outcome = "learnt"
    return GroupRecord(
        number=number,
        item=group.task,
        version=_version(group),
        outcome=outcome,
        rollouts=scored,
        failed=[*(each.id for each in group.trajectories if not each.rewards), *given_up],
    )


def _version(group: Group) -> int | None:
    replies = (
        turn.reply for tree in group.trajectories for call in tree.calls for turn in call.turns
    )
    return min((span.version for reply in replies for span in reply.versions or ()), default=None)


def write(folder: Path, accounts: Sequence[GroupRecord], step: int) -> None:
    """Add ``accounts``, which came about in step ``step``, with one write."""
    path = folder / FILE
    lines = b"".join(
        msgspec.json.encode(msgspec.structs.replace(each, step=step)) + b"\n" for each in accounts
    )
    if not lines:
        return
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":  # what was cut off by a kill must not swallow the next line
                lines = b"\n" + lines
        file.write(lines)


def read(folder: Path) -> Iterator[GroupRecord]:
    """The lines of a run's folder, in order; a torn one is skipped, and there may be none."""
    path = folder / FILE
    for line in path.read_bytes().splitlines() if path.is_file() else ():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            yield msgspec.json.decode(line, type=GroupRecord)


def cut(folder: Path, step: int) -> None:
    """Drop what came about after ``step``; atomic."""
    kept = b"".join(msgspec.json.encode(each) + b"\n" for each in read(folder) if each.step <= step)
    path = folder / FILE
    if kept or path.exists():
        fresh = path.with_suffix(".tmp")
        fresh.write_bytes(kept)
        fresh.replace(path)


def accounts(folder: Path) -> GroupRecords:
    """What became of all groups up to the last checkpoint of the run in ``folder``; what came after
    it will come again. Empty where there is none yet. Raises ConfigError where that is no run's
    folder: nothing missing would be said of it."""
    checkpoint = CheckpointStore(folder).latest()
    if checkpoint is None:
        if not any((folder / name).exists() for name in (FILE, "metrics.jsonl", "checkpoints")):
            raise ConfigError(
                f"{folder} holds no run: give the folder that `ramify train` was given as --out"
            )
        return GroupRecords({}, [], [], [])
    state = read_state(checkpoint)
    found = [each for each in read(folder) if each.step <= state.step]
    times = Counter([*(each.number for each in found), *state.pending])
    return GroupRecords(
        dict(Counter(each.outcome for each in found)),
        list(state.pending),
        sorted(number for number, num in times.items() if num > 1),
        [number for number in range(state.first_item, state.next_item) if not times[number]],
    )
