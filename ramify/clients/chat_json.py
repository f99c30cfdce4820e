"""Convert between Ramify's types and the JSON of OpenAI's chat completions.

A ``Request`` becomes a request body, a response body becomes a ``Reply``, and an HTTP error becomes
a ``ModelError``.

    Request(messages, Sampling(max_tokens=64))  ->  {"model": …, "messages": […], "max_tokens": 64}
    {"choices": [{"message": {"content": "hi"}, "finish_reason": "stop"}]}  ->  Reply(…, "stop")

Differences in what servers accept are listed per provider in ``providers.py``. Where they differ in
what they send, every known form is read: reasoning as ``reasoning``, ``reasoning_content`` or parts
of the content, vLLM's token ids, and reasoning tokens that are counted only in the total.

All clients that speak HTTP share the reading of errors, whatever library they use. The message is
one line and never contains a key. The time to wait is read from ``retry-after``, from the reset
header of an exhausted rate limit, and from Google's ``retryDelay``.

``json_api.py`` sends the requests.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from itertools import starmap
from typing import Any, TypeVar

import msgspec

from ramify.clients.base import (
    Request,
    parse_finish_reason,
    picture_base64,
    reported_cost,
    reported_usage,
)
from ramify.clients.providers import ResolvedEndpoint
from ramify.errors import (
    ModelError,
    RateLimited,
    ReplyLostError,
    RequestRefusedError,
    ServerStatusError,
)
from ramify.lazy_pattern import lazy_pattern
from ramify.secret_redaction import encoded_secret_forms
from ramify.types.message import Finish, Message, Reply, ToolCall, Usage
from ramify.types.picture import Picture

KIND = "chat completion"
STREAM_FIELDS = {"stream": True, "stream_options": {"include_usage": True}}
"""Request fields that enable streaming with token counts in the last event."""
HAS_LAST_BODY = False
"""True if the last event of a stream contains the whole response body."""


class _Function(msgspec.Struct):
    name: str | None = ""
    arguments: Any = ""


class _ToolCall(msgspec.Struct):
    id: str | None = ""
    function: _Function = msgspec.field(default_factory=_Function)


class _Message(msgspec.Struct):
    content: str | list[Any] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    refusal: str | None = None
    tool_calls: list[_ToolCall] | None = None


class _Logprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    index: Any = None
    message: _Message = msgspec.field(default_factory=_Message)
    finish_reason: str | msgspec.UnsetType | None = msgspec.UNSET
    content_filter_results: Any = None
    logprobs: _Logprobs | None = None
    token_ids: tuple[int, ...] | None = None


class ChatCompletion(msgspec.Struct):
    """A chat completion from an OpenAI-compatible server, reduced to the fields that Ramify
    reads."""

    choices: list[_Choice] | None = None
    usage: Any = None
    """Usage as the server reports it. Often malformed, so ``_usage`` validates it."""
    model: Any = None
    error: Any = None
    prompt_token_ids: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.choices and len(self.choices) > 1:  # servers may send them in any order
            self.choices.sort(key=lambda choice: _whole_number(choice.index))

    @property
    def num_items(self) -> int:
        """The total length of all lists in the response, such as its tool calls and token ids.

        A size limit applies to this number.
        """
        if not self.choices:
            return len(self.prompt_token_ids or ())
        choice = self.choices[0]
        message, logprobs = choice.message, choice.logprobs
        number = len(self.choices)
        if isinstance(message.content, list):
            number += len(message.content)
        if logprobs is not None:
            number += len(logprobs.content or ())
        for items in (self.prompt_token_ids, choice.token_ids, message.tool_calls):
            if items:
                number += len(items)
        return number


def _whole_number(value: Any) -> float:
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return value if is_number else math.inf


Decoded = TypeVar("Decoded")


def decode_body(decoder: msgspec.json.Decoder[Decoded], body: bytes) -> Decoded:
    """Decode the JSON body of a response with the given decoder.

    Raises msgspec.DecodeError if the body has another form.

    Invalid characters are replaced, because the reply has already been billed. A model may sample
    them and a server may pass them on.
    """
    try:
        return decoder.decode(body)
    except RecursionError:
        raise msgspec.DecodeError("JSON is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        try:
            parsed = json.loads(body.decode("utf-8-sig", "replace"), parse_constant=_no_number)
            loose = json.dumps(parsed, ensure_ascii=False)
        except (ValueError, RecursionError):
            raise error from None
        return decoder.decode(loose.encode("utf-8", "replace"))


_decoder = msgspec.json.Decoder(ChatCompletion)


def decode(body: bytes) -> ChatCompletion:
    """Decode the JSON body of a chat completion from a server.

    Raises msgspec.DecodeError if the body has another form.
    """
    return decode_body(_decoder, body)


class _ToolCallPart(_ToolCall):
    index: int = 0


class _Delta(_Message):
    tool_calls: list[_ToolCallPart] | None = None  # type: ignore[assignment]


class _ChoicePart(_Choice):
    delta: _Delta | None = None


class _Chunk(ChatCompletion):
    choices: list[_ChoicePart] | None = None  # type: ignore[assignment]


_decoder_of_chunks = msgspec.json.Decoder(_Chunk)


class ChatReplyAssembler:
    """Assembles a chat completion from the chunks of a stream.

    Only the first choice (index 0) is read.
    """

    def __init__(self) -> None:
        self.is_done = False
        self.error: Any = None
        self._completion = ChatCompletion()
        self._choice: _Choice | None = None
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._refusals: list[str] = []
        self._logprobs: list[_Logprob] = []
        self._ids: list[int] = []
        self._calls: dict[int, tuple[_ToolCall, list[str]]] = {}
        """Index of a tool call -> its id and name, and the pieces of its arguments in order."""

    @property
    def is_whole(self) -> bool:
        """True if the streamed reply is complete, that is, if a finish reason has arrived.

        This is needed because some servers end a stream without ``[DONE]``.
        """
        return self._choice is not None and isinstance(self._choice.finish_reason, str)

    def add(self, event: bytes) -> tuple[str, str]:
        if event == b"[DONE]":
            self.is_done = True
            return "", ""
        chunk = decode_body(_decoder_of_chunks, event)
        completion = self._completion
        if chunk.error:
            self.error = chunk.error
        if chunk.usage is not None:
            completion.usage = chunk.usage
        if completion.model is None:
            completion.model = chunk.model
        if chunk.prompt_token_ids is not None:
            completion.prompt_token_ids = chunk.prompt_token_ids
        text, thought = "", ""
        for part in chunk.choices or ():
            if part.index in (0, None):
                more, more_thought = self._add_part(part)
                text, thought = text + more, thought + more_thought
        return text, thought

    def body(self) -> bytes:
        choice = self._choice
        if choice is not None:
            choice.message = _Message(
                content="".join(self._texts),
                reasoning="".join(self._thoughts) or None,
                refusal="".join(self._refusals) or None,
                tool_calls=[self._whole_call(index) for index in sorted(self._calls)] or None,
            )
            choice.logprobs = _Logprobs(self._logprobs) if self._logprobs else None
            choice.token_ids = tuple(self._ids) if self._ids else None
            self._completion.choices = [choice]
        return encode(self._completion)

    def _add_part(self, part: _ChoicePart) -> tuple[str, str]:
        if self._choice is None:
            self._choice = _Choice()
        if part.finish_reason is not msgspec.UNSET:  # null or empty until the last chunk
            self._choice.finish_reason = part.finish_reason or self._choice.finish_reason or None
        if part.content_filter_results is not None:
            self._choice.content_filter_results = part.content_filter_results
        if part.logprobs is not None:
            self._logprobs += part.logprobs.content or ()
        if part.token_ids is not None:
            self._ids += part.token_ids
        # Some servers send the whole message in a stream of one event.
        delta = part.message if part.delta is None else part.delta
        for call in delta.tool_calls or ():
            self._add_call(call)
        if delta.refusal:
            self._refusals.append(delta.refusal)
        content, thought = delta.content or "", delta.reasoning or delta.reasoning_content or ""
        if isinstance(content, list):
            content, more_thought = _split_content(content)
            thought += more_thought or ""
        if content:
            self._texts.append(content)
        if thought:
            self._thoughts.append(thought)
        return content, thought

    def _add_call(self, part: _ToolCall) -> None:
        index = part.index if isinstance(part, _ToolCallPart) else len(self._calls)
        call, arguments = self._calls.setdefault(index, (_ToolCall(), []))
        call.id = call.id or part.id
        call.function.name = call.function.name or part.function.name
        given = part.function.arguments
        arguments.append(given if isinstance(given, str) else msgspec.json.encode(given).decode())

    def _whole_call(self, index: int) -> _ToolCall:
        call, arguments = self._calls[index]
        call.function.arguments = "".join(arguments)
        return call


new_stream = ChatReplyAssembler


def _no_number(constant: str) -> None:
    """Decode NaN and infinities in a response's JSON as null.

    Some servers write them, although JSON does not allow them.
    """


_encode = msgspec.json.Encoder().encode


def request_body_fields(
    request: Request, endpoint: ResolvedEndpoint, limit_field: str
) -> dict[str, Any]:
    """Return the JSON fields of a request, in the form that its server expects."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "model": endpoint.model,
        "messages": _wire_messages(request, endpoint.provider.reasoning_field),
        limit_field: sampling.max_tokens,
    }
    for name in ("temperature", "top_p", "seed"):
        if (value := getattr(sampling, name)) is not None:
            fields[name] = value
    if sampling.top_k is not None and endpoint.provider.local:  # not part of OpenAI's own API
        fields["top_k"] = sampling.top_k
    if sampling.stop:
        fields["stop"] = sampling.stop
    if sampling.logprobs:
        fields["logprobs"] = True
        if endpoint.provider.returns_ids:
            fields["return_token_ids"] = True
    if request.schema is not None:
        schema = {
            "name": "answer",
            "schema": request.schema,
            "strict": is_strict_compatible(request.schema),
        }
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    if request.tools:
        fields["tools"] = [{"type": "function", "function": tool} for tool in request.tools]
    if request.messages and request.messages[-1].role == "assistant":
        fields |= endpoint.provider.continue_fields
    if request.affinity and endpoint.cache_key:
        fields["prompt_cache_key"] = request.affinity
    fields.update(sampling.extra)
    return fields


def is_strict_compatible(schema: Any) -> bool:
    """Return True if OpenAI can strictly enforce a JSON schema.

    That is the case if every object is closed and requires all its properties.
    """
    if isinstance(schema, list):
        return all(map(is_strict_compatible, schema))
    if not isinstance(schema, dict):
        return True
    properties = schema.get("properties")
    if schema.get("type") == "object" or isinstance(properties, dict):
        named = properties if isinstance(properties, dict) else {}
        if schema.get("additionalProperties") is not False or set(
            schema.get("required", ())
        ) != set(named):
            return False
        if not all(map(is_strict_compatible, named.values())):
            return False
    subschemas = (
        value
        for key, value in schema.items()
        if key not in ("properties", "enum", "const", "default", "examples")
    )
    return all(map(is_strict_compatible, subschemas))


def encode(fields: Any) -> bytes:
    """Encode the body of a request as JSON.

    Text that is not valid Unicode is repaired.
    """
    try:
        return _encode(fields)
    except UnicodeEncodeError:
        return _encode(without_surrogates(fields))


def reply_from_response(
    completion: ChatCompletion, choice: _Choice, model: str, seconds: float
) -> Reply:
    """Convert a decoded chat completion to a ``Reply``.

    Raises ValueError if its fields contradict each other, and ServerStatusError if the server
    reports that it aborted the reply.
    """
    finish = _finish_reason(choice, model)
    return Reply(
        message=_message(choice.message),
        usage=_usage(completion.usage),
        finish=finish,
        filter=_filter_reason(choice) if finish == "content_filter" else "",
        model=reported_model_name(completion.model, model),
        cost=reported_cost(_dict_or_empty(completion.usage).get("cost")),
        seconds=seconds,
        prompt_ids=completion.prompt_token_ids,
        token_ids=choice.token_ids,
        logprobs=_logprobs(choice),
    )


def reported_model_name(reported: Any, model: str) -> str:
    """Return the name of the model that the server reports, or the requested name if it reports
    none."""
    return reported if isinstance(reported, str) and reported else model


def _wire_messages(request: Request, reasoning_field: str) -> list[dict[str, Any]]:
    """Convert a request's messages to the JSON that the server expects.

    Consecutive assistant messages are merged. They occur when a reply is continued.
    """
    wires: list[dict[str, Any]] = []
    last_role = ""
    for message in request.messages:
        wire = _wire_message(message, reasoning_field)
        if message.pictures:
            wire["content"] = [*_wire_pictures(request, message), *_wire_text(message)]
        if message.role == last_role == "assistant":
            wire["content"] = (wires[-1]["content"] or "") + (wire["content"] or "")
            wires[-1] |= wire
        else:
            wires.append(wire)
        last_role = message.role
    return wires


def _wire_pictures(request: Request, message: Message) -> list[dict[str, Any]]:
    return [
        {"type": "image_url", "image_url": {"url": picture_url(request, picture)}}
        for picture in message.pictures
    ]


def _wire_text(message: Message) -> list[dict[str, Any]]:
    return [{"type": "text", "text": message.content}] if message.content else []


def picture_url(request: Request, picture: Picture) -> str:
    """Return a picture in a request as a ``data:`` URL."""
    return f"data:{picture.media_type};base64,{picture_base64(request, picture)}"


def _wire_message(message: Message, reasoning_field: str) -> dict[str, Any]:
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.tool_calls:
        wire["content"] = message.content or None
        wire["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        wire["tool_call_id"] = message.tool_call_id
    if message.reasoning and reasoning_field:
        wire[reasoning_field] = message.reasoning
    return wire


def without_surrogates(value: Any) -> Any:
    """Replace each lone surrogate, which UTF-8 cannot encode, in a value's strings with U+FFFD."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, dict):
        return {key: without_surrogates(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_surrogates(item) for item in value]
    return (
        without_surrogates(msgspec.to_builtins(value))
        if isinstance(value, msgspec.Struct)
        else value
    )


def _message(wire: _Message) -> Message:
    content, reasoning = (
        (wire.content, None) if not isinstance(wire.content, list) else _split_content(wire.content)
    )
    return Message(
        role="assistant",
        content=content or _refusal(wire),
        reasoning=wire.reasoning or wire.reasoning_content or reasoning or None,
        tool_calls=tuple(starmap(_tool_call, enumerate(wire.tool_calls or ()))),
    )


def _tool_call(index: int, wire: _ToolCall) -> ToolCall:
    arguments = wire.function.arguments
    text = arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
    return ToolCall(wire.id or f"call_{index}", wire.function.name or "", text)


def _split_content(parts: list[Any]) -> tuple[str, str | None]:
    """Split the parts of a message's content into its text and its reasoning."""
    text, thinking = [], []
    for part in parts:
        if isinstance(part, str):
            text.append(part)
        elif isinstance(part, dict) and part.get("type") == "thinking":
            inner = part.get("thinking")
            thinking.append(
                _split_content(inner)[0] if isinstance(inner, list) else str(inner or "")
            )
        elif isinstance(part, dict):
            text.append(text_field(part, "text"))
    return "".join(text), "".join(thinking) or None


def text_field(part: dict[str, Any], field: str) -> str:
    """Return the string in ``field`` of one part of a model's reply.

    It is empty if the field is null or missing. Raises ValueError if the field has another type.
    """
    text = part.get(field)
    if text is not None and not isinstance(text, str):
        raise ValueError(f"sent {text!r:.60} as the {field} of a reply")
    return text or ""


def _finish_reason(choice: _Choice, model: str) -> Finish:
    if _refusal(choice.message):
        return "content_filter"
    return parse_finish_reason(choice.finish_reason, model)


def _refusal(wire: _Message) -> str:
    """Return the refusal message in a model's reply.

    It is empty if the model answered.
    """
    if not isinstance(wire.content, list):
        return "" if wire.content else wire.refusal or ""
    text = _split_content(wire.content)[0]
    parts = [text_field(part, "refusal") for part in wire.content if isinstance(part, dict)]
    return "" if text else "".join(parts) or wire.refusal or ""


def _filter_reason(choice: _Choice) -> str:
    """Return why a reply was filtered: ``refusal``, or the server's reason and Azure's
    categories."""
    if _refusal(choice.message):
        return "refusal"
    results = _dict_or_empty(choice.content_filter_results)
    kinds = [
        str(kind)
        for kind, result in results.items()
        if _dict_or_empty(result).get("filtered") is True
    ]
    return f"{choice.finish_reason} ({', '.join(kinds)})" if kinds else str(choice.finish_reason)


def _logprobs(choice: _Choice) -> tuple[float, ...] | None:
    if choice.logprobs is None or choice.logprobs.content is None:
        return None
    return tuple(token.logprob for token in choice.logprobs.content)


def _usage(reported: Any) -> Usage:
    """Read the token counts that a chat completion reports.

    ``calls`` is 0 if the server reports no counts for the prompt and the reply, or impossible ones.
    """
    fields = _dict_or_empty(reported)
    inputs = _dict_or_empty(fields.get("prompt_tokens_details"))
    outputs = _dict_or_empty(fields.get("completion_tokens_details"))
    return reported_usage(
        fields.get("prompt_tokens"),
        fields.get("completion_tokens"),
        total=fields.get("total_tokens"),
        # The second name is that of DeepSeek.
        cached=inputs.get("cached_tokens") or fields.get("prompt_cache_hit_tokens"),
        stored=inputs.get("cache_write_tokens"),
        reasoning=outputs.get("reasoning_tokens") or fields.get("reasoning_tokens"),
    )


def _dict_or_empty(reported: Any) -> dict[str, Any]:
    return reported if isinstance(reported, dict) else {}


_LOOKS_LIKE_A_KEY = lazy_pattern(r"\b((?:sk|pk|rk|gsk|xai|key)[-_]|AIza|Bearer\s+)[\w*.+/=-]{8,}")
_TOO_LONG = lazy_pattern(
    r"context.{0,12}(length|window)|maximum context|too many (input )?tokens|prompt is too long"
    r"|input is too long|max_model_len|longer than the (model|maximum)"
    r"|exceeds? the (maximum|model|limit)[^.]{0,40}tokens",
    re.IGNORECASE,
)
_NO_MONEY = lazy_pattern(
    r"insufficient_quota|billing|credit balance|exceeded your current quota", re.IGNORECASE
)
_TITLE = lazy_pattern(r"<title[^<>]{0,200}>([^<]{1,1000})</title>", re.IGNORECASE)
_MOST_ERROR_BYTES = 1 << 16
"""Maximum bytes of an error body that are read. Error messages are short."""
_NOT_THERE = (404, 405, 501)
"""HTTP statuses for a missing path or an unsupported method. They are typical of a server that
does not offer the API."""
_DURATION = lazy_pattern(r"(\d+(?:\.\d+)?)(ms|s|m|h|d)")
_UNIT_S = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_RETRY_DELAY = re.compile(rb'"retryDelay"\s*:\s*"(\d+(?:\.\d+)?)s"')


def error_from_status(
    where: str,
    status: int,
    headers: Mapping[str, str],
    body: bytes,
    *,
    key_variable: str = "",
    secrets: Iterable[str] = (),
) -> ModelError:
    """Return the ModelError to raise for a response whose HTTP status is not 2xx.

    ``where`` names the model and its address, for the error message. ``secrets`` are the keys that
    were sent; they are removed from the message.
    """
    secrets = tuple(filter(None, secrets))
    body = body[:_MOST_ERROR_BYTES]
    message = error_message(body, secrets)
    text = f"{where} answered {status}: {message}" if message else f"{where} answered {status}"
    # 529 is an overloaded Anthropic server. A 503 that says how long to wait is a rate limit, too.
    if status in (429, 529) or (status == 503 and retry_after_s(headers, body) is not None):
        if _NO_MONEY.search(message) and status == 429:
            return _needs_key(f"{text}; the account has no quota left")
        return RateLimited(text, retry_after_s(headers, body))
    if status in (504, 524):
        return ReplyLostError(f"{text}; a gateway gave up waiting")
    if status in (408, 425) or (status >= 500 and status not in _NOT_THERE):
        return ServerStatusError(text)
    key = f"check the key in {key_variable}" if secrets else f"no key was sent: set {key_variable}"
    return _refusal_error(text, status, message, key if key_variable else "")


def _refusal_error(text: str, status: int, message: str, key: str) -> RequestRefusedError:
    if status in (400, 413, 422) and (status == 413 or _TOO_LONG.search(message)):
        error = RequestRefusedError(
            f"{text}; shorten the prompt or name a model with a larger window"
        )
        error.too_long = True
        return error
    if status == 402 or (status in (400, 403) and _NO_MONEY.search(message)):
        return _needs_key(f"{text}; the account has no quota left")
    if status in (401, 403):
        return _needs_key(f"{text}; {key}" if key else text)
    if status == 407:
        return RequestRefusedError(
            f"{text}; the proxy of the environment wants a user and password in its URL"
        )
    # Servers name an unknown model. Otherwise it is the path that they do not have.
    if status in _NOT_THERE and "model" not in message.lower():
        return RequestRefusedError(f"{text}; check the base URL: most end in /v1")
    return RequestRefusedError(text)


def error_from_body(
    where: str,
    headers: Mapping[str, str],
    body: bytes,
    error: Any,
    *,
    is_beside_reply: bool,
    key_variable: str = "",
    secrets: Iterable[str] = (),
) -> ModelError:
    """Return the error for a response with status 200 whose body contains an ``error``.

    An error code that is an HTTP status decides the kind of error. If the body also has a reply,
    that reply may have been billed.
    """
    code = error.get("code") if isinstance(error, dict) else None
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    failure = error_from_status(
        where, status, headers, body, key_variable=key_variable, secrets=secrets
    )
    failure.may_be_paid = failure.may_be_paid or is_beside_reply
    return failure


def _needs_key(text: str) -> RequestRefusedError:
    error = RequestRefusedError(text)
    error.needs_key = True
    return error


def error_message(body: bytes, secrets: Iterable[str] = ()) -> str:
    """Extract the message from an error body in any provider's format.

    The message is one line of at most 300 characters, and the given secrets are removed from it.
    """
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        text = body[:20_000].decode("utf-8", "replace")
        parsed = _web_page(text) if text.lstrip()[:1] == "<" else text
    # Secrets are removed first, because half of one would not be recognized.
    return " ".join(redact_secrets(_error_text(parsed), secrets).split())[:300]


def _web_page(text: str) -> str:
    """Describe an HTML page by its title, such as ``a web page "502 Bad Gateway"``."""
    import html

    title = _TITLE.search(text)
    name = " ".join(html.unescape(title[1]).split())[:100] if title else ""
    return f'a web page "{name}"' if name else "a web page"


def _error_text(parsed: Any) -> str:
    if isinstance(parsed, list):
        return _error_text(parsed[0]) if parsed else ""
    if not isinstance(parsed, dict):
        return str(parsed)
    for field in ("error", "message", "detail", "msg", "error_message"):
        if parsed.get(field):
            code = parsed.get("code") or parsed.get("type")
            tail = f" ({code})" if field == "message" and isinstance(code, str) else ""
            return _error_text(parsed[field]) + tail
    return msgspec.json.encode(parsed).decode() if parsed else ""


def redact_secrets(text: str, secrets: Iterable[str] = ()) -> str:
    """Remove the given secrets, and anything that looks like a key, from ``text``."""
    for secret in secrets:
        for form in encoded_secret_forms(secret) if len(secret) >= 6 else ():
            text = text.replace(form, "***")
    return _LOOKS_LIKE_A_KEY.sub(r"\1***", text)


def retry_after_s(headers: Mapping[str, str], body: bytes = b"") -> float | None:
    """Return how many seconds the server asked the client to wait, or None if it did not say."""
    waits = [
        _parse_scaled(headers.get("retry-after-ms"), 1e-3),
        seconds_until(headers.get("retry-after")),
        _reset_of_exhausted_limit(headers),
    ]
    for wait_s in waits:
        if wait_s is not None:
            return wait_s
    delay = _RETRY_DELAY.search(body)
    return float(delay[1]) if delay else None


def _parse_scaled(value: str | None, unit: float) -> float | None:
    try:
        return max(0.0, float(value) * unit) if value is not None else None
    except ValueError:
        return None


def _reset_of_exhausted_limit(headers: Mapping[str, str]) -> float | None:
    waits = []
    for name, value in headers.items():
        name = name.lower()
        if "ratelimit" in name and "remaining" in name and value.strip() == "0":
            reset = seconds_until(headers.get(name.replace("remaining", "reset")))
            if reset is not None:
                waits.append(reset)
    return max(waits, default=None)


def seconds_until(value: str | None) -> float | None:
    """Parse a duration or a point in time, and return the seconds from now.

    Accepts ``"2"``, ``"6m0.5s"``, ``"20ms"``, an HTTP date, an ISO date, or a Unix time.
    """
    if not value:
        return None
    value = value.strip()
    number = _parse_scaled(value, 1.0)
    if number is not None:
        return (
            number
            if number < 1e9
            else max(0.0, (number / 1000 if number > 1e11 else number) - time.time())
        )
    if _DURATION.fullmatch(value) or re.fullmatch(rf"({_DURATION.pattern})+", value):
        return sum(float(amount) * _UNIT_S[unit] for amount, unit in _DURATION.findall(value))
    from email.utils import parsedate_to_datetime  # rarely needed, and slow to import

    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            return max(0.0, parse(value).timestamp() - time.time())
        except (ValueError, TypeError, OverflowError):
            continue
    return None
