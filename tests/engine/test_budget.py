"""Limits of a whole tree: exact under concurrency, enforced at the deadline, with a last word."""

from __future__ import annotations

import asyncio
import math
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify import RLM, Limits, Model, Stop
from ramify.clients.base import Price
from ramify.errors import ConfigError
from ramify.testing.scripted_client import ScriptedClient, dropped, no_usage
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.event import CallStarted, RunEnded, RunStarted
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, by_role, client, code, rlm

ASK_MANY = code("""
from concurrent.futures import ThreadPoolExecutor
def ask(i):
    try:
        return llm_query(f'p{i}')
    except SubcallError:
        return None
with ThreadPoolExecutor(50) as pool:
    found = list(pool.map(ask, range(50)))
if None not in found:
    FINAL(found)
else:
    print(len(found) - found.count(None), 'of', len(found))
""")


def last_word_or(line: str) -> Any:
    def script(messages: tuple[Message, ...]) -> str:
        if "Answer now with what you have" in messages[-1].content:
            return "FINAL(what I have)"
        return line if messages[0].role == "system" else "x" * 40

    return script


@settings(max_examples=15, deadline=None)
@given(max_calls=st.integers(1, 60), concurrency=st.integers(1, 64))
def test_max_calls_is_never_exceeded(max_calls: int, concurrency: int) -> None:
    model = client(last_word_or(ASK_MANY), latency_s=0.001)
    with rlm(
        model, limits={"max_calls": max_calls, "max_concurrency": concurrency}, sandbox="inprocess"
    ) as r:
        result = r.completion("text", "?")
    assert model.served.calls <= max_calls
    assert result.usage == model.served
    if max_calls >= 52:
        assert result.stop is Stop.FINAL
    else:
        assert (result.stop, result.response, model.served.calls) == (
            Stop.MAX_CALLS,
            "what I have",
            max_calls,
        )


@settings(max_examples=15, deadline=None)
@given(cents=st.floats(0.05, 3.0), latency_ms=st.integers(0, 2))
def test_max_cost_is_never_exceeded(cents: float, latency_ms: int) -> None:
    price = Price(input=10.0, output=30.0)
    model = client(last_word_or(ASK_MANY), price=price, latency_s=latency_ms / 1000)
    limits = Limits(max_cost=cents / 100, max_reply_tokens=100)
    with rlm(model, limits=limits, sandbox="inprocess") as r:
        result = r.completion("text", "?")
    assert price.of(model.served) <= cents / 100 * (1 + 1e-9)
    assert result.cost == pytest.approx(price.of(model.served))
    assert result.stop in (Stop.FINAL, Stop.MAX_COST)


def test_max_tokens_covers_child_calls() -> None:
    def script(messages: tuple[Message, ...]) -> str:
        if "Answer now" in messages[-1].content:
            return "FINAL(enough)"
        if "Question: root" in messages[1].content:
            return code(
                "try:\n  rlm_query_batched(['child'] * 6)\nexcept SubcallError as e: "
                "print(len(e.failures))"
            )
        return code("print('z' * 400)")

    model = client(script)
    with rlm(model, limits={"max_tokens": 20_000, "max_reply_tokens": 100}) as r:
        result = r.completion("text", "root")
    assert (result.stop, result.response) == (Stop.MAX_TOKENS, "enough")
    assert result.usage == model.served
    assert model.served.total_tokens <= 20_000


def test_max_turns_warns_the_model_and_allows_a_last_word() -> None:
    model = client(last_word_or(code("1")))
    with rlm(model, limits={"max_turns": 5}) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response, len(model.requests)) == (Stop.MAX_TURNS, "what I have", 6)
    assert model.requests[-2].messages[-1].content == (
        "=> 1\n[limit] 1 of 5 turns left: answer now with FINAL(…)\n[turn 4 of 5]"
    )
    assert "[limit]" not in model.requests[-1].messages[-2].content


def test_answer_content_is_used_without_a_last_word() -> None:
    model = client(lambda m: code("answer['content'] = 'partial'") if len(m) < 5 else "no idea")
    with rlm(model, limits={"max_turns": 1}) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response) == (Stop.MAX_TURNS, "partial")


@pytest.mark.parametrize(
    "cell", ["while True: pass", "import time; time.sleep(60)", "llm_query('slow')"]
)
def test_deadline_interrupts_cells_and_calls_in_flight(cell: str) -> None:
    async def script(messages: tuple[Message, ...]) -> str:
        if messages[-1].content == "slow":
            await asyncio.sleep(60)
        return "FINAL(in time)" if "Answer now" in messages[-1].content else code(f"x = 1\n{cell}")

    began, model = time.monotonic(), client(script)
    with rlm(model, limits={"max_seconds": 3.0}) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response) == (Stop.DEADLINE, "in time")
    assert time.monotonic() - began < 50
    asked = [request.messages[-1].content for request in model.requests]
    assert result.usage.unknown_calls == asked.count("slow")  # 1 if the session started in time
    assert asked.count("slow") <= ("llm_query" in cell)


def test_endless_cell_is_interrupted_and_keeps_variables() -> None:
    from ramify import SandboxSpec

    model = client([code("import time\nx = 5\nwhile True: time.sleep(0.01)"), code("FINAL(x)")])
    with rlm(model, sandbox=SandboxSpec(cell_s=5.0, grace_s=60.0)) as r:
        assert r.completion("text", "?").answer == 5
    assert "KeyboardInterrupt" in model.requests[1].messages[-1].content


def test_usage_is_exact_and_an_upper_bound_for_dropped_replies() -> None:
    async def main() -> None:
        root = [code("FINAL(llm_query_batched(['a', 'b', 'c']))")]
        lost = iter([True])

        def plain(prompt: str) -> Any:
            if prompt == "b" and next(lost, False):
                return dropped()
            return no_usage("silent") if prompt == "c" else f"re: {prompt}"

        async with ScriptedServer(by_role(root, plain)) as server:
            async with RLM(
                f"openai:test@{server.url}", scaffold=SCAFFOLD, limits=Limits(max_reply_tokens=64)
            ) as r:
                result = await r.acompletion("text", "?")
            assert result.answer == ["re: a", "re: b", "silent"]
            assert (result.usage.calls, result.usage.unknown_calls) == (5, 2)
            assert server.served.calls == 5
            assert result.usage.total_tokens > server.served.total_tokens
            assert result.trajectory.usage == result.usage
            assert "may" not in result.trajectory.errors[0]
            assert result.trajectory.errors[0].startswith("call 0.1, turn 0: ")

    asyncio.run(main())


def test_a_cost_limit_without_a_price_is_refused() -> None:
    with (
        rlm([], limits={"max_cost": 1.0}) as r,
        pytest.raises(ConfigError, match="scripted:test has no known price"),
    ):
        r.completion("text", "?")


def test_a_model_without_a_price_is_warned_about_once(caplog: pytest.LogCaptureFixture) -> None:
    def warnings() -> list[str]:
        return [each.getMessage() for each in caplog.records if each.event == "no_price"]  # type: ignore[attr-defined]

    async def ask(model: Any, **limits: Any) -> None:
        async with RLM(model, limits=Limits(**limits)) as r:
            await r.acompletion("text", "?")

    async def main() -> None:
        async with ScriptedServer(lambda messages: "yes") as server:
            name = f"openai:gpt-5-minni@{server.url}"
            await ask(ScriptedClient(["yes"]))
            await ask(f"vllm:served@{server.url}")
            await ask(Model(name, price="$1 in, $2 out per million tokens"))
            await ask(name, max_cost=math.inf)
            assert warnings() == []
            await ask(name)
            await ask(name)
            (text,) = warnings()
            assert text.startswith(f"{name} has no known price, so the default limit of $5 does")

    asyncio.run(main())


# --- events and cancellation
# -------------------------------------------------------------------------------------------


def test_events_reach_streams_and_callbacks() -> None:
    async def main() -> None:
        script = [code("FINAL(1)")]
        heard: list[Any] = []
        async with rlm(script) as r:
            seen = [event async for event in r.stream("text", "?")]
        async with rlm([code("FINAL(1)")]) as r:
            await r.acompletion("text", "?", on_event=heard.append)
        names = [
            "RunStarted",
            "CallStarted",
            "RequestStarted",
            "ReplyReceived",
            "CellRan",
            "CallEnded",
            "RunEnded",
        ]
        assert [type(event).__name__ for event in seen] == names
        assert [type(event).__name__ for event in heard] == names
        assert isinstance(seen[0], RunStarted)
        assert isinstance(seen[1], CallStarted)
        assert isinstance(seen[-1], RunEnded)

    asyncio.run(main())


def test_failing_listener_is_dropped_without_stopping_the_run() -> None:
    def bad(event: Any) -> None:
        raise ValueError("bad listener")

    with rlm([code("FINAL(1)")]) as r, pytest.warns(UserWarning, match="bad listener"):
        assert r.completion("text", "?", on_event=bad).answer == 1


def test_wrap_up_gives_best_answer_so_far() -> None:
    async def main() -> None:
        started = asyncio.Event()

        async def script(messages: tuple[Message, ...]) -> str:
            if "You are asked to finish" in messages[-1].content:
                return "FINAL(so far)"
            if messages[0].role != "system":
                started.set()
                await asyncio.sleep(60)
            return code("llm_query('slow')")

        async with rlm(client(script)) as r:
            running = r.start("text", "?")
            await started.wait()
            running.wrap_up()
            result = await running.result()
        assert (result.stop, result.response) == (Stop.CANCELLED, "so far")

    asyncio.run(main())


def test_cancel_ends_all_calls_of_the_tree() -> None:
    async def main() -> None:
        model = ScriptedClient(by_role([code("llm_query_batched(['a'] * 20)")]), latency_s=30)
        model_root = client(by_role([code("llm_query_batched(['a'] * 20)")]))
        events: list[Any] = []
        async with RLM(model_root, sub_model=model, scaffold=SCAFFOLD) as r:
            running = r.start("text", "?", on_event=events.append)
            while model.in_flight < 20:
                await asyncio.sleep(0.01)
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.result()
        assert model.in_flight == 0
        assert isinstance(events[-1], RunEnded)
        assert events[-1].stop is Stop.CANCELLED
        assert running.recorder.trajectory.usage.unknown_calls == 20

    asyncio.run(main())
