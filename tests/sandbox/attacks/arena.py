"""Where attacks run: one sandbox with a sibling session, surrounded by everything an attacker might
want to reach.

Decides how an attack is judged. A bystander process holds a secret and must survive. A key file, an
environment variable and listeners of every kind wait for a visitor. The sibling counts its own
cells and must not miscount.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from attacks import watch
from attacks.base import Attack, Verdict
from attacks.tools import TOOLS
from ramify.errors import HostCallError, SandboxError, SessionDied
from ramify.sandbox.base import CellResult, Sandbox, Session, open_sandbox, provider_spec
from ramify.sandbox.providers.jail import JailSandbox

SPEC: dict[str, Any] = {
    "memory_bytes": 256 << 20,
    "cell_s": 30.0,
    "grace_s": 0.25,
    "max_output_bytes": 100_000,
}
SECRET_NAME = "RAMIFY_TEST_SECRET"
_STRAY_FDS = 40
"""Descriptors that a pool may take or give back while one attack runs."""
VICTIM = """
import ctypes, sys, time
secret = ctypes.create_string_buffer(sys.stdin.readline().strip().encode())
print(ctypes.addressof(secret), flush=True)
while True: time.sleep(60)
"""


def start_victim() -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", VICTIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


async def answer(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The host's answers to attackers."""
    if name == "echo":
        return args[0]
    if name == "big":
        return "x" * (1 << 20)
    if name == "sleep":
        await asyncio.sleep(args[0])
        return None
    raise HostCallError("NameError", f"there is no {str(name)[:40]!r}")


class Listeners:
    """Sockets that record every connection from an attacker who escapes."""

    def __init__(self, folder: str) -> None:
        self.heard: list[str] = []
        self.abstract = "ramify-" + secrets.token_hex(8)
        self.path = os.path.join(folder, "socket")
        self._all: list[socket.socket] = []
        self.tcp = self._listen(
            "tcp", socket.AF_INET, socket.SOCK_STREAM, ("127.0.0.1", 0)
        ).getsockname()[1]
        self.udp = self._listen(
            "udp", socket.AF_INET, socket.SOCK_DGRAM, ("127.0.0.1", 0)
        ).getsockname()[1]
        self._listen("abstract", socket.AF_UNIX, socket.SOCK_STREAM, "\0" + self.abstract)
        self._listen("unix", socket.AF_UNIX, socket.SOCK_STREAM, self.path)
        self._listen(
            "abstract datagram",
            socket.AF_UNIX,
            socket.SOCK_DGRAM,
            "\0" + self.abstract + "-datagram",
        )
        self._listen("unix datagram", socket.AF_UNIX, socket.SOCK_DGRAM, self.path + "-datagram")
        os.chmod(self.path, 0o777)
        os.chmod(self.path + "-datagram", 0o777)

    def _listen(self, name: str, family: int, kind: int, address: Any) -> socket.socket:
        made = socket.socket(family, kind)
        made.bind(address)
        made.setblocking(False)
        if kind == socket.SOCK_STREAM:
            made.listen(64)
        self._all.append(made)
        asyncio.get_running_loop().add_reader(made, self._hear, name, made, kind)
        return made

    def _hear(self, name: str, sock: socket.socket, kind: int) -> None:
        self.heard.append(name)
        with contextlib.suppress(OSError):
            if kind == socket.SOCK_STREAM:
                sock.accept()[0].close()
            else:
                sock.recv(1000)

    def close(self) -> None:
        for sock in self._all:
            asyncio.get_running_loop().remove_reader(sock)
            sock.close()


class Arena:
    """Use it with ``async with``; ``verdict`` tries one attack."""

    def __init__(self, provider: str, spec: Mapping[str, Any], landlock: int = 0) -> None:
        """``landlock``: the newest version that the jail may use; 0: the kernel's own."""
        self.spec = provider_spec({"provider": provider, **SPEC, **spec})
        self._landlock = landlock
        self.sandbox: Sandbox
        self.sibling: Session
        self._count = 0
        self._folder = tempfile.TemporaryDirectory(prefix="arena-")
        self._stack = contextlib.ExitStack()
        self._open: list[Session] = []

    async def __aenter__(self) -> Arena:
        watch.adopt_orphans()
        folder = self._folder.name
        self.secrets = {
            name: f"{name}-{secrets.token_hex(12)}" for name in ("file", "environment", "memory")
        }
        os.environ[SECRET_NAME] = self.secrets["environment"]
        os.chmod(folder, 0o755)
        self.key_file = os.path.join(folder, "id_ed25519")
        Path(self.key_file).write_text(self.secrets["file"])
        os.chmod(self.key_file, 0o666)  # so that only the sandbox protects it
        self.listeners = Listeners(folder)
        self.victim = await asyncio.to_thread(start_victim)
        assert self.victim.stdin is not None
        assert self.victim.stdout is not None
        self.victim.stdin.write(self.secrets["memory"] + "\n")
        self.victim.stdin.flush()
        self.address = int(self.victim.stdout.readline())
        self._lay_out_checkout(os.path.join(folder, "checkout"))
        self.before = (watch.descendants(os.getpid()), len(watch.open_descriptors()))
        older = self._landlock and JailSandbox(self.spec, landlock=self._landlock)
        self.sandbox = older or open_sandbox(self.spec)
        await self._new_sibling()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sandbox.close()
        self.victim.kill()
        self.victim.communicate()
        self.listeners.close()
        self._folder.cleanup()

    def _lay_out_checkout(self, folder: str) -> None:
        """Create a package that sessions may import, in a folder with files that they may not
        read."""
        secret = self.secrets["file"]
        texts = {
            ".env": secret,
            ".git/config": secret,
            "id_rsa": secret,
            "settings.toml": secret,
            "conftest.py": f"k = '{secret}'",
            "of_arena/__init__.py": "",
            "of_arena/inner/__init__.py": "",
            "of_arena/data.txt": "data",
            "of_arena/.env": secret,
            "of_arena/inner/.netrc": secret,
        }
        for name, text in texts.items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        os.symlink("../.env", Path(folder, "of_arena/linked"))
        sys.path.append(folder)
        self.spec = msgspec.structs.replace(self.spec, packages=(*self.spec.packages, "of_arena"))

    async def _new_sibling(self) -> None:
        self.sibling = await self.sandbox.open()
        self._count = 0
        await self.sibling.run("state = 0\nlist_of_mine = ['mine'] * 1000", answer=answer)

    def facts(self) -> dict[str, Any]:
        """Facts about its surroundings that the attacker is given."""
        return {
            "key_file": self.key_file,
            "folder": self._folder.name,
            "home": os.path.expanduser("~"),
            "tcp": self.listeners.tcp,
            "udp": self.listeners.udp,
            "abstract": self.listeners.abstract,
            "unix": self.listeners.path,
            "host": os.getpid(),
            "victim": self.victim.pid,
            "address": self.address,
            "length": len(self.secrets["memory"]),
            "secret_name": SECRET_NAME,
            "sibling": getattr(self.sibling, "pid", 0),
        }

    async def session(self, **options: Any) -> Session:
        """Open a session with the attacker's tools. It is closed after the attack."""
        session = await self.sandbox.open(**options)
        self._open.append(session)
        await self.equip(session)
        return session

    async def equip(self, session: Session) -> None:
        await session.install("tools_of_attack", TOOLS)
        await session.set("arena", self.facts())

    def keep(self, session: Session) -> None:
        """Register a session that an attack opened by other means; it is closed after the
        attack."""
        self._open.append(session)

    async def verdict(self, attack: Attack) -> Verdict:
        """Try one attack."""
        verdict = Verdict(attack.name)
        if attack.needs_fork and not (self.sandbox.caps.fork and hasattr(self.sibling, "fork")):
            verdict.skipped = "this provider does not fork sessions"
            return verdict
        verdict.faults += await self._sibling_faults("before")
        watch.reset_peak()
        memory, fds = watch.memory_mb("VmRSS"), len(watch.open_descriptors())
        self.listeners.heard.clear()
        started = time.perf_counter()
        text = ""
        try:
            async with asyncio.timeout(attack.timeout_s + 60):
                verdict.ended, text, verdict.detail = await self._run(attack)
        except Exception as error:  # noqa: BLE001  (whatever it was, the attacks after it are still to be tried)
            verdict.faults.append(f"the attack could not be tried: {type(error).__name__}: {error}")
        finally:
            while self._open:
                await self._open.pop().close()
        verdict.seconds = time.perf_counter() - started
        verdict.reached = [line[9:] for line in text.splitlines() if line.startswith("!reached ")]
        verdict.refused = [line[9:] for line in text.splitlines() if line.startswith("!refused ")]
        verdict.detail = verdict.detail or text[-300:]
        if (
            verdict.ended == "error"
            and "ModuleNotFoundError" in verdict.detail
            and self.spec.provider != "process"
        ):
            verdict.skipped = f"it cannot begin here: {verdict.detail.splitlines()[-1]}"
            return verdict
        if verdict.ended and verdict.ended not in attack.ends:
            verdict.faults.append(
                f"it ended otherwise than {' or '.join(attack.ends)}: {verdict.ended}"
            )
        if (
            verdict.ended != "died"
            and "attempt(" in attack.code
            and len(verdict.reached) + len(verdict.refused) < attack.tries
        ):
            verdict.faults.append("it did not happen: its cell made too few attempts")
        verdict.faults += [
            f"the secret of the {name} was seen"
            for name, value in self.secrets.items()
            if value in text
        ]
        verdict.faults += self._host_faults(attack, memory, fds)
        verdict.faults += await self._sibling_faults("after")
        return verdict

    async def _run(self, attack: Attack) -> tuple[str, str, str]:
        """Return how the attack ended, what it printed, and other remarks."""
        session = await self.session()
        if attack.act is not None:
            return "ran", await attack.act(self, session), ""
        try:
            ran = await session.run(attack.code, answer=answer, timeout_s=attack.timeout_s)
        except SessionDied as died:
            return "died", died.stdout, str(died)
        how, said = ended(ran), ran.cell.stdout + (ran.cell.value or "")
        if (
            how not in attack.ends and "died" in attack.ends
        ):  # its end may have come before the news of its lie
            try:
                await session.run("1", answer=answer)
            except SessionDied as died:
                return "died", said, str(died)
        return how, said, (ran.cell.error or "")[-300:]

    async def _sibling_faults(self, when: str) -> list[str]:
        self._count += 1
        try:
            code = "state += 1\nstate, set(list_of_mine), 6 * 7"
            ran = await asyncio.wait_for(self.sibling.run(code, answer=answer), 60)
            wanted = f"({self._count}, {{'mine'}}, 42)"
            if ran.cell.value == wanted:
                return []
            fault = f"{ran.cell.value or ran.cell.error}, not {wanted}"
        except (SandboxError, TimeoutError) as error:
            fault = f"{type(error).__name__}: {error}"
        with contextlib.suppress(SandboxError):
            await self.sibling.close()
        await self._new_sibling()
        return [f"a sibling session was hurt ({when}): {fault}"]

    def _host_faults(self, attack: Attack, memory: int, fds: int) -> Iterator[str]:
        if self.victim.poll() is not None:
            yield "a process of the host was killed"
        elif "T" in Path(f"/proc/{self.victim.pid}/stat").read_text().rpartition(")")[2].split()[0]:
            yield "a process of the host was stopped"
            os.kill(self.victim.pid, 18)
        if Path(self.key_file).read_text() != self.secrets["file"]:
            yield "a file of the host was changed"
            Path(self.key_file).write_text(self.secrets["file"])
        if self.listeners.heard:
            yield f"it was heard outside: {', '.join(self.listeners.heard)}"
        grown = watch.memory_mb("VmHWM") - memory
        if grown > attack.host_mb:
            yield f"the host grew by {grown} MB, where {attack.host_mb} are allowed"
        more = len(watch.open_descriptors()) - fds
        if more > _STRAY_FDS:
            yield f"the host has {more} more open files"
        if left := marked_processes():
            yield f"processes are left: {left}"
            for pid in left:
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)

    def left_over(self) -> list[str]:
        """Processes and descriptors that exist at the end but did not exist at the beginning."""
        processes, fds = self.before
        watch.reap_orphans(processes)
        faults = [
            f"process {pid} is left"
            for pid in watch.descendants(os.getpid()) - processes - {self.victim.pid}
        ]
        found = watch.open_descriptors()
        if len(found) > fds:
            faults.append(f"{len(found) - fds} descriptors are left, of: {sorted(found)}")
        return faults


MARK = "by-attack"
"""The name that attacks give to processes they make."""


def marked_processes(patience_s: float = 10.0) -> list[int]:
    """Processes that an attack created and that did not end within a while."""
    until = time.monotonic() + patience_s
    while True:
        left = []
        for pid in watch.descendants(os.getpid()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().strip() == MARK:
                    left.append(pid)
        if not left or time.monotonic() >= until:
            return left
        time.sleep(0.02)


def ended(ran: CellResult) -> str:
    if ran.interrupted:
        return "interrupted"
    return "error" if ran.cell.error else "ran"
