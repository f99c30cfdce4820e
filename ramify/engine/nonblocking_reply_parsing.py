"""Parse a model's reply into an action without blocking the event loop.

Long replies are parsed in a helper process.

    short reply ─────────────────▶ Scaffold.read ───────────▶ ParsedReply
    long reply ──▶ helper process: Scaffold.read, prose_of ──▶ ParsedReply

A reply is untrusted text, and parsing it searches the whole text several times. This module decides
which replies are long. The rules of parsing are in ``reply_action_parsing.py``.
"""

from __future__ import annotations

import msgspec

from ramify.engine.prompt_scaffold import Scaffold
from ramify.engine.reply_action_parsing import ParsedAction, prose_of
from ramify.types.message import Message, escape_message_surrogates

_LONG_CHARS = 100_000
"""Replies with more characters are parsed in a helper process. A reply of 8,192 tokens usually has
about 30,000 characters."""
_MANY_CALLS = 100


class _Reading(msgspec.Struct, array_like=True):
    scaffold: Scaffold
    message: Message
    is_cut: bool


class ParsedReply(msgspec.Struct, array_like=True):
    """A parsed model reply: the requested action and, for a long reply, its prose without code."""

    action: ParsedAction
    prose: str | None = None
    """Text of a long reply, without code and thinking. None for a short reply, whose prose is
    extracted only when it is needed."""


async def read_reply(scaffold: Scaffold, message: Message, is_cut: bool = False) -> ParsedReply:
    """Parse a model's reply into code to run or a final answer, without blocking the event loop.

    A long reply is parsed in a helper process. If that fails or takes too long, the result has an
    empty action that states the error.
    """
    if not _is_long(message):
        return ParsedReply(scaffold.read(message, is_cut))
    from ramify.actors.untrusted_data_process import HelperProcessDied, call_in_helper_process

    try:
        reading = _encode(_Reading(scaffold, message, is_cut))
    except UnicodeEncodeError:
        reading = _encode(_Reading(scaffold, escape_message_surrogates(message), is_cut))
    try:
        answer = await call_in_helper_process(f"{__name__}:{read_in_helper.__name__}", reading)
    except HelperProcessDied as error:
        return ParsedReply(
            ParsedAction(ignored=(f"the whole reply: reading it failed, since {error}",)), ""
        )
    return _decode_read(answer)


def read_in_helper(reading: bytes) -> bytes:
    """Parse an encoded model reply inside the helper process, and return the encoded result."""
    given = _decode_reading(reading)
    action = given.scaffold.read(given.message, given.is_cut)
    return _encode(ParsedReply(action, prose_of(given.message.content)))


def _is_long(message: Message) -> bool:
    num_chars, calls = len(message.content), message.tool_calls
    if calls:
        num_chars += sum(len(call.arguments) for call in calls)
    return num_chars > _LONG_CHARS or len(calls) > _MANY_CALLS


_encode = msgspec.msgpack.Encoder().encode
_decode_reading = msgspec.msgpack.Decoder(_Reading).decode
_decode_read = msgspec.msgpack.Decoder(ParsedReply).decode
