"""Decode a server's responses within size limits, without blocking the event loop.

    body ── small ──────────────────▶ _decode_in_place ──▶ Reply
       └─── large ──▶ helper process: _decode_in_place ──▶ Reply

Replies are untrusted. A reply may be very long, or a short one may decode to very many objects.
``Request.reply_size_limit`` is the largest plausible reply, and anything larger is rejected. Large
bodies are decoded in another process, because a decoder holds the interpreter's lock. A body is
large if it has many bytes, or so many commas that decoding may take long.

Every client that reads HTTP bodies uses ``decode_reply``. A format is a module such as
``chat_json.py``: its ``decode`` returns an object with ``choices``, ``error`` and ``num_items``,
and its ``read`` turns that object into a reply. ``http_client/http_transport.py`` limits the
received bytes, and the formats interpret the fields.
"""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Any

import msgspec

from ramify.clients.base import ReplySizeLimit
from ramify.errors import MalformedResponse, ServerStatusError
from ramify.http_client.decompression import body_too_long_error
from ramify.types.message import Reply

LARGE_BYTES = 1 << 18
"""Response bodies with more bytes than this are decoded in a helper process."""
_LARGE_COMMAS = 2048
"""Bodies with more commas than this are also decoded in a helper process, because a number or an
object between two commas may be slow to decode."""


class ReplyDecodeError(Exception):
    """Raised if the body of a response does not have the expected format."""


class NoReplyInResponse(Exception):
    """Raised if a response contains no reply, or both a reply and an error."""

    def __init__(self, code: int | None, *, has_error: bool, is_beside_reply: bool) -> None:
        super().__init__("no reply")
        self.code = code
        """Code of the error, if it looks like an HTTP status; otherwise None."""
        self.has_error = has_error
        self.is_beside_reply = is_beside_reply
        """True if the response has an error and also a reply or a token count."""


class _Task(msgspec.Struct, array_like=True):
    format: str
    """Name of the module that defines the response format."""
    model: str
    bound: ReplySizeLimit
    seconds: float


class _Decoded(msgspec.Struct, array_like=True):
    reply: Reply | None = None
    failed: str = ""
    """Kind of failure: a key of ``_FAILURES``, or ``no reply``. Empty if decoding succeeded."""
    text: str = ""
    code: int | None = None
    has_error: bool = False
    is_beside_reply: bool = False


_FAILURES: dict[str, type[Exception]] = {
    "undecodable": ReplyDecodeError,
    "contradicts itself": ValueError,
    "broken off": ServerStatusError,
    "too much": MalformedResponse,
}


async def decode_reply(
    format: ModuleType, body: bytes, model: str, bound: ReplySizeLimit, seconds: float = 0.0
) -> Reply:
    """Decode a reply from the body of a response.

    Large bodies are decoded in a helper process.

    Raises ReplyDecodeError or NoReplyInResponse; ValueError if fields of the reply contradict each
    other; ServerStatusError if the server aborted the reply; and MalformedResponse, which is not
    retried, if the reply exceeds ``bound``.
    """
    if len(body) > bound.bytes:
        raise body_too_long_error(bound.bytes)
    if not is_large(body):
        return _reply_or_raise(_decode_in_place(format, body, model, bound, seconds))
    from ramify.actors.untrusted_data_process import HelperProcessDied, call_in_helper_process

    task = _encode(_Task(format.__name__, model, bound, seconds))
    try:
        answer = await call_in_helper_process(f"{__name__}:{decode_in_helper.__name__}", task, body)
    except HelperProcessDied as error:
        return _reply_or_raise(_Decoded(None, "too much", f"the reply cannot be decoded: {error}"))
    # Building a long text takes long. In a thread it may slow the loop, but it blocks no callback.
    return _reply_or_raise(await asyncio.to_thread(msgspec.msgpack.decode, answer, type=_Decoded))


def is_large(body: bytes) -> bool:
    """Return True if a body may take so long to decode that it would block the event loop."""
    return len(body) > LARGE_BYTES or body.count(b",") > _LARGE_COMMAS


def _reply_or_raise(decoded: _Decoded) -> Reply:
    if decoded.reply is not None:
        return decoded.reply
    if decoded.failed == "no reply":
        raise NoReplyInResponse(
            decoded.code,
            has_error=decoded.has_error,
            is_beside_reply=decoded.is_beside_reply,
        )
    error = _FAILURES[decoded.failed](decoded.text)
    if isinstance(error, MalformedResponse):
        error.transient = False
    if isinstance(error, MalformedResponse | ServerStatusError):
        error.may_be_paid = True
    raise error


def _decode_in_place(
    format: ModuleType, body: bytes, model: str, bound: ReplySizeLimit, seconds: float = 0.0
) -> _Decoded:
    try:
        completion = format.decode(body)
        if completion.error or not completion.choices:
            return _no_reply(completion)
        if problem := _problem("items", completion.num_items, bound.items):
            return _Decoded(None, "too much", problem)
        reply = format.reply_from_response(completion, completion.choices[0], model, seconds)
    except ServerStatusError as error:
        return _Decoded(None, "broken off", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _Decoded(None, "undecodable", str(error))
    except ValueError as error:
        return _Decoded(None, "contradicts itself", str(error))
    message = reply.message
    num_chars = len(message.content) + len(message.reasoning or "")
    for call in message.tool_calls:
        num_chars += len(call.name) + len(call.arguments)
    problem = _problem("tool calls", len(message.tool_calls), bound.tool_calls)
    problem = problem or _problem("characters", num_chars, bound.chars)
    return _Decoded(None, "too much", problem) if problem else _Decoded(reply)


def _no_reply(completion: Any) -> _Decoded:
    error = completion.error
    code = error.get("code") if isinstance(error, dict) else None
    return _Decoded(
        None,
        "no reply",
        code=code if isinstance(code, int) and 0 < code < 1000 else None,
        has_error=bool(error),
        is_beside_reply=bool(completion.choices or completion.usage),
    )


def _problem(what: str, number: int, most: int) -> str:
    if number <= most:
        return ""
    return f"the reply has {number:,} {what}, and at most {most:,} can be honest; lower max_tokens"


def decode_in_helper(task: bytes, body: bytes) -> bytes:
    """Decode an untrusted response body inside a helper process, and return the encoded result."""
    given = msgspec.msgpack.decode(task, type=_Task)
    format = importlib.import_module(given.format)
    return _encode(_decode_in_place(format, body, given.model, given.bound, given.seconds))


_encode = msgspec.msgpack.Encoder().encode
