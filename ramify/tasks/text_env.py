"""Text environments as tasks: SkyRL-gym (``init``, ``step``, ``close``) or Gymnasium (``reset``,
``step``).

    env_task("sums", splits, lambda item: skyrl_gym.make("gsm8k", extras=item.metadata["extras"]))

    session:  step("look north")  ──>  env.step  ──>  "You see a door."     (reward is recorded)
    if the episode has not ended by then, the final answer is its last action

A Gymnasium environment with an ``action_space`` takes values of that space instead of text. An
action is then JSON: ``step("1")`` for ``Discrete(2)`` and ``step("[0.5]")`` for a ``Box`` of one
number. The model sees ``str(observation)``.

The model works in a session as in any other task and acts by calling the function ``step``. The
reward ``return`` is the sum of the environment's rewards. ``validate`` tries the item's right
answer as the only action. Not here: whether the environment's rewards are fair.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ramify.errors import RamifyError
from ramify.tasks.base import Item, Score, SimpleTask, TaskStart, WholeTrajectoryReward
from ramify.tasks.scoring.answer_text import as_text
from ramify.types.trajectory import Trajectory

ENDED = "(the episode has ended)"
_KEY = "episode"
_ABOUT = (
    "`step(action)` does one action, given as text, in an environment, and returns what is seen "
    "then. Your final answer, if "
    "the episode has not ended by then, is its last action."
)


def env_task(
    name: str,
    splits: Mapping[str, Sequence[Item]],
    make: Callable[[Item], Any],
    *,
    weights: Mapping[str, float] | None = None,
) -> SimpleTask:
    """Return a task that plays an environment.

    ``make`` creates a fresh environment for an item: an object with ``init(prompt) -> (messages,
    info)`` or ``reset() -> (observation, info)``, and with ``step(action)``, which returns a
    mapping with ``observations``, ``reward`` and ``done``, or Gymnasium's five values. ``close``
    and ``get_metrics`` are optional.

    Example:
        tasks.env_task("lake", splits, lambda item: gymnasium.make("FrozenLake-v1"))
    """

    async def begin(item: Item) -> TaskStart:
        episode = EnvEpisode(make(item), item)
        about = "\n".join(filter(None, [episode.opening, _ABOUT, episode.actions]))
        return TaskStart(
            context=item.context, tools={"step": episode.step}, about=about, on_end=episode.end
        )

    def score(item: Item, trajectory: Trajectory) -> Score:
        record = trajectory.metadata.get(_KEY)
        if record is None:  # no action was taken: the answer is the only one
            record = EnvEpisode(make(item), item).end(trajectory.answer)[_KEY]
        return Score(
            {"return": sum(record["rewards"])},
            metrics={**record["metrics"], "steps": len(record["rewards"])},
        )

    return SimpleTask(name, splits, WholeTrajectoryReward(score), dict(weights or {}), begin)


class EnvEpisode:
    """One environment from its first observation to its end. Actions are serialized by a lock."""

    def __init__(self, env: Any, item: Item) -> None:
        self._env = env
        self._lock = threading.Lock()
        self._rewards: list[float] = []
        self._done = False
        self.opening = _opened(env, item.question)
        """First observation, without the question."""
        self.actions = (
            "" if _space(env) is None else f"An action is a value in JSON, from {_space(env)}."
        )
        """Description of the valid actions; empty if any text is one."""

    def step(self, action: str) -> str:
        """Do one action in the environment; returns what is seen then."""
        with self._lock:
            if self._done:
                return ENDED
            observation, reward, self._done = _stepped(
                self._env.step(_action(self._env, str(action)))
            )
            self._rewards.append(reward)
            return "\n".join(filter(None, [observation, ENDED if self._done else ""]))

    def end(self, answer: Any) -> dict[str, Any]:
        """Close the environment and return the record of the episode. If the episode is not over,
        ``answer`` is its last action."""
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
            return {_KEY: {"rewards": self._rewards, "done": self._done, "metrics": numbers}}
        finally:
            close = getattr(self._env, "close", None)
            if callable(close):
                close()

    def _do_last(self, action: str) -> None:
        """Do the final action. If the environment rejects it, its reward is 0. (Within a session,
        the model sees the error instead.)"""
        try:
            self.step(action)
        except RamifyError:
            raise
        except Exception:  # noqa: BLE001 -- an environment may raise anything on a model's text
            self._rewards.append(0.0)


def _opened(env: Any, question: str) -> str:
    """Reset the environment and return its first observation."""
    prompt = [{"role": "user", "content": question}]
    if hasattr(env, "init"):
        messages, _ = env.init(prompt)
        return _contents([message for message in messages if message not in prompt])
    observation, _ = env.reset()
    return str(observation)


def _space(env: Any) -> Any:
    """Return the environment's action space, or None if actions are text."""
    space = getattr(env, "action_space", None)
    return space if hasattr(space, "from_jsonable") and type(space).__name__ != "Text" else None


def _action(env: Any, text: str) -> Any:
    """Convert ``text`` to an action. Raises ValueError if it is not in the action space."""
    space = _space(env)
    if space is None:
        return text
    try:
        value = json.loads(text)
        action = space.from_jsonable(_batch(space, value))[0]
        is_action = space.contains(action) and _is_whole(space, action, value)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError):
        is_action = False
    if not is_action:
        raise ValueError(
            f"{text[:100]!r} is not an action here: give a value in JSON, from {space}"
        )
    return action


def _batch(space: Any, value: Any) -> Any:
    """Return ``value`` as a batch of one in the form of ``space.from_jsonable``. The parts of a
    tuple or dict space are batches themselves."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return {name: _batch(part, value[name]) for name, part in parts.items()}
    if isinstance(parts, Sequence):
        return [_batch(part, entry) for part, entry in zip(parts, value, strict=True)]
    return [value]


def _is_whole(space: Any, action: Any, value: Any) -> bool:
    """Return False if a number was truncated to fit an integer space: 1.7 is not action 1."""
    parts = getattr(space, "spaces", None)
    if isinstance(parts, Mapping):
        return all(_is_whole(part, action[name], value[name]) for name, part in parts.items())
    if isinstance(parts, Sequence):
        return all(map(_is_whole, parts, action, value))
    kind = getattr(getattr(space, "dtype", None), "kind", "")
    return kind not in ("i", "u") or (not isinstance(value, bool) and bool((action == value).all()))


def _stepped(result: Any) -> tuple[str, float, bool]:
    """Convert the result of ``step`` to (observation, reward, done). Raises RamifyError for an
    unknown form."""
    if isinstance(result, Mapping):
        messages = result["observations"] or []
        return _contents(messages), float(result["reward"]), bool(result["done"])
    if isinstance(result, tuple) and len(result) == 5:
        observation, reward, terminated, truncated, _ = result
        return str(observation), float(reward), bool(terminated or truncated)
    raise RamifyError(
        f"the environment's step returned a {type(result).__name__}: it must be a mapping with "
        "observations, reward and done, or (observation, reward, terminated, truncated, info)"
    )


def _contents(messages: Any) -> str:
    if isinstance(messages, str):
        return messages
    return "\n".join(str(message["content"]) for message in messages)
