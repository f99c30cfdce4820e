"""Replies beyond what was asked for are refused; long ones are decoded outside of this process."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ramify.clients import chat_json, responses_json
from ramify.clients.base import Request, Sampling
from ramify.clients.reply_decoding import (
    LARGE_BYTES,
    NoReplyInResponse,
    ReplyDecodeError,
    decode_reply,
)
from ramify.errors import MalformedResponse, ServerStatusError
from ramify.types.message import Message, Reply, ToolCall

MESSAGES = (Message("user", "hi"),)
PAD = b" " * LARGE_BYTES
"""White space that makes any body large."""


def decoded(body: bytes, request: Request | None = None, format: ModuleType = chat_json) -> Reply:
    bound = (request or asks()).reply_size_limit()
    return asyncio.run(decode_reply(format, body, "m", bound))


def asks(max_tokens: int = 8192, **sampling: Any) -> Request:
    return Request(MESSAGES, Sampling(max_tokens=max_tokens, **sampling))


def body(finish: str = "stop", **message: Any) -> bytes:
    return json.dumps({"choices": [{"message": message, "finish_reason": finish}]}).encode()


def helpers() -> set[int]:
    """Ids of this process's helpers."""
    children: list[str] = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError):  # a thread that has just ended
            children += (task / "children").read_text().split()
    found = set()
    for pid in children:
        with contextlib.suppress(OSError):
            if b"untrusted_data_process" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.add(int(pid))
    return found


def end_helpers() -> None:
    for pid in helpers():
        os.kill(pid, signal.SIGKILL)
    while helpers():
        time.sleep(0.01)


@pytest.mark.parametrize("pad", [b"", PAD], ids=["small", "large"])
def test_reply_is_the_same_in_place_and_in_a_helper(pad: bytes) -> None:
    call = {"id": "a", "function": {"name": "python", "arguments": '{"code": 1}'}}
    given = body(content="é text 😀", reasoning="because", tool_calls=[call])
    reply = decoded(pad + given)
    assert reply.message == Message(
        "assistant", "é text 😀", "because", (ToolCall("a", "python", '{"code": 1}'),)
    )
    assert reply.finish == "stop"


@pytest.mark.parametrize("pad", [b"", PAD], ids=["small", "large"])
@pytest.mark.parametrize(
    ("given", "error", "text"),
    [
        (b"<html>", ReplyDecodeError, "malformed"),
        (body(finish="strange", content="x"), ValueError, "strange"),
        (body(finish="error", content="x"), ServerStatusError, "broke the reply off"),
        (b'{"choices": []}', NoReplyInResponse, "no reply"),
        (b'{"error": {"code": 429}}', NoReplyInResponse, "no reply"),
    ],
)
def test_failures_are_the_same_in_place_and_in_a_helper(
    pad: bytes, given: bytes, error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        decoded(pad + given)
    if isinstance(caught.value, NoReplyInResponse):
        expected = (429, True) if b"429" in given else (None, False)
        assert (caught.value.code, caught.value.has_error) == expected


def test_items_of_responses_are_counted() -> None:
    items = [{"type": "reasoning", "summary": []}] * 20_000
    given = json.dumps({"status": "completed", "output": items}).encode()
    with pytest.raises(MalformedResponse, match="20,000 items"):
        decoded(given, format=responses_json)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (b" " * (4 << 20), "longer than 3145728 bytes"),
        (body(tool_calls=[{"function": {"name": "p"}}] * 2049), "2,049 tool calls"),
        (body(content=["x"] * 20_000), "20,001 items"),
        (
            b'{"choices":[{"message":{"content":"x"},"token_ids":[%b1]}]}' % (b"1," * 30_000),
            "30,002 items",
        ),
    ],
)
def test_reply_beyond_what_was_asked_for_is_refused_for_good(given: bytes, text: str) -> None:
    with pytest.raises(MalformedResponse, match=text) as caught:
        decoded(given)
    assert not caught.value.transient
    assert caught.value.may_be_paid or "bytes" in text


@pytest.mark.parametrize("token", [" " * 128, "\u4e2d\u6587", "\\" * 16, "\n" * 32, "😀", "=" * 64])
def test_honest_reply_of_long_tokens_is_read(token: str) -> None:
    """Every token of the reply is one of the longest or most escaped of common tokenizers."""
    content = token * 8192
    assert decoded(body(content=content, reasoning="why")).message.content == content


def test_honest_log_probabilities_fit() -> None:
    """20 alternatives for each of 4,096 tokens, with their bytes, as OpenAI sends them."""
    one = {"token": "\u4e2d\u6587 text", "logprob": -12.345678, "bytes": list(range(200, 214))}
    token = {**one, "top_logprobs": [one] * 20}
    choice = {
        "message": {"content": "x"},
        "finish_reason": "stop",
        "logprobs": {"content": [token] * 4096},
        "token_ids": list(range(100_000, 104_096)),
    }
    given = json.dumps({"choices": [choice], "prompt_token_ids": [151_000] * 60}).encode()
    request = asks(4096, logprobs=True, extra={"top_logprobs": 20})
    reply = decoded(given, request)
    assert reply.logprobs == (-12.345678,) * 4096
    assert reply.token_ids is not None
    assert len(reply.token_ids) == 4096


def test_one_helper_serves_many_large_replies() -> None:
    decoded(PAD + body(content="x"))
    first = helpers()
    assert first
    for _ in range(3):
        decoded(PAD + body(content="x"))
    assert helpers() == first


def test_small_body_of_many_numbers_is_decoded_in_a_helper() -> None:
    numbers = b'{"usage":[%b1],%b' % (b"1.2345678901234567890e-300," * 3000, body(content="x")[1:])
    assert len(numbers) < LARGE_BYTES
    end_helpers()
    assert decoded(numbers).message.content == "x"
    assert helpers()


def test_reply_that_takes_too_long_to_decode_is_refused() -> None:
    many = b'{"usage":[%b1],%b' % (
        b"1.2345678901234567890123456789e-300," * 1_000_000,
        body(content="x")[1:],
    )
    with pytest.raises(MalformedResponse, match="it exceeds 2 s of CPU time") as caught:
        decoded(many, asks(1_000_000))
    assert not caught.value.transient


def test_cancelled_decoding_ends_at_once() -> None:
    """The helper of a cancelled request is killed, so that the loop's end waits for no thread."""
    many = b'{"usage":[%b1],%b' % (
        b"1.2345678901234567890123456789e-300," * 1_000_000,
        body(content="x")[1:],
    )
    bound = asks(1_000_000).reply_size_limit()

    async def cancel() -> None:
        task = asyncio.create_task(decode_reply(chat_json, many, "m", bound))
        while not helpers():
            await asyncio.sleep(0.01)
        task.cancel()
        await task

    end_helpers()
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(cancel())
    while helpers():
        time.sleep(0.01)
