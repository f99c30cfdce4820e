"""Turns text environments into tasks.

An environment has the interface of Gymnasium (``reset``, ``step``) or of SkyRL-gym (``init``,
``step``, ``close``).

    env_task("lake", splits, "FrozenLake-v1", parse=parse_direction, render=draw)

    session:  step("left")  ──parse──>  env.step  ──render──>  "S.H\\n..G"    (reward is recorded)
    if the episode has not ended by then, the final answer is its last action

The model works in a session as in any other task and acts by calling the function ``step``. With
``acts="replies"`` the model has a conversation instead, and each reply is one action. The reward
``return`` is the sum of the environment's rewards. ``validate`` tries the item's right answer as
the only action.

Each item has a seed: its metadata's ``seed``, or a number computed from its id. Every attempt at
the item resets its environment with that seed, so the attempts of a group start alike.

Without ``parse``, an environment with an ``action_space`` takes values of that space in JSON:
``step("1")`` for ``Discrete(2)`` and ``step("[0.5]")`` for a ``Box`` of one number. Other
environments get the model's text. Without ``render``, the model sees ``str(observation)``.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib
import inspect
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from ramify.errors import ConfigError, RamifyError
from ramify.tasks.base import (
    DatasetTask,
    Item,
    RolloutInitialState,
    Score,
    TrajectoryRewardFunction,
)
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.message import Message
from ramify.types.trajectory import Trajectory

ENDED = "(the episode has ended)"
REJECTED = "rejected actions"
"""Metric: number of actions that were attempted in an episode but were not valid."""
_KEY = "episode"
_ABOUT = (
    "`step(action)` does one action, given as text, in an environment, and returns what is seen "
    "then. Your final answer, if "
    "the episode has not ended by then, is its last action."
)
_REPLIES = "Each of your replies is one action. You then see what has changed."


Parse = Callable[[str], Any]
"""Converts the text of an action to a value for ``env.step``. Raises ValueError if the text is not
an action; the model sees the message.
"""
Render = Callable[[Any, Any], str]
"""(environment, observation) -> the text that the model sees."""


def env_task(
    name: str,
    splits: Mapping[str, Sequence[Item]],
    make: str | Callable[[Item], Any],
    *,
    parse: Parse | None = None,
    render: Render | None = None,
    weights: Mapping[str, float] | None = None,
    acts: Literal["session", "replies"] = "session",
) -> DatasetTask:
    """Return a task in which the model acts in an environment.

    Each attempt is one episode.

    ``acts`` is how the model acts: by code in a session, or by replies, each of which is one
    action. An episode of replies also ends at ``limits.max_turns``, and is scored.

    ``make`` is the id of a Gymnasium environment or a function that creates a fresh environment for
    an item: an object with ``reset(seed=…) -> (observation, info)`` or ``init(prompt) -> (messages,
    info)``, and with ``step(action)``, which returns Gymnasium's five values or a mapping with
    ``observations``, ``reward`` and ``done``. ``close`` and ``get_metrics`` are optional.

    Items need no gold answer, and all of them may ask the same question: their ids give them
    different seeds. Raises ConfigError if Gymnasium is missing or does not have the id.

    Example:
        goal = lambda rng: tasks.Item("Walk from S to G.")
        tasks.env_task("lake", tasks.generated("lake", goal), "FrozenLake-v1")
    """
    if acts not in ("session", "replies"):
        raise ConfigError(f"task '{name}': acts is {acts!r:.40}; give 'session' or 'replies'")
    if isinstance(make, str):
        make = _environment_factory(name, make)
    _check_call(name, "make", make, "(item), which returns a new environment")
    _check_call(name, "parse", parse, "(text)")
    _check_call(name, "render", render, "(env, observation)")
    create = make

    def begin_episode(item: Item) -> EnvEpisode:
        return EnvEpisode(create(item), item, parse, render)

    async def begin(item: Item) -> RolloutInitialState:
        episode = begin_episode(item)
        if acts == "replies":
            return RolloutInitialState(
                conduct=lambda model: _converse(episode, item, model),
                on_end=lambda answer: episode.end(None),
            )
        about = "\n".join(filter(None, [episode.opening, _ABOUT, episode.actions]))
        return RolloutInitialState(
            context=item.context, tools={"step": episode.step}, about=about, on_end=episode.end
        )

    def score(item: Item, trajectory: Trajectory) -> Score:
        record = trajectory.metadata.get(_KEY)
        if record is None:  # no action was taken: the answer is the only one
            record = begin_episode(item).end(trajectory.answer)[_KEY]
        return Score(
            {"return": sum(record["rewards"])},
            metrics={
                **record["metrics"],
                "steps": len(record["rewards"]),
                REJECTED: record["rejected"],
            },
        )

    return DatasetTask(name, splits, TrajectoryRewardFunction(score), dict(weights or {}), begin)


def _check_call(name: str, option: str, function: Any, call: str) -> None:
    """Raise ConfigError if an option is given but is not a function with the right parameters.

    ``call`` lists them, such as ``(env, observation)``.
    """
    if function is None:
        return
    wanted = f"task '{name}': {option} is {function!r:.80}; it must be a function of {call}"
    if not callable(function):
        raise ConfigError(wanted)
    try:
        parameters = inspect.signature(function)
    except (TypeError, ValueError):  # a type of the standard library, such as int
        return
    try:
        parameters.bind(*[None] * (call.partition(")")[0].count(",") + 1))
    except TypeError as error:
        raise ConfigError(f"{wanted}: {error}") from None


async def _converse(episode: EnvEpisode, item: Item, model: Any) -> str:
    """Play an episode in which each reply of the model is an action, and return the last reply.

    ``model`` is the run's ``RunModelClient``.
    """
    parts = [item.question, episode.opening, _REPLIES, episode.actions]
    messages = [*item.messages, Message("user", "\n".join(filter(None, parts)))]
    action = ""
    for _ in range(model.max_turns):
        reply = await model.ask(messages)
        action = reply.message.content
        try:
            seen = await asyncio.to_thread(episode.step, action)
        except ValueError as error:  # not an action: the model sees why, as in a session
            seen = str(error)
        if episode.is_over:
            break
        messages += [reply.message, Message("user", seen)]
    return action


def _environment_factory(name: str, id: str) -> Callable[[Item], Any]:
    """Return a function that creates the registered Gymnasium environment with this id."""
    try:
        gymnasium = importlib.import_module("gymnasium")
    except ImportError:
        raise ConfigError(
            f"task '{name}': the environment '{id}' needs Gymnasium: pip install gymnasium"
        ) from None
    try:
        spec = gymnasium.spec(id)
    except Exception as error:
        raise ConfigError(f"task '{name}': Gymnasium has no environment '{id}': {error}") from error
    return lambda item: gymnasium.make(spec)


def seed_of(item: Item) -> int:
    """Return an item's environment seed: ``seed`` in its metadata, or else a hash of its id.

    The hash is at least 0 and below 2**31. Raises ConfigError if the seed in the metadata is
    invalid.
    """
    seed = item.metadata.get("seed")
    if seed is None:
        return int.from_bytes(hashlib.sha256(item.id.encode()).digest()[:4], "big") >> 1
    if not isinstance(seed, int) or isinstance(seed, bool) or seed < 0:
        raise ConfigError(
            f"item {item.id}: its seed is {seed!r:.60}; give a whole number of at least 0"
        )
    return seed


class EnvEpisode:
    """One episode in an environment, from the first observation to the end.

    A lock ensures that only one action runs at a time.
    """

    def __init__(
        self, env: Any, item: Item, parse: Parse | None = None, render: Render | None = None
    ) -> None:
        self._env = env
        self._parse = parse
        self._render = render
        self._lock = threading.Lock()
        self._rewards: list[float] = []
        self._num_rejected = 0
        self._done = False
        self.opening = self._reset_environment(item)
        """First observation, without the question."""
        self.actions = (
            f"An action is a value in JSON, from {_space(env)}."
            if parse is None and _space(env) is not None
            else ""
        )
        """Description of the valid actions. Empty if any text is valid, or if the function
        ``parse`` decides which actions are.
        """

    @property
    def is_over(self) -> bool:
        """True once the environment has ended the episode."""
        return self._done

    def _reset_environment(self, item: Item) -> str:
        """Start an episode in the environment, and return the first observation.

        The seed of the item is used for the reset.
        """
        if hasattr(self._env, "init"):
            prompt = [{"role": "user", "content": item.question}]
            messages, _ = self._env.init(prompt)
            return _contents([message for message in messages if message not in prompt])
        parameters = inspect.signature(self._env.reset).parameters
        takes_seed = "seed" in parameters or any(
            each.kind is each.VAR_KEYWORD for each in parameters.values()
        )
        found = self._env.reset(**({"seed": seed_of(item)} if takes_seed else {}))
        if not isinstance(found, tuple) or len(found) != 2:
            raise RamifyError(
                f"the environment's reset returned a {type(found).__name__}, as in gym before "
                "0.26: return (observation, info)"
            )
        return self._render_observation(found[0])

    def _render_observation(self, observation: Any) -> str:
        return str(observation) if self._render is None else self._render(self._env, observation)

    def _action(self, text: str) -> Any:
        return _action(self._env, text) if self._parse is None else self._parse(text)

    def step(self, action: str) -> str:
        """Perform one action, given as text, and return the resulting observation.

        Raises ValueError if the text is not a valid action.
        """
        with self._lock:
            if self._done:
                return ENDED
            try:
                value = self._action(str(action))
            except ValueError:
                self._num_rejected += 1
                raise
            result = self._env.step(value)
            observation, reward, self._done = _parse_step_result(result)
            self._rewards.append(reward)
            seen = (
                observation
                if isinstance(result, Mapping)
                else self._render_observation(observation)
            )
            return "\n".join(filter(None, [seen, ENDED if self._done else ""]))

    def end(self, answer: Any) -> dict[str, Any]:
        """End the episode, and return its rewards and metrics.

        This closes the environment. If the episode is not over, ``answer`` is performed as the last
        action.
        """
        try:
            text = as_text(answer)
            if text is not None:
                self._do_last(text)
            metrics: Mapping[str, Any] = getattr(self._env, "get_metrics", dict)()
            numbers = {
                str(name): float(value)
                for name, value in metrics.items()
                if isinstance(value, int | float)
            }
            return {
                _KEY: {
                    "rewards": self._rewards,
                    "done": self._done,
                    "metrics": numbers,
                    "rejected": self._num_rejected,
                }
            }
        finally:
            close = getattr(self._env, "close", None)
            if callable(close):
                close()

    def _do_last(self, action: str) -> None:
        """Perform the model's final answer as the last action of the episode.

        If the environment rejects it, its reward is 0. Errors of earlier actions are shown to the
        model instead.
        """
        try:
            self.step(action)
        except RamifyError:
            raise
        except Exception:  # noqa: BLE001 -- an environment may raise anything on a model's text
            self._rewards.append(0.0)


def _space(env: Any) -> Any:
    """Return the action space of an environment, or None if its actions are strings."""
    space = getattr(env, "action_space", None)
    return space if hasattr(space, "from_jsonable") and type(space).__name__ != "Text" else None


def _action(env: Any, text: str) -> Any:
    """Convert the model's text to an action of the environment.

    Raises ValueError if it is not in the action space.
    """
    space = _space(env)
    if space is None:
        return text
    try:
        value = json.loads(text)
        action = space.from_jsonable(_wrap_in_batch(space, value))[0]
        is_action = space.contains(action) and _is_whole(space, action, value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        is_action = False
    if not is_action:
        raise ValueError(
            f"{text[:100]!r} is not an action here: give a value in JSON, from {space}"
        )
    return action


def _wrap_in_batch(space: Any, value: Any) -> Any:
    """Wrap an action in a batch of size one, as ``space.from_jsonable`` expects.

    In a tuple or dict space, each component is wrapped separately.
    """
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return {name: _wrap_in_batch(part, value[name]) for name, part in parts.items()}
    if isinstance(parts, Sequence):
        return [_wrap_in_batch(part, entry) for part, entry in zip(parts, value, strict=True)]
    return [value]


def _is_whole(space: Any, action: Any, value: Any) -> bool:
    """Return True unless converting a number to an integer action lost its fractional part.

    For example, 1.7 is not action 1.
    """
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return all(_is_whole(part, action[name], value[name]) for name, part in parts.items())
    if isinstance(parts, Sequence):
        return all(map(_is_whole, parts, action, value))
    kind = getattr(getattr(space, "dtype", None), "kind", "")
    return kind not in ("i", "u") or (not isinstance(value, bool) and bool((action == value).all()))


def _parse_step_result(result: Any) -> tuple[Any, float, bool]:
    """Return the observation, the reward and the end-of-episode flag from an environment's step.

    Raises RamifyError for an unknown form.
    """
    if isinstance(result, Mapping):
        messages = result["observations"] or []
        return _contents(messages), float(result["reward"]), bool(result["done"])
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        return observation, float(reward), bool(terminated or truncated)
    if isinstance(result, tuple) and len(result) == 4:
        raise RamifyError(
            "the environment's step returned 4 values, the form of gym before 0.26: return "
            "(observation, reward, terminated, truncated, info)"
        )
    form = f"{len(result)} values" if isinstance(result, tuple) else f"a {type(result).__name__}"
    raise RamifyError(
        f"the environment's step returned {form}: it must be a mapping with "
        "observations, reward and done, or (observation, reward, terminated, truncated, info)"
    )


def _contents(messages: Any) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message["content"]) for message in messages)
