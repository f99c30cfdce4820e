"""Define messages to a model and the replies that come back, independently of the provider.

Each client translates them to its provider's format. No other code uses a provider's field names.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from ramify.types.picture import Picture

Role = Literal["system", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "tool_calls", "content_filter", "other"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """A tool call that a model requested through its API.

    >>> inference.ToolCall("call_1", "lookup", '{"host": "web-3"}').name
    'lookup'
    """

    id: str
    name: str
    arguments: str
    """Arguments as the JSON text that the model wrote. It may be invalid JSON."""


class Message(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One message of a conversation with a model.

    >>> ramify.Message("user", "Which host failed first?").role
    'user'
    """

    role: Role
    content: str = ""
    reasoning: str | None = None
    """Reasoning text of a reasoning model, if the provider returns it."""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str | None = None
    """For ``role="tool"``: id of the tool call that this message answers."""
    pictures: tuple[Picture, ...] = ()
    """Pictures that the model sees before the text, as references. The request supplies their
    bytes."""


def escape_surrogates(text: str) -> str:
    """Escape the characters of ``text`` that UTF-8 cannot encode, and return the result.

    Lone surrogates are replaced by escapes.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def escape_message_surrogates(message: Message) -> Message:
    """Return a copy of ``message`` in which characters that UTF-8 cannot encode are escaped.

    Lone surrogates are replaced by escapes.
    """
    calls = tuple(
        ToolCall(
            escape_surrogates(call.id),
            escape_surrogates(call.name),
            escape_surrogates(call.arguments),
        )
        for call in message.tool_calls
    )
    reasoning = None if message.reasoning is None else escape_surrogates(message.reasoning)
    pictures = tuple(
        msgspec.structs.replace(picture, name=escape_surrogates(picture.name))
        for picture in message.pictures
    )
    content, id = escape_surrogates(message.content), message.tool_call_id
    return Message(message.role, content, reasoning, calls, id, pictures)


class Usage(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Token counts of one or more requests, as the server reported them.

    Two instances can be added with ``+``.
    """

    input_tokens: int = 0
    output_tokens: int = 0
    cached_tokens: int = 0
    """Part of ``input_tokens`` that the provider read from its prompt cache."""
    reasoning_tokens: int = 0
    """Part of ``output_tokens`` that was reasoning."""
    calls: int = 0
    """Number of requests that were billed, or may have been."""
    unknown_calls: int = 0
    """Number of those calls whose token counts are upper bounds, because the server reported no
    usage."""
    cache_write_tokens: int = 0
    """Part of ``input_tokens`` that the provider wrote to its prompt cache, which it bills at a
    separate price.
    """

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


class VersionSpan(msgspec.Struct, frozen=True, gc=False):
    """The policy version that sampled the tokens ``[start, end)`` of a reply.

    Weights may change while a reply is being sampled, so a reply can have several spans.
    """

    start: int
    end: int
    version: int


class Reply(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """The reply of a model to one request.

    Every client returns replies in this form.
    """

    message: Message
    usage: Usage = Usage()
    finish: Finish = "stop"
    model: str = ""
    """Name of the model as the server reported it."""
    cost: float | None = None
    """Cost in dollars. None if the model has no price."""
    seconds: float = 0.0
    """Duration of the request in seconds."""
    prompt_ids: tuple[int, ...] | None = None
    """Token ids of the whole prompt, if the server returns them. In a trajectory or journal, only
    those after the turn's first ``reused_ids`` ids."""
    token_ids: tuple[int, ...] | None = None
    """Sampled token ids, including the one that ended the reply."""
    logprobs: tuple[float, ...] | None = None
    """Log-probability of each sampled token under the distribution that it was drawn from."""
    versions: tuple[VersionSpan, ...] | None = None
    kept: tuple[tuple[int, ...], ...] | None = None
    """For each sampled token, the ids that remained after top-p and top-k filtering. A trainer
    renormalizes over them as the sampler did. None if nothing was filtered out.
    """
    routes: tuple[tuple[int, ...], ...] | None = None
    """For mixture-of-experts models: for each sampled token, the experts of the forward pass that
    produced it, i.e. of the preceding token. They are k ids per layer, concatenated. None if the
    engine does not report them.
    """
    filter: str = ""
    """The server's own reason for stopping the reply, such as ``SAFETY`` or ``refusal``. Set if
    ``finish`` is ``content_filter``.
    """
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None = None
    """For each sampled token, the most likely ids at its position with their log-probabilities,
    most likely first. The log-probabilities are under the distribution that the token was drawn
    from. None unless the request asked for them.
    """

    def __post_init__(self) -> None:
        if self.token_ids is None:
            return
        per_token = (
            ("logprobs", self.logprobs),
            ("kept sets", self.kept),
            ("routes", self.routes),
            ("sets of likeliest tokens", self.top_logprobs),
        )
        for name, values in per_token:
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{len(self.token_ids)} token ids but {len(values)} {name} in one reply"
                )
