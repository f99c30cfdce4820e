"""Providers that report more than was reserved, or nothing: what a run spends past a limit, and what
its record says."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify import Limits, Stop
from ramify.clients.base import Price
from ramify.store.folder_store import Store
from ramify.types.event import NoteAdded
from ramify.types.message import Message, Reply, Usage
from tests.engine.helpers import client, code, rlm

ASK_40 = code("found = llm_query_batched(['p'] * 40)\nprint(len(found))")
MAX_TOKENS = 60_000


def reports(usage: Usage, root: str = ASK_40) -> Any:
    """A script whose replies to plain calls report ``usage``, and that never answers."""

    def script(messages: tuple[Message, ...]) -> Any:
        if messages[0].role == "system":
            return root
        return Reply(Message("assistant", "x"), msgspec.structs.replace(usage, calls=1))

    return script


@pytest.mark.parametrize("concurrency", [1, 3, 16])
def test_only_requests_in_flight_at_the_first_report_exceed_a_limit(concurrency: int) -> None:
    model = client(reports(Usage(10, 40_000)), latency_s=0.001)
    limits = Limits(max_tokens=MAX_TOKENS, max_reply_tokens=50, max_concurrency=concurrency)
    with rlm(model, limits=limits, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    assert result.stop is Stop.MAX_TOKENS
    assert result.usage == model.served
    assert result.usage.total_tokens - MAX_TOKENS <= concurrency * 40_010
    answered = [request for request in model.requests if request.messages[0].role != "system"]
    assert len(answered) <= concurrency
    if result.usage.total_tokens > MAX_TOKENS:
        because = "of 60,000 tokens were used, because scripted:test reported 40,010 tokens"
        assert because in result.trajectory.reason


def test_later_requests_reserve_what_was_reported(tmp_path: Any) -> None:
    one_by_one = code("for i in range(40): llm_query('p')")
    model = client(reports(Usage(10, 5_000), one_by_one))
    limits = Limits(max_tokens=MAX_TOKENS, max_reply_tokens=50)
    store = Store(tmp_path)
    with rlm(model, limits=limits, sandbox="inprocess", store=store) as r:
        result = r.completion("text", "?")
    assert result.stop is Stop.MAX_TOKENS
    assert MAX_TOKENS - 25_000 < result.usage.total_tokens <= MAX_TOKENS
    notes = [event for event in store.events("last") if isinstance(event, NoteAdded)]
    (text,) = [note.text for note in notes if "reported" in note.text]
    assert text.startswith(
        "warning: scripted:test reported 5,010 tokens for call 0.0, turn 0, which had reserved "
    )
    assert result.trajectory.warnings[-1] == text.removeprefix("warning: ")


def test_a_growing_report_adds_one_reply_each_time() -> None:
    sizes = iter(range(1_000, 100_000, 1_000))

    def script(messages: tuple[Message, ...]) -> Any:
        if messages[0].role == "system":
            return code("for i in range(40): llm_query('p')")
        return Reply(Message("assistant", "x"), Usage(10, next(sizes), calls=1))

    model = client(script)
    limits = Limits(max_tokens=MAX_TOKENS, max_reply_tokens=50)
    with rlm(model, limits=limits, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    turns = [turn for call in result.trajectory.calls for turn in call.turns]
    largest = max(turn.reply.usage.total_tokens for turn in turns)
    assert result.usage.total_tokens <= MAX_TOKENS + largest


def test_dollars_are_bounded_in_the_same_way() -> None:
    price = Price(input=10.0, output=30.0)
    model = client(reports(Usage(100_000, 1)), price=price, latency_s=0.001)
    with rlm(model, limits=Limits(max_cost=1.0, max_concurrency=4), sandbox="inprocess") as r:
        result = r.completion("text", "?")
    assert result.stop is Stop.MAX_COST
    assert result.cost == pytest.approx(price.of(model.served))
    assert (result.cost or 0) <= 1.0 + 4 * price.of(Usage(100_000, 1))
    assert "of $1 were spent, because scripted:test reported" in result.trajectory.reason


@pytest.mark.parametrize("zeros", [Usage(0, 0), Usage(9, 0), Usage(0, 9)])
def test_zeros_beside_a_text_cost_the_upper_bound(zeros: Usage) -> None:
    model = client(reports(zeros), price=Price(input=1.0, output=2.0))
    limits = Limits(max_tokens=MAX_TOKENS, max_reply_tokens=1_000)
    with rlm(model, limits=limits, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    assert result.stop is Stop.MAX_TOKENS
    num = result.usage.unknown_calls
    assert num > 5
    assert num * 1_000 < result.usage.total_tokens <= MAX_TOKENS
    assert (result.cost or 0) > num * 1_000 * 2e-6


def test_an_empty_reply_may_have_used_no_tokens() -> None:
    def script(messages: tuple[Message, ...]) -> Any:
        if messages[0].role == "system":
            return code("FINAL(1)")
        return Reply(Message("assistant", ""), Usage(9, 0, calls=1))

    with rlm(client(script)) as r:
        assert r.completion("text", "?").usage.unknown_calls == 0


def test_a_resumed_run_knows_what_was_reported(tmp_path: Any) -> None:
    asked = 0

    def script(messages: tuple[Message, ...]) -> Any:
        nonlocal asked
        if messages[0].role == "system":
            return code("for i in range(40): llm_query('p')")
        asked += 1
        if asked == 3 and not resumed:
            raise KeyboardInterrupt
        return Reply(Message("assistant", "x"), Usage(10, 20_000, calls=1))

    resumed, store = False, Store(tmp_path)
    limits = Limits(max_tokens=MAX_TOKENS, max_reply_tokens=50)
    options: dict[str, Any] = {"limits": limits, "sandbox": "inprocess", "store": store}
    with rlm(script, **options) as r:
        r.completion("text", "?")
    path = store.path("last")
    kept = path.read_bytes().splitlines(keepends=True)
    first = next(n for n, line in enumerate(kept) if b"reported 20,010" in line)
    path.write_bytes(b"".join(kept[: first + 1]))
    resumed = True
    with rlm(script, **options) as r:
        result = r.resume("last")
    assert result.stop is Stop.MAX_TOKENS
    assert result.usage.total_tokens <= MAX_TOKENS
