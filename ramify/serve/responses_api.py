"""The OpenAI responses API of ``ramify serve``.

This module reads requests and writes responses and streams.

    body ──read──> AnswerRequest          ServedAnswer ──> response body, or events of a stream

A response consists of items: a reasoning item that grows with the run's progress, and a message
with the answer. The server keeps no state between requests, so ``previous_response_id`` is
rejected: the client must send the whole conversation, as clients do by default.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import msgspec

from ramify.http_server.chat_completions_api import encode
from ramify.http_server.model_api import refuse_unsupported
from ramify.http_server.rejections import RequestRejected
from ramify.serve.answer_request import (
    AnswerRequest,
    ChatMessage,
    Content,
    RamifyRequestFields,
    Role,
    chat_message,
    decode_request_body,
    response_format_schema,
)
from ramify.serve.client_function_tools import ClientFunctionTool, tool_call_answer_type
from ramify.serve.question_serving import ServedAnswer
from ramify.types.message import Usage

PATH = "/v1/responses"
FIELD = "input"
_CHUNK_CHARS = 8000
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "top_logprobs": (0,),
    "max_tool_calls": (),
    "context_management": ([],),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""


class _Item(msgspec.Struct):
    type: str = "message"
    role: Role | None = None
    content: Content = None
    name: str = ""
    arguments: str = ""
    call_id: str = ""
    output: Any = None


class _Tool(ClientFunctionTool, frozen=True):
    type: Literal["function"] = "function"


class _Text(msgspec.Struct):
    format: Any = None


class _Body(msgspec.Struct):
    input: str | list[_Item]
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: _Text | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    store: bool | None = None
    stream: bool | None = None
    ramify: RamifyRequestFields | None = None
    # Rejected unless their value has no effect: see ``_HARMLESS``.
    previous_response_id: Any = None
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    top_logprobs: Any = None
    max_tool_calls: Any = None
    context_management: Any = None


_decoder = msgspec.json.Decoder(_Body)


def parse_request(body: bytes) -> AnswerRequest:
    """Parse the body of a request to the responses API.

    Raises RequestRejected, with the name of the invalid field.
    """
    parsed = decode_request_body(_decoder, body)
    refuse_unsupported(parsed, _HARMLESS)
    items = (
        [_Item(role="user", content=parsed.input)]
        if isinstance(parsed.input, str)
        else parsed.input
    )
    if not items:
        raise RequestRejected("input is empty: give a text or a list of items", param="input")
    messages = [ChatMessage("system", (parsed.instructions,))] if parsed.instructions else []
    names = {item.call_id: item.name for item in items if item.type == "function_call"}
    converted = (_message_of(item, f"input[{index}]", names) for index, item in enumerate(items))
    messages += [message for message in converted if message is not None]
    schema, field = response_format_schema(
        parsed.text.format if parsed.text else None, "text.format", nested=False
    )
    return AnswerRequest(
        tuple(messages),
        bool(parsed.stream),
        schema,
        field,
        parsed.max_output_tokens,
        "max_output_tokens",
        parsed.temperature,
        parsed.top_p,
        parsed.ramify or RamifyRequestFields(),
        offer=tool_call_answer_type(
            parsed.tools or (),
            parsed.tool_choice,
            parsed.parallel_tool_calls is not False,
            schema,
            field,
        ),
        is_private=parsed.store is False,
    )


def new_id() -> str:
    return f"resp_{uuid.uuid4().hex}"


def response_body(
    answer: ServedAnswer, request: AnswerRequest, id: str, model: str
) -> dict[str, Any]:
    """Return the response body for an answer that is sent in one piece, not streamed."""
    return _final_body(
        _Head(request, id, model),
        _function_calls(answer) or [_message(f"msg_{id[5:]}", answer.text, answer)],
        answer,
    )


class ResponsesStreamEncoder:
    """Encodes one streamed response as events in the format of the responses API.

    Their sequence numbers have no gaps.

    Call ``begin`` once, ``encode_progress`` any number of times, then ``encode_answer`` or
    ``fail``.
    """

    def __init__(self, request: AnswerRequest, id: str, model: str) -> None:
        self._head = _Head(request, id, model)
        self._reasoning_id = f"rs_{id[5:]}"
        self._message_id = f"msg_{id[5:]}"
        self._number = 0
        self._reasoning = ""

    def begin(self) -> bytes:
        response = self._head.body("in_progress", [], None)
        return self._encode_event("created", response=response) + self._encode_event(
            "in_progress", response=response
        )

    def encode_progress(self, text: str) -> bytes:
        opening = b""
        place = {"item_id": self._reasoning_id, "output_index": 0, "summary_index": 0}
        if not self._reasoning:
            item = {"type": "reasoning", "id": self._reasoning_id, "summary": []}
            part = {"type": "summary_text", "text": ""}
            opening = self._encode_event("output_item.added", output_index=0, item=item)
            opening += self._encode_event("reasoning_summary_part.added", **place, part=part)
        self._reasoning += text
        return opening + self._encode_event("reasoning_summary_text.delta", **place, delta=text)

    def encode_answer(self, answer: ServedAnswer) -> Iterator[bytes]:
        items = []
        if self._reasoning:
            items.append(self._reasoning_item())
            yield self._end_of_reasoning(items[0])
        for call in _function_calls(answer):
            yield self._encode_call(len(items), call)
            items.append(call)
        if not answer.calls:
            yield from self._encode_text(len(items), answer)
            items.append(_message(self._message_id, answer.text, answer))
        response = _final_body(self._head, items, answer)
        yield self._encode_event(response["status"], response=response)

    def _encode_call(self, index: int, item: dict[str, Any]) -> bytes:
        place = {"item_id": item["id"], "output_index": index}
        opened = {**item, "status": "in_progress", "arguments": ""}
        return b"".join(
            [
                self._encode_event("output_item.added", output_index=index, item=opened),
                self._encode_event(
                    "function_call_arguments.delta", **place, delta=item["arguments"]
                ),
                self._encode_event(
                    "function_call_arguments.done",
                    **place,
                    name=item["name"],
                    arguments=item["arguments"],
                ),
                self._encode_event("output_item.done", output_index=index, item=item),
            ]
        )

    def _encode_text(self, index: int, answer: ServedAnswer) -> Iterator[bytes]:
        id = self._message_id
        place = {"item_id": id, "output_index": index, "content_index": 0}
        item = _message(id, answer.text, answer)
        opened = {**item, "status": "in_progress", "content": []}
        yield self._encode_event("output_item.added", output_index=index, item=opened)
        yield self._encode_event("content_part.added", **place, part=_part(""))
        for at in range(0, len(answer.text), _CHUNK_CHARS):
            yield self._encode_event(
                "output_text.delta", **place, delta=answer.text[at : at + _CHUNK_CHARS], logprobs=[]
            )
        yield self._encode_event("output_text.done", **place, text=answer.text, logprobs=[])
        yield self._encode_event("content_part.done", **place, part=_part(answer.text))
        yield self._encode_event("output_item.done", output_index=index, item=item)

    def fail(self, error: RequestRejected) -> Iterator[bytes]:
        items = [self._reasoning_item()] if self._reasoning else []
        response = self._head.body("failed", items, None)
        response["error"] = {"code": "server_error", "message": str(error)}
        response["ramify"] = {"run": error.run}
        yield self._encode_event("failed", response=response)

    def _end_of_reasoning(self, item: dict[str, Any]) -> bytes:
        place = {"item_id": self._reasoning_id, "output_index": 0, "summary_index": 0}
        text = self._reasoning
        return b"".join(
            [
                self._encode_event("reasoning_summary_text.done", **place, text=text),
                self._encode_event(
                    "reasoning_summary_part.done",
                    **place,
                    part={"type": "summary_text", "text": text},
                ),
                self._encode_event("output_item.done", output_index=0, item=item),
            ]
        )

    def _reasoning_item(self) -> dict[str, Any]:
        summary = [{"type": "summary_text", "text": self._reasoning}]
        return {"type": "reasoning", "id": self._reasoning_id, "summary": summary}

    def _encode_event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return f"event: {kind}\ndata: ".encode() + encode(event) + b"\n\n"


class _Head:
    """Builds the JSON bodies that describe one response from its start to its completion.

    All have the same id, model and settings.
    """

    def __init__(self, request: AnswerRequest, id: str, model: str) -> None:
        self._id = id
        self._model = model
        self._request = request
        self._created = int(time.time())

    def body(
        self, status: str, output: list[dict[str, Any]], usage: dict[str, Any] | None
    ) -> dict[str, Any]:
        request = self._request
        kind = (
            {"type": "text"}
            if request.schema is None
            else {"type": "json_schema", "name": "answer", "schema": request.schema}
        )
        return {
            "id": self._id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model,
            "output": output,
            "usage": usage,
            "error": None,
            "incomplete_details": None,
            "instructions": None,
            "metadata": {},
            "parallel_tool_calls": True,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "max_output_tokens": request.max_tokens,
            "tool_choice": "auto",
            "tools": [],
            "text": {"format": kind},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "reasoning": {},
        }


def _final_body(head: _Head, output: list[dict[str, Any]], answer: ServedAnswer) -> dict[str, Any]:
    why = {"length": "max_output_tokens", "content_filter": "content_filter"}.get(answer.finish)
    body = head.body("incomplete" if why else "completed", output, _usage(answer.usage))
    body["incomplete_details"] = {"reason": why} if why else None
    return {**body, "ramify": answer.about}


def _function_calls(answer: ServedAnswer) -> list[dict[str, Any]]:
    return [
        {
            "type": "function_call",
            "id": f"fc_{id[5:]}",
            "call_id": id,
            "name": call.name,
            "arguments": call.arguments_json(),
            "status": "completed",
        }
        for id, call in answer.calls
    ]


def _message_of(item: _Item, where: str, names: Mapping[str, str]) -> ChatMessage | None:
    """Convert one input item of a responses API request to a chat message.

    Returns None for reasoning of earlier turns, which is ignored.
    """
    match item.type:
        case "message":
            if item.role is None:
                raise RequestRejected("a message has no role", param=f"{where}.role")
            return chat_message(item.role, item.content, where)
        case "reasoning":
            return None
        case "function_call":
            return ChatMessage("assistant", (f"(called {item.name}({item.arguments}))",))
        case "function_call_output":
            output = (
                item.output
                if isinstance(item.output, str)
                else msgspec.json.encode(item.output).decode()
            )
            name = names.get(item.call_id)
            return ChatMessage("tool", ((f"(result of {name})", output) if name else (output,)))
        case _:
            raise RequestRejected(
                f"an item of type {item.type!r:.60} is not supported: give messages",
                param=f"{where}.type",
            )


def _message(id: str, text: str, answer: ServedAnswer) -> dict[str, Any]:
    status = "completed" if answer.finish == "stop" else "incomplete"
    return {
        "type": "message",
        "id": id,
        "status": status,
        "role": "assistant",
        "content": [_part(text)],
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


open_stream = ResponsesStreamEncoder
"""The stream encoder of this API, under the name that the interface ``ApiFormatModule``
requires."""
