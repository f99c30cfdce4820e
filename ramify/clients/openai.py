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
from ramify.clients.base import Price, ReplyBound, Request
from ramify.clients.chat_json import from_body, from_status, redacted
from ramify.clients.http_transport import HttpConnectionPool, HttpResponse, route_to
from ramify.clients.providers import RESPONSES_PATH, Endpoint
from ramify.clients.reply_decoding import NoReply, Undecodable, decode_reply
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
        bound = request.reply_bound()
        started = time.perf_counter()
        async with self._wire.send(self.name, self._route, body, bound.bytes) as exchange:
            answer = await exchange.read()
        seconds = time.perf_counter() - started
        if answer.status // 100 != 2:
            raise self._refusal(answer)
        return await self._reply(answer, bound, seconds)

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

    async def _reply(self, answer: HttpResponse, bound: ReplyBound, seconds: float) -> Reply:
        try:
            reply = await decode_reply(self._format, answer.body, self._endpoint.model, bound)
            return msgspec.structs.replace(reply, seconds=seconds)
        except NoReply as error:
            raise self._no_reply(answer, error) from None
        except Undecodable as error:
            raise self._not_json(answer, error) from None
        except ValueError as error:
            raise self._bad(str(error)) from None
        except BadReply as error:
            located = self._bad(f"was refused: {error}")
            located.transient = error.transient
            raise located from None

    def _not_json(self, answer: HttpResponse, error: Undecodable) -> BadReply:
        kind = answer.headers.get("content-type", "no content type")
        start = answer.body[:2000].decode("utf-8", "replace")
        if "html" in kind.lower() or start.lstrip()[:1] == "<":
            hint = (
                ""
                if self._endpoint.url.endswith(("/v1/chat/completions", RESPONSES_PATH))
                else ": most end in /v1"
            )
            return self._bad(
                f"answered {kind} instead of JSON; check the base URL{hint}", paid=False
            )
        start = redacted(start, (self._endpoint.secret,))[:80]
        return self._bad(f"answered {kind} that is not a {self._format.KIND} ({error}): {start!r}")

    def _no_reply(self, answer: HttpResponse, found: NoReply) -> ModelError:
        if not found.has_error:
            return self._bad(
                f"sent a reply without choices; is it a {self._format.KIND}s endpoint?"
            )
        return from_body(
            self._where(),
            answer.headers,
            answer.body,
            {"code": found.code},
            is_beside_reply=found.is_beside_reply,
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
