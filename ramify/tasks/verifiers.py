"""A taskset of the ``verifiers`` library (0.4, ``verifiers.v1``) as a task.

    task = from_verifiers("gsm8k-v1")                                       an installed taskset by its id
    task = from_verifiers(MyTaskset(MyConfig()), right=lambda data: data.answer)

Its prompt is the question, its ``@reward`` and ``@metric`` methods the score, over a trace of one
reply: the answer. Each reward comes weighted as it is there. ``context`` takes what should be in
the session out of the row; without it a prompt that is too long to be a question is the context.
Not here: tasksets that need a container, tool servers, a conversation of several turns (an ``Env``
of their own), or code before or after the reply (``setup``, ``finalize``). These are refused, and
so is a score of which a reward needs a runtime. ``evaluate/verifiers_env.py`` is the other way
round.
"""

from __future__ import annotations

import asyncio
import importlib
import inspect
import itertools
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, overload

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import ENDLESS, Item, Score
from ramify.tasks.scoring.answer_text import as_text
from ramify.tasks.simple import SimpleTask, WholeTrajectoryReward
from ramify.types.trajectory import Trajectory

MAX_QUESTION_CHARS = 20_000
_LONG = "The task and its data are in `context`. Read it and do what it asks."


def verifiers_v1() -> Any:
    """The library. Raises ConfigError where it is not installed, or too old."""
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise ConfigError(
            f"this needs the package verifiers, 0.4 or later: pip install verifiers ({error})"
        ) from None


def from_verifiers(
    taskset: Any,
    *,
    split: str = "test",
    context: Callable[[Any], Any] | None = None,
    right: Callable[[Any], Any] | None = None,
    name: str = "",
) -> SimpleTask:
    """The task over ``taskset``, or the installed one of that id. ``context`` and ``right`` take
    the session's context and an answer that must score 1 out of a row (its ``TaskData``); without
    ``right``, ``validate`` has nothing to go by.

    Raises ConfigError for what cannot be a task here."""
    vf = verifiers_v1()
    if isinstance(taskset, str):
        taskset = _installed(taskset)
    name = name or taskset.config.id or type(taskset).__name__
    kind = type(taskset).task_type()
    if (
        kind.NEEDS_CONTAINER
        or kind.toolsets(taskset.config.task)
        or taskset.toolsets(taskset.config)
    ):
        raise ConfigError(
            f"taskset '{name}' needs a container or tool servers of its own: it cannot be a task "
            "here"
        )
    hooks = [
        hook for hook in ("setup", "finalize") if getattr(kind, hook) is not getattr(vf.Task, hook)
    ]
    if hooks:
        raise ConfigError(
            f"taskset '{name}' runs code of its own around a reply ({' and '.join(hooks)} of "
            f"{kind.__name__}), "
            "which needs a runtime: it cannot be a task here"
        )
    rows = VerifiersItems(f"{name}/{split}", taskset, context, right)

    def score(item: Item, trajectory: Trajectory) -> Score:
        return _run(_scored(vf, rows.task(item), trajectory))

    return SimpleTask(name, {split: rows}, WholeTrajectoryReward(score))


def _installed(id: str) -> Any:
    """The taskset of that id, with its own configuration. Raises ConfigError if it cannot be had or
    is not one reply."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        env = loaders.environment_class(id)
        taskset = loaders.load_taskset(loaders.taskset_config_type(id)(id=id))
    except (ImportError, TypeError, ValueError) as error:  # pydantic's errors are ValueErrors
        said = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"taskset '{id}' of verifiers cannot be loaded: {said}; install it, or give the "
            "taskset itself with its "
            "configuration"
        ) from None
    if env is not loaders.environment_class(""):
        raise ConfigError(
            f"taskset '{id}' plays its tasks in an environment of its own ({env.__name__}), not by "
            "one reply: "
            "it cannot be a task here"
        )
    return taskset


class VerifiersItems(Sequence[Item]):
    """Their tasks as items, read from the taskset as far as they are looked at."""

    def __init__(
        self,
        name: str,
        taskset: Any,
        context: Callable[[Any], Any] | None,
        right: Callable[[Any], Any] | None,
    ) -> None:
        self._name, self._context, self._right = name, context, right
        self._left: Iterator[Any] = iter(taskset)
        self._tasks: list[Any] = []
        self._lock = threading.Lock()
        self._is_endless = not taskset.bounded

    def __len__(self) -> int:
        return ENDLESS if self._is_endless else len(self._read(None))

    @overload
    def __getitem__(self, index: int) -> Item: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Item]: ...
    def __getitem__(self, index: int | slice) -> Item | Sequence[Item]:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        data = self._read(number)[number].data
        prompt = "\n\n".join(filter(None, [data.system_prompt, data.prompt_text]))
        given = None if self._context is None else self._context(data)
        if given is None and len(prompt) > MAX_QUESTION_CHARS:
            prompt, given = _LONG, prompt
        right = None if self._right is None else self._right(data)
        return Item(prompt, given, right, str(data.name or ""), f"{self._name}/{number}", right)

    def task(self, item: Item) -> Any:
        """Their task behind ``item``."""
        number = int(item.id.rpartition("/")[2])
        return self._read(number)[number]

    def _read(self, upto: int | None) -> list[Any]:
        with self._lock:
            missing = None if upto is None else max(0, upto + 1 - len(self._tasks))
            self._tasks += itertools.islice(self._left, missing)
            return self._tasks


async def _scored(vf: Any, task: Any, trajectory: Trajectory) -> Score:
    """What their rewards and metrics give for a trace of one reply."""
    trace = vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=importlib.import_module("verifiers.v1.state").state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
    )
    said = as_text(trajectory.answer) or ""
    asked = vf.UserMessage(content=task.data.prompt_text or trajectory.question)
    trace.nodes.append(vf.MessageNode(message=asked))
    trace.nodes.append(
        vf.MessageNode(parent=0, message=vf.AssistantMessage(content=said), sampled=True)
    )
    trace.info["ramify"] = {"stop": str(trajectory.stop), "calls": len(trajectory.calls)}
    await task.score(trace)
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        why = (
            f"its reward '{missing[0]}' gave nothing"
            if missing
            else "no reward of it works without a runtime"
        )
        raise RamifyError(f"task {type(task).__name__}, row {task.data.idx}: {why}")
    left_out = [reward.__name__ for reward in task.hooks("reward") if _needs_runtime(reward)]
    left_out += [
        judge.reward_name for judge in task.plugged_judges() if _needs_runtime(judge.score)
    ]
    if left_out:  # verifiers leaves them out of a score, which would be another one than theirs
        raise RamifyError(
            f"task {type(task).__name__}, row {task.data.idx}: its reward '{left_out[0]}' needs a "
            "runtime, and there is none"
        )
    metrics = {name: float(value) for name, value in trace.metrics.items() if value is not None}
    return Score(
        {name: float(reward.value) for name, reward in trace.rewards.items()}, metrics=metrics
    )


def _needs_runtime(reward: Callable[..., Any]) -> bool:
    found = inspect.signature(reward).parameters.get("runtime")
    return found is not None and found.default is inspect.Parameter.empty


def _run(work: Coroutine[Any, Any, Score]) -> Score:
    """``work`` on a loop of its own, in a thread of its own where this one has a loop that runs."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(asyncio.run(work))
        except BaseException as error:  # noqa: BLE001 -- raised again where it is waited for
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    result: Score = found[0]
    return result
