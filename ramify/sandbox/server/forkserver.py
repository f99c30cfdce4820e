"""The fork server, a small process from which sessions are forked.

It always runs outside the host process.

This module sets up a session's process (process group, limits, folder, descriptors). It ensures
that nothing it started outlives it, and that everything ends with the host. The session itself is
in ``guest/``, and isolation in ``jail/``. The server is started with an empty environment; the
host's end is ``host/forkserver_channel.py``. Standard library only.

    host ──control socket──> server ──fork──> session          (has its own socket to the host)
                               └─────fork──> template ──fork──> session
                                             (has decoded a large context once)

    host:    config, then
             open{id,early} + [wire, spool, buffers]   template{id,files} + [control, context]
             map{id,places} + [file, …]                (to a template, before it is ready)
             install{id,module,source,code}            (for the sessions that are forked later)
             signal{pid,signal}  adopt{pid}  disown{pid}  retire
    server:  ready | failed{message}, then
             opened{id,pid} + [pidfd]  mapped{id}  installed{id}  failed{id,message}
             exited{pid,status}
"""

from __future__ import annotations

import array
import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import sys
import time
import types
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.sandbox.guest import (
        guest,
        interpreter_state,
        message_frames,
        notebook,
        output,
        value_encoding,
    )
    from ramify.sandbox.server.process_setup import (
        MAX_FILES,
        address_space_bytes,
        adopt_orphans,
        close_and_renumber_descriptors,
        limit_open_files,
        map_file,
        nonblocking_pipe,
        reset_sigchld,
        set_limits,
        tie_to_parent,
    )
else:
    # In this process, Ramify is not installed: see host/guest_module_files.py.
    from ramify_guest import (
        guest,
        interpreter_state,
        message_frames,
        notebook,
        output,
        value_encoding,
    )
    from ramify_server_process_setup import (
        MAX_FILES,
        address_space_bytes,
        adopt_orphans,
        close_and_renumber_descriptors,
        limit_open_files,
        map_file,
        nonblocking_pipe,
        reset_sigchld,
        set_limits,
        tie_to_parent,
    )

PRELOAD = (
    "bisect",
    "concurrent.futures.thread",
    "copy",
    "csv",
    "dataclasses",
    "datetime",
    "decimal",
    "difflib",
    "enum",
    "fractions",
    "functools",
    "hashlib",
    "heapq",
    "html",
    "inspect",
    "itertools",
    "operator",
    "pprint",
    "random",
    "statistics",
    "string",
    "subprocess",
    "tempfile",
    "textwrap",
    "threading",
    "time",
    "traceback",
    "typing",
    "uuid",
)
"""Modules that cells often import. Sessions inherit them from the fork server at no cost."""
_IDLE_MS = 20
"""Milliseconds without a request after which the modules of ``to_import`` are imported."""
_USUAL_FDS = [MAX_FILES, MAX_FILES + 1, MAX_FILES + 2]
"""Descriptor numbers that a session normally uses: its connection, its output file and its shared
buffers."""
_NO_MODULES: dict[str, tuple[str, types.CodeType]] = {}
_TEMPLATE = None
BRANCH = False
"""Marks a branch, which a session forked itself; the server prepared nothing for it."""


class ForkServerHostConnection:
    """The fork server's connection to the host, which carries messages and file descriptors.

    It trusts the host and may block.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self._reader = message_frames.MessageFrameReader(sock.fileno(), sock.recvmsg)

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """Wait for the next message and return it with its descriptors.

        Raises EOFError if the host is gone.
        """
        while (message := self.next()) is None:
            self._reader.fill()
        return message

    def next(self) -> tuple[dict[str, Any], list[int]] | None:
        """Return the next message and its file descriptors, or None if it is incomplete."""
        view = self._reader.next()
        if view is None:
            return None
        header: dict[str, Any] = json.loads(bytes(message_frames.split_frame(view)[0]))
        fds, count = self._reader.fds, header.get("fds", 0)
        self._reader.fds = fds[count:]
        return header, fds[:count]

    def send(self, header: dict[str, Any], fds: tuple[int, ...] = ()) -> None:
        if fds:
            header["fds"] = len(fds)
        data = b"".join(message_frames.frame(json.dumps(header).encode()))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        sent = self.sock.sendmsg([data], rights)
        if sent < len(data):
            self.sock.sendall(data[sent:])


class ForkServer:
    """A process that forks sessions when the host asks for them, and cleans up after them.

    It forks templates too. A template is a process that has decoded a large context. It is a fork
    server, too.
    """

    def __init__(self, control: ForkServerHostConnection, config: dict[str, Any]) -> None:
        self.control = control
        self.config = config
        self._context: Any = None
        self._has_context = False
        self.apart: Any = None
        """In a jail, the ``branches.GuestForkOperations``. Otherwise None, and the host sends a
        branch's descriptors with its fork request."""
        self._guest: guest.SandboxGuest | None = None
        """The prepared guest of the next session whose descriptors have the usual numbers."""
        self._modules: dict[str, tuple[str, types.CodeType]] = {}
        """Modules that every guest has from its start: name -> source and compiled code."""
        self.children: dict[int, Any] = {}
        """Process id -> result of ``prepare_session`` for its session; _TEMPLATE for a template."""
        self.to_import: list[str] = []
        """Modules to import when idle, or before a second session is forked.

        The first session does not wait for them, and imports what it uses. Template processes
        import the remaining ones.
        """
        self._num_opened = 0
        self._is_retiring = False
        self.is_ending = False
        self.pid = os.getpid()

    def serve(self) -> None:
        """Handle requests until the host has closed the connection.

        A template also stops once it has been retired and has no sessions left.
        """
        # Again, because a template inherits this object from the fork server.
        self.pid = os.getpid()
        if self.apart is not None:  # its parts then lie on pages that sessions share
            self._guest = self._make_guest(_USUAL_FDS)
            gc.freeze()
        awake, wakeup = (
            os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC) if hasattr(os, "pipe2") else nonblocking_pipe()
        )
        # Without a handler in Python, the signal would not write to the wakeup descriptor.
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(awake, select.POLLIN)
        poll.register(self.control.sock, select.POLLIN)
        idle_ms = _IDLE_MS
        while not (self._is_retiring and not self.children):
            events = poll.poll(idle_ms if self.to_import else None)
            idle_ms = _IDLE_MS if events else 0
            if not events:
                self._import_next()
            for fd, _ in events:
                if fd == awake:
                    os.read(awake, 4096)
                    self._reap()
                    continue
                try:
                    message: Any = self.control.receive()
                    while message is not None:
                        self.handle(*message)
                        message = self.control.next()
                except (EOFError, OSError):
                    self._end()
        os._exit(0)

    def _import_next(self) -> None:
        with contextlib.suppress(Exception):  # the session that uses it will see why
            importlib.import_module(self.to_import.pop(0))
        if not self.to_import:
            gc.collect()
            gc.freeze()

    def handle(self, header: dict[str, Any], fds: list[int]) -> None:
        op = header["op"]
        if op == "open":
            self._open(header, fds)
        elif op == "template":
            self._start_template(header, fds)
        elif op == "install":
            self._install(header)
        elif op == "signal":
            if header["pid"] in self.children:
                os.kill(header["pid"], header["signal"])
        elif op == "adopt":  # a session's branch, which may outlive it
            self.children[header["pid"]] = BRANCH
        elif op == "disown":  # it ended before its origin, which has reaped it
            if self.children.get(header["pid"]) is BRANCH:
                del self.children[header["pid"]]
        elif op == "retire":
            self._is_retiring = True

    # -- forking

    def _open(self, header: dict[str, Any], fds: list[int]) -> None:
        # The first session starts at once. Later ones share the modules that are imported here.
        while self.children and self.to_import:
            self._import_next()
        prepared = _TEMPLATE  # nothing is prepared yet
        try:
            prepared = self.prepare_session()
            pid = os.fork()
        except OSError as error:
            if prepared is not _TEMPLATE:
                self.release_prepared(prepared)
                self.remove_session_folder(prepared)
            self._refuse(header["id"], fds, f"no process for it: {error}")
            return
        if not pid:
            _in_child(lambda: self._run_session(prepared, header, fds))
        self.release_prepared(prepared)
        self.children[pid] = prepared
        self._report_opened(header["id"], pid, fds)

    def _install(self, header: dict[str, Any]) -> None:
        """Install a module in all sessions that will be forked from this server.

        The module's code runs here, so that the sessions share its memory pages.
        """
        name, source = header["module"], header["source"]
        before = self._modules
        try:
            marshalled = bytes.fromhex(header["code"])
            code = notebook.compile_or_load_module(source, f"<{name}>", marshalled)
            self._modules = {**before, name: (source, code)}
            _run_warmup_cells(16, self._modules)
            self._guest = self._make_guest(_USUAL_FDS)
        except BaseException as error:  # noqa: BLE001  (a session that installs it says why)
            self._modules = before
            self._refuse(header["id"], [], notebook.safe_error_message(error))
            return
        gc.freeze()
        self.control.send({"op": "installed", "id": header["id"]})

    # -- setting up a session; the jail overrides this

    def prepare_session(self) -> Any:
        """Create what the next session needs before it is forked.

        In this class, that is the session's folder.
        """
        self._num_opened += 1
        # With the process id, because templates use the folder of their server, too.
        folder = os.path.join(self.config["folder"], f"{os.getpid()}-{self._num_opened}")
        os.mkdir(folder, 0o700)
        return folder

    def set_up_session_process(
        self, prepared: Any, fds: list[int]
    ) -> tuple[list[int], tuple[int, int]]:
        """Set up a newly forked process to run a session: its folder, descriptors and limits.

        It moves to the prepared folder, closes all descriptors except the given ones (connection,
        output file, shared buffers), and sets the limits. Returns the new descriptor numbers and
        the memory limits.
        """
        os.setsid()
        tie_to_parent(self.pid)
        fds = close_and_renumber_descriptors(fds)
        os.chdir(prepared)
        os.environ.update(HOME=prepared, TMPDIR=prepared)
        limit_open_files()
        return fds, set_limits(self.config["memory_bytes"], address_space_bytes())

    def release_prepared(self, prepared: Any) -> None:
        """Release resources that this server no longer needs once the session has been forked.

        Does nothing here; subclasses override it.
        """

    def remove_session_folder(self, prepared: Any) -> None:
        """Delete the folder of a session that has ended."""
        delete_folder(prepared)

    def _start_template(self, header: dict[str, Any], fds: list[int]) -> None:
        try:
            pid = os.fork()
        except OSError as error:
            self._refuse(header["id"], fds, f"no process for its context: {error}")
            return
        if not pid:
            _in_child(lambda: self._become_template(fds[0], fds[1], header["files"]))
        self.children[pid] = _TEMPLATE
        self._report_opened(header["id"], pid, fds)

    def _report_opened(self, id: int, pid: int, fds: list[int]) -> None:
        pidfd = os.pidfd_open(pid) if hasattr(os, "pidfd_open") else -1
        self.control.send({"op": "opened", "id": id, "pid": pid}, (pidfd,) if pidfd >= 0 else ())
        for fd in [*fds, pidfd]:
            if fd >= 0:
                os.close(fd)

    def _refuse(self, id: int, fds: list[int], message: str) -> None:
        for fd in fds:
            os.close(fd)
        self.control.send({"op": "failed", "id": id, "message": message})

    def _become_template(self, control: int, context: int, num_files: int) -> None:
        """Turn this process into a template, from which sessions with a large context are forked.

        It decodes the context from a file descriptor; its sessions have it in memory. The host
        sends ``num_files`` more descriptors, of files that hold texts of the context.
        """
        reset_sigchld()
        tie_to_parent(self.pid)
        self.control.sock.close()
        self.control = ForkServerHostConnection(socket.socket(fileno=control))
        self.children = {}
        try:
            files = self._map_files(num_files)
            # Private and writable: a session that changes a table changes a separate copy.
            data = mmap.mmap(context, 0, access=mmap.ACCESS_COPY)
            self._context, _ = message_frames.unpack_value(data, files, self.config["packages"])
            with contextlib.suppress(BufferError):  # tables stay in the file
                data.close()
        except Exception as error:  # noqa: BLE001  (reported to the host, which raises it)
            self.control.send({"op": "failed", "message": f"its context did not decode: {error}"})
            os._exit(1)
        os.close(context)
        self._has_context = True
        gc.collect()
        gc.freeze()
        self.control.send({"op": "ready"})
        self.serve()

    def _map_files(self, count: int) -> dict[str, memoryview]:
        """Receive the files of a context from the host, and map them into memory.

        Returns the bytes of their texts, by the digest of the file.
        """
        mapped: dict[str, memoryview] = {}
        # There may be several messages, because one carries at most 253 descriptors.
        while len(mapped) < count:
            header, fds = self.control.receive()
            for (digest, start, num_bytes), fd in zip(header["places"], fds, strict=True):
                mapped[digest] = map_file(fd, num_bytes)[start:]
                os.close(fd)
            self.control.send({"op": "mapped", "id": header["id"]})
        return mapped

    def _run_session(self, prepared: Any, header: dict[str, Any], fds: list[int]) -> None:
        """Run a session in its forked process until it ends."""
        os.dup2(fds[1], 2)  # the host reads there why it could not be set up
        reset_sigchld()
        own_fds, memory = self.set_up_session_process(prepared, fds)
        session = self._guest if own_fds == _USUAL_FDS else None
        session = session or self._make_guest(own_fds)
        session.record_own_process(memory)
        if self._has_context:
            session.notebook.bind("context", self._context, True)
        gc.enable()
        session.serve(rehearse=header["early"])
        os._exit(0)

    def _make_guest(self, fds: list[int]) -> guest.SandboxGuest:
        wire, spool, *buffers = fds
        made = guest.SandboxGuest(
            wire,
            wire,
            output.FileOutputSpool(spool),
            max_output_bytes=self.config["max_output_bytes"],
            owns_process=True,
            can_fork=True,
            shared_buffers=message_frames.HostGuestSharedMemory(buffers[0], is_host=False)
            if buffers
            else None,
            apart=self.apart,
        )
        for name, (source, code) in self._modules.items():
            made.install_module(name, source, code)
        return made

    # -- endings

    def _reap(self) -> None:
        """Collect the exit status of each ended session, and report it to the host.

        A session's process group is killed first, while its id cannot have been reused.
        """
        while True:
            pid = _next_dead()
            if not pid:
                break
            is_child, prepared = pid in self.children, self.children.pop(pid, _TEMPLATE)
            # Templates are in the server's own process group. Adopted orphans are only reaped.
            if prepared is not _TEMPLATE:
                with contextlib.suppress(OSError):
                    os.killpg(pid, signal.SIGKILL)
            _, status = os.waitpid(pid, 0)
            self.kill_orphans()
            if prepared is not _TEMPLATE and prepared is not BRANCH:
                self.remove_session_folder(prepared)
            if is_child:
                with contextlib.suppress(OSError):
                    self.control.send(
                        {"op": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)}
                    )

    def kill_orphans(self) -> None:
        """Kill processes that have left the process group of their session.

        When a session ends, they become children of this process, because it is their subreaper.
        """
        with contextlib.suppress(OSError), open(f"/proc/self/task/{os.getpid()}/children") as file:
            for pid in map(int, file.read().split()):
                if pid not in self.children:
                    os.kill(pid, signal.SIGKILL)

    def _end(self) -> None:
        """End all sessions and templates and then this fork server, because the host has gone.

        This happens once the host is gone.
        """
        self.is_ending = True
        signal.set_wakeup_fd(-1)  # nothing waits for it any more: the loop below polls
        deadline = time.monotonic() + 2.0
        while time.monotonic() < deadline:
            for pid, prepared in self.children.items():
                # A template notices the host's end itself, and first ends its own sessions.
                if prepared is not _TEMPLATE:
                    with contextlib.suppress(OSError):
                        os.kill(pid, signal.SIGKILL)
            self._reap()
            self.kill_orphans()
            if not self.children and _next_dead() is None:
                break
            # Short, because the host waits for this when it closes a sandbox.
            time.sleep(0.002)
        for pid in self.children:  # only a hanging template is left
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        if not self._has_context:  # a template shares the folder of its server
            delete_folder(self.config["folder"])
        os._exit(0)


def delete_folder(path: str) -> None:
    """Delete a folder and its contents, ignoring errors.

    Does nothing for an empty path, since the sessions of a jail have no folders on the host.
    """
    if path:
        import shutil  # takes longer to import than the folders of a jail to exist

        shutil.rmtree(path, ignore_errors=True)


def _next_dead() -> int | None:
    """Return the process id of an ended child whose exit status has not been collected yet.

    Returns 0 if there is none, and None if there are no children. The id is not reused until the
    child is waited for.
    """
    try:
        dead = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return None
    return dead.si_pid if dead is not None else 0


def _in_child(life: Any) -> None:
    """Run a function in a newly forked child process, then exit the child.

    The child therefore never returns into the server's loop.
    """
    try:
        life()
    except BaseException:  # noqa: BLE001  (whatever happened, it must not continue as a server)
        sys.__excepthook__(*sys.exc_info())
    finally:
        # The host has words for this status: see host/transport.py.
        os._exit(70)


def _warm_up() -> None:
    """Run the code that every session will run, so that forked sessions start faster.

    This happens before any fork. Most of the cost of a fork is copying the pages that a session
    writes to, one page fault each. Code that has run before writes to fewer pages, because the
    interpreter has already specialized it and filled its caches.
    """
    interpreter_state.complete_builtins()
    try:
        raise ValueError
    except ValueError as error:
        notebook.format_error(error)
    value_encoding.roundtrip_copy([1, "a", (2.0, None)])
    _run_warmup_cells(16)


def _run_warmup_cells(
    cells: int, modules: Mapping[str, tuple[str, types.CodeType]] = _NO_MODULES
) -> None:
    """Run a few trivial cells in the fork server, so that sessions forked from it start faster.

    ``modules`` holds the source and code of the guest's modules.
    """
    if not hasattr(os, "memfd_create"):
        return
    host, guest_end = socket.socketpair()
    wire, spool = guest_end.detach(), os.memfd_create("rehearsal")
    with host:
        # The guest's replies are never read. Those of a few cells fit into the socket's buffer.
        for id in range(cells):
            host.sendall(
                b"".join(
                    message_frames.frame(
                        json.dumps({"op": "run", "id": id, "code": "x = 1\nx"}).encode()
                    )
                )
            )
        host.shutdown(socket.SHUT_WR)
        rehearsing = guest.SandboxGuest(
            wire,
            wire,
            output.FileOutputSpool(spool),
            max_output_bytes=1000,
            owns_process=False,
            can_fork=True,
        )
        for name, (source, code) in modules.items():
            rehearsing.install_module(name, source, code)
        rehearsing.serve()
    os.close(spool)


def main(control_fd: int) -> None:
    """Run the fork server until the host closes the connection."""
    # A collection would write to pages that are shared with sessions; these enable it again.
    gc.disable()
    # Inherited by sessions, so that an interrupt before their guest is ready does not end them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = ForkServerHostConnection(socket.socket(fileno=control_fd))
    config, _ = control.receive()
    try:
        preload(config["paths"], (*PRELOAD, *config["packages"]))
        prepare_first_fork()
        control.send({"op": "ready"})
        ForkServer(control, config).serve()
    except PackageNotImportable as error:
        control.send({"op": "failed", "message": str(error)})
    except OSError:
        pass  # the host went away during the start
    finally:
        # Only for a start that failed, because ``serve`` does not return.
        delete_folder(config["folder"])


class PackageNotImportable(Exception):
    """Raised if a package that sessions should be able to import cannot be imported."""


def preload(paths: list[str], names: Sequence[str]) -> None:
    """Import the modules that sessions will need, before any session is forked.

    The given folders are added to the search path before. Raises PackageNotImportable if one cannot
    be imported.
    """
    sys.path += [path for path in paths if path not in sys.path]
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001  (a package may raise anything when imported)
            raise PackageNotImportable(
                f"'{name}' cannot be imported: {type(error).__name__}: {error}"
            ) from None


def prepare_first_fork(proc: int | None = None) -> None:
    """Prepare this process to fork sessions, for example by running common code in advance.

    It adopts orphans and becomes the first victim of the OOM killer.
    """
    if sys.platform == "linux":
        adopt_orphans()
        with contextlib.suppress(OSError):
            # In a jail, /proc may have no path, only a descriptor.
            path = "/proc/self/oom_score_adj" if proc is None else "self/oom_score_adj"
            fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC, dir_fd=proc)
            os.write(fd, b"1000")  # sessions are killed before any other process
            os.close(fd)
    _warm_up()
    # Then collections in sessions do not write to the objects that exist now.
    gc.freeze()  # without a collection, which takes milliseconds and would find next to nothing
