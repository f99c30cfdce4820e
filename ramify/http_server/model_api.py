"""The interface between a model and its HTTP APIs, and the code that these APIs share.

    body ── parse_request of an API ──> ModelApiReplyWriter ── request ──> ServedModel
                                            └── body, or events of a stream <── replies ──┘

Three APIs implement ``ModelApiReplyWriter``, and two models implement ``ServedModel``: a served
policy (``serve/policy_server.py``), and the model that answers an agent in a run
(``evaluate/agent_model_server.py``). This module also has what the APIs share: the choice of tools,
ids of tool calls, log-probabilities, and the text by which a streamed message has grown.

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
from ramify.errors import RequestRefusedError
from ramify.http_server.rejections import RequestRejected
from ramify.types.message import Message, Reply, ToolCall

T = TypeVar("T")
MAX_REPLIES = 128
"""Maximum number of replies to one request."""
MAX_TOP_LOGPROBS = 20
"""Maximum number of most likely tokens reported per sampled token."""
encode = msgspec.json.Encoder().encode


class ServedModel(Protocol):
    """Interface of a model that answers the requests of one caller."""

    name: str
    """Model name shown in responses."""
    window: int
    """Context window: maximum tokens of prompt and reply together."""

    async def generate_replies(self, request: Request, num_replies: int) -> Sequence[Reply]:
        """Sample several independent replies to one request.

        Raises RamifyError or RequestRejected on failure.
        """
        ...

    def stream(
        self, request: Request, num_replies: int
    ) -> AsyncGenerator[tuple[int, Message | Reply], None]:
        """Yield several replies to one request while the model generates them.

        Each value is the index of a reply, with the message so far or, at its end, with the whole
        reply. Raises RamifyError or RequestRejected on failure.
        """
        ...

    def num_tokens(self, request: Request) -> int:
        """Return the number of tokens in a request's prompt.

        Raises RequestRefusedError if it cannot be determined.
        """
        ...

    def token_text(self, id: int) -> str:
        """Return the text of a token, or an empty string if it is unknown."""
        ...


class ModelApiReplyWriter(Protocol):
    """Interface of the objects that handle one request in the format of one API.

    They also write the answer in that format. ``body`` returns a whole response. A stream consists
    of ``encode_stream_start``, any number of ``encode_message_delta``, ``encode_reply_end`` for
    each reply, and ``encode_stream_end``; ``encode_stream_error`` replaces the rest after an error.
    """

    id: str
    """Id of the response."""
    is_private: bool
    """True if the caller wants nothing of this exchange to be recorded (``store: false``)."""
    request: Request
    num_replies: int
    is_streamed: bool
    tool_choice: ToolChoice

    def response_body(self, replies: Sequence[Reply]) -> bytes: ...

    def encode_stream_start(self) -> bytes: ...

    def encode_message_delta(self, index: int, message: Message) -> bytes: ...

    def encode_reply_end(self, index: int, reply: Reply) -> bytes: ...

    def encode_stream_end(self) -> bytes: ...

    def encode_stream_error(self, error: RequestRejected) -> bytes: ...


class ToolChoice(msgspec.Struct, frozen=True):
    """A request's rule on tool calls: whether the reply must, may or must not call tools.

    It is checked on the finished reply and never written into the prompt, so the conversation's
    token ids do not change.
    """

    is_required: bool = False
    """True if a reply without a tool call is an error."""
    is_forbidden: bool = False
    """True if a reply with a tool call is an error."""
    names: tuple[str, ...] = ()
    """Names of the tools that a reply may call. Empty: all."""
    is_parallel: bool = True
    """False if a reply with more than one tool call is an error."""

    def check_reply(self, reply: Reply) -> None:
        """Raise RequestRejected if the tool calls in a reply violate this tool choice."""
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
    """Return the error for a model's reply that does not meet a requirement of its request.

    The error includes the reply's text.
    """
    error = RequestRejected(problem, code=code)
    error.more["failed_generation"] = reply.message.content
    return error


def check_tool_choice(choice: ToolChoice, tools: Sequence[Tool], field: str) -> ToolChoice:
    """Check that a request's tool choice is possible with its tools, and return it unchanged.

    Raises RequestRejected if it names or requires a tool that is not offered.
    """
    known = {tool.name for tool in tools}
    unknown = next((name for name in choice.names if name not in known), None)
    if unknown is not None:
        raise RequestRejected(
            f"{field} names {unknown!r:.80}, which is not one of the tools", param=field
        )
    if choice.is_required and not tools:
        raise RequestRejected(f"{field} requires a tool call, but there are no tools", param=field)
    return choice


def parse_openai_tool_choice(choice: Any, parallel: bool | None) -> ToolChoice:
    """Parse a request's ``tool_choice`` in the format of chat completions or the responses API.

    Raises RequestRejected for an unsupported value.
    """
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
    """Decode the JSON body of a request to a model API.

    Raises RequestRefusedError with the reason if it is invalid. ``kind`` names the requested object
    in the error.
    """
    try:
        return decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise RequestRefusedError(f"not a request for a {kind}: {error}") from None


def refuse_unsupported(parsed: msgspec.Struct, harmless: Mapping[str, Sequence[Any]]) -> None:
    """Raise RequestRejected if an unsupported field of a request would change the answer.

    ``harmless`` maps the name of each unsupported field to the values that have no effect.
    """
    for name, values in harmless.items():
        value = getattr(parsed, name)
        if value is not None and value not in values:
            raise RequestRejected(f"{name}={value!r:.100} is not supported: remove it", param=name)


def check_sampling(temperature: float | None, top_p: float | None) -> None:
    """Check a request's sampling options: ``temperature >= 0`` and ``0 < top_p <= 1``.

    Raises RequestRefusedError otherwise.
    """
    if not (temperature or 0) >= 0 or not 0 < (1 if top_p is None else top_p) <= 1:
        raise RequestRefusedError(
            f"temperature={temperature} must be at least 0, top_p={top_p} above 0 and at most 1"
        )


def check_top_logprobs(number: int | None) -> int:
    """Return how many top tokens to report per sampled token, after checking the request's value.

    Raises RequestRejected for more than ``MAX_TOP_LOGPROBS``.
    """
    if number is not None and not 0 <= number <= MAX_TOP_LOGPROBS:
        raise RequestRejected(
            f"top_logprobs={number} must be from 0 to {MAX_TOP_LOGPROBS}", param="top_logprobs"
        )
    return number or 0


def response_format_schema(format: Any, where: str) -> dict[str, Any] | None:
    """Return the JSON schema from the response format of an OpenAI API request, or None for plain
    text.

    ``where`` names the field in errors. Raises RequestRejected for an unsupported format.
    """
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


def new_call_id_suffix() -> str:
    """Return random characters that make the tool-call ids of one reply unique."""
    return secrets.token_hex(8)


def unique_call_id(id: str, mark: str) -> str:
    """Return a tool-call id that is unique in the conversation.

    The mark is appended to an id that a chat template generated. Other ids stay unchanged.

    >>> unique_call_id("call_0", "5f1c0a9be2d34c77")
    'call_0_5f1c0a9be2d34c77'
    """
    return f"{id}_{mark}" if _OWN_ID.fullmatch(id) else id


def original_call_id(id: str) -> str:
    """Remove the mark that ``unique_call_id`` appended to a tool-call id.

    Other ids stay unchanged.

    >>> original_call_id("call_0_5f1c0a9be2d34c77")
    'call_0'
    """
    match = _SENT_ID.fullmatch(id)
    return match[1] if match else id


def calls_with_unique_ids(message: Message) -> list[ToolCall]:
    """Return a reply's tool calls with ids that are unique in the conversation."""
    if not message.tool_calls:
        return []
    mark = new_call_id_suffix()
    return [
        msgspec.structs.replace(call, id=unique_call_id(call.id, mark))
        for call in message.tool_calls
    ]


class ReplyDeltaTracker:
    """Tracks how much of a streamed message has been sent to the client."""

    def __init__(self) -> None:
        self._reasoning: str | None = None
        self._content = ""

    def next_delta(self, message: Message) -> tuple[str | None, str]:
        """Return the reasoning and the content that a streamed message gained since the last call.

        The reasoning is None if none was added, and an empty string if it has just begun. If text
        that was already sent has changed, nothing is returned for it.
        """
        reasoning: str | None = None
        if message.reasoning is not None:
            reasoning = _added_text(self._reasoning or "", message.reasoning)
            if self._reasoning is not None and not reasoning:
                reasoning = None
            self._reasoning = (self._reasoning or "") + (reasoning or "")
        content = _added_text(self._content, message.content)
        self._content += content
        return reasoning, content


def _added_text(sent: str, now: str) -> str:
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
    """A cache of the strings of token ids, so that each token is looked up only once."""

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
    """Encode one stream event as a server-sent event.

    ``kind`` is the event's name, which some APIs repeat outside the data.
    """
    head = f"event: {kind}\n".encode() if kind else b""
    return b"%sdata: %s\n\n" % (head, encode(event))


def text_of_parts(parts: Sequence[Mapping[str, Any]], kinds: Mapping[str, str]) -> Iterator[str]:
    """Yield the text of each part of a message.

    ``kinds`` maps each supported kind of part to the field with its text. Raises
    RequestRefusedError for any other kind.
    """
    for part in parts:
        kind = str(part.get("type"))
        if kind not in kinds:
            raise RequestRefusedError(f"content of type {kind:.60} is not supported: give text")
        yield str(part.get(kinds[kind]) or "")
