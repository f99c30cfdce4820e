"""Convert a response of Anthropic's messages API into a ``Reply``.

The response is either one JSON body or the events of a stream.

    {"content": [{"type": "text", "text": "hi"}], "stop_reason": "end_turn"}  ->  Reply(…, "stop")

Thinking becomes ``reasoning``. ``anthropic.py`` writes the requests, and ``json_api.py`` sends
them.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.clients.base import parse_finish_reason, reported_usage
from ramify.clients.chat_json import decode_body, encode, reported_model_name, text_field
from ramify.types.message import Message, Reply, ToolCall, Usage

KIND = "message"
STREAM_FIELDS = {"stream": True}
"""Request fields that enable streaming. Anthropic's streams always include token counts."""
HAS_LAST_BODY = False

Blocks = list[dict[str, Any]]


class AnthropicMessageResponse(msgspec.Struct):
    """A response of Anthropic's API, reduced to the fields that Ramify reads."""

    content: list[dict[str, Any]] | None = None
    stop_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    usage: Any = None
    model: Any = None
    error: Any = None

    @property
    def choices(self) -> list[Any]:
        """The reply's content as a list with one entry, like OpenAI's ``choices``.

        The list is empty if the response has no content.
        """
        return [] if self.content is None else [self.content]

    @property
    def num_items(self) -> int:
        return len(self.content or ())


_decoder = msgspec.json.Decoder(AnthropicMessageResponse)


def decode(body: bytes) -> AnthropicMessageResponse:
    """Decode the JSON body of a response from Anthropic's messages API.

    Raises msgspec.DecodeError if the body has another form.
    """
    return decode_body(_decoder, body)


class _StreamEvent(msgspec.Struct):
    type: str = ""
    index: int = 0
    message: AnthropicMessageResponse | None = None
    content_block: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    usage: Any = None
    error: Any = None


_decoder_of_events = msgspec.json.Decoder(_StreamEvent)
_DELTAS = {
    "text_delta": "text",
    "thinking_delta": "thinking",
    "signature_delta": "signature",
    "input_json_delta": "partial_json",
}
"""Type of a stream delta -> the field that holds its text."""


class AnthropicReplyAssembler:
    """Assembles a reply from the events of an Anthropic stream."""

    def __init__(self) -> None:
        self.is_done = False
        self.error: Any = None
        self._body = AnthropicMessageResponse()
        self._blocks: dict[int, dict[str, Any]] = {}
        self._parts: dict[tuple[int, str], list[str]] = {}
        """(index of a content block, field) -> pieces of the field's text, in order."""

    @property
    def is_whole(self) -> bool:
        return isinstance(self._body.stop_reason, str)

    def add(self, event: bytes) -> tuple[str, str]:
        part = decode_body(_decoder_of_events, event)
        match part.type:
            case "message_start" if part.message is not None:
                self._body = part.message
            case "content_block_start":
                if part.content_block is None:
                    raise msgspec.DecodeError("a block begins without its kind")
                self._blocks[part.index] = dict(part.content_block)
            case "content_block_delta" if part.delta is not None:
                return self._add_delta(part.index, part.delta)
            case "message_delta":
                reason = (part.delta or {}).get("stop_reason")
                self._body.stop_reason = reason if isinstance(reason, str) else None
                self._update_usage(part.usage)
            case "message_stop":
                self.is_done = True
            case "error":
                self.error = part.error or {}
            case _:
                pass  # a keepalive, or the end of a block
        return "", ""

    def body(self) -> bytes:
        for (index, field), parts in self._parts.items():
            block, text = self._blocks[index], "".join(parts)
            if field == "partial_json":
                block["input"] = decode_arguments(text) if text else {}
            else:
                block[field] = f"{block.get(field) or ''}{text}"
        if self._blocks:
            self._body.content = [self._blocks[index] for index in sorted(self._blocks)]
        return encode(self._body)

    def _add_delta(self, index: int, delta: dict[str, Any]) -> tuple[str, str]:
        field = _DELTAS.get(str(delta.get("type")), "")
        text = delta.get(field)
        if text is None or text == "":
            return "", ""
        if not isinstance(text, str):
            raise msgspec.DecodeError(f"{text!r:.60} as the {field} of a block")
        self._blocks.setdefault(index, {"type": field})
        self._parts.setdefault((index, field), []).append(text)
        return (text if field == "text" else ""), (text if field == "thinking" else "")

    def _update_usage(self, usage: Any) -> None:
        """Update the reply's token counts with the counts in a stream event.

        Each count is a running total, and unchanged counts may be missing.
        """
        if isinstance(usage, dict):
            before = self._body.usage if isinstance(self._body.usage, dict) else {}
            known = {name: count for name, count in usage.items() if count is not None}
            self._body.usage = {**before, **known}


new_stream = AnthropicReplyAssembler


def reply_from_response(
    body: AnthropicMessageResponse, blocks: Blocks, model: str, seconds: float
) -> Reply:
    """Convert a decoded response into a ``Reply``.

    Raises ValueError if its fields contradict each other.
    """
    texts = [text_field(block, "text") for block in blocks if block.get("type") == "text"]
    thoughts = [
        text_field(block, "thinking") for block in blocks if block.get("type") == "thinking"
    ]
    message = Message(
        role="assistant",
        content="".join(texts),
        reasoning="".join(thoughts) or None,
        tool_calls=tuple(
            ToolCall(
                str(block.get("id")),
                str(block.get("name")),
                msgspec.json.encode(block.get("input")).decode(),
            )
            for block in blocks
            if block.get("type") == "tool_use"
        ),
    )
    finish = parse_finish_reason(body.stop_reason, model)
    return Reply(
        message,
        _usage(body.usage),
        finish,
        model=reported_model_name(body.model, model),
        seconds=seconds,
        filter=str(body.stop_reason) if finish == "content_filter" else "",
    )


def thinking_blocks(body: bytes) -> Blocks:
    """Return the signed thinking blocks in the body of a response.

    They must be sent back unchanged together with tool results.
    """
    kinds = ("thinking", "redacted_thinking")
    return [block for block in decode(body).content or () if block.get("type") in kinds]


def decode_arguments(text: str) -> dict[str, Any]:
    """Decode the arguments of a tool call to a JSON object, as the API requires.

    Any other text is returned in the field ``unparsed`` of an object.
    """
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"unparsed": text}


def _usage(reported: Any) -> Usage:
    """Read the token counts that Anthropic's API reports for a reply.

    The prompt tokens are the sum of the fresh, the cache-read and the cache-written tokens.
    """
    fields = reported if isinstance(reported, dict) else {}
    parts = [
        fields.get("input_tokens"),
        fields.get("cache_read_input_tokens") or 0,
        fields.get("cache_creation_input_tokens") or 0,
    ]
    details = fields.get("output_tokens_details")
    thinking = details.get("thinking_tokens") if isinstance(details, dict) else None
    counts = [
        reported_usage(part, 0).input_tokens if reported_usage(part, 0).calls else None
        for part in parts
    ]
    prompt_tokens = None if None in counts else sum(filter(None, counts))
    return reported_usage(
        prompt_tokens,
        fields.get("output_tokens"),
        cached=counts[1],
        stored=counts[2],
        reasoning=thinking,
    )
