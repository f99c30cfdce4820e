"""A client for all providers that LiteLLM supports.

It needs the optional extra ``litellm``.

Models are named ``litellm:provider/model``, such as ``litellm:bedrock/…``. LiteLLM returns OpenAI's
format, which ``chat_json.py`` reads. If the provider itself uses that format, the finish reason and
the usage are read from its original reply, because LiteLLM turns a missing or unknown reason into
"stop" and a missing usage into zeros. Keys come from the environment variables that LiteLLM
documents for each provider.
Prices and context windows that our table lacks come from LiteLLM's packaged table; downloading a
newer one at import is disabled. LiteLLM's retries are disabled too: see
``rate_limited_requests.py``.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.clients import chat_json
from ramify.clients.base import Price, Request, is_known_finish, reported_cost
from ramify.clients.chat_json import error_from_body, error_from_status, redact_secrets
from ramify.clients.picture_token_costs import can_read_pictures
from ramify.clients.providers import (
    ModelProviderSpec,
    ResolvedEndpoint,
    split_model_url,
    split_provider,
)
from ramify.errors import (
    ConfigError,
    MalformedResponse,
    ModelError,
    ReplyLostError,
    RequestRefusedError,
    Unreachable,
)
from ramify.pip_install_command import install_command
from ramify.types.message import Reply

_TIER = re.compile(r"input_cost_per_token_above_(\d+)k_tokens$")
_WINDOW = 128_000
_PROVIDER = ModelProviderSpec(title="LiteLLM", url="", url_variable="", key_variables=("",))

# Read when LiteLLM is imported.
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")


class RawProviderReply:
    """The body of a reply as the provider sent it, before LiteLLM fills in and renames fields."""

    def __init__(self) -> None:
        self.body = ""

    def record_response_body(self, details: dict[str, Any]) -> None:
        """Store the body of the provider's response.

        LiteLLM calls this function before and after each request.
        """
        body = details.get("original_response")
        if details.get("log_event_type") == "post_api_call" and isinstance(body, str):
            self.body = body

    def completion(self) -> chat_json.ChatCompletion | None:
        """Decode the stored body as a chat completion.

        Returns None if the provider uses another format.
        """
        try:
            found = chat_json.decode(self.body.encode("utf-8", "replace"))
        except (msgspec.DecodeError, UnicodeDecodeError):
            return None
        return found if found.choices or found.error else None


class LiteLLMClient:
    """Sends requests to one model through LiteLLM; implements ``Client``."""

    package = "litellm"

    def __init__(
        self,
        name: str,
        *,
        window: int | None,
        price: Price | None = None,
        key: str | None = None,
        base_url: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        try:
            import litellm
        except ImportError:
            raise ConfigError(f"{name} needs LiteLLM: {install_command('litellm')}") from None
        litellm.suppress_debug_info = True
        # Its aiohttp transport would read bytes that arrive on an idle connection as the reply to
        # the next request.
        litellm.disable_aiohttp_transport = True
        self._litellm: Any = litellm
        self.name = name
        self.vision = can_read_pictures(name)
        model, url = split_model_url(split_provider(name)[1])
        self._endpoint = ResolvedEndpoint(
            _PROVIDER,
            model,
            base_url or url or "",
            dict(headers or {}),
            key or "",
            "max_tokens",
            False,
        )
        known_price, known_window = self._model_info(model)
        self.price = price or known_price
        self.window = window or known_window or _WINDOW

    async def complete(self, request: Request) -> Reply:
        fields = chat_json.request_body_fields(request, self._endpoint, "max_tokens")
        original = RawProviderReply()
        started = time.perf_counter()
        try:
            sent = await self._litellm.acompletion(
                **fields,
                num_retries=0,
                max_retries=0,
                drop_params=True,
                timeout=3600.0,
                api_key=self._endpoint.secret or None,
                base_url=self._endpoint.url or None,
                **({"extra_headers": self._endpoint.headers} if self._endpoint.headers else {}),
                logger_fn=original.record_response_body,
            )
        except Exception as error:  # each provider raises its own exceptions
            raise self._to_model_error(error, original) from error
        return self._to_reply(sent, original, time.perf_counter() - started)

    async def close(self) -> None:
        """Do nothing, because LiteLLM shares its connections across the process and closes them
        at exit."""

    def _model_info(self, model: str) -> tuple[Price | None, int | None]:
        """Return a model's price and context window from LiteLLM's table.

        If long prompts cost more per token, the window is limited to the length at which the usual
        price still applies.
        """
        try:
            info = self._litellm.get_model_info(model)
        except Exception:  # noqa: BLE001  an unknown model is a bare Exception there
            return None, None
        ends = [
            int(tier[1]) * 1000
            for name, cost in info.items()
            if cost and (tier := _TIER.match(name))
        ]
        window = min(
            [tokens for tokens in (info.get("max_input_tokens"), *ends) if tokens], default=None
        )
        cache_costs = [
            info.get(f"{kind}_token_cost") for kind in ("cache_read_input", "cache_creation_input")
        ]
        read, write = (None if cost is None else cost * 1e6 for cost in cache_costs)
        costs = info.get("input_cost_per_token"), info.get("output_cost_per_token")
        if costs[0] is None or costs[1] is None:
            return None, window
        return Price(costs[0] * 1e6, costs[1] * 1e6, read, write or None), window

    def _to_reply(self, sent: Any, original: RawProviderReply, seconds: float) -> Reply:
        found = original.completion()
        if found is not None and found.error:
            raise self._error_in_body(found, original)
        try:
            dumped = sent.model_dump()
            for choice in dumped["choices"]:
                # LiteLLM turns what it does not know, an aborted reply included, into "stop".
                native = (choice.get("provider_specific_fields") or {}).get("native_finish_reason")
                if native is not None:
                    choice["finish_reason"] = native
            completion = msgspec.convert(dumped, chat_json.ChatCompletion)
            if not completion.choices:
                raise MalformedResponse(f"{self.name}: LiteLLM returned a reply without choices")
            if found is not None and found.choices:
                first = found.choices[0]
                if len(found.choices) > 1:  # LiteLLM renumbers the choices in order of arrival
                    completion.choices[0] = first
                elif not is_known_finish(first.finish_reason):  # LiteLLM reports null as "stop"
                    completion.choices[0].finish_reason = first.finish_reason
                completion.choices[0].message.refusal = first.message.refusal  # LiteLLM drops it
                completion.usage = found.usage
            elif isinstance(completion.usage, dict) and not completion.usage.get("total_tokens"):
                completion.usage = None  # LiteLLM fills in zeros if the server reported no usage
            reply = chat_json.reply_from_response(
                completion, completion.choices[0], self._endpoint.model, seconds
            )
        except (ValueError, AttributeError, LookupError) as error:
            raise MalformedResponse(
                f"{self.name}: LiteLLM returned something that is not a chat completion ({error})"
            ) from None
        hidden = getattr(sent, "_hidden_params", None) or {}
        return msgspec.structs.replace(
            reply, cost=reported_cost(hidden.get("response_cost")) or reply.cost
        )

    def _error_in_body(
        self, found: chat_json.ChatCompletion, original: RawProviderReply
    ) -> ModelError:
        return error_from_body(
            self.name,
            {},
            original.body.encode("utf-8", "replace"),
            found.error,
            is_beside_reply=bool(found.choices or found.usage),
            secrets=(self._endpoint.secret,),
        )

    def _to_model_error(self, error: Exception, original: RawProviderReply) -> ModelError:
        found = original.completion()
        if found is not None and found.error:
            return self._error_in_body(found, original)
        message = " ".join(redact_secrets(str(error), (self._endpoint.secret,)).split())[:300]
        if isinstance(error, self._litellm.exceptions.ContextWindowExceededError):
            refused = RequestRefusedError(
                f"{self.name}: {message}; shorten the prompt or name a model with a larger window"
            )
            refused.too_long = True
            return refused
        # LiteLLM does not say whether the request was sent before it timed out.
        if "timeout" in type(error).__name__.lower() or "Connection error" in message:
            return ReplyLostError(f"{self.name}: {message}")
        if "connect" in type(error.__cause__).__name__.lower():
            return Unreachable(f"{self.name}: {message}")
        status = getattr(error, "status_code", None)
        if not isinstance(status, int) or status < 400:
            return MalformedResponse(f"{self.name}: {message or type(error).__name__}")
        headers = getattr(error, "litellm_response_headers", None) or {}
        failure = error_from_status(
            self.name, status, headers, message.encode(), secrets=(self._endpoint.secret,)
        )
        failure.may_be_paid = status >= 500  # includes replies that LiteLLM could not parse
        return failure
