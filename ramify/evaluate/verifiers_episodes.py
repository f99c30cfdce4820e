"""Run environments of the ``verifiers`` library (0.4, ``verifiers.v1``) as Ramify tasks.

The environments need no change.

    task = verifiers_task("gsm8k-v1")                          an installed taskset by its id
    task = task_of("verifiers:gsm8k-v1")                       the same in a recipe: task.name=…
    task = verifiers_task(MyTaskset(MyConfig()), env=MyEnv)    objects and classes of a program

    attempt ── conduct ──> vf.Env.run_episode ── its agents' requests ──> AgentModelServer ──> run
                           setup, tools, turns, finalize, rewards              trained by tokens
            ── score <──── rewards and metrics of the episode's traces

The library itself plays each rollout: its environment, its tool servers, its runtime, and the code
around the reply (``setup``, ``finalize``). It also computes the rewards and metrics and asks the
judges, while the runtime still exists. Only the model is Ramify's: every request becomes a turn of
a call in the rollout, with the exact token ids that were sampled.

A conversation whose agent is not trainable (``agents.user.trainable = False``) is recorded without
token ids, so nothing is learned from it. It is answered by the model for calls below the root:
``depths[1]`` of a recipe, ``sub_model`` of an RLM, or else the policy. The same model can answer
the judges of a rubric.

Two related adapters are in other modules: tasksets as questions for an RLM with a session
(``tasks/verifiers.py``), and Ramify's tasks in that library (``verifiers_env.py``).
"""

from __future__ import annotations

import importlib
import secrets
import sys
import types
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import fmean
from typing import Any

import msgspec

from ramify.engine.external_conversations import RunModelClient
from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.agent_model_server import MODEL, AgentModelAccess, AgentModelServer
from ramify.evaluate.verifiers_chat_harness import register_chat_harness
from ramify.tasks.base import (
    ENDLESS,
    DatasetTask,
    Item,
    LazySequence,
    RolloutInitialState,
    Score,
    TrajectoryRewardFunction,
)
from ramify.tasks.verifiers import LazyVerifiersTasks, load_taskset, verifiers_v1
from ramify.types.trajectory import Trajectory

FROZEN = "frozen"
_KEY = "verifiers"
_PERIOD = 10
"""Number of tasks per block. Each block gives one task to validation and one to test."""
_NO_KEY = "NO_API_KEY_IS_NEEDED"
"""Environment variable that is never set. The verifiers library expects an API key in it, but the
endpoint's key is sent in the request headers."""
_OPENS = "(the environment opens the conversation)"


def verifiers_task(
    taskset: Any,
    *,
    env: Any = "",
    config: Mapping[str, Any] | None = None,
    harness: str = "",
    runtime: str = "",
    judge: str = "",
    name: str = "",
) -> DatasetTask:
    """Return a task whose attempts are episodes of an environment of the ``verifiers`` library.

    Args:
        taskset: The tasks to play: an object, or the id of an installed taskset.
        env: An ``Env`` class, or the id of an installed one. The default is the taskset's own, or
            else an environment with one agent.
        config: Fields of the environment's configuration, as in the library's TOML files:
            ``{"agent": {"max_turns": 4}, "taskset": {"split": "train"}}``.
        harness: Program of the agents that name none. The default is the one of the taskset, or
            else the library's chat program in this process.
        runtime: Runtime of all agents. By default, it is the one in an agent's configuration, or
            else ``subprocess``, or ``docker`` if the task needs a container.
        judge: The model that judges of a rubric ask: the base URL of a server, or ``frozen`` for
            the model below the root. By default their own configuration names it.
        name: Name of the task. The default is the id of the taskset.

    Of ten tasks, eight are in the split ``train``, one in ``validation`` and one in ``test``. If
    the taskset has fewer than three, all of them are in each split. Raises ConfigError if verifiers
    is missing, or if it refuses the configuration.

    Example:
        task = evaluate.verifiers_task("alphabet-sort", config={"taskset": {"max_turns": 2}})
    """
    runner = VerifiersEpisodeRunner(taskset, env, dict(config or {}), harness, runtime, judge, name)
    splits = {
        split: VerifiersSplit(runner, split, kept)
        for split, kept in runner.split_positions_in_block().items()
    }
    return DatasetTask(
        runner.name, splits, TrajectoryRewardFunction(runner.score), begin=runner.prepare_rollout
    )


class VerifiersSplit(LazySequence[Item]):
    """The task items in one split of a ``verifiers`` taskset: train, validation or test."""

    def __init__(self, runner: VerifiersEpisodeRunner, split: str, kept: Sequence[int]) -> None:
        """Create a split from some of the tasks in the runner's ``verifiers`` taskset.

        Tasks are divided into blocks of ``runner.period``, usually ten. The split contains the
        tasks at the positions ``kept`` of each block.
        """
        self._runner = runner
        self._split = split
        self._kept = kept

    def __len__(self) -> int:
        rows, period = self._runner.rows, self._runner.period
        if rows.is_endless:
            return ENDLESS
        whole, rest = divmod(len(rows), period)
        return whole * len(self._kept) + sum(position < rest for position in self._kept)

    def at(self, index: int) -> Item:
        turn, number = divmod(index, len(self._kept))
        place = turn * self._runner.period + self._kept[number]
        data = self._runner.rows.task(place).data
        question = data.prompt_text or data.description or data.name or _OPENS
        return Item(
            question,
            kind=str(data.name or ""),
            id=f"{self._runner.name}/{self._split}/{index}",
            metadata={"row": place},
        )


class RunningVerifiersEnv(msgspec.Struct):
    """A running ``verifiers`` environment and the model endpoint that its agents call.

    The tool servers of the environment are running, too.
    """

    env: Any
    endpoint: AgentModelServer


class VerifiersEpisodeRunner:
    """Runs and scores episodes of one environment of the ``verifiers`` library."""

    def __init__(
        self,
        taskset: Any,
        env: Any,
        config: dict[str, Any],
        harness: str,
        runtime: str,
        judge: str,
        name: str,
    ) -> None:
        self._vf = verifiers_v1()
        self._harness = harness
        self._runtime = runtime
        self._judge = judge
        if judge and judge != FROZEN and "://" not in judge:
            raise ConfigError(
                f"judge={judge!r}: give the base URL of a server, or '{FROZEN}' for the model "
                "below the root (depths[1] of a recipe, sub_model of an RLM)"
            )
        given, taskset = taskset, load_taskset(taskset, config.pop("taskset", None))
        self.name = name or (given if isinstance(given, str) else taskset.config.id)
        self.name = self.name or type(taskset).__name__
        self._taskset = taskset
        env_class = _env_class(self._vf, env, taskset)
        self._env_class = env_class
        self._config = self._resolve_config(config)
        self.rows = LazyVerifiersTasks(taskset)
        self.period = _PERIOD if self.rows.is_endless else min(_PERIOD, len(self.rows))
        if not self.period:
            raise ConfigError(f"taskset '{self.name}' has no tasks")

    def split_positions_in_block(self) -> dict[str, Sequence[int]]:
        """Return which positions in each block of ``verifiers`` tasks belong to each split.

        The taskset is divided into blocks of ``period`` tasks, usually ten.
        """
        every = range(self.period)
        if self.period < 3:
            return {"train": every, "validation": every, "test": every}
        return {"train": every[:-2], "validation": every[-2:-1], "test": every[-1:]}

    def _resolve_config(self, config: dict[str, Any]) -> Any:
        """Return the environment's configuration in which every agent has a supported harness and
        runtime.

        Raises ConfigError if the library rejects the configuration.
        """
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        agents = importlib.import_module("verifiers.v1.configs.agent")
        kind = loaders.concrete_type(self._env_class, self._vf.EnvConfig, origin=self._vf.Env)
        kind = kind or self._vf.EnvConfig
        try:
            own = self._taskset.config.model_copy(update={"id": ensure_taskset_id(self._taskset)})
            resolved = kind.model_validate({**config, "taskset": own})
            seats = agents.agent_config_fields(resolved)
            return resolved.model_copy(
                update={seat: self._seat_config(seat, spec) for seat, spec in seats.items()}
            )
        except (ValueError, TypeError, ImportError) as error:
            raise ConfigError(f"environment of '{self.name}': {_one_line(error)}") from error

    def _seat_config(self, seat: str, spec: Any) -> Any:
        agents = importlib.import_module("verifiers.v1.configs.agent")
        update: dict[str, Any] = {}
        if spec.harness is None:
            own = self._taskset_harness()
            update["harness"] = {"id": self._harness or own or register_chat_harness()}
        if self._runtime or "runtime" not in spec.model_fields_set:
            needs_container = type(self._taskset).task_type().NEEDS_CONTAINER
            default = "docker" if needs_container else "subprocess"
            update["runtime"] = {"type": self._runtime or default}
        checked = agents.AgentConfig.model_validate({**spec.model_dump(), **update})
        return spec.model_copy(update={key: getattr(checked, key) for key in update})

    def _taskset_harness(self) -> str:
        """Return the id of the harness that the ``verifiers`` taskset recommends, or an empty
        string."""
        loaders = importlib.import_module("verifiers.v1.utils.loaders")
        id = self._taskset.config.id
        found = str(loaders.default_harness_id(id)) if id else "bash"
        return "" if found == "bash" else found

    def _make(self, max_turns: int) -> Any:
        """Create a ``verifiers`` environment that limits each of its agents to ``max_turns``
        turns."""
        agents = importlib.import_module("verifiers.v1.configs.agent")
        seats = {
            seat: spec.model_copy(update={"max_turns": min(spec.max_turns or max_turns, max_turns)})
            for seat, spec in agents.agent_config_fields(self._config).items()
        }
        env = self._env_class(self._config.model_copy(update=seats))
        env.taskset = self._taskset
        return env

    @asynccontextmanager
    async def _serve_env(self, max_turns: int) -> AsyncIterator[RunningVerifiersEnv]:
        env = self._make(max_turns)
        async with AgentModelServer() as endpoint, env.serving():
            yield RunningVerifiersEnv(env, endpoint)

    # --- one attempt ------------------------------------------------------------------------------

    async def prepare_rollout(self, item: Item) -> RolloutInitialState:
        """Prepare an attempt at a task item that will run as an episode of the ``verifiers``
        environment.

        The environment holds the conversations, not Ramify's engine.
        """
        attempt = VerifiersEpisodeAttempt(self, item)
        return RolloutInitialState(conduct=attempt.run_episode, on_end=attempt.metadata)

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        record = trajectory.metadata.get(_KEY)
        if record is None:
            raise RamifyError(
                f"task '{self.name}', item {item.id}: only an episode of its environment can be "
                "scored, not an answer alone: evaluate or train the task"
            )
        return Score(record["rewards"], record["calls"], record["metrics"])

    async def run_episode(self, item: Item, conversations: RunModelClient) -> tuple[Any, Any]:
        """Run one episode of the ``verifiers`` environment on a task item.

        Return the library's episode object, and the rewards and metrics to record for it.
        """
        max_turns = conversations.max_turns
        served = await conversations.get_or_open_shared(self, lambda: self._serve_env(max_turns))
        vf, task = self._vf, self.rows.task(item.metadata["row"]).with_data()
        client = vf.EvalClientConfig(
            base_url=served.endpoint.url(),
            api_key_var=_NO_KEY,
            headers=served.endpoint.headers,
        )
        with served.endpoint.access_registry() as seats:

            def take_seat(trace: Any) -> None:
                learns = trace.agent.trainable
                seats[trace.id] = AgentModelAccess(
                    conversations, trace.id, depth=0 if learns else 1, learns=learns
                )

            if self._judge:
                name = f"judge-{secrets.token_hex(8)}"
                seats[name] = AgentModelAccess(conversations, name, depth=1, learns=False)
                task.config = self._with_judge(task.config, served.endpoint, name)
            episode = await served.env.run_episode(
                task, vf.ModelContext(model=MODEL, client=client), on_trace=take_seat
            )
        if not served.env.complete(episode):
            raise RamifyError(f"task '{self.name}', item {item.id}: {_failure(episode)}")
        return episode, _summarize_episode(self.name, item, episode, conversations)

    def _with_judge(self, config: Any, endpoint: AgentModelServer, seat: str) -> Any:
        if self._judge == FROZEN:
            update = {
                "base_url": endpoint.url(seat),
                "api_key_var": _NO_KEY,
                "headers": endpoint.headers,
            }
        else:
            update = {"base_url": self._judge}
        return _with_judges(self._vf, config, update)


class VerifiersEpisodeAttempt:
    """An attempt at a task item that runs one episode of a ``verifiers`` environment.

    It keeps the rewards of the episode until the attempt is scored.
    """

    def __init__(self, runner: VerifiersEpisodeRunner, item: Item) -> None:
        self._runner = runner
        self._item = item
        self._record: dict[str, Any] | None = None

    async def run_episode(self, conversations: RunModelClient) -> str:
        """Run the episode, and return an agent's last reply as the answer.

        It is the first trained agent, or the first agent if none is trained.
        """
        episode, self._record = await self._runner.run_episode(self._item, conversations)
        trained = [trace for trace in episode.traces if trace.agent.trainable]
        return str((trained or episode.traces)[0].last_reply or "")

    def metadata(self, answer: Any) -> Mapping[str, Any]:
        return {} if self._record is None else {_KEY: self._record}


def _summarize_episode(
    name: str, item: Item, episode: Any, conversations: RunModelClient
) -> dict[str, Any]:
    """Summarize the rewards and metrics of an episode for the record of its run.

    It contains the mean over the trained traces and the rewards of each one. The rewards of a trace
    are stored for the calls that belong to it.
    """
    traces = [trace for trace in episode.traces if trace.agent.trainable] or episode.traces
    rewards = [_rewards(name, item, trace) for trace in traces]
    calls = {
        call: own
        for trace, own in zip(traces, rewards, strict=True)
        for call in conversations.agent_call_ids(trace.id)
    }
    metrics = [
        {key: float(value) for key, value in trace.metrics.items() if value is not None}
        | {"turns": float(trace.num_turns)}
        for trace in traces
    ]
    return {
        "rewards": _means(rewards),
        "calls": calls if len(traces) > 1 else {},
        "metrics": _means(metrics),
        "traces": [
            {"agent": trace.agent.name, "stop": trace.stop_condition, "rewards": own}
            for trace, own in zip(traces, rewards, strict=True)
        ],
    }


def _rewards(name: str, item: Item, trace: Any) -> dict[str, float]:
    """Return the weighted rewards in a ``verifiers`` trace, by name.

    Raises RamifyError if there are none or one of them has no value.
    """
    missing = [key for key, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        what = f"its reward '{missing[0]}' returned nothing" if missing else "it has no rewards"
        raise RamifyError(f"task '{name}', item {item.id}, agent '{trace.agent.name}': {what}")
    return {key: float(reward.value) for key, reward in trace.rewards.items()}


def _means(values: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean of each reward or metric over the traces that report it."""
    names = dict.fromkeys(name for each in values for name in each)
    return {name: fmean(each[name] for each in values if name in each) for name in names}


def _failure(episode: Any) -> str:
    """Describe in one line why a ``verifiers`` episode failed."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not errors:
        return "its episode did not end well, and gives no reason"
    return f"its episode failed: {errors[0].type}: {_one_line(errors[0].message)}"


def _one_line(error: Any) -> str:
    text = " ".join(str(error).split())
    return text if len(text) <= 400 else f"{text[:200]} … {text[-199:]}"


def _with_judges(vf: Any, config: Any, update: Mapping[str, Any]) -> Any:
    """Return an environment's configuration with the given fields changed in all of its judges.

    Judges are found however deeply they are nested.
    """
    if isinstance(config, vf.JudgeConfig):
        return config.model_copy(update=update)
    if isinstance(config, list):
        return [_with_judges(vf, each, update) for each in config]
    if not hasattr(config, "model_copy"):
        return config
    changed = {name: _with_judges(vf, value, update) for name, value in config}
    return config.model_copy(update=changed)


def _env_class(vf: Any, env: Any, taskset: Any) -> type:
    """Return the environment class that the user chose, or else the taskset's default class.

    Raises ConfigError if neither exists.
    """
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    if isinstance(env, type) and issubclass(env, vf.Env):
        return env
    if not isinstance(env, str):
        raise ConfigError(f"env is {env!r:.80}: give an Env class of verifiers, or its id")
    try:
        found: type = loaders.environment_class(taskset.config.id, env)
    except (ImportError, TypeError, AttributeError, ValueError) as error:
        raise ConfigError(f"environment '{env}': {_one_line(error)}") from error
    return found


def ensure_taskset_id(taskset: Any) -> str:
    """Register a taskset with the ``verifiers`` library if it has no id, and return its id.

    If a program created the taskset itself, first register its class under a new id, so that the
    library can find it.
    """
    if taskset.config.id:
        return str(taskset.config.id)
    kind = type(taskset)
    id = f"ramify_taskset_{kind.__name__.lower()}_{object_id_hex(kind)}"
    if id not in sys.modules:
        module = types.ModuleType(id)
        module.__dict__.update({kind.__name__: kind, "__all__": [kind.__name__]})
        sys.modules[id] = module
    return id


def object_id_hex(kind: type) -> str:
    return f"{id(kind):x}"
