"""Conformance checks of stopping: cells can be interrupted, and killing one session harms no
other."""

from __future__ import annotations

import asyncio
import time

from ramify.errors import SandboxError, SessionDied
from ramify.sandbox.base import CellResult
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

SOON_S = 20.0
"""Seconds within which an interrupt must end a cell that would take 30 s or run forever. Long
enough for a busy machine.
"""


@register_check("an endless loop stops, variables stay", "interrupt")
async def check_endless_loop_interrupt(probe: SandboxUnderTest) -> None:
    session = await probe.open()
    started = time.perf_counter()
    ran = await session.run(
        "x = 41\nprint('so far')\nwhile True: pass", answer=answer_host_call, timeout_s=0.3
    )
    assert_true(time.perf_counter() - started < SOON_S, "it took too long")
    assert_same((ran.interrupted, ran.cell.stdout), ("time", "so far\n"))
    assert_true(
        ran.cell.error and "KeyboardInterrupt" in ran.cell.error and "line 3" in ran.cell.error,
        f"{ran.cell.error}",
    )
    assert_same(cell_values(await probe.cells("x + 1", session=session)), ["42"])


@register_check("time waiting for the host does not count")
async def check_host_wait_excluded_from_timeout(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    ran = await session.run(
        "for _ in range(3): host('sleep', 1)\n'done'", answer=answer_host_call, timeout_s=2.0
    )
    assert_same((ran.cell.value, ran.interrupted), ("'done'", None))
    assert_true(ran.cell.seconds < 2.0, f"{ran.cell.seconds} s of work")


@register_check("interrupt stops a waiting cell", "interrupt")
async def check_cell_interrupt(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
    started = time.perf_counter()
    ran = await session.run("x = 1\nhost('sleep', 30)", answer=answer_host_call)
    assert_true(time.perf_counter() - started < SOON_S, "it took too long")
    assert_same(ran.interrupted, "deadline")
    assert_true(ran.cell.error, "no error")
    session.interrupt("idle")  # harmless
    assert_same(cell_values(await probe.cells("x", session=session)), ["1"])


@register_check("interrupt stops a pool of waiting threads", "interrupt")
async def check_thread_pool_interrupt(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as t:
    list(t.map(lambda i: host('sleep', 30), range(50)))
"""
    started = time.perf_counter()
    ran = await session.run(code, answer=answer_host_call)
    assert_true(time.perf_counter() - started < SOON_S, "it took too long")
    assert_same(ran.interrupted, "deadline")
    assert_same(cell_values(await probe.cells("1", session=session)), ["1"])


@register_check("a cancelled run leaves a usable session", "interrupt")
async def check_cell_cancellation(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    before = asyncio.all_tasks()
    for code in ("x = 1\nwhile True: pass", "host('sleep', 30)"):
        task = asyncio.ensure_future(session.run(code, answer=answer_host_call))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait((task,))
        assert_true(task.cancelled(), "run did not raise the cancellation")
    assert_same(cell_values(await probe.cells("x", session=session)), ["1"])
    left = asyncio.all_tasks() - before
    if left:  # perhaps a moment's work of the provider
        await asyncio.wait(left, timeout=1.0)
    assert_true(all(task.done() for task in left), f"tasks are left: {left}")


@register_check("one request at a time")
async def check_one_request_at_a_time(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    task = asyncio.ensure_future(session.run("host('sleep', .2)", answer=answer_host_call))
    await asyncio.sleep(0.05)
    try:
        await session.run("1", answer=answer_host_call)
    except SandboxError as error:
        assert_true("busy" in str(error), str(error))
    else:
        raise ConformanceError("two cells ran at once")
    ran: CellResult = await task
    assert_same(ran.cell.value, "0.2")


@register_check("a cell that cannot be stopped is killed", "full_python", "kill")
async def check_unstoppable_cell_killed(probe: SandboxUnderTest) -> None:
    session, other = await probe.open(), await probe.open()
    await session.run("import time; said = False", answer=answer_host_call)
    code = (  # everything is inside the try: on a slow machine the first interrupt arrives early
        "while True:\n    try:\n        if not said: said = True; print('written')\n        "
        "time.sleep(10)\n"
        "    except BaseException: pass"
    )
    try:
        await session.run(code, answer=answer_host_call, timeout_s=0.5)
    except SessionDied as error:
        assert_same(error.stdout, "written\n")
    else:
        raise ConformanceError("the session was not killed")
    try:
        await session.run("1", answer=answer_host_call)
    except SessionDied:
        pass
    else:
        raise ConformanceError("a dead session answered")
    assert_same(cell_values(await probe.cells("1", session=other)), ["1"])


@register_check("a crash is reported, with the output so far", "full_python", "kill")
async def check_crash_report(probe: SandboxUnderTest) -> None:
    for code, sign in (
        ("import os\nos._exit(7)", "status 7"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ):
        session = await probe.open()
        try:
            await session.run(f"print('written')\n{code}", answer=answer_host_call)
        except SessionDied as error:
            assert_same(error.stdout, "written\n")
            assert_true(sign in str(error), str(error))
        else:
            raise ConformanceError("the session survived")


@register_check("memory runs out as MemoryError", "limits_memory")
async def check_memory_limit(probe: SandboxUnderTest) -> None:
    limit = probe.spec.memory_bytes
    codes = (f"x = 1\nb = 'a' * {2 * limit}", "many = []\nwhile True: many.append('a' * 100_000)")
    big, many, after = await probe.cells(*codes, "many = None\nx")
    for cell in (big, many):
        assert_true(cell.error and "MemoryError" in cell.error, f"{cell.error}")
    assert_same(after.value, "1")


@register_check("a misbehaving cell does not break the next", "full_python", "kill")
async def check_misbehaving_cells(probe: SandboxUnderTest) -> None:
    session = await open_with_host(probe)
    for code in (
        "import sys, io\nsys.stdout = sys.stderr = io.StringIO()",
        "import os\nos.close(1); os.close(2); os.close(0)",
        "import sys\nsys.settrace(lambda *a: 1/0)",
        "import sys\nsys.setrecursionlimit(60)",
        "sys.modules.pop('__main__')",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)",
        "import builtins\ndel builtins.len, builtins.print",
        "__builtins__ = {}",
        "globals().clear()",
        "def f(): return f()\nf()",
        "raise BaseException('base')",
        "import os\nfor n in range(3, 200):\n    try: os.close(n)\n    except OSError: pass",
        "import json, time, os\njson.dumps = time.monotonic = os.write = os.read = None",
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E",
        "import sys\nsys.stdout.close()",
    ):
        await session.run(code, answer=answer_host_call)
        [cell] = assert_no_errors(
            await probe.cells(
                "import os\nprint(len('abc'), host('echo', 1))\nos.getpid() > 0", session=session
            )
        )
        assert_same((cell.stdout, cell.value), ("3 1\n", "True"), f"after {code!r}")
    ran = await session.run("while True: pass", answer=answer_host_call, timeout_s=0.2)
    assert_same(ran.interrupted, "time")
