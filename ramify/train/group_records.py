"""Records the outcome of each rollout group, one line each, in the run's folder: ``groups.jsonl``.

    {"step": 7, "number": 57, "item": "ledger/train/57", "version": 6, "outcome": "learnt",
     "rollouts": ["…"], "failed": []}

A group is the attempts at one item, and is identified by the item's number. The first item of a run
is the first of its training split that no demonstration used, and each group takes the next. A line
is written in the step that learned from the group or gave it up. If the run goes back to a
checkpoint before that step, the line is removed. Together with the checkpoint's list of groups that
had begun (``CheckpointState.pending``) the numbers are complete: each occurs exactly once.
``read_group_records`` checks that. Not here: the rollouts themselves (``OUT/rollouts``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from ramify.errors import ConfigError
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.metrics import RunLines
from ramify.types.trajectory import Group

FILE = "groups.jsonl"

Outcome = Literal["learnt", "silent", "lost", "spare"]
"""``learnt``: some of its tokens had an advantage. ``silent``: none had one (zero variance), or it
was replaced because nothing could be learned from it. ``lost``: none of its rollouts has a reward.
``spare``: more groups had begun than the step needed."""


class GroupRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of one group."""

    step: int = 0
    """Optimizer steps of the run, including the one that decided the outcome, as in
    ``metrics.jsonl``."""
    number: int
    """Number of the item."""
    item: str
    """Id of the item."""
    version: int | None
    """Oldest policy version that sampled any of its tokens; None if it is not known."""
    outcome: Outcome
    rollouts: list[str]
    """Ids of the rollouts that have a reward."""
    failed: list[str] = []
    """Ids of the other rollouts, including those that were given up."""


GROUPS = RunLines(FILE, GroupRecord)


class GroupRecords(msgspec.Struct, frozen=True):
    """The records of all groups in a run's folder."""

    outcomes: dict[str, int]
    """Outcome -> number of groups."""
    pending: list[int]
    """Numbers of groups that had begun, but were not learned from, at the last checkpoint."""
    duplicated: list[int]
    """Numbers that occur twice: learned from twice, or begun again after learning."""
    missing: list[int]
    """Numbers that do not occur: groups that were skipped without a record."""

    @property
    def balanced(self) -> bool:
        """Whether every group occurs exactly once."""
        return not self.duplicated and not self.missing


def account(
    number: int, group: Group, learnt: Collection[str] | None, given_up: Sequence[str] = ()
) -> GroupRecord:
    """The record of one group. ``learnt``: ids of the step's rollouts with an advantage; None if
    the group was spare. ``given_up``: ids of rollouts without which the group continued."""
    scored = [trajectory.id for trajectory in group.trajectories if trajectory.rewards]
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
        failed=[
            *(trajectory.id for trajectory in group.trajectories if not trajectory.rewards),
            *given_up,
        ],
    )


def _version(group: Group) -> int | None:
    replies = (
        turn.reply for tree in group.trajectories for call in tree.calls for turn in call.turns
    )
    return min((span.version for reply in replies for span in reply.versions or ()), default=None)


def read_group_records(folder: Path) -> GroupRecords:
    """The outcomes of all groups up to the last checkpoint of the run in ``folder``; later groups
    will be repeated. Empty before the first checkpoint. Raises ConfigError if the folder does not
    hold a run, which would otherwise pass as complete.

    Example:
        train.read_group_records(Path("runs/tiny")).balanced    # every group occurs once
    """
    checkpoint = CheckpointStore(folder).latest()
    if checkpoint is None:
        if not any((folder / name).exists() for name in (FILE, "metrics.jsonl", "checkpoints")):
            raise ConfigError(
                f"{folder} does not hold a run: give the folder passed to `ramify train` as --out"
            )
        return GroupRecords({}, [], [], [])
    state = read_state(checkpoint)
    records = [record for record in GROUPS.read(folder) if record.step <= state.step]
    times = Counter([*(record.number for record in records), *state.pending])
    return GroupRecords(
        dict(Counter(record.outcome for record in records)),
        list(state.pending),
        sorted(number for number, num in times.items() if num > 1),
        [number for number in range(state.first_item, state.next_item) if not times[number]],
    )
