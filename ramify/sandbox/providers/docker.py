"""The sandbox provider ``docker``, which runs each session in a separate container on a local
engine.

Code in a container can only compute: the container has no network, no capabilities, no way to gain
privileges, a read-only root, and limits on memory, CPU and processes. The provider checks that the
engine enforces this, by comparing the container's description with the request. The module also
finds the engine, and converts its responses to values or one-line errors. The connection to the
code in the container is in ``remote.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
from collections.abc import AsyncIterator, Iterator
from typing import Any
from urllib.parse import quote

from ramify.errors import ConfigError, ModelError, SandboxError, Unreachable
from ramify.http_client.http_transport import (
    HttpConnectionPool,
    LiveHttpExchange,
    Method,
    route_to_socket,
)
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.providers.remote import Carries, RemoteSandbox

IMAGE = "python:3.12-slim"
NUM_CPUS = 1.0
MAX_PROCESSES = 256
SCRATCH_BYTES = 256 << 20
"""Maximum size in bytes of the in-memory files at /tmp, which count toward the memory of the
container."""
_OVERHEAD_BYTES = 128 << 20
"""Memory in bytes for Python and the guest, in addition to ``memory_bytes``."""
_NOBODY = "65534:65534"
_NUM_USUAL_CAPABILITIES = 11
"""Number of capabilities that a container has by default. An engine may report dropped capabilities
one by one instead of as ``ALL``."""
_WHERE = "sandbox 'docker'"
_FRAME = struct.Struct(">BxxxI")
_MAX_FRAME_BYTES = 64 << 20
_MAX_BODY_BYTES = 64 << 20
HOW_TO_GET_ONE = (
    "start Docker or Podman (podman system service), or set DOCKER_HOST=unix:///path/to/its.sock; "
    "to get one, see https://docs.docker.com/engine/install"
)


class DockerSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """The configuration of the sandbox provider ``docker``.

    Example:
        DockerSpec(image="python:3.12-slim")
    """

    provider: str = "docker"
    image: str = ""
    """Image that contains ``packages`` and Python 3.11 or later as ``python3``. If empty, a plain
    Python image is used."""


class DockerService:
    """A service that starts commands in new containers on a Docker-compatible engine.

    Implements ``remote.SandboxService``.
    """

    name = "docker"
    carries: Carries = "bytes"

    def __init__(self, engine: DockerApiClient, spec: DockerSpec) -> None:
        self._engine = engine
        self._spec = spec

    async def start_in_new_box(self, command: list[str]) -> DockerContainerStream:
        request = container_create_request(command, self._spec)
        id = await self._create(request)
        try:
            running = DockerContainerStream(self._engine, id, await self._engine.attach(id))
        except BaseException:
            await _remove(self._engine, id)
            raise
        try:
            await self._engine.ask("start a container", "POST", f"/containers/{id}/start")
            if not self._spec.allow_weaker:
                description = await self._engine.ask(
                    "describe a container", "GET", f"/containers/{id}/json"
                )
                _check_protections(request, description)
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
        """Do nothing, because this service holds no resources between sessions."""


class DockerContainerStream:
    """A running Docker container that exchanges messages with the host over standard input and
    output.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, engine: DockerApiClient, id: str, attached: ContainerStdio) -> None:
        self._engine = engine
        self._id = id
        self._attached = attached
        self.send = attached.send
        self.receive = attached.receive

    async def close(self) -> None:
        await self._attached.close()
        await _remove(self._engine, self._id)


async def _remove(engine: DockerApiClient, id: str) -> None:
    try:
        await engine.ask("remove a container", "DELETE", f"/containers/{id}?force=true&v=true")
    except DockerEngineError as error:
        if error.status not in (404, 409):  # already gone, or being removed
            raise


def container_create_request(command: list[str], spec: DockerSpec) -> dict[str, Any]:
    """Return the JSON body of the API request that creates a session's container."""
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
            "MemorySwap": memory,  # memory plus swap, so this means no swap
            "NanoCpus": int(NUM_CPUS * 1e9),
            "PidsLimit": MAX_PROCESSES,
            "IpcMode": "private",
            "AutoRemove": True,
            "Tmpfs": {"/tmp": f"rw,nosuid,nodev,mode=1777,size={SCRATCH_BYTES}"},
            "LogConfig": {"Type": "none"},
        },
    }


def _check_protections(request: dict[str, Any], description: dict[str, Any]) -> None:
    """Raise SandboxError if a new container lacks a protection that was requested."""
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
            "DockerSpec(allow_weaker=True)"
        )


class DockerEngineError(SandboxError):
    """Raised if the container engine responded with an error."""

    def __init__(self, what: str, status: int, message: str) -> None:
        super().__init__(f"the container engine could not {what}: {message} (status {status})")
        self.status = status


def find_socket() -> str:
    """Return the path of the container engine's Unix socket.

    Raises ConfigError if DOCKER_HOST names something else, and SandboxError if no engine is found.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith("unix://"):
        raise ConfigError(
            f"DOCKER_HOST is {host!r}, but only unix:// sockets are supported: set it to "
            "unix:///path/to/its.sock"
        )
    paths = [host.removeprefix("unix://")] if host else list(_usual_places())
    for path in paths:
        if os.path.exists(path):
            return path
    raise SandboxError(f"sandbox 'docker': no engine at {' or '.join(paths)}; {HOW_TO_GET_ONE}")


def _usual_places() -> Iterator[str]:
    yield "/var/run/docker.sock"
    yield os.path.expanduser("~/.docker/run/docker.sock")
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    if runtime:
        yield os.path.join(runtime, "docker.sock")
        yield os.path.join(runtime, "podman", "podman.sock")


class DockerApiClient:
    """A client for the HTTP API of a container engine over its Unix socket.

    Every request opens a new connection. Podman's compatible service works too.
    """

    def __init__(self, path: str) -> None:
        self._path = path

    async def ask(self, what: str, method: Method, path: str, body: Any = None) -> Any:
        """Send a request to the engine and return the decoded response.

        ``what`` names the operation in error messages. Raises DockerEngineError if the engine
        reports an error.
        """
        data = b"" if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} if data else {}
        async with self._exchange(what, method, path, headers, data) as exchange:
            answer = await exchange.read()
        if answer.status >= 400:
            raise DockerEngineError(what, answer.status, _message(answer.body))
        return _decode_response(answer.body)

    async def attach(self, container: str) -> ContainerStdio:
        """Connect to the standard input and output of a container.

        The container must have been created with its input open.
        """
        path = f"/containers/{quote(container)}/attach?stream=1&stdin=1&stdout=1&stderr=1"
        upgrade = {"Upgrade": "tcp", "Connection": "Upgrade"}
        what = "attach to a container"
        async with self._exchange(what, "POST", path, upgrade, upgrades=True) as exchange:
            if exchange.status not in (101, 200):
                answer = await exchange.read()
                raise DockerEngineError(what, answer.status, _message(answer.body))
            return ContainerStdio(*exchange.take_over())

    @contextlib.asynccontextmanager
    async def _exchange(
        self,
        what: str,
        method: Method,
        path: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        upgrades: bool = False,
    ) -> AsyncIterator[LiveHttpExchange]:
        pool = HttpConnectionPool(max_body_bytes=_MAX_BODY_BYTES)
        route = route_to_socket(self._path, path, headers, method)
        try:
            async with pool.prepare_exchange(_WHERE, route, body, upgrades=upgrades) as exchange:
                yield exchange
        except Unreachable as error:
            raise SandboxError(f"{error}; {HOW_TO_GET_ONE}") from None
        except ModelError as error:
            why = " ".join(str(error).removeprefix(f"{_WHERE}: ").split())[:200]
            raise SandboxError(
                f"the connection to the container engine at {self._path} broke ({what}): {why}"
            ) from None
        finally:
            await pool.close()


class ContainerStdio:
    """The standard input and output of a container without a terminal.

    The engine sends the output in frames, which are marked as standard output or standard error.
    """

    def __init__(self, transport: asyncio.Transport, begin: bytes) -> None:
        """Take over an HTTP connection that the engine now uses for the container's input and
        output.

        ``begin`` holds the bytes that have already arrived.
        """
        self._transport = transport
        loop = asyncio.get_running_loop()
        self._reader = asyncio.StreamReader(loop=loop)
        protocol = asyncio.StreamReaderProtocol(self._reader, loop=loop)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        self._reader.feed_data(begin)
        self._writer = asyncio.StreamWriter(transport, protocol, self._reader, loop)

    async def send(self, data: bytes) -> None:
        self._writer.write(data)
        await self._writer.drain()

    async def receive(self) -> bytes:
        """Return the next output of the container, from either stream, or b"" at the end."""
        try:
            while True:
                _, size = _FRAME.unpack(await self._reader.readexactly(_FRAME.size))
                if size > _MAX_FRAME_BYTES:
                    raise SandboxError(f"the container engine sent a frame of {size:,} bytes")
                if size:
                    return await self._reader.readexactly(size)
        except (asyncio.IncompleteReadError, ConnectionError):
            return b""

    async def close(self) -> None:
        self._transport.close()


def _decode_response(data: bytes) -> Any:
    """Decode the body of the engine's response, which is JSON in most cases.

    Several lines of JSON, such as the progress of an image pull, become a list. A response that is
    not JSON is returned as text.
    """
    try:
        return json.loads(data) if data else None
    except (ValueError, RecursionError):
        pass
    try:
        return [json.loads(line) for line in data.splitlines() if line.strip()]
    except (ValueError, RecursionError):
        return data.decode("utf-8", "replace")


def _message(data: bytes) -> str:
    response = _decode_response(data)
    message = response.get("message", response) if isinstance(response, dict) else response
    return " ".join(str(message).split())[:500]


def open_provider(spec: DockerSpec) -> RemoteSandbox:
    """Open a sandbox whose sessions run in containers.

    ``base.open_sandbox`` calls this.
    """
    return RemoteSandbox(spec, DockerService(DockerApiClient(find_socket()), spec))
