"""The client for servers that implement OpenAI's chat completions API or its responses API.

``json_api.py`` sends each request once and turns bad answers into errors. ``chat_json.py``
translates the JSON, or ``responses_json.py`` if the URL ends in ``/responses``. ``providers.py``
defines addresses and differences between providers. ``rate_limited_requests.py`` does rate
limiting and retries, and computes costs.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from ramify.clients import chat_json
from ramify.clients.base import OnPiece, Price, Request
from ramify.clients.json_api import JsonApiClient
from ramify.clients.picture_token_costs import can_read_pictures
from ramify.clients.providers import RESPONSES_PATH, ResolvedEndpoint
from ramify.errors import ConfigError, RequestRefusedError
from ramify.http_client.http_transport import HttpConnectionPool
from ramify.types.message import Reply

if TYPE_CHECKING:
    from ramify.clients.provider_batch_apis import OpenAIBatches


class OpenAIClient:
    """Sends requests to one model of an OpenAI-compatible server; implements ``Client``."""

    def __init__(
        self,
        name: str,
        endpoint: ResolvedEndpoint,
        wire: HttpConnectionPool,
        *,
        window: int,
        price: Price | None = None,
        streams: bool = True,
    ) -> None:
        """Create a client for one model at ``endpoint``.

        ``streams=False`` disables streaming.
        """
        self.name = name
        self.window = window
        self.price = price
        self.vision = can_read_pictures(name)
        self.continues = bool(endpoint.provider.continue_fields)
        """True if the server can continue an incomplete assistant message at the end of a
        request."""
        self._endpoint = endpoint
        self._format: ModuleType = chat_json
        if endpoint.url.endswith(RESPONSES_PATH):
            from ramify.clients import responses_json

            self._format = responses_json
        self._limit_field = endpoint.limit_field
        self._wire = wire
        self._api = JsonApiClient(name, endpoint, wire, self._format, streams=streams)
        self.where = self._api.where
        """Model name and server address, for use in error messages."""

    async def complete(self, request: Request, on_piece: OnPiece | None = None) -> Reply:
        fields = self._body(request)
        # Not every server streams the log-probabilities and ids that it has.
        whole = request.sampling.logprobs or request.whole
        try:
            reply, _ = await self._api.ask(
                fields, request.reply_size_limit(), on_piece, whole=whole
            )
            return reply
        except RequestRefusedError as error:
            self.adapt_to_refusal(error)
            raise

    def adapt_to_refusal(self, error: RequestRefusedError) -> None:
        """Use ``max_completion_tokens`` in later requests if the error shows that the server
        requires it.

        The error is then marked as worth a retry.
        """
        if self._limit_field == "max_tokens" and "max_completion_tokens" in str(error):
            self._limit_field = "max_completion_tokens"
            error.transient = True

    def batches(self) -> OpenAIBatches:
        """Return the batch API for this model.

        Raises ConfigError if Ramify does not support one for its provider.
        """
        from ramify.clients.provider_batch_apis import OpenAIBatches

        if not self.name.startswith("openai:"):
            provider = self._endpoint.provider.title
            raise ConfigError(
                f"{self.name}: batches are not supported for {provider}: use a model of openai or "
                "anthropic, or ask without a batch"
            )
        base, slash, path = self._endpoint.url.rpartition(
            RESPONSES_PATH if self._format is not chat_json else "/chat/completions"
        )
        headers = self._endpoint.headers
        return OpenAIBatches(
            self._api, self._wire, base, headers, self._body, endpoint=f"/v1{slash}{path}"
        )

    def _body(self, request: Request) -> dict[str, Any]:
        fields: dict[str, Any] = self._format.request_body_fields(
            request, self._endpoint, self._limit_field
        )
        return fields

    async def close(self) -> None:
        """Do nothing, because the connections belong to the pool that created this client."""
