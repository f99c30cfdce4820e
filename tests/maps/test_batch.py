"""Maps through the batch APIs of OpenAI and Anthropic, against servers that speak them."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import testing
from ramify.clients.provider_batch_apis import split
from ramify.errors import ConfigError
from ramify.maps.api import total_map_limits
from ramify.maps.map_journal import TableMapStore, read_lines
from ramify.maps.map_journal_state import MapJournalState
from ramify.maps.map_run import TableMapRun, TableMapSpec
from ramify.maps.open_row_source import open_rows

PRICE = ramify.Price(input=1.0, output=2.0)
PROVIDERS = pytest.mark.parametrize("provider", ["openai", "anthropic"])
CREATE = {"openai": "POST /v1/batches", "anthropic": "POST /v1/messages/batches"}


class BatchedMap:
    """A server, and maps of rows against it."""

    def __init__(self, server: testing.FakeBatchApiServer, provider: str, folder: Path) -> None:
        self.server = server
        self.out = folder / "out.jsonl"
        self.store = ramify.Store(folder / "store")
        url = server.url if provider == "openai" else server.root
        self.model = ramify.Model(
            f"{provider}:m", api_key="sk-0123456789", base_url=url, price=PRICE, window=100_000
        )

    async def ask(self, rows: Any = 6, **options: Any) -> ramify.MapResult:
        rows = texts(rows) if isinstance(rows, int) else rows
        options = {"batch": True, "columns": ["text"], "out": self.out, **options}
        options.setdefault("store", self.store)
        return await ramify.amap("Which word?", rows, self.model, **options)

    def answers(self) -> list[Any]:
        return [json.loads(line)["answer"] for line in self.out.read_text().splitlines()]

    def errors(self) -> list[Any]:
        return [json.loads(line)["error"] for line in self.out.read_text().splitlines()]

    def recorded(self) -> MapJournalState:
        ((path, _),) = TableMapStore(self.store.root).headers()
        return MapJournalState.read(path)

    def num_uploaded(self) -> int:
        """Requests in all batches that the provider has."""
        return sum(len(batch.requests) for batch in self.server.batches.values())


def texts(num: int) -> list[dict[str, Any]]:
    return [{"id": number, "text": f"the word is w{number}"} for number in range(num)]


def word(messages: Any) -> str:
    return messages[-1].content.splitlines()[0].split()[-1]


def run(
    work: Callable[[BatchedMap], Awaitable[None]],
    provider: str,
    folder: Path,
    script: Any = word,
    **options: Any,
) -> None:
    async def served() -> None:
        async with testing.FakeBatchApiServer(script, **options) as server:
            await work(BatchedMap(server, provider, folder))

    asyncio.run(served())


def at_look(server: testing.FakeBatchApiServer, do: Callable[[], Any], num: int = 1) -> None:
    """Call ``do`` when a client looks at a batch for the ``num``-th time."""
    looks = 0

    def on_request(line: str, is_done: bool) -> bool:
        nonlocal looks
        parts = line.split("/")
        if not is_done and line.startswith("GET") and parts[-2] == "batches":
            looks += 1
            if looks == num and asyncio.iscoroutine(found := do()):
                server.soon(found)
        return True

    server.on_request = on_request


@PROVIDERS
def test_rows_are_answered_in_batches_at_half_the_price(provider: str, tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        result = await map.ask([*texts(10), *texts(1)], batch_rows=4)
        assert map.answers() == [*(f"w{number}" for number in range(10)), "w0"]
        assert [len(batch.requests) for batch in map.server.batches.values()] == [4, 4, 2]
        assert (result.stop, result.num_questions, result.num_known) == ("done", 10, 1)
        assert map.server.num_direct == 0
        assert result.usage.input_tokens == map.server.served.input_tokens
        assert result.cost == pytest.approx(PRICE.of(map.server.served) / 2)
        again = await map.ask([*texts(10), *texts(1)])
        assert (len(map.server.batches), again.num_questions, again.cost) == (3, 0, result.cost)
        assert (map.recorded().batches, map.recorded().cost) == ({}, pytest.approx(result.cost))

    run(work, provider, tmp_path)


@PROVIDERS
def test_a_row_that_fails_in_a_batch_fails_alone(provider: str, tmp_path: Path) -> None:
    def reply(messages: Any) -> Any:
        found = word(messages)
        asked[found] += 1
        if found == "w1":
            return testing.refused(text="too hot")
        return testing.server_error() if found == "w2" and asked[found] == 1 else found

    async def work(map: BatchedMap) -> None:
        result = await map.ask(4)
        assert map.answers() == ["w0", None, "w2", "w3"]
        assert (result.num_answered, result.num_failed) == (3, 1)
        assert "too hot" in map.errors()[1]
        # The provider's own fault is asked again, in a batch.
        assert [len(batch.requests) for batch in map.server.batches.values()] == [4, 1]
        await map.ask(4, retry_failed=True)
        assert asked == {"w0": 1, "w1": 2, "w2": 2, "w3": 1}
        assert map.server.num_direct == 0

    asked: Counter[str] = Counter()
    run(work, provider, tmp_path, reply)


@PROVIDERS
def test_rows_of_an_expired_batch_are_put_into_another(provider: str, tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        async def expire() -> None:
            await map.server.finish("expired", num=2)
            map.server.holds = False

        at_look(map.server, expire)
        result = await map.ask(5)
        assert map.answers() == [f"w{number}" for number in range(5)]
        assert [len(batch.requests) for batch in map.server.batches.values()] == [5, 3]
        assert result.usage.calls == 5

    run(work, provider, tmp_path, holds=True)


def test_a_row_is_without_a_result_at_most_three_times(tmp_path: Path) -> None:
    def reply(messages: Any) -> Any:
        return testing.server_error() if word(messages) == "w1" else word(messages)

    async def work(map: BatchedMap) -> None:
        result = await map.ask(3)
        assert (result.num_answered, result.num_failed) == (2, 1)
        assert [len(batch.requests) for batch in map.server.batches.values()] == [3, 1, 1]

    run(work, "openai", tmp_path, reply)


@PROVIDERS
def test_a_batch_that_somebody_cancels_suspends_the_map(provider: str, tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        at_look(map.server, lambda: map.server.finish("cancelled", num=2))
        result = await map.ask(5)
        assert (result.stop, result.num_waiting) == ("suspended", 0)
        assert f"was cancelled at {provider} before 3 of its rows" in result.reason
        assert not map.out.exists()
        map.server.holds = False
        result = await map.ask(5)
        assert map.answers() == [f"w{number}" for number in range(5)]
        assert map.num_uploaded() == 5 + 3

    run(work, provider, tmp_path, holds=True)


def test_a_batch_that_is_refused_as_a_whole_says_why(tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        at_look(map.server, lambda: map.server.refuse("token_limit_exceeded: too many tokens"))
        result = await map.ask(3)
        assert result.stop == "failed"
        assert "refused batch batch_0: token_limit_exceeded: too many tokens" in result.reason
        map.server.holds = False
        assert (await map.ask(3)).num_answered == 3

    run(work, "openai", tmp_path, holds=True)


@PROVIDERS
def test_a_map_that_stops_leaves_its_batch_and_collects_it(provider: str, tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        request = TableMapSpec(
            question="Which word?",
            budget=total_map_limits(None, None, None),
            columns=("text",),
            out=map.out,
            batch=True,
        )
        rlm = ramify.RLM(map.model, store=map.store)
        started = TableMapRun(rlm, open_rows(texts(4)), request)
        at_look(map.server, started.stop_gracefully)
        result = await started.run()
        (id,) = map.server.batches
        assert (result.stop, result.num_waiting) == ("stopped", 4)
        assert f"4 rows remain in batches at {provider} ({id})" in result.reason
        with pytest.raises(ConfigError, match="without a sample"):
            await map.ask(4, sample=2)
        await map.server.finish()
        # It collects the batch whether or not a batch is asked for now.
        result = await map.ask(5, batch=False)
        assert map.answers() == [f"w{number}" for number in range(5)]
        assert (map.num_uploaded(), map.server.num_direct) == (4, 1)

    run(work, provider, tmp_path, holds=True)


@PROVIDERS
def test_an_upload_whose_answer_is_lost_is_not_paid_twice(provider: str, tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        lost = []

        def drop(line: str, is_done: bool) -> bool:
            is_lost = line == CREATE[provider] and is_done and not lost
            lost.extend([line] * is_lost)
            return not is_lost

        # Other batches are in the provider's list, some with as many requests.
        others = tmp_path / "others"
        others.mkdir()
        await BatchedMap(map.server, provider, others).ask(3, batch_rows=1)
        await BatchedMap(map.server, provider, others).ask(3, prefix="b", out=others / "b.jsonl")
        map.server.on_request = drop
        result = await map.ask(3)
        assert lost
        assert (result.stop, map.num_uploaded()) == ("done", 3 + 3 + 3)
        assert map.answers() == ["w0", "w1", "w2"]

    run(work, provider, tmp_path, page=2)


def test_rows_that_need_a_session_are_answered_meanwhile(tmp_path: Path) -> None:
    def reply(messages: Any) -> str:
        if messages[0].content.startswith("Answer the question"):
            return word(messages)
        direct.append(len(messages))
        return "```repl\nFINAL('long')\n```"

    async def work(map: BatchedMap) -> None:
        def on_request(line: str, is_done: bool) -> bool:
            if line.endswith("/chat/completions") and is_done:
                map.server.soon(map.server.finish())
            return True

        map.server.on_request = on_request
        long = {"id": 9, "text": "a long text " * 20_000}
        result = await map.ask([*texts(2), long, *texts(4)])
        assert map.answers() == ["w0", "w1", "long", "w0", "w1", "w2", "w3"]
        assert (map.num_uploaded(), len(direct)) == (4, 1)
        assert (result.num_questions, result.num_known) == (5, 2)

    direct: list[int] = []
    run(work, "openai", tmp_path, reply, holds=True)


@PROVIDERS
def test_a_reply_that_does_not_fit_is_repaired_at_once(provider: str, tmp_path: Path) -> None:
    def reply(messages: Any) -> str:
        return "8" if "does not fit" in messages[-1].content else "eight"

    async def work(map: BatchedMap) -> None:
        result = await map.ask(2, answer_type=int)
        assert map.answers() == [8, 8]
        assert (map.num_uploaded(), map.server.num_direct) == (2, 2)
        assert result.usage.calls == 4

    run(work, provider, tmp_path, reply)


def test_the_budget_is_reserved_before_anything_is_uploaded(tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        with pytest.raises(ConfigError, match=r"10 rows may take \$0\.08.* nothing was uploaded"):
            await map.ask(10, max_cost=0.05)
        assert map.server.log == []
        # The same rows fit at the price of a batch only.
        assert (await map.ask(10, max_cost=0.1)).num_answered == 10

    run(work, "openai", tmp_path)


def test_a_sample_is_asked_at_once_and_estimated_at_the_price_of_a_batch(tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        usual = await map.ask(40, sample=20, batch=False, out=None, store=None)
        halved = await map.ask(40, sample=20)
        assert usual.estimate is not None
        assert halved.estimate is not None
        assert usual.estimate.cost is not None
        assert halved.estimate.cost is not None
        assert halved.estimate.is_batch
        assert halved.estimate.cost.value == pytest.approx(usual.estimate.cost.value / 2)
        assert (map.num_uploaded(), map.server.num_direct) == (0, 40)

    run(work, "openai", tmp_path)


def test_what_has_no_batch_is_refused_at_once(tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        with pytest.raises(ConfigError, match="give a store"):
            await map.ask(2, store=None)
        with pytest.raises(ConfigError, match="a batch of 0 rows"):
            await map.ask(2, batch_rows=0)
        map.model = ramify.Model("groq:m", base_url=map.server.url, price=PRICE)
        with pytest.raises(ConfigError, match="batches are not supported for Groq"):
            await map.ask(2)
        assert map.server.log == []

    run(work, "openai", tmp_path)
    store = ramify.Store(tmp_path / "store")
    with pytest.raises(ConfigError, match="batches are not supported"):
        ramify.map("Which?", ["a"], testing.ScriptedClient(["x"]), batch=True, store=store)


def test_uploads_are_split_by_requests_and_bytes() -> None:
    bodies = [(b"x" * size, size) for size in (3, 3, 3, 9, 1, 1, 1)]
    parts = [[size for _, size in part] for part in split(bodies, 3, 7)]
    assert parts == [[3, 3], [3], [9], [1, 1, 1]]


def test_the_journal_has_a_batch_before_it_is_uploaded(tmp_path: Path) -> None:
    async def work(map: BatchedMap) -> None:
        await map.ask(2)
        ((path, _),) = TableMapStore(map.store.root).headers()
        kinds = [
            name
            for _, line in read_lines(path)
            for name in "cbwurv"
            if getattr(line, name) is not None
        ]
        assert "".join(kinds) == "cbbwurrv"

    run(work, "openai", tmp_path)
