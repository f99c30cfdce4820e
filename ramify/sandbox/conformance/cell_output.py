"""Conformance checks: the output of a cell."""

from __future__ import annotations

import asyncio

from ramify.sandbox.conformance.base import (
    SandboxProbe,
    check,
    clean,
    same,
    true,
    with_host,
)


@check("stdout and stderr are one ordered stream", "full_python")
async def one_stream(probe: SandboxProbe) -> None:
    code = (
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\nsys.stdout.write('c\\n')\n"
        "sys.stdout.buffer.write(b'd\\n')\n"
    )
    [cell] = clean(await probe.cells(code + "print('é\\ud800')"))
    same((cell.stdout, cell.stdout_chars), ("a\nb\nc\nd\né\\ud800\n", 16))


@check("other processes' output is in order", "full_python", "kill", "starts_processes")
async def raw_output(probe: SandboxProbe) -> None:
    code = """
import os, subprocess
print(1)
os.write(1, b'2\\n')
subprocess.run(['echo', '3'])
print(4)
os.write(2, b'5\\xff')
"""
    first, second = clean(await probe.cells(code, "print('next')"))
    same((first.stdout, second.stdout), ("1\n2\n3\n4\n5\ufffd", "next\n"))


@check("long output keeps head, tail and length")
async def long_output(probe: SandboxProbe) -> None:
    limit, session = probe.spec.max_output_bytes, await with_host(probe)
    count = limit // 4
    [cell] = clean(await probe.cells(f"for i in range({count}): print('é', i)", session=session))
    true(
        len(cell.stdout.encode()) <= limit + 200,
        f"{len(cell.stdout.encode()):,} bytes kept of at most {limit:,}",
    )
    true(cell.stdout.startswith("é 0\né 1\n"), "no head")
    true(cell.stdout.endswith(f"é {count - 2}\né {count - 1}\n"), "no tail")
    expected = sum(len(f"é {i}\n") for i in range(count))
    same(cell.stdout_chars, expected)
    head, tail = cell.stdout.split("\n[… ")[0], cell.stdout.split(" …]\n")[1]
    gap = f"\n[… {expected - len(head) - len(tail):,} characters left out …]\n"
    true(gap in cell.stdout, f"the output lacks the correct gap message {gap!r}")
    last, after = await probe.cells("t = last_output(); len(t)", "print(end='')", session=session)
    same((last.value, after.stdout), (str(expected), ""))


@check("sessions do not mix their output", "full_python")
async def separate_output(probe: SandboxProbe) -> None:
    async def one(number: int) -> str:
        session = await with_host(probe)
        code = f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as t:
    list(t.map(lambda i: (host('sleep', .001), print('{number}')), range(50)))
"""
        return clean(await probe.cells(code, session=session))[0].stdout

    outputs = await asyncio.gather(*(one(number) for number in range(4)))
    same([sorted(text) for text in outputs], [sorted(f"{number}\n" * 50) for number in range(4)])
