"""The steps of a plan that compute their result without a model: counts, sums, maxima, sets, joins,
dates and pairs.

    ["spam", "ham", "spam"]                    ──count──>    {"spam": 2, "ham": 1}
    [{"user": "a"}, {"user": "b"}]             ──cross──>    [["a", "b"]]
    [{"day": "2024-05-01"}]                    ──periods──>  [{"day": "2024-05"}]

A value None stands for a record about which the model call failed; it is not counted. The steps
that ask a model are in ``asking_steps.py``.
"""

from __future__ import annotations

import datetime
import itertools
import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from ramify.errors import ConfigError
from ramify.plans.leaf_questions import render_for_prompt
from ramify.plans.plan_leaf_runner import PlanLeafRunner
from ramify.plans.plan_step import PlanStep
from ramify.plans.predicates import Comparison, field_value
from ramify.plans.text_parts import ContextPart, num_bytes
from ramify.plans.value_bounds import (
    MAX_ITEMS,
    PlannedModelCalls,
    PlanValueBounds,
    known_value_bounds,
    reply_bounds,
)
from ramify.plans.value_types import (
    ANY,
    COUNTS,
    DATE,
    NUMBER,
    TEXT,
    PlanValueType,
    check_field_values,
    list_of,
    pair_of,
)

MAX_PAIRS = 5_000_000
"""Maximum number of results of a step that pairs or joins items, such as ``cross``. More results
are an error."""
_NUMBER_BYTES = 32
_FORMATS = ("%Y/%m/%d", "%b %d, %Y", "%B %d, %Y", "%d %b %Y", "%d %B %Y", "%Y-%m-%dT%H:%M:%S")
_PERIODS = {"day": "%Y-%m-%d", "week": "%G-W%V", "month": "%Y-%m", "year": "%Y"}


class ModelFreeStep(PlanStep, frozen=True):
    """A step of a plan that computes its result without asking a model."""

    def apply(self, value: Any) -> Any:
        """Compute the result of this plan step for a value."""
        raise NotImplementedError

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        """Return size bounds on this step's result for an input that depends on model replies.

        ``shape`` gives the bounds of the input, and ``given`` its type.
        """
        raise NotImplementedError

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        """Estimate the size bounds of this step's result before the plan runs.

        If the input is already known, the result is computed. ``shape`` gives the bounds of the
        input, and ``given`` its type. The step makes no model calls, so ``sheet`` is not changed.
        """
        return (
            known_value_bounds(self.apply(shape.value))
            if shape.is_known
            else self.output_bounds(shape, given)
        )

    async def run(self, value: Any, flow: PlanLeafRunner, shape: PlanValueBounds) -> Any:
        """Compute the result of this step in a thread, so that the event loop is not blocked."""
        return await flow.run_in_thread(self.apply, value)


class ConcatListsStep(ModelFreeStep, frozen=True, tag="concat"):
    """A step that joins a list of lists into one list, or strings or text parts into one string.

    >>> plans.ConcatListsStep().apply([["a"], ["b", "c"]])
    ['a', 'b', 'c']
    """

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        if item.kind == "list":
            return item
        if item.kind in ("text", "part"):
            return TEXT
        if item.kind == "any":
            return ANY
        raise ConfigError(f"concat needs lists or texts, but got {given}")

    def apply(self, value: list[Any]) -> Any:
        if any(isinstance(each, list) for each in value):
            return [item for each in value if each is not None for item in each]
        return render_for_prompt([each for each in value if each is not None]) if value else ""

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        if shape.inner:
            return reply_bounds(shape.inner, shape.item_bytes, shape.total_bytes, is_exact=False)
        return reply_bounds(1, shape.max_bytes)


class PairDistinctValuesStep(ModelFreeStep, frozen=True, tag="cross"):
    """A step that forms all pairs of different values of a field.

    The first value comes from an item that meets the condition ``left``, and the second from one
    that meets ``right``; without conditions, all items are used.

    >>> plans.PairDistinctValuesStep("user").apply([{"user": "b"}, {"user": "a"}])
    [['a', 'b']]
    """

    key: str = ""
    """Field whose values are paired. Empty means the items themselves."""
    left: Comparison | None = None
    """Condition on the item of the first value. None accepts all items."""
    right: Comparison | None = None
    ordered: bool = False
    """True to treat (a, b) and (b, a) as two pairs. If False, the conditions may be met in either
    order."""

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        key = item.field_type(self.key, self.title)
        for condition in filter(None, (self.left, self.right)):
            kind = condition.infer_output_type(item, self.title)
            if kind.kind not in ("boolean", "any"):
                raise ConfigError(
                    f"cross: the condition {condition} must give a boolean, but gives {kind}"
                )
        return list_of(pair_of(key, key))

    def apply(self, value: list[Any]) -> list[list[Any]]:
        first, second = (
            self._matching_keys(value, self.left),
            self._matching_keys(value, self.right),
        )
        if len(first) * len(second) > MAX_PAIRS:
            raise ConfigError(
                f"cross would give {len(first) * len(second):,} pairs, and at most {MAX_PAIRS:,} "
                "are kept: filter first"
            )
        pairs = {(a, b) for a in first for b in second if a != b}
        if not self.ordered:
            pairs = {(min(pair, key=str), max(pair, key=str)) for pair in pairs}
        return [list(pair) for pair in sorted(pairs, key=lambda pair: tuple(map(str, pair)))]

    def _matching_keys(self, items: list[Any], condition: Comparison | None) -> list[Any]:
        items = [item for item in items if item is not None]
        if condition is not None:
            verdicts = condition.keep_mask(items)
            items = [item for item, is_in in zip(items, verdicts, strict=True) if is_in]
        keys = (_to_hashable(field_value(item, self.key)) for item in items)
        return list(dict.fromkeys(key for key in keys if key is not None))

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        num = min(shape.num**2, MAX_PAIRS)
        return reply_bounds(num, 2 * shape.item_bytes + _NUMBER_BYTES, is_exact=False)

    def shown(self) -> str:
        conditions = " × ".join(str(each or "any") for each in (self.left, self.right))
        return f"cross {self.key or 'items'} ({conditions})"


class TakeMaxItemStep(ModelFreeStep, frozen=True, tag="best"):
    """A step that takes the item with the highest value of a field.

    Of several such items, it takes the first.

    >>> plans.TakeMaxItemStep("score").apply([{"score": 1}, {"score": 3}])
    {'score': 3}
    """

    by: str = ""

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        _check_number(item.field_type(self.by, self.title), self.title)
        return item

    def apply(self, value: list[Any]) -> Any:
        ranked = [(finite_number_at(item, self.by), item) for item in value]
        rated = [(rank, item) for rank, item in ranked if rank is not None]
        return max(rated, key=lambda each: each[0])[1] if rated else None

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return reply_bounds(1, shape.item_bytes)

    def shown(self) -> str:
        return f"best by {self.by or 'value'}"


class TakeFieldStep(ModelFreeStep, frozen=True, tag="field"):
    """A step that takes one field of a record, or of each record in a list.

    >>> plans.field("user").steps[0].apply([{"user": "a"}, {"user": "b"}])
    ['a', 'b']
    """

    name: str

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        if given.kind == "list" and given.item is not None:
            return list_of(given.item.field_type(self.name, self.title))
        return given.field_type(self.name, self.title)

    def apply(self, value: Any) -> Any:
        if isinstance(value, list):
            return [field_value(item, self.name) for item in value]
        return field_value(value, self.name)

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return msgspec.structs.replace(shape, value=None)

    def shown(self) -> str:
        return f"field {self.name}"


class CountValuesStep(ModelFreeStep, frozen=True, tag="count"):
    """A step that counts how often each value of one or more fields occurs.

    The most frequent value is first.

    >>> plans.CountValuesStep().apply(["ham", "spam", "spam"])
    {'spam': 2, 'ham': 1}
    """

    by: tuple[str, ...] = ()
    """Fields that are counted together. Empty means the items themselves."""

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        for name in self.by or ("",):
            field = item.field_type(name, self.title)
            if field.kind in ("record", "list", "pair", "counts", "part"):
                raise ConfigError(f"count needs plain values, but got {field}: name its fields")
        return COUNTS

    def apply(self, value: list[Any]) -> dict[str, int]:
        keys = ([field_value(item, name) for name in self.by or ("",)] for item in value)
        named = (" | ".join(map(_text_or_json, key)) for key in keys if None not in key)
        return dict(sorted(Counter(named).items(), key=lambda each: (-each[1], each[0])))

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        fields = [
            given.item_type(self.title).field_type(name, self.title) for name in self.by or ("",)
        ]
        num, key_bytes = shape.num, shape.item_bytes + 3 * len(fields)
        if all(field.labels for field in fields):
            num = min(num, math.prod(len(field.labels) for field in fields))
            key_bytes = sum(max(map(num_bytes, field.labels)) + 3 for field in fields)
        return reply_bounds(num, key_bytes + _NUMBER_BYTES, is_exact=False)

    def shown(self) -> str:
        return f"count {' and '.join(self.by) or 'values'}"


class CountHistogramStep(ModelFreeStep, frozen=True, tag="spread"):
    """A step that makes a histogram of counts: how many values occur once, how many twice, and so
    on.

    >>> plans.CountHistogramStep().apply({"ham": 2, "spam": 2, "eggs": 1})
    {'2': 2, '1': 1}
    """

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        if given.kind not in ("counts", "any"):
            raise ConfigError(f"spread needs counts, but got {given}: put count before it")
        return COUNTS

    def apply(self, value: dict[str, int]) -> dict[str, int]:
        return {str(count): num for count, num in Counter(value.values()).most_common()}

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return reply_bounds(shape.num, 2 * _NUMBER_BYTES, is_exact=False)


class AggregateFieldStep(ModelFreeStep, frozen=True, tag="total"):
    """A step that computes the sum, mean, minimum or maximum of a numeric field.

    The field is read from all items.

    >>> plans.AggregateFieldStep("price").apply([{"price": 2}, {"price": 3.5}])
    5.5
    """

    field: str = ""
    how: Literal["sum", "mean", "min", "max"] = "sum"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        _check_number(item.field_type(self.field, self.title), self.title)
        return NUMBER

    def apply(self, value: list[Any]) -> float | int | None:
        numbers = [n for item in value if (n := finite_number_at(item, self.field)) is not None]
        if self.how == "sum":
            is_whole = all(isinstance(number, int) for number in numbers)
            return sum(numbers) if is_whole else math.fsum(numbers)
        if not numbers:
            return None
        if self.how == "mean":
            return math.fsum(numbers) / len(numbers)
        return min(numbers) if self.how == "min" else max(numbers)

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return reply_bounds(1, _NUMBER_BYTES)

    def shown(self) -> str:
        return f"{self.how} of {self.field or 'values'}"


class TopItemsStep(ModelFreeStep, frozen=True, tag="top"):
    """A step that keeps the ``k`` highest counts, or the ``k`` highest records by a field.

    >>> plans.TopItemsStep(1).apply({"ham": 1, "spam": 2})
    {'spam': 2}
    """

    k: int
    by: str = ""

    def __post_init__(self) -> None:
        check_field_values(self, self.title)
        if self.k < 1:
            raise ConfigError(f"top: k={self.k!r:.40}: give 1 or more")

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        if given.kind in ("counts", "any"):
            return given
        item = given.item_type(self.title)
        _check_number(item.field_type(self.by, self.title), self.title)
        return given

    def apply(self, value: Any) -> Any:
        if isinstance(value, dict):
            ranked = sorted(value.items(), key=lambda each: (-each[1], each[0]))
            return dict(ranked[: self.k])
        ranked = [(finite_number_at(item, self.by), item) for item in value]
        rated = [(rank, item) for rank, item in ranked if rank is not None]
        return [item for _, item in sorted(rated, key=lambda each: -each[0])[: self.k]]

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return shape.limit_items(self.k)

    def shown(self) -> str:
        return f"top {self.k}" + f" by {self.by}" * bool(self.by)


class DistinctValuesStep(ModelFreeStep, frozen=True, tag="distinct"):
    """A step that returns the distinct values of a field in sorted order.

    >>> plans.DistinctValuesStep().apply(["b", "a", "b"])
    ['a', 'b']
    """

    field: str = ""

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        return list_of(given.item_type(self.title).field_type(self.field, self.title))

    def apply(self, value: list[Any]) -> list[Any]:
        found = (field_value(item, self.field) for item in value)
        return _sorted_set(each for each in found if each is not None)

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        return msgspec.structs.replace(shape, is_exact=False, inner=0)

    def shown(self) -> str:
        return f"distinct {self.field or 'values'}"


class SetOperation(ModelFreeStep, frozen=True, tag="combine"):
    """A step that combines two lists as sets, by union, intersection or difference.

    >>> plans.SetOperation("intersection").apply((["a", "b"], ["b", "c"]))
    ['b']
    """

    how: Literal["union", "intersection", "difference"]

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        first, second = _both_lists(given, self.title)
        if not first.accepts(second):
            raise ConfigError(f"combine needs lists of one type, but got {given}")
        return list_of(first)

    def apply(self, value: tuple[list[Any], list[Any]]) -> list[Any]:
        first, second = ({_key(item): item for item in each if item is not None} for each in value)
        if self.how == "union":
            kept = {**second, **first}
        else:
            is_both = self.how == "intersection"
            kept = {key: item for key, item in first.items() if (key in second) is is_both}
        return _sorted_set(kept.values())

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        first, second = shape.both or (shape, shape)
        most = max(first.item_bytes, second.item_bytes)
        total = first.total_bytes + second.total_bytes
        return reply_bounds(first.num + second.num, most, total, is_exact=False)

    def shown(self) -> str:
        return f"combine ({self.how})"


class JoinRecordsStep(ModelFreeStep, frozen=True, tag="join"):
    """A step that joins records from two lists if they have the same value in a field.

    >>> plans.JoinRecordsStep("id").apply(([{"id": 1, "a": 2}], [{"id": 1, "b": 3}]))
    [{'id': 1, 'a': 2, 'b': 3}]
    """

    on: str

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        first, second = _both_lists(given, self.title)
        first.field_type(self.on, self.title)
        second.field_type(self.on, self.title)
        shared = (first.fields.keys() & second.fields.keys()) - {self.on}
        if shared:
            raise ConfigError(
                f"join: both records have the field '{min(shared)}': rename it in one schema"
            )
        return list_of(PlanValueType("record", fields={**second.fields, **first.fields}))

    def apply(self, value: tuple[list[Any], list[Any]]) -> list[dict[str, Any]]:
        first, second = ([each for each in side if isinstance(each, dict)] for side in value)
        by_key: dict[Any, list[dict[str, Any]]] = {}
        for record in second:
            by_key.setdefault(_key(record.get(self.on)), []).append(record)
        matches = ((each, by_key.get(_key(each.get(self.on)), ())) for each in first)
        joined = ({**left, **right} for left, rights in matches for right in rights)
        found = list(itertools.islice(joined, MAX_PAIRS + 1))
        if len(found) > MAX_PAIRS:
            raise ConfigError(f"join would give more than {MAX_PAIRS:,} records: filter first")
        return found

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        first, second = shape.both or (shape, shape)
        num = min(first.num * second.num, MAX_PAIRS)
        return reply_bounds(num, first.item_bytes + second.item_bytes, is_exact=False)

    def shown(self) -> str:
        return f"join on {self.on}"


class TruncateDates(ModelFreeStep, frozen=True, tag="periods"):
    """A step that replaces each date in a field with its day, week, month or year, so that dates
    can be counted and compared.

    A date in an unknown format becomes None.

    >>> plans.TruncateDates("day", "month").apply([{"day": "May 3, 2024"}])
    [{'day': '2024-05'}]
    """

    field: str = ""
    per: Literal["day", "week", "month", "year"] = "day"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        kind = item.field_type(self.field, self.title)
        if kind.kind not in ("date", "text", "any"):
            raise ConfigError(f"periods needs dates, but got {kind}: name a field with dates")
        if not self.field:
            return list_of(DATE)
        return list_of(msgspec.structs.replace(item, fields={**item.fields, self.field: DATE}))

    def apply(self, value: list[Any]) -> list[Any]:
        return [self._truncate_item_date(item) for item in value]

    def _truncate_item_date(self, item: Any) -> Any:
        if not self.field:
            return self._truncate_to_period(item)
        return (
            {**item, self.field: self._truncate_to_period(item.get(self.field))} if item else item
        )

    def _truncate_to_period(self, value: Any) -> str | None:
        date = _date(value)
        return None if date is None else date.strftime(_PERIODS[self.per])

    def output_bounds(self, shape: PlanValueBounds, given: PlanValueType) -> PlanValueBounds:
        item = shape.item_bytes + _NUMBER_BYTES
        total = shape.total_bytes + shape.num * _NUMBER_BYTES
        return msgspec.structs.replace(
            shape, value=None, item_bytes=item, total_bytes=min(total, MAX_ITEMS)
        )

    def shown(self) -> str:
        return f"{self.per} of {self.field or 'values'}"


def finite_number_at(item: Any, field: str) -> float | int | None:
    """Return the number in a field of an item, or None if the field holds no finite number."""
    value = field_value(item, field)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number and math.isfinite(value) else None


def _check_number(kind: PlanValueType, step: str) -> None:
    if kind.kind not in ("number", "any"):
        raise ConfigError(f"{step} needs a number, but got {kind}: name a field with one")


def _both_lists(given: PlanValueType, step: str) -> tuple[PlanValueType, PlanValueType]:
    if given.kind == "any":
        return ANY, ANY
    if given.kind != "pair" or given.item is None or given.second is None:
        raise ConfigError(f"{step} needs a pair of lists, but got {given}: put both(…) before it")
    return given.item.item_type(step), given.second.item_type(step)


def _date(value: Any) -> datetime.date | None:
    if not isinstance(value, str):
        return None
    text = value.strip()
    try:
        return datetime.date.fromisoformat(text)
    except ValueError:
        pass
    for form in _FORMATS:
        try:
            return datetime.datetime.strptime(text, form).date()
        except ValueError:
            continue
    return None


def _text_or_json(value: Any) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def _key(value: Any) -> Any:
    return (
        value.text if isinstance(value, ContextPart) else msgspec.json.encode(value, order="sorted")
    )


def _to_hashable(value: Any) -> Any:
    return value if isinstance(value, str | int | float | None) else _text_or_json(value)


def _sorted_set(values: Iterable[Any]) -> list[Any]:
    found = {_key(value): value for value in values}
    return sorted(found.values(), key=lambda value: (str(type(value)), _sort_key(value)))


def _sort_key(value: Any) -> Any:
    return value if isinstance(value, str | int | float) else str(_key(value))
