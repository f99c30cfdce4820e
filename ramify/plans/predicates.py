"""Predicates with which a plan's ``filter`` step selects items without a model call.

They are a regular expression, a BM25 ranking and a comparison of fields.

    Pattern("error|failed")                  parts with a match
    Relevance(top=20)                        the 20 parts that fit the question best, by BM25
    Comparison("score", ">=", 5)             records whose score is 5 or more
    Comparison("found")                      records whose field ``found`` is true
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

from ramify.errors import ConfigError
from ramify.pip_install_command import install_command
from ramify.plans.text_parts import ContextPart, compile_regex
from ramify.plans.value_types import BOOLEAN, PlanValueType, check_field_values

Operator = Literal["", "==", "!=", "<", "<=", ">", ">=", "in", "contains"]
_OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "in": lambda value, wanted: value in wanted,
    "contains": lambda value, wanted: wanted in value,
}
_KIND_OF = {str: ("text", "date", "part"), bool: ("boolean",), int: ("number",), float: ("number",)}


class Pattern(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="regex"):
    """A predicate that keeps the items in which a regular expression matches.

    The items are parts, texts or records.

    >>> plans.Pattern("error|failed").keep_mask(["1 error", "fine"])
    [True, False]
    """

    regex: str
    """Regular expression. It is searched in linear time, so look-around and back-references are not
    supported."""
    ignore_case: bool = True
    field: str = ""
    """Field of a record in which to search."""

    def __post_init__(self) -> None:
        check_field_values(self, "pattern")
        self._compile_regex()

    def _compile_regex(self) -> Any:
        return compile_regex(f"{'(?i)' if self.ignore_case else ''}{self.regex}")

    def infer_output_type(self, given: PlanValueType, step: str) -> PlanValueType:
        """Return the type of the predicate's result, which is always boolean.

        Raises ConfigError if items of the type ``given`` cannot be searched. The error names the
        plan step ``step``.
        """
        kind = given.field_type(self.field, step)
        if kind.kind not in ("text", "part", "date", "any"):
            raise ConfigError(f"{step}: a pattern needs text, but got {kind}")
        return BOOLEAN

    def keep_mask(self, items: Sequence[Any]) -> list[bool]:
        """Return a mask with one boolean per item: True if the regular expression matches the
        item."""
        pattern = self._compile_regex()
        texts = (_text(field_value(item, self.field)) for item in items)
        return [isinstance(text, str) and pattern.search(text) is not None for text in texts]

    def __str__(self) -> str:
        return f"/{self.regex}/" + f" in {self.field}" * bool(self.field)


class Relevance(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="bm25"
):
    """A predicate that keeps the parts that best match a query, in their original order.

    Parts are ranked by BM25.

    >>> plans.Relevance(top=3).top
    3
    """

    top: int
    """Maximum number of parts to keep, up to 100."""
    query: str = ""
    """Words to search for. Empty means the words of the question."""

    def __post_init__(self) -> None:
        from ramify.sources.search_units import MAX_HITS

        check_field_values(self, "relevance")
        if not 1 <= self.top <= MAX_HITS:
            raise ConfigError(f"top={self.top!r:.40}: give a number from 1 to {MAX_HITS}")

    def infer_output_type(self, given: PlanValueType, step: str) -> PlanValueType:
        """Return the type of the predicate's result, which is always boolean.

        Raises ConfigError if items of the type ``given`` cannot be ranked. The error names the plan
        step ``step``.
        """
        if given.kind not in ("part", "text", "any"):
            raise ConfigError(f"{step}: BM25 needs parts or texts, but got {given}")
        return BOOLEAN

    def mask_top_matches(self, items: Sequence[Any], question: str) -> list[bool]:
        """Return a mask with one boolean per item: True for the ``top`` items that best match the
        query.

        The ranking is by BM25. Blocks while the search index is built. Raises ConfigError if the
        package ``tantivy`` is missing.
        """
        from ramify.sources.text_search import MAX_QUERY_CHARS, TextSearchTool, has_tantivy

        if not has_tantivy():
            raise ConfigError(
                f"BM25 needs tantivy: {install_command('inputs')}, or read every part "
                "(search(top=0), --top 0)"
            )
        if len(items) <= self.top:
            return [True] * len(items)
        search = TextSearchTool([_text(item) for item in items])
        query = (self.query or question)[:MAX_QUERY_CHARS]
        try:
            hits = search(query, 100)
        except (ValueError, TimeoutError) as error:
            raise ConfigError(f"the parts cannot be ranked by BM25: {error}") from None
        names = list(dict.fromkeys(hit["name"] for hit in hits))[: self.top]
        # Parts without a match are left out, even if fewer than ``top`` remain.
        kept = set(names)
        return [index in kept for index in range(len(items))]

    def __str__(self) -> str:
        words = f"{self.query!r}" if self.query else "the question"
        return f"BM25, the best {self.top} for {words}"


class Comparison(
    msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="by", tag="field"
):
    """A predicate that keeps items whose field satisfies a comparison with a value.

    >>> plans.Comparison("n", ">", 2).keep_mask([{"n": 1}, {"n": 3}])
    [False, True]
    """

    field: str = ""
    """Field to compare. Empty means the item itself."""
    op: Operator = ""
    """Comparison operator. Empty keeps the items whose field is ``True``."""
    value: Any = None

    def __post_init__(self) -> None:
        check_field_values(self, "comparison")
        if self.op == "in" and not isinstance(self.value, list | tuple):
            raise ConfigError("the comparison 'in' needs a list of values")

    def infer_output_type(self, given: PlanValueType, step: str) -> PlanValueType:
        """Return the type of the predicate's result.

        Raises ConfigError if items of the type ``given`` cannot be compared with the value. The
        error names the plan step ``step``.
        """
        kind = given.field_type(self.field, step)
        if not self.op:
            return kind
        if kind.kind in ("list", "record", "pair", "counts"):
            raise ConfigError(f"{step}: {self} cannot compare {kind} with a value")
        values = self.value if self.op == "in" else [self.value]
        for value in values:
            wanted = _KIND_OF.get(type(value), ())
            if kind.kind != "any" and kind.kind not in wanted:
                raise ConfigError(
                    f"{step}: {self} compares {kind} with a {type(value).__name__}: give a value "
                    "of the same type"
                )
            unknown = kind.labels and self.op in ("==", "!=", "in") and value not in kind.labels
            if unknown:
                raise ConfigError(
                    f"{step}: '{value}' is not one of the labels {', '.join(kind.labels)}"
                )
        return BOOLEAN

    def keep_mask(self, items: Sequence[Any]) -> list[bool]:
        """Return a mask with one boolean per item: True if the item's field satisfies the
        comparison."""
        return [self._is_kept(field_value(item, self.field)) for item in items]

    def _is_kept(self, value: Any) -> bool:
        if not self.op:
            return value is True
        if value is None:
            return False
        try:
            return bool(_OPERATORS[self.op](value, self.value))
        except TypeError:  # a value of another type than the schema's
            return False

    def __str__(self) -> str:
        return f"{self.field or 'value'} {self.op} {self.value!r}" if self.op else self.field


def field_value(item: Any, field: str) -> Any:
    """Return the value of a record's field.

    If no field is named, return the item itself.
    """
    if not field:
        return item
    return item.get(field) if isinstance(item, dict) else None


def _text(item: Any) -> Any:
    return item.text if isinstance(item, ContextPart) else item
