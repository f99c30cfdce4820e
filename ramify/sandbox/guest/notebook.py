"""Runs the cells of a session in one live namespace, as a Jupyter kernel does.

This module defines what a cell sees: a real ``__main__`` module, reserved names that are restored
after each cell, and modules that the host has installed. It evaluates the last expression of a
cell, which is echoed, and supports a top-level ``await``. It limits the length of values and errors
that are shown. A traceback shows the frames of the cell and of the code it called, but not those of
the guest. The connection, the output and the interpreter around a cell are handled by ``guest.py``.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import gc
import linecache
import marshal
import os
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Collection, Mapping
from typing import Any

from .channel import DeferrableInterrupts
from .interpreter_state import AddressSpaceLimits
from .value_encoding import (
    VALUE_CHARS,
    ValueEncoder,
    ValueEncodingError,
    ValueLimitError,
    type_name,
)

_HERE = os.path.dirname(__file__) + os.sep
"""Folder of the guest's own files."""


def cut(text: str, limit: int) -> str:
    """Shorten a string to about ``limit`` characters by keeping only its beginning and end.

    A note between them says how many characters are missing. Text within the limit is returned
    unchanged.
    """
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [… {len(text) - 2 * half:,} characters left out …] {text[-half:]}"


def safe_repr(value: Any) -> str:
    """Return ``repr(value)``, shortened to a limited length.

    Never raises an Exception, even if the value's own ``__repr__`` does, and never copies a long
    string.
    """
    kind = type(value)
    if kind in (str, bytes) and len(value) > VALUE_CHARS:
        half = VALUE_CHARS // 2
        shown = f"{value[:half]!r} [… {len(value) - 2 * half:,} left out …] {value[-half:]!r}"
        return shown if len(shown) <= VALUE_CHARS + 100 else cut(shown, VALUE_CHARS)
    try:
        return cut("".join([repr(value), ""]), VALUE_CHARS)
    except Exception as error:  # noqa: BLE001  (whatever a repr does, the cell continues)
        return f"<{type_name(kind)} whose repr raised {type(error).__name__}>"


def safe_error_message(error: BaseException) -> str:
    """Return ``str(error)``, or a note if that fails.

    It may fail for an exception class that was defined in a cell.
    """
    try:
        return "".join([str(error), ""])
    except BaseException as worse:  # noqa: BLE001  (whatever it does, the session continues)
        return f"(its text cannot be had: {type(worse).__name__})"


def format_error(error: BaseException, hidden: Collection[str] = ()) -> str:
    """Format an error's traceback as a cell's author should see it.

    Frames of the guest and of the files in ``hidden`` are left out.
    """
    shown = traceback.TracebackException(type(error), error, error.__traceback__, compact=True)
    visited: set[int] = set()
    stack = [shown]
    while stack:
        part = stack.pop()
        if id(part) in visited:
            continue
        visited.add(id(part))
        frames = [
            entry
            for entry in part.stack or ()
            if not (entry.filename.startswith(_HERE) or entry.filename in hidden)
        ]
        part.stack = traceback.StackSummary.from_list(frames) if frames else None  # type: ignore[assignment]
        stack += [p for p in (part.__cause__, part.__context__) if p is not None]
        stack += getattr(part, "exceptions", None) or []
    return cut("".join(shown.format()).rstrip("\n"), VALUE_CHARS)


_COMPILE_FLAGS = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
_FUTURES = 0
for _name in __future__.all_feature_names:
    _FUTURES |= getattr(__future__, _name).compiler_flag


def remember_source(name: str, source: str) -> None:
    """Register source code that is in no file, so that tracebacks and ``inspect`` can show its
    lines."""
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)


_COMPILING = threading.Lock()
"""Lock that lets only one thread at a time build a syntax tree. Python 3.11 counts the tree's depth
in one place for all threads. If two threads build trees at once, one may fail with "AST constructor
recursion depth mismatch". In-process sessions are threads of one process."""


_ASSIGNMENT = re.compile(
    r"[A-Za-z_][\w.]* *[-+*/%&|^@]?= *[^\s=;#'\"\\][^;#'\"\\\r\f]*\Z", re.ASCII
)


def ends_in_assignment(source: str) -> bool:
    """Return True if a cell certainly ends in an assignment, and so has no value to echo.

    False means that it may or may not.

    Cells with triple-quoted strings or backslashes give False. In all others only brackets continue
    a statement on the next line. So a last line whose brackets are balanced is a statement by
    itself, unless the cell has a syntax error.
    """
    if "\\" in source or '"""' in source or "'''" in source:
        return False
    source = source.rstrip()
    last = source[source.rfind("\n") + 1 :]
    if _ASSIGNMENT.match(last) is None:
        return False
    count = last.count
    return count("(") == count(")") and count("[") == count("]") and count("{") == count("}")


class CompiledCell:
    """The compiled code of a cell, separated into its statements and its last expression.

    The value of the expression is echoed.
    """

    __slots__ = ("body", "flags", "last")

    def __init__(self, source: str, name: str, flags: int) -> None:
        self.last = None
        if ends_in_assignment(source):
            try:
                self.body = self._compile(source, name, flags)
            except SyntaxError:
                pass  # reported below
            else:
                self.flags = flags | (self.body.co_flags & _FUTURES)
                return
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


def compile_or_load_module(source: str, name: str, code: Any = None) -> types.CodeType:
    """Compile the source code of a module, or load the code object that the host has compiled.

    If the host has compiled it already, load that code from ``code`` instead, in marshal format and
    from the same version of Python. A code object is returned unchanged.
    """
    if isinstance(code, types.CodeType):
        return code
    if code:
        module: types.CodeType = marshal.loads(code)
        return module
    return compile(source, name, "exec", 0, True)


_CO_COROUTINE = 0x80
_MISSING = object()
_NAMED: dict[type, str] = {ValueEncodingError: "TypeError", ValueLimitError: "ValueError"}
Outcome = tuple[str | None, str | None]
"""Result of a cell: the echo of its last value, and its error, both as text or None."""


class GuestNotebook:
    """A live namespace, as in a notebook, in which the cells of a session run."""

    __slots__ = (
        "_added",
        "_flags",
        "_interrupts",
        "_memory",
        "_owns_process",
        "builtins",
        "evaluate",
        "hidden",
        "loop",
        "module",
        "modules",
        "namespace",
        "reserved",
    )

    def __init__(
        self, interrupts: DeferrableInterrupts, memory: AddressSpaceLimits, *, owns_process: bool
    ) -> None:
        self._interrupts = interrupts
        self._memory = memory
        self._owns_process = owns_process
        self.module = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.builtins: types.ModuleType = builtins
        """The module that cells see as ``builtins``. A guest that shares its process may replace
        it."""
        self.namespace["__builtins__"] = builtins
        self.loop: Any = None
        """Event loop for cells with a top-level ``await``. Once created, it lives as long as the
        session."""
        self.evaluate: Callable[[str, str], Outcome] = self._evaluate
        """Runs a cell's source under a file name. An installed module may replace this function."""
        self.hidden: set[str] = set()
        """Files that tracebacks skip, in addition to the guest's own."""
        self._flags = 0
        self.reserved: dict[str, Any] = {}
        """Names that are restored after each cell, with their values."""
        self.modules: dict[str, types.ModuleType] = {}
        """Installed modules, by name."""
        self._added: dict[str, set[str]] = {}
        """Names that each installed module has added to the namespace."""

    # -- names

    def bind(self, name: str, value: Any, reserved: bool) -> None:
        """Set a variable in the session's namespace on behalf of the host.

        A reserved name is restored after each cell that overwrites it.
        """
        if reserved:
            self.reserved[name] = value
        else:
            self.reserved.pop(name, None)
        self.namespace[name] = value

    def get(self, name: str) -> Any:
        if name not in self.namespace:
            raise NameError(f"name '{name}' is not defined")
        return self.namespace[name]

    def mend_namespace(self) -> None:
        """Restore ``__name__`` and ``__builtins__`` in the cells' namespace.

        Without them, Python code cannot run properly.
        """
        self.namespace["__name__"] = "__main__"
        self.namespace["__builtins__"] = self.builtins

    def restore_names(self) -> list[str]:
        """Restore the reserved names that a cell has overwritten, and return a list of them."""
        if not self.reserved:
            return []
        namespace = self.namespace
        changed = [
            name
            for name, value in self.reserved.items()
            if namespace.get(name, _MISSING) is not value
        ]
        for name in changed:
            namespace[name] = self.reserved[name]
        return changed

    # -- modules

    def install_module(
        self, module: str, source: str, host_names: Mapping[str, Any], code: Any = None
    ) -> None:
        """Execute source code as a module and bind the names in its ``__all__`` as reserved names.

        A module that was installed earlier under the same name is replaced, and its names are
        removed.

        ``host_names``: variables for the module's namespace, in addition to this notebook and the
        namespace of the cells. ``code``: the module, if it has been compiled already.
        """
        for old in self._added.pop(module, ()):
            self.namespace.pop(old, None)
            self.reserved.pop(old, None)
        before = set(self.namespace)
        installed = types.ModuleType(module if self._owns_process else f"{module}@{id(self)}")
        installed.__dict__.update(host_names, namespace=self.namespace, notebook=self)
        name = f"<{module}>"
        remember_source(name, source)
        if self._owns_process:
            sys.modules[module] = installed
        exec(compile_or_load_module(source, name, code), installed.__dict__)
        self.hidden.add(name)
        self.modules[module] = installed
        for public in installed.__dict__.get("__all__", ()):
            self.bind(public, getattr(installed, public), True)
        self._added[module] = self.namespace.keys() - before

    @property
    def has_after_cell_hooks(self) -> bool:
        """True if an installed module might define a hook that must run after each cell."""
        return bool(self.modules)

    def run_after_cell_hooks(
        self, encoder: ValueEncoder, error: str | None
    ) -> tuple[Any, str | None]:
        """Call the ``after_cell`` hook of each installed module, and return the encoded results.

        Also return an error: that of the cell if it failed, otherwise that of the first hook that
        failed, or None. The hooks see the namespace as the cell left it.
        """
        notes: dict[str, Any] = {}
        for name, module in self.modules.items():
            hook = module.__dict__.get("after_cell")
            if hook is None:
                continue
            try:
                notes[name] = encoder.encode(hook())
            except BaseException as failure:  # noqa: BLE001  (shown to the cell's author: the cell may have caused it)
                notes[name] = None
                kind = _NAMED.get(type(failure), type(failure).__name__)
                error = error or f"{kind}: {cut(safe_error_message(failure), 2000)}"
        return notes or None, error

    # -- a cell

    def execute(self, source: str, name: str) -> Outcome:
        """Run a cell and return its echoed value and its error.

        An interrupt may arrive at any point, even while a value or an exception is formatted.
        """
        try:
            self._interrupts.is_live = True
            try:
                return self.evaluate(source, name)
            except BaseException as error:  # noqa: BLE001  (a cell may raise anything)
                return None, self.format_error(error)
        finally:
            self._interrupts.is_live = False

    def _evaluate(self, source: str, name: str) -> Outcome:
        remember_source(name, source)
        code = CompiledCell(source, name, self._flags)
        self._flags = code.flags
        self._value_of(code.body)
        return (self._echo(self._value_of(code.last)) if code.last else None), None

    def _value_of(self, code: types.CodeType) -> Any:
        result = eval(code, self.namespace)
        return self.run_coroutine(result) if code.co_flags & _CO_COROUTINE else result

    def _echo(self, value: Any) -> str | None:
        if value is None:
            return None
        self.namespace["_"] = value
        return safe_repr(value)

    def run_coroutine(self, coroutine: Any) -> Any:
        """Run a coroutine of a cell to completion in the session's event loop, and return its
        result."""
        import asyncio

        if self.loop is None:
            self.loop = asyncio.new_event_loop()
        task = self.loop.create_task(coroutine)
        try:
            return self.loop.run_until_complete(task)
        finally:
            if not task.done():
                task.cancel()
                self.loop.run_until_complete(asyncio.wait([task], timeout=0.1))

    def close_event_loop(self) -> None:
        if self.loop is not None:
            self.loop.close()
            self.loop = None

    def format_error(self, error: BaseException) -> str | None:
        """Format the exception that ended a cell as text.

        Returns None if the cell ended with an exit that is not an error.
        """
        if isinstance(error, SystemExit):
            return (
                None if error.code in (None, 0) else cut(f"SystemExit: {error.code}", VALUE_CHARS)
            )
        self._memory.lift_cell_limit()
        if isinstance(error, MemoryError):
            error.__context__ = None  # the interpreter reuses its few MemoryError objects
        try:
            text: str | None = format_error(error, self.hidden)
        except Exception:  # noqa: BLE001  (its text cannot be built)
            text = f"{type(error).__name__} (its traceback could not be shown)"
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            gc.collect()
        return text
