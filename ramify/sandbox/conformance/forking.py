"""Conformance checks: forking a session."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from ramify.errors import SandboxError
from ramify.sandbox.conformance.base import (
    ConformanceError,
    SandboxProbe,
    check,
    clean,
    echo,
    same,
    true,
    values,
    with_host,
)


@check("a branch and its origin are independent", "fork")
async def branches(probe: SandboxProbe) -> None:
    session = await with_host(probe)
    await probe.cells("x = [1]\nprint('before')", session=session)
    branch = await session.fork()
    try:
        ran = await probe.cells("x.append(2)\nprint('branch')", "host('echo', x)", session=branch)
        same((ran[0].stdout, ran[1].value), ("branch\n", "[1, 2]"))
        same(values(await probe.cells("x", session=session)), ["[1]"])
        draw = "import random\nrandom.random()"
        same(
            values(await probe.cells(draw, session=branch)),
            values(await probe.cells(draw, session=session)),
        )
        await session.close()
        same(values(await probe.cells("x", session=branch)), ["[1, 2]"])
        ran2 = await branch.run("while True: pass", answer=echo, timeout_s=0.2)
        same(ran2.interrupted, "time")
    finally:
        await branch.close_tree()


@check("a waiting cell continues in every branch", "fork")
async def branches_within(probe: SandboxProbe) -> None:
    session = await with_host(probe)
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
        same(
            [result.cell.value for result in ran],
            ["['0a', '1a']", "['0b', '1b']", "['late', 'late']"],
        )
        same([result.cell.stdout for result in ran], ["once\n"] * 3)
        same(values(await probe.cells("got", session=branches[0])), ["['0a', '1a']"])
    finally:
        await session.close_tree()


@check("a fork that would lose something is refused", "fork")
async def refused_forks(probe: SandboxProbe) -> None:
    for code, sign in (
        (
            "import threading, time\nt = threading.Thread(target=time.sleep, args=(60,), "
            "daemon=True)\nt.start()",
            "threads",
        ),
        ("import os\nends = os.pipe()", "close them"),
    ):
        session = await probe.open()
        clean(await probe.cells(code, session=session))
        try:
            await session.fork()
        except SandboxError as error:
            true(sign in str(error), str(error))
        else:
            raise ConformanceError(f"forked after {code!r}")
        same(values(await probe.cells("1", session=session)), ["1"])
    session = await probe.open()
    task = asyncio.ensure_future(session.run("import time; time.sleep(2)", answer=echo))
    await asyncio.sleep(0.05)
    try:
        await session.fork()
    except SandboxError as error:
        true("working" in str(error), str(error))
    else:
        raise ConformanceError("forked while it worked")
    await task
