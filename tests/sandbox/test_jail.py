"""Jail only: its tiers, its system call filter, what it exposes of the host, and its cleanup."""

import asyncio
import ctypes
import ctypes.util
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import jail_tiers as tiers
import pytest
from other_user import AS_NOBODY, VERSION, own_path, readable

from ramify.errors import ConfigError, SandboxError, SessionDied
from ramify.sandbox.base import JailSpec, SandboxSpec, SharedContextValue, open_sandbox
from ramify.sandbox.host.process_transport import pid_of_pidfd
from ramify.sandbox.jail import seccomp_requests
from ramify.sandbox.providers.jail import WEAKER, JailSandbox, launch, launched, probe
from ramify.sandbox.providers.process import ProcessSandbox
from tests.sandbox.jail_helpers import (
    answer,
    descendants,
    error,
    is_running,
    value,
    with_jail,
)

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="THE JAIL IS NOT TESTED HERE: it needs Linux"
)


"""Code that cannot be interrupted."""


# ------------------------------------------------------------------------------------------------
# tiers


def test_other_user_reads_copy_of_private_checkout(tmp_path: Path) -> None:
    """Without the copy, every test as this user would be skipped."""
    if os.geteuid() != 0:
        pytest.skip("only root can become another user")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    for name, folder in zip(("package", "tests"), own_path(), strict=False):
        (closed / name).symlink_to(folder)
    copied = readable((str(closed / "package"), str(closed / "tests"), *own_path()[2:]))
    if copied is None:
        pytest.skip(f"NOT TESTED AS ANOTHER USER: no {VERSION} that another user can run")
    done = subprocess.run(
        [copied.python, "-c", "import os, ramify; print(os.getuid(), ramify.__file__)"],
        cwd="/",
        env={"PYTHONPATH": os.pathsep.join(copied.path), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=True,
        **AS_NOBODY,
    )
    assert done.stdout == f"65534 {copied.path[0]}/ramify/__init__.py\n"
    assert str(closed) not in copied.path[0]


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_conformance_checks_pass_for_ordinary_user(tier: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("these tests run as an ordinary user anyway")
    other = readable()
    if other is None:
        pytest.skip(f"NOT TESTED AS AN ORDINARY USER: no {VERSION} that another user can run")
    done = subprocess.run(
        [other.python, "-P", str(other.tests / "jail_tiers.py"), tier],
        cwd="/",
        capture_output=True,
        env={"PYTHONPATH": os.pathsep.join(other.path), "PYTHONDONTWRITEBYTECODE": "1"},
        **AS_NOBODY,
    )
    assert done.returncode == 0, done.stderr.decode()[-2000:]
    found = json.loads(done.stdout)
    if found["tier"] != tier:
        pytest.skip(
            f"TIER {tier} IS NOT TESTED AS AN ORDINARY USER: the kernel gives {found['tier']}"
        )
    assert found == {"uid": 65534, "tier": tier, "broken": []}


def test_weaker_tier_than_requested_is_refused_with_remedy() -> None:
    if why := tiers.why_not("C"):
        pytest.skip(why)
    with pytest.raises(
        SandboxError,
        match=r"does not reach tier B .*tier B: no Landlock.*lsm=landlock.*allow_weaker",
    ):
        JailSandbox(JailSpec(), deny=tiers.WITHOUT["C"])
    weaker = JailSandbox(JailSpec(allow_weaker=True), deny=tiers.WITHOUT["C"])
    assert weaker.warning == WEAKER["C"]
    assert weaker.reached.tier == "C"


def test_unsupported_platform_is_refused_unless_allow_weaker(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(SandboxError, match=r"needs Linux and this is darwin.*allow_weaker"):
        open_sandbox(SandboxSpec(provider="jail"))
    assert type(open_sandbox(SandboxSpec(provider="jail", allow_weaker=True))) is ProcessSandbox


def test_root_becomes_unprivileged_user_inside() -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        assert await value(session, "import os; os.getuid() != 0 and os.geteuid() != 0") == "True"
        status = Path(f"/proc/{pid_of_pidfd(session.pidfd)}/status").read_text()
        lines = dict(line.split(":\t", 1) for line in status.splitlines() if ":\t" in line)
        assert lines["Uid"].split()[0] != "0"
        assert (lines["CapEff"], lines["CapPrm"], lines["NoNewPrivs"], lines["Seccomp"]) == (
            "0" * 16,
            "0" * 16,
            "1",
            "2",
        )

    for tier in tiers.TIERS:
        with_jail(test, tier)


def test_probe_result_is_cached() -> None:
    assert probe(tiers.WITHOUT["C"]) is probe(tiers.WITHOUT["C"])


# ------------------------------------------------------------------------------------------------
# the system call filter


@pytest.mark.parametrize(
    ("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)]
)
def test_system_call_tables_match_libseccomp(machine: str, architecture: int) -> None:
    path = ctypes.util.find_library("seccomp")
    if path is None:
        pytest.skip("THE TABLES ARE NOT CHECKED HERE: no libseccomp")
    code = f"""
import importlib.util, json, sys
def load(name, path):
    spec = importlib.util.spec_from_file_location(name, path)
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
folder = {str(Path(seccomp_requests.__file__).parent)!r}
load("ramify_jail_seccomp_requests", folder + "/seccomp_requests.py")
load("ramify_jail_primitives", folder + "/primitives.py")
s = load("ramify_jail_seccomp", folder + "/seccomp.py")
table = s._ANYWHERE + s._WITH_PATHS + s._FILTERED
print(json.dumps([s.syscall_numbers(table, {machine!r}), len(s.filter_for({machine!r}, paths=True, changes=True)) // 8]))
"""
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, check=True)
    numbers, steps = json.loads(done.stdout)
    resolve = ctypes.CDLL(path).seccomp_syscall_resolve_name_arch
    resolve.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
    assert {name: resolve(architecture, name.encode()) for name in numbers} == numbers
    assert len(numbers) > 100
    assert steps < 500


def test_unusual_system_calls_fail_harmlessly() -> None:
    code = """
import ctypes, mmap, resource, socket
libc = ctypes.CDLL(None, use_errno=True)
def call(*numbers):
    return (libc.syscall(*numbers), ctypes.get_errno())
def fails(f, *a):
    try: f(*a)
    except (OSError, ValueError) as e: return getattr(e, 'errno', 0) or type(e).__name__
calls = [call(n, 0, 0, 0, 0, 0, 0) for n in (41, 62, 101, 155, 165, 272, 298, 308, 310, 317, 321, 323, 425, 438)]
raised = fails(resource.setrlimit, resource.RLIMIT_CPU, (1 << 30, 1 << 30))
(set(calls), fails(socket.socket), fails(mmap.mmap, -1, 4096), raised,
 call(435, 0, 0), mmap.mmap(-1, 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS).close())
"""
    if os.uname().machine != "x86_64":
        pytest.skip("written with the numbers of x86_64")

    async def test(jail: JailSandbox) -> None:
        assert (
            await value(await jail.open(), code)
            == "({(-1, 1)}, 1, 1, 'ValueError', (-1, 38), None)"
        )

    with_jail(test)


# ------------------------------------------------------------------------------------------------
# files and packages exposed to a session


def test_mount_is_read_only_at_requested_path(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(parent.stat().st_mode | 0o055)

    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        assert await value(session, "open('/data/notes.txt').read()") == "'hello'"
        assert "Read-only" in await error(session, "open('/data/notes.txt', 'w')")
        assert "Read-only" in await error(session, "open('/data/new', 'w')")

    with_jail(test, mounts=((str(tmp_path), "/data"),))


@pytest.mark.parametrize(
    ("mounts", "message"),
    [
        ((("/no/such", "/data"),), "'/no/such' does not exist"),
        ((("/", "/data"),), "'/' may not be mounted"),
        ((("/proc/self", "/data"),), "'/proc/self' may not be mounted"),
        (((".", "data"),), "cannot be mounted at 'data'"),
        (((".", "/a/../b"),), "cannot be mounted at"),
    ],
)
def test_invalid_mount_is_named(mounts: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_sandbox(JailSpec(mounts=mounts))


@pytest.mark.parametrize("tier", ["B", "C"])
def test_weaker_tiers_refuse_mount_at_another_path(tier: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"reaches tier {tier}, .* cannot be mounted at '/data'"):
        tiers.open_jail(JailSpec(tier=tier, mounts=((str(tmp_path), "/data"),)))


def test_memory_limit_above_machine_memory_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"all_memory_bytes is .* more than the .* bytes of this machine"
    ):
        open_sandbox(JailSpec(all_memory_bytes=1 << 50))


def test_session_folder_is_private_and_size_limited() -> None:
    async def test(jail: JailSandbox) -> None:
        first, second = await jail.open(), await jail.open()
        assert (
            await value(
                first,
                "import os, tempfile; open('f', 'w').write('x'); os.getcwd() == "
                "tempfile.gettempdir()",
            )
            == "True"
        )
        assert await value(second, "import os; os.listdir('.')") == "[]"
        assert "No space left" in await error(
            first, "open('big', 'wb', 0).write(bytes(4 << 20))\nopen('b2', 'wb', 0).write(b'1')"
        )
        assert "Read-only" in await error(first, "open('/outside', 'w')")

    with_jail(test, files_bytes=1 << 20)


def test_file_may_be_as_large_as_the_folder() -> None:
    async def test(jail: JailSandbox) -> None:
        code = "import os\nwith open('f', 'wb') as f: f.truncate(300 << 20)\nos.path.getsize('f')"
        assert await value(await jail.open(), code) == str(300 << 20)

    with_jail(test, files_bytes=512 << 20)


def test_packages_of_the_host_are_importable_on_request() -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        assert await value(session, "import msgspec; msgspec.json.decode(b'[1]')") == "[1]"

    for tier in tiers.TIERS:
        with_jail(test, tier, packages=("msgspec",))


def test_unrequested_host_package_is_not_importable() -> None:
    async def test(jail: JailSandbox) -> None:
        assert "No module named 'msgspec'" in await error(await jail.open(), "import msgspec")

    with_jail(test)


# ------------------------------------------------------------------------------------------------
# branches


def test_fork_makes_files_read_only_for_both_sessions() -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        await value(session, "f = open('kept', 'w'); f.write('x')")
        with pytest.raises(SandboxError, match="close"):
            await session.fork()
        await value(session, "f.close()")
        branch = await session.fork()
        for each in (session, branch):
            assert await value(each, "open('kept').read()") == "'x'"
            assert "Read-only" in await error(each, "open('kept', 'a')")

    with_jail(test)


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_only_host_can_create_processes(tier: str) -> None:
    async def test(jail: JailSandbox) -> None:
        session = await jail.open()
        branch = await session.fork()
        for each in (session, branch):
            assert "not permitted" in await error(each, "import os\nos.fork()")
        await branch.close()
        assert "not permitted" in await error(
            session, "for _ in range(50):\n    try: os.fork()\n    except OSError: pass\nos.fork()"
        )

    with_jail(test, tier)


def test_close_tree_ends_every_branch() -> None:
    async def test(jail: JailSandbox) -> None:
        before = descendants(os.getpid())
        root = await jail.open()
        tree = [root]
        for _ in range(2):
            tree += [await each.fork() for each in [*tree]]
        assert len(descendants(os.getpid()) - before) >= len(tree)
        await tree[-1].close_tree()
        for each in tree:
            with pytest.raises(SessionDied):
                await each.run("1", answer=answer)

    with_jail(test, pool=0)


# ------------------------------------------------------------------------------------------------
# cleanup


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_closed_jail_leaves_no_processes_mounts_or_descriptors(tier: str) -> None:
    async def life(jail: JailSandbox, context: SharedContextValue) -> None:
        for index in range(6):
            session = await jail.open(context=context if index % 2 else None)
            await value(session, "1")
            await (await session.fork()).close()
            await session.close()

    async def main() -> None:
        context = SharedContextValue("x" * (2 << 20))
        jail = tiers.open_jail(JailSpec(tier=tier))
        await life(jail, context)
        await asyncio.sleep(0.2)
        fds = len(os.listdir("/proc/self/fd"))
        await life(jail, context)
        until = time.monotonic() + 100
        while len(os.listdir("/proc/self/fd")) > fds:
            assert time.monotonic() < until, os.listdir("/proc/self/fd")
            await asyncio.sleep(0.02)
        await jail.close()

    def there() -> tuple[set[int], int, int]:
        mounts = Path("/proc/self/mounts").read_text().splitlines()
        return descendants(os.getpid()), len(mounts), len(os.listdir("/proc/self/fd"))

    before = there()
    asyncio.run(main())
    until = time.monotonic() + 100  # killed processes may need a moment
    while (after := there()) != before and time.monotonic() < until:
        time.sleep(0.02)
    assert after == before


@pytest.mark.parametrize("tier", tiers.TIERS)
def test_killed_host_takes_all_sessions_with_it(tier: str, tmp_path: Path) -> None:
    if why := tiers.why_not(tier):
        pytest.skip(why)
    script = tmp_path / "host.py"
    script.write_text(
        textwrap.dedent("""
        import asyncio, sys, time
        import jail_tiers as tiers
        from ramify.sandbox.base import JailSpec
        async def answer(name, args, kwargs): return None
        async def main():
            jail = tiers.open_jail(JailSpec(tier=sys.argv[1]))
            session = await jail.open()
            branch = await session.fork()
            running = [asyncio.ensure_future(s.run("while True: pass", answer=answer)) for s in (session, branch)]
            await asyncio.sleep(.1)
            print("up", flush=True)
            await asyncio.gather(*running)
        asyncio.run(main())
        """)
    )
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[2])])
    }
    with subprocess.Popen(
        [sys.executable, script, tier], stdout=subprocess.PIPE, text=True, env=environment
    ) as host:
        assert host.stdout is not None
        assert host.stdout.readline() == "up\n"
        started = descendants(host.pid)
        assert len(started) >= 3
        host.send_signal(signal.SIGKILL)
    end = time.monotonic() + 100
    while time.monotonic() < end and any(is_running(pid) for pid in started):
        time.sleep(0.02)
    assert [pid for pid in started if is_running(pid)] == []


def test_prelaunched_zygote_is_used_and_ends() -> None:
    spec = JailSpec(cell_s=77.0)
    launch(spec)
    pid = launched[spec].process.pid

    async def main() -> None:
        jail = open_sandbox(spec)
        open_sandbox(spec)  # opened, but never used
        session = await jail.open()
        assert await value(session, "1 + 1") == "2"
        assert spec not in launched
        await jail.close()

    asyncio.run(main())
    assert not is_running(pid)
