"""Find the code that made each sub-call, and the text that shows its returned values.

A sub-call is a model call that a session's code made.

    0.0 returned "30,102 dollars"     "30,102 dollars" and 30102 lead to 0.0
    0.1 returned ["web-3", 7]         "web-3" and 7 lead to 0.1

A value that more than ``MAX_SOURCES`` calls returned is not linked. A journal records the sub-calls
of a cell in the order of their creation, but not the expression that made each one.
``match_subcalls_to_expressions`` finds that expression. ``data_flow.py`` traces where the results
went from there, and which calls a text may have come from.
"""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import msgspec

from ramify.types.trajectory import answer_text

QUERIES = {
    "llm_query": "lm",
    "llm_query_batched": "lm",
    "rlm_query": "rlm",
    "rlm_query_batched": "rlm",
}
_MIN_WORDS = 6
"""Minimum length, in characters, of a literal that can distinguish one call expression from
another.
"""


class CellSubcall(msgspec.Struct, frozen=True):
    """A sub-call, which is a model call that the code of a cell made."""

    id: str
    kind: str
    question: str


def match_subcalls_to_expressions(
    tree: ast.Module, made: Sequence[CellSubcall]
) -> dict[ast.AST, list[str]]:
    """Find the expression in a cell's code that made each sub-call.

    Returns the ids of the sub-calls for each expression, by its syntax node.

    If each expression runs once, sub-calls are matched in order. Otherwise an expression is
    recognised by its kind and by the literal text in its prompt. Calls that look the same are
    assigned to every expression of their kind.
    """
    sites = _sites_of(tree)
    found: dict[ast.AST, list[str]] = {site: [] for site, _, _ in sites}
    if len(sites) == 1:
        return {sites[0][0]: [call.id for call in made]}
    exact = _in_order(tree, sites, made)
    if exact is not None:
        return exact
    for call in made:
        kinds = [each for each in sites if QUERIES[each[1]] == call.kind] or sites
        named = [each for each in kinds if each[2] and all(w in call.question for w in each[2])]
        for site, _, _ in named or kinds:
            found[site].append(call.id)
    return found


def _sites_of(tree: ast.Module) -> list[tuple[ast.AST, str, list[str]]]:
    """Return the expressions in the code that make sub-calls, in source order.

    Each has its syntax node, the name of the called function, and the literal texts in the prompt.
    """
    called = {}
    found: list[tuple[ast.AST, str, list[str]]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called[node.func] = node
            if node.func.id in QUERIES:
                words = [
                    part.value
                    for argument in node.args[:1]
                    for part in ast.walk(argument)
                    if isinstance(part, ast.Constant) and isinstance(part.value, str)
                ]
                found.append((node, node.func.id, [w for w in words if len(w) >= _MIN_WORDS]))
    for node in ast.walk(tree):
        if not isinstance(node, ast.Name) or node in called or node.id not in QUERIES:
            continue
        if isinstance(node.ctx, ast.Load):
            found.append((node, node.id, []))
    return sorted(
        found, key=lambda each: (getattr(each[0], "lineno", 0), getattr(each[0], "col_offset", 0))
    )


def _in_order(
    tree: ast.Module, sites: Sequence[tuple[ast.AST, str, list[str]]], made: Sequence[CellSubcall]
) -> dict[ast.AST, list[str]] | None:
    """Match sub-calls to expressions in the code by their order alone.

    Returns None unless each expression runs once and makes a known number of calls.
    """
    repeated = {
        inner
        for outer in ast.walk(tree)
        if isinstance(
            outer,
            ast.For | ast.While | ast.FunctionDef | ast.Lambda | ast.ListComp | ast.SetComp
            | ast.DictComp | ast.GeneratorExp | ast.If | ast.Try | ast.AsyncFunctionDef,
        )
        for inner in ast.walk(outer)
    }  # fmt: skip
    counts: list[int | None] = []
    for site, name, _ in sites:
        if site in repeated or not isinstance(site, ast.Call):
            return None
        argument = site.args[0] if site.args else None
        literal = isinstance(argument, ast.List) and not any(
            isinstance(part, ast.Starred) for part in argument.elts
        )
        batch = len(argument.elts) if literal and isinstance(argument, ast.List) else None
        counts.append(batch if name.endswith("_batched") else 1)
    if counts.count(None) == 1:
        rest = len(made) - sum(count or 0 for count in counts)
        counts = [max(rest, 0) if count is None else count for count in counts]
    if None in counts or sum(count or 0 for count in counts) != len(made):
        return None
    found, at = {}, 0
    nested = sorted(
        sites,
        key=lambda each: (getattr(each[0], "end_lineno", 0), getattr(each[0], "end_col_offset", 0)),
    )
    for site, _, _ in nested:  # an argument runs before the call that it is given to
        count = counts[[each[0] for each in sites].index(site)] or 0
        found[site] = [call.id for call in made[at : at + count]]
        at += count
    return found


MAX_SOURCES = 3
"""A value that more calls than this returned is not linked to any of them."""
_MIN_TEXT = 5
"""Minimum length, in characters, of a text that can be linked to the call that returned it. A
number needs at least 3 digits instead.
"""
NUMBER = re.compile(
    r"(?<![\w.])(?<!\w-)[-+]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?:[eE][-+]?\d+)?(?![\w]|\.\d)"
)
_PERCENT = re.compile(r"\s?%")
_MAX_LITERAL = 2_000
"""Number of characters at the beginning of a literal that are searched for numbers."""
_MAX_LEAVES = 500


def _key(text: str) -> Any:
    """Return a lookup key for a returned value, such that equal values have equal keys.

    For example, 30,102 and 30102.0 are the same number.
    """
    try:
        return float(f"{float(text.replace(',', '')):.12g}")
    except ValueError:
        return text


class ValueOriginIndex:
    """An index of the values that calls returned.

    It finds the calls that returned a given value.
    """

    def __init__(self) -> None:
        self._by_key: dict[Any, set[str]] = {}
        self._texts: dict[str, list[str]] = {}
        """Texts that each call returned, whole and in parts, by call id."""

    def add(self, id: str, answer: Any) -> None:
        texts: list[str] = []
        for leaf in leaves(answer):
            texts.append(leaf)
            self._by_key.setdefault(_key(leaf), set()).add(id)
            if len(leaf) <= 2_000:
                for match in NUMBER.finditer(leaf):
                    self._by_key.setdefault(_key(match[0]), set()).add(id)
        self._texts[id] = texts

    @property
    def call_ids(self) -> frozenset[str]:
        """Ids of all calls whose returned values are in the index."""
        return frozenset(self._texts)

    def calls_with(self, text: str) -> frozenset[str]:
        """Return the ids of the calls that returned this value.

        Empty if there are more than ``MAX_SOURCES``, because the value then says little about its
        origin.
        """
        found = self._by_key.get(_key(text), set())
        return frozenset(found) if len(found) <= MAX_SOURCES else frozenset()

    def guess_source_calls(self, value: Any) -> frozenset[str]:
        """Guess which calls returned a literal that occurs in the code, or the numbers in this
        literal.

        Returns the ids of these calls. Values that are too short to identify a call are ignored.
        """
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            return frozenset()
        text = str(value).strip()
        if is_distinctive(text) and (calls := self.calls_with(text)):
            return calls
        numbers = [
            match for match in NUMBER.finditer(text[:_MAX_LITERAL]) if is_distinctive(match[0])
        ]
        return frozenset[str]().union(*(self.calls_with_number(text, match) for match in numbers))

    def calls_with_number(self, text: str, match: re.Match[str]) -> frozenset[str]:
        """Return the ids of the calls that returned the number at ``match`` in ``text``.

        A percentage also matches its fraction, so 45.67 % matches 0.4567.
        """
        calls = self.calls_with(match[0])
        if calls or not _PERCENT.match(text, match.end()):
            return calls
        return self.calls_with(str(_key(match[0]) / 100))

    def texts_returned_by(self, calls: Iterable[str]) -> list[str]:
        """Return the strings that ``calls`` returned, the longest first."""
        texts = {text for call in calls for text in self._texts.get(call, ())}
        return sorted((text for text in texts if len(text) > 1), key=len, reverse=True)


def is_distinctive(text: str) -> bool:
    """Return True if a string is long enough that an equal string elsewhere is hardly a
    coincidence."""
    if NUMBER.fullmatch(text):
        return sum(letter.isdigit() for letter in text) >= 3
    return len(text) >= _MIN_TEXT


def leaves(answer: Any) -> Iterator[str]:
    """Yield all strings inside a value, including those in nested lists and dicts.

    A value that is itself a string is yielded too. Lists and dicts that are encoded as JSON in a
    text are searched too.
    """
    stack, num = [answer], 0
    while stack and num < _MAX_LEAVES:
        value = stack.pop()
        num += 1
        if isinstance(value, dict):
            stack += value.values()
        elif isinstance(value, list | tuple):
            stack += value
        elif isinstance(value, str):
            text = value.strip()
            if text:
                yield text
            if text[:1] in ("[", "{"):
                with contextlib.suppress(msgspec.DecodeError):
                    stack.append(msgspec.json.decode(text))
            elif "\n" in text:
                stack += [line for line in text.split("\n") if len(line.strip()) >= _MIN_TEXT]
        elif value is not None:
            yield answer_text(value)


class ReturnedValueSpan(msgspec.Struct, frozen=True):
    """A range ``[start, end)`` of a string that shows a value returned by ``calls``."""

    start: int
    end: int
    calls: frozenset[str]


def find_values(
    text: str, returned: ValueOriginIndex, calls: frozenset[str]
) -> list[ReturnedValueSpan]:
    """Return the places in ``text`` that show a value returned by one of ``calls``.

    They do not overlap, since longer values take precedence.
    """
    taken = bytearray(len(text))
    spans: list[ReturnedValueSpan] = []
    for value in returned.texts_returned_by(calls):
        sources = returned.calls_with(value) & calls
        if not sources or NUMBER.fullmatch(value):
            continue
        # The text may show a value as it is, as Python prints it, or as JSON.
        for form in dict.fromkeys((value, repr(value)[1:-1], answer_text([value])[2:-2])):
            spans += _occurrences(text, form, sources, taken)
    for match in NUMBER.finditer(text):
        sources = returned.calls_with_number(text, match) & calls
        if sources and not any(taken[match.start() : match.end()]):
            taken[match.start() : match.end()] = b"\1" * len(match[0])
            spans.append(ReturnedValueSpan(match.start(), match.end(), sources))
    return spans


def _occurrences(
    text: str, value: str, calls: frozenset[str], taken: bytearray
) -> list[ReturnedValueSpan]:
    found: list[ReturnedValueSpan] = []
    at = text.find(value)
    while at >= 0 and len(found) < 20:
        end = at + len(value)
        before, after = text[at - 1 : at], text[end : end + 1]
        inside = (before.isalnum() and value[0].isalnum()) or (
            after.isalnum() and value[-1].isalnum()
        )
        if not inside and not any(taken[at:end]):
            taken[at:end] = b"\1" * len(value)
            found.append(ReturnedValueSpan(at, end, calls))
        at = text.find(value, end)
    return found
