"""The sandbox provider ``modal``, which runs each session in its own Modal sandbox, connected
through the standard input and output of a command started with ``exec``.

The sandbox has no network, limits on memory and CPU, and a limited lifetime. This provider has not
been tested against the real service, but against a double with the SDK's names and signatures.
"""

from __future__ import annotations

import os
from typing import Any

from ramify.extras.sandboxes import cloud_sandbox_sdk
from ramify.sandbox.base import SandboxSpec
from ramify.sandbox.providers.remote import Carries, RemoteSandbox

APP = "ramify"
_BOX = ("app", "image", "block_network", "timeout", "cpu", "memory")
SDK = cloud_sandbox_sdk.SandboxSdkSpec(
    "modal",
    "modal",
    "modal",
    ">=1.6,<2",
    (
        cloud_sandbox_sdk.SdkCallSignature(
            "App.lookup.aio", 1, ("create_if_missing",), is_awaited=True
        ),
        cloud_sandbox_sdk.SdkCallSignature("Image.from_registry", 1),
        cloud_sandbox_sdk.SdkCallSignature("Image.debian_slim", 0, ("python_version",)),
        cloud_sandbox_sdk.SdkCallSignature("Sandbox.create.aio", 0, _BOX, is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("Sandbox.exec.aio", 2, ("text",), is_awaited=True),
        cloud_sandbox_sdk.SdkCallSignature("Sandbox.terminate.aio", 1, is_awaited=True),
    ),
)


class ModalSpec(SandboxSpec, frozen=True, forbid_unknown_fields=True):
    """Configuration of the provider ``modal``, which runs each session in its own Modal sandbox.

    Example:
        ModalSpec(image="python:3.12-slim")
    """

    provider: str = "modal"
    image: str = ""
    """Container image. It must contain Python 3.11 or later as python3, and ``packages``. Empty: a
    plain Python image."""


class ModalService:
    """Creates Modal sandboxes and starts one command in each.

    Implements ``remote.SandboxService``.
    """

    name = "modal"
    carries: Carries = "bytes"

    def __init__(self, modal: Any, spec: ModalSpec) -> None:
        self._modal = modal
        self._spec = spec

    async def start_in_new_box(self, command: list[str]) -> ModalByteStream:
        modal = self._modal
        app = await modal.App.lookup.aio(APP, create_if_missing=True)
        image = (
            modal.Image.from_registry(self._spec.image)
            if self._spec.image
            else modal.Image.debian_slim(python_version="3.12")
        )
        request = modal.Sandbox.create.aio(
            app=app,
            image=image,
            block_network=True,
            timeout=cloud_sandbox_sdk.LIFETIME_S,
            cpu=cloud_sandbox_sdk.NUM_CPUS,
            memory=(self._spec.memory_bytes + cloud_sandbox_sdk.OVERHEAD_BYTES) >> 20,
        )
        box = await cloud_sandbox_sdk.create_sandbox(
            self.name, request, lambda created: created.terminate.aio()
        )
        try:
            return ModalByteStream(box, await box.exec.aio(*command, text=False))
        except BaseException:
            await cloud_sandbox_sdk.delete_after_failure(
                self.name, f"sandbox {box.object_id}", box.terminate.aio
            )
            raise

    async def close(self) -> None:
        """Do nothing, because the service holds no resources between sessions."""


class ModalByteStream:
    """The two-way byte stream over a command's standard input and output in a Modal sandbox.

    Implements ``remote.CommandByteStream``.
    """

    def __init__(self, box: Any, process: Any) -> None:
        self._box = box
        self._stdin = process.stdin
        self._stdout = aiter(process.stdout)

    async def send(self, data: bytes) -> None:
        self._stdin.write(data)
        await self._stdin.drain.aio()

    async def receive(self) -> bytes:
        return await cloud_sandbox_sdk.next_bytes(self._stdout)

    async def close(self) -> None:
        await cloud_sandbox_sdk.delete_with_retries(self._box.terminate.aio)


def open_provider(spec: ModalSpec) -> RemoteSandbox:
    """Return a sandbox provider whose sessions run on Modal.

    ``base.open_sandbox`` calls this function. Raises SandboxError if the SDK or the API key is
    missing.
    """
    modal = SDK.load()
    file = os.environ.get("MODAL_CONFIG_PATH", "~/.modal.toml")
    cloud_sandbox_sdk.require_api_key("modal", ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET"), file)
    return RemoteSandbox(spec, ModalService(modal, spec))
