"""Computes what a plan costs before its first call.

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

from ramify.clients.base import ASSUMED_WINDOW, Client, Price, reasons
from ramify.clients.model_config import Model
from ramify.clients.providers import PriceTable
from ramify.engine.limits import BudgetAmount, Limits, max_request_amount
from ramify.engine.plain_call import MAX_REPAIRS
from ramify.errors import ConfigError
from ramify.plans.value_bounds import PlanStepCalls

_REPAIR_TOKENS = 2_048
"""Bound on the message that shows a leaf the error of its reply, with its markers."""
_REASONING_TOKENS = 16_384
"""Hidden reasoning of one reply, for a model that reasons and no other limit."""
_BYTES_PER_WORD_TOKEN = 4
"""Bytes of English text per token, for the likely cost."""


class PlanModel(msgspec.Struct, frozen=True):
    """The properties of a model on which the cost of a plan depends, such as its price and context
    window."""

    name: str
    window: int
    """Maximum number of tokens in a prompt and its reply together."""
    price: Price | None
    """Dollars per million tokens; None if it is unknown."""
    reasoning_tokens: int = 0
    """Hidden reasoning that each reply may have in addition."""


def look_up_model(model: Any, limits: Limits | None = None) -> PlanModel:
    """Look up the properties of a model without connecting to it. Raises ConfigError if ``model``
    is not a model name, a ``Model`` or a client."""
    name = model if isinstance(model, str) else getattr(model, "name", None)
    if not isinstance(name, str) or not isinstance(model, str | Model | Client):
        raise ConfigError(
            f"{model!r:.80} is not a model: give 'provider:model', a ramify.Model(…) or a client"
        )
    table = PriceTable.load()
    price = getattr(model, "price", None) or table.price(name)
    window = getattr(model, "window", None) or table.window(name) or ASSUMED_WINDOW
    most = limits.max_reasoning_tokens if limits is not None else None
    reasoning = most if most is not None else _REASONING_TOKENS if reasons(name) else 0
    return PlanModel(name, window, price, reasoning)


class CallBound(msgspec.Struct, frozen=True):
    """An upper bound on the number, tokens and dollars of some model calls."""

    calls: int
    input_tokens: int
    output_tokens: int
    dollars: float | None
    """None if the model has no price."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens


class PlanCost(msgspec.Struct, frozen=True):
    """The maximum cost of a plan: its calls, tokens and dollars."""

    calls: int
    is_exact: bool
    """Whether it takes exactly that many calls, if no leaf fails; otherwise at most."""
    input_tokens: int
    """Upper bound."""
    output_tokens: int
    """Upper bound, with hidden reasoning."""
    dollars: float | None
    """Upper bound; None if the model has no price."""
    retries: CallBound
    """Bound on what is added if every reply is rejected as often as possible. Attempts that were
    lost on the way are not in it: the run's limits bound them."""
    steps: tuple[PlanStepCalls, ...]
    """The steps that ask, in order."""

    @property
    def tokens(self) -> int:
        return self.input_tokens + self.output_tokens

    def likely_dollars(self, model: PlanModel) -> float | None:
        """Return the likely cost in dollars if the text is English and all replies have full
        length."""
        return _dollars(self.input_tokens // _BYTES_PER_WORD_TOKEN, self.output_tokens, model)

    def rounds(self, concurrency: int = 64) -> int:
        """Return how many rounds of calls the plan needs if ``concurrency`` calls run at a time."""
        if concurrency < 1:
            raise ConfigError(f"concurrency={concurrency}: give 1 or more")
        return sum(math.ceil(wave / concurrency) for step in self.steps for wave in step.waves)

    def seconds(self, call_s: float, concurrency: int = 64) -> float:
        """Return the seconds until the answer if each call takes ``call_s`` seconds and none is
        repeated."""
        return self.rounds(concurrency) * call_s

    def check(self, budget: BudgetAmount, *, is_rest: bool = False) -> None:
        """Raise ConfigError if the plan may need more calls, tokens or dollars than a budget
        allows. The error states both numbers. ``is_rest`` says that the budget is the unused part
        of a run's limits, which changes the advice in the error."""
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


def cost_of(steps: Sequence[PlanStepCalls], model: PlanModel) -> PlanCost:
    """Return the cost of the steps of a plan with a model. Raises ConfigError if a prompt and its
    reply may not fit the model's context window."""
    for step in steps:
        # A prompt's bytes bound its tokens; a third of them is what the parts are measured in.
        likely = math.ceil(step.largest_input / 3) + step.largest_output
        if likely > model.window:
            raise ConfigError(
                f"{step.step}: a prompt of {step.largest_input:,} bytes and a reply of "
                f"{step.largest_output:,} tokens do not fit the {model.window:,} tokens of "
                f"{model.name}: give smaller parts"
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
    return PlanCost(calls, is_exact, given, output, dollars, retries, tuple(steps))


def _dollars(input_tokens: int, output_tokens: int, model: PlanModel) -> float | None:
    return (
        None
        if model.price is None
        else max_request_amount(input_tokens, output_tokens, model.price).cost
    )
