"""Which place in a cell's code made which of its sub-calls.

A journal records the sub-calls of a cell in the order of their creation, but not the expression
that made each. Not here: where the results went from there (see data_flow.py).
"""

from __future__ import annotations

import ast
from collections.abc import Sequence

import msgspec

QUERIES = {
    "llm_query": "lm",
    "llm_query_batched": "lm",
    "rlm_query": "rlm",
    "rlm_query_batched": "rlm",
}
_MIN_WORDS = 6
"""Characters of a literal that tells one place from another."""


class MadeCall(msgspec.Struct, frozen=True):
    """A sub-call of a cell, in order of creation."""

    id: str
    kind: str
    question: str


def assign_sites(tree: ast.Module, made: Sequence[MadeCall]) -> dict[ast.AST, list[str]]:
    """Assign the sub-calls of a cell to the places in its code that made them.

    A place is recognised by its kind, by the literal words of its prompt, and, where each place
    runs once, by the order. Calls that look the same are assigned to every place of their
    kind.
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
    """(node, function, literal words of its prompt) of each place, in source order."""
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
    tree: ast.Module, sites: Sequence[tuple[ast.AST, str, list[str]]], made: Sequence[MadeCall]
) -> dict[ast.AST, list[str]] | None:
    """Assign by order if each place runs once and makes a known number of calls."""
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
