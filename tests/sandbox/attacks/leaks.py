"""Attacks on what the kernel shares between sessions implicitly: locks, flags of descriptors, exit
codes, process numbers, the process at the other end of a socket."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from attacks.base import attack
from attacks.branches import fork
from attacks.sharing import cell, verdict_line

if TYPE_CHECKING:
    from attacks.arena import Arena

PAIR = {"without_walls": "unsafe"}


def channel(name: str, send: str, receive: str, quiet: str, *, branch: bool = False) -> None:
    """Register an attack: ``send`` is run in one session, ``receive`` in another one; its result
    must be ``quiet``, as it is before."""

    async def act(arena: Arena, session: Any) -> str:
        other = await (fork(arena, session) if branch else arena.session())
        if isinstance(other, str):
            return verdict_line(name, True, other)
        pairs = ((session, other), (other, session))
        text = ""
        for number, (sender, receiver) in enumerate(pairs):
            before = await cell(receiver, receive)
            said = await cell(sender, send)
            after = await cell(receiver, receive)
            is_seen = after != quiet if quiet else after != before
            text += verdict_line(f"{name} {number}", is_seen, (before, after, said[-100:]))
        return text

    attack(
        f"{name} of a {'relative' if branch else 'sibling'}",
        "branches" if branch else "siblings",
        act=act,
        needs_fork=branch,
        tries=2,
        **PAIR,  # type: ignore[arg-type]
    )


TRY = "def tried(act):\n    try: return act()\n    except Exception as error: return type(error).__name__\n"
LOCK = (
    TRY
    + "import fcntl, json, struct\nf = open(json.__file__) if tried(lambda: open(json.__file__)) != 'PermissionError' else None\n"
)
LOCKED = LOCK + (
    "def asked():\n"
    "    data = fcntl.fcntl(f, %s, struct.pack('hhqqi4x', fcntl.F_WRLCK, 0, 5, 1, 0))\n"
    "    return struct.unpack('hhqqi4x', data)[4]\n"
    "tried(asked) in (0, 'OSError', 'PermissionError', 'TypeError', 'AttributeError')"
)
TAKE = LOCK + "tried(lambda: fcntl.fcntl(f, %s, struct.pack('hhqqi4x', fcntl.F_RDLCK, 0, 5, 1, 0)))"
FLAGS = TRY + "import fcntl, os\n"
SETS = "[tried(lambda: fcntl.fcntl(%s, fcntl.F_SETFL, os.O_%s))]"
GETS = "fcntl.fcntl(%s, fcntl.F_GETFL) & os.O_%s"

for related in (False, True):
    channel("a lock on a library", TAKE % 6, LOCKED % 5, "True", branch=related)
    channel("a lock of a file description", TAKE % 37, LOCKED % 36, "True", branch=related)
    for number, stream in enumerate(("input", "output", "errors")):
        for flag in ("NONBLOCK", "APPEND") if number == 0 else ("NONBLOCK",):
            channel(
                f"the flag {flag} of standard {stream}",
                FLAGS + SETS % (number, flag),
                FLAGS + GETS % (number, flag),
                "",
                branch=related,
            )
    channel(
        "the place in standard output",
        "import os\nos.lseek(1, 12345, 0)",
        "import os\nos.lseek(1, 0, 1) == 12345",
        "False",
        branch=related,
    )
    channel(
        "the name of a process",
        "libc.prctl(15, b'by-attack', 0, 0, 0)",
        TRY
        + "import os\ntried(lambda: open(f'/proc/{os.getppid()}/comm').read()) in ('by-attack',)",
        "False",
        branch=related,
    )
    channel(
        "the number of a process",
        "import os\nos.getpid()",
        TRY + "import os\nme = os.getpid()\n[n for n in range(2, 400) if n != me and "
        "isinstance(tried(lambda: os.getsid(n)), int)]",
        "[]",
        branch=related,
    )
    channel(
        "signals of a process",
        TRY + "import os, signal\n[tried(lambda: os.kill(n, 0)) for n in range(2, 50)]",
        "import signal\nsorted(signal.sigpending())",
        "[]",
        branch=related,
    )

ENDS = {
    "waitpid": "tried(lambda: os.waitpid(-1, os.WNOHANG))",
    "waitid": "tried(lambda: os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT))",
    "waitid of stopped ones": "tried(lambda: os.waitid(os.P_ALL, 0, os.WSTOPPED | os.WNOHANG))",
    "SIGCHLD": "tried(lambda: signal.sigtimedwait([signal.SIGCHLD], 0.2))",
    "rusage of children": "resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss or None",
    "times of children": "(os.times().children_user + os.times().children_system) or None",
}


async def branch_end_seen_by_origin(arena: Arena, session: Any) -> str:
    """A branch that ends with a status, and what its origin can learn of that."""
    text = ""
    before = (
        TRY
        + "import os, resource, signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])"
    )
    for name, ask in ENDS.items():
        origin = await arena.session()
        await cell(origin, before)
        branch = await fork(arena, origin)
        if isinstance(branch, str):
            text += verdict_line(name, True, branch)
            continue
        await cell(branch, "import os\nsum(range(10 ** 6))\nos._exit(77)")
        await asyncio.sleep(0.05)
        seen = await cell(origin, TRY + f"got = {ask}\ngot")
        text += verdict_line(
            name, seen not in ("", "ChildProcessError", "'ChildProcessError'"), seen
        )
    return text


attack(
    "how a branch ends", "branches", act=branch_end_seen_by_origin, needs_fork=True, tries=6, **PAIR
)  # type: ignore[arg-type]


async def origin_end_seen_by_branch(arena: Arena, session: Any) -> str:
    """A branch must not learn that its origin has ended."""
    branch = await fork(arena, session)
    if isinstance(branch, str):
        return verdict_line("its parent", True, branch)
    ask = TRY + "import os\nos.getppid(), tried(lambda: os.getpgid(os.getppid()))"
    before = await cell(branch, ask)
    await cell(session, "import os\nos._exit(3)")
    await asyncio.sleep(0.1)
    after = await cell(branch, ask)
    return verdict_line("its parent", before != after, (before, after))


attack("how an origin ends", "branches", act=origin_end_seen_by_branch, needs_fork=True, **PAIR)  # type: ignore[arg-type]

# A patched runtime: the guest's own functions keep what the host has not given to it.
REWRITE = r"""
import ctypes, os, socket, sys
kept = []
__import__('gc').unfreeze()  # the guest is older than its process
guest = [o for o in __import__('gc').get_objects() if type(o).__name__ == 'SessionForker'][0]
apart = guest._apart
import ramify_guest.session_forking as own
own._closerange = os.closerange = lambda *a: None
primitives = sys.modules['ramify_jail_primitives']
"""
KEPT = {
    "a pipe": "kept += os.pipe()\n",
    "a pair of sockets": "kept += [each.detach() for each in socket.socketpair()]\n",
    "an event counter": "kept.append(os.eventfd(0))\n",
    "a timer": "kept.append(libc.timerfd_create(1, 0))\n",
    "an epoll": "kept.append(__import__('select').epoll().fileno())\n",
    "its own socket": "kept.append(os.dup(sock_fd()))\n",
    "its own output": "kept.append(os.dup(1))\n",
    "a library": "kept.append(os.open(os.__file__, 0))\n",
    "a high number": "import fcntl\nkept += [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in os.pipe()]\n",
}
PATCHES = {
    "nothing closed": "primitives._closerange = lambda *a: None\nguest._cannot_fork = lambda fds: None\n",
    "all but one closed": (
        "real = primitives._closerange\n"
        "def closing(low, high):\n"
        "    for fd in range(264):\n"
        "        if fd not in kept:\n"
        "            try: os.close(fd)\n"
        "            except OSError: pass\n"
        "primitives._closerange = closing\n"
    ),
    "opened by a signal": (
        "import signal\n"
        "def again(*_):\n"
        "    try: kept.extend(os.pipe())\n"
        "    except OSError: pass\n"
        "signal.signal(signal.SIGALRM, again)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.0005, 0.0005)\n"
    ),
}
ALL_OPEN = "sum(libc.fcntl(fd, 1) >= 0 for fd in range(3, 264)) if 'kept' in vars() else -1"


async def patched_runtime(arena: Arena, session: Any, patch: str, open_it: str) -> str:
    other = await arena.session()
    bypass = "type(guest)._cannot_fork = lambda self, fds: None\n"
    await cell(
        other,
        REWRITE
        + open_it
        + bypass
        + PATCHES[patch].replace("guest._cannot_fork = lambda fds: None\n", ""),
    )
    branch = await fork(arena, other)
    if isinstance(branch, str):
        return verdict_line(patch, "!" in branch, branch)
    stop = "import signal\nsignal.setitimer(signal.ITIMER_REAL, 0)\n" if "signal" in patch else ""
    write = stop + (
        "for fd in kept[1:]:\n    try: os.write(fd, b'of a relative')\n    except OSError: pass\n"
    )
    read = stop + (
        "found = []\n"
        "for fd in kept:\n"
        "    try: os.set_blocking(fd, False); found.append(os.read(fd, 100))\n"
        "    except OSError: pass\n"
        "[each for each in found if b'relative' in each]"
    )
    seen = []
    for writer, reader in ((branch, other), (other, branch)):
        await cell(writer, write)
        seen.append(await cell(reader, read))
    return verdict_line(patch, any("relative" in each for each in seen), seen)


for patch in PATCHES:
    for what, open_it in KEPT.items():

        async def act(
            arena: Arena, session: Any, patch: str = patch, open_it: str = open_it
        ) -> str:
            return await patched_runtime(arena, session, patch, open_it)

        attack(
            f"a runtime that keeps {what} across a fork: {patch}",
            "branches",
            act=act,
            needs_fork=True,
            timeout_s=40,
            **PAIR,  # type: ignore[arg-type]
        )

ODD = {
    "a number above all": "ctypes.c_ulong(2 ** 64 - 1)",
    "a number above 32 bits": "ctypes.c_ulong(1 << 40 | 256)",
    "a number beyond its limit": "ctypes.c_long(4000)",
    "the number of its output": "ctypes.c_long(1)",
}


async def odd_wire_numbers(arena: Arena, session: Any) -> str:
    """A runtime asks for its wire under numbers that the host does not expect. Only its own session
    may suffer."""
    loop, raised, text = asyncio.get_running_loop(), list[str](), ""
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: raised.append(str(context)))
    try:
        for what, number in ODD.items():
            other = await arena.session()
            asks = (
                "def odd(_):\n"
                "    primitives._closerange(0, 1 << 20)\n"
                "    asked = 187 if os.uname().machine == 'x86_64' else 213\n"
                f"    libc.syscall(ctypes.c_long(asked), {number})\n"
                "primitives.replace_all_descriptors = odd\n"
            )
            await cell(other, REWRITE + asks)
            said = str(await fork(arena, other))[:80]
            alive = await cell(session, "1 + 1")
            text += verdict_line(what, alive != "2" or bool(raised), (said, alive, raised))
    finally:
        loop.set_exception_handler(before)
    return text


attack(
    "a runtime that asks for its wire under odd numbers",
    "branches",
    act=odd_wire_numbers,
    needs_fork=True,
    timeout_s=60,
    **PAIR,  # type: ignore[arg-type]
)

attack(
    "the process at the other end of a socket",
    "descriptors",
    """
import ctypes, os, socket
def option(number, size):
    value, length = ctypes.create_string_buffer(size), ctypes.c_uint32(size)
    if libc.getsockopt(sock_fd(), 1, number, value, ctypes.byref(length)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return value.raw[:length.value]
for name, number, size in (('SO_PEERCRED', 17, 12), ('SO_PEERPIDFD', 77, 4), ('SO_PEERSEC', 31, 100), ('SO_PEERGROUPS', 59, 64), ('SO_PASSPIDFD', 76, 4), ('SO_COOKIE', 57, 8)):
    attempt(name, lambda: option(number, size))
attempt('a set option', lambda: socket.socket(fileno=os.dup(sock_fd())).setsockopt(1, 16, 1))
""",
    tries=7,
    without_walls="either",
)
attack(
    "urgent data on the wire",
    "descriptors",
    """
import os, socket
sock = socket.socket(fileno=os.dup(sock_fd()))
attempt('send', lambda: sock.send(b'x', socket.MSG_OOB))
attempt('sendmsg', lambda: sock.sendmsg([b'x'], [], socket.MSG_OOB))
attempt('recv', lambda: sock.recv(1, socket.MSG_OOB | socket.MSG_DONTWAIT))
attempt('recvmsg', lambda: sock.recvmsg(1, 0, socket.MSG_OOB | socket.MSG_DONTWAIT))
sock.detach()
""",
    tries=4,
    ends=("ran", "died"),
    without_walls="unsafe",
)
attack(
    "the places of other processes",
    "process reach",
    """
import ctypes
head, size = ctypes.c_void_p(), ctypes.c_size_t()
NUMBER = {'x86_64': 274, 'aarch64': 100}[__import__('os').uname().machine]
def robust(pid):
    if libc.syscall(ctypes.c_long(NUMBER), ctypes.c_long(pid), ctypes.byref(head), ctypes.byref(size)) < 0:
        raise OSError(ctypes.get_errno(), 'refused')
    return head.value
import os
for pid in (arena['host'], arena['victim'], os.getppid(), 1):
    attempt(f'the robust list of {pid}', lambda: robust(pid))
    attempt(f'the scheduling of {pid}', lambda: os.sched_getparam(pid))
""",
    tries=8,
    without_walls="reached",
)
attack(
    "flags of open that are not listed",
    "files",
    """
import os
path, folder = arena['key_file'], arena['folder']
for name, flags, where in (
    ('PATH', os.O_PATH, path), ('PATH of a folder', os.O_PATH | os.O_DIRECTORY, folder), ('NOATIME', 0o1000000, path),
    ('TMPFILE', os.O_TMPFILE | os.O_RDWR, folder), ('ASYNC', 0o20000, path), ('mode 3', 3, path), ('all bits', 0x7fffffff, path),
    ('a new bit', 1 << 30, os.__file__), ('PATH of a library', os.O_PATH, os.__file__),
):
    attempt(name, lambda: os.close(os.open(where, flags, 0o600)))
""",
    tries=9,
    without_walls="reached",
)


async def descriptors_in_flight(arena: Arena, session: Any) -> str:
    """One session keeps as many descriptors in flight as it can; another one must still open."""
    code = """
import array, os, socket
pairs, sent = [], 0
try:
    for _ in range(100):
        pair = socket.socketpair()
        pairs.append(pair)
        for _ in range(3):
            fds = array.array('i', [1] * 250)
            pair[0].sendmsg([b'x'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)], socket.MSG_DONTWAIT)
            sent += 250
except OSError as error:
    print(error)
sent
"""
    said = await cell(session, code)
    seen = await cell(await arena.session(), "6 * 7")
    branch = await fork(arena, session)
    return verdict_line(
        "others kept from opening", seen != "42" or "!" in str(branch), (seen, said)
    )


attack("descriptors in flight", "descriptors", act=descriptors_in_flight, **PAIR)  # type: ignore[arg-type]


async def lowered_file_limit(arena: Arena, session: Any) -> str:
    """A limit of open files below a descriptor that is kept across the fork."""
    await cell(
        session,
        "import fcntl, os, resource\nends = os.pipe()\n"
        "kept = [fcntl.fcntl(fd, fcntl.F_DUPFD, 200) for fd in ends]\n"
        "[os.close(fd) for fd in ends]\nresource.setrlimit(resource.RLIMIT_NOFILE, (20, 20))\n"
        + REWRITE.replace("kept = []", "")
        + "type(guest)._cannot_fork = lambda self, fds: None\nprimitives._closerange = lambda *a: None",
    )
    branch = await fork(arena, session)
    if isinstance(branch, str):
        return verdict_line("a pipe above the limit", "!" in branch, branch)
    await cell(branch, "os.write(kept[1], b'of a relative')")
    seen = await cell(session, "os.set_blocking(kept[0], False)\nos.read(kept[0], 100)")
    return verdict_line("a pipe above the limit", "of a relative" in seen, seen)


attack(
    "a limit of files below an open one",
    "branches",
    act=lowered_file_limit,
    needs_fork=True,
    **PAIR,
)  # type: ignore[arg-type]


async def process_replaces_branch(arena: Arena, session: Any) -> str:
    """A process in the place of a branch, which never asks for a wire: it must not survive."""
    from attacks.arena import marked_processes

    await cell(
        session,
        "libc.prctl(15, b'by-attack', 0, 0, 0)\n" + REWRITE + "import time\n"
        "def stay(*places):\n"
        "    while True: time.sleep(60)\n"
        "real = guest._apart\n"
        "def fork():\n"
        "    pid = real.fork()\n"
        "    if pid == 0: stay()\n"
        "    return pid\n"
        "guest._apart = real._replace(fork=fork)",
    )
    branch = await fork(arena, session)
    await session.close()
    left = marked_processes(patience_s=3.0)
    return verdict_line("a process in a branch's place", left, (left, str(branch)[:80]))


attack(
    "a process in the place of a branch",
    "branches",
    act=process_replaces_branch,
    needs_fork=True,
    timeout_s=60,
    **PAIR,  # type: ignore[arg-type]
)
attack(
    "a process session of its own",
    "signals",
    """
import os
attempt('setsid', os.setsid)
attempt('raw setsid', lambda: kernel('setsid') if not isinstance(kernel('setsid'), str) else (_ for _ in ()).throw(Gone()))
""",
    tries=2,
    without_walls="contained",
)
for name, code in {
    "plain fork": "clone', 17, 0, 0, 0, 0",
    "a child of the fork server": "clone', 0x8011, 0, 0, 0, 0",
    "a child of the fork server with its number written": "clone', 0x1208011, 0, 0, 0, 0",
    "a child without a signal": "clone', 0, 0, 0, 0, 0",
    "a child that shares files": "clone', 0x411, 0, 0, 0, 0",
    "a child that shares memory": "clone', 0x111, 0, 0, 0, 0",
    "a child with a descriptor": "clone', 0x1011, 0, 0, 0, 0",
}.items():
    attack(
        f"a process that nobody asked for: {name}",
        "processes",
        f"attempt('clone', lambda: kernel('{code}))",
        without_walls="unsafe",
    )
