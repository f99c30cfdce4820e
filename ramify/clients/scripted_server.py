"""A scripted model behind a real OpenAI-compatible HTTP server on loopback: for tests, demos and benchmarks.

    async with ScriptedServer(["hello", rate_limited(0.2), "again"], latency_s=0.05) as server:
        Pool(base_urls={"openai": server.url}) …
        server.served           what it would have charged, to the token, lost replies included

    python -m ramify.clients.scripted_server SCRIPT.json --port 8123 --latency 0.05

It fails on the wire as real servers do: 429 with ``retry-after``, web pages, bodies that are not JSON or stop in the
middle, connections that close or stall. ``GET /served`` returns its counts, for a caller in another process.
``POST …/chat/completions`` takes ``stream`` too, and sends the whole reply as one event.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
from collections.abc import Mapping
from typing import Any, Literal

import msgspec
from aiohttp import web

from ramify.clients.script import Failure, Lines, Script, count_message
from ramify.errors import ConfigError, Refused
from ramify.types.message import Message, Reply, ToolCall, Usage


class _Function(msgspec.Struct):
    name: str = ""
    arguments: str = ""


class _ToolCall(msgspec.Struct, omit_defaults=True):
    id: str = ""
    function: _Function = msgspec.field(default_factory=_Function)
    type: str = ""


class _Said(msgspec.Struct):
    role: Literal["system", "user", "assistant", "tool", "developer"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_ToolCall] | None = None
    tool_call_id: str | None = None


class _Asked(msgspec.Struct):
    messages: list[_Said]
    model: str = ""
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stream: bool = False


class Received(msgspec.Struct, frozen=True):
    """One request as it came in."""

    path: str
    headers: Mapping[str, str]
    """Case-insensitive."""
    body: bytes

    @property
    def json(self) -> dict[str, Any]:
        return msgspec.json.decode(self.body, type=dict[str, Any])


_decode = msgspec.json.Decoder(_Asked).decode
_encode = msgspec.json.Encoder().encode
_JSON = {"Content-Type": "application/json"}


class ScriptedServer:
    """An HTTP server over a script; ``async with`` starts and stops it."""

    def __init__(
        self,
        script: Lines | Script,
        *,
        latency_s: float = 0.0,
        window: int = 128_000,
        host: str = "127.0.0.1",
        port: int = 0,
        keep: bool = True,
    ) -> None:
        """``port`` 0 takes a free one. Without ``keep``, ``requests`` stays empty."""
        self.served = Usage()
        self.requests: list[Received] = []
        self.answered = 0
        """Requests for a reply so far."""
        self.most_in_flight = 0
        self._in_flight = 0
        self._script = script if isinstance(script, Script) else Script(script, "the scripted server")
        self._latency_s, self._window, self._keep = latency_s, window, keep
        self._host, self._port = host, port
        self._closing = asyncio.Event()
        self._runner = web.ServerRunner(web.Server(self._handle, access_log=None), shutdown_timeout=0.2)

    @property
    def url(self) -> str:
        """The base URL, ``http://127.0.0.1:PORT/v1``."""
        return f"http://{self._host}:{self._port}/v1"

    async def __aenter__(self) -> ScriptedServer:
        await self._runner.setup()
        site = web.TCPSite(self._runner, self._host, self._port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            await self._runner.cleanup()
            raise ConfigError(f"port {self._port} on {self._host}: {error.strerror}; choose another --port") from None
        self._port = self._runner.addresses[0][1]
        return self

    async def __aexit__(self, *exc: object) -> None:
        self._closing.set()
        await self._runner.cleanup()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        if request.method == "POST" and request.path.endswith("/chat/completions"):
            self.answered += 1
            self._in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self._in_flight)
            try:
                return await self._complete(request)
            finally:
                self._in_flight -= 1
        if request.method == "GET" and request.path.endswith("/models"):
            model = {"id": "scripted", "object": "model", "owned_by": "ramify", "max_model_len": self._window}
            return _json(200, {"object": "list", "data": [model]})
        if request.method == "GET" and request.path == "/served":
            counts = {"answered": self.answered, "most_in_flight": self.most_in_flight}
            return _json(200, {**counts, "usage": msgspec.to_builtins(self.served)})
        return _error(404, f"no {request.method} {request.path} here: POST {self.url}/chat/completions")

    async def _complete(self, request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if self._keep:
            self.requests.append(Received(request.path_qs, request.headers, body))
        try:
            asked = _decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            return _error(400, f"not a request for a chat completion: {error}")
        messages = tuple(map(_message, asked.messages))
        length = sum(map(count_message, messages))
        if length > self._window:
            text = f"This model's maximum context length is {self._window} tokens, but the messages have {length}."
            return _error(400, text, "context_length_exceeded")
        try:
            step, usage = await self._script.answer(
                messages, asked.max_completion_tokens or asked.max_tokens or self._window
            )
        except Refused as error:
            return _error(400, str(error))
        self.served += usage
        if self._latency_s:
            await asyncio.sleep(self._latency_s)
        if isinstance(step, Failure):
            return await self._fail(request, step, asked)
        return await self._send(request, asked, completion(step, asked.model))

    async def _send(self, request: web.BaseRequest, asked: _Asked, sent: dict[str, Any]) -> web.StreamResponse:
        if not asked.stream:
            return web.Response(body=_encode(sent), headers=_JSON)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for choice in sent["choices"]:
            choice["delta"] = choice.pop("message")
        sent["object"] = "chat.completion.chunk"
        await response.write(b"data: " + _encode(sent) + b"\n\ndata: [DONE]\n\n")
        return response

    async def _fail(self, request: web.BaseRequest, step: Failure, asked: _Asked) -> web.StreamResponse:
        match step.fail:
            case "rate_limited":
                wait = {} if step.retry_after_s is None else {"retry-after-ms": f"{step.retry_after_s * 1000:g}"}
                return _error(429, "Rate limit reached", "rate_limit_exceeded", wait)
            case "server_error" | "refused":
                return _error(step.status or (500 if step.fail == "server_error" else 400), step.text)
            case "html":
                return web.Response(status=step.status or 200, text=step.text, content_type="text/html")
            case "malformed":
                return web.Response(text=step.text, content_type="application/json")
            case "no_choices":
                return web.Response(body=b'{"object": "chat.completion", "choices": []}', headers=_JSON)
            case "no_usage":
                sent = completion(Reply(Message("assistant", step.text)), asked.model)
                del sent["usage"]
                return await self._send(request, asked, sent)
            case "stalled":
                await self._closing.wait()
        return await self._drop(request, step)

    async def _drop(self, request: web.BaseRequest, step: Failure) -> web.StreamResponse:
        """Close the connection: before the reply, or for ``cut`` in the middle of its body."""
        response = web.StreamResponse(headers={**_JSON, "Content-Length": "1000"})
        if step.fail == "cut":
            await response.prepare(request)
            await response.write(b'{"object": "chat.completion", "choices": [')
        if request.transport is not None:
            request.transport.close()
        return response


def completion(reply: Reply, model: str) -> dict[str, Any]:
    """``reply`` as the body of a chat completion."""
    message: dict[str, Any] = {"role": "assistant", "content": reply.message.content}
    if reply.message.reasoning is not None:
        message["reasoning_content"] = reply.message.reasoning
    if reply.message.tool_calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.message.tool_calls
        ]
    choice: dict[str, Any] = {"index": 0, "message": message, "finish_reason": reply.finish}
    if reply.logprobs is not None:
        choice["logprobs"] = {"content": [{"token": "", "logprob": each} for each in reply.logprobs]}
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


def _message(said: _Said) -> Message:
    parts = said.content if isinstance(said.content, list) else None
    content = "".join(str(part.get("text") or "") for part in parts) if parts is not None else said.content
    return Message(
        role="system" if said.role == "developer" else said.role,
        content=content or "",  # type: ignore[arg-type]
        tool_calls=tuple(
            ToolCall(call.id, call.function.name, call.function.arguments) for call in said.tool_calls or ()
        ),
        tool_call_id=said.tool_call_id,
    )


def _json(status: int, value: object) -> web.Response:
    return web.Response(status=status, body=_encode(value), headers=_JSON)


def _error(status: int, text: str, code: str = "", headers: Mapping[str, str] | None = None) -> web.Response:
    body = _encode({"error": {"message": text, "type": "invalid_request_error", "code": code or None}})
    return web.Response(status=status, body=body, headers={**_JSON, **(headers or {})})


async def _serve(options: argparse.Namespace) -> None:
    done = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, done.set)
    script = Script.load(options.script)
    async with ScriptedServer(
        script, latency_s=options.latency, window=options.window, host=options.host, port=options.port, keep=False
    ) as server:
        print(server.url, flush=True)
        await done.wait()


def main() -> None:
    """The command line: serve a script file until interrupted. The first line printed is the base URL."""
    parser = argparse.ArgumentParser(prog="python -m ramify.clients.scripted_server", description=main.__doc__)
    parser.add_argument("script", metavar="SCRIPT.json", help="a JSON list of replies, failures or rules")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one (default)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--latency", type=float, default=0.0, help="seconds before each reply")
    parser.add_argument("--window", type=int, default=128_000, help="tokens")
    try:
        asyncio.run(_serve(parser.parse_args()))
    except ConfigError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
