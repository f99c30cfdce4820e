"""Make Ramify's tasks available as tasksets of the ``verifiers`` library (0.4, ``verifiers.v1``).

The module also provides a harness that runs Ramify's engine.

    # my_ledger.py, a package that the loaders of verifiers find by its name
    LedgerTaskset = taskset("ledger", split="train", multi=0.5)
    RamifyHarness = harness(scaffold="minimal")
    __all__ = ["LedgerTaskset", "RamifyHarness"]

With this harness, a rollout of the library is a run of the engine, with sessions and child calls.
Every model request passes through the library's interception server, so its trainers see each call
as a branch of the trace. The reward is computed by the task. With any other harness, the prompt is
the question followed by the context, if that is short enough, and the answer is the last reply.

The rows of a taskset contain only the task's name, options, split and index, so that any worker of
the library can make the item itself.
"""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from ramify.clients.openai import OpenAIClient
from ramify.clients.providers import resolve_endpoint
from ramify.engine import observation_messages
from ramify.engine.limits import Limits
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError
from ramify.evaluate.attempt import attempt
from ramify.http_client.http_transport import HttpConnectionPool
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.base import Item, Task, items_of, score_trajectory, task_of
from ramify.tasks.scoring.answer_text import as_text
from ramify.tasks.validation import answer_only_trajectory
from ramify.tasks.verifiers import verifiers_v1

MAX_PROMPT_CHARS = 100_000
"""Maximum characters of a context that is put into the prompt for a harness other than Ramify's. A
longer context is left out."""
_KEY = "ramify"


def taskset(name: str, /, *, split: str = "train", num: int | None = None, **options: Any) -> type:
    """Return a ``Taskset`` class of the ``verifiers`` library for one split of a Ramify task.

    The task is looked up by ``name``, as in ``tasks.base.task_of``. It contains the first ``num``
    items of the split. By default, it contains all of them, which may be infinitely many.

    Example:
        ledger = evaluate.taskset("ledger", num=100, multi=1.0)
    """
    vf = verifiers_v1()
    items = items_of(_task(name, msgspec.json.encode(options).decode()), split)
    size = len(items) if num is None else min(num, len(items))

    class Data(vf.TaskData):  # type: ignore[misc,name-defined]
        """The fields of a ``verifiers`` task that identify a Ramify task item.

        Its fields are the task, its options, the split and the index of the item.
        """

        ramify_task: str
        ramify_options: str
        ramify_split: str
        ramify_index: int

    class Row(vf.Task[Data]):  # type: ignore[misc,name-defined]
        """A Ramify task item, wrapped as a task of the ``verifiers`` library."""

        @vf.reward  # type: ignore[untyped-decorator]
        async def task_rewards(self, trace: Any) -> dict[str, float]:
            return dict(_rewards(self.data, trace)["rewards"])

        @vf.metric  # type: ignore[untyped-decorator]
        async def task_metrics(self, trace: Any) -> dict[str, float]:
            return dict(_rewards(self.data, trace)["metrics"])

    class Items(vf.Taskset[Row, vf.TasksetConfig]):  # type: ignore[misc,name-defined]
        """The items of the split, in order."""

        INFINITE = num is None and size > 1 << 32

        def load(self) -> Any:
            for index in range(size):
                item = items[index]
                yield Row(
                    Data(
                        id=item.id,
                        name=item.kind or None,
                        prompt=_prompt(item),
                        ramify_task=name,
                        ramify_options=msgspec.json.encode(options).decode(),
                        ramify_split=split,
                        ramify_index=index,
                    ),
                    self.config.task,
                )

    Items.__name__ = Items.__qualname__ = (
        f"{name.rpartition(':')[2].title().replace('_', '')}Taskset"
    )
    return Items


def harness(
    *,
    scaffold: str | None = None,
    limits: Limits | None = None,
    sandbox: SandboxSpec | None = None,
    window: int = 128_000,
) -> type:
    """Return a ``Harness`` class that lets ``verifiers`` run Ramify's tasksets in Ramify's engine.

    ``window`` is the context window of the model, in tokens.
    """
    vf = verifiers_v1()

    class RamifyHarness(vf.Harness[vf.HarnessConfig]):  # type: ignore[misc,name-defined]
        """A ``verifiers`` harness that runs a recursive language model in Ramify's engine.

        The model's code runs in sandbox sessions of Ramify's engine instead of the verifiers
        runtime.
        """

        NEEDS_CONTAINER = False
        APPENDS_SYSTEM_PROMPT = True

        async def launch(
            self,
            ctx: Any,
            trace: Any,
            runtime: Any,
            endpoint: str,
            secret: str,
            mcp_urls: dict[str, str],
            data: Any,
        ) -> Any:
            task, item = _task_and_item(data)
            model = f"openai:{ctx.model}"
            wire = HttpConnectionPool()
            client = OpenAIClient(
                model, resolve_endpoint(model, key=secret, base_url=endpoint), wire, window=window
            )
            try:
                async with RLM(client, scaffold=scaffold, limits=limits, sandbox=sandbox) as rlm:
                    trajectory = await attempt(rlm, task, item)
            finally:
                await wire.close()
            if not trajectory.rewards:
                return vf.ProgramResult(
                    exit_code=1, stdout="", stderr=(trajectory.errors or ["no reward"])[-1]
                )
            trace.root_reply = as_text(trajectory.answer) or ""
            trace.info[_KEY] = {
                "rewards": _weight_rewards(task, trajectory.rewards),
                "metrics": trajectory.metrics,
                "stop": str(trajectory.stop),
                "call_rewards": trajectory.call_rewards,
            }
            return vf.ProgramResult(exit_code=0, stdout=trace.root_reply, stderr="")

    return RamifyHarness


@functools.cache
def _task(name: str, options: str) -> Task:
    return task_of(name, **msgspec.json.decode(options))


def _task_and_item(data: Any) -> tuple[Task, Item]:
    try:
        task = _task(data.ramify_task, data.ramify_options)
        return task, items_of(task, data.ramify_split)[data.ramify_index]
    except AttributeError:
        raise ConfigError(
            "the ramify harness only runs tasks of ramify: give it a taskset made by `taskset`"
        ) from None


def _prompt(item: Item) -> str:
    if (
        item.context is not None
        and observation_messages.count_context_chars(item.context) > MAX_PROMPT_CHARS
    ):
        return item.question
    return observation_messages.plain_prompt(item.question, item.context)


def _rewards(data: Any, trace: Any) -> dict[str, dict[str, float]]:
    """Return the rewards and metrics of a rollout from its ``verifiers`` trace.

    If Ramify's engine ran the rollout, they are recorded in the trace. With any other harness, the
    last reply of the trace is scored as the answer.
    """
    recorded: dict[str, dict[str, float]] | None = trace.info.get(_KEY)
    if recorded is not None:
        return recorded
    task, item = _task_and_item(data)
    last_score = score_trajectory(task, item, answer_only_trajectory(item, trace.last_reply))
    return {
        "rewards": _weight_rewards(task, last_score.rewards),
        "metrics": dict(last_score.metrics),
    }


def _weight_rewards(task: Task, rewards: dict[str, float]) -> dict[str, float]:
    return {name: task.weights.get(name, 1.0) * reward for name, reward in rewards.items()}
