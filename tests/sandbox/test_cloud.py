"""The cloud providers against doubles with their SDKs' names and signatures, which run the guest in a local process.

``test_the_doubles_have_the_sdk_s_own_face`` compares them with the SDKs where these are installed. The doubles confine
nothing, so the promises about isolation are left out; what is asked of each service for them is asserted instead.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import inspect
import os
import pty
import shlex
import signal
import sys
import tomllib
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import SandboxError
from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.sandbox.check import check_one
from ramify.sandbox.promises import PROMISES, Promise, echo

PROVIDERS = ["modal", "e2b", "daytona", "prime", "prime-files"]
KEYS = ("MODAL_TOKEN_ID", "MODAL_TOKEN_SECRET", "E2B_API_KEY", "DAYTONA_API_KEY", "PRIME_API_KEY")
LOCAL = [promise for promise in PROMISES if not any(name.startswith("isolates") for name in promise.needs)]
asked: list[tuple[str, Any]] = []
"""What the services were asked for, and "ended" for each box that they were told to end."""


class Local:
    """A command in a local process, with Python where the image would have it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self._queue: asyncio.Queue[bytes] = asyncio.Queue()
        self._pump = asyncio.ensure_future(self._read())

    async def _read(self) -> None:
        assert self.process.stdout is not None
        data = b"-"
        while data:
            data = await self.process.stdout.read(50_000)
            self._queue.put_nowait(data)

    @classmethod
    async def run(cls, command: str | list[str]) -> Local:
        words = shlex.split(command) if isinstance(command, str) else command
        words = [sys.executable if word == "python3" else word for word in words]
        return cls(await asyncio.create_subprocess_exec(*words, stdin=-1, stdout=-1, start_new_session=True))

    async def write(self, data: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(data)
        await self.process.stdin.drain()

    async def output(self) -> AsyncIterator[bytes]:
        while data := await self._queue.get():
            yield data

    async def end(self) -> None:
        asked.append(("ended", {}))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        assert self.process.stdin is not None
        self.process.stdin.close()
        await self._pump
        await self.process.wait()


# ------------------------------------------------------------------------------------------------ modal


class Aio:
    """A method of Modal's: called as ``method.aio(…)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.aio = function


class ModalStdin:
    def __init__(self, local: Local) -> None:
        self._local = local
        self._data = b""
        self.drain = Aio(self._drain)

    def write(self, data: bytes) -> None:
        assert len(data) <= 2 << 20, "Modal's buffer of input"
        self._data += data

    async def _drain(self) -> None:
        data, self._data = self._data, b""
        await self._local.write(data)


class ModalBox:
    object_id = "sb-1"

    @staticmethod
    async def create(
        *args: str, app: Any = None, image: Any = None, timeout: int = 300, cpu: Any = None, memory: Any = None,
        block_network: bool = False,
    ) -> Any:  # fmt: skip
        asked.append(("modal", {"image": image, "block_network": block_network, "timeout": timeout, "memory": memory}))
        box = ModalBox()
        return types.SimpleNamespace(exec=Aio(box.exec), terminate=Aio(box.terminate), object_id=box.object_id)

    async def exec(self, *args: str, text: bool = True) -> Any:
        assert text is False
        self.local = await Local.run(list(args))
        return types.SimpleNamespace(stdin=ModalStdin(self.local), stdout=self.local.output())

    async def terminate(self) -> None:
        await self.local.end()


async def lookup(name: str, *, create_if_missing: bool = False) -> str:
    return name


def modal_sdk() -> types.ModuleType:
    module = types.ModuleType("modal")
    module.__dict__.update(
        App=types.SimpleNamespace(lookup=Aio(lookup)),
        Image=types.SimpleNamespace(
            debian_slim=lambda python_version=None: f"slim {python_version}",
            from_registry=lambda tag: f"registry {tag}",
        ),
        Sandbox=types.SimpleNamespace(
            create=Aio(ModalBox.create), exec=Aio(ModalBox.exec), terminate=Aio(ModalBox.terminate)
        ),
    )
    return module


# ------------------------------------------------------------------------------------------------ e2b


class E2BHandle:
    def __init__(self, local: Local, on_stdout: Any) -> None:
        self.pid = local.process.pid
        self._local = local
        self._on_stdout = on_stdout

    async def wait(self) -> None:
        async for data in self._local.output():
            self._on_stdout(data.decode())
        raise RuntimeError("command exited with code 1")


class E2BCommands:
    def __init__(self) -> None:
        self.locals: dict[int, Local] = {}

    async def run(
        self, cmd: str, background: Any = None, on_stdout: Any = None, on_stderr: Any = None, stdin: Any = None,
        timeout: float | None = 60, *, retain_output: bool = True,
    ) -> Any:  # fmt: skip
        assert (background, stdin, timeout) == (True, True, 0)
        local = await Local.run(cmd)
        self.locals[local.process.pid] = local
        return E2BHandle(local, on_stdout)

    async def send_stdin(self, pid: int, data: str) -> None:
        await self.locals[pid].write(data.encode())


class E2BBox:
    sandbox_id = "e1"

    def __init__(self) -> None:
        self.commands = E2BCommands()

    @classmethod
    async def create(cls, template: Any = None, timeout: Any = None, allow_internet_access: Any = None) -> E2BBox:
        asked.append(("e2b", {"template": template, "internet": allow_internet_access, "timeout": timeout}))
        return cls()

    async def kill(self) -> bool:
        for local in self.commands.locals.values():
            await local.end()
        return True


def e2b_sdk() -> types.ModuleType:
    module = types.ModuleType("e2b")
    module.__dict__.update(AsyncSandbox=E2BBox, AsyncCommandHandle=E2BHandle)
    return module


# ------------------------------------------------------------------------------------------------ daytona


class DaytonaTerminal:
    """A real terminal with a real shell."""

    def __init__(self, on_data: Any) -> None:
        self._fd, theirs = pty.openpty()
        os.set_blocking(self._fd, False)
        self._on_data = on_data
        self._loop = asyncio.get_running_loop()
        self._over = self._loop.create_future()
        self._shell = asyncio.create_subprocess_exec(
            "sh", "-i", stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
        )
        self._theirs = theirs
        self._loop.add_reader(self._fd, self._readable)

    def _readable(self) -> None:
        try:
            self._on_data(os.read(self._fd, 1 << 16))
        except OSError:
            self._loop.remove_reader(self._fd)
            if not self._over.done():
                self._over.set_result(None)

    async def wait_for_connection(self) -> None:
        self._process = await self._shell
        os.close(self._theirs)

    async def send_input(self, data: str | bytes) -> None:
        rest = data.encode() if isinstance(data, str) else data
        rest = rest.replace(b" python3 ", f" {sys.executable} ".encode())
        while rest:
            try:
                rest = rest[os.write(self._fd, rest) :]
            except BlockingIOError:
                await asyncio.sleep(0.001)

    async def wait(self) -> None:
        await self._over

    async def disconnect(self) -> None:
        self._loop.remove_reader(self._fd)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()
        os.close(self._fd)


class DaytonaProcess:
    async def create_pty_session(self, id: str, on_data: Any) -> DaytonaTerminal:
        return DaytonaTerminal(on_data)


class DaytonaClient:
    async def create(self, params: Any = None, *, timeout: float = 60) -> Any:
        asked.append(("daytona", params))
        return types.SimpleNamespace(process=DaytonaProcess(), id="d1")

    async def get(self, sandbox_id_or_name: str) -> Any:
        return types.SimpleNamespace(process=DaytonaProcess(), id="d1")

    async def delete(self, sandbox: Any) -> None:
        asked.append(("ended", {}))

    async def close(self) -> None:
        asked.append(("closed", {}))


def daytona_sdk() -> types.ModuleType:
    module = types.ModuleType("daytona")
    module.__dict__.update(
        AsyncDaytona=DaytonaClient,
        CreateSandboxFromImageParams=lambda **fields: fields,
        CreateSandboxFromSnapshotParams=lambda **fields: fields,
    )
    return module


# ------------------------------------------------------------------------------------------------ prime


class PrimeProcess:
    def __init__(self, local: Local) -> None:
        self._local = local
        self.stdout = local.output()

    async def write_stdin(self, data: bytes) -> None:
        await self._local.write(data)

    async def kill(self) -> None:
        await self._local.end()

    async def aclose(self) -> None:
        pass


def prime_request(
    *, name: str, docker_image: Any = None, checkpoint_id: Any = None, arch: Any = None, start_command: Any = None,
    cpu_cores: float = 1.0, memory_gb: float = 1.0, disk_size_gb: Any = None, gpu_count: int = 0, gpu_type: Any = None,
    network_allowlist: Any = None, network_denylist: Any = None, timeout_minutes: int = 60,
    idle_timeout_minutes: Any = None, environment_vars: Any = None, secrets: Any = None, labels: Any = (),
    team_id: Any = None, region: Any = None, advanced_configs: Any = None, idempotency_key: Any = None,
    lan_network_id: Any = None, lan_tags: Any = None, volumes: Any = None,
) -> dict[str, Any]:  # fmt: skip
    """``CreateSandboxRequest`` of prime-sandboxes 0.5: the fields that were given."""
    return {name: value for name, value in locals().items() if value not in (None, 0, ())}


class PrimeClient:
    """``AsyncSandboxClient`` of prime-sandboxes 0.5: virtual machines, and nothing to ask whether it is one."""

    folder: Path

    def __init__(self, api_key: str | None = None) -> None:
        self._jobs: dict[str, Local] = {}
        self._num_boxes = 0

    async def create(self, request: Any) -> Any:
        asked.append(("prime", request))
        self._num_boxes += 1
        return types.SimpleNamespace(id=f"p{self._num_boxes}")

    async def wait_for_creation(
        self, sandbox_id: str, max_attempts: int = 60, stability_checks: int = 1, image_build_timeout_seconds: int = 3000
    ) -> None:
        pass

    async def open_process(
        self, sandbox_id: str, command: str, working_dir: str | None = None, env: Any = None, user: str | None = None
    ) -> PrimeProcess:
        return PrimeProcess(await Local.run(command))

    async def delete(self, sandbox_id: str) -> dict[str, Any]:
        asked.append(("ended", {}))
        if sandbox_id in self._jobs:
            await self._jobs[sandbox_id].end()
        return {}

    async def aclose(self) -> None:
        asked.append(("closed", {}))


class PrimeContainerClient(PrimeClient):
    """The same of prime-sandboxes before 0.4, which knows containers too."""

    async def is_vm(self, sandbox_id: str) -> bool:
        return False

    def _there(self, box: str, path: str) -> str:
        """A path of the box, on this disk."""
        return path.replace("/tmp/ramify-mail", str(self.folder / box))

    async def start_background_job(
        self, sandbox_id: str, command: str, working_dir: str | None = None, env: Any = None, user: str | None = None
    ) -> None:
        self._jobs[sandbox_id] = await Local.run(self._there(sandbox_id, command))

    async def upload_bytes(
        self, sandbox_id: str, file_path: str, file_bytes: bytes, filename: str, timeout: int | None = None
    ) -> None:
        path = Path(self._there(sandbox_id, file_path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file_bytes[: len(file_bytes) // 2])  # a reader may see half of it
        await asyncio.sleep(0.001)
        with contextlib.suppress(FileNotFoundError):
            path.write_bytes(file_bytes)

    async def read_file(
        self, sandbox_id: str, file_path: str, timeout: int | None = None, offset: int | None = None,
        length: int | None = None,
    ) -> Any:  # fmt: skip
        start = offset or 0
        content = Path(self._there(sandbox_id, file_path)).read_bytes()[start : start + (length or 1 << 30)]
        return types.SimpleNamespace(content=content.decode())


def prime_sdk(has_containers: bool, folder: Path) -> types.ModuleType:
    module = types.ModuleType("prime_sandboxes")
    base = PrimeContainerClient if has_containers else PrimeClient
    client = type("AsyncSandboxClient", (base,), {"folder": folder})
    module.__dict__.update(
        AsyncSandboxClient=client, CreateSandboxRequest=prime_request, AsyncSandboxProcess=PrimeProcess
    )
    return module


# ------------------------------------------------------------------------------------------------ tests


@pytest.fixture
def services(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], SandboxSpec]:
    """Put the double of a provider in its SDK's place; the spec for it."""
    asked.clear()

    def put(provider: str, **fields: Any) -> SandboxSpec:
        for key in KEYS:
            monkeypatch.setenv(key, "k")
        makers = {"modal": modal_sdk, "e2b": e2b_sdk, "daytona": daytona_sdk}
        name = provider.split("-")[0]
        made = makers[name]() if name in makers else prime_sdk(provider == "prime-files", tmp_path)
        monkeypatch.setitem(sys.modules, made.__name__, made)
        return SandboxSpec(provider=name, memory_bytes=256 << 20, max_output_bytes=100_000, grace_s=3.0, **fields)

    return put


async def use(spec: SandboxSpec) -> str | None:
    sandbox = open_sandbox(spec)
    session = await sandbox.open(seed="s")
    ran = await session.run("print('hello')\n6 * 7", answer=echo)
    await sandbox.close()
    return ran.cell.stdout + (ran.cell.value or "")


WANTED = {
    "modal": {"image": "slim 3.12", "block_network": True, "timeout": 3600, "memory": 512},
    "e2b": {"template": None, "internet": False, "timeout": 3600},
    "daytona": {"language": "python", "network_block_all": True, "ephemeral": True, "auto_stop_interval": 60},
}


@pytest.mark.parametrize("provider", PROVIDERS)
def test_a_session(provider: str, services: Callable[..., SandboxSpec]) -> None:
    assert asyncio.run(use(services(provider))) == "hello\n42"
    assert ("ended", {}) in asked
    if provider == "daytona":
        assert asked[0][1].pop("name").startswith("ramify-")
    if provider in WANTED:
        assert asked[0] == (provider, WANTED[provider])
    else:
        request = asked[0][1]
        assert request.pop("name").startswith("ramify-")
        assert request == {
            "docker_image": "python:3.12-slim", "cpu_cores": 1.0, "memory_gb": 1.0, "timeout_minutes": 60,
            "labels": ["ramify"],
        }  # fmt: skip


def test_an_image_of_one_s_own(services: Callable[..., SandboxSpec]) -> None:
    found = []
    for provider in ("modal", "e2b", "daytona", "prime"):
        asked.clear()
        asyncio.run(use(services(provider, image="mine:1")))
        found.append({name: asked[0][1].get(name) for name in ("image", "template", "docker_image")})
    none = {"image": None, "template": None, "docker_image": None}
    assert found == [
        {**none, "image": "registry mine:1"}, {**none, "template": "mine:1"}, {**none, "image": "mine:1"},
        {**none, "docker_image": "mine:1"},
    ]  # fmt: skip


BRIEF = [
    "values go over and come back the same", "large values travel", "calls from threads run at once",
    "an endless loop stops, variables stay", "a cell that cannot be stopped is killed",
    "a crash is told, with the output so far", "long output keeps head, tail and length",
    "a rude cell does not break the next", "the host's environment is not seen",
]  # fmt: skip
"""What depends on how bytes travel, and not on the guest alone; ``docker`` is put to everything."""
CASES = [(p, q) for p in PROVIDERS for q in LOCAL if q.name in BRIEF]


@pytest.mark.parametrize(("provider", "promise"), CASES, ids=[f"{p}-{q.name}" for p, q in CASES])
def test_promise(provider: str, promise: Promise, services: Callable[..., SandboxSpec]) -> None:
    spec = services(provider)

    async def put() -> None:
        sandbox = open_sandbox(spec)
        finding = await check_one(sandbox, spec, promise)
        await sandbox.close()
        if finding.kept is None:
            pytest.skip(finding.detail)
        assert finding.kept, finding.detail

    asyncio.run(put())


def test_without_a_key_or_an_sdk(services: Callable[..., SandboxSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/nowhere")
    for provider in ("modal", "e2b", "daytona", "prime"):
        spec = services(provider)
        for key in KEYS:
            monkeypatch.delenv(key)
        with pytest.raises(SandboxError, match=f"sandbox '{provider}' has no key: set {provider.upper()}_"):
            open_sandbox(spec)
        services(provider)
        monkeypatch.setitem(sys.modules, "prime_sandboxes" if provider == "prime" else provider, None)
        with pytest.raises(SandboxError, match=rf"pip install 'ramify\[{provider}\]'"):
            open_sandbox(spec)


def test_a_service_that_refuses(services: Callable[..., SandboxSpec], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = services("e2b")

    async def create(**_: Any) -> None:
        raise PermissionError("invalid key\nmore")

    monkeypatch.setattr(E2BBox, "create", create)
    with pytest.raises(SandboxError, match=r"sandbox 'e2b' could not start a session: PermissionError: invalid key$"):
        asyncio.run(use(spec))


def faces() -> list[tuple[str, str, Callable[..., Any]]]:
    """(SDK module, dotted name in it, the double's function)"""
    prime = [getattr(PrimeContainerClient, name) for name in (
        "create", "wait_for_creation", "is_vm", "open_process", "start_background_job", "upload_bytes", "read_file",
        "delete", "aclose",
    )]  # fmt: skip
    return [
        ("modal", "Sandbox.create.aio", ModalBox.create), ("modal", "Sandbox.exec.aio", ModalBox.exec),
        ("modal", "Sandbox.terminate.aio", ModalBox.terminate), ("modal", "App.lookup.aio", lookup),
        ("modal", "io_streams.StreamWriter.write", ModalStdin.write),
        ("modal", "io_streams.StreamWriter.drain.aio", ModalStdin._drain),
        ("modal", "Image.debian_slim", lambda python_version=None: None), ("modal", "Image.from_registry", lambda tag: None),
        ("e2b", "AsyncSandbox.create", E2BBox.create), ("e2b", "AsyncSandbox.kill", E2BBox.kill),
        ("e2b", "AsyncCommandHandle.wait", E2BHandle.wait),
        ("e2b", "sandbox_async.commands.command.Commands.run", E2BCommands.run),
        ("e2b", "sandbox_async.commands.command.Commands.send_stdin", E2BCommands.send_stdin),
        *(("daytona", f"AsyncDaytona.{name}", getattr(DaytonaClient, name)) for name in ("create", "get", "delete", "close")),
        ("daytona", "_async.process.AsyncProcess.create_pty_session", DaytonaProcess.create_pty_session),
        *(("daytona", f"handle.async_pty_handle.AsyncPtyHandle.{name}", getattr(DaytonaTerminal, name))
          for name in ("wait_for_connection", "send_input", "wait", "disconnect")),
        ("prime_sandboxes", "CreateSandboxRequest", prime_request),
        *(("prime_sandboxes", f"AsyncSandboxClient.{f.__name__}", f) for f in prime),
        *(("prime_sandboxes", f"AsyncSandboxProcess.{name}", getattr(PrimeProcess, name))
          for name in ("write_stdin", "kill", "aclose")),
    ]  # fmt: skip


def real(module: Any, name: str) -> Any:
    for part in name.split("."):
        found = getattr(module, part, None)
        module = found if found is not None else importlib.import_module(f"{module.__name__}.{part}")
    return module


def sdk_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        pytest.skip(f"the SDK is not installed: {error}")


def shape(function: Callable[..., Any]) -> list[tuple[str, str, bool]]:
    """(name, kind, has a default) of each parameter"""
    signature = inspect.signature(function)
    return [(p.name, p.kind.name, p.default is not p.empty) for p in signature.parameters.values()]


@pytest.mark.parametrize("sdk", ["modal", "e2b", "daytona", "prime_sandboxes"])
def test_the_doubles_have_the_sdk_s_own_face(sdk: str) -> None:
    module = sdk_module(sdk)
    has_containers = hasattr(getattr(module, "AsyncSandboxClient", None), "is_vm")
    for _, name, ours in (face for face in faces() if face[0] == sdk):
        if sdk == "prime_sandboxes" and not has_containers and not hasattr(PrimeClient, ours.__name__):
            if ours.__qualname__.startswith("PrimeContainerClient"):
                continue  # newer SDKs have no containers
        theirs = real(module, name)
        known = inspect.signature(theirs).parameters
        for parameter in inspect.signature(ours).parameters.values():
            if parameter.name not in ("self", "cls"):
                assert parameter.name in known, f"{sdk}.{name} has no parameter '{parameter.name}'"
                assert known[parameter.name].kind == parameter.kind, f"{sdk}.{name}({parameter.name})"
        if name != "AsyncSandbox.kill":  # it hides that it is one
            assert inspect.iscoroutinefunction(theirs) == inspect.iscoroutinefunction(ours), f"{sdk}.{name}"


def test_the_double_of_prime_has_exactly_the_sdk_s_signatures() -> None:
    module = sdk_module("prime_sandboxes")
    if hasattr(module.AsyncSandboxClient, "is_vm"):
        pytest.skip("the SDK that is installed is older than the one that the double copies")
    pairs = [(module.CreateSandboxRequest, prime_request)]
    pairs += [
        (getattr(module.AsyncSandboxClient, name), getattr(PrimeClient, name))
        for name in ("create", "wait_for_creation", "open_process", "delete", "aclose")
    ]
    pairs += [
        (getattr(module.AsyncSandboxProcess, name), getattr(PrimeProcess, name))
        for name in ("write_stdin", "kill", "aclose")
    ]
    assert [shape(ours) for _, ours in pairs] == [shape(theirs) for theirs, _ in pairs]


@pytest.mark.parametrize("provider", ["modal", "e2b", "daytona", "prime"])
def test_the_sdk_has_each_call_that_the_provider_makes(provider: str) -> None:
    """On the SDK itself, and the extra installs the versions that the provider names."""
    found = importlib.import_module(f"ramify.sandbox.cloud.{provider}").SDK
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras[provider] == [found.package + found.wanted]
    sdk_module(found.module)
    found.load()
