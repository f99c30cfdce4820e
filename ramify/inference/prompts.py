"""Conversion between messages and token ids, for engines that take ids: the prompt of a request,
and the message that sampled ids stand for.

This is the only place where it happens, so the engine in this process and engines behind HTTP get
the same ids for the same request.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from ramify.clients.base import Request
from ramify.errors import Refused
from ramify.models.renderer import Renderer
from ramify.types.message import Message


def prompt_ids(renderer: Renderer, request: Request) -> list[int]:
    """The whole prompt: the known ids, then the ids that the messages after them add."""
    known = request.known
    if known is None or renderer.unstable:
        return renderer.prompt(request.messages, request.tools)
    return [*known.ids, *renderer.extend(request.messages[known.num_messages :], after=known.ids)]


def spoken(renderer: Renderer, sampled: Sequence[int], stop: Sequence[str] = ()) -> Message:
    """The message that the ``sampled`` ids stand for, cut before the first text of ``stop`` in
    it."""
    message = renderer.parse(sampled)
    ends = [at for text in stop if (at := message.content.find(text)) >= 0]
    return (
        msgspec.structs.replace(message, content=message.content[: min(ends)]) if ends else message
    )


def too_long(name: str, window: int, request: Request | None, num_ids: int) -> Refused:
    """The error for a prompt of ``num_ids`` tokens that does not fit the window."""
    parts = "given as ids"
    if request is not None:
        before = request.known
        parts = f"{len(request.messages)} messages"
        if before is not None:
            new = len(request.messages) - before.num_messages
            parts = (
                f"{len(before.ids)} from the turns before, {num_ids - len(before.ids)} from {new} "
                "new messages"
            )
    error = Refused(
        f"{name}: the prompt has {num_ids} tokens ({parts}), and the window of {window} leaves no "
        "room for a reply: shorten it, or let a child look at a part"
    )
    error.too_long = True
    return error
