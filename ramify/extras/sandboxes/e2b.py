"""The sandbox provider ``e2b``, which runs each session in its own E2B sandbox, connected through
the standard input and output of a background command.

The sandbox has no internet access and a limited lifetime. The SDK returns output as text, so bytes
are sent as base64. This provider has not been tested against the real service, but against a
double with the SDK's names and signatures.
"""

from __future__ import annotations

import asyncio
import shlex
from typing import Any

from ramify.extras.sandboxes import cloud_sandbox_sdk
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.providers.remote import Carries, CommandOutputQueue, RemoteSandbox

SDK = cloud_sandbox_sdk.SandboxSdkSpec(
    "e2b",
    "e2b",
    "e2b",
    ">=2.63,<3",
    (
        cloud_sandbox_sdk.SdkCallSignature(
            "AsyncSandbox.create",
            0,
            ("template", "timeout", "allow_internet_access"),
            is_awaited=True,
        ),
        cloud_sandbox_sdk.SdkCallSignature("AsyncSandbox.kill", 1),
        cloud_sandbox_sdk.SdkCallSignature("AsyncCommandHandle.wait", 1, is_awaited=True),
    ),
)


class E2BSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """Configuration of the provider ``e2b``, which runs each session in its own E2B sandbox.

    Example:
        E2BSpec(image="my-template")
    """

    provider: str = "e2b"
    image: str = ""
    """Name of a template. It must contain Python 3.11 or later as python3, and ``packages``. Empty:
    the service's plain Python."""


class E2BService:
    """Creates E2B sandboxes and starts one command in each.

    Implements ``remote.SandboxService``.
    """

    name = "e2b"
    carries: Carries = "text"

    def __init__(self, e2b: Any, spec: E2BSpec) -> None:
        self._e2b = e2b
        self._spec = spec

    async def start_in_new_box(self, command: list[str]) -> E2BStream:
        request = self._e2b.AsyncSandbox.create(
            template=self._spec.image or None,
            timeout=cloud_sandbox_sdk.LIFETIME_S,
            allow_internet_access=False,
        )
        box = await cloud_sandbox_sdk.create_sandbox(
            self.name, request, lambda created: created.kill()
        )
        try:
            inbox = CommandOutputQueue()
            handle = await box.commands.run(
                shlex.join(command),
                background=True,
                stdin=True,
                timeout=0,
                on_stdout=inbox.put,
                on_stderr=inbox.put,
                retain_output=False,
            )
        except BaseException:
            await cloud_sandbox_sdk.delete_after_failure(
                self.name, f"sandbox {box.sandbox_id}", box.kill
            )
            raise
        return E2BStream(box, handle, inbox)

    async def close(self) -> None:
        """Do nothing, because the service holds no resources between sessions."""


class E2BStream:
    """The two-way byte stream over a background command's standard input and output in an E2B
    sandbox.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, box: Any, handle: Any, inbox: CommandOutputQueue) -> None:
        self._box = box
        self._handle = handle
        self.receive = inbox.get
        self._watch = asyncio.ensure_future(inbox.end_after(handle.wait))

    async def send(self, data: bytes) -> None:
        await self._box.commands.send_stdin(self._handle.pid, data.decode("ascii"))

    async def close(self) -> None:
        self._watch.cancel()
        await cloud_sandbox_sdk.delete_with_retries(self._box.kill)


def open_provider(spec: E2BSpec) -> RemoteSandbox:
    """Return a sandbox provider whose sessions run on E2B.

    ``base.open_sandbox`` calls this function. Raises SandboxError if the SDK or the API key is
    missing.
    """
    e2b = SDK.load()
    cloud_sandbox_sdk.require_api_key("e2b", ("E2B_API_KEY",))
    return RemoteSandbox(spec, E2BService(e2b, spec))
