"""Compile the modules that the host installs in sessions, such as the functions that a session has.

A session that runs the same version of Python loads the compiled module, which takes a tenth of a
millisecond where compiling takes some. Each module is compiled once for all sessions, if possible
while the first of them is still being started (``compile_in_advance``). How a module is installed
is in ``session.py`` and, inside the session, in ``guest/notebook.py``.
"""

from __future__ import annotations

import functools
import marshal
from collections.abc import Mapping


@functools.lru_cache(64)
def compiled_module(module: str, source: str) -> bytes:
    """Return a module in the format of ``marshal``. Returns empty bytes if it cannot be compiled;
    the session that installs it then reports the error."""
    try:
        return marshal.dumps(compile(source, f"<{module}>", "exec", 0, True))
    except (SyntaxError, ValueError):
        return b""


def compile_in_advance(sources: Mapping[str, str]) -> None:
    """Compile modules, given by name, so that ``compiled_module`` has them when a session is
    open."""
    for module, source in sources.items():
        compiled_module(module, source)
