"""Clients for the batch APIs of model providers.

A batch is a single upload of many requests, which the provider answers within a day at half the
price.

    lines ── create(key) ──> id ── state(id), until it has ended ── results ──> Reply
                └── if no answer arrives: possible_batch_ids(key) ── is_from_upload_key ──> the id
                    of the batch, so that it is not paid twice

| | OpenAI | Anthropic |
|---|---|---|
| upload | a file of JSON lines, then a batch that names it | one request |
| limits of one batch | 50,000 requests, 200 MB | 100,000 requests, 256 MB |
| found again by | ``metadata`` of the batch | the ids of its requests, once it has ended |

Each upload has another ``key``, with which the ids of its requests begin. ``chat_json.py`` and
``anthropic_reply_parser.py`` define the content of requests and replies, and ``ramify/maps``
decides what is uploaded when.
"""

from __future__ import annotations

import abc
import asyncio
import datetime
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Literal, Protocol, TypeVar, runtime_checkable

import msgspec

from ramify.clients.base import Price, Request
from ramify.clients.json_api import JsonApiClient, status_of_error
from ramify.errors import MalformedResponse, ReplyLostError, RequestRefusedError, ServerStatusError
from ramify.http_client.http_transport import HttpConnectionPool, HttpResponse, Method, route_to
from ramify.types.message import Reply

BATCH_SHARE = 0.5
"""Price of a request in a batch as a fraction of its usual price, which is the same for OpenAI and
Anthropic."""
_TIMEOUT_S = 600.0
_IDLE_S = 120.0
"""Maximum seconds without receiving any part of a download."""
_SKEW_S = 3600.0
"""Maximum difference in seconds between the clocks of this machine and of a provider."""
UPLOAD_BYTES = 64 << 20
"""Maximum bytes of one upload, which is held in memory. Every provider accepts more."""
_PAGE = 100
_LINE_BYTES = 64 << 20
"""Bytes of the longest plausible line of a download."""
_METADATA = "ramify"
"""Name of the metadata field that stores the key of an upload."""
_encode = msgspec.json.Encoder().encode
Item = TypeVar("Item")


class BatchState(msgspec.Struct, frozen=True):
    """The state of one batch of requests, as the provider reports it."""

    id: str
    status: str
    """Status in the provider's own terms."""
    is_ended: bool
    num_done: int
    """Number of finished requests; 0 if the provider reports it only at the end."""
    problem: str = ""
    """Why the whole batch was refused; empty if it was not refused."""
    files: tuple[str, ...] = ()
    """Ids of the result files, which the method ``results`` downloads."""


class BatchRequestResult(msgspec.Struct, frozen=True):
    """The result of one request in a provider's batch.

    It is the server's response, or a note that the request expired or was cancelled.
    """

    custom_id: str
    kind: Literal["replied", "expired", "cancelled"]
    status: int = 0
    """HTTP status of the reply."""
    body: bytes = b""
    """Body that the server would have returned for the same request outside a batch."""


def batch_price(price: Price | None) -> Price | None:
    """Return the discounted price of a request that is sent in a batch.

    It is a fixed fraction of the usual price.
    """
    if price is None:
        return None
    cached, written = (
        None if each is None else BATCH_SHARE * each for each in (price.cached, price.cache_write)
    )
    return Price(BATCH_SHARE * price.input, BATCH_SHARE * price.output, cached, written)


def split(
    bodies: Iterable[tuple[bytes, Item]], max_rows: int, max_bytes: int = UPLOAD_BYTES
) -> Iterator[list[tuple[bytes, Item]]]:
    """Split requests into batch uploads of at most ``max_rows`` requests and ``max_bytes`` bytes.

    Each request is a pair of its JSON body and an item of the caller's choice.

    A body that exceeds the limit is sent in an upload by itself; the provider may refuse it.
    """
    part, size = list[tuple[bytes, Item]](), 0
    for body, item in bodies:
        if part and (len(part) >= max_rows or size + len(body) > max_bytes):
            yield part
            part, size = [], 0
        part.append((body, item))
        size += len(body)
    if part:
        yield part


class BatchApi(abc.ABC):
    """The batch API of one provider, used for one model."""

    provider: str
    max_rows: int
    """Maximum number of requests in one batch."""

    def __init__(
        self,
        api: JsonApiClient,
        wire: HttpConnectionPool,
        base: str,
        headers: Mapping[str, str],
        fields: Callable[[Request], dict[str, Any]],
    ) -> None:
        """Create the batch API for the server at ``base``, a URL without a path.

        ``fields`` converts a request to the fields of its JSON body.
        """
        self._api = api
        self._wire = wire
        self._base = base
        self._headers = dict(headers)
        self._fields = fields

    def request_body(self, request: Request) -> bytes:
        """Return the JSON body of one request of a batch.

        It is the same as outside a batch.
        """
        return _encode(self._fields(request))

    @abc.abstractmethod
    def format_upload_line(self, custom_id: str, body: bytes) -> bytes:
        """Format a request as one line of an upload.

        ``custom_id`` identifies the request in the results.
        """

    @abc.abstractmethod
    async def create(self, key: str, lines: Sequence[bytes]) -> str:
        """Upload requests as a new batch, and return the batch's id.

        Raises ModelError if that fails.
        """

    @abc.abstractmethod
    async def possible_batch_ids(self, key: str, num: int, since: float) -> list[str]:
        """Return the ids of batches that an earlier upload may have created.

        Use this if the response to the upload was lost. The upload used ``key``, had ``num``
        requests, and began at the Unix time ``since``.
        """

    @abc.abstractmethod
    async def is_from_upload_key(self, id: str, key: str) -> bool | None:
        """Return True if the upload with the given key created this batch, and False if it did not.

        Returns None if that is not known yet.
        """

    @abc.abstractmethod
    async def state(self, id: str) -> BatchState:
        """Ask the provider for the state of a batch, such as whether it has ended."""

    @abc.abstractmethod
    def results(self, state: BatchState) -> AsyncGenerator[BatchRequestResult]:
        """Download the results of a batch that has ended.

        They come in any order. Raises ModelError if the download fails.
        """

    async def decode_result(self, result: BatchRequestResult, request: Request) -> Reply:
        """Decode the reply in a batch result.

        Raises the ModelError that an ordinary request with this response would raise.
        """
        if result.kind == "expired":
            raise ServerStatusError(
                f"{self._api.where}: the batch expired before the request was sent"
            )
        if result.kind == "cancelled":
            raise ServerStatusError(
                f"{self._api.where}: the batch was cancelled at {self.provider}"
            )
        answer = HttpResponse(result.status, {"content-type": "application/json"}, result.body)
        return await self._api.parse_reply(answer, request.reply_size_limit())

    async def _call(
        self,
        method: Method,
        path: str,
        body: bytes = b"",
        content_type: str = "application/json",
    ) -> bytes:
        headers = {**self._headers, "Content-Type": content_type} if body else self._headers
        route = route_to(self._base + path, headers, method)
        try:
            async with (
                asyncio.timeout(_TIMEOUT_S),
                self._wire.prepare_exchange(self._api.where, route, body) as exchange,
            ):
                answer = await exchange.read()
        except TimeoutError:
            raise ReplyLostError(
                f"{self._api.where}: no answer in {_TIMEOUT_S:g} s ({route.url})"
            ) from None
        if answer.status // 100 != 2:
            raise self._api.error_from_response(answer)
        return answer.body

    def _decode_body(self, body: bytes, kind: Any) -> Any:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise MalformedResponse(
                f"{self._api.where}: unexpected reply from its batch API ({error})"
            ) from None

    async def _download_lines(self, path: str) -> AsyncGenerator[bytes]:
        """Download a file, and yield its lines as they arrive."""
        route = route_to(self._base + path, self._headers, "GET")
        async with self._wire.prepare_exchange(self._api.where, route) as exchange:
            if exchange.status // 100 != 2:
                raise self._api.error_from_response(await exchange.read())
            rest = b""
            while data := await self._receive_chunk(exchange.receive()):
                *lines, rest = (rest + data).split(b"\n")
                if len(rest) > _LINE_BYTES:
                    raise MalformedResponse(
                        f"{self._api.where}: a line of {route.url} is longer than {_LINE_BYTES:,} "
                        "bytes"
                    )
                for line in lines:
                    if line.strip():
                        yield line
            if rest.strip():
                yield rest

    async def _receive_chunk(self, receiving: Any) -> bytes:
        try:
            async with asyncio.timeout(_IDLE_S):
                data: bytes = await receiving
                return data
        except TimeoutError:
            raise ReplyLostError(f"{self._api.where}: the download of results stalled") from None


@runtime_checkable
class BatchCapableClient(Protocol):
    """A client whose provider also offers a cheaper batch API."""

    def batches(self) -> BatchApi:
        """Return the batch API for the client's model.

        Raises ConfigError if the provider turns out to have none.
        """
        ...

    def adapt_to_refusal(self, error: RequestRefusedError) -> None:
        """Change the form of later requests if the error shows that the server rejects the current
        one."""
        ...


# --- OpenAI


class _Problem(msgspec.Struct):
    code: str | None = None
    message: str | None = None


class _Problems(msgspec.Struct):
    data: list[_Problem] | None = None


class _Counts(msgspec.Struct):
    completed: int = 0
    failed: int = 0
    total: int = 0


class _OpenAIBatch(msgspec.Struct):
    id: str
    status: str
    created_at: float = 0.0
    errors: _Problems | None = None
    metadata: dict[str, str] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    request_counts: _Counts | None = None


class _OpenAIPage(msgspec.Struct):
    data: list[_OpenAIBatch]
    has_more: bool = False


class _FileId(msgspec.Struct):
    id: str


class _OpenAIResponse(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


class _OpenAILine(msgspec.Struct):
    custom_id: str
    response: _OpenAIResponse | None = None
    error: _Problem | None = None


class OpenAIBatches(BatchApi):
    """OpenAI's batch API, to which the requests of a batch are uploaded as one file.

    A file of requests is uploaded with ``POST /files``, and ``POST /batches`` then starts the
    batch.
    """

    provider = "openai"
    max_rows = 50_000

    def __init__(self, *given: Any, endpoint: str) -> None:
        """Create the batch API for requests to the path ``endpoint``, such as
        ``/v1/chat/completions``."""
        super().__init__(*given)
        self._endpoint = endpoint

    def format_upload_line(self, custom_id: str, body: bytes) -> bytes:
        fields = {"custom_id": custom_id, "method": "POST", "url": self._endpoint}
        return _encode({**fields, "body": msgspec.Raw(body)})

    async def create(self, key: str, lines: Sequence[bytes]) -> str:
        boundary = f"ramify-{key}"
        head = (
            f'--{boundary}\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
            f'--{boundary}\r\nContent-Disposition: form-data; name="file"; '
            f'filename="{key}.jsonl"\r\nContent-Type: application/jsonl\r\n\r\n'
        )
        body = b"".join((head.encode(), *_add_newlines(lines), f"\r\n--{boundary}--\r\n".encode()))
        kind = f"multipart/form-data; boundary={boundary}"
        file = self._decode_body(await self._call("POST", "/files", body, kind), _FileId)
        fields = {
            "input_file_id": file.id,
            "endpoint": self._endpoint,
            "completion_window": "24h",
            "metadata": {_METADATA: key},
        }
        created = await self._call("POST", "/batches", _encode(fields))
        id: str = self._decode_body(created, _OpenAIBatch).id
        return id

    async def possible_batch_ids(self, key: str, num: int, since: float) -> list[str]:
        after = ""
        while True:
            answer = await self._call("GET", f"/batches?limit={_PAGE}{after}")
            page: _OpenAIPage = self._decode_body(answer, _OpenAIPage)
            found = [
                each.id
                for each in page.data
                if (each.metadata or {}).get(_METADATA) == key and each.status != "failed"
            ]
            if found or not page.has_more or not page.data:
                return found
            after = f"&after={page.data[-1].id}"

    async def is_from_upload_key(self, id: str, key: str) -> bool | None:
        return True

    async def state(self, id: str) -> BatchState:
        batch: _OpenAIBatch = self._decode_body(
            await self._call("GET", f"/batches/{id}"), _OpenAIBatch
        )
        counts = batch.request_counts or _Counts()
        problems = (batch.errors.data if batch.errors else None) or []
        texts = [f"{each.code}: {each.message}" for each in problems[:3]]
        return BatchState(
            id,
            batch.status,
            batch.status in ("completed", "failed", "expired", "cancelled"),
            counts.completed + counts.failed,
            ("; ".join(texts) or "no reason was given") if batch.status == "failed" else "",
            tuple(filter(None, (batch.output_file_id, batch.error_file_id))),
        )

    async def results(self, state: BatchState) -> AsyncGenerator[BatchRequestResult]:
        for file in state.files:
            async with aclosing(self._download_lines(f"/files/{file}/content")) as lines:
                async for line in lines:
                    yield self._result(self._decode_body(line, _OpenAILine))

    def _result(self, line: _OpenAILine) -> BatchRequestResult:
        response, code = line.response, line.error.code if line.error else None
        if code == "batch_expired":
            return BatchRequestResult(line.custom_id, "expired")
        if code == "batch_cancelled":
            return BatchRequestResult(line.custom_id, "cancelled")
        if response is None:
            return BatchRequestResult(
                line.custom_id, "replied", 500, _encode({"error": line.error})
            )
        return BatchRequestResult(
            line.custom_id, "replied", response.status_code, bytes(response.body)
        )


# --- Anthropic


class _Tallies(msgspec.Struct):
    canceled: int = 0
    errored: int = 0
    expired: int = 0
    processing: int = 0
    succeeded: int = 0


class _AnthropicBatch(msgspec.Struct):
    id: str
    processing_status: str
    created_at: datetime.datetime
    request_counts: _Tallies = msgspec.field(default_factory=_Tallies)
    results_url: str | None = None


class _AnthropicPage(msgspec.Struct):
    data: list[_AnthropicBatch]
    has_more: bool = False
    last_id: str | None = None


class _AnthropicResult(msgspec.Struct):
    type: str
    message: msgspec.Raw = msgspec.Raw(b"null")
    error: msgspec.Raw = msgspec.Raw(b"null")


class _AnthropicLine(msgspec.Struct):
    custom_id: str
    result: _AnthropicResult


class AnthropicBatches(BatchApi):
    """Anthropic's batch API, in which all requests are uploaded in one call: ``POST
    /v1/messages/batches``."""

    provider = "anthropic"
    max_rows = 100_000
    _PATH = "/v1/messages/batches"

    def format_upload_line(self, custom_id: str, body: bytes) -> bytes:
        return _encode({"custom_id": custom_id, "params": msgspec.Raw(body)})

    async def create(self, key: str, lines: Sequence[bytes]) -> str:
        body = b"".join((b'{"requests":[', b",".join(lines), b"]}"))
        created = await self._call("POST", self._PATH, body)
        id: str = self._decode_body(created, _AnthropicBatch).id
        return id

    async def possible_batch_ids(self, key: str, num: int, since: float) -> list[str]:
        found, after = list[str](), ""
        while True:  # the newest is first
            answer = await self._call("GET", f"{self._PATH}?limit={_PAGE}{after}")
            page: _AnthropicPage = self._decode_body(answer, _AnthropicPage)
            for each in page.data:
                if each.created_at.timestamp() < since - _SKEW_S:
                    return found
                if sum(msgspec.structs.astuple(each.request_counts)) == num:
                    found.append(each.id)
            if not page.has_more or not page.last_id:
                return found
            after = f"&after_id={page.last_id}"

    async def is_from_upload_key(self, id: str, key: str) -> bool | None:
        state = await self.state(id)
        if not state.is_ended:
            return None
        async with aclosing(self.results(state)) as results:
            async for result in results:
                return result.custom_id.startswith(f"{key}-")
        return False

    async def state(self, id: str) -> BatchState:
        answer = await self._call("GET", f"{self._PATH}/{id}")
        batch: _AnthropicBatch = self._decode_body(answer, _AnthropicBatch)
        counts, word = batch.request_counts, batch.processing_status
        done = sum(msgspec.structs.astuple(counts)) - counts.processing
        files = (id,) if batch.results_url else ()
        return BatchState(id, word, word == "ended", done, files=files)

    async def results(self, state: BatchState) -> AsyncGenerator[BatchRequestResult]:
        for id in state.files:
            async with aclosing(self._download_lines(f"{self._PATH}/{id}/results")) as lines:
                async for line in lines:
                    found: _AnthropicLine = self._decode_body(line, _AnthropicLine)
                    yield self._result(found.custom_id, found.result)

    def _result(self, custom_id: str, result: _AnthropicResult) -> BatchRequestResult:
        match result.type:
            case "succeeded":
                return BatchRequestResult(custom_id, "replied", 200, bytes(result.message))
            case "expired":
                return BatchRequestResult(custom_id, "expired")
            case "canceled":
                return BatchRequestResult(custom_id, "cancelled")
            case _:
                body = bytes(result.error)
                return BatchRequestResult(custom_id, "replied", status_of_error(body), body)


def _add_newlines(lines: Iterable[bytes]) -> Iterator[bytes]:
    for line in lines:
        yield line
        yield b"\n"
