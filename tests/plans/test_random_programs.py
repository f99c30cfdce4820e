"""Random programs of every kind of step, over contexts of up to 150,000 characters: a plan that is
not refused ends, within its bound."""

from __future__ import annotations

from collections.abc import Callable

import hypothesis
from hypothesis import strategies as st

from ramify import ConfigError, Limits, Stop, plans
from ramify.plans.text_parts import By
from tests.plans.helpers import LABELS, QUESTION, answered, lines

MOST_CALLS = 1_000
"""A program with a larger bound is not run."""
RECORD = {
    "type": "object",
    "properties": {"key": {"type": "string"}, "n": {"type": "integer"}, "is": {"type": "boolean"}},
    "required": ["key", "n", "is"],
}


def steps_of(tokens: int, reply_tokens: int) -> dict[str, Callable[[], plans.Plan]]:
    """Name -> a step. Leaves read ``tokens`` and reply with ``reply_tokens``."""
    text = plans.Leaf("Read {question}", None, tokens, reply_tokens)
    yes = plans.Leaf("Is it?", {"type": "boolean"}, tokens, 16)
    label = plans.Leaf("Label each.", {"enum": LABELS}, tokens, 16, each=True)
    record = plans.Leaf("Fill in.", RECORD, tokens, max(32, reply_tokens))
    each = plans.Leaf("Fill in each.", RECORD, tokens, max(32, reply_tokens), each=True)
    number = plans.Leaf("How many?", {"type": "integer"}, tokens, 16)
    return {
        "filter": lambda: plans.filter(yes),
        "peek": lambda: plans.peek(30),
        "regex": lambda: plans.filter(plans.Pattern("spam|read 3")),
        "compare": lambda: plans.filter(plans.Comparison("n", ">=", 3)),
        "map": lambda: plans.map(text),
        "label": lambda: plans.map(label) | plans.concat(),
        "records": lambda: plans.map(record),
        "each": lambda: plans.map(each) | plans.concat(),
        "numbers": lambda: plans.map(number),
        "reduce": lambda: plans.reduce(text),
        "concat": plans.concat,
        "ask": lambda: plans.ask(text),
        "count": lambda: plans.count("key"),
        "counts": plans.count,
        "top": lambda: plans.top(3),
        "best": lambda: plans.best("n"),
        "total": lambda: plans.total("n", "mean"),
        "distinct": lambda: plans.distinct("key"),
        "field": lambda: plans.field("key"),
        "cross": lambda: plans.cross("key", ordered=True),
        "union": lambda: (
            plans.both(plans.field("key"), plans.distinct("key")) | plans.combine("union")
        ),
        "both": lambda: plans.both(plans.map(yes), plans.map(text)),
    }


NAMES = sorted(steps_of(100, 16))


@hypothesis.given(
    names=st.lists(st.sampled_from(NAMES), min_size=1, max_size=8),
    by=st.sampled_from(["lines", "records", "sentences", "tokens"]),
    num=st.integers(1, 3_000),
    tokens=st.integers(60, 4_000),
    reply_tokens=st.integers(16, 100),
)
@hypothesis.settings(deadline=None, max_examples=30)
def test_a_program_that_is_not_refused_ends_within_its_bound(
    names: list[str], by: By, num: int, tokens: int, reply_tokens: int
) -> None:
    steps, context = steps_of(tokens, reply_tokens), lines(num)
    plan = plans.split(by, tokens, cut=True)
    for name in names:
        try:
            plan |= steps[name]()
        except ConfigError:  # it cannot use what the steps before it give
            continue
    try:
        cost = plan.cost(context, "openai:gpt-4.1-mini", QUESTION)
    except ConfigError:
        hypothesis.reject()
    if cost.calls > MOST_CALLS:
        hypothesis.reject()
    limits = Limits(max_calls=MOST_CALLS, max_tokens=10**9)
    result, client = answered(plan, context, limits=limits)
    assert result.stop is Stop.FINAL
    assert len(client.requests) <= cost.calls
    assert not cost.is_exact or len(client.requests) == cost.calls
    assert result.usage.total_tokens <= cost.tokens
