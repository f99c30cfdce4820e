"""OpenAI's chat completions from the server's side: a body in, a ``Request`` out; a ``Reply`` in,
bodies and events out.

Fields that change nothing here (``user``, ``metadata``, …) are taken and ignored; one that would
change the answer and is not understood is refused by name, so that nobody believes it was heeded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ramify.clients.base import Request, Sampling, Tool
from ramify.errors import Refused
from ramify.types.message import Message, Reply, ToolCall, Usage

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
"""Field -> the value at which it changes nothing."""


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _Call(msgspec.Struct):
    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _CompletionMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None


class _OfferedTool(msgspec.Struct):
    name: str
    description: str = ""
    parameters: dict[str, Any] = {}


class _Tool(msgspec.Struct):
    function: _OfferedTool


class _StreamOptions(msgspec.Struct):
    include_usage: bool = False


class CompletionRequest(msgspec.Struct):
    """A request for a chat completion, as far as it is read."""

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
    stream_options: _StreamOptions | None = None
    tools: list[_Tool] | None = None
    prompt_cache_key: str | None = None


_decode = msgspec.json.Decoder(CompletionRequest).decode
_decode_any = msgspec.json.Decoder(dict[str, Any]).decode
encode = msgspec.json.Encoder().encode


def read(body: bytes) -> CompletionRequest:
    """Raises Refused that says what is wrong with ``body``."""
    try:
        asked, fields = _decode(body), _decode_any(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a request for a chat completion: {error}") from None
    for name, harmless in _NOT_HERE.items():
        if fields.get(name) not in (None, harmless):
            raise Refused(f"{name}={fields[name]!r} is not supported: leave it out")
    if not asked.messages:
        raise Refused("messages is empty: give at least one")
    limit = _limit(asked)
    if limit is not None and limit < 1:
        raise Refused(f"max_tokens is {limit}: give at least 1")
    if (
        not (asked.temperature or 0) >= 0
        or not 0 < (1 if asked.top_p is None else asked.top_p) <= 1
    ):
        raise Refused(
            f"temperature={asked.temperature} must be at least 0, top_p={asked.top_p} above 0 and "
            "at most 1"
        )
    return asked


def request_of(asked: CompletionRequest, window: int) -> Request:
    """What the engine is asked. Without a limit a reply may fill the window."""
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    sampling = Sampling(
        max_tokens=_limit(asked) or window,
        temperature=asked.temperature,
        top_p=asked.top_p,
        top_k=asked.top_k,
        stop=tuple(filter(None, stop)),
        seed=asked.seed,
        logprobs=True,
    )
    tools = tuple(
        Tool(each.function.name, each.function.description, each.function.parameters)
        for each in asked.tools or ()
    )
    return Request(
        tuple(map(_message, asked.messages)),
        sampling,
        tools=tools,
        affinity=asked.prompt_cache_key or "",
    )


def completion(
    reply: Reply,
    asked: CompletionRequest,
    id: str,
    model: str,
    text_of: Callable[[Sequence[int]], str],
) -> dict[str, Any]:
    """The whole body."""
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
    _add_tokens(body, choice, reply, asked, text_of)
    return body


def growth(before: Message, now: Message, id: str, model: str) -> dict[str, Any] | None:
    """The event for what a message has gained; None where that is nothing."""
    delta: dict[str, Any] = {}
    for field, old, new in (
        ("reasoning_content", before.reasoning or "", now.reasoning or ""),
        ("content", before.content, now.content),
    ):
        if len(new) > len(old) and new.startswith(old):
            delta[field] = new[len(old) :]
    return event(id, model, delta) if delta else None


def opening(id: str, model: str) -> dict[str, Any]:
    """The first event."""
    return event(id, model, {"role": "assistant", "content": ""})


def ending(
    reply: Reply,
    asked: CompletionRequest,
    id: str,
    model: str,
    text_of: Callable[[Sequence[int]], str],
) -> list[dict[str, Any]]:
    """The last events: calls of tools, why it ended, and what it used where that was asked for."""
    events = []
    if calls := _wire(reply.message).get("tool_calls"):
        events.append(
            event(id, model, {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]})
        )
    last = event(id, model, {})
    last["choices"][0]["finish_reason"] = reply.finish
    _add_tokens(last, last["choices"][0], reply, asked, text_of)
    events.append(last)
    if asked.stream_options is not None and asked.stream_options.include_usage:
        events.append(
            {
                **head(id, model, "chat.completion.chunk"),
                "choices": [],
                "usage": usage_fields(reply.usage),
            }
        )
    return events


def failure(
    text: str, kind: str, code: str | None = None, param: str | None = None, **more: Any
) -> bytes:
    """The body of an error; ``param`` is the field that is wrong, ``more`` are fields beside
    OpenAI's."""
    return encode({"error": {"message": text, "type": kind, "code": code, "param": param, **more}})


def _limit(asked: CompletionRequest) -> int | None:
    return asked.max_tokens if asked.max_completion_tokens is None else asked.max_completion_tokens


def _message(said: _CompletionMessage) -> Message:
    content = said.content or ""
    if not isinstance(content, str):
        kinds = {str(part.get("type")) for part in content}
        if kinds - {"text"}:
            raise Refused(
                f"content of type {', '.join(sorted(kinds - {'text'}))} is not supported: give text"
            )
        content = "".join(str(part.get("text", "")) for part in content)
    calls = tuple(
        ToolCall(call.id, call.function.name, call.function.arguments)
        for call in said.tool_calls or ()
    )
    role = "system" if said.role == "developer" else said.role
    return Message(role, content, said.reasoning_content, calls, said.tool_call_id)


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
    asked: CompletionRequest,
    text_of: Callable[[Sequence[int]], str],
) -> None:
    ids, logprobs = reply.token_ids or (), reply.logprobs or ()
    if asked.logprobs:
        texts = [text_of([id]) for id in ids]
        choice["logprobs"] = {
            "content": [
                {"token": text, "logprob": logprob, "bytes": _bytes(text), "top_logprobs": []}
                for text, logprob in zip(texts, logprobs, strict=True)
            ]
        }
    if asked.return_token_ids:
        choice["token_ids"] = ids
        body["prompt_token_ids"] = reply.prompt_ids


def _bytes(text: str) -> list[int] | None:
    """None for a part of a character, whose bytes its text does not say."""
    return None if "\ufffd" in text else list(text.encode())


def usage_fields(usage: Usage) -> dict[str, Any]:
    """``usage`` as chat completions write it."""
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
    """What every body begins with."""
    return {"id": id, "object": kind, "created": int(time.time()), "model": model}
