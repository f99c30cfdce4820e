"""Small budgets shorten replies, or refuse before the first request; what a result says of itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from ramify import Limits, SandboxSpec, Stop
from ramify.types.message import Message, Reply
from tests.engine.helpers import by_role, client, code, rlm

ANSWER = [code("print(len(context))"), code("FINAL(7)")]


@pytest.mark.parametrize("max_tokens", [40_000, 20_000, 12_000])
def test_a_small_budget_shortens_the_replies(max_tokens: int) -> None:
    model = client(ANSWER)
    with rlm(model, limits={"max_tokens": max_tokens}) as r:
        result = r.completion("text " * 9000, "How many?")
    assert (result.stop, result.answer) == (Stop.FINAL, 7)
    assert result.usage.total_tokens <= max_tokens
    limits = [request.sampling.max_tokens for request in model.requests]
    assert all(512 <= limit <= 8192 for limit in limits)
    assert (limits[0] < 8192) == (max_tokens < 40_000)


@pytest.mark.parametrize("max_tokens", [1, 500, 2000])
def test_a_budget_without_room_for_a_reply_is_refused_before_the_first_request(
    max_tokens: int,
) -> None:
    model = client(ANSWER)
    with rlm(model, limits={"max_tokens": max_tokens}) as r:
        result = r.completion("text " * 9000, "How many?")
    assert (model.requests, result.answer, result.stop) == ([], None, Stop.MAX_TOKENS)
    assert f"of {max_tokens:,} were left" in (result.error or "")
    assert f"of {max_tokens:,} were left" in result.reason


def test_a_small_budget_shortens_a_direct_answer() -> None:
    model = client(["seven"])
    with rlm(model, limits={"max_tokens": 5000}, scaffold="default") as r:
        result = r.completion("How many days has a week?")
    assert (result.answer, model.requests[0].sampling.max_tokens) == ("seven", 4096)


def test_a_short_reply_that_is_cut_names_the_budget() -> None:
    reply = Reply(Message("assistant", "I will"), finish="length")
    with rlm([reply] * 9, limits={"max_tokens": 20_000}) as r:
        result = r.completion("text " * 9000, "How many?")
    assert "raise max_tokens" in str(result.failure or result.reason)


def test_the_time_for_a_last_word_follows_the_replies() -> None:
    """The first reply takes a second, so at least two are kept: code that would run on is stopped
    that long before the deadline, and not a tenth of it."""
    began = [0.0]

    async def script(messages: Any) -> str:
        loop = asyncio.get_running_loop()
        if len(messages) == 2:
            began[0] = loop.time()
            await asyncio.sleep(1.0)
            return code("import time\nwhile True: time.sleep(0.01)")
        began.append(loop.time())
        return "FINAL(7)"

    limits = Limits(max_seconds=6.0)
    with rlm(script, limits=limits, sandbox=SandboxSpec(grace_s=30.0)) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer) == (Stop.DEADLINE, 7)
    assert "and the last 2" in result.reason or "and the last 3" in result.reason
    assert began[1] - began[0] < 6.0 - 1.5


def test_a_result_shows_itself_in_one_line() -> None:
    with rlm([code("FINAL('<b>' + 'x' * 500 + '\\n')")]) as r:
        result = r.completion("text", "?")
    assert "\n" not in repr(result)
    assert len(repr(result)) < 200
    assert repr(result).startswith("Result('<b>xxx")
    assert f"stop=final, calls=1, tokens={result.usage.total_tokens:,}" in repr(result)
    assert result.run_id in repr(result)
    page = result._repr_html_()
    assert "&lt;b&gt;x" in page
    assert "<b>x" not in page
    assert (result.reason, result.error) == ("", None)


def test_a_trajectory_prints_its_tree() -> None:
    with rlm(by_role([code("FINAL(llm_query('a\\nb'))")])) as r:
        result = r.completion("text", "How many?")
    assert str(result.trajectory).splitlines() == [
        f"run {result.run_id}: final",
        "0 How many? → re: a b",
        "  0.0 a b → re: a b",
    ]
