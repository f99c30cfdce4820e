"""Inference engines started as processes by a run: their commands, ports and environment.

The output of an engine goes to a log file, whose last lines are quoted if the engine fails. Engines
end together with the trainer (see ``actors/``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path

from ramify.actors.launcher import Launcher, RoleInstanceId
from ramify.actors.tcp_peer_user import listener_user_id
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import EXPERTS_OPTION, VERSIONS, InferenceSpec
from ramify.inference.weight_sync import WEIGHT_SYNCS

PROGRAMS = {
    "ramify": (sys.executable, "-m", "ramify", "serve-policy"),
    "vllm": ("vllm", "serve"),
    "sglang": (sys.executable, "-m", "sglang.launch_server"),
}
"""Engine -> command that starts it if ``InferenceSpec.command`` is empty."""
INSIDE = Path(__file__).parent / "inside"
"""Folder of the only Ramify module that runs inside vLLM."""
_HOST = "127.0.0.1"
_END_S = 10.0
_POLL_S = 0.01
_GONE_S = 1.0


class EngineProcess:
    """An inference engine that runs as a process on its assigned machine and devices.

    If the assignment has changed, a restart moves it, possibly to another address.
    """

    def __init__(
        self,
        launcher: Launcher,
        spec: InferenceSpec,
        index: int,
        checkpoint: Path,
        dtype: str,
        window: int,
        log: Path,
    ) -> None:
        """Start the inference engine as a process on its assigned machine.

        Raises ConfigError if it cannot be started.
        """
        self._launcher = launcher
        self._member = RoleInstanceId("inference", index)
        self.log = log
        self._spec = spec
        self._model = (checkpoint.resolve(), dtype, window)
        self._fixed = spec.ports[index] if spec.ports else 0
        self._host = ""
        log.unlink(missing_ok=True)
        self._start()

    async def restart(self) -> None:
        """Stop the engine's process if it still runs, and start it again.

        Its ``url`` may change. Raises ConfigError if it cannot be started.
        """
        await asyncio.to_thread(self._restart)

    def _restart(self) -> None:
        self.close()
        self._launcher.ensure_slot(self._member)
        self._start()

    def _start(self) -> None:
        host = self._launcher.address_of(self._member)
        if host != self._host:
            self._host = host
            self._port = self._fixed or self._launcher.free_port(self._member)
            self.url = f"http://{host}:{self._port}"
        checkpoint, dtype, window = self._model
        command = engine_command(self._spec, checkpoint, self._port, dtype, window, host)
        environment = engine_environment(self._spec, self._member.number)
        self._process = self._launcher.start(self._member, command, environment, self.log.resolve())

    def check_port_user(self) -> None:
        """Raise ConfigError if the engine's address is in use by a process of another user.

        That process would receive the API key. Only addresses of this machine can be checked.
        """
        user = listener_user_id(self._host, self._port) if self._host == _HOST else None
        if user not in (None, os.getuid()):
            raise ConfigError(
                f"the engine's address {self._host}:{self._port} was taken by user {user} of this "
                "machine: nothing was sent there; start again, or set inference.ports"
            )

    @property
    def exit_status(self) -> int | None:
        """The exit status of the engine's process.

        None while it runs.
        """
        return self._process.poll()

    def exit_reason(self) -> str:
        """Describe in words how the engine's process ended.

        The text includes the last lines of its log.
        """
        return f"{self._process.where} {self._process.exit_reason()}"

    def close(self) -> None:
        """Stop the engine's process and all of its child processes.

        A second call has no effect.
        """
        self._process.end(_END_S)


async def engine_exit_status(engine: EngineProcess | None) -> int | None:
    """Return an engine's exit status, or None if it still runs or was not started by this process.

    The call may be slow for an engine on another machine.
    """
    return None if engine is None else await asyncio.to_thread(lambda: engine.exit_status)


async def wait_briefly_for_exit(engine: EngineProcess | None) -> int | None:
    """Wait briefly for a lost engine's process to exit, and return its exit status.

    Returns None if it still runs or was not started by this process.
    """
    return None if engine is None else await asyncio.to_thread(_ended_within, engine, _GONE_S)


def _ended_within(engine: EngineProcess, wait_s: float) -> int | None:
    until = time.monotonic() + wait_s
    while (status := engine.exit_status) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return status


def check_ports_free(spec: InferenceSpec) -> None:
    """Raise ConfigError if a port that an engine should use on this machine is taken."""
    # All sockets stay bound until every port is checked, so that a port given twice is found.
    with contextlib.ExitStack() as stack:
        for port in spec.ports:
            holder = stack.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((_HOST, port))
            except OSError as error:
                raise ConfigError(
                    f"inference.ports: an engine cannot listen on {_HOST}:{port} "
                    f"({error.strerror}): choose another port, omit ports to use free ones, or "
                    "set urls to use the server that runs there"
                ) from None


def check_program_installed(spec: InferenceSpec) -> None:
    """Raise ConfigError if this machine lacks the program that starts the engine."""
    if spec.urls:
        return
    program = (spec.command or PROGRAMS[spec.engine])[0]
    problem = "" if shutil.which(program) else f"no program '{program}', also not on PATH"
    if spec.engine == "sglang" and not spec.command and find_spec("sglang") is None:
        problem = f"the package sglang is not installed for {sys.executable}"
    if problem:
        first, next_unsupported = (
            ".".join(map(str, each)) for each in VERSIONS.get(spec.engine, ((), ()))
        )
        install = f"pip install '{spec.engine}>={first},<{next_unsupported}', " if first else ""
        raise ConfigError(
            f"inference.engine={spec.engine} cannot be started: {problem}: {install}set "
            "inference.command to the command that starts it, or inference.urls to servers that "
            "already run"
        )


def engine_command(
    spec: InferenceSpec, checkpoint: Path, port: int, dtype: str, window: int, host: str = _HOST
) -> list[str]:
    """Return the command that starts an engine.

    It listens on ``host``, by default the loopback interface.
    """
    begin = list(spec.command or PROGRAMS[spec.engine])
    last = [*([EXPERTS_OPTION] if spec.report_experts else []), *spec.args]
    folder, at = str(checkpoint), ["--host", host, "--port", str(port), "--dtype", dtype]
    if spec.engine == "ramify":
        own = [*at, "--weight-transfer"]
        if spec.weight_sync_name not in WEIGHT_SYNCS.ours:
            own += ["--weight-sync", spec.weight_sync_name]
        return [*begin, folder, *own, *last]
    if spec.engine == "vllm":
        own = [
            *at,
            "--max-model-len",
            str(window),
            "--logprobs-mode",
            "processed_logprobs",
            "--worker-extension-cls",
            "ramify_in_vllm.RamifyWorkerExtension",
            "--weight-transfer-config",
            '{"backend": "ramify"}',
        ]
        own += ["--enable-sleep-mode"] if spec.effective_sleep_level else []
        return [*begin, folder, *own, *last]
    if spec.engine != "sglang":
        return [*begin, folder, *at, *last]
    own = ["--enable-memory-saver"] if spec.effective_sleep_level else []
    own += ["--enable-weights-cpu-backup"] if spec.effective_sleep_level == 1 else []
    return [*begin, "--model-path", folder, *at, "--context-length", str(window), *own, *last]


def engine_environment(spec: InferenceSpec, index: int) -> dict[str, str]:
    """Return extra environment variables for engine number ``index`` of a run, such as its GPUs."""
    added = {}
    if spec.gpus:
        added["CUDA_VISIBLE_DEVICES"] = spec.gpus[index]
    if spec.engine == "vllm":
        inherited = [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
        added |= {
            "VLLM_SERVER_DEV_MODE": "1",
            "PYTHONPATH": os.pathsep.join([str(INSIDE), *inherited]),
        }
    key = os.environ.get(spec.key_variable)
    if key:
        added |= {"RAMIFY_SERVE_KEY": key, "VLLM_API_KEY": key}
    return added
