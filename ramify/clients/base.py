"""What the engine asks of a model: one ``Request`` in, one ``Reply`` out, one attempt at a time.

A client translates and sends once. Trying again, waiting for one's turn and charging the budget are
the ``Pool``'s (``clients/pool.py``), so that they are written once for every provider:

    engine ── Pool.ask(client, request, account) ──┐
                 account.reserve()                 │  may wait; raises LimitReached
                 limiter slot                      │  held only while on the wire
                 client.complete(request)          │  one attempt: Reply, or a ModelError that says what it cost
                 account.settle / forfeit / release┘
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import msgspec

from ramify.types.message import Message, Reply, Usage


class Sampling(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a reply is drawn."""

    max_tokens: int = 8192
    """Of the reply. Always sent: a budget can only be kept exactly if every reply is bounded."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    """Ask for token ids and log-probabilities where the server has them."""
    extra: dict[str, Any] = {}
    """Further fields for the provider's request body, as they are: ``{"reasoning_effort":
    "low"}``."""
    top_k: int | None = None
    """Draw among the k likeliest tokens; left out where a provider's API has no such field."""


class Tool(msgspec.Struct, frozen=True):
    """A tool offered natively to a model."""

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""


class KnownPrefix(msgspec.Struct, frozen=True):
    """The exact ids of a request's beginning, as the model was given and sampled them. A client
    that has them extends them by the messages after, and never makes ids of that text again: a
    tokenizer may cut it up in another way than the model wrote it."""

    num_messages: int
    """Messages of the request that the ids stand for; the last of them is a reply of the model."""
    ids: tuple[int, ...]


class Request(msgspec.Struct, frozen=True):
    """One request for one reply."""

    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    schema: dict[str, Any] | None = None
    """JSON schema that the reply's content should meet, where the provider can enforce it."""
    tools: tuple[Tool, ...] = ()
    affinity: str = ""
    """Requests with the same value share a prefix; a server with several engines may keep them
    together. The engine gives the call's id, unique within its run."""
    known: KnownPrefix | None = None
    """Where the replies so far came with ids; no part of what makes two requests the same."""

    def max_input_tokens(self) -> int:
        """An upper bound on the prompt's tokens, known before sending: its UTF-8 bytes, plus what
        templates add.

        No byte-level tokenizer makes more tokens than bytes. 16 per message and 64 per request
        cover role markers.
        """
        total = 64
        for message in self.messages:
            total += 16 + _num_bytes(message.content)
            if message.reasoning:
                total += _num_bytes(message.reasoning)
            for call in message.tool_calls:
                total += 16 + _num_bytes(call.name) + _num_bytes(call.arguments)
        for part in (self.schema, self.tools or None):
            total += len(msgspec.json.encode(part)) if part is not None else 0
        return total

    def max_usage(self) -> Usage:
        """An upper bound on what one attempt uses: what to reserve, and what to book where no usage
        came back."""
        tokens = self.max_input_tokens()
        return Usage(
            tokens, self.sampling.max_tokens, cache_write_tokens=tokens, calls=1, unknown_calls=1
        )


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Price(msgspec.Struct, frozen=True):
    """Dollars per million tokens."""

    input: float
    output: float
    cached: float | None = None
    """For input read from the provider's cache; None: the same as ``input``."""
    cache_write: float | None = None
    """For input that the provider stored in its cache and charges more for; None: the same as
    ``input``."""

    def of(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        stored = self.input if self.cache_write is None else self.cache_write
        fresh = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        dollars = (
            fresh * self.input + usage.cached_tokens * cached + usage.cache_write_tokens * stored
        )
        return (dollars + usage.output_tokens * self.output) / 1e6


@runtime_checkable
class Client(Protocol):
    """A model that can be asked. One attempt per call; every failure is a ``ModelError``."""

    name: str
    """``provider:model``"""
    window: int
    """Tokens that prompt and reply together may have."""
    price: Price | None
    """None where it is not known; free local models have ``Price(0, 0)``."""

    async def complete(self, request: Request) -> Reply:
        """Send ``request`` once. ``Reply.usage.calls`` is 1, or 0 where the server did not say what
        was used: the pool then books ``request.max_usage()``. ``Reply.cost`` is left to the
        pool."""
        ...

    async def close(self) -> None: ...


class RequestBudget(Protocol):
    """Who pays for one request. The engine's ledger implements it; ``reserve`` comes before every
    attempt."""

    async def reserve(self) -> None:
        """Set aside the most that one attempt can cost; waits while others' reservations may yet be
        freed.

        Raises LimitReached where it cannot fit even then."""
        ...

    def settle(self, usage: Usage, cost: float | None) -> None:
        """The attempt cost this much."""
        ...

    def forfeit(self, error: str) -> None:
        """The attempt may have cost everything that was reserved; record it as an upper bound."""
        ...

    def release(self, error: str) -> None:
        """The attempt cost nothing."""
        ...
