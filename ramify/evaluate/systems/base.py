"""What a system is that answers items of a task, and the seat through which it asks the model.

    item ──> System.answer(question, context, seat=…) ──> SystemAnswer ──score──> AttemptOutcome
                          │
                          └─ POST seat.base_url/chat/completions, seat.key ──> meter ──> the model

All systems ask the same model through a meter (``serve/meter.py``), with one seat for each item.
The meter counts requests, tokens and dollars of a seat in the engine's ledger, and refuses a
request that would pass the seat's budget. A system's own counts are kept beside those of the meter;
nothing is decided by them.
"""

from __future__ import annotations

import math
from typing import Protocol

import msgspec

from ramify.engine.limits import Ledger, Limits
from ramify.errors import ConfigError
from ramify.types.message import Usage
from ramify.types.trajectory import Stop


class SeatBudget(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The most that one seat may spend. None: no limit."""

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
        """The same budget as the limits of a ledger."""
        return Limits(
            max_calls=self.max_calls or _NO_LIMIT,
            max_tokens=self.max_tokens or _NO_LIMIT,
            max_cost=self.max_cost or math.inf,
        )


_NO_LIMIT = 1 << 62


class MeterSeat:
    """The access of one item to the model: an address, its own key, and what was spent."""

    def __init__(
        self,
        name: str,
        *,
        base_url: str,
        key: str,
        model: str,
        window: int,
        budget: SeatBudget,
        is_priced: bool,
    ) -> None:
        """``key`` ends with the seat. ``window`` is that of the model (tokens). ``is_priced``: the
        model has a price."""
        self.name = name
        self.base_url = base_url
        """Base URL for clients of OpenAI's APIs, which ends with ``/v1``."""
        self.key = key
        self.model = model
        """Name of the model in requests. A request with any other name is answered by it, too."""
        self.window = window
        self.budget = budget
        self.ledger = Ledger(budget.limits(), priced=is_priced, owner="item")
        """What was spent of the budget, and what is reserved."""
        self.num_refused = 0
        """Requests that were refused because they would have passed the budget."""
        self.refusal = ""
        """Sentence of the first such request; empty if there was none."""
        self.exhausted: Stop | None = None
        """Limit that this request would have passed."""
        self.outage = ""
        """Last failure of the model that a retry could have repaired; empty if there was none."""

    @property
    def usage(self) -> Usage:
        """Requests and tokens so far, as the meter counts them."""
        return self.ledger.usage

    @property
    def cost(self) -> float | None:
        """Dollars so far; None if the model has no price."""
        return self.ledger.cost

    def __repr__(self) -> str:
        """Without the key."""
        return f"MeterSeat({self.name!r}, {self.base_url!r}, usage={self.usage})"


class SystemAnswer(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a system gave for one item."""

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
    """A system that answers questions over contexts with the model of a seat."""

    name: str
    """Its name in tables: ``rlms``, or the program of a command."""

    async def answer(self, question: str, context: str, *, seat: MeterSeat) -> SystemAnswer:
        """Answer ``question``. A failure of the system is a ``SystemAnswer`` with its reason, never
        an exception. A cancelled call leaves no process behind."""
        ...
