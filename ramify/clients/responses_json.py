"""Convert between Ramify's types and the JSON of OpenAI's responses API.

A ``Request`` becomes a request body, and a response body becomes a ``Reply``.

    Request(messages, Sampling(max_tokens=64))  ->  {"input": […], "max_output_tokens": 64, …}
    {"status": "completed", "output": [{"type": "message", …}]}  ->  Reply(Message("assistant", …))

``openai.py`` uses this API for a base URL that ends in ``/responses``. The whole conversation is
sent each time, and the server is asked to store nothing. The API has neither ``stop`` and ``seed``
nor token ids.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.clients.base import Request, reported_usage
from ramify.clients.chat_json import (
    decode_body,
    is_strict_compatible,
    picture_url,
    reported_model_name,
    text_field,
)
from ramify.clients.providers import ResolvedEndpoint
from ramify.clients.reply_decoding import is_large
from ramify.errors import ServerStatusError
from ramify.types.message import Finish, Message, Reply, ToolCall, Usage

KIND = "response"
STREAM_FIELDS = {"stream": True}
"""Request fields that enable streaming. The last event of a stream counts the tokens."""
HAS_LAST_BODY = True


class ResponsesApiResponse(msgspec.Struct):
    """A response of OpenAI's responses API, reduced to the fields that Ramify reads."""

    status: str | None = None
    output: list[dict[str, Any]] | None = None
    incomplete_details: Any = None
    usage: Any = None
    model: Any = None
    error: Any = None

    @property
    def choices(self) -> list[dict[str, Any]] | None:
        """The items of the response's output.

        The name is the same as in chat completions, so that one decoder can read all formats.
        """
        return self.output

    @property
    def num_items(self) -> int:
        """The number of output items plus the number of parts in them.

        A size limit applies to this number.
        """
        items = self.output or []
        return len(items) + sum(
            len(parts)
            for item in items
            for name in ("content", "summary")
            if isinstance(parts := item.get(name), list)
        )


_decoder = msgspec.json.Decoder(ResponsesApiResponse)


def decode(body: bytes) -> ResponsesApiResponse:
    """Decode the JSON body of a response from OpenAI's responses API.

    Raises msgspec.DecodeError if the body has another form.
    """
    return decode_body(_decoder, body)


class _StreamEvent(msgspec.Struct):
    """One event of a streamed response from OpenAI's responses API.

    Its larger fields are decoded only when needed, because the last event holds the whole response.
    """

    type: str = ""
    delta: msgspec.Raw = msgspec.Raw()
    response: msgspec.Raw = msgspec.Raw()
    error: msgspec.Raw = msgspec.Raw()
    code: msgspec.Raw = msgspec.Raw()
    message: msgspec.Raw = msgspec.Raw()


_decoder_of_events = msgspec.json.Decoder(_StreamEvent)
_LAST = ("response.completed", "response.incomplete", "response.failed")
_TEXT = ("response.output_text.delta", "response.refusal.delta")
_REASONING = ("response.reasoning_summary_text.delta", "response.reasoning_text.delta")


class ResponsesReplyAssembler:
    """Assembles a model's reply from the events of a stream of the responses API.

    The last event contains the whole response.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.is_whole = False
        self.error: Any = None
        self._response = b""

    def add(self, event: bytes) -> tuple[str, str]:
        if event == b"[DONE]":  # not part of this API, but some gateways send it
            return "", ""
        if is_large(event):
            part = _decoder_of_events.decode(event)
        else:
            part = decode_body(_decoder_of_events, event)
        if part.type in _LAST:
            self._response, self.is_done = bytes(part.response), True
        elif part.type == "error":
            named = {"message": part.message, "code": part.code}
            self.error = _decode_if_small(part.error) or {
                name: _decode_if_small(raw) for name, raw in named.items()
            }
        elif part.type in _TEXT:
            return str(_decode_if_small(part.delta) or ""), ""
        elif part.type in _REASONING:
            return "", str(_decode_if_small(part.delta) or "")
        return "", ""

    def body(self) -> bytes:
        return self._response


new_stream = ResponsesReplyAssembler


def _decode_if_small(raw: msgspec.Raw) -> Any:
    data = bytes(raw)
    return msgspec.json.decode(data) if data and not is_large(data) else None


def request_body_fields(
    request: Request, endpoint: ResolvedEndpoint, limit_field: str
) -> dict[str, Any]:
    """Return the JSON fields of a request to the responses API.

    ``limit_field`` is ignored: it names the limit of the reply in chat completions, and here that
    field is always ``max_output_tokens``."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "input": [item for message in request.messages for item in _items(request, message)],
        "max_output_tokens": sampling.max_tokens,
        "store": False,
    }
    for name in ("temperature", "top_p"):
        if (value := getattr(sampling, name)) is not None:
            fields[name] = value
    if request.schema is not None:
        kind = {
            "type": "json_schema",
            "name": "answer",
            "strict": is_strict_compatible(request.schema),
        }
        fields["text"] = {"format": {**kind, "schema": request.schema}}
    if request.tools:
        fields["tools"] = [
            {"type": "function", "strict": False, **msgspec.to_builtins(tool)}
            for tool in request.tools
        ]
    if request.affinity and endpoint.cache_key:
        fields["prompt_cache_key"] = request.affinity
    return fields | sampling.extra


def reply_from_response(
    response: ResponsesApiResponse, _output: Any, model: str, seconds: float
) -> Reply:
    """Convert a decoded response to a ``Reply``.

    Raises ValueError if the response contradicts itself or may be incomplete, and ServerStatusError
    if the server reports a failure.
    """
    items = response.output or []
    parts = [part for item in items if item.get("type") == "message" for part in _parts(item)]
    text = "".join(text_field(part, "text") for part in parts)
    refusal = "".join(text_field(part, "refusal") for part in parts)
    calls = tuple(
        ToolCall(str(item.get("call_id")), str(item.get("name")), str(item.get("arguments")))
        for item in items
        if item.get("type") == "function_call"
    )
    finish, stopped_by = _finish_and_reason(response, bool(calls), model)
    if refusal and not text:
        finish, stopped_by = "content_filter", "refusal"
    return Reply(
        Message("assistant", text or refusal, _reasoning(items), calls),
        _usage(response.usage),
        finish,
        model=reported_model_name(response.model, model),
        seconds=seconds,
        filter=stopped_by if finish == "content_filter" else "",
    )


def _items(request: Request, message: Message) -> list[dict[str, Any]]:
    if message.role == "tool":
        id = message.tool_call_id or ""
        return [{"type": "function_call_output", "call_id": id, "output": message.content}]
    items: list[dict[str, Any]] = []
    if message.pictures:
        parts = [
            {"type": "input_image", "image_url": picture_url(request, picture)}
            for picture in message.pictures
        ]
        text = [{"type": "input_text", "text": message.content}] if message.content else []
        items.append({"role": message.role, "content": [*parts, *text]})
    elif message.content or not message.tool_calls:
        items.append({"role": message.role, "content": message.content})
    for call in message.tool_calls:
        fields = {"call_id": call.id, "name": call.name, "arguments": call.arguments}
        items.append({"type": "function_call", **fields})
    return items


def _parts(item: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the content of an output message as a list of parts.

    Raises ValueError if the message is not complete.
    """
    if item.get("status") not in ("completed", "incomplete", None):
        raise ValueError(f"sent a message with status {item['status']!r:.60}: it may be incomplete")
    content = item.get("content")
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise ValueError("sent a message whose content is not a list of parts")
    return content


def _finish_and_reason(
    response: ResponsesApiResponse, has_calls: bool, model: str
) -> tuple[Finish, str]:
    """Return why a reply ended, and the server's reason if it was filtered or cut off.

    Raises ServerStatusError if the server failed.
    """
    details = response.incomplete_details
    reason = str(details.get("reason")) if isinstance(details, dict) else ""
    is_cut = any(item.get("status") == "incomplete" for item in response.output or ())
    match response.status:
        case "completed" if not is_cut:
            return ("tool_calls" if has_calls else "stop"), ""
        case "incomplete" if reason == "content_filter":
            return "content_filter", reason
        case "incomplete" if reason == "max_output_tokens":
            return "length", reason
        case "failed" | "cancelled":
            failed = ServerStatusError(f"{model} broke the reply off (status {response.status!r})")
            failed.may_be_paid = True
            raise failed
        case status:
            raise ValueError(
                f"ended a reply with status {status!r:.60} {reason}: it may be incomplete"
            )


def _reasoning(items: list[dict[str, Any]]) -> str | None:
    summaries = [item.get("summary") for item in items if item.get("type") == "reasoning"]
    parts = [part for summary in summaries if isinstance(summary, list) for part in summary]
    texts = [str(part.get("text") or "") for part in parts if isinstance(part, dict)]
    return "\n\n".join(filter(None, texts)) or None


def _usage(reported: Any) -> Usage:
    fields = reported if isinstance(reported, dict) else {}
    inputs, outputs = (
        details if isinstance(details, dict) else {}
        for details in (fields.get("input_tokens_details"), fields.get("output_tokens_details"))
    )
    return reported_usage(
        fields.get("input_tokens"),
        fields.get("output_tokens"),
        total=fields.get("total_tokens"),
        cached=inputs.get("cached_tokens"),
        reasoning=outputs.get("reasoning_tokens"),
    )
