"""Environments of verifiers played by a scripted model: by the library alone, and as tasks here."""

from __future__ import annotations

from typing import Any

import verifiers.v1 as vf

from examples.verifiers_environments import made
from ramify import RLM, Limits, SandboxSpec, ScriptedClient
from ramify.evaluate.attempt import attempt
from ramify.evaluate.verifiers_episodes import verifiers_task
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, ToolCall
from ramify.types.trajectory import Trajectory
from tests.evaluate.library_rollout import library_episode

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


async def played_by_library(name: str, *, harness: str = "") -> vf.Episode:
    """The episode of the library's own rollout against a server with the script."""
    async with ScriptedServer(scripted) as server:
        return await library_episode(name, server.url, harness=harness)


async def played_here(
    name: str, client: Any = None, *, item: int = 0, **options: Any
) -> Trajectory:
    """The attempt at one item by the engine."""
    taskset, env = made(name)
    task = verifiers_task(taskset, env=env, name=name, judge="frozen", **options)
    client = client or ScriptedClient(scripted)
    async with RLM(client, limits=Limits(max_seconds=200), sandbox=SPEC) as rlm:
        return await attempt(rlm, task, task.splits[SPLIT][item])
