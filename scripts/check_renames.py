"""Check that a commit only renamed: `scripts/check_renames.py BEFORE AFTER`, two commits.

Every Python file of BEFORE must exist in AFTER, under the name in ``docs/renames.tsv``, with the
same syntax tree. Docstrings are ignored, imports may be reordered, and identifiers and texts may
differ only as the table says. Prints each difference that the table does not explain, and the
number of renamed identifiers.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "docs" / "renames.tsv"
Pairs = set[tuple[str, str]]


def git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout


def table() -> tuple[dict[str, str], Pairs]:
    """Return old module -> new module, and every other (old, new) pair of names."""
    modules: dict[str, str] = {}
    pairs: Pairs = set()
    for line in TABLE.read_text("utf-8").splitlines():
        if line and not line.startswith("#"):
            kind, _, old, new = line.split("\t")
            if kind == "module":
                modules[old] = new
                pairs.add((old.rpartition(".")[2], new.rpartition(".")[2]))
            else:
                pairs.add((old, new))
    return modules, pairs


def moved(module: str, modules: dict[str, str]) -> str:
    """Return the new name of ``module``. The longest matching entry of the table decides."""
    for old in sorted(modules, key=len, reverse=True):
        if module == old or module.startswith(old + "."):
            return modules[old] + module[len(old) :]
    return module


def statements(source: str) -> ast.Module:
    """Return the syntax tree of ``source`` without docstrings."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            statements = [child for child in body if not _is_text(child)]
            node.body = statements or [ast.Pass()]  # type: ignore[attr-defined]
    return tree


def _is_text(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


class Comparison:
    """Comparison of one file with its new version."""

    def __init__(self, path: str, modules: dict[str, str], pairs: Pairs) -> None:
        self.path = path
        self.modules = modules
        self.pairs = pairs
        self.faults: list[str] = []
        self.num_mapped = 0

    def compare(self, old: Any, new: Any, line: int = 0) -> None:
        line = getattr(new, "lineno", line)
        if isinstance(old, list) and isinstance(new, list):
            old, new = self._without_imports(old, new)
            if len(old) != len(new):
                self.faults.append(f"{self.path}:{line}: {len(old)} nodes became {len(new)}")
            for one, other in zip(old, new, strict=False):
                self.compare(one, other, line)
        elif isinstance(old, ast.AST) and type(old) is type(new):
            for field in old._fields:
                self.compare(getattr(old, field, None), getattr(new, field, None), line)
        elif isinstance(old, str) and isinstance(new, str):
            self._texts(old, new, line)
        elif old != new or type(old) is not type(new):
            self.faults.append(
                f"{self.path}:{line}: {ast.dump(old) if isinstance(old, ast.AST) else old!r}"
            )

    def _texts(self, old: str, new: str, line: int) -> None:
        if old == new:
            return
        self.num_mapped += 1
        before, after = re.findall(r"\w+|\W", old), re.findall(r"\w+|\W", new)
        if (old, new) in self.pairs or moved(old, self.modules) == new:
            return
        if not self._same_words(before, after):
            self.faults.append(f"{self.path}:{line}: {old!r} became {new!r}")

    def _same_words(self, before: list[str], after: list[str]) -> bool:
        """Return True if the texts differ only by names of modules and classes in them."""
        if len(before) != len(after):
            return False
        return all(
            one == other or (one, other) in self.pairs
            for one, other in zip(before, after, strict=True)
        )

    def _without_imports(self, old: list[Any], new: list[Any]) -> tuple[list[Any], list[Any]]:
        imports = (ast.Import, ast.ImportFrom)
        before = sorted(
            name for node in old if isinstance(node, imports) for name in self._imported(node, True)
        )
        after = sorted(
            name
            for node in new
            if isinstance(node, imports)
            for name in self._imported(node, False)
        )
        if before != after:
            missing, added = set(before) - set(after), set(after) - set(before)
            if len(missing) != len(added):
                self.faults.append(f"{self.path}: imports {sorted(missing)} became {sorted(added)}")
        return [n for n in old if not isinstance(n, imports)], [
            n for n in new if not isinstance(n, imports)
        ]

    def _imported(self, node: ast.AST, is_old: bool) -> Iterator[str]:
        if isinstance(node, ast.Import):
            yield from (moved(a.name, self.modules) if is_old else a.name for a in node.names)
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{'.' * node.level}{node.module or ''}.{alias.name}"
                yield moved(full, self.modules) if is_old else full


def main(before: str, after: str) -> int:
    modules, pairs = table()
    new_files = set(git("ls-tree", "-r", "--name-only", after).splitlines())
    faults: list[str] = []
    num_files = num_mapped = 0
    for path in git("ls-tree", "-r", "--name-only", before).splitlines():
        if not path.endswith(".py"):
            continue
        is_package = path.endswith("/__init__.py")
        dotted = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
        target = moved(dotted, modules).replace(".", "/") + (
            "/__init__.py" if is_package else ".py"
        )
        if path == "ramify/__init__.py" or not path.startswith("ramify/"):
            target = path
        if target not in new_files:
            faults.append(f"{path}: {target} does not exist")
            continue
        comparison = Comparison(target, modules, pairs)
        comparison.compare(
            statements(git("show", f"{before}:{path}")).body,
            statements(git("show", f"{after}:{target}")).body,
        )
        faults += comparison.faults
        num_mapped += comparison.num_mapped
        num_files += 1
    print(*faults, sep="\n", end="\n" if faults else "")
    print(
        f"{num_files} files, {num_mapped} names mapped, {len(faults)} differences that the table "
        "does not explain"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
