"""Compile the modules that are installed in sandboxed Python sessions.

Examples are the functions that model-written code can call. A session that runs the same version of
Python loads the compiled module in a tenth of a millisecond, while compiling would take a few
milliseconds. Each module is compiled once for all sessions, if possible while the first of them is
still being started (``compile_in_advance``). The compiled form of a file of this package is cached
beside the file, as Python does for imported files. How a module is installed is in
``sandbox/host/session.py`` and, inside the session, in ``sandbox/guest/notebook.py``.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

_files: dict[str, Path] = {}
"""Source text -> path of the file in this package that contains it, so that Python's cached
compilation of the file can be reused."""


def read_module_source(path: Path) -> str:
    """Return the source of a package file that is installed as a module in sessions."""
    source = path.read_text("utf-8")
    _files[source] = path
    return source


@functools.lru_cache(64)
def compiled_module(module: str, source: str) -> bytes:
    """Compile a module and return its code as ``marshal`` bytes.

    Returns empty bytes if the source cannot be compiled, and the session that installs it then
    reports the error.
    """
    name = f"<{module}>"
    try:
        if source in _files:
            return marshal.dumps(_replace_code_filename(_kept_code(_files[source]), name))
        return marshal.dumps(compile(source, name, "exec", 0, True))
    except (SyntaxError, ValueError):
        return b""


def _kept_code(path: Path) -> CodeType:
    """Return the compiled code of a Python file, using Python's bytecode cache if it is up to
    date."""
    loader = SourceFileLoader(path.stem, str(path))
    code = loader.get_code(path.stem)
    assert code is not None
    return code


def _replace_code_filename(code: CodeType, name: str) -> CodeType:
    """Return a copy of a code object whose tracebacks show ``name`` as the file name.

    A session must not see where this package is installed.
    """
    inner = (
        _replace_code_filename(each, name) if isinstance(each, CodeType) else each
        for each in code.co_consts
    )
    return code.replace(co_filename=name, co_consts=tuple(inner))


def compile_in_advance(sources: Mapping[str, str]) -> None:
    """Compile modules (name -> source) ahead of time, so that sessions open faster."""
    for module, source in sources.items():
        compiled_module(module, source)
