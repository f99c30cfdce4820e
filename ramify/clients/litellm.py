"""Whatever else LiteLLM speaks (``pip install 'ramify[litellm]'``): ``litellm:provider/model``,
such as ``litellm:bedrock/…``.

LiteLLM returns OpenAI's shape, which ``chat_json.py`` reads. Keys come from the variables that
LiteLLM documents for each provider. Prices and windows that our table does not know are taken from
LiteLLM's packaged one; it is told not to fetch a newer one over the network when it is imported.
LiteLLM does not try again: the pool does.
"""

from __future__ import annotations

import os
import re
import time
from typing import Any

import msgspec

from ramify.clients import chat_json
from ramify.clients.base import Price, Request
from ramify.clients.failures import from_status, redacted
from ramify.clients.providers import Endpoint, ProviderSpec, split_name, split_url
from ramify.clients.usage import dollars
from ramify.errors import BadReply, ConfigError, ModelError, Refused, ReplyLost, Unreachable
from ramify.types.message import Reply

_TIER = re.compile(r"input_cost_per_token_above_(\d+)k_tokens$")
_WINDOW = 128_000
_PROVIDER = ProviderSpec(title="LiteLLM", url="", url_variable="", key_variables=("",))


class LiteLLMClient:
    """A ``Client`` for one model behind LiteLLM."""

    def __init__(
        self,
        name: str,
        *,
        window: int | None,
        price: Price | None = None,
        key: str | None = None,
        base_url: str | None = None,
    ) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        try:
            import litellm
        except ImportError:
            raise ConfigError(f"{name} needs LiteLLM: pip install 'ramify[litellm]'") from None
        litellm.suppress_debug_info = True
        self._litellm: Any = litellm
        self.name = name
        model, url = split_url(split_name(name)[1])
        self._endpoint = Endpoint(
            _PROVIDER, model, base_url or url or "", {}, key or "", "max_tokens", False
        )
        known_price, known_window = self._known(model)
        self.price = price or known_price
        self.window = window or known_window or _WINDOW

    async def complete(self, request: Request) -> Reply:
        fields = chat_json.body_fields(request, self._endpoint, "max_tokens")
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
            )
        except Exception as error:  # its providers raise what they like
            raise self._failure(error) from error
        return self._reply(sent, time.perf_counter() - started)

    async def close(self) -> None:
        """Nothing: LiteLLM keeps its connections for the whole process and closes them at exit."""

    def _known(self, model: str) -> tuple[Price | None, int | None]:
        """What LiteLLM's own table says; the window ends where tokens become dearer."""
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
        each = [
            info.get(f"{kind}_token_cost") for kind in ("cache_read_input", "cache_creation_input")
        ]
        read, write = (None if cost is None else cost * 1e6 for cost in each)
        costs = info.get("input_cost_per_token"), info.get("output_cost_per_token")
        if costs[0] is None or costs[1] is None:
            return None, window
        return Price(costs[0] * 1e6, costs[1] * 1e6, read, write or None), window

    def _reply(self, sent: Any, seconds: float) -> Reply:
        try:
            completion = msgspec.convert(sent.model_dump(), chat_json.ChatCompletion)
            if not completion.choices:
                raise BadReply(f"{self.name}: LiteLLM returned a reply without choices")
            if isinstance(completion.usage, dict) and not completion.usage.get("total_tokens"):
                completion.usage = None  # what LiteLLM makes of a reply that did not say
            reply = chat_json.read(completion, completion.choices[0], self._endpoint.model, seconds)
        except (ValueError, AttributeError) as error:
            raise BadReply(
                f"{self.name}: LiteLLM returned something that is not a chat completion ({error})"
            ) from None
        hidden = getattr(sent, "_hidden_params", None) or {}
        return msgspec.structs.replace(
            reply, cost=dollars(hidden.get("response_cost")) or reply.cost
        )

    def _failure(self, error: Exception) -> ModelError:
        said = redacted(" ".join(str(error).split())[:300], (self._endpoint.secret,))
        if isinstance(error, self._litellm.exceptions.ContextWindowExceededError):
            refused = Refused(
                f"{self.name}: {said}; shorten the prompt or name a model with a larger window"
            )
            refused.too_long = True
            return refused
        if "timeout" in type(error).__name__.lower() or "Connection error" in said:
            return ReplyLost(
                f"{self.name}: {said}"
            )  # it does not tell whether the request was sent
        if "connect" in type(error.__cause__).__name__.lower():
            return Unreachable(f"{self.name}: {said}")
        status = getattr(error, "status_code", None)
        if not isinstance(status, int) or status < 400:
            return BadReply(f"{self.name}: {said or type(error).__name__}")
        headers = getattr(error, "litellm_response_headers", None) or {}
        failure = from_status(
            self.name, status, headers, said.encode(), secrets=(self._endpoint.secret,)
        )
        failure.may_be_paid = status >= 500  # replies that LiteLLM could not read are among them
        return failure
