"""A task of ours as a text environment of theirs: ``init``, ``step``, ``close``, as SkyRL-gym's
trainers drive one.

    Env = text_env(ledger(), split="train", scaffold="tiny")        # a class; for skyrl_gym.register with base=BaseTextEnv
    env = Env(extras={"index": 17})

    init(prompt)  ──> the run is started ──> what the model is told first
    step(reply)   ──> the engine runs the reply's code in a real session ──> what the model is shown next
                      … until the run has ended ──> done, and the task's reward

The engine asks a model as always; that model is whoever calls ``step``. Calls below the root are
answered by ``sub_model``; without one there are none. Works from plain synchronous code, each
environment independent of the others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any

from ramify.clients.base import Price, Request
from ramify.engine import event_loop_thread
from ramify.engine.limits import Limits
from ramify.engine.models import ModelSpec
from ramify.engine.rlm import RLM
from ramify.engine.scaffold import Scaffold
from ramify.errors import ConfigError, Refused
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
    """The class of environments over the items of ``split``. ``base`` is what a trainer wants its
    environments to inherit from, as ``skyrl_gym.make`` does ``BaseTextEnv``; nothing of it is
    used."""
    items = items_of(task, split)
    model: list[ModelSpec] = [_ExternalClient(), *([sub_model] if sub_model is not None else [])]
    rlm = RLM(
        model, scaffold=scaffold, limits=limits, sandbox=sandbox
    )  # of all of them: they share its sandbox

    class Env(TaskEnv, base):  # type: ignore[misc]  # any class
        """One attempt at item ``extras["index"]``."""

        def __init__(self, env_config: Any = None, extras: Mapping[str, Any] = {}) -> None:
            index = extras.get("index")
            if not isinstance(index, int):
                raise ConfigError(
                    f"an environment of '{task.name}' needs extras={{'index': N}}; it got {index!r}"
                )
            super().__init__(task, items[index], rlm)

    return Env


class TaskEnv:
    """One attempt, driven from outside. Its prompt is the engine's: the one given to ``init`` is
    not used."""

    def __init__(self, task: Task, item: Item, rlm: RLM) -> None:
        self._task, self._item, self._rlm, self._model = task, item, rlm, _Driver()
        self._running: asyncio.Task[Trajectory] | None = None
        self._shown = 0
        self.trajectory: Trajectory | None = None
        """The whole run with its rewards, once it has ended."""
        self.turns = 0
        self.max_turns = rlm.limits.max_turns

    def init(self, prompt: Sequence[Said] = ()) -> tuple[list[Said], dict[str, Any]]:
        """Start the run: (what the model is told first, nothing more)."""
        if self._running is not None:
            raise ConfigError("init was called before: make a new environment for another attempt")
        event_loop_thread.run(self._begin())
        return self._next(), {"item": self._item.id}

    def step(self, action: str) -> dict[str, Any]:
        """Give the model's reply: what it is shown then, the reward where that was the end, and
        whether it was."""
        if self._running is None or self.trajectory is not None:
            raise ConfigError(
                "step needs a run that goes on: call init first, and not after the end"
            )
        self.turns += 1
        self._model.reply(action)
        observations = self._next()
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
        """End the run, wherever it is. Idempotent."""
        if self._running is not None and not self._running.done():
            event_loop_thread.run(self._cancel())

    def get_metrics(self) -> dict[str, Any]:
        """The task's rewards and metrics by name."""
        found = self.trajectory
        return {
            "turns": self.turns,
            **(found.rewards if found else {}),
            **(found.metrics if found else {}),
        }

    # --- on the engine's loop

    async def _begin(self) -> None:
        _driver.set(self._model)  # what is started from here on sees it
        self._running = asyncio.ensure_future(attempt(self._rlm, self._task, self._item))

    def _next(self) -> list[Said]:
        messages = event_loop_thread.run(self._wait())
        new = (
            messages[self._shown :] if len(messages) > self._shown else messages
        )  # all of it after a summary
        self._shown = len(messages) + 1  # and the reply that is to come
        return [{"role": message.role, "content": message.content} for message in new]

    async def _wait(self) -> Sequence[Message]:
        """The prompt of the next request; none, and ``trajectory``, where the run has ended."""
        assert self._running is not None
        asked = asyncio.ensure_future(self._model.asked())
        await asyncio.wait([asked, self._running], return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result().messages
        asked.cancel()
        self.trajectory = self._running.result()
        return ()

    async def _cancel(self) -> None:
        assert self._running is not None
        self._running.cancel()
        await asyncio.wait([self._running])


class _Driver:
    """Requests of one run out, replies in."""

    def __init__(self) -> None:
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._reply: asyncio.Future[str] | None = None

    async def ask(self, request: Request) -> str:
        self._reply = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(request)
        return await self._reply

    async def asked(self) -> Request:
        return await self._requests.get()

    def reply(self, text: str) -> None:
        """From any thread."""
        assert self._reply is not None
        self._reply.get_loop().call_soon_threadsafe(self._answer, text)

    def _answer(self, text: str) -> None:
        if self._reply is not None and not self._reply.done():
            self._reply.set_result(text)


_driver: ContextVar[_Driver] = ContextVar("driver")
"""Who answers the run that the running task belongs to."""


class _ExternalClient:
    """A ``Client`` whose replies come from whoever drives the run."""

    name = "env:outside"
    window = 1 << 30
    price: Price | None = None

    async def complete(self, request: Request) -> Reply:
        if request.affinity != "0":
            raise Refused(
                "calls below the root need a sub_model, which this environment was not given"
            )
        text = await _driver.get().ask(request)
        return Reply(Message("assistant", text), Usage(calls=1))

    async def close(self) -> None:
        """Nothing to close."""
