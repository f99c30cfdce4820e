"""Decoding of a server's replies within bounds, without stopping the event loop.

    body ── small ──────────────────▶ _decode_in_place ──▶ Reply
       └─── large ──▶ helper process: _decode_in_place ──▶ Reply

A reply is as hostile as a session's value. It may be many bytes, or few bytes that decode to many
objects. ``Request.reply_bound`` says how much an honest reply can hold, and anything longer is
refused. Large bodies are decoded in another process, since a decoder holds the interpreter's lock.
A body is large if it has many bytes, or so many commas that decoding it takes long.

Every client that reads HTTP bodies uses ``decode_reply``. A format is a module such as
``chat_json.py``: its ``decode`` returns an object with ``choices``, ``error`` and ``num_items``,
and its ``read`` a reply. Not here: how many bytes are received at all (see
``http_transport.py``), and what the fields mean (see the formats).
"""

from __future__ import annotations

import asyncio
import importlib
from types import ModuleType
from typing import Any

import msgspec

from ramify.actors.helper_process import HelperError, in_helper
from ramify.clients.base import ReplyBound
from ramify.clients.compression import too_long
from ramify.errors import BadReply, ServerFailed
from ramify.types.message import Reply

LARGE_BYTES = 1 << 18
"""Longer bodies are decoded in a helper process."""
_LARGE_COMMAS = 2048
"""Bodies with more commas are, too: each may stand for a slow number or an object."""


class Undecodable(Exception):
    """A body is not a reply of the format."""


class NoReply(Exception):
    """A response without a reply, or with an error beside it."""

    def __init__(self, code: int | None, *, has_error: bool, is_beside_reply: bool) -> None:
        super().__init__("no reply")
        self.code = code
        """Code of the error, if it has one that may be an HTTP status."""
        self.has_error = has_error
        self.is_beside_reply = is_beside_reply
        """True if the response with an error also has a reply, or counts tokens."""


class _Task(msgspec.Struct, array_like=True):
    format: str
    """Name of the format's module."""
    model: str
    bound: ReplyBound


class _Decoded(msgspec.Struct, array_like=True):
    reply: Reply | None = None
    failed: str = ""
    """Kind of the failure: a key of ``_FAILURES``, or ``no reply``."""
    text: str = ""
    code: int | None = None
    has_error: bool = False
    is_beside_reply: bool = False


_FAILURES: dict[str, type[Exception]] = {
    "undecodable": Undecodable,
    "contradicts itself": ValueError,
    "broken off": ServerFailed,
    "too much": BadReply,
}


async def decode_reply(format: ModuleType, body: bytes, model: str, bound: ReplyBound) -> Reply:
    """Return the reply in ``body``.

    Raises Undecodable, NoReply, ValueError if the reply contradicts itself, ServerFailed if the
    server broke it off, and BadReply, which no other attempt can avoid, if it is over ``bound``.
    """
    if len(body) > bound.bytes:
        raise too_long(bound.bytes)
    if not is_large(body):
        return _reply(_decode_in_place(format, body, model, bound))
    task = _encode(_Task(format.__name__, model, bound))
    try:
        answer = await in_helper(f"{__name__}:{decode_in_helper.__name__}", task, body)
    except HelperError as error:
        return _reply(_Decoded(None, "too much", f"the reply cannot be decoded: {error}"))
    # A long text takes long to build. In a thread, this delays the loop but no callback of it.
    return _reply(await asyncio.to_thread(_decode_answer, answer))


def is_large(body: bytes) -> bool:
    """True if decoding ``body`` may take so long that it must not happen in the event loop."""
    return len(body) > LARGE_BYTES or body.count(b",") > _LARGE_COMMAS


def _reply(decoded: _Decoded) -> Reply:
    if decoded.reply is not None:
        return decoded.reply
    if decoded.failed == "no reply":
        raise NoReply(
            decoded.code,
            has_error=decoded.has_error,
            is_beside_reply=decoded.is_beside_reply,
        )
    error = _FAILURES[decoded.failed](decoded.text)
    if isinstance(error, BadReply):
        error.transient = False
    if isinstance(error, BadReply | ServerFailed):
        error.may_be_paid = True
    raise error


def _decode_in_place(format: ModuleType, body: bytes, model: str, bound: ReplyBound) -> _Decoded:
    try:
        completion = format.decode(body)
        if completion.error or not completion.choices:
            return _no_reply(completion)
        if problem := _problem("items", completion.num_items, bound.items):
            return _Decoded(None, "too much", problem)
        reply = format.read(completion, completion.choices[0], model, 0.0)
    except ServerFailed as error:
        return _Decoded(None, "broken off", str(error))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _Decoded(None, "undecodable", str(error))
    except ValueError as error:
        return _Decoded(None, "contradicts itself", str(error))
    message = reply.message
    num_chars = len(message.content) + len(message.reasoning or "")
    num_chars += sum(len(call.name) + len(call.arguments) for call in message.tool_calls)
    problem = _problem("tool calls", len(message.tool_calls), bound.tool_calls) or _problem(
        "characters", num_chars, bound.chars
    )
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
    """Decode ``body`` in a helper process."""
    given = _decode_task(task)
    format = importlib.import_module(given.format)
    return _encode(_decode_in_place(format, body, given.model, given.bound))


_encode = msgspec.msgpack.Encoder().encode
_decode_task = msgspec.msgpack.Decoder(_Task).decode
_decode_answer = msgspec.msgpack.Decoder(_Decoded).decode
