"""List the mutants of one module as JSON. Each changes one operator, number, constant, loop,
decorator or exception. ``scripts/mutate`` runs this file in the environment that has cosmic-ray.

    list_mutants.py MODULE OPERATORS        OPERATORS is a regular expression

It decides which mutants count: not those in annotations, which are not evaluated, in code for type
checkers only, in ``__all__``, in the bodies of protocols, or of the ``*`` that separates
parameters. It does not decide which tests run.
"""

from __future__ import annotations

import ast
import collections
import itertools
import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.plugins import get_operator, operator_names

Place = tuple[int, int]
"""(line, column)"""


def main() -> None:
    path, operators = Path(sys.argv[1]), re.compile(sys.argv[2])
    source = path.read_text()
    tree, parsed = ast.parse(source), get_ast(source)
    unevaluated = list(parts_without_behaviour(tree))
    mutants: list[dict[str, Any]] = []
    excluded: collections.Counter[str] = collections.Counter()
    for name in operator_names():
        if not operators.fullmatch(name.removeprefix("core/")):
            continue
        operator = get_operator(name)()
        for occurrence, (start, end, changed) in enumerate(changes_by(operator, source, parsed)):
            why = next((why for why, *span in unevaluated if span[0] <= start < span[1]), None)
            if why is None and not compiles(changed):
                why = "not a program"
            if why is not None:
                excluded[why] += 1
                continue
            is_body, first, last, names = context_of(tree, start)
            mutants.append(
                {
                    "operator": name,
                    "occurrence": occurrence,
                    "line": start[0],
                    "column": start[1],
                    "end_line": end[0],
                    "in_function": is_body,
                    "statement": [first, last],
                    "names": names,
                    "source": changed,
                }
            )
    mutants.sort(
        key=lambda each: (each["line"], each["column"], each["operator"], each["occurrence"])
    )
    json.dump({"mutants": mutants, "excluded": excluded}, sys.stdout)


def changes_by(operator: Any, source: str, parsed: Any) -> Iterator[tuple[Place, Place, str]]:
    """Yield (start, end, changed source) for each place that an operator changes. Parsing the
    source again for each change, as cosmic-ray does, would take minutes."""
    offsets = list(
        itertools.accumulate(
            (len(line) for line in source.split("\n")), lambda a, b: a + b + 1, initial=0
        )
    )
    for node in ast_nodes(parsed):
        for index, (start, end) in enumerate(list(operator.mutation_positions(node))):
            (first, column), (last, end_column) = node.get_start_pos_of_prefix(), node.end_pos
            before = source[: offsets[first - 1] + column]
            after = source[offsets[last - 1] + end_column :]
            restore = remembered(node)
            try:
                changed = operator.mutate(node, index)
                code = changed.get_code() if changed is not None else ""
            except AttributeError:  # it cannot replace the exception of ``except module.Name``
                code = "("
            restore()
            yield start, end, f"{before}{code}{after}"


def remembered(node: Any) -> Callable[[], None]:
    """Return a function that undoes changes within ``node``."""
    nodes, found = [node], list[tuple[Any, dict[str, Any]]]()
    while nodes:
        each = nodes.pop()
        children = list(getattr(each, "children", ()))
        nodes += children
        names = ("children", "value", "prefix", "parent")
        kept = {name: getattr(each, name) for name in names if hasattr(each, name)}
        if children:
            kept["children"] = children
            kept.pop("prefix", None)
            kept.pop("value", None)
        found.append((each, kept))

    def restore() -> None:
        for each, kept in found:
            for name, value in kept.items():
                setattr(each, name, value)

    return restore


def compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def parts_without_behaviour(tree: ast.Module) -> Iterator[tuple[str, Place, Place]]:
    """Yield (reason, start, end) for each part of a module that does not run."""
    for node in ast.walk(tree):
        match node:
            case (
                ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation)
            ):
                yield "in an annotation", *span(annotation)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                yield "for type checkers only", *span(node)
            case ast.Assign(targets=[ast.Name(id="__all__")]):
                yield "in __all__", *span(node)
            case ast.ClassDef(bases=bases) if any(is_protocol(base) for base in bases):
                yield "in a protocol", *span(node)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            if node.returns is not None:
                yield "in an annotation", *span(node.returns)
            if node.args.kwonlyargs and node.args.vararg is None:
                parts = [*node.args.posonlyargs, *node.args.args, *node.args.defaults]
                start = max((span(each)[1] for each in parts), default=span(node)[0])
                yield "between parameters", start, span(node.args.kwonlyargs[0])[0]


def is_protocol(base: ast.expr) -> bool:
    return isinstance(base, ast.Name) and base.id == "Protocol"


def span(node: ast.stmt | ast.expr | ast.arg) -> tuple[Place, Place]:
    return (node.lineno, node.col_offset), (node.end_lineno or 0, node.end_col_offset or 0)


def context_of(tree: ast.Module, place: Place) -> tuple[bool, int, int, list[str]]:
    """Return whether ``place`` is in the body of a function, the first and last line of its
    statement (if compound, without its body), and the names of the definitions around it outside
    of functions."""
    nodes: list[ast.AST] = list(tree.body)
    is_in_function, first, last = False, 1, 1
    names: list[str] = []
    while node := next((each for each in nodes if begins(each) <= place <= ends(each)), None):
        parts = [
            part
            for field in ("body", "orelse", "finalbody", "handlers", "cases")
            if isinstance(part := getattr(node, field, None), list) and part
        ]
        heads = [begins(part[0])[0] for part in parts]
        first, last = (
            begins(node)[0],
            max(begins(node)[0], min(heads) - 1) if heads else ends(node)[0],
        )
        if not is_in_function:
            names += defined_by(node)
        nodes = [each for part in parts for each in part]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            is_in_function = is_in_function or place >= begins(node.body[0])
    return is_in_function, first, last, names


def defined_by(node: ast.AST) -> list[str]:
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
    return []


def begins(node: ast.AST) -> Place:
    decorators = getattr(node, "decorator_list", None)
    if decorators:
        return decorators[0].lineno, 0
    if isinstance(node, ast.match_case):
        return node.pattern.lineno, 0
    return getattr(node, "lineno", 0), 0


def ends(node: ast.AST) -> Place:
    if isinstance(node, ast.match_case):
        node = node.body[-1]
    return getattr(node, "end_lineno", 0), 1 << 20


if __name__ == "__main__":
    main()
