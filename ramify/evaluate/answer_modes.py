"""Define the answer modes of an evaluation: the ways in which a model can answer a task item.

    direct    one plain call with the question and the whole context; an item that is longer than
              the model's window is not asked, and scores 0
    free      a session, in which the model writes code and calls models
    plan      the ready-made plan that fits the wording of the question
    auto      one of them, chosen by rules and at most one call

A mode is a function like ``attempt`` (see attempt.py), and is looked up by its name. Modes of other
systems are defined elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from ramify.clients.base import Price
from ramify.engine.observation_messages import count_context_chars
from ramify.engine.question import ALWAYS
from ramify.engine.rlm import RLM
from ramify.errors import ConfigError, did_you_mean
from ramify.evaluate.attempt import DOES_NOT_FIT, attempt
from ramify.evaluate.run_evaluation import AttemptFunction
from ramify.tasks.base import Item, RolloutInitialState, Task
from ramify.types.trajectory import Trajectory

CHARS_PER_TOKEN = 4
"""Characters per token that are assumed when a suite's lengths are set, and when it is decided
whether an item fits the window."""
_PROMPT_TOKENS = 200
"""Tokens that a plain call adds to the question and the context."""


class PlainCallModelLimits(msgspec.Struct, frozen=True):
    """The context window, reply limit and price of a model in a plain call."""

    window: int
    """Context window, in tokens."""
    reply: int
    """Tokens of the window kept for the reply."""
    price: Price | None

    @property
    def is_free(self) -> bool:
        """True if the model is known to cost nothing."""
        return self.price is not None and not (self.price.input or self.price.output)

    def fits(self, tokens: int) -> bool:
        """Return True if ``tokens`` tokens of question and context fit into one plain call."""
        return tokens + _PROMPT_TOKENS + self.reply <= self.window

    def max_cost(self, tokens: int) -> float | None:
        """Return an upper bound on the dollar cost of one plain call without retries.

        Return None if the model has no price. As in budget reservations, each byte counts as a
        token.
        """
        if self.price is None:
            return None
        rates = (self.price.input, self.price.cached, self.price.cache_write)
        bytes_read = CHARS_PER_TOKEN * (tokens + _PROMPT_TOKENS)
        read = bytes_read * max(rate for rate in rates if rate is not None)
        return (read + self.reply * self.price.output) / 1e6


async def root_model_spec(rlm: RLM) -> PlainCallModelLimits:
    """Return the context window, reply limit and price of the root call's model.

    The model is not called.
    """
    async with rlm.direct_calls(rlm.limits) as calls:
        window = calls.client.window
        # A reply limit as long as a small window would leave no room for a prompt.
        return PlainCallModelLimits(
            window, min(calls.max_reply_tokens, window // 4), calls.client.price
        )


async def answer_directly(rlm: RLM, task: Task, item: Item, **options: Any) -> Trajectory:
    """Attempt a task item with one plain model call.

    If the item does not fit the model's window, the model is not called.
    """
    room = await root_model_spec(rlm)

    def unfit(start: RolloutInitialState) -> str:
        chars = len(item.question) + (
            0 if start.context is None else count_context_chars(start.context)
        )
        return "" if room.fits(-(-chars // CHARS_PER_TOKEN)) else DOES_NOT_FIT

    return await attempt(rlm, task, item, **{**options, "direct": ALWAYS, "refuse": unfit})


async def answer_in_session(rlm: RLM, task: Task, item: Item, **options: Any) -> Trajectory:
    """Attempt a task item in a Python session, in which the model writes code and calls models."""
    return await attempt(rlm, task, item, **{**options, "direct": False})


async def answer_by_plan(rlm: RLM, task: Task, item: Item, **options: Any) -> Trajectory:
    """Attempt a task item with the predefined plan that fits the wording of its question."""
    return await attempt(rlm, task, item, **{**options, "mode": "plan"})


async def answer_automatically(rlm: RLM, task: Task, item: Item, **options: Any) -> Trajectory:
    """Attempt a task item in the mode that is chosen automatically for its question."""
    return await attempt(rlm, task, item, **{**options, "mode": "auto"})


MODES: Mapping[str, AttemptFunction] = {
    "direct": answer_directly,
    "free": answer_in_session,
    "plan": answer_by_plan,
    "auto": answer_automatically,
}
"""Name of a mode -> its function."""


def mode_function(name: str) -> AttemptFunction:
    """Return the function that attempts a task item in the answer mode ``name``.

    Raises ConfigError for an unknown name.
    """
    if name not in MODES:
        raise ConfigError(f"unknown mode '{name}': {did_you_mean(name, MODES)}")
    return MODES[name]
