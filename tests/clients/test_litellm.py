"""LiteLLM's client through LiteLLM itself, against the scripted server."""

import sys

import pytest

from ramify.clients.base import Price
from ramify.clients.pool import ClientPool
from ramify.clients.scripted import dropped, no_usage, rate_limited, refused
from ramify.clients.scripted_server import ScriptedServer
from ramify.errors import ConfigError, ModelError
from tests.clients.helpers import Books, request, run


def test_missing_extra_is_named_in_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "litellm", None)
    with pytest.raises(
        ConfigError, match=r"^litellm:x/y needs LiteLLM: pip install 'ramify\[litellm\]'$"
    ):
        ClientPool().client("litellm:x/y")


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
            pool = ClientPool(
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
        ["hello", "RateLimited", "ReplyLost", "Refused", "Refused", "x"],
        ["settle", "release", "forfeit", "release", "release", "settle"],
        Price(0.15, 0.6, 0.075),
        128_000,
    )
