"""Computes upper bounds on a plan's values and model calls before any model is called.

The bounds give the number and size of the model calls. The cost of a plan is estimated from these
bounds.

    4 parts (known) ──map──> 4 answers of at most 3 kB (unknown) ──reduce──> 1 answer
    PlannedModelCalls:               4 calls, exactly                                 1 call

Each step transforms the bounds of its input in the same way as it will transform the value. The
cost of a plan therefore needs no separate description, which might differ from what the plan does.
``plan_cost.py`` adds prices.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from ramify.clients.base import Request
from ramify.plans.leaf_questions import BETWEEN_BYTES, Leaf
from ramify.plans.text_parts import ContextPart, num_bytes
from ramify.types.message import Message

MAX_ITEMS = 10**15
"""Cap on the number of items in a list's bounds. Larger numbers are reduced to it."""


class PlanValueBounds(msgspec.Struct, frozen=True):
    """Limits on the size of one value of a plan, known before any model is called.

    If the value does not depend on model replies, the value itself is known too.
    """

    value: Any = None
    """The value if ``is_known``. Otherwise, for a list that a filter will shorten, the items before
    filtering, or None."""
    is_known: bool = False
    """True if the value does not depend on a model's replies."""
    num: int = 1
    """Maximum number of items if the value is a list."""
    is_exact: bool = True
    """True if there are exactly ``num`` items, provided that no model call fails."""
    item_bytes: int = 0
    """Maximum size in bytes of one item, or of a value that is not a list."""
    total_bytes: int = 0
    """Maximum size in bytes of all items together."""
    inner: int = 0
    """For a list of lists: maximum total number of inner items."""
    both: tuple[PlanValueBounds, PlanValueBounds] | None = None
    """For a pair: the bounds of both values."""

    @property
    def max_bytes(self) -> int:
        """Return the maximum size in bytes of the whole value when it is written into a prompt."""
        return self.total_bytes + self.num * BETWEEN_BYTES

    def limit_items(self, num: int) -> PlanValueBounds:
        """Return the bounds of the list that remains if a step keeps at most ``num`` of its items.

        Which ones it keeps is not known yet.
        """
        num, total = min(num, self.num), self.total_bytes
        if self.value is None:  # the sizes of parts also have their places
            total = min(total, num * self.item_bytes)
        return msgspec.structs.replace(
            self, num=num, total_bytes=total, is_known=False, is_exact=False
        )


def known_value_bounds(value: Any) -> PlanValueBounds:
    """Return the size bounds of a value that is known before the plan calls any model.

    They include the value itself.
    """
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    if isinstance(value, tuple):  # of ``both``
        sides = known_value_bounds(value[0]), known_value_bounds(value[1])
        total = sides[0].max_bytes + sides[1].max_bytes
        return PlanValueBounds(value, True, 1, True, total, total, both=sides)
    sizes = [_size(item) for item in items]
    total = sum(sizes) + sum(
        num_bytes(each.place) + 3 for each in items if isinstance(each, ContextPart)
    )
    inner = sum(len(item) for item in items if isinstance(item, list))
    return PlanValueBounds(value, True, len(items), True, max(sizes, default=0), total, inner)


def reply_bounds(
    num: int, item_bytes: int, total_bytes: int | None = None, **fields: Any
) -> PlanValueBounds:
    """Return the size bounds of a value that model replies will produce.

    It has at most ``num`` items of at most ``item_bytes`` bytes each.
    """
    total = num * item_bytes if total_bytes is None else total_bytes
    return PlanValueBounds(
        num=min(num, MAX_ITEMS), item_bytes=item_bytes, total_bytes=total, **fields
    )


def _size(value: Any) -> int:
    if isinstance(value, ContextPart):
        return num_bytes(value.text)
    if isinstance(value, str):
        return num_bytes(value)
    try:
        return len(msgspec.json.encode(value))
    except TypeError:  # parts in a list, or a pair of them
        return sum(map(_size, value)) if isinstance(value, list | tuple) else 0


class PlannedStepCalls(msgspec.Struct, frozen=True):
    """The model calls that one step of a plan will make, and upper bounds on their tokens."""

    step: str
    """Name of the step and of the question that it asks."""
    calls: int
    is_exact: bool
    """True if there are exactly this many calls, provided that none fails. Otherwise the number is
    a maximum."""
    input_tokens: int
    """Upper bound on the input tokens of all calls together. A token has at least one byte, so this
    is the size of their prompts in bytes."""
    output_tokens: int
    """Maximum output tokens of all calls together, without hidden reasoning."""
    waves: tuple[int, ...]
    """Number of calls in each wave. The calls of a wave can run at the same time, and a wave starts
    when the previous one has ended."""
    largest_input: int
    """Maximum tokens of the longest prompt."""
    largest_output: int
    """Maximum tokens of the longest reply, without hidden reasoning."""


class PlannedModelCalls:
    """Collects the model calls that a plan's steps will make.

    The cost of the plan is computed from them.
    """

    def __init__(self, question: str) -> None:
        self.question = question
        self.steps: list[PlannedStepCalls] = []

    def add(
        self,
        name: str,
        waves: Sequence[int],
        is_exact: bool,
        inputs: Iterable[int],
        outputs: Iterable[int],
    ) -> None:
        """Add the model calls of a plan step whose prompts are already known.

        ``inputs`` and ``outputs`` are maximum token counts of each call's prompt and reply.
        """
        given, replied = list(inputs), list(outputs)
        self.steps.append(
            PlannedStepCalls(
                name,
                sum(waves),
                is_exact,
                sum(given),
                sum(replied),
                tuple(waves),
                max(given, default=0),
                max(replied, default=0),
            )
        )

    def add_bounded(
        self, name: str, leaf: Leaf, waves: Sequence[int], is_exact: bool, total: int, largest: int
    ) -> None:
        """Add the model calls of a plan step for whose prompts only the maximum sizes are known.

        ``total`` is the maximum number of bytes that all calls read together, and ``largest`` the
        maximum that one call reads.
        """
        num = sum(waves)
        prompt = self.max_instruction_tokens(leaf)
        self.steps.append(
            PlannedStepCalls(
                name,
                num,
                is_exact,
                num * prompt + total,
                num * leaf.reply_tokens,
                tuple(waves),
                prompt + largest if num else 0,
                leaf.reply_tokens if num else 0,
            )
        )

    def max_instruction_tokens(self, leaf: Leaf) -> int:
        """Return an upper bound on the tokens of a leaf's prompt when the value to read is empty.

        A leaf is one kind of model call in a plan.
        """
        return self.prompt_token_bound(leaf, "")

    def prompt_token_bound(self, leaf: Leaf, given: Any, *, is_preview: bool = False) -> int:
        """Return an upper bound on the tokens of the prompt that asks a leaf's question about
        ``given``."""
        text = leaf.request_text(self.question, given, is_preview=is_preview)
        kind = leaf.answer_kind(given)
        schema = kind.enforceable_schema if kind else None
        return Request((Message("user", text),), schema=schema).max_input_tokens()

    def add_call_per_item(
        self, name: str, leaf: Leaf, shape: PlanValueBounds, *, is_preview: bool = False
    ) -> None:
        """Add the model calls of a plan step that asks about each item of a list.

        ``shape`` holds the bounds on the list's length and size.
        """
        if shape.value is None and not shape.is_known:
            largest = shape.item_bytes + BETWEEN_BYTES
            self.add_bounded(name, leaf, (shape.num,), shape.is_exact, shape.max_bytes, largest)
            return
        inputs = [
            self.prompt_token_bound(leaf, item, is_preview=is_preview) for item in shape.value
        ]
        outputs = [leaf.max_reply_tokens(item) for item in shape.value]
        if shape.num < len(inputs):
            inputs, outputs = (heapq.nlargest(shape.num, each) for each in (inputs, outputs))
        self.add(name, (shape.num,), shape.is_exact, inputs, outputs)
