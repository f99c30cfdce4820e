"""Send requests to providers' JSON APIs, and check their responses, streamed or not.

    fields ── POST ──┬── application/json    ── body ──────────────────┬── decode_reply ──> Reply
                     ├── text/event-stream   ── StreamedReplyAssembler ┘
                     │                             └── on_piece, for each piece
                     └── any other status    ── ModelError

The clients of all providers use this module, so statuses, redirects, web pages and broken streams
are handled in one way. Replies are streamed unless the user disables it: a long reply then has an
idle timeout instead of a total one, and cancelling a request stops its cost. The events of a
stream are assembled into the body that the server would have sent without streaming, so the same
code reads both. If a server refuses to stream, or its streams do not count tokens, later requests
do not stream, because a budget needs the count.

The content of requests and replies is defined by ``chat_json.py``, ``responses_json.py`` and
``anthropic_reply_parser.py``. ``reply_decoding.py`` bounds the size of replies, and
``rate_limited_requests.py`` applies timeouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from types import ModuleType
from typing import Any, Protocol

import msgspec

from ramify.clients import chat_json
from ramify.clients.base import OnPiece, ReplyPiece, ReplySizeLimit
from ramify.clients.chat_json import error_from_body, error_from_status, redact_secrets
from ramify.clients.event_stream import ServerSentEventParser
from ramify.clients.providers import ResolvedEndpoint
from ramify.clients.reply_decoding import (
    NoReplyInResponse,
    ReplyDecodeError,
    decode_reply,
    is_large,
)
from ramify.errors import MalformedResponse, ModelError, ReplyLostError
from ramify.http_client.decompression import body_too_long_error
from ramify.http_client.http_transport import (
    HttpConnectionPool,
    HttpResponse,
    LiveHttpExchange,
    route_to,
)
from ramify.logging import ComponentLogger
from ramify.types.message import Reply

_log = ComponentLogger("clients")
_END_S = 0.25
"""Seconds to wait for the end of the response body after the last event, so that the connection
can be reused."""
_MOST_OVERHEAD = 16
"""Maximum bytes of a stream for each byte of the longest plausible body. A stream is much longer
than a body, because every token has a separate event."""
_ABOUT_STREAMS = re.compile(r"\bstream(ing|ed|_options)?\b", re.IGNORECASE)
_REFUSALS = (400, 404, 405, 406, 415, 422, 501)
_STATUS_OF_ERROR = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "permission_error": 403,
    "billing_error": 402,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "timeout_error": 504,
    "overloaded_error": 529,
}
"""Name of an error in a stream or in a batch result -> the HTTP status of the same error in an
ordinary response."""


def status_of_error(body: bytes) -> int:
    """Return the HTTP status that corresponds to an error in a batch result.

    The body of such an error contains only the error's name. An unknown name gives 500.
    """
    try:
        name = msgspec.json.decode(body)["error"]["type"]
    except (msgspec.DecodeError, UnicodeDecodeError, TypeError, KeyError):
        name = ""
    return _STATUS_OF_ERROR.get(str(name), 500)


class StreamedReplyAssembler(Protocol):
    """Assembles a model's reply from the events of a streamed response.

    Each provider's format implements this protocol.
    """

    @property
    def is_done(self) -> bool:
        """True once the event that ends the streamed response has arrived."""
        ...

    @property
    def is_whole(self) -> bool:
        """True if the reply is complete, whether or not the final event of the stream arrives."""
        ...

    @property
    def error(self) -> Any:
        """The error that the server sent in the stream, or None."""
        ...

    def add(self, event: bytes) -> tuple[str, str]:
        """Process one event of the stream, and return the text and the reasoning that it adds to
        the reply.

        Raises msgspec.DecodeError if the event has another form.
        """
        ...

    def body(self) -> bytes:
        """Return the response body that the server would have sent without streaming."""
        ...


class JsonApiClient:
    """Sends requests to one URL of a provider's JSON API, and reads the replies."""

    def __init__(
        self,
        name: str,
        endpoint: ResolvedEndpoint,
        wire: HttpConnectionPool,
        format: ModuleType,
        *,
        streams: bool = True,
    ) -> None:
        """Create a client for ``endpoint``, whose API uses the given JSON format.

        ``format`` is a module such as ``chat_json.py``. It has ``decode`` and ``read`` for whole
        bodies, and ``new_stream`` for streams. Its ``STREAM_FIELDS`` are the request fields that
        enable a stream with token counts. Its ``KIND`` names a reply in errors.
        """
        is_named = endpoint.url.removesuffix("/chat/completions") in name
        self.where = name if is_named else f"{name} at {endpoint.url}"
        """Model and address. A name of the form ``provider:model@URL`` already contains both."""
        self._streams = streams
        self._name = name
        self._endpoint = endpoint
        self._wire = wire
        self._format = format
        self._route = route_to(endpoint.url, endpoint.headers)

    async def ask(
        self,
        fields: dict[str, Any],
        bound: ReplySizeLimit,
        on_piece: OnPiece | None,
        *,
        whole: bool = False,
    ) -> tuple[Reply, bytes]:
        """Send a request, and return the reply and the response body.

        ``whole`` disables streaming for this request. Raises ModelError if the attempt fails.
        """
        is_streamed = self._streams and not whole and "stream" not in fields
        if is_streamed:
            fields = {**fields, **self._format.STREAM_FIELDS}
        data, has_stream = chat_json.encode(fields), False
        started = time.perf_counter()
        async with self._wire.prepare_exchange(
            self._name, self._route, data, bound.bytes
        ) as exchange:
            kind = exchange.headers.get("content-type", "")
            is_good = exchange.status // 100 == 2
            if is_good and kind.lower().startswith("text/event-stream"):
                body, has_stream = await self._read_stream(exchange, bound, on_piece), True
                answer = HttpResponse(exchange.status, exchange.headers, body)
            else:
                answer = await exchange.read()
        seconds = time.perf_counter() - started
        if not is_good:
            error = self.error_from_response(answer)
            about_streams = answer.status in _REFUSALS and _ABOUT_STREAMS.search(str(error))
            if is_streamed and about_streams and not error.transient:
                self._stop_streaming(str(error))
                error.transient = True
            raise error
        reply = await self._read(answer, bound, seconds)
        if has_stream and not reply.usage.calls:
            self._stop_streaming("its streams do not count tokens")
        return reply, answer.body

    async def parse_reply(self, answer: HttpResponse, bound: ReplySizeLimit) -> Reply:
        """Parse the reply from a response received elsewhere, such as in a batch.

        Raises ModelError if it has no valid reply.
        """
        if answer.status // 100 != 2:
            raise self.error_from_response(answer)
        return await self._read(answer, bound, 0.0)

    def _malformed_response(self, what: str, *, paid: bool = True) -> MalformedResponse:
        error = MalformedResponse(f"{self.where} {what}")
        error.may_be_paid = paid
        return error

    def error_from_response(self, answer: HttpResponse) -> ModelError:
        """Return the ModelError to raise for a response whose HTTP status is not 2xx."""
        if 300 <= answer.status < 400:
            moved = self._malformed_response(
                f"moved to {answer.headers.get('location', '?')}; use that as the base URL",
                paid=False,
            )
            moved.transient = False
            return moved
        return error_from_status(
            self.where,
            answer.status,
            answer.headers,
            answer.body,
            key_variable=self._endpoint.provider.key_variables[0],
            secrets=(self._endpoint.secret,),
        )

    # --- a stream -----------------------------------------------------------------------------

    async def _read_stream(
        self, exchange: LiveHttpExchange, bound: ReplySizeLimit, on_piece: OnPiece | None
    ) -> bytes:
        """Read a streamed reply to its end, and pass on its pieces as they arrive.

        Returns the equivalent body of a response without streaming.
        """
        stream: StreamedReplyAssembler = self._format.new_stream()
        events, num_bytes, num_chars = ServerSentEventParser(bound.bytes), 0, 0
        while not stream.is_done:
            data = await exchange.receive()
            piece = self._add_events(
                stream, events.feed(data) if data else events.flush_last_event()
            )
            num_bytes += len(data)
            num_chars += len(piece.text) + len(piece.reasoning)
            if num_bytes > _MOST_OVERHEAD * bound.bytes or num_chars > bound.chars:
                raise self._too_much(body_too_long_error(bound.bytes))
            if on_piece is not None:
                on_piece(piece)
            if stream.error is not None:
                raise self._error_in_stream(stream.error, is_beside_reply=num_chars > 0)
            if not data:
                break
        if not (stream.is_done or stream.is_whole):
            raise ReplyLostError(
                f"{self.where}: the stream ended before the reply was whole; if the server cannot "
                "stream, give Model(…, stream=False)"
            )
        # Read the rest of the body, so that the connection can be reused.
        if not exchange.is_complete:
            with contextlib.suppress(TimeoutError, ModelError):
                async with asyncio.timeout(_END_S):
                    while await exchange.receive():
                        pass
        return stream.body()

    def _add_events(self, stream: StreamedReplyAssembler, events: list[bytes]) -> ReplyPiece:
        """Add newly received events of a stream to the reply that is being assembled.

        Returns the text and the reasoning that they contain as one piece.
        """
        texts, thoughts = list[str](), list[str]()
        for event in events:
            if stream.is_done:
                break
            if not self._format.HAS_LAST_BODY and is_large(event):
                # Decoding it would block the event loop. Whole bodies that are this large are
                # decoded in a helper process.
                self._stop_streaming(f"one event has {len(event):,} bytes")
                raise self._malformed_response(f"sent an event of {len(event):,} bytes in a stream")
            try:
                text, thought = stream.add(event)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise self._unreadable_error("sent an event", event, str(error)) from None
            except ValueError as error:
                raise self._malformed_response(str(error)) from None
            if text:
                texts.append(text)
            if thought:
                thoughts.append(thought)
        return ReplyPiece("".join(texts), "".join(thoughts))

    def _error_in_stream(self, reported: Any, *, is_beside_reply: bool) -> ModelError:
        if isinstance(reported, dict) and not isinstance(reported.get("code"), int):
            status = _STATUS_OF_ERROR.get(str(reported.get("type")))
            reported = {**reported, "code": status} if status else reported
        return error_from_body(
            self.where,
            {},
            msgspec.json.encode({"error": reported}),
            reported,
            is_beside_reply=is_beside_reply,
            key_variable=self._endpoint.provider.key_variables[0],
            secrets=(self._endpoint.secret,),
        )

    def _stop_streaming(self, why: str) -> None:
        if self._streams:
            self._streams = False
            text = f"{self._name}: replies are no longer streamed ({why})"
            _log.info("streaming_off", text, model=self._name)

    # --- a body -------------------------------------------------------------------------------

    async def _read(self, answer: HttpResponse, bound: ReplySizeLimit, seconds: float) -> Reply:
        model = self._endpoint.model
        try:
            return await decode_reply(self._format, answer.body, model, bound, seconds)
        except NoReplyInResponse as error:
            raise self._no_reply(answer, error) from None
        except ReplyDecodeError as error:
            raise self._not_json(answer, error) from None
        except ValueError as error:
            raise self._malformed_response(str(error)) from None
        except MalformedResponse as error:
            raise self._too_much(error) from None

    def _too_much(self, error: MalformedResponse) -> MalformedResponse:
        located = self._malformed_response(f"was refused: {error}")
        located.transient = error.transient
        return located

    def _not_json(self, answer: HttpResponse, error: ReplyDecodeError) -> MalformedResponse:
        kind = answer.headers.get("content-type", "no content type")
        if "html" in kind.lower() or answer.body[:2000].lstrip()[:1] == b"<":
            has_path = re.search(r"/v1/[\w/]+$|/responses$", self._endpoint.url)
            hint = "" if has_path else ": most end in /v1"
            text = f"answered {kind} instead of JSON; check the base URL{hint}"
            return self._malformed_response(text, paid=False)
        return self._unreadable_error(f"answered {kind}", answer.body, str(error))

    def _no_reply(self, answer: HttpResponse, found: NoReplyInResponse) -> ModelError:
        if not found.has_error:
            kind = self._format.KIND
            return self._malformed_response(
                f"sent a reply without choices; is it a {kind}s endpoint?"
            )
        return error_from_body(
            self.where,
            answer.headers,
            answer.body,
            {"code": found.code},
            is_beside_reply=found.is_beside_reply,
            key_variable=self._endpoint.provider.key_variables[0],
            secrets=(self._endpoint.secret,),
        )

    def _unreadable_error(self, did: str, data: bytes, why: str) -> MalformedResponse:
        start = redact_secrets(data[:2000].decode("utf-8", "replace"), (self._endpoint.secret,))[
            :80
        ]
        return self._malformed_response(
            f"{did} that is not a {self._format.KIND} ({why}): {start!r}"
        )
