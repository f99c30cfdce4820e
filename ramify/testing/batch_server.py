"""A local test server that imitates the batch APIs of OpenAI and Anthropic.

It was written from the types in their Python packages.

    async with FakeBatchApiServer(lambda messages: "hello") as server:
        openai.OpenAI(base_url=server.url)              files, batches, and chat completions
        anthropic.Anthropic(base_url=server.root)       messages.batches, and messages
        server.finish()                                 all open batches end, with their results

A batch ends at once, or with ``holds=True`` when ``finish``, ``expire`` or ``refuse`` says so, or
when a client cancels it. A script answers the requests; a request that it fails has an error in the
results, as at the providers. Limits on requests and bytes are the providers', or smaller. The only
files are those of batches. To test single requests, use ``scripted_server.py``.
"""

from __future__ import annotations

import asyncio
import datetime
import inspect
import re
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Literal
from urllib.parse import parse_qs

import msgspec

from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest
from ramify.errors import RequestRefusedError
from ramify.testing.reply_script import Lines, Script, ScriptedFailure, step_outcome
from ramify.testing.scripted_server import completion_body
from ramify.types.message import Message, Reply, Usage

_encode = msgspec.json.Encoder().encode
_BOUNDARY = re.compile(r'boundary="?([^";]+)')
_NAME = re.compile(rb'[ ;]name="([^"]*)"')
_FILENAME = re.compile(rb'filename="([^"]*)"')
_MADE_AT = 1_790_000_000
_FAR = "2096-01-01T00:00:00Z"
End = Literal["completed", "expired", "cancelled"]


class FakeBatchApiRequest(msgspec.Struct):
    """One request of a batch."""

    custom_id: str
    body: dict[str, Any]
    result: dict[str, Any] | None = None
    """Line for the request in the results file; None until the request is done."""
    kind: str = "processing"
    """Status of the request: ``processing``, ``succeeded``, ``errored``, ``expired`` or
    ``canceled``."""


class FakeBatchJob(msgspec.Struct):
    """One batch of requests on the test server."""

    id: str
    kind: Literal["openai", "anthropic"]
    requests: list[FakeBatchApiRequest]
    number: int
    endpoint: str = ""
    input_file: str = ""
    metadata: dict[str, str] | None = None
    status: str = "in_progress"
    problem: str = ""
    """Reason why the whole batch was rejected, or empty."""

    def count_requests(self, *kinds: str) -> int:
        return sum(each.kind in kinds for each in self.requests)


class FakeBatchApiServer:
    """A local server for tests that imitates the batch APIs of OpenAI and Anthropic.

    ``async with`` starts and stops it.

    Example:
        async with testing.FakeBatchApiServer(["yes", "no"]) as server:
            os.environ["OPENAI_BASE_URL"] = server.url
    """

    def __init__(
        self,
        script: Lines | Script,
        *,
        holds: bool = False,
        max_rows: int | None = None,
        max_bytes: int = 200_000_000,
        page: int = 100,
    ) -> None:
        """Create a server whose answers come from ``script``.

        ``holds``: keep batches open until ``finish`` is called. ``max_rows``: maximum number of
        requests in a batch; None uses each provider's limit. ``page``: maximum number of batches
        per response that lists batches.
        """
        self.holds = holds
        """Whether new batches wait for ``finish``."""
        self.batches: dict[str, FakeBatchJob] = {}
        """Id -> batch, in the order of their creation."""
        self.files: dict[str, bytes] = {}
        """Id -> content."""
        self.served = Usage()
        """Total token usage of all requests answered so far."""
        self.num_direct = 0
        """Number of requests that were not part of a batch."""
        self.log: list[str] = []
        """Method and path of each request, such as ``POST /v1/batches``."""
        self.on_request: Callable[[str, bool], bool] = lambda line, is_done: True
        """Called with each line of the log, before it is served (False) and after (True). If it
        returns False, the connection is closed at that moment, without a response."""
        self._script = script if isinstance(script, Script) else Script(script, "the batch server")
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._page = page
        self._names: dict[str, str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = MockHttpServer(self._handle)

    @property
    def root(self) -> str:
        """Base URL for Anthropic's client: ``http://127.0.0.1:PORT``."""
        return f"http://{self._http.host}:{self._http.port}"

    @property
    def url(self) -> str:
        """Base URL for OpenAI's client: ``http://127.0.0.1:PORT/v1``."""
        return f"{self.root}/v1"

    async def __aenter__(self) -> FakeBatchApiServer:
        await self._http.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    # --- what a test decides ----------------------------------------------------------------------

    async def finish(self, end: End = "completed", num: int | None = None) -> None:
        """End all open batches on the test server as completed, expired or cancelled.

        In an expired or cancelled batch, only the first ``num`` requests are answered; None answers
        none.
        """
        for batch in self.batches.values():
            if batch.status in ("in_progress", "cancelling"):
                await self._finish(batch, end, num)

    def refuse(self, problem: str) -> None:
        """Fail all open batches, as OpenAI does for an invalid input file.

        ``problem`` is the error message.
        """
        for batch in self.batches.values():
            if batch.status == "in_progress":
                batch.status, batch.problem = "failed", problem

    def soon(self, work: Coroutine[Any, Any, None]) -> None:
        """Run a coroutine as a background task of the test server.

        ``on_request`` can use this to do work after the current request has been answered.
        """
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _finish(self, batch: FakeBatchJob, end: End, num: int | None = None) -> None:
        for place, request in enumerate(batch.requests):
            if end == "completed" or (num is not None and place < num):
                await self._serve(batch, request)
            else:
                request.kind = "expired" if end == "expired" else "canceled"
                request.result = _unserved_result(batch, request)
        batch.status = end

    async def _serve(self, batch: FakeBatchJob, request: FakeBatchApiRequest) -> None:
        status, body = await self._answer(request.body, is_openai=batch.kind == "openai")
        request.kind = "succeeded" if status == 200 else "errored"
        if batch.kind == "openai":
            response = {"status_code": status, "request_id": f"req_{batch.number}", "body": body}
            request.result = {
                "id": f"batch_req_{request.custom_id}",
                "custom_id": request.custom_id,
                "response": response,
                "error": None,
            }
            return
        result = {"type": "succeeded", "message": body}
        if status != 200:
            result = {"type": "errored", "error": body}
        request.result = {"custom_id": request.custom_id, "result": result}

    async def _answer(self, body: dict[str, Any], *, is_openai: bool) -> tuple[int, dict[str, Any]]:
        """Return the HTTP status and the response body for one request of a batch."""
        messages = tuple(_messages(body))
        try:
            step = self._script.tell(messages)
        except RequestRefusedError as error:
            return 400, _error_body(str(error), 400, is_openai=is_openai)
        if inspect.isawaitable(step):
            step = await step
        most = body.get("max_completion_tokens") or body.get("max_tokens") or 128_000
        outcome, usage = step_outcome(step, messages, most)
        self.served += usage
        if isinstance(outcome, ScriptedFailure):
            status = outcome.status or _STATUS.get(outcome.fail, 500)
            return status, _error_body(outcome.text or outcome.fail, status, is_openai=is_openai)
        model = str(body.get("model", ""))
        return 200, completion_body(outcome, model) if is_openai else _message(outcome, model)

    # --- requests ---------------------------------------------------------------------------------

    def _handle(self, exchange: PendingMockRequest) -> None:
        self.soon(self._serve_http(exchange))

    async def _serve_http(self, exchange: PendingMockRequest) -> None:
        path, _, query = exchange.path.partition("?")
        line = f"{exchange.method} {path}"
        self.log.append(line)
        if not self.on_request(line, False):
            return exchange.drop()
        status, body = await self._respond(
            exchange, path, {name: values[-1] for name, values in parse_qs(query).items()}
        )
        if not self.on_request(line, True):
            return exchange.drop()
        return exchange.send(status, body if isinstance(body, bytes) else _encode(body))

    async def _respond(
        self, exchange: PendingMockRequest, path: str, query: dict[str, str]
    ) -> tuple[int, Any]:
        parts = path.strip("/").split("/")
        is_openai = "messages" not in parts
        match exchange.method, parts:
            case "POST", ["v1", "files"]:
                return self._upload(exchange)
            case "GET", ["v1", "files", id, "content"] if id in self.files:
                return 200, self.files[id]
            case "GET", ["v1", "files", id, "content"] if id.startswith("results_"):
                return 200, self._output(id)
            case "GET", ["v1", "files", id] if id in self.files:
                return 200, self._file_object(id)
            case "POST", ["v1", "batches"]:
                return await self._create(msgspec.json.decode(exchange.body))
            case "POST", ["v1", "messages", "batches"]:
                return await self._create_messages(exchange.body)
            case "GET", ["v1", "batches"] | ["v1", "messages", "batches"]:
                return 200, self._list("openai" if is_openai else "anthropic", query)
            case "GET", [*_, "batches", id] if id in self.batches:
                return 200, self._batch_object(self.batches[id])
            case "POST", [*_, "batches", id, "cancel"] if id in self.batches:
                return 200, self._cancel_batch(self.batches[id])
            case "GET", ["v1", "messages", "batches", id, "results"] if id in self.batches:
                return 200, _result_lines(self.batches[id].requests)
            case "POST", ["v1", "chat", "completions"] | ["v1", "messages"]:
                self.num_direct += 1
                return await self._answer(msgspec.json.decode(exchange.body), is_openai=is_openai)
        text = f"no {exchange.method} {path} here"
        return 404, _error_body(text, 404, is_openai=is_openai)

    def _upload(self, exchange: PendingMockRequest) -> tuple[int, Any]:
        fields, name = _form(exchange)
        if fields.get("purpose") != b"batch" or "file" not in fields:
            return 400, _error_body("a file of purpose 'batch' is needed", 400, is_openai=True)
        if len(fields["file"]) > self._max_bytes:
            return 413, _error_body("the file is too large", 413, is_openai=True)
        id = f"file_{len(self.files)}"
        self.files[id], self._names[id] = fields["file"], name
        return 200, self._file_object(id)

    def _file_object(self, id: str) -> dict[str, Any]:
        return {
            "id": id,
            "object": "file",
            "bytes": len(self.files[id]),
            "created_at": _MADE_AT,
            "filename": self._names[id],
            "purpose": "batch",
            "status": "processed",
        }

    async def _create(self, given: dict[str, Any]) -> tuple[int, Any]:
        content = self.files.get(given.get("input_file_id", ""))
        if content is None:
            return 400, _error_body("input_file_id is not a file", 400, is_openai=True)
        if given.get("completion_window") != "24h":
            return 400, _error_body("completion_window must be 24h", 400, is_openai=True)
        lines = [msgspec.json.decode(line) for line in content.splitlines() if line.strip()]
        requests = [FakeBatchApiRequest(line["custom_id"], line["body"]) for line in lines]
        number = len(self.batches)
        batch = FakeBatchJob(
            f"batch_{number}",
            "openai",
            requests,
            number,
            given["endpoint"],
            given["input_file_id"],
            given.get("metadata"),
        )
        problem = self._problem_of(requests, 50_000)
        if any(line["url"] != given["endpoint"] or line["method"] != "POST" for line in lines):
            problem = "mismatched_endpoint: a request has another url than the batch"
        return 200, await self._begin(batch, problem)

    async def _create_messages(self, body: bytes) -> tuple[int, Any]:
        lines = msgspec.json.decode(body)["requests"]
        requests = [FakeBatchApiRequest(line["custom_id"], line["params"]) for line in lines]
        problem = self._problem_of(requests, 100_000)
        for each in requests:
            if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", each.custom_id):
                problem = f"custom_id {each.custom_id!r} is not allowed"
        if len(body) > self._max_bytes:
            return 413, _error_body("the batch is too large", 413, is_openai=False)
        if problem:
            return 400, _error_body(problem, 400, is_openai=False)
        number = len(self.batches)
        batch = FakeBatchJob(f"msgbatch_{number}", "anthropic", requests, number)
        return 200, await self._begin(batch, "")

    def _problem_of(self, requests: list[FakeBatchApiRequest], limit: int) -> str:
        limit = self._max_rows or limit
        if not 0 < len(requests) <= limit:
            return f"invalid_batch_size: {len(requests)} requests, and 1 to {limit} are allowed"
        if len({each.custom_id for each in requests}) < len(requests):
            return "duplicate_custom_id: a custom_id occurs twice"
        return ""

    async def _begin(self, batch: FakeBatchJob, problem: str) -> dict[str, Any]:
        self.batches[batch.id] = batch
        if problem:
            batch.status, batch.problem = "failed", problem
        elif not self.holds:
            await self._finish(batch, "completed")
        return self._batch_object(batch)

    def _cancel_batch(self, batch: FakeBatchJob) -> dict[str, Any]:
        if batch.status == "in_progress":
            batch.status = "cancelling"
        return self._batch_object(batch)

    def _list(self, kind: str, query: Mapping[str, str]) -> dict[str, Any]:
        found = [each for each in reversed(self.batches.values()) if each.kind == kind]
        after = query.get("after") or query.get("after_id")
        ids = [each.id for each in found]
        begin = ids.index(after) + 1 if after in ids else 0
        size = min(int(query.get("limit", 20)), self._page)
        page = found[begin : begin + size]
        return {
            "object": "list",
            "data": [self._batch_object(each) for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": begin + size < len(found),
        }

    def _batch_object(self, batch: FakeBatchJob) -> dict[str, Any]:
        return self._openai_batch(batch) if batch.kind == "openai" else self._anthropic_batch(batch)

    def _openai_batch(self, batch: FakeBatchJob) -> dict[str, Any]:
        is_ended = batch.status in ("completed", "expired", "cancelled")
        num_failed = batch.count_requests("errored")
        code, _, message = batch.problem.partition(": ")
        errors = {"object": "list", "data": [{"code": code, "message": message}]}
        return {
            "id": batch.id,
            "object": "batch",
            "endpoint": batch.endpoint,
            "errors": errors if batch.problem else None,
            "input_file_id": batch.input_file,
            "completion_window": "24h",
            "status": batch.status,
            "output_file_id": f"results_{batch.id}_out"
            if is_ended and batch.count_requests("succeeded")
            else None,
            "error_file_id": f"results_{batch.id}_err"
            if is_ended and batch.count_requests("errored", "expired", "canceled")
            else None,
            "created_at": _MADE_AT + batch.number,
            "request_counts": {
                "total": len(batch.requests),
                "completed": batch.count_requests("succeeded"),
                "failed": num_failed,
            },
            "metadata": batch.metadata,
        }

    def _anthropic_batch(self, batch: FakeBatchJob) -> dict[str, Any]:
        words = {"in_progress": "in_progress", "cancelling": "canceling"}
        is_ended = batch.status not in words
        kinds = ("succeeded", "errored", "expired", "canceled")
        results = f"{self.root}/v1/messages/batches/{batch.id}/results"
        return {
            "id": batch.id,
            "type": "message_batch",
            "processing_status": words.get(batch.status, "ended"),
            "request_counts": {kind: batch.count_requests(kind) for kind in (*kinds, "processing")},
            "created_at": _now(),
            "expires_at": _FAR,
            "ended_at": _now() if is_ended else None,
            "cancel_initiated_at": None,
            "archived_at": None,
            "results_url": results if is_ended else None,
        }

    def _output(self, id: str) -> bytes:
        _, _, rest = id.partition("_")
        name, _, which = rest.rpartition("_")
        wanted = ("succeeded",) if which == "out" else ("errored", "expired", "canceled")
        requests = self.batches[name].requests
        return _result_lines([each for each in requests if each.kind in wanted])


_STATUS = {"rate_limited": 429, "refused": 400}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


def _error_body(text: str, status: int, *, is_openai: bool) -> dict[str, Any]:
    kind = _TYPES.get(status, "api_error")
    if is_openai:
        return {"error": {"message": text, "type": kind, "param": None, "code": None}}
    return {"type": "error", "error": {"type": kind, "message": text}, "request_id": "req_0"}


def _unserved_result(batch: FakeBatchJob, request: FakeBatchApiRequest) -> dict[str, Any]:
    if batch.kind == "anthropic":
        return {"custom_id": request.custom_id, "result": {"type": request.kind}}
    code = "batch_expired" if request.kind == "expired" else "batch_cancelled"
    error = {"code": code, "message": "This request could not be executed."}
    return {"id": "batch_req", "custom_id": request.custom_id, "response": None, "error": error}


def _result_lines(requests: list[FakeBatchApiRequest]) -> bytes:
    """Return the results of a batch as JSON lines, in reverse order.

    Real providers do not guarantee the order of results.
    """
    return b"".join(_encode(each.result) + b"\n" for each in reversed(requests))


def _messages(body: dict[str, Any]) -> list[Message]:
    """Convert the messages in a request to those that a test script receives.

    The request has the format of OpenAI or Anthropic.
    """
    found = list[Message]()
    if system := body.get("system"):
        found.append(Message("system", _text(system)))
    for each in body.get("messages", ()):
        role = "system" if each["role"] == "developer" else each["role"]
        found.append(msgspec.convert({"role": role, "content": _text(each["content"])}, Message))
    return found


def _text(content: Any) -> str:
    if isinstance(content, list):
        return "".join(str(part.get("text") or "") for part in content)
    return content or ""


def _message(reply: Reply, model: str) -> dict[str, Any]:
    """Convert a scripted reply to the format of Anthropic's Messages API."""
    reasons = {"length": "max_tokens", "content_filter": "refusal"}
    usage = reply.usage
    return {
        "id": "msg_scripted",
        "type": "message",
        "role": "assistant",
        "model": reply.model or model,
        "content": [{"type": "text", "text": reply.message.content}],
        "stop_reason": reasons.get(reply.finish, "end_turn"),
        "stop_sequence": None,
        "usage": {
            "input_tokens": usage.input_tokens - usage.cached_tokens,
            "output_tokens": usage.output_tokens,
            "cache_read_input_tokens": usage.cached_tokens,
            "cache_creation_input_tokens": 0,
        },
    }


def _form(exchange: PendingMockRequest) -> tuple[dict[str, bytes], str]:
    """Parse a multipart form that contains an uploaded file.

    Returns the content of each field by name, and the file name or an empty string.
    """
    found = _BOUNDARY.search(exchange.headers.get("content-type", ""))
    if found is None:
        return {}, ""
    fields, name = dict[str, bytes](), ""
    for part in exchange.body.split(b"--" + found[1].encode())[1:-1]:
        head, _, content = part.partition(b"\r\n\r\n")
        field, file = _NAME.search(head), _FILENAME.search(head)
        if field is not None:
            fields[field[1].decode()] = content.removesuffix(b"\r\n")
        name = file[1].decode() if file else name
    return fields, name


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat()
