"""The floors of the package: which room may import which, and that ``import ramify`` stays light.

A room imports lower floors; on its own floor only another room's ``base``. Imports inside functions
count, and so do those under ``TYPE_CHECKING``. The public names of ``ramify`` and its namespaces
come from every floor: they are listed in ``__init__.pyi`` files and imported on first use. Inside a
room, at any depth, nothing that a sub-package imports imports it, directly or not. No two modules
import each other, and a protocol has two implementers (``scripts/check_house.py``).
"""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "ramify"
SPEC = importlib.util.spec_from_file_location("check_house", ROOT / "scripts/check_house.py")
assert SPEC is not None
assert SPEC.loader is not None
check_house = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(check_house)
FLOORS = [
    {
        "types",
        "errors",
        "plugins",
        "trained_policy_settings",
        "progress",
        "secret_redaction",
        "logging",
        "log_handlers",
    }
    | {
        "terminal_sanitizer",
        "format_quantities",
        "lazy_pattern",
        "pip_install_command",
        "step_time_accounting",
        "deprecated_public_names",
        "session_module_compiler",
        "public_name_advice",
        "training_run_recognition",
        "user_folders",
        "nearest_name",
        "argument_types",
    },
    {"http_client"},
    {"actors", "clients", "sandbox", "models", "inference", "store", "sources", "tasks"},
    {"engine", "http_server"},
    {"plans"},
    {"evaluate", "maps"},
    {"train"},
    {"agents"},
    {"viewer", "serve"},
    {"cli", "testing", "ray"},
    {"extras", "__main__"},
]
TABLES_OF_EXTRAS = {("plugins", "extras.ENTRY_POINTS"), ("cli", "extras.EXTRA_COMMANDS")}
"""The only imports of the code beside the core: its tables of names, each by its one reader."""
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
ALSO = {
    ("inference", "models"),
    ("plugins", "errors"),
    ("deprecated_public_names", "errors"),
    ("trained_policy_settings", "errors"),
    ("trained_policy_settings", "plugins"),
    ("logging", "secret_redaction"),
    ("logging", "log_handlers"),
    ("errors", "terminal_sanitizer"),
    ("logging", "terminal_sanitizer"),
    ("log_handlers", "terminal_sanitizer"),
    *((room, "nearest_name") for room in ("errors", "plugins", "log_handlers")),
    ("errors", "argument_types"),
    ("log_handlers", "secret_redaction"),
    ("progress", "logging"),
    *((room, "lazy_pattern") for room in ("terminal_sanitizer", "secret_redaction", "types")),
    *((room, "actors") for room in FLOORS[2]),
}
"""Every room starts its processes through ``actors``."""
STANDARD_LIBRARY_ONLY = [
    "__init__.py",
    "actors/process_guard.py",
    *(f"sandbox/{folder}" for folder in ("guest", "server", "jail")),
]
"""Files, and folders whose modules may import each other, by relative names: they are loaded under
another one too."""
HEAVY = {"torch", "transformers", "aiohttp", "httpx", "pydantic", "jsonschema", "typer", "rich"}


def imports(tree: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of all that is imported anywhere in ``tree``; ``from a import b`` gives
    ``a.b``."""
    for node in ast.walk(tree):
        match node:
            case ast.Import():
                yield from (alias.name for alias in node.names)
            case ast.ImportFrom():
                above = (
                    package.split(".")[: len(package.split(".")) - node.level + 1]
                    if node.level
                    else []
                )
                yield from (
                    ".".join([*above, *filter(None, [node.module]), alias.name])
                    for alias in node.names
                )
            case ast.Call(
                func=ast.Attribute(attr="import_module")
                | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield name


def is_allowed(importer: str, name: str) -> bool:
    """Whether room ``importer`` may import ``name``, a dotted name below ``ramify``."""
    room, _, rest = name.partition(".")
    if room in (importer, "__version__", "lazy_namespace") or (importer, name) in TABLES_OF_EXTRAS:
        return True
    if room not in FLOOR_OF or FLOOR_OF[room] > FLOOR_OF[importer]:
        return False
    return (
        FLOOR_OF[room] < FLOOR_OF[importer]
        or rest.split(".")[0] == "base"
        or (importer, room) in ALSO
    )


def without_type_checking(tree: ast.Module) -> ast.Module:
    guarded = [
        node
        for node in tree.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return ast.Module([node for node in tree.body if node not in guarded], [])


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_rooms_import_only_lower_floors(path: Path) -> None:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    tree = ast.parse(path.read_bytes())
    if parts == ("__init__",):
        names = list(imports(without_type_checking(tree), "ramify"))
    else:
        assert parts[0] in FLOOR_OF, f"ramify/{parts[0]} is on no floor of the table in this file"
        names = list(imports(tree, ".".join(("ramify", *parts[:-1]))))
        inside = [name.removeprefix("ramify.") for name in names if name.startswith("ramify.")]
        wrong = [name for name in inside if not is_allowed(parts[0], name)]
        assert (wrong, "ramify" in names) == ([], False), f"{path} imports a room that it may not"


def test_only_the_server_of_aiohttp_is_used() -> None:
    """Requests go through ``http_client``: aiohttp's client gave one request another's reply."""
    found = {
        name
        for path in PACKAGE.rglob("*.py")
        for name in imports(ast.parse(path.read_bytes()), "ramify")
        if name.partition(".")[0] == "aiohttp"
    }
    assert found == {"aiohttp.web"}


def imported_siblings() -> dict[str, set[str]]:
    """Package or module below a room -> its siblings (below the same parent) that its files import.
    Names in tables of plug-ins are not imports."""
    modules = {
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(
            ".__init__"
        ): path
        for path in PACKAGE.rglob("*.py")
    }
    siblings: dict[str, set[str]] = {}
    for module, path in modules.items():
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        for name in imports(ast.parse(path.read_bytes()), package):
            while name and name not in modules:
                name = name.rpartition(".")[0]
            mine, others = module.split("."), name.split(".")
            same = 0
            while same < min(len(mine), len(others)) and mine[same] == others[same]:
                same += 1
            if 1 < same < min(len(mine), len(others)):
                one, other = ".".join(mine[: same + 1]), ".".join(others[: same + 1])
                siblings.setdefault(one, set()).add(other)
    return siblings


def two_way_sub_packages() -> list[str]:
    """Sub-packages that import something that, directly or not, imports them."""
    siblings = imported_siblings()

    def reached(start: str) -> set[str]:
        seen: set[str] = set()
        ahead = list(siblings.get(start, ()))
        while ahead:
            if (name := ahead.pop()) not in seen:
                seen.add(name)
                ahead += siblings.get(name, ())
        return seen

    is_package = {name: (PACKAGE.parent / name.replace(".", "/")).is_dir() for name in siblings}
    return sorted(name for name in siblings if is_package[name] and name in reached(name))


def test_sub_packages_import_one_way() -> None:
    assert two_way_sub_packages() == []


def test_no_two_modules_import_each_other() -> None:
    assert check_house.import_cycles() == []


def test_protocols_have_two_implementers() -> None:
    assert check_house.lone_protocols() == {}


def test_documented_protocols_exist() -> None:
    names = {place.rpartition(".")[2] for place in check_house.implementers()}
    assert check_house.documented_plugins() <= names


def written(folder: Path, **sources: str) -> Path:
    package = folder / "small"
    package.mkdir()
    for name, text in ({"__init__": ""} | sources).items():
        (package / f"{name}.py").write_text(text)
    return package


@pytest.mark.parametrize(
    ("imported_by_a", "imported_by_b", "cycles"),
    [
        ("from small import b", "import small.c", []),
        ("from . import b", "from .a import x", [["small.a", "small.b"]]),
        ("import small.b", "def f():\n    from small.a import x", [["small.a", "small.b"]]),
        (
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small.b import y",
            "from small import c, a",
            [["small.a", "small.b"]],
        ),
        (
            "from small.b import y",
            "try:\n    import json\nexcept ImportError:\n    import small.a",
            [["small.a", "small.b"]],
        ),
    ],
)
def test_import_cycles_on_examples(
    tmp_path: Path, imported_by_a: str, imported_by_b: str, cycles: list[list[str]]
) -> None:
    package = written(tmp_path, a=imported_by_a, b=imported_by_b, c="")
    assert check_house.import_cycles(package) == cycles


def test_implementers_on_examples(tmp_path: Path) -> None:
    protocols = """
class Shape(Protocol):
    name: str
    def area(self, unit: str) -> float: ...
class Rule(Protocol):
    def __call__(self, row: int) -> bool: ...
class Wire(asyncio.Protocol): ...
"""
    classes = """
class Circle:
    def __init__(self): self.name = "circle"
    def area(self, unit, digits=2): ...
class Ring(Circle): ...
class OtherParameter:
    name = "square"
    def area(self, scale): ...
class NoName:
    def area(self, unit): ...
class FieldOnly:
    name: str
    area: float
class Inherits(Shape): ...
def is_even(row): ...
def is_odd(column): ...
class Rows:
    def first(self, row): ...
"""
    package = written(tmp_path, protocols=protocols, classes=classes)
    assert check_house.implementers(package) == {
        "small.protocols.Shape": [f"small.classes.{n}" for n in ("Circle", "Inherits", "Ring")],
        "small.protocols.Rule": ["small.classes.Rows.first", "small.classes.is_even"],
    }


def files_of(each: str) -> list[Path]:
    path = PACKAGE / each
    return sorted(path.glob("*.py")) if path.is_dir() else [path]


@pytest.mark.parametrize(
    "path",
    [path for each in STANDARD_LIBRARY_ONLY for path in files_of(each)],
    ids=lambda path: str(path.relative_to(PACKAGE)),
)
def test_guest_files_import_only_standard_library(path: Path) -> None:
    names = imports(without_type_checking(ast.parse(path.read_bytes())), "")
    own = {""} if path.parent.name == "guest" else set()  # ``.module.name``
    if path.name == "dataframes.py":  # inside functions, for sessions that have these packages
        own |= {"numpy", "pandas", "pyarrow"}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names | own


@pytest.mark.parametrize(
    ("importer", "name", "allowed"),
    [
        ("engine", "clients.openai.OpenAI", True),
        ("clients", "sandbox.base.SandboxCapabilities", True),
        ("clients", "sandbox.providers.process", False),
        ("clients", "sandbox", False),
        ("store", "engine.rlm", False),
        ("inference", "models.load", True),
        ("models", "inference.local", False),
        ("types", "errors.RamifyError", False),
        ("engine", "helpers.x", False),
        ("cli", "extras.EXTRA_COMMANDS", True),
        ("cli", "extras.cluster.plan", False),
        ("extras", "cli.parser", True),
    ],
)
def test_import_rule_on_examples(importer: str, name: str, allowed: bool) -> None:
    assert is_allowed(importer, name) is allowed


def test_import_is_light() -> None:
    script = f"import ramify, sys; print(sorted({HEAVY!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout == "[]\n"
