"""Client for Claude through Anthropic's SDK (``pip install 'ramify[anthropic]'``):
``anthropic:MODEL``.

Leading system messages become ``system``, tool results become blocks of a user turn, and thinking
becomes ``reasoning``. A conversation that will be sent again (it contains a reply, or has an
``affinity``) is marked for the prompt cache at its end, so an append-only history is read from the
cache. A single question is not marked, because writing to the cache costs more than sending.
``seed`` and ``logprobs`` do not exist in this API and are omitted. Request thinking through
``Sampling.extra``.

The SDK's retries are disabled: see ``pool.py``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.clients.base import ASSUMED_WINDOW, Price, Request, counted, finish_of
from ramify.clients.chat_json import from_status, is_strict, redacted, without_surrogates
from ramify.clients.providers import no_key, split_name, split_url
from ramify.errors import BadReply, ConfigError, ModelError, Refused, ReplyLost, Unreachable
from ramify.secrets import remember
from ramify.types.message import Message, Reply, ToolCall, Usage

_NEVER_SENT = ("ConnectError", "ConnectTimeout", "ProxyError", "PoolTimeout", "UnsupportedProtocol")
_MOST_REMEMBERED = 1024
_ADDRESS = "https://api.anthropic.com"
_CACHE = {"type": "ephemeral"}

Blocks = list[dict[str, Any]]


class AnthropicClient:
    """A ``Client`` for one Claude model."""

    package = "anthropic"

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
    ) -> None:
        try:
            import anthropic
        except ImportError:
            raise ConfigError(
                f"{name} needs Anthropic's SDK: pip install 'ramify[anthropic]'"
            ) from None
        self.name = name
        self.window = window or ASSUMED_WINDOW
        self.price = price
        self._model, url = split_url(split_name(name)[1])
        key = key or environ.get("ANTHROPIC_API_KEY") or None
        token = None if key else environ.get("ANTHROPIC_AUTH_TOKEN") or None
        if not (key or token):
            raise no_key(name, "ANTHROPIC_API_KEY")
        self._secret = key or token or ""
        remember("ANTHROPIC_API_KEY", self._secret)
        self._sdk = anthropic.AsyncAnthropic(
            api_key=key,
            auth_token=token,
            # Without an address, the SDK would read the environment of now.
            base_url=base_url or url or environ.get("ANTHROPIC_BASE_URL") or _ADDRESS,
            default_headers=dict(headers or {}),
            max_retries=0,
            timeout=anthropic.Timeout(3600.0, connect=30.0),
        )
        self._sdk.api_key, self._sdk.auth_token = key, token  # what it found elsewhere is not ours
        self._enforces_schema = True
        self._thoughts: dict[Message, Blocks] = {}
        """Signed thinking blocks of replies with tool calls, which must be sent back unchanged."""

    async def complete(self, request: Request) -> Reply:
        import anthropic

        fields = self._fields(request)
        started = time.perf_counter()
        try:
            sent = await self._sdk.messages.create(
                model=self._model,
                max_tokens=request.sampling.max_tokens,
                messages=fields.pop("messages"),
                extra_body=fields,
            )
        except anthropic.APIStatusError as error:
            raise self._refusal(error) from error
        except anthropic.APIError as error:
            raise self._broken(error) from error
        except ValueError as error:  # the SDK lets broken JSON and broken text through
            raise self._no_message(error) from error
        try:
            return self._reply(sent, time.perf_counter() - started)
        except (AttributeError, TypeError) as error:  # the SDK does not check what it parses
            raise self._no_message(error) from error

    async def close(self) -> None:
        await self._sdk.close()

    def _fields(self, request: Request) -> dict[str, Any]:
        sampling = request.sampling
        head = next(
            (i for i, message in enumerate(request.messages) if message.role != "system"),
            len(request.messages),
        )
        turns = _turns(request.messages[head:], self._thoughts)
        fields: dict[str, Any] = {"messages": turns}
        system = "\n\n".join(
            message.content for message in request.messages[:head] if message.content
        )
        if system:
            fields["system"] = [_text(system)]
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
        if request.schema is not None and self._enforces_schema and is_strict(request.schema):
            fields["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
        if request.affinity or any(message.role == "assistant" for message in request.messages):
            _mark_for_cache(fields)
        fields.update(sampling.extra)
        return _sendable(fields)

    def _reply(self, sent: Any, seconds: float) -> Reply:
        blocks = getattr(sent, "content", None)
        if not isinstance(blocks, list) or getattr(sent, "usage", None) is None:
            error = BadReply(
                f"{self.name}: {self._sdk.base_url} answered something that is not a message; "
                "check the base URL"
            )
            error.may_be_paid = not isinstance(sent, str)
            raise error
        message = Message(
            role="assistant",
            content="".join(block.text for block in blocks if block.type == "text"),
            reasoning="".join(block.thinking for block in blocks if block.type == "thinking")
            or None,
            tool_calls=tuple(
                ToolCall(block.id, block.name, msgspec.json.encode(block.input).decode())
                for block in blocks
                if block.type == "tool_use"
            ),
        )
        if message.tool_calls:
            self._remember(
                message,
                [b.model_dump() for b in blocks if b.type in ("thinking", "redacted_thinking")],
            )
        try:
            finish = finish_of(sent.stop_reason, self.name)
        except ValueError as error:
            raise BadReply(f"{self.name}: {self._sdk.base_url} {error}") from None
        model = str(sent.model or self._model)
        stopped_by = str(sent.stop_reason) if finish == "content_filter" else ""
        return Reply(
            message, _usage(sent.usage), finish, model=model, seconds=seconds, filter=stopped_by
        )

    def _remember(self, message: Message, thoughts: Blocks) -> None:
        if thoughts:
            self._thoughts[message] = thoughts
            while len(self._thoughts) > _MOST_REMEMBERED:
                del self._thoughts[next(iter(self._thoughts))]

    def _refusal(self, error: Any) -> ModelError:
        failure = from_status(
            f"{self.name} at {self._sdk.base_url}",
            error.status_code,
            error.response.headers,
            error.response.content,
            key_variable="ANTHROPIC_API_KEY",
            secrets=(self._secret,),
        )
        if (
            isinstance(failure, Refused)
            and self._enforces_schema
            and "output_config" in str(failure)
        ):
            # An older model cannot enforce the schema, which is checked when the reply is read.
            self._enforces_schema = False
            failure.transient = True
        return failure

    def _no_message(self, reason: object) -> BadReply:
        text = " ".join(redacted(str(reason), (self._secret,)).split())[:200]
        return BadReply(
            f"{self.name}: {self._sdk.base_url} answered something that is not a message ({text})"
        )

    def _broken(self, error: Exception) -> ModelError:
        cause = error.__cause__ or error
        text = " ".join(redacted(str(cause), (self._secret,)).split())
        reason = text[:200] or type(cause).__name__
        if type(error).__name__ == "APIResponseValidationError":
            return self._no_message(reason)
        if any(base.__name__ in _NEVER_SENT for base in type(cause).__mro__):
            return Unreachable(f"{self.name}: cannot reach {self._sdk.base_url} ({reason})")
        return ReplyLost(
            f"{self.name}: the connection to {self._sdk.base_url} broke before the reply was whole "
            f"({reason})"
        )


def _turns(messages: tuple[Message, ...], thoughts: dict[Message, Blocks]) -> list[dict[str, Any]]:
    """Return alternating user and assistant turns as lists of blocks, without empty messages."""
    turns: list[dict[str, Any]] = []
    for message in messages:
        role = "assistant" if message.role == "assistant" else "user"
        blocks = _blocks(message, thoughts)
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
        blocks.append(_text(message.content))
    for call in message.tool_calls:
        blocks.append(
            {
                "type": "tool_use",
                "id": call.id,
                "name": call.name,
                "input": _arguments(call.arguments),
            }
        )
    return blocks


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _arguments(text: str) -> dict[str, Any]:
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except msgspec.DecodeError:
        return {"unparsed": text}


def _mark_for_cache(fields: dict[str, Any]) -> None:
    """Mark the end of the system prompt and of the conversation, where the next request's prefix
    ends."""
    if "system" in fields:
        fields["system"][-1]["cache_control"] = _CACHE
    if fields["messages"]:
        last = fields["messages"][-1]["content"][-1]
        if "thinking" not in last["type"]:
            last["cache_control"] = _CACHE


def _sendable(fields: dict[str, Any]) -> dict[str, Any]:
    try:
        msgspec.json.encode(fields)
        return fields
    except UnicodeEncodeError:
        repaired: dict[str, Any] = without_surrogates(fields)
        return repaired


def _usage(sent: Any) -> Usage:
    """Usage of a reply. The prompt is the sum of fresh, cache-read and cache-written tokens."""
    parts = [
        sent.input_tokens,
        sent.cache_read_input_tokens or 0,
        sent.cache_creation_input_tokens or 0,
    ]
    thinking = getattr(getattr(sent, "output_tokens_details", None), "thinking_tokens", None)
    counts = [counted(part, 0).input_tokens if counted(part, 0).calls else None for part in parts]
    prompt_tokens = None if None in counts else sum(filter(None, counts))
    return counted(
        prompt_tokens, sent.output_tokens, cached=counts[1], stored=counts[2], reasoning=thinking
    )
