"""Killed, resumed and replayed runs: nothing in the journal is paid for twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify import RLM, Limits, RamifyError, Sampling, Scaffold, Stop, Store, Suspended
from ramify.clients.scripted import refused
from ramify.clients.scripted_server import ScriptedServer
from ramify.errors import ConfigError, LimitReached, ReplayDiverged
from ramify.types.event import AttemptFailed, ReplyReceived, RequestStarted
from ramify.types.message import Message
from tests.engine.helpers import SCAFFOLD, by_role, client, code, rlm

RUN = """
import sys
sys.path.insert(0, {root!r})
from ramify import RLM, Limits, Store
from tests.engine.helpers import SCAFFOLD
with RLM({model!r}, scaffold=SCAFFOLD, store=Store({store!r}), limits=Limits(max_concurrency=4)) as r:
    r.completion("text", "?")
"""
ROOT = code(
    "import random\nfirst = llm_query_batched([f'a{i}' for i in range(8)])\nlucky = "
    "random.random()",
    "second = llm_query_batched([f'b{i}' for i in range(12)])",
)


def script(block: asyncio.Event) -> Any:
    """Return a model whose b calls, except b0 to b3, hang until ``block`` is set. With four calls
    at a time, b8 to b11 are not yet sent."""

    async def answer(messages: tuple[Message, ...]) -> str:
        last = messages[-1].content
        if messages[0].role == "system":
            return ROOT if len(messages) == 2 else code("FINAL([first, second, lucky])")
        if last[0] == "b" and int(last[1]) >= 4:
            await block.wait()
        return f"re: {last}"

    return answer


def test_killed_run_resumes_without_paying_twice(tmp_path: Path) -> None:
    asyncio.run(_kill_and_resume(tmp_path))


async def _kill_and_resume(tmp_path: Path) -> None:
    block = asyncio.Event()
    async with ScriptedServer(script(block)) as server:
        model = f"openai:test@{server.url}"
        source = RUN.format(root=str(Path.cwd()), model=model, store=str(tmp_path))
        env = {**os.environ, "OPENAI_API_KEY": "unused-in-this-test"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", source, env=env, stderr=subprocess.PIPE
        )
        store = Store(tmp_path)
        async with asyncio.timeout(60):
            while not (store.runs() and _replied(store) >= 13):
                await asyncio.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        await process.communicate()
        asked_before = Counter(_last_message(request) for request in server.requests)
        assert all(count == 1 for count in asked_before.values())
        run = store.runs()[0]
        assert (run.stop, run.alive) == (None, False)

        block.set()
        async with RLM(model, scaffold=SCAFFOLD, store=store) as r:
            result = await r.aresume("last")
            again = await r.aresume("last")
            replayed = await r.areplay("last")
        first, second, _ = result.answer
        assert (first, second) == (
            [f"re: a{i}" for i in range(8)],
            [f"re: b{i}" for i in range(12)],
        )
        assert again.answer == result.answer
        assert replayed.answer == result.answer, "the session draws the same random numbers again"
        asked = Counter(_last_message(request) for request in server.requests)
        in_flight = [f"b{i}" for i in range(4, 8)]
        assert {text for text, count in asked.items() if count > 1} == set(in_flight)
        assert result.usage.unknown_calls == 4
        assert result.usage.calls == 1 + 8 + 12 + 1 + 4
        assert result.trajectory.usage == result.usage == store.load("last").usage == replayed.usage
        kinds = Counter(event.__struct_config__.tag for event in store.events("last"))
        assert (kinds["Requested"], kinds["Replied"], kinds["Attempted"], kinds["RunStarted"]) == (
            22,
            22,
            4,
            1,
        )


def _replied(store: Store) -> int:
    return sum(isinstance(event, ReplyReceived) for event in store.events("last"))


def _last_message(request: Any) -> str:
    return str(request.json["messages"][-1]["content"])


def test_replay_repeats_failures_tools_and_last_word_without_a_model(tmp_path: Path) -> None:
    from ramify.clients.scripted import refused

    num_calls = iter(range(100))

    def tick() -> int:
        return next(num_calls)

    lines = [
        code("try:\n  llm_query('bad')\nexcept SubcallError as e:\n  why = str(e)\nt = tick()"),
        code("print(why, t)"),
        "FINAL(cut off)",
    ]
    store = Store(tmp_path)
    live = client(by_role(lines, lambda p: refused(400, "no")))
    with rlm(live, store=store, tools=[tick], limits={"max_turns": 2}) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.response) == (Stop.MAX_TURNS, "cut off")
    silent = client([])
    with rlm(silent, store=store, tools=[tick], limits={"max_turns": 2}) as r:
        again = r.replay("last")
    assert (again.stop, again.response, again.usage) == (result.stop, result.response, result.usage)
    assert silent.requests == []
    assert next(num_calls) == 1, "the tool was not called again"
    assert [
        type(e) for e in store.events("last") if isinstance(e, AttemptFailed | RequestStarted)
    ].count(AttemptFailed) == 1


def test_replay_with_another_prompt_diverges(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm([code("FINAL(1)")], store=store) as r:
        r.completion("text", "?")
    other = SCAFFOLD.__class__(system="Another prompt.", direct_chars=0)
    with (
        rlm([], store=store, scaffold=other) as r,
        pytest.raises(ReplayDiverged, match=r"call 0, turn 0: the prompt has"),
    ):
        r.replay("last")


def test_run_without_store_writes_nothing_and_cannot_be_resumed(tmp_path: Path) -> None:
    with rlm([code("FINAL(1)")]) as r:
        assert r.completion("text", "?").trajectory.root.answer == 1
        with pytest.raises(ConfigError, match="resume needs the store"):
            r.resume("last")
    assert list(tmp_path.iterdir()) == []


def test_contexts_are_stored_once_and_long_outputs_in_full(tmp_path: Path) -> None:
    store = Store(tmp_path)
    text = "line\n" * 50_000
    with rlm([code("print(context)"), code("FINAL(1)")] * 2, store=store) as r:
        for _ in range(2):
            result = r.completion(text, "?")
    cell = result.trajectory.root.turns[0].cells[0]
    assert cell.stdout_digest is not None
    assert store.blobs.get(cell.stdout_digest).decode() == text + "\n"
    assert store.size() < 3 * len(text)
    assert store.load("last") == result.trajectory


def test_limit_reached_is_a_ramify_error_and_default_depth_is_one() -> None:
    assert issubclass(LimitReached, RamifyError)
    assert Limits().max_depth == 1


def test_cancelled_run_resumes_where_it_stopped(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        slow, done = asyncio.Event(), asyncio.Event()

        async def answer(messages: tuple[Message, ...]) -> str:
            if messages[0].role == "system":
                return code("FINAL(llm_query_batched(['fast', 'slow']))")
            if messages[-1].content == "slow" and not done.is_set():
                slow.set()
                await done.wait()
            return f"re: {messages[-1].content}"

        model = client(answer)
        async with rlm(model, store=store) as r:
            running = r.start("text", "?")
            await slow.wait()
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running.result()
            done.set()
            result = await r.aresume("last")
        assert (result.answer, result.stop) == (["re: fast", "re: slow"], Stop.FINAL)
        assert [request.messages[-1].content for request in model.requests[1:]] == [
            "fast",
            "slow",
            "slow",
        ]
        assert (result.usage.calls, result.usage.unknown_calls) == (4, 1)
        assert store.load("last").usage == result.usage
        assert store.load("last").stop is Stop.FINAL

    asyncio.run(main())


def test_replay_skips_cells_that_a_wrapped_up_run_skipped(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        asked = asyncio.Event()

        async def answer(messages: tuple[Message, ...]) -> str:
            if "You are asked to finish" in messages[-1].content:
                return "FINAL(so far)"
            if messages[0].role != "system":
                asked.set()
                await asyncio.sleep(60)
            return code(
                "try:\n  llm_query('slow')\nexcept BaseException: pass",
                "import time; time.sleep(60)",
            )

        async with rlm(client(answer), store=store) as r:
            running = r.start("text", "?")
            await asked.wait()
            running.wrap_up()
            result = await running.result()
            again = await r.areplay("last")
        assert (
            (result.stop, result.response)
            == (again.stop, again.response)
            == (Stop.CANCELLED, "so far")
        )
        assert len(again.trajectory.root.turns[0].cells) == 1

    asyncio.run(main())


def test_replay_skips_the_same_cells_without_a_last_word(tmp_path: Path) -> None:
    async def main() -> None:
        store = Store(tmp_path)
        asked = asyncio.Event()

        async def answer(messages: tuple[Message, ...]) -> str:
            if messages[0].role != "system":
                asked.set()
                await asyncio.sleep(60)
            return code(
                "answer['content'] = 7\ntry:\n  llm_query('slow')\nexcept BaseException: pass",
                "llm_query('b')",
            )

        async with rlm(
            client(answer), store=store, scaffold=Scaffold(direct_chars=0, last_word=False)
        ) as r:
            running = r.start("text", "?")
            await asked.wait()
            running.wrap_up()
            result = await running.result()
            again = await r.areplay("last")
        assert (result.stop, result.answer) == (again.stop, again.answer) == (Stop.CANCELLED, 7)
        assert [len(turn.cells) for turn in again.trajectory.root.turns] == [1]
        assert [call.id for call in again.trajectory.calls] == ["0", "0.0"]

    asyncio.run(main())


# --- higher limits, forks and conversations
# ------------------------------------------------------------------------------------------------


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
                with pytest.raises(Suspended) as caught:
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
    with program as r, pytest.raises(Suspended):
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
        "model=scripted:test, not scripted:other; scaffold.max_idle=2, not 7; "
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
            ({"prompt": "a", "code": "b"}, "give one of the two"),
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
                ConfigError, match=r"may take .* tokens, and the run may take 9,000"
            ):
                await r.estimate_fork(
                    origin.run_id, 4, prompt="more " * 200, limits=Limits(max_tokens=9000)
                )
        assert (asked.max_calls, asked.window, ran.input_tokens) == (40, model.window, None)
        assert asked.input_tokens

    asyncio.run(main())
