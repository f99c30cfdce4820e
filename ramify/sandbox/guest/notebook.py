"""The live namespace of a session, and how a cell runs in it.

Decides what a cell sees (a true ``__main__``, reserved names that are restored, modules that the
host has installed), its echo, its ``await``, and the text of its errors. Not here: the connection,
the output and the interpreter around a cell (see ``guest.py``).
"""

from __future__ import annotations

import builtins
import gc
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

from .bounds import LimitError
from .interpreter import MemoryLimit
from .interrupts import GuestInterrupts
from .shown import VALUE_CHARS, cut, safe_repr, show_error, text_of
from .source import CellCode, compiled, remember_source
from .values import CodecError, ValueEncoder

_CO_COROUTINE = 0x80
_MISSING = object()
_NAMED: dict[type, str] = {CodecError: "TypeError", LimitError: "ValueError"}
Outcome = tuple[str | None, str | None]
"""Result of a cell: its echo, and its error as text."""


class GuestNotebook:
    """A notebook namespace and the cells that run in it."""

    __slots__ = (
        "_flags",
        "_interrupts",
        "_memory",
        "_modules",
        "_owns_process",
        "_reserved",
        "builtins",
        "evaluate",
        "hidden",
        "loop",
        "module",
        "namespace",
    )

    def __init__(
        self, interrupts: GuestInterrupts, memory: MemoryLimit, *, owns_process: bool
    ) -> None:
        self._interrupts = interrupts
        self._memory = memory
        self._owns_process = owns_process
        self.module = types.ModuleType("__main__")
        self.namespace = vars(self.module)
        self.builtins: types.ModuleType = builtins
        """The module that cells see as ``builtins``; a guest that shares its process may set
        another one."""
        self.namespace["__builtins__"] = builtins
        self.loop: Any = None
        """Event loop for cells with a top-level ``await``; once created, it lives as long as the
        session."""
        self.evaluate: Callable[[str, str], Outcome] = self._evaluate
        """Runs source under a name; an installed module may replace it. Its exceptions count as the
        cell's."""
        self.hidden: set[str] = set()
        """Files that tracebacks do not show, in addition to the guest's own."""
        self._flags = 0
        self._reserved: dict[str, Any] = {}
        self._modules: dict[str, types.ModuleType] = {}

    # -- names

    def bind(self, name: str, value: Any, reserved: bool) -> None:
        """Bind a name for the host."""
        if reserved:
            self._reserved[name] = value
        else:
            self._reserved.pop(name, None)
        self.namespace[name] = value

    def get(self, name: str) -> Any:
        if name not in self.namespace:
            raise NameError(f"name '{name}' is not defined")
        return self.namespace[name]

    def mend(self) -> None:
        """Restore the names that Python itself needs."""
        self.namespace["__name__"] = "__main__"
        self.namespace["__builtins__"] = self.builtins

    def restore_names(self) -> list[str]:
        """Restore the reserved names that a cell has rebound, and return them."""
        namespace = self.namespace
        changed = [
            name
            for name, value in self._reserved.items()
            if namespace.get(name, _MISSING) is not value
        ]
        for name in changed:
            namespace[name] = self._reserved[name]
        return changed

    # -- modules

    def install(
        self, module: str, source: str, host_names: Mapping[str, Any], code: Any = None
    ) -> None:
        """Execute ``source`` as ``module``, with ``host_names`` and this ``notebook`` in its
        namespace. Bind the names in its ``__all__``. ``code``: the module, compiled by the host."""
        installed = types.ModuleType(module if self._owns_process else f"{module}@{id(self)}")
        installed.__dict__.update(host_names, namespace=self.namespace, notebook=self)
        name = f"<{module}>"
        remember_source(name, source)
        if self._owns_process:
            sys.modules[module] = installed
        exec(compiled(source, name, code), installed.__dict__)
        self.hidden.add(name)
        self._modules[module] = installed
        for public in installed.__dict__.get("__all__", ()):
            self.bind(public, getattr(installed, public), True)

    @property
    def has_hooks(self) -> bool:
        """Return True if code of installed modules may run after a cell."""
        return bool(self._modules)

    def after_cell(self, encoder: ValueEncoder, error: str | None) -> tuple[Any, str | None]:
        """Call the modules' ``after_cell`` hooks and return their results, encoded. The hooks see
        the names as the cell left them."""
        notes: dict[str, Any] = {}
        for name, module in self._modules.items():
            hook = module.__dict__.get("after_cell")
            if hook is None:
                continue
            try:
                notes[name] = encoder.encode(hook())
            except BaseException as failure:  # noqa: BLE001  (shown to the cell's author: the cell may have caused it)
                notes[name] = None
                kind = _NAMED.get(type(failure), type(failure).__name__)
                error = error or f"{kind}: {cut(text_of(failure), 2000)}"
        return notes or None, error

    # -- a cell

    def execute(self, source: str, name: str) -> Outcome:
        """Run a cell. Every part of it can be interrupted, including a repr or an exception's
        text."""
        try:
            self._interrupts.is_live = True
            try:
                return self.evaluate(source, name)
            except BaseException as error:  # noqa: BLE001  (a cell may raise anything)
                return None, self.describe(error)
        finally:
            self._interrupts.is_live = False

    def _evaluate(self, source: str, name: str) -> Outcome:
        remember_source(name, source)
        code = CellCode(source, name, self._flags)
        self._flags = code.flags
        self._value_of(code.body)
        return (self._echo(self._value_of(code.last)) if code.last else None), None

    def _value_of(self, code: types.CodeType) -> Any:
        result = eval(code, self.namespace)
        return self.complete(result) if code.co_flags & _CO_COROUTINE else result

    def _echo(self, value: Any) -> str | None:
        if value is None:
            return None
        self.namespace["_"] = value
        return safe_repr(value)

    def complete(self, coroutine: Any) -> Any:
        """Run a coroutine of a cell to completion."""
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

    def end_loop(self) -> None:
        if self.loop is not None:
            self.loop.close()
            self.loop = None

    def describe(self, error: BaseException) -> str | None:
        """Return an error of a cell as text; None for an exit without an error."""
        if isinstance(error, SystemExit):
            return (
                None if error.code in (None, 0) else cut(f"SystemExit: {error.code}", VALUE_CHARS)
            )
        self._memory.allow_guest()
        if isinstance(error, MemoryError):
            error.__context__ = None  # the interpreter reuses its few MemoryError objects
        try:
            text: str | None = show_error(error, self.hidden)
        except Exception:  # noqa: BLE001  (its text cannot be built)
            text = f"{type(error).__name__} (its traceback could not be shown)"
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            gc.collect()
        return text
