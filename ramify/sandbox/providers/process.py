"""The sandbox provider ``process``, which runs each session in a separate CPython process, forked
in milliseconds, without isolation.

This module decides which process a session is forked from: the fork server, or a template process
that already holds the session's large context. It also ensures that closing leaves nothing behind.
The connection to a session is in ``host/process_transport.py``. Sessions are not isolated, unlike
those of ``jail.py``: code runs with the user's rights.

    ProcessSandbox ──ForkServerChannel──> fork server ─┬─> session <──> GuestSessionProxy
                   └─ForkServerChannel──> template ────┴─> session
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import socket
import subprocess
import sys
import weakref
from collections.abc import Coroutine, Mapping, MutableMapping, Sequence
from typing import Any

from ramify.errors import ConfigError, SandboxError, SourceError
from ramify.sandbox.base import (
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
    SharedContextValue,
)
from ramify.sandbox.file_reference import FileReferenceReader
from ramify.sandbox.host.forkserver_channel import ForkServerChannel, start_server
from ramify.sandbox.host.forkserver_process import StartedForkServer
from ramify.sandbox.host.importable_packages import locate
from ramify.sandbox.host.process_transport import (
    ForkedSessionHandles,
    ForkedSessionTransport,
    SessionSharedMemory,
)
from ramify.sandbox.host.running_cell import limits_of
from ramify.sandbox.host.session import GuestSessionProxy, SessionLifecycleHooks
from ramify.sandbox.host.transport import SandboxConnectionState

WARNING = (
    "sandbox 'process': code runs in a separate process, without the host's environment and with "
    "limits on memory and time, but with your user's rights: it can read your files and use the "
    "network. Do not run hostile code in it."
)
_STARTS = 3
"""Maximum number of attempts to start a fork server. A further attempt is made if the server was
killed before the requested session existed."""
_EXIT_S = 2.0
_GONE_S = 0.2
"""Maximum seconds until the exit of a killed server is noticed."""
_MAX_TEMPLATES = 8
# On the host: the socket, the output file, the shared buffers and the process descriptor.
_FDS_PER_SESSION = 4
_FILES_AT_ONCE = 100
"""Files that a template maps in one step. The system passes at most 253 descriptors at once."""
_SPARE_FDS = 128


class ProcessSandbox:
    """A sandbox whose sessions are forked processes.

    Implements ``base.Sandbox``. The subclass for the jail overrides how the fork server is started
    and how sessions are connected.
    """

    warning: str | None = WARNING

    def __init__(self, spec: SandboxSpec) -> None:
        if sys.platform == "win32" or not hasattr(os, "fork"):
            raise SandboxError(
                "sandbox 'process' needs fork, which this platform lacks: run inside WSL2 or a "
                "container, or use the provider 'inprocess' for debugging"
            )
        is_linux = sys.platform == "linux"
        self.caps = SandboxCapabilities(
            limits_memory=is_linux,
            interrupt=True,
            kill=True,
            fork=is_linux,
            starts_processes=True,
            shares_context=True,
        )
        self.spec = spec
        self.paths = locate(spec.packages)
        self._server: asyncio.Task[ForkServerChannel] | None = None
        self._processes: list[subprocess.Popen[bytes]] = []
        self._folders: list[str] = []
        self.sessions: set[GuestSessionProxy] = set()
        self._templates: dict[
            int, tuple[weakref.ref[SharedContextValue], asyncio.Task[ForkServerChannel]]
        ] = {}
        self._retired: list[ForkServerChannel] = []
        self._retiring: set[asyncio.Task[ForkServerChannel]] = set()
        """Start-up tasks of templates that are to be ended."""
        self.buffers = SandboxConnectionState()
        self._is_closed = False

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> GuestSessionProxy:
        await asyncio.sleep(0)  # a caller that tries again and again lets others run
        if self._is_closed:
            raise SandboxError("the sandbox is closed: it opens no more sessions")
        if context is not None and not isinstance(context, SharedContextValue):
            raise ConfigError(
                f"a context must be a SharedContextValue, not {type(context).__name__}"
            )
        for retries_left in reversed(range(_STARTS)):
            large = context is not None and context.fd is not None
            channel = await (
                self._template_channel(context)
                if large and context is not None
                else self.fork_server()
            )
            try:
                session = await self.fork_session(channel, seed)
                if context is not None and not large:
                    await session.set_context(context.parts, self.spec.packages)
                return session
            except SandboxError:
                await asyncio.wait([channel.gone], timeout=_GONE_S)
                # Try again only if the server was killed before it returned the session.
                if not retries_left or not channel.gone.done():
                    raise
        raise AssertionError("a session is opened or an error raised")

    # -- servers

    async def fork_server(self) -> ForkServerChannel:
        """Return the connection to the fork server, which is started if necessary.

        The server is started for the first session, and restarted if it was killed.
        """
        if self._server is None or _is_gone(self._server):
            self._clean_up(self._server)
            self._server = _start_task_quietly(self._start())
        return await asyncio.shield(self._server)

    def _clean_up(self, server: asyncio.Task[ForkServerChannel] | None) -> None:
        """Release the host's resources for a fork server that has ended."""
        if server is not None and not server.cancelled() and server.exception() is None:
            server.result().release_resources()
        self._processes = [each for each in self._processes if each.poll() is None]

    async def _start(self) -> ForkServerChannel:
        for retries_left in reversed(range(_STARTS)):
            server = self.start_fork_server()
            self._processes.append(server.process)
            self._folders.append(server.folder)
            channel = ForkServerChannel(server.control, server.complaints)
            try:
                self.check_server_report(await channel.wait_ready())
                return channel
            except SandboxError:
                await channel.close()
                if not retries_left or not await _was_killed(server.process):
                    raise
        raise AssertionError("a start ends well or raises")

    def check_server_report(self, ready: Mapping[str, Any]) -> None:
        """Raise SandboxError if a fork server reports that it cannot run sessions as required.

        This class accepts every server; a subclass may not.
        """

    def start_fork_server(self) -> StartedForkServer:
        """Start a fork server, or return one that was started in advance."""
        return _launched.pop(self.spec, None) or _start(self.spec, self.paths)

    async def _template_channel(self, context: SharedContextValue) -> ForkServerChannel:
        """Return the connection to the template process that has this large context in memory.

        The template is started for the context's first session and lives as long as the context.
        """
        base = await self.fork_server()
        key, loop = context.serial, asyncio.get_running_loop()
        if key not in self._templates or _is_gone(self._templates[key][1]):
            self._retire_over(_MAX_TEMPLATES - 1)

            # Called in the thread that dropped the last reference to the context.
            def retire(_: object) -> None:
                with contextlib.suppress(RuntimeError):
                    loop.call_soon_threadsafe(self._retire, key)

            reference = weakref.ref(context, retire)
            self._templates[key] = (
                reference,
                _start_task_quietly(self._start_template(base, context)),
            )
        try:
            template = await asyncio.shield(self._templates[key][1])
            # A session would be killed if it read behind the end of a file that became shorter.
            for file in context.files:
                file.check_unchanged()
            return template
        except (SandboxError, SourceError):
            self._retire(key)
            raise

    async def _start_template(
        self, base: ForkServerChannel, context: SharedContextValue
    ) -> ForkServerChannel:
        host_end, template_end = socket.socketpair()
        channel = ForkServerChannel(host_end)
        channel.modules = base.modules
        with template_end:
            assert context.fd is not None
            _, fds = await base.ask(
                {"op": "template", "files": len(context.files)},
                (template_end.fileno(), context.fd),
            )
        # The template's process descriptor, not needed: a template ends with its channel.
        _close_all(fds)
        try:
            for at in range(0, len(context.files), _FILES_AT_ONCE):
                await _map_files(channel, context.files[at : at + _FILES_AT_ONCE])
            await channel.wait_ready()
        except (SandboxError, SourceError):
            await channel.close()
            raise
        return channel

    def _retire_over(self, limit: int) -> None:
        while len(self._templates) > limit:
            self._retire(next(iter(self._templates)))

    def _retire(self, key: int) -> None:
        """Retire a template process, so that it ends after the last of its sessions."""
        entry = self._templates.pop(key, None)
        if entry is None:
            return
        self._retiring.add(entry[1])
        entry[1].add_done_callback(self._end_template)  # a caller may still wait for its start

    def _end_template(self, started: asyncio.Task[ForkServerChannel]) -> None:
        self._retiring.discard(started)
        if not started.cancelled() and started.exception() is None:
            channel = started.result()
            with contextlib.suppress(SandboxError):
                channel.send({"op": "retire"})
            self._retired = [old for old in self._retired if not old.gone.done()] + [channel]

    # -- sessions

    async def fork_session(
        self, channel: ForkServerChannel, seed: str, *, early: bool = False
    ) -> GuestSessionProxy:
        """Fork a new session from a fork server or from a template.

        With ``early``, the session is created in advance, while no caller waits for it.
        """
        _make_room(_FDS_PER_SESSION * (len(self.sessions) + 1) + _SPARE_FDS)
        host_end, session_end = socket.socketpair()
        files = SessionSharedMemory.make(self.buffers.shared_buffers)
        # As of now: what is installed while this waits, the session does not have.
        modules = channel.modules
        try:
            with session_end:
                reply, fds = await channel.ask(
                    {"op": "open", "early": early},
                    (session_end.fileno(), *files.descriptors()),
                )
        except BaseException:
            host_end.close()
            files.close()
            raise
        transport = self.make_transport(
            ForkedSessionHandles(host_end, files, channel, reply["pid"], fds[0] if fds else -1)
        )
        session = GuestSessionProxy(
            transport,
            limits_of(self.spec),
            SessionLifecycleHooks(self.unregister_session, self.register_session),
        )
        session.modules = dict(modules)
        self.sessions.add(session)
        try:
            if not early:  # otherwise when it is taken
                session.seed(seed)
            await session.wait_ready()
        except BaseException:
            await session.close()
            raise
        self.register_session(session)
        return session

    def register_session(self, session: GuestSessionProxy) -> None:
        """Register a new session or branch, and raise the limit on open files if necessary."""
        self.sessions.add(session)
        with contextlib.suppress(SandboxError):  # the next fork reports what is missing
            # Twice, because each session may be forked, which does not raise the limit.
            _make_room(_FDS_PER_SESSION * (2 * len(self.sessions) + 1) + _SPARE_FDS)

    def unregister_session(self, session: GuestSessionProxy) -> None:
        self.sessions.discard(session)

    def make_transport(self, process: ForkedSessionHandles) -> ForkedSessionTransport:
        return ForkedSessionTransport(self.caps, self.buffers, process)

    async def close(self) -> None:
        self._is_closed = True
        await asyncio.gather(*(session.close() for session in [*self.sessions]))
        started = [
            task
            for task in (self._server, *(task for _, task in self._templates.values()))
            if task is not None
        ]
        self._templates.clear()
        await asyncio.gather(*started, *self._retiring, return_exceptions=True)
        channels = [
            task.result()
            # Templates first: the server waits for them, and each ends with its own channel.
            for task in reversed(started)
            if not task.cancelled() and task.exception() is None
        ]
        for channel in [*self._retired, *channels]:
            await channel.close()
        while self._processes:
            await self._reap(self._processes.pop())
        if self.buffers.endings:
            await asyncio.wait(self.buffers.endings)
        for folder in self._folders:
            _delete(folder)

    async def _reap(self, process: subprocess.Popen[bytes]) -> None:
        for attempt in range(250):  # it ends in a few milliseconds
            if process.poll() is not None:
                return
            await asyncio.sleep(0.001 if attempt < 50 else 0.01)
        process.kill()
        await asyncio.to_thread(process.wait)


_launched: dict[SandboxSpec, StartedForkServer] = {}


def launch(spec: SandboxSpec) -> None:
    """Start a fork server ahead of time for the next sandbox with this configuration.

    A command can call this as soon as it knows the configuration, before an event loop runs. A
    server that is never used ends with this process.
    """
    if not _launched:
        atexit.register(_discard_unused_servers)
    if spec not in _launched:
        _launched[spec] = _start(spec, locate(spec.packages))


def close_inherited_servers(launched: MutableMapping[Any, StartedForkServer]) -> None:
    """Close a forked child's handles to the fork servers of its parent process.

    Call this in a forked child; otherwise parent and child would talk to the same server.
    """
    for server in launched.values():
        server.leave_to_parent()
    launched.clear()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=lambda: close_inherited_servers(_launched))


def _discard_unused_servers() -> None:
    """End the fork servers that were launched in advance but never used."""
    for server in _launched.values():
        server.discard()
        _delete(server.folder)
    _launched.clear()


def _delete(folder: str) -> None:
    """Delete the folder that holds the private folders of a fork server's sessions.

    Does nothing for an empty path, since the fork server of a jail has no folder.
    """
    if folder:
        import shutil

        shutil.rmtree(folder, ignore_errors=True)


def _start(spec: SandboxSpec, paths: list[str]) -> StartedForkServer:
    import tempfile

    return start_server(
        {
            "paths": paths,
            "packages": list(spec.packages),
            "folder": tempfile.mkdtemp(prefix="ramify-"),
            "memory_bytes": spec.memory_bytes,
            "max_output_bytes": spec.max_output_bytes,
        }
    )


async def _was_killed(process: subprocess.Popen[bytes]) -> bool:
    """Return True if a signal ended the fork server's process, so that a second start may
    succeed."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        return await asyncio.to_thread(process.wait, _EXIT_S) < 0
    return False


def _is_gone(server: asyncio.Task[ForkServerChannel]) -> bool:
    """Return True if a fork server has ended or could not be started."""
    if not server.done():
        return False
    return server.cancelled() or server.exception() is not None or server.result().gone.done()


def _start_task_quietly(
    start: Coroutine[Any, Any, ForkServerChannel],
) -> asyncio.Task[ForkServerChannel]:
    """Start a task that opens a fork server, and mark its exception as handled.

    Then asyncio logs no warning about the exception even if all callers are cancelled.
    """
    task = asyncio.ensure_future(start)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return task


async def _map_files(channel: ForkServerChannel, files: Sequence[FileReferenceReader]) -> None:
    """Tell a template process to map the files of a context into its memory.

    Raises SourceError if one of them has changed.
    """
    fds: list[int] = []
    try:
        for file in files:
            fds.append(file.open_unchanged())
        places = [[each.reference.digest, each.start, each.reference.num_bytes] for each in files]
        await channel.ask({"op": "map", "places": places}, fds)
    finally:
        _close_all(fds)


def _make_room(fds: int) -> None:
    """Raise this process's limit on open files if ``fds`` files would exceed it.

    Raises SandboxError if the hard limit is too low.
    """
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or fds <= soft:
        return
    limit = fds * 2 if hard == resource.RLIM_INFINITY else min(fds * 2, hard)
    if limit < fds:
        raise SandboxError(
            f"{fds} open files are needed, but the limit is {hard}: raise the limit (ulimit -n), "
            "or run fewer sessions"
        )
    with contextlib.suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


def _close_all(fds: list[Any]) -> None:
    for fd in fds:
        os.close(fd)


def open_provider(spec: SandboxSpec) -> ProcessSandbox:
    """Open a sandbox whose sessions are ordinary processes on this machine.

    ``base.open_sandbox`` calls this function.
    """
    return ProcessSandbox(spec)
