"""Define tasks that are solved by an external agent, which is a command or a Python function.

The agent may have been written for another system.

    train.Run(
        policy=…,
        task=train.ExternalAgentTask(
            command="{python} my_agent.py {item_file}",
            items="questions.jsonl",
            reward="score.py:score",
        ),
        rl=…,
    )

The agent needs no change: it asks its models at the base URL that its environment names. The same
class is a task for ``evaluate``. In a recipe it becomes plain data, the task ``agent`` with its
fields as options, so ``task.options.max_seconds=60`` overrides a field, and a checkpoint or another
process has all of it.

This module checks the description of a task, so that mistakes are found before a model is loaded,
and turns the result of a reward into a score. ``agent_attempt.py`` runs one rollout.
"""

from __future__ import annotations

import functools
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.agents.agent_attempt import (
    AgentAttempt,
    AgentTimeLimits,
    RunningAgent,
    StartAgent,
)
from ramify.agents.agent_command import AgentCommandTemplate, parse_task_environment, start_command
from ramify.agents.agent_job import AgentRolloutInput, remove_folder
from ramify.agents.agent_result import AgentExitRecord, AgentRun
from ramify.agents.run_function_agent import AgentFunctionRun
from ramify.errors import ConfigError, RamifyError
from ramify.plugins import class_import_location, is_object_location, load_object
from ramify.tasks.async_reward_loop import run_coroutine
from ramify.tasks.base import (
    DATA_SUFFIXES,
    Item,
    RolloutInitialState,
    Score,
    Task,
    Worth,
    as_score,
    check_weight_names,
    task_of,
)
from ramify.tasks.data import dataset
from ramify.tasks.scoring import SCORERS
from ramify.train.config import TaskSpec
from ramify.types.agent_outcome import AGENT_RECORD
from ramify.types.trajectory import Trajectory

_CALL_ID = re.compile(r"\d+([.:]\d+)*")
_TOTAL = "correct"
"""Name under which a reward that is a single number is reported."""


class ExternalAgentTask(TaskSpec, frozen=True, forbid_unknown_fields=True, kw_only=True, dict=True):
    """A task that is solved by an external agent, which is a command or a Python function.

    The agent may have been written for another system. The agent reads its item, asks models at the
    address that it is given, and ends. The reward function sees the agent's exit status, output,
    files and tree of calls.

    Example:
        train.ExternalAgentTask(agent=solve, items="questions.jsonl", reward="exact")
    """

    name: str = "agent"
    """Name of the task, in a recipe and in errors."""
    command: str | list[str] = ""
    """The agent as a command, with placeholders such as ``{item_file}`` and ``{question}``
    (docs/agents.md). It is split into words by a shell's rules, but is not run by a shell."""
    shell: bool = False
    """Run the command in a shell, for example to use pipes or redirection. Values of placeholders
    are quoted."""
    env: Sequence[str] = ()
    """Additional environment variables of the command. Each is ``NAME=value``, or a name whose
    value is taken from the trainer's environment."""
    agent: Any = None
    """The agent as a function, sync or async, that takes an ``AgentRolloutInput`` and returns the
    answer. Alternatively the function's import location, ``file.py:name``."""
    container: str = ""
    """Docker image in which the command runs, with the agent's folder mounted. If empty, the
    command runs on this machine as a plain process."""
    items: Any = ""
    """A ``.jsonl`` or ``.parquet`` file, ``hf:NAME``, a list of rows, or a dict from each split to
    one of these; or a task, or the name of one."""
    item_options: dict[str, Any] = msgspec.field(default_factory=dict)
    """Options for reading the rows, such as ``question``, ``gold`` and ``context`` (see
    ``tasks.dataset``). If ``items`` names a task, the options of that task."""
    reward: Any = ""
    """Function (sync or async) from an ``AgentRun`` to a number, numbers by name or call id, or a
    ``Score``; or its location ``file.py:name``. A name such as ``exact``, which compares the answer
    with the gold answer, selects a scoring function."""
    weights: dict[str, float] = msgspec.field(default_factory=dict)
    """Reward name -> its weight in the total reward. The default weight is 1."""
    max_seconds: float = 600.0
    """Maximum time in seconds for one rollout. An agent that takes longer is stopped, and its
    rollout is not used for training."""
    first_request_s: float = 120.0
    """Seconds within which the agent must send its first model request. Otherwise it is stopped,
    and its rollout is not used for training."""
    scores_crashes: bool = False
    """Whether the rollout of a crashed agent gets a reward and is used for training, like one
    that ended normally."""

    def __post_init__(self) -> None:
        if self.options:
            raise ConfigError(
                f"ExternalAgentTask: options={self.options!r:.80}: give them as fields of the task"
            )
        if not self.command and self.agent is None:
            raise ConfigError(
                "ExternalAgentTask has no agent: give command='program {item_file}', or agent=a "
                "function"
            )
        if self.command and self.agent is not None:
            raise ConfigError("ExternalAgentTask has both command and agent: give only one")
        if not self.command and (self.container or self.shell or self.env):
            raise ConfigError(
                "ExternalAgentTask: container, shell and env apply only to command: give command, "
                "or remove them"
            )
        if not self.reward:
            raise ConfigError(
                "ExternalAgentTask has no reward: give a function of an AgentRun, file.py:name, or "
                "the name of a score, such as 'exact'"
            )
        if isinstance(self.items, str | Mapping | Sequence) and not self.items:
            raise ConfigError(
                "ExternalAgentTask has no items: give a file of rows (.jsonl, .parquet), a list of "
                "rows, or the name of a task"
            )
        for field in ("max_seconds", "first_request_s"):
            value = getattr(self, field)
            if not isinstance(value, int | float) or not value > 0:
                raise ConfigError(
                    f"ExternalAgentTask: {field}={value!r:.80} must be a number above 0"
                )
        if isinstance(self.env, str):
            raise ConfigError(
                f"ExternalAgentTask: env={self.env!r:.80}: give a list of names, {[self.env]}"
            )
        _ = self._start, self._reward
        msgspec.structs.force_setattr(self, "options", self._options())

    def _options(self) -> dict[str, Any]:
        """Return the fields that the user has set, in which import locations replace functions."""
        given = {
            field.name: value
            for field in msgspec.structs.fields(type(self))
            if field.name not in TaskSpec.__struct_fields__
            and (value := getattr(self, field.name)) != field.default
            and not (field.default is msgspec.NODEFAULT and value == {})
        }
        return {name: _import_location(value) for name, value in given.items()}

    # --- the task ---------------------------------------------------------------------------------

    @functools.cached_property
    def splits(self) -> Mapping[str, Sequence[Item]]:
        """Load the task items of each dataset split.

        Returns a dict from the split's name to its items. Raises ConfigError or SourceError if they
        cannot be read.
        """
        items, options = self.items, self.item_options
        if isinstance(items, Task):
            return items.splits
        is_rows = not isinstance(items, str) or items.startswith("hf:")
        if not is_rows and not items.endswith(DATA_SUFFIXES):
            return task_of(items, **options).splits
        return dataset(items, **{"reward": _raise_unscorable, "name": self.name, **options}).splits

    async def prepare(self, item: Item) -> RolloutInitialState:
        limits = AgentTimeLimits(
            max_seconds=self.max_seconds,
            first_request_s=self.first_request_s,
            scores_crashes=self.scores_crashes,
        )
        attempt = AgentAttempt(f"task '{self.name}', item {item.id}", item, self._start, limits)
        return RolloutInitialState(conduct=attempt.run, on_end=attempt.trajectory_metadata)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        found = trajectory.metadata.get(AGENT_RECORD)
        if found is None:
            if self._has_named_scorer:
                return self._score_answer(item, trajectory)
            raise RamifyError(
                f"task '{self.name}', item {item.id}: the reward needs a rollout of the agent, "
                "but got only an answer: evaluate or train the task"
            )
        record = msgspec.convert(found, AgentExitRecord)
        try:
            if self._has_named_scorer:
                return self._score_answer(item, trajectory)
            score = _to_score(self._reward(_to_agent_run(item, trajectory, record)), trajectory)
            return check_weight_names(self.name, self.weights, score)
        finally:
            if record.folder:
                remove_folder(Path(record.folder).parent)
                found.pop("folder", None)

    def _score_answer(self, item: Item, trajectory: Trajectory) -> Score:
        score = as_score(self._reward(trajectory.answer, item))
        return check_weight_names(self.name, self.weights, score)

    @property
    def writes_prompts(self) -> bool:
        """Always True, because an external agent writes its own prompts.

        Ramify's prompt scaffolds do not apply.
        """
        return True

    @property
    def needs_rollout(self) -> bool:
        """True if the reward depends on the whole rollout, not just on the answer."""
        return not self._has_named_scorer

    def as_answer(self, right: Any) -> Any:
        """Return the answer that a perfect agent would give, in the agent's output format.

        ``validate`` uses it to check that the reward function accepts the gold answer.
        """
        convert = getattr(self._reward, "as_answer", None)
        return right if convert is None else convert(right)

    # --- the agent and its reward -----------------------------------------------------------------

    @functools.cached_property
    def _start(self) -> StartAgent:
        """Return the function that starts the task's agent for one rollout.

        Raises ConfigError if the agent cannot be loaded.
        """
        if self.command:
            template = AgentCommandTemplate(
                self.command, shell=self.shell, container=self.container
            )

            parse_task_environment(self.env)

            async def start_process(job: AgentRolloutInput) -> RunningAgent:
                return await start_command(template, job, self.env)

            return start_process
        function = self.agent
        if isinstance(function, str):
            function = load_object(function, f"agent '{function}'")
        _check_call("agent", function, "an AgentRolloutInput")

        async def start(job: AgentRolloutInput) -> RunningAgent:
            return AgentFunctionRun(function, job)

        return start

    @functools.cached_property
    def _has_named_scorer(self) -> bool:
        """True if the reward is a named scorer that compares the answer with the gold answer."""
        return isinstance(self.reward, str) and not is_object_location(self.reward)

    @functools.cached_property
    def _reward(self) -> Callable[..., Any]:
        """Load the reward function of the task and return it.

        If ``reward`` is the name of a score, the function takes an answer and an item, and compares
        the answer with the gold answer. Otherwise it takes an ``AgentRun``, which describes a whole
        rollout.
        """
        if not isinstance(self.reward, str):
            found = self.reward
        elif self._has_named_scorer:
            found = SCORERS.resolve(self.reward)
        else:
            found = load_object(self.reward, f"reward '{self.reward}'")
        if not self._has_named_scorer:
            _check_call("reward", found, "an AgentRun")
        reward: Callable[..., Any] = found
        return reward


def _raise_unscorable(answer: Any, item: Item) -> float:
    """Raise RamifyError, because only the reward of the item's ``ExternalAgentTask`` can score the
    answer.

    Items that are read from a file have this function as their scorer, because only the reward of
    the ``ExternalAgentTask`` can score them.
    """
    raise RamifyError(
        f"item {item.id}: only the reward of its ExternalAgentTask can score it: evaluate or train "
        "that task"
    )


def _check_call(field: str, function: Any, argument: str) -> None:
    """Raise ConfigError unless the value of ``field`` is a function that can be called with one
    argument."""
    name = getattr(function, "__name__", type(function).__name__)
    if not callable(function):
        raise ConfigError(
            f"ExternalAgentTask: {field} is a {type(function).__name__}; give a function of "
            f"{argument}, or file.py:name"
        )
    if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
        raise ConfigError(
            f"ExternalAgentTask: {field} {name} is a generator: return the result instead of "
            "yielding it"
        )
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        raise ConfigError(
            f"ExternalAgentTask: {field} {name}{inspect.signature(function)} cannot be called with "
            f"one argument, {argument}"
        ) from None
    except ValueError:  # a function in C
        return


def _import_location(value: Any) -> Any:
    """Return a function's import location, such as ``file.py:name``.

    Checkpoints and other processes use it to load the function again. Other values, and functions
    that cannot be imported, are returned unchanged.
    """
    if not inspect.isroutine(value) or "<" in value.__qualname__:
        return value
    if value.__module__ == "__main__":
        file = getattr(sys.modules["__main__"], "__file__", None)
        return f"{Path(file).absolute()}:{value.__qualname__}" if file else value
    return class_import_location(value) or value  # type: ignore[arg-type]


def _to_agent_run(item: Item, trajectory: Trajectory, record: AgentExitRecord) -> AgentRun:
    return AgentRun(
        item=item,
        answer=trajectory.answer,
        exit_code=record.exit_code or 0,
        output=record.output,
        error_output=record.error_output,
        folder=Path(record.folder),
        trajectory=trajectory,
        seconds=record.seconds,
    )


def _to_score(worth: Any, trajectory: Trajectory) -> Score:
    """Convert a reward function's return value to a ``Score``.

    If the function returned a dict, each key that is the id of a call gives the reward of that
    call. If there are no other keys, the reward of the rollout is the mean over these calls."""
    if inspect.iscoroutine(worth):
        worth = run_coroutine(worth)
    if not isinstance(worth, Mapping):
        checked: Worth = worth
        return as_score(checked)
    calls = {name: value for name, value in worth.items() if _CALL_ID.fullmatch(str(name))}
    rewards = {name: value for name, value in worth.items() if name not in calls}
    by_call = {
        str(name): dict(value) if isinstance(value, Mapping) else {_TOTAL: value}
        for name, value in calls.items()
    }
    if not rewards and by_call:
        rewards = _means(by_call)
    return Score(rewards, by_call)


def _means(by_call: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Average each named reward over the model calls of a rollout that report it.

    Raises RamifyError if a value is not a number.
    """
    known: dict[str, list[float]] = {}
    for call, values in by_call.items():
        for name, value in values.items():
            try:
                known.setdefault(name, []).append(float(value))
            except (TypeError, ValueError, OverflowError):
                raise RamifyError(
                    f"the reward '{name}' of call '{call}' is {value!r:.100}; it must be a finite "
                    "number, or be left out"
                ) from None
    return {name: sum(each) / len(each) for name, each in known.items()}
