"""What a task is: questions that have a right answer, in splits that share none, and how an answer
is scored.

    task.splits["train"][17] ──> Item ── prepare ──> Start ── the engine runs it ──> Trajectory ── score ──> Score

A task of one's own is a function that makes an item and one that scores an answer (``simple.py``)::

    def make(rng: random.Random) -> Item:
        words = rng.choices(["teal", "coral", "mint"], k=1000)
        return Item("How often does 'teal' occur?", " ".join(words), gold=words.count("teal"))

    task = SimpleTask("teal", generated("teal", make), numeric)

Leaves out who runs an item (``evaluate/attempt.py``) and what is done with rewards (``train/``).
What a trajectory holds was written by a model and by its code: a score reads it as hostile text,
never runs it, and is bounded in time.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
import random
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, overload, runtime_checkable

import msgspec

from ramify.errors import ConfigError, RamifyError, nearest
from ramify.sandbox.base import Session
from ramify.types.trajectory import Trajectory

SPLITS = ("train", "validation", "test")
"""Every task has these; validation chooses checkpoints, test is reported. A task may have more, for
what it holds out."""
ENDLESS = 1 << 40
"""Length of a generated split."""
TASKS = {
    "ledger": "ramify.tasks.ledger.task:ledger",
    "needle": "ramify.tasks.needle:needle",
    "programs": "ramify.tasks.programs.task:programs",
    "toolmath": "ramify.tasks.toolmath.task:toolmath",
}
"""Name -> the function that makes the task; loaded when it is asked for."""
DATA_SUFFIXES = (".jsonl", ".parquet")
"""Of files whose rows are a task."""


class Item(msgspec.Struct, frozen=True):
    """One question."""

    question: str
    context: Any = None
    """What the session gets; None for a question without a context."""
    gold: Any = None
    """The right answer, in whatever form the score compares with."""
    kind: str = ""
    """What sort of question it is; reports are by kind."""
    id: str = ""
    """Unique, and enough to find the item again: ``ledger/train/17``."""
    right: Any = None
    """An answer that must score 1, where ``gold`` is not one itself (a list of accepted answers,
    say)."""
    wrong: Any = None
    """An answer that must not score 1; None: one that resembles no gold."""
    metadata: Mapping[str, Any] = {}
    """What else the score or a report needs."""


class TaskStart(msgspec.Struct, kw_only=True):
    """What one rollout begins with; made anew for each, so that it may hold state. The engine takes
    it as a context."""

    context: Any = None
    tools: Mapping[str, Any] = {}
    """Functions (and values) in the session, of the root and of its children; functions run in the
    host."""
    about: str = ""
    """What the model is told of the context beyond its size and beginning."""
    on_session: Callable[[Session], Awaitable[None]] | None = None
    """What is done to each fresh session of the rollout before its first cell: names bound, modules
    installed."""
    on_end: Callable[[Any], Mapping[str, Any]] | None = None
    """Called once with the answer (None where there is none) when the rollout has ended, however it
    did. What it returns is put into the trajectory's ``metadata``, for the score."""

    def manifest(self) -> str:
        """``about``, as the engine asks for it."""
        return self.about


class Score(msgspec.Struct, frozen=True):
    """What a trajectory is worth."""

    rewards: Mapping[str, float]
    """Reward name -> reward of the whole trajectory."""
    calls: Mapping[str, Mapping[str, float]] = {}
    """Call id -> reward name -> reward of that call alone, where its own right answer is known."""
    metrics: Mapping[str, float] = {}
    """Name -> number that is reported and not rewarded."""


@runtime_checkable
class Task(Protocol):
    """Questions and their score. ``validate`` (``validate.py``) proves it: the gold must score 1, a
    wrong answer not."""

    name: str
    splits: Mapping[str, Sequence[Item]]
    """Split -> its items, made when they are looked at. No item is in two splits."""
    weights: Mapping[str, float]
    """Reward name -> its weight in the total; a name that is not there weighs 1."""

    async def prepare(self, item: Item) -> TaskStart:
        """What a rollout of ``item`` begins with."""
        ...

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        """What ``trajectory`` is worth as an answer to ``item``: the same for the same two,
        whenever it is asked. May take its time (it is called in a thread), and may raise where the
        fault is the task's own."""
        ...


# --- data
# ----------------------------------------------------------------------------------------------------------


class GeneratedSplit(Sequence[Item]):
    """A split that is generated: item ``index`` is made from a random generator of its own, seeded
    by the task's name, the seed, the split and the index. So splits are disjoint streams, and any
    item can be made again by itself."""

    def __init__(
        self,
        task: str,
        split: str,
        make: Callable[[random.Random], Item],
        seed: int = 0,
        size: int = ENDLESS,
    ) -> None:
        self.task, self.split, self.seed = task, split, seed
        self._make, self._size = make, size

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if self._size == ENDLESS:
            self._check_reachable(index)
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(
                f"{self.task}/{self.split} has {self._size} items, and no item {index}"
            )
        index %= self._size
        name = f"{self.task}/{self.split}/{index}"
        item = self._make(random.Random(f"{name}/{self.seed}"))
        return msgspec.structs.replace(item, id=name)

    def _check_reachable(self, index: int | slice) -> None:
        """Raises ConfigError for what is counted from an end that there is not."""
        asked = (index.start, index.stop) if isinstance(index, slice) else (index,)
        is_open = (
            isinstance(index, slice)
            and (index.stop if (index.step or 1) > 0 else index.start) is None
        )
        if not is_open and all(each is None or each >= 0 for each in asked):
            return
        shown = str(index)
        if isinstance(index, slice):
            shown = ":".join("" if each is None else str(each) for each in asked)
        raise ConfigError(
            f"{self.task}/{self.split} has no end, and [{shown}] needs one: give both bounds, from "
            "0 up, as in [0:100], or "
            "the task a size"
        )

    def __iter__(self) -> Iterator[Item]:
        return map(self.__getitem__, range(self._size))


def generated(
    task: str, make: Callable[[random.Random], Item], *, seed: int = 0, size: int = ENDLESS
) -> dict[str, Sequence[Item]]:
    """The three splits of a task whose items ``make`` makes of a random generator."""
    return {split: GeneratedSplit(task, split, make, seed, size) for split in SPLITS}


def items_of(task: Task, split: str) -> Sequence[Item]:
    """The items of a split by name. Raises ConfigError for one that the task does not have."""
    if split not in task.splits:
        raise ConfigError(
            f"task '{task.name}' has no split '{split}': {nearest(split, task.splits)}"
        )
    return task.splits[split]


_OTHERS = "give file.py:attribute, module:attribute, rows in a .jsonl or .parquet file, or hf:NAME"


def task_of(name: str, **options: Any) -> Task:
    """The task called ``name``: one of ``TASKS``; ``module:attribute`` or ``file.py:attribute``, a
    task or a function that makes one of ``options``; or a file of rows (``.jsonl``, ``.parquet``,
    ``hf:NAME``), with the options of ``data.dataset``. Raises ConfigError for what there is not,
    with the nearest that there is."""
    if name.startswith("hf:") or name.endswith(DATA_SUFFIXES):
        name, options = "ramify.tasks.data:dataset", {"source": name, **options}
    module, _, attribute = TASKS.get(name, name).rpartition(":")
    if not module:
        raise ConfigError(f"unknown task '{name}': {nearest(name, TASKS)}; or {_OTHERS}")
    try:
        found = getattr(
            _file(module) if module.endswith(".py") else importlib.import_module(module), attribute
        )
    except FileNotFoundError as error:
        raise ConfigError(f"task '{name}': there is no file {error.filename}") from error
    except RamifyError:
        raise
    except Exception as error:  # whatever a file of the user's own raises
        why = (
            error
            if isinstance(error, ImportError | AttributeError | SyntaxError | OSError)
            else repr(error)
        )
        raise ConfigError(f"task '{name}' cannot be loaded: {why}") from error
    if not isinstance(found, Task):
        found = _made(name, found, options)
    elif options:
        raise ConfigError(
            f"task '{name}' is made already and takes no options: leave out {', '.join(options)}"
        )
    if not isinstance(found, Task):
        raise ConfigError(
            f"'{name}' gives a {type(found).__name__}, not a Task (name, splits, weights, prepare, "
            "score)"
        )
    return found


def _file(path: str) -> Any:
    """The module in a file of the user's own."""
    spec = importlib.util.spec_from_file_location(re.sub(r"\W", "_", path), path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _made(name: str, make: Any, options: Mapping[str, Any]) -> Any:
    if not callable(make):
        return make
    known = inspect.signature(make).parameters
    stray = [option for option in options if option not in known]
    if stray and not any(each.kind is each.VAR_KEYWORD for each in known.values()):
        raise ConfigError(f"task '{name}' has no option '{stray[0]}': {nearest(stray[0], known)}")
    try:
        return make(**options)
    except RamifyError:
        raise
    except Exception as error:
        why = error if isinstance(error, TypeError) else repr(error)
        raise ConfigError(f"task '{name}' with {dict(options)}: {why}") from error


# --- scoring
# -------------------------------------------------------------------------------------------------------


def total(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """The one number that ``rewards`` come to: their weighted sum.

    >>> total({"correct": 1.0, "short": 0.5}, {"short": 0.2})
    1.1
    """
    return math.fsum(weights.get(name, 1.0) * reward for name, reward in rewards.items())


def scored(task: Task, item: Item, trajectory: Trajectory) -> Trajectory:
    """``trajectory`` with its rewards, those of its calls, and its metrics; the same object.

    Raises RamifyError, naming task and item, where the score itself failed or gave what is no
    reward."""
    try:
        score = task.score(item, trajectory)
    except RamifyError:
        raise
    except Exception as error:
        raise RamifyError(
            f"task '{task.name}', item {item.id}: its score raised {type(error).__name__}: {error}"
        ) from error
    _check(task, item, trajectory, score)
    trajectory.rewards = dict(score.rewards)
    trajectory.call_rewards = {call: dict(rewards) for call, rewards in score.calls.items()}
    trajectory.metrics = {**trajectory.metrics, **score.metrics}
    return trajectory


def _check(task: Task, item: Item, trajectory: Trajectory, score: Score) -> None:
    where = f"task '{task.name}', item {item.id}"
    if not score.rewards:
        raise RamifyError(
            f"{where}: its score has no reward; give one by name, as in Score({{'correct': 1.0}})"
        )
    calls = {call.id for call in trajectory.calls}
    stray = sorted(score.calls.keys() - calls)
    if stray:
        raise RamifyError(
            f"{where}: a reward for call {stray[0]!r}, which the trajectory does not have"
        )
    for rewards in (score.rewards, score.metrics, *score.calls.values()):
        for name, value in rewards.items():
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise RamifyError(
                    f"{where}: reward '{name}' is {value!r}; it must be a finite number"
                )
