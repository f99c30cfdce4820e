import asyncio
import json

import pytest

from ramify.clients.base import Client
from ramify.errors import ConfigError, ModelError, RateLimited, RequestRefusedError
from ramify.testing.reply_script import Script, ScriptRule
from ramify.testing.scripted_client import (
    ScriptedClient,
    dropped,
    html,
    no_usage,
    rate_limited,
    stalled,
)
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import request, run


def outcomes(client, *texts):
    async def main():
        said = []
        for text in texts:
            try:
                said.append((await client.complete(request(text))).message.content)
            except ModelError as error:
                said.append(type(error).__name__)
        return said

    return run(main())


def test_scripted_client_implements_client_protocol():
    assert isinstance(ScriptedClient([]), Client)


def test_scripted_replies_come_in_order_and_exhaustion_is_refused():
    client = ScriptedClient(["a", rate_limited(1.5), "b"])
    assert outcomes(client, *"1234") == ["a", "RateLimited", "b", "RequestRefusedError"]
    with pytest.raises(
        RequestRefusedError,
        match=r"^scripted:test: all 3 replies are used up \(this is request 5\): add one, or use",
    ):
        run(client.complete(request()))


def test_script_may_be_a_plain_or_async_function():
    async def slow(messages):
        await asyncio.sleep(0)
        return messages[-1].content.upper()

    assert outcomes(ScriptedClient(lambda messages: f"{len(messages)}"), "x") == ["1"]
    assert outcomes(ScriptedClient(slow), "x") == ["X"]


def test_rules_match_last_message_and_repeat_their_last_reply():
    client = ScriptedClient(
        [ScriptRule("cap.tal", ("Paris", "Rome")), ScriptRule("^no", rate_limited()), "else"]
    )
    assert outcomes(client, "capital?", "a\ncapital", "capital", "no", "x") == [
        "Paris",
        "Rome",
        "Rome",
        "RateLimited",
        "else",
    ]


def test_served_usage_counts_lost_replies_that_were_paid():
    client = ScriptedClient(["12345678", dropped("1234"), rate_limited(), html(), no_usage("1")])
    outcomes(client, *["123456789"] * 5)
    assert client.served == Usage(3 * 3, 2 + 1 + 1, calls=3)
    assert len(client.requests) == 5


def test_a_reply_is_bounded_by_max_tokens():
    async def main():
        return await ScriptedClient(["x" * 100]).complete(request(max_tokens=5))

    reply = run(main())
    assert (reply.message.content, reply.finish, reply.usage) == (
        "x" * 20,
        "length",
        Usage(2, 5, calls=1),
    )


def test_message_and_reply_objects_are_returned_unchanged():
    call = ToolCall("1", "look", "{}")
    given = Reply(
        Message("assistant", "a"), Usage(10, 20, calls=1), token_ids=(1, 2), logprobs=(-1.0, -2.0)
    )

    async def main():
        client = ScriptedClient(
            [Message("assistant", "", reasoning="hm", tool_calls=(call,)), given]
        )
        return await client.complete(request()), await client.complete(request()), client.served

    first, second, served = run(main())
    assert (first.message.tool_calls, first.finish, first.usage) == (
        (call,),
        "tool_calls",
        Usage(2, 3, 0, 1, 1),
    )
    assert (second.token_ids, second.logprobs, second.usage) == (
        (1, 2),
        (-1.0, -2.0),
        Usage(10, 20, calls=1),
    )
    assert served == Usage(12, 23, 0, 1, 2)


def test_replies_take_latency_and_stalled_request_can_be_cancelled():
    async def main():
        loop, client = asyncio.get_running_loop(), ScriptedClient(["a", stalled()], latency_s=0.02)
        started = loop.time()
        await client.complete(request())
        took = loop.time() - started
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client.complete(request()), 0.05)
        return took, client.in_flight

    took, in_flight = run(main())
    assert took >= 0.02
    assert in_flight == 0


def test_a_prompt_beyond_the_window_is_refused():
    with pytest.raises(RequestRefusedError, match="the prompt has 25 tokens and the window 10"):
        run(ScriptedClient(["a"], window=10).complete(request("x" * 100)))


def test_rate_limit_has_retry_after():
    with pytest.raises(RateLimited) as caught:
        run(ScriptedClient([rate_limited(1.5)]).complete(request()))
    assert caught.value.retry_after_s == 1.5


def test_script_is_loaded_from_file(tmp_path):
    path = tmp_path / "script.json"
    lines = [
        {"match": "one", "reply": ["1", {"fail": "rate_limited", "retry_after_s": 0.5}]},
        {"match": "", "reply": {"content": "else", "reasoning": "hm"}},
    ]
    path.write_text(json.dumps(lines))
    assert outcomes(ScriptedClient.load(path), "one", "one", "two") == ["1", "RateLimited", "else"]
    path.write_text(json.dumps(["a", {"fail": "dropped"}, {"content": "b"}]))
    assert outcomes(ScriptedClient.load(path), *"123") == ["a", "ReplyLostError", "b"]


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "No such file"),
        ("nonsense", "malformed"),
        ("[1]", "Expected `str`"),
        ('[{"fail": "sulk"}]', "Invalid enum value 'sulk'"),
        ('[{"match": "(", "reply": "x"}]', "unterminated"),
        ('[{"match": "x"}]', "Expected `str`"),
    ],
)
def test_a_bad_script_file_is_named(tmp_path, text, says):
    path = tmp_path / "script.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        Script.load(path)
    assert str(caught.value).startswith(f"script {path}: ")
