"""No process of a run unpickles what another one sends; the exceptions and their reasons are here."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "ramify"
MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal", "multiprocessing", "joblib"}
"""Modules that turn bytes into objects or code; ``multiprocessing`` pickles in ``send`` and
``recv``."""
CALLS = {
    "broadcast_object_list": "pickles",
    "all_gather_object": "pickles",
    "gather_object": "pickles",
    "scatter_object_list": "pickles",
    "send_object_list": "pickles",
    "recv_object_list": "pickles",
    "TCPStore": "accepts every process that reaches it",
}
"""Functions of libraries -> why they are not used."""
EXCEPTIONS = {
    ("actors/child_process.py", "marshal"): "one message of this process to its own guard, over a "
    "socket pair that only the two have",
    ("actors/process_guard.py", "marshal"): "the other end: a guard starts with the standard "
    "library alone",
    (
        "session_module_compiler.py",
        "marshal",
    ): "compiled code of a cell goes from the host into the session, never back",
    ("sandbox/guest/notebook.py", "marshal"): "the other end, inside the sandbox",
    (
        "train/backends/torchrun_rendezvous.py",
        "TCPStore",
    ): "torchrun's own store, as a client: an address in "
    "it is believed only with the run's signature",
}
RAY = {
    *("actors/launcher.py", "actors/ray_cluster.py", "actors/ray_launcher.py"),
    *("maps/ray_data_stage.py", "maps/ray_map.py", "maps/ray_source.py"),
}
"""Ray pickles the calls of its actors, which are node agents and the workers of maps, and the stages
of Ray Data, on its own authenticated connections."""
CHECKPOINTS = "train/backends/sharded_checkpoint.py"
"""torch.distributed.checkpoint pickles its plan between ranks, over the group that proved its key
(``rank_group_authentication.py``), and into ``.metadata`` beside the shards, which only the run's user writes."""


def uses(tree: ast.AST) -> Iterator[str]:
    """The modules and functions above that a file names in its code."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (each.name.partition(".")[0] for each in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield module.partition(".")[0]
                yield from (each.name for each in names)
            case ast.Attribute(attr=attr):
                yield attr
            case ast.Name(id=name):
                yield name


def test_nothing_is_pickled_between_processes() -> None:
    found = set()
    for path in PACKAGE.rglob("*.py"):
        names = set(uses(ast.parse(path.read_bytes())))
        file = path.relative_to(PACKAGE).as_posix()
        found |= {(file, name) for name in names & (MODULES | set(CALLS))}
    assert found == set(EXCEPTIONS)


def test_torch_files_are_read_as_weights_only() -> None:
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "torch.load":
                continue
            given = {each.arg: ast.unparse(each.value) for each in node.keywords}
            assert given.get("weights_only") == "True", f"{path}:{node.lineno}"


def test_only_the_named_files_use_libraries_that_pickle_by_themselves() -> None:
    users: dict[str, set[str]] = {"ray": set(), "torch.distributed.checkpoint": set()}
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_bytes())):
            names = []
            if isinstance(node, ast.Import):
                names = [each.name for each in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module is not None:
                names = [node.module]
            for library in users:
                if any(name == library or name.startswith(f"{library}.") for name in names):
                    users[library].add(path.relative_to(PACKAGE).as_posix())
    assert users["torch.distributed.checkpoint"] == {CHECKPOINTS}
    assert users["ray"] == RAY
