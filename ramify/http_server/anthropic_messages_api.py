"""Anthropic's messages API for a single model: parse requests, and write replies and streams.

    body ──read──> AnthropicReplyWriter ── request ──> Request       Reply ──> body or events

In this API, the arguments of a tool call are a JSON object, while the chat template of a model
writes them as JSON text. Both directions use the spacing of ``json.dumps``, as chat templates do,
so that a call that a client sends back has the text that the model wrote. Log-probabilities and
several replies do not exist in this API. Unsupported fields that would change the answer are
rejected by name. Ramify's own client of this API is in ``clients/anthropic.py``.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.clients.base import Request, Sampling, Tool
from ramify.errors import RequestRefusedError
from ramify.http_server import model_api
from ramify.http_server.model_api import (
    ReplyDeltaTracker,
    ServedModel,
    ToolChoice,
    encode,
    server_sent_event,
)
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Message, Reply, ToolCall, Usage

PATH = "/messages"
COUNT_PATH = "/messages/count_tokens"
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "context_management": (
        {},
        {"edits": []},
        {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    ),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""
_TEXT_BLOCKS = {"text": "text"}
_UNPARSED = "unparsed"
"""Key of the object that wraps tool-call arguments which are not a JSON object."""
_STOP_REASONS = {
    "length": "max_tokens",
    "tool_calls": "tool_use",
    "content_filter": "refusal",
}


class _Block(msgspec.Struct):
    type: str
    text: str = ""
    thinking: str = ""
    id: str = ""
    name: str = ""
    input: dict[str, Any] = {}
    tool_use_id: str = ""
    content: str | list[dict[str, Any]] | None = None


class _Turn(msgspec.Struct):
    role: Literal["user", "assistant", "system"]
    content: str | list[_Block]


class _Tool(msgspec.Struct):
    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class _Choice(msgspec.Struct):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool | None = None


class _OutputConfig(msgspec.Struct):
    format: Any = None


class AnthropicMessagesRequest(msgspec.Struct):
    """The fields of a messages API request, including those that this server rejects.

    It asks for a reply or a token count.
    """

    messages: list[_Turn]
    model: str = ""
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    tools: list[_Tool] | None = None
    tool_choice: _Choice | None = None
    output_config: _OutputConfig | None = None
    output_format: Any = None
    store: bool | None = None
    """If false, nothing of the exchange is recorded. Anthropic's own API has no such field."""
    # Rejected unless their value has no effect: see ``_HARMLESS``.
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None


_decoder = msgspec.json.Decoder(AnthropicMessagesRequest)


class AnthropicReplyWriter:
    """Handles one messages API request, and writes the response.

    The response is one body or a stream of events.
    """

    num_replies = 1

    def __init__(self, parsed: AnthropicMessagesRequest, model: ServedModel) -> None:
        """Prepare to answer a parsed request to the messages API.

        Raises RequestRefusedError or RequestRejected if it cannot be answered.
        """
        self.is_streamed = bool(parsed.stream)
        self.is_private = parsed.store is False
        self.request = _request_of(parsed, model.window)
        self.tool_choice = model_api.check_tool_choice(
            _choice(parsed.tool_choice), self.request.tools, "tool_choice"
        )
        self._model = model
        self.id = f"msg_{uuid.uuid4().hex[:24]}"
        self._growth = ReplyDeltaTracker()
        self._open = ""
        """Type of the content block that is being streamed. Empty between blocks."""
        self._num_blocks = 0

    def response_body(self, replies: Sequence[Reply]) -> bytes:
        (reply,) = replies
        message = reply.message
        content: list[dict[str, Any]] = []
        if message.reasoning is not None:
            signed = {"thinking": message.reasoning, "signature": self.id}
            content.append({"type": "thinking", **signed})
        if message.content:
            content.append({"type": "text", "text": message.content})
        content += [
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": _arguments_to_object(call.arguments),
            }
            for call in model_api.calls_with_unique_ids(message)
        ]
        fields = {**self._head(content), **self._stop_fields(reply), "usage": _usage(reply.usage)}
        return encode(fields)

    def encode_stream_start(self) -> bytes:
        head = self._head([])
        head |= {"stop_reason": None, "stop_sequence": None, "usage": _usage(Usage())}
        return _event("message_start", message=head)

    def encode_message_delta(self, index: int, message: Message) -> bytes:
        reasoning, content = self._growth.next_delta(message)
        events = b""
        if reasoning is not None:
            events += self._in_block("thinking", {"thinking": "", "signature": ""})
        if reasoning:
            events += self._delta({"type": "thinking_delta", "thinking": reasoning})
        if content:
            events += self._in_block("text", {"text": ""})
            events += self._delta({"type": "text_delta", "text": content})
        return events

    def encode_reply_end(self, index: int, reply: Reply) -> bytes:
        events = self.encode_message_delta(index, reply.message)
        for call in model_api.calls_with_unique_ids(reply.message):
            fields = {"id": call.id, "name": call.name, "input": {}}
            events += self._close_block() + self._in_block("tool_use", fields)
            written = json.dumps(_arguments_to_object(call.arguments), ensure_ascii=False)
            events += self._delta({"type": "input_json_delta", "partial_json": written})
        events += self._close_block()
        return events + _event(
            "message_delta", delta=self._stop_fields(reply), usage=_usage(reply.usage)
        )

    def encode_stream_end(self) -> bytes:
        return _event("message_stop")

    def encode_stream_error(self, error: RequestRejected) -> bytes:
        return b"event: error\ndata: " + error.anthropic_error_body() + b"\n\n"

    def _in_block(self, kind: str, fields: dict[str, Any]) -> bytes:
        """Start a content block of the given kind in the streamed reply, unless one is already
        open.

        Returns the events to send: the end of the previous block and the start of this one.
        """
        if self._open == kind:
            return b""
        events = self._close_block()
        self._open = kind
        block = {"type": kind, **fields}
        return events + _event("content_block_start", index=self._num_blocks, content_block=block)

    def _close_block(self) -> bytes:
        if not self._open:
            return b""
        events = b""
        if self._open == "thinking":
            events = self._delta({"type": "signature_delta", "signature": self.id})
        events += _event("content_block_stop", index=self._num_blocks)
        self._open = ""
        self._num_blocks += 1
        return events

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._num_blocks, delta=delta)

    def _head(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self._model.name,
            "content": content,
        }

    def _stop_fields(self, reply: Reply) -> dict[str, Any]:
        """Return the fields of the response that say why the model's reply ended."""
        reason = _STOP_REASONS.get(reply.finish, "end_turn")
        stop = self._stop_sequence(reply) if reason == "end_turn" else None
        return {"stop_reason": "stop_sequence" if stop else reason, "stop_sequence": stop}

    def _stop_sequence(self, reply: Reply) -> str | None:
        """Return the stop sequence that ended the model's reply, or None if there is none.

        The decoded token ids still contain it, directly after the message's text.
        """
        stops = self.request.sampling.stop
        if not stops or not reply.token_ids:
            return None
        sampled = "".join(map(self._model.token_text, reply.token_ids))
        content = reply.message.content
        return next((stop for stop in stops if content + stop in sampled), None)


def parse_request(body: bytes, model: ServedModel) -> AnthropicReplyWriter:
    """Parse the body of a messages API request, and return the writer of its response.

    Raises RequestRefusedError or RequestRejected with the reason if it is invalid.
    """
    parsed = _parse_request(body)
    if parsed.max_tokens is None:
        raise RequestRejected("max_tokens is missing: give at least 1", param="max_tokens")
    if parsed.max_tokens < 1:
        raise RequestRefusedError(f"max_tokens is {parsed.max_tokens}: give at least 1")
    return AnthropicReplyWriter(parsed, model)


def parse_token_count_request(body: bytes, model: ServedModel) -> Request:
    """Parse the body of a request to count a prompt's tokens.

    Raises RequestRefusedError or RequestRejected with the reason if it is invalid.
    """
    return _request_of(_parse_request(body), model.window)


def _parse_request(body: bytes) -> AnthropicMessagesRequest:
    parsed = model_api.decode_request(_decoder, body, "message")
    model_api.refuse_unsupported(parsed, _HARMLESS)
    if not parsed.messages:
        raise RequestRefusedError("messages is empty: give at least one")
    if parsed.messages[-1].role == "assistant":
        raise RequestRejected(
            "the last message is the assistant's: prefilling a reply is not supported; end with a "
            "user message",
            param="messages",
        )
    model_api.check_sampling(parsed.temperature, parsed.top_p)
    return parsed


def _request_of(parsed: AnthropicMessagesRequest, window: int) -> Request:
    sampling = Sampling(
        max_tokens=parsed.max_tokens or window,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        stop=tuple(filter(None, parsed.stop_sequences or ())),
        logprobs=True,
    )
    messages = [Message("system", _text(parsed.system, "\n\n"))] if parsed.system else []
    for turn in parsed.messages:
        messages += (
            _parse_assistant_turn(turn) if turn.role == "assistant" else _parse_user_turn(turn)
        )
    format = parsed.output_format
    if parsed.output_config is not None and parsed.output_config.format is not None:
        format = parsed.output_config.format
    schema = model_api.response_format_schema(format, "output_config.format")
    return Request(tuple(messages), sampling, schema, _tools(parsed.tools or ()))


def _tools(offered: Sequence[_Tool]) -> tuple[Tool, ...]:
    for index, tool in enumerate(offered):
        if tool.type not in (None, "custom"):
            raise RequestRejected(
                f"a tool of type {tool.type!r:.60} is not supported: give tools with an "
                "input_schema",
                param=f"tools[{index}].type",
            )
    return tuple(
        Tool(tool.name, tool.description or "", tool.input_schema or {}) for tool in offered
    )


def _choice(choice: _Choice | None) -> ToolChoice:
    if choice is None:
        return ToolChoice()
    is_parallel = not choice.disable_parallel_tool_use
    match choice.type:
        case "none":
            return ToolChoice(is_forbidden=True)
        case "any":
            return ToolChoice(is_required=True, is_parallel=is_parallel)
        case "tool":
            return ToolChoice(True, names=(choice.name,), is_parallel=is_parallel)
        case _:
            return ToolChoice(is_parallel=is_parallel)


def _parse_assistant_turn(turn: _Turn) -> list[Message]:
    """Convert an assistant turn of a messages API request to a message for the engine.

    The turn's content is a string or a list of content blocks.
    """
    if isinstance(turn.content, str):
        return [Message("assistant", turn.content)]
    content, reasoning = "", None
    calls = []
    for block in turn.content:
        match block.type:
            case "text":
                content += block.text
            case "thinking":
                reasoning = (reasoning or "") + block.thinking
            case "tool_use":
                id = model_api.original_call_id(block.id)
                calls.append(ToolCall(id, block.name, _object_to_arguments(block.input)))
            case _:
                raise _unsupported_block_error(block)
    return [Message("assistant", content, reasoning, tuple(calls))]


def _parse_user_turn(turn: _Turn) -> list[Message]:
    """Convert a turn that the model did not write from the messages API to engine messages.

    Each tool result becomes a message, and so does any text between tool results.
    """
    role = turn.role
    if isinstance(turn.content, str):
        return [Message(role, turn.content)]
    messages: list[Message] = []
    texts: list[str] = []
    for block in turn.content:
        if block.type == "text":
            texts.append(block.text)
            continue
        if block.type != "tool_result":
            raise _unsupported_block_error(block)
        if texts:
            messages.append(Message(role, "\n".join(texts)))
            texts.clear()
        id = model_api.original_call_id(block.tool_use_id)
        messages.append(Message("tool", _text(block.content or "", "\n"), tool_call_id=id))
    return [*messages, Message(role, "\n".join(texts))] if texts else messages


def _text(content: str | list[dict[str, Any]], between: str) -> str:
    if isinstance(content, str):
        return content
    return between.join(model_api.text_of_parts(content, _TEXT_BLOCKS))


def _unsupported_block_error(block: _Block) -> RequestRejected:
    return RequestRejected(
        f"a block of type {block.type!r:.60} is not supported: give text, thinking, tool_use and "
        "tool_result",
        param="messages",
    )


def _arguments_to_object(arguments: str) -> dict[str, Any]:
    """Convert a tool call's arguments from JSON text to the object that the messages API requires.

    Text that is not a JSON object is wrapped in one.
    """
    try:
        value = json.loads(arguments)
    except ValueError:
        return {_UNPARSED: arguments}
    return value if isinstance(value, dict) else {_UNPARSED: arguments}


def _object_to_arguments(input: dict[str, Any]) -> str:
    """Convert a tool call's arguments from the object of the messages API to JSON text.

    Text that ``_arguments_to_object`` wrapped is returned unchanged.
    """
    unparsed = input.get(_UNPARSED)
    if len(input) == 1 and isinstance(unparsed, str):
        return unparsed
    return json.dumps(input, ensure_ascii=False)


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens - usage.cached_tokens,
        "cache_read_input_tokens": usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.output_tokens,
    }


def _event(kind: str, **fields: Any) -> bytes:
    return server_sent_event({"type": kind, **fields}, kind)
