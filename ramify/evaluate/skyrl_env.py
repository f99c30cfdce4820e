"""Expose a Ramify task as a SkyRL-gym text environment, so that other trainers can use it.

The environment has the methods ``init``, ``step`` and ``close``.

    # a class, for skyrl_gym.register with base=BaseTextEnv
    Env = text_env(ledger(), split="train", scaffold="minimal")
    env = Env(extras={"index": 17})

    init(prompt)  ──▶ the run starts ──▶ the model's first messages
    step(reply)   ──▶ the engine runs the reply's code in a real session ──▶ the next messages
                      … until the run has ended ──▶ done, and the task's reward

The engine sends its requests as usual, but the caller of ``step`` answers them. Calls below the
root are answered by ``sub_model``; without one they are not possible. All methods are synchronous,
and environments are independent of each other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ramify.clients.base import Price, Request
from ramify.engine import event_loop_thread
from ramify.engine.limits import Limits
from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.question import ModelSpec
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, RequestRefusedError
from ramify.evaluate.attempt import attempt
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import Item, Task, items_of, total
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Trajectory

Said = dict[str, str]
"""A message as ``{"role": …, "content": …}``."""


def text_env(
    task: Task,
    *,
    split: str = "train",
    scaffold: Scaffold | str | None = None,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    sub_model: ModelSpec | None = None,
    base: type = object,
) -> type[TaskEnv]:
    """Return a text environment class with which RL trainers attempt the items of a task.

    Each instance of the class attempts one task item. The class inherits from ``base``, because
    trainers such as SkyRL require a certain base class (``BaseTextEnv``). No method of the base
    class is used.

    Example:
        Env = evaluate.text_env(tasks.task_of("ledger"), base=skyrl_gym.BaseTextEnv)
    """
    items = items_of(task, split)
    model: list[ModelSpec] = [_ExternalClient(), *([sub_model] if sub_model is not None else [])]
    # All environments share one RLM and its sandbox.
    rlm = RLM(model, scaffold=scaffold, limits=limits, sandbox=sandbox)

    class Env(TaskEnv, base):  # type: ignore[misc]  # any class
        """A SkyRL-gym environment in which the trainer's model attempts one item of the task.

        The item is the one at index ``extras["index"]`` of the split.
        """

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] = {}) -> None:
            index = extras.get("index")
            if not isinstance(index, int):
                raise ConfigError(
                    f"an environment of '{task.name}' needs extras={{'index': N}}; it got {index!r}"
                )
            super().__init__(task, items[index], rlm)

    return Env


class TaskEnv:
    """An attempt at a task item in which the caller supplies the model's replies.

    The replies are given step by step. An item is one question of a task. The engine writes the
    prompt, and ignores the prompt passed to ``init``.

    Example:
        env = evaluate.text_env(task)(index=0)
        prompt, info = env.init()
    """

    def __init__(self, task: Task, item: Item, rlm: RLM) -> None:
        self._task = task
        self._item = item
        self._rlm = rlm
        self._driver = _Driver()
        self._running: asyncio.Task[Trajectory] | None = None
        self._shown = 0
        self.trajectory: Trajectory | None = None
        """The whole run with its rewards, once it has ended."""
        self.turns = 0
        self.max_turns = rlm.limits.max_turns

    def init(self, prompt: Sequence[Said] = ()) -> tuple[list[Said], dict[str, Any]]:
        """Start the attempt at the environment's task item.

        Return the first messages for the model, and a dict with the item's id.
        """
        if self._running is not None:
            raise ConfigError("init was already called: make a new environment for another attempt")
        event_loop_thread.run(self._begin())
        return self._next_messages(), {"item": self._item.id}

    def step(self, action: str) -> dict[str, Any]:
        """Pass the model's reply to the attempt, and continue it until the next reply is needed.

        Return the next messages and whether the run has ended, with the reward if it has.
        """
        if self._running is None or self.trajectory is not None:
            raise ConfigError(
                "step needs a running attempt: call init first, and do not call step after the end"
            )
        self.turns += 1
        self._driver.reply(action)
        observations = self._next_messages()
        reward = (
            0.0 if self.trajectory is None else total(self.trajectory.rewards, self._task.weights)
        )
        return {
            "observations": observations,
            "reward": reward,
            "done": self.trajectory is not None,
            "metadata": {} if self.trajectory is None else {"errors": list(self.trajectory.errors)},
        }

    def close(self) -> None:
        """Cancel the attempt at the task item if it has not ended yet.

        Calling it twice is harmless.
        """
        if self._running is not None and not self._running.done():
            event_loop_thread.run(self._cancel())

    def get_metrics(self) -> dict[str, Any]:
        """Return the number of turns and, once the run has ended, the rewards and metrics of the
        task by name."""
        trajectory = self.trajectory
        return {
            "turns": self.turns,
            **(trajectory.rewards if trajectory else {}),
            **(trajectory.metrics if trajectory else {}),
        }

    # --- on the engine's loop

    async def _begin(self) -> None:
        _driver.set(self._driver)  # inherited by the task that is created next
        self._running = asyncio.ensure_future(attempt(self._rlm, self._task, self._item))

    def _next_messages(self) -> list[Said]:
        messages = event_loop_thread.run(self._await_request())
        # After a summary the conversation is shorter, and all of it is new.
        new = messages[self._shown :] if len(messages) > self._shown else messages
        self._shown = len(messages) + 1  # includes the reply that will follow
        return [{"role": message.role, "content": message.content} for message in new]

    async def _await_request(self) -> Sequence[Message]:
        """Wait for the attempt's next request to the model, and return the messages in it.

        If the run ends instead, store its trajectory and return no messages.
        """
        assert self._running is not None
        request = asyncio.ensure_future(self._driver.next_request())
        await asyncio.wait([request, self._running], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            return request.result().messages
        request.cancel()
        self.trajectory = self._running.result()
        return ()

    async def _cancel(self) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])


class _Driver:
    """Relays an attempt's model requests to the caller of its environment, and the replies back."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None

    async def ask(self, request: Request) -> str:
        self._reply = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._reply

    async def next_request(self) -> Request:
        return await self._requests.get()

    def reply(self, text: str) -> None:
        """Answer the model request for which the attempt is waiting.

        This method may be called from any thread.
        """
        assert self._reply is not None
        self._reply.get_loop().call_soon_threadsafe(self._answer, text)

    def _answer(self, text: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(text)


_driver: ContextVar[_Driver] = ContextVar("driver")
"""The driver that answers the requests of the current asyncio task's run."""


class _ExternalClient:
    """A model client that gets its replies from the caller of ``TaskEnv.step`` instead of a
    server."""

    name = "env:outside"
    window = 1 << 30
    price: Price | None = None

    async def complete(self, request: Request) -> Reply:
        if request.affinity != "0":
            raise RequestRefusedError(
                "calls below the root need a sub_model, which this environment was not given"
            )
        text = await _driver.get().ask(request)
        return Reply(Message("assistant", text), Usage(calls=1))

    async def close(self) -> None:
        """Nothing to close."""
