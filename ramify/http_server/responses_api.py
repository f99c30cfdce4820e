"""OpenAI's responses API for a single model: parse requests, and write responses and streams.

    body ──read──> ResponsesApiReplyWriter ── request ──> Request       Reply ──> body or events

A response consists of items: reasoning, a message, and function calls. If a client sends the items
of an earlier response back in their order, they become the one message that the model wrote. With
``previous_response_id`` the conversation continues from a response that the server has stored.
Unsupported fields that would change the answer are rejected by name. Responses for whole runs are
handled in ``serve/responses_api.py``.
"""

from __future__ import annotations

import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, Literal

import msgspec

from ramify.clients.base import Request, Sampling, Tool
from ramify.errors import RequestRefusedError
from ramify.http_server import model_api
from ramify.http_server.model_api import ReplyDeltaTracker, ServedModel, encode, server_sent_event
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Message, Reply, ToolCall, Usage

PATH = "/responses"
_LOGPROBS = "message.output_text.logprobs"
_MAX_STORED = 4096
_MAX_STORED_BYTES = 64 << 20
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "max_tool_calls": (),
    "truncation": ("disabled",),
    "context_management": ([],),
}
"""Request fields that are not supported, each with the values that are accepted nevertheless
because they change nothing. Other values are rejected."""
_TEXT_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "refusal": "refusal",
    "reasoning_text": "text",
    "summary_text": "text",
}
_UNFINISHED = {"length": "max_output_tokens", "content_filter": "content_filter"}
"""Finish reason of a reply that ended early -> value of ``reason`` in an incomplete response."""


class StoredResponse(msgspec.Struct, frozen=True):
    """A stored response with its conversation, from which a later request can continue."""

    messages: tuple[Message, ...]
    """The conversation without instructions, up to and including the reply."""
    body: bytes
    """The response's JSON body."""
    num_bytes: int
    """Size of the request and the response together."""


class RecentResponseStore:
    """The most recent responses to one caller, by id.

    At most a few thousand are stored. Their total size is limited, too.
    """

    def __init__(self) -> None:
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        self._num_bytes = 0

    def get(self, id: str) -> StoredResponse | None:
        return self._stored.get(id)

    def keep(self, id: str, response: StoredResponse) -> None:
        """Store a finished response, so that a later request can continue from it.

        If there are then too many, or their total size is too large, the oldest ones are removed.
        """
        self._stored[id] = response
        self._num_bytes += response.num_bytes
        while len(self._stored) > _MAX_STORED or self._num_bytes > _MAX_STORED_BYTES:
            self.forget(next(iter(self._stored)))

    def forget(self, id: str) -> bool:
        """Remove the stored response with the given id.

        Returns False if there is none with this id.
        """
        response = self._stored.pop(id, None)
        self._num_bytes -= response.num_bytes if response is not None else 0
        return response is not None


class _Item(msgspec.Struct):
    type: str = "message"
    role: Literal["system", "developer", "user", "assistant"] | None = None
    content: str | list[dict[str, Any]] | None = None
    summary: list[dict[str, Any]] | None = None
    name: str = ""
    arguments: str = ""
    call_id: str = ""
    output: str | list[dict[str, Any]] = ""


class _Tool(msgspec.Struct):
    type: str = "function"
    name: str = ""
    description: str | None = None
    parameters: dict[str, Any] | None = None


class _Text(msgspec.Struct):
    format: Any = None


class ResponsesApiRequest(msgspec.Struct):
    """The fields of a responses API request, including those that this server rejects."""

    input: str | list[_Item]
    model: str = ""
    instructions: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    text: _Text | None = None
    tools: list[_Tool] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    stream: bool | None = None
    store: bool | None = None
    previous_response_id: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    # Rejected unless their value has no effect: see ``_HARMLESS``.
    conversation: Any = None
    prompt: Any = None
    background: Any = None
    max_tool_calls: Any = None
    truncation: Any = None
    context_management: Any = None


_decoder = msgspec.json.Decoder(ResponsesApiRequest)


class ResponsesApiReplyWriter:
    """Handles one responses API request, and writes the response.

    The response is one body or a stream of events.
    """

    num_replies = 1

    def __init__(
        self,
        parsed: ResponsesApiRequest,
        model: ServedModel,
        stored: RecentResponseStore,
        num_bytes: int,
    ) -> None:
        """Prepare to answer a parsed responses API request, whose body had ``num_bytes`` bytes.

        Raises RequestRefusedError or RequestRejected for a request that cannot be answered.
        """
        before: tuple[Message, ...] = ()
        if parsed.previous_response_id is not None:
            previous = stored.get(parsed.previous_response_id)
            if previous is None:
                raise RequestRejected(
                    f"no response has the id {parsed.previous_response_id!r:.80}: send the "
                    "conversation as input; only the last responses with store=true are "
                    "remembered",
                    param="previous_response_id",
                    code="previous_response_not_found",
                )
            before = previous.messages
        self._conversation = (*before, *_messages(parsed.input))
        if not self._conversation:
            raise RequestRejected("input is empty: give a text or a list of items", param="input")
        head = (Message("system", parsed.instructions),) if parsed.instructions else ()
        self._with_logprobs = _LOGPROBS in (parsed.include or ()) or bool(parsed.top_logprobs)
        self.is_streamed = bool(parsed.stream)
        sampling = Sampling(
            max_tokens=parsed.max_output_tokens or model.window,
            temperature=parsed.temperature,
            top_p=parsed.top_p,
            logprobs=True,
            top_logprobs=model_api.check_top_logprobs(parsed.top_logprobs),
        )
        format = parsed.text.format if parsed.text is not None else None
        self.request = Request(
            (*head, *self._conversation),
            sampling,
            model_api.response_format_schema(format, "text.format"),
            _tools(parsed.tools or ()),
            affinity=parsed.prompt_cache_key or "",
        )
        self.tool_choice = model_api.check_tool_choice(
            model_api.parse_openai_tool_choice(parsed.tool_choice, parsed.parallel_tool_calls),
            self.request.tools,
            "tool_choice",
        )
        self._parsed = parsed
        self._model = model
        self._stored = stored
        self._num_bytes = num_bytes
        self._key = uuid.uuid4().hex
        self.id = f"resp_{self._key}"
        self.is_private = parsed.store is False
        self._created = int(time.time())
        self._number = 0
        self._growth = ReplyDeltaTracker()
        self._items: list[_StreamedItem] = []
        self._last = b""

    def response_body(self, replies: Sequence[Reply]) -> bytes:
        return self._finish_response(replies[0], self._output(replies[0]))

    def encode_stream_start(self) -> bytes:
        response = self._fields("in_progress", [], None)
        return self._event("created", response=response) + self._event(
            "in_progress", response=response
        )

    def encode_message_delta(self, index: int, message: Message) -> bytes:
        reasoning, content = self._growth.next_delta(message)
        events = b""
        if reasoning is not None:
            events += self._text_delta("reasoning", reasoning)
        if content:
            events += self._text_delta("message", content)
        return events

    def encode_reply_end(self, index: int, reply: Reply) -> bytes:
        events = self.encode_message_delta(index, reply.message)
        output = self._output(reply)
        streamed = [item.kind for item in self._items]
        # Items keep the order in which they began.
        output.sort(
            key=lambda item: streamed.index(item["type"]) if item["type"] in streamed else 9
        )
        for place, item in enumerate(output):
            if item["type"] == "function_call":
                events += self._call_events(place, item)
            else:
                if place == len(self._items):  # a message without text
                    events += self._open(item["type"])
                events += self._close(place, item)
        body = self._finish_response(reply, output)
        kind = "incomplete" if reply.finish in _UNFINISHED else "completed"
        return events + self._event(kind, response=msgspec.Raw(body))

    def encode_stream_end(self) -> bytes:
        return b""

    def encode_stream_error(self, error: RequestRejected) -> bytes:
        response = self._fields("failed", [], None)
        response["error"] = {"code": error.code or "server_error", "message": str(error)}
        return self._event("failed", response=response)

    def _finish_response(self, reply: Reply, output: list[dict[str, Any]]) -> bytes:
        """Complete the response to a request, and return its body.

        Unless the request says ``store: false``, the response is stored, so that a later request
        can continue from it.
        """
        reason = _UNFINISHED.get(reply.finish)
        fields = self._fields("incomplete" if reason else "completed", output, reply.usage)
        fields["incomplete_details"] = {"reason": reason} if reason else None
        body = encode(fields)
        if self._parsed.store is not False:
            messages = (*self._conversation, reply.message)
            num_bytes = self._num_bytes + len(body)
            self._stored.keep(self.id, StoredResponse(messages, body, num_bytes))
        return body

    def _output(self, reply: Reply) -> list[dict[str, Any]]:
        message = reply.message
        status = "incomplete" if reply.finish in _UNFINISHED else "completed"
        output: list[dict[str, Any]] = []
        if message.reasoning is not None:
            content = [{"type": "reasoning_text", "text": message.reasoning}]
            output.append(self._item("reasoning", summary=[], content=content))
        if message.content or not message.tool_calls:
            entries = []
            if self._with_logprobs:
                entries = model_api.logprob_entries(reply, self._model.token_text)
            part = {**_part(message.content), "logprobs": entries}
            output.append(self._item("message", role="assistant", content=[part], status=status))
        for index, call in enumerate(model_api.calls_with_unique_ids(message)):
            output.append(
                {
                    "type": "function_call",
                    "id": f"fc_{self._key}_{index}",
                    "call_id": call.id,
                    "name": call.name,
                    "arguments": call.arguments,
                    "status": "completed",
                }
            )
        return output

    def _item(self, kind: str, **fields: Any) -> dict[str, Any]:
        prefix = "rs" if kind == "reasoning" else "msg"
        return {"type": kind, "id": f"{prefix}_{self._key}", **fields}

    def _text_delta(self, kind: str, text: str) -> bytes:
        """Return the stream events that append text to the response's current output item.

        The item is opened if necessary.
        """
        events = b""
        if not self._items or self._items[-1].kind != kind:
            events = self._open(kind)
        item = self._items[-1]
        if kind == "reasoning":
            return events + self._event("reasoning_text.delta", **item.place, delta=text)
        return events + self._event("output_text.delta", **item.place, delta=text, logprobs=[])

    def _open(self, kind: str) -> bytes:
        at = len(self._items)
        if kind == "reasoning":
            opened = self._item(kind, summary=[], content=[])
        else:
            opened = self._item(kind, role="assistant", content=[], status="in_progress")
        item = _StreamedItem(
            kind, {"item_id": opened["id"], "output_index": at, "content_index": 0}
        )
        self._items.append(item)
        events = self._event("output_item.added", output_index=at, item=opened)
        if kind == "message":
            events += self._event("content_part.added", **item.place, part=_part(""))
        return events

    def _close(self, at: int, item: dict[str, Any]) -> bytes:
        """Return the stream events that complete an output item of the response.

        It is a reasoning item or a message.
        """
        place, part = self._items[at].place, item["content"][0]
        if item["type"] == "reasoning":
            events = self._event("reasoning_text.done", **place, text=part["text"])
        else:
            events = self._event(
                "output_text.done", **place, text=part["text"], logprobs=part["logprobs"]
            )
            events += self._event("content_part.done", **place, part=part)
        return events + self._event("output_item.done", output_index=at, item=item)

    def _call_events(self, at: int, item: dict[str, Any]) -> bytes:
        place = {"item_id": item["id"], "output_index": at}
        opened = {**item, "status": "in_progress", "arguments": ""}
        name, arguments = item["name"], item["arguments"]
        return b"".join(
            [
                self._event("output_item.added", output_index=at, item=opened),
                self._event("function_call_arguments.delta", **place, delta=arguments),
                self._event(
                    "function_call_arguments.done", **place, name=name, arguments=arguments
                ),
                self._event("output_item.done", output_index=at, item=item),
            ]
        )

    def _event(self, kind: str, **fields: Any) -> bytes:
        kind = f"response.{kind}"
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._number += 1
        return server_sent_event(event, kind)

    def _fields(
        self, status: str, output: list[dict[str, Any]], usage: Usage | None
    ) -> dict[str, Any]:
        parsed = self._parsed
        format = parsed.text.format if parsed.text is not None else None
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "model": self._model.name,
            "output": output,
            "usage": None if usage is None else usage_fields(usage),
            "error": None,
            "incomplete_details": None,
            "instructions": parsed.instructions,
            "metadata": parsed.metadata or {},
            "parallel_tool_calls": parsed.parallel_tool_calls is not False,
            "temperature": parsed.temperature,
            "top_p": parsed.top_p,
            "top_logprobs": parsed.top_logprobs or 0,
            "max_output_tokens": parsed.max_output_tokens,
            "tool_choice": parsed.tool_choice or "auto",
            "tools": [
                {
                    "type": "function",
                    "name": tool.name,
                    "description": tool.description,
                    "parameters": tool.parameters,
                    "strict": False,
                }
                for tool in self.request.tools
            ],
            "text": {"format": format or {"type": "text"}},
            "previous_response_id": parsed.previous_response_id,
            "store": parsed.store is not False,
            "truncation": "disabled",
            "reasoning": {},
        }


class _StreamedItem(msgspec.Struct, frozen=True):
    """A response item that is being streamed."""

    kind: str
    place: dict[str, Any]
    """The fields that identify the item in each of its events."""


def parse_request(
    body: bytes, model: ServedModel, stored: RecentResponseStore
) -> ResponsesApiReplyWriter:
    """Parse the body of a responses API request, and return the writer of its response.

    Raises RequestRefusedError or RequestRejected with the reason if it is invalid.
    """
    parsed = model_api.decode_request(_decoder, body, "response")
    model_api.refuse_unsupported(parsed, _HARMLESS)
    if parsed.max_output_tokens is not None and parsed.max_output_tokens < 1:
        raise RequestRefusedError(
            f"max_output_tokens is {parsed.max_output_tokens}: give at least 1"
        )
    model_api.check_sampling(parsed.temperature, parsed.top_p)
    return ResponsesApiReplyWriter(parsed, model, stored, len(body))


def usage_fields(usage: Usage) -> dict[str, Any]:
    """Convert token usage to the JSON object used in the responses API."""
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _tools(offered: Sequence[_Tool]) -> tuple[Tool, ...]:
    for index, tool in enumerate(offered):
        if tool.type != "function":
            raise RequestRejected(
                f"a tool of type {tool.type!r:.60} is not supported: give functions",
                param=f"tools[{index}].type",
            )
    return tuple(Tool(tool.name, tool.description or "", tool.parameters or {}) for tool in offered)


def _messages(input: str | list[_Item]) -> list[Message]:
    """Convert the input items of a responses API request to messages for the engine.

    Consecutive items from one reply of the model become one message.
    """
    if isinstance(input, str):
        return [Message("user", input)] if input else []
    messages: list[Message] = []
    reply: _WrittenReply | None = None
    for index, item in enumerate(input):
        is_reply = item.type in ("reasoning", "function_call") or item.role == "assistant"
        if reply is not None and not (is_reply and reply.takes(item)):
            messages.append(reply.message())
            reply = None
        if is_reply:
            reply = reply or _WrittenReply()
            reply.add(item)
        else:
            messages.append(_message(item, index))
    return messages if reply is None else [*messages, reply.message()]


class _WrittenReply:
    """One earlier reply of the model, collected from a request's input items.

    Their order is reasoning, message, function calls.
    """

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._content: str | None = None
        self._calls: list[ToolCall] = []

    def takes(self, item: _Item) -> bool:
        """Return True if an input item continues the reply collected so far."""
        if item.type == "function_call":
            return True
        has_text = self._content is not None or bool(self._calls)
        return not has_text and (item.type == "message" or self._reasoning is None)

    def add(self, item: _Item) -> None:
        if item.type == "function_call":
            id = model_api.original_call_id(item.call_id)
            self._calls.append(ToolCall(id, item.name, item.arguments))
        elif item.type == "reasoning":
            self._reasoning = _text(item.content or item.summary or "")
        else:
            self._content = _text(item.content or "")

    def message(self) -> Message:
        return Message("assistant", self._content or "", self._reasoning, tuple(self._calls))


def _message(item: _Item, index: int) -> Message:
    """Convert an input item that was not written by the model to a message for the engine.

    Raises RequestRefusedError or RequestRejected if it is not supported.
    """
    if item.type == "function_call_output":
        id = model_api.original_call_id(item.call_id)
        return Message("tool", _text(item.output), tool_call_id=id)
    if item.type != "message":
        raise RequestRejected(
            f"an item of type {item.type!r:.60} is not supported: give messages, reasoning, "
            "function calls and their outputs",
            param=f"input[{index}].type",
        )
    if item.role is None:
        raise RequestRejected("a message has no role", param=f"input[{index}].role")
    role = "system" if item.role == "developer" else item.role
    return Message(role, _text(item.content or ""))


def _text(content: str | list[dict[str, Any]]) -> str:
    if isinstance(content, str):
        return content
    return "".join(model_api.text_of_parts(content, _TEXT_PARTS))
