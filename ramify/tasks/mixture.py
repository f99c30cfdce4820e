"""Combines several tasks into one training mixture.

Each item belongs to one task, and the tasks take turns in proportion to their weights.

    mixture(parts={
        "sums": {"task": "ledger", "weight": 2},
        "papers": {"task": "evidence", "options": {"papers": [4, 6]}, "reward": 0.5},
        "held out": {"task": "needle", "weight": 0},                 evaluated, never trained
        "again": {"task": "ledger", "pool": "runs/a/groups.jsonl"},  what was learnt from in a run
    })

    train       sums sums papers sums sums papers …       the same order each time, without a seed
    validation  the trained parts, alternately            decides which checkpoint is the best
    test        the trained parts, alternately
    test_NAME, validation_NAME                            one part alone, for ``evaluate.final``

A reward is called ``PART.REWARD``, so that metrics and weights belong to one part. Items keep the
score, the tools and the initial state of the task that they come from. The algorithm that learns
from them, one for all parts or one for each, is chosen in ``train/advantages/by_task.py``.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import (
    ENDLESS,
    Item,
    LazySequence,
    RolloutInitialState,
    Score,
    Task,
    items_of,
    task_of,
)
from ramify.tasks.batch_scoring import batch_scores, is_batch_scored
from ramify.types.trajectory import RolloutGroupOutcome, Trajectory

_PERIOD = 1000
"""Number of items after which the order of the tasks repeats."""
_MARK = ":"
"""Separates the name of a part from the id of an item in that part's task."""


class TaskMixturePart(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One of the tasks of a mixture, with its weight and options."""

    task: str
    """Name of the task, as in ``TaskSpec.name``."""
    options: dict[str, Any] = {}
    weight: float = 1.0
    """Share of the training items, relative to the other parts. 0: used only for evaluation."""
    reward: float = 1.0
    """Factor by which the task's rewards are multiplied."""
    pool: str = ""
    """A run's folder or its ``groups.jsonl``, to train only on items whose groups had one of
    ``outcomes`` in that run. Empty: all items of the task."""
    outcomes: tuple[RolloutGroupOutcome, ...] = (RolloutGroupOutcome.LEARNT,)
    """For ``pool``: which group outcomes to select. ``learnt``: some attempts were better than
    others. ``no_signal``: all attempts scored the same, so the item was too easy or too hard."""


class _GroupLine(msgspec.Struct, frozen=True):
    """The fields that a mixture needs from a training run's record about a group of rollouts.

    The record is a line of ``groups.jsonl``.
    """

    item: str
    outcome: RolloutGroupOutcome


class TaskMixture(msgspec.Struct, frozen=True):
    """A training mixture: a task whose items come from several other tasks.

    Implements ``tasks.Task``.
    """

    name: str
    splits: Mapping[str, Sequence[Item]]
    weights: Mapping[str, float]
    tasks: Mapping[str, Task]
    factors: Mapping[str, float]
    """Name of a part -> factor by which its rewards are multiplied."""
    trained: tuple[str, ...]
    """Names of the parts that are trained on."""

    def right_answer_reward(self, item: Item) -> float:
        """Return the reward that a right answer to ``item`` gets in this mixture.

        It is the factor of the item's part in the mixture.
        """
        return self.factors[_part_and_item(item)[0]]

    async def prepare(self, item: Item) -> RolloutInitialState:
        part, own = _part_and_item(item)
        return await self.tasks[part].prepare(own)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        part, own = _part_and_item(item)
        return _score_of(part, self.tasks[part].score(own, trajectory))

    def is_scored_by_step(self, item: Item) -> bool:
        part, own = _part_and_item(item)
        return is_batch_scored(self.tasks[part], own)

    def score_step(
        self, rollouts: Sequence[tuple[Item, Trajectory]]
    ) -> Sequence[Score | RamifyError]:
        """Score all rollouts of a training step, with one call for each task of the mixture.

        If a task fails, only its own rollouts get the error.
        """
        parts = [(*_part_and_item(item), trajectory) for item, trajectory in rollouts]
        scores: dict[str, Iterator[Score | RamifyError]] = {
            part: iter(
                batch_scores(
                    self.tasks[part], [(own, run) for name, own, run in parts if name == part]
                )
            )
            for part in dict.fromkeys(part for part, _, _ in parts)
        }
        found = ((part, next(scores[part])) for part, _, _ in parts)
        return [
            score if isinstance(score, RamifyError) else _score_of(part, score)
            for part, score in found
        ]


class TaskMixtureItems(LazySequence[Item]):
    """A sequence that interleaves the items of several tasks in proportion to their weights."""

    def __init__(
        self,
        parts: Mapping[str, Sequence[Item]],
        weights: Mapping[str, float],
        *,
        repeats: bool = False,
    ) -> None:
        """Combine the items of several tasks into one sequence.

        With ``repeats``, a part that runs out of items starts over while another part still has new
        ones.
        """
        self._parts = parts
        self._repeats = repeats
        self._order = list(_order(weights))
        self._before: list[int] = []
        """For each position in the period: the number of earlier positions that belong to the same
        part.
        """
        seen: Counter[str] = Counter()
        for name in self._order:
            self._before.append(seen[name])
            seen[name] += 1
        self._counts = seen

    def __len__(self) -> int:
        """Return the number of items before the first task would have to repeat an item.

        If parts may repeat, count the items until every item has been used once.
        """
        period = len(self._order)
        sizes = (len(self._parts[name]) * period // num for name, num in self._counts.items())
        return max(sizes) if self._repeats else min(sizes)

    def at(self, index: int) -> Item:
        period, place = divmod(index, len(self._order))
        name = self._order[place]
        items = self._parts[name]
        own = items[(period * self._counts[name] + self._before[place]) % len(items)]
        kind = f"{name} {own.kind}".strip()
        return msgspec.structs.replace(own, id=f"{name}{_MARK}{own.id}", kind=kind)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))


def mixture(*, parts: Any = None) -> TaskMixture:
    """Return a task that combines several weighted tasks.

    Args:
        parts: Name -> ``TaskMixturePart`` or a mapping of its fields.

    Raises ConfigError if no part has a weight above 0, and for a pool without items.
    """
    if not parts or not isinstance(parts, Mapping):
        raise ConfigError(
            f"mixture: parts is {parts!r:.60}: give each task a name, as in "
            'parts={"sums": {"task": "ledger"}}'
        )
    if any(_MARK in name or "." in name for name in parts):
        raise ConfigError("mixture: the names of parts must not contain ':' or '.'")
    specs = {name: _to_mixture_part(name, value) for name, value in parts.items()}
    weights = {name: spec.weight for name, spec in specs.items()}
    if any(not weight >= 0 or math.isinf(weight) for weight in weights.values()):
        raise ConfigError(f"mixture: weights {weights} must be finite numbers, at least 0")
    trained = {name: weight for name, weight in weights.items() if weight}
    if not trained:
        raise ConfigError(
            "mixture: all weights are 0, so there is nothing to train on: give at least one part a "
            "weight above 0"
        )
    rare = next((name for name in trained if name not in {*_order(trained)}), None)
    if rare is not None:
        raise ConfigError(
            f"mixture: the weight of part '{rare}' ({trained[rare]:g} of "
            f"{sum(trained.values()):g}) is too small to get one of every {_PERIOD} items: raise "
            "it, or set it to 0"
        )
    tasks = {name: task_of(spec.task, **spec.options) for name, spec in specs.items()}
    train = {name: _train_items(name, specs[name], tasks[name]) for name in trained}
    splits: dict[str, Sequence[Item]] = {"train": TaskMixtureItems(train, trained, repeats=True)}
    for split in ("validation", "test"):
        each = {name: items_of(task, split) for name, task in tasks.items()}
        splits[split] = TaskMixtureItems(each, dict.fromkeys(trained, 1.0))
        splits |= {f"{split}_{name}": TaskMixtureItems(each, {name: 1.0}) for name in tasks}
    factors = {name: spec.reward for name, spec in specs.items()}
    return TaskMixture("mixture", splits, _Weights(factors, tasks), tasks, factors, tuple(trained))


class _Weights(dict[str, float]):
    """A dict of the weights of a mixture's rewards, which computes each weight when it is needed.

    The keys are names such as ``PART.REWARD``. Each weight is the factor of the part times the
    reward's weight in the part's own task, which is 1 by default.
    """

    def __init__(self, factors: Mapping[str, float], tasks: Mapping[str, Task]) -> None:
        super().__init__()
        self._factors = factors
        self._tasks = tasks

    def get(self, name: str, default: Any = None) -> Any:
        part, _, reward = name.partition(".")
        if part not in self._factors:
            return default
        return self._factors[part] * self._tasks[part].weights.get(reward, 1.0)


def _to_mixture_part(name: str, value: Any) -> TaskMixturePart:
    try:
        part = (
            value if isinstance(value, TaskMixturePart) else msgspec.convert(value, TaskMixturePart)
        )
    except msgspec.ValidationError as error:
        known = f" (known: {', '.join(RolloutGroupOutcome)})" if "outcomes" in str(error) else ""
        raise ConfigError(
            f"mixture: part '{name}' is {value!r:.60}: {error}{known}; give a task with its "
            'options, as in {"task": "ledger", "weight": 2}'
        ) from error
    if not 0 < part.reward < math.inf:
        raise ConfigError(
            f"mixture: part '{name}': reward={part.reward:g} is a factor of its rewards and must "
            "be above 0; for a task that is only evaluated set weight to 0"
        )
    return part


def _train_items(name: str, spec: TaskMixturePart, task: Task) -> Sequence[Item]:
    items = items_of(task, "train")
    if not spec.pool:
        return items
    path = Path(spec.pool)
    path = path / "groups.jsonl" if path.is_dir() else path
    if not path.is_file():
        raise ConfigError(f"mixture: part '{name}': its pool {path} does not exist")
    outcomes = _outcomes(path)
    wanted = dict.fromkeys(id for id, outcome in outcomes if outcome in spec.outcomes)
    indices = _indices(items, list(wanted))
    if not indices:
        has = Counter(outcome for _, outcome in outcomes)
        raise ConfigError(
            f"mixture: part '{name}': {path} has no item of {task.name}/train with an outcome in "
            f"{list(map(str, spec.outcomes))}; its groups: "
            f"{', '.join(f'{num} {outcome}' for outcome, num in has.items()) or 'none'}"
        )
    return [items[index] for index in indices]


def _outcomes(path: Path) -> list[tuple[str, RolloutGroupOutcome]]:
    """Return the item id and the outcome of each group of rollouts in a training run.

    They are read from its ``groups.jsonl``. An incomplete line, left by a killed run, is skipped.
    """
    records: list[tuple[str, RolloutGroupOutcome]] = []
    for line in path.read_bytes().splitlines():
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            record = msgspec.json.decode(line, type=_GroupLine)
            records.append((record.item, record.outcome))
    return records


def _indices(items: Sequence[Item], ids: Sequence[str]) -> list[int]:
    """Return the indices of the task items that have one of the given ids.

    An id may have the name of a part as prefix. Ids that are not found are left out.
    """
    found = {id: place for id in ids if (place := _index_of_id(items, id)) is not None}
    if len(found) < len(ids) and len(items) < ENDLESS:
        every = {item.id: place for place, item in enumerate(items)}
        own = (
            (id, next((each for each in _possible_ids(id) if each in every), None)) for id in ids
        )
        found |= {id: every[name] for id, name in own if name is not None}
    return list(dict.fromkeys(found[id] for id in ids if id in found))


def _index_of_id(items: Sequence[Item], id: str) -> int | None:
    """Return the index of the task item with this id, if the id ends with the index.

    An example of such an id is ``ledger/train/57``. Returns None if the item at that index has a
    different id, since ids can also end with a row number of a dataset that was divided into
    splits.
    """
    last = id.rpartition("/")[2]
    place = int(last) if last.isdecimal() else len(items)
    return place if place < len(items) and items[place].id in _possible_ids(id) else None


def _possible_ids(id: str) -> tuple[str, str]:
    """Return the ids that an item may have in its own task: with and without the first prefix.

    The prefix is a part's name.
    """
    return id, id.partition(_MARK)[2]


def _order(weights: Mapping[str, float]) -> Iterator[str]:
    """Yield, item by item, the name of the task from which a mixture takes its next item.

    The order then repeats. The next part is always the one that is furthest behind its share of
    items.
    """
    total = math.fsum(weights.values())
    num = min(_PERIOD, round(total / min(weights.values())) * 10)
    behind = dict.fromkeys(weights, 0.0)
    for _ in range(num):
        for name, weight in weights.items():
            behind[name] += weight / total
        chosen = max(behind, key=lambda name: behind[name])
        behind[chosen] -= 1
        yield chosen


def item_part_name(id: str) -> str:
    """Return the name of the task in the mixture from which the item with this id comes.

    >>> item_part_name("sums:ledger/train/17")
    'sums'
    """
    return id.partition(_MARK)[0]


def _part_and_item(item: Item) -> tuple[str, Item]:
    """Return the name of the task from which a mixture's item comes, and the original item."""
    part, _, id = item.id.partition(_MARK)
    kind = item.kind.removeprefix(part).strip()
    return part, msgspec.structs.replace(item, id=id, kind=kind)


def _score_of(part: str, score: Score) -> Score:
    """Return a copy of a score whose reward and metric names are prefixed with its task's name."""
    calls = {call: _prefix_names(part, rewards) for call, rewards in score.calls.items()}
    return Score(_prefix_names(part, score.rewards), calls, _prefix_names(part, score.metrics))


def _prefix_names(part: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{part}.{name}": value for name, value in values.items()}
