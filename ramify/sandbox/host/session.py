"""The host's side of a session: runs cells and handles the guest's messages.

It sends requests to the guest, the code in the sandbox, and handles the guest's messages.

This module decides which messages may arrive in which order, when the cell's clock runs, and what
happens to a cell that does not end. Messages are encoded and checked by
``session_frame_connection.py``, the state of a running cell and its calls is kept by
``running_cell.py``, and the other end is in ``guest/``.

    run ──> run frame ──> … out* call* … ──> done ──> CellResult
              clock runs      └─ answer(name, args, kwargs), one task each; meanwhile the clock
                                 counts only CPU time, of the cell's other threads
    timeout, interrupt(), cancelled ──> cancel the answers, send SIGINT until the cell ends
                                          ──grace──> kill ──> SessionDied
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

from ramify.errors import HostCallError, SandboxError, SessionDied
from ramify.sandbox.base import Answer, CellResult, SandboxCapabilities
from ramify.sandbox.guest.value_encoding import ProtocolError, ValueEncoder, ValueEncodingError
from ramify.sandbox.host import session_frame_connection
from ramify.sandbox.host.running_cell import (
    CellLimits,
    CellTimeoutTimer,
    GuestReportedError,
    RunningCell,
    SessionStatus,
    result_of,
)
from ramify.sandbox.host.session_frame_connection import GuestFrameConnection
from ramify.sandbox.host.transport import ForkingTransport, GuestTransport
from ramify.session_module_compiler import compiled_module

_FORK_S = 10.0
"""Maximum time until a forked branch is ready, in seconds."""
_INTERRUPTS = 5
"""Number of interrupts sent within the grace time. The first may arrive too early or be caught."""


class SessionLifecycleHooks(NamedTuple):
    """The callbacks by which a sandbox provider learns that a session was closed or forked."""

    on_close: Callable[[GuestSessionProxy], None] = lambda session: None
    on_fork: Callable[[GuestSessionProxy], None] = lambda session: None
    """Called with each new branch."""


NO_HOOKS = SessionLifecycleHooks()


class GuestSessionProxy:
    """The host's handle for a session whose code runs behind a ``GuestTransport``.

    It implements the interface ``base.Session``.
    """

    __slots__ = (
        "__weakref__",
        "_alarm",
        "_cell",
        "_closed",
        "_ended",
        "_failure",
        "_forking",
        "_forks",
        "_hello",
        "_hooks",
        "_limits",
        "_reply",
        "_state",
        "_wire",
        "caps",
        "modules",
        "pid",
        "tree",
    )

    def __init__(
        self, transport: GuestTransport, limits: CellLimits, hooks: SessionLifecycleHooks = NO_HOOKS
    ) -> None:
        self.caps: SandboxCapabilities = transport.caps
        self.pid = 0
        """Process id, as reported by the guest."""
        self.modules: dict[str, str] = {}
        """Modules that the session had at its start, before any ``install``: name -> source."""
        self._limits = limits
        self._hooks = hooks
        self.tree: set[GuestSessionProxy] = {self}
        """This session and every open session that is related to it by forking."""
        self._state = SessionStatus.IDLE
        self._failure = ""
        """Reason why the session has ended, once it is known."""
        self._cell: RunningCell | None = None
        """The cell that is running or suspended."""
        self._reply: tuple[int, asyncio.Future[Any]] | None = None
        """Id and future answer of the request in progress."""
        loop = asyncio.get_running_loop()
        self._hello: asyncio.Future[None] = loop.create_future()
        self._ended: asyncio.Future[None] = loop.create_future()
        self._closed: asyncio.Future[None] | None = None
        self._alarm = CellTimeoutTimer(self._stop)
        self._forking = asyncio.Lock()
        self._forks = 0
        """Number of forks that are in progress or queued."""
        self._wire = GuestFrameConnection(transport)
        self._wire.start_reading(self._handle_frame, self._fail, self._on_connection_lost)

    async def wait_ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the guest reports that it is ready.

        Raises SandboxError if the session ends before that, or if it takes longer than
        ``timeout_s`` seconds.
        """
        await asyncio.wait(
            (self._hello, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._hello.done():
            why = (
                await self._failure_reason()
                if self._ended.done()
                else f"it said nothing for {timeout_s:g} s"
            )
            said = self._wire.transport.unsent_output(0).decode("utf-8", "replace").strip()
            why += f" ({said.splitlines()[-1][:300]})" if said else ""
            await self.close()
            raise SandboxError(f"a session could not be opened: {why}")

    # -- requests

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        self._mark_busy()
        id = self._wire.next_id()
        cell = self._cell = RunningCell(
            id,
            code,
            answer,
            wire=self._wire,
            limit_s=self._limits.cell_s if timeout_s is None else timeout_s,
            max_output_bytes=self._limits.max_output_bytes,
            on_bug=self._stop_for_bug,
        )
        cell.clock.start()
        return await self._await_cell_result(cell, {"op": "run", "id": id, "code": code})

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        cell = self._cell
        if self._state is not SessionStatus.SUSPENDED or cell is None:
            raise SandboxError(
                "nothing to resume: this session was not forked in the middle of a cell"
            )
        self._state = SessionStatus.BUSY
        cell.calls.answer = answer
        if timeout_s is not None:
            cell.limit_s = cell.clock.working_s() + timeout_s
        for id in cell.calls.pending:
            cell.calls.start_answering(id)
        return await self._await_cell_result(cell, None)

    async def _await_cell_result(
        self, cell: RunningCell, request: dict[str, Any] | None
    ) -> CellResult:
        """Wait until a cell has ended and return its result, after starting the cell if necessary.

        ``request`` starts the cell. It is None in a branch, which continues a cell of its origin.
        """
        try:
            self._alarm.watch(cell)
            if request is not None:
                self._wire.send(request)
                self._wire.read_at_once()
            try:
                end = await cell.until_done()
            except asyncio.CancelledError:
                await self._give_up(cell)
                raise
            if isinstance(end, SessionDied):
                raise await self._death_of(cell)
        finally:
            # Before the wait at the end, which may be cancelled.
            self._cell = None
            self._become_idle()
            self._alarm.watch(None)
            if cell.timer is not None:
                cell.timer.cancel()
            if cell.calls.tasks:
                await cell.calls.cancel_and_wait(self._limits.grace_s)
        if cell.calls.bug is not None:
            raise cell.calls.bug
        return result_of(cell, *end)

    async def _death_of(self, cell: RunningCell) -> SessionDied:
        why = await self._failure_reason()
        left = self._wire.transport.unsent_output(self._wire.upto)
        cell.append_output(left, 0, cell.chars + len(left.decode("utf-8", "replace")))
        return SessionDied(f"the session ended in the middle of a cell: {why}", cell.stdout())

    async def _give_up(self, cell: RunningCell) -> None:
        """Stop a cell because the task that was awaiting its result has been cancelled.

        Afterwards the session is either usable or known to be dead.
        """
        self._stop(cell, "cancelled")
        try:
            # After grace_s the session is killed, and its end is reported within 1 s (see _fail).
            await cell.wait(self._limits.grace_s + 1.0)
        except asyncio.CancelledError:
            self._fail("its cell was cancelled twice")
            raise

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        encoder = ValueEncoder()
        try:
            data = encoder.encode(value)
        except ValueEncodingError as error:
            raise SandboxError(f"'{name}' cannot be set in the session: {error}") from None
        await self._ask({"op": "set", "name": name, "reserved": reserved, "value": data}, encoder)

    async def set_context(self, parts: Sequence[Any], packages: Sequence[str] = ()) -> None:
        """Set the reserved variable ``context``.

        ``parts`` is the value as ``SharedContextValue`` has encoded it. Tables in it become
        DataFrames if pandas is among the ``packages`` that the session may import.
        """
        encoder = ValueEncoder(defers=True)
        encoder.blobs += parts
        as_one_blob = [sum(map(len, parts))]
        await self._ask(
            {"op": "context", "packages": list(packages), "blobs": as_one_blob}, encoder
        )

    async def get(self, name: str) -> Any:
        try:
            return await self._ask({"op": "get", "name": name})
        except GuestReportedError as error:
            raise HostCallError(error.kind, str(error)) from None

    async def install(self, module: str, source: str) -> None:
        self._check_free()
        # Removed, because after any install it is no longer the module that the session began with.
        if self.modules.pop(module, None) == source:
            return
        encoder = ValueEncoder()
        if getattr(self._wire.transport, "has_same_python", False):
            encoder.blobs += filter(None, [compiled_module(module, source)])
        try:
            await self._ask({"op": "install", "module": module, "source": source}, encoder)
        except GuestReportedError as error:
            raise SandboxError(
                f"module '{module}' could not be installed in the session: {error}"
            ) from None

    async def _ask(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> Any:
        self._mark_busy()
        reply = self._expect_reply()
        header["id"] = self._wire.last_id
        try:
            self._wire.send(header, encoder)
            async with asyncio.timeout(self._limits.cell_s):
                return await reply
        except SessionDied:
            raise SessionDied(f"the session ended: {await self._failure_reason()}") from None
        except TimeoutError:
            self._fail(f"no answer to '{header['op']}' within {self._limits.cell_s:g} s")
            raise SessionDied(f"the session ended: {self._failure}") from None
        except asyncio.CancelledError:
            self._fail(f"a request ('{header['op']}') was cancelled on its way")
            raise
        finally:
            self._reply = None
            self._become_idle()

    def _expect_reply(self) -> asyncio.Future[Any]:
        reply: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._reply = (self._wire.next_id(), reply)
        return reply

    def _check_alive(self) -> None:
        if self._state is SessionStatus.ENDED:
            raise SessionDied(f"the session has ended: {self._failure or 'its process is gone'}")

    def _check_free(self) -> None:
        self._check_alive()
        if self._state is SessionStatus.SUSPENDED:
            raise SandboxError("this branch was forked in the middle of a cell: resume it first")
        if self._state is SessionStatus.BUSY or self._forks:
            raise SandboxError("the session is busy: one run, set, get or install at a time")

    def _mark_busy(self) -> None:
        self._check_free()
        self._state = SessionStatus.BUSY

    def _become_idle(self) -> None:
        if self._state is SessionStatus.BUSY:
            self._state = SessionStatus.IDLE

    def seed(self, seed: str) -> None:
        """Set the seed with which the session's ``random`` module is reseeded before the next
        request.

        Raises SessionDied if the session has ended, and SandboxError if it is busy.
        """
        self._check_free()
        self._wire.seed = seed

    def kill(self, reason: str) -> None:
        """End the session at once.

        ``reason`` is reported to the session's user.
        """
        self._fail(reason)

    @property
    def pidfd(self) -> int:
        """The process descriptor (pidfd) of the session, or -1 if its transport has none."""
        return getattr(self._wire.transport, "pidfd", -1)

    @property
    def server_and_pid(self) -> tuple[Any, int]:
        """The session's fork server connection, and the session's process id as seen by that
        server."""
        transport = self._wire.transport
        return getattr(transport, "channel", None), getattr(transport, "server_pid", -1)

    def host_bytes(self) -> int:
        """Return how many bytes of the host's memory this session uses.

        It includes unfinished messages, arguments of pending calls, output and shared buffers.
        """
        pending = self._cell.calls.pending.values() if self._cell is not None else ()
        files: int = getattr(self._wire.transport, "file_bytes", lambda: 0)()
        return self._wire.held_bytes() + sum(call.weight for call in pending) + files

    # -- branches

    async def fork(self) -> GuestSessionProxy:
        """Fork a copy of the session, called a branch, and return it.

        Concurrent forks of one session run one after another. If the caller is cancelled, the fork
        is completed and the branch closed.
        """
        transport, cell = self._wire.transport, self._cell
        if not self.caps.fork:
            raise SandboxError(
                "sessions of this provider do not fork: use the provider 'jail' (or 'process')"
            )
        self._forks += 1
        try:
            async with self._forking:
                forking = asyncio.ensure_future(self._fork(cast(ForkingTransport, transport), cell))
                forking.add_done_callback(lambda done: done.cancelled() or done.exception())
                try:
                    return await asyncio.shield(forking)
                except asyncio.CancelledError:
                    with contextlib.suppress(SandboxError):
                        await (await forking).close()
                    raise
        finally:
            self._forks -= 1

    async def _fork(
        self, transport: ForkingTransport, cell: RunningCell | None
    ) -> GuestSessionProxy:
        """Fork a branch of the session once all earlier fork requests have been handled.

        Requests to fork wait for their turn. ``cell`` is the cell that was waiting for the host
        when the fork was requested, or None if the session was idle.
        """
        if cell is None:
            self._check_alive()
        self._check_waits(cell)
        # The branch inherits the random generator, so a pending seed is applied before the fork.
        # The guest does not reply to this request, which therefore needs no id.
        if self._wire.seed is not None:
            self._wire.send({"op": "seed", "id": 0})
        reply = self._expect_reply()
        id = self._wire.last_id
        try:
            await transport.prepare_branch()
            # The session may have changed its state during the wait.
            self._check_waits(cell)
            # A call that is answered during the fork is still unanswered in the branch.
            pending = dict(cell.calls.pending) if cell is not None else {}
            branch_transport = transport.fork_branch(
                session_frame_connection.build_request_frame({"op": "fork", "id": id}),
                self._reset_output_offset,
            )
            # The session may move to a new socket, so other frames wait until the fork is complete.
            self._wire.hold_sending()
            branch = GuestSessionProxy(branch_transport, self._limits, self._hooks)
            try:
                await self._until_forked(reply, branch)
                transport.check_memory_isolated()
            except BaseException:
                await branch.close()
                raise
            finally:
                transport.finish_forking(branch_transport)
        finally:
            self._reply = None
            self._wire.send_held()
        branch.tree, branch._wire.last_id = self.tree, self._wire.last_id
        if cell is not None and self._cell is cell and cell.end is None:
            branch._cell = cell.copy(pending, branch._wire, branch._stop_for_bug)
            branch._state = SessionStatus.SUSPENDED
        self.tree.add(branch)
        self._hooks.on_fork(branch)
        return branch

    def _reset_output_offset(self) -> None:
        """Start reading the session's output from the beginning, because it has a new output
        file."""
        self._wire.upto = 0

    def _check_waits(self, cell: RunningCell | None) -> None:
        """Raise SandboxError if the session is in a state in which it cannot be forked.

        It can if it is idle, or if its cell waits for the host.
        """
        self._check_alive()
        if self._state is SessionStatus.SUSPENDED:
            raise SandboxError("this branch was forked in the middle of a cell: resume it first")
        is_asking = self._state is SessionStatus.BUSY and self._cell is None
        if is_asking or self._cell is not cell or (cell is not None and not cell.is_waiting):
            raise SandboxError(
                "the session is working: fork it while it is idle or waits for the host"
            )

    async def _until_forked(self, reply: asyncio.Future[Any], branch: GuestSessionProxy) -> None:
        try:
            async with asyncio.timeout(_FORK_S):
                await reply
        except GuestReportedError as error:
            raise SandboxError(f"the session cannot be forked: {error}") from None
        except SessionDied:
            raise SessionDied(
                f"the session ended while it was forked: {await self._failure_reason()}"
            ) from None
        except TimeoutError:
            self._fail(f"it did not fork within {_FORK_S:g} s")
            raise SessionDied(f"the session ended: {self._failure}") from None
        await branch.wait_ready(_FORK_S)

    async def close_tree(self) -> None:
        await asyncio.gather(*(session.close() for session in [*self.tree]))

    # -- stopping

    def interrupt(self, reason: str) -> None:
        if self._cell is not None and self._state is not SessionStatus.SUSPENDED:
            self._stop(self._cell, reason)

    def _stop(self, cell: RunningCell, reason: str = "error") -> None:
        if cell.stopped is not None or cell.end is not None:
            return
        cell.stopped = reason
        cell.calls.cancel()
        self._interrupt_again(cell, _INTERRUPTS)

    def _stop_for_bug(self) -> None:
        """Stop the running cell because a bug in the host left one of its calls unanswered."""
        if self._cell is not None:
            self._stop(self._cell)

    def _interrupt_again(self, cell: RunningCell, times: int) -> None:
        if cell.end is not None:
            return
        grace_s = self._limits.grace_s
        if times:
            self._wire.transport.interrupt()
            cell.timer = asyncio.get_running_loop().call_later(
                grace_s / _INTERRUPTS, self._interrupt_again, cell, times - 1
            )
        else:
            self._fail(f"it did not stop within {grace_s:g} s of an interrupt ({cell.stopped})")

    def _fail(self, why: str) -> None:
        """Kill a session that cannot continue, and record the reason."""
        if not self._failure:
            self._failure, self._state = why, SessionStatus.ENDED
            self._wire.transport.kill()
            self._wire.clear_pause_reasons()
            # In case the end of the stream never arrives
            asyncio.get_running_loop().call_later(1.0, self._on_connection_lost)

    def _on_connection_lost(self) -> None:
        self._state = SessionStatus.ENDED
        if not self._ended.done():
            self._ended.set_result(None)
        if self._cell is not None and self._cell.end is None:
            self._cell.calls.cancel()
            self._cell.mark_ended(SessionDied(""))
        if self._reply is not None and not self._reply[1].done():
            self._reply[1].set_exception(SessionDied(""))
            self._reply[1].exception()  # its caller may have been cancelled

    async def _failure_reason(self) -> str:
        self._failure = self._failure or await self._wire.transport.exit_reason()
        return self._failure

    async def close(self) -> None:
        if self._closed is None:
            self._closed = self._ended
            self._failure = self._failure or "it was closed"
            self._state = SessionStatus.ENDED
            self._alarm.close()
            self._hooks.on_close(self)
            self.tree.discard(self)
            waits = self._wire.close()
            if waits is not None:
                self._closed = asyncio.ensure_future(waits)
            self._on_connection_lost()
        await asyncio.shield(self._closed)

    # -- frames

    def _handle_frame(
        self, message: session_frame_connection.FromGuest, value: Any, weight: int
    ) -> None:
        """Handle a decoded message from the sandboxed session.

        ``weight`` is its estimated memory in bytes. Raises ProtocolError if no such frame may
        arrive now.
        """
        cell = self._cell
        # The cell of a suspended branch waits for the host, so it sends nothing.
        if cell is not None and cell.end is None and self._state is not SessionStatus.SUSPENDED:
            if type(message) is session_frame_connection.CellDoneFrame:
                self._end_cell(cell, message, value)
                return
            if type(message) is session_frame_connection.HostCallFrame:
                cell.calls.accept_call(message, value, weight, cell.stopped)
                return
            if type(message) is session_frame_connection.CellOutputFrame:
                cell.append_output(value, message.skip, message.chars)
                self._wire.upto = message.upto
                return
        if self._reply is not None and self._take_reply(message, value, *self._reply):
            return
        if isinstance(message, session_frame_connection.GuestReadyFrame) and not self._hello.done():
            self.pid = message.pid
            self._hello.set_result(None)
        elif not self._failure:  # after a failure, late frames are ignored
            raise ProtocolError(f"a frame '{message.__struct_config__.tag}' that was not expected")

    def _end_cell(
        self, cell: RunningCell, message: session_frame_connection.CellDoneFrame, note: Any
    ) -> None:
        if message.id != cell.id:
            raise ProtocolError(f"the end of cell {message.id}, while {cell.id} runs")
        if note is not None and not isinstance(note, dict):
            raise ProtocolError("a note that is not a dict")
        if (shared_buffers := self._wire.transport.shared_buffers) is not None:
            shared_buffers.release_memory()
        cell.chars = message.chars
        cell.mark_ended((message, note))

    def _take_reply(
        self,
        message: session_frame_connection.FromGuest,
        value: Any,
        id: int,
        reply: asyncio.Future[Any],
    ) -> bool:
        is_reply = isinstance(
            message,
            session_frame_connection.OkReplyFrame
            | session_frame_connection.ValueReplyFrame
            | session_frame_connection.FailedReplyFrame,
        )
        if not is_reply or getattr(message, "id", None) != id or reply.done():
            return False
        if isinstance(message, session_frame_connection.FailedReplyFrame):
            reply.set_exception(GuestReportedError(message.kind, message.message))
        else:
            reply.set_result(value)
        return True
