"""The combinators: functions that each give a plan of one step, to be joined by ``|``.

    plans.split("lines") | plans.map(leaf) | plans.concat() | plans.count()

Not here: what the steps do (``asking_steps.py``, ``symbolic_steps.py``).
"""

from __future__ import annotations

from typing import Any, Literal

from ramify.plans.asking_steps import (
    AskLeaf,
    FilterItems,
    MapLeaf,
    PeekParts,
    ReduceTree,
    SplitText,
)
from ramify.plans.leaf import Leaf
from ramify.plans.plan import BothPlans, Plan
from ramify.plans.predicates import Comparison, Pattern, Relevance
from ramify.plans.symbolic_steps import (
    BestItem,
    CombineLists,
    ConcatLists,
    CountValues,
    CrossPairs,
    DatePeriods,
    DistinctValues,
    JoinRecords,
    TakeField,
    TopItems,
    TotalField,
)
from ramify.plans.text_parts import By


def split(by: By = "lines", tokens: int = 4000, **options: Any) -> Plan:
    """Cut the context into parts: see ``SplitText``."""
    return Plan((SplitText(by, tokens, **options),))


def peek(tokens: int = 500) -> Plan:
    """Let the filters that follow read only the beginning of each part."""
    return Plan((PeekParts(tokens),))


def map(leaf: Leaf) -> Plan:
    """Ask ``leaf`` about each item."""
    return Plan((MapLeaf(leaf),))


def filter(predicate: Pattern | Relevance | Comparison | Leaf) -> Plan:
    """Keep the items for which the predicate is true."""
    return Plan((FilterItems(predicate),))


def ask(leaf: Leaf) -> Plan:
    """Ask ``leaf`` once about the whole value."""
    return Plan((AskLeaf(leaf),))


def reduce(leaf: Leaf) -> Plan:
    """Let ``leaf`` merge all items to one, in a tree of bounded fan-in."""
    return Plan((ReduceTree(leaf),))


def both(left: Plan, right: Plan) -> Plan:
    """Run two plans on one value, for ``join`` or ``combine``."""
    return Plan((BothPlans(left, right),))


def concat() -> Plan:
    """Join lists to one list, or texts to one text."""
    return Plan((ConcatLists(),))


def cross(
    key: str = "",
    left: Comparison | None = None,
    right: Comparison | None = None,
    *,
    ordered: bool = False,
) -> Plan:
    """Pair the values of ``key`` of items that satisfy two conditions."""
    return Plan((CrossPairs(key, left, right, ordered),))


def best(by: str = "") -> Plan:
    """Take the item with the highest value of a field."""
    return Plan((BestItem(by),))


def field(name: str) -> Plan:
    """Take one field of a record, or of each record of a list."""
    return Plan((TakeField(name),))


def count(*by: str) -> Plan:
    """Count the values of fields."""
    return Plan((CountValues(by),))


def total(field: str = "", how: Literal["sum", "mean", "min", "max"] = "sum") -> Plan:
    """Add up the numbers of a field."""
    return Plan((TotalField(field, how),))


def top(k: int, by: str = "") -> Plan:
    """Keep the ``k`` highest."""
    return Plan((TopItems(k, by),))


def distinct(field: str = "") -> Plan:
    """Take the set of the values of a field."""
    return Plan((DistinctValues(field),))


def combine(how: Literal["union", "intersection", "difference"]) -> Plan:
    """Combine the two lists of ``both`` as sets."""
    return Plan((CombineLists(how),))


def join(on: str) -> Plan:
    """Join the records of the two lists of ``both``."""
    return Plan((JoinRecords(on),))


def periods(field: str = "", per: Literal["day", "week", "month", "year"] = "day") -> Plan:
    """Replace dates by their day, week, month or year."""
    return Plan((DatePeriods(field, per),))
