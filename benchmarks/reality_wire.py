"""Wire formats and servers for the catalogue of misbehaviours (``reality_catalogue.py``).

A ``Wire`` knows how one API writes a correct reply, as a body and as a stream of events, and where
that reply keeps its text, its finish reason and its usage. ``MisbehavingServer`` is a real server
on loopback, with or without TLS, that sends whatever bytes it is given:

    request ── WireRequest(body, wants_stream) ── answer(asked) ── bytes, waits, RESET, CLOSE, STALL

Not here: which bytes are wrong, and what must follow (see ``reality_catalogue.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import socket
import ssl
import struct
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from http import HTTPStatus
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import msgspec

ELSEWHERE = "/elsewhere"
"""Path to which redirects point. Nothing is there."""
encode = msgspec.json.encode
Body = dict[str, Any]
MISSING: Any = object()
"""Value of a field that is left out."""


class Action(NamedTuple):
    """Something that a server does beside sending bytes."""

    name: str


RESET = Action("reset the connection")
CLOSE = Action("close the connection")
STALL = Action("keep the connection open and send nothing more")
Step = bytes | float | Action
"""Bytes to send, seconds to wait, or an action."""


# --- wire formats


def _put(fields: Body, name: str, value: Any) -> None:
    if value is MISSING:
        fields.pop(name, None)
    else:
        fields[name] = value


def event(data: Any, name: str = "") -> bytes:
    """One event of a stream. ``data`` is JSON, or the bytes of it."""
    head = b"event: %s\n" % name.encode() if name else b""
    return head + b"data: %s\n\n" % (data if isinstance(data, bytes) else encode(data))


def pieces(text: Any) -> list[Any]:
    """A text as a stream sends it. Anything else than a text is one piece."""
    if not isinstance(text, str):
        return [text]
    return [text[at : at + 3] for at in range(0, len(text), 3)]


class Chat:
    """OpenAI's chat completions."""

    name = "chat"
    finishes: ClassVar = {
        "length": "length",
        "filter": "content_filter",
        "broken": "error",
        "open": "pause",
    }
    """Finish reasons by what they mean; ``open`` is that of a reply that is not over."""

    def model(self, root: str) -> str:
        return f"openai:m@{root}/v1"

    def usage(self, given: Any, produced: Any, **more: Any) -> Body:
        return {"prompt_tokens": given, "completion_tokens": produced, **more}

    def body(self, text: Any, usage: Any = None) -> Body:
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        head = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
        return {**head, "choices": [choice], "usage": usage or self.usage(9, 9, total_tokens=18)}

    def finish(self, body: Body, reason: Any) -> Body:
        _put(body["choices"][0], "finish_reason", reason)
        return body

    def parts(self, body: Body, parts: Any) -> Body:
        _put(body, "choices", parts)
        return body

    def reasoning(self, text: str) -> Body:
        body = self.body(None)
        body["choices"][0]["message"]["reasoning_content"] = text
        return body

    def refusal(self) -> Body:
        body = self.body(None)
        body["choices"][0]["message"]["refusal"] = "I cannot help"
        return body

    def tool_call(self, text: str | None) -> Body:
        body = self.finish(self.body(text), "tool_calls")
        call = {"id": "1", "type": "function", "function": {"name": "lookup", "arguments": "{}"}}
        body["choices"][0]["message"]["tool_calls"] = [call]
        return body

    def events(self, body: Body) -> list[bytes]:
        """The events of a stream that says the same as ``body``."""
        head = {**body, "object": "chat.completion.chunk"}
        usage, choices = head.pop("usage", MISSING), head.pop("choices", MISSING)
        if not isinstance(choices, list):
            chunks = [{**head, **({} if choices is MISSING else {"choices": choices})}]
        else:
            chunks = [{**head, "choices": each} for each in self._deltas(choices)]
        if usage is not MISSING:
            chunks.append({**head, "choices": [], "usage": usage})
        return [*map(event, chunks), event(b"[DONE]")]

    def _deltas(self, choices: list[Any]) -> Iterable[list[Any]]:
        for choice in choices:
            if not isinstance(choice, dict):
                yield [choice]
                continue
            rest = {name: value for name, value in choice.items() if name != "message"}
            finish = {"finish_reason": rest.pop("finish_reason")} if "finish_reason" in rest else {}
            message = dict(choice.get("message") or {})
            text = message.pop("content", None)
            for at, call in enumerate(message.get("tool_calls") or ()):
                call["index"] = at
            yield [{**rest, "delta": {**message, "content": ""}, "finish_reason": None}]
            for piece in pieces(text):
                yield [{**rest, "delta": {"content": piece}, "finish_reason": None}]
            yield [{**rest, "delta": {}, **finish}]


class Responses:
    """OpenAI's responses API."""

    name = "responses"
    finishes: ClassVar = {
        "length": "length",
        "filter": "filter",
        "broken": "failed",
        "open": "in_progress",
    }

    def model(self, root: str) -> str:
        return f"openai:m@{root}/v1/responses"

    def usage(self, given: Any, produced: Any, **more: Any) -> Body:
        more = {name.replace("prompt_", "input_"): value for name, value in more.items()}
        return {"input_tokens": given, "output_tokens": produced, **more}

    def body(self, text: Any, usage: Any = None) -> Body:
        part = {"type": "output_text", "text": text, "annotations": []}
        item = {"id": "i", "type": "message", "role": "assistant", "status": "completed"}
        return {
            "id": "r",
            "object": "response",
            "model": "m",
            "status": "completed",
            "output": [{**item, "content": [part]}],
            "incomplete_details": None,
            "error": None,
            "usage": usage or self.usage(9, 9, total_tokens=18),
        }

    def finish(self, body: Body, reason: Any) -> Body:
        if reason in ("length", "filter"):
            why = {"length": "max_output_tokens", "filter": "content_filter"}[reason]
            body |= {"status": "incomplete", "incomplete_details": {"reason": why}}
        else:
            _put(body, "status", reason)
        return body

    def parts(self, body: Body, parts: Any) -> Body:
        _put(body, "output", parts)
        return body

    def reasoning(self, text: str) -> Body:
        summary = [{"type": "summary_text", "text": text}]
        return self.parts(self.body(""), [{"id": "i", "type": "reasoning", "summary": summary}])

    def refusal(self) -> Body:
        body = self.body("")
        body["output"][0]["content"] = [{"type": "refusal", "refusal": "I cannot help"}]
        return body

    def tool_call(self, text: str | None) -> Body:
        body = self.body(text)
        item = {"type": "function_call", "call_id": "1", "name": "lookup", "arguments": "{}"}
        body["output"] = [*(body["output"] if text else []), {"id": "f", **item}]
        return body

    def events(self, body: Body) -> list[bytes]:
        status = body.get("status")
        known = {"incomplete": "incomplete", "failed": "failed"}
        last = (
            f"response.{known.get(status, 'completed') if isinstance(status, str) else 'completed'}"
        )
        begun = {**body, "status": "in_progress", "output": [], "usage": None, "error": None}
        found = [event({"type": "response.created", "response": begun}, "response.created")]
        for at, item in (
            enumerate(body.get("output") or ()) if isinstance(body.get("output"), list) else ()
        ):
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type") == "output_text":
                    kind = "response.output_text.delta"
                    place = {"type": kind, "item_id": "i", "output_index": at, "content_index": 0}
                    found += [
                        event({**place, "delta": each}, kind) for each in pieces(part["text"])
                    ]
        return [*found, event({"type": last, "response": body}, last)]


class Messages:
    """Anthropic's messages."""

    name = "messages"
    finishes: ClassVar = {
        "length": "max_tokens",
        "filter": "refusal",
        "broken": "error",
        "open": "pause_turn",
    }

    def model(self, root: str) -> str:
        return f"anthropic:m@{root}"

    def usage(self, given: Any, produced: Any, **more: Any) -> Body:
        cached = more.pop("prompt_tokens_details", None)
        read = {"cache_read_input_tokens": cached["cached_tokens"]} if cached else {}
        return {"input_tokens": given, "output_tokens": produced, **read, **more}

    def body(self, text: Any, usage: Any = None) -> Body:
        head = {"id": "m", "type": "message", "role": "assistant", "model": "m"}
        blocks = [{"type": "text", "text": text}]
        end = {"stop_reason": "end_turn", "stop_sequence": None}
        return {**head, "content": blocks, **end, "usage": usage or self.usage(9, 9)}

    def finish(self, body: Body, reason: Any) -> Body:
        _put(body, "stop_reason", reason)
        return body

    def parts(self, body: Body, parts: Any) -> Body:
        _put(body, "content", parts)
        return body

    def reasoning(self, text: str) -> Body:
        block = {"type": "thinking", "thinking": text, "signature": "s"}
        return self.parts(self.body(""), [block])

    def refusal(self) -> Body:
        return self.finish(self.body("I cannot help"), "refusal")

    def tool_call(self, text: str | None) -> Body:
        body = self.finish(self.body(text), "tool_use")
        block = {"type": "tool_use", "id": "1", "name": "lookup", "input": {}}
        return self.parts(body, [*(body["content"] if text else []), block])

    def events(self, body: Body) -> list[bytes]:
        usage, blocks = body.get("usage", MISSING), body.get("content")
        begun = {**body, "content": [], "stop_reason": None}
        delta = {name: body[name] for name in ("stop_reason", "stop_sequence") if name in body}
        last: Body = {"type": "message_delta", "delta": delta}
        if usage is not MISSING:
            begun["usage"] = {**usage, "output_tokens": 1} if isinstance(usage, dict) else usage
            last["usage"] = usage
        if not isinstance(blocks, list):
            begun["content"] = blocks
        sent: list[Body] = [{"type": "message_start", "message": begun}]
        for at, block in enumerate(blocks if isinstance(blocks, list) else ()):
            sent += self._block(at, block)
        if error := body.get("error"):
            sent.append({"type": "error", "error": error})
        sent += [last, {"type": "message_stop"}]
        return [event(each, each["type"]) for each in sent]

    def _block(self, at: int, block: Any) -> Iterable[Body]:
        empty, deltas = block, []
        if isinstance(block, dict):
            kind = {"text": "text", "thinking": "thinking"}.get(block.get("type", ""))
            if kind is not None:
                empty = {**block, kind: ""}
                deltas = [{"type": f"{kind}_delta", kind: each} for each in pieces(block[kind])]
            elif block.get("type") == "tool_use":
                empty = {**block, "input": {}}
                deltas = [{"type": "input_json_delta", "partial_json": "{}"}]
        yield {"type": "content_block_start", "index": at, "content_block": empty}
        for delta in deltas:
            yield {"type": "content_block_delta", "index": at, "delta": delta}
        yield {"type": "content_block_stop", "index": at}


class ChatThroughLiteLLM(Chat):
    """OpenAI's chat completions, asked through LiteLLM."""

    name = "litellm"

    def model(self, root: str) -> str:
        return f"litellm:openai/m@{root}/v1"


Wire = Chat | Responses | Messages
WIRES: tuple[Wire, ...] = (Chat(), Responses(), Messages(), ChatThroughLiteLLM())


# --- HTTP


def http(
    body: bytes,
    status: int = 200,
    kind: str = "application/json",
    headers: Mapping[str, str] = {},
) -> bytes:
    """A complete response."""
    lines = [f"HTTP/1.1 {status} {_phrase(status)}", f"Content-Length: {len(body)}"]
    lines += [f"Content-Type: {kind}"] if kind else []
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def _phrase(status: int) -> str:
    return HTTPStatus(status).phrase if status in {each.value for each in HTTPStatus} else "Odd"


EVENT_STREAM = "text/event-stream; charset=utf-8"


def stream_head(kind: str = EVENT_STREAM) -> bytes:
    """Head of a response that is sent in chunks."""
    return (
        b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nTransfer-Encoding: chunked\r\n\r\n" % kind.encode()
    )


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"


def streamed(events: Sequence[bytes]) -> list[Step]:
    """A complete response that is a stream of events, one chunk for each."""
    return [stream_head(), *map(chunk, events), LAST_CHUNK]


class WireRequest(NamedTuple):
    """A request as the server received it."""

    path: str
    fields: Body
    """Its JSON body; empty if it has none."""

    @property
    def wants_stream(self) -> bool:
        return self.fields.get("stream") is True


def said(wire: Wire, asked: WireRequest, body: Body) -> list[Step]:
    """``body`` as a complete response, in the form that was asked for."""
    return (
        streamed(wire.events(copy.deepcopy(body))) if asked.wants_stream else [http(encode(body))]
    )


class MisbehavingServer:
    """A server that answers each request with the steps that ``answer`` returns for it."""

    def __init__(
        self, answer: Callable[[WireRequest], Iterable[Step]], tls: ssl.SSLContext | None = None
    ) -> None:
        self.num_asked = 0
        self._answer = answer
        self._tls = tls
        self._tasks: set[asyncio.Task[Any]] = set()
        self._server: asyncio.Server | None = None

    @property
    def root(self) -> str:
        assert self._server is not None
        scheme = "https" if self._tls else "http"
        return f"{scheme}://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> MisbehavingServer:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self._tls)
        return self

    async def __aexit__(self, *exc: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            # A client that gives up closes the connection, in any of these ways.
            ways = (OSError, EOFError, asyncio.LimitOverrunError, asyncio.CancelledError)
            with contextlib.suppress(*ways):
                while (asked := await self._read(reader)) is not None:
                    self.num_asked += 1
                    for step in self._answer(asked):
                        await self._do(step, writer)
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _read(self, reader: asyncio.StreamReader) -> WireRequest | None:
        """Return the next request; None for one of a stranger, such as a scan of ports."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        method, _, rest = head.partition(" ")
        path = rest.partition(" ")[0]
        if method not in ("GET", "POST") or not path.startswith(("/v1/", ELSEWHERE)):
            return None
        length = int(head.lower().partition("content-length:")[2].partition("\r\n")[0] or 0)
        body = await reader.readexactly(length)
        return WireRequest(path, msgspec.json.decode(body) if body else {})

    async def _do(self, step: Step, writer: asyncio.StreamWriter) -> None:
        if isinstance(step, bytes):
            writer.write(step)
            await writer.drain()
        elif isinstance(step, float):
            await asyncio.sleep(step)
        elif step is STALL:
            await asyncio.Event().wait()
        elif step is RESET:
            sock: socket.socket = writer.get_extra_info("socket")
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()
            raise ConnectionResetError
        else:
            writer.close()
            await writer.wait_closed()
            raise EOFError


@functools.cache
def self_signed(folder: Path) -> tuple[Path, Path]:
    """Make (certificate, key) of 127.0.0.1 in ``folder``."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    options = ["-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    names = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1,DNS:localhost"]
    made = ["-days", "2", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(["openssl", "req", *options, *names, *made], check=True, capture_output=True)
    return certificate, key


@functools.cache
def server_tls(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    return context
