"""Define the interface between the engine and a model.

A client receives a ``Request``, makes one attempt, and returns a ``Reply``.

A client translates a request and sends it once. Retries, rate limiting and budgets are handled by
``RateLimitedClientPool`` (see ``rate_limited_requests.py``), so they are written once for every
provider:

    engine ── RateLimitedClientPool.ask(client, request, account)
                 ├─ account.reserve()                       may wait; raises LimitReached
                 ├─ limiter slot                            held only while a request is in flight
                 ├─ client.complete(request)                one attempt: a Reply or a ModelError
                 └─ account.settle / charge_full_reservation / release

The tokens and dollars that a server reports are validated here, so that a budget can rely on them.
A report that is missing, impossible or inconsistent counts as unknown, and the pool then books the
most that the request can cost. No report can therefore lower the recorded spending.

    {"prompt_tokens": 9, "completion_tokens": 2}            ->  Usage(9, 2, calls=1)
    9 prompt tokens, of which 500 were cached; -3; NaN; true  ->  Usage(): unknown
    0 prompt tokens, or 0 tokens of a reply with text         ->  unknown
"""

from __future__ import annotations

import binascii
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from ramify.clients.picture_token_costs import picture_tokens_upper_bound
from ramify.errors import ServerStatusError, StrictKeywordsMeta
from ramify.lazy_pattern import lazy_pattern
from ramify.types.message import Finish, Message, Reply, Usage
from ramify.types.picture import Picture

ASSUMED_WINDOW = 128_000
"""Context window in tokens that is assumed if a model's window is unknown."""


class Sampling(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True, omit_defaults=True):
    """The sampling settings of a request, such as the temperature and the maximum reply length."""

    max_tokens: int = 8192
    """Maximum tokens of the reply. It is always sent, because a budget can only be exact if
    every reply is limited."""
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logprobs: bool = False
    """Request token ids and log-probabilities if the server supports them."""
    extra: dict[str, Any] = {}
    """Additional fields for the provider's request body, passed unchanged: ``{"reasoning_effort":
    "low"}``."""
    top_k: int | None = None
    """Sample only from the k most likely tokens. Omitted if the provider's API has no such
    field."""
    top_logprobs: int = 0
    """For each sampled token, also report this many of the most likely tokens with their
    log-probabilities. Only the in-process engine supports this; other providers report none."""


class Tool(msgspec.Struct, frozen=True):
    """A tool that a model may call through the provider's tool-calling API.

    >>> inference.Tool("add", "Add two numbers.", {"type": "object", "properties": {}}).name
    'add'
    """

    name: str
    description: str
    parameters: dict[str, Any]
    """JSON schema of the arguments."""


class KnownPrefix(msgspec.Struct, frozen=True):
    """The exact token ids of earlier turns at the start of a request.

    They are the ids that the model received and sampled in those turns. A client that receives
    known ids appends the later messages to them, and never tokenizes the earlier text again. A
    tokenizer may split that text differently from how the model sampled it.
    """

    num_messages: int
    """Number of messages that the ids cover. The last of these messages is a reply of the model."""
    ids: tuple[int, ...]


_CONSTANT_BYTES = 1 << 20
_TOKEN_BYTES = 256
"""Maximum bytes of JSON per token of a reply. The longest tokens have about 128 characters, and
some servers send reasoning twice."""
_LOGPROB_BYTES = 1024
"""Maximum bytes of JSON per log-probability, which includes its token as text and as bytes."""
_ID_BYTES = 16
_MOST_REPLY_BYTES = 64 << 20
_MOST_CHARS = 4 << 20


class ReplySizeLimit(msgspec.Struct, frozen=True):
    """The size of the largest plausible reply to a request.

    Larger replies are rejected.
    """

    bytes: int
    """Bytes of the response body."""
    items: int
    """Total length of the response's lists: content parts, token ids and log-probabilities."""
    tool_calls: int
    chars: int
    """Total number of characters of the reply's text, reasoning and tool arguments."""


class Request(msgspec.Struct, frozen=True):
    """One request to a model: the messages, sampling settings, and optionally a schema and
    tools."""

    messages: tuple[Message, ...]
    sampling: Sampling = Sampling()
    schema: dict[str, Any] | None = None
    """JSON schema that the reply's content should match, if the provider can enforce it."""
    tools: tuple[Tool, ...] = ()
    affinity: str = ""
    """Requests with the same value share a prefix, so a server can route them to the same engine.
    Ramify sends the id of the call, unique within its run."""
    known: KnownPrefix | None = None
    """Token ids of the conversation so far, if its replies came with ids. Ignored when requests
    are compared."""
    model: str = ""
    """Name of the requested model. It determines how many tokens a picture may cost."""
    read_picture: Callable[[str], bytes] | None = None
    """Returns the bytes of a picture in the messages by the picture's digest; None if there are
    no pictures. Raises RequestRefusedError if the bytes are gone."""
    whole: bool = False
    """If True, the reply is not streamed, because it is expected to be short."""

    def max_input_tokens(self) -> int:
        """Return an upper bound on the number of prompt tokens, known before the request is sent.

        It is the number of UTF-8 bytes of the prompt plus template overhead. No byte-level
        tokenizer produces more tokens than bytes. 16 per message and 64 per request cover the role
        markers. How many tokens a picture costs depends on the model (see
        ``picture_token_costs.py``).
        """
        total = 64 + sum(
            message_tokens_upper_bound(message, self.model) for message in self.messages
        )
        for part in (self.schema, self.tools or None):
            total += len(msgspec.json.encode(part)) if part is not None else 0
        return total

    def reply_size_limit(self) -> ReplySizeLimit:
        """Return the size of the largest plausible reply to this request under its sampling
        settings."""
        sampling = self.sampling
        if not sampling.extra and not sampling.logprobs:
            return _plain_bound(sampling.max_tokens)
        choices, top_logprobs = 1, 0
        if sampling.extra:
            choices = _positive_or_default(sampling.extra.get("n"), 1)
            top_logprobs = _positive_or_default(sampling.extra.get("top_logprobs"), 0)
        tokens, token_bytes, prompt_ids = choices * sampling.max_tokens, _TOKEN_BYTES, 0
        if sampling.logprobs or top_logprobs:
            token_bytes += _LOGPROB_BYTES * (1 + top_logprobs)
            prompt_ids = self.max_input_tokens()
        return _reply_bound(tokens, token_bytes, prompt_ids)

    def max_usage(self) -> Usage:
        """Return an upper bound on the tokens that one attempt at this request can use.

        A budget reserves this amount before the attempt, and charges it if the server reports no
        usage.
        """
        tokens = self.max_input_tokens()
        return Usage(
            tokens, self.sampling.max_tokens, cache_write_tokens=tokens, calls=1, unknown_calls=1
        )


def _reply_bound(tokens: int, token_bytes: int, prompt_ids: int) -> ReplySizeLimit:
    num_bytes = _CONSTANT_BYTES + tokens * token_bytes + prompt_ids * _ID_BYTES
    # Some servers do not count reasoning, so there may be twice as many tokens. A tool call takes
    # at least four: its name, its arguments, and the marks around them.
    return ReplySizeLimit(
        min(num_bytes, _MOST_REPLY_BYTES),
        1024 + 2 * tokens + prompt_ids,
        max(64, tokens // 4),
        min(_CONSTANT_BYTES + tokens * _TOKEN_BYTES, _MOST_CHARS),
    )


@functools.lru_cache(64)
def _plain_bound(tokens: int) -> ReplySizeLimit:
    """Return the largest plausible size of a reply with one choice and no log-probabilities."""
    return _reply_bound(tokens, _TOKEN_BYTES, 0)


class PromptRenderer(msgspec.Struct, frozen=True):
    """Turns messages into prompt token ids without asking the model.

    A client has one if its chat template runs in this process.
    """

    ids: Callable[[Request], Sequence[int]]
    """Returns the prompt token ids that the client would send for a request. Raises ConfigError
    if the template cannot render the messages."""
    is_append_only: bool
    """Whether the ids of a request with ``known`` always begin with the known ids."""
    text_of: Callable[[int], str]
    """Returns the text of one token."""


def message_tokens_upper_bound(message: Message, model: str = "") -> int:
    """Return an upper bound on the number of tokens of one message, including its pictures."""
    total = 16 + _num_bytes(message.content)
    if message.reasoning:
        total += _num_bytes(message.reasoning)
    for call in message.tool_calls:
        total += 16 + _num_bytes(call.name) + _num_bytes(call.arguments)
    for picture in message.pictures:
        total += picture_tokens_upper_bound(model, picture)
    return total


def picture_base64(request: Request, picture: Picture) -> str:
    """Return the bytes of a picture in a request as base64 text.

    Raises RequestRefusedError if the bytes are no longer available.
    """
    assert request.read_picture is not None, "a request with pictures has their bytes"
    return binascii.b2a_base64(request.read_picture(picture.digest), newline=False).decode()


def _num_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


class Price(msgspec.Struct, metaclass=StrictKeywordsMeta, frozen=True):
    """The price of a model in dollars per million tokens."""

    input: float
    output: float
    cached: float | None = None
    """Price of input tokens that are read from the provider's cache, in dollars per million; None
    means the same as ``input``."""
    cache_write: float | None = None
    """Price of input tokens that the provider writes to its cache at a surcharge, in dollars per
    million; None means the same as ``input``."""

    def of(self, usage: Usage) -> float:
        cached = self.input if self.cached is None else self.cached
        stored = self.input if self.cache_write is None else self.cache_write
        fresh = usage.input_tokens - usage.cached_tokens - usage.cache_write_tokens
        dollars = (
            fresh * self.input + usage.cached_tokens * cached + usage.cache_write_tokens * stored
        )
        return (dollars + usage.output_tokens * self.output) / 1e6


class ReplyPiece(msgspec.Struct, frozen=True):
    """A piece of a streamed reply.

    An empty piece only shows that the server is alive.
    """

    text: str = ""
    reasoning: str = ""


OnPiece = Callable[[ReplyPiece], None]
"""Callback for each piece of a streamed reply. It runs in the event loop, so it must return
quickly."""


@runtime_checkable
class Client(Protocol):
    """A connection to one model.

    Each call of ``complete`` sends a request once, and every failure is raised as a ``ModelError``.

    A client that receives replies piece by piece also accepts ``on_piece``, an ``OnPiece``:
    ``complete(request, on_piece)``. The pool checks for this parameter. A client that can send
    pictures has the attribute ``vision``: whether its model reads them, or None if that is unknown.
    Without the attribute, it gets no request with pictures. A client that renders prompts itself
    has ``rendering``, a ``PromptRenderer``. The requests of outside agents are then compared by
    token ids.
    """

    name: str
    """Full name of the model: ``provider:model``."""
    window: int
    """Context window: maximum tokens of the prompt and the reply together."""
    price: Price | None
    """Price of the model; None if it is unknown. Free local models have ``Price(0, 0)``."""

    async def complete(self, request: Request) -> Reply:
        """Send a request to the model once, and return its reply.

        Raises a ModelError if the attempt fails.

        ``Reply.usage.calls`` is 1, or 0 if the server reported no usage; the pool then books
        ``request.max_usage()``. The pool sets ``Reply.cost``.
        """
        ...

    async def close(self) -> None: ...


class RequestBudgetReservation(Protocol):
    """Reserves budget for one model request before each attempt to send it.

    The engine's ledger, which tracks a run's spending, implements this protocol. ``reserve`` is
    called before every attempt.
    """

    async def reserve(self) -> None:
        """Reserve the maximum cost of one attempt.

        If the budget is too small only because of other reservations, wait until they are released.

        Raises LimitReached if the attempt would not fit even then.
        """
        ...

    def is_still_valid(self) -> bool:
        """Return True if the reservation still covers the next attempt.

        It does not if another reply has shown that the model may use more than was reserved. In
        that case the reservation has been released, and ``reserve`` must be called again.
        """
        ...

    def settle(self, usage: Usage, cost: float | None) -> None:
        """Charge the attempt's actual usage and cost, and release the reservation."""
        ...

    def charge_full_reservation(self, error: str) -> None:
        """Charge the full reservation, because the failed attempt may still have been billed."""
        ...

    def release(self, error: str) -> None:
        """Release the reservation, because the attempt cost nothing."""
        ...


def reported_usage(
    given: Any,
    produced: Any,
    *,
    total: Any = None,
    cached: Any = None,
    stored: Any = None,
    reasoning: Any = None,
) -> Usage:
    """Convert the token counts that a server reports to a ``Usage``.

    The result is empty if the counts are missing or inconsistent.

    ``given`` counts the tokens of the whole prompt, ``produced`` those of the reply and ``total``
    both; ``cached`` and ``stored`` are parts of the prompt. Some servers count reasoning tokens
    only in the total, and charge for them.
    """
    try:
        inputs, outputs, both, read, written, thinking = map(
            _check_token_count, (given, produced, total, cached, stored, reasoning)
        )
    except ValueError:
        return Usage()
    if inputs is None or (outputs is None and (both is None or both < inputs)):
        return Usage()
    # Some servers count reasoning only in the total, and some only in a separate field.
    output = max(outputs or 0, (both or 0) - inputs)
    thinking = thinking or 0
    output += thinking if thinking > output else 0
    usage = Usage(inputs, output, read or 0, thinking, calls=1, cache_write_tokens=written or 0)
    return usage if _is_consistent(usage) else Usage()


def plausible_usage(reply: Reply, request: Request, window: int) -> Usage:
    """Return the usage that a reply reports, or the request's maximum usage if the report is
    implausible.

    A count of zero tokens is not plausible for a prompt, or for a reply with text. Neither is a
    prompt or a reply longer than the model's ``window``.
    """
    usage, message = reply.usage, reply.message
    within = usage.output_tokens <= max(request.sampling.max_tokens, window) and (
        # Counted only if necessary, since it reads the whole prompt.
        usage.input_tokens <= window or usage.input_tokens <= request.max_input_tokens()
    )
    says = bool(message.content or message.reasoning or message.tool_calls)
    counted = usage.input_tokens > 0 and (usage.output_tokens > 0 or not says)
    is_believed = usage.calls and _is_consistent(usage) and within and counted
    return usage if is_believed else request.max_usage()


def reported_cost(reported: Any) -> float | None:
    """Return the cost that a server reports, or None if it is not a valid amount of money."""
    if isinstance(reported, bool) or not isinstance(reported, int | float):
        return None
    try:
        amount = float(reported)
    except OverflowError:  # an integer of hundreds of digits
        return None
    return amount if math.isfinite(amount) and amount >= 0 else None


def _positive_or_default(value: Any, default: int) -> int:
    return value if isinstance(value, int) and value > 0 else default


def _check_token_count(reported: Any) -> int | None:
    """Check a token count that a server reports, and return it, or None if it is missing.

    Raises ValueError if the value cannot be a count.
    """
    if reported is None or (type(reported) is int and reported >= 0):
        return reported
    if isinstance(reported, float) and reported.is_integer():  # some gateways write 12.0
        reported = int(reported)
    if isinstance(reported, bool) or not isinstance(reported, int) or reported < 0:
        raise ValueError
    return int(reported)


def _is_consistent(usage: Usage) -> bool:
    """Return True if all token counts of a ``Usage`` are valid and no part exceeds its total."""
    figures = msgspec.structs.astuple(usage)
    if set(map(type, figures)) != {int} or min(figures) < 0:
        return False
    parts = usage.cached_tokens + usage.cache_write_tokens
    return parts <= usage.input_tokens and usage.reasoning_tokens <= usage.output_tokens


_REASONING = lazy_pattern(
    r"(^|[/:._-])(o[134](?=$|[-@])|gpt-5(?!.*chat)|gpt-oss|deepseek-r|r1(?=$|[-@])|qwq|magistral"
    r"|qwen-?3(?!.*(instruct|coder))|glm-(4\.[5-9]|[5-9])|grok-(3-mini|4)|gemini-(2\.5|[3-9])"
    r"|minimax-m|[\w.-]*(reason|think))"
)


def is_reasoning_model(name: str) -> bool:
    """Return True if a model with this name reasons by default before it replies."""
    return _REASONING.search(name.partition("@http")[0].lower()) is not None


_WORDS: dict[Finish, str] = {
    "stop": "stop end_turn stop_sequence eos eos_token eot complete completed finished done end",
    "length": "length max_tokens max_output_tokens max_length model_length token_limit"
    " model_context_window_exceeded context_length repetition_truncation",
    "tool_calls": "tool_calls tool_call tool_use function_call",
    "content_filter": "content_filter content_filtered refusal safety recitation blocklist"
    " prohibited_content spii sensitive guardrail_intervened image_safety language error_toxic",
}
_FINISHES: dict[str, Finish] = {
    word: finish for finish, words in _WORDS.items() for word in words.split()
}
_BROKEN = {
    "error",
    "network_error",
    "insufficient_system_resource",
    "abort",
    "aborted",
    "cancelled",
    "canceled",
    "malformed_function_call",
}


def is_known_finish(reason: Any) -> bool:
    """Return True if ``parse_finish_reason`` can convert the given finish reason of a server."""
    return str(reason).lower() in _FINISHES or str(reason).lower() in _BROKEN


def parse_finish_reason(reason: Any, where: str) -> Finish:
    """Convert the finish reason that a server reports to one of Ramify's finish reasons.

    Raises ServerStatusError, which names ``where``, if the server aborted the reply, and ValueError
    if the reason is missing (UNSET), null or unknown, because the reply may then be incomplete.
    """
    if reason is msgspec.UNSET:
        raise ValueError("ended a reply without a finish reason: it may be incomplete")
    word = str(reason).lower()
    if (finish := _FINISHES.get(word)) is not None:
        return finish
    if word in _BROKEN:
        failed = ServerStatusError(f"{where} broke the reply off (finish reason {word!r})")
        failed.may_be_paid = True
        raise failed
    raise ValueError(
        f"ended a reply with the unknown finish reason {reason!r:.60}: it may be incomplete"
    )
