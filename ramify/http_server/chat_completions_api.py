"""The chat completions API for a single model: parse requests, and write replies and streams.

    body ──read──> ChatCompletionsReplyWriter ── request ──> Request       Reply ──> body or events

Fields without an effect here (``user``, ``metadata``, …) are accepted and ignored. A field that
would change the answer but is not supported is rejected by name, so that no client believes that it
had an effect. Chat completions for whole runs are handled in ``serve/chat_completions.py``.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.clients.base import Request, Sampling, Tool
from ramify.errors import RequestRefusedError
from ramify.http_server import model_api
from ramify.http_server.model_api import (
    MAX_REPLIES,
    ReplyDeltaTracker,
    ServedModel,
    server_sent_event,
)
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Message, Reply, ToolCall, Usage

PATH = "/chat/completions"
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "ignore_eos": (False,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "chat_template_kwargs": ({},),
    "guided_json": (),
    "structured_outputs": (),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class PriorToolCall(msgspec.Struct):
    """A tool call from an earlier reply in the conversation."""

    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _CompletionMessage(msgspec.Struct):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    reasoning_content: str | None = None
    tool_calls: list[PriorToolCall] | None = None
    tool_call_id: str | None = None


class _OfferedTool(msgspec.Struct):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Tool(msgspec.Struct):
    function: _OfferedTool


class StreamOptions(msgspec.Struct):
    """Options of a streamed chat completion.

    ``include_usage`` adds the token usage to the last event.
    """

    include_usage: bool = False


class ChatCompletionRequest(msgspec.Struct):
    """The fields of a chat completion request, including those that this server rejects."""

    messages: list[_CompletionMessage]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    return_token_ids: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    response_format: Any = None
    prompt_cache_key: str | None = None
    store: bool | None = None
    # Rejected unless their value has no effect: see ``_HARMLESS``.
    frequency_penalty: Any = None
    presence_penalty: Any = None
    repetition_penalty: Any = None
    min_p: Any = None
    min_tokens: Any = None
    logit_bias: Any = None
    ignore_eos: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    chat_template_kwargs: Any = None
    guided_json: Any = None
    structured_outputs: Any = None


_decoder = msgspec.json.Decoder(ChatCompletionRequest)
encode = model_api.encode


class ChatCompletionsReplyWriter:
    """Handles one chat completion request, and writes the response.

    The response is one body or a stream.
    """

    def __init__(self, parsed: ChatCompletionRequest, model: ServedModel) -> None:
        """Prepare to answer a parsed chat completion request.

        Raises RequestRefusedError or RequestRejected if it cannot be answered.
        """
        self.num_replies = _num_replies(parsed.n)
        self.is_streamed = bool(parsed.stream)
        self.request = _request_of(parsed, model.window)
        self.tool_choice = model_api.check_tool_choice(
            model_api.parse_openai_tool_choice(parsed.tool_choice, parsed.parallel_tool_calls),
            self.request.tools,
            "tool_choice",
        )
        self._parsed = parsed
        self._model = model
        self.id = f"chatcmpl-{uuid.uuid4().hex[:24]}"
        self.is_private = parsed.store is False
        self._created = int(time.time())
        self._growths = [ReplyDeltaTracker() for _ in range(self.num_replies)]
        self._usages: list[Usage] = []

    def response_body(self, replies: Sequence[Reply]) -> bytes:
        body = self._head("chat.completion")
        body["choices"] = [self._choice(index, reply) for index, reply in enumerate(replies)]
        body["usage"] = usage_fields(total_usage([reply.usage for reply in replies]))
        if self._parsed.return_token_ids:
            body["prompt_token_ids"] = replies[0].prompt_ids
        return encode(body)

    def encode_stream_start(self) -> bytes:
        first = {"role": "assistant", "content": ""}
        return b"".join(self._event(index, first) for index in range(self.num_replies))

    def encode_message_delta(self, index: int, message: Message) -> bytes:
        reasoning, content = self._growths[index].next_delta(message)
        delta = {"reasoning_content": reasoning} if reasoning is not None else {}
        if content:
            delta["content"] = content
        return self._event(index, delta) if delta else b""

    def encode_reply_end(self, index: int, reply: Reply) -> bytes:
        events = self.encode_message_delta(index, reply.message)
        calls = _to_wire(reply.message).get("tool_calls", ())
        if calls:
            delta = {"tool_calls": [{"index": i, **call} for i, call in enumerate(calls)]}
            events += self._event(index, delta)
        last = chunk(self.id, self._model.name, {}, index, self._created)
        last["choices"][0]["finish_reason"] = reply.finish
        self._add_tokens(last["choices"][0], reply)
        if self._parsed.return_token_ids:
            last["prompt_token_ids"] = reply.prompt_ids
        self._usages.append(reply.usage)
        return events + server_sent_event(last)

    def encode_stream_end(self) -> bytes:
        events = b""
        options = self._parsed.stream_options
        if options is not None and options.include_usage:
            usage = usage_fields(total_usage(self._usages))
            head = self._head("chat.completion.chunk")
            events = server_sent_event({**head, "choices": [], "usage": usage})
        return events + b"data: [DONE]\n\n"

    def encode_stream_error(self, error: RequestRejected) -> bytes:
        return b"data: " + error.openai_error_body() + b"\n\ndata: [DONE]\n\n"

    def _choice(self, index: int, reply: Reply) -> dict[str, Any]:
        choice = {"index": index, "message": _to_wire(reply.message), "finish_reason": reply.finish}
        self._add_tokens(choice, reply)
        return choice

    def _add_tokens(self, choice: dict[str, Any], reply: Reply) -> None:
        if self._parsed.logprobs:
            entries = model_api.logprob_entries(reply, self._model.token_text)
            choice["logprobs"] = {"content": entries, "refusal": None}
        if self._parsed.return_token_ids:
            choice["token_ids"] = reply.token_ids or ()

    def _event(self, index: int, delta: dict[str, Any]) -> bytes:
        return server_sent_event(chunk(self.id, self._model.name, delta, index, self._created))

    def _head(self, kind: str) -> dict[str, Any]:
        return common_fields(self.id, self._model.name, kind, self._created)


def parse_request(body: bytes, model: ServedModel) -> ChatCompletionsReplyWriter:
    """Parse the body of a chat completion request, and return the writer of its response.

    Raises RequestRefusedError or RequestRejected with the reason if it is invalid.
    """
    parsed = model_api.decode_request(_decoder, body, "chat completion")
    model_api.refuse_unsupported(parsed, _HARMLESS)
    if not parsed.messages:
        raise RequestRefusedError("messages is empty: give at least one")
    limit = _limit(parsed)
    if limit is not None and limit < 1:
        raise RequestRefusedError(f"max_tokens is {limit}: give at least 1")
    model_api.check_sampling(parsed.temperature, parsed.top_p)
    if parsed.top_logprobs and not parsed.logprobs:
        raise RequestRejected("top_logprobs needs logprobs=true", param="top_logprobs")
    return ChatCompletionsReplyWriter(parsed, model)


def total_usage(usages: Sequence[Usage]) -> Usage:
    """Return the total token usage of several replies to one prompt.

    Prompt tokens count once.
    """
    total = usages[0]
    for usage in usages[1:]:
        total += usage
    first = usages[0]
    return msgspec.structs.replace(
        total, input_tokens=first.input_tokens, cached_tokens=first.cached_tokens
    )


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Convert token usage to the JSON object used in chat completions."""
    return {
        "prompt_tokens": usage.input_tokens,
        "completion_tokens": usage.output_tokens,
        "total_tokens": usage.total_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
    }


def opening_chunk(id: str, model: str) -> dict[str, Any]:
    """Return the first event of a streamed chat completion.

    It names the role and has no text.
    """
    return chunk(id, model, {"role": "assistant", "content": ""})


def chunk(
    id: str, model: str, delta: dict[str, Any], index: int = 0, created: int | None = None
) -> dict[str, Any]:
    """Return one event (chunk) of a streamed chat completion.

    ``delta`` is the new part of reply number ``index``.
    """
    choice = {"index": index, "delta": delta, "finish_reason": None}
    return {**common_fields(id, model, "chat.completion.chunk", created), "choices": [choice]}


def common_fields(id: str, model: str, kind: str, created: int | None = None) -> dict[str, Any]:
    """Return the fields with which every chat completion and every stream event begins.

    ``created`` is a Unix time in seconds, by default now.
    """
    return {"id": id, "object": kind, "created": created or int(time.time()), "model": model}


def _num_replies(n: int | None) -> int:
    if n is not None and not 1 <= n <= MAX_REPLIES:
        raise RequestRejected(f"n={n} must be from 1 to {MAX_REPLIES}", param="n")
    return n or 1


def _request_of(parsed: ChatCompletionRequest, window: int) -> Request:
    """Convert a parsed chat completion request to a request for the engine.

    Without a token limit, the reply may fill the context window.
    """
    stop = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    sampling = Sampling(
        max_tokens=_limit(parsed) or window,
        temperature=parsed.temperature,
        top_p=parsed.top_p,
        top_k=parsed.top_k,
        stop=tuple(filter(None, stop)),
        seed=parsed.seed,
        logprobs=True,
        top_logprobs=model_api.check_top_logprobs(parsed.top_logprobs),
    )
    offered = [tool.function for tool in parsed.tools or ()]
    tools = tuple(
        Tool(tool.name, tool.description or "", tool.parameters or {}) for tool in offered
    )
    return Request(
        tuple(map(_message, parsed.messages)),
        sampling,
        model_api.response_format_schema(parsed.response_format, "response_format"),
        tools,
        affinity=parsed.prompt_cache_key or "",
    )


def _limit(parsed: ChatCompletionRequest) -> int | None:
    is_new = parsed.max_completion_tokens is not None
    return parsed.max_completion_tokens if is_new else parsed.max_tokens


def _message(message: _CompletionMessage) -> Message:
    content = message.content or ""
    if not isinstance(content, str):
        content = "".join(model_api.text_of_parts(content, {"text": "text", "refusal": "refusal"}))
    calls = tuple(
        ToolCall(model_api.original_call_id(call.id), call.function.name, call.function.arguments)
        for call in message.tool_calls or ()
    )
    role = "system" if message.role == "developer" else message.role
    id = None if message.tool_call_id is None else model_api.original_call_id(message.tool_call_id)
    return Message(role, content, message.reasoning_content, calls, id)


def _to_wire(message: Message) -> dict[str, Any]:
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
            for call in model_api.calls_with_unique_ids(message)
        ]
    return wire
