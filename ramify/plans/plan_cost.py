"""Computes the cost of a plan before its first model call.

A plan is a fixed sequence of steps, some of which call a model.

    calls of each step, price of the model ──> calls, tokens, dollars, time; retries are separate

The number of calls is exact if it does not depend on the model's replies and no call fails;
otherwise it is an upper bound. Tokens and dollars are always upper bounds: a prompt is counted as
one token per byte, as in the budget of a run, and a reply with its maximum length. English text has
about a quarter as many tokens as bytes. ``value_bounds.py`` determines the calls of each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from ramify.clients.base import ASSUMED_WINDOW, Client, Price, is_reasoning_model
from ramify.clients.model_config import Model
from ramify.clients.providers import PriceTable
from ramify.engine.limits import BudgetAmount, Limits, max_request_amount
from ramify.engine.plain_call import MAX_REPAIRS
from ramify.errors import ConfigError
from ramify.plans.value_bounds import PlannedStepCalls

_REPAIR_TOKENS = 2_048
"""Maximum tokens of the message that shows the model an error in its reply, including the markers
of the chat format."""
_REASONING_TOKENS = 16_384
"""Assumed number of hidden reasoning tokens per reply of a reasoning model for which no limit is
set."""
_BYTES_PER_WORD_TOKEN = 4
"""Bytes of English text per token, for estimating the likely cost."""


class ModelCostProfile(msgspec.Struct, frozen=True):
    """The properties of a model that determine the cost of a plan, such as its price and context
    window."""

    name: str
    window: int
    """Context window in tokens, for a prompt and its reply together."""
    price: Price | None
    """Price in dollars per million tokens, or None if it is unknown."""
    reasoning_tokens: int = 0
    """Maximum number of hidden reasoning tokens per reply."""


def look_up_model(model: Any, limits: Limits | None = None) -> ModelCostProfile:
    """Look up the properties of a model without connecting to it.

    Raises ConfigError unless ``model`` is a model name, a ``Model`` or a client.
    """
    name = model if isinstance(model, str) else getattr(model, "name", None)
    if not isinstance(name, str) or not isinstance(model, str | Model | Client):
        raise ConfigError(
            f"{model!r:.80} is not a model: give 'provider:model', a ramify.Model(…) or a client"
        )
    table = PriceTable.load()
    price = getattr(model, "price", None) or table.price(name)
    window = getattr(model, "window", None) or table.context_window(name) or ASSUMED_WINDOW
    most = limits.max_reasoning_tokens if limits is not None else None
    reasoning = most if most is not None else _REASONING_TOKENS if is_reasoning_model(name) else 0
    return ModelCostProfile(name, window, price, reasoning)


class CallBound(msgspec.Struct, frozen=True):
    """Upper bounds for a set of model calls: their number, their tokens and their cost."""

    calls: int
    input_tokens: int
    output_tokens: int
    dollars: float | None
    """Maximum dollars, or None if the model has no price."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class PlanCostBound(msgspec.Struct, frozen=True):
    """The maximum cost of a plan in calls, tokens and dollars."""

    calls: int
    is_exact: bool
    """True if the plan takes exactly this many calls, provided that none fails. Otherwise the
    number is a maximum."""
    input_tokens: int
    """Maximum number of input tokens."""
    output_tokens: int
    """Maximum number of output tokens, including hidden reasoning."""
    dollars: float | None
    """Maximum cost in dollars, or None if the model has no price."""
    retries: CallBound
    """Maximum additional cost if every reply is rejected and asked for again as often as allowed.
    Attempts lost in transit are not included, because the run's limits bound them."""
    steps: tuple[PlannedStepCalls, ...]
    """The steps that call a model, in order."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def likely_dollars(self, model: ModelCostProfile) -> float | None:
        """Return the likely cost of the plan in dollars.

        English text and replies of full length are assumed.
        """
        return _dollars(self.input_tokens // _BYTES_PER_WORD_TOKEN, self.output_tokens, model)

    def rounds(self, concurrency: int = 64) -> int:
        """Return how many rounds of concurrent model calls the plan needs.

        Up to ``concurrency`` calls run at a time.
        """
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: give 1 or more")
        return sum(math.ceil(wave / concurrency) for step in self.steps for wave in step.waves)

    def seconds(self, call_s: float, concurrency: int = 64) -> float:
        """Estimate the seconds until the answer, if each call takes ``call_s`` and none is
        retried."""
        return self.rounds(concurrency) * call_s

    def check(self, budget: BudgetAmount, *, is_rest: bool = False) -> None:
        """Raise ConfigError if the plan may need more calls, tokens or dollars than a budget
        allows.

        The error states both numbers. Set ``is_rest`` if the budget is the unused part of a run's
        limits, because the advice then differs.
        """
        for needed, most, unit, option in (
            (self.calls, budget.calls, "{:,} calls", "max_calls"),
            (self.tokens, budget.tokens, "{:,} tokens", "max_tokens"),
            (self.dollars or 0.0, budget.cost, "${:,.2f}", "max_cost"),
        ):
            if needed > most * (1 + 1e-9):
                allowed = unit.format(max(0, most))
                raise ConfigError(
                    f"the plan may take {unit.format(needed)}, and {allowed} of the run's {option} "
                    "are left: give less of the text, or larger parts"
                    if is_rest
                    else f"the plan may take {unit.format(needed)}, and the limit is {allowed}: "
                    f"raise {option}, or choose larger parts or another plan"
                )


def cost_of(steps: Sequence[PlannedStepCalls], model: ModelCostProfile) -> PlanCostBound:
    """Return the cost of running a plan's steps with a model.

    Raises ConfigError if a prompt and its reply may exceed the model's context window.
    """
    for step in steps:
        # A prompt's bytes bound its tokens; a third of them is what the parts are measured in.
        likely = math.ceil(step.largest_input / 3) + step.largest_output
        if likely > model.window:
            raise ConfigError(
                f"{step.step}: a prompt of {step.largest_input:,} bytes and a reply of "
                f"{step.largest_output:,} tokens do not fit the window of {model.name} "
                f"({model.window:,} tokens): make the parts smaller"
            )
    calls = sum(step.calls for step in steps)
    output = sum(step.output_tokens + step.calls * model.reasoning_tokens for step in steps)
    given = sum(step.input_tokens for step in steps)
    repaired_input = MAX_REPAIRS * given
    for step in steps:
        reply = step.largest_output + model.reasoning_tokens
        repaired_input += step.calls * 3 * (reply + _REPAIR_TOKENS)  # after one and two replies
    retries = CallBound(
        MAX_REPAIRS * calls,
        repaired_input,
        MAX_REPAIRS * output,
        _dollars(repaired_input, MAX_REPAIRS * output, model),
    )
    is_exact = all(step.is_exact for step in steps)
    dollars = _dollars(given, output, model)
    return PlanCostBound(calls, is_exact, given, output, dollars, retries, tuple(steps))


def _dollars(input_tokens: int, output_tokens: int, model: ModelCostProfile) -> float | None:
    return (
        None
        if model.price is None
        else max_request_amount(input_tokens, output_tokens, model.price).cost
    )
