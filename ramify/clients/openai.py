"""Client for any server that implements OpenAI's chat completions, or its responses API.

It sends each request once and turns bad answers into errors. ``chat_json.py`` translates the JSON,
or ``responses_json.py`` if the URL ends in ``/responses``. ``http_transport.py`` sends the bytes,
and ``providers.py`` defines addresses and differences between providers. Not here: rate limiting,
retries and prices (see ``pool.py``).
"""

from __future__ import annotations

import time

import msgspec

from ramify.clients import chat_json, responses_json
from ramify.clients.base import Price, Request
from ramify.clients.chat_json import from_body, from_status, redacted
from ramify.clients.http_transport import HttpConnectionPool, HttpResponse, route_to
from ramify.clients.providers import RESPONSES_PATH, Endpoint
from ramify.errors import BadReply, ModelError, Refused
from ramify.types.message import Reply


class OpenAIClient:
    """A ``Client`` for one model at one endpoint."""

    def __init__(
        self,
        name: str,
        endpoint: Endpoint,
        wire: HttpConnectionPool,
        *,
        window: int,
        price: Price | None = None,
    ) -> None:
        self.name = name
        self.window = window
        self.price = price
        self.continues = bool(endpoint.provider.continue_fields)
        """True if a request that ends with a part of a reply is answered with its rest."""
        self._endpoint = endpoint
        self._format = responses_json if endpoint.url.endswith(RESPONSES_PATH) else chat_json
        self._limit_field = endpoint.limit_field
        self._wire = wire
        self._route = route_to(endpoint.url, endpoint.headers)

    async def complete(self, request: Request) -> Reply:
        fields = self._format.body_fields(request, self._endpoint, self._limit_field)
        body = chat_json.encode(fields)
        started = time.perf_counter()
        async with self._wire.send(self.name, self._route, body) as exchange:
            answer = await exchange.read()
        seconds = time.perf_counter() - started
        if answer.status != 200:
            raise self._refusal(answer)
        return self._reply(answer, seconds)

    async def close(self) -> None:
        """Do nothing: the connections belong to the pool."""

    def _refusal(self, answer: HttpResponse) -> ModelError:
        if 300 <= answer.status < 400:
            moved = self._bad(
                f"moved to {answer.headers.get('location', '?')}; use that as the base URL",
                paid=False,
            )
            moved.transient = False
            return moved
        error = from_status(
            self._where(),
            answer.status,
            answer.headers,
            answer.body,
            key_variable=self._endpoint.provider.key_variables[0],
            secrets=(self._endpoint.secret,),
        )
        if (
            isinstance(error, Refused)
            and self._limit_field == "max_tokens"
            and "max_completion_tokens" in str(error)
        ):
            self._limit_field = "max_completion_tokens"
            error.transient = True
        return error

    def _reply(self, answer: HttpResponse, seconds: float) -> Reply:
        completion = self._completion(answer)
        if completion.error or not completion.choices:
            raise self._no_reply(answer, completion)
        try:
            reply: Reply = self._format.read(
                completion, completion.choices[0], self._endpoint.model, seconds
            )
            return reply
        except ValueError as error:
            raise self._bad(str(error)) from None

    def _completion(
        self, answer: HttpResponse
    ) -> chat_json.ChatCompletion | responses_json.ResponseBody:
        try:
            completion: chat_json.ChatCompletion = self._format.decode(answer.body)
            return completion
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            kind = answer.headers.get("content-type", "no content type")
            if "html" in kind.lower() or answer.body.lstrip()[:1] == b"<":
                hint = (
                    ""
                    if self._endpoint.url.endswith(("/v1/chat/completions", RESPONSES_PATH))
                    else ": most end in /v1"
                )
                raise self._bad(
                    f"answered {kind} instead of JSON; check the base URL{hint}", paid=False
                ) from None
            start = redacted(
                answer.body[:2000].decode("utf-8", "replace"), (self._endpoint.secret,)
            )[:80]
            raise self._bad(
                f"answered {kind} that is not a {self._format.KIND} ({error}): {start!r}"
            ) from None

    def _no_reply(
        self,
        answer: HttpResponse,
        completion: chat_json.ChatCompletion | responses_json.ResponseBody,
    ) -> ModelError:
        if not completion.error:
            return self._bad(
                f"sent a reply without choices; is it a {self._format.KIND}s endpoint?"
            )
        return from_body(
            self._where(),
            answer.headers,
            answer.body,
            completion.error,
            is_beside_reply=bool(completion.choices or completion.usage),
            key_variable=self._endpoint.provider.key_variables[0],
            secrets=(self._endpoint.secret,),
        )

    def _where(self) -> str:
        """Model and address. A name of the form ``provider:model@URL`` already contains both."""
        url = self._endpoint.url
        return (
            self.name
            if url.removesuffix("/chat/completions") in self.name
            else f"{self.name} at {url}"
        )

    def _bad(self, what: str, *, paid: bool = True) -> BadReply:
        error = BadReply(f"{self._where()} {what}")
        error.may_be_paid = paid
        return error
