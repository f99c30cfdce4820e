"""The host's side of a session: one guest behind a transport.

Decides which frames may arrive in which order, when the cell's clock runs, and what happens to a
cell that does not end. Not here: the bytes (see ``host_frames.py``, ``transport.py``), the state of
a running cell (see ``running_cell.py``), and the guest (see ``guest/``).

    run ──> run frame ──> … out* call* … ──> done ──> CellResult
              clock runs      └─ answer(name, args, kwargs), one task each; the clock pauses
                                 while any of them runs
    timeout, interrupt(), cancelled ──> cancel the answers, send SIGINT until the cell ends
                                          ──grace──> kill ──> SessionDied
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from ramify.errors import HostCallError, SandboxError, SessionDied
from ramify.sandbox import host_frames
from ramify.sandbox.base import Answer, CellResult, SandboxCapabilities
from ramify.sandbox.guest.values import CodecError, ProtocolError, ValueEncoder
from ramify.sandbox.running_cell import RunningCell
from ramify.sandbox.transport import ForkingTransport, Transport
from ramify.types.trajectory import Cell

MAX_CALLS = 1024
"""Concurrent calls of one cell; beyond this limit its frames wait in the socket."""
MAX_CALL_BYTES = 256 << 20
"""Maximum size of the arguments of all pending calls together."""
_WEIGHT_OF_JSON = 16
"""Memory per byte of JSON: small Python values take many times the size of their JSON."""
_FORK_S = 10.0
"""Maximum seconds until a branch is ready."""
_INTERRUPTS = 5
"""Number of times an interrupt is sent within the grace time: it may arrive before the cell begins,
or the cell may catch it."""


class GuestSession:
    """A session of a guest behind a ``Transport``. Implements ``base.Session``."""

    __slots__ = (
        "_assembler",
        "_cell",
        "_cell_s",
        "_closed",
        "_ended",
        "_failure",
        "_forking",
        "_forks",
        "_grace_s",
        "_held_frames",
        "_hello",
        "_is_paused",
        "_last_id",
        "_loop",
        "_max_output_bytes",
        "_on_close",
        "_on_fork",
        "_on_install",
        "_transport",
        "_unfinished",
        "_upto",
        "_waiting",
        "caps",
        "pid",
        "tree",
    )

    def __init__(
        self,
        transport: Transport,
        *,
        cell_s: float,
        grace_s: float,
        max_output_bytes: int,
        on_close: Callable[[GuestSession], None] = lambda session: None,
        on_fork: Callable[[GuestSession], None] = lambda session: None,
        on_install: Callable[[str, str], None] = lambda module, source: None,
    ) -> None:
        self.caps: SandboxCapabilities = transport.caps
        self.pid = 0
        """Process id, as reported by the guest."""
        self._transport = transport
        self._cell_s = cell_s
        self._grace_s = grace_s
        self._max_output_bytes = max_output_bytes
        self._on_close = on_close
        self._on_fork = on_fork
        self._on_install = on_install
        self.tree: set[GuestSession] = {self}
        """This session and every open session related to it by forking."""
        self._unfinished: RunningCell | None = None
        """The unfinished cell in which this branch was forked; ``resume`` completes it."""
        self._loop = asyncio.get_running_loop()
        self._assembler = host_frames.FrameAssembler()
        self._hello: asyncio.Future[None] = self._loop.create_future()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._failure: str | None = None
        self._cell: RunningCell | None = None
        self._waiting: tuple[int, asyncio.Future[Any]] | None = None
        self._forking = asyncio.Lock()
        self._forks = 0
        self._held_frames: list[tuple[dict[str, Any], ValueEncoder | None]] | None = None
        """Frames that wait while the session forks. They are sent afterwards, possibly over a new
        socket."""
        self._last_id = 0
        self._is_paused = False
        self._upto = 0
        self._closed: asyncio.Future[None] | None = None
        transport.attach(self._received, self._lost)

    async def ready(self, timeout_s: float = 30.0) -> None:
        """Wait until the guest has sent its hello frame. Raises SandboxError after
        ``timeout_s``."""
        await asyncio.wait(
            (self._hello, self._ended), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED
        )
        if not self._hello.done():
            why = (
                await self._why() if self._ended.done() else f"it said nothing for {timeout_s:g} s"
            )
            await self.close()
            raise SandboxError(f"a session could not be opened: {why}")

    # -- requests

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        self._check_free()
        limit_s = self._cell_s if timeout_s is None else timeout_s
        id = self._next_id()
        cell = RunningCell(id, code, answer, limit_s, self._max_output_bytes, self._loop.time())
        self._cell = cell
        return await self._finish(cell, limit_s, {"op": "run", "id": id, "code": code})

    async def _finish(
        self, cell: RunningCell, limit_s: float, request: dict[str, Any] | None
    ) -> CellResult:
        try:
            cell.timer = self._loop.call_later(limit_s, self._time_up, cell)
            if request is not None:
                self._send(request)
            try:
                done, note = await self._until_done(cell)
            except asyncio.CancelledError:
                await self._give_up(cell)
                raise
        finally:
            self._cell = None
            if cell.timer is not None:
                cell.timer.cancel()
            if cell.tasks:
                await self._end_answers(cell)
        if cell.bug is not None:
            raise cell.bug
        return self._ran(cell, done, note)

    def _ran(self, cell: RunningCell, done: host_frames.CellDoneFrame, note: Any) -> CellResult:
        shown = Cell(
            code=cell.code,
            stdout=cell.text(),
            value=done.value,
            error=done.error,
            seconds=cell.worked_s,
            stdout_chars=done.chars,
            restored=tuple(done.restored),
        )
        return CellResult(shown, note, cell.stopped)

    async def _until_done(self, cell: RunningCell) -> tuple[host_frames.CellDoneFrame, Any]:
        await cell.changed
        end = cell.end
        if isinstance(end, tuple):
            return end
        why = await self._why()
        left = self._transport.leftover(self._upto)
        cell.output.add(left)
        cell.chars += len(left.decode("utf-8", "replace"))
        raise SessionDied(f"the session ended in the middle of a cell: {why}", cell.text())

    async def _give_up(self, cell: RunningCell) -> None:
        """Stop the cell after the caller of ``run`` was cancelled, so that the session stays usable
        or is known to be dead."""
        self._stop(cell, "cancelled")
        try:
            await cell.wait(self._grace_s + 1.0)
        except asyncio.CancelledError:
            self._fail("its cell was cancelled twice")
            raise

    async def _end_answers(self, cell: RunningCell) -> None:
        tasks = list(cell.tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks, timeout=self._grace_s)

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        encoder = ValueEncoder()
        try:
            data = encoder.encode(value)
        except CodecError as error:
            raise SandboxError(f"'{name}' cannot be set in the session: {error}") from None
        await self._ask({"op": "set", "name": name, "reserved": reserved, "value": data}, encoder)

    async def set_context(self, encoded: Any) -> None:
        """Bind the reserved name ``context`` to a value that ``SharedContext`` has encoded."""
        encoder = ValueEncoder()
        encoder.blobs.append(encoded)
        await self._ask({"op": "context"}, encoder)

    async def get(self, name: str) -> Any:
        try:
            return await self._ask({"op": "get", "name": name})
        except _GuestRefused as error:
            raise HostCallError(error.kind, str(error)) from None

    async def install(self, module: str, source: str) -> None:
        self._on_install(module, source)
        try:
            await self._ask({"op": "install", "module": module, "source": source})
        except _GuestRefused as error:
            raise SandboxError(
                f"module '{module}' could not be installed in the session: {error}"
            ) from None

    async def _ask(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> Any:
        self._check_free()
        header["id"] = id = self._next_id()
        future: asyncio.Future[Any] = self._loop.create_future()
        self._waiting = (id, future)
        try:
            self._send(header, encoder)
            async with asyncio.timeout(self._cell_s):
                return await future
        except SessionDied:
            raise SessionDied(f"the session ended: {await self._why()}") from None
        except TimeoutError:
            self._fail(f"no answer to '{header['op']}' within {self._cell_s:g} s")
            raise SessionDied(f"the session ended: {self._failure}") from None
        except asyncio.CancelledError:
            self._fail(f"a request ('{header['op']}') was cancelled on its way")
            raise
        finally:
            self._waiting = None

    def _check_open(self) -> None:
        if self._failure is not None or self._ended.done():
            raise SessionDied(f"the session has ended: {self._failure or 'its process is gone'}")
        if self._unfinished is not None:
            raise SandboxError("this branch was forked in the middle of a cell: resume it first")

    def _check_free(self) -> None:
        self._check_open()
        if self._cell is not None or self._waiting is not None or self._forks:
            raise SandboxError("the session is busy: one run, set, get or install at a time")

    def _next_id(self) -> int:
        self._last_id += 1
        return self._last_id

    def _send(self, header: dict[str, Any], encoder: ValueEncoder | None = None) -> None:
        if self._held_frames is not None:
            self._held_frames.append((header, encoder))
            return
        shared_buffers = self._transport.shared_buffers
        if shared_buffers is not None and (
            header["op"] not in ("ret", "err", "fork") or header["id"] == shared_buffers.owed
        ):
            shared_buffers.owed = None
        try:
            parts = host_frames.request(header, encoder, shared_buffers)
        except UnicodeEncodeError:
            # The code has lone surrogates: replace them, so that Python reports them in the cell.
            replaced = {
                k: v.encode("utf-8", "replace").decode() if isinstance(v, str) else v
                for k, v in header.items()
            }
            parts = host_frames.request(replaced, encoder, shared_buffers)
        self._transport.write(parts)

    def seed(self, seed: str) -> None:
        """Seed ``random`` again, before the next request. Raises SessionDied."""
        self._check_free()
        self._send({"op": "seed", "id": 0, "seed": seed})

    def kill(self, reason: str) -> None:
        """End the session at once; ``reason`` is reported to its user."""
        self._fail(reason)

    @property
    def process(self) -> int:
        """File descriptor of the session's process, or -1 if the transport has none."""
        return getattr(self._transport, "pidfd", -1)

    # -- branches

    async def fork(self) -> GuestSession:
        """Fork a branch. Concurrent forks of one session run one after the other."""
        transport, cell = self._transport, self._cell
        if not self.caps.fork or not isinstance(transport, ForkingTransport):
            raise SandboxError(
                "sessions of this provider do not fork: use the provider 'jail' (or 'process')"
            )
        self._forks += 1
        try:
            async with self._forking:
                return await self._fork(transport, cell)
        finally:
            self._forks -= 1

    async def _fork(self, transport: ForkingTransport, cell: RunningCell | None) -> GuestSession:
        """Fork a branch. ``cell`` was running, and waiting for the host, when the fork was
        requested."""
        if cell is None:
            self._check_open()
        id, future = self._next_id(), self._loop.create_future()
        self._check_waits(cell)
        self._waiting = (id, future)
        try:
            await transport.prepare_branch()
            self._check_waits(cell, also_waiting=True)
            pending = dict(cell.calls) if cell is not None else {}
            branch_transport = transport.begin_branch(
                host_frames.request({"op": "fork", "id": id}), self._moved
            )
            self._held_frames = []
            branch = GuestSession(
                branch_transport,
                cell_s=self._cell_s,
                grace_s=self._grace_s,
                max_output_bytes=self._max_output_bytes,
                on_close=self._on_close,
                on_fork=self._on_fork,
                on_install=self._on_install,
            )
            try:
                await self._until_forked(future, branch)
                transport.check_apart()
            except BaseException:
                await branch.close()
                raise
            finally:
                transport.end_branch(branch_transport)
        finally:
            self._waiting = None
            self._send_held()
        branch.tree, branch._last_id = self.tree, self._last_id
        if cell is not None and self._cell is cell and cell.end is None:
            branch._unfinished = cell.copy(pending)
        self.tree.add(branch)
        self._on_fork(branch)
        return branch

    def _moved(self) -> None:
        """The session's output goes to a new file from now on."""
        self._upto = 0

    def _send_held(self) -> None:
        frames, self._held_frames = self._held_frames, None
        for header, encoder in frames or ():
            self._send(header, encoder)

    def _check_waits(self, cell: RunningCell | None, *, also_waiting: bool = False) -> None:
        """Raise unless the session can fork: a cell must be waiting for the host, with no other
        request pending."""
        if self._failure is not None or self._ended.done():
            raise SessionDied(f"the session has ended: {self._failure or 'its process is gone'}")
        is_working = self._cell is not cell or (
            cell is not None
            and (cell.end is not None or cell.stopped is not None or not cell.tasks)
        )
        if is_working or (self._waiting is not None and not also_waiting):
            raise SandboxError(
                "the session is working: fork it while it is idle or waits for the host"
            )

    async def _until_forked(self, future: asyncio.Future[Any], branch: GuestSession) -> None:
        try:
            async with asyncio.timeout(_FORK_S):
                await future
        except _GuestRefused as error:
            raise SandboxError(f"the session cannot be forked: {error}") from None
        except SessionDied:
            raise SessionDied(
                f"the session ended while it was forked: {await self._why()}"
            ) from None
        except TimeoutError:
            self._fail(f"it did not fork within {_FORK_S:g} s")
            raise SessionDied(f"the session ended: {self._failure}") from None
        await branch.ready(_FORK_S)

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        cell, self._unfinished = self._unfinished, None
        if cell is None:
            raise SandboxError(
                "nothing to resume: this session was not forked in the middle of a cell"
            )
        self._cell = cell
        cell.answer = answer
        if timeout_s is not None:
            cell.limit_s = cell.worked_s + timeout_s
        for id, (name, args, kwargs, _) in cell.calls.items():
            cell.tasks[id] = self._loop.create_task(self._answer(cell, id, name, args, kwargs))
        return await self._finish(cell, cell.limit_s - cell.worked_s, None)

    async def close_tree(self) -> None:
        await asyncio.gather(*(session.close() for session in [*self.tree]))

    # -- stopping

    def interrupt(self, reason: str) -> None:
        if self._cell is not None:
            self._stop(self._cell, reason)

    def _time_up(self, cell: RunningCell) -> None:
        left = cell.limit_s - cell.worked(self._loop.time())
        if left <= 0:
            self._stop(cell, "time")
        else:  # the clock was paused for a while, or still is
            cell.timer = self._loop.call_later(left, self._time_up, cell)

    def _stop(self, cell: RunningCell, reason: str) -> None:
        if cell.stopped is not None or cell.end is not None:
            return
        cell.stopped = reason
        for task in cell.tasks.values():
            task.cancel()
        if cell.timer is not None:
            cell.timer.cancel()
        self._interrupt_again(cell, _INTERRUPTS)

    def _interrupt_again(self, cell: RunningCell, times: int) -> None:
        if cell.end is not None:
            return
        if times:
            self._transport.interrupt()
            cell.timer = self._loop.call_later(
                self._grace_s / _INTERRUPTS, self._interrupt_again, cell, times - 1
            )
        else:
            self._fail(
                f"it did not stop within {self._grace_s:g} s of an interrupt ({cell.stopped})"
            )

    def _fail(self, why: str) -> None:
        """End a session that cannot continue, with the reason ``why``."""
        if self._failure is None:
            self._failure = why
            self._transport.kill()
            self._transport.resume()  # read to the end of the stream
            self._loop.call_later(1.0, self._lost)  # in case the end of the stream never arrives

    def _lost(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)
        died = SessionDied("")
        if self._cell is not None and self._cell.end is None:
            now = self._loop.time()
            self._cell.clock_stops(now)
            for task in self._cell.tasks.values():
                task.cancel()
            self._cell.ends(died)
        if self._waiting is not None and not self._waiting[1].done():
            self._waiting[1].set_exception(died)

    async def _why(self) -> str:
        if self._failure is None:
            self._failure = await self._transport.exit_reason()
        return self._failure

    async def close(self) -> None:
        if self._closed is None:
            self._closed = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closed)

    async def _close(self) -> None:
        self._failure = self._failure or "it was closed"
        self._on_close(self)
        self.tree.discard(self)
        await self._transport.close()
        self._lost()

    # -- frames

    def _received(self, data: memoryview) -> None:
        try:
            for view in self._assembler.feed(data):
                message, blobs = host_frames.parse(view, self._transport.shared_buffers)
                self._take(message, blobs, len(view))
        except ProtocolError as error:
            self._fail(f"it broke the protocol: {error}")

    def _take(self, message: host_frames.FromGuest, blobs: list[memoryview], size: int) -> None:
        cell = self._cell
        if cell is not None and cell.end is None:
            if type(message) is host_frames.CellDoneFrame:
                self._ended_cell(cell, message, blobs)
                return
            if type(message) is host_frames.HostCallFrame:
                self._called(cell, message, blobs, size)
                return
            if type(message) is host_frames.OutputFrame:
                self._printed(cell, message, blobs)
                return
        if self._waiting is not None:
            if self._replied(message, blobs, *self._waiting):
                return
        elif type(message) is host_frames.HelloFrame and not self._hello.done():
            self.pid = message.pid
            self._hello.set_result(None)
            return
        if self._failure is None:
            raise ProtocolError(f"a frame '{message.__struct_config__.tag}' that was not expected")

    def _printed(
        self, cell: RunningCell, message: host_frames.OutputFrame, blobs: list[memoryview]
    ) -> None:
        if len(blobs) != 1:
            raise ProtocolError(f"output in {len(blobs)} blobs")
        cell.output.add(bytes(blobs[0]), message.skip)
        cell.chars = message.chars
        self._upto = message.upto

    def _ended_cell(
        self, cell: RunningCell, message: host_frames.CellDoneFrame, blobs: list[memoryview]
    ) -> None:
        if message.id != cell.id:
            raise ProtocolError(f"the end of cell {message.id}, while {cell.id} runs")
        note = host_frames.value_of(message, message.note, blobs)
        if self._transport.shared_buffers is not None:
            self._transport.shared_buffers.empty()
        cell.clock_stops(self._loop.time())
        cell.chars = message.chars
        cell.ends((message, note))

    def _replied(
        self,
        message: host_frames.FromGuest,
        blobs: list[memoryview],
        id: int,
        future: asyncio.Future[Any],
    ) -> bool:
        if (
            not isinstance(
                message, host_frames.OkFrame | host_frames.ValueFrame | host_frames.FailedFrame
            )
            or message.id != id
            or future.done()
        ):
            return False
        if isinstance(message, host_frames.FailedFrame):
            future.set_exception(_GuestRefused(message.kind, message.message))
        else:
            future.set_result(
                host_frames.value_of(message, message.value, blobs)
                if isinstance(message, host_frames.ValueFrame)
                else None
            )
        return True

    # -- calls

    def _called(
        self,
        cell: RunningCell,
        message: host_frames.HostCallFrame,
        blobs: list[memoryview],
        size: int,
    ) -> None:
        if message.id <= cell.last_call:
            raise ProtocolError(f"call {message.id} after call {cell.last_call}")
        cell.last_call = message.id
        value = host_frames.value_of(message, message.value, blobs)
        match value:
            case [list() as args, dict() as kwargs] if all(isinstance(key, str) for key in kwargs):
                pass
            case _:
                raise ProtocolError("a call without [args, kwargs]")
        if cell.stopped is not None:
            self._refuse(
                message.id,
                HostCallError("Interrupted", f"the cell is being stopped ({cell.stopped})"),
            )
            return
        if not cell.tasks:
            cell.clock_stops(self._loop.time())
        long = sum(map(len, blobs))
        short = size if message.shelved else size - long
        cell.calls[message.id] = (message.name, args, kwargs, long + _WEIGHT_OF_JSON * short)
        cell.tasks[message.id] = self._loop.create_task(
            self._answer(cell, message.id, message.name, args, kwargs)
        )
        if (
            len(cell.tasks) >= MAX_CALLS
            or sum(call[-1] for call in cell.calls.values()) > MAX_CALL_BYTES
        ):
            self._is_paused = True
            self._transport.pause()

    async def _answer(
        self, cell: RunningCell, id: int, name: str, args: list[Any], kwargs: dict[str, Any]
    ) -> None:
        encoder = ValueEncoder(defers=self._transport.shared_buffers is not None)
        failure: HostCallError | None = None
        data = None
        try:
            data = encoder.encode(await cell.answer(name, args, kwargs))
        except HostCallError as error:
            failure = error
        except CodecError as error:
            failure = HostCallError("TypeError", f"{name}: {error}")
        except asyncio.CancelledError:
            failure = HostCallError("Interrupted", f"{name} was cut off")
        except Exception as error:  # noqa: BLE001  (a bug of the host, not of the cell: ``run`` raises it)
            cell.bug = error
            failure = HostCallError("HostFailed", f"{name} failed in the host")
        self._settle(cell, id)
        if failure is not None:
            self._refuse(id, failure)
        elif cell.end is None:
            self._send({"op": "ret", "id": id, "value": data}, encoder)
        if cell.bug is not None:
            self._stop(cell, "error")

    def _refuse(self, id: int, error: HostCallError) -> None:
        encoder = ValueEncoder()
        try:
            data = encoder.encode(error.data)
        except CodecError:
            encoder, data = ValueEncoder(), {}
        self._send(
            {"op": "err", "id": id, "kind": error.kind, "message": str(error), "value": data},
            encoder,
        )

    def _settle(self, cell: RunningCell, id: int) -> None:
        cell.tasks.pop(id, None)
        cell.calls.pop(id, None)
        if not cell.tasks and cell.end is None:
            cell.clock_from = self._loop.time()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume()


class _GuestRefused(Exception):
    """The guest could not fulfil a request."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind
