"""The interface of tasks.

A task has questions with right answers, divided into disjoint splits, and scores each answer.

    task.splits["train"][17] ──> Item ──prepare──> RolloutInitialState ──engine runs──> Trajectory
                                                                                             │
                                                                                Score <──score

To write a task, give a function that makes an item and one that scores an answer::

    def make(rng: random.Random) -> Item:
        words = rng.choices(["teal", "coral", "mint"], k=1000)
        return Item("How often does 'teal' occur?", " ".join(words), gold=words.count("teal"))

    task = DatasetTask("teal", generated("teal", make), numeric)

A reward takes the answer and the item, or the whole trajectory. It may be async. It returns a
number, several numbers by name, or a ``Score``::

    DatasetTask("teal", splits, lambda answer, item: float(answer == item.gold))
    DatasetTask(
        "teal",
        splits,
        TrajectoryRewardFunction(lambda item, trajectory: {"correct": …, "short": …}),
        weights={"short": 0.1},
    )

Items are run by ``evaluate/attempt.py``, and rewards are used in ``train/``. A trajectory holds
text written by a model and by its code, so a score must treat it as hostile: it never executes the
text, and its running time is bounded.
"""

from __future__ import annotations

import inspect
import math
import os
import random
from abc import abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar, overload, runtime_checkable

import msgspec

from ramify.errors import ConfigError, RamifyError, did_you_mean, user_line_of_error
from ramify.nearest_name import nearest_name
from ramify.plugins import PluginRegistry
from ramify.sandbox.base import Session
from ramify.tasks.async_reward_loop import run_coroutine
from ramify.tasks.dataset_messages import convert_messages
from ramify.training_run_recognition import training_run_hint
from ramify.types.message import Message
from ramify.types.trajectory import Cell, Trajectory

SPLITS = ("train", "validation", "test")
"""Names of the splits that every task has: validation is for selecting checkpoints, and test is for
reporting. A task may define further held-out splits."""
ENDLESS = 1 << 40
"""Length of a generated split that has no fixed size."""
_OTHERS = "file.py:name, module:name, rows in a .jsonl or .parquet file, hf:NAME, or verifiers:ID"
TASKS = PluginRegistry(
    "task",
    "ramify.tasks",
    {
        "agent": "ramify.agents.agent_task:ExternalAgentTask",
        "ledger": "ramify.tasks.ledger.task:ledger",
        "mixture": "ramify.tasks.mixture:mixture",
    },
    others=_OTHERS,
)
"""Task name -> a task, or a function that creates it."""
_VERIFIERS = "verifiers:"
DATA_SUFFIXES = (".jsonl", ".parquet")
"""Suffixes of files whose rows can be loaded as a task."""


class Item(msgspec.Struct, frozen=True):
    """One question of a task, with its context and its right answer.

    >>> tasks.Item("How many hosts failed?", context="web-3 ERROR", gold=1).gold
    1
    """

    question: str = ""
    """The question. If empty, the last of ``messages`` is the question; it must be the user's."""
    context: Any = None
    """Value of the variable ``context`` in the session. None or an empty string means that the
    question has no context."""
    gold: Any = None
    """The right answer, in the form that the score function expects."""
    kind: str = ""
    """Category of the question. Reports are broken down by it."""
    id: str = ""
    """Unique id by which the item can be found again, such as ``ledger/train/17``."""
    right: Any = None
    """An answer that must score 1, used to check the task. Needed only if ``gold`` is not itself an
    answer, such as a list of accepted answers."""
    wrong: Any = None
    """An answer that must not score 1, used to check the task. If None, ``validate`` uses a text
    that does not look like an answer."""
    metadata: Mapping[str, Any] = {}
    """Further values for the score function or a report."""
    messages: tuple[Message, ...] = ()
    """Messages before the question: a system message, few-shot examples, earlier turns. They may be
    given as mappings with ``role`` and ``content``."""

    def __post_init__(self) -> None:
        if self.messages:
            self._take_messages()
        if isinstance(self.context, str) and not self.context:
            msgspec.structs.force_setattr(self, "context", None)
        for field in ("gold", "right", "wrong"):
            value = getattr(self, field)
            if hasattr(value, "tolist"):  # NumPy, PyTorch: scores compare Python's values
                msgspec.structs.force_setattr(self, field, value.tolist())

    def _take_messages(self) -> None:
        """Convert the item's chat messages to ``Message`` objects.

        Without a question, the last message becomes the question.

        Raises ValueError if a message is invalid, or if the question is missing and the last
        message is not the user's.
        """
        messages, question = convert_messages(self.messages), self.question
        if not question:
            if messages[-1].role != "user":
                raise ValueError(
                    "it has no question, and its last message, which would be the question, is "
                    "not the user's"
                )
            messages, question = messages[:-1], messages[-1].content
        msgspec.structs.force_setattr(self, "messages", messages)
        msgspec.structs.force_setattr(self, "question", question)


class RolloutInitialState(msgspec.Struct, kw_only=True):
    """The initial state of one rollout: what the model's session contains at the start.

    It is created once per rollout, so it may hold mutable state.

    The engine accepts it as a context.
    """

    context: Any = None
    """Value of the variable ``context`` in the session. None or an empty string means no context.
    """
    tools: Mapping[str, Any] = {}
    """Functions and values that the sessions of the root call and its children get. Functions run
    in the host process.
    """
    about: str = ""
    """Description of the context for the model, beyond its size and first characters."""
    instructions: str = ""
    """Instructions that are added to the prompt."""
    examples: Sequence[Any] = ()
    """(question, answer) pairs that are added to the prompt."""
    messages: Sequence[Message] = ()
    """Messages before the question. A plain call gets them unchanged. In a session, a system
    message is appended to that of the scaffold.
    """
    on_session: Callable[[Session], Awaitable[None]] | None = None
    """Called with each new session of the rollout before its first code cell, for example to bind
    names or install modules.
    """
    conduct: Callable[[Any], Awaitable[Any]] | None = None
    """Function that runs the rollout's conversations in place of the engine and returns the answer,
    for agents and environments with their own loop. Its argument is the run's ``RunModelClient``
    (``ramify/engine/external_conversations.py``). If None, the engine runs a session or one plain
    call."""
    on_end: Callable[[Any], Mapping[str, Any]] | None = None
    """Called once when the rollout has ended for any reason, with the answer or None. The result is
    stored in the trajectory's ``metadata`` for the score function.
    """

    def __post_init__(self) -> None:
        if isinstance(self.context, str) and not self.context:
            self.context = None

    def manifest(self) -> str:
        """Return ``about``, the description of the context for the model's prompt.

        The engine calls this method.
        """
        return self.about


class Score(msgspec.Struct, frozen=True):
    """The rewards and metrics of one trajectory, as returned by a task.

    >>> tasks.Score({"correct": 1.0, "brief": 0.5}, metrics={"calls": 3}).rewards["brief"]
    0.5
    """

    rewards: Mapping[str, float]
    """Reward name -> reward of the whole trajectory."""
    calls: Mapping[str, Mapping[str, float]] = {}
    """Call id -> reward name -> reward of that call alone, for calls with a right answer of their
    own.
    """
    metrics: Mapping[str, float] = {}
    """Metric name -> number to report, which is not part of the reward."""


@runtime_checkable
class Task(Protocol):
    """The interface of a task: its items, and a score for each answer.

    The function ``validate`` checks that right answers score 1 and wrong ones do not.

    Example:
        class Sums:
            name, weights = "sums", {}
            splits = tasks.generated("sums", make)
            async def prepare(self, item): return tasks.RolloutInitialState(context=item.context)
            def score(self, item, trajectory): return tasks.Score({"correct": 1.0})
    """

    name: str
    splits: Mapping[str, Sequence[Item]]
    """Split name -> items, created on access. No item is in two splits."""
    weights: Mapping[str, float]
    """Reward name -> weight in the total reward. The default weight is 1."""

    async def prepare(self, item: Item) -> RolloutInitialState:
        """Return the initial state of a rollout of ``item``."""
        ...

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        """Score ``trajectory`` as an answer to ``item``.

        The result must be deterministic. The method may be slow, since it runs in a thread. It
        should raise an error only for a fault of the task, not for a wrong answer.
        """
        ...


# --- data -----------------------------------------------------------------------------------------


T = TypeVar("T")


class LazySequence(Sequence[T]):
    """A sequence whose elements are created when they are accessed.

    A slice is a list.
    """

    @abstractmethod
    def at(self, index: int) -> T:
        """Create and return the element at ``index``, which is never negative.

        It is below the length of the sequence.
        """

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f"item {index} does not exist: there are {len(self)}")
        return self.at(index % len(self))


class DemonstrationPromptFormat(msgspec.Struct, frozen=True):
    """The prompt texts that surround the demonstrator's replies in a demonstration.

    The engine adds them in a real run. A demonstration that runs without the engine must reproduce
    them.
    """

    first_message: Callable[[str, object], str]
    """(question, context) -> the first message of a call."""
    report: Callable[[Cell], str]
    """Code cell -> the text that reports its result to the model."""
    system: str = ""
    """System message; empty if there is none."""
    native_tools: bool = False
    """True if the model runs code by native tool calls."""


class GeneratedSplit(Sequence[Item]):
    """A split of a task, such as ``train``, whose items are generated when they are accessed.

    Each item has its own random generator, seeded by the task name, the seed, the split and the
    index. Splits are therefore disjoint, and any item can be regenerated independently.

    >>> def make(rng): return tasks.Item(f"{rng.randint(1, 9)} + 1?")
    >>> tasks.GeneratedSplit("sums", "train", make)[17].id
    'sums/train/17'
    """

    def __init__(
        self,
        task: str,
        split: str,
        make: Callable[[random.Random], Item],
        seed: int = 0,
        size: int = ENDLESS,
    ) -> None:
        self.task = task
        self.split = split
        self.seed = seed
        self._make = make
        self._size = size

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
            return [self[number] for number in range(*index.indices(self._size))]
        if not -self._size <= index < self._size:
            raise IndexError(
                f"{self.task}/{self.split} has {self._size} items; item {index} does not exist"
            )
        index %= self._size
        name = self.id_of(index)
        try:
            item = self._make(random.Random(f"{name}/{self.seed}"))
        except (ArithmeticError, LookupError, NameError, TypeError, ValueError) as error:
            raise ConfigError(
                f"item {name} cannot be made: {type(error).__name__}: {error}; see the task's "
                "make function and options (RAMIFY_DEBUG=1 shows where)"
            ) from error
        return msgspec.structs.replace(item, id=name)

    def id_of(self, index: int) -> str:
        """Return the id of the item at ``index`` without generating the item.

        >>> tasks.task_of("needle").splits["test"].id_of(3)
        'needle/test/3'
        """
        return f"{self.task}/{self.split}/{index}"

    def _check_reachable(self, index: int | slice) -> None:
        """Raise ConfigError if ``index`` counts from the end of an endless split."""
        bounds = (index.start, index.stop) if isinstance(index, slice) else (index,)
        is_open = (
            isinstance(index, slice)
            and (index.stop if (index.step or 1) > 0 else index.start) is None
        )
        if not is_open and all(bound is None or bound >= 0 for bound in bounds):
            return
        shown = str(index)
        if isinstance(index, slice):
            shown = ":".join("" if bound is None else str(bound) for bound in bounds)
        raise ConfigError(
            f"{self.task}/{self.split} is endless, and [{shown}] counts from its end: give both "
            "bounds of at least 0, as in [0:100], or give the task a size"
        )

    def __iter__(self) -> Iterator[Item]:
        return map(self.__getitem__, range(self._size))


def generated(
    task: str, make: Callable[[random.Random], Item], *, seed: int = 0, size: int = ENDLESS
) -> dict[str, Sequence[Item]]:
    """Return train, validation and test splits whose items are generated by a function.

    The function ``make`` generates each item when it is accessed.

    >>> def make(rng): return tasks.Item(f"{rng.randint(1, 9)} + 1?")
    >>> list(tasks.generated("sums", make, size=100))
    ['train', 'validation', 'test']
    """
    return {split: GeneratedSplit(task, split, make, seed, size) for split in SPLITS}


def items_of(task: Task, split: str) -> Sequence[Item]:
    """Return the items of the named split.

    Raises ConfigError if the task has no such split.

    >>> len(tasks.items_of(tasks.task_of("needle"), "test")[:3])
    3
    """
    if split not in task.splits:
        raise ConfigError(
            f"task '{task.name}' has no split '{split}': {did_you_mean(split, task.splits)}"
        )
    return task.splits[split]


def task_of(name: str, /, **options: Any) -> Task:
    """Return the task called ``name``.

    ``name`` is one of ``TASKS``; ``module:attribute`` or ``file.py:attribute``, which is a task or
    a function that makes one from ``options``; a file of rows (``.jsonl``, ``.parquet``,
    ``hf:NAME``), with the options of ``data.dataset``; or ``verifiers:ID``, an installed taskset of
    that library, with the options of ``evaluate.verifiers_task``. Raises ConfigError for an unknown
    name, with the nearest known one.

    >>> tasks.task_of("ledger", multi=1.0).name
    'ledger'
    """
    named = name
    if hint := training_run_hint(Path(name)) if os.path.exists(name) else "":
        raise ConfigError(f"'{name}' is not a task; {hint}")
    if os.path.isdir(name):
        raise ConfigError(f"'{name}' is a folder, not a task: give a name, {_OTHERS}")
    if name.startswith("hf:") or name.endswith(DATA_SUFFIXES):
        name, options = "ramify.tasks.data:dataset", {"source": name, **options}
    elif name.startswith(_VERIFIERS):
        taskset = name.removeprefix(_VERIFIERS)
        name = "ramify.evaluate.verifiers_episodes:verifiers_task"
        options = {"taskset": taskset, **options}
    task = TASKS.resolve(name)
    if isinstance(task, type) or not isinstance(task, Task):  # a class has the names of a task
        task = _from_factory(named, task, options)
    elif options:
        raise ConfigError(
            f"task '{name}' is an object, not a function, and takes no options: remove "
            f"{', '.join(options)}"
        )
    if not isinstance(task, Task):
        raise ConfigError(
            f"'{name}' gives a {type(task).__name__}, not a Task (name, splits, weights, prepare, "
            "score)"
        )
    return task


def _from_factory(name: str, make: Any, options: Mapping[str, Any]) -> Any:
    """Create a task by calling its factory function with the given options.

    If ``make`` is not callable, return it unchanged. Raises ConfigError for an unknown option, or
    if the factory fails.
    """
    if not callable(make):
        return make
    parameters = inspect.signature(make).parameters
    unknown = [option for option in options if option not in parameters]
    if unknown and not any(param.kind is param.VAR_KEYWORD for param in parameters.values()):
        raise ConfigError(
            f"task '{name}' has no option '{unknown[0]}': {did_you_mean(unknown[0], parameters)}"
        )
    try:
        return make(**options)
    except RamifyError:
        raise
    except Exception as error:
        reason = error if isinstance(error, TypeError) else repr(error)
        raise ConfigError(f"task '{name}' with {dict(options)}: {reason}") from error


# --- scoring --------------------------------------------------------------------------------------


def total(rewards: Mapping[str, float], weights: Mapping[str, float]) -> float:
    """Return the weighted sum of the named rewards.

    >>> total({"correct": 1.0, "short": 0.5}, {"short": 0.2})
    1.1
    """
    return math.fsum(weights.get(name, 1.0) * reward for name, reward in rewards.items())


def score_trajectory(task: Task, item: Item, trajectory: Trajectory) -> Trajectory:
    """Score a trajectory with its task, store the score in the trajectory, and return it.

    The score consists of rewards, per-call rewards and metrics. Raises RamifyError, naming the task
    and the item, if the score raised or returned an invalid reward.
    """
    where = f"task '{task.name}', item {item.id}"
    try:
        score = task.score(item, trajectory)
    except RamifyError:
        raise
    except (Exception, SystemExit) as error:  # a score that exits must not end the run silently
        raise RamifyError(
            f"{where}: its score raised {type(error).__name__}: {error}{user_line_of_error(error)}"
        ) from error
    set_trajectory_score(where, trajectory, score)
    return trajectory


def set_trajectory_score(where: str, trajectory: Trajectory, score: Score) -> None:
    """Store the rewards and metrics of ``score`` in ``trajectory``.

    Raises RamifyError if the score is invalid, with a message that begins with ``where``.
    """
    _check_calls(where, trajectory, score)
    rewards = _to_finite_numbers(where, score.rewards)
    calls = {call: _to_finite_numbers(where, given) for call, given in score.calls.items()}
    metrics = _to_finite_numbers(where, score.metrics)
    trajectory.rewards, trajectory.call_rewards = rewards, calls
    trajectory.metrics = {**trajectory.metrics, **metrics}


def _check_calls(where: str, trajectory: Trajectory, score: Score) -> None:
    """Raise RamifyError if a score has no reward, or rewards a call that does not exist."""
    if not score.rewards:
        raise RamifyError(
            f"{where}: its score has no reward; give one by name, as in Score({{'correct': 1.0}})"
        )
    calls = {call.id for call in trajectory.calls}
    unknown = sorted(score.calls.keys() - calls)
    if unknown:
        raise RamifyError(
            f"{where}: a reward for call {unknown[0]!r}, which the trajectory does not have"
        )


def _to_finite_numbers(where: str, given: Mapping[str, Any]) -> dict[str, float]:
    """Convert rewards or metrics to floats, and check that they are finite.

    Raises RamifyError for a value that is not a finite number.
    """
    numbers: dict[str, float] = {}
    for name, value in given.items():
        if inspect.iscoroutine(value):
            value.close()
            raise RamifyError(
                f"{where}: reward '{name}' is a coroutine: await it in an async reward, or give a "
                "function without `async`"
            )
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, ArithmeticError, RuntimeError):
            number = math.nan
        if not math.isfinite(number):
            raise RamifyError(
                f"{where}: reward '{name}' is {value!r:.100}; it must be a finite number"
            )
        numbers[name] = number
    return numbers


Worth = float | Mapping[str, float] | Score
"""Return value of a reward function: one number, several numbers by name, or a ``Score``."""
AnswerReward = Callable[[Any, Item], Worth | Coroutine[Any, Any, Worth]]
"""A reward function, async or not: (answer, item) -> reward. The answer is None if the rollout has
none.
"""


class TrajectoryRewardFunction(msgspec.Struct, frozen=True):
    """A wrapper that marks a reward function as one that needs the whole trajectory.

    The function is called as ``fn(item, trajectory)``.

    Example:
        tasks.TrajectoryRewardFunction(lambda item, run: {"brief": float(len(run.calls) < 10)})
    """

    reward: Callable[[Item, Trajectory], Worth | Coroutine[Any, Any, Worth]]


class DatasetTask(msgspec.Struct, frozen=True):
    """A task made of splits and a reward function.

    Implements the interface ``Task``.

    Example:
        tasks.DatasetTask("logs", tasks.generated("logs", make), tasks.numeric)
    """

    name: str
    splits: Mapping[str, Sequence[Item]]
    reward: AnswerReward | TrajectoryRewardFunction
    """Function that is called with (answer, item), or a ``TrajectoryRewardFunction``. A reward
    that scores a whole step at once must also have ``waits_for_step`` and ``of_step``, as
    ``BatchedReward`` does.
    """
    weights: Mapping[str, float] = {}
    """Weights of the named rewards in their sum. A reward without a weight has 1."""
    begin: Callable[[Item], Awaitable[RolloutInitialState]] | None = None
    """Function that creates the initial state of a rollout. If None, each rollout has a session
    with only the item's context."""
    instructions: str = ""
    """Instructions that are added to the prompt of every item."""
    examples: Sequence[Any] = ()
    """(question, answer) pairs that are added to the prompt of every item."""
    families: Sequence[str] = ()
    """Kinds of questions selected with the task's option ``families``, if it has one. A matrix of
    evaluations shows one row for each kind."""

    def __post_init__(self) -> None:
        if not self.name or not self.splits:
            raise ConfigError(f"task {self.name!r} needs a name and at least one split")
        if not callable(self.reward) and not isinstance(self.reward, TrajectoryRewardFunction):
            raise ConfigError(
                f"task '{self.name}': its reward is a {type(self.reward).__name__}; give a function"
            )
        if not isinstance(self.reward, TrajectoryRewardFunction):
            self._check_signature(self.reward)

    def _check_signature(self, reward: AnswerReward) -> None:
        """Raise ConfigError if ``reward`` cannot be called with two arguments, the answer and the
        item.
        """
        try:
            signature = inspect.signature(reward)
        except ValueError:  # a function in C
            return
        name = getattr(reward, "__name__", type(reward).__name__)
        where = f"task '{self.name}': its reward {name}{signature} cannot be called with "
        if "completions" in signature.parameters:
            raise ConfigError(f"{where}one answer: give BatchedReward({name})")
        try:
            signature.bind(None, None)
        except TypeError:
            raise ConfigError(
                f"{where}(answer, item): give it these two parameters; or `completions` and "
                "columns, to score many answers at once; or wrap a function of (item, trajectory) "
                "in TrajectoryRewardFunction"
            ) from None

    async def prepare(self, item: Item) -> RolloutInitialState:
        if self.begin is None:
            start = RolloutInitialState(context=item.context, messages=item.messages)
        else:
            start = await self.begin(item)
        start.instructions = "\n\n".join(filter(None, [self.instructions, start.instructions]))
        start.examples = (*self.examples, *start.examples)
        return start

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        reward, answer = self.reward, trajectory.answer
        score = as_score(
            reward.reward(item, trajectory)
            if isinstance(reward, TrajectoryRewardFunction)
            else reward(answer, item)
        )
        return check_weight_names(self.name, self.weights, score)

    def is_scored_by_step(self, item: Item) -> bool:
        return bool(getattr(self.reward, "waits_for_step", False))

    def score_step(
        self, rollouts: Sequence[tuple[Item, Trajectory]]
    ) -> Sequence[Score | RamifyError]:
        reward: Any = self.reward
        rewards = reward.of_step([(trajectory.answer, item) for item, trajectory in rollouts])
        return [
            each
            if isinstance(each, RamifyError)
            else check_weight_names(self.name, self.weights, as_score(each))
            for each in rewards
        ]


def check_weight_names(task: str, weights: Mapping[str, float], score: Score) -> Score:
    """Return ``score``, or raise ConfigError if one of the ``weights`` is that of a misspelled
    reward.

    A score may give a reward for some items only, so a weight may lack its reward. But if a reward
    with a similar name has no weight, the weight is misspelled.
    """
    unweighted = [name for name in score.rewards if name not in weights]
    for name in weights:
        if name not in score.rewards and (meant := nearest_name(name, unweighted)):
            raise ConfigError(
                f"weights of task '{task}': no reward '{name}': did you mean '{meant}'? known: "
                f"{', '.join(score.rewards)}; a reward without a weight counts with 1"
            )
    return score


def as_score(worth: Worth | Coroutine[Any, Any, Worth]) -> Score:
    """Convert the result of a reward function to a ``Score``.

    An async result is awaited first. A single number becomes the reward named ``correct``.
    """
    if isinstance(worth, Coroutine):
        worth = run_coroutine(worth)
    if isinstance(worth, Score):
        return worth
    return Score(dict(worth)) if isinstance(worth, Mapping) else Score({"correct": worth})
