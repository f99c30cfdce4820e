"""Structure and readability of the package in numbers.

    python benchmarks/house.py            print a table
    python benchmarks/house.py --json     also print, as the last line, {"figures": [{"name", …},
                                          …]}
    python benchmarks/house.py --against v0.9    also compare journals with those of a commit

Three rules come first: no import cycle, no protocol with one implementer, and no object on the seven
walks of `benchmarks/walk.py` that `docs/architecture.md` does not name. Then, without a floor, the
statements that a reader of the core has to own: all but `testing/` and `extras/` (`ASIDE`).

Counts come from syntax trees and from walks that are traced, so every run gives the same numbers;
`--quick` changes nothing. Decides what is counted. Not here: the rules themselves (see
`scripts/check_house.py`, `tests/test_names.py`, `scripts/check_prose.py`,
`scripts/check_public.py`).
"""

from __future__ import annotations

import argparse
import ast
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

sys.path.insert(0, str(ROOT))

import check_house  # noqa: E402
import check_prose  # noqa: E402
import check_public  # noqa: E402
from figures import Figure, show  # noqa: E402
from journals import different as different_journals  # noqa: E402
from walk import undocumented as not_named  # noqa: E402
from walk import walks  # noqa: E402

from tests.test_house import two_way_sub_packages  # noqa: E402

ASIDE = ("extras/", "testing/")
"""Folders beside the core: sandboxes of other vendors, planning, and studies; and doubles for
tests."""


def sources() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "ramify").rglob("*.py")):
        yield path.relative_to(ROOT).as_posix(), path.read_text("utf-8")


LOOP = tuple(
    f"train/{name}.py" for name in ("trainer", "learner", "run_record", "assemble", "stages")
)
PARTS = {
    "engine": lambda name: name.startswith("engine/"),
    "training loop": lambda name: name in LOOP,
    "sandbox session": lambda name: name == "sandbox/host/session.py",
}
"""Part of the package whose classes must stay small -> predicate: does a file belong to it?"""


def repeated_names() -> int:
    """Count the public class names that are used for more than one class."""
    names = Counter(
        node.name
        for _, text in sources()
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    return sum(num > 1 for num in names.values())


def core_statements() -> int:
    """Count the statements (``ast.stmt``) of the package without the parts ``ASIDE``."""
    return sum(
        sum(1 for _ in check_house.statements(ast.parse(text)))
        for path, text in sources()
        if not path.removeprefix("ramify/").startswith(ASIDE)
    )


def class_sizes(part: str) -> tuple[int, int]:
    """Return the largest numbers of constructor arguments and of attributes over the classes of
    ``part``. The public ``RLM`` may take any number of arguments, since these are its options."""
    arguments = attributes = 0
    for path, text in sources():
        if not PARTS[part](path.removeprefix("ramify/")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                attributes = max(attributes, len(_attributes(node)))
                if node.name != "RLM":
                    arguments = max(arguments, _num_arguments(node))
    return arguments, attributes


def _num_arguments(node: ast.ClassDef) -> int:
    for child in node.body:
        if isinstance(child, ast.FunctionDef) and child.name == "__init__":
            signature = child.args
            return len([*signature.posonlyargs, *signature.args, *signature.kwonlyargs]) - 1
    return 0


def _attributes(node: ast.ClassDef) -> set[str]:
    """Names that methods assign on ``self``."""
    return {
        child.attr
        for child in ast.walk(node)
        if isinstance(child, ast.Attribute)
        and isinstance(child.ctx, ast.Store)
        and isinstance(child.value, ast.Name)
        and child.value.id == "self"
    }


def loaded_by(statement: str) -> set[str]:
    """Modules that ``statement`` loads in a new interpreter."""
    script = (
        f"import sys; before = set(sys.modules); {statement}; "
        "print(*sorted(set(sys.modules) - before))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return set(done.stdout.split())


def added_by_import() -> set[str]:
    """Modules that ``import ramify`` loads, except the package itself and the few modules of the
    standard library that it needs."""
    before = loaded_by("import __future__, importlib, warnings, logging")
    return loaded_by("import ramify") - before - {"ramify"}


def figures(commit: str = "") -> Iterator[Figure]:
    """Yield each figure. Journals are compared with those of ``commit``, if one is given."""
    hits = [
        hit
        for name in check_prose.files([])
        for hit in check_prose.hits(name, (ROOT / name).read_text("utf-8"))
    ]
    long_lines = sum(len(line) > 100 for _, text in sources() for line in text.splitlines())
    cycles = check_house.import_cycles()
    yield Figure("import cycles", len(cycles), "cycles", {"before": 12}, 0)
    lone = check_house.lone_protocols()
    yield Figure("protocols with one implementer", len(lone), "protocols", {}, 0)
    for walk in walks():
        hidden = not_named(walk)
        yield Figure(f"undocumented objects: {walk.name}", len(hidden), "objects", {}, 0)
    yield Figure("statements of the core", core_statements(), "statements", {})
    yield Figure("repeated public class names", repeated_names(), "names", {"before": 88}, 0)
    yield Figure("phrases that are not plain English", len(hits), "phrases", {}, 0)
    yield Figure(
        "docstrings that begin with 'Of'",
        sum(h.phrase == "Of" for h in hits),
        "docstrings",
        {"before": 219},
        0,
    )
    yield Figure("lines over 100 columns", long_lines, "lines", {"before": 5517}, 100)
    deep, undocumented = check_public.deep_imports(), check_public.undocumented()
    yield Figure("deep imports in what users read", len(deep), "imports", {}, 0)
    yield Figure("exported names without an example or unit", len(undocumented), "names", {}, 0)
    yield Figure("modules that import ramify adds", len(added_by_import()), "modules", {}, 0)
    two_way = two_way_sub_packages()
    yield Figure("two-way sub-packages", len(two_way), "sub-packages", {"before": 2}, 0)
    for part in PARTS:
        arguments, attributes = class_sizes(part)
        yield Figure(f"{part}: most constructor arguments", arguments, "arguments", {}, 8)
        yield Figure(f"{part}: most attributes", attributes, "attributes", {}, 16)
    if commit:
        changed = different_journals(commit)
        yield Figure(f"journals that differ from {commit}", len(changed), "scenarios", {}, 0)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="the same, since it is quick")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--against", default="", metavar="COMMIT", help="also compare journals with this version"
    )
    options = parser.parse_args()
    found = list(figures(options.against))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
