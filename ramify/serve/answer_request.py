"""A request for an answer, independent of the API through which it arrived.

It has messages and run limits. The request's field ``ramify`` may lower the server's limits. The
progress of its run is available as text.

    chat_completions.read ─┐
    responses.read ────────┴─> AnswerRequest ──conversation_to_question.py──> question ──> run
    events of the run ──apply──> pending text ──texts──> streaming response
    replies as they arrive ────────┘

Fields without an effect here (``user``, ``metadata``, ``reasoning_effort``, …) are accepted and
ignored. A field that would change the answer but is not supported is rejected by name, so that no
client believes that it had an effect. A file must be inside the request, in base64: this server
stores no files and downloads nothing.

The run never waits for a slow reader, and no text is lost: text that arrived meanwhile is delivered
in one piece. Error messages of providers are hidden: only the operator sees them. The fields of
each API are read by ``chat_completions.py`` and ``responses_api.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncGenerator
from typing import Any, Literal, TypeVar

import msgspec

from ramify.clients.base import Sampling
from ramify.engine.limits import Limits
from ramify.engine.run_handle import RunHandle
from ramify.engine.run_result import Result
from ramify.http_server.rejections import RequestRejected
from ramify.plugins import explain_conversion_error
from ramify.progress import ReplyTextDelta, watch_reply_text
from ramify.serve.client_function_tools import AnswerOrToolCallSchema
from ramify.types.event import (
    AnyEvent,
    CallEnded,
    CallStarted,
    CellRan,
    NoteAdded,
    ReplyReceived,
    RequestAttemptFailed,
)
from ramify.types.message import escape_surrogates

T = TypeVar("T")


class AttachedFile(msgspec.Struct, frozen=True):
    """A file that is attached to a message of a request."""

    name: str
    data: str
    """Content in base64, or as a ``data:`` URL."""
    where: str
    """Path of the file's field for use in error messages, such as
    ``messages[0].content[1].file.file_data``."""


class ChatMessage(msgspec.Struct, frozen=True):
    """One message of a conversation, independent of the API over which it arrived."""

    role: str
    """``system``, ``user``, ``assistant`` or ``tool``."""
    parts: tuple[str | AttachedFile, ...]


class RunLimitOverrides(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The limits that one request sets for its run.

    None selects the server's limit, which is also the maximum.
    """

    max_turns: int | None = None
    max_depth: int | None = None
    max_calls: int | None = None
    max_tokens: int | None = None
    max_cost: float | None = None
    max_seconds: float | None = None
    max_children: int | None = None
    max_reply_tokens: int | None = None
    max_sub_reply_tokens: int | None = None
    max_reasoning_tokens: int | None = None

    def apply_to_limits(self, limits: Limits, most_cost: float | None) -> Limits:
        """Return the run's limits: those of the server, lowered where this request asks for it.

        ``most_cost``: the server's maximum cost of a run in dollars. Raises RequestRejected for a
        limit above the server's.
        """
        fields = {
            name: value for name, value in msgspec.structs.asdict(self).items() if value is not None
        }
        for name, value in fields.items():
            maximum = most_cost if name == "max_cost" else getattr(limits, name)
            if maximum is not None and value > maximum:
                raise RequestRejected(
                    f"{name}={value!r} is above the server's limit of {maximum!r}: a request can "
                    "only lower it",
                    param=f"ramify.limits.{name}",
                )
            if value < 0 or (value == 0 and name not in ("max_depth", "max_reasoning_tokens")):
                raise RequestRejected(
                    f"{name}={value!r} allows nothing: give a larger value",
                    param=f"ramify.limits.{name}",
                )
        return msgspec.structs.replace(limits, **fields)


class RamifyRequestFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The field ``ramify`` of a request, which holds options that OpenAI's API lacks."""

    limits: RunLimitOverrides = RunLimitOverrides()
    depth: int | None = None
    """Short form of ``limits.max_depth``."""
    cite: bool = False
    """True to ask for citations, verify them, and return them in the ``ramify`` field of the
    response."""
    resume: str = ""
    """Id of an interrupted run of this request that is to be continued. The replies recorded so far
    are reused at no cost."""

    def limit_overrides(self) -> RunLimitOverrides:
        """Return the limits that the request sets for its run, including its maximum depth.

        Raises RequestRejected if both forms are given.
        """
        if self.depth is None:
            return self.limits
        if self.limits.max_depth is not None:
            raise RequestRejected(
                "the depth is also given as limits.max_depth: give only one", param="ramify.depth"
            )
        return msgspec.structs.replace(self.limits, max_depth=self.depth)


class AnswerRequest(msgspec.Struct, frozen=True):
    """A request for one answer, read from any of the supported APIs."""

    messages: tuple[ChatMessage, ...]
    stream: bool
    schema: dict[str, Any] | None
    """JSON schema that the answer must match."""
    schema_field: str
    """Path of the schema's field, for use in error messages."""
    max_tokens: int | None
    """Maximum number of tokens of the final answer."""
    max_tokens_field: str
    temperature: float | None
    top_p: float | None
    ramify: RamifyRequestFields
    seed: int | None = None
    stops: tuple[str, ...] = ()
    """Stop sequences. The answer ends before the first one that occurs."""
    offer: AnswerOrToolCallSchema | None = None
    """Answer type for the client functions that the answer may call; None if there are none."""
    with_usage: bool = True
    """True if the last event of a streamed chat completion contains the usage."""
    is_private: bool = False
    """True if nothing of this request may be recorded (``store: false``)."""

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise RequestRejected(
                f"{self.max_tokens_field} is {self.max_tokens}: give at least 1",
                param=self.max_tokens_field,
            )
        if self.temperature is not None and not 0 <= self.temperature <= 2:
            raise RequestRejected(
                f"temperature={self.temperature} must be from 0 to 2", param="temperature"
            )
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise RequestRejected(
                f"top_p={self.top_p} must be above 0 and at most 1", param="top_p"
            )
        if self.offer is not None and self.ramify.cite:
            raise RequestRejected(
                "an answer with tools cannot have citations: give either tools or cite",
                param="ramify.cite",
            )

    def merged_sampling(self, server: Sampling) -> Sampling:
        """Return the run's sampling settings, in which the request's values override the
        server's."""
        fields = {"temperature": self.temperature, "top_p": self.top_p, "seed": self.seed}
        return msgspec.structs.replace(
            server, **{name: value for name, value in fields.items() if value is not None}
        )


def decode_request_body(decoder: msgspec.json.Decoder[T], body: bytes) -> T:
    """Decode the JSON body of a request.

    Raises RequestRejected, with the name of the invalid field.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        text, _, path = str(error).partition(" - at ")
        match = re.search(r"(?:field|value) [`'](.+?)[`']", text)
        place = path.strip("`").removeprefix("$").removeprefix(".")
        name = match[1] if match and "field" in text else ""
        advice = explain_conversion_error(error, decoder.type).removeprefix(str(error))
        raise RequestRejected(
            f"{text} ({place or 'the body'}){advice}",
            param=".".join(filter(None, [place, name])) or None,
        ) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RequestRejected(f"the body is not valid JSON: {error}") from None


def response_format_schema(
    format: Any, where: str, *, nested: bool
) -> tuple[dict[str, Any] | None, str]:
    """Return the JSON schema in a request's response format, and the schema's path in the request.

    The path is for error messages. The schema is None for a text response.

    ``where``: the path of the response format. ``nested``: True for chat completions, which put the
    schema into the field ``json_schema``. Raises RequestRejected if the format is unknown or its
    schema is missing.
    """
    if format is None:
        return None, where
    kind = format.get("type") if isinstance(format, dict) else None
    if kind == "text":
        return None, where
    if kind == "json_object":
        return {"type": "object"}, where
    if kind != "json_schema":
        raise RequestRejected(
            f"unknown response format type {kind!r:.60}: give text, json_object or json_schema",
            param=f"{where}.type",
        )
    where = f"{where}.json_schema" if nested else where
    holder = format.get("json_schema") if nested else format
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict):
        raise RequestRejected(
            "the schema is missing: give a JSON schema as an object", param=f"{where}.schema"
        )
    return schema, f"{where}.schema"


Role = Literal["system", "developer", "user", "assistant", "tool"]


class _File(msgspec.Struct):
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None


class ContentPart(msgspec.Struct):
    """One part of a chat message's content, such as a text or a file.

    It has the fields of both the chat completions and the responses API.
    """

    type: str
    text: str | None = None
    refusal: str | None = None
    file: _File | None = None
    filename: str | None = None
    file_data: str | None = None
    file_id: str | None = None
    file_url: str | None = None

    def read(self, where: str) -> str | AttachedFile:
        """Return the content of this part of a message: a string or an attached file.

        Raises RequestRejected for any other kind of part.
        """
        match self.type:
            case "text" | "input_text" | "output_text":
                if self.text is None:
                    raise RequestRejected(
                        f"a part of type {self.type} has no text", param=f"{where}.text"
                    )
                return self.text
            case "refusal":
                return self.refusal or ""
            case "file":
                if self.file is None:
                    raise RequestRejected("a part of type file has no file", param=f"{where}.file")
                return _to_attached_file(self.file.filename, self.file.file_data, f"{where}.file")
            case "input_file":
                return _to_attached_file(self.filename, self.file_data, where)
            case _:
                raise RequestRejected(
                    f"content of type {self.type!r:.60} is not supported: give text or files",
                    param=f"{where}.type",
                )


Content = str | list[ContentPart] | None


def chat_message(
    role: Role, content: Content, where: str, more: str = "", result_of: str = ""
) -> ChatMessage:
    """Convert a message of the chat completions or responses API to a ``ChatMessage``.

    ``more`` is text to add after the content. ``result_of`` is the tool's name if the message is a
    tool's result.
    """
    if isinstance(content, str):
        parts: list[str | AttachedFile] = [content]
    else:
        parts = [part.read(f"{where}.content[{index}]") for index, part in enumerate(content or ())]
    head = [f"(result of {result_of})"] if result_of else []
    return ChatMessage(
        "system" if role == "developer" else role, (*head, *parts, *([more] if more else []))
    )


def _to_attached_file(name: str | None, data: str | None, where: str) -> AttachedFile:
    if not data:
        raise RequestRejected(
            "the content of the file is missing: give file_data in base64 (this server stores no "
            "files and downloads none)",
            param=f"{where}.file_data",
        )
    return AttachedFile(name or "file", data, f"{where}.file_data")


_MOST_CHARS = 2000
"""Maximum length in characters of the progress text for one reply of the root session."""
_LINE_CHARS = 200


class RunProgressFormatter:
    """A formatter that turns the events of one run into lines of progress text."""

    def __init__(self) -> None:
        self.has_reply = False
        """True once a model has answered, which shows that the request is valid."""
        self._roots: set[str] = set()
        """Ids of the sessions at depth 0: the session that answers the question, and branches
        forked from it."""
        self._arrived: dict[str, _ArrivedReply] = {}
        """Session -> the reply that it is receiving."""

    def text_of(self, event: AnyEvent) -> str:
        """Return the text that shows the client one event of the run.

        It ends with a newline, or is empty if the event shows no progress.
        """
        return escape_surrogates(self._text(event))

    def delta_text(self, part: ReplyTextDelta) -> str:
        """Return the progress text for a newly arrived piece of a model reply.

        Only replies to the root, the session that answers the question itself, are shown; for
        others the text is empty.
        """
        if part.call not in self._roots:
            return ""
        self.has_reply = True
        if part.is_first:
            begun = self._arrived.pop(part.call, None)
            self._arrived[part.call] = _ArrivedReply()
            again = "\n" if begun is not None and begun.is_shown else ""
            return escape_surrogates(again + self._arrived[part.call].add(part))
        reply = self._arrived.get(part.call)
        return escape_surrogates(reply.add(part)) if reply is not None else ""

    def _text(self, event: AnyEvent) -> str:
        match event:
            case CallStarted(depth=0):
                if event.kind == "rlm":
                    self._roots.add(event.id)
                return ""
            case CallStarted():
                return f"call {event.id} ({event.kind}): {_to_one_line(event.question)}\n"
            case ReplyReceived():
                self.has_reply = True
                begun = self._arrived.pop(event.call, None)
                if begun is not None and begun.is_shown:
                    return begun.end()
                content = event.reply.message.content.strip()
                return (
                    f"turn {event.turn + 1}\n{_truncate_text(content)}\n"
                    if content and event.call in self._roots
                    else ""
                )
            case CellRan(result=cell):
                end = (
                    cell.error.strip().splitlines()[0 if cell.died else -1]
                    if cell.error
                    else cell.value or cell.stdout
                )
                return (
                    f"call {event.call} ran {cell.seconds:.1f} s: "
                    f"{_to_one_line(end) or '(no output)'}\n"
                )
            case RequestAttemptFailed():
                return f"call {event.call}: a request failed\n"
            case NoteAdded():
                return (
                    f"call {event.call}: {_to_one_line(event.text)}\n"
                    if "trying again" not in event.text
                    else ""
                )
            case CallEnded() if event.id not in self._roots and "." in event.id:
                return f"call {event.id} ended: {event.stop}\n"
            case _:
                return ""


class _ArrivedReply:
    """A formatter for a reply that the root session is still receiving."""

    def __init__(self) -> None:
        self.is_shown = False
        self._num_chars = 0

    def add(self, part: ReplyTextDelta) -> str:
        text = part.text if self.is_shown else part.text.lstrip()
        if not text:
            return ""
        head = "" if self.is_shown else f"turn {part.turn + 1}\n"
        shown = text[: max(0, _MOST_CHARS - self._num_chars)]
        self.is_shown, self._num_chars = True, self._num_chars + len(text)
        return head + shown

    def end(self) -> str:
        return " […]\n" if self._num_chars > _MOST_CHARS else "\n"


def _truncate_text(text: str) -> str:
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]} […]"


def _to_one_line(text: str) -> str:
    line = " ".join(text[: 4 * _LINE_CHARS].split())
    return line if len(line) <= _LINE_CHARS else f"{line[: _LINE_CHARS - 1]}…"


class ProgressTextCollector:
    """Collects the progress of a request's run as text that can be sent to the client.

    Pass ``add_event`` to the run as its event listener, then pass the run to ``begin``.
    """

    def __init__(self) -> None:
        self._progress = RunProgressFormatter()
        self._pending: list[str] = []
        self._watching = contextlib.ExitStack()
        self._wake = asyncio.Event()
        self._end: asyncio.Future[Result] | None = None
        self.running: RunHandle | None = None

    def begin(self, running: RunHandle) -> None:
        self.running = running
        self._watching.enter_context(watch_reply_text(running.id, self._on_reply_delta))
        self._end = asyncio.ensure_future(running.result())
        self._end.add_done_callback(self._on_run_end)

    def _on_run_end(self, _: asyncio.Future[Result]) -> None:
        self._watching.close()
        self._wake.set()

    def _on_reply_delta(self, part: ReplyTextDelta) -> None:
        if text := self._progress.delta_text(part):
            self._pending.append(text)
        self._wake.set()

    def add_event(self, event: AnyEvent) -> None:
        if text := self._progress.text_of(event):
            self._pending.append(text)
        self._wake.set()

    async def stream_texts(self, patience_s: float) -> AsyncGenerator[str, None]:
        """Yield pieces of progress text as they arrive, until the run ends.

        Nothing is yielded before the first reply of a model, so that a request that fails at once
        can still be answered with an error status. After ``patience_s`` seconds without progress,
        an empty string is yielded.
        """
        assert self._end is not None
        is_waiting = True
        while not self._end.done():
            try:
                async with asyncio.timeout(patience_s):
                    await self._wake.wait()
            except TimeoutError:
                is_waiting = False
                yield self._take_pending()
                continue
            self._wake.clear()
            is_waiting = is_waiting and not self._progress.has_reply
            if self._pending and not is_waiting:
                yield self._take_pending()
        if self._pending and self._progress.has_reply:
            yield self._take_pending()

    async def result(self) -> Result:
        """Wait for the result of the run.

        Cancelling this call cancels the run.
        """
        assert self._end is not None
        return await self._end

    async def cancel_run(self) -> None:
        """Cancel the run if it is still in progress, and wait until it has stopped."""
        if self._end is not None:
            self._end.cancel()
            with contextlib.suppress(BaseException):
                await asyncio.wait({self._end})

    def _take_pending(self) -> str:
        text = "".join(self._pending)
        self._pending.clear()
        return text
