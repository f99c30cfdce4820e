"""The live namespace of a session, and what it is to run a cell in it.

Decides what a cell sees (a true ``__main__``, reserved names that come back, modules that the host
has installed), its echo, its ``await`` and how its errors read. Leaves out what lies around a cell:
the wire, output, the interpreter.
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
"""Of a cell: its echo, and its error as text."""


class GuestNotebook:
    """Names, and cells that run among them."""

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
        """What cells see as ``builtins``; a guest that shares its process may be given another
        one."""
        self.namespace["__builtins__"] = builtins
        self.loop: Any = None
        """The event loop of cells with ``await`` at their top: once there, it lives as long as the
        session."""
        self.evaluate: Callable[[str, str], Outcome] = self._evaluate
        """How source is run under a name; an installed module may put another way here. What it
        raises is the cell's."""
        self.hidden: set[str] = set()
        """Files that tracebacks do not show, beside the guest's own."""
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
        """What Python itself wants to find among the names."""
        self.namespace["__name__"] = "__main__"
        self.namespace["__builtins__"] = self.builtins

    def restore_names(self) -> list[str]:
        """Bind the reserved names again that a cell has rebound; returns those."""
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

    def install(self, module: str, source: str, given: Mapping[str, Any]) -> None:
        """Execute ``source`` as ``module``, where it finds the names ``given`` and this
        ``notebook``; bind what its ``__all__`` names."""
        made = types.ModuleType(module if self._owns_process else f"{module}@{id(self)}")
        made.__dict__.update(given, namespace=self.namespace, notebook=self)
        name = f"<{module}>"
        remember_source(name, source)
        if self._owns_process:
            sys.modules[module] = made
        exec(compiled(source, name), made.__dict__)
        self.hidden.add(name)
        self._modules[module] = made
        for public in made.__dict__.get("__all__", ()):
            self.bind(public, getattr(made, public), True)

    def after_cell(self, encoder: ValueEncoder, error: str | None) -> tuple[Any, str | None]:
        """What the modules' ``after_cell`` say, encoded. They see the names as the cell left
        them."""
        notes: dict[str, Any] = {}
        for name, module in self._modules.items():
            hook = module.__dict__.get("after_cell")
            if hook is None:
                continue
            try:
                notes[name] = encoder.encode(hook())
            except BaseException as failure:  # noqa: BLE001  (shown to whoever wrote the cell, which may have caused it)
                notes[name] = None
                kind = _NAMED.get(type(failure), type(failure).__name__)
                error = error or f"{kind}: {cut(text_of(failure), 2000)}"
        return notes or None, error

    # -- a cell

    def execute(self, source: str, name: str) -> Outcome:
        """Run a cell. All of it can be interrupted, also a repr or an exception's text."""
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
        """Run a coroutine of a cell to its end."""
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
        """An error of a cell as text; None for an exit without one."""
        if isinstance(error, SystemExit):
            return (
                None if error.code in (None, 0) else cut(f"SystemExit: {error.code}", VALUE_CHARS)
            )
        self._memory.allow_guest()
        if isinstance(error, MemoryError):
            error.__context__ = None  # the interpreter keeps few of them, and uses them again
        try:
            text: str | None = show_error(error, self.hidden)
        except Exception:  # noqa: BLE001  (an exception whose text cannot be made, or no memory for it)
            text = f"{type(error).__name__} (its traceback could not be shown)"
        if isinstance(error, MemoryError):
            error.__traceback__ = None
            gc.collect()
        return text
