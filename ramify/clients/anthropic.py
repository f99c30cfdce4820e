"""The client for Claude models, which uses Anthropic's messages API.

Models are named ``anthropic:MODEL``.

Leading system messages become ``system``, tool results become blocks of a user turn, and thinking
becomes ``reasoning``. A conversation that will be sent again (it contains a reply, or has an
``affinity``) is marked for the prompt cache at its end, so an append-only history is read from the
cache. A single question is not marked, because writing to the cache costs more than sending.
``seed`` and ``logprobs`` do not exist in this API and are omitted. Request thinking through
``Sampling.extra``.

``anthropic_reply_parser.py`` reads replies, ``json_api.py`` sends requests, and
``rate_limited_requests.py`` does rate limiting and retries.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from ramify.clients import anthropic_reply_parser
from ramify.clients.anthropic_reply_parser import Blocks, decode_arguments
from ramify.clients.base import ASSUMED_WINDOW, OnPiece, Price, Request, picture_base64
from ramify.clients.chat_json import is_strict_compatible
from ramify.clients.json_api import JsonApiClient
from ramify.clients.picture_token_costs import can_read_pictures
from ramify.clients.provider_batch_apis import AnthropicBatches
from ramify.clients.providers import (
    ANTHROPIC_KEYS,
    ModelProviderSpec,
    ResolvedEndpoint,
    missing_key_error,
    split_model_url,
    split_provider,
)
from ramify.errors import ConfigError, RequestRefusedError
from ramify.http_client.http_transport import HttpConnectionPool
from ramify.http_client.urls_and_proxies import is_http_url
from ramify.types.message import Message, Reply

_PROVIDER = ModelProviderSpec(
    title="Claude",
    url="https://api.anthropic.com",
    url_variable="ANTHROPIC_BASE_URL",
    key_variables=ANTHROPIC_KEYS,
)
_VERSION = "2023-06-01"
"""Version of Anthropic's API that this client uses."""
_PATH = "/v1/messages"
_MOST_REMEMBERED = 1024
_CACHE = {"type": "ephemeral"}


class AnthropicClient:
    """Sends requests to one Claude model; implements ``Client``."""

    def __init__(
        self,
        name: str,
        *,
        window: int | None,
        price: Price | None = None,
        key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
        environ: Mapping[str, str] = os.environ,
        streams: bool = True,
    ) -> None:
        self.name = name
        self.window = window or ASSUMED_WINDOW
        self.price = price
        self.vision = can_read_pictures(name)
        model, url = split_model_url(split_provider(name)[1])
        url = base_url or url or environ.get("ANTHROPIC_BASE_URL") or _PROVIDER.url
        self._endpoint = ResolvedEndpoint(
            provider=_PROVIDER,
            model=model,
            url=_messages_url(name, url),
            headers={"anthropic-version": _VERSION, **_key_headers(name, key, environ)}
            | dict(headers or {}),
            secret=key or environ.get("ANTHROPIC_API_KEY") or environ["ANTHROPIC_AUTH_TOKEN"],
            limit_field="max_tokens",
            cache_key=False,
        )
        self._wire = HttpConnectionPool()
        self._api = JsonApiClient(
            name, self._endpoint, self._wire, anthropic_reply_parser, streams=streams
        )
        self.where = self._api.where
        """Model name and server address, for use in error messages."""
        self._enforces_schema = True
        self._thoughts: dict[Message, Blocks] = {}
        """Signed thinking blocks of replies with tool calls, which must be sent back unchanged."""

    async def complete(self, request: Request, on_piece: OnPiece | None = None) -> Reply:
        fields = self._fields(request)
        try:
            reply, body = await self._api.ask(fields, request.reply_size_limit(), on_piece)
        except RequestRefusedError as error:
            self.adapt_to_refusal(error)
            raise
        if reply.message.tool_calls and reply.message.reasoning is not None:
            self._remember(reply.message, anthropic_reply_parser.thinking_blocks(body))
        return reply

    def adapt_to_refusal(self, error: RequestRefusedError) -> None:
        """Send later requests without the JSON schema if the error shows that the model cannot
        enforce it.

        The error is then marked as worth a retry.
        """
        if self._enforces_schema and "output_config" in str(error):
            # An older model cannot enforce the schema, which is checked when the reply is read.
            self._enforces_schema = False
            error.transient = True

    def batches(self) -> AnthropicBatches:
        """Return Anthropic's batch API for this model."""
        base = self._endpoint.url.removesuffix(_PATH)
        return AnthropicBatches(self._api, self._wire, base, self._endpoint.headers, self._fields)

    async def close(self) -> None:
        await self._wire.close()

    def _fields(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        head = next(
            (i for i, message in enumerate(request.messages) if message.role != "system"),
            len(request.messages),
        )
        turns = _turns(request, head, self._thoughts)
        fields: dict[str, Any] = {
            "model": self._endpoint.model,
            "max_tokens": sampling.max_tokens,
            "messages": turns,
        }
        system = "\n\n".join(
            message.content for message in request.messages[:head] if message.content
        )
        if system:
            fields["system"] = [_text_block(system)]
        for name in ("temperature", "top_p", "top_k"):
            if (value := getattr(sampling, name)) is not None:
                fields[name] = value
        if sampling.stop:
            fields["stop_sequences"] = list(sampling.stop)
        if request.tools:
            fields["tools"] = [
                {
                    "name": tool.name,
                    "description": tool.description,
                    "input_schema": tool.parameters,
                }
                for tool in request.tools
            ]
        if (
            request.schema is not None
            and self._enforces_schema
            and is_strict_compatible(request.schema)
        ):
            fields["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
        # Only a conversation that continues is worth the surcharge for writing to the cache.
        if request.affinity or any(message.role == "assistant" for message in request.messages):
            _mark_for_cache(fields)
        fields.update(sampling.extra)
        return fields

    def _remember(self, message: Message, thoughts: Blocks) -> None:
        if thoughts:
            self._thoughts[message] = thoughts
            while len(self._thoughts) > _MOST_REMEMBERED:
                del self._thoughts[next(iter(self._thoughts))]


def _messages_url(name: str, base: str) -> str:
    """Return the URL of the messages API for a server's base URL.

    Raises ConfigError if the base URL is not HTTP, or contains a user name or password.
    """
    base = base.rstrip("/")
    if not is_http_url(base) or "@" in base.partition("://")[2].partition("/")[0]:
        raise ConfigError(f"{name}: the base URL is not a URL: write it as {_PROVIDER.url}")
    return base if base.endswith(_PATH) else f"{base.removesuffix('/v1')}{_PATH}"


def _key_headers(name: str, key: str | None, environ: Mapping[str, str]) -> dict[str, str]:
    key = key or environ.get("ANTHROPIC_API_KEY")
    if key:
        return {"x-api-key": key}
    token = environ.get("ANTHROPIC_AUTH_TOKEN")
    if not token:
        raise missing_key_error(name, "ANTHROPIC_API_KEY")
    return {"Authorization": f"Bearer {token}"}


def _turns(request: Request, head: int, thoughts: dict[Message, Blocks]) -> list[dict[str, Any]]:
    """Convert messages to alternating user and assistant turns, as the API requires.

    The first ``head`` messages, which are system messages, are skipped. Each turn is a list of
    content blocks. Messages without content are dropped.
    """
    turns: list[dict[str, Any]] = []
    for message in request.messages[head:]:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = [*_pictures(request, message), *_blocks(message, thoughts)]
        if blocks and turns and turns[-1]["role"] == role:
            turns[-1]["content"].extend(blocks)
        elif blocks:
            turns.append({"role": role, "content": blocks})
    return turns


def _blocks(message: Message, thoughts: dict[Message, Blocks]) -> Blocks:
    if message.role == "tool":
        return [
            {
                "type": "tool_result",
                "tool_use_id": message.tool_call_id or "",
                "content": message.content,
            }
        ]
    blocks: Blocks = [dict(block) for block in thoughts.get(message, ())]
    if message.content.strip():
        blocks.append(_text_block(message.content))
    for call in message.tool_calls:
        blocks.append(
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": decode_arguments(call.arguments),
            }
        )
    return blocks


def _pictures(request: Request, message: Message) -> Blocks:
    return [
        {
            "type": "image",
            "source": {
                "type": "base64",
                "media_type": picture.media_type,
                "data": picture_base64(request, picture),
            },
        }
        for picture in message.pictures
    ]


def _text_block(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _mark_for_cache(fields: dict[str, Any]) -> None:
    """Add prompt-cache markers after the system prompt and after the conversation.

    The next request can then reuse everything before them.
    """
    if "system" in fields:
        fields["system"][-1]["cache_control"] = _CACHE
    if fields["messages"]:
        last = fields["messages"][-1]["content"][-1]
        if "thinking" not in last["type"]:
            last["cache_control"] = _CACHE
