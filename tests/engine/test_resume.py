"""Killed, resumed and replayed runs: nothing in the journal is paid for twice."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, Limits, RamifyError, RunSuspendedError, Scaffold, Stop, Store
from ramify.errors import ConfigError, LimitReached, ReplayDiverged
from ramify.testing import refused
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.event import AnyEvent, ReplyReceived, RequestAttemptFailed, RequestStarted
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
        again_sent = [text for text in result.trajectory.warnings if text.endswith("; sent again")]
        assert (len(again_sent), result.trajectory.errors) == (4, [])
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
    from ramify.testing.scripted_client import refused

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
        type(e)
        for e in store.events("last")
        if isinstance(e, RequestAttemptFailed | RequestStarted)
    ].count(RequestAttemptFailed) == 1


def test_replay_with_another_prompt_diverges(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm([code("FINAL(1)")], store=store) as r:
        r.completion("text", "?")
    other = SCAFFOLD.__class__(system="Another prompt. {{tools}} {{limits}} FINAL", direct_chars=0)
    with (
        rlm([], store=store, scaffold=other) as r,
        pytest.raises(ReplayDiverged, match=r"call 0, turn 0: the prompt has"),
    ):
        r.replay("last")


def test_a_resume_that_diverges_writes_nothing(tmp_path: Path) -> None:
    store = Store(tmp_path)
    cell = code("import time\nx = llm_query(str(time.time_ns()))")  # asks something else each time
    with rlm(by_role([cell, code("FINAL(x)")]), store=store) as r:
        r.completion("text", "?")
    path = store.path("last")
    lines = path.read_bytes().splitlines(keepends=True)
    second = [at for at, line in enumerate(lines) if line.startswith(b'{"type":"Replied"')][1]
    path.write_bytes(b"".join(lines[: second + 1]))
    before = path.read_bytes()
    with (
        rlm(by_role([code("FINAL('another answer')")] * 3), store=store) as r,
        pytest.raises(ReplayDiverged, match=r"call 0\.0, turn 0: the prompt has hash"),
    ):
        r.resume("last")
    assert path.read_bytes() == before


def test_nothing_is_written_after_a_resume_has_diverged(tmp_path: Path) -> None:
    """One of two calls in a batch is asked something else. The other was in flight when the run was
    killed, so it is sent again."""
    store, cell = Store(tmp_path), "import time\nllm_query_batched(['same', str(time.time_ns())])"
    changed = asyncio.Event()

    async def script(messages: tuple[Message, ...]) -> str:
        if messages[0].role == "system":
            return code(cell) if len(messages) == 2 else code("FINAL(1)")
        if messages[-1].content == "same":
            await asyncio.wait_for(changed.wait(), 60)
        changed.set()
        return "x"

    with rlm(script, store=store) as r:
        r.completion("text", "?")
    path = store.path("last")
    lines = path.read_bytes().splitlines(keepends=True)
    second = [at for at, line in enumerate(lines) if line.startswith(b'{"type":"Replied"')][1]
    assert b'"call":"0.1"' in lines[second]
    path.write_bytes(b"".join(lines[: second + 1]))
    before = path.read_bytes()
    with rlm(script, store=store) as r, pytest.raises(ReplayDiverged, match=r"call 0\.1, turn 0"):
        r.resume("last")
    # The first call was sent again before the second one differed.
    assert path.read_bytes().startswith(before)
    assert [type(event) for event in list(store.events("last"))[second + 1 :]] == [
        RequestAttemptFailed
    ]


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


class _CountingStore(Store):
    """Counts how often the events of a run are read."""

    num_readings = 0

    def events(self, run: str) -> Iterator[AnyEvent]:
        self.num_readings += 1
        return super().events(run)


def test_a_resume_reads_its_journal_once(tmp_path: Path) -> None:
    store, is_broken = _CountingStore(tmp_path), True

    def answer(messages: tuple[Message, ...]) -> Any:
        return refused(401, "no key") if is_broken else code("FINAL(1)")

    with RLM(client(answer), scaffold=SCAFFOLD, store=store) as r:
        with pytest.raises(RunSuspendedError):
            r.completion("text", "?")
        is_broken = False
        assert r.resume("last").answer == 1
    assert store.num_readings == 1


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
