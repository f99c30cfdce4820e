"""Define the interface of the systems to evaluate and of their metered access to the model.

A system answers the items (questions) of a task. Its metered access is called a seat.

    item ─> EvaluatedSystem.answer(question, context, seat=…) ─> EvaluatedSystemAnswer
         ─score─> AttemptOutcome
                          │
                          └─ POST seat.base_url/chat/completions, seat.key ──> meter ──> the model

All systems ask the same model through a meter (``serve/metering_proxy.py``), with separate access
for each item. The meter counts the requests, tokens and dollars of that access, and refuses a
request that would exceed its budget. The counts made by a system itself are kept beside those of
the meter, but nothing is decided by them.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import msgspec

from ramify.clients.base import Price
from ramify.clients.model_config import Model
from ramify.engine.limits import BudgetLedger, Limits
from ramify.errors import ConfigError
from ramify.types.message import Usage
from ramify.types.trajectory import Stop


class TaskItemBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The spending limits of a system for one task item (a question of a task).

    None means no limit.
    """

    max_calls: int | None = None
    """Maximum number of requests to the model per item; None means no limit."""
    max_tokens: int | None = None
    """Maximum number of input and output tokens of all requests per item; None means no limit."""
    max_cost: float | None = None
    """Cost in dollars."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"a budget of {name}={value} allows nothing: give more than 0")

    def limits(self) -> Limits:
        """Return this budget as limits for the engine's budget ledger."""
        return Limits(
            max_calls=self.max_calls or _MANY,
            max_tokens=self.max_tokens or _MANY,
            max_cost=self.max_cost or math.inf,
        )


_MANY = 1 << 62
NO_LIMIT = TaskItemBudget()


class MeteredModelAccess:
    """The metered access of a system to the model, for one task item.

    It consists of a base URL, a key, and the usage so far.
    """

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        key: str,
        model: str,
        window: int,
        budget: TaskItemBudget,
        price: Price | None,
    ) -> None:
        """Create metered access to the model for one task item.

        The key is valid until ``cancel_requests`` is called. ``window`` (in tokens) and ``price``
        are those of the model.
        """
        self.name = name
        self.base_url = base_url
        """Base URL for clients of OpenAI's APIs, ending with ``/v1``."""
        self.key = key
        self.model = model
        """Model name in requests. Requests with any other name go to the same model."""
        self.window = window
        self.price = price
        self.budget = budget
        self.ledger = BudgetLedger(budget.limits(), priced=price is not None, owner="item")
        """Spent and reserved amounts of the budget."""
        self.num_requests = 0
        """Number of requests that arrived, including refused ones."""
        self.num_refused = 0
        """Number of requests refused because they would have exceeded the budget."""
        self.refusal = ""
        """Error message of the first request refused for the budget; empty if none was."""
        self.exhausted: Stop | None = None
        """Limit that the first refused request would have exceeded; None if no request was
        refused."""
        self.outage = ""
        """Error of the last request that failed for a temporary reason, so that a retry could have
        succeeded; empty if none."""
        self._answering: set[asyncio.Task[Any]] = set()

    @property
    def usage(self) -> Usage:
        """The number of requests and tokens used on the task item, as counted by the metering
        proxy."""
        return self.ledger.usage

    @property
    def cost(self) -> float | None:
        """The dollars spent on the task item so far, or None if the model has no known price."""
        return self.ledger.cost

    def record_refusal(self, sentence: str, limit: Stop) -> None:
        """Record that a request was refused because it would have exceeded a limit.

        The reason of the first refusal is kept.
        """
        self.num_refused += 1
        if self.exhausted is None:
            self.refusal, self.exhausted = sentence, limit

    @contextmanager
    def cancellable_request(self) -> Iterator[None]:
        """Mark the current asyncio task as busy with a model request, for the duration of a
        ``with`` block.

        ``cancel_requests`` cancels the registered tasks.
        """
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._answering.add(task)
        try:
            yield
        finally:
            self._answering.discard(task)

    async def cancel_requests(self) -> None:
        """Cancel the system's unanswered model requests, and wait until their usage is counted.

        The counts are then final, unless another request begins.
        """
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering)

    def as_model(self) -> Model:
        """Return a model for Ramify's engine whose requests are metered through this access."""
        return Model(
            f"openai:{self.model}",
            base_url=self.base_url,
            api_key=self.key,
            price=self.price,
            window=self.window,
        )

    def __repr__(self) -> str:
        """Return a description without the API key, so that the key never appears in a log."""
        return f"MeteredModelAccess({self.name!r}, {self.base_url!r}, usage={self.usage})"


class EvaluatedSystemAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a system returned for one task item: its answer, or the reason why it failed."""

    answer: str | None = None
    """Answer of the system; None if it gave none."""
    failure: str = ""
    """Sentence that says why the answer is missing; empty if there is one."""
    is_late: bool = False
    """True if the system was stopped at its time limit."""
    requests: int | None = None
    """Number of requests to the model that the system reports; None if it does not count them."""
    input_tokens: int | None = None
    """Prompt tokens that the system reports."""
    output_tokens: int | None = None
    """Reply tokens that the system reports."""
    seconds: float = 0.0


class EvaluatedSystem(Protocol):
    """Interface of a question-answering system that can be evaluated on a task.

    The model is reached through a metering proxy.
    """

    name: str
    """Name of the system in tables: ``rlms``, or the program of a command."""

    async def answer(
        self, question: str, context: str, *, seat: MeteredModelAccess
    ) -> EvaluatedSystemAnswer:
        """Return the system's answer to a question about a context.

        A failure is returned as a ``EvaluatedSystemAnswer`` with its reason, and never raised. If
        the call is cancelled, no process is left behind.
        """
        ...
