"""An OpenAI-compatible HTTP server for tests and benchmarks.

It answers from a script and listens only on the loopback interface.

    async with ScriptedServer(["hello", rate_limited(0.2), "again"], latency_s=0.05) as server:
        RateLimitedClientPool(base_urls={"openai": server.url}) …
        server.served           exact usage that it would have charged, lost replies included

    python -m ramify.testing serve SCRIPT.json --port 8123 --latency 0.05
    python -m ramify.testing serve offline:default

It fails on the network as real servers do: 429 with ``retry-after``, web pages, bodies that are
invalid JSON or truncated, connections that close or stall. ``GET /served`` returns its counts to a
caller in another process. ``POST …/chat/completions`` also streams: the role, the pieces of the
reply, the finish reason, and the usage if it is asked for.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import inspect
import signal
import sys
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec

from ramify.clients.function_client import estimate_message_tokens
from ramify.clients.mock_http_server import MockHttpServer, PendingMockRequest
from ramify.errors import ConfigError, RequestRefusedError
from ramify.testing.offline_model import simulated_model
from ramify.testing.reply_script import Lines, Script, ScriptedFailure, Step, step_outcome
from ramify.types.message import Message, Reply, ToolCall, Usage
from ramify.types.picture import Picture, picture_from_bytes


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _ToolCall(msgspec.Struct, omit_defaults=True):
    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)
    type: str = ""


class _MessageBody(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _RequestBody(msgspec.Struct):
    messages: list[_MessageBody]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False
    stream_options: dict[str, Any] | None = None


class ReceivedRequest(msgspec.Struct, frozen=True):
    """One HTTP request as the scripted server received it.

    Example:
        first, *others = server.requests[0].json["messages"]
    """

    path: str
    headers: Mapping[str, str]
    """Headers of the request, with lower-case names."""
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])


_decode = msgspec.json.Decoder(_RequestBody).decode
_encode = msgspec.json.Encoder().encode


class ScriptedServer:
    """An OpenAI-compatible HTTP server for tests that answers from a script.

    ``async with`` starts and stops it.

    Example:
        async with testing.ScriptedServer(["hello", testing.rate_limited(0.2)]) as server:
            os.environ["OPENAI_BASE_URL"] = server.url
    """

    def __init__(
        self,
        script: Lines | Script,
        *,
        latency_s: float = 0.0,
        window: int = 128_000,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: bool = True,
        pieces: int = 1,
        piece_s: float = 0.0,
    ) -> None:
        """Create a server that answers from ``script``, without starting it.

        ``latency_s``: seconds before each reply. ``window``: maximum tokens of a prompt. ``port``:
        0 uses a free port. ``keep``: record the requests in ``requests``. ``pieces``, ``piece_s``:
        number of parts of a streamed reply, and the seconds between two of them.
        """
        self.served = Usage()
        self.requests: list[ReceivedRequest] = []
        self.answered = 0
        """Number of completion requests received so far."""
        self.most_in_flight = 0
        self._in_flight = 0
        self._script = (
            script if isinstance(script, Script) else Script(script, "the scripted server")
        )
        self._latency_s = latency_s
        self._window = window
        self._keep = keep
        self._pieces = pieces
        self.piece_s = piece_s
        """Seconds between two parts of a streamed reply. It may change while a reply is sent."""
        self.num_cut_off = 0
        """Number of streamed replies that a client left before they ended."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._http = MockHttpServer(self._handle, host, port)

    @property
    def url(self) -> str:
        """Base URL: ``http://127.0.0.1:PORT/v1``."""
        return f"http://{self._http.host}:{self._http.port}/v1"

    @property
    def num_connections(self) -> int:
        """Number of open connections."""
        return self._http.num_open_connections

    async def __aenter__(self) -> ScriptedServer:
        await self._http.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._http.close()

    def _handle(self, exchange: PendingMockRequest) -> None:
        path = exchange.path.partition("?")[0]
        if exchange.method == "POST" and path.endswith("/chat/completions"):
            self.answered += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            self._complete(exchange)
        elif exchange.method == "GET" and path.endswith("/models"):
            model = {
                "id": "scripted",
                "object": "model",
                "owned_by": "ramify",
                "max_model_len": self._window,
            }
            exchange.send(200, _encode({"object": "list", "data": [model]}))
        elif exchange.method == "GET" and path == "/served":
            counts = {
                "answered": self.answered,
                "most_in_flight": self.most_in_flight,
                "usage": self.served,
            }
            exchange.send(200, _encode(counts))
        else:
            text = f"no {exchange.method} {path} here: POST {self.url}/chat/completions"
            exchange.send(404, _error(text))

    def _complete(self, exchange: PendingMockRequest) -> None:
        if self._keep:
            self.requests.append(ReceivedRequest(exchange.path, exchange.headers, exchange.body))
        due = asyncio.get_running_loop().time() + self._latency_s
        try:
            parsed = _decode(exchange.body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return self._refuse(exchange, f"not a request for a chat completion: {error}")
        try:
            messages = tuple(map(_message, parsed.messages))
        except ValueError as error:
            return self._refuse(exchange, str(error))
        length = sum(map(estimate_message_tokens, messages))
        if length > self._window:
            text = (
                f"This model's maximum context length is {self._window} tokens, but the messages "
                f"have {length}."
            )
            return self._refuse(exchange, text, "context_length_exceeded")
        try:
            step = self._script.tell(messages)
        except RequestRefusedError as error:
            return self._refuse(exchange, str(error))
        if inspect.isawaitable(step):
            task = asyncio.ensure_future(self._answer_later(exchange, parsed, messages, step, due))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        else:
            self._answer(exchange, parsed, messages, step, due)

    async def _answer_later(
        self,
        exchange: PendingMockRequest,
        parsed: _RequestBody,
        messages: tuple[Message, ...],
        step: Awaitable[Step],
        due: float,
    ) -> None:
        self._answer(exchange, parsed, messages, await step, due)

    def _answer(
        self,
        exchange: PendingMockRequest,
        parsed: _RequestBody,
        messages: tuple[Message, ...],
        step: Step,
        due: float,
    ) -> None:
        outcome, usage = step_outcome(
            step, messages, parsed.max_completion_tokens or parsed.max_tokens or self._window
        )
        self.served += usage
        if self._latency_s:
            asyncio.get_running_loop().call_at(due, self._finish, exchange, parsed, outcome)
        else:
            self._finish(exchange, parsed, outcome)

    def _finish(
        self, exchange: PendingMockRequest, parsed: _RequestBody, outcome: Reply | ScriptedFailure
    ) -> None:
        if isinstance(outcome, ScriptedFailure) and outcome.fail == "stalled":
            return
        self._in_flight -= 1
        if isinstance(outcome, ScriptedFailure):
            self._fail(exchange, parsed, outcome)
        else:
            self._send(exchange, parsed, completion_body(outcome, parsed.model))

    def _refuse(self, exchange: PendingMockRequest, text: str, code: str = "") -> None:
        self._in_flight -= 1
        exchange.send(400, _error(text, code))

    def _send(
        self, exchange: PendingMockRequest, parsed: _RequestBody, sent: dict[str, Any]
    ) -> None:
        if not parsed.stream:
            return exchange.send(200, _encode(sent))
        with_usage = (parsed.stream_options or {}).get("include_usage") is True
        events = [
            _event(chunk) for chunk in completion_stream_chunks(sent, self._pieces, with_usage)
        ]
        events.append(b"data: [DONE]\n\n")
        if not self.piece_s:
            return exchange.send(200, b"".join(events), content_type="text/event-stream")
        task = asyncio.ensure_future(self._send_slowly(exchange, events))
        self._tasks.add(task)
        return task.add_done_callback(self._tasks.discard)

    async def _send_slowly(self, exchange: PendingMockRequest, events: list[bytes]) -> None:
        exchange.begin_streamed_response("text/event-stream")
        for event in events:
            exchange.send_piece(event)
            await asyncio.sleep(self.piece_s)
            if not exchange.is_open:
                self.num_cut_off += 1
                return
        exchange.end()

    def _send_half(self, exchange: PendingMockRequest, parsed: _RequestBody, text: str) -> None:
        """Send the first half of a streamed reply, and then close the connection."""
        chunks = completion_stream_chunks(
            completion_body(Reply(Message("assistant", text)), parsed.model), 8, False
        )
        exchange.begin_streamed_response("text/event-stream")
        exchange.send_piece(b"".join(map(_event, chunks[: len(chunks) // 2])))
        exchange.drop()

    def _fail(
        self, exchange: PendingMockRequest, parsed: _RequestBody, step: ScriptedFailure
    ) -> None:
        match step.fail:
            case "rate_limited":
                wait = (
                    {}
                    if step.retry_after_s is None
                    else {"retry-after-ms": f"{step.retry_after_s * 1000:g}"}
                )
                exchange.send(429, _error("Rate limit reached", "rate_limit_exceeded"), wait)
            case "server_error" | "refused":
                exchange.send(
                    step.status or (500 if step.fail == "server_error" else 400), _error(step.text)
                )
            case "html":
                exchange.send(
                    step.status or 200, step.text.encode(), content_type="text/html; charset=utf-8"
                )
            case "malformed":
                exchange.send(200, step.text.encode())
            case "no_choices":
                exchange.send(200, b'{"object": "chat.completion", "choices": []}')
            case "no_usage":
                sent = completion_body(Reply(Message("assistant", step.text)), parsed.model)
                del sent["usage"]
                self._send(exchange, parsed, sent)
            case "cut" if parsed.stream:
                self._send_half(exchange, parsed, step.text)
            case "cut":
                exchange.drop(b'{"object": "chat.completion", "choices": [')
            case _:
                exchange.drop()


def completion_body(reply: Reply, model: str) -> dict[str, Any]:
    """Convert a reply to the JSON body of an OpenAI chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.content}
    if reply.message.reasoning is not None:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in reply.message.tool_calls
        ]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish}
    if reply.logprobs is not None:
        choice["logprobs"] = {
            "content": [{"token": "", "logprob": logprob} for logprob in reply.logprobs]
        }
    if reply.token_ids is not None:
        choice["token_ids"] = reply.token_ids
    sent: dict[str, Any] = {
        "id": "chatcmpl-scripted",
        "object": "chat.completion",
        "created": 0,
        "model": reply.model or model,
        "choices": [choice],
        "usage": {
            "prompt_tokens": reply.usage.input_tokens,
            "completion_tokens": reply.usage.output_tokens,
            "total_tokens": reply.usage.total_tokens,
            "prompt_tokens_details": {"cached_tokens": reply.usage.cached_tokens},
            "completion_tokens_details": {"reasoning_tokens": reply.usage.reasoning_tokens},
        },
    }
    if reply.prompt_ids is not None:
        sent["prompt_token_ids"] = reply.prompt_ids
    return sent


def completion_stream_chunks(
    sent: dict[str, Any], pieces: int, with_usage: bool
) -> list[dict[str, Any]]:
    """Split the body of a chat completion into chunks for streaming.

    The text is split into ``pieces`` parts. ``with_usage`` adds a last chunk with the token usage.
    """
    head = {name: value for name, value in sent.items() if name not in ("choices", "usage")}
    head["object"] = "chat.completion.chunk"
    (choice,) = sent["choices"]
    message, text = dict(choice["message"]), choice["message"].get("content") or ""
    rest = {name: value for name, value in choice.items() if name not in ("index", "message")}
    finish = rest.pop("finish_reason")
    message["content"] = ""
    size = max(1, -(-len(text) // max(pieces, 1)))
    deltas = [{"content": text[at : at + size]} for at in range(0, len(text), size)]
    calls = [{"index": at, **call} for at, call in enumerate(message.pop("tool_calls", ()))]
    deltas += [{"tool_calls": [call]} for call in calls]
    chunks = [
        {**head, "choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
        for delta in (message, *deltas)
    ]
    chunks.append({**head, "choices": [{"index": 0, "delta": {}, "finish_reason": finish, **rest}]})
    if with_usage and "usage" in sent:
        chunks.append({**head, "choices": [], "usage": sent["usage"]})
    return chunks


def _event(chunk: dict[str, Any]) -> bytes:
    return b"data: " + _encode(chunk) + b"\n\n"


def _pictures(parts: Sequence[dict[str, Any]]) -> Iterator[Picture]:
    """Yield the pictures contained in the parts of a chat message.

    Raises ValueError unless each is a ``data:`` URL that states the picture's actual format.
    """
    for part in parts:
        if part.get("type") == "image_url":
            kind, _, encoded = str(part["image_url"]["url"]).partition(";base64,")
            picture = picture_from_bytes(base64.b64decode(encoded, validate=True))
            if kind != f"data:{picture.media_type}":
                raise ValueError(
                    f"a picture of type {picture.media_type} was sent as {kind[:60]!r}"
                )
            yield picture


def _message(body: _MessageBody) -> Message:
    parts = body.content if isinstance(body.content, list) else None
    content = (
        "".join(str(part.get("text") or "") for part in parts)
        if parts is not None
        else body.content
    )
    return Message(
        role="system" if body.role == "developer" else body.role,
        content=content or "",  # type: ignore[arg-type]
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments)
            for call in body.tool_calls or ()
        ),
        tool_call_id=body.tool_call_id,
        pictures=tuple(_pictures(parts or ())),
    )


def _error(text: str, code: str = "") -> bytes:
    return _encode(
        {"error": {"message": text, "type": "invalid_request_error", "code": code or None}}
    )


async def _serve(options: argparse.Namespace) -> None:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    kind, _, name = options.script.partition(":")
    script = (
        Script(simulated_model(name).tell) if kind == "offline" else Script.load(options.script)
    )
    async with ScriptedServer(
        script,
        latency_s=options.latency,
        window=options.window,
        host=options.host,
        port=options.port,
        keep=False,
    ) as server:
        print(server.url, flush=True)
        await done.wait()


def main(words: Sequence[str] | None = None) -> int:
    """Serve a script, or the model for offline use, until interrupted.

    The first line printed is the base URL.
    """
    parser = argparse.ArgumentParser(
        prog="python -m ramify.testing serve", description=main.__doc__
    )
    parser.add_argument(
        "script",
        metavar="SCRIPT.json",
        help="a JSON list of replies, failures or rules; or offline:NAME",
    )
    parser.add_argument("--port", type=int, default=0, help="0 uses any free port (default)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each reply")
    parser.add_argument("--window", type=int, default=128_000, help="context window in tokens")
    try:
        asyncio.run(_serve(parser.parse_args(words)))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
