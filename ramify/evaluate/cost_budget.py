"""Limit the total cost in dollars of all attempts of an evaluation.

    held = await budget.hold()                None: too little is left
    attempt(…, max_cost=held)                 the attempt may spend at most this
    budget.settle(held, cost)

Before an attempt begins, the most that it may spend is reserved; when it has ended, its actual cost
is counted instead. The sum of spent and reserved dollars never exceeds the limit, however many
attempts run at once. If too little is left, a new attempt waits as long as running attempts may
still return part of their reservations. The limit of a single attempt is enforced elsewhere, by
``engine/limits.py``.
"""

from __future__ import annotations

import asyncio

from ramify.errors import ConfigError
from ramify.format_quantities import format_plain_number

_LEAST = 0.5
"""Minimum fraction of an attempt's usual cost limit that must be left to start it. With less, it
would probably be cut off."""


class CostBudget:
    """A limit in dollars shared by all attempts of an evaluation.

    Each attempt reserves its maximum cost before it begins and is charged its actual cost
    afterwards. An instance may be used in one event loop only.
    """

    def __init__(self, limit: float, per_attempt: float, spent: float = 0.0) -> None:
        """Create a budget of ``limit`` dollars, of which earlier evaluations have already used
        ``spent``.

        ``per_attempt`` is the most that one attempt may spend. Raises ConfigError unless ``limit``
        and ``per_attempt`` are positive.
        """
        if not limit > 0 or not per_attempt > 0:
            raise ConfigError(
                f"a budget of ${format_plain_number(limit, 6)}, with "
                f"${format_plain_number(per_attempt, 6)} for one attempt, "
                "allows nothing: give positive numbers"
            )
        self.limit = limit
        self.spent = spent
        self.is_used_up = False
        """True once an attempt has been refused because too little of the budget is left."""
        self._per_attempt = min(per_attempt, limit)
        self._held = 0.0
        self._freed = asyncio.Event()

    async def reserve(self) -> float | None:
        """Reserve money for the next attempt, and return how much, or None if too little is left.

        Waits while running attempts still hold reservations, since they may return enough.
        """
        while True:
            left = self.limit - self.spent - self._held
            amount = min(self._per_attempt, left)
            # With nothing reserved, waiting frees no dollars: the rest is used if it may be enough.
            is_last = self._held <= 0 and amount >= _LEAST * self._per_attempt
            if amount >= self._per_attempt * (1 - 1e-9) or is_last:
                self._held += amount
                return amount
            if self._held <= 0:
                self.is_used_up = True
                return None
            self._freed.clear()
            await self._freed.wait()

    def was_reservation_reduced(self, held: float) -> bool:
        """Return True if less than the usual amount of dollars was reserved for an attempt.

        If it was then stopped for reaching that amount, its result says nothing about the model.
        """
        return held < self._per_attempt * (1 - 1e-9)

    def settle(self, held: float, cost: float) -> None:
        """Replace the dollars reserved for an attempt with its actual cost."""
        self._held = max(0.0, self._held - held)
        if self._held < 1e-9 * self.limit:
            self._held = 0.0  # a rounding error must not keep other attempts waiting
        self.spent += cost
        self._freed.set()
