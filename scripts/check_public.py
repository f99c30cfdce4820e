"""Check the public names: what users read imports nothing else, and each name is documented.

    python scripts/check_public.py      print each fault as FILE:LINE: what; exit with 1 if any

A *deep import* is one of a name that no public namespace lists, in a recipe, an example, a page
(blocks of Python, and ``python -c`` in blocks of commands) or a notebook. A name is *documented* if
its docstring has an example (``>>>``, or an indented or fenced block), or if the docstring or those
of its fields and methods state a unit or a shape. Decides only these two rules. Not here: which
names are public (``ramify/**/__init__.pyi``).
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).parents[1]
READ_BY_USERS = ("recipes/", "examples/", "docs/", "README.md", "CONTRIBUTING.md")
NAMESPACES = ("", "evaluate", "inference", "plans", "ray", "tasks", "testing", "train")
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```", re.MULTILINE | re.DOTALL)
STATEMENT = re.compile(r"\b(?:from ramify(?!_)\S* import [\w, ]+|import ramify(?!_)\S*)")
EXAMPLE = re.compile(r"^\s*>>> |^ {4,}\S|^```", re.MULTILINE)
UNIT = re.compile(
    r"\b(?:bytes|characters|tokens|seconds|milliseconds|dollars|turns|steps|ranks|GPUs|percent"
    r"|number of|share of|weight of|per token|per turn|per step|temperature|logits"
    r"|log-probabilit\w+|from 0 to 1|0 or 1|1 or 0)\b|\[[A-Z][\w, ]*\]|\[n\]",
    re.IGNORECASE,
)


def public_names() -> dict[str, dict[str, str]]:
    """Namespace -> name -> the module that defines it."""
    found: dict[str, dict[str, str]] = {}
    for space in NAMESPACES:
        stub = ast.parse((ROOT / "ramify" / space / "__init__.pyi").read_text("utf-8"))
        found[f"ramify.{space}".rstrip(".")] = {
            alias.name: node.module or ""
            for node in stub.body
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ramify")
            for alias in node.names
        }
    return found


def deep_imports(root: Path = ROOT) -> list[str]:
    """``FILE:LINE: import`` of each import below ``root`` of a name that is not public."""
    public = public_names()
    return [
        f"{name}:{line}: {text}"
        for name in _files(root)
        for line, source in _code(root / name)
        for line, text in _private(source, line, public)
    ]


def undocumented() -> list[str]:
    """``FILE: name`` of each public name without a documented example or unit."""
    homes = {(home, name) for names in public_names().values() for name, home in names.items()} - {
        ("ramify", space) for space in NAMESPACES
    }
    return sorted(
        f"{_path(home)}: {name}"
        for home, name in homes
        if not is_documented((ROOT / _path(home)).read_text("utf-8"), name)
    )


def _files(root: Path) -> list[str]:
    """Names of the files that users read, as far as git knows them if ``root`` is a checkout."""
    done = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=root, capture_output=True, text=True
    )
    names = (
        done.stdout.splitlines()
        if done.returncode == 0
        else [path.relative_to(root).as_posix() for path in sorted(root.rglob("*"))]
    )
    return [name for name in names if name.startswith(READ_BY_USERS) and (root / name).is_file()]


def _code(path: Path) -> Iterator[tuple[int, str]]:
    """(first line, text) of each piece of code in a file."""
    if path.suffix == ".py":
        yield 1, path.read_text("utf-8")
    elif path.suffix == ".md":
        text = path.read_text("utf-8")
        for block in FENCE.finditer(text):
            yield text.count("\n", 0, block.start(3)) + 1, block[3]
    elif path.suffix == ".ipynb":
        for cell in json.loads(path.read_text("utf-8"))["cells"]:
            if cell["cell_type"] == "code":
                yield 1, "".join(cell["source"])


def _private(
    source: str, first: int, public: dict[str, dict[str, str]]
) -> Iterator[tuple[int, str]]:
    for line, statement in _imports(source):
        node = ast.parse(statement).body[0]
        if isinstance(node, ast.Import):
            wrong = [alias.name for alias in node.names if alias.name not in public]
        else:
            assert isinstance(node, ast.ImportFrom)
            names = {*public.get(node.module or "", {}), "__version__", "*"}
            wrong = [alias.name for alias in node.names if alias.name not in names]
        if wrong:
            yield first + line - 1, statement


def _imports(source: str) -> Iterator[tuple[int, str]]:
    """(line, statement) of each import from the package. Code that is not Python, such as a command
    or a cell with ``!``, is searched for statements."""
    try:
        tree = ast.parse(source)
    except SyntaxError:
        for found in STATEMENT.finditer(source):
            yield source.count("\n", 0, found.start()) + 1, found[0].rstrip(", ;\"'")
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):  # a file that it writes
            yield from ((node.lineno, found[0]) for found in STATEMENT.finditer(node.value))
        elif isinstance(node, ast.Import):
            ours = [alias for alias in node.names if alias.name.partition(".")[0] == "ramify"]
            if ours:
                yield node.lineno, ast.unparse(ast.Import(ours))
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "ramify":
            yield node.lineno, ast.unparse(node)


def _path(home: str) -> str:
    module = ROOT.joinpath(*home.split("."))
    path = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    return path.relative_to(ROOT).as_posix()


def is_documented(source: str, name: str) -> bool:
    """Whether the docstring of ``name`` in the module ``source`` has an example or a unit."""
    for node, after in pairwise([*ast.parse(source).body, ast.Pass()]):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.name == name:
                own = ast.get_docstring(node) or ""
                return bool(own) and bool(EXAMPLE.search(own) or UNIT.search(_whole(node)))
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(isinstance(target, ast.Name) and target.id == name for target in targets):
                text = _text(after)
                return bool(EXAMPLE.search(text) or UNIT.search(text))
    return False


def _whole(node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    """The docstrings of ``node`` and, for a class, of its fields and public methods."""
    texts = [_text(each) for each in node.body]
    for each in node.body if isinstance(node, ast.ClassDef) else ():
        is_method = isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
        if is_method and (each.name in ("__init__", "__call__") or not each.name.startswith("_")):
            texts.append(ast.get_docstring(each) or "")
    return "\n".join(texts)


def _text(node: ast.AST) -> str:
    value = node.value if isinstance(node, ast.Expr) else None
    is_text = isinstance(value, ast.Constant) and isinstance(value.value, str)
    return value.value if is_text else ""  # type: ignore[union-attr, return-value]


def main() -> int:
    faults = [*deep_imports(), *(f"{each} has no example or unit" for each in undocumented())]
    print(*faults, sep="\n", end="\n" if faults else "")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
