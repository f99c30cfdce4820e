"""Uses tasksets of the ``verifiers`` library (0.4, ``verifiers.v1``) as Ramify tasks.

A taskset is a collection of tasks.

    task = from_verifiers("gsm8k-v1")                             an installed taskset by its id
    task = from_verifiers(MyTaskset(MyConfig()), right=lambda data: data.answer)

The taskset's prompt is the question. Its ``@reward`` and ``@metric`` methods score a trace of one
reply, the answer; rewards arrive weighted. ``context`` extracts the session's context from a row.
Without it, a prompt that is too long for a question becomes the context.

Refused: tasksets that need a container, tool servers, a conversation of several turns (their own
``Env``), code before or after the reply (``setup``, ``finalize``), or a runtime for their rewards.
``evaluate/verifiers_episodes.py`` plays those as they are. For the opposite direction see
``evaluate/verifiers_env.py``.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ramify.errors import ConfigError, RamifyError
from ramify.pip_install_command import install_command
from ramify.tasks.async_reward_loop import run_coroutine
from ramify.tasks.base import (
    ENDLESS,
    DatasetTask,
    Item,
    LazySequence,
    Score,
    TrajectoryRewardFunction,
)
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.trajectory import Trajectory

MAX_QUESTION_CHARS = 20_000
_LONG = "The task and its data are in `context`. Read it and do what it asks."


def verifiers_v1() -> Any:
    """Import and return the module ``verifiers.v1``.

    Raises ConfigError if the ``verifiers`` library is not installed or is too old.

    Example:
        tasks.verifiers_v1().Taskset
    """
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"this needs verifiers 0.4: {install_command('verifiers')} ({error})"
        ) from None


def from_verifiers(
    taskset: Any,
    *,
    split: str = "test",
    context: Callable[[Any], Any] | None = None,
    right: Callable[[Any], Any] | None = None,
    name: str = "",
) -> DatasetTask:
    """Create a Ramify task from a taskset of the ``verifiers`` library.

    The taskset is given as an object or as the id of an installed taskset. ``context`` and
    ``right`` extract the session's context and an answer that must score 1 from a row (its
    ``TaskData``). Without ``right``, ``validate`` skips the check of scores. Raises ConfigError for
    a taskset that is not supported.

    Example:
        task = tasks.from_verifiers(taskset, split="test")
    """
    vf = verifiers_v1()
    if isinstance(taskset, str):
        taskset = _load_taskset(taskset)
    name = name or taskset.config.id or type(taskset).__name__
    kind = type(taskset).task_type()
    if (
        kind.NEEDS_CONTAINER
        or kind.toolsets(taskset.config.task)
        or taskset.toolsets(taskset.config)
    ):
        raise ConfigError(
            f"taskset '{name}' needs its own container or tool servers: play it with "
            "ramify.evaluate.verifiers_task"
        )
    hooks = [
        hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)
    ]
    if hooks:
        raise ConfigError(
            f"taskset '{name}' runs its own code around a reply ({' and '.join(hooks)} of "
            f"{kind.__name__}), which needs a runtime: play it with ramify.evaluate.verifiers_task"
        )
    rows = VerifiersTasksetItems(f"{name}/{split}", taskset, context, right)

    def score(item: Item, trajectory: Trajectory) -> Score:
        return run_coroutine(_score_trajectory(vf, rows.task(item), trajectory))

    return DatasetTask(name, {split: rows}, TrajectoryRewardFunction(score))


def load_taskset(taskset: Any, config: Mapping[str, Any] | None = None) -> Any:
    """Load a taskset of the ``verifiers`` library by its id.

    ``config`` has the fields of its configuration. A taskset object is returned unchanged. Raises
    ConfigError on failure.

    Example:
        tasks.load_taskset("gsm8k-v1", {"system_prompt": None})
    """
    if not isinstance(taskset, str):
        if config:
            raise ConfigError(
                f"a taskset object already has its configuration: set {', '.join(config)} when "
                "you create it"
            )
        return taskset
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        given = {**(config or {}), "id": taskset}
        return loaders.load_taskset(loaders.taskset_config_type(taskset).model_validate(given))
    except (ImportError, TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"taskset '{taskset}' of verifiers cannot be loaded: {reason}; install it, or give the "
            "taskset object with its configuration"
        ) from None


def _load_taskset(id: str) -> Any:
    """Load an installed taskset of the ``verifiers`` library whose tasks need only one reply.

    Raises ConfigError if its tasks need several replies of the model.
    """
    taskset = load_taskset(id)
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    env = loaders.environment_class(id)
    if env is not loaders.environment_class(""):
        raise ConfigError(
            f"taskset '{id}' runs its tasks in its own environment ({env.__name__}), not with one "
            "reply: play it with ramify.evaluate.verifiers_task"
        )
    return taskset


class LazyVerifiersTasks:
    """A lazily loaded sequence of the tasks in a ``verifiers`` taskset.

    They are loaded lazily, up to the last one that was accessed.
    """

    def __init__(self, taskset: Any) -> None:
        self.is_endless = not taskset.bounded
        self._name = taskset.config.id or type(taskset).__name__
        self._unread: Iterator[Any] = iter(taskset)
        self._tasks: list[Any] = []
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return ENDLESS if self.is_endless else len(self._read(None))

    def task(self, number: int) -> Any:
        """Return the ``verifiers`` task with this index in its taskset."""
        return self._read(number)[number]

    def _read(self, upto: int | None) -> list[Any]:
        with self._lock:
            missing = None if upto is None else max(0, upto + 1 - len(self._tasks))
            try:
                self._tasks += itertools.islice(self._unread, missing)
            except Exception as error:  # code of the taskset, which may raise anything
                reason = " ".join(str(error).split())[:300]
                raise ConfigError(
                    f"the tasks of {self._name} of verifiers cannot be read: "
                    f"{type(error).__name__}: {reason}; install what it needs, or check its "
                    "configuration"
                ) from error
            return self._tasks


class VerifiersTasksetItems(LazySequence[Item]):
    """A sequence of Ramify task items made from the tasks of a ``verifiers`` taskset."""

    def __init__(
        self,
        name: str,
        taskset: Any,
        context: Callable[[Any], Any] | None,
        right: Callable[[Any], Any] | None,
    ) -> None:
        self._name = name
        self._context = context
        self._right = right
        self._rows = LazyVerifiersTasks(taskset)

    def __len__(self) -> int:
        return len(self._rows)

    def at(self, index: int) -> Item:
        data = self._rows.task(index).data
        prompt = "\n\n".join(filter(None, [data.system_prompt, data.prompt_text]))
        context = None if self._context is None else self._context(data)
        if context is None and len(prompt) > MAX_QUESTION_CHARS:
            prompt, context = _LONG, prompt
        right = None if self._right is None else self._right(data)
        return Item(prompt, context, right, str(data.name or ""), f"{self._name}/{index}", right)

    def task(self, item: Item) -> Any:
        """Return the ``verifiers`` task from which an item was made."""
        return self._rows.task(int(item.id.rpartition("/")[2]))


async def _score_trajectory(vf: Any, task: Any, trajectory: Trajectory) -> Score:
    """Score a trajectory's answer with the reward functions of a ``verifiers`` task.

    Its metrics are computed too. Raises RamifyError if a reward is missing, or if it needs a
    ``verifiers`` runtime, which does not exist here.
    """
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    reply = as_text(trajectory.answer) or ""
    prompt = vf.UserMessage(content=task.data.prompt_text or trajectory.question)
    trace.nodes.append(vf.MessageNode(message=prompt))
    trace.nodes.append(
        vf.MessageNode(parent=0, message=vf.AssistantMessage(content=reply), sampled=True)
    )
    trace.info["ramify"] = {"stop": str(trajectory.stop), "calls": len(trajectory.calls)}
    await task.score(trace)
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        reason = (
            f"its reward '{missing[0]}' returned nothing"
            if missing
            else "none of its rewards works without a runtime"
        )
        raise RamifyError(f"task {type(task).__name__}, row {task.data.idx}: {reason}")
    skipped = [reward.__name__ for reward in task.hooks("reward") if _needs_runtime(reward)]
    skipped += [judge.reward_name for judge in task.plugged_judges() if _needs_runtime(judge.score)]
    if skipped:  # verifiers omits these silently, which would change the score
        raise RamifyError(
            f"task {type(task).__name__}, row {task.data.idx}: its reward '{skipped[0]}' needs a "
            "runtime, but there is none"
        )
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Score(
        {name: float(reward.value) for name, reward in trace.rewards.items()}, metrics=metrics
    )


def _needs_runtime(reward: Callable[..., Any]) -> bool:
    runtime = inspect.signature(reward).parameters.get("runtime")
    return runtime is not None and runtime.default is inspect.Parameter.empty
