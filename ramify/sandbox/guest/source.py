"""The compiled source of a cell.

Decides how code that is in no file is named and where its lines are found, that a cell's last
expression is its echo, and that modules to install may arrive compiled.
Not here: running the code (see ``notebook.py``).
"""

from __future__ import annotations
import __future__

import ast
import linecache
import marshal
import threading
import types
from typing import Any

_COMPILE_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


def remember_source(name: str, source: str) -> None:
    """Let tracebacks and ``inspect`` find the lines of code that is in no file."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


_COMPILING = threading.Lock()
"""Python 3.11 counts the depth of a syntax tree in one place for all threads. If two threads build
trees at once, one may fail with "AST constructor recursion depth mismatch". In-process sessions are
threads of one process."""


class CellCode:
    """A cell's compiled code: everything except the last expression, and that expression."""

    __slots__ = ("body", "flags", "last")

    def __init__(self, source: str, name: str, flags: int) -> None:
        self.last = None
        with _COMPILING:
            tree = compile(source, name, "exec", flags | _COMPILE_FLAGS | ast.PyCF_ONLY_AST, True)
            if tree.body and isinstance(tree.body[-1], ast.Expr):
                last = ast.Expression(tree.body.pop().value)
                self.body = self._compile(tree, name, flags)
                self.last = self._compile(last, name, flags | (self.body.co_flags & _FUTURES))
            else:
                self.body = self._compile(tree, name, flags)
        self.flags = flags | (self.body.co_flags & _FUTURES)

    @staticmethod
    def _compile(tree: Any, name: str, flags: int) -> types.CodeType:
        mode = "eval" if isinstance(tree, ast.Expression) else "exec"
        code: types.CodeType = compile(tree, name, mode, flags | _COMPILE_FLAGS, True)
        return code


def compiled(source: str, name: str, code: Any = None) -> types.CodeType:
    """Return the code of a module to install. ``code``: what a host with the same Python has made
    of it (``marshalled``)."""
    if code:
        module: types.CodeType = marshal.loads(code)
        return module
    return compile(source, name, "exec", 0, True)


def marshalled(source: str, name: str) -> bytes:
    """Compile a module for sessions with the same Python. Returns nothing if it cannot be compiled:
    the session that installs it reports the error."""
    try:
        return marshal.dumps(compile(source, name, "exec", 0, True))
    except (SyntaxError, ValueError):
        return b""
