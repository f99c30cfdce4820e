"""The request for a final answer at a limit: what is held for it, how long its reply may be, and that
it is sent again after a crash."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import DepthOptions, Limits, Stop, Store
from ramify.clients.base import Price
from ramify.types.event import ReplyReceived
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.engine.helpers import by_role, client, code, rlm

NAME = "code_interpreter"
ASK_60 = "try:\n  for i in range(60): llm_query('p')\nexcept LimitReached: print('stopped')"


def is_final(messages: tuple[Message, ...]) -> bool:
    text = messages[-1].content
    return "Answer now with what you have" in text or "You are asked to finish" in text


def test_final_answer_of_a_child_has_the_length_of_its_own_depth() -> None:
    """What is held for the root's final answer bounds only the root's."""

    def script(messages: tuple[Message, ...]) -> str:
        if is_final(messages):
            return "FINAL(as far as I got)"
        is_root = "Question: root" in messages[1].content
        return code("FINAL(rlm_query('child'))" if is_root else "print(1)")

    model = client(script)
    depths = [DepthOptions(max_reply_tokens=600), DepthOptions(max_turns=1)]
    with rlm(model, depths=depths, limits={"max_tokens": 100_000}) as r:
        assert r.completion("text", "root").answer == "as far as I got"
    assert [request.sampling.max_tokens for request in model.requests] == [600, 8192, 4096]


@pytest.mark.parametrize(
    ("cell", "end"),
    [
        ("print(sql('select 1'))", "; its last cell raised NameError: name 'sql' is not defined"),
        ("1 / 0\nprint(1)", "; its last cell raised ZeroDivisionError: division by zero"),
        ("print(1)", ""),
    ],
)
def test_reason_names_the_exception_of_the_last_cell(cell: str, end: str) -> None:
    with rlm(lambda _: code(cell), limits={"max_turns": 2}) as r:
        result = r.completion("text", "?", answer_type=int)
    used = "2 of 2 turns were used, and one more for a final reply: raise max_turns"
    assert (result.stop, result.answer, result.reason) == (Stop.MAX_TURNS, None, used + end)


def test_reason_of_a_run_with_one_call_names_its_limit() -> None:
    with rlm(lambda _: code("print(1)"), limits={"max_calls": 1}) as r:
        result = r.completion("text", "?", answer_type=int)
    assert (result.stop, result.answer) == (Stop.MAX_CALLS, None)
    wanted = "0 of 1 requests were used, and one is kept for the final reply: raise max_calls"
    assert result.reason == wanted


def test_limit_of_plain_calls_does_not_hold_for_children() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if messages[0].role != "system":
            return "leaf"
        is_root = "Question: root" in messages[1].content
        return code("FINAL(rlm_query('child'))" if is_root else "FINAL(llm_query('leaf'))")

    model = client(script)
    with rlm(model, limits={"max_sub_reply_tokens": 600}) as r:
        assert r.completion("text", "root").answer == "leaf"
    assert [request.sampling.max_tokens for request in model.requests] == [8192, 8192, 600]


def test_request_is_cut_when_the_run_closes_and_the_final_one_is_not() -> None:
    async def main() -> None:
        asked = asyncio.Event()

        async def script(messages: tuple[Message, ...]) -> str:
            if is_final(messages):
                return "FINAL(7)"
            asked.set()
            await asyncio.sleep(600)
            return "never"

        model = client(script)
        async with rlm(model) as r:
            running = r.start("text", "?")
            await asked.wait()
            running.wrap_up()
            result = await asyncio.wait_for(running.result(), 60)
        assert (result.stop, result.answer, len(model.requests)) == (Stop.CANCELLED, 7, 2)

    asyncio.run(main())


def test_more_is_held_once_the_roots_model_reported_more_than_was_reserved() -> None:
    """The calls of the same turn leave enough for a final reply of that size."""
    answered = [0]

    def root(messages: tuple[Message, ...]) -> Reply:
        line = "FINAL(what I have)" if is_final(messages) else code(ASK_60)
        return Reply(Message("assistant", line), Usage(10, 20_000, calls=1))

    def leaf(messages: tuple[Message, ...]) -> Reply:
        answered[0] += 1
        return Reply(Message("assistant", "x"), Usage(10, 990, calls=1))

    limits = Limits(max_tokens=60_000, max_reply_tokens=1_000, max_concurrency=1)
    with rlm(client(root, name="root"), sub_model=client(leaf, name="leaf"), limits=limits) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response) == (Stop.MAX_TOKENS, "what I have")
    assert result.usage.total_tokens <= 60_000
    assert answered[0] >= 5


def test_record_says_which_replies_were_not_paid_for(tmp_path: Path) -> None:
    store, price = Store(tmp_path), Price(input=1.0, output=2.0)
    model = client(by_role([code("FINAL([llm_query('a'), llm_query('a')])")]), price=price)
    with rlm(model, store=store) as r:
        result = r.completion("text", "?", cache=True)
    replies = [event for event in store.events("last") if isinstance(event, ReplyReceived)]
    assert [event.cached for event in replies] == [False, False, True]
    paid = [price.of(event.reply.usage) for event in replies[:2]]
    assert [event.reply.cost for event in replies] == pytest.approx([*paid, 0.0])
    assert result.cost == pytest.approx(sum(paid))


def test_reused_reply_of_a_model_without_a_price_has_no_cost(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm(by_role([code("FINAL([llm_query('a'), llm_query('a')])")]), store=store) as r:
        r.completion("text", "?", cache=True)
    replies = [event for event in store.events("last") if isinstance(event, ReplyReceived)]
    assert [(event.cached, event.reply.cost) for event in replies][-1] == (True, None)


@pytest.mark.parametrize(("reported", "answered"), [(20_000, 1), (100, 3)])
def test_resumed_run_reserves_what_its_recorded_replies_reported(
    tmp_path: Path, reported: int, answered: int
) -> None:
    """The journal ends after the first plain reply. If that reply used more than was reserved, the
    next request needs as much, which is not left; if not, the others are asked."""

    def script(messages: tuple[Message, ...]) -> Any:
        if is_final(messages):
            return "FINAL(what I have)"
        if messages[0].role == "system":
            return code("FINAL([llm_query('p') for _ in range(3)])")
        return Reply(Message("assistant", "x"), Usage(10, reported, calls=1))

    store, model = Store(tmp_path), client(script)
    limits = Limits(max_tokens=39_000, max_reply_tokens=500)
    with rlm(model, store=store, limits=limits) as r:
        r.completion("text", "?")
    path = store.path("last")
    kept = path.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(kept) if b'"content":"x"' in line)
    path.write_bytes(b"".join(kept[: first + 1]))
    with rlm(model, store=store, limits=limits) as r:
        result = r.resume("last")
    leaves = [call for call in result.trajectory.calls if call.parent and call.turns]
    assert (len(leaves), result.stop) == (
        answered,
        Stop.FINAL if answered == 3 else Stop.MAX_TOKENS,
    )
    assert result.usage.total_tokens <= 39_000


def test_final_request_takes_the_place_of_one_that_was_cut_off(tmp_path: Path) -> None:
    """A run was killed during a request. When it is resumed, it is asked to finish during the same
    request, whose turn then has another prompt."""

    async def main() -> None:
        asked, store = asyncio.Event(), Store(tmp_path)

        async def script(messages: tuple[Message, ...]) -> str:
            if is_final(messages):
                return "FINAL(7)"
            asked.set()
            await asyncio.sleep(600)
            return "never"

        async with rlm(client(script), store=store) as r:
            running = r.start("text", "?")
            await asked.wait()
            path = store.path(running.id)
            recorded = path.read_bytes()
            running.wrap_up()
            await asyncio.wait_for(running.result(), 60)
        path.write_bytes(recorded)  # as if it had been killed at that moment
        asked.clear()
        async with rlm(client(script), store=store) as r:
            running = r.restart("last")
            await asked.wait()
            running.wrap_up()
            result = await asyncio.wait_for(running.result(), 60)
        assert (result.stop, result.answer) == (Stop.CANCELLED, 7)
        assert [turn.reply.message.content for turn in result.trajectory.root.turns] == ["FINAL(7)"]

    asyncio.run(main())


@pytest.mark.parametrize(
    ("reply", "recorded"),
    [
        (Reply(Message("assistant", "<code>6*7")), "<code>6*7</code>"),
        (Reply(Message("assistant", "<code>6*7"), finish="length"), "<code>6*7"),
        (
            Reply(
                Message("assistant", "<code>", tool_calls=(ToolCall("a", NAME, '{"code": "1"}'),))
            ),
            "<code>",
        ),
    ],
)
def test_only_what_a_stop_text_ended_is_completed_by_it(reply: Reply, recorded: str) -> None:
    with rlm([reply, r"\boxed{42}"], scaffold="retool") as r:
        result = r.completion("What is 6*7?")
    first = result.trajectory.root.turns[0].reply.message.content
    assert first == recorded
