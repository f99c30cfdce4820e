"""Runs that are continued with higher limits, forked at a turn, or asked another question."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import Limits, RunSuspendedError, Sampling, Stop, Store
from ramify.errors import ConfigError, ReplayDiverged
from ramify.testing.scripted_client import refused
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, client, code, rlm


def counting(messages: tuple[Message, ...]) -> str:
    """A root that adds one call per turn and answers after four of them."""
    text = messages[-1].content
    if messages[0].role != "system":
        return f"re: {text}"
    if "The limit is reached" in text:
        return "FINAL(too early)"
    turn = sum(message.role == "assistant" for message in messages)
    return code(
        "FINAL(found)"
        if turn == 4
        else f"found = [*globals().get('found', []), llm_query('a{turn}')]"
    )


ALL = ["re: a0", "re: a1", "re: a2", "re: a3"]


@pytest.mark.parametrize(
    ("limit", "low", "high", "stop"),
    [
        ("max_turns", 3, 9, Stop.MAX_TURNS),
        ("max_turns", 4, 9, Stop.MAX_TURNS),
        ("max_calls", 6, 20, Stop.MAX_CALLS),
    ],
)
def test_run_ended_by_a_limit_continues_with_a_higher_one(
    tmp_path: Path, limit: str, low: int, high: int, stop: Stop
) -> None:
    store, model = Store(tmp_path), client(counting)
    with rlm(model, store=store, limits={limit: low}) as r:
        first = r.completion("text", "?")
        before = store.path("last").read_bytes()
        assert (first.stop, first.answer) == (stop, "too early")
        assert r.resume("last").answer == "too early"
        with pytest.raises(ConfigError, match=f"to continue it, give more than {limit}={low}"):
            r.restart("last")
        assert store.path("last").read_bytes() == before
        result = r.resume("last", limits=Limits(**{limit: high}))
    assert (result.stop, result.answer) == (Stop.FINAL, ALL)
    plain = Counter(r.messages[-1].content for r in model.requests if r.messages[0].role == "user")
    assert set(plain.values()) == {1}
    loaded = store.load("last")
    assert (loaded.answer, loaded.usage) == (ALL, result.usage)
    assert result.usage.calls == len(model.requests), "the last word is charged too"
    with rlm(client([]), store=store, limits={limit: high}) as r:
        assert r.replay("last").answer == r.resume("last").answer == ALL


def test_a_limit_may_be_raised_twice(tmp_path: Path) -> None:
    store, model = Store(tmp_path), client(counting)
    with rlm(model, store=store, limits={"max_turns": 2}) as r:
        r.completion("text", "?")
        for limit in (3, 4):
            assert r.resume("last", limits=Limits(max_turns=limit)).answer == "too early"
        assert r.resume("last", limits=Limits(max_turns=5)).answer == ALL
        assert r.replay("last").answer == ALL
    assert [turn.cells[0].error for turn in store.load("last").root.turns] == [None] * 5


def test_run_can_be_forked_at_a_turn_with_edited_code(tmp_path: Path) -> None:
    store, model = Store(tmp_path), client(counting)
    with rlm(model, store=store) as r:
        origin = r.completion("text", "?")
        before = store.path("last").read_bytes()
        fork = r.fork(origin.run_id, 2, code="found = [*found, 'mine']")
        again = r.fork(origin.run_id, 4)
        with pytest.raises(ConfigError, match="the root has 5 turns: turn 6 cannot be forked"):
            r.fork(origin.run_id, 5)
        assert r.replay(fork.run_id).answer == fork.answer
    assert fork.answer == ["re: a0", "re: a1", "mine", "re: a3"]
    assert (again.answer, again.usage.calls) == (ALL, 1)
    assert store.path(origin.run_id).read_bytes() == before
    assert fork.trajectory.metadata["forked"] == {
        "run": origin.run_id,
        "turn": 2,
        "edited": "code",
    }
    assert fork.usage.calls == 3, "two turns of the root and one call are new"
    assert len(store.runs()) == 3


def test_suspended_conversation_resumes_its_last_question(tmp_path: Path) -> None:
    async def main() -> None:
        store, is_valid = Store(tmp_path), False

        def script(messages: tuple[Message, ...]) -> Any:
            if "The next question" not in messages[-1].content:
                return (
                    code("seen = [llm_query('a')]\nFINAL(1)")
                    if messages[0].role == "system"
                    else "re"
                )
            return code("FINAL(seen)") if is_valid else refused(401, "no")

        model = client(script)
        async with rlm(model, store=store) as r:
            async with r.conversation("text") as conversation:
                assert (await conversation.aask("first?")).answer == 1
                with pytest.raises(RunSuspendedError) as caught:
                    await conversation.aask("second?")
            before = len(model.requests)
            is_valid = True
            result = await r.aresume(caught.value.run_id)
        assert (result.answer, len(model.requests) - before) == (["re"], 1)
        assert [call.id for call in store.load("last").calls] == ["0", "0.0", "1"]
        assert [call.stop for call in store.load("last").calls] == [Stop.FINAL] * 3

    asyncio.run(main())


def test_resume_names_every_changed_setting_before_writing(tmp_path: Path) -> None:
    def tool() -> int:
        return 1

    def other() -> int:
        return 2

    store = Store(tmp_path)
    program = rlm([code("x = 1"), refused(401, "no")], store=store, tools={"tool": tool})
    with program as r, pytest.raises(RunSuspendedError):
        r.completion("text", "?")
    before = store.path("last").read_bytes()
    scaffold = msgspec.structs.replace(SCAFFOLD, max_idle=7)
    with (
        rlm(
            client([], name="scripted:other"),
            store=store,
            tools={"tool": other},
            scaffold=scaffold,
            limits={"max_depth": 3},
            sampling=Sampling(temperature=0.5),
        ) as r,
        pytest.raises(ReplayDiverged) as caught,
    ):
        r.resume("last")
    assert str(caught.value).partition(" was started with ")[2] == (
        "model=scripted:test, not scripted:other; scaffold.max_idle=3, not 7; "
        "sampling.temperature=None, not 0.5; tool tool (changed now); limits.max_depth=1, not 3: "
        "resume it with the recorded settings, or ask as a new run"
    )
    assert store.path("last").read_bytes() == before


def test_fork_can_edit_a_prompt_and_records_it(tmp_path: Path) -> None:
    store, model = Store(tmp_path), client(counting)
    with rlm(model, store=store) as r:
        origin = r.completion("text", "?")
        fork = r.fork(origin.run_id, 2, prompt="continue with care")
        assert [request.messages[-1].content for request in model.requests].count(
            "continue with care"
        ) == 1
        assert fork.trajectory.metadata["forked"] == {
            "run": origin.run_id,
            "turn": 2,
            "edited": "prompt",
            "prompts": {"0/2": ["continue with care"]},
        }
        assert r.replay(fork.run_id).answer == fork.answer == origin.answer
        again = r.fork(fork.run_id, 3)
        assert again.trajectory.root.turns[2].prompt[-1].content == "continue with care"
        assert again.usage.calls == 3
        earlier = r.fork(fork.run_id, 1)
        assert "prompts" not in earlier.trajectory.metadata["forked"]
        num, size = len(model.requests), len(store.runs())
        for edit, words in (
            ({"prompt": "x" * 1_000_000}, "the edited prompt has about .* tokens, and the window"),
            ({"prompt": "  "}, "an edited message of the prompt is empty"),
            ({"prompt": ["a", "b"]}, "turn 3 of the root adds 1 messages .* 2 edited ones"),
            ({"prompt": "a", "code": "b"}, "not both: give one"),
            ({"call": "0.9"}, "the run has no call 0.9"),
            ({"call": "0.0", "code": "1"}, "call 0.0 is a plain call, which runs no code"),
        ):
            with pytest.raises(ConfigError, match=words):
                r.fork(origin.run_id, 2 if "call" not in edit else 0, **edit)
        assert (len(model.requests), len(store.runs())) == (num, size), "nothing is sent or stored"


def test_fork_of_a_subcall_repeats_its_concurrent_siblings(tmp_path: Path) -> None:
    begun, is_open = 0, asyncio.Event()

    async def script(messages: tuple[Message, ...]) -> str:
        nonlocal begun
        if messages[0].role == "system":
            if len(messages) > 2:
                return code("FINAL(both)")
            return code(
                "first = llm_query_batched(['a', 'b', 'c'])\n"
                "both = [*first, llm_query(' '.join(first))]"
            )
        begun += 1
        if begun == 3:
            is_open.set()
        await is_open.wait()
        return f"re: {messages[-1].content}"

    store, model = Store(tmp_path), client(script)
    with rlm(model, store=store) as r:
        origin = r.completion("text", "?")
        fork = r.fork(origin.run_id, 0, call="0.1", prompt="B")
        assert r.replay(fork.run_id).answer == fork.answer
    assert fork.answer == ["re: a", "re: B", "re: c", "re: re: a re: B re: c"]
    assert fork.usage.calls == 3, "the edited call, the one that needs it, and the root's next turn"
    assert fork.trajectory.metadata["forked"] == {
        "run": origin.run_id,
        "turn": 0,
        "call": "0.1",
        "edited": "prompt",
        "prompts": {"0.1/0": ["B"]},
    }


def test_estimate_fork_reports_calls_and_tokens(tmp_path: Path) -> None:
    async def main() -> None:
        store, model = Store(tmp_path), client(counting)
        async with rlm(model, store=store, limits={"max_calls": 40}) as r:
            origin = await r.acompletion("text", "?")
            asked = await r.estimate_fork(origin.run_id, 4)
            ran = await r.estimate_fork(origin.run_id, 4, code="1")
            with pytest.raises(
                ConfigError, match=r"could take .* tokens, too many for the run's limit of 9,000"
            ):
                await r.estimate_fork(
                    origin.run_id, 4, prompt="more " * 200, limits=Limits(max_tokens=9000)
                )
        assert (asked.max_calls, asked.window, ran.input_tokens) == (40, model.window, None)
        assert asked.input_tokens

    asyncio.run(main())
