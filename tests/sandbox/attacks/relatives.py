"""Attacks of a session on its own branches, and of a branch on its origin."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from attacks.base import attack
from attacks.branches import fork
from attacks.sharing import cell, verdict_line
from ramify.errors import RamifyError

if TYPE_CHECKING:
    from attacks.arena import Arena

CALLS = r"""
import ctypes, mmap, os
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
def mapped(flags, fd=-1, prot=1):
    at = libc.mmap(None, 4096, prot, flags, fd, 0)
    if at in (None, 2 ** 64 - 1): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return at
def writable(at):
    if libc.mprotect(at, 4096, 3): raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return at
places = []
"""
WAYS = {
    "read-only, then writable": "places.append(writable(mapped(0x21)))",
    "closed, then writable": "places.append(writable(mapped(0x21, prot=0)))",
    "validated": "places.append(writable(mapped(0x23)))",
    "writable": "places.append(mapped(0x21, prot=3))",
    "mmap of Python": "places.append(ctypes.addressof(ctypes.c_char.from_buffer(mmap.mmap(-1, 4096))))",
    "of descriptor 1": "places.append(writable(mapped(1, 1)))",
    "of its files": """
for fd in range(3, 300):
    try: places.append(writable(mapped(1, fd)))
    except OSError: continue
""",
    "of its files, later": """
for fd in range(1, 300):
    try: places.append(mapped(1, fd))
    except OSError: continue
late = True
""",
    "of a file of its own": "f = open('kept', 'w+b'); f.write(bytes(4096)); f.flush()\nplaces.append(writable(mapped(1, f.fileno()))); f.close(); os.unlink('kept')",
}
WRITE = "if 'late' in vars(): places = [each for each in places if not libc.mprotect(each, 4096, 3)]\nfor each in places: ctypes.memmove(each + 2048, b'of a relative', 13)"
READ = "any(ctypes.string_at(each + 2048, 13) == b'of a relative' for each in places)"


async def shared_memory(arena: Arena, session: Any) -> str:
    """Memory that is mapped before a fork, in every possible way, and written by one process after
    it."""

    async def one(name: str, code: str) -> str:
        other = await arena.session()
        said = await cell(other, CALLS + code)
        branch = await fork(arena, other)
        if isinstance(branch, str):
            return verdict_line(name, "mapped" not in branch and "close" not in branch, branch)
        seen = []
        for writer, reader in ((branch, other), (other, branch)):
            await cell(writer, WRITE)
            seen.append(await cell(reader, READ))
        return verdict_line(name, seen != ["False", "False"], (seen, said[-80:]))

    return "".join([await one(name, code) for name, code in WAYS.items()])


attack(
    "memory mapped before a fork",
    "branches",
    act=shared_memory,
    needs_fork=True,
    without_walls="unsafe",
    tries=9,
)


async def views_of_output(arena: Arena, session: Any) -> str:
    """Views of the session's files that its branch still has."""
    await cell(
        session,
        CALLS
        + "views = []\nfor fd in range(1, 300):\n    try: views.append(mapped(1, fd))\n    except OSError: continue",
    )
    branch = await fork(arena, session)
    if isinstance(branch, str):
        return verdict_line("views of the session's files", False, branch)
    await cell(
        session,
        "print('a word of the origin ' * 10)\nos.write(1, b'a word of the "
        "origin')\ncall_host('echo', 'a word of the origin' * 5000)",
    )
    seen = await cell(
        branch,
        "sum(ctypes.string_at(each, 4096).count(b'word of the ' + b'origin') for each in views)",
    )
    return verdict_line("views of the session's files", seen != "0", seen)


attack(
    "views of a relative's output",
    "branches",
    act=views_of_output,
    needs_fork=True,
    without_walls="unsafe",
)

# Hooks: keep every open descriptor, in each process, by hidden copies.
KEEP = r"""
import ctypes, fcntl, os, resource
kept = []
def keep(where):
    resource.setrlimit(resource.RLIMIT_NOFILE, (264, 264))
    for fd in (*range(3, 30), *range(250, 264)):
        try: kept.append(os.dup(fd))
        except OSError: continue
    try: kept.extend(os.pipe())
    except OSError: pass
"""
PYTHON = (
    KEEP
    + "os.register_at_fork(before=lambda: keep(0), after_in_parent=lambda: keep(1), after_in_child=lambda: keep(2))"
)
NATIVE = KEEP + (
    "hooks = [ctypes.CFUNCTYPE(None)(lambda n=n: keep(n)) for n in range(3)]\n"
    "getattr(libc, '__register_atfork')(*hooks, None)"
)
OPEN = r"""
import ctypes
kind, size = ctypes.c_int(), ctypes.c_uint32(4)
found = [fd for fd in range(3, 264) if libc.fcntl(fd, 1) >= 0]
[len(found), sum(libc.getsockopt(fd, 1, 3, ctypes.byref(kind), ctypes.byref(size)) == 0 for fd in found)]
"""


async def hooks_that_keep(arena: Arena, session: Any) -> str:
    """After the fork each process has its socket, its output and its shared buffers, and nothing
    else. The hooks do not run."""
    text = ""
    for name, code in {"of Python": PYTHON, "of the C library": NATIVE}.items():
        other = await arena.session()
        said = await cell(other, code)
        branch = await fork(arena, other)
        if isinstance(branch, str):
            text += verdict_line(f"hooks {name}", True, (branch, said))
            continue
        seen = [await cell(each, OPEN) for each in (other, branch)]
        kept = [await cell(each, "len(kept)") for each in (other, branch)]
        text += verdict_line(
            f"hooks {name}",
            seen != ["[3, 1]"] * 2 or kept != ["0", "0"] or "Error" in said,
            (seen, kept, said),
        )
    return text


attack(
    "hooks that keep a relative's wire",
    "branches",
    act=hooks_that_keep,
    needs_fork=True,
    without_walls="unsafe",
)

FORGE = r"""
import json, os, socket, struct, threading, time
def forge():
    text = json.dumps({"op": "call", "id": 7777, "name": "forged", "value": [[], {}]}).encode()
    data = struct.pack("<IBI", 5 + len(text), 1, len(text)) + text
    end = json.dumps({"op": "done", "id": 9, "value": "'forged'", "error": None, "restored": [], "note": None, "chars": 0}).encode()
    data += struct.pack("<IBI", 5 + len(end), 1, len(end)) + end
    for fd in range(250, 264):  # not on the wires that a branch may be given
        try: socket.socket(fileno=os.dup(fd)).send(data)
        except OSError: continue
def hook():
    forge()
    LAST
"""


async def forged(arena: Arena, session: Any) -> str:
    """A branch that writes to the inherited socket before it is a branch, pretending to be the
    session that waits for an answer."""

    async def one(last: str) -> str:
        other, heard = await arena.session(), list[str]()
        gate, asked = asyncio.Event(), asyncio.Event()

        async def answers(name: str, args: Any, kwargs: Any) -> Any:
            heard.append(name)
            asked.set()
            await gate.wait()
            return "true"

        await cell(other, FORGE.replace("LAST", last) + "os.register_at_fork(after_in_child=hook)")
        running = asyncio.ensure_future(other.run("call_host('wait')", answer=answers))
        await asyncio.wait_for(asked.wait(), 30)
        branch = await fork(arena, other)
        gate.set()
        try:
            value = str((await asyncio.wait_for(running, 30)).cell.value)
        except RamifyError as error:
            value = f"{type(error).__name__}: {error}"
        said = (heard, value, str(branch)[:60])
        return verdict_line(
            f"frames of a branch, then {last}", heard != ["wait"] or value != "'true'", said
        )

    return "".join(await asyncio.gather(one("return"), one("time.sleep(60)")))


attack(
    "frames forged on the wire of a relative",
    "branches",
    act=forged,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=60,
)


async def concurrent_forks(arena: Arena, session: Any) -> str:
    """Many concurrent forks are one process each, and none takes another's place."""
    from attacks.arena import marked_processes

    await cell(session, "libc.prctl(15, b'by-attack', 0, 0, 0)\nx = [0]")
    others = [await fork(arena, session) for _ in range(3)]
    found = await asyncio.gather(*(fork(arena, each) for each in [session, *others] * 6))
    bad = [each for each in found if isinstance(each, str)]
    marked = len(marked_processes(patience_s=0))
    tries = "attempt('one more', lambda: os.fork() or os._exit(0))"
    more = [await cell(each, f"import os\n{tries}") for each in [session, *others, *found[:4]]]
    return (
        verdict_line("forks refused", bad, bad)
        + verdict_line("processes", marked > 4 + len(found), marked)
        + "\n".join(more)
    )


attack(
    "forks of a whole tree at once",
    "branches",
    act=concurrent_forks,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=60,
)


async def sockets_taken_by_code(arena: Arena, session: Any) -> str:
    """Code makes the system call that hands over sockets: before, during and after a fork."""
    ask = "libc.syscall.restype = ctypes.c_long\ndef ask():\n    got = libc.syscall(ctypes.c_long(187 if os.uname().machine == 'x86_64' else 213), ctypes.c_long(256))\n    if got < 0: raise OSError(ctypes.get_errno(), 'refused')\n    return got\n"
    text = await cell(session, f"import ctypes, os\n{ask}attempt('before', ask)")
    branch = await fork(arena, session)
    for each in (session, branch):
        text += (
            verdict_line("no branch", True, branch)
            if isinstance(each, str)
            else await cell(each, "attempt('after', ask)")
        )
    other = await arena.session()
    took = "took = []\ndef twice():\n    for _ in range(3):\n        try: took.append(ask())\n        except OSError: pass\nos.register_at_fork(after_in_child=twice, before=twice)"
    await cell(other, f"import ctypes, os\n{ask}{took}")
    branch = await fork(arena, other)
    said = [
        await cell(each, "1 + 1") if not isinstance(each, str) else each for each in (other, branch)
    ]
    return text + verdict_line("the session after it", said[0] != "2", said)


attack(
    "wires taken by code",
    "branches",
    act=sockets_taken_by_code,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=60,
)
