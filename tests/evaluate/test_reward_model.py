"""Reward models behind HTTP: the forms of their servers, batches, retries and errors."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from aiohttp import web

from ramify.errors import ConfigError, RamifyError
from ramify.evaluate.reward_model_client import RewardModel
from ramify.tasks.base import DatasetTask, Item, score_trajectory
from ramify.tasks.validation import answer_only_trajectory

ITEMS = [Item(f"question {n}", id=f"t/test/{n}") for n in range(100)]


class Server:
    """Scores a text by its length, in the forms of three servers."""

    def __init__(self) -> None:
        self.url = ""
        self.sizes: list[int] = []
        self.keys: set[str] = set()
        self.failures: list[int | bytes] = []
        """Statuses or bodies of the next replies."""
        self.most_at_once = self.at_once = 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers.get("Authorization", ""))
        self.at_once += 1
        self.most_at_once = max(self.most_at_once, self.at_once)
        await asyncio.sleep(0.02)
        self.at_once -= 1
        if self.failures:
            failure = self.failures.pop(0)
            if isinstance(failure, int):
                return web.Response(status=failure, text="not now")
            return web.Response(body=failure, content_type="application/json")
        texts = body.get("inputs") or body["input"]
        self.sizes.append(len(texts))
        lengths = [float(len(text)) for text in texts]
        match request.path:
            case "/predict":
                return web.json_response(
                    [
                        [{"label": "bad", "score": -n}, {"label": "good", "score": n}]
                        for n in lengths
                    ]
                )
            case "/classify":  # in another order than asked
                rows = [{"index": i, "label": "x", "probs": [n, -n]} for i, n in enumerate(lengths)]
                return web.json_response({"data": rows[::-1]})
            case "/pooling":
                rows = [{"index": i, "data": [[n], [-n]]} for i, n in enumerate(lengths)]
                return web.json_response({"data": rows})
            case _:  # SGLang
                return web.json_response([{"embedding": [n]} for n in lengths])


@pytest.fixture
def server() -> Iterator[Server]:
    made, loop = Server(), asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> web.AppRunner:
        app = web.Application()
        app.router.add_post("/{tail:.*}", made.answer)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        host, port = runner.addresses[0]
        made.url = f"http://{host}:{port}"
        return runner

    runner = asyncio.run_coroutine_threadsafe(start(), loop).result(30)
    yield made
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result(30)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.mark.parametrize(
    ("path", "options", "sign"),
    [
        ("/classify", {}, 1),
        ("/classify", {"label": 1}, -1),
        ("/pooling", {}, 1),
        ("/pooling", {"label": 1}, -1),
        ("/predict", {"label": "good"}, 1),
        ("/predict", {"label": "bad"}, -1),
        ("/v1/other", {"form": "classify", "model": "rm"}, 1),
    ],
)
def test_reward_is_the_number_of_the_label(
    server: Server, path: str, options: dict[str, Any], sign: int
) -> None:
    model = RewardModel(server.url + path, **options)
    task = DatasetTask("t", {"test": ITEMS}, model)
    rewards = score_trajectory(task, ITEMS[3], answer_only_trajectory(ITEMS[3], "four")).rewards
    assert rewards == {"correct": sign * len("question 3\n\nfour")}


def test_answers_are_sent_in_batches(server: Server) -> None:
    model = RewardModel(f"{server.url}/classify", max_batch=8, concurrency=3)
    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(lambda item: model("x" * int(item.id[7:]), item), ITEMS))
    assert found == [len(item.question) + 2 + n for n, item in enumerate(ITEMS)]
    assert sum(server.sizes) == 100
    assert max(server.sizes) == 8
    assert server.most_at_once <= 3


def test_transient_failures_are_retried(server: Server) -> None:
    server.failures += [503, 429, b"<html>", b'{"data": []}']
    assert RewardModel(f"{server.url}/classify")("a", ITEMS[0]) == 13
    assert server.failures == []


@pytest.mark.parametrize(
    ("failures", "message"),
    [
        ([503] * 5, "reward model .*/classify answered 503"),
        ([b"{}"] * 5, "its reply does not have the form of /classify"),
        ([400], "400"),
    ],
)
def test_error_names_the_server(server: Server, failures: list[Any], message: str) -> None:
    server.failures += failures
    with pytest.raises(RamifyError, match=message):
        RewardModel(f"{server.url}/classify")("a", ITEMS[0])
    assert server.failures == []


def test_key_is_sent_and_not_shown(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RM_KEY", "sk-of-the-reward-model")
    model = RewardModel(f"{server.url}/classify", key_variable="RM_KEY")
    model("a", ITEMS[0])
    assert server.keys == {"Bearer sk-of-the-reward-model"}
    server.failures += [401]
    with pytest.raises(RamifyError) as refused:
        model("a", ITEMS[0])
    assert "RM_KEY" in str(refused.value)
    assert "sk-of" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "options", "message"),
    [
        ("gpu1:8000/classify", {}, "give a URL, such as"),
        ("http://gpu1:8000", {}, "its path is none of classify, pooling, predict"),
        ("http://gpu1/x", {"form": "clasify"}, "unknown form 'clasify': did you mean 'classify'"),
        ("http://gpu1/classify", {"key_variable": "NO_KEY"}, "variable NO_KEY is not set"),
        ("http://gpu1/classify", {"label": "good"}, "unnamed scores: give label="),
        ("http://gpu1/classify", {"max_batch": 0}, "max_batch=0"),
    ],
)
def test_wrong_options_are_refused(url: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RewardModel(url, **options)
