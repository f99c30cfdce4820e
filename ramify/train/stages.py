"""What a run goes through, one stage after the other, and what each step of a stage learns from.

    warm-up  random strings said twice             ┐
    sft      demonstrations, stored trajectories   ├── work(step) ──> Work: sequences of one or more optimizer steps
    rl       rollouts by the policy as it is now   ┘                  (everything after this is the same for all)

Decides sizes and options of each stage, dynamic sampling, and how a step's rollouts are split into minibatches. Leaves out
what is done with the work (``loop.py``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec

from ramify.errors import ConfigError, TrainError
from ramify.tasks.base import Item, Task
from ramify.train import induction
from ramify.train.algorithms.base import Algorithm, Stamping, finish, needs_of, remembering
from ramify.train.backends.base import Optim
from ramify.train.compile import sequences
from ramify.train.groups import Account, account
from ramify.train.loss import Loss
from ramify.train.metrics import of_rollouts
from ramify.train.rollout import Rollouts
from ramify.train.sft import order
from ramify.train.signals.filters import num_more
from ramify.train.signals.reading import Reader, Signals
from ramify.train.stamps import Stamped
from ramify.types.sequence import Sequence as Row
from ramify.types.trajectory import Group

Numbered = tuple[int, Group]
"""An item's running number and its group."""


class Part(msgspec.Struct, eq=False):
    """What one optimizer step learns from."""

    rows: list[Row]
    denominators: Mapping[str, float] | None
    """Loss component -> what its sum is divided by; None: the sum of its weights."""


class Work(msgspec.Struct, eq=False):
    """What one step of a stage learns from."""

    parts: list[Part]
    metrics: dict[str, float]
    next_item: int
    """Index of the first item of the training split that has not been used."""
    silence: str = ""
    """Why there is nothing to learn; empty where there is."""
    groups: list[Group] = msgspec.field(default_factory=list)
    """The rollouts that it was made of."""
    notes: list[str] = msgspec.field(default_factory=list)
    """What a person should know, in sentences."""
    memory: dict[str, float] = msgspec.field(default_factory=dict)
    """What the stage's algorithm remembers after it."""
    accounts: list[Account] = msgspec.field(default_factory=list)
    """What became of each group that it used up; their step is said by who writes them down."""


class Stage(Protocol):
    """One stage of a run."""

    name: str
    num_steps: int
    optim: Optim
    loss: Loss
    samples: bool
    """Whether its work is sampled from the policy, so that the engine must have the newest weights."""
    max_staleness: int
    """How many steps older than the weights that learn from it the weights that made a work may be."""
    streams: frozenset[str]
    """What the trainer is to compute of a work's rows before they are learnt from: ``old_logprobs``, ``ref_logprobs``,
    ``values``, ``lag``."""
    critic: bool
    """Whether there is one."""
    memory: dict[str, float]
    """What its algorithm remembers after the last work that was made; to be set where a run is resumed."""

    def finish(self, rows: Sequence[Row]) -> dict[str, float]:
        """Put onto the rows of a whole work what follows from those streams; what was measured."""
        ...

    async def work(self, step: int, next_item: int) -> Work:
        """Step ``step``, from 0, the same whenever it is asked for."""
        ...


class Given:
    """What stages without rollouts have in common: nothing is to be computed first, or remembered."""

    samples, max_staleness, critic, streams = False, 0, False, frozenset[str]()
    loss = Loss()

    def __init__(self) -> None:
        self.memory: dict[str, float] = {}

    def finish(self, rows: Sequence[Row]) -> dict[str, float]:
        return {}


class WarmUp(Given):
    """Random strings; see ``induction.py``."""

    name = "warmup"

    def __init__(self, num_steps: int, optim: Optim, ids: Sequence[int], batch_tokens: int, seed: int) -> None:
        super().__init__()
        self.num_steps, self.optim = num_steps, scheduled(optim, num_steps)
        self._ids, self._batch_tokens, self._seed = ids, batch_tokens, seed

    async def work(self, step: int, next_item: int) -> Work:
        rows = induction.induction(step, self._ids, self._batch_tokens, self._seed)
        return Work([Part(rows, None)], {}, next_item)


class Imitate(Given):
    """Rows that were made ready before, in the order of ``sft.order``."""

    name = "sft"

    def __init__(self, rows: Sequence[Row], optim: Optim, batch_tokens: int, epochs: int, seed: int) -> None:
        """Raises ConfigError where there is nothing to learn from."""
        super().__init__()
        self._rows, self._order = rows, order(rows, batch_tokens, epochs, seed)
        if not self._order:
            raise ConfigError("supervised fine-tuning has nothing to learn from: no trajectory passed its filter")
        self.num_steps = len(self._order)
        self.optim = scheduled(optim, self.num_steps)

    async def work(self, step: int, next_item: int) -> Work:
        return Work([Part([self._rows[index] for index in self._order[step]], None)], {}, next_item)


class Sample(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How much each step of reinforcement learning samples."""

    items: int = 24
    """Items of the task per step."""
    first_item: int = 0
    """Of the training split, to begin with; after a stage of demonstrations the first that was not demonstrated."""
    max_items: int = 0
    """With dynamic sampling: most items that a step may try until ``items`` of them have a signal; 0: no such search."""
    minibatches: int = 1
    """Optimizer steps that a step's rollouts are split into, group by group."""
    max_staleness: int = 0

    def __post_init__(self) -> None:
        if self.items < 1 or self.minibatches < 1 or self.max_staleness < 0 or 0 < self.max_items < self.items:
            raise ConfigError(
                f"rl: items={self.items} and minibatches={self.minibatches} must be at least 1, max_items={self.max_items} "
                f"0 or at least items, max_staleness={self.max_staleness} not negative"
            )


class Reinforce:
    """Rollouts of the task's training split, stamped by an algorithm."""

    name, samples = "rl", True

    def __init__(
        self, num_steps: int, optim: Optim, loss: Loss, *, task: Task, items: Sequence[Item], rollouts: Rollouts,
        algorithm: Algorithm, sample: Sample, temperature: float, signals: Signals | None = None,
    ) -> None:  # fmt: skip
        self.num_steps, self.optim = num_steps, scheduled(optim, num_steps * sample.minibatches)
        self.loss = loss.for_minibatches(sample.minibatches)
        self.max_staleness = sample.max_staleness
        needs = needs_of(algorithm)
        self.critic, self.streams = needs.values, needs.streams | _streams_of(self.loss)
        self.memory: dict[str, float] = {}
        self._task, self._items, self._rollouts, self._algorithm = task, items, rollouts, algorithm
        self._sample, self._temperature, self._signals = sample, temperature, signals

    async def work(self, step: int, next_item: int) -> Work:
        if self._signals is None:
            return await self._work(step, next_item, None)
        num = self._sample.max_items or self._sample.items
        items = [self._items[index % len(self._items)] for index in range(next_item, next_item + num)]
        async with self._signals.step(step, items) as reader:
            return await self._work(step, next_item, reader)

    async def _work(self, step: int, next_item: int, reader: Reader | None) -> Work:
        numbered, given_up, num_tried = await self._groups(step, next_item, reader)
        groups = [group for _, group in numbered]
        _check_any_came_back(groups, step)
        stamping = self._stamp(groups, reader)
        self.memory = {**self.memory, **stamping.memory}
        metrics = {**stamping.metrics, "items": float(num_tried), **_measured(groups)}
        metrics |= of_rollouts(groups, self._task.weights)
        parts = self._parts(stamping)
        if not needs_of(self._algorithm).streams:  # else they are not known yet
            _note_advantages(stamping.rollouts)
        if reader is not None:
            metrics |= reader.metrics()
            reader.put_on_trees(groups)
        learnt = {rollout.trajectory.id for rollout in stamping.rollouts}
        told = [account(number, group, learnt) for number, group in numbered] + given_up
        return Work(
            parts, metrics, next_item + num_tried, stamping.silence, groups, stamping.notes, dict(self.memory), told
        )

    def finish(self, rows: Sequence[Row]) -> dict[str, float]:
        return finish(self._algorithm, rows)

    async def _groups(
        self, step: int, next_item: int, reader: Reader | None
    ) -> tuple[list[Numbered], list[Account], int]:
        """The groups of a step, those given up, and how many items they took. With dynamic sampling those without a signal
        are given up for others."""
        wanted, most = self._sample.items, self._sample.max_items
        groups = await self._roll(step, next_item, wanted, reader)
        if not most:
            return groups, [], wanted
        tried = wanted
        silent: list[Numbered] = []
        loud = self._loud(groups, silent, reader)
        while more := num_more(wanted, len(loud), tried, most):
            loud += self._loud(await self._roll(step, next_item + tried, more, reader, tried), silent, reader)
            tried += more
        missing = max(0, wanted - len(loud))
        given_up = [account(number, group, ()) for number, group in silent[missing:]]
        given_up += [account(number, group, None) for number, group in loud[wanted:]]
        return [*loud[:wanted], *silent[:missing]], given_up, tried

    async def _roll(self, step: int, first: int, num: int, reader: Reader | None, begun: int = 0) -> list[Numbered]:
        """``begun``: groups of this step before these."""
        items = [self._items[index % len(self._items)] for index in range(first, first + num)]
        after = None if reader is None else reader.group
        groups = await self._rollouts.groups(items, step, after=after, first=begun)
        return list(enumerate(groups, first))

    def _loud(self, groups: Sequence[Numbered], silent: list[Numbered], reader: Reader | None) -> list[Numbered]:
        """Those of ``groups`` that teach something; the others are added to ``silent``."""
        loud: list[Numbered] = []
        for number, group in groups:
            is_silent = bool(self._composed(reader).stamp([group], self._task.weights).silence)
            (silent if is_silent else loud).append((number, group))
        return loud

    def _composed(self, reader: Reader | None) -> Algorithm:
        """The algorithm with what it remembers, and with what signals read."""
        algorithm = remembering(self._algorithm, self.memory)
        return algorithm if reader is None else reader.composed(algorithm)

    def _stamp(self, groups: Sequence[Group], reader: Reader | None) -> Stamping:
        return self._composed(reader).stamp(groups, self._task.weights, every_token=self.loss.wants_every_token)

    def _parts(self, stamping: Stamping) -> list[Part]:
        """Minibatches of about as many rollouts each, in turn, so that each has some of every group. What is divided by
        is split evenly: each minibatch is an estimate of the same loss."""
        num = min(self._sample.minibatches, len(stamping.rollouts))
        shares = {name: value / num for name, value in stamping.denominators.items()} if num else {}
        return [Part(sequences(stamping.rollouts[index::num], self._temperature), shares) for index in range(num)]


def scheduled(optim: Optim, num_steps: int) -> Optim:
    """``optim`` with the stage's length as its schedule's, where it names none."""
    return optim if optim.num_steps else msgspec.structs.replace(optim, num_steps=num_steps)


def _streams_of(loss: Loss) -> frozenset[str]:
    """What a loss needs that the trainer has to compute first."""
    wanted = {"ref_logprobs"} if loss.kl_beta else set()
    if loss.old == "pass":
        wanted.add("old_logprobs")
    return frozenset(wanted | (loss.reads & {"lag"}))


def _check_any_came_back(groups: Sequence[Group], step: int) -> None:
    """A step whose rollouts all failed is no step: something is wrong that more steps will not mend."""
    trajectories = [trajectory for group in groups for trajectory in group.trajectories]
    if not any(trajectory.rewards for trajectory in trajectories):
        errors = next((trajectory.errors for trajectory in trajectories if trajectory.errors), ["no error was said"])
        raise TrainError(f"all {len(trajectories)} rollouts of step {step} failed, the first with: {errors[-1]}")


def _note_advantages(rollouts: Sequence[Stamped]) -> None:
    """Put each turn's advantages beside its rollout (``metadata["advantages"]``), where the rollouts that are kept show
    them: ``{"0.1/2": 0.25}`` for turn 2 of call 0.1, and a list where its tokens differ."""
    for rollout in rollouts:
        noted: dict[str, float | list[float]] = {}
        for (call, turn), stamp in rollout.stamps.items():
            values = stamp.advantages
            if values:
                noted[f"{call}/{turn}"] = values[0] if min(values) == max(values) else list(values)
        rollout.trajectory.metadata["advantages"] = noted


def _measured(groups: Sequence[Group]) -> dict[str, float]:
    """What rollouts took and how they ended."""
    calls = [call for group in groups for trajectory in group.trajectories for call in trajectory.calls]
    turns = [turn for call in calls for turn in call.turns]
    stops = [call.stop for call in calls]
    num_sampled = sum(len(turn.reply.token_ids or ()) for turn in turns)
    return {
        "sampled_tokens": float(num_sampled),
        "length_mean": num_sampled / max(sum(len(group.trajectories) for group in groups), 1),
        "given_tokens": float(sum(len(turn.reply.prompt_ids or ()) for turn in turns)),
        "turns_per_call": len(turns) / max(len(calls), 1),
        "truncated": sum(stop is not None and stop.is_truncated() for stop in stops) / max(len(calls), 1),
        "split_turns": sum(trajectory.metrics.get("split_turns", 0.0) for g in groups for trajectory in g.trajectories),
    }
