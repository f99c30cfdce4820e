"""Conversations that a served policy holds, recorded as runs of a store."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from ramify import RLM, Limits
from ramify.clients.base import Request
from ramify.errors import ConfigError
from ramify.inference.local.local_client import LocalClient
from ramify.serve.policy_server import PolicyServer
from ramify.serve.recursive_run_server import RecursiveRunServer
from ramify.serve.redaction import RedactionRules
from ramify.serve.traffic_recorder import (
    PolicyFactsForRecorder,
    ServedTrafficRecorder,
    TrafficRetention,
)
from ramify.store.folder_store import Store
from ramify.types.message import Message, Reply
from ramify.types.trajectory import CallForkOrigin, Stop, Trajectory
from tests.inference.helpers import policy
from tests.serve.serving import SANDBOX

Body = dict[str, Any]
POLICY = policy(max_position_embeddings=2048)


class LoggingClient(LocalClient):
    """An engine that remembers what it was asked and what it replied."""

    def __init__(self) -> None:
        super().__init__(POLICY, slots=8)
        self.log: list[tuple[Request, Reply]] = []

    async def complete(self, request: Request) -> Reply:
        reply = await super().complete(request)
        self.log.append((request, reply))
        return reply


class Traffic:
    """A recording server, and a client of it."""

    def __init__(
        self, server: PolicyServer, recorder: ServedTrafficRecorder, engine: LoggingClient
    ) -> None:
        self.server = server
        self.recorder = recorder
        self.engine = engine
        self.headers: list[dict[str, str]] = []

    async def post(self, path: str, body: Body, **headers: str) -> tuple[int, Body]:
        given = {"Authorization": f"Bearer {self.server.key}"} | headers
        async with (
            aiohttp.ClientSession(headers=given) as http,
            http.post(f"{self.server.url}/{path}", json=body) as answer,
        ):
            self.headers.append(dict(answer.headers))
            if answer.content_type == "text/event-stream":
                return answer.status, {"events": (await answer.text()).split("\n\n")}
            return answer.status, await answer.json()

    async def chat(self, *texts: str, **fields: Any) -> Body:
        """A completion after ``texts``, which are by user and assistant in turn."""
        messages = [
            {"role": "assistant" if index % 2 else "user", "content": text}
            for index, text in enumerate(texts)
        ]
        given = {"messages": messages, "max_tokens": 6, "temperature": 1.0, **fields}
        status, body = await self.post("chat/completions", given)
        assert status == 200, body
        return body

    def runs(self) -> list[Trajectory]:
        store = Store(self.recorder.store.root)
        return [store.load(id) for id in reversed(store.ids())]


@asynccontextmanager
async def serving(folder: Path, *patterns: str, **limits: Any) -> AsyncIterator[Traffic]:
    engine = LoggingClient()
    recorder = ServedTrafficRecorder(
        folder,
        PolicyFactsForRecorder.from_policy(POLICY),
        RedactionRules(patterns),
        TrafficRetention(**limits),
    )
    try:
        async with PolicyServer(engine, name="mine", recorder=recorder) as server:
            yield Traffic(server, recorder, engine)
    finally:
        await recorder.close()
        await engine.close()


def content(body: Body) -> str:
    return str(body["choices"][0]["message"]["content"])


def ids_of(run: Trajectory, call: str = "0") -> list[int]:
    path = run.path(run.call(call))
    assert path is not None
    return list(path.ids)


def test_a_conversation_is_one_run_with_the_engines_ids(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            first = content(await traffic.chat("one"))
            second = content(await traffic.chat("one", first, "two"))
            await traffic.chat("one", first, "two", second, "three")
            last = traffic.engine.log[-1][1]
        [run] = traffic.runs()
        [call] = run.calls
        assert len(call.turns) == 3
        assert run.stop is not None
        assert ids_of(run) == [*(last.prompt_ids or ()), *(last.token_ids or ())]
        for turn, (_, reply) in zip(call.turns, traffic.engine.log, strict=True):
            assert turn.reply.token_ids == reply.token_ids
            assert turn.reply.logprobs == reply.logprobs
            assert turn.reply.versions == reply.versions
        assert [turn.prompt for turn in call.turns] == [
            (Message("user", "one"),), (Message("user", "two"),), (Message("user", "three"),)
        ]  # fmt: skip
        assert run.metrics == {"calls.new": 1, "turns.continued": 2}
        assert run.task == "traffic"
        assert [mark.values for mark in run.marks] == [{"temperature": 1.0}] * 3

    asyncio.run(test())


def test_a_second_continuation_is_a_fork_in_the_same_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            first = content(await traffic.chat("one"))
            await traffic.chat("one", first, "two")
            await traffic.chat("one", first, "two again")
            await traffic.chat("something else")
        tree, other = sorted(traffic.runs(), key=lambda run: -len(run.calls))
        assert [len(call.turns) for call in tree.calls] == [2, 1]
        assert tree.calls[1].fork == CallForkOrigin("0", 0)
        assert tree.calls[1].turns[0].prompt == (Message("user", "two again"),)
        assert [len(call.turns) for call in other.calls] == [1]
        _, reply = traffic.engine.log[2]
        assert ids_of(tree, "1") == [*(reply.prompt_ids or ()), *(reply.token_ids or ())]

    asyncio.run(test())


@pytest.mark.parametrize("stream", [False, True])
def test_several_replies_to_one_request_are_calls_of_one_run(tmp_path: Path, stream: bool) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            body = await traffic.chat("one", n=3, stream=stream)
            if stream:
                body = json.loads(body["events"][0].removeprefix("data: "))
            said = {"id": body["id"], "index": 2, "score": 1}
            assert (await traffic.post("feedback", said))[0] == 200
        [run] = traffic.runs()
        assert [call.cause for call in run.calls] == ["new", "sample", "sample"]
        assert {call.turns[0].reply.prompt_ids for call in run.calls} == {
            run.root.turns[0].reply.prompt_ids
        }
        scored = {mark.call for mark in run.marks if mark.by == "feedback"}
        assert len(scored) == 1

    asyncio.run(test())


def test_all_apis_are_recorded(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            _, body = await traffic.post("responses", {"input": "one", "max_output_tokens": 6})
            _, more = await traffic.post(
                "responses",
                {"input": "two", "max_output_tokens": 6, "previous_response_id": body["id"]},
            )
            asked = [{"role": "user", "content": "three"}]
            _, said = await traffic.post("messages", {"messages": asked, "max_tokens": 6})
            for each in (body, more, said):
                assert (await traffic.post("feedback", {"id": each["id"], "score": 1}))[0] == 200
        assert sorted(len(run.root.turns) for run in traffic.runs()) == [1, 2]

    asyncio.run(test())


def test_streams_are_recorded_and_a_client_can_decline(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            await traffic.chat("one", stream=True)
            assert traffic.headers[-1]["Ramify-Recorded"] == "true"
            await traffic.chat("two", store=False)
            assert "Ramify-Recorded" not in traffic.headers[-1]
            private = {"store": False, "input": "three", "max_output_tokens": 6}
            assert (await traffic.post("responses", private))[0] == 200
            assert "Ramify-Recorded" not in traffic.headers[-1]
            asked = [{"role": "user", "content": "four"}]
            private = {"store": False, "messages": asked, "max_tokens": 6}
            assert (await traffic.post("messages", private))[0] == 200
            assert "Ramify-Recorded" not in traffic.headers[-1]
        assert [run.question for run in traffic.runs()] == ["one"]

    asyncio.run(test())


def test_concurrent_users_have_the_engines_ids(tmp_path: Path) -> None:
    async def user(traffic: Traffic, number: int) -> None:
        texts = [f"user {number}"]
        for turn in range(3):
            texts += [content(await traffic.chat(*texts)), f"more {turn}"]

    async def test() -> None:
        async with serving(tmp_path) as traffic:
            await asyncio.gather(*(user(traffic, number) for number in range(12)))
            logged = {(reply.prompt_ids, reply.token_ids) for _, reply in traffic.engine.log}
        runs = traffic.runs()
        assert len(runs) == 12
        stored = set()
        for run in runs:
            for index, turn in enumerate(run.root.turns):
                path = run.path(run.root, index)
                assert path is not None
                assert turn.reply.token_ids is not None
                end = len(path.ids) - len(turn.reply.token_ids)
                stored.add((tuple(path.ids[:end]), turn.reply.token_ids))
        assert stored == logged

    asyncio.run(test())


def test_what_is_redacted_is_in_no_file_and_other_ids_are_exact(tmp_path: Path) -> None:
    mail, word = "ann.smith@example.org", "grünwald-77"

    async def test() -> None:
        async with serving(tmp_path, "grünwald-\\d+") as traffic:
            first = content(await traffic.chat(f"I am {mail}, and {word}é. Count to 3", seed=1))
            await traffic.chat(f"I am {mail}, and {word}é. Count to 3", first, "go on")
            replies = [reply for _, reply in traffic.engine.log]
        for file in tmp_path.rglob("*"):
            if file.is_file():
                data = file.read_bytes()
                assert mail.encode() not in data, file
                assert "grünwald".encode() not in data, file
        [run] = traffic.runs()
        assert run.root.turns[0].prompt[0].content == (
            "I am «redacted e-mail», and «redacted»é. Count to 3"
        )
        ids = ids_of(run)
        true = [*(replies[1].prompt_ids or ()), *(replies[1].token_ids or ())]
        decode = PolicyFactsForRecorder.from_policy(POLICY).decode
        assert len(ids) == len(true)
        changed = [
            index for index, (one, two) in enumerate(zip(ids, true, strict=True)) if one != two
        ]
        assert mail not in decode(ids)
        assert "77" not in decode(ids)
        spelled = decode([true[index] for index in changed])
        assert len(changed) <= len(mail) + len(word.encode()) + 2, spelled

    asyncio.run(test())


def test_a_redacted_sampled_token_is_marked_and_tells_nothing(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, "[a-zA-Z]") as traffic:
            await traffic.chat("1 2 3", max_tokens=24, top_k=5, seed=1)
            _, reply = traffic.engine.log[0]
        [run] = traffic.runs()
        stored = run.root.turns[0].reply
        [mark] = run.marks
        flags = mark.tokens["redacted"]
        assert len(flags) == len(reply.token_ids or ())
        assert sum(flags) > 0
        for index, flag in enumerate(flags):
            if flag:
                assert (stored.logprobs or ())[index] == 0
                assert (stored.kept or ())[index] == ()
            else:
                assert (stored.token_ids or ())[index] == (reply.token_ids or ())[index]
                assert (stored.logprobs or ())[index] == (reply.logprobs or ())[index]

    asyncio.run(test())


def test_feedback_scores_the_turn_it_is_about(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            first = await traffic.chat("one")
            second = await traffic.chat("one", content(first), "two")
            note = "ask ann@example.org"
            said = {"id": second["id"], "score": True, "note": note}
            assert (await traffic.post("feedback", said))[0] == 200
            assert (await traffic.post("feedback", {"id": first["id"], "score": -0.5}))[0] == 200
            status, body = await traffic.post("feedback", {"id": "chatcmpl-no", "score": 1})
            assert status == 404
            assert body["error"]["code"] == "unknown_reply"
            for wrong in (
                {"id": "x"},
                {"id": "x", "score": "good"},
                {"id": "x", "score": 1, "u": 2},
            ):
                assert (await traffic.post("feedback", wrong))[0] == 400
            assert (await traffic.post("feedback", said, Authorization="Bearer no"))[0] == 401
        [run] = traffic.runs()
        marks = [mark for mark in run.marks if mark.by == "feedback"]
        assert [(mark.turn, mark.values, mark.text) for mark in marks] == [
            (1, {"feedback": 1.0}, "ask «redacted e-mail»"), (0, {"feedback": -0.5}, "")
        ]  # fmt: skip

    asyncio.run(test())


def test_feedback_without_a_recording_is_refused() -> None:
    async def test() -> None:
        engine = LoggingClient()
        async with PolicyServer(engine, name="mine") as server:
            traffic = Traffic(server, None, engine)  # type: ignore[arg-type]
            status, body = await traffic.post("feedback", {"id": "x", "score": 1})
        await engine.close()
        assert status == 404
        assert "--record" in body["error"]["message"]

    asyncio.run(test())


def test_feedback_reaches_a_conversation_of_an_earlier_start(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path) as traffic:
            body = await traffic.chat("one")
        async with serving(tmp_path) as traffic:
            assert (await traffic.post("feedback", {"id": body["id"], "score": 1}))[0] == 200
        assert traffic.runs()[0].marks[-1].values == {"feedback": 1.0}

    asyncio.run(test())


def test_the_oldest_conversations_make_room(tmp_path: Path) -> None:
    async def test() -> None:
        async with serving(tmp_path, max_bytes=250_000) as traffic:
            bodies = [await traffic.chat(f"{number} " * 100) for number in range(60)]
        size = traffic.recorder.store.size()
        async with serving(tmp_path) as traffic:
            old = await traffic.post("feedback", {"id": bodies[0]["id"], "score": 1})
            new = await traffic.post("feedback", {"id": bodies[-1]["id"], "score": 1})
        assert size < 300_000
        assert 1 < len(traffic.runs()) < 60
        assert old[0] == 404
        assert new[0] == 200
        assert traffic.recorder.num_lost == 0

    asyncio.run(test())


def test_other_stores_are_refused(tmp_path: Path) -> None:
    store = Store(tmp_path / "used")
    with store.create("20260101-000000-a"):
        pass
    mine = PolicyFactsForRecorder.from_policy(POLICY)
    with pytest.raises(ConfigError, match="not recorded traffic"):
        ServedTrafficRecorder(tmp_path / "used", mine)
    with pytest.raises(ConfigError, match="cannot create"):
        ServedTrafficRecorder("/proc/nowhere", mine)
    asyncio.run(ServedTrafficRecorder(tmp_path / "mine", mine).close())
    other = PolicyFactsForRecorder.from_policy(policy(max_position_embeddings=2048, hidden_size=16))
    with pytest.raises(ConfigError, match="another base model"):
        ServedTrafficRecorder(tmp_path / "mine", other)


@pytest.mark.parametrize("pattern", ["(", "a*"])
def test_a_wrong_pattern_is_refused(pattern: str) -> None:
    with pytest.raises(ConfigError, match="--redact"):
        RedactionRules([pattern])


REDACTED: Sequence[tuple[str, str]] = [
    ("a.b+c@mail.example.co.uk!", "«redacted e-mail»!"),
    ("call +41 44 123 45 67, or (020) 7946 0958", "call «redacted phone», or «redacted phone»"),
    ("4111-1111-1111-1111 is a card", "«redacted card» is a card"),
    ("4111-1111-1111-1112 is none", "4111-1111-1111-1112 is none"),
    ("key sk-abcdefgh12345678", "key sk-«redacted key»"),
    ("on 2026-11-27 at 10:30, 1,234,567,890 of 3.14159265358979", ""),
    ("12345678 + 0.0044123456 = 12345678.0044123456", ""),
]


@pytest.mark.parametrize(("text", "redacted"), REDACTED)
def test_default_patterns(text: str, redacted: str) -> None:
    assert RedactionRules().redact_text(text) == (redacted or text)
    assert RedactionRules(defaults=False).redact_text(text) == text


@pytest.mark.parametrize("text", ["a@" * 50_000, "0" * 100_000, "+1 " * 30_000, "a." * 50_000])
def test_hostile_text_does_not_keep_the_patterns_busy(text: str) -> None:
    assert RedactionRules().redact_text(text) == text  # a backtracking pattern would take hours


SERVER = """
import asyncio, sys
from pathlib import Path
from ramify.inference.local.local_client import LocalClient
from ramify.serve.policy_server import PolicyServer
from ramify.serve.traffic_recorder import PolicyFactsForRecorder, ServedTrafficRecorder
from ramify.http_server.access import ListenAddress
from tests.serve.test_traffic import POLICY

async def main():
    recorder = ServedTrafficRecorder(Path(sys.argv[1]), PolicyFactsForRecorder.from_policy(POLICY))
    async with PolicyServer(LocalClient(POLICY), name="mine", recorder=recorder, key="k" * 20) as s:
        print(s.url, flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_server_loses_only_replies_in_flight(tmp_path: Path) -> None:
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        received: set[tuple[int, ...]] = set()

        async def user(http: aiohttp.ClientSession, number: int) -> None:
            messages: list[Body] = [{"role": "user", "content": f"user {number}"}]
            while True:
                body = {"messages": messages, "max_tokens": 6, "return_token_ids": True}
                async with http.post(f"{url}/chat/completions", json=body) as answer:
                    reply = (await answer.json())["choices"][0]
                received.add(tuple(reply["token_ids"]))
                if len(received) >= 30:
                    os.kill(server.pid, signal.SIGKILL)
                messages += [
                    {"role": "assistant", "content": reply["message"]["content"]},
                    {"role": "user", "content": "more"},
                ]

        async def test() -> None:
            async with aiohttp.ClientSession(
                headers={"Authorization": "Bearer " + "k" * 20}
            ) as http:
                await asyncio.gather(*(user(http, number) for number in range(6)))

        with pytest.raises((aiohttp.ClientError, KeyError, json.JSONDecodeError)):
            asyncio.run(test())
    finally:
        server.kill()
        server.wait()
        if server.stdout is not None:
            server.stdout.close()
    store = Store(tmp_path)
    stored = {turn.reply.token_ids for id in store.ids() for turn in store.load(id).root.turns}
    assert received <= stored
    assert all(store.check(id).num_damaged == 0 for id in store.ids())
    assert any(store.load(id).stop in (Stop.FINAL, Stop.MAX_TOKENS) for id in store.ids())


def test_runs_are_recorded_with_their_ids_and_scored(tmp_path: Path) -> None:
    async def test() -> None:
        engine = LoggingClient()
        recorder = ServedTrafficRecorder(
            tmp_path / "traffic", PolicyFactsForRecorder.from_policy(POLICY)
        )
        limits = Limits(max_turns=2, max_reply_tokens=8)
        rlm = RLM(engine, scaffold="bare", sandbox=SANDBOX, limits=limits)
        async with RecursiveRunServer(rlm, name="mine", open_recorder=lambda _: recorder) as server:
            traffic = Traffic(server, recorder, engine)  # type: ignore[arg-type]
            asked = [{"role": "user", "content": "write to ann@example.org"}]
            body = {"messages": asked, "temperature": 1.0}
            status, answer = await traffic.post("chat/completions", body)
            assert status in (200, 502), answer
            if status == 200:
                said = {"id": answer["id"], "score": 1}
                assert (await traffic.post("feedback", said))[0] == 200
                assert traffic.headers[0]["Ramify-Recorded"] == "true"
            await traffic.post("chat/completions", {**body, "store": False})
        await recorder.close()
        await engine.close()
        [run] = traffic.runs()
        assert run.task == "traffic"
        assert run.rewards == {"feedback": 1.0}
        assert "ann@" not in json.dumps(msgspec.to_builtins(run))
        replies = {reply.token_ids for _, reply in engine.log}
        assert {turn.reply.token_ids for call in run.calls for turn in call.turns} <= replies
        assert all(turn.num_ids for call in run.calls for turn in call.turns)

    asyncio.run(test())
