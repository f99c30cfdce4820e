"""Engines as processes of this run: which command starts one, on which port, and what is said where
it does not come up.

Their output goes to a file, whose last lines are quoted where they fail; they end with the trainer
(``ramify/child.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import sys
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

from ramify.child import ChildProcess
from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import VERSIONS, InferenceSpec

PROGRAMS = {
    "ramify": (sys.executable, "-m", "ramify", "serve-policy"),
    "vllm": ("vllm", "serve"),
    "sglang": (sys.executable, "-m", "sglang.launch_server"),
}
"""Engine -> what starts one, where ``InferenceSpec.command`` is empty."""
INSIDE = Path(__file__).parent / "inside"
"""The folder of the one file that is loaded inside vLLM."""
_HOST = "127.0.0.1"
_END_S = 10.0
_POLL_S = 0.01
_GONE_S = 1.0


class EngineHandle(Protocol):
    """A process that serves."""

    url: str
    log: Path

    async def restart(self) -> None:
        """End what is left of it, and start it again; ``url`` may be another one then. Raises
        ConfigError where that cannot be."""
        ...

    @property
    def ended(self) -> int | None:
        """Its exit status; None while it runs."""
        ...

    def said(self) -> str:
        """The end of its log, on one line."""
        ...

    def close(self) -> None:
        """End it and what it started. Idempotent."""
        ...


class EngineProcess:
    """Implements ``EngineHandle``: one that was started here."""

    def __init__(
        self,
        spec: InferenceSpec,
        index: int,
        port: int,
        checkpoint: Path,
        dtype: str,
        window: int,
        log: Path,
    ) -> None:
        """Raises ConfigError where the command is not there."""
        self.url, self.log = f"http://{_HOST}:{port}", log
        self._spec, self._index = spec, index
        self._command = engine_command(spec, checkpoint, port, dtype, window)
        log.unlink(missing_ok=True)
        self.start()

    def start(self) -> None:
        """Start it, the first time or again once ``close`` has returned. Belongs into a thread that
        lasts: with the one it is called in the engine ends. Raises ConfigError as above."""
        environment = engine_environment(self._spec, self._index)
        try:
            self._child = ChildProcess(
                self._command, environment=environment, log=self.log, follow=signal.SIGTERM
            )
        except OSError as error:
            raise ConfigError(
                f"an engine cannot be started: {self._command[0]}: {error.strerror}; give "
                "inference.command, or install "
                f"{self._spec.engine}"
            ) from None

    async def restart(self) -> None:
        """As ``EngineHandle.restart``."""
        await asyncio.to_thread(self.close)  # it may still run, and not answer
        self.start()

    @property
    def ended(self) -> int | None:
        return self._child.poll()

    def said(self) -> str:
        return self._child.said()

    def close(self) -> None:
        self._child.end(_END_S)


async def status_of(engine: EngineHandle | None) -> int | None:
    """Its exit status; None while it runs, and where nothing is known of it. Another machine may
    take its time to say so."""
    return None if engine is None else await asyncio.to_thread(lambda: engine.ended)


async def ended_soon(engine: EngineHandle | None) -> int | None:
    """As ``status_of``, of one whose connections broke: the process is gone a moment later."""
    return None if engine is None else await asyncio.to_thread(_ended_within, engine, _GONE_S)


def _ended_within(engine: EngineHandle, wait_s: float) -> int | None:
    until = time.monotonic() + wait_s
    while (status := engine.ended) is None and time.monotonic() < until:
        time.sleep(_POLL_S)
    return status


def ports_for(spec: InferenceSpec) -> list[int]:
    """A port for each server that is to be started. Raises ConfigError for one that is in use."""
    with contextlib.ExitStack() as held:
        taken = []
        for wanted in spec.ports or (0,) * spec.num:
            holder = held.enter_context(socket.socket())
            holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                holder.bind((_HOST, wanted))
            except OSError as error:
                raise ConfigError(
                    f"inference.ports: an engine cannot listen on {_HOST}:{wanted} "
                    f"({error.strerror}): choose another "
                    "port, leave ports out for free ones, or give urls to use what runs there"
                ) from None
            taken.append(holder.getsockname()[1])
        return taken


def check_program(spec: InferenceSpec) -> None:
    """Raises ConfigError where this machine does not have what starts an engine."""
    if spec.urls:
        return
    program = (spec.command or PROGRAMS[spec.engine])[0]
    lacks = "" if shutil.which(program) else f"no program '{program}' is there, or on PATH"
    if spec.engine == "sglang" and not spec.command and find_spec("sglang") is None:
        lacks = f"the package sglang is not installed for {sys.executable}"
    if lacks:
        first, beyond = (".".join(map(str, each)) for each in VERSIONS.get(spec.engine, ((), ())))
        known = f"pip install '{spec.engine}>={first},<{beyond}', " if first else ""
        raise ConfigError(
            f"inference.engine={spec.engine} is to be started, and {lacks}: {known}name what "
            "starts it in inference.command, "
            "or give inference.urls of servers that run already"
        )


def engine_command(
    spec: InferenceSpec, checkpoint: Path, port: int, dtype: str, window: int, host: str = _HOST
) -> list[str]:
    """What starts an engine that listens on ``host``, this machine's loopback where nothing else is
    said."""
    begin = list(spec.command or PROGRAMS[spec.engine])
    folder, at = str(checkpoint), ["--host", host, "--port", str(port), "--dtype", dtype]
    if spec.engine == "ramify":
        own = [*at, "--weight-transfer"]
        if ":" in spec.carried_by:
            own += ["--weight-sync", spec.carried_by]
        return [*begin, folder, *own, *spec.args]
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
        own += ["--enable-sleep-mode"] if spec.level else []
        return [*begin, folder, *own, *spec.args]
    own = ["--enable-memory-saver"] if spec.level else []
    own += ["--enable-weights-cpu-backup"] if spec.level == 1 else []
    return [*begin, "--model-path", folder, *at, "--context-length", str(window), *own, *spec.args]


def engine_environment(spec: InferenceSpec, index: int) -> dict[str, str]:
    """What is added to the environment of a machine for the engine ``index`` on it."""
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
