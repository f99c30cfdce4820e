"""The host's end of a fork server: the files that it loads, its start, and its control socket.

Decides how a server process is started (an empty environment, one file descriptor), how replies,
which may carry descriptors, reach their requests, and which files of this machine it gets: those of
this package, also for a container or a cloud machine, and the packages that sessions may import.
Not here: which requests are made (see ``process.py``) and how they are executed (see
``forkserver.py``).

This package's files: ``process_setup.py`` becomes the module ``ramify_process_setup``,
``jail/walls.py`` becomes ``ramify_jail_walls``, and the folder ``guest/`` becomes the package
``ramify_guest``. The same few lines always load them as files, in the order in which they are
listed. On this machine they are loaded from their own folder, so Python finds them compiled.
Elsewhere they are loaded from a temporary folder, which is deleted before any code of a session
runs.

Packages: a folder into which packages were installed is shown to a jail as a whole. From any other
folder, such as a checkout, only the modules that can be imported under the requested names are
shown: never the ``.env``, ``.git`` or keys beside them.

    site-packages/numpy       requested ──> site-packages           its dependencies are there too
    checkout/src/mine/        requested ──> checkout/src/mine       without its hidden files
    checkout/mine.py          requested ──> checkout/mine.py
    checkout/mine/            no __init__.py (a namespace), or the root of a project:
                              only its modules and packages
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import importlib.machinery
import importlib.metadata
import importlib.util
import os
import site
import socket
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from ramify.errors import ConfigError, SandboxError
from ramify.sandbox.base import anonymous_file
from ramify.sandbox.guest.frames import frame, open_frame
from ramify.sandbox.transport import FrameAssembler

FOLDER = Path(__file__).resolve().parent
LOADER = """
import importlib.util, os, sys

def load(folder, names):
    for name in names:
        path = f"{folder}/{name}"
        path = f"{path}/__init__.py" if os.path.isdir(path) else f"{path}.py"
        spec = importlib.util.spec_from_file_location("ramify_" + name.replace("/", "_"), path)
        sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module
"""
"""Runs first in the other process; ``load`` returns the last module."""


def paths(modules: Sequence[str]) -> list[Path]:
    """Return the files of ``modules``; for a package, all its files."""
    files = []
    for name in modules:
        path = FOLDER / name
        files += sorted(path.glob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
    return files


@cache
def texts(modules: tuple[str, ...]) -> dict[str, str]:
    """Return the source of ``modules``, by path relative to the folder that ``load`` takes."""
    return {path.relative_to(FOLDER).as_posix(): path.read_text("utf-8") for path in paths(modules)}


_PROJECT = (".git", ".hg", "pyproject.toml", "setup.py", "setup.cfg")
"""A folder that contains one of these is the root of a project."""


def locate(packages: Sequence[str]) -> list[str]:
    """Return the folders that contain ``packages`` and their dependencies, each once. Raises
    ConfigError."""
    return list(
        dict.fromkeys(os.path.dirname(place) for name in packages for place in _places(name))
    )


def readable(packages: Sequence[str]) -> list[str]:
    """Return the files and folders of ``packages`` that sessions of a jail may read. Raises
    ConfigError."""
    paths: list[str] = []
    for place in (place for name in packages for place in _places(name)):
        if _is_installed(os.path.dirname(place)):
            paths.append(os.path.dirname(place))
        paths += _shown(os.path.realpath(place))
    return list(dict.fromkeys(paths))


def listed(packages: Sequence[str]) -> list[str]:
    """Return the folders of ``packages`` that a jail shows only in part: imports look up names
    there. Raises ConfigError."""
    places = [os.path.realpath(place) for name in packages for place in _places(name)]
    shown = {*readable(packages)}
    return [place for place in dict.fromkeys(places) if os.path.isdir(place) and place not in shown]


def _places(name: str) -> list[str]:
    """Return the folder or file of a package, or all folders of a namespace package; also the
    targets of symbolic links."""
    spec = _spec(name)
    folders = [
        place
        for place in spec.submodule_search_locations or ()
        if os.path.isabs(place) and os.path.isdir(place)
    ]
    if not folders and spec.origin and os.path.exists(spec.origin):
        folders = [os.path.abspath(spec.origin)]
    real = [
        real
        for place in folders
        if os.path.basename(real := os.path.realpath(place)) == os.path.basename(place)
    ]
    return list(dict.fromkeys([*folders, *real]))


def _spec(name: str) -> ModuleSpec:
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not (spec.origin or spec.submodule_search_locations):
        raise ConfigError(f"sandbox packages: this Python has no package '{name}'; {_remedy(top)}")
    return spec


def _is_installed(folder: str) -> bool:
    """Return True if packages were installed into ``folder`` and nothing else is there."""
    install_folders = [
        *site.getsitepackages(),
        site.getusersitepackages(),
        *map(sysconfig.get_path, ("purelib", "platlib", "stdlib")),
    ]
    real = os.path.realpath(folder)
    if real in map(os.path.realpath, install_folders) or os.path.basename(real) in (
        "site-packages",
        "dist-packages",
    ):
        return not _is_project(real)
    return False


def _is_project(folder: str) -> bool:
    return any(os.path.lexists(os.path.join(folder, name)) for name in _PROJECT)


def _shown(place: str) -> list[str]:
    """Return the files and folders of a package or module that sessions may read."""
    if _is_installed(os.path.dirname(place)):
        return [os.path.dirname(place)]
    if not os.path.isdir(place):
        return [place]
    return (
        _package(place)
        if _is_package(place) and not _is_project(place)
        else list(_importable(place))
    )


def _package(folder: str) -> list[str]:
    """Return everything in ``folder`` except hidden files: the folder itself, if it has none."""
    paths, shows_all = [], True
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.name.startswith("."):
            shows_all = False
        elif entry.is_symlink():
            continue  # its target was not requested
        elif entry.is_dir(follow_symlinks=False):
            below = _package(entry.path)
            shows_all = shows_all and below == [entry.path]
            paths += below
        else:
            paths.append(entry.path)
    return [folder] if shows_all else paths


def _importable(folder: str) -> Iterator[str]:
    """Yield the modules and packages in a folder that also contains other files."""
    for entry in sorted(os.scandir(folder), key=lambda entry: entry.name):
        if entry.is_symlink() or not entry.name.split(".")[0].isidentifier():
            continue
        if not entry.is_dir():
            if entry.name.endswith(tuple(importlib.machinery.all_suffixes())):
                yield entry.path
        elif os.path.exists(os.path.join(entry.path, "pyvenv.cfg")):
            continue
        elif _is_package(entry.path) and not _is_project(entry.path):
            yield from _package(entry.path)
        else:
            yield from _importable(entry.path)


def _is_package(folder: str) -> bool:
    return any(
        os.path.isfile(os.path.join(folder, f"__init__{end}"))
        for end in importlib.machinery.all_suffixes()
    )


def _remedy(name: str) -> str:
    """Suggest what to do: a distribution's name often differs from its import name."""
    normalized = name.lower().replace("_", "-")
    import_names = sorted(
        imported
        for imported, distributions in importlib.metadata.packages_distributions().items()
        if not imported.startswith("_")
        and normalized in (name.lower().replace("_", "-") for name in distributions)
    )
    if import_names:
        return f"it is imported as '{import_names[0]}'"
    return f"install it into the environment of {sys.executable}, or remove it from packages"


_BOOT = f"""{LOADER}
load(sys.argv[1], sys.argv[2:-1]).main(int(sys.argv[-1]))
"""
ENVIRONMENT = {
    "PYTHONHASHSEED": "0",
    "LANG": "C.UTF-8",
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1:glibc.malloc.arena_max=2",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
"""The whole environment of a session. Sets have the same order in every session. Large heaps fork
fast (huge pages). Threads do not each reserve address space. No library starts threads before the
fork."""
START_S = 60.0
MODULES = ("guest", "process_setup", "forkserver")


class StartedForkServer(NamedTuple):
    """A fork server that was started, with everything that its ``ForkServerChannel`` needs."""

    process: subprocess.Popen[bytes]
    control: socket.socket
    complaints: int
    folder: str


class ForkServerChannel:
    """Control channel to a fork server or a template."""

    def __init__(self, sock: socket.socket, complaints: int | None = None) -> None:
        sock.setblocking(False)
        self._complaints = complaints
        """File with the standard error output of the server, in case it does not start."""
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._assembler = FrameAssembler()
        self._fds: list[int] = []
        self._last_id = 0
        self._replies: dict[int, asyncio.Future[Any]] = {}
        self._exits: dict[int, Callable[[int], None]] = {}
        self._room = asyncio.Semaphore(32)
        self.ready: asyncio.Future[Any] = self._loop.create_future()
        self.gone: asyncio.Future[None] = self._loop.create_future()
        self._loop.add_reader(sock, self._readable)

    async def wait_ready(self) -> None:
        """Wait until the server is ready. Raises SandboxError with the reason if it is not."""
        await asyncio.wait(
            (self.ready, self.gone), timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not self.ready.done():
            why = (
                "ended before it was ready"
                if self.gone.done()
                else f"was not ready after {START_S:g} s"
            )
            words = self._last_words() or f": {sys.executable} said nothing"
            raise SandboxError(f"the fork server {why}{words}")
        self.ready.result()

    def _last_words(self) -> str:
        if self._complaints is None:
            return ""
        lines = (
            os.pread(self._complaints, 1 << 16, 0).decode("utf-8", "replace").strip().splitlines()
        )
        return f": {lines[-1]}" if lines else ""

    async def ask(
        self, header: dict[str, Any], fds: Sequence[int] = ()
    ) -> tuple[dict[str, Any], list[int]]:
        """Send a request and return the reply with its descriptors, which the caller must close.
        Raises SandboxError if the server refuses."""
        async with self._room:
            self._last_id += 1
            id = header["id"] = self._last_id
            reply = self._replies[id] = self._loop.create_future()
            try:
                self.send(header, fds)
                answer: tuple[dict[str, Any], list[int]] = await reply
                return answer
            finally:
                self._replies.pop(id, None)

    def send(self, header: dict[str, Any], fds: Sequence[int] = ()) -> None:
        """Send a message that has no reply. Messages are small and few, so the socket's buffer
        holds them."""
        if fds:
            header["fds"] = len(fds)
        data = b"".join(frame(msgspec.json.encode(header)))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            sent = self._sock.sendmsg([data], rights)
            if sent < len(data):
                self._send_rest(data[sent:])
        except OSError as error:
            raise SandboxError(f"the fork server is gone: {error}") from None

    def _send_rest(self, data: bytes) -> None:
        """Send the rest of a long request (a module's source). The server reads at once, so this
        blocks only briefly."""
        self._sock.setblocking(True)
        try:
            self._sock.settimeout(10.0)
            self._sock.sendall(data)
        finally:
            self._sock.setblocking(False)

    def on_exit(self, pid: int, call: Callable[[int], None]) -> None:
        """Run ``call`` once with the exit status of ``pid``, as ``subprocess`` gives it."""
        self._exits[pid] = call

    def _readable(self) -> None:
        try:
            data, ancillary, _, _ = self._sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, ancillary = b"", []
        for _, _, packed in ancillary:
            self._fds += array.array("i", packed[: len(packed) // 4 * 4])
        if not data:
            self._lose()
            return
        for view in self._assembler.feed(memoryview(data)):
            header = msgspec.json.decode(open_frame(view)[0])
            count = header.get("fds", 0)
            fds, self._fds = self._fds[:count], self._fds[count:]
            self._take(header, fds)

    def _take(self, header: dict[str, Any], fds: list[int]) -> None:
        if header["op"] == "exited":
            call = self._exits.pop(header["pid"], None)
            if call is not None:
                call(header["status"])
            return
        reply = self._replies.get(header["id"]) if "id" in header else self.ready
        if reply is None or reply.done():
            # The caller is gone; the process will see its socket closed.
            for fd in fds:
                os.close(fd)
        elif header["op"] == "failed":
            reply.set_exception(SandboxError(header["message"]))
            reply.exception()  # its caller may have been cancelled
        elif "id" in header:
            reply.set_result((header, fds))
        else:
            reply.set_result(None)

    def _lose(self) -> None:
        self._loop.remove_reader(self._sock)
        self._sock.close()
        if not self.gone.done():
            self.gone.set_result(None)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(SandboxError(f"the fork server ended{self._last_words()}"))
                reply.exception()  # its caller may have been cancelled
        for call in [*self._exits.values()]:
            call(-9)
        self._exits.clear()

    async def close(self) -> None:
        """Close the control socket; the server then ends everything that it forked, and itself."""
        if self._sock.fileno() < 0:  # the server has ended before
            self.abandon()
            return
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)
        await asyncio.wait((self.gone,), timeout=5.0)
        if not self.gone.done():
            self._lose()
        self.abandon()

    def abandon(self) -> None:
        """Release the resources of pending requests."""
        if self._complaints is not None:
            os.close(self._complaints)
            self._complaints = None
        futures: list[asyncio.Future[Any]] = [self.ready, *self._replies.values()]
        for future in futures:
            if future.done() and not future.cancelled():
                future.exception()  # mark it as retrieved


def start_server(
    config: dict[str, Any],
    modules: Sequence[str] = MODULES,
) -> StartedForkServer:
    """Start a fork server in a separate process, which inherits one descriptor of the host. Needs
    no event loop.

    ``modules``: the modules that it loads; the ``main`` of the last one runs it.
    """
    host_end, server_end = socket.socketpair()
    complaints = anonymous_file("ramify-errors")
    with server_end:
        command = [
            sys.executable,
            "-s",
            "-S",
            "-P",
            "-c",
            _BOOT,
            str(FOLDER),
            *modules,
            str(server_end.fileno()),
        ]
        process = subprocess.Popen(
            command,
            env=ENVIRONMENT,
            pass_fds=[server_end.fileno()],
            cwd="/",
            start_new_session=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=complaints,
        )
    host_end.sendall(b"".join(frame(msgspec.json.encode(config))))
    return StartedForkServer(process, host_end, complaints, config["folder"])
