"""Training data of supervised fine-tuning: demonstrations and stored trajectories, as token
sequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError
from ramify.logging import RoomLogger
from ramify.progress import report_progress
from ramify.tasks.base import Task, task_of
from ramify.train.config import Run, SftSpec
from ramify.train.data.compile import token_sequences
from ramify.train.data.sft_data import DEMOS, TrajectoryTokenizer, read, trajectory_of
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from ramify.models.load import Policy

_log = RoomLogger("train")


def demonstrations_of(run: Run, task: Task, scaffold: Scaffold) -> Iterator[Trajectory]:
    """The trajectories to imitate: newly made demonstrations, then stored trajectories."""
    spec = run.sft
    if spec is None:
        return
    if spec.demos:
        make = DEMOS.of(spec.demos)
        demo_task = task_of(spec.task.name, **spec.task.options) if spec.task is not None else task
        demonstrations = make(demo_task, spec.num, run.seed, scaffold, **spec.options)
        with report_progress("demonstrations", spec.num, "items") as work:
            for conversations in demonstrations:
                yield trajectory_of(conversations)
                work.more()
    if spec.trajectories:
        yield from read(Path(spec.trajectories))


def rows_of(
    spec: SftSpec,
    demonstrations: Sequence[Trajectory],
    policy: Policy,
    scaffold: Scaffold,
    weights: Mapping[str, float],
) -> list[TokenSequence]:
    """The sequences of ``demonstrations`` that fit the policy's window. Raises ConfigError if
    nothing is left to learn."""
    tokeniser = TrajectoryTokenizer(policy.renderer, scaffold.tools())
    groups = []
    with report_progress("tokenising", len(demonstrations), "trajectories") as work:
        for trajectory in demonstrations:
            groups.append(Group(trajectory.task, [tokeniser.tokenised(trajectory)]))
            work.more()
    assigned = spec.algorithm.assign_advantages(groups, weights)
    if assigned.no_signal:
        raise ConfigError(f"sft has nothing to learn from: {assigned.no_signal}")
    rows = token_sequences(assigned.rollouts)
    fitting = [row for row in rows if len(row) <= policy.window]
    if len(fitting) < len(rows):
        longest = max(map(len, rows))
        _log.warning(
            "demonstrations_left_out",
            f"{len(rows) - len(fitting)} of {len(rows)} demonstration sequences are left out: the "
            f"longest has {longest} tokens, but the policy's window is {policy.window}",
            shown=True,
            left_out=len(rows) - len(fitting),
            of=len(rows),
        )
    return fitting
