"""What a run goes through, one stage after the other, and what each step of a stage learns from.

    warm-up  random strings said twice             ┐
    sft      demonstrations, stored trajectories   ├── source.work(step) ──> Work: sequences of one or more optimizer steps
    rl       rollouts by the policy as it is now   ┘                         (everything after this is the same for all)

Decides sizes and options of each stage, and how a step's rollouts are split into minibatches.
Leaves out which rollouts those are (``group_queue.py``), and what is done with the work
(``training_loop.py``).
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import Item, Task
from ramify.train import induction
from ramify.train.algorithms.base import Algorithm, AssignedStep, finish, needs_of, remembering
from ramify.train.backends.base import OptimizerSpec
from ramify.train.compile import sequences
from ramify.train.group_queue import GroupQueue, StepGroups
from ramify.train.group_records import GroupRecord, account
from ramify.train.loss import LossSpec
from ramify.train.metrics import of_rollouts
from ramify.train.rollout import Rollouter
from ramify.train.roots import RootCount, first_items
from ramify.train.sft_data import order
from ramify.train.signals.signal_reader import RunSignals, SignalReader
from ramify.train.token_credit import AssignedRollout
from ramify.types.sequence import TokenSequence
from ramify.types.trajectory import Group


class Minibatch(msgspec.Struct, eq=False):
    """What one optimizer step learns from."""

    rows: list[TokenSequence]
    denominators: Mapping[str, float] | None
    """Loss component -> what its sum is divided by; None: the sum of its weights."""


class StepData(msgspec.Struct, eq=False):
    """What one step of a stage learns from."""

    parts: list[Minibatch]
    metrics: dict[str, float]
    no_signal: str = ""
    """Why there is nothing to learn; empty where there is."""
    groups: list[Group] = msgspec.field(default_factory=list)
    """The rollouts that it was made of."""
    notes: list[str] = msgspec.field(default_factory=list)
    """What a person should know, in sentences."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """What the stage's algorithm remembers after it."""
    accounts: list[GroupRecord] = msgspec.field(default_factory=list)
    """What became of each group that it used up; their step is said by who writes them down."""


class StepSource(Protocol):
    """Where the work of a stage comes from, as long as the stage lasts."""

    async def work(self, step: int) -> StepData:
        """That of step ``step``, from 0; asked for in order, once the steps before are over."""
        ...

    def newer(self, step: int) -> None:
        """The weights are those that ``step`` steps of the stage made, and the engine has them."""
        ...

    def state(self) -> tuple[int, list[int]]:
        """As ``State.next_item`` and ``State.pending`` have it."""
        ...

    def paused(self) -> AbstractContextManager[None]:
        """While something else wants the engine."""
        ...


class Checkpointable(Protocol):
    """What a checkpoint within a stage holds besides weights and optimizer."""

    def save(self, folder: Path) -> None:
        """Write it, as it is now."""
        ...

    def load(self, folder: Path) -> None:
        """Go on with what was written. Raises ConfigError where there is none."""
        ...


class TrainingStage(Protocol):
    """One stage of a run."""

    name: str
    num_steps: int
    optim: OptimizerSpec
    loss: LossSpec
    samples: bool
    """Whether its work is sampled from the policy, so that the engine must have the newest
    weights."""
    max_staleness: int
    """How many steps older than the weights that learn from it the weights that made a work may
    be."""
    streams: frozenset[str]
    """What the trainer is to compute of a work's rows before they are learnt from:
    ``old_logprobs``, ``ref_logprobs``, ``values``, ``staleness``."""
    critic: bool
    """Whether there is one."""
    memory: dict[str, float]
    """What its algorithm remembers after the last work that was made; to be set where a run is
    resumed."""

    @property
    def kept(self) -> Mapping[str, Checkpointable]:
        """Name in a checkpoint -> what is to be kept once a step is done. What it is before, the
        stage makes anew."""
        ...

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        """Put onto the rows of a whole work what follows from those streams; what was measured."""
        ...

    def source(
        self, next_item: int, pending: Sequence[int]
    ) -> AbstractAsyncContextManager[StepSource]:
        """``next_item`` and ``pending`` as the run's state has them."""
        ...

    async def roots(self, next_item: int) -> RootCount | None:
        """How many of its first roots will be recursive; None for a stage that samples nothing."""
        ...


class FixedDataStage(ABC):
    """What stages without rollouts have in common: nothing is to be computed first, or
    remembered."""

    samples, max_staleness, critic, streams = False, 0, False, frozenset[str]()
    loss = LossSpec()

    def __init__(self) -> None:
        self.memory: dict[str, float] = {}
        self._standing: tuple[int, list[int]] = (0, [])

    @property
    def kept(self) -> Mapping[str, Checkpointable]:
        return {}

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return {}

    @contextlib.asynccontextmanager
    async def source(self, next_item: int, pending: Sequence[int]) -> AsyncIterator[StepSource]:
        self._standing = (next_item, list(pending))
        yield self

    async def roots(self, next_item: int) -> RootCount | None:
        return None

    @abstractmethod
    async def work(self, step: int) -> StepData: ...

    def newer(self, step: int) -> None:  # noqa: B027 (nothing of such a stage depends on the weights)
        """Nothing is begun by it."""

    def state(self) -> tuple[int, list[int]]:
        return self._standing

    def paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class WarmUpStage(FixedDataStage):
    """Random strings; see ``induction.py``."""

    name = "warmup"

    def __init__(
        self, num_steps: int, optim: OptimizerSpec, ids: Sequence[int], batch_tokens: int, seed: int
    ) -> None:
        super().__init__()
        self.num_steps, self.optim = num_steps, scheduled(self.name, optim, num_steps)
        self._ids, self._batch_tokens, self._seed = ids, batch_tokens, seed

    async def work(self, step: int) -> StepData:
        rows = induction.induction(step, self._ids, self._batch_tokens, self._seed)
        return StepData([Minibatch(rows, None)], {})


class SftStage(FixedDataStage):
    """Rows that were made ready before, in the order of ``sft.order``."""

    name = "sft"

    def __init__(
        self,
        rows: Sequence[TokenSequence],
        optim: OptimizerSpec,
        batch_tokens: int,
        epochs: int,
        seed: int,
    ) -> None:
        """Raises ConfigError where there is nothing to learn from."""
        super().__init__()
        self._rows, self._order = rows, order(rows, batch_tokens, epochs, seed)
        if not self._order:
            raise ConfigError(
                "supervised fine-tuning has nothing to learn from: no trajectory passed its filter"
            )
        self.num_steps = len(self._order)
        self.optim = scheduled(self.name, optim, self.num_steps)

    async def work(self, step: int) -> StepData:
        return StepData([Minibatch([self._rows[index] for index in self._order[step]], None)], {})


class StepSampleSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much each step of reinforcement learning samples."""

    items: int = 24
    """Items of the task per step."""
    first_item: int = 0
    """Of the training split, to begin with; after a stage of demonstrations the first that was not
    demonstrated."""
    max_items: int = 0
    """With dynamic sampling: most items that a step may try until ``items`` of them have a signal;
    0: no such search."""
    minibatches: int = 1
    """Optimizer steps that a step's rollouts are split into, group by group."""
    max_staleness: int = 0
    """Steps that rollouts may begin ahead: 0 has each step wait for its own; with 1 or more they go
    on while the trainer learns, and take newer weights as they come, see ``group_queue.py``."""
    grace_steps: int = 4
    """Steps more that a slow rollout may take, with ``max_staleness`` above 0, before a step waits
    for it. At 0 no token is older than ``max_staleness``, and ``max_staleness + 1`` steps take at
    least as long as the slowest rollout."""
    straggler_factor: float = 0.0
    """A rollout is given up once it has taken so many times the median and its step waits for
    nothing else; 0: never."""
    pause: bool = False
    """Whether no rollout begins while the policy is evaluated, so that nothing but what has begun
    competes with it."""

    @property
    def max_token_staleness(self) -> int:
        """Steps that the weights have gone on, at most, when a token is learnt from."""
        return self.max_staleness + self.grace_steps if self.max_staleness else 0

    def __post_init__(self) -> None:
        if self.grace_steps < 0:
            raise ConfigError(f"rl.sample: grace_steps={self.grace_steps} must be at least 0")
        if self.straggler_factor and self.straggler_factor < 1:
            raise ConfigError(
                f"rl.sample: straggler_factor={self.straggler_factor:g} is times the median: at "
                "least 1, or 0 for never"
            )
        if (
            self.items < 1
            or self.minibatches < 1
            or self.max_staleness < 0
            or 0 < self.max_items < self.items
        ):
            raise ConfigError(
                f"rl.sample: items={self.items} and minibatches={self.minibatches} must be at "
                "least 1, "
                f"max_items={self.max_items} 0 or at least items, "
                f"max_staleness={self.max_staleness} not negative"
            )


class RlStage:
    """Rollouts of the task's training split, stamped by an algorithm."""

    name, samples = "rl", True

    def __init__(
        self,
        num_steps: int,
        optim: OptimizerSpec,
        loss: LossSpec,
        *,
        task: Task,
        items: Sequence[Item],
        rollouts: Rollouter,
        algorithm: Algorithm,
        sample: StepSampleSpec,
        temperature: float,
        signals: RunSignals | None = None,
    ) -> None:
        self.num_steps, self.optim = (
            num_steps,
            scheduled(self.name, optim, num_steps * sample.minibatches),
        )
        self.loss = loss.for_minibatches(sample.minibatches)
        self.max_staleness = sample.max_staleness
        needs = needs_of(algorithm)
        self.critic, self.streams = needs.values, needs.streams | streams_of(self.loss)
        self.memory: dict[str, float] = {}
        self._task, self._items, self._rollouts, self._algorithm = task, items, rollouts, algorithm
        self._sample, self._temperature, self._signals = sample, temperature, signals

    @property
    def kept(self) -> Mapping[str, Checkpointable]:
        return {} if self._signals is None else self._signals.kept

    @contextlib.asynccontextmanager
    async def source(self, next_item: int, pending: Sequence[int]) -> AsyncIterator[StepSource]:
        async with contextlib.AsyncExitStack() as stack:
            reader = (
                None
                if self._signals is None
                else await stack.enter_async_context(self._signals.opened())
            )
            queue = GroupQueue(
                self._rollouts,
                self._items,
                self._sample,
                self.num_steps,
                next_item=next_item,
                pending=pending,
                read=None if reader is None else reader.group,
                has_no_signal=lambda group: bool(
                    self._composed(reader).assign_advantages([group], self._task.weights).no_signal
                ),
            )
            stack.push_async_callback(queue.close)
            yield RolloutStepSource(self, queue, reader)

    async def roots(self, next_item: int) -> RootCount | None:
        return await self._rollouts.roots(first_items(self._items, next_item))

    def finish(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return finish(self._algorithm, rows)

    def made_of(self, taken: StepGroups, step: int, reader: SignalReader | None) -> StepData:
        """The work of step ``step``, whose groups are ``taken``."""
        groups = [group for _, group in taken.groups]
        _check_any_came_back(groups, step, taken.notes)
        assigned = self._stamp(groups, reader)
        self.memory = {**self.memory, **assigned.memory}
        metrics = {**assigned.metrics, **taken.metrics, **_measured(groups)}
        metrics |= of_rollouts(groups, self._task.weights)
        parts = self._parts(assigned)
        if not needs_of(self._algorithm).streams:  # else they are not known yet
            _note_advantages(assigned.rollouts)
        if reader is not None:
            metrics |= reader.metrics(groups)
            reader.put_on_trees(groups)
            reader.forget(groups)
        learnt = {rollout.trajectory.id for rollout in assigned.rollouts}
        gone = taken.stragglers
        accounts = [
            account(number, group, learnt, gone.get(number, ())) for number, group in taken.groups
        ]
        accounts += taken.given_up
        notes = [*taken.notes, *assigned.notes]
        return StepData(
            parts, metrics, assigned.no_signal, groups, notes, dict(self.memory), accounts
        )

    def _composed(self, reader: SignalReader | None) -> Algorithm:
        """The algorithm with what it remembers, and with what signals read."""
        algorithm = remembering(self._algorithm, self.memory)
        return algorithm if reader is None else reader.composed(algorithm)

    def _stamp(self, groups: Sequence[Group], reader: SignalReader | None) -> AssignedStep:
        return self._composed(reader).assign_advantages(
            groups, self._task.weights, every_token=self.loss.wants_every_token
        )

    def _parts(self, assigned: AssignedStep) -> list[Minibatch]:
        """Minibatches of about as many rollouts each, in turn, so that each has some of every
        group. What is divided by is split evenly: each minibatch is an estimate of the same
        loss."""
        num = min(self._sample.minibatches, len(assigned.rollouts))
        shares = {name: value / num for name, value in assigned.denominators.items()} if num else {}
        return [
            Minibatch(sequences(assigned.rollouts[index::num], self._temperature), shares)
            for index in range(num)
        ]


class RolloutStepSource:
    """The work of ``RlStage``, as its groups become whole."""

    def __init__(self, stage: RlStage, queue: GroupQueue, reader: SignalReader | None) -> None:
        self._stage, self._queue, self._reader = stage, queue, reader
        self.newer, self.state, self.paused = queue.newer, queue.state, queue.paused

    async def work(self, step: int) -> StepData:
        if self._reader is not None:
            await self._reader.turn_to(step, self._queue.by_id)
        taken = await self._queue.take(step)
        if self._reader is not None:  # a signal may have come to be wanted since a group was whole
            for _, group in taken.groups:
                await self._reader.group(group)
        return self._stage.made_of(taken, step, self._reader)


def scheduled(stage: str, optim: OptimizerSpec, num_steps: int) -> OptimizerSpec:
    """``optim`` with the stage's length as its schedule's, where it names none. Raises ConfigError,
    with the stage's name, where that is too short for its warm-up."""
    if optim.num_steps:
        return optim
    try:
        return msgspec.structs.replace(optim, num_steps=num_steps)
    except ConfigError as error:
        raise ConfigError(
            f"{stage}.{error}: the stage has no more; lower {stage}.optim.warmup_steps, or set "
            f"{stage}.optim.schedule=constant"
        ) from None


def streams_of(loss: LossSpec) -> frozenset[str]:
    """What a loss needs that the trainer has to compute first."""
    wanted = {"ref_logprobs"} if loss.kl_beta else set()
    if loss.old == "pass":
        wanted.add("old_logprobs")
    return frozenset(wanted | (loss.reads & {"staleness"}))


def _check_any_came_back(groups: Sequence[Group], step: int, notes: Sequence[str]) -> None:
    """A step whose rollouts all failed is no step: something is wrong that more steps will not
    mend. ``notes`` say which were given up."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not any(trajectory.rewards for trajectory in trajectories):
        errors = [
            *(trajectory.errors[-1] for trajectory in trajectories if trajectory.errors),
            *notes,
            "no error was said",
        ]
        raise TrainError(
            f"all {len(trajectories)} rollouts of step {step} failed, the first with: {errors[0]}"
        )


def _note_advantages(rollouts: Sequence[AssignedRollout]) -> None:
    """Put each turn's advantages beside its rollout (``metadata["advantages"]``), where the
    rollouts that are kept show them: ``{"0.1/2": 0.25}`` for turn 2 of call 0.1, and a list where
    its tokens differ."""
    for rollout in rollouts:
        noted: dict[str, float | list[float]] = {}
        for (call, turn), credit in rollout.credits.items():
            values = credit.advantages
            if values:
                noted[f"{call}/{turn}"] = values[0] if min(values) == max(values) else list(values)
        rollout.trajectory.metadata["advantages"] = noted


def _measured(groups: Sequence[Group]) -> dict[str, float]:
    """What rollouts took and how they ended."""
    calls = [
        call for group in groups for trajectory in group.trajectories for call in trajectory.calls
    ]
    turns = [turn for call in calls for turn in call.turns]
    stops = [call.stop for call in calls]
    num_sampled = sum(len(turn.reply.token_ids or ()) for turn in turns)
    return {
        "sampled_tokens": float(num_sampled),
        "length_mean": num_sampled / max(sum(len(group.trajectories) for group in groups), 1),
        "given_tokens": float(sum(len(turn.reply.prompt_ids or ()) for turn in turns)),
        "turns_per_call": len(turns) / max(len(calls), 1),
        "truncated": sum(stop is not None and stop.is_truncated() for stop in stops)
        / max(len(calls), 1),
        "split_turns": sum(
            trajectory.metrics.get("split_turns", 0.0)
            for g in groups
            for trajectory in g.trajectories
        ),
    }
