"""The chat completions API of ``ramify serve``.

This module reads requests and writes responses and streams.

    body ──read──> AnswerRequest          ServedAnswer ──> response body, or events of a stream

A served policy has a separate implementation of this API; the formats that both share are in
``http_server/chat_completions_api.py``.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from ramify.http_server import chat_completions_api
from ramify.http_server.model_api import refuse_unsupported
from ramify.http_server.rejections import RequestRejected
from ramify.serve.answer_request import (
    AnswerRequest,
    Content,
    RamifyRequestFields,
    Role,
    chat_message,
    decode_request_body,
    response_format_schema,
)
from ramify.serve.client_function_tools import ClientFunctionTool, tool_call_answer_type
from ramify.serve.question_serving import ServedAnswer

PATH = "/v1/chat/completions"
_CHUNK_CHARS = 8000
"""Maximum answer characters in one event, since some clients reject lines above 64 KiB."""
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "functions": ([],),
    "function_call": ("none",),
    "audio": (),
    "modalities": (["text"],),
    "web_search_options": (),
    "return_token_ids": (False,),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""


class _Tool(msgspec.Struct):
    function: ClientFunctionTool
    type: Literal["function"] = "function"


class _Message(msgspec.Struct):
    role: Role
    content: Content = None
    tool_calls: list[chat_completions_api.PriorToolCall] | None = None
    tool_call_id: str | None = None


class _Body(msgspec.Struct):
    messages: list[_Message]
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: chat_completions_api.StreamOptions | None = None
    response_format: Any = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    ramify: RamifyRequestFields | None = None
    # Rejected unless their value has no effect: see ``_HARMLESS``.
    n: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    logprobs: Any = None
    top_logprobs: Any = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Any = None
    web_search_options: Any = None
    return_token_ids: Any = None


_decoder = msgspec.json.Decoder(_Body)


def parse_request(body: bytes) -> AnswerRequest:
    """Parse the body of a chat completions request.

    Raises RequestRejected, with the name of the invalid field.
    """
    parsed = decode_request_body(_decoder, body)
    refuse_unsupported(parsed, _HARMLESS)
    if not parsed.messages:
        raise RequestRejected("messages is empty: give at least one", param="messages")
    schema, field = response_format_schema(parsed.response_format, "response_format", nested=True)
    limit = (
        parsed.max_tokens if parsed.max_completion_tokens is None else parsed.max_completion_tokens
    )
    limit_field = "max_tokens" if parsed.max_completion_tokens is None else "max_completion_tokens"
    stops = [parsed.stop] if isinstance(parsed.stop, str) else parsed.stop or []
    tools = [tool.function for tool in parsed.tools or ()]
    names = {
        call.id: call.function.name for each in parsed.messages for call in each.tool_calls or ()
    }
    return AnswerRequest(
        tuple(
            chat_message(
                each.role,
                each.content,
                f"messages[{index}]",
                _calls_as_text(each),
                names.get(each.tool_call_id or "", ""),
            )
            for index, each in enumerate(parsed.messages)
        ),
        bool(parsed.stream),
        schema,
        field,
        limit,
        limit_field,
        parsed.temperature,
        parsed.top_p,
        parsed.ramify or RamifyRequestFields(),
        parsed.seed,
        tuple(stops),
        tool_call_answer_type(
            tools, parsed.tool_choice, parsed.parallel_tool_calls is not False, schema, field
        ),
        parsed.stream_options is not None and parsed.stream_options.include_usage,
        parsed.store is False,
    )


FIELD = "messages"


def new_id() -> str:
    return f"chatcmpl-{uuid.uuid4().hex[:24]}"


def response_body(
    answer: ServedAnswer, request: AnswerRequest, id: str, model: str
) -> dict[str, Any]:
    """Return the response body for an answer that is not streamed."""
    message: dict[str, Any] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.calls:
        message |= {"content": None, "tool_calls": _tool_calls(answer)}
    choice = {"index": 0, "message": message, "finish_reason": answer.finish, "logprobs": None}
    usage = chat_completions_api.usage_fields(answer.usage)
    return {
        **chat_completions_api.common_fields(id, model, "chat.completion"),
        "choices": [choice],
        "usage": usage,
        "ramify": answer.about,
    }


class ChatStreamEncoder:
    """Encodes one streamed chat completion as events in the format of OpenAI's API.

    Call ``begin`` once, ``encode_progress`` any number of times, then ``encode_answer`` or
    ``fail``.
    """

    def __init__(self, request: AnswerRequest, id: str, model: str) -> None:
        self._request = request
        self._id = id
        self._model = model

    def begin(self) -> bytes:
        return _encode_sse(chat_completions_api.opening_chunk(self._id, self._model))

    def encode_progress(self, text: str) -> bytes:
        return self._encode_delta({"reasoning_content": text})

    def encode_answer(self, answer: ServedAnswer) -> Iterator[bytes]:
        for at in range(0, len(answer.text), _CHUNK_CHARS):
            yield self._encode_delta({"content": answer.text[at : at + _CHUNK_CHARS]})
        for index, call in enumerate(_tool_calls(answer)):
            yield self._encode_delta({"tool_calls": [{"index": index, **call}]})
        last = chat_completions_api.chunk(self._id, self._model, {})
        last["choices"][0]["finish_reason"] = answer.finish
        yield _encode_sse({**last, "ramify": answer.about})
        if self._request.with_usage:
            usage = chat_completions_api.usage_fields(answer.usage)
            yield _encode_sse(
                {
                    **chat_completions_api.common_fields(
                        self._id, self._model, "chat.completion.chunk"
                    ),
                    "choices": [],
                    "usage": usage,
                }
            )
        yield b"data: [DONE]\n\n"

    def fail(self, error: RequestRejected) -> Iterator[bytes]:
        yield b"data: " + error.openai_error_body() + b"\n\n"
        yield b"data: [DONE]\n\n"

    def _encode_delta(self, delta: dict[str, Any]) -> bytes:
        return _encode_sse(chat_completions_api.chunk(self._id, self._model, delta))


def _tool_calls(answer: ServedAnswer) -> list[dict[str, Any]]:
    return [
        {
            "id": id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments_json()},
        }
        for id, call in answer.calls
    ]


def _calls_as_text(message: _Message) -> str:
    """Format the function calls of an earlier assistant message as lines of text."""
    calls = [call.function for call in message.tool_calls or ()]
    return "\n".join(f"(called {call.name}({call.arguments}))" for call in calls)


def _encode_sse(event: dict[str, Any]) -> bytes:
    return b"data: " + chat_completions_api.encode(event) + b"\n\n"


open_stream = ChatStreamEncoder
"""The stream encoder of this API, under the name that the interface ``ApiFormatModule``
requires."""
