"""Run sessions on a remote service that starts commands, such as a container engine or a cloud.

The guest, the code that runs cells, needs no installation: its files are the first data sent. This
module defines how the guest's bytes and control messages share one stream. It also handles streams
that carry only text, and streams on which other output (a greeting) comes first. Each service is a
``SandboxService`` of a few lines (see ``docker.py`` and ``extras/sandboxes/``).

    GuestSessionProxy ─ RemoteTransport ─frames─> CommandByteStream
        ··> session_supervisor ─fork─> guest/

A service sees base64 if its streams carry text ("text") or pass through a terminal ("terminal").
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import json
import zlib
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal, Protocol

import msgspec

from ramify.errors import ConfigError, SandboxError
from ramify.logging import ComponentLogger
from ramify.sandbox.base import (
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
    SharedContextValue,
)
from ramify.sandbox.guest.message_frames import (
    HostGuestSharedMemory,
    frame,
    split_frame,
    to_base64_lines,
)
from ramify.sandbox.guest.value_encoding import Buffer, ProtocolError
from ramify.sandbox.host.forkserver_process import ENVIRONMENT
from ramify.sandbox.host.guest_module_files import LOADER, module_sources
from ramify.sandbox.host.running_cell import limits_of
from ramify.sandbox.host.session import GuestSessionProxy, SessionLifecycleHooks
from ramify.sandbox.host.transport import MessageFrameAssembler, how_it_ended

_log = ComponentLogger("sandbox")
Carries = Literal["bytes", "text", "terminal"]
START_S = 120.0
"""Maximum seconds from starting the command to the guest's first frame."""
PROVISION_S = 900.0
"""Maximum seconds to create a container or machine, including the pull or build of its image."""
CLOSE_S = 30.0
_DATA, _INTERRUPT, _KILL = b'{"op":"data"}', b'{"op":"interrupt"}', b'{"op":"kill"}'
_PIECE_BYTES = 1 << 18
"""Maximum number of the guest's bytes in one message. An interrupt has to wait for at most one such
message."""
_MAX_GREETING_BYTES = 1 << 16
_MAX_FRAME_BYTES = 2 << 20
"""Maximum size in bytes of a message from the remote end, which a hostile guest may control."""
_MARK = b"ramify-guest-1\n"
_MODULES = ("guest", "server/process_setup", "server/forkserver", "server/session_supervisor")
# The mark is in two parts, so that no echo of this code contains it. Input is read through
# sys.stdin.buffer, like all later messages: it may have read more than a line.
_BOOT = f"""{LOADER}
os.dup2(1, 2)
if sys.argv[1] == "terminal":
    import tty
    tty.setraw(0)
os.write(1, b"ramify-" b"guest-1\\n")
import base64, json, tempfile, zlib
parcel = json.loads(zlib.decompress(base64.b64decode(sys.stdin.buffer.readline())))
with tempfile.TemporaryDirectory(prefix="ramify-") as folder:
    for path, text in parcel["files"].items():
        path = os.path.join(folder, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    supervisor = load(folder, parcel["modules"])
supervisor.main(parcel["config"], sys.argv[1] != "bytes")
"""
# In base64, because some services send the command as one line to a shell.
_SHORT = f"import base64;exec(base64.b64decode('{base64.b64encode(_BOOT.encode()).decode()}'))"


def boot_command(carries: Carries) -> list[str]:
    """Return the command that starts a session's Python (3.11 or later) in a clean environment."""
    environment = {**ENVIRONMENT, "PATH": "/usr/local/bin:/usr/bin:/bin"}
    return [
        "env",
        "-i",
        *(f"{name}={value}" for name, value in environment.items()),
        "python3",
        "-P",
        "-c",
        _SHORT,
        carries,
    ]


def _pack_boot_parcel(spec: SandboxSpec, seed: str) -> bytes:
    config = {
        "seed": seed,
        "packages": list(spec.packages),
        "memory_bytes": spec.memory_bytes,
        "max_output_bytes": spec.max_output_bytes,
    }
    parcel = {"config": config, "modules": _MODULES, "files": module_sources(_MODULES)}
    return base64.b64encode(zlib.compress(json.dumps(parcel).encode())) + b"\n"


class SupervisorMessage(msgspec.Struct):
    """The header of a message from the program that starts and supervises a remote session.

    This program is the session supervisor.
    """

    op: Literal["data", "failed", "ended"]
    message: str = ""
    """Reason why the guest could not be started."""
    status: Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)] | None = None
    """The guest's exit status; None if the guest only closed its connection."""
    start: int = 0
    """Offset in the guest's output file at which the message's data begins."""


_decoder = msgspec.json.Decoder(SupervisorMessage)


class CommandByteStream(Protocol):
    """The standard input and output of one command that a service has started."""

    async def send(self, data: bytes) -> None:
        """Send all data to the command's standard input, in order.

        Calls never overlap.
        """
        ...

    async def receive(self) -> bytes:
        """Return the next data from the command's standard output, or b"" at the end."""
        ...

    async def close(self) -> None:
        """End the command, and delete the container or machine in which it ran."""
        ...


class SandboxService(Protocol):
    """A service, such as Docker or a cloud, that runs commands in new containers or machines.

    Its methods may raise any exception of the service's SDK; ``RemoteSandbox`` adds what was
    attempted.
    """

    name: str
    """Name for messages, such as ``docker``."""
    carries: Carries

    async def start_in_new_box(self, command: list[str]) -> CommandByteStream:
        """Create a new box (a container or machine) and start a command in it."""
        ...

    async def close(self) -> None: ...


SEPARATE_MACHINE = SandboxCapabilities(
    isolates_files=True,
    isolates_network=True,
    isolates_processes=True,
    limits_memory=True,
    interrupt=True,
    kill=True,
    starts_processes=True,
)
"""Capabilities of a service that runs each session on a separate machine without a network."""


class RemoteSandbox:
    """A sandbox whose sessions run on a remote service, such as a container engine or a cloud.

    Every session gets a separate box, which is a container or machine. Implements ``base.Sandbox``.
    """

    def __init__(
        self,
        spec: SandboxSpec,
        service: SandboxService,
        caps: SandboxCapabilities = SEPARATE_MACHINE,
        warning: str | None = None,
    ) -> None:
        self.caps = caps
        self.warning = warning
        self._spec = spec
        self._service = service
        self._sessions: set[GuestSessionProxy] = set()
        self._is_closed = False

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> GuestSessionProxy:
        if self._is_closed:
            raise SandboxError("the sandbox is closed: it opens no more sessions")
        if context is not None and not isinstance(context, SharedContextValue):
            raise ConfigError(
                f"a context must be a SharedContextValue, not {type(context).__name__}"
            )
        transport = RemoteTransport(self.caps, await self._start(), self._service)
        try:
            await transport.send_session_code(_pack_boot_parcel(self._spec, seed))
            if self._is_closed:  # closed meanwhile: nothing else would close this session
                raise SandboxError("the sandbox was closed while a session was being opened")
            session = self._add_session(transport)
            await session.wait_ready(START_S)
            if context is not None:
                parts = context.in_memory_copy().parts
                await session.set_context(parts, self._spec.packages)
        except BaseException:
            await transport.close()
            raise
        return session

    async def _start(self) -> CommandByteStream:
        try:
            async with asyncio.timeout(PROVISION_S):
                return await self._service.start_in_new_box(boot_command(self._service.carries))
        except SandboxError:
            raise
        except Exception as error:
            raise SandboxError(
                f"sandbox '{self._service.name}' could not start a session: "
                f"{_summarize_error(error)}"
            ) from error

    def _add_session(self, transport: RemoteTransport) -> GuestSessionProxy:
        session = GuestSessionProxy(
            transport, limits_of(self._spec), SessionLifecycleHooks(self._sessions.discard)
        )
        self._sessions.add(session)
        return session

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(session.close() for session in [*self._sessions]))
        await self._service.close()


class RemoteTransport:
    """The host's connection to one session on a remote service.

    Call ``send_session_code`` before ``start_reading``.
    """

    shared_buffers: HostGuestSharedMemory | None = None

    def __init__(
        self, caps: SandboxCapabilities, stream: CommandByteStream, service: SandboxService
    ) -> None:
        self.caps = caps
        self._stream = stream
        self._service = service
        self._assembler = MessageFrameAssembler(_MAX_FRAME_BYTES)
        self._line = b""
        """Beginning of a base64 line whose end has not arrived yet."""
        self._early = b""
        """Data that arrived right after the greeting, the output before the supervisor's first
        message."""
        self._urgent: deque[bytes] = deque()
        self._backlog: deque[bytes] = deque()
        self._has_work = asyncio.Event()
        self._flows = asyncio.Event()
        self._flows.set()
        self._exit_reason: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """Reason why the guest ended."""
        self._left: tuple[int, bytes] = (0, b"")
        self._tasks: list[asyncio.Task[None]] = []
        self._received: Callable[[memoryview], None] = lambda data: None
        self._lost: Callable[[], None] = lambda: None

    async def send_session_code(self, parcel: bytes) -> None:
        """Wait for the remote Python to start, then send it the session's source files.

        Raises SandboxError, with the output of the remote end, if Python does not start.
        """
        greeting = bytearray()
        try:
            async with asyncio.timeout(START_S):
                while _MARK not in greeting:
                    data = await self._stream.receive()
                    greeting += data
                    if not data or len(greeting) > _MAX_GREETING_BYTES:
                        raise SandboxError(
                            self._no_python_message(greeting.decode("utf-8", "replace"))
                        )
                self._early = bytes(greeting.partition(_MARK)[2])
                await self._stream.send(parcel)
        except TimeoutError:
            raise SandboxError(
                f"sandbox '{self._service.name}': Python did not start within {START_S:g} s"
            ) from None

    def _no_python_message(self, output: str) -> str:
        lines = output.strip().splitlines()
        output = f"it said: {lines[-1][:300]}" if lines else "it said nothing"
        return (
            f"sandbox '{self._service.name}': its image did not start Python, {output}; "
            "name an image that has python3 of version 3.11 or later (image=…)"
        )

    # -- the transport

    def start_reading(
        self, received: Callable[[memoryview], None], lost: Callable[[], None]
    ) -> None:
        self._received = received
        self._lost = lost
        self._tasks = [asyncio.ensure_future(self._read()), asyncio.ensure_future(self._write())]

    def write(self, data: list[Any]) -> None:
        joined = memoryview(b"".join(data))
        for at in range(0, len(joined), _PIECE_BYTES):
            self._backlog.append(self._pack_frame(_DATA, joined[at : at + _PIECE_BYTES]))
        self._has_work.set()

    def pause(self) -> None:
        self._flows.clear()

    def resume(self) -> None:
        self._flows.set()

    def interrupt(self) -> None:
        self._urgent.append(self._pack_frame(_INTERRUPT))
        self._has_work.set()

    def kill(self) -> None:
        self._urgent.append(self._pack_frame(_KILL))
        self._has_work.set()

    def unsent_output(self, start: int) -> bytes:
        begins, data = self._left
        if start > begins + len(data):  # the output file was truncated meanwhile
            start = begins
        return data[max(start - begins, 0) :]

    async def exit_reason(self) -> str:
        await asyncio.wait((self._exit_reason,), timeout=0.5)
        return (
            self._exit_reason.result()
            if self._exit_reason.done()
            else "it closed its connection to the host"
        )

    async def close(self) -> None:
        tasks, self._tasks = self._tasks, []
        stream, self._stream = self._stream, _ClosedStream()
        for task in tasks:
            task.cancel()
        try:
            if tasks:
                await asyncio.wait(tasks, timeout=CLOSE_S)
        finally:  # even if this task is cancelled: a box costs money
            await self._close_stream(stream)

    async def _close_stream(self, stream: CommandByteStream) -> None:
        try:
            async with asyncio.timeout(CLOSE_S):
                await stream.close()
        except Exception as error:  # noqa: BLE001  (an SDK may raise anything; the session is over anyway)
            message = (
                f"sandbox '{self._service.name}': a session's box may still be running: "
                f"{_summarize_error(error)}"
            )
            _log.issue_python_warning(message, RuntimeWarning, stacklevel=2)

    # -- bytes

    def _pack_frame(self, header: bytes, data: Buffer = b"") -> bytes:
        packed = b"".join(frame(header, [data]))
        return packed if self._service.carries == "bytes" else to_base64_lines(packed)

    async def _write(self) -> None:
        try:
            while True:
                await self._has_work.wait()
                self._has_work.clear()
                while self._urgent or self._backlog:
                    await self._stream.send(self._next_part())
        except Exception as error:  # noqa: BLE001  (an SDK may raise anything: report it as the session's end)
            self._note_end(f"the connection to it broke: {_summarize_error(error)}")

    def _next_part(self) -> bytes:
        """Return the next bytes to send to the remote session.

        This is an urgent message, or as many waiting messages as fit into one full piece.
        """
        if self._urgent:
            return self._urgent.popleft()
        parts = [self._backlog.popleft()]
        size = len(parts[0])
        while self._backlog and size + len(self._backlog[0]) <= _PIECE_BYTES:
            parts.append(self._backlog.popleft())
            size += len(parts[-1])
        return b"".join(parts)

    async def _read(self) -> None:
        try:
            await self._handle_received(self._early)
            while data := await self._stream.receive():
                await self._handle_received(data)
            self._note_end("its box ended")
        except (ProtocolError, ValueError) as error:
            self._note_end(f"it broke the protocol: {error}")
            self.kill()
        except Exception as error:  # noqa: BLE001  (as above)
            self._note_end(f"the connection to it broke: {_summarize_error(error)}")

    def _decode_received(self, data: bytes) -> bytes:
        """Decode data from the remote session if its service can carry only lines of base64.

        An incomplete last line is kept for later. Otherwise return the data unchanged.
        """
        if self._service.carries == "bytes":
            return data
        lines, _, self._line = (self._line + data).rpartition(b"\n")
        if len(self._line) > _MAX_FRAME_BYTES:
            raise ProtocolError(f"a line of {len(self._line):,} bytes is too long")
        return b"".join(map(binascii.a2b_base64, lines.split(b"\n")))

    async def _handle_received(self, data: bytes) -> None:
        """Handle the messages from the remote session that the received data completes.

        Waits before a message while the session has paused reading.
        """
        for view in self._assembler.feed(memoryview(self._decode_received(data))):
            if not self._flows.is_set():
                await self._flows.wait()
            self._handle_message(view)

    def _handle_message(self, view: memoryview) -> None:
        header, end = split_frame(view)
        try:
            message = _decoder.decode(header)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProtocolError(f"invalid frame: {str(error)[:200]}") from None
        if message.op == "data":
            self._received(view[end:])
        elif message.op == "failed":
            self._note_end(f"{message.message[:2000]} (in its image; set by image=…)")
        else:
            self._left = (message.start, bytes(view[end:]))
            self._note_end(
                "it closed its connection to the host"
                if message.status is None
                else how_it_ended(message.status)
            )

    def _note_end(self, why: str) -> None:
        if not self._exit_reason.done():
            self._exit_reason.set_result(why)
        self._lost()


class _ClosedStream:
    """A replacement for the stream of a closed transport, which ignores all data.

    It replaces the stream of a closed transport.
    """

    async def send(self, data: bytes) -> None:
        pass

    async def receive(self) -> bytes:
        return b""

    async def close(self) -> None:
        pass


class CommandOutputQueue:
    """A queue of a remote command's output, which the SDK of the service delivers by callback.

    ``CommandByteStream.receive`` of the service reads from it.
    """

    def __init__(self) -> None:
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()

    def put(self, data: str | bytes) -> None:
        if data:
            self._queue.put_nowait(data.encode() if isinstance(data, str) else data)

    async def end_after(self, wait: Callable[[], Awaitable[object]]) -> None:
        """Wait for the remote command to end, then mark the end of its output in the queue.

        ``wait`` returns when the command has ended.
        """
        try:
            with contextlib.suppress(Exception):  # the guest has reported the reason, if it could
                await wait()
        finally:
            self._queue.put_nowait(b"")

    async def get(self) -> bytes:
        return await self._queue.get()


def _summarize_error(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
