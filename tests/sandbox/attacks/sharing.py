"""Attacks on sessions of the same sandbox through what they share: a context, and the process they
are forked from."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from attacks.base import attack
from ramify.errors import RamifyError
from ramify.sandbox.base import Session, SharedContextValue

if TYPE_CHECKING:
    from attacks.arena import Arena


async def cell(session: Session, code: str, timeout_s: float = 30.0) -> str:
    """All output of a cell: what it printed, its echo, its error."""
    from attacks.arena import answer

    try:
        ran = await session.run(code, answer=answer, timeout_s=timeout_s)
    except RamifyError as error:
        return f"\n{type(error).__name__}: {error}\n{getattr(error, 'stdout', '')}"
    return "\n".join(filter(None, (ran.cell.stdout, ran.cell.value, ran.cell.error)))


def verdict_line(name: str, is_reached: object, what: Any) -> str:
    return f"\n!{'reached' if is_reached else 'refused'} {name}: {str(what)[:200]!r}\n"


async def write_over_context(arena: Arena, session: Session) -> str:
    context = SharedContextValue("a line of the context\n" * 200_000)
    attacker, sibling = [await arena.session(context=context) for _ in range(2)]
    code = """
import ctypes, sys
before = len(context)
ctypes.memset(id(context) + sys.getsizeof(context) - len(context) - 1, 90, 4096)
context[:10]
"""
    said = await cell(attacker, code)
    later = await arena.session(context=context)
    hurt = [
        await cell(
            s,
            "context[:6], hash(context[:5000]) == hash('a line of the context\\n' * 300) or "
            "context[:5000] == ('a line of the context\\n' * 300)[:5000]",
        )
        for s in (sibling, later)
    ]
    right = (
        all(h == "('a line', True)" for h in hurt)
        and context.digest == SharedContextValue("a line of the context\n" * 200_000).digest
    )
    return said + verdict_line("the context of siblings", not right, hurt)


attack(
    "the shared context written over",
    "siblings",
    act=write_over_context,
    without_walls="contained",
    host_mb=128,
)


async def write_through_descriptors(arena: Arena, session: Session) -> str:
    context = SharedContextValue("a line of the context\n" * 200_000)
    attacker, sibling = [await arena.session(context=context) for _ in range(2)]
    code = """
import mmap, os, stat
wrote = []
for fd in range(3, 1024):
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode): continue
    except OSError: continue
    size = os.fstat(fd).st_size
    if size < 1 << 20 or size == 16 << 20: continue  # the latter is its own shelf
    for name, act in {'pwrite': lambda: os.pwrite(fd, b'Z' * 100, 100), 'truncate': lambda: os.ftruncate(fd, 10), 'map': lambda: mmap.mmap(fd, size).write(b'Z')}.items():
        try: act()
        except (OSError, ValueError): continue
        wrote.append(name)
wrote
"""
    said = await cell(attacker, code)
    hurt = await cell(sibling, "context.count('a line')")
    return verdict_line(
        "the memory file of the context", hurt != "200000" or said != "[]", (said, hurt)
    )


attack(
    "the file of the context written",
    "siblings",
    act=write_through_descriptors,
    without_walls="contained",
    host_mb=128,
)


async def leave_files(arena: Arena, session: Session) -> str:
    other, text = await arena.session(), ""
    for path in ("/tmp/by-attack", "/dev/shm/by-attack", "by-attack", "/var/tmp/by-attack"):
        await cell(
            session,
            f"try: open({path!r}, 'w').write('here')\nexcept OSError as error: print(error)",
        )
        seen = await cell(
            other, f"try: print(open({path!r}).read())\nexcept OSError as error: print('no', error)"
        )
        await cell(session, f"import os\ntry: os.unlink({path!r})\nexcept OSError: pass")
        text += verdict_line(path, seen.startswith("here"), seen)
    return text


attack("files left for a sibling", "siblings", act=leave_files)


async def meet_by_socket(arena: Arena, session: Session) -> str:
    other = await arena.session()
    name = "\\0by-attack-meeting"
    await cell(
        session,
        f"import socket\ntry:\n    s = socket.socket(socket.AF_UNIX); s.bind('{name}'); "
        "s.listen()\nexcept OSError as e: print(e)",
    )
    seen = await cell(
        other,
        f"import socket\ntry:\n    t = socket.socket(socket.AF_UNIX); t.connect('{name}'); "
        "print('met')\nexcept OSError as e: print('no', e)",
    )
    return verdict_line("a meeting", seen.startswith("met"), seen)


attack("a socket between siblings", "siblings", act=meet_by_socket)


async def meet_by_shared_memory(arena: Arena, session: Session) -> str:
    other = await arena.session()
    code = "attempt('get', lambda: (lambda r: r if isinstance(r, int) else (_ for _ in ()).throw(Gone(r)))(kernel('shmget', 77123, 4096, %s)))"
    text = await cell(session, code % "0o1600")
    seen = await cell(other, code % "0")
    await cell(session, "import ctypes\nlibc.shmctl(libc.shmget(77123, 4096, 0), 0, None)")
    return text + "\n" + seen


attack("shared memory between siblings", "siblings", act=meet_by_shared_memory)


async def meet_by_locks(arena: Arena, session: Session) -> str:
    other = await arena.session()
    take = "import fcntl, os, json\ntry:\n    f = open(json.__file__)\n    fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)\n    print('locked')\nexcept OSError as e: print('no', e)"
    first, second = await cell(session, take), await cell(other, take)
    return verdict_line(
        "a lock seen", first.startswith("locked") and second.startswith("no"), (first, second)
    )


attack("locks on shared files as a channel", "siblings", act=meet_by_locks)


async def crash_many(arena: Arena, session: Session) -> str:
    deaths = (
        "import os\nos._exit(1)",
        "import ctypes\nctypes.string_at(0)",
        "import os, signal\nos.kill(os.getpid(), 9)",
        "say({'op': 'x'})",
    )
    for code in deaths * 2:
        await cell(await arena.session(), code)
    fresh = await cell(await arena.session(), "6 * 7")
    return verdict_line("the process that makes sessions", fresh != "42", fresh)


attack("many sessions crash", "siblings", act=crash_many, without_walls="contained")


async def starve(arena: Arena, session: Session) -> str:
    """Sessions that burn all cores must not prevent another session from answering."""
    others = [await arena.session() for _ in range(4)]
    burning = [asyncio.create_task(cell(other, "while True: pass", 1.0)) for other in others]
    await asyncio.sleep(0.2)
    quick = await cell(session, "sum(range(1000))")
    await asyncio.gather(*burning)
    return verdict_line("a sibling's time", quick != "499500", quick)


attack("every core burnt", "siblings", act=starve, without_walls="contained", timeout_s=20)


async def same_random_secrets(arena: Arena, session: Session) -> str:
    """A random secret of one session must not be drawn by another session too."""
    draw = "import os, secrets, uuid\nsecrets.token_hex(8), uuid.uuid4().hex, os.urandom(4).hex()"
    drawn = [await cell(s, draw) for s in (session, await arena.session())]
    return verdict_line("the same secret twice", drawn[0] == drawn[1], drawn)


attack(
    "secrets that a sibling draws too",
    "siblings",
    act=same_random_secrets,
    without_walls="contained",
)
