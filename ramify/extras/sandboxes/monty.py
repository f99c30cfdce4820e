"""The sandbox provider ``monty``, which runs sessions in Monty, a small Python interpreter from the
package ``pydantic-monty``, on every platform that it supports.

Cells are fed to Monty's worker process, since the usual code inside a session cannot run there.
Modules that the engine installs are trusted: they run in the host process, and the session can call
their functions and see their plain values. The ``namespace`` that such a module reads is as the
last cell left it. A cell that is stopped is undone, by restarting the worker with the state from
before. Exceptions of the host arrive as RuntimeError. What Monty lacks is listed in
``docs/sandbox.md``.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import importlib
import re
import time
import types
from collections.abc import Callable
from typing import Any

from ramify.errors import ConfigError, HostCallError, SandboxError, SessionDied
from ramify.extras.sandboxes.monty_cells import (
    RunningMontyCell,
    analyze_cell,
    exception_for_monty,
    is_encodable,
)
from ramify.pip_install_command import install_command
from ramify.sandbox.base import (
    Answer,
    CellResult,
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
    SharedContextValue,
)
from ramify.sandbox.guest.guest import SessionHostCallError
from ramify.sandbox.guest.message_frames import copy_as_sent_to_host
from ramify.sandbox.guest.notebook import cut, safe_repr
from ramify.sandbox.guest.value_encoding import (
    VALUE_CHARS,
    ValueEncoder,
    ValueEncodingError,
    roundtrip_copy,
)
from ramify.types.trajectory import Cell

_MAX_WORKERS = 1024
SETTLE_S = 0.05
"""Seconds that a process with Monty sessions waits before it exits, because a thread of Monty could
crash it during the exit."""
_AGAIN = "_lent_"
"""Prefix of the name under which a host function is passed into the session again after a cell has
rebound its original name."""
_INPUT = re.compile(r"<python-input-(\d+)>")
CAPS = SandboxCapabilities(
    isolates_files=True,
    isolates_network=True,
    isolates_processes=True,
    limits_memory=True,
    kill=True,
    full_python=False,
)


class MontySandbox:
    """A sandbox whose sessions run in the Monty interpreter.

    Implements ``base.Sandbox``.
    """

    caps = CAPS
    warning: str | None = None

    def __init__(self, spec: SandboxSpec) -> None:
        try:
            self._monty: Any = importlib.import_module("pydantic_monty")
        except ImportError:
            raise SandboxError(f"sandbox 'monty' needs Monty: {install_command('monty')}") from None
        if spec.packages:
            raise ConfigError(
                f"sandbox 'monty' does not support packages, but '{spec.packages[0]}' was "
                "requested: use another sandbox"
            )
        atexit.unregister(_wait_before_exit)
        atexit.register(_wait_before_exit)
        self._spec = spec
        self._pool: Any = None
        self._is_starting = asyncio.Lock()
        self._sessions: set[MontySession] = set()
        self._is_closed = False

    async def open(self, *, context: PreparedContext | None = None, seed: str = "") -> MontySession:
        if self._is_closed:
            raise SandboxError("the sandbox is closed: it opens no more sessions")
        if context is not None and not isinstance(context, SharedContextValue):
            raise ConfigError(
                f"a context must be a SharedContextValue, not {type(context).__name__}"
            )
        async with self._is_starting:  # several sessions may be opened at once
            if self._pool is None:
                pool = self._monty.AsyncMonty(max_processes=_MAX_WORKERS)
                await pool.__aenter__()
                self._pool = pool
        session = MontySession(self._monty, self._pool, self._spec, self._sessions.discard)
        self._sessions.add(session)
        await session.start_worker()
        await session.seed_random(seed)
        if context is not None:
            await session.set("context", context.in_memory_copy().value, reserved=True)
        return session

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(session.close() for session in [*self._sessions]))
        pool, self._pool = self._pool, None
        if pool is not None:
            await pool.__aexit__(None, None, None)


class MontySession:
    """A session in a worker process of the Monty interpreter.

    Implements ``base.Session``.
    """

    caps = CAPS

    def __init__(
        self, monty: Any, pool: Any, spec: SandboxSpec, on_close: Callable[[MontySession], None]
    ) -> None:
        self._monty = monty
        self._pool = pool
        self._spec = spec
        self._on_close = on_close
        self._loop = asyncio.get_running_loop()
        self._checkout: Any = None
        self._worker: Any = None
        self._cell: RunningMontyCell | None = None
        self._num_cells = 0
        self._num_feeds = 0
        self._cell_of: dict[int, int] = {}
        self._is_busy = False
        self._is_closed = False
        self._reserved: dict[str, Any] = {}
        self._states: dict[str, dict[Any, Any]] = {}
        """Variable name -> dict that both installed modules and cells may change."""
        self._lent: dict[str, Callable[..., Any]] = {}
        self._modules: dict[str, types.ModuleType] = {}
        self._names: set[str] = set()
        self._namespace: dict[str, Any] = {}
        self._last: Any = None
        self._last_output = ""

    async def start_worker(self, state: bytes | None = None) -> None:
        """Start the session's worker process, either fresh or from a saved session state."""
        limits = {"max_memory": self._spec.memory_bytes, "max_suspensions": 1_000_000}
        self._checkout = self._pool.checkout(limits=limits)
        self._worker = await self._checkout.__aenter__()
        if state is not None:
            await self._worker.load_session(state)

    async def seed_random(self, seed: str) -> None:
        await self._feed(f"import random\nrandom.seed({int.from_bytes(seed.encode()[:32], 'big')})")

    async def _feed(self, code: str, **options: Any) -> Any:
        self._num_feeds += 1
        return await self._worker.feed_run(code, **options)

    @contextlib.contextmanager
    def _claim_session(self) -> Any:
        if self._is_closed:
            raise SessionDied("the session has ended: it was closed")
        if self._is_busy:
            raise SandboxError("the session is busy: one run, set, get or install at a time")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    # -- a cell

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        with self._claim_session():
            self._num_cells += 1
            cell = self._cell = RunningMontyCell(answer, self._spec.max_output_bytes)
            # If the cell is stopped, a new worker continues from this state.
            state = await self._worker.dump()
            work = asyncio.ensure_future(self._execute(cell, code))
            try:
                value, error = await self._await_cell(cell, work, timeout_s or self._spec.cell_s)
                if cell.stopped is not None:
                    await self._undo(state)
                    error = (
                        f"KeyboardInterrupt: the cell was stopped ({cell.stopped}), and what it "
                        "had bound is undone"
                    )
            except asyncio.CancelledError:
                work.cancel()
                await asyncio.wait((work,))
                await self._undo(state)
                raise
            finally:
                self._cell = None
                for call in [*cell.calls]:
                    call.cancel()
            if error is not None and "MemoryError" in error and not await self._is_alive():
                await self._undo(state)
            if cell.bug is not None:
                raise cell.bug
            self._last_output = cell.full_output.text(cell.chars)
            note, error, restored = await self._finish_cell(error)
        shown = Cell(
            code=code,
            stdout=cell.output.text(cell.chars),
            value=value,
            error=error,
            seconds=cell.worked_s,
            stdout_chars=cell.chars,
            restored=tuple(restored),
        )
        return CellResult(shown, note, cell.stopped)

    async def _await_cell(
        self,
        cell: RunningMontyCell,
        work: asyncio.Future[tuple[str | None, str | None]],
        limit_s: float,
    ) -> tuple[str | None, str | None]:
        """Wait until a code cell ends, is interrupted, or reaches its time limit.

        Returns the cell's value and error. Both are None if the cell was stopped.
        """
        stop = asyncio.ensure_future(cell.stop.wait())
        try:
            while not work.done() and cell.stopped is None:
                left = limit_s - cell.worked_s
                await asyncio.wait(
                    (work, stop), timeout=max(left / 2, 0.01), return_when=asyncio.FIRST_COMPLETED
                )
                if not work.done() and cell.worked_s >= limit_s:
                    cell.interrupt("time")
        finally:
            stop.cancel()
        if work.done() and cell.stopped is None:
            return work.result()
        work.cancel()
        await asyncio.wait((work,))
        return None, None

    async def _execute(self, cell: RunningMontyCell, code: str) -> tuple[str | None, str | None]:
        # Monty's tracebacks number every input of the worker, not only cells.
        self._cell_of[self._num_feeds] = self._num_cells
        self._num_feeds += 1
        assigned, has_echo, uses_last = analyze_cell(code)
        inputs = {"_": self._last} if uses_last and self._last is not None else None
        self._names |= assigned
        try:
            step = await self._run_timed_step(
                cell,
                self._worker.feed_start(
                    code, inputs=inputs, external_lookup=self._lent, print_callback=cell.add_output
                ),
            )
            while not isinstance(step, self._monty.MontyComplete):
                step = await self._run_timed_step(cell, await self._next(cell, step))
            output = step.output
        except self._monty.MontyCrashedError as error:
            raise SessionDied(
                f"the session ended in the middle of a cell: {error}", cell.output.text(cell.chars)
            ) from None
        except self._monty.MontyError as error:
            return None, self._format_error(error)
        if not has_echo or output is None:
            return None, None
        self._last = output if is_encodable(output) else None
        return (
            safe_repr(output)
            if not isinstance(output, self._monty.MontyClassProxy)
            else f"<{output.name} object>"
        ), None

    async def _run_timed_step(self, cell: RunningMontyCell, work: Any) -> Any:
        """Run one step of the Monty interpreter, and count its duration as the cell's working
        time."""
        before, started = cell.worked_s, self._loop.time()
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                await asyncio.wait((task,), timeout=0.02)
                cell.worked_s = before + self._loop.time() - started
        except asyncio.CancelledError:
            task.cancel()
            raise
        return task.result()

    async def _next(self, cell: RunningMontyCell, step: Any) -> Any:
        """Answer the request that paused a code cell, and resume the cell.

        For example, the request is a function call. Return the next step of the cell.
        """
        if not hasattr(step, "function_name"):
            return step.resume()
        if step.is_os_function:
            return step.resume_not_handled()
        name = step.function_name.removeprefix(_AGAIN)
        if name not in self._lent:
            return step.resume({"exception": NameError(f"name '{name}' is not defined")})
        try:
            args, kwargs = (
                self._to_plain_data(list(step.args)),
                self._to_plain_data(dict(step.kwargs)),
            )
            value = await asyncio.to_thread(self._lent[name], *args, **kwargs)
            return step.resume({"return_value": value})
        except Exception as error:  # noqa: BLE001  (from the module or the cell's arguments: raised in the cell)
            return step.resume({"exception": exception_for_monty(error)})

    def _to_plain_data(self, value: Any) -> Any:
        """Convert instances of classes defined in the sandboxed session to plain data.

        A dataclass becomes a dict of its fields, and any other object a short string.
        """
        if isinstance(value, self._monty.MontyClassProxy):
            return (
                self._to_plain_data(value.attributes)
                if value.is_dataclass
                else f"<{value.name} object>"
            )
        if type(value) in (list, tuple):
            return type(value)(map(self._to_plain_data, value))
        return (
            {key: self._to_plain_data(item) for key, item in value.items()}
            if type(value) is dict
            else value
        )

    def _format_error(self, error: Any) -> str:
        text = error.display()
        if isinstance(error, self._monty.MontySyntaxError):
            text = text.removeprefix("Traceback (most recent call last):\n")
        named = _INPUT.sub(
            lambda match: f"<cell {self._cell_of.get(int(match[1]), match[1])}>", text
        )
        return cut(named, VALUE_CHARS)

    async def _is_alive(self) -> bool:
        """Return True if the session's worker process is still alive after running out of memory.

        It either raises MemoryError or is killed.
        """
        try:
            await self._feed("None")
        except self._monty.MontyError:
            return False
        return True

    async def _undo(self, state: bytes) -> None:
        with contextlib.suppress(Exception):  # it may be gone already
            await self._checkout.__aexit__(None, None, None)
        await self.start_worker(state)
        self._num_feeds = 0
        self._cell_of.clear()

    # -- after a cell

    async def _finish_cell(self, error: str | None) -> tuple[Any, str | None, list[str]]:
        restored = [name for name in self._names if name in self._reserved or name in self._lent]
        notes: dict[str, Any] = {}
        before: dict[str, Any] = {}
        if self._modules:
            await self._refresh_namespace()
            before = {name: dict(state) for name, state in self._states.items()}
        for name, module in self._modules.items():
            hook = module.__dict__.get("after_cell")
            if hook is not None:
                try:
                    notes[name] = copy_as_sent_to_host(await asyncio.to_thread(hook))
                except Exception as failure:  # noqa: BLE001  (shown to the cell's author)
                    notes[name], error = (
                        None,
                        error or f"{type(failure).__name__}: {cut(str(failure), 2000)}",
                    )
        for name, state in before.items():
            if state != self._states[name] and name not in restored:
                await self._feed("None", inputs={name: dict(self._states[name])})
        for name in sorted(restored):
            self._names.discard(name)
            if name in self._reserved:
                await self._feed("None", inputs={name: self._reserved[name]})
            else:
                await self._feed(
                    f"{name} = {_AGAIN}{name}", external_lookup={_AGAIN + name: self._lent[name]}
                )
        return notes or None, error, sorted(restored)

    async def _refresh_namespace(self) -> None:
        """Update the namespace that installed modules see, after a code cell has run.

        Variables of the session are copied into it, and dicts shared with cells get their new
        contents.
        """
        self._namespace.clear()
        self._namespace.update(self._reserved)
        for name in sorted(self._names | set(self._states)):
            with contextlib.suppress(self._monty.MontyError):
                value = self._to_plain_data(await self._feed(name))
                if name not in self._names and isinstance(value, dict):
                    state = self._states[name]
                    state.clear()
                    state.update(value)
                else:
                    self._namespace[name] = value
        self._namespace.update(self._lent)

    # -- values and modules

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        with self._claim_session():
            try:
                ValueEncoder().encode(value)
            except ValueEncodingError as error:
                raise SandboxError(f"'{name}' cannot be set in the session: {error}") from None
            await self._bind(name, value, reserved)

    async def _bind(self, name: str, value: Any, reserved: bool) -> None:
        try:
            await self._feed("None", inputs={name: value})
        except self._monty.MontyError as error:
            raise SandboxError(f"'{name}' cannot be set in a Monty session: {error}") from None
        self._reserved.pop(name, None)
        if reserved:
            self._reserved[name] = value

    async def get(self, name: str) -> Any:
        with self._claim_session():
            if not name.isidentifier():
                raise HostCallError("NameError", f"name '{name}' is not defined")
            try:
                return copy_as_sent_to_host(await self._feed(name))
            except (TypeError, ValueError) as error:
                raise HostCallError(type(error).__name__, str(error)) from None
            except self._monty.MontyError as error:
                raise HostCallError("NameError", str(error).removeprefix("NameError: ")) from None

    async def install(self, module: str, source: str) -> None:
        with self._claim_session():
            installed = types.ModuleType(module)
            installed.__dict__.update(
                call_host=self._call_host,
                SessionHostCallError=SessionHostCallError,
                namespace=self._namespace,
                last_output=lambda: self._last_output,
                portable=copy_as_sent_to_host,
                namespace_is_live=False,
            )
            try:
                exec(compile(source, f"<{module}>", "exec", 0, True), installed.__dict__)
            except Exception as error:  # noqa: BLE001  (a module may raise anything)
                line = (
                    error.__traceback__.tb_next.tb_lineno
                    if error.__traceback__ and error.__traceback__.tb_next
                    else 0
                )
                raise SandboxError(
                    f"module '{module}' could not be installed in the session: "
                    f"{type(error).__name__}: {error}, line {line}"
                ) from None
            self._modules[module] = installed
            for name in installed.__dict__.get("__all__", ()):
                value = getattr(installed, name)
                if callable(value) and not isinstance(value, type):
                    self._lent[name] = value
                elif is_encodable(value) or isinstance(value, dict):
                    await self._bind(name, dict(value) if isinstance(value, dict) else value, False)
                    self._reserved[name] = value
                    if isinstance(value, dict):
                        self._states[name] = value

    def _call_host(self, name: str, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function of the host on behalf of an installed module.

        The module's code runs in a thread, so this call blocks until the host answers.
        """
        cell = self._cell
        if cell is None:
            raise SessionHostCallError(
                "RuntimeError", f"{name}() was called after its cell had ended"
            )
        args, kwargs = copy_as_sent_to_host([list(args), kwargs])
        future = asyncio.run_coroutine_threadsafe(
            self._answer(cell, name, args, kwargs), self._loop
        )
        cell.calls.add(future)
        try:
            return future.result()
        finally:
            cell.calls.discard(future)

    async def _answer(self, cell: RunningMontyCell, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return roundtrip_copy(await cell.answer(name, args, kwargs))
        except HostCallError as error:
            raise SessionHostCallError(error.kind, str(error), error.data) from None
        except Exception as error:  # noqa: BLE001  (a bug of the host, not of the cell: ``run`` raises it)
            cell.bug = error
            raise SessionHostCallError("HostFailed", f"{name} failed in the host") from None

    # -- branches

    async def fork(self) -> MontySession:
        raise SandboxError(
            "a session of 'monty' cannot be forked: run without a search, or in the jail"
        )

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        raise SandboxError("a session of 'monty' is not a branch: there is nothing to resume")

    async def close_tree(self) -> None:
        await self.close()

    # -- stopping

    def interrupt(self, reason: str) -> None:
        if self._cell is not None:
            self._cell.interrupt(reason)

    async def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        self._on_close(self)
        if self._cell is not None:
            self._cell.interrupt("closed")
        with contextlib.suppress(Exception):  # it may be gone already
            await self._checkout.__aexit__(None, None, None)


def _wait_before_exit() -> None:
    """Wait briefly before Python exits, to avoid a crash in Monty.

    A thread of its runtime that releases a Python object during the exit aborts the process
    (pydantic-monty 1.4.0: one exit in seven on a busy machine). There is no way to know when the
    last thread has finished.
    """
    time.sleep(SETTLE_S)


def open_provider(spec: SandboxSpec) -> MontySandbox:
    """Return a sandbox whose sessions run in Monty.

    ``base.open_sandbox`` calls this function. Raises SandboxError if Monty is not installed.
    """
    return MontySandbox(spec)
