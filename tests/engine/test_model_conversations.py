"""Conversations that a task holds itself (``RolloutInitialState.conduct``): which request continues which
call, what is recorded, and what ends a run."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, ScriptedClient, Store
from ramify.clients.base import Sampling, Tool
from ramify.engine.external_conversations import RunModelClient
from ramify.errors import LimitReached
from ramify.tasks.base import RolloutInitialState
from ramify.types.event import NoteAdded
from ramify.types.message import Message, Reply, VersionSpan
from ramify.types.trajectory import CallForkOrigin, Stop

Conduct = Callable[[RunModelClient], Awaitable[Any]]


def user(text: str) -> Message:
    return Message("user", text)


def conducted(conduct: Conduct, client: Any = None, **options: Any) -> Any:
    """The result of a run whose conversations ``conduct`` holds. No sandbox is opened."""
    client = client or ScriptedClient(lambda messages: f"re: {messages[-1].content}")

    async def run() -> Any:
        async with RLM(client, **options) as rlm:
            return await rlm.start(RolloutInitialState(conduct=conduct), "play")

    return asyncio.run(run())


def shape(result: Any) -> list[tuple[str, int, Stop | None]]:
    return [(call.id, len(call.turns), call.stop) for call in result.trajectory.calls]


def test_request_continues_the_call_whose_conversation_it_begins_with() -> None:
    async def conduct(model: RunModelClient) -> str:
        first = await model.ask([user("a")])
        talk = [user("a"), first.message, user("b")]
        second = await model.ask(talk)
        await model.ask([*talk, second.message, user("c")])
        await model.ask([user("a"), Message("assistant", "another reply"), user("b")])  # rewritten
        await model.ask([user("a")])  # again from the start
        await model.ask([*talk, second.message, user("d")])  # from the middle
        await model.ask([user("a")], thread="other")
        look = Tool("look", "Look.", {"type": "object", "properties": {}})
        await model.ask([user("a"), first.message, user("b")], tools=(look,))
        assert model.agent_call_ids("other") == ["2"]
        return "done"

    result = conducted(conduct)
    assert result.answer == "done"
    assert shape(result) == [
        ("0", 3, Stop.FINAL),
        ("1", 1, Stop.FINAL),
        ("0:1", 1, Stop.FINAL),
        ("0:2", 1, Stop.FINAL),
        ("2", 1, Stop.FINAL),
        ("3", 1, Stop.FINAL),
    ]
    calls = result.trajectory.calls
    assert [(call.cause, call.fork) for call in calls] == [
        ("new", None),
        ("edited", None),
        ("repeated", CallForkOrigin("0", -1)),
        ("branch", CallForkOrigin("0", 1)),
        ("new", None),
        ("tools", None),
    ]
    assert result.trajectory.metrics == {
        "calls.new": 2,
        "calls.edited": 1,
        "calls.repeated": 1,
        "calls.branch": 1,
        "calls.tools": 1,
        "turns.continued": 2,
    }
    turns = calls[0].turns
    assert [(turn.reused, [m.content for m in turn.prompt]) for turn in turns] == [
        (0, ["a"]),
        (2, ["b"]),
        (4, ["c"]),
    ]


def test_a_conversation_that_waits_for_a_reply_is_not_continued() -> None:
    """Two equal requests at once are two calls."""
    both = asyncio.Event()
    waiting = 0

    async def reply(messages: tuple[Message, ...]) -> str:
        nonlocal waiting
        waiting += 1
        if waiting == 2:
            both.set()
        await both.wait()
        return "yes"

    async def conduct(model: RunModelClient) -> None:
        replies = await asyncio.gather(model.ask([user("a")]), model.ask([user("a")]))
        talk = [user("a"), replies[0].message, user("b")]
        await asyncio.gather(*(model.ask(talk) for _ in range(3)))

    result = conducted(conduct, ScriptedClient(reply))
    assert shape(result) == [
        (id, num, Stop.FINAL) for id, num in {"0": 2, "0:1": 2, "0:2": 1}.items()
    ]
    third = result.trajectory.calls[2]
    assert (third.cause, third.fork) == ("repeated", CallForkOrigin("0", 0))


def test_several_replies_to_one_request_are_forks_that_share_its_prompt() -> None:
    numbers = iter(range(10))

    async def conduct(model: RunModelClient) -> None:
        first = await model.ask([user("a")])
        talk = [user("a"), first.message, user("b")]
        for reply in await model.request_replies(talk, num_replies=3):
            await model.ask([*talk, reply.message, user("c")])

    result = conducted(conduct, ScriptedClient(lambda messages: str(next(numbers))))
    trajectory = result.trajectory
    assert [(call.id, call.fork, len(call.turns)) for call in trajectory.calls] == [
        ("0", None, 3),
        ("0:1", CallForkOrigin("0", 0), 2),
        ("0:2", CallForkOrigin("0", 0), 2),
    ]
    assert [
        [message.content for message in trajectory.conversation(call)] for call in trajectory.calls
    ] == [["a", "0", "b", number, "c", last] for number, last in ("14", "25", "36")]
    assert trajectory.metrics == {"calls.new": 1, "calls.sample": 2, "turns.continued": 4}


def test_a_request_decides_its_length_and_stop_texts_and_not_its_temperature() -> None:
    client = ScriptedClient(lambda messages: "yes")

    async def conduct(model: RunModelClient) -> None:
        wanted = Sampling(max_tokens=7, temperature=0.2, stop=("END",))
        await model.ask([user("a")], sampling=wanted)
        await model.ask([user("b")], sampling=Sampling(max_tokens=10**6))

    notes: list[str] = []

    def listen(event: Any) -> None:
        if isinstance(event, NoteAdded):
            notes.append(event.text)

    async def run() -> None:
        async with RLM(client, sampling=Sampling(temperature=1.0, max_tokens=100)) as rlm:
            await rlm.start(RolloutInitialState(conduct=conduct), "play", on_event=listen)

    asyncio.run(run())
    first, second = (request.sampling for request in client.requests)
    assert (first.max_tokens, first.stop, first.temperature) == (7, ("END",), 1.0)
    assert (second.max_tokens, second.stop, second.temperature) == (100, (), 1.0)
    assert notes == [
        "1 requests asked for another temperature, top-p or top-k than the run's, which had no "
        "effect"
    ]


def test_replies_that_must_not_be_learnt_from_have_no_ids() -> None:
    class WithIds(ScriptedClient):
        async def complete(self, request: Any) -> Reply:
            reply = await super().complete(request)
            known = request.known.ids if request.known else ()
            return Reply(
                reply.message,
                reply.usage,
                prompt_ids=(*known, 1, 2),
                token_ids=(3, 4),
                logprobs=(-0.5, -0.25),
                versions=(VersionSpan(0, 2, 7),),
            )

    async def conduct(model: RunModelClient) -> None:
        for thread, learns in (("policy", True), ("guest", False)):
            talk = [user("a")]
            for text in ("b", "c"):
                reply = await model.ask(talk, thread=thread, learns=learns)
                talk = [*talk, reply.message, user(text)]

    result = conducted(conduct, WithIds(lambda messages: "hm"))
    policy, guest = result.trajectory.calls
    assert [turn.reply.token_ids for turn in policy.turns] == [(3, 4), (3, 4)]
    assert result.trajectory.path(policy).ids == (1, 2, 3, 4, 1, 2, 3, 4)
    for turn in guest.turns:
        reply = turn.reply
        assert (reply.prompt_ids, reply.token_ids, reply.logprobs, reply.versions) == (None,) * 4


def test_limits_and_errors_of_the_task_end_the_run_with_one_line() -> None:
    async def endless(model: RunModelClient) -> None:
        talk = [user("a")]
        while True:
            reply = await model.ask(talk)
            talk = [*talk, reply.message, user("more")]

    result = conducted(endless, limits=Limits(max_turns=3))
    assert shape(result)[0][:2] == ("0", 3)
    assert isinstance(result.failure, LimitReached)
    assert "3 of 3 turns were used" in result.error

    async def broken(model: RunModelClient) -> None:
        await model.ask([user("a")])
        raise KeyError("door")

    result = conducted(broken)
    assert (result.stop, shape(result)) == (Stop.ERROR, [("0", 1, Stop.ERROR)])
    line = f"{__file__}:{broken.__code__.co_firstlineno + 2} (broken)"
    assert result.error == f"the task's conversations ended with KeyError('door'), at {line}"


def test_shared_resource_is_opened_once_and_closed_with_the_rlm() -> None:
    events: list[str] = []

    @contextlib.asynccontextmanager
    async def server() -> AsyncIterator[int]:
        events.append("opened")
        yield 7
        events.append("closed")

    async def conduct(model: RunModelClient) -> int:
        events.append("run")
        return await model.get_or_open_shared("server", server)

    async def several() -> list[Any]:
        async with RLM(ScriptedClient(["x"])) as rlm:
            starts = [rlm.start(RolloutInitialState(conduct=conduct), "play") for _ in range(3)]
            return [await each for each in starts]

    assert [each.answer for each in asyncio.run(several())] == [7, 7, 7]
    assert (events.count("opened"), events.count("closed"), events[-1]) == (1, 1, "closed")


def test_interrupted_run_is_resumed_without_asking_again(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    asked: list[str] = []

    def reply(messages: tuple[Message, ...]) -> str:
        asked.append(messages[-1].content)
        return f"re: {messages[-1].content}"

    async def conduct(model: RunModelClient, gate: asyncio.Event | None = None) -> str:
        first = await model.ask([user("a")])
        if gate is not None:
            gate.set()
            await asyncio.Event().wait()
        second = await model.ask([user("a"), first.message, user("b")])
        return second.message.content

    async def both() -> Any:
        async with RLM(ScriptedClient(reply), store=store) as rlm:
            gate = asyncio.Event()
            running = rlm.start(
                RolloutInitialState(conduct=lambda model: conduct(model, gate)), "play"
            )
            await gate.wait()
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
            _forget_end(store, running.id)
            return await rlm.restart(running.id, prompt=RolloutInitialState(conduct=conduct))

    result = asyncio.run(both())
    assert (result.answer, asked) == ("re: b", ["a", "b"])
    assert shape(result) == [("0", 2, Stop.FINAL)]


def _forget_end(store: Store, run: str) -> None:
    """Cut the last two lines of the journal, as if the process had been killed."""
    path = next(Path(store.root).rglob(f"{run}.jsonl"))
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-2]))


def test_replay_of_conversations_needs_the_task(tmp_path: Path) -> None:
    store = Store(tmp_path / "store")

    async def conduct(model: RunModelClient) -> str:
        return (await model.ask([user("a")])).message.content

    async def both() -> Any:
        async with RLM(ScriptedClient(["x"]), store=store) as rlm:
            result = await rlm.start(RolloutInitialState(conduct=conduct), "play")
            return await rlm.areplay(result.run_id)

    with pytest.raises(Exception, match="its task holds its conversations") as error:
        asyncio.run(both())
    assert "\n" not in str(error.value)
