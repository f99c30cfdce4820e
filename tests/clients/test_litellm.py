"""LiteLLM's client through LiteLLM itself, against the scripted server."""

import sys

import msgspec
import pytest

from ramify.clients.base import Price
from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError, ModelError
from ramify.testing.scripted_client import dropped, no_usage, rate_limited, refused
from ramify.testing.scripted_server import ScriptedServer
from tests.clients.helpers import Books, request, run, says


def test_missing_extra_is_named_in_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(
        ConfigError, match=r"^litellm:x/y needs LiteLLM: pip install .*\[litellm\]'$"
    ):
        RateLimitedClientPool().client("litellm:x/y")


@pytest.mark.filterwarnings("ignore")
def test_litellm_replies_failures_price_and_window():
    pytest.importorskip("litellm", reason="the extra 'litellm' is not installed")

    async def main():
        script = [
            "hello",
            rate_limited(),
            dropped(),
            refused(401, "bad key"),
            refused(400, "context length is 5"),
            no_usage("x"),
        ]
        async with ScriptedServer(script) as server:
            pool = RateLimitedClientPool(
                max_attempts=1,
                keys={"litellm": "key-0123456789"},
                base_urls={"litellm": server.url},
            )
            client, outcomes, books = pool.client("litellm:openai/gpt-4o-mini"), [], Books()
            for _ in script:
                try:
                    outcomes.append((await pool.ask(client, request(), books)).message.content)
                except ModelError as error:
                    outcomes.append(type(error).__name__)
            await pool.close()
            return outcomes, books.kinds, client.price, client.window

    assert run(main()) == (
        [
            "hello",
            "RateLimited",
            "ReplyLostError",
            "RequestRefusedError",
            "RequestRefusedError",
            "x",
        ],
        ["settle", "release", "forfeit", "release", "release", "settle"],
        Price(0.15, 0.6, 0.075),
        128_000,
    )


def completion(*without, finish_reason="stop", **fields):
    """A chat completion of the text "x"; its choice has none of the fields ``without``."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": "x"},
        "finish_reason": finish_reason,
    }
    for name in without:
        del choice[name]
    usage = {"prompt_tokens": 9, "completion_tokens": 9, "total_tokens": 18}
    body = {"id": "c", "object": "chat.completion", "created": 1, "model": "m", "usage": usage}
    return msgspec.json.encode({**body, "choices": [choice], **fields})


SECOND_FIRST = [
    {"index": 1, "message": {"role": "assistant", "content": "second"}, "finish_reason": "length"},
    {"index": 0, "message": {"role": "assistant", "content": "first"}, "finish_reason": "stop"},
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("body", "outcome", "booked"),
    [
        (completion(), "x", "settle"),
        (completion(finish_reason=None), "MalformedResponse", "forfeit"),
        (completion(finish_reason=""), "MalformedResponse", "forfeit"),
        (completion(finish_reason=7), "MalformedResponse", "forfeit"),
        (completion(finish_reason="odd"), "MalformedResponse", "forfeit"),
        (completion("finish_reason"), "MalformedResponse", "forfeit"),
        (completion(finish_reason="error"), "ServerStatusError", "forfeit"),
        (completion(error={"message": "overloaded"}), "ServerStatusError", "forfeit"),
        (completion(error={"type": "odd"}), "ServerStatusError", "forfeit"),
        (completion(error={}), "x", "settle"),
        (completion(choices=SECOND_FIRST), "first", "settle"),
    ],
)
def test_litellm_replies_have_the_same_outcome_as_elsewhere(body, outcome, booked):
    pytest.importorskip("litellm", reason="the extra 'litellm' is not installed")

    async def main(name):
        async with says(body) as server:
            provider = name.partition(":")[0]
            pool = RateLimitedClientPool(
                max_attempts=1,
                keys={provider: "key-0123456789"},
                base_urls={provider: server.root + "/v1"},
            )
            books = Books()
            try:
                reply = await pool.ask(pool.client(name), request(), books)
                return reply.message.content, books.kinds
            except ModelError as error:
                return type(error).__name__, books.kinds
            finally:
                await pool.close()

    for name in ("openai:m", "litellm:openai/m"):
        assert run(main(name)) == (outcome, [booked])
