"""Shared by the tests of the run server: a server over a scripted model, and OpenAI's own
client."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import openai

from ramify import RLM, Limits, SandboxSpec, Scaffold, ScriptedClient
from ramify.clients.base import Price
from ramify.serve.api_keys import ApiKey, ServerApiKeys
from ramify.serve.recursive_run_server import RecursiveRunServer
from ramify.types.message import Message

SANDBOX = SandboxSpec(provider="inprocess", allow_weaker=True)
LONG = "red;3\nblue;4\n" * 2000
"""A text that becomes the context."""
OPENING = "You drive a session; FINAL ends it."
MINIMAL = Scaffold(name="test", system=OPENING + " {{tools}}{{limits}}", direct_chars=0)
PRICE = Price(1.0, 1.0)


def session(
    *turns: str, direct: Callable[[str], Any] = lambda prompt: f"re: {prompt}"
) -> Callable[..., Any]:
    """A model that replies with ``turns`` in order when it drives a session, and with
    ``direct(prompt)`` to a plain call."""

    def script(messages: tuple[Message, ...]) -> Any:
        if not messages[0].content.startswith(OPENING):
            return direct(messages[-1].content)
        return turns[sum(message.role == "assistant" for message in messages)]

    return script


def cell(code: str) -> str:
    return f"```repl\n{code}\n```"


@asynccontextmanager
async def serving(
    model: Any,
    *,
    price: Price | None = None,
    limits: Limits | None = None,
    store: Any = None,
    keys: dict[str, ApiKey] | ServerApiKeys | None = None,
    **options: Any,
) -> AsyncIterator[RecursiveRunServer]:
    is_ready = isinstance(model, ScriptedClient | str)
    client = model if is_ready else ScriptedClient(model, price=price)
    rlm = RLM(client, scaffold=MINIMAL, sandbox=SANDBOX, limits=limits, store=store)
    given = keys if isinstance(keys, ServerApiKeys) else ServerApiKeys(keys or {})
    async with RecursiveRunServer(rlm, name="mine", keys=given, **options) as server:
        yield server


@asynccontextmanager
async def asking(server: RecursiveRunServer, key: str = "") -> AsyncIterator[openai.AsyncOpenAI]:
    """OpenAI's client with only another base URL and key (default: the server's own). It does not retry, so that errors are seen, and
    allows more than 5 s to connect, for hundreds of simultaneous connections on a slow
    machine."""
    async with openai.AsyncOpenAI(
        base_url=server.url, api_key=key or server.key or "none", max_retries=0, timeout=600.0
    ) as client:
        yield client


def session_of(server: RecursiveRunServer) -> aiohttp.ClientSession:
    """A plain HTTP client that presents the server's key."""
    return aiohttp.ClientSession(headers={"Authorization": f"Bearer {server.key}"})


def user(*parts: Any) -> dict[str, Any]:
    """A message of the user: one text, or several parts."""
    if len(parts) == 1 and isinstance(parts[0], str):
        return {"role": "user", "content": parts[0]}
    return {
        "role": "user",
        "content": [{"type": "text", "text": p} if isinstance(p, str) else p for p in parts],
    }


def file(name: str, data: bytes, head: str = "data:text/plain;base64,") -> dict[str, Any]:
    return {
        "type": "file",
        "file": {"filename": name, "file_data": head + base64.b64encode(data).decode()},
    }
