"""The interface between the HTTP APIs of one model and the model that answers their requests, with
functions that all these APIs share.

    body ── completions.read ────┐                                 ┌─ body
            responses_api.read ──┼─> ModelApiExchange ─ request ─> ServedModel ─ replies ─> exchange
            messages_api.read ───┘                                 └─ events of a stream

Three APIs implement ``ModelApiExchange``, and two models implement ``ServedModel``: a served policy
(``serve/policy.py``), and the model that answers an agent in a run
(``evaluate/agent_model_endpoint.py``). This module also has what the APIs share: the choice of
tools, ids of tool calls, log-probabilities, and the text by which a streamed message has grown.

A model's chat template numbers the tool calls of each reply from ``call_0``. Programs expect ids
that are unique in a conversation, so random characters, the same for all calls of a reply, are
appended when a call is sent, and removed when it is sent back. The messages of the next request are
then those that the model wrote.

    call_0  ──unique_call_id──>  call_0_5f1c0a9be2d34c77  ──original_call_id──>  call_0

Routes and errors are handled in ``model_api_routes.py``.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from ramify.clients.base import Request, Tool
from ramify.errors import Refused
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Message, Reply, ToolCall

T = TypeVar("T")
MAX_REPLIES = 128
"""Maximum number of replies to one request."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of likeliest tokens reported for each sampled token."""
encode = msgspec.json.Encoder().encode


class ServedModel(Protocol):
    """A model that answers the requests of one caller of a server."""

    name: str
    """Name of the model in responses."""
    window: int
    """Maximum tokens of prompt and reply together."""

    async def replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        """Return independent replies to one request. Raises RamifyError or RequestRejected."""
        ...

    def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        """Yield the replies to a request as they grow, each with its number: the message so far
        after each step, and the whole reply at its end. Raises RamifyError or RequestRejected."""
        ...

    def num_tokens(self, request: Request) -> int:
        """Return the number of tokens of a request's prompt. Raises Refused if it is unknown."""
        ...

    def token_text(self, id: int) -> str:
        """Return the text of one token, or an empty string if it is unknown."""
        ...


class ModelApiExchange(Protocol):
    """A request in the format of an API, with the methods that write the answer in the same format.

    ``body`` returns a whole response. A stream consists of ``begin``, any number of ``grow``,
    ``end`` for each reply, and ``close``; ``fail`` replaces the rest after an error.
    """

    id: str
    """Id of the response."""
    is_private: bool
    """If True, the caller wants nothing of this exchange to be recorded (``store: false``)."""
    request: Request
    num_replies: int
    is_streamed: bool
    tool_choice: ToolChoice

    def body(self, replies: Sequence[Reply]) -> bytes: ...

    def begin(self) -> bytes: ...

    def grow(self, index: int, message: Message) -> bytes: ...

    def end(self, index: int, reply: Reply) -> bytes: ...

    def close(self) -> bytes: ...

    def fail(self, error: RequestRejected) -> bytes: ...


class ToolChoice(msgspec.Struct, frozen=True):
    """The tools that a reply must or may call. The choice is not written into the prompt, so that a
    conversation keeps its token ids; instead the finished reply is checked."""

    is_required: bool = False
    """If True, a reply without a tool call is an error."""
    is_forbidden: bool = False
    """If True, a reply with a tool call is an error."""
    names: tuple[str, ...] = ()
    """Tools that the reply may call; empty for all."""
    is_parallel: bool = True
    """If False, a reply with more than one tool call is an error."""

    def check(self, reply: Reply) -> None:
        """Raise RequestRejected if a reply does not call a tool although it must, or calls one that
        is not allowed."""
        called = [call.name for call in reply.message.tool_calls]
        others = [name for name in called if self.names and name not in self.names]
        problem = ""
        if self.is_forbidden and called:
            problem = f"the model called {called[0]!r:.80}, and tool_choice forbids tool calls"
        elif self.is_required and not called:
            required = " or ".join(self.names) or "a tool"
            problem = f"the model did not call {required}, which tool_choice requires"
        elif others:
            problem = f"the model called {others[0]!r:.80}, and tool_choice allows {self.names}"
        elif not self.is_parallel and len(called) > 1:
            problem = f"the model called {len(called)} tools, and parallel calls are switched off"
        if problem:
            raise unmet_reply_requirement_error(f"{problem}: ask again", "tool_use_failed", reply)


def unmet_reply_requirement_error(problem: str, code: str, reply: Reply) -> RequestRejected:
    """Return the error for a reply that does not do what the request required. It includes the text
    of the reply."""
    error = RequestRejected(problem, code=code)
    error.more["failed_generation"] = reply.message.content
    return error


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool], field: str) -> ToolChoice:
    """Return the choice unchanged, or raise RequestRejected if it names or requires a tool that is
    not offered."""
    known = {tool.name for tool in tools}
    unknown = next((name for name in choice.names if name not in known), None)
    if unknown is not None:
        raise RequestRejected(
            f"{field} names {unknown!r:.80}, which is not one of the tools", param=field
        )
    if choice.is_required and not tools:
        raise RequestRejected(f"{field} requires a tool call, but there are no tools", param=field)
    return choice


def openai_tool_choice(choice: Any, parallel: bool | None) -> ToolChoice:
    """Parse the ``tool_choice`` of a request, in the format of chat completions or of the responses
    API. Raises RequestRejected if its value is not supported."""
    is_parallel = parallel is not False
    if choice is None or choice == "auto":
        return ToolChoice(is_parallel=is_parallel)
    if choice == "none":
        return ToolChoice(is_forbidden=True)
    if choice == "required":
        return ToolChoice(is_required=True, is_parallel=is_parallel)
    if isinstance(choice, dict):
        kind = choice.get("type")
        held = choice.get(kind) if isinstance(kind, str) else None
        fields: Mapping[str, Any] = held if isinstance(held, dict) else choice
        if kind == "function" and isinstance(fields.get("name"), str):
            return ToolChoice(True, names=(fields["name"],), is_parallel=is_parallel)
        if kind == "allowed_tools" and isinstance(fields.get("tools"), list):
            allowed = [each for each in fields["tools"] if isinstance(each, dict)]
            functions = [each.get("function", each) for each in allowed]
            names = tuple(str(each.get("name")) for each in functions if isinstance(each, dict))
            is_required = fields.get("mode") == "required"
            return ToolChoice(is_required, names=names, is_parallel=is_parallel)
    raise RequestRejected(
        f"tool_choice={choice!r:.100} is not supported: give auto, none, required, one function, "
        "or allowed_tools",
        param="tool_choice",
    )


def decode_request(decoder: msgspec.json.Decoder[T], body: bytes, kind: str) -> T:
    """Decode the JSON body of a request. Raises Refused with the reason if that fails. ``kind``
    says what the API returns, for the error."""
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise Refused(f"not a request for a {kind}: {error}") from None


def refuse_unsupported(parsed: msgspec.Struct, harmless: Mapping[str, Sequence[Any]]) -> None:
    """Raise RequestRejected if a request has an unsupported field whose value would change the
    answer.

    ``harmless`` maps the name of each unsupported field to the values that have no effect.
    """
    for name, values in harmless.items():
        value = getattr(parsed, name)
        if value is not None and value not in values:
            raise RequestRejected(f"{name}={value!r:.100} is not supported: remove it", param=name)


def check_sampling(temperature: float | None, top_p: float | None) -> None:
    """Raise Refused unless ``temperature`` is at least 0, and ``top_p`` is above 0 and at most
    1."""
    if not (temperature or 0) >= 0 or not 0 < (1 if top_p is None else top_p) <= 1:
        raise Refused(
            f"temperature={temperature} must be at least 0, top_p={top_p} above 0 and at most 1"
        )


def check_top_logprobs(number: int | None) -> int:
    """Return how many of the likeliest tokens to report for each sampled token. Raises
    RequestRejected if a request asks for too many."""
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        raise RequestRejected(
            f"top_logprobs={number} must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    return number or 0


def schema_in(format: Any, where: str) -> dict[str, Any] | None:
    """Return the JSON schema in the response format of a request to either OpenAI API, or None if
    the reply may be any text. ``where`` names the field for errors. Raises RequestRejected if the
    response format is not supported."""
    kind = format.get("type") if isinstance(format, dict) else None
    if format is None or kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    # Chat completions put the schema into ``json_schema``.
    holder = format.get("json_schema", format) if isinstance(format, dict) else None
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        raise RequestRejected(
            f"{where}={format!r:.100} is not supported: give text, json_object, or json_schema "
            "with a schema",
            param=where,
        )
    return schema


_OWN_ID = re.compile(r"call_\d+")
_SENT_ID = re.compile(r"(call_\d+)_[0-9a-f]{16}")


def new_reply_mark() -> str:
    """Return random characters that make the ids of one reply's tool calls unique."""
    return secrets.token_hex(8)


def unique_call_id(id: str, mark: str) -> str:
    """
    >>> unique_call_id("call_0", "5f1c0a9be2d34c77")
    'call_0_5f1c0a9be2d34c77'
    """
    return f"{id}_{mark}" if _OWN_ID.fullmatch(id) else id


def original_call_id(id: str) -> str:
    """
    >>> original_call_id("call_0_5f1c0a9be2d34c77")
    'call_0'
    """
    match = _SENT_ID.fullmatch(id)
    return match[1] if match else id


def calls_with_unique_ids(message: Message) -> list[ToolCall]:
    """Return the tool calls of a reply, with ids that are unique in the conversation."""
    if not message.tool_calls:
        return []
    mark = new_reply_mark()
    return [
        msgspec.structs.replace(call, id=unique_call_id(call.id, mark))
        for call in message.tool_calls
    ]


class ReplyDeltaTracker:
    """A record of how much of a streamed message was sent, which finds the text that is new."""

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._content = ""

    def gained(self, message: Message) -> tuple[str | None, str]:
        """Return the reasoning and the content by which a message has grown since the last call.
        The reasoning is None if nothing was added to it; the first part of it may be empty. If text
        that was already sent has changed, nothing is sent again."""
        reasoning: str | None = None
        if message.reasoning is not None:
            reasoning = _gain(self._reasoning or "", message.reasoning)
            if self._reasoning is not None and not reasoning:
                reasoning = None
            self._reasoning = (self._reasoning or "") + (reasoning or "")
        content = _gain(self._content, message.content)
        self._content += content
        return reasoning, content


def _gain(sent: str, now: str) -> str:
    return now[len(sent) :] if now.startswith(sent) else ""


def logprob_entries(reply: Reply, text_of: Callable[[int], str]) -> list[dict[str, Any]]:
    """Return the log-probabilities of all sampled tokens of a reply, in the format of OpenAI's
    APIs."""
    texts = _TokenTexts(text_of)
    ids, logprobs = reply.token_ids or (), reply.logprobs or ()
    tops = reply.top_logprobs or ((),) * len(ids)
    return [
        {**texts.entry(id, logprob), "top_logprobs": [texts.entry(*each) for each in top]}
        for id, logprob, top in zip(ids, logprobs, tops, strict=True)
    ]


class _TokenTexts:
    """A cache of the texts of tokens, so that each is looked up once."""

    def __init__(self, text_of: Callable[[int], str]) -> None:
        self._text_of = text_of
        self._known: dict[int, tuple[str, list[int] | None]] = {}

    def entry(self, id: int, logprob: float) -> dict[str, Any]:
        if id not in self._known:
            text = self._text_of(id)
            # The bytes of a part of a character are unknown.
            self._known[id] = text, None if "\ufffd" in text else list(text.encode())
        text, as_bytes = self._known[id]
        return {"token": text, "logprob": logprob, "bytes": as_bytes}


def server_sent_event(event: object, kind: str = "") -> bytes:
    """Encode one event of a stream as server-sent events require. ``kind`` is the event's name,
    which some APIs repeat outside the data."""
    head = f"event: {kind}\n".encode() if kind else b""
    return b"%sdata: %s\n\n" % (head, encode(event))


def text_of_parts(parts: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the texts of the parts of a message. ``kinds`` maps each supported kind of part to the
    field that has its text. Raises Refused for any other kind."""
    for part in parts:
        kind = str(part.get("type"))
        if kind not in kinds:
            raise Refused(f"content of type {kind:.60} is not supported: give text")
        yield str(part.get(kinds[kind]) or "")
