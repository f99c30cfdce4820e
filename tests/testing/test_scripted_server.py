"""The scripted server, called by our own client and by a plain HTTP client, and started from the
command line."""

import asyncio
import http.client
import json
import signal
import subprocess
import sys
import urllib.error
import urllib.request

import msgspec
import pytest

from ramify.clients.rate_limited_requests import RateLimitedClientPool
from ramify.errors import ConfigError
from ramify.testing.scripted_client import (
    cut,
    dropped,
    html,
    malformed,
    no_choices,
    rate_limited,
    refused,
    server_error,
)
from ramify.testing.scripted_server import ScriptedServer
from ramify.types.message import Message, Reply, ToolCall, Usage
from tests.clients.helpers import Books, request, run


def post(url, body, **headers):
    """POST with the standard library's client; return (status, headers, body)."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    asked = urllib.request.Request(url, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


ASK = {"model": "m", "messages": [{"role": "user", "content": "hi there"}]}


def answers(script, *bodies, path="/chat/completions", **options):
    async def main():
        async with ScriptedServer(script, **options) as server:
            return [
                await asyncio.to_thread(post, server.url + path, body) for body in bodies or (ASK,)
            ], server

    return run(main())


def test_chat_completion_response():
    (status, headers, body), *_ = answers(["hello"])[0]
    assert (status, headers["Content-Type"]) == (200, "application/json")
    assert json.loads(body) == {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": "m",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "hello"},
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 2,
            "total_tokens": 4,
            "prompt_tokens_details": {"cached_tokens": 0},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


@pytest.mark.parametrize("with_usage", [False, True])
def test_streamed_reply_is_a_series_of_chunks(with_usage):
    options = {"stream_options": {"include_usage": True}} if with_usage else {}
    (status, headers, body), *_ = answers(["hello"], ASK | {"stream": True} | options)[0]
    *events, done, _ = body.decode().split("\n\n")
    assert (status, headers["Content-Type"], done) == (200, "text/event-stream", "data: [DONE]")
    chunks = [json.loads(event.removeprefix("data: ")) for event in events]
    assert [
        (choice["delta"].get("content"), choice["finish_reason"])
        for chunk in chunks
        for choice in chunk["choices"]
    ] == [("", None), ("hello", None), (None, "stop")]
    assert ["usage" in chunk for chunk in chunks] == [False] * 3 + [True] * with_usage


def test_scripted_failures_become_http_responses():
    script = [
        rate_limited(1.5),
        server_error(503),
        refused(403, "no"),
        html(),
        malformed("{"),
        no_choices(),
    ]
    got, server = answers(script, *[ASK] * 6)
    assert [status for status, _, _ in got] == [429, 503, 403, 200, 200, 200]
    assert got[0][1]["retry-after-ms"] == "1500"
    assert got[3][1]["Content-Type"].startswith("text/html")
    assert got[4][2] == b"{"
    assert server.served == Usage(4, 2 + 1, calls=2)


@pytest.mark.parametrize(
    ("failure", "error"),
    [(dropped(), http.client.RemoteDisconnected), (cut(), http.client.IncompleteRead)],
)
def test_scripted_failure_breaks_the_connection(failure, error):
    async def main():
        async with ScriptedServer([failure]) as server:
            with pytest.raises(error):
                await asyncio.to_thread(post, server.url + "/chat/completions", ASK)
            return server.served.calls

    assert run(main()) == 1


@pytest.mark.parametrize(
    ("body", "path", "status", "says"),
    [
        (b"nonsense", "/chat/completions", 400, "not a request for a chat completion"),
        (
            {"messages": [{"role": "wizard"}]},
            "/chat/completions",
            400,
            "Invalid enum value 'wizard'",
        ),
        (ASK, "/nowhere", 404, "no POST /v1/nowhere here: POST http://127.0.0.1"),
        (
            {"messages": [{"role": "user", "content": "x" * 99}]},
            "/chat/completions",
            400,
            "maximum context length is 9",
        ),
    ],
)
def test_bad_request_gets_error_status(body, path, status, says):
    (got, _, sent), *_ = answers([], body, path=path, window=9)[0]
    assert got == status
    assert says in sent.decode()


def test_reply_fields_survive_the_round_trip():
    call = ToolCall("c1", "look", '{"at":1}')
    given = Reply(
        Message("assistant", "", reasoning="hm", tool_calls=(call,)), Usage(3, 2, 1, 1, 1), "tool_calls", "m-1",
        prompt_ids=(1, 2, 3), token_ids=(4, 5), logprobs=(-1.0, -2.0),
    )  # fmt: skip

    async def main():
        async with ScriptedServer([given]) as server:
            pool = RateLimitedClientPool(base_urls={"vllm": server.url})
            reply = await pool.ask(pool.client("vllm:m"), request(), Books())
            await pool.close()
            return msgspec.structs.replace(reply, seconds=0.0, cost=None)

    assert run(main()) == given


def test_async_scripts_run_concurrently():
    async def main():
        all_here = asyncio.Barrier(5)

        async def script(messages):
            await all_here.wait()
            return "x"

        async with ScriptedServer(script) as server:
            pool = RateLimitedClientPool(base_urls={"vllm": server.url})
            await asyncio.gather(
                *(pool.ask(pool.client("vllm:m"), request(), Books()) for _ in range(5))
            )
            await pool.close()
            return server.most_in_flight

    assert run(main()) == 5


def test_a_port_in_use_is_named():
    async def main():
        async with ScriptedServer([]) as first:
            port = int(first.url.split(":")[2].split("/")[0])
            async with ScriptedServer([], port=port):
                pass

    with pytest.raises(ConfigError, match=r"cannot listen on 127\.0\.0\.1:"):
        run(main())


def test_server_starts_from_the_command_line(tmp_path):
    script = tmp_path / "script.json"
    script.write_text('[{"match": "", "reply": "hello"}]')
    command = [sys.executable, "-m", "ramify.testing", "serve"]
    with subprocess.Popen([*command, str(script)], stdout=subprocess.PIPE, text=True) as process:
        url = process.stdout.readline().strip()
        status, _, body = post(url + "/chat/completions", ASK)
        with urllib.request.urlopen(url.removesuffix("/v1") + "/served", timeout=60) as answer:
            counts = json.load(answer)
        with urllib.request.urlopen(url + "/models", timeout=60) as answer:
            models = json.load(answer)
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert (status, json.loads(body)["choices"][0]["message"]["content"]) == (200, "hello")
    assert counts == {
        "answered": 1,
        "most_in_flight": 1,
        "usage": {"input_tokens": 2, "output_tokens": 2, "calls": 1},
    }
    assert models["data"][0]["max_model_len"] == 128_000
    wrong = subprocess.run([*command, str(tmp_path / "none.json")], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr.startswith("error: script ")) == (2, True)
