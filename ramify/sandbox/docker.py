"""The provider ``docker``: every session runs in a separate container, on a local engine.

Decides what a container may do: nothing but compute in memory. It has no network, no capabilities,
no way to gain privileges, a read-only root, and limits on memory, CPU and processes. The provider
also checks that the engine enforces this, by comparing the container's description with the
request. Not here: the engine's HTTP API (see ``docker_engine.py``) and the connection to the guest
(see ``remote.py``).
"""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxCapabilities, SandboxSpec
from ramify.sandbox.docker_engine import (
    ContainerStdio,
    DockerEngine,
    DockerEngineError,
    find_socket,
)
from ramify.sandbox.remote import Carries, RemoteSandbox

IMAGE = "python:3.12-slim"
NUM_CPUS = 1.0
MAX_PROCESSES = 256
SCRATCH_BYTES = 256 << 20
"""Maximum size of files in memory at /tmp, which count toward the container's memory."""
_OVERHEAD_BYTES = 128 << 20
"""Memory for Python and the guest, in addition to ``memory_bytes``."""
_NOBODY = "65534:65534"
_NUM_USUAL_CAPABILITIES = 11
"""Number of capabilities of a container if none is dropped; an engine may list them instead of
ALL."""


class DockerService:
    """Starts containers on an engine. Implements ``remote.SandboxService``."""

    name = "docker"
    carries: Carries = "bytes"

    def __init__(self, engine: DockerEngine, allow_weaker: bool) -> None:
        self._engine = engine
        self._allow_weaker = allow_weaker

    async def start(self, command: list[str], spec: SandboxSpec) -> DockerContainer:
        request = container(command, spec)
        id = await self._create(request)
        try:
            running = DockerContainer(self._engine, id, await self._engine.attach(id))
        except BaseException:
            await _remove(self._engine, id)
            raise
        try:
            await self._engine.ask("start a container", "POST", f"/containers/{id}/start")
            if not self._allow_weaker:
                description = await self._engine.ask(
                    "describe a container", "GET", f"/containers/{id}/json"
                )
                _compare(request, description)
        except BaseException:
            await running.close()
            raise
        return running

    async def _create(self, request: dict[str, Any]) -> str:
        try:
            created = await self._engine.ask(
                "create a container", "POST", "/containers/create", request
            )
        except DockerEngineError as error:
            if error.status != 404:
                raise
            await self._pull(request["Image"])
            created = await self._engine.ask(
                "create a container", "POST", "/containers/create", request
            )
        return str(created["Id"])

    async def _pull(self, image: str) -> None:
        has_tag = ":" in image.rpartition("/")[2]
        query = quote(image if has_tag or "@" in image else f"{image}:latest", safe="")
        steps = await self._engine.ask(
            f"pull the image '{image}'", "POST", f"/images/create?fromImage={query}"
        )
        for step in steps if isinstance(steps, list) else [steps]:
            if isinstance(step, dict) and "error" in step:
                raise SandboxError(
                    f"sandbox 'docker': the image '{image}' could not be pulled: {step['error']}"
                )

    async def close(self) -> None:
        """Do nothing: no resources are held between sessions."""


class DockerContainer:
    """A running container and its standard input and output. Implements ``remote.ByteStream``."""

    def __init__(self, engine: DockerEngine, id: str, attached: ContainerStdio) -> None:
        self._engine = engine
        self._id = id
        self._attached = attached
        self.send = attached.send
        self.receive = attached.receive

    async def close(self) -> None:
        await self._attached.close()
        await _remove(self._engine, self._id)


async def _remove(engine: DockerEngine, id: str) -> None:
    try:
        await engine.ask("remove a container", "DELETE", f"/containers/{id}?force=true&v=true")
    except DockerEngineError as error:
        if error.status not in (404, 409):  # already gone, or being removed
            raise


def container(command: list[str], spec: SandboxSpec) -> dict[str, Any]:
    """Return the request to create a container."""
    memory = spec.memory_bytes + _OVERHEAD_BYTES
    return {
        "Image": spec.image or IMAGE,
        "Entrypoint": command[:1],
        "Cmd": command[1:],
        "User": _NOBODY,
        "WorkingDir": "/tmp",
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "OpenStdin": True,
        "StdinOnce": True,
        "Tty": False,
        "NetworkDisabled": True,
        "Labels": {"ramify": "session"},
        "HostConfig": {
            "NetworkMode": "none",
            "ReadonlyRootfs": True,
            "CapDrop": ["ALL"],
            "Privileged": False,
            "SecurityOpt": ["no-new-privileges"],
            "Memory": memory,
            "MemorySwap": memory,
            "NanoCpus": int(NUM_CPUS * 1e9),
            "PidsLimit": MAX_PROCESSES,
            "IpcMode": "private",
            "AutoRemove": True,
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,mode=1777,size={SCRATCH_BYTES}"},
            "LogConfig": {"Type": "none"},
        },
    }


def _compare(request: dict[str, Any], description: dict[str, Any]) -> None:
    """Raise SandboxError if the engine did not apply a requested protection."""
    requested, actual = request["HostConfig"], description.get("HostConfig") or {}
    missing = [
        name
        for name in ("NetworkMode", "ReadonlyRootfs", "Privileged", "Memory", "PidsLimit")
        if actual.get(name) != requested[name]
    ]
    dropped = actual.get("CapDrop") or ()
    if "ALL" not in dropped and len(dropped) < _NUM_USUAL_CAPABILITIES:
        missing.append("CapDrop")
    if not any(
        option.startswith("no-new-privileges") for option in actual.get("SecurityOpt") or ()
    ):
        missing.append("SecurityOpt")
    if (description.get("Config") or {}).get("User") != request["User"]:
        missing.append("User")
    if missing:
        raise SandboxError(
            f"sandbox 'docker': this engine did not apply {', '.join(missing)} to the container, "
            "according to its own description; use another engine, or accept this with "
            "SandboxSpec(allow_weaker=True)"
        )


def open_provider(spec: SandboxSpec) -> RemoteSandbox:
    """Entry point for ``base.open_sandbox``."""
    caps = SandboxCapabilities(
        isolates_files=True,
        isolates_network=True,
        isolates_processes=True,
        limits_memory=True,
        interrupt=True,
        kill=True,
        starts_processes=True,
    )
    return RemoteSandbox(
        spec, DockerService(DockerEngine(find_socket()), spec.allow_weaker), caps, None
    )
