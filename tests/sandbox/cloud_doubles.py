"""Doubles of the cloud providers' SDKs: same names and signatures, with the guest in a local
process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import pty
import shlex
import signal
import sys
import types
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

asked: list[tuple[str, Any]] = []
"""The requests that the services received, and "ended" for each box that was deleted."""


class LocalProcess:
    """A command in a local process, with the Python that the image would have."""

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
    async def run(cls, command: str | list[str]) -> LocalProcess:
        words = shlex.split(command) if isinstance(command, str) else command
        words = [sys.executable if word == "python3" else word for word in words]
        return cls(
            await asyncio.create_subprocess_exec(
                *words, stdin=-1, stdout=-1, start_new_session=True
            )
        )

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


# ------------------------------------------------------------------------------------------------
# modal


class Aio:
    """A Modal method, called as ``method.aio(…)``."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.aio = function


class ModalStdin:
    def __init__(self, local: LocalProcess) -> None:
        self._local = local
        self._data = b""
        self.drain = Aio(self.wait_drained)

    def write(self, data: bytes) -> None:
        assert len(data) <= 2 << 20, "Modal's buffer of input"
        self._data += data

    async def wait_drained(self) -> None:
        data, self._data = self._data, b""
        await self._local.write(data)


class ModalBox:
    object_id = "sb-1"

    @staticmethod
    async def create(
        *args: str,
        app: Any = None,
        image: Any = None,
        timeout: int = 300,
        cpu: Any = None,
        memory: Any = None,
        block_network: bool = False,
    ) -> Any:
        asked.append(
            (
                "modal",
                {
                    "image": image,
                    "block_network": block_network,
                    "timeout": timeout,
                    "memory": memory,
                },
            )
        )
        box = ModalBox()
        return types.SimpleNamespace(
            exec=Aio(box.exec), terminate=Aio(box.terminate), object_id=box.object_id
        )

    async def exec(self, *args: str, text: bool = True) -> Any:
        assert text is False
        self.local = await LocalProcess.run(list(args))
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


# ------------------------------------------------------------------------------------------------
# e2b


class E2BHandle:
    def __init__(self, local: LocalProcess, on_stdout: Any) -> None:
        self.pid = local.process.pid
        self._local = local
        self._on_stdout = on_stdout

    async def wait(self) -> None:
        async for data in self._local.output():
            self._on_stdout(data.decode())
        raise RuntimeError("command exited with code 1")


class E2BCommands:
    def __init__(self) -> None:
        self.locals: dict[int, LocalProcess] = {}

    async def run(
        self,
        cmd: str,
        background: Any = None,
        on_stdout: Any = None,
        on_stderr: Any = None,
        stdin: Any = None,
        timeout: float | None = 60,
        *,
        retain_output: bool = True,
    ) -> Any:
        assert (background, stdin, timeout) == (True, True, 0)
        local = await LocalProcess.run(cmd)
        self.locals[local.process.pid] = local
        return E2BHandle(local, on_stdout)

    async def send_stdin(self, pid: int, data: str) -> None:
        await self.locals[pid].write(data.encode())


class E2BBox:
    sandbox_id = "e1"

    def __init__(self) -> None:
        self.commands = E2BCommands()

    @classmethod
    async def create(
        cls, template: Any = None, timeout: Any = None, allow_internet_access: Any = None
    ) -> E2BBox:
        asked.append(
            ("e2b", {"template": template, "internet": allow_internet_access, "timeout": timeout})
        )
        return cls()

    async def kill(self) -> bool:
        for local in self.commands.locals.values():
            await local.end()
        return True


def e2b_sdk() -> types.ModuleType:
    module = types.ModuleType("e2b")
    module.__dict__.update(AsyncSandbox=E2BBox, AsyncCommandHandle=E2BHandle)
    return module


# ------------------------------------------------------------------------------------------------
# daytona


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


# ------------------------------------------------------------------------------------------------
# prime


class PrimeProcess:
    def __init__(self, local: LocalProcess) -> None:
        self._local = local
        self.stdout = local.output()

    async def write_stdin(self, data: bytes) -> None:
        await self._local.write(data)

    async def kill(self) -> None:
        await self._local.end()

    async def aclose(self) -> None:
        pass


def prime_request(
    *,
    name: str,
    docker_image: Any = None,
    checkpoint_id: Any = None,
    arch: Any = None,
    start_command: Any = None,
    cpu_cores: float = 1.0,
    memory_gb: float = 1.0,
    disk_size_gb: Any = None,
    gpu_count: int = 0,
    gpu_type: Any = None,
    network_allowlist: Any = None,
    network_denylist: Any = None,
    timeout_minutes: int = 60,
    idle_timeout_minutes: Any = None,
    environment_vars: Any = None,
    secrets: Any = None,
    labels: Any = (),
    team_id: Any = None,
    region: Any = None,
    advanced_configs: Any = None,
    idempotency_key: Any = None,
    lan_network_id: Any = None,
    lan_tags: Any = None,
    volumes: Any = None,
) -> dict[str, Any]:
    """``CreateSandboxRequest`` of prime-sandboxes 0.5: the fields that were passed."""
    return {name: value for name, value in locals().items() if value not in (None, 0, ())}


class PrimeClient:
    """``AsyncSandboxClient`` of prime-sandboxes 0.5: only virtual machines, and no ``is_vm``."""

    folder: Path

    def __init__(self, api_key: str | None = None) -> None:
        self._jobs: dict[str, LocalProcess] = {}
        self._num_boxes = 0

    async def create(self, request: Any) -> Any:
        asked.append(("prime", request))
        self._num_boxes += 1
        return types.SimpleNamespace(id=f"p{self._num_boxes}")

    async def wait_for_creation(
        self,
        sandbox_id: str,
        max_attempts: int = 60,
        stability_checks: int = 1,
        image_build_timeout_seconds: int = 3000,
    ) -> None:
        pass

    async def open_process(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Any = None,
        user: str | None = None,
    ) -> PrimeProcess:
        return PrimeProcess(await LocalProcess.run(command))

    async def delete(self, sandbox_id: str) -> dict[str, Any]:
        asked.append(("ended", {}))
        if sandbox_id in self._jobs:
            await self._jobs[sandbox_id].end()
        return {}

    async def aclose(self) -> None:
        asked.append(("closed", {}))


class PrimeContainerClient(PrimeClient):
    """The client of prime-sandboxes before 0.4, which also supports containers."""

    async def is_vm(self, sandbox_id: str) -> bool:
        return False

    def _local_path(self, box: str, path: str) -> str:
        """Path on this disk that stands for a path in the box."""
        return path.replace("/tmp/ramify-mail", str(self.folder / box))

    async def start_background_job(
        self,
        sandbox_id: str,
        command: str,
        working_dir: str | None = None,
        env: Any = None,
        user: str | None = None,
    ) -> None:
        self._jobs[sandbox_id] = await LocalProcess.run(self._local_path(sandbox_id, command))

    async def upload_bytes(
        self,
        sandbox_id: str,
        file_path: str,
        file_bytes: bytes,
        filename: str,
        timeout: int | None = None,
    ) -> None:
        path = Path(self._local_path(sandbox_id, file_path))
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(file_bytes[: len(file_bytes) // 2])  # a reader may see half of it
        await asyncio.sleep(0.001)
        with contextlib.suppress(FileNotFoundError):
            path.write_bytes(file_bytes)

    async def read_file(
        self,
        sandbox_id: str,
        file_path: str,
        timeout: int | None = None,
        offset: int | None = None,
        length: int | None = None,
    ) -> Any:
        start = offset or 0
        content = Path(self._local_path(sandbox_id, file_path)).read_bytes()[
            start : start + (length or 1 << 30)
        ]
        return types.SimpleNamespace(content=content.decode())


def prime_sdk(has_containers: bool, folder: Path) -> types.ModuleType:
    module = types.ModuleType("prime_sandboxes")
    base = PrimeContainerClient if has_containers else PrimeClient
    client = type("AsyncSandboxClient", (base,), {"folder": folder})
    module.__dict__.update(
        AsyncSandboxClient=client,
        CreateSandboxRequest=prime_request,
        AsyncSandboxProcess=PrimeProcess,
    )
    return module
