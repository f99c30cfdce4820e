"""Functions that create single-step plans.

The operator ``|`` joins such plans into longer ones.

    plans.split("lines") | plans.map(leaf) | plans.concat() | plans.count()

The steps themselves are in ``asking_steps.py`` and ``model_free_steps.py``.
"""

from __future__ import annotations

from typing import Any, Literal

from ramify.plans.asking_steps import (
    AskEachItem,
    AskWholeValue,
    FilterItems,
    FilterPreviewStep,
    SplitText,
    TreeReduceStep,
)
from ramify.plans.leaf_questions import Leaf
from ramify.plans.model_free_steps import (
    AggregateFieldStep,
    ConcatListsStep,
    CountHistogramStep,
    CountValuesStep,
    DistinctValuesStep,
    JoinRecordsStep,
    PairDistinctValuesStep,
    SetOperation,
    TakeFieldStep,
    TakeMaxItemStep,
    TopItemsStep,
    TruncateDates,
)
from ramify.plans.plan import ApplyBothPlans, Plan
from ramify.plans.predicates import Comparison, Pattern, Relevance
from ramify.plans.text_parts import By


def split(by: By = "lines", tokens: int = 4000, **options: Any) -> Plan:
    """Cut the context into parts of limited size.

    The options are the fields of ``SplitText``.

    >>> plans.split("lines", 2000, max_records=50).steps[0].shown()
    'split by lines, at most 2,000 tokens, 50 at most in one'
    """
    return Plan((SplitText(by, tokens, **options),))


def peek(tokens: int = 500) -> Plan:
    """Limit later filters to the first ``tokens`` tokens of each part of the text.

    >>> print(plans.peek(300).steps[0].shown())
    peek at 300 tokens
    """
    return Plan((FilterPreviewStep(tokens),))


def map(leaf: Leaf) -> Plan:
    """Ask a model the same bounded question (a leaf) about each item of a list.

    >>> plans.map(plans.Leaf("Summarise.", label="sum up")).steps[0].shown()
    'map sum up'
    """
    return Plan((AskEachItem(leaf),))


def filter(predicate: Pattern | Relevance | Comparison | Leaf) -> Plan:
    """Keep the items for which a predicate is true, such as a pattern or a yes-or-no question to a
    model.

    >>> plans.filter(plans.Pattern("error|failed")).steps[0].shown()
    'filter: /error|failed/'
    """
    return Plan((FilterItems(predicate),))


def ask(leaf: Leaf) -> Plan:
    """Ask a model one bounded question (a leaf) about the whole value.

    >>> plans.ask(plans.Leaf("Answer: {question}", label="answer")).steps[0].shown()
    'ask answer'
    """
    return Plan((AskWholeValue(leaf),))


def reduce(leaf: Leaf) -> Plan:
    """Let a model merge all items into one.

    The calls form a tree, and each call reads a limited number of items.

    >>> plans.reduce(plans.Leaf("Merge.", label="merge")).steps[0].shown()
    'reduce merge'
    """
    return Plan((TreeReduceStep(leaf),))


def both(left: Plan, right: Plan) -> Plan:
    """Run two plans on the same value.

    The pair of results can be passed to ``join`` or ``combine``.

    >>> str(plans.both(plans.count("user"), plans.total("price")).type)
    'pair of counts and number'
    """
    return Plan((ApplyBothPlans(left, right),))


def concat() -> Plan:
    """Join a list of lists into one list, or a list of texts into one text.

    >>> plans.concat().steps[0].apply([["a"], ["b"]])
    ['a', 'b']
    """
    return Plan((ConcatListsStep(),))


def cross(
    key: str = "",
    left: Comparison | None = None,
    right: Comparison | None = None,
    *,
    ordered: bool = False,
) -> Plan:
    """Form all pairs of two distinct values of a field.

    The first value is from an item that meets the condition ``left``, and the second from an item
    that meets the condition ``right``.

    >>> plans.cross("user", plans.Comparison("age", ">", 60)).steps[0].shown()
    'cross user (age > 60 × any)'
    """
    return Plan((PairDistinctValuesStep(key, left, right, ordered),))


def best(by: str = "") -> Plan:
    """Take the item that has the highest value of a field.

    >>> plans.best("score").steps[0].apply([{"score": 1}, {"score": 3}])
    {'score': 3}
    """
    return Plan((TakeMaxItemStep(by),))


def field(name: str) -> Plan:
    """Take one field of a record, or of each record in a list.

    >>> plans.field("user").steps[0].apply({"user": "a"})
    'a'
    """
    return Plan((TakeFieldStep(name),))


def count(*by: str) -> Plan:
    """Count how often each value of the given fields occurs.

    >>> plans.count("day").steps[0].apply([{"day": "Mon"}, {"day": "Mon"}])
    {'Mon': 2}
    """
    return Plan((CountValuesStep(by),))


def spread() -> Plan:
    """Build a histogram of counts: how many keys occur once, twice, and so on.

    >>> plans.spread().steps[0].apply({"ham": 2, "spam": 2, "eggs": 1})
    {'2': 2, '1': 1}
    """
    return Plan((CountHistogramStep(),))


def total(field: str = "", how: Literal["sum", "mean", "min", "max"] = "sum") -> Plan:
    """Compute the sum, mean, minimum or maximum of a numeric field over all items.

    >>> plans.total("n", "mean").steps[0].apply([{"n": 1}, {"n": 2}])
    1.5
    """
    return Plan((AggregateFieldStep(field, how),))


def top(k: int, by: str = "") -> Plan:
    """Keep the ``k`` items with the highest values, or the ``k`` keys with the highest counts.

    >>> plans.top(1).steps[0].apply({"ham": 1, "spam": 2})
    {'spam': 2}
    """
    return Plan((TopItemsStep(k, by),))


def distinct(field: str = "") -> Plan:
    """Collect the distinct values that a field has across all items.

    >>> plans.distinct().steps[0].apply(["b", "a", "b"])
    ['a', 'b']
    """
    return Plan((DistinctValuesStep(field),))


def combine(how: Literal["union", "intersection", "difference"]) -> Plan:
    """Combine the two lists in the result of ``both`` by set union, intersection or difference.

    >>> plans.combine("union").steps[0].apply((["a"], ["b"]))
    ['a', 'b']
    """
    return Plan((SetOperation(how),))


def join(on: str) -> Plan:
    """Join the two lists of records that ``both`` returns by their common field ``on``.

    >>> plans.join("id").steps[0].apply(([{"id": 1, "a": 2}], [{"id": 1, "b": 3}]))
    [{'id': 1, 'a': 2, 'b': 3}]
    """
    return Plan((JoinRecordsStep(on),))


def periods(field: str = "", per: Literal["day", "week", "month", "year"] = "day") -> Plan:
    """Replace each date with the day, week, month or year that contains it.

    >>> plans.periods("", "month").steps[0].apply(["May 3, 2024"])
    ['2024-05']
    """
    return Plan((TruncateDates(field, per),))
