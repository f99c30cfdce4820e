"""Training data of supervised fine-tuning: demonstrations and stored trajectories, as token
sequences."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ramify.clients.scripted import ScriptedClient
from ramify.engine.limits import Limits
from ramify.engine.rlm import RLM
from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.attempt import attempt
from ramify.logging import RoomLogger
from ramify.progress import report_progress
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import DATA_SUFFIXES, Item, Task, items_of, task_of
from ramify.train.config import Run, SftSpec
from ramify.train.data.compile import token_sequences
from ramify.train.data.message_rows import message_demonstrations
from ramify.train.data.sft_data import DEMOS, TrajectoryTokenizer, read, trajectory_of
from ramify.types.message import Message
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
        demonstrations = _shown(run, spec, task, scaffold)
        with report_progress("demonstrations", spec.num, "items") as work:
            for shown in demonstrations:
                yield shown if isinstance(shown, Trajectory) else trajectory_of(shown)
                work.more()
    if spec.trajectories:
        yield from read(Path(spec.trajectories))


def _shown(run: Run, spec: SftSpec, task: Task, scaffold: Scaffold) -> Iterator[Any]:
    """The demonstrations of a file, or of a function."""
    if spec.demos.endswith(DATA_SUFFIXES):
        yield from message_demonstrations(spec.demos, spec.num)
        return
    make = DEMOS.of(spec.demos)
    demo_task = task_of(spec.task.name, **spec.task.options) if spec.task is not None else task
    try:
        yield from make(demo_task, spec.num, run.seed, scaffold, **spec.options)
    except RamifyError:
        raise
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        raise ConfigError(
            f"sft.demos={spec.demos} cannot demonstrate the task '{demo_task.name}': {error!r} at "
            f"{at.filename}:{at.lineno}; correct it, or set sft.task to the task that it shows"
        ) from error


def num_demonstrated(spec: SftSpec | None) -> int:
    """Items at the beginning of the training split that are demonstrated: none by a file."""
    if spec is None or not spec.demos or spec.demos.endswith(DATA_SUFFIXES):
        return 0
    return spec.num


def demonstrate(
    task: Task,
    expert: str | Callable[[Sequence[Message]], str],
    num: int,
    scaffold: Scaffold,
    *,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    concurrency: int = 8,
) -> list[Trajectory]:
    """Runs of ``expert`` on the first ``num`` training items, with rewards, for ``sft.demos``.

    ``expert`` is a model, ``provider:model``, or a function from the messages of a call to its next
    reply. Its code runs in real sessions. Set ``sft.algorithm.min_reward`` to learn only from good
    runs. Runs that failed are left out; raises ConfigError if all of them did.

    Example:
        def demos(task, num, seed, scaffold):
            return train.demonstrate(task, "openai:gpt-5-mini", num, scaffold)
    """

    async def run() -> list[Trajectory]:
        model = expert if isinstance(expert, str) else ScriptedClient(expert)
        room = asyncio.Semaphore(concurrency)
        async with RLM(model, scaffold=scaffold, limits=limits, sandbox=sandbox) as rlm:

            async def one(item: Item) -> Trajectory:
                async with room:
                    return await attempt(rlm, task, item)

            return list(await asyncio.gather(*map(one, items_of(task, "train")[:num])))

    with ThreadPoolExecutor(1) as thread:  # the caller may be on an event loop
        runs = thread.submit(asyncio.run, run()).result()
    shown = [each for each in runs if each.rewards]
    if runs and not shown:
        raise ConfigError(
            f"all {len(runs)} demonstrations failed, the first with: {runs[0].errors}"
        )
    return shown


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
