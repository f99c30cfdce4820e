"""Define the stages of a training run: warm-up, supervised fine-tuning and reinforcement learning.

Each stage supplies the data that its steps train on.

    warm-up  random strings, each repeated         ┐
    sft      demonstrations, stored trajectories   ├── source.work(step) ──> StepData
    rl       rollouts by the current policy        ┘   sequences of one or more optimizer steps

Each class here sets the size and options of one stage, and how the rollouts of a step are divided
into minibatches. ``group_queue.py`` chooses the rollouts of a step. ``trainer.py`` uses the data,
in the same way for all stages.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Protocol

import msgspec

from ramify.errors import ConfigError, TrainError
from ramify.step_time_accounting import WallAndCpuTimer
from ramify.tasks.base import Task, items_of
from ramify.tasks.mixture import TaskMixture
from ramify.train.advantages.base import (
    Algorithm,
    OptimizerStepAdvantages,
    RolloutAdvantages,
    finish_advantages,
    needs_of,
    with_reduction,
    with_saved_state,
)
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import RlSpec
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.data.sft_data import induction_warmup_sequences, rows_by_step
from ramify.train.losses.total_loss import LossSpec
from ramify.train.metrics import RolloutGroupRecord, group_record, mixture_metrics, rollout_metrics
from ramify.train.policy_dependent_defaults import usual_warmup_steps
from ramify.train.rollouts.difficulty_pool import NoSignalItemFilter
from ramify.train.rollouts.group_queue import RolloutGroupProducer, StepRolloutGroups
from ramify.train.rollouts.rollouter import RootModeCounts, TaskRolloutRunner, next_items
from ramify.train.sampling_metrics import (
    advantage_reward_correlation,
    rollout_sampling_metrics,
    select_probe_sequences,
)
from ramify.train.score_failure_counts import ScoreFailureCounts, error_summary
from ramify.train.signals.signal_runner import SignalRunner, TrainingSignalSet
from ramify.train.traffic_training import RecordedTrafficTask, mask_redacted_tokens
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Call, Group


class RolloutsFailed(TrainError):
    """Raised when so many rollouts fail that further steps would not help.

    Either all rollouts of a step failed, or most of those with an answer failed in steps without a
    training signal.
    """


class Minibatch(msgspec.Struct, eq=False):
    """The data of one optimizer step."""

    rows: list[TokenSequence]
    denominators: Mapping[str, float] | None
    """Denominator of each loss component, by name. None: the sum of the component's weights."""


class StepData(msgspec.Struct, eq=False):
    """One step's training data in one or more minibatches, and metrics about the data."""

    parts: list[Minibatch]
    metrics: dict[str, float]
    no_signal: str = ""
    """Why there is nothing to learn from. Empty if there is a training signal."""
    groups: list[Group] = msgspec.field(default_factory=list)
    """The rollouts that the data comes from."""
    notes: list[str] = msgspec.field(default_factory=list)
    """Messages for the user, as full sentences."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """State of the stage's algorithm after this step."""
    accounts: list[RolloutGroupRecord] = msgspec.field(default_factory=list)
    """The outcome of each group that the step used up. The field ``step`` of each is set when it is
    written."""
    others: dict[str, StepData] = msgspec.field(default_factory=dict)
    """The data for each other trained policy from the same rollouts, by the policy's name."""


class StageDataSource(Protocol):
    """The source of one stage's training data.

    It stays open for the duration of the stage.
    """

    async def step_data(self, step: int) -> StepData:
        """Return the training data of step ``step``, counted from 0.

        Steps are requested in order, each after the previous one has ended.
        """
        ...

    def note_new_weights(self, step: int) -> None:
        """Notify the source that the inference engine now has the weights after ``step`` steps of
        the stage.

        Rollouts that waited for newer weights may then begin.
        """
        ...

    def data_position(self) -> tuple[int, list[int]]:
        """Return the next new task item and the items in progress, so that a run can resume from a
        checkpoint.

        Both are given as item indices.
        """
        ...

    def take_skipped(self) -> list[RolloutGroupRecord]:
        """Return and clear the records of skipped task items that were not yet reported with a
        step.

        Only items before the next new one are included.
        """
        ...

    def paused(self) -> AbstractContextManager[None]:
        """Return a context manager that keeps the source from using the inference engine.

        Use it while the engine is needed for other work, such as an evaluation.
        """
        ...


class Checkpointable(Protocol):
    """Interface for state that a checkpoint stores in addition to the weights and the optimizer."""

    def save(self, folder: Path) -> None:
        """Write the current state to the folder of a checkpoint."""
        ...

    def load(self, folder: Path) -> None:
        """Restore the state that ``save`` wrote to ``folder``.

        Raises ConfigError if it is missing.
        """
        ...


class TrainingStage(Protocol):
    """The interface of one stage of a training run, such as supervised fine-tuning.

    It defines the stage's length, optimizer, loss and data source.
    """

    name: str
    num_steps: int
    optim: OptimizerSpec
    loss: LossSpec
    samples: bool
    """True if the stage's data is sampled from the policy, so that the engine must have the newest
    weights."""
    max_staleness: int
    """Maximum staleness: how many steps the sampling weights may lag behind the trained weights
    when a rollout begins."""
    streams: frozenset[str]
    """Per-token inputs that the trainer must compute before learning: ``old_logprobs``,
    ``ref_logprobs``, ``values``, ``staleness``."""
    critic: bool
    """True if the stage trains a critic."""
    memory: dict[str, float]
    """State of the stage's algorithm after the latest step. Set it when a run is resumed."""

    @property
    def others(self) -> Mapping[str, TrainingStage]:
        """The stages of the other policies that learn from the same rollouts, keyed by policy name.

        Each policy has its own optimizer and assigns its own credit.
        """
        ...

    @property
    def extra_state(self) -> Mapping[str, Checkpointable]:
        """Additional state of this stage that a checkpoint must store, by name.

        A checkpoint before the first step stores none, because the stage creates it when it begins.
        """
        ...

    def add_loss_inputs(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        """Add further per-token inputs of the loss to the token sequences ``rows``, in place.

        Returns metrics.
        """
        ...

    def select_probe_sequences(self, groups: Sequence[Group], step: int) -> list[TokenSequence]:
        """Return the token sequences used to compare the policy before and after a training step.

        No comparison is made if the list is empty.
        """
        ...

    def open_data_source(
        self, next_item: int, pending: Sequence[int]
    ) -> AbstractAsyncContextManager[StageDataSource]:
        """Open the stage's data source at a position that was stored in a checkpoint.

        ``next_item`` is the index of the next new item, and ``pending`` holds the indices of the
        items that were in progress.
        """
        ...

    async def count_planned_root_modes(self, next_item: int) -> RootModeCounts | None:
        """Count how many of the first root calls will be recursive and how many will be plain
        calls.

        The run reports this before its first rollout. Returns None for a stage without rollouts.
        """
        ...


class OfflineDataStage(ABC):
    """Base class of stages whose data exists before training.

    These stages compute nothing before learning and keep no state.
    """

    samples, max_staleness, critic, streams = False, 0, False, frozenset[str]()
    loss = LossSpec()

    def __init__(self) -> None:
        self.memory: dict[str, float] = {}
        self._state: tuple[int, list[int]] = (0, [])

    @property
    def others(self) -> Mapping[str, TrainingStage]:
        return {}

    @property
    def extra_state(self) -> Mapping[str, Checkpointable]:
        return {}

    def add_loss_inputs(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return {}

    def select_probe_sequences(self, groups: Sequence[Group], step: int) -> list[TokenSequence]:
        return []

    @contextlib.asynccontextmanager
    async def open_data_source(
        self, next_item: int, pending: Sequence[int]
    ) -> AsyncIterator[StageDataSource]:
        self._state = (next_item, list(pending))
        yield self

    async def count_planned_root_modes(self, next_item: int) -> RootModeCounts | None:
        return None

    @abstractmethod
    async def step_data(self, step: int) -> StepData: ...

    def note_new_weights(self, step: int) -> None:  # noqa: B027 (fixed data does not depend on the weights)
        """Do nothing, because fixed data does not depend on the weights."""

    def data_position(self) -> tuple[int, list[int]]:
        return self._state

    def take_skipped(self) -> list[RolloutGroupRecord]:
        return []

    def paused(self) -> AbstractContextManager[None]:
        return contextlib.nullcontext()


class RandomStringWarmUpStage(OfflineDataStage):
    """A warm-up stage on repeated random strings that teaches a model to copy text (induction).

    ``sft_data.induction`` makes the strings.
    """

    name = "warmup"

    def __init__(
        self, num_steps: int, optim: OptimizerSpec, ids: Sequence[int], batch_tokens: int, seed: int
    ) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.optim = with_schedule_defaults(self.name, optim, num_steps)
        self._ids = ids
        self._batch_tokens = batch_tokens
        self._seed = seed

    async def step_data(self, step: int) -> StepData:
        rows = induction_warmup_sequences(step, self._ids, self._batch_tokens, self._seed)
        return StepData([Minibatch(rows, None)], {})


class SftStage(OfflineDataStage):
    """The stage of supervised fine-tuning on tokenized examples.

    ``rows_by_step`` decides their order.
    """

    name = "sft"

    def __init__(
        self,
        rows: Sequence[TokenSequence],
        optim: OptimizerSpec,
        batch_tokens: int,
        epochs: int,
        seed: int,
    ) -> None:
        """Create a stage of supervised fine-tuning on the token sequences ``rows``.

        Raises ConfigError if there is nothing to learn from.
        """
        super().__init__()
        self._rows = rows
        self._order = rows_by_step(rows, batch_tokens, epochs, seed)
        if not self._order:
            raise ConfigError(
                "supervised fine-tuning has nothing to learn from: no trajectory passed its filter"
            )
        self.num_steps = len(self._order)
        self.optim = with_schedule_defaults(self.name, optim, self.num_steps)

    async def step_data(self, step: int) -> StepData:
        return StepData([Minibatch([self._rows[index] for index in self._order[step]], None)], {})


class RlStage:
    """The stage of reinforcement learning on rollouts of the task's training split.

    An algorithm computes the advantages.
    """

    name, samples = "rl", True

    def __init__(
        self,
        spec: RlSpec,
        algorithm: Algorithm,
        task: Task,
        rollouts: TaskRolloutRunner,
        *,
        temperature: float | Callable[[Call], float] | None = None,
        signals: TrainingSignalSet | None = None,
        others: Mapping[str, RlStage] | None = None,
        pool: NoSignalItemFilter | None = None,
    ) -> None:
        """Create a stage of reinforcement learning for one policy.

        ``algorithm`` is the part of the recipe's algorithm that applies to this policy.
        ``temperature`` is the sampling temperature of the policy's calls, or None for the
        temperature of all rollouts. ``others`` holds the stages of other policies that are trained
        on the same rollouts, by policy name. ``pool`` decides which items are skipped because they
        currently give no training signal.
        """
        self.num_steps = spec.steps
        self.optim = with_schedule_defaults(
            self.name, spec.optim, spec.steps * spec.sample.minibatches
        )
        self.loss = spec.loss.for_minibatches(spec.sample.minibatches)
        self.max_staleness = spec.sample.max_staleness
        needs = needs_of(algorithm)
        self.critic = needs.values
        self.streams = needs.streams | required_loss_inputs(self.loss)
        self.memory: dict[str, float] = {}
        self.others: Mapping[str, RlStage] = others or {}
        self._task = task
        self._items = items_of(task, "train")
        self._rollouts = rollouts
        self._algorithm = with_reduction(algorithm, self.loss.reduction)
        self._sample = spec.sample
        self._temperature = spec.rollout.temperature if temperature is None else temperature
        self._signals = signals
        self._pool = pool

    @property
    def extra_state(self) -> Mapping[str, Checkpointable]:
        return {} if self._signals is None else self._signals.checkpoint_state

    @contextlib.asynccontextmanager
    async def open_data_source(
        self, next_item: int, pending: Sequence[int]
    ) -> AsyncIterator[StageDataSource]:
        async with contextlib.AsyncExitStack() as stack:
            reader = (
                None
                if self._signals is None
                else await stack.enter_async_context(self._signals.open_runner())
            )
            if self._pool is not None:
                self._pool.load()
            queue = RolloutGroupProducer(
                self._rollouts,
                self._items,
                self._sample,
                self.num_steps,
                next_item=next_item,
                pending=pending,
                read=None if reader is None else reader.score_group,
                # A group is useful if any of the trained policies can learn from it.
                has_no_signal=lambda group: all(
                    stage.has_no_signal(group, reader) for stage in (self, *self.others.values())
                ),
                pool=self._pool,
            )
            stack.push_async_callback(queue.close)
            yield RolloutGroupSource(self, queue, reader)

    async def count_planned_root_modes(self, next_item: int) -> RootModeCounts | None:
        return await self._rollouts.count_planned_modes(next_items(self._items, next_item))

    def add_loss_inputs(self, rows: Sequence[TokenSequence]) -> dict[str, float]:
        return finish_advantages(self._algorithm, rows)

    def select_probe_sequences(self, groups: Sequence[Group], step: int) -> list[TokenSequence]:
        return select_probe_sequences(groups, self._temperature, step)

    def step_data(
        self, taken: StepRolloutGroups, step: int, reader: SignalRunner | None
    ) -> StepData:
        """Return the training data of step ``step``, built from the rollout groups in ``taken``."""
        groups = [group for _, group in taken.groups]
        _check_any_came_back(groups, taken.notes)
        data, learnt = self.assign_credit(groups, reader)
        for name, stage in self.others.items():
            data.others[name], also = stage.assign_credit(groups)
            learnt |= also
        metrics = {**data.metrics, **taken.metrics, **_rollout_metrics(groups)}
        metrics |= rollout_sampling_metrics(groups, self._task.weights)
        metrics |= rollout_metrics(groups, self._task.weights)
        if isinstance(self._task, TaskMixture):
            metrics = mixture_metrics(groups, self._task.weights) | metrics
        is_recorded = isinstance(self._task, RecordedTrafficTask)
        allowed = self.num_steps if is_recorded else self._sample.max_token_staleness
        metrics["staleness_allowed"] = float(allowed)
        data.metrics = metrics
        if reader is not None:
            data.metrics |= reader.metrics(groups)
            reader.attach_signals_to_trees(groups)
            reader.forget(groups)
        gone = taken.stragglers
        data.accounts = [
            group_record(number, group, learnt, gone.get(number, ()))
            for number, group in taken.groups
        ]
        data.accounts += taken.given_up
        if self._pool is not None:
            self._pool.record_outcomes(data.accounts)
        unscored = ScoreFailureCounts.from_groups(groups)
        data.metrics |= unscored.metrics()
        data.notes = [*taken.notes, *([str(unscored)] if unscored.num else []), *data.notes]
        return data

    def assign_credit(
        self, groups: list[Group], reader: SignalRunner | None = None
    ) -> tuple[StepData, set[str]]:
        """Assign advantages to the rollouts in ``groups``.

        Returns the training data for this stage's policy, and the ids of the rollouts that received
        advantages.
        """
        assigned = self._compose_algorithm(reader).assign_advantages(
            groups, self._task.weights, every_token=self.loss.needs_zero_advantage
        )
        self.memory = {**self.memory, **assigned.memory}
        if isinstance(self._task, RecordedTrafficTask):
            mask_redacted_tokens(assigned)
        parts = self._minibatches(assigned)
        if not needs_of(self._algorithm).streams:  # otherwise advantages are not known yet
            _note_advantages(assigned.rollouts)
            assigned.metrics |= advantage_reward_correlation(
                groups, assigned.rollouts, self._task.weights
            )
        data = StepData(
            parts,
            dict(assigned.metrics),
            assigned.no_signal,
            groups,
            list(assigned.notes),
            dict(self.memory),
        )
        return data, {rollout.trajectory.id for rollout in assigned.rollouts}

    def has_no_signal(self, group: Group, reader: SignalRunner | None = None) -> bool:
        """Return True if a complete rollout group gives no training signal, for example if all
        rewards are equal."""
        composed = self._compose_algorithm(reader)
        return bool(composed.assign_advantages([group], self._task.weights).no_signal)

    def _compose_algorithm(self, reader: SignalRunner | None) -> Algorithm:
        """Return the training algorithm, combined with its saved state and the scores of training
        signals."""
        algorithm = with_saved_state(self._algorithm, self.memory)
        return algorithm if reader is None else reader.algorithm_with_scores(algorithm)

    def _minibatches(self, assigned: OptimizerStepAdvantages) -> list[Minibatch]:
        """Divide the rollouts of a step into minibatches of about the same size.

        Rollouts are dealt out in turn, so that each minibatch has some of every group. The loss
        denominators are divided evenly, so that each minibatch estimates the same loss.
        """
        num = min(self._sample.minibatches, len(assigned.rollouts))
        shares = {name: value / num for name, value in assigned.denominators.items()} if num else {}
        with WallAndCpuTimer("packing"):
            return [
                Minibatch(token_sequences(assigned.rollouts[index::num], self._temperature), shares)
                for index in range(num)
            ]


class RolloutGroupSource:
    """The source of training data for ``RlStage``.

    A step's data is ready when its groups of rollouts are complete.
    """

    def __init__(
        self, stage: RlStage, queue: RolloutGroupProducer, reader: SignalRunner | None
    ) -> None:
        self._stage = stage
        self._queue = queue
        self._reader = reader
        self._taken: list[int] = []
        """Indices of the items whose groups were taken from the queue and are being scored by
        signals."""
        self.note_new_weights = queue.begin_groups_for_weights
        self.paused = queue.paused
        self.take_skipped = queue.take_skipped_records

    def data_position(self) -> tuple[int, list[int]]:
        next_item, pending = self._queue.resume_position()
        return next_item, sorted([*self._taken, *pending])

    async def step_data(self, step: int) -> StepData:
        if self._reader is not None:
            await self._reader.begin_step(step, self._queue.by_id)
        taken = await self._queue.take(step)
        if self._reader is not None:  # a signal may be needed only since a group was completed
            self._taken = [number for number, _ in taken.groups]
            for _, group in taken.groups:
                await self._reader.score_group(group)
            self._taken = []
        with WallAndCpuTimer("credit"):
            return self._stage.step_data(taken, step, self._reader)


def with_schedule_defaults(stage: str, optim: OptimizerSpec, num_steps: int) -> OptimizerSpec:
    """Fill in the missing options of an optimizer's schedule.

    The schedule lasts ``num_steps`` steps, and the warm-up a tenth of that but at most 10 steps.
    Raises ConfigError with the stage's name if the schedule is shorter than the warm-up.
    """
    if optim.warmup_steps is None:
        optim = msgspec.structs.replace(optim, warmup_steps=usual_warmup_steps(num_steps))
    if optim.num_steps is not None:
        return optim
    try:
        return msgspec.structs.replace(optim, num_steps=num_steps)
    except ConfigError as error:
        raise ConfigError(
            f"{stage}.{error}: lower {stage}.optim.warmup_steps, or set "
            f"{stage}.optim.schedule=constant"
        ) from None


def required_loss_inputs(loss: LossSpec) -> frozenset[str]:
    """Return the names of the per-token inputs that the trainer must compute before it can evaluate
    this loss."""
    needed = {"ref_logprobs"} if loss.kl_beta else set()
    if loss.old == "pass":
        needed.add("old_logprobs")
    return frozenset(needed | (loss.reads & {"staleness"}))


def _check_any_came_back(groups: Sequence[Group], notes: Sequence[str]) -> None:
    """Raise RolloutsFailed if all rollouts of a training step failed.

    ``notes`` say which rollouts were abandoned. The message quotes the first note if no rollout has
    an error.
    """
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not any(trajectory.rewards for trajectory in trajectories):
        errors = error_summary(trajectories) or next(iter(notes), "no error was recorded")
        raise RolloutsFailed(f"all {len(trajectories)} rollouts failed: {errors}")


def _note_advantages(rollouts: Sequence[RolloutAdvantages]) -> None:
    """Store the advantages of each turn in its rollout's metadata, so that saved rollouts show
    them.

    For example, ``{"0.1/2": 0.25}`` is the advantage of turn 2 of call 0.1. If a turn's tokens
    differ, a list takes the place of the number.
    """
    for rollout in rollouts:
        by_turn: dict[str, float | list[float]] = {}
        for (call, turn), credit in rollout.credits.items():
            values = credit.advantages
            if values:
                by_turn[f"{call}/{turn}"] = (
                    values[0] if min(values) == max(values) else list(values)
                )
        # Another policy may have turns of the same rollout.
        rollout.trajectory.metadata.setdefault("advantages", {}).update(by_turn)


def _rollout_metrics(groups: Sequence[Group]) -> dict[str, float]:
    """Return metrics of a step's rollouts, such as numbers of tokens and shares of truncated
    calls."""
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
        **_agent_requests(calls),
    }


def _agent_requests(calls: Sequence[Call]) -> dict[str, float]:
    """Return metrics about the requests that external agents sent to the policy.

    ``agent/CAUSE`` counts the calls that they began, by cause, and ``agent/continued`` the turns
    that continued a call. Empty if no agent sent a request.
    """
    asked = [call for call in calls if call.cause is not None]
    counts = Counter(f"agent/{call.cause}" for call in asked)
    counts["agent/continued"] = sum(max(len(call.turns) - 1, 0) for call in asked)
    return {name: float(num) for name, num in sorted(counts.items())} if asked else {}
