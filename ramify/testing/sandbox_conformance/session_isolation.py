"""Conformance checks of isolation: what sessions share, and which host resources they cannot reach.

Sessions share contexts and forks.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import SharedContextValue
from ramify.testing.sandbox_conformance.base import (
    ConformanceError,
    SandboxUnderTest,
    answer_host_call,
    assert_no_errors,
    assert_same,
    assert_true,
    cell_values,
    open_with_host,
    register_check,
)


@register_check("a context is bound, reserved and complete", "full_python")
async def check_context_binding(probe: SandboxUnderTest) -> None:
    for value in (
        "short é\ud800",
        {"a": [1, (2, "b")], 3: "c"},
        ["line é"] * 300_000,
        "long é " * 400_000,
    ):
        context = SharedContextValue(value)
        session = await probe.open(context=context)
        assert_same(await session.get("context"), value)
        ran = await probe.cells("context = None", "type(context).__name__", session=session)
        assert_same((ran[0].restored, ran[1].value), (("context",), repr(type(value).__name__)))
        assert_same(SharedContextValue.from_encoded(context.buffer()).digest, context.digest)


@register_check("sessions over a context share its memory", "shares_context")
async def check_context_is_not_copied(probe: SandboxUnderTest) -> None:
    context = SharedContextValue("some text of some length " * 2_000_000)
    sessions = [await probe.open(context=context) for _ in range(3)]
    code = """
def private():
    try:
        lines = open('/proc/self/smaps_rollup')
        return sum(int(line.split()[1]) for line in lines if line.startswith('Private')) * 1024
    except OSError: return 0
context.count('text'), private()
"""
    for session in sessions:
        [cell] = assert_no_errors(await probe.cells(code, session=session))
        count, private = (int(part) for part in (cell.value or "").strip("()").split(","))
        assert_true(count == 2_000_000 and private < 20 << 20, f"{private:,} private bytes")


@register_check("a branch and its origin are independent", "fork")
async def check_branching(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    await probe.cells("x = [1]\nprint('before')", session=session)
    branch = await session.fork()
    try:
        ran = await probe.cells("x.append(2)\nprint('branch')", "host('echo', x)", session=branch)
        assert_same((ran[0].stdout, ran[1].value), ("branch\n", "[1, 2]"))
        assert_same(cell_values(await probe.cells("x", session=session)), ["[1]"])
        draw = "import random\nrandom.random()"
        assert_same(
            cell_values(await probe.cells(draw, session=branch)),
            cell_values(await probe.cells(draw, session=session)),
        )
        await session.close()
        assert_same(cell_values(await probe.cells("x", session=branch)), ["[1, 2]"])
        ran2 = await branch.run("while True: pass", answer=answer_host_call, timeout_s=0.2)
        assert_same(ran2.interrupted, "time")
    finally:
        await branch.close_tree()


@register_check("a waiting cell continues in every branch", "fork")
async def check_branching_within_cell(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    has_called, first = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def later(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        has_called.set()
        return await first

    def always(value: str) -> Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]:
        async def answer(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return args[0] + value

        return answer

    code = "print('once')\ngot = [host('echo', f'{i}') for i in range(2)]\ngot"
    origin = asyncio.ensure_future(session.run(code, answer=later))
    await has_called.wait()
    branches = [await session.fork() for _ in range(2)]
    try:
        ran = await asyncio.gather(
            *(b.resume(answer=always(word)) for b, word in zip(branches, "ab", strict=True))
        )
        first.set_result("late")
        ran.append(await origin)
        assert_same(
            [result.cell.value for result in ran],
            ["['0a', '1a']", "['0b', '1b']", "['late', 'late']"],
        )
        assert_same([result.cell.stdout for result in ran], ["once\n"] * 3)
        assert_same(cell_values(await probe.cells("got", session=branches[0])), ["['0a', '1a']"])
    finally:
        await session.close_tree()


@register_check("a fork that would lose something is refused", "fork")
async def check_unsafe_forks_refused(probe: SandboxUnderTest) -> None:
    for code, sign in (
        (
            "import threading, time\nt = threading.Thread(target=time.sleep, args=(60,), "
            "daemon=True)\nt.start()",
            "threads",
        ),
        ("import os\nends = os.pipe()", "close them"),
    ):
        session = await probe.open()
        assert_no_errors(await probe.cells(code, session=session))
        try:
            await session.fork()
        except SandboxError as error:
            assert_true(sign in str(error), str(error))
        else:
            raise ConformanceError(f"the session was forked after {code!r}")
        assert_same(cell_values(await probe.cells("1", session=session)), ["1"])
    session = await probe.open()
    task = asyncio.ensure_future(session.run("import time; time.sleep(2)", answer=answer_host_call))
    await asyncio.sleep(0.05)
    try:
        await session.fork()
    except SandboxError as error:
        assert_true("working" in str(error), str(error))
    else:
        raise ConformanceError("the session was forked while it worked")
    await task


@register_check("the host's environment is not visible", "full_python", "kill")
async def check_environment_isolation(probe: SandboxUnderTest) -> None:
    import os

    [cell] = assert_no_errors(
        await probe.cells("""
import os, sys
try: found = sorted(os.listdir('.'))
except PermissionError: found = []
sorted(os.environ), found, sys.stdin.read()
""")
    )
    visible = set(
        msgspec.json.decode((cell.value or "").split("]")[0].lstrip("(").replace("'", '"') + "]")
    )
    allowed = {"LANG", "LC_CTYPE", "HOME", "TMPDIR", "PYTHONHASHSEED", "GLIBC_TUNABLES", "PATH"}
    foreign = {
        name
        for name in visible & set(os.environ)
        if name not in allowed and not name.endswith("_NUM_THREADS")
    }
    assert_true(not foreign, f"it sees {sorted(foreign)}")
    assert_true(
        (cell.value or "").endswith("], [], '')"),
        f"its folder or its standard input is not empty: {cell.value}",
    )


@register_check("no descriptor of the host is inherited", "full_python", "kill")
async def check_descriptor_isolation(probe: SandboxUnderTest) -> None:
    code = """
import os
def kind(n):
    try: return os.readlink(f'/proc/self/fd/{n}')
    except OSError: return None
opened = {n: kind(n) for n in range(3, 4096)} if os.path.isdir('/proc/self/fd') else {}
own = ('/memfd:ramify-output (deleted)', '/memfd:ramify-shared (deleted)')
sorted(k.split(':')[0] for k in opened.values() if k and k not in own)
"""
    [cell] = assert_no_errors(await probe.cells(code))
    assert_true(cell.value in ("[]", "['socket']"), f"open descriptors: {cell.value}")


@register_check("files of the host are out of reach", "isolates_files")
async def check_host_file_isolation(probe: SandboxUnderTest) -> None:
    """Check that code in a session cannot read files of the host.

    A container may have files at the same paths as the host, but they must be its own.
    """
    import os
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="ramify-secret-") as secret:
        secret.write("the host's own")
        secret.flush()
        paths = [
            secret.name,
            f"/proc/{os.getpid()}/environ",
            f"/proc/{os.getpid()}/cmdline",
            __file__,
        ]
        code = f"""
def reach(path):
    try:
        return bool(open(path).read(1))
    except OSError:
        return False
[reach(path) for path in {paths!r}]
"""
        assert_same(cell_values(await probe.cells(code)), [str([False] * len(paths))])


@register_check("the network is out of reach", "full_python", "isolates_network")
async def check_network_isolation(probe: SandboxUnderTest) -> None:
    server = await asyncio.start_server(lambda reader, writer: writer.close(), "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        code = f"""
import socket
try:
    r = socket.create_connection(('127.0.0.1', {port}), 1)
except OSError:
    r = None
r is None
"""
        assert_same(cell_values(await probe.cells(code)), ["True"])


@register_check("other processes are out of reach", "full_python", "isolates_processes")
async def check_process_isolation(probe: SandboxUnderTest) -> None:
    import os

    code = f"""
import os
def fails(f, *a):
    try:
        f(*a)
    except OSError:
        return True
fails(os.kill, {os.getpid()}, 0), {probe.sandbox.caps.starts_processes} or fails(os.fork)
"""
    assert_same(cell_values(await probe.cells(code)), ["(True, True)"])


@register_check("a closed session has ended")
async def check_use_after_close(probe: SandboxUnderTest) -> None:
    session = await probe.open()
    await session.close()
    await session.close()
    try:
        await session.run("1", answer=answer_host_call)
    except SessionDied:
        return
    raise ConformanceError("a closed session answered")
