"""What is said to a model and what comes back, whatever the provider's wire looks like.

Clients translate; nothing above them knows a provider's field names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls", "content_filter", "other"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One native tool call that a model asked for."""

    id: str
    name: str
    arguments: str
    """The arguments as the JSON text that the model wrote; it may not parse."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message of a conversation."""

    role: Role
    content: str = ""
    reasoning: str | None = None
    """What a reasoning model thought aloud, where the provider returns it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For ``role="tool"``: the call that this message answers."""


def encodable(text: str) -> str:
    """``text`` as it can be sent and written: half a surrogate pair, which UTF-8 cannot hold,
    becomes its escape."""
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def sendable(message: Message) -> Message:
    """``message`` with all its texts ``encodable``."""
    calls = tuple(
        ToolCall(encodable(call.id), encodable(call.name), encodable(call.arguments))
        for call in message.tool_calls
    )
    reasoning = None if message.reasoning is None else encodable(message.reasoning)
    return Message(message.role, encodable(message.content), reasoning, calls, message.tool_call_id)


class Usage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Tokens as the server counted them. Adds with ``+``."""

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """The part of ``input_tokens`` that the provider read from its prompt cache."""
    reasoning_tokens: int = 0
    """The part of ``output_tokens`` that was thinking."""
    calls: int = 0
    """Requests that were paid for, or may have been."""
    unknown_calls: int = 0
    """The part of ``calls`` whose tokens are an upper bound, since no usage came back."""
    cache_write_tokens: int = 0
    """The part of ``input_tokens`` that the provider stored in its prompt cache and charges for as
    such."""

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.input_tokens + other.input_tokens,
            self.output_tokens + other.output_tokens,
            self.cached_tokens + other.cached_tokens,
            self.reasoning_tokens + other.reasoning_tokens,
            self.calls + other.calls,
            self.unknown_calls + other.unknown_calls,
            self.cache_write_tokens + other.cache_write_tokens,
        )

    @property
    def total_tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class VersionSpan(msgspec.Struct, frozen=True):
    """Sampled tokens ``[start, end)`` came from policy ``version``."""

    start: int
    end: int
    version: int


class Reply(msgspec.Struct, frozen=True, omit_defaults=True):
    """What any client returns for one request."""

    message: Message
    usage: Usage = Usage()
    finish: Finish = "stop"
    model: str = ""
    """The model's name as the server gave it."""
    cost: float | None = None
    """Dollars, or None where the model has no price."""
    seconds: float = 0.0
    """Time on the wire."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole prompt, where the server returns them; in a tree and a journal those
    after the ``reused_ids`` of the turn."""
    token_ids: tuple[int, ...] | None = None
    """Token ids that were sampled, the one that ended the reply included."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each sampled token, under the distribution that it was drawn from."""
    versions: tuple[VersionSpan, ...] | None = None
    kept: tuple[tuple[int, ...], ...] | None = None
    """For each sampled token the ids that top-p and top-k left to draw from: with them a trainer
    renormalises as the sampler did. None where nothing was cut off."""
    filter: str = ""
    """What stopped the reply, as the server named it, if ``finish`` is ``content_filter``:
    ``SAFETY``, ``refusal``."""

    def __post_init__(self) -> None:
        if self.token_ids is None:
            return
        for name, values in (("logprobs", self.logprobs), ("kept sets", self.kept)):
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{len(self.token_ids)} token ids but {len(values)} {name} in one reply"
                )
