"""Attacks on the fork of a session: the only moment at which it may create a process."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from attacks.base import attack
from attacks.sharing import cell, verdict_line
from ramify.errors import RamifyError

if TYPE_CHECKING:
    from attacks.arena import Arena

FORK_S = 25.0
"""Far beyond what the host itself allows for a fork."""
MARK = "libc.prctl(15, b'by-attack', 0, 0, 0)\n"


async def fork(arena: Arena, session: Any) -> Any:
    """A branch of ``session``, or the reason why there is none."""
    try:
        branch = await asyncio.wait_for(session.fork(), FORK_S)
    except RamifyError as error:
        return f"{type(error).__name__}: {error}"
    except TimeoutError:
        return "!reached a fork that hangs"
    arena.keep(branch)
    return branch


async def branch_writes_to_parent(arena: Arena, session: Any) -> str:
    await cell(session, "x = [1]")
    branch = await fork(arena, session)
    if isinstance(branch, str):
        return verdict_line("a fork of an idle session failed", True, branch)
    await cell(branch, "x.append(2)\nprint('of the branch')")
    seen = await cell(session, "x")
    theirs = await cell(
        branch,
        "x, attempt('kill the parent', lambda: __import__('os').kill(__import__('os').getppid() or "
        "1, 0))",
    )
    return verdict_line("the parent's names", seen != "[1]", seen) + theirs


attack(
    "a branch writes on its parent",
    "branches",
    act=branch_writes_to_parent,
    needs_fork=True,
    without_walls="contained",
)


async def thread_races_for_fork(arena: Arena, session: Any) -> str:
    """A thread constantly tries to create processes, so that one attempt coincides with the
    grant."""
    code = (
        MARK
        + """
import threading
won = []
def race():
    while True:
        pid = libc.fork()
        if pid == 0:
            libc.prctl(15, b'by-attack', 0, 0, 0)
            libc.sleep(60)
            libc._exit(0)
        if pid > 0: won.append(pid)
threading.Thread(target=race, daemon=True).start()
"""
    )
    await cell(session, code)
    results = []
    for _ in range(5):
        branch = await fork(arena, session)
        results.append(branch if isinstance(branch, str) else "forked")
    return await report_extra_processes(session, results, "len(won)")


async def report_extra_processes(session: Any, results: list[str], won: str) -> str:
    """Processes of the attacker other than the session and its branches. One that used a grant may
    live for a moment."""
    from attacks.arena import marked_processes

    allowed = 1 + results.count("forked")
    for _ in range(50):
        found = len(marked_processes(patience_s=0))
        if found <= allowed:
            break
        await asyncio.sleep(0.02)
    said = f"{found} processes, {allowed} allowed, won {await cell(session, won)}: {results}"
    return verdict_line("processes won in the race", found > allowed, said) + "\n".join(
        r for r in results if "!" in r
    )


attack(
    "a thread races for the granted fork",
    "branches",
    act=thread_races_for_fork,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=20,
)


async def hidden_thread(arena: Arena, session: Any) -> str:
    """The same race from a thread that Python does not list."""
    code = (
        MARK
        + """
import ctypes, sys, threading
won = []
def race(_):
    while True:
        pid = libc.fork()
        if pid == 0:
            libc.sleep(60)
            libc._exit(0)
        if pid > 0: won.append(pid)
threading.active_count = lambda: 1
threading.enumerate = lambda: [threading.main_thread()]
sys._current_frames = lambda: {threading.get_ident(): None}
kept = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)(race)
libc.pthread_create(ctypes.byref(ctypes.c_ulong()), None, kept, None)
"""
    )
    await cell(session, code)
    results = []
    for _ in range(5):
        branch = await fork(arena, session)
        results.append(branch if isinstance(branch, str) else "forked")
    return await report_extra_processes(session, results, "len(won)")


attack(
    "a hidden thread races for the granted fork",
    "branches",
    act=hidden_thread,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=60,
)


async def alarm_forks(arena: Arena, session: Any) -> str:
    """The same without threads: a signal handler that forks, hundreds of times a second."""
    code = (
        MARK
        + """
import os, signal, time
won = []
def on_alarm(*_):
    try: pid = libc.fork()
    except OSError: return
    if pid == 0:
        libc.sleep(60)
        libc._exit(0)
    if pid > 0: won.append(pid)
signal.signal(signal.SIGALRM, on_alarm)
signal.setitimer(signal.ITIMER_REAL, .001, .001)
"""
    )
    await cell(session, code)
    results = []
    for _ in range(5):
        branch = await fork(arena, session)
        results.append(branch if isinstance(branch, str) else "forked")
    return await report_extra_processes(
        session, results, "signal.setitimer(signal.ITIMER_REAL, 0)\nlen(won)"
    )


attack(
    "a signal handler races for the granted fork",
    "branches",
    act=alarm_forks,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=20,
)


async def hooks(arena: Arena, session: Any) -> str:
    """Hooks that run around a fork, in the parent and in the branch, forever. One burns its core,
    the others wait."""

    async def one(when: str) -> str:
        other, turn = await arena.session(), "pass" if when == "before" else "time.sleep(60)"
        await cell(
            other,
            "import os, time\ndef hang():\n    while True: "
            f"{turn}\nos.register_at_fork({when}=hang)",
        )
        branch = await fork(arena, other)
        return verdict_line(f"a hook {when}", isinstance(branch, str) and "!" in branch, branch)

    return "".join(await asyncio.gather(*map(one, ("before", "after_in_parent", "after_in_child"))))


attack(
    "hooks that hang around the fork",
    "branches",
    act=hooks,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=40,
)


async def lying_fork(arena: Arena, session: Any) -> str:
    """The guest's own functions are replaced, so that it lies about having forked."""
    text = ""
    for code in (
        "os.fork = lambda: 0",
        "os.fork = lambda: 12345",
        "os.fork = None",
        "os.getpid = lambda: 1",
        "os.dup2 = os.close = lambda *a: 0",
    ):
        other = await arena.session()
        await cell(other, f"import os\n{code}")
        branch = await fork(arena, other)
        said = branch if isinstance(branch, str) else await cell(branch, "1 + 1")
        text += verdict_line(code, False, said) + (said if "!" in said else "")
    return text


attack(
    "a guest that lies about having forked",
    "branches",
    act=lying_fork,
    needs_fork=True,
    without_walls="unsafe",
    timeout_s=60,
)


async def second_fork(arena: Arena, session: Any) -> str:
    """After a granted fork, no second one may succeed: neither in the parent nor in the branch."""
    branch = await fork(arena, session)
    text = verdict_line("no branch", isinstance(branch, str), branch)
    tries = "import os\nfor _ in range(5):\n    attempt('fork', lambda: os.fork() or os._exit(0))\n    attempt('libc', lambda: (lambda p: libc._exit(0) if p == 0 else p if p > 0 else (_ for _ in ()).throw(Gone()))(libc.fork()))"
    for each in (session, branch):
        text += "" if isinstance(each, str) else await cell(each, tries)
    return text


attack(
    "a second fork after the granted one",
    "branches",
    act=second_fork,
    needs_fork=True,
    without_walls="unsafe",
)


async def branches_outlive_root(arena: Arena, session: Any) -> str:
    """Branches of branches that do not end: closing the root ends them all."""
    tree = [session]
    await cell(session, MARK + "x = 1")
    for _ in range(3):
        branch = await fork(arena, tree[-1])
        if isinstance(branch, str):
            return verdict_line("no branch", True, branch)
        tree.append(branch)
    spinning = [
        asyncio.create_task(
            cell(s, "import signal\nsignal.signal(2, signal.SIG_IGN)\nwhile True: pass", 60)
        )
        for s in tree[1:]
    ]
    await asyncio.sleep(0.1)
    await session.close_tree()
    _, late = await asyncio.wait(spinning, timeout=30)
    for task in late:
        task.cancel()
    return verdict_line("branches that outlive their root", late, f"{len(late)} of {len(spinning)}")


attack(
    "branches that outlive their root",
    "branches",
    act=branches_outlive_root,
    needs_fork=True,
    without_walls="contained",
    timeout_s=20,
)


async def branch_reads_output(arena: Arena, session: Any) -> str:
    """A session's output from before and after the fork is private."""
    branch = await fork(arena, session)
    if isinstance(branch, str):
        return verdict_line("no branch", True, branch)
    await cell(session, "print('only of the root ' * 10)")
    seen = await cell(
        branch,
        "import os\nsize = os.fstat(1).st_size\nb'of the root' in os.pread(1, 1 << 20, 0) if size "
        "else False",
    )
    return verdict_line("the output of the root", "True" in seen, seen)


attack(
    "a branch reads its root's output",
    "branches",
    act=branch_reads_output,
    needs_fork=True,
    without_walls="contained",
)


async def ten_branches_are_ten_processes(arena: Arena, session: Any) -> str:
    """Many branches are one process each, and no more."""
    await cell(session, MARK)
    branches = [await fork(arena, session) for _ in range(10)]
    bad = [b for b in branches if isinstance(b, str)]
    from attacks.arena import marked_processes

    marked = len(marked_processes(patience_s=0))
    return verdict_line("more processes than branches", marked > 11, marked) + verdict_line(
        "refused branches", bad, bad
    )


attack(
    "ten branches are ten processes",
    "branches",
    act=ten_branches_are_ten_processes,
    needs_fork=True,
    without_walls="contained",
)


async def fork_in_a_call(arena: Arena, session: Any) -> str:
    """A session that waits for the host is forked; only one of the two gets the host's answer
    twice."""
    held: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    asked = asyncio.Event()

    async def answer(name: str, args: Any, kwargs: Any) -> Any:
        asked.set()
        return await asyncio.shield(held)

    running = asyncio.create_task(session.run("y = call_host('echo', 1)\ny", answer=answer))
    await asyncio.wait_for(asked.wait(), 30)
    branch = await fork(arena, session)
    held.set_result("answered")
    ran = await asyncio.wait_for(running, 60)
    later = branch if isinstance(branch, str) else "forked"
    return verdict_line(
        "a call answered wrongly",
        ran.cell.value != "'answered'",
        (ran.cell.value, ran.cell.error, later),
    )


attack(
    "a fork in the middle of a call",
    "branches",
    act=fork_in_a_call,
    needs_fork=True,
    without_walls="contained",
)
