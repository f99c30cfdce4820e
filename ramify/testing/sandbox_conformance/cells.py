"""Conformance checks of how a sandbox runs code cells.

Cells must behave as in a notebook, and their output must be complete and in order.
"""

from __future__ import annotations

import asyncio

from ramify.testing.sandbox_conformance.base import (
    SandboxUnderTest,
    assert_no_errors,
    assert_same,
    assert_true,
    cell_values,
    open_with_host,
    register_check,
)


@register_check("functions see updated globals")
async def check_updated_globals(probe: SandboxUnderTest) -> None:
    assert_same(
        cell_values(await probe.cells("n = 1\ndef f(): return n", "n = 2", "f()")),
        [None, None, "2"],
    )


@register_check("names bound before an error stay", "full_python")
async def check_names_kept_after_error(probe: SandboxUnderTest) -> None:
    failed, after = await probe.cells("a = 1\n_b = 2\n1/0\nc = 3", "(a, _b, 'c' in globals())")
    assert_true(failed.error and "ZeroDivisionError" in failed.error, f"no error: {failed}")
    assert_same(after.value, "(1, 2, False)")


@register_check("del deletes", "full_python")
async def check_del_statement(probe: SandboxUnderTest) -> None:
    assert_same(cell_values(await probe.cells("a = 1", "del a", "'a' in globals()"))[-1], "False")


@register_check("classes, decorators, dataclasses and imports work", "full_python")
async def check_full_python(probe: SandboxUnderTest) -> None:
    code = """
from __future__ import annotations
import dataclasses, functools, textwrap, statistics, io
class A:
    def hi(self): return 'hi'
class B(A):
    def hi(self): return super().hi() + '!'
@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: list[int] = dataclasses.field(default_factory=list)
@functools.cache
def fib(n): return n if n < 2 else fib(n-1) + fib(n-2)
def count():
    yield from (i for i in range(3))
k = 10
squares = [[i * k for i in range(j)] for j in range(3)]
"""
    ran = await probe.cells(
        code, "B().hi(), Point(1), fib(50), list(count()), squares[2], __name__"
    )
    assert_same(
        cell_values(ran)[-1],
        "('hi!', Point(x=1, y=[]), 12586269025, [0, 1, 2], [0, 10], '__main__')",
    )


@register_check("annotations and pickle find __main__", "full_python", "kill")
async def check_main_module(probe: SandboxUnderTest) -> None:
    code = """
import typing, pickle, inspect
class Node:
    child: 'Node | None'
    def f(self):
        return 1
found = typing.get_type_hints(Node)['child'] == (Node | None)
"""
    ran = await probe.cells(
        code, "found, type(pickle.loads(pickle.dumps(Node()))) is Node, inspect.getsource(Node.f)"
    )
    assert_same(cell_values(ran)[-1], "(True, True, '    def f(self):\\n        return 1\\n')")


@register_check("the last expression is echoed", "full_python")
async def check_last_expression_echo(probe: SandboxUnderTest) -> None:
    ran = await probe.cells(
        "x = 1\nx + 1", "_ * 10", "None", "x = 5", "def f(): pass", "'é\\ud800'", "# nothing", ""
    )
    assert_same(cell_values(ran), ["2", "20", None, None, None, "'é\\ud800'", None, None])


@register_check("a repr that raises or is huge is safe", "full_python")
async def check_unsafe_reprs(probe: SandboxUnderTest) -> None:
    ran = await probe.cells(
        "class R:\n    def __repr__(self): raise ValueError('no')\nR()",
        "'x' * 5_000_000",
        "list(range(500_000))",
    )
    shown = cell_values(ran)
    assert_true(shown[0] and "ValueError" in shown[0], f"{shown[0]}")
    assert_true(
        all(value is not None and len(value) < 500_000 for value in shown), "an echo is too long"
    )
    assert_true(
        shown[2] and shown[2].startswith("[0, 1,") and shown[2].endswith("499999]"),
        "a list's echo lacks head or tail",
    )


@register_check("tracebacks carry the cell's lines")
async def check_tracebacks(probe: SandboxUnderTest) -> None:
    _, cell = await probe.cells("def f(x):\n    y = 1\n    return y / x", "\nf(0)")
    error = cell.error or ""
    for part in (
        'File "<cell 1>", line 3, in f',
        "return y / x",
        'File "<cell 2>", line 2',
        "ZeroDivisionError: div",
    ):
        assert_true(part in error, f"{part!r} is not in {error}")
    assert_same(error.count("File "), 2, "frames")


@register_check("syntax errors are shown and harm nothing", "full_python")
async def check_syntax_errors(probe: SandboxUnderTest) -> None:
    bad, after = await probe.cells("x = 1\ny = = 2", "'x' in globals()")
    assert_true(
        bad.error and 'File "<cell 1>", line 2' in bad.error and "SyntaxError" in bad.error,
        f"{bad.error}",
    )
    assert_true(bad.error and "    ^" in bad.error and "Traceback" not in bad.error, f"{bad.error}")
    assert_same(after.value, "False")


@register_check("exit ends the cell, not the session", "full_python")
async def check_exit_ends_cell(probe: SandboxUnderTest) -> None:
    a, b, c, d = await probe.cells(
        "x = 1\nexit()\nx = 2", "import sys; sys.exit('why')", "raise SystemExit(3)", "x"
    )
    assert_same(
        [a.error, b.error, c.error, d.value], [None, "SystemExit: why", "SystemExit: 3", "1"]
    )


@register_check("await works at the top of a cell")
async def check_top_level_await(probe: SandboxUnderTest) -> None:
    code = "import asyncio\nr = await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))\nr"
    assert_same(
        cell_values(
            await probe.cells(code, "await asyncio.sleep(0, 3)", "asyncio.run(asyncio.sleep(0, 4))")
        ),
        ["[1, 2]", "3", "4"],
    )


@register_check("random is seeded", "kill")
async def check_seeded_random(probe: SandboxUnderTest) -> None:
    async def draw(seed: str) -> str | None:
        session = await probe.open(seed=seed)
        return (
            await probe.cells(
                "import random; random.random(), hash('a'), list({'a', 'b', 'c'})", session=session
            )
        )[0].value

    first, again, other = await draw("a"), await draw("a"), await draw("b")
    assert_true(first == again != other, f"{first} {again} {other}")


@register_check("stdout and stderr are one ordered stream", "full_python")
async def check_output_order(probe: SandboxUnderTest) -> None:
    code = (
        "import sys\nprint('a')\nprint('b', file=sys.stderr)\nsys.stdout.write('c\\n')\n"
        "sys.stdout.buffer.write(b'd\\n')\n"
    )
    [cell] = assert_no_errors(await probe.cells(code + "print('é\\ud800')"))
    assert_same((cell.stdout, cell.stdout_chars), ("a\nb\nc\nd\né\\ud800\n", 16))


@register_check("other processes' output is in order", "full_python", "kill", "starts_processes")
async def check_subprocess_output(probe: SandboxUnderTest) -> None:
    code = """
import os, subprocess
print(1)
os.write(1, b'2\\n')
subprocess.run(['echo', '3'])
print(4)
os.write(2, b'5\\xff')
"""
    first, second = assert_no_errors(await probe.cells(code, "print('next')"))
    assert_same((first.stdout, second.stdout), ("1\n2\n3\n4\n5\ufffd", "next\n"))


@register_check("long output keeps head, tail and length")
async def check_long_output(probe: SandboxUnderTest) -> None:
    limit, session = probe.spec.max_output_bytes, await open_with_host(probe)
    count = limit // 4
    [cell] = assert_no_errors(
        await probe.cells(f"for i in range({count}): print('é', i)", session=session)
    )
    assert_true(
        len(cell.stdout.encode()) <= limit + 200,
        f"{len(cell.stdout.encode()):,} bytes kept of at most {limit:,}",
    )
    assert_true(cell.stdout.startswith("é 0\né 1\n"), "no head")
    assert_true(cell.stdout.endswith(f"é {count - 2}\né {count - 1}\n"), "no tail")
    expected = sum(len(f"é {i}\n") for i in range(count))
    assert_same(cell.stdout_chars, expected)
    head, tail = cell.stdout.split("\n[… ")[0], cell.stdout.split(" …]\n")[1]
    gap = f"\n[… {expected - len(head) - len(tail):,} characters left out …]\n"
    assert_true(gap in cell.stdout, f"the output lacks the correct gap message {gap!r}")
    last, after = await probe.cells("t = last_output(); len(t)", "print(end='')", session=session)
    assert_same((last.value, after.stdout), (str(expected), ""))


@register_check("sessions do not mix their output", "full_python")
async def check_output_isolation(probe: SandboxUnderTest) -> None:
    async def one(number: int) -> str:
        session = await open_with_host(probe)
        code = f"""
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as t:
    list(t.map(lambda i: (host('sleep', .001), print('{number}')), range(50)))
"""
        return assert_no_errors(await probe.cells(code, session=session))[0].stdout

    outputs = await asyncio.gather(*(one(number) for number in range(4)))
    assert_same(
        [sorted(text) for text in outputs], [sorted(f"{number}\n" * 50) for number in range(4)]
    )
