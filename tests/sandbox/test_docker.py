"""The provider ``docker`` against a double that speaks the engine's HTTP API on a Unix socket and
really runs the guest.

The double isolates nothing, so isolation checks are skipped here; instead, the tests assert the
isolation that is requested from the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError, SandboxError, SessionDied
from ramify.sandbox.base import SandboxSpec, open_sandbox
from ramify.sandbox.providers.docker import DockerSpec
from ramify.testing.sandbox_conformance import CHECKS, ConformanceCheck, answer_host_call, check_one

SPEC = SandboxSpec(provider="docker", memory_bytes=256 << 20, max_output_bytes=100_000, grace_s=3.0)
LOCAL = [check for check in CHECKS if not any(name.startswith("isolates") for name in check.needs)]


class FakeEngine:
    """Fake container engine. ``images`` are local, ``registry`` can be pulled; ``forgets`` names
    protections that it does not apply."""

    def __init__(self) -> None:
        self.images = {"python:3.12-slim"}
        self.registry = {"my/python:latest"}
        self.forgets: set[str] = set()
        self.python = sys.executable
        self.requests: list[str] = []
        self.containers: dict[str, dict[str, Any]] = {}
        self.attached: dict[str, tuple[asyncio.StreamReader, asyncio.StreamWriter]] = {}
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: set[asyncio.Task[None]] = set()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.append(writer)
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        method, path, _ = head.split("\r\n")[0].split(" ")
        length = head.lower().partition("content-length: ")[2].partition("\r\n")[0]
        size = int(length or 0)
        body = json.loads(await reader.readexactly(size)) if size else None
        self.requests.append(f"{method} {path}")
        if "/attach" in path:
            self.attached[path.split("/")[2]] = (reader, writer)
            assert "Upgrade: tcp" in head
            writer.write(b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n")
            return
        status, answer = await self.answer(method, path, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        if status == 204:
            writer.write(b"HTTP/1.1 204 No Content\r\n\r\n")
        elif "/json" in path:
            chunk = f"{len(data):x}\r\n".encode() + data + b"\r\n0\r\n\r\n"
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk)
        else:
            writer.write(
                f"HTTP/1.1 {status} X\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data
            )
        await writer.drain()
        writer.close()

    async def answer(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        id = path.split("?")[0].split("/")[2]
        if path == "/containers/create":
            if body["Image"] not in self.images:
                return 404, {"message": f"No such image: {body['Image']}"}
            id = f"c{len(self.containers)}"
            self.containers[id] = body
            return 201, {"Id": id, "Warnings": []}
        if path.startswith("/images/create"):
            image = path.partition("fromImage=")[2].replace("%2F", "/").replace("%3A", ":")
            if image not in self.registry:
                return 200, b'{"status":"Pulling"}\r\n{"error":"manifest unknown"}\r\n'
            self.images.add(image)
            return 200, b'{"status":"Pulling"}\r\n{"status":"done"}\r\n'
        if path.endswith("/start"):
            await self.start(id)
            return 204, b""
        if path.endswith("/json"):
            body = self.containers[id]
            host = {
                name: value
                for name, value in body["HostConfig"].items()
                if name not in self.forgets
            }
            return 200, {"Id": id, "Config": {"User": body["User"]}, "HostConfig": host}
        if method == "DELETE":
            self.kill(id)
            return 204, b""
        return 404, {"message": f"page not found: {path}"}

    async def start(self, id: str) -> None:
        body = self.containers[id]
        command = [
            self.python if part == "python3" else part
            for part in (*body["Entrypoint"], *body["Cmd"])
        ]
        process = await asyncio.create_subprocess_exec(
            *command, stdin=-1, stdout=-1, stderr=-1, cwd="/"
        )
        self.processes[id] = process
        reader, writer = self.attached[id]
        self.spawn(self.feed(reader, process, id))
        self.spawn(self.relay(process, writer))

    def spawn(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    async def feed(
        self, reader: asyncio.StreamReader, process: asyncio.subprocess.Process, id: str
    ) -> None:
        assert process.stdin is not None
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                process.stdin.write(data)
                await process.stdin.drain()
        self.kill(id)

    async def relay(
        self, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter
    ) -> None:
        async def one(number: int, source: asyncio.StreamReader) -> None:
            while data := await source.read(30_000):
                writer.write(struct.pack(">BxxxI", number, len(data)) + data)
                await writer.drain()

        assert process.stdout is not None
        assert process.stderr is not None
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(one(1, process.stdout), one(2, process.stderr))
        await process.wait()
        writer.close()

    async def close(self) -> None:
        """Wait without force: removed containers must end by themselves."""
        while self.tasks:
            await asyncio.wait([*self.tasks], timeout=10)
        for writer in self.writers:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def kill(self, id: str) -> None:
        process = self.processes.get(id)
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()


@contextlib.asynccontextmanager
async def engine(monkeypatch: pytest.MonkeyPatch, folder: Path) -> AsyncIterator[FakeEngine]:
    fake = FakeEngine()
    path = str(folder / "engine.sock")
    server = await asyncio.start_unix_server(fake.serve, path)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{path}")
    async with server:
        try:
            yield fake
        finally:
            await fake.close()


@pytest.mark.parametrize("check", LOCAL, ids=[check.name for check in LOCAL])
def test_conformance_check(
    check: ConformanceCheck, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def put() -> None:
        async with engine(monkeypatch, tmp_path):
            sandbox = open_sandbox(SPEC)
            result = await check_one(sandbox, SPEC, check)
            await sandbox.close()
        if result.passed is None:
            pytest.skip(result.detail)
        assert result.passed, result.detail

    asyncio.run(put())


def test_create_request_asks_for_isolation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def ask() -> FakeEngine:
        async with engine(monkeypatch, tmp_path) as fake:
            sandbox = open_sandbox(SPEC)
            session = await sandbox.open()
            assert (await session.run("6 * 7", answer=answer_host_call)).cell.value == "42"
            await sandbox.close()
            return fake

    fake = asyncio.run(ask())
    assert fake.requests == [
        "POST /containers/create",
        "POST /containers/c0/attach?stream=1&stdin=1&stdout=1&stderr=1",
        "POST /containers/c0/start",
        "GET /containers/c0/json",
        "DELETE /containers/c0?force=true&v=true",
    ]
    body = fake.containers["c0"]
    assert {
        name: body[name]
        for name in ("Image", "User", "Tty", "OpenStdin", "StdinOnce", "NetworkDisabled")
    } == {
        "Image": "python:3.12-slim",
        "User": "65534:65534",
        "Tty": False,
        "OpenStdin": True,
        "StdinOnce": True,
        "NetworkDisabled": True,
    }
    assert body["HostConfig"] == {
        "NetworkMode": "none",
        "ReadonlyRootfs": True,
        "CapDrop": ["ALL"],
        "Privileged": False,
        "SecurityOpt": ["no-new-privileges"],
        "Memory": 384 << 20,
        "MemorySwap": 384 << 20,
        "NanoCpus": 10**9,
        "PidsLimit": 256,
        "IpcMode": "private",
        "AutoRemove": True,
        "Tmpfs": {"/tmp": f"rw,nosuid,nodev,mode=1777,size={256 << 20}"},
        "LogConfig": {"Type": "none"},
    }


def open_once(
    monkeypatch: pytest.MonkeyPatch, folder: Path, spec: SandboxSpec = SPEC, **changes: Any
) -> FakeEngine:
    async def go() -> FakeEngine:
        async with engine(monkeypatch, folder) as fake:
            for name, value in changes.items():
                setattr(fake, name, value)
            sandbox = open_sandbox(spec)
            try:
                await sandbox.open()
            finally:
                await sandbox.close()
            return fake

    return asyncio.run(go())


def spec(**fields: Any) -> SandboxSpec:
    return DockerSpec(memory_bytes=256 << 20, **fields)


@pytest.mark.parametrize(
    "lost", ["NetworkMode", "ReadonlyRootfs", "CapDrop", "SecurityOpt", "Memory", "PidsLimit"]
)
def test_engine_that_ignores_a_protection_is_refused(
    lost: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        SandboxError, match=f"did not apply {lost} to the container.*allow_weaker=True"
    ):
        open_once(monkeypatch, tmp_path, forgets={lost})
    fake = open_once(monkeypatch, tmp_path, spec(allow_weaker=True), forgets={lost})
    assert fake.requests[-1].startswith("DELETE")


def test_missing_image_is_pulled_and_unknown_image_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake = open_once(
        monkeypatch, tmp_path, spec(image="my/python"), images={"my/python"}, registry=set()
    )
    assert len(fake.containers) == 1
    with pytest.raises(
        SandboxError, match="the image 'other' could not be pulled: manifest unknown"
    ):
        open_once(monkeypatch, tmp_path, spec(image="other"))


def test_image_without_python_or_requested_package_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(
        SandboxError, match=r"did not start Python, it said: .*no-python.*\(image=…\)"
    ):
        open_once(monkeypatch, tmp_path, python="no-python")
    with pytest.raises(
        SandboxError, match=r"'no_such_package' cannot be imported: .*set by image=…"
    ):
        open_once(monkeypatch, tmp_path, spec(packages=("no_such_package",)))


def test_container_killed_from_outside_ends_its_session(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def go() -> None:
        async with engine(monkeypatch, tmp_path) as fake:
            sandbox = open_sandbox(SPEC)
            session = await sandbox.open()
            asyncio.get_running_loop().call_later(0.2, fake.kill, "c0")
            with pytest.raises(SessionDied, match="its box ended"):
                await session.run(
                    "print('so far', flush=True)\nimport time\ntime.sleep(30)",
                    answer=answer_host_call,
                )
            await sandbox.close()

    asyncio.run(go())


def test_unreachable_engine_is_named_with_remedy(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(SandboxError, match=r"no engine at .*none\.sock; start Docker or Podman"):
        open_sandbox(SPEC)
    monkeypatch.setenv("DOCKER_HOST", "tcp://1.2.3.4:2375")
    with pytest.raises(ConfigError, match="only unix:// sockets are supported"):
        open_sandbox(SPEC)
    os.mknod(tmp_path / "dead.sock")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/dead.sock")
    with pytest.raises(SandboxError, match=r"'docker': cannot reach unix:.*dead\.sock \(.*; start"):
        asyncio.run(open_sandbox(SPEC).open())
