"""Environments of verifiers played by a scripted model: by the library alone, and as tasks here."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

from examples.verifiers_environments import made
from ramify import RLM, Limits, SandboxSpec, ScriptedClient
from ramify.clients.scripted_server import ScriptedServer
from ramify.evaluate.attempt import attempt
from ramify.evaluate.verifiers_episodes import verifiers_task
from ramify.evaluate.verifiers_harness import register_chat_harness
from ramify.types.message import Message, Reply, ToolCall
from ramify.types.trajectory import Trajectory

SPEC = SandboxSpec(provider="process", allow_weaker=True)
SPLIT = "train"


def called(name: str, arguments: str) -> Reply:
    call = ToolCall("call_1", name, arguments)
    return Reply(Message("assistant", "", tool_calls=(call,)), finish="tool_calls")


def scripted(messages: tuple[Message, ...]) -> str | Reply:
    """One model for all environments. It is right about the first task of most of them."""
    last = messages[-1]
    text = last.content
    if text.startswith("Question:"):  # the judge
        return "Yes, it is." if "please" in text else "No."
    if "capital" in text:
        return called("atlas_capital", '{"country": "France"}')
    if "into the cart" in text:
        return called("cart_add", '{"item": "milk"}')
    if last.role == "tool":
        return f"It says {text}"
    if text in ("Guess a number from 0 to 11.", "Lower."):
        return "I guess 5" if text.startswith("Guess") else "0"
    if "backwards" in text:
        return "laet"
    if "program" in text:
        return "```python\nprint(9)\n```"
    if "guest" in messages[0].content:
        return "Soup for table 3" if len(messages) < 4 else "Thanks, and tea"
    if "teal" in text:
        return "teal 1"
    if "Say 0" in text:
        return "um, 0"
    return "May I please have 2" if "Ask" in text else "That makes 2"


async def played_by_library(
    name: str, script: Any = scripted, *, harness: str = "", row: int = 0
) -> vf.Episode:
    """The episode of the library's own rollout against a server with the script."""
    taskset, env = made(name)
    env_class = env or vf.SingleAgentEnv
    (config_class,) = [
        argument
        for base in (*getattr(env_class, "__orig_bases__", ()), *vf.SingleAgentEnv.__orig_bases__)
        for argument in getattr(base, "__args__", ())
    ][:1]
    seats = [
        field
        for field, info in config_class.model_fields.items()
        if isinstance(info.default, vf.AgentConfig)
    ]
    seat = {
        "harness": {"id": harness or register_chat_harness()},
        "runtime": {"type": "subprocess"},
    }
    # The library finds a taskset's class by an id: the one under which the task here entered it.
    known = verifiers_task(taskset, env=env).splits[SPLIT]
    assert len(known) > 0
    async with ScriptedServer(script) as server:
        config = config_class.model_validate(
            {
                "taskset": taskset.config.model_copy(update={"id": known_id(taskset)}),
                **dict.fromkeys(seats, seat),
            }
        )
        played = env_class(config)
        task = next(each for index, each in enumerate(played.taskset) if index == row)
        if hasattr(task.config, "judge"):
            judge = task.config.judge.model_copy(update={"base_url": server.url})
            task.config = task.config.model_copy(update={"judge": judge})
        client = vf.EvalClientConfig(base_url=server.url, api_key_var="NO_API_KEY")
        async with played.serving():
            return await played.run_episode(task, vf.ModelContext(model="m", client=client))


def known_id(taskset: Any) -> str:
    from ramify.evaluate.verifiers_episodes import known_as

    return known_as(taskset)


async def played_here(
    name: str, client: Any = None, *, item: int = 0, **options: Any
) -> Trajectory:
    """The attempt at one item by the engine."""
    taskset, env = made(name)
    task = verifiers_task(taskset, env=env, name=name, judge="frozen", **options)
    client = client or ScriptedClient(scripted)
    async with RLM(client, limits=Limits(max_seconds=200), sandbox=SPEC) as rlm:
        return await attempt(rlm, task, task.splits[SPLIT][item])
