"""Compile the modules that the host installs in sessions, such as the functions that a session has.

A session that runs the same version of Python loads the compiled module, which takes a tenth of a
millisecond where compiling takes some. Each module is compiled once for all sessions, if possible
while the first of them is still being started (``compile_in_advance``). Of a file of this package,
Python keeps the compiled module beside the file, as of files that are imported. How a module is
installed is in ``sandbox/host/session.py`` and, inside the session, in
``sandbox/guest/notebook.py``.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

_files: dict[str, Path] = {}
"""Source -> the file that has it, for files of this package."""


def file_source(path: Path) -> str:
    """Return the source of a file of this package that sessions install as a module."""
    source = path.read_text("utf-8")
    _files[source] = path
    return source


@functools.lru_cache(64)
def compiled_module(module: str, source: str) -> bytes:
    """Return a module in the format of ``marshal``. Returns empty bytes if it cannot be compiled;
    the session that installs it then reports the error."""
    name = f"<{module}>"
    try:
        if source in _files:
            return marshal.dumps(_renamed(_kept_code(_files[source]), name))
        return marshal.dumps(compile(source, name, "exec", 0, True))
    except (SyntaxError, ValueError):
        return b""


def _kept_code(path: Path) -> CodeType:
    """Return the code of a file as Python would import it: from the folder of compiled files, if it
    is there and belongs to this source."""
    loader = SourceFileLoader(path.stem, str(path))
    code = loader.get_code(path.stem)
    assert code is not None
    return code


def _renamed(code: CodeType, name: str) -> CodeType:
    """Return code whose tracebacks name ``name`` as its file. A session shall not see where this
    package is installed."""
    inner = (
        _renamed(each, name) if isinstance(each, CodeType) else each for each in code.co_consts
    )
    return code.replace(co_filename=name, co_consts=tuple(inner))


def compile_in_advance(sources: Mapping[str, str]) -> None:
    """Compile modules, given by name, so that ``compiled_module`` has them when a session is
    open."""
    for module, source in sources.items():
        compiled_module(module, source)
