"""The provider ``daytona``: every session in a Daytona sandbox of its own, over a terminal session's websocket.

Decides which sandbox is asked for (no network, gone when it stops) and why a terminal: it is the one two-way stream of
the SDK, while a session command's input is a request each and its output a log that is followed. The terminal is made
raw, and bytes travel in base64. Not run against the real service: its double in the tests has the SDK's names and
signatures.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from typing import Any

from ramify.sandbox.base import Caps, SandboxSpec
from ramify.sandbox.cloud import sdk
from ramify.sandbox.remote import Carries, Inbox, RemoteSandbox


class DaytonaService:
    """Implements ``remote.Service``."""

    name = "daytona"
    carries: Carries = "terminal"

    def __init__(self, daytona: Any) -> None:
        self._daytona = daytona
        self._client: Any = None

    async def start(self, command: list[str], spec: SandboxSpec) -> DaytonaStream:
        if self._client is None:
            self._client = self._daytona.AsyncDaytona()
        client = self._client
        box = await client.create(self._wanted(spec), timeout=0)
        try:
            inbox = Inbox()
            terminal = await box.process.create_pty_session(id="ramify", on_data=inbox.put)
            await terminal.wait_for_connection()
            await terminal.send_input(f"exec {shlex.join(command)}\n")
        except BaseException:
            await client.delete(box)
            raise
        return DaytonaStream(client, box, terminal, inbox)

    def _wanted(self, spec: SandboxSpec) -> Any:
        common = {"network_block_all": True, "ephemeral": True, "auto_stop_interval": sdk.LIFETIME_S // 60}
        if spec.image:
            return self._daytona.CreateSandboxFromImageParams(image=spec.image, **common)
        return self._daytona.CreateSandboxFromSnapshotParams(language="python", **common)

    async def close(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            await client.close()


class DaytonaStream:
    """Implements ``remote.Stream``."""

    def __init__(self, client: Any, box: Any, terminal: Any, inbox: Inbox) -> None:
        self._client = client
        self._box = box
        self._terminal = terminal
        self.receive = inbox.get
        self._watch = asyncio.ensure_future(self._until_end(inbox))

    async def _until_end(self, inbox: Inbox) -> None:
        try:
            with contextlib.suppress(Exception):  # how it ended: the guest has said it, if it could
                await self._terminal.wait()
        finally:
            inbox.end()

    async def send(self, data: bytes) -> None:
        await self._terminal.send_input(data)

    async def close(self) -> None:
        self._watch.cancel()
        try:
            with contextlib.suppress(Exception):  # the terminal goes with the box
                await self._terminal.disconnect()
        finally:
            await self._client.delete(self._box)


def open_provider(spec: SandboxSpec) -> RemoteSandbox:
    """What ``base.open_sandbox`` calls."""
    daytona = sdk.load("daytona", "daytona")
    sdk.need_key("daytona", ("DAYTONA_API_KEY",), instead="DAYTONA_JWT_TOKEN")
    caps = Caps(
        isolates_files=True,
        isolates_network=True,
        isolates_processes=True,
        limits_memory=True,
        interrupt=True,
        kill=True,
        starts_processes=True,
    )
    return RemoteSandbox(spec, DaytonaService(daytona), caps, None)
