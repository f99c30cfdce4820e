"""Process provider only: what a session inherits, what outlives it, and the fork server that it
comes from."""

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError, SandboxError, SessionDied
from ramify.sandbox.base import SandboxSpec, SharedContextValue, open_sandbox
from ramify.sandbox.host.process_transport import ForkedSessionTransport
from ramify.sandbox.providers.process import ProcessSandbox

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


async def answer(name: str, args: Any, kwargs: Any) -> Any:
    return args


def with_sandbox(test: Callable[[ProcessSandbox], Awaitable[None]], **spec: Any) -> None:
    async def main() -> None:
        sandbox = ProcessSandbox(SandboxSpec(**spec))
        try:
            await test(sandbox)
        finally:
            await sandbox.close()

    asyncio.run(main())


async def value(session: Any, code: str) -> Any:
    cell = (await session.run(code, answer=answer)).cell
    assert cell.error is None, cell.error
    return cell.value


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state != "Z"


async def wait_until(fact: Callable[[], bool], timeout_s: float = 100.0) -> bool:
    end = time.monotonic() + timeout_s
    while not fact() and time.monotonic() < end:
        await asyncio.sleep(0.01)
    return fact()


def test_session_inherits_no_keys_descriptors_or_arguments_of_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    opened = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(opened, True)

    async def test(sandbox: ProcessSandbox) -> None:
        session = await sandbox.open()
        code = """
import os, sys
seen = open('/proc/self/environ').read() + open(f'/proc/{os.getppid()}/environ').read() + repr(dict(os.environ))
'sk-secret' in seen, sorted(n for n in os.listdir('/proc/self/fd') if int(n) < 256), os.getpid() == os.getsid(0)
"""
        # 3 is the descriptor that listing the folder needs
        assert await value(session, code) == "(False, ['0', '1', '2', '3'], True)"
        with pytest.raises(AssertionError, match="No module named 'ramify'"):
            await value(session, "import ramify")

    try:
        with_sandbox(test)
    finally:
        os.close(opened)


def test_close_leaves_no_process_and_no_file() -> None:
    pids: list[int] = []
    folders: list[str] = []

    async def test(sandbox: ProcessSandbox) -> None:
        session, other = await sandbox.open(), await sandbox.open()
        code = """
import os, subprocess, time
open('file', 'w').write('x')
inside = subprocess.Popen(['sleep', '60']).pid
outside = subprocess.Popen(['sleep', '60'], start_new_session=True).pid
r, w = os.pipe()
if os.fork() == 0:          # a daemon: its own session, its parent gone
    os.setsid()
    pid = os.fork()
    if pid: os.write(w, str(pid).encode()); os._exit(0)
    time.sleep(60); os._exit(0)
daemon = int(os.read(r, 20)); os.wait()
os.getpid(), inside, outside, daemon, os.getcwd()
"""
        *found, folder = msgspec.json.decode(
            (await value(session, code)).replace("(", "[").replace(")", "]").replace("'", '"')
        )
        assert all(is_alive(pid) for pid in found)
        assert os.listdir(folder) == ["file"]
        await session.close()
        assert await wait_until(lambda: not any(is_alive(pid) for pid in found))
        assert await wait_until(lambda: not os.path.exists(folder))
        pids.append(int(await value(other, "import os; os.getpid()")))
        folders.append(await value(other, "os.getcwd()"))

    with_sandbox(test)
    assert not is_alive(pids[0])
    assert not os.path.exists(os.path.dirname(folders[0].strip("'")))


def test_processes_and_files_vanish_with_killed_host(tmp_path: Path) -> None:
    script = tmp_path / "host.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio
        from ramify.sandbox.base import SandboxSpec, open_sandbox
        from ramify.sandbox.base import SharedContextValue
        async def answer(*a): print(*a[1], flush=True)
        async def main():
            sandbox = open_sandbox(SandboxSpec(provider="process", cell_s=60))
            sessions = [await sandbox.open(), await sandbox.open(context=SharedContextValue("x" * 2_000_000))]
            for session in sessions:
                await session.install("m", "__all__ = ['tell']\\ndef tell(*a): call_host('t', *a)")
            code = "import os, subprocess\\np = subprocess.Popen(['sleep', '60'], start_new_session=True)\\n"
            code += "tell(os.getpid(), os.getppid(), p.pid, os.path.dirname(os.getcwd()))\\nwhile True: pass"
            await asyncio.gather(*(session.run(code, answer=answer) for session in sessions))
        asyncio.run(main())
    """)
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env=environment
    ) as host:
        assert host.stdout is not None
        told = [host.stdout.readline().split() for _ in range(2)]
        host.kill()
    pids = [int(pid) for line in told for pid in line[:3]]
    assert asyncio.run(wait_until(lambda: not any(is_alive(pid) for pid in pids)))
    assert asyncio.run(wait_until(lambda: not os.path.exists(told[0][3])))


def test_unused_prelaunched_fork_server_ends_with_host() -> None:
    code = (
        "from ramify.sandbox import base; from ramify.sandbox.providers import process as p; "
        "s = base.SandboxSpec(provider='process'); "
        "p.launch(s); "
        "print(p._launched[s].folder)"
    )
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment, check=True
    )
    assert asyncio.run(wait_until(lambda: not os.path.exists(run.stdout.strip())))


def test_killed_fork_server_is_reported_and_replaced() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        session = await sandbox.open()
        os.kill(int(await value(session, "import os; os.getppid()")), signal.SIGKILL)
        with pytest.raises(SessionDied):
            await value(session, "import time; time.sleep(60)")
        assert await value(await sandbox.open(), "'alive'") == "'alive'"
        assert (
            await value(
                await sandbox.open(context=SharedContextValue("x" * 2_000_000)), "len(context)"
            )
            == "2000000"
        )

    with_sandbox(test)


def test_crashed_session_leaves_siblings_alive() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        context = SharedContextValue(["shared"] * 400_000)
        first, second = await sandbox.open(context=context), await sandbox.open(context=context)
        with pytest.raises(SessionDied, match="SIGKILL"):
            await value(first, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
        assert await value(second, "len(context)") == "400000"
        third = await sandbox.open(context=context)
        assert await value(third, "context[-1]") == "'shared'"

    with_sandbox(test)


@pytest.mark.skipif(sys.platform != "linux", reason="sessions fork on Linux")
def test_branch_hello_before_host_continues_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    send = ForkedSessionTransport.request_fork

    def send_and_be_slow(transport: ForkedSessionTransport, frame: list[Any]) -> Any:
        sent = send(transport, frame)
        ours = sent[0].dup()
        ours.setblocking(True)
        ours.recv(1, socket.MSG_PEEK)  # wait for the hello of the branch
        ours.setblocking(False)
        ours.close()
        return sent

    async def test(sandbox: ProcessSandbox) -> None:
        session = await sandbox.open()
        await session.run("x = 1", answer=answer)
        assert await value(await session.fork(), "x") == "1"

    monkeypatch.setattr(ForkedSessionTransport, "request_fork", send_and_be_slow)
    with_sandbox(test)


def test_sessions_outlive_their_retired_template() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        sessions = []
        for number in range(10):
            context = SharedContextValue(f"{number}" * 2_000_000)
            sessions.append(await sandbox.open(context=context))
            del context
        template = int(await value(sessions[0], "import os; os.getppid()"))
        assert [await value(session, "context[:2]") for session in sessions] == [
            repr(str(n) * 2) for n in range(10)
        ]
        assert is_alive(template)
        await sessions[0].close()
        assert await wait_until(lambda: not is_alive(template))

    with_sandbox(test)


def test_template_retired_during_start_still_serves_waiters() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        contexts = [SharedContextValue(f"{number:02}" * 1_000_000) for number in range(20)]
        sessions = await asyncio.gather(*(sandbox.open(context=each) for each in contexts))
        assert await asyncio.gather(*(value(each, "context[:2]") for each in sessions)) == [
            repr(f"{number:02}") for number in range(20)
        ]

    with_sandbox(test)


def test_packages_of_the_host_are_importable_on_request() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        session = await sandbox.open()
        assert await value(session, "import sys; 'msgspec' in sys.modules") == "True"
        assert await value(session, "import msgspec; msgspec.json.decode(b'[1]')") == "[1]"

    with_sandbox(test, packages=("msgspec",))


def test_failing_package_import_names_the_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fragile.py").write_text("raise ValueError('not here')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SandboxError, match="'fragile' cannot be imported: ValueError: not here"):
        with_sandbox(lambda sandbox: sandbox.open(), packages=("fragile",))  # type: ignore[arg-type, return-value]


def test_many_sessions_open_at_once() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        sessions = await asyncio.gather(*(sandbox.open(seed=str(n)) for n in range(40)))
        codes = [value(session, f"x = {n}\nx") for n, session in enumerate(sessions)]
        assert await asyncio.gather(*codes) == [str(n) for n in range(40)]
        assert len({session.pid for session in sessions}) == 40

    with_sandbox(test)


def test_cancelled_open_leaks_no_descriptors() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        await (await sandbox.open()).close()
        before = set(os.listdir("/proc/self/fd"))
        for wait in (0, 0.001, 0.002, 0.004):
            task = asyncio.ensure_future(sandbox.open())
            await asyncio.sleep(wait)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await (await task).close()
        assert await wait_until(
            lambda: set(os.listdir("/proc/self/fd")) <= before
        )  # the first session may still have been closing
        assert await value(await sandbox.open(), "1") == "1"

    with_sandbox(test)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: open_sandbox(SandboxSpec(provider="proces")),
            ConfigError,
            "did you mean 'process'",
        ),
        (lambda: SandboxSpec(cell_s=0), ConfigError, "cell_s is 0: give a positive number"),
        (lambda: SandboxSpec(grace_s=-1), ConfigError, "grace_s is -1"),
        (lambda: SandboxSpec(max_output_bytes=0), ConfigError, "max_output_bytes is 0"),
        (lambda: SandboxSpec(memory_bytes=1 << 20), ConfigError, "too little for a Python session"),
        (
            lambda: open_sandbox(SandboxSpec(provider="process", packages=("nothere",))),
            ConfigError,
            "no package 'nothere'; install it into the environment of",
        ),
        (
            lambda: open_sandbox(SandboxSpec(provider="process", packages=("PyYAML_x",))),
            ConfigError,
            "no package",
        ),
        (lambda: SharedContextValue(object()), SandboxError, "a value of type object at value"),
    ],
)
def test_invalid_options_are_named(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as caught:
        make()
    assert message in str(caught.value)


def test_closed_sandbox_refuses_to_open() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        await sandbox.close()
        with pytest.raises(SandboxError, match="closed"):
            await sandbox.open()

    with_sandbox(test)


def test_time_limit_runs_while_another_thread_waits_for_host() -> None:
    async def test(sandbox: ProcessSandbox) -> None:
        asked = asyncio.Event()

        async def never(name: str, args: Any, kwargs: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

        session = await sandbox.open()
        await session.install("ask", "ask = lambda: call_host('ask')\n__all__ = ['ask']")
        start = "import threading\nthreading.Thread(target=ask, daemon=True).start()\n"
        busy = await session.run(start + "while True: pass", answer=never, timeout_s=0.5)
        assert busy.interrupted == "time"
        # While every thread waits for the host, no time is counted. The time before that is, and
        # on a busy machine the first limits may pass before the host is asked.
        for timeout_s in (0.2, 2.0, 20.0):
            asked.clear()
            waiting = asyncio.ensure_future(session.run("ask()", answer=never, timeout_s=timeout_s))
            asking = asyncio.ensure_future(asked.wait())
            await asyncio.wait([asking, waiting], return_when=asyncio.FIRST_COMPLETED)
            asking.cancel()
            if not waiting.done():
                break
        assert not await wait_until(waiting.done, 3 * timeout_s)
        session.interrupt("enough")
        assert (await waiting).interrupted == "enough"

    with_sandbox(test)
