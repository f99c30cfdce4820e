"""Cloud boxes are deleted however work on them ends, and none is created with an incompatible
SDK."""

from __future__ import annotations

import asyncio
import sys
import types
from importlib import metadata
from typing import Any

import cloud_doubles as doubles
import pytest

from ramify.errors import SandboxError
from ramify.extras.sandboxes.daytona import DaytonaService, DaytonaSpec
from ramify.extras.sandboxes.e2b import E2BService, E2BSpec
from ramify.extras.sandboxes.modal import ModalService, ModalSpec
from ramify.extras.sandboxes.prime import PrimeSandboxService, PrimeSpec, open_provider
from ramify.pip_install_command import install_command
from ramify.sandbox.base import SandboxCapabilities
from ramify.sandbox.providers.remote import RemoteSandbox

LIMITS = {"memory_bytes": 256 << 20}
SPEC = PrimeSpec(**LIMITS)


class DeadProcess(doubles.PrimeProcess):
    """A process that has ended and does not report its end."""

    def __init__(self) -> None:
        self.stdout = self.nothing()

    async def nothing(self) -> Any:
        return
        yield

    async def kill(self) -> None:
        raise RuntimeError("the gateway is gone")


class Cloud(doubles.PrimeClient):
    """Records existing boxes; one chosen step fails or blocks."""

    def __init__(self, fails: str = "", waits: str = "", lost_deletes: int = 0) -> None:
        super().__init__()
        self.boxes: set[str] = set()
        self.is_waiting = asyncio.Event()
        self.may_proceed = asyncio.Event()
        self._fails, self._waits, self._lost_deletes = fails, waits, lost_deletes

    async def _step(self, name: str) -> None:
        if name == self._waits:
            self.is_waiting.set()
            await self.may_proceed.wait()
        if name == self._fails:
            raise ConnectionError(f"{name} failed\nwith details")

    async def create(self, request: Any) -> Any:
        await self._step("request")
        box = await super().create(request)
        self.boxes.add(box.id)
        await self._step("create")
        return box

    async def wait_for_creation(self, sandbox_id: str, *args: Any, **more: Any) -> None:
        await self._step("wait_for_creation")

    async def open_process(self, sandbox_id: str, command: str, *args: Any, **more: Any) -> Any:
        await self._step("open_process")
        return DeadProcess()

    async def delete(self, sandbox_id: str) -> dict[str, Any]:
        await self._step("delete")
        self._lost_deletes -= 1
        if self._lost_deletes >= 0:
            raise ConnectionError("no route to the service")
        self.boxes.discard(sandbox_id)
        return {}


def prime(cloud: Cloud) -> RemoteSandbox:
    sdk = types.SimpleNamespace(
        AsyncSandboxClient=lambda: cloud, CreateSandboxRequest=doubles.prime_request
    )
    return RemoteSandbox(SPEC, PrimeSandboxService(sdk, SPEC), SandboxCapabilities(), None)


async def error_of_open(cloud: Cloud) -> str:
    """Return the error that opening a session raises."""
    try:
        await prime(cloud).open(seed="s")
    except SandboxError as error:
        return str(error)
    raise AssertionError("a session was opened")


@pytest.mark.parametrize("step", ["wait_for_creation", "open_process"])
def test_failed_start_step_leaves_no_box(step: str) -> None:
    async def run() -> tuple[str, set[str]]:
        cloud = Cloud(fails=step)
        return await error_of_open(cloud), cloud.boxes

    assert asyncio.run(run()) == (
        f"sandbox 'prime' could not start a session: ConnectionError: {step} failed",
        set(),
    )


def test_box_is_deleted_when_guest_fails_to_start_and_kill_fails() -> None:
    async def run() -> tuple[str, set[str]]:
        cloud = Cloud()
        return await error_of_open(cloud), cloud.boxes

    said, left = asyncio.run(run())
    assert said.startswith("sandbox 'prime': its image did not start Python, it said nothing")
    assert left == set()


@pytest.mark.parametrize("step", ["request", "create", "wait_for_creation", "open_process"])
def test_a_cancelled_start_leaves_no_box(step: str) -> None:
    async def run() -> set[str]:
        cloud = Cloud(waits=step)
        task = asyncio.ensure_future(prime(cloud).open(seed="s"))
        await cloud.is_waiting.wait()
        task.cancel()
        await asyncio.sleep(0)
        cloud.may_proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return cloud.boxes

    assert asyncio.run(run()) == set()


def test_cancelling_again_does_not_stop_the_deletion() -> None:
    async def run() -> set[str]:
        cloud = Cloud(fails="open_process", waits="delete")
        task = asyncio.ensure_future(prime(cloud).open(seed="s"))
        await cloud.is_waiting.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        cloud.may_proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return cloud.boxes

    assert asyncio.run(run()) == set()


def test_closing_sandbox_during_open_leaves_no_box() -> None:
    class Greeting(DeadProcess):
        async def nothing(self) -> Any:
            yield b"ramify-guest-1\n"

        async def write_stdin(self, data: bytes) -> None:
            pass

    class Greeted(Cloud):
        async def open_process(self, sandbox_id: str, command: str, *args: Any, **more: Any) -> Any:
            await self._step("open_process")
            return Greeting()

    async def run() -> set[str]:
        cloud = Greeted(waits="open_process")
        sandbox = prime(cloud)
        task = asyncio.ensure_future(sandbox.open(seed="s"))
        await cloud.is_waiting.wait()
        await sandbox.close()
        cloud.may_proceed.set()
        with pytest.raises(SandboxError, match="closed while a session was being opened"):
            await task
        return cloud.boxes

    assert asyncio.run(run()) == set()


def test_failed_deletion_is_retried() -> None:
    async def run() -> set[str]:
        cloud = Cloud(fails="open_process", lost_deletes=2)
        await error_of_open(cloud)
        return cloud.boxes

    assert asyncio.run(run()) == set()


def test_undeletable_box_is_named_and_first_error_is_kept() -> None:
    async def run() -> str:
        return await error_of_open(Cloud(fails="open_process", lost_deletes=99))

    with pytest.warns(RuntimeWarning) as seen:
        said = asyncio.run(run())
    assert said == "sandbox 'prime' could not start a session: ConnectionError: open_process failed"
    assert [str(warning.message) for warning in seen] == [
        "sandbox 'prime': sandbox p1 may still be running, its deletion failed (ConnectionError: no "
        "route to the "
        "service); delete it at the service, or it ends automatically after 60 minutes"
    ]


class SlowService:
    """Service whose box creation is still in progress when its caller is cancelled."""

    def __init__(self) -> None:
        self.left = 0
        self.is_waiting, self.may_proceed = asyncio.Event(), asyncio.Event()

    async def make(self, *args: Any, **more: Any) -> Any:
        self.left += 1
        self.is_waiting.set()
        await self.may_proceed.wait()
        return types.SimpleNamespace(terminate=doubles.Aio(self.end), kill=self.end)

    async def end(self, box: Any = None) -> None:
        self.left -= 1


def service(provider: str, slow: SlowService) -> Any:
    if provider == "modal":
        sdk = doubles.modal_sdk()
        sdk.Sandbox = types.SimpleNamespace(create=doubles.Aio(slow.make))
        return ModalService(sdk, ModalSpec(**LIMITS))
    if provider == "e2b":
        return E2BService(
            types.SimpleNamespace(AsyncSandbox=types.SimpleNamespace(create=slow.make)),
            E2BSpec(**LIMITS),
        )
    client = types.SimpleNamespace(create=slow.make, delete=slow.end)
    return DaytonaService(
        types.SimpleNamespace(
            AsyncDaytona=lambda: client, CreateSandboxFromSnapshotParams=lambda **fields: fields
        ),
        DaytonaSpec(**LIMITS),
    )


@pytest.mark.parametrize("provider", ["modal", "e2b", "daytona"])
def test_a_cancelled_creation_leaves_no_box(provider: str) -> None:
    async def run() -> int:
        slow = SlowService()
        task = asyncio.ensure_future(service(provider, slow).start_in_new_box(["true"]))
        await slow.is_waiting.wait()
        task.cancel()
        await asyncio.sleep(0)
        slow.may_proceed.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        return slow.left

    assert asyncio.run(run()) == 0


def test_daytona_deletes_by_name_a_sandbox_that_did_not_start() -> None:
    boxes: list[str] = []

    class Client(doubles.DaytonaClient):
        async def create(self, params: Any = None, *, timeout: float = 60) -> Any:
            boxes.append(params["name"])
            raise RuntimeError("the sandbox did not start")

        async def get(self, sandbox_id_or_name: str) -> Any:
            return boxes[boxes.index(sandbox_id_or_name)]

        async def delete(self, sandbox: Any) -> None:
            boxes.remove(sandbox)

    sdk = types.SimpleNamespace(
        AsyncDaytona=Client, CreateSandboxFromSnapshotParams=lambda **fields: fields
    )
    with pytest.raises(RuntimeError, match="did not start"):
        asyncio.run(DaytonaService(sdk, DaytonaSpec(**LIMITS)).start_in_new_box(["true"]))
    assert boxes == []


async def one_argument(self: Any, sandbox_id: str) -> None: ...


def no_coroutine(self: Any, sandbox_id: str) -> None: ...


def no_labels(
    *, name: str, docker_image: str, cpu_cores: float, memory_gb: float, timeout_minutes: int
) -> None: ...


@pytest.mark.parametrize(
    ("owner", "name", "value", "fault"),
    [
        ("AsyncSandboxClient", "open_process", None, "it has no AsyncSandboxClient.open_process"),
        (
            "AsyncSandboxClient",
            "open_process",
            one_argument,
            "its AsyncSandboxClient.open_process takes other arguments",
        ),
        (
            "AsyncSandboxClient",
            "delete",
            no_coroutine,
            "its AsyncSandboxClient.delete is not asynchronous",
        ),
        ("", "AsyncSandboxProcess", None, "it has no AsyncSandboxProcess.write_stdin"),
        ("", "CreateSandboxRequest", no_labels, "its CreateSandboxRequest takes other arguments"),
    ],
)
def test_incompatible_sdk_is_refused_before_anything_is_created(
    owner: str, name: str, value: Any, fault: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sdk = doubles.prime_sdk(False, tmp_path)
    setattr(getattr(sdk, owner) if owner else sdk, name, value)
    monkeypatch.setitem(sys.modules, "prime_sandboxes", sdk)
    monkeypatch.setenv("PRIME_API_KEY", "k")
    doubles.asked.clear()
    with pytest.raises(SandboxError) as error:
        open_provider(SPEC)
    said = str(error.value)
    try:  # it is installed if another package needs it
        version = metadata.version("prime-sandboxes")
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    assert said.startswith(f"sandbox 'prime' cannot use prime-sandboxes {version}: {fault}")
    assert said.endswith(
        "; nothing was created; install prime-sandboxes>=0.2.38,<0.6: " + install_command("prime")
    )
    assert "\n" not in said
    assert doubles.asked == []
