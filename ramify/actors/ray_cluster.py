"""Join a Ray cluster, or start one on this machine that is shut down when this process leaves it.

    cluster = RayClusterConnection(address)   the address, RAY_ADDRESS, or a new one on loopback
    cluster.join() ── work ── cluster.leave()

Ray compares the versions of Ray and Python when a process joins. Ray is imported only when it is
needed. ``ray_launcher.py`` and ``ramify/maps/ray_map.py`` run work on the cluster.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from ramify import __version__
from ramify.errors import ConfigError
from ramify.pip_install_command import install_command

ADDRESS = "RAY_ADDRESS"
_REACH_S = 10.0
"""Time limit in seconds for opening a connection to the cluster, and for its head node to
answer."""
_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
"""First bytes of each gRPC connection: the HTTP/2 preface and an empty SETTINGS frame."""
_SETTINGS = 4
"""Type of the first frame that every HTTP/2 server sends."""


class RayClusterConnection:
    """This process's connection to a Ray cluster, which it joins or starts on this machine."""

    def __init__(
        self,
        address: str = "",
        start_s: float = 120.0,
        store_bytes: int = 80 << 20,
        *,
        is_quiet: bool = False,
    ) -> None:
        """Prepare to join the cluster at ``address``, or to start one if ``address`` is empty.

        ``start_s`` is the time limit in seconds for starting a cluster, and ``store_bytes`` the
        size of the object store of a cluster that is started here. If ``is_quiet`` is True, Ray
        writes nothing to stdout and stderr; failures are raised anyway."""
        self.address = address or os.environ.get(ADDRESS, "")
        """Address of an existing Ray cluster; empty if a new cluster is started on this machine."""
        self._ray = import_ray()
        self._start_s = start_s
        self._store_bytes = store_bytes
        self._folder = ""
        self._began = 0.0
        self._is_joined = False
        self._is_quiet = is_quiet
        self._undo = contextlib.ExitStack()
        """Reverts the changes that this class made to Ray's settings in this process."""

    def leave(self) -> None:
        """Disconnect this process from the Ray cluster.

        If it was started here, shut it down. Calling this again has no effect.
        """
        if self._is_joined:
            self._is_joined = False
            self._ray.shutdown()
        self._undo.close()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)

    def join_or_start(self, num_gpus: int = 0) -> None:
        """Join the cluster, or start one with the given number of this machine's GPUs.

        Raises ConfigError if that fails.
        """
        ray = self._ray
        if ray.is_initialized():
            raise ConfigError(
                "this process is already connected to a Ray cluster, which only one run can use "
                "at a time: wait for that run to end, or use another process"
            )
        self._check_reachable()
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        logging.getLogger("ray").setLevel(logging.ERROR)
        options: dict[str, Any] = {
            "log_to_driver": False,
            "configure_logging": False,
            "namespace": "ramify",
        }
        if self.address:
            options |= {"address": self.address}
        else:
            # Ray keeps sockets in this folder, and socket paths must be short: the system's folder
            # for temporary files may be too deep.
            root = tempfile.gettempdir() if len(tempfile.gettempdir()) < 20 else "/tmp"
            self._folder = tempfile.mkdtemp(prefix="ray", dir=root)
            # Without a token in the environment, Ray writes one to the home folder.
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
            self._undo.callback(patch_ray_loopback())
            options |= {
                "address": "local",
                "num_cpus": os.cpu_count(),
                "num_gpus": num_gpus,
                "include_dashboard": False,
                "_temp_dir": self._folder,
                "_node_ip_address": "127.0.0.1",
                "object_store_memory": self._store_bytes,
                "_system_config": {"prestart_worker_first_driver": False},
            }
        self._began = time.monotonic()
        until = self._began + self._start_s
        if self._is_quiet:
            self._undo.callback(_keep_quiet())
        with _own_handlers():
            while True:
                try:
                    with _without_stderr() if self._is_quiet else contextlib.nullcontext():
                        ray.init(**options)
                    self._is_joined = True
                    return
                except Exception as error:  # noqa: BLE001 (Ray raises this class itself)
                    # Ray gives up after 30 s, which a busy machine may need.
                    is_slow = "timed out during startup" in str(error)
                    if not is_slow or time.monotonic() > until:
                        raise ConfigError(self._why_not_joined(str(error))) from None

    def _check_reachable(self) -> None:
        """Raise ConfigError if no Ray head node listens at the cluster's address.

        Without this check, Ray would retry for minutes.
        """
        host, _, port = self.address.rpartition(":")
        if not host or "/" in host or not port.isdigit():
            return
        try:
            found = socket.create_connection((host.strip("[]"), int(port)), _REACH_S)
        except OSError as error:
            raise ConfigError(
                f"the Ray cluster at {self.address} cannot be reached: {error.strerror or error}; "
                f"start its head (ray start --head --port={port}), or correct {ADDRESS}"
            ) from None
        with found:
            if os.environ.get("RAY_USE_TLS", "0") == "0" and not _speaks_grpc(found):
                raise ConfigError(
                    f"the server at {self.address} is not the head of a Ray cluster: give the "
                    f"address that `ray start --head` prints, or correct {ADDRESS}"
                )

    def _why_not_joined(self, error: str) -> str:
        where = (
            f"the Ray cluster at {self.address}"
            if self.address
            else "a Ray cluster on this machine"
        )
        message = " ".join(error.split())[:300]
        if "ersion mismatch" in error:
            return (
                f"{where} runs other versions than this process ({message}): install the same "
                "versions of Ray and Python on all nodes; this process has ray "
                f"{self._ray.__version__} and Python {sys.version.split()[0]}"
            )
        if "timed out during startup" in error:
            tried_s = time.monotonic() - self._began
            message += (
                f"; it was tried for {tried_s:.0f} s: allow more time (placement.start_s), or free "
                "this machine of other work"
            )
        return f"{where} cannot be {'joined' if self.address else 'started'}: {message}"


def _speaks_grpc(connection: socket.socket) -> bool:
    """Return True if the server at the other end of ``connection`` speaks gRPC.

    Every gRPC server answers the start of an HTTP/2 connection with a SETTINGS frame.
    """
    try:
        connection.sendall(_PREFACE)
        frame = connection.recv(4)
    except OSError:
        return False
    return len(frame) == 4 and frame[3] == _SETTINGS


def patch_ray_loopback() -> Callable[[], None]:
    """Stop Ray from replacing a loopback address, and return a function that undoes the change.

    On Linux, Ray replaces a loopback address with one that other machines can reach. The setting
    that turns this off is meant for Windows and macOS, and is read when a process imports Ray.
    """
    from ray._private import ray_constants

    constant, variable = "ENABLE_RAY_CLUSTER", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
    before, given = getattr(ray_constants, constant, None), os.environ.get(variable)
    os.environ[variable] = "0"
    setattr(ray_constants, constant, False)

    def undo() -> None:
        setattr(ray_constants, constant, before)
        if given is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = given

    return undo


def _keep_quiet() -> Callable[[], None]:
    """Make Ray write nothing to stdout and stderr, and return a function that undoes the change.

    By default Ray prints the last log lines of each lost node, and warnings of its C++ code.
    """
    from ray._private import worker

    name, variable = "print_to_stdstream", "RAY_BACKEND_LOG_LEVEL"
    before, given = getattr(worker, name, None), os.environ.get(variable)
    setattr(worker, name, lambda *args, **options: None)
    os.environ.setdefault(variable, "fatal")

    def undo() -> None:
        setattr(worker, name, before)
        if given is None:
            os.environ.pop(variable, None)

    return undo


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Discard everything written to stderr in a ``with`` block, including output from C++ code."""
    sys.stderr.flush()
    kept, sink = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(sink, 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(sink)


def import_ray() -> Any:
    """Import the module ``ray`` and return it.

    Raises ConfigError if it is not installed.
    """
    try:
        import ray
        import ray.util
    except ImportError:
        raise ConfigError(f"--placement ray needs Ray: {install_command('ray')}") from None
    return ray


@contextlib.contextmanager
def _own_handlers() -> Any:
    """Restore this process's SIGTERM handler after a ``with`` block in which Ray replaces it.

    The handler that Ray installs would end the process immediately.
    """
    is_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if is_main:
            signal.signal(signal.SIGTERM, before)


def check_ramify_version(version: str) -> None:
    """Raise ConfigError if this process does not run the given version of Ramify."""
    if version != __version__:
        raise ConfigError(
            f"node {socket.gethostname()} runs ramify {__version__}, but this run was started "
            f"with {version}: install the same version on all nodes"
        )


def check_node_versions(version: str) -> None:
    """Raise ConfigError if any node of the cluster lacks the given version of Ramify."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    ray = import_ray()
    check = ray.remote(check_ramify_version)
    for node in ray.nodes():
        if not node["Alive"] or not node["Resources"].get("CPU"):
            continue
        at = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        try:
            # With num_cpus=0, the check also runs on a node whose slots are all taken.
            ray.get(check.options(num_cpus=0, scheduling_strategy=at).remote(version))
        except ray.exceptions.RayError as error:
            cause = getattr(error, "cause", None)
            if isinstance(cause, ConfigError):
                raise ConfigError(str(cause)) from None
            why = error_cause_line(error)
            raise ConfigError(
                f"the node {node['NodeManagerHostname']} cannot run ramify {version} ({why}): "
                "install the same versions of Ramify and Python on all nodes"
            ) from None


def error_cause_line(error: BaseException) -> str:
    """Return the last line of a Ray error message, which states the cause.

    It is shortened to 300 characters.
    """
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1][:300] if lines else type(error).__name__
