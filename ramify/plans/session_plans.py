"""Lets code in a Python session run plans.

This is the host's side of the module ``ramify_plans``, which such code can import.

    session: classify(…) ──> SessionPlansTool.strategy ──> SessionPlanCall(calls) ──> labels
                                                       └ leaves: calls 0.3.0, 0.3.1, …

Each call of a function of the module becomes a plan of one or more steps, which runs over the value
that the session sent. The same code runs the plans of users, so both cut, ask and count in the same
way and are refused for the same reasons. What a session sends is untrusted: it is decoded and
checked here. The functions that the session calls are in ``session_module.py``, and
``engine/session_host_calls.py`` records the calls and pays for them.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ramify.engine.call_outcome import CallOutcome
from ramify.engine.leaf_calls import LeafModelCaller
from ramify.errors import ConfigError, did_you_mean
from ramify.plans import step_constructors as c
from ramify.plans.leaf_questions import Leaf
from ramify.plans.plan import Plan
from ramify.plans.plan_strategy import run_plan
from ramify.plans.predicates import Comparison, Pattern, Relevance
from ramify.plans.ready_plans import READY_PLANS, ready_plan
from ramify.plans.text_parts import BYTES_PER_TOKEN, ContextPart, num_bytes
from ramify.plans.value_bounds import PlanValueBounds, known_value_bounds
from ramify.plans.value_types import (
    ANY,
    BOOLEAN,
    COUNTS,
    NUMBER,
    TEXT,
    PlanValueType,
    list_of,
    pair_of,
)
from ramify.sandbox.base import FileBackedText
from ramify.session_module_compiler import read_module_source

_STEPS: dict[str, Callable[..., Plan]] = {
    "split": c.split,
    "peek": c.peek,
    "map": c.map,
    "filter": c.filter,
    "reduce": c.reduce,
    "ask": c.ask,
    "concat": c.concat,
    "cross": c.cross,
    "best": c.best,
    "top": c.top,
    "field": c.field,
    "count": c.count,
    "total": c.total,
    "distinct": c.distinct,
    "periods": c.periods,
    "combine": c.combine,
    "join": c.join,
}
_READY = {name.replace("-", "_"): name for name in READY_PLANS}
"""Name of a function in the session -> name of the ready-made plan."""
_EACH_RECORD = ("classify", "aggregate", "pairwise")
"""Ready-made plans that treat the elements of a list as separate items, because they give a value
for each record."""
_LEAST_TOKENS = 4000
_Predicate = Leaf | Pattern | Relevance | Comparison
_DESCRIPTION = """\
- `ramify_plans`, a module (`from ramify_plans import classify`): it asks many small questions \
at once and checks the replies, in place of a loop over `llm_query`.
  - `classify(context, ["error", "fine"])`: a label for each line (of a list: for each item)
  - `aggregate(context, labels)`, `search(context)`, `summarise(context)`, `pairwise(context)`, \
`multi_hop(context)`: an answer to your question, or to `question="…"`
  - `split(context, "lines", tokens=4000)`: parts, for \
`map(parts, Leaf("Who is named?", schema=list[str]))`, `filter(parts, Pattern("error"))` (or \
`Relevance(top=20)`, or a `Leaf` with `schema=bool`), `reduce(answers, Leaf("Merge these."))`
  - `count`, `total`, `top`, `best`, `distinct`, `join`, `combine`, `periods`, `cross`: computed \
without a model; `help(ramify_plans.map)` says more"""


class SessionPlansTool:
    """A tool that provides the module ``ramify_plans`` to Python sessions.

    Each call of one of its functions runs a plan, and the plan's model calls are recorded.
    """

    __name__ = "ramify_plans"
    __doc__ = "Plans in a session."
    prompt_entry = _DESCRIPTION

    def __call__(self) -> None:
        raise RuntimeError(
            "ramify_plans works only inside a session: there, write `from ramify_plans import …`"
        )

    @property
    def session_source(self) -> str:
        """Return the source code of the module ``ramify_plans``, which is installed in each
        session."""
        return _module_source()

    def strategy(self, name: Any, value: Any, options: Any, question: Any) -> SessionPlanCall:
        """Return the strategy that runs the plan behind one ``ramify_plans`` call from a session.

        Raises ConfigError if the function does not exist or its options are invalid.
        """
        if name not in _STEPS and name not in _READY:
            raise ConfigError(f"unknown function: {did_you_mean(str(name), [*_STEPS, *_READY])}")
        if not isinstance(options, dict) or not all(isinstance(key, str) for key in options):
            raise ConfigError("the options must be a dict")
        if question is not None and not isinstance(question, str):
            raise ConfigError("the question must be a text")
        return SessionPlanCall(name, value, options, question)


@functools.cache
def _module_source() -> str:
    return read_module_source(Path(__file__).with_name("session_module.py"))


class SessionPlanCall:
    """A call of a ``ramify_plans`` function by code in a session.

    Calling this object runs the plan that answers it.
    """

    def __init__(
        self, name: str, value: Any, options: dict[str, Any], question: str | None
    ) -> None:
        self.title = name
        """Name of the function, for readers of the run's record."""
        self.question = question
        """Question to answer, or None for the session's own question."""
        self._value = value
        self._options = options

    async def __call__(self, calls: LeafModelCaller) -> CallOutcome:
        """Run the plan that code in the session has called, and return the outcome of the call.

        The answer has the form that the session decodes. Raises ConfigError before any model call
        if the plan cannot read the value or may exceed the budget.
        """
        plan, first, given = await asyncio.to_thread(self._prepare_plan, calls.question.context)
        outcome = await run_plan(plan, first, given, calls)
        return msgspec.structs.replace(
            outcome, answer=self._encode_answer(outcome.answer, first.value)
        )

    @property
    def may_call_model(self) -> bool:
        """Return True if this call can lead to model calls."""
        by = self._options.get("predicate")
        is_leaf = isinstance(by, dict) and by.get("by") == "leaf"
        return self.title in ("map", "reduce", "ask", *_READY) or is_leaf

    @property
    def is_parts_list(self) -> bool:
        """Return True if the result of this call is a list of text parts."""
        return self.title in ("split", "peek")

    def _prepare_plan(self, context: Any) -> tuple[Plan, PlanValueBounds, PlanValueType | None]:
        value = _decode_sent_value(self._value, context)
        plan = self._plan(value)
        if self.title in ("split", *_READY) and not _are_parts(value):
            return plan, PlanValueBounds(value, True), None
        return plan, known_value_bounds(value), _type_of(value)

    def _plan(self, value: Any) -> Plan:
        options = {name: _convert_option(name, each) for name, each in self._options.items()}
        if self.title in _STEPS:
            by = options.pop("by", ()) if self.title == "count" else ()
            try:
                return _STEPS[self.title](*by, **options)
            except TypeError as error:
                raise ConfigError(str(error)) from None
        if not _are_parts(value):
            if self.title in _EACH_RECORD and isinstance(value, list | tuple):
                options.setdefault("by", "items")
            return ready_plan(_READY[self.title], **options)
        largest = max(math.ceil(num_bytes(part.text) / BYTES_PER_TOKEN) for part in value)
        options.setdefault("part_tokens", max(_LEAST_TOKENS, largest))
        return Plan(ready_plan(_READY[self.title], **options).steps[1:])

    def _encode_answer(self, answer: Any, value: Any) -> Any:
        if answer is None:
            return None
        if self.is_parts_list:
            return [_fields(part) for part in answer]
        if self.title == "filter":
            return _kept_indices(value, answer)
        return answer


def _decode_sent_value(sent: Any, context: Any) -> Any:
    """Decode a value that a session sent to a plan function.

    A session refers to its own context by name, and ``context`` replaces that reference. Raises
    ConfigError if the value cannot be read.
    """
    if not isinstance(sent, dict):
        raise ConfigError("the value cannot be read: call the functions of ramify_plans")
    match sent.get("of"):
        case "context":
            return str(context) if isinstance(context, FileBackedText) else context
        case "value":
            return sent.get("value")
        case "pair":
            pair = sent.get("pair")
            if not isinstance(pair, list) or len(pair) != 2:
                raise ConfigError("the pair cannot be read: give two lists")
            return _decode_sent_value(pair[0], context), _decode_sent_value(pair[1], context)
        case "parts" | "part" as form:
            given = sent.get("parts")
            if not isinstance(given, list) or not given:
                raise ConfigError("there are no parts: give what split returns")
            parts = [_decode_part(fields) for fields in given]
            return parts if form == "parts" else parts[0]
        case _:
            raise ConfigError("the value cannot be read: call the functions of ramify_plans")


def _decode_part(fields: Any) -> ContextPart:
    """Decode and validate a text part from a session, which may have forged it."""
    is_valid = isinstance(fields, list) and len(fields) == 4
    if not is_valid or not all(isinstance(each, str) for each in fields):
        raise ConfigError("a part cannot be read: give what split returns")
    text, place, spans, preview = fields
    try:
        bounds = [int(each) for each in spans.split()]
        records = tuple(zip(bounds[::2], bounds[1::2], strict=True))
    except ValueError:
        raise ConfigError("the records of a part cannot be read: split the text again") from None
    ends = [0, *bounds, len(text)]
    if any(a > b for a, b in itertools.pairwise(ends)):
        raise ConfigError("the records of a part are not in it: split the text again")
    return ContextPart(text, place[:200], (), 0, records, preview)


def _fields(part: ContextPart) -> list[str]:
    spans = " ".join(f"{start} {end}" for start, end in part.records)
    return [part.text, part.place, spans, part.preview]


def _kept_indices(value: Any, kept: Sequence[Any]) -> list[int]:
    """Return the indices, in the unfiltered list, of the items that a filter step has kept.

    Items are compared by identity, and must be in their original order.
    """
    places, found = iter(enumerate(value)), list[int]()
    for each in kept:
        found.append(next(index for index, item in places if item is each))
    return found


_KINDS = {"leaf": Leaf, "predicate": _Predicate, "left": Comparison, "right": Comparison}
"""Name of an option that sessions send as a dict -> the class to which it is converted."""


def _convert_option(name: str, value: Any) -> Any:
    """Convert an option of a plan function, as received from a session, to a value that plans
    accept.

    Some options become objects, such as ``Leaf``. Raises ConfigError if the option is invalid.
    """
    if name not in _KINDS:
        return value
    try:
        return msgspec.convert(value, _KINDS[name])
    except msgspec.ValidationError as error:
        cause = error.__cause__
        raise ConfigError(str(cause if isinstance(cause, ConfigError) else error)) from None


def _are_parts(value: Any) -> bool:
    return (
        isinstance(value, list) and bool(value) and all(isinstance(v, ContextPart) for v in value)
    )


def _type_of(value: Any) -> PlanValueType:
    """Return the plan type of a value from a session, or ``ANY`` if there is no more specific type.

    Raises ConfigError if the value is None.
    """
    match value:
        case bool():
            return BOOLEAN
        case int() | float():
            return NUMBER
        case str():
            return TEXT
        case ContextPart():
            return _part_type([value])
        case dict():
            numbers = value and all(type(each) is int for each in value.values())
            return COUNTS if numbers else PlanValueType("record", fields=dict.fromkeys(value, ANY))
        case (left, right) if isinstance(value, tuple):
            return pair_of(_type_of(left), _type_of(right))
        case list():
            return list_of(_part_type(value) if _are_parts(value) else _item_type(value))
        case None:
            raise ConfigError("the value is None: give a list, or what another function returned")
        case _:
            return ANY


def _part_type(parts: Sequence[ContextPart]) -> PlanValueType:
    largest = max(math.ceil(num_bytes(part.text) / BYTES_PER_TOKEN) for part in parts)
    has_records = any(part.records for part in parts)  # a part may be blank
    return PlanValueType("part", has_records=has_records, tokens=largest)


def _item_type(items: Sequence[Any]) -> PlanValueType:
    """Return the common type of all items in a list, or ``ANY`` if their types differ.

    None is ignored, because it marks an item that failed.
    """
    given = [item for item in items if item is not None]
    if given and all(isinstance(item, Mapping) for item in given):
        names = dict.fromkeys(name for item in given for name in item if isinstance(name, str))
        return PlanValueType("record", fields=dict.fromkeys(names, ANY))
    if given and all(isinstance(item, list | tuple) for item in given):
        return list_of(ANY)
    if any(isinstance(item, list | tuple | Mapping | ContextPart) for item in given):
        return ANY
    found = {kind.kind: kind for kind in map(_type_of, given)}
    return next(iter(found.values())) if len(found) == 1 else ANY
