"""Every promise of ``base.py``, each as one small test that any provider can be put to.

    >>> @promise("a function sees updated globals")
    ... async def updated_globals(probe): ...

``check.py`` runs them. A test opens sessions through its ``Probe``, which closes them afterwards.
"""

from __future__ import annotations

import asyncio
import datetime
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import msgspec

from ramify.errors import HostCallError, SandboxError, SessionDied
from ramify.sandbox.base import Ran, Sandbox, SandboxSpec, Session
from ramify.sandbox.context import SharedContext
from ramify.types.trajectory import Cell


class Probe:
    """A sandbox under test."""

    def __init__(self, sandbox: Sandbox, spec: SandboxSpec) -> None:
        self.sandbox = sandbox
        self.spec = spec
        self._sessions: list[Session] = []

    async def open(self, **options: Any) -> Session:
        session = await self.sandbox.open(**options)
        self._sessions.append(session)
        return session

    async def cells(self, *codes: str, session: Session | None = None) -> list[Cell]:
        """Run cells one after the other, by default in a fresh session."""
        session = session or await self.open()
        return [(await session.run(code, answer=echo)).cell for code in codes]

    async def close(self) -> None:
        for session in self._sessions:
            await session.close()


class Promise(msgspec.Struct, frozen=True):
    name: str
    test: Callable[[Probe], Awaitable[None]]
    needs: tuple[str, ...] = ()
    """Names of ``Caps`` without which it cannot be kept."""


PROMISES: list[Promise] = []


def promise(
    name: str, *needs: str
) -> Callable[[Callable[[Probe], Awaitable[None]]], Callable[[Probe], Awaitable[None]]]:
    def add(test: Callable[[Probe], Awaitable[None]]) -> Callable[[Probe], Awaitable[None]]:
        PROMISES.append(Promise(name, test, needs))
        return test

    return add


class Broken(AssertionError):
    """A promise was not kept."""


def same(got: Any, expected: Any, what: str = "") -> None:
    if got != expected or type(got) is not type(expected):
        raise Broken(f"{what + ': ' if what else ''}expected {str(expected)[:500]!r}, got {str(got)[:500]!r}")


def true(fact: object, what: str) -> None:
    if not fact:
        raise Broken(what)


async def echo(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The host of these tests: ``echo`` returns its argument, ``sleep`` waits, ``fail`` fails."""
    if name == "sleep":
        await asyncio.sleep(args[0])
    if name == "fail":
        raise HostCallError("SubcallError", "two failed", {"results": ["a", None], "failures": {1: "no"}})
    return args[0] if args else dict(kwargs)


HOST = """
__all__ = ["host", "HostError", "last_output"]
def host(name, *args, **kwargs):
    return call_host(name, *args, **kwargs)
"""


async def with_host(probe: Probe) -> Session:
    session = await probe.open()
    await session.install("host_names", HOST)
    return session


def clean(cells: list[Cell]) -> list[Cell]:
    for cell in cells:
        true(cell.error is None, f"{cell.code!r} failed: {cell.error}")
    return cells


def values(cells: list[Cell]) -> list[str | None]:
    return [cell.value for cell in clean(cells)]


# ------------------------------------------------------------------------------------------------ a notebook


@promise("functions see updated globals")
async def updated_globals(probe: Probe) -> None:
    same(values(await probe.cells("n = 1\ndef f(): return n", "n = 2", "f()")), [None, None, "2"])


@promise("names bound before an error stay", "full_python")
async def partial_cell(probe: Probe) -> None:
    failed, kept = await probe.cells("a = 1\n_b = 2\n1/0\nc = 3", "(a, _b, 'c' in globals())")
    true(failed.error and "ZeroDivisionError" in failed.error, f"no error: {failed}")
    same(kept.value, "(1, 2, False)")


@promise("del deletes", "full_python")
async def deletes(probe: Probe) -> None:
    same(values(await probe.cells("a = 1", "del a", "'a' in globals()"))[-1], "False")


@promise("classes, decorators, dataclasses and imports work", "full_python")
async def whole_python(probe: Probe) -> None:
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
    ran = await probe.cells(code, "B().hi(), Point(1), fib(50), list(count()), squares[2], __name__")
    same(values(ran)[-1], "('hi!', Point(x=1, y=[]), 12586269025, [0, 1, 2], [0, 10], '__main__')")


@promise("annotations and pickle find __main__", "full_python", "kill")
async def main_module(probe: Probe) -> None:
    code = """
import typing, pickle, inspect
class Node:
    child: 'Node | None'
    def f(self):
        return 1
found = typing.get_type_hints(Node)['child'] == (Node | None)
"""
    ran = await probe.cells(code, "found, type(pickle.loads(pickle.dumps(Node()))) is Node, inspect.getsource(Node.f)")
    same(values(ran)[-1], "(True, True, '    def f(self):\\n        return 1\\n')")


@promise("the last expression is echoed", "full_python")
async def echoes(probe: Probe) -> None:
    ran = await probe.cells("x = 1\nx + 1", "_ * 10", "None", "x = 5", "def f(): pass", "'é\\ud800'", "# nothing", "")
    same(values(ran), ["2", "20", None, None, None, "'é\\ud800'", None, None])


@promise("a repr that raises or is huge is safe", "full_python")
async def odd_reprs(probe: Probe) -> None:
    ran = await probe.cells(
        "class R:\n    def __repr__(self): raise ValueError('no')\nR()", "'x' * 5_000_000", "list(range(500_000))"
    )
    shown = values(ran)
    true(shown[0] and "ValueError" in shown[0], f"{shown[0]}")
    true(all(value is not None and len(value) < 500_000 for value in shown), "an echo without bounds")
    true(
        shown[2] and shown[2].startswith("[0, 1,") and shown[2].endswith("499999]"), "a list's echo lacks head or tail"
    )


@promise("tracebacks carry the cell's lines")
async def tracebacks(probe: Probe) -> None:
    _, cell = await probe.cells("def f(x):\n    y = 1\n    return y / x", "\nf(0)")
    error = cell.error or ""
    for part in ('File "<cell 1>", line 3, in f', "return y / x", 'File "<cell 2>", line 2', "ZeroDivisionError: div"):
        true(part in error, f"{part!r} is not in {error}")
    same(error.count("File "), 2, "frames")


@promise("syntax errors are shown and harm nothing", "full_python")
async def syntax_errors(probe: Probe) -> None:
    bad, after = await probe.cells("x = 1\ny = = 2", "'x' in globals()")
    true(bad.error and 'File "<cell 1>", line 2' in bad.error and "SyntaxError" in bad.error, f"{bad.error}")
    true(bad.error and "    ^" in bad.error and "Traceback" not in bad.error, f"{bad.error}")
    same(after.value, "False")


@promise("exit ends the cell, not the session", "full_python")
async def exits(probe: Probe) -> None:
    a, b, c, d = await probe.cells("x = 1\nexit()\nx = 2", "import sys; sys.exit('why')", "raise SystemExit(3)", "x")
    same([a.error, b.error, c.error, d.value], [None, "SystemExit: why", "SystemExit: 3", "1"])


@promise("await works at the top of a cell")
async def top_level_await(probe: Probe) -> None:
    code = "import asyncio\nr = await asyncio.gather(asyncio.sleep(0, 1), asyncio.sleep(0, 2))\nr"
    same(values(await probe.cells(code, "await asyncio.sleep(0, 3)", "asyncio.run(asyncio.sleep(0, 4))")),
         ["[1, 2]", "3", "4"])  # fmt: skip


@promise("random is seeded", "kill")
async def seeded(probe: Probe) -> None:
    async def draw(seed: str) -> str | None:
        session = await probe.open(seed=seed)
        return (await probe.cells("import random; random.random(), hash('a'), list({'a', 'b', 'c'})", session=session))[
            0
        ].value

    first, again, other = await draw("a"), await draw("a"), await draw("b")
    true(first == again != other, f"{first} {again} {other}")


# ------------------------------------------------------------------------------------------------ output


@promise("stdout and stderr are one ordered stream", "full_python")
async def one_stream(probe: Probe) -> None:
    code = "import sys\nprint('a')\nprint('b', file=sys.stderr)\nsys.stdout.write('c\\n')\nsys.stdout.buffer.write(b'd\\n')\n"
    [cell] = clean(await probe.cells(code + "print('é\\ud800')"))
    same((cell.stdout, cell.stdout_chars), ("a\nb\nc\nd\né\\ud800\n", 16))


@promise("other processes' output is in order", "full_python", "kill", "starts_processes")
async def raw_output(probe: Probe) -> None:
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


@promise("long output keeps head, tail and length")
async def long_output(probe: Probe) -> None:
    limit, session = probe.spec.max_output_bytes, await with_host(probe)
    count = limit // 4
    [cell] = clean(await probe.cells(f"for i in range({count}): print('é', i)", session=session))
    true(len(cell.stdout.encode()) <= limit + 200, f"{len(cell.stdout.encode()):,} bytes kept of at most {limit:,}")
    true(cell.stdout.startswith("é 0\né 1\n"), "no head")
    true(cell.stdout.endswith(f"é {count - 2}\né {count - 1}\n"), "no tail")
    expected = sum(len(f"é {i}\n") for i in range(count))
    same(cell.stdout_chars, expected)
    head, tail = cell.stdout.split("\n[… ")[0], cell.stdout.split(" …]\n")[1]
    gap = f"\n[… {expected - len(head) - len(tail):,} characters left out …]\n"
    true(gap in cell.stdout, f"the gap is not named rightly, as {gap!r}")
    whole, after = await probe.cells("t = last_output(); len(t)", "print(end='')", session=session)
    same((whole.value, after.stdout), (str(expected), ""))


@promise("sessions do not mix their output", "full_python")
async def separate_output(probe: Probe) -> None:
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


# ------------------------------------------------------------------------------------------------ values


ZONE = datetime.timezone(datetime.timedelta(hours=-3))
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63 - 1, -(2**63), 2**64, -(3**500), 1.5, -0.0, 1e308, math.inf, -math.inf, 1j,
    complex(-0.0, 2),
    "", "é\x00\n\"\\", "\ud800 alone", "\U0001f600", "x" * 5000, "é\udfff" * 5000, b"", b"\x00\xff" * 3000,
    [], [1, [2, [3]]], (), (1,), ((), []), set(), {(2, "a")}, {1}, frozenset({frozenset({1})}),
    {}, {"a": {"b": 1}}, {1: "int", (1, 2): "tuple", None: "none", b"k": 1.0}, {"$": "tag", "v": 1}, {"\ud800": 1},
    datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4), datetime.datetime(1, 1, 1), datetime.timedelta(-1, 2, 3),
    datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=ZONE), datetime.time(1, tzinfo=datetime.UTC),
    list(range(1000)), ["ab"] * 1000, [0.5] * 1000, [1, math.nan and 2] * 20, ["\ud800"] * 20, [2**70] * 20, [math.inf] * 20,
]  # fmt: skip


@promise("values go over and come back the same", "full_python")
async def round_trip(probe: Probe) -> None:
    session = await with_host(probe)
    await session.set("v", VALUES)
    same(repr(await session.get("v")), repr(VALUES), "set, get")
    [cell] = clean(await probe.cells("w = host('echo', v)\nrepr(w) == repr(v)", session=session))
    same(cell.value, "True", "call")
    await session.set("nan", {"n": math.nan})
    true(math.isnan((await session.get("nan"))["n"]), "nan")


@promise("other values are refused by type and place", "full_python")
async def refused_values(probe: Probe) -> None:
    session = await with_host(probe)
    code = "class Foo: pass\nx = {'a': [1, (Foo(),)]}\nloop = []\nloop.append(loop)"
    _, called, cyclic, after = await probe.cells(code, "host('echo', x)", "host('echo', loop)", "1", session=session)
    true(called.error and "TypeError" in called.error and "type Foo" in called.error, f"{called.error}")
    true(called.error and "['a'][1][0]" in called.error, f"no path: {called.error}")
    true(cyclic.error and "nested deeper" in cyclic.error, f"{cyclic.error}")
    same(after.value, "1")
    for name, kind in (("x", "TypeError"), ("nothing", "NameError")):
        try:
            await session.get(name)
        except HostCallError as error:
            same(error.kind, kind)
        else:
            raise Broken(f"get({name!r}) did not fail")
    try:
        await session.set("y", {"a": object()})
    except SandboxError as error:
        true("type object" in str(error) and "['a']" in str(error), str(error))
    else:
        raise Broken("set of an object did not fail")


@promise("large values travel")
async def large_values(probe: Probe) -> None:
    session = await with_host(probe)
    text = "é" * 1_000_000
    await session.set("text", text)
    [cell] = clean(
        await probe.cells("host('echo', text) == text, host('echo', [text] * 8) == [text] * 8", session=session)
    )
    same(cell.value, "(True, True)")
    same(await session.get("text"), text)


# ------------------------------------------------------------------------------------------------ modules and calls


@promise("reserved names are put back and reported", "full_python")
async def reserved(probe: Probe) -> None:
    session = await probe.open()
    await session.set("given", [1], reserved=True)
    await session.set("other", 1, reserved=True)
    await session.set("free", 1)
    ran = await probe.cells(
        "given = 5\ndel other\nfree = 2", "given, other, free", "given.append(2)", "given", session=session
    )
    same([ran[0].restored, ran[1].value], [("given", "other"), "([1], 1, 2)"])
    same([ran[1].restored, ran[2].restored, ran[3].value], [(), (), "[1, 2]"])
    await session.set("given", 7)
    same(values(await probe.cells("given = 8", "given", session=session))[-1], "8")


@promise("modules bind names and send notes", "full_python")
async def modules(probe: Probe) -> None:
    session = await probe.open()
    source = """
__all__ = ["double", "Failure"]
class Failure(Exception): pass
def double(x):
    "Twice x."
    if x is None: raise Failure("none given")
    return call_host("echo", x) * 2
hidden = 1
def after_cell():
    return {"has": sorted(n for n in ("double", "a") if n in namespace), "out": last_output()}
"""
    await session.install("tools", source)
    ran = await session.run("a = double(4)\nprint(a)\ndouble = 3", answer=echo)
    same(
        (ran.cell.stdout, ran.cell.restored, ran.note),
        ("8\n", ("double",), {"tools": {"has": ["a", "double"], "out": "8\n"}}),
    )
    cells = await probe.cells("'hidden' in globals(), double('x'), double.__doc__", "double(None)", session=session)
    same(cells[0].value, "(False, 'xx', 'Twice x.')")
    true(
        cells[1].error and cells[1].error.count("File ") == 1 and "Failure: none given" in cells[1].error,
        f"{cells[1].error}",
    )
    try:
        await session.install("broken", "x = 1\n1/0")
    except SandboxError as error:
        true("ZeroDivisionError" in str(error) and "line 2" in str(error), str(error))
    else:
        raise Broken("a module that fails was installed")


@promise("errors of the host rise in the cell", "full_python")
async def host_errors(probe: Probe) -> None:
    session = await with_host(probe)
    code = "try:\n    host('fail')\nexcept HostError as e:\n    r = (e.kind, str(e), e.data)\nr"
    caught, raised = await probe.cells(code, "\nhost('fail')", session=session)
    same(caught.value, "('SubcallError', 'two failed', {'results': ['a', None], 'failures': {1: 'no'}})")
    true(
        raised.error and 'File "<cell 2>", line 2' in raised.error and raised.error.count("File ") == 1,
        f"{raised.error}",
    )


@promise("a fault of the host is raised by run")
async def host_faults(probe: Probe) -> None:
    session = await with_host(probe)

    async def broken(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        raise ZeroDivisionError("a bug")

    try:
        await session.run("host('x')", answer=broken)
    except ZeroDivisionError:
        pass
    else:
        raise Broken("the host's bug was not raised")
    same(values(await probe.cells("1", session=session)), ["1"])


@promise("calls from threads run at once", "full_python")
async def concurrent_calls(probe: Probe) -> None:
    session = await with_host(probe)
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(16) as pool:
    got = list(pool.map(lambda i: host('sleep', .1 + i * 0), range(16)))
    big = list(pool.map(lambda i: len(host('echo', str(i) * 100_000)), range(10)))
got == [.1] * 16, big
"""
    started = time.perf_counter()
    [cell] = clean(await probe.cells(code, session=session))
    same(cell.value, f"(True, {[100_000] * 10})")
    true(time.perf_counter() - started < 1.2, "16 calls of 0.1 s took as long as one after the other")


@promise("a call outside its cell fails clearly", "full_python")
async def late_calls(probe: Probe) -> None:
    session = await with_host(probe)
    code = """
import threading, time
caught = []
def late(wait, *call):
    time.sleep(wait)
    try: host(*call)
    except BaseException as e: caught.append(str(e))
for args in ((.15, 'echo', 1), (0, 'sleep', 5)):
    threading.Thread(target=late, args=args, daemon=True).start()
time.sleep(.05)
"""
    clean(await probe.cells(code, session=session))
    await asyncio.sleep(0.3)
    ran = await probe.cells("1", "import time; time.sleep(.1); len(caught), caught", session=session)
    value = values(ran)[-1] or ""
    true(value.startswith("(2, ") and "after its cell had ended" in value and "still waiting" in value, value)


@promise("a forked process is not the session", "full_python", "kill", "starts_processes")
async def forked(probe: Probe) -> None:
    session = await with_host(probe)
    code = """
import os
pid = os.fork()
if not pid:
    try: host('echo', 1)
    except Exception as e: print(e)
else:
    status = os.waitpid(pid, 0)[1]
"""
    first, second = clean(await probe.cells(code, "status, host('echo', 2)", session=session))
    true("forked process" in first.stdout, first.stdout)
    same(second.value, "(0, 2)")


# ------------------------------------------------------------------------------------------------ stopping


@promise("an endless loop stops, variables stay", "interrupt")
async def endless_loop(probe: Probe) -> None:
    session = await probe.open()
    started = time.perf_counter()
    ran = await session.run("x = 41\nprint('so far')\nwhile True:\n    pass", answer=echo, timeout_s=0.3)
    true(time.perf_counter() - started < 0.3 + 1.0, "it took too long")
    same((ran.interrupted, ran.cell.stdout), ("time", "so far\n"))
    true(ran.cell.error and "KeyboardInterrupt" in ran.cell.error and "line 3" in ran.cell.error, f"{ran.cell.error}")
    same(values(await probe.cells("x + 1", session=session)), ["42"])


@promise("time waiting for the host does not count")
async def clock(probe: Probe) -> None:
    session = await with_host(probe)
    ran = await session.run("for _ in range(3): host('sleep', .3)\n'done'", answer=echo, timeout_s=0.5)
    same((ran.cell.value, ran.interrupted), ("'done'", None))
    true(ran.cell.seconds < 0.3, f"{ran.cell.seconds} s of work")


@promise("interrupt cuts a waiting cell", "interrupt")
async def interrupts(probe: Probe) -> None:
    session = await with_host(probe)
    asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
    started = time.perf_counter()
    ran = await session.run("x = 1\nhost('sleep', 30)", answer=echo)
    true(time.perf_counter() - started < 2, "it took too long")
    same(ran.interrupted, "deadline")
    true(ran.cell.error, "no error")
    session.interrupt("idle")  # harmless
    same(values(await probe.cells("x", session=session)), ["1"])


@promise("interrupt cuts a pool of waiting threads", "interrupt")
async def interrupts_threads(probe: Probe) -> None:
    session = await with_host(probe)
    asyncio.get_running_loop().call_later(0.1, session.interrupt, "deadline")
    code = """
from concurrent.futures import ThreadPoolExecutor
with ThreadPoolExecutor(4) as t:
    list(t.map(lambda i: host('sleep', 30), range(50)))
"""
    started = time.perf_counter()
    ran = await session.run(code, answer=echo)
    true(time.perf_counter() - started < 5, "it took too long")
    same(ran.interrupted, "deadline")
    same(values(await probe.cells("1", session=session)), ["1"])


@promise("a cancelled run leaves a usable session", "interrupt")
async def cancelled(probe: Probe) -> None:
    session = await with_host(probe)
    before = asyncio.all_tasks()
    for code in ("x = 1\nwhile True: pass", "host('sleep', 30)"):
        task = asyncio.ensure_future(session.run(code, answer=echo))
        await asyncio.sleep(0.1)
        task.cancel()
        await asyncio.wait((task,))
        true(task.cancelled(), "run did not pass the cancellation on")
    same(values(await probe.cells("x", session=session)), ["1"])
    true(asyncio.all_tasks() <= before, f"tasks are left: {asyncio.all_tasks() - before}")


@promise("one request at a time")
async def busy(probe: Probe) -> None:
    session = await with_host(probe)
    task = asyncio.ensure_future(session.run("host('sleep', .2)", answer=echo))
    await asyncio.sleep(0.05)
    try:
        await session.run("1", answer=echo)
    except SandboxError as error:
        true("busy" in str(error), str(error))
    else:
        raise Broken("two cells at once")
    ran: Ran = await task
    same(ran.cell.value, "0.2")


@promise("a cell that cannot be stopped is killed", "full_python", "kill")
async def killed(probe: Probe) -> None:
    session, other = await probe.open(), await probe.open()
    await session.run("import time; said = False", answer=echo)
    code = (  # all of it within the try: on a slow machine the first interrupt comes early
        "while True:\n    try:\n        if not said: said = True; print('written')\n        time.sleep(10)\n"
        "    except BaseException: pass"
    )
    try:
        await session.run(code, answer=echo, timeout_s=0.5)
    except SessionDied as error:
        same(error.stdout, "written\n")
    else:
        raise Broken("it was not killed")
    try:
        await session.run("1", answer=echo)
    except SessionDied:
        pass
    else:
        raise Broken("a dead session answered")
    same(values(await probe.cells("1", session=other)), ["1"])


@promise("a crash is told, with the output so far", "full_python", "kill")
async def crashes(probe: Probe) -> None:
    for code, sign in (
        ("import os\nos._exit(7)", "status 7"),
        ("import ctypes\nctypes.string_at(0)", "SIGSEGV"),
    ):
        session = await probe.open()
        try:
            await session.run(f"print('written')\n{code}", answer=echo)
        except SessionDied as error:
            same(error.stdout, "written\n")
            true(sign in str(error), str(error))
        else:
            raise Broken("the session lived on")


@promise("memory runs out as MemoryError", "limits_memory")
async def memory(probe: Probe) -> None:
    limit = probe.spec.memory_bytes
    codes = (f"x = 1\nb = 'a' * {2 * limit}", "many = []\nwhile True: many.append('a' * 100_000)")
    big, many, after = await probe.cells(*codes, "many = None\nx")
    for cell in (big, many):
        true(cell.error and "MemoryError" in cell.error, f"{cell.error}")
    same(after.value, "1")


@promise("a rude cell does not break the next", "full_python", "kill")
async def rude_cells(probe: Probe) -> None:
    session = await with_host(probe)
    for code in (
        "import sys, io\nsys.stdout = sys.stderr = io.StringIO()", "import os\nos.close(1); os.close(2); os.close(0)",
        "import sys\nsys.settrace(lambda *a: 1/0)", "import sys\nsys.setrecursionlimit(60)", "sys.modules.pop('__main__')",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)", "import builtins\ndel builtins.len, builtins.print",
        "__builtins__ = {}", "globals().clear()", "def f(): return f()\nf()", "raise BaseException('base')",
        "import os\nfor n in range(3, 200):\n    try: os.close(n)\n    except OSError: pass",
        "import json, time, os\njson.dumps = time.monotonic = os.write = os.read = None",
        "class E(Exception):\n    def __str__(self): raise SystemExit\nraise E", "import sys\nsys.stdout.close()",
    ):  # fmt: skip
        await session.run(code, answer=echo)
        [cell] = clean(
            await probe.cells("import os\nprint(len('abc'), host('echo', 1))\nos.getpid() > 0", session=session)
        )
        same((cell.stdout, cell.value), ("3 1\n", "True"), f"after {code!r}")
    ran = await session.run("while True: pass", answer=echo, timeout_s=0.2)
    same(ran.interrupted, "time")


# ------------------------------------------------------------------------------------------------ contexts


@promise("a context is bound, reserved and whole", "full_python")
async def contexts(probe: Probe) -> None:
    for value in ("short é\ud800", {"a": [1, (2, "b")], 3: "c"}, ["line é"] * 300_000, "long é " * 400_000):
        context = SharedContext(value)
        session = await probe.open(context=context)
        same(await session.get("context"), value)
        ran = await probe.cells("context = None", "type(context).__name__", session=session)
        same((ran[0].restored, ran[1].value), (("context",), repr(type(value).__name__)))
        same(SharedContext.decode(context.buffer()).digest, context.digest)


@promise("sessions over a context share its memory", "shares_context")
async def shared_context(probe: Probe) -> None:
    context = SharedContext("some text of some length " * 2_000_000)
    sessions = [await probe.open(context=context) for _ in range(3)]
    code = """
def private():
    try: return sum(int(l.split()[1]) for l in open('/proc/self/smaps_rollup') if l.startswith('Private')) * 1024
    except OSError: return 0
context.count('text'), private()
"""
    for session in sessions:
        [cell] = clean(await probe.cells(code, session=session))
        count, private = (int(part) for part in (cell.value or "").strip("()").split(","))
        true(count == 2_000_000 and private < 20 << 20, f"{private:,} bytes of its own")


# ------------------------------------------------------------------------------------------------ branches


@promise("a branch and its origin go separate ways", "fork")
async def branches(probe: Probe) -> None:
    session = await with_host(probe)
    await probe.cells("x = [1]\nprint('before')", session=session)
    branch = await session.fork()
    try:
        ran = await probe.cells("x.append(2)\nprint('branch')", "host('echo', x)", session=branch)
        same((ran[0].stdout, ran[1].value), ("branch\n", "[1, 2]"))
        same(values(await probe.cells("x", session=session)), ["[1]"])
        draw = "import random\nrandom.random()"
        same(values(await probe.cells(draw, session=branch)), values(await probe.cells(draw, session=session)))
        await session.close()
        same(values(await probe.cells("x", session=branch)), ["[1, 2]"])
        ran2 = await branch.run("while True: pass", answer=echo, timeout_s=0.2)
        same(ran2.interrupted, "time")
    finally:
        await branch.close_tree()


@promise("a cell that waits goes on in every branch", "fork")
async def branches_within(probe: Probe) -> None:
    session = await with_host(probe)
    asked, first = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def later(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        asked.set()
        return await first

    def always(value: str) -> Callable[[str, Sequence[Any], Mapping[str, Any]], Awaitable[Any]]:
        async def answer(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
            return args[0] + value

        return answer

    code = "print('once')\ngot = [host('echo', f'{i}') for i in range(2)]\ngot"
    origin = asyncio.ensure_future(session.run(code, answer=later))
    await asked.wait()
    branches = [await session.fork() for _ in range(2)]
    try:
        ran = await asyncio.gather(*(b.resume(answer=always(word)) for b, word in zip(branches, "ab", strict=True)))
        first.set_result("late")
        ran.append(await origin)
        same([each.cell.value for each in ran], ["['0a', '1a']", "['0b', '1b']", "['late', 'late']"])
        same([each.cell.stdout for each in ran], ["once\n"] * 3)
        same(values(await probe.cells("got", session=branches[0])), ["['0a', '1a']"])
    finally:
        await session.close_tree()


@promise("a fork that would lose something is refused", "fork")
async def refused_forks(probe: Probe) -> None:
    for code, sign in (
        (
            "import threading, time\nt = threading.Thread(target=time.sleep, args=(5,), daemon=True)\nt.start()",
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
            raise Broken(f"forked after {code!r}")
        same(values(await probe.cells("1", session=session)), ["1"])
    session = await probe.open()
    task = asyncio.ensure_future(session.run("import time; time.sleep(.3)", answer=echo))
    await asyncio.sleep(0.05)
    try:
        await session.fork()
    except SandboxError as error:
        true("working" in str(error), str(error))
    else:
        raise Broken("forked while it worked")
    await task


# ------------------------------------------------------------------------------------------------ walls


@promise("the host's environment is not seen", "full_python", "kill")
async def environment(probe: Probe) -> None:
    import os

    [cell] = clean(
        await probe.cells("""
import os, sys
try: found = sorted(os.listdir('.'))
except PermissionError: found = []
sorted(os.environ), found, sys.stdin.read()
""")
    )
    seen = set(msgspec.json.decode((cell.value or "").split("]")[0].lstrip("(").replace("'", '"') + "]"))
    allowed = {"LANG", "LC_CTYPE", "HOME", "TMPDIR", "PYTHONHASHSEED", "GLIBC_TUNABLES", "PATH"}
    foreign = {name for name in seen & set(os.environ) if name not in allowed and not name.endswith("_NUM_THREADS")}
    true(not foreign, f"it sees {sorted(foreign)}")
    true((cell.value or "").endswith("], [], '')"), f"its folder is not empty, or it has an input: {cell.value}")


@promise("no descriptor of the host is inherited", "full_python", "kill")
async def descriptors(probe: Probe) -> None:
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


@promise("files of the host are out of reach", "isolates_files")
async def files(probe: Probe) -> None:
    """A container has files of its own at the usual places: what counts is that none is the host's."""
    import os
    import tempfile

    with tempfile.NamedTemporaryFile("w", prefix="ramify-secret-") as secret:
        secret.write("the host's own")
        secret.flush()
        paths = [secret.name, f"/proc/{os.getpid()}/environ", f"/proc/{os.getpid()}/cmdline", __file__]
        code = f"""
def reach(path):
    try:
        return bool(open(path).read(1))
    except OSError:
        return False
[reach(path) for path in {paths!r}]
"""
        same(values(await probe.cells(code)), [str([False] * len(paths))])


@promise("the network is out of reach", "full_python", "isolates_network")
async def network(probe: Probe) -> None:
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


@promise("other processes are out of reach", "full_python", "isolates_processes")
async def processes(probe: Probe) -> None:
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


@promise("a closed session is over")
async def closes(probe: Probe) -> None:
    session = await probe.open()
    await session.close()
    await session.close()
    try:
        await session.run("1", answer=echo)
    except SessionDied:
        return
    raise Broken("a closed session answered")
