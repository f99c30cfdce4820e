"""The sandbox provider ``prime``, which runs each session in its own Prime sandbox.

The way in which bytes are sent depends on the sandbox. A virtual machine has live processes with
input and output. A container has only files, so the stream is relayed through files. SDKs since 0.4
create only virtual machines and have no ``is_vm``. No network rule is set, so the provider does not
claim to isolate the network: a request cannot deny all destinations, and a rule that is set later
leaves existing connections open. This provider has not been tested against the real service, but
against a double with the SDK's signatures.
"""

from __future__ import annotations

import contextlib
import shlex
import uuid
from dataclasses import replace
from typing import Any

import msgspec

from ramify.extras.sandboxes import cloud_sandbox_sdk
from ramify.extras.sandboxes.stream_over_files import (
    ByteStreamOverFiles,
    PrimeSandboxFiles,
    relay_program_source,
)
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.providers.remote import (
    SEPARATE_MACHINE,
    Carries,
    CommandByteStream,
    RemoteSandbox,
)

IMAGE = "python:3.12-slim"
WARNING = (
    "sandbox 'prime': code runs on a machine of the service, without access to your files, but it "
    "can use the network. Do not give it secrets."
)
_FOLDER = "/tmp/ramify-mail"
_REQUEST = ("name", "docker_image", "cpu_cores", "memory_gb", "timeout_minutes", "labels")
SDK = cloud_sandbox_sdk.SandboxSdkSpec(
    "prime",
    "prime_sandboxes",
    "prime-sandboxes",
    ">=0.2.38,<0.6",
    (
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient"),
        cloud_sandbox_sdk.SdkCallSignature("CreateSandboxRequest", 0, _REQUEST),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.create", 2, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature(
            "AsyncSandboxClient.wait_for_creation", 2, is_awaited=True
        ),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.open_process", 3, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.delete", 2, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.aclose", 1, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxProcess.write_stdin", 2, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxProcess.kill", 1, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxProcess.aclose", 1, is_awaited=True),
    ),
)
CONTAINER_CALLS = (
    cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.is_vm", 2, is_awaited=True),
    cloud_sandbox_sdk.SdkCallSignature(
        "AsyncSandboxClient.start_background_job", 3, is_awaited=True
    ),
    cloud_sandbox_sdk.SdkCallSignature("AsyncSandboxClient.upload_bytes", 5, is_awaited=True),
    cloud_sandbox_sdk.SdkCallSignature(
        "AsyncSandboxClient.read_file", 3, ("offset", "length"), is_awaited=True
    ),
)
"""SDK calls that are needed only if the SDK supports containers."""


class PrimeSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """Configuration of the provider ``prime``, which runs each session in its own Prime sandbox.

    Example:
        PrimeSpec(image="python:3.12-slim")
    """

    provider: str = "prime"
    image: str = ""
    """Container image. It must contain Python 3.11 or later as python3, and ``packages``. Empty: a
    plain Python image."""


class PrimeSandboxService:
    """Creates Prime sandboxes and starts one command in each.

    Implements ``remote.SandboxService``.
    """

    name = "prime"
    carries: Carries = "text"

    def __init__(self, prime: Any, spec: PrimeSpec) -> None:
        self._prime = prime
        self._spec = spec
        self._client: Any = None

    async def start_in_new_box(self, command: list[str]) -> CommandByteStream:
        if self._client is None:
            self._client = self._prime.AsyncSandboxClient()
        client = self._client
        created = await cloud_sandbox_sdk.create_sandbox(
            self.name, client.create(self._request()), lambda box: client.delete(box.id)
        )
        try:
            await client.wait_for_creation(created.id)
            return await self._stream(created.id, command)
        except BaseException:
            await cloud_sandbox_sdk.delete_after_failure(
                self.name, f"sandbox {created.id}", lambda: client.delete(created.id)
            )
            raise

    def _request(self) -> Any:
        gigabytes = -(-(self._spec.memory_bytes + cloud_sandbox_sdk.OVERHEAD_BYTES) // (1 << 30))
        return self._prime.CreateSandboxRequest(
            name=f"ramify-{uuid.uuid4().hex[:12]}",
            docker_image=self._spec.image or IMAGE,
            cpu_cores=cloud_sandbox_sdk.NUM_CPUS,
            memory_gb=float(gigabytes),
            timeout_minutes=cloud_sandbox_sdk.LIFETIME_S // 60,
            labels=["ramify"],
        )

    async def _stream(self, id: str, command: list[str]) -> CommandByteStream:
        client = self._client
        if not hasattr(client, "is_vm") or await client.is_vm(id):
            return PrimeProcess(client, id, await client.open_process(id, shlex.join(command)))
        files = PrimeSandboxFiles(client, id)
        await files.put(f"{_FOLDER}/postman.py", relay_program_source())
        await client.start_background_job(
            id, shlex.join(["python3", f"{_FOLDER}/postman.py", _FOLDER, *command])
        )
        return ByteStreamOverFiles(files, _FOLDER)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class PrimeProcess:
    """The two-way byte stream over a running process in a virtual machine.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, client: Any, id: str, process: Any) -> None:
        self._client = client
        self._id = id
        self._process = process
        self._stdout = aiter(process.stdout)

    async def send(self, data: bytes) -> None:
        await self._process.write_stdin(data)

    async def receive(self) -> bytes:
        return await cloud_sandbox_sdk.next_bytes(self._stdout)

    async def close(self) -> None:
        try:
            with contextlib.suppress(Exception):  # the process ends with the box
                await self._process.kill()
                await self._process.aclose()
        finally:
            await cloud_sandbox_sdk.delete_with_retries(lambda: self._client.delete(self._id))


def open_provider(spec: PrimeSpec) -> RemoteSandbox:
    """Return a sandbox provider whose sessions run on Prime.

    ``base.open_sandbox`` calls this function. Raises SandboxError if the SDK or the API key is
    missing.
    """
    prime = SDK.load()
    if hasattr(prime.AsyncSandboxClient, "is_vm"):
        replace(SDK, calls=CONTAINER_CALLS).load()
    cloud_sandbox_sdk.require_api_key("prime", ("PRIME_API_KEY",), "~/.prime/config.json")
    caps = msgspec.structs.replace(SEPARATE_MACHINE, isolates_network=False)
    return RemoteSandbox(spec, PrimeSandboxService(prime, spec), caps, WARNING)
