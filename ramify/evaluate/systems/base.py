"""The interface of a system that answers the items of a task, and its metered access to the model
(a seat).

    item ──> System.answer(question, context, seat=…) ──> SystemAnswer ──score──> AttemptOutcome
                          │
                          └─ POST seat.base_url/chat/completions, seat.key ──> meter ──> the model

All systems ask the same model through a meter (``serve/meter.py``), with separate access for each
item. The meter counts the requests, tokens and dollars of that access, and refuses a request that
would exceed its budget. The counts made by a system itself are kept beside those of the meter, but
nothing is decided by them.
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


class ModelAccessBudget(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True
):
    """The most that a system may spend on one item. None means no limit."""

    max_calls: int | None = None
    """Requests to the model."""
    max_tokens: int | None = None
    """Input and output tokens of all requests."""
    max_cost: float | None = None
    """Dollars."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"a budget of {name}={value} allows nothing: give more than 0")

    def limits(self) -> Limits:
        """Convert this budget to the limits of the engine's ledger, which counts what was spent."""
        return Limits(
            max_calls=self.max_calls or _MANY,
            max_tokens=self.max_tokens or _MANY,
            max_cost=self.max_cost or math.inf,
        )


_MANY = 1 << 62
NO_LIMIT = ModelAccessBudget()


class MeteredModelAccess:
    """The access to the model that a system gets for one item: a base URL, a key for this item
    alone, and the count of what was spent."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        key: str,
        model: str,
        window: int,
        budget: ModelAccessBudget,
        price: Price | None,
    ) -> None:
        """Create the access for one item. The key is valid until ``cancel_requests`` is called.
        ``window`` (in tokens) and ``price`` are those of the model."""
        self.name = name
        self.base_url = base_url
        """Base URL for clients of OpenAI's APIs, which ends with ``/v1``."""
        self.key = key
        self.model = model
        """Name of the model in requests. A request with any other name is answered by it, too."""
        self.window = window
        self.price = price
        self.budget = budget
        self.ledger = BudgetLedger(budget.limits(), priced=price is not None, owner="item")
        """What was spent of the budget, and what is reserved."""
        self.num_requests = 0
        """Requests that arrived, including those that were refused."""
        self.num_refused = 0
        """Requests that were refused because they would have passed the budget."""
        self.refusal = ""
        """Sentence of the first such request; empty if there was none."""
        self.exhausted: Stop | None = None
        """Limit that this request would have passed."""
        self.outage = ""
        """Failure of the last request that a retry could have repaired; empty if there was
        none."""
        self._answering: set[asyncio.Task[Any]] = set()

    @property
    def usage(self) -> Usage:
        """The requests and tokens so far, as counted by the meter."""
        return self.ledger.usage

    @property
    def cost(self) -> float | None:
        """The dollars spent so far, or None if the model has no known price."""
        return self.ledger.cost

    def record_refusal(self, sentence: str, limit: Stop) -> None:
        """Count a request that was refused because it would have exceeded a limit. The reason for
        the first one is kept."""
        self.num_refused += 1
        if self.exhausted is None:
            self.refusal, self.exhausted = sentence, limit

    @contextmanager
    def track_request(self) -> Iterator[None]:
        """Register the current task, while the block runs, as one that is answering a request.
        ``cancel_requests`` cancels the registered tasks."""
        task = asyncio.current_task()
        assert task is not None, "requests are answered in tasks"
        self._answering.add(task)
        try:
            yield
        finally:
            self._answering.discard(task)

    async def cancel_requests(self) -> None:
        """Cancel the requests that are still unanswered, and wait until each has been counted. The
        counts are then final, unless another request begins."""
        for task in self._answering:
            task.cancel()
        if self._answering:
            await asyncio.wait(self._answering)

    def as_model(self) -> Model:
        """Return this access as a model for Ramify's engine, so that the engine's requests go
        through the meter."""
        return Model(
            f"openai:{self.model}",
            base_url=self.base_url,
            api_key=self.key,
            price=self.price,
            window=self.window,
        )

    def __repr__(self) -> str:
        """Return a description without the key, so that the key never appears in a log."""
        return f"MeteredModelAccess({self.name!r}, {self.base_url!r}, usage={self.usage})"


class SystemAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The answer of a system to one item, or the reason why there is none."""

    answer: str | None = None
    """None if it gave none."""
    failure: str = ""
    """Why it gave no answer, as a sentence; empty if it gave one."""
    is_late: bool = False
    """Whether it was ended because its time was over."""
    requests: int | None = None
    """Requests to the model by the system's own count; None if it does not count them."""
    input_tokens: int | None = None
    """Tokens of prompts by the system's own count."""
    output_tokens: int | None = None
    """Tokens of replies by the system's own count."""
    seconds: float = 0.0


class System(Protocol):
    """The interface of a system that answers questions about a context, using a model that it
    reaches through a meter."""

    name: str
    """Its name in tables: ``rlms``, or the program of a command."""

    async def answer(
        self, question: str, context: str, *, seat: MeteredModelAccess
    ) -> SystemAnswer:
        """Answer a question about a context. A failure is returned as a ``SystemAnswer`` with its
        reason and never raised. If the call is cancelled, no process is left behind."""
        ...
