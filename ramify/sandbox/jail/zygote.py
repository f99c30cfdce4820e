"""The zygote, the isolated fork server of a jail.

Every session is forked from it, and so is every template, a process that holds a large context for
sessions.

This module decides when the isolation is built, what is reported to the host about it, and what is
prepared for a session. The fork server in general is ``server/forkserver.py``, and the isolation is
built by ``walls.py``. The zygote runs in a separate process with an empty environment, and uses the
standard library only.

    host:    config{tiers,…}  freeze{id,pid}  folders{id}  and the messages of ``forkserver.py``
    zygote:  walls{tier,missing,landlock} | failed{message}, then ready | failed{message}
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ramify.sandbox.guest import session_forking
    from ramify.sandbox.jail import confine, primitives, seccomp, walls
    from ramify.sandbox.server import forkserver, process_setup
else:
    # In the fork server, where Ramify is not installed: see host/guest_module_files.py.
    from ramify_guest import session_forking

    forkserver = sys.modules["ramify_server_forkserver"]
    process_setup = sys.modules["ramify_server_process_setup"]
    confine = sys.modules["ramify_jail_confine"]
    primitives = sys.modules["ramify_jail_primitives"]
    seccomp = sys.modules["ramify_jail_seccomp"]
    walls = sys.modules["ramify_jail_walls"]

MORE = (
    "abc",
    "argparse",
    "array",
    "ast",
    "asyncio",
    "base64",
    "binascii",
    "calendar",
    "cmath",
    "codecs",
    "colorsys",
    "concurrent.futures",
    "configparser",
    "contextlib",
    "contextvars",
    "ctypes",
    "email.message",
    "fileinput",
    "fnmatch",
    "getpass",
    "glob",
    "graphlib",
    "gzip",
    "html.parser",
    "http.client",
    "ipaddress",
    "json",
    "keyword",
    "locale",
    "logging",
    "math",
    "mimetypes",
    "numbers",
    "optparse",
    "pathlib",
    "pickle",
    "platform",
    "queue",
    "re",
    "reprlib",
    "sched",
    "secrets",
    "selectors",
    "shelve",
    "shlex",
    "shutil",
    "signal",
    "socket",
    "struct",
    "sysconfig",
    "tarfile",
    "timeit",
    "tokenize",
    "types",
    "unicodedata",
    "unittest",
    "urllib.parse",
    "urllib.request",
    "weakref",
    "zipfile",
    "xml.etree.ElementTree",
    "zlib",
    "zoneinfo",
    "encodings.idna",
    "encodings.latin_1",
    "encodings.ascii",
    "encodings.cp1252",
    "encodings.utf_16",
    "_strptime",
)
"""Modules that are imported in advance in addition to ``forkserver.PRELOAD``, if sessions cannot
read the standard library."""
_NOT_STORED = {"__pycache__", "idlelib", "site-packages", "dist-packages", "test", "tests"}


class InMemoryStdlibImporter:
    """An importer that finds standard library modules in memory.

    Sessions need it if they may make no system call that names a file, or if their user cannot read
    the library's folder.
    """

    def __init__(self, folders: list[str]) -> None:
        self._modules: dict[str, tuple[str, bytes]] = {}
        """Module name -> (path, source)."""
        for folder in folders:
            self._store_folder(folder, "")

    def _store_folder(self, folder: str, package: str) -> None:
        for entry in os.scandir(folder):
            name, _, end = entry.name.partition(".")
            if not name.isidentifier() or entry.name in _NOT_STORED:
                continue
            if entry.is_dir(follow_symlinks=False):
                self._store_folder(entry.path, f"{package}{name}.")
            elif end == "py":
                full = package.rstrip(".") if name == "__init__" else package + name
                with contextlib.suppress(OSError), open(entry.path, "rb") as file:
                    self._modules[full] = entry.path, file.read()

    def find_spec(self, name: str, *_: Any) -> ModuleSpec | None:
        if name not in self._modules:
            return None
        path = self._modules[name][0]
        spec = ModuleSpec(name, self, origin=path, is_package=path.endswith("__init__.py"))  # type: ignore[arg-type]
        # Then the module has __file__, as if it had been loaded from the file.
        spec.has_location = True
        return spec

    def create_module(self, _: ModuleSpec) -> None:
        """Return None, so that Python creates the module object in the default way."""

    def exec_module(self, module: ModuleType) -> None:
        path, source = self._modules[module.__name__]
        # Otherwise the __future__ import of this file would apply to the module.
        exec(compile(source, path, "exec", dont_inherit=True), vars(module))


def _store_library() -> None:
    """Load the standard library into memory for sessions that cannot read its files.

    Extension modules are imported now, and the source of the other modules is kept in memory.
    """
    import sysconfig

    places = map(os.path.realpath, map(sysconfig.get_path, ("stdlib", "platstdlib")))
    folders = [place for place in dict.fromkeys(places) if os.path.isdir(place)]
    for folder in folders:
        with contextlib.suppress(OSError):
            # These can be loaded only from their files, so not later in a session.
            for file in os.listdir(f"{folder}/lib-dynload"):
                name = file.partition(".")[0]
                # The module _tkinter would load Tcl and Tk.
                if name in sys.stdlib_module_names - {"_tkinter"}:
                    with contextlib.suppress(ImportError):
                        importlib.import_module(name)
    sys.meta_path.append(InMemoryStdlibImporter(folders))


class Zygote(forkserver.ForkServer):
    """The fork server of a jail, from which confined sessions are forked."""

    def __init__(self, control: Any, config: dict[str, Any], built: Any) -> None:
        super().__init__(control, config)
        self._walls = built
        # Without a pid namespace, a branch ends with this process only if it asks for it.
        settle = primitives.end_with_parent if built.outer else (lambda: None)
        self.apart = session_forking.GuestForkOperations(
            primitives.fork_sibling, primitives.adopt_host_connection, settle
        )

    def prepare_session(self) -> confine.JailFolderDescriptors:
        prepared: confine.JailFolderDescriptors = self._walls.confinement.prepare_session()
        return prepared

    def release_prepared(self, prepared: confine.JailFolderDescriptors) -> None:
        prepared.close_rules_descriptor()

    def set_up_session_process(
        self, prepared: confine.JailFolderDescriptors, fds: list[int]
    ) -> tuple[list[int], tuple[int, int]]:
        # The host knows the processes of a session by its session id.
        os.setsid()
        confinement, proc = self._walls.confinement, self._walls.proc
        # Now, because the confined process can no longer read /proc.
        mapped = process_setup.address_space_bytes(proc if proc >= 0 else None)
        confinement.set_up_session_process(prepared)
        # Not in the zygote, which may still import modules whose hooks sessions do not need.
        confine.restore_fork_hooks()
        fds = process_setup.close_and_renumber_descriptors(fds)
        process_setup.tie_to_parent(self.pid)
        memory = process_setup.set_limits(
            self.config["memory_bytes"], mapped, confinement.max_file_bytes
        )
        confinement.apply_resource_limits()
        confinement.finish(fds[0])
        # Last, because the kernel also counts descriptors in transit, such as the listener.
        process_setup.limit_open_files()
        return fds, memory

    def remove_session_folder(self, prepared: confine.JailFolderDescriptors) -> None:
        prepared.drop_scratch()

    def handle(self, header: dict[str, Any], fds: list[int]) -> None:
        if header["op"] == "freeze":
            self._freeze_session_folder(header["id"], header["pid"])
        elif header["op"] == "folders":
            self.control.send(
                {"op": "folders", "id": header["id"], "bytes": self._session_folder_sizes()}
            )
        elif header["op"] != "adopt" or self._walls.outer:  # else it has another number here
            super().handle(header, fds)

    def _freeze_session_folder(self, id: int, pid: int) -> None:
        """Make a session's private folder read-only, because the session is about to fork."""
        prepared = self.children.get(pid)
        try:
            if isinstance(prepared, confine.JailFolderDescriptors) and prepared.scratch >= 0:
                primitives.freeze_filesystem(prepared.scratch)
        except OSError as error:
            self.control.send({"op": "failed", "id": id, "message": str(error.strerror)})
            return
        self.control.send({"op": "frozen", "id": id})

    def _session_folder_sizes(self) -> list[tuple[int, int]]:
        """Return each session's process id and the size of its private folder in bytes.

        Sessions without a private folder are left out.
        """
        found = []
        for pid, prepared in self.children.items():
            if isinstance(prepared, confine.JailFolderDescriptors) and prepared.scratch >= 0:
                space = os.fstatvfs(prepared.scratch)
                found.append((pid, (space.f_blocks - space.f_bfree) * space.f_frsize))
        return found

    def kill_orphans(self) -> None:
        """Kill the processes that ended sessions have left behind, if the fork server is shutting
        down.

        Before that there are none, because a session can create no processes except branches, and
        the host ends these.
        """
        if self.is_ending and self._walls.outer:
            super().kill_orphans()


def main(control_fd: int) -> None:
    """Run the zygote until the host is gone."""
    # A collection would write to pages that are shared with sessions; these enable it again.
    gc.disable()
    # Inherited by sessions, so that an interrupt before their guest is ready does not end them.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    control = forkserver.ForkServerHostConnection(socket.socket(fileno=control_fd))
    _use_wait(control.sock)
    config, _ = control.receive()
    try:
        _run_zygote(control, config)
    except (forkserver.PackageNotImportable, walls.IsolationTierUnavailable) as error:
        missing = getattr(error, "missing", None)
        control.send(
            {"op": "failed", "message": str(error), **({"missing": missing} if missing else {})}
        )
    except OSError:
        pass  # the host went away during the start


def _use_wait(sock: socket.socket) -> None:
    """Use the wait for the configuration to import modules that sessions will need."""
    poll = select.poll()
    poll.register(sock, select.POLLIN)
    for name in forkserver.PRELOAD:
        if poll.poll(0):
            break
        importlib.import_module(name)


def _run_zygote(control: Any, config: dict[str, Any]) -> None:
    """Isolate this process and then serve as the fork server of a jail.

    With ``config["reports"]``, report the isolation as soon as it is built. With
    ``config["probes"]``, end after that.
    """
    # At tier A, the library and the packages exist only at their real paths.
    sys.path[:] = [os.path.realpath(path) for path in sys.path]
    config["paths"] = [os.path.realpath(path) for path in config["paths"]]
    if config["deny"]:
        _be_poorer(config["deny"])

    def preload(more: bool) -> None:
        if not config["probes"]:
            forkserver.preload(config["paths"], (*forkserver.PRELOAD, *(MORE if more else ())))
            if more:
                _store_library()
            # The hooks that the user's packages register must run after forks.
            confine.restore_fork_hooks()
            forkserver.preload([], config["packages"])

    built = walls.isolate_zygote(config, control.sock.close, preload)
    if config["reports"]:
        control.send(
            {
                "op": "walls",
                "tier": built.tier,
                "missing": built.missing,
                "landlock": built.landlock,
            }
        )
    if config["probes"]:
        return
    zygote = Zygote(control, config, built)
    # Sessions of tier A can read the library, so the zygote may import it later, when idle.
    # Packages are imported now, so that one that cannot be imported is reported at the start.
    if built.tier == "A" and not config["packages"]:
        zygote.to_import = [name for name in forkserver.PRELOAD if name not in sys.modules]
    elif built.tier == "A":
        preload(False)
    forkserver.prepare_first_fork(built.proc if built.proc >= 0 else None)
    control.send(
        {"op": "ready", "tier": built.tier, "missing": built.missing, "landlock": built.landlock}
    )
    zygote.serve()


def _be_poorer(deny: list[int]) -> None:
    """Deny this process the given system calls, to simulate a less capable machine.

    This simulates a kernel or a container that lacks them.
    """
    primitives.prctl(primitives.PR_SET_NO_NEW_PRIVS, 1)
    seccomp.SeccompFilter(seccomp.build_deny_filter(os.uname().machine, set(deny))).install(
        listener=False
    )
