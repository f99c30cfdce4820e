"""Which turn an agent's request continues, if a client sends its history back differently."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from ramify import RLM, ScriptedClient
from ramify.engine.external_conversations import RunModelClient
from ramify.errors import ModelError
from ramify.tasks.base import RolloutInitialState
from ramify.testing import refused
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallForkOrigin, Trajectory
from tests.engine.rerenderings import RERENDERINGS, Rerendering, fault, play
from tests.engine.template_client import TemplateClient


@pytest.mark.parametrize("each", RERENDERINGS, ids=lambda each: each.name)
def test_a_rerendered_history_gives_the_documented_tree(each: Rerendering) -> None:
    assert fault(each, play(each.change)) == ""


Conduct = Callable[[RunModelClient], Awaitable[None]]


def played(conduct: Conduct, client: Any) -> Trajectory:
    async def run() -> Any:
        async with RLM(client) as rlm:
            return await rlm.start(RolloutInitialState(conduct=conduct), "play")

    result = asyncio.run(run())
    assert result.error is None, result.error
    trajectory: Trajectory = result.trajectory
    return trajectory


def shape(trajectory: Trajectory) -> list[tuple[str, str | None, CallForkOrigin | None, int]]:
    return [
        (call.id, call.cause and str(call.cause), call.fork, len(call.turns))
        for call in trajectory.calls
    ]


def user(text: str) -> Message:
    return Message("user", text)


def test_a_fork_shares_the_ids_of_its_origin_and_each_sampled_id_is_recorded_once() -> None:
    texts = iter(["one", "two", "three", "four", "five", "six"])
    client = TemplateClient(lambda messages: next(texts))

    async def conduct(model: RunModelClient) -> None:
        talk = [user("a")]
        for text in "bc":
            talk += [(await model.ask(talk)).message, user(text)]
        await model.ask(talk)
        await model.ask([*talk[:2], user("another b")])
        for reply in await model.request_replies(talk[:3], num_replies=2):
            assert reply.prompt_ids == client.log[1][0]

    trajectory = played(conduct, client)
    assert shape(trajectory) == [
        ("0", "new", None, 3),
        ("0:1", "branch", CallForkOrigin("0", 0), 1),
        ("0:2", "repeated", CallForkOrigin("0", 0), 1),
        ("0:3", "sample", CallForkOrigin("0", 0), 1),
    ]
    for call, (prompt, sampled) in zip(trajectory.calls, client.log[2:], strict=True):
        path = trajectory.path(call)
        assert path is not None
        assert path.ids == (*prompt, *sampled)
    assert [turn.reply.token_ids for call in trajectory.calls for turn in call.turns] == [
        sampled for _, sampled in client.log
    ]
    assert "split_turns" not in trajectory.metrics


def test_a_template_that_rewrites_its_past_gives_a_new_call() -> None:
    async def conduct(model: RunModelClient) -> None:
        talk = [user("a")]
        for text in "bc":
            talk += [(await model.ask(talk)).message, user(text)]
        await model.ask(talk)

    trajectory = played(conduct, TemplateClient(lambda messages: "yes", "counting"))
    assert shape(trajectory) == [
        ("0", "new", None, 1),
        ("1", "template", None, 1),
        ("2", "template", None, 1),
    ]


def test_a_request_that_failed_is_asked_again_in_its_call() -> None:
    replies = iter([refused("no"), "yes"])

    async def conduct(model: RunModelClient) -> None:
        with pytest.raises(ModelError):
            await model.ask([user("a")])
        await model.ask([user("a")])

    trajectory = played(conduct, ScriptedClient(lambda messages: next(replies)))
    assert shape(trajectory) == [("0", "new", None, 1)]


def test_a_request_whose_connection_ended_leaves_no_turn_and_is_asked_again_in_its_call() -> None:
    asked = asyncio.Event()
    never = asyncio.Event()

    async def reply(messages: tuple[Message, ...]) -> str:
        if messages[-1].content == "b" and not asked.is_set():
            asked.set()
            await never.wait()
        return "yes"

    async def conduct(model: RunModelClient) -> None:
        talk = [user("a"), (await model.ask([user("a")])).message, user("b")]
        lost = asyncio.create_task(model.ask(talk))
        await asked.wait()
        lost.cancel()
        await asyncio.wait([lost])
        await model.ask(talk)

    trajectory = played(conduct, ScriptedClient(reply))
    assert shape(trajectory) == [("0", "new", None, 2)]


def test_dropped_reasoning_changes_nothing_if_no_ids_are_compared() -> None:
    answer = Reply(Message("assistant", "yes", reasoning="hm"))

    async def conduct(model: RunModelClient) -> None:
        await model.ask([user("a")])
        await model.ask([user("a"), Message("assistant", "yes"), user("b")])

    assert shape(played(conduct, ScriptedClient(lambda messages: answer))) == [
        ("0", "new", None, 2)
    ]


@pytest.mark.parametrize(("is_canonical", "calls"), [(True, 1), (False, 2)])
def test_other_messages_with_the_same_ids_continue_the_call(is_canonical: bool, calls: int) -> None:
    """A client writes the reasoning into the content, which the template writes alike. Its ids are
    those that were sampled only if the model sampled them as the tokenizer would."""
    text = "<think>\nhm\n</think>\n\nyes"
    client = TemplateClient(lambda messages: text, is_canonical=is_canonical)

    async def conduct(model: RunModelClient) -> None:
        talk = [user("a")]
        for question in "bc":
            await model.ask(talk)
            talk += [Message("assistant", text), user(question)]
        await model.ask(talk[:3])

    trajectory = played(conduct, client)
    assert len(trajectory.calls) == calls + 1
    assert trajectory.calls[-1].cause == "repeated" if is_canonical else "merged"
    for call, (prompt, sampled) in zip(trajectory.calls, client.log[-calls - 1 :], strict=True):
        path = trajectory.path(call)
        assert path is not None
        assert path.ids == (*prompt, *sampled)


@pytest.mark.parametrize("num_steps", range(8))
def test_a_request_cancelled_at_any_step_does_not_occupy_its_call(num_steps: int) -> None:
    async def conduct(model: RunModelClient) -> None:
        talk = [user("a"), (await model.ask([user("a")])).message, user("b")]
        lost = asyncio.create_task(model.ask(talk))
        for _ in range(num_steps):
            await asyncio.sleep(0)
        lost.cancel()
        await asyncio.wait([lost])
        await model.ask(talk)

    client = ScriptedClient(lambda messages: "yes", latency_s=0.01)
    assert shape(played(conduct, client)) == [("0", "new", None, 2)]
