"""Conformance checks: what a session cannot reach."""

from __future__ import annotations

import asyncio

import msgspec

from ramify.errors import SessionDied
from ramify.sandbox.conformance.base import (
    ConformanceError,
    SandboxProbe,
    check,
    clean,
    echo,
    same,
    true,
    values,
)


@check("the host's environment is not visible", "full_python", "kill")
async def environment(probe: SandboxProbe) -> None:
    import os

    [cell] = clean(
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
    true(not foreign, f"it sees {sorted(foreign)}")
    true(
        (cell.value or "").endswith("], [], '')"),
        f"its folder or its standard input is not empty: {cell.value}",
    )


@check("no descriptor of the host is inherited", "full_python", "kill")
async def descriptors(probe: SandboxProbe) -> None:
    code = """
import os
def kind(n):
    try: return os.readlink(f'/proc/self/fd/{n}')
    except OSError: return None
opened = {n: kind(n) for n in range(3, 4096)} if os.path.isdir('/proc/self/fd') else {}
own = ('/memfd:ramify-output (deleted)', '/memfd:ramify-shelf (deleted)')
sorted(k.split(':')[0] for k in opened.values() if k and k not in own)
"""
    [cell] = clean(await probe.cells(code))
    true(cell.value in ("[]", "['socket']"), f"open descriptors: {cell.value}")


@check("files of the host are out of reach", "isolates_files")
async def files(probe: SandboxProbe) -> None:
    """A container has its own files at the usual paths; none of them may be the host's."""
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
        same(values(await probe.cells(code)), [str([False] * len(paths))])


@check("the network is out of reach", "full_python", "isolates_network")
async def network(probe: SandboxProbe) -> None:
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
        same(values(await probe.cells(code)), ["True"])


@check("other processes are out of reach", "full_python", "isolates_processes")
async def processes(probe: SandboxProbe) -> None:
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
    same(values(await probe.cells(code)), ["(True, True)"])


@check("a closed session has ended")
async def closes(probe: SandboxProbe) -> None:
    session = await probe.open()
    await session.close()
    await session.close()
    try:
        await session.run("1", answer=echo)
    except SessionDied:
        return
    raise ConformanceError("a closed session answered")
