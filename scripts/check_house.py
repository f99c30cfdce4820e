"""Check the structure of the package: import cycles, and protocols with one implementer.

    python scripts/check_house.py      print each fault on a line; exit with 1 if there is any

An import counts wherever it stands: at the top, in a function, or under ``TYPE_CHECKING``.
``from p import m`` imports the module ``p.m`` if there is one, else ``p``.

A class or a module *implements* a protocol if it inherits from it, or if it defines each of its
members (a class itself or in a base class of the package) and its methods take parameters of the
same names. A protocol that has only ``__call__`` is implemented by functions and methods. A
protocol that users implement is in the list of ``docs/plugins.md`` and needs no implementer here.

Decides only these two rules. Not here: which folder may import which (``tests/test_house.py``), and
whether the documentation names the objects of a walk (``benchmarks/walk.py``).
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ramify"
PLUGINS = ROOT / "docs" / "plugins.md"

Function = ast.FunctionDef | ast.AsyncFunctionDef
UNKNOWN = ("**",)
"""Parameters of a value that is assigned, which may be a function."""


@cache
def modules(package: Path = PACKAGE) -> dict[str, tuple[Path, ast.Module]]:
    """Dotted name of each module of ``package`` -> its file and its syntax tree."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = (package.name, *path.relative_to(package).with_suffix("").parts)
        name = ".".join(parts).removesuffix(".__init__")
        found[name] = (path, ast.parse(path.read_bytes()))
    return found


def statements(parent: ast.AST) -> Iterator[ast.stmt]:
    """Yield the statements inside ``parent``, those inside them included."""
    for field in ("body", "handlers", "orelse", "finalbody", "cases"):
        for child in getattr(parent, field, ()):
            if isinstance(child, ast.stmt):
                yield child
            yield from statements(child)


def imported_modules(package: Path = PACKAGE) -> dict[str, set[str]]:
    """Module of ``package`` -> the other modules of ``package`` that its import statements name."""
    known = modules(package)
    graph = {}
    for name, (path, tree) in known.items():
        here = name if path.name == "__init__.py" else name.rpartition(".")[0]
        graph[name] = {each for each in _named(tree, here, known) if each != name}
    return graph


def _named(tree: ast.Module, package: str, known: Container[str]) -> Iterator[str]:
    for node in statements(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1]
            parts = [*(above if node.level else []), *filter(None, [node.module])]
            for alias in node.names:
                names = (".".join([*parts, alias.name]), ".".join(parts))
                yield from [each for each in names if each in known][:1]


def import_cycles(package: Path = PACKAGE) -> list[list[str]]:
    """Groups of at least two modules, each of which imports all others directly or indirectly; the
    largest group first."""
    graph = imported_modules(package)
    reached = {name: _reached(name, graph) for name in graph}
    groups = {
        tuple(sorted(other for other in reached[name] if name in reached[other]))
        for name in graph
        if name in reached[name]
    }
    return sorted(map(list, groups), key=lambda group: (-len(group), group))


def _reached(start: str, graph: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    ahead = [*graph[start]]
    while ahead:
        if (name := ahead.pop()) not in seen:
            seen.add(name)
            ahead += graph[name]
    return seen


class Shape(NamedTuple):
    """What a class, a function or a module looks like from outside."""

    place: str
    """``module.Name``; for a module, its dotted name."""
    bases: tuple[str, ...]
    """Names of its base classes, without their modules."""
    members: dict[str, tuple[str, ...] | None]
    """Name of a method or field -> names of the method's parameters; None for a field."""
    is_class: bool
    is_protocol: bool = False


def shapes(package: Path = PACKAGE) -> Iterator[Shape]:
    """Yield each class and module of ``package``, and each function and method as a shape with only
    ``__call__``."""
    for module, (_, tree) in modules(package).items():
        yield Shape(module, (), dict(_members(tree)), is_class=False)
        for node in statements(tree):
            if isinstance(node, ast.ClassDef):
                bases = tuple(map(_last_name, node.bases))
                is_protocol = any(map(_is_protocol, node.bases))
                place = f"{module}.{node.name}"
                yield Shape(place, bases, dict(_members(node)), True, is_protocol)
                if not is_protocol:
                    yield from _functions(node, place)
        yield from _functions(tree, module)


def _functions(parent: ast.Module | ast.ClassDef, place: str) -> Iterator[Shape]:
    for name, parameters in _members(parent):
        if parameters not in (None, UNKNOWN) and name != "__call__":
            yield Shape(f"{place}.{name}", (), {"__call__": parameters}, is_class=False)


def _is_protocol(base: ast.expr) -> bool:
    """Whether ``base`` is ``typing.Protocol``, not a class such as ``asyncio.Protocol``."""
    if isinstance(base, ast.Subscript):
        return _is_protocol(base.value)
    return ast.unparse(base) in ("Protocol", "typing.Protocol")


def _last_name(node: ast.expr) -> str:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _members(parent: ast.Module | ast.ClassDef) -> Iterator[tuple[str, tuple[str, ...] | None]]:
    """Yield the names that ``parent`` defines, and those that methods assign on ``self``."""
    is_class = isinstance(parent, ast.ClassDef)
    for node in statements(parent) if is_class else ():
        for target in _targets(node):
            if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self":
                yield target.attr, UNKNOWN
    for child in parent.body:
        for target in _targets(child):
            if isinstance(target, ast.Name):
                yield target.id, UNKNOWN if isinstance(child, ast.Assign) else None
        if isinstance(child, Function):
            decorators = {_last_name(each) for each in child.decorator_list}
            if decorators & {"property", "cached_property"}:
                yield child.name, None
            else:
                bound = is_class and "staticmethod" not in decorators
                yield child.name, _parameters(child, bound=bound)


def _targets(node: ast.stmt) -> Iterator[ast.expr]:
    """Yield what ``node`` assigns to; the parts of a tuple one by one."""
    if isinstance(node, ast.AnnAssign):
        yield node.target
    elif isinstance(node, ast.Assign):
        for target in node.targets:
            yield from target.elts if isinstance(target, ast.Tuple) else [target]


def _parameters(node: Function, *, bound: bool) -> tuple[str, ...]:
    """Names of the parameters, without ``self``; "*" for one that is given only by position."""
    positional = [*("*" for _ in node.args.posonlyargs), *(arg.arg for arg in node.args.args)]
    return (*positional[bound:], *(arg.arg for arg in node.args.kwonlyargs))


def implementers(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Map ``module.Name`` of each protocol of ``package`` to the places of its implementers."""
    found = list(shapes(package))
    classes = {each.place.rpartition(".")[2]: each for each in found if each.is_class}

    def lineage(shape: Shape) -> Iterator[Shape]:
        yield shape
        for base in shape.bases:
            if base in classes and classes[base] is not shape:
                yield from lineage(classes[base])

    def all_members(shape: Shape) -> dict[str, tuple[str, ...] | None]:
        ancestors = [*lineage(shape)][::-1]
        return {name: given for each in ancestors for name, given in each.members.items()}

    concrete = [
        ({base.place for base in lineage(each)}, all_members(each), each.place)
        for each in found
        if not each.is_protocol
    ]
    protocols = [(each.place, all_members(each)) for each in found if each.is_protocol]
    return {
        protocol: sorted(
            place
            for ancestors, members, place in concrete
            if protocol in ancestors or _has(members, wanted)
        )
        for protocol, wanted in protocols
    }


def _has(
    members: Mapping[str, tuple[str, ...] | None], wanted: Mapping[str, tuple[str, ...] | None]
) -> bool:
    return all(name in members and _accepts(members[name], wanted[name]) for name in wanted)


def _accepts(given: tuple[str, ...] | None, wanted: tuple[str, ...] | None) -> bool:
    if wanted is None or given is UNKNOWN:
        return True
    if given is None:
        return False
    return len(given) >= len(wanted) and all(
        "*" in (one, other) or one == other for one, other in zip(wanted, given, strict=False)
    )


def documented_plugins(page: Path = PLUGINS) -> set[str]:
    """Names of the protocols that ``page`` tells users to implement: the first column of the table
    under "Protocols for your own parts"."""
    _, _, rest = page.read_text("utf-8").partition("## Protocols for your own parts\n")
    table, _, _ = rest.partition("\n## ")
    return set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def lone_protocols(package: Path = PACKAGE) -> dict[str, list[str]]:
    """Protocols with fewer than two implementers that are no documented plug-in -> implementers."""
    plugins = documented_plugins()
    return {
        place: found
        for place, found in implementers(package).items()
        if len(found) < 2 and place.rpartition(".")[2] not in plugins
    }


def main() -> int:
    cycles, lone = import_cycles(), lone_protocols()
    for group in cycles:
        print(f"{len(group)} modules import each other: {', '.join(group)}")
    for place, found in lone.items():
        print(f"protocol {place}: implemented by {', '.join(found) or 'nothing'}")
    return bool(cycles or lone)


if __name__ == "__main__":
    sys.exit(main())
