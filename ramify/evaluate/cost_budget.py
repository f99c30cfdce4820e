"""A limit in dollars over all attempts of an evaluation.

    async with budget.hold() as dollars:      None: nothing is left
        attempt(…, max_cost=dollars)          may spend at most this

Before an attempt, the most that it may spend is held; afterwards its actual cost counts. The sum of
what was spent and what is held never exceeds the limit, however many attempts run at once. An
attempt waits if others may still give back what they hold. Not here: the limits of one attempt (see
``engine/limits.py``), which a provider can exceed only by what its requests in flight report.
"""

from __future__ import annotations

import asyncio

from ramify.errors import ConfigError

_LEAST = 0.5
"""An attempt that could spend less than this share of its usual limit is not begun: it would most
likely be cut off."""


class CostBudget:
    """Dollars of all attempts. Bound to the event loop of the first ``hold``."""

    def __init__(self, limit: float, per_attempt: float, spent: float = 0.0) -> None:
        """``per_attempt`` is the most that one attempt may spend. ``spent`` was spent earlier.
        Raises ConfigError unless both limits are positive."""
        if not limit > 0 or not per_attempt > 0:
            raise ConfigError(
                f"a budget of ${limit:g}, with ${per_attempt:g} for one attempt, allows nothing: "
                "give positive numbers"
            )
        self.limit = limit
        self.spent = spent
        self.is_used_up = False
        """True once an attempt was refused."""
        self._per_attempt = min(per_attempt, limit)
        self._held = 0.0
        self._freed = asyncio.Event()

    async def hold(self) -> float | None:
        """Hold what the next attempt may spend, and return it; None if too little is left. Waits
        while running attempts may give back enough."""
        while True:
            left = self.limit - self.spent - self._held
            amount = min(self._per_attempt, left)
            is_last = self._held <= 0 and amount >= _LEAST * self._per_attempt
            if amount >= self._per_attempt * (1 - 1e-9) or is_last:
                self._held += amount
                return amount
            if self._held <= 0:
                self.is_used_up = True
                return None
            self._freed.clear()
            await self._freed.wait()

    def is_reduced(self, held: float) -> bool:
        """Whether an attempt held less than the usual limit. If that cut it off, it says nothing
        about the model."""
        return held < self._per_attempt * (1 - 1e-9)

    def settle(self, held: float, cost: float) -> None:
        """Replace what an attempt held by what it cost."""
        self._held = max(0.0, self._held - held)
        if self._held < 1e-9 * self.limit:
            self._held = 0.0  # a rounding error must not keep others waiting
        self.spent += cost
        self._freed.set()
