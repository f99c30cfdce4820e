"""The sandbox provider ``daytona``, which runs each session in its own Daytona sandbox, connected
through the websocket of a terminal.

The sandbox has no network and is deleted when it stops. A terminal is used because it is the only
two-way stream of the SDK: for a session command, each input is a separate request, and the output
is a log to follow. The terminal is set to raw mode, and bytes are sent as base64. This provider
has not been tested against the real service, but against a double with the SDK's names and
signatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import uuid
from typing import Any

from ramify.extras.sandboxes import cloud_sandbox_sdk
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.providers.remote import Carries, CommandOutputQueue, RemoteSandbox

_BOX = ("name", "network_block_all", "ephemeral", "auto_stop_interval")
SDK = cloud_sandbox_sdk.SandboxSdkSpec(
    "daytona",
    "daytona",
    "daytona",
    ">=0.226,<1",
    (
        cloud_sandbox_sdk.SdkCallSignature("AsyncDaytona"),
        cloud_sandbox_sdk.SdkCallSignature("CreateSandboxFromImageParams", 0, ("image", *_BOX)),
        cloud_sandbox_sdk.SdkCallSignature(
            "CreateSandboxFromSnapshotParams", 0, ("language", *_BOX)
        ),
        cloud_sandbox_sdk.SdkCallSignature("AsyncDaytona.create", 2, ("timeout",), is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncDaytona.get", 2, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncDaytona.delete", 2, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("AsyncDaytona.close", 1, is_awaited=True),
    ),
)


class DaytonaSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """Configuration of the provider ``daytona``, which runs each session in its own Daytona
    sandbox.

    Example:
        DaytonaSpec(image="python:3.12-slim")
    """

    provider: str = "daytona"
    image: str = ""
    """Container image. It must contain Python 3.11 or later as python3, and ``packages``. Empty:
    the service's Python snapshot."""


class DaytonaService:
    """Creates Daytona sandboxes and starts one command in each.

    Implements ``remote.SandboxService``.
    """

    name = "daytona"
    carries: Carries = "terminal"

    def __init__(self, daytona: Any, spec: DaytonaSpec) -> None:
        self._daytona = daytona
        self._spec = spec
        self._client: Any = None

    async def start_in_new_box(self, command: list[str]) -> DaytonaStream:
        if self._client is None:
            self._client = self._daytona.AsyncDaytona()
        client = self._client
        box = await self._create()
        try:
            inbox = CommandOutputQueue()
            terminal = await box.process.create_pty_session(id="ramify", on_data=inbox.put)
            await terminal.wait_for_connection()
            await terminal.send_input(f"exec {shlex.join(command)}\n")
        except BaseException:
            await cloud_sandbox_sdk.delete_after_failure(
                self.name, f"sandbox {box.id}", lambda: client.delete(box)
            )
            raise
        return DaytonaStream(client, box, terminal, inbox)

    async def _create(self) -> Any:
        """Create a new Daytona sandbox, and wait until it has started.

        If the start fails, the sandbox is deleted.

        The SDK's ``create`` also waits for the start. If the start fails, the sandbox exists
        already and is deleted by its name.
        """
        client = self._client
        name = f"ramify-{uuid.uuid4().hex[:12]}"
        request = client.create(self._parameters(name), timeout=0)
        try:
            return await cloud_sandbox_sdk.create_sandbox(self.name, request, client.delete)
        except Exception:
            await cloud_sandbox_sdk.delete_after_failure(
                self.name, f"sandbox {name}", lambda: self._delete_named(name)
            )
            raise

    async def _delete_named(self, name: str) -> None:
        try:
            box = await self._client.get(name)
        except Exception:  # noqa: BLE001  (most failures leave no sandbox of this name)
            return
        await self._client.delete(box)

    def _parameters(self, name: str) -> Any:
        common = {
            "name": name,
            "network_block_all": True,
            "ephemeral": True,
            "auto_stop_interval": cloud_sandbox_sdk.LIFETIME_S // 60,
        }
        if self._spec.image:
            return self._daytona.CreateSandboxFromImageParams(image=self._spec.image, **common)
        return self._daytona.CreateSandboxFromSnapshotParams(language="python", **common)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class DaytonaStream:
    """The two-way byte stream over a Daytona sandbox's terminal.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, client: Any, box: Any, terminal: Any, inbox: CommandOutputQueue) -> None:
        self._client = client
        self._box = box
        self._terminal = terminal
        self.receive = inbox.get
        self._watch = asyncio.ensure_future(inbox.end_after(terminal.wait))

    async def send(self, data: bytes) -> None:
        await self._terminal.send_input(data)

    async def close(self) -> None:
        self._watch.cancel()
        try:
            with contextlib.suppress(Exception):  # the terminal ends with the box
                await self._terminal.disconnect()
        finally:
            await cloud_sandbox_sdk.delete_with_retries(lambda: self._client.delete(self._box))


def open_provider(spec: DaytonaSpec) -> RemoteSandbox:
    """Return a sandbox provider whose sessions run on Daytona.

    ``base.open_sandbox`` calls this function. Raises SandboxError if the SDK or the API key is
    missing.
    """
    daytona = SDK.load()
    cloud_sandbox_sdk.require_api_key("daytona", ("DAYTONA_API_KEY",), instead="DAYTONA_JWT_TOKEN")
    return RemoteSandbox(spec, DaytonaService(daytona, spec))
