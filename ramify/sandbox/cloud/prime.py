"""The provider ``prime``: every session in a Prime sandbox of its own.

Decides how its bytes travel: a virtual machine has live processes with input and output; a container has files only,
and gets the mailbox. The service has no switch that takes the network away from both kinds, so none is claimed. Not run
against the real service: its double in the tests has the SDK's names and signatures.
"""

from __future__ import annotations

import shlex
import uuid
from typing import Any

from ramify.sandbox.base import Caps, SandboxSpec
from ramify.sandbox.cloud import sdk
from ramify.sandbox.cloud.mailbox import Mailbox, postman
from ramify.sandbox.remote import Carries, RemoteSandbox, Stream

IMAGE = "python:3.12-slim"
WARNING = (
    "sandbox 'prime': code runs on a machine of the service, away from your files, but it can use the network. "
    "Do not give it secrets."
)
_FOLDER = "/tmp/ramify-mail"


class PrimeService:
    """Implements ``remote.Service``."""

    name = "prime"
    carries: Carries = "text"

    def __init__(self, prime: Any) -> None:
        self._prime = prime
        self._client: Any = None

    async def start(self, command: list[str], spec: SandboxSpec) -> Stream:
        if self._client is None:
            self._client = self._prime.AsyncSandboxClient()
        client = self._client
        gigabytes = -(-(spec.memory_bytes + sdk.OVERHEAD_BYTES) // (1 << 30))
        made = await client.create(
            self._prime.CreateSandboxRequest(
                name=f"ramify-{uuid.uuid4().hex[:12]}",
                docker_image=spec.image or IMAGE,
                cpu_cores=sdk.NUM_CPUS,
                memory_gb=float(gigabytes),
                timeout_minutes=sdk.LIFETIME_S // 60,
                labels=["ramify"],
            )
        )
        try:
            await client.wait_for_creation(made.id)
            if await client.is_vm(made.id):
                return PrimeProcess(client, made.id, await client.open_process(made.id, shlex.join(command)))
            files = PrimeFiles(client, made.id)
            await files.put(f"{_FOLDER}/postman.py", postman())
            await client.start_background_job(
                made.id, shlex.join(["python3", f"{_FOLDER}/postman.py", _FOLDER, *command])
            )
            return Mailbox(files, _FOLDER)
        except BaseException:
            await client.delete(made.id)
            raise

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()


class PrimeProcess:
    """Implements ``remote.Stream`` with a live process."""

    def __init__(self, client: Any, id: str, process: Any) -> None:
        self._client = client
        self._id = id
        self._process = process
        self._stdout = aiter(process.stdout)

    async def send(self, data: bytes) -> None:
        await self._process.write_stdin(data)

    async def receive(self) -> bytes:
        async for data in self._stdout:
            if data:
                return bytes(data)
        return b""

    async def close(self) -> None:
        try:
            await self._process.kill()
            await self._process.aclose()
        finally:
            await self._client.delete(self._id)


class PrimeFiles:
    """Implements ``mailbox.Files``."""

    def __init__(self, client: Any, id: str) -> None:
        self._client = client
        self._id = id

    async def put(self, path: str, data: bytes) -> None:
        await self._client.upload_bytes(self._id, path, data, path.rpartition("/")[2])

    async def get(self, path: str, offset: int, length: int) -> bytes:
        reply = await self._client.read_file(self._id, path, offset=offset, length=length)
        return str(reply.content).encode()

    async def close(self) -> None:
        await self._client.delete(self._id)


def open_provider(spec: SandboxSpec) -> RemoteSandbox:
    """What ``base.open_sandbox`` calls."""
    prime = sdk.load("prime", "prime_sandboxes")
    sdk.need_key("prime", ("PRIME_API_KEY",), "~/.prime/config.json")
    caps = Caps(
        isolates_files=True,
        isolates_processes=True,
        limits_memory=True,
        interrupt=True,
        kill=True,
        starts_processes=True,
    )
    return RemoteSandbox(spec, PrimeService(prime), caps, WARNING)
