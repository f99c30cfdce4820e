"""The chat completions API for a single model: reads requests, and writes replies and streams.

    body ──read──> CompletionRequest ──request_of──> Request       Reply ──> body or events

Fields without an effect here (``user``, ``metadata``, …) are accepted and ignored. A field that
would change the answer but is not supported is rejected by name, so that no client believes that it
had an effect. Not here: chat completions for runs (see serve/chat_completions.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from ramify.clients.base import Request, Sampling, Tool
from ramify.errors import Refused
from ramify.types.message import Message, Reply, ToolCall, Usage

T = TypeVar("T")
_NOT_HERE = {
    "n": 1,
    "frequency_penalty": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "min_p": 0,
    "logit_bias": None,
    "top_logprobs": 0,
    "response_format": None,
    "tool_choice": "auto",
    "functions": None,
    "audio": None,
}
"""Unsupported field -> the value that has no effect and is accepted."""


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class WrittenCall(msgspec.Struct):
    """Tool call of an earlier reply."""

    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _CompletionMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[WrittenCall] | None = None
    tool_call_id: str | None = None


class _OfferedTool(msgspec.Struct):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    function: _OfferedTool


class StreamOptions(msgspec.Struct):
    """Options of a streamed completion."""

    include_usage: bool = False


class CompletionRequest(msgspec.Struct):
    """Request for a chat completion: the fields that this server reads."""

    messages: list[_CompletionMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[_Tool] | None = None
    prompt_cache_key: str | None = None


_decoder = msgspec.json.Decoder(CompletionRequest)
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


def read_fields(
    body: bytes, decoder: msgspec.json.Decoder[T], harmless: Mapping[str, Any], kind: str
) -> T:
    """Decode a request for a ``kind``. ``harmless``: unsupported field -> the value that has no
    effect and is accepted. Raises Refused."""
    try:
        api_request, fields = decoder.decode(body), _decode_any(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a request for a {kind}: {error}") from None
    for name, value in harmless.items():
        if fields.get(name) not in (None, value):
            raise Refused(f"{name}={fields[name]!r} is not supported: remove it")
    return api_request


def read(body: bytes) -> CompletionRequest:
    """Read a request body. Raises Refused with the reason if it is invalid."""
    api_request = read_fields(body, _decoder, _NOT_HERE, "chat completion")
    if not api_request.messages:
        raise Refused("messages is empty: give at least one")
    limit = _limit(api_request)
    if limit is not None and limit < 1:
        raise Refused(f"max_tokens is {limit}: give at least 1")
    if (
        not (api_request.temperature or 0) >= 0
        or not 0 < (1 if api_request.top_p is None else api_request.top_p) <= 1
    ):
        raise Refused(
            f"temperature={api_request.temperature} must be at least 0, "
            f"top_p={api_request.top_p} above 0 and at most 1"
        )
    return api_request


def request_of(api_request: CompletionRequest, window: int) -> Request:
    """Convert to an engine request. Without a token limit, a reply may fill the window."""
    stop = [api_request.stop] if isinstance(api_request.stop, str) else api_request.stop or []
    sampling = Sampling(
        max_tokens=_limit(api_request) or window,
        temperature=api_request.temperature,
        top_p=api_request.top_p,
        top_k=api_request.top_k,
        stop=tuple(filter(None, stop)),
        seed=api_request.seed,
        logprobs=True,
    )
    tools = tuple(
        Tool(tool.function.name, tool.function.description, tool.function.parameters)
        for tool in api_request.tools or ()
    )
    return Request(
        tuple(map(_message, api_request.messages)),
        sampling,
        tools=tools,
        affinity=api_request.prompt_cache_key or "",
    )


def completion(
    reply: Reply,
    api_request: CompletionRequest,
    id: str,
    model: str,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """Response body of a reply that is not streamed."""
    choice: dict[str, Any] = {
        "index": 0,
        "message": _wire(reply.message),
        "finish_reason": reply.finish,
    }
    body = {
        **head(id, model, "chat.completion"),
        "choices": [choice],
        "usage": usage_fields(reply.usage),
    }
    _add_tokens(body, choice, reply, api_request, text_of)
    return body


def growth(before: Message, now: Message, id: str, model: str) -> dict[str, Any] | None:
    """Event with the text that a message has gained; None if it has gained nothing."""
    delta: dict[str, Any] = {}
    for field, old, new in (
        ("reasoning_content", before.reasoning or "", now.reasoning or ""),
        ("content", before.content, now.content),
    ):
        if len(new) > len(old) and new.startswith(old):
            delta[field] = new[len(old) :]
    return event(id, model, delta) if delta else None


def opening(id: str, model: str) -> dict[str, Any]:
    """First event of a stream."""
    return event(id, model, {"role": "assistant", "content": ""})


def ending(
    reply: Reply,
    api_request: CompletionRequest,
    id: str,
    model: str,
    text_of: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """Last events of a stream: tool calls, the finish reason, and the usage if requested."""
    events = []
    if calls := _wire(reply.message).get("tool_calls"):
        events.append(
            event(id, model, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        )
    last = event(id, model, {})
    last["choices"][0]["finish_reason"] = reply.finish
    _add_tokens(last, last["choices"][0], reply, api_request, text_of)
    events.append(last)
    if api_request.stream_options is not None and api_request.stream_options.include_usage:
        events.append(
            {
                **head(id, model, "chat.completion.chunk"),
                "choices": [],
                "usage": usage_fields(reply.usage),
            }
        )
    return events


def _limit(api_request: CompletionRequest) -> int | None:
    return (
        api_request.max_tokens
        if api_request.max_completion_tokens is None
        else api_request.max_completion_tokens
    )


def _message(message: _CompletionMessage) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        kinds = {str(part.get("type")) for part in content}
        if kinds - {"text"}:
            raise Refused(
                f"content of type {', '.join(sorted(kinds - {'text'}))} is not supported: give text"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    role = "system" if message.role == "developer" else message.role
    return Message(role, content, message.reasoning_content, calls, message.tool_call_id)


def _wire(message: Message) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning is not None:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return wire


def _add_tokens(
    body: dict[str, Any],
    choice: dict[str, Any],
    reply: Reply,
    api_request: CompletionRequest,
    text_of: Callable[[Sequence[int]], str],
) -> None:
    ids, logprobs = reply.token_ids or (), reply.logprobs or ()
    if api_request.logprobs:
        texts = [text_of([id]) for id in ids]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }
    if api_request.return_token_ids:
        choice["token_ids"] = ids
        body["prompt_token_ids"] = reply.prompt_ids


def _bytes(text: str) -> list[int] | None:
    """UTF-8 bytes of a token; None for a part of a character, whose bytes are unknown."""
    return None if "\ufffd" in text else list(text.encode())


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Convert ``usage`` to the format of chat completions."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def event(id: str, model: str, delta: dict[str, Any]) -> dict[str, Any]:
    """One event of a stream."""
    choice = {"index": 0, "delta": delta, "finish_reason": None}
    return {**head(id, model, "chat.completion.chunk"), "choices": [choice]}


def head(id: str, model: str, kind: str) -> dict[str, Any]:
    """Fields that every response body and event has."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}
