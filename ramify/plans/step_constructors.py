"""The combinators: functions that each give a plan of one step, to be joined by ``|``.

    plans.split("lines") | plans.map(leaf) | plans.concat() | plans.count()

Not here: what the steps do (``asking_steps.py``, ``symbolic_steps.py``).
"""

from __future__ import annotations

from typing import Any, Literal

from ramify.plans.asking_steps import (
    AskLeaf,
    FilterItems,
    LimitFiltersToPreview,
    MapLeaf,
    ReduceTree,
    SplitText,
)
from ramify.plans.leaf import Leaf
from ramify.plans.plan import Plan, RunTwoPlans
from ramify.plans.predicates import Comparison, Pattern, Relevance
from ramify.plans.symbolic_steps import (
    AggregateField,
    ConcatLists,
    CountValues,
    DistinctValues,
    HistogramOfCounts,
    JoinRecords,
    PairFieldValues,
    SetOperation,
    TakeField,
    TakeMaxItem,
    TopItems,
    TruncateDates,
)
from ramify.plans.text_parts import By


def split(by: By = "lines", tokens: int = 4000, **options: Any) -> Plan:
    """Cut the context into parts: see ``SplitText``.

    >>> plans.split("lines", 2000, max_records=50).steps[0].shown()
    'split by lines, at most 2,000 tokens, 50 at most in one'
    """
    return Plan((SplitText(by, tokens, **options),))


def peek(tokens: int = 500) -> Plan:
    """Let the filters that follow read only the beginning of each part.

    >>> print(plans.peek(300).steps[0].shown())
    peek at 300 tokens
    """
    return Plan((LimitFiltersToPreview(tokens),))


def map(leaf: Leaf) -> Plan:
    """Ask ``leaf`` about each item.

    >>> plans.map(plans.Leaf("Summarise.", label="sum up")).steps[0].shown()
    'map sum up'
    """
    return Plan((MapLeaf(leaf),))


def filter(predicate: Pattern | Relevance | Comparison | Leaf) -> Plan:
    """Keep the items for which the predicate is true.

    >>> plans.filter(plans.Pattern("error|failed")).steps[0].shown()
    'filter: /error|failed/'
    """
    return Plan((FilterItems(predicate),))


def ask(leaf: Leaf) -> Plan:
    """Ask ``leaf`` once about the whole value.

    >>> plans.ask(plans.Leaf("Answer: {question}", label="answer")).steps[0].shown()
    'ask answer'
    """
    return Plan((AskLeaf(leaf),))


def reduce(leaf: Leaf) -> Plan:
    """Let ``leaf`` merge all items to one, in a tree of bounded fan-in.

    >>> plans.reduce(plans.Leaf("Merge.", label="merge")).steps[0].shown()
    'reduce merge'
    """
    return Plan((ReduceTree(leaf),))


def both(left: Plan, right: Plan) -> Plan:
    """Run two plans on one value, for ``join`` or ``combine``.

    >>> str(plans.both(plans.count("user"), plans.total("price")).type)
    'pair of counts and number'
    """
    return Plan((RunTwoPlans(left, right),))


def concat() -> Plan:
    """Join lists to one list, or texts to one text.

    >>> plans.concat().steps[0].apply([["a"], ["b"]])
    ['a', 'b']
    """
    return Plan((ConcatLists(),))


def cross(
    key: str = "",
    left: Comparison | None = None,
    right: Comparison | None = None,
    *,
    ordered: bool = False,
) -> Plan:
    """Return a plan that pairs the values of field ``key``: each value of an item that meets the
    condition ``left`` with each value of an item that meets ``right``.

    >>> plans.cross("user", plans.Comparison("age", ">", 60)).steps[0].shown()
    'cross user (age > 60 × any)'
    """
    return Plan((PairFieldValues(key, left, right, ordered),))


def best(by: str = "") -> Plan:
    """Take the item with the highest value of a field.

    >>> plans.best("score").steps[0].apply([{"score": 1}, {"score": 3}])
    {'score': 3}
    """
    return Plan((TakeMaxItem(by),))


def field(name: str) -> Plan:
    """Take one field of a record, or of each record of a list.

    >>> plans.field("user").steps[0].apply({"user": "a"})
    'a'
    """
    return Plan((TakeField(name),))


def count(*by: str) -> Plan:
    """Count the values of fields.

    >>> plans.count("day").steps[0].apply([{"day": "Mon"}, {"day": "Mon"}])
    {'Mon': 2}
    """
    return Plan((CountValues(by),))


def spread() -> Plan:
    """Count how many values have each count.

    >>> plans.spread().steps[0].apply({"ham": 2, "spam": 2, "eggs": 1})
    {'2': 2, '1': 1}
    """
    return Plan((HistogramOfCounts(),))


def total(field: str = "", how: Literal["sum", "mean", "min", "max"] = "sum") -> Plan:
    """Add up the numbers of a field.

    >>> plans.total("n", "mean").steps[0].apply([{"n": 1}, {"n": 2}])
    1.5
    """
    return Plan((AggregateField(field, how),))


def top(k: int, by: str = "") -> Plan:
    """Keep the ``k`` highest.

    >>> plans.top(1).steps[0].apply({"ham": 1, "spam": 2})
    {'spam': 2}
    """
    return Plan((TopItems(k, by),))


def distinct(field: str = "") -> Plan:
    """Take the set of the values of a field.

    >>> plans.distinct().steps[0].apply(["b", "a", "b"])
    ['a', 'b']
    """
    return Plan((DistinctValues(field),))


def combine(how: Literal["union", "intersection", "difference"]) -> Plan:
    """Combine the two lists of ``both`` as sets.

    >>> plans.combine("union").steps[0].apply((["a"], ["b"]))
    ['a', 'b']
    """
    return Plan((SetOperation(how),))


def join(on: str) -> Plan:
    """Join the records of the two lists of ``both``.

    >>> plans.join("id").steps[0].apply(([{"id": 1, "a": 2}], [{"id": 1, "b": 3}]))
    [{'id': 1, 'a': 2, 'b': 3}]
    """
    return Plan((JoinRecords(on),))


def periods(field: str = "", per: Literal["day", "week", "month", "year"] = "day") -> Plan:
    """Replace dates by their day, week, month or year.

    >>> plans.periods("", "month").steps[0].apply(["May 3, 2024"])
    ['2024-05']
    """
    return Plan((TruncateDates(field, per),))
