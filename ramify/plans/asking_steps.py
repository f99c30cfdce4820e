"""The steps of a plan that divide the context or ask a model: split, peek, map, filter, ask and
reduce.

A model is asked small questions of bounded size, called leaves.

    context ──split──> parts ──map──> answers, one per part ──reduce──> one answer
                                                              └ groups that fit a leaf's bound

``plan_leaf_runner.py`` sends the questions, and ``model_free_steps.py`` has the steps that need no
model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from ramify.errors import ConfigError
from ramify.plans.leaf_questions import BETWEEN_BYTES, Leaf
from ramify.plans.plan_leaf_runner import LEAF_FAILED, PlanLeafRunner
from ramify.plans.plan_step import PlanStep
from ramify.plans.predicates import Comparison, Pattern, Relevance
from ramify.plans.text_parts import (
    BYTES_PER_TOKEN,
    By,
    ContextPart,
    ContextSplitRule,
    compile_regex,
    items_of,
    named_texts,
    num_bytes,
    shortened,
    split_texts_into_parts,
)
from ramify.plans.value_bounds import (
    PlannedModelCalls,
    PlanValueBounds,
    known_value_bounds,
    reply_bounds,
)
from ramify.plans.value_types import ANY, BOOLEAN, PlanValueType, check_field_values, list_of

T = TypeVar("T")
_MIN_TOKENS = 16


class AskingStep(PlanStep, frozen=True):
    """A plan step that splits the context or asks a model bounded questions (leaves)."""

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        """Estimate the size bounds of this step's result before the plan runs.

        The step's model calls are added to ``sheet``. ``shape`` gives the bounds of the input, and
        ``given`` its type.
        """
        raise NotImplementedError

    async def run(self, value: Any, flow: PlanLeafRunner, shape: PlanValueBounds) -> Any:
        """Apply this plan step to a value and return the result.

        ``shape`` gives the bounds of the value that were computed before the plan ran.
        """
        raise NotImplementedError


class SplitText(AskingStep, frozen=True, tag="split"):
    """A step that cuts the context into parts of strictly limited size.

    >>> print([part.text for part in plans.SplitText("lines", 16).parts("a b\\n" * 20)])
    ['a b\\na b\\n...', 'a b\\na b\\n...']
    """

    by: By = "lines"
    tokens: int = 4000
    """Maximum size of a part in tokens, counting three bytes as one token."""
    overlap: int = 0
    """Maximum number of tokens that a part repeats from the end of the previous one."""
    separator: str = ""
    """Regular expression that matches the beginning of a record, for texts that are split by
    ``records``. If empty, blank lines separate records."""
    max_records: int = 0
    """Maximum number of lines, records or sentences in a part. 0 means no limit."""
    cut: bool = False
    """True to cut a record that exceeds the maximum size. If False, such a record is an error."""
    header: bool = False
    """True if texts are split by ``lines`` and the first line of each names the columns of a table.
    This line is not a record, and is repeated at the start of each part."""

    def __post_init__(self) -> None:
        check_field_values(self, self.title)
        if self.tokens < _MIN_TOKENS:
            raise ConfigError(f"split: tokens={self.tokens!r:.40}: give {_MIN_TOKENS} or more")
        if self.overlap < 0 or 2 * self.overlap > self.tokens:
            raise ConfigError(
                f"split: an overlap of {self.overlap} tokens is more than half of {self.tokens}: "
                "give less"
            )
        if self.separator and self.by != "records":
            raise ConfigError("split: separator works only with by='records'")
        if self.separator:
            compile_regex(self.separator)
        if self.header and (self.by != "lines" or self.overlap):
            raise ConfigError("split: header works only with by='lines' and no overlap")
        if self.by == "items" and (self.overlap or self.cut):
            raise ConfigError(
                "split: items can be neither cut nor repeated: omit overlap and cut, or split by "
                "lines"
            )

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        if given.kind not in ("text", "any"):
            raise ConfigError(f"split needs a text, but got {given}")
        return list_of(PlanValueType("part", has_records=self.by != "tokens", tokens=self.tokens))

    def parts(self, context: Any) -> list[ContextPart]:
        """Divide a context into text parts of limited size.

        Raises ConfigError if a single record exceeds the limit and must not be cut.
        """
        rule = msgspec.convert(self, ContextSplitRule, from_attributes=True)
        texts = items_of(context) if self.by == "items" else named_texts(context)
        return split_texts_into_parts(texts, rule)

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        if not shape.is_known:
            raise ConfigError("split works on the context, not on replies: put it first")
        parts = self.parts(shape.value)
        if not parts:
            raise ConfigError("the context is empty, so there is nothing to ask about")
        return known_value_bounds(parts)

    async def run(
        self, value: Any, flow: PlanLeafRunner, shape: PlanValueBounds
    ) -> list[ContextPart]:
        return await flow.run_in_thread(self.parts, value)

    def shown(self) -> str:
        more = [
            f"{self.overlap:,} repeated" * bool(self.overlap),
            f"{self.max_records} at most in one" * bool(self.max_records),
            "each with the header of its table" * self.header,
        ]
        return ", ".join(
            [f"split by {self.by}, at most {self.tokens:,} tokens", *filter(None, more)]
        )


class FilterPreviewStep(AskingStep, frozen=True, tag="peek"):
    """A step that makes later filters read only the beginning of each part of the text."""

    tokens: int = 500

    def __post_init__(self) -> None:
        check_field_values(self, self.title)
        if self.tokens < 1:
            raise ConfigError(f"peek: tokens={self.tokens!r:.40}: give 1 or more")

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        if item.kind not in ("part", "any"):
            raise ConfigError(f"peek needs parts, but got {given}: put split before it")
        return given

    def _add_previews(self, parts: Sequence[ContextPart]) -> list[ContextPart]:
        most = BYTES_PER_TOKEN * self.tokens
        return [msgspec.structs.replace(part, preview=shortened(part.text, most)) for part in parts]

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        return msgspec.structs.replace(shape, value=self._add_previews(shape.value))

    async def run(
        self, value: list[ContextPart], flow: PlanLeafRunner, shape: PlanValueBounds
    ) -> list[ContextPart]:
        return self._add_previews(value)

    def shown(self) -> str:
        return f"peek at {self.tokens:,} tokens"


class AskEachItem(AskingStep, frozen=True, tag="map"):
    """A step that asks a model the same bounded question (a leaf) about each item of a list."""

    leaf: Leaf

    @property
    def title(self) -> str:
        return f"map {self.leaf.label}"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        return list_of(self.leaf.answer_type_for(given.item_type(self.title), self.title))

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        _check_items(self.title, self.leaf, shape)
        sheet.add_call_per_item(self.title, self.leaf, shape)
        return _answer_bounds(self.leaf, shape)

    async def run(
        self, value: list[Any], flow: PlanLeafRunner, shape: PlanValueBounds
    ) -> list[Any]:
        answers = await flow.ask_about_items(self.leaf, value, self.title)
        if not self.leaf.each:
            return [answer for answer in answers if answer is not LEAF_FAILED]
        return [
            [None] * len(part.records) if answer is LEAF_FAILED else answer
            for part, answer in zip(value, answers, strict=True)
        ]


class FilterItems(AskingStep, frozen=True, tag="filter"):
    """A step that keeps the items for which a predicate is true.

    The predicate is a regular expression, a BM25 ranking, a comparison, or a yes-or-no question to
    a model.
    """

    predicate: Pattern | Relevance | Comparison | Leaf

    @property
    def title(self) -> str:
        predicate = self.predicate
        return f"filter {predicate.label}" if isinstance(predicate, Leaf) else "filter"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item, predicate = given.item_type(self.title), self.predicate
        kind = (
            predicate.answer_type_for(item, self.title)
            if isinstance(predicate, Leaf)
            else predicate.infer_output_type(item, self.title)
        )
        if not BOOLEAN.accepts(kind):
            raise ConfigError(f"{self.title}: the predicate must give a boolean, but gives {kind}")
        return given

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        predicate = self.predicate
        if isinstance(predicate, Leaf):
            _check_items(self.title, predicate, shape)
            sheet.add_call_per_item(self.title, predicate, shape, is_preview=True)
            return shape.limit_items(shape.num)
        if shape.is_known:
            return known_value_bounds(
                _select_kept(shape.value, self._keep_mask(shape.value, sheet.question))
            )
        if isinstance(predicate, Relevance):
            return shape.limit_items(predicate.top)
        if isinstance(predicate, Pattern) and isinstance(shape.value, list):
            value = _select_kept(shape.value, predicate.keep_mask(shape.value))
            kept = msgspec.structs.replace(shape, value=value)
            return kept.limit_items(len(value))
        return shape.limit_items(shape.num)

    def _keep_mask(self, items: Sequence[Any], question: str) -> list[bool]:
        assert not isinstance(self.predicate, Leaf)
        if isinstance(self.predicate, Relevance):
            return self.predicate.mask_top_matches(items, question)
        return self.predicate.keep_mask(items)

    async def run(
        self, value: list[Any], flow: PlanLeafRunner, shape: PlanValueBounds
    ) -> list[Any]:
        if isinstance(self.predicate, Leaf):
            answers = await flow.ask_about_items(self.predicate, value, self.title, is_preview=True)
            return _select_kept(value, [answer is True for answer in answers])
        verdicts = await flow.run_in_thread(self._keep_mask, value, flow.question)
        return _select_kept(value, verdicts)

    def shown(self) -> str:
        predicate = self.predicate
        return self.title if isinstance(predicate, Leaf) else f"filter: {predicate}"


class AskWholeValue(AskingStep, frozen=True, tag="ask"):
    """A step that asks a model one bounded question (a leaf) about the whole value."""

    leaf: Leaf

    @property
    def title(self) -> str:
        return f"ask {self.leaf.label}"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        return self.leaf.answer_type_for(given, self.title)

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        size = shape.max_bytes
        if size > self.leaf.read_bytes:
            raise ConfigError(
                f"{self.title}: it may receive {size:,} bytes, but its leaf reads at most "
                f"{self.leaf.read_bytes:,} ({self.leaf.tokens:,} tokens): put reduce or top "
                "before it"
            )
        if shape.is_known:
            tokens = sheet.prompt_token_bound(self.leaf, shape.value)
            sheet.add(self.title, (1,), True, [tokens], [self.leaf.reply_tokens])
        else:
            sheet.add_bounded(self.title, self.leaf, (1,), True, size, size)
        return reply_bounds(1, self.leaf.max_answer_bytes)

    async def run(self, value: Any, flow: PlanLeafRunner, shape: PlanValueBounds) -> Any:
        (answer,) = await flow.ask_about_items(self.leaf, [value], self.title)
        return answer


class TreeReduceStep(AskingStep, frozen=True, tag="reduce"):
    """A step in which a model merges the items of a list into one.

    The calls form a tree: each call reads as many items as fit, and the results are merged in turn.
    """

    leaf: Leaf

    @property
    def title(self) -> str:
        return f"reduce {self.leaf.label}"

    def infer_output_type(self, given: PlanValueType) -> PlanValueType:
        item = given.item_type(self.title)
        if self.leaf.each:
            raise ConfigError(
                f"{self.title}: its leaf must give one value for all, but gives one for each "
                "record: omit each"
            )
        result = self.leaf.answer_type_for(item, self.title)
        expected = "text" if item.kind == "part" else item.kind
        if ANY not in (item, result) and (result.kind != expected or not self._can_merge(item)):
            raise ConfigError(
                f"{self.title}: it merges items of type {item}, but its leaf gives {result}"
            )
        if self._fan_in(self.leaf.max_answer_bytes) < 2:
            raise ConfigError(
                f"{self.title}: two of its answers may take "
                f"{2 * (self.leaf.max_answer_bytes + BETWEEN_BYTES):,} bytes, but its leaf reads "
                f"at most {self.leaf.read_bytes:,}: raise the leaf's tokens, or lower its "
                "reply_tokens"
            )
        return result

    def _can_merge(self, item: PlanValueType) -> bool:
        return item.kind == "part" or item.accepts(self.leaf.type)

    def _fan_in(self, item_bytes: int) -> int:
        return self.leaf.read_bytes // (item_bytes + BETWEEN_BYTES)

    def _tree(self, shape: PlanValueBounds) -> ReduceTreeGrouping:
        is_parts = _has_parts(shape.value)
        first = max(1, self._fan_in(shape.item_bytes))
        return ReduceTreeGrouping(
            first, self._fan_in(self.leaf.max_answer_bytes), is_parts or first == 1
        )

    def estimate_bounds(
        self, shape: PlanValueBounds, given: PlanValueType, sheet: PlannedModelCalls
    ) -> PlanValueBounds:
        if shape.item_bytes > self.leaf.read_bytes:
            raise ConfigError(
                f"{self.title}: an item may take {shape.item_bytes:,} bytes, but its leaf reads "
                f"at most {self.leaf.read_bytes:,} ({self.leaf.tokens:,} tokens): raise the "
                "leaf's tokens"
            )
        tree = self._tree(shape)
        waves = tree.calls_per_level(shape.num)
        total = shape.max_bytes + sum(waves[1:]) * self.leaf.read_bytes
        places = (
            num_bytes(each.place) + 3 for each in shape.value or () if isinstance(each, ContextPart)
        )
        largest = self.leaf.read_bytes + tree.first * max(places, default=0)
        sheet.add_bounded(self.title, self.leaf, waves, shape.is_exact, total, largest)
        return reply_bounds(
            1, max(self.leaf.max_answer_bytes, 0 if tree.asks_single else shape.item_bytes)
        )

    async def run(self, value: list[Any], flow: PlanLeafRunner, shape: PlanValueBounds) -> Any:
        tree = self._tree(shape)
        items, is_first = [item for item in value if item is not None], True
        while len(items) > 1 or (items and is_first and tree.asks_single):
            groups = tree.groups(items, is_first=is_first)
            is_asked = [tree.needs_model_call(group, is_first=is_first) for group in groups]
            asked = [group for group, is_in in zip(groups, is_asked, strict=True) if is_in]
            answers = iter(await flow.ask_about_items(self.leaf, asked, self.title))
            merged = [
                next(answers) if is_in else group[0]
                for group, is_in in zip(groups, is_asked, strict=True)
            ]
            items, is_first = [each for each in merged if each is not LEAF_FAILED], False
        if items:
            return items[0]
        return "" if self.leaf.schema is None else None


class ReduceTreeGrouping(NamedTuple):
    """Determines how a reduction groups items into model calls, level by level."""

    first: int
    """Number of items that a call of the first level reads."""
    later: int
    """Number of answers that a call of each later level reads."""
    asks_single: bool
    """True if a group of one item on the first level also needs a model call, because the item is
    not yet an answer."""

    def groups(self, items: Sequence[T], *, is_first: bool) -> list[Sequence[T]]:
        size = self.first if is_first else self.later
        return [items[at : at + size] for at in range(0, len(items), size)]

    def needs_model_call(self, group: Sequence[T], *, is_first: bool) -> bool:
        """Return True if reducing a group of items takes a model call.

        A single answer is passed on unchanged.
        """
        return len(group) > 1 or (is_first and self.asks_single)

    def calls_per_level(self, num: int) -> list[int]:
        """Return the number of model calls on each level of the tree for ``num`` items.

        >>> ReduceTreeGrouping(4, 4, False).calls_per_level(17)
        [4, 1, 1]
        """
        found: list[int] = []
        is_first = True
        while num > 1 or (num and is_first and self.asks_single):
            size = self.first if is_first else self.later
            full, rest = divmod(num, size)
            is_single = is_first and self.asks_single
            asked = (full if size > 1 or is_single else 0) + (rest > 1 or (rest == 1 and is_single))
            found.append(asked)
            num, is_first = full + (rest > 0), False
        return [each for each in found if each]


def _check_items(step: str, leaf: Leaf, shape: PlanValueBounds) -> None:
    """Raise ConfigError if an item that is already known is too large for a model call of the plan.

    Parts of a text are not checked here, because their type already has a size limit.
    """
    if not shape.is_known or _has_parts(shape.value) or shape.item_bytes <= leaf.read_bytes:
        return
    raise ConfigError(
        f"{step}: an item has {shape.item_bytes:,} bytes, but leaf '{leaf.label}' reads at most "
        f"{leaf.read_bytes:,} ({leaf.tokens:,} tokens): split it, or raise the leaf's tokens"
    )


def _has_parts(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], ContextPart)


def _select_kept(items: Sequence[T], verdicts: Sequence[bool]) -> list[T]:
    return [item for item, is_kept in zip(items, verdicts, strict=True) if is_kept]


def _answer_bounds(leaf: Leaf, shape: PlanValueBounds) -> PlanValueBounds:
    """Return size bounds on the answers to a plan's question, before any model call.

    ``leaf`` is the question, and ``shape`` gives the bounds of the items that it is about.
    """
    most = leaf.max_answer_bytes
    if leaf.each and isinstance(shape.value, list):
        counts = sorted((len(part.records) for part in shape.value), reverse=True)
        inner = sum(counts[: shape.num])
        return reply_bounds(shape.num, most, inner * most, is_exact=shape.is_exact, inner=inner)
    inner = shape.num * most // 2 if leaf.type.kind == "list" else 0
    return reply_bounds(shape.num, most, is_exact=shape.is_exact, inner=inner)
