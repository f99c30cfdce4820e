"""A program as an answer: run in the jail against the item's tests.

    metadata["tests"]: ["assert add(2, 3) == 5", {"input": "2 3", "output": "5"}, …]

An ``assert`` is run after the program in its session; a test of input and output runs the program
anew, and what it prints is compared here, outside. A program shares its session with the asserts on
it, and one that means to can bend them; where that matters, give tests of input and output, whose
right answers the session never sees. Each test has a session of its own. Decides nothing of how
code is confined: that is the sandbox's.
"""

from __future__ import annotations

import ast
import asyncio
import atexit
import contextlib
import re
import threading
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from ramify.errors import ConfigError, HostCallError, RamifyError, SessionDied
from ramify.sandbox.base import CellResult, Sandbox, SandboxSpec, open_sandbox
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import as_text

T = TypeVar("T")
_FENCE = re.compile(r"```(?:python|py|repl)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_OUTPUT = 200_000


class UnitTestScore(msgspec.Struct, frozen=True):
    """1 where the program passes all tests, or with ``share`` the share that it passes."""

    timeout_s: float = 10.0
    """Of one test, the program's own run included."""
    share: bool = False
    sandbox: SandboxSpec = SandboxSpec(cell_s=60.0, pool=1)

    def __call__(self, answer: Any, item: Item) -> float:
        tests = _tests(item)
        program = code_of(answer)
        if program is None:
            return 0.0
        passed = _bench.run(self._passed(program, tests))
        return sum(passed) / len(tests) if self.share else float(all(passed))

    async def _passed(self, program: str, tests: Sequence[str | Mapping[str, str]]) -> list[bool]:
        sandbox = _bench.sandbox(self.sandbox)
        found = []
        for test in tests:
            found.append(await self._passes(sandbox, program, test))
            if not found[-1] and not self.share:
                return found
        return found

    async def _passes(self, sandbox: Sandbox, program: str, test: str | Mapping[str, str]) -> bool:
        session = await sandbox.open()
        try:
            if isinstance(test, str):
                if (await self._run(session.run, program)).cell.error is not None:
                    return False
                return (await self._run(session.run, test)).cell.error is None
            await session.set("__given__", test["input"])
            await self._run(
                session.run, "import io, sys\nsys.stdin = io.StringIO(__given__)\ndel __given__"
            )
            ran = await self._run(session.run, program)
            return ran.cell.error is None and _same_output(ran.cell.stdout, test["output"])
        except (SessionDied, HostCallError):  # it was killed, or fell over: its own doing
            return False
        finally:
            await session.close()

    async def _run(self, run: Any, code: str) -> CellResult:
        ran: CellResult = await run(code, answer=_nobody, timeout_s=self.timeout_s)
        return ran


def code_of(answer: Any) -> str | None:
    """The program in ``answer``: its last fenced block, or all of it where there is none; None
    where it is no Python."""
    text = as_text(answer)
    if text is None:
        return None
    blocks = _FENCE.findall(text)
    code = blocks[-1] if blocks else text
    try:
        ast.parse(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return code


def _tests(item: Item) -> Sequence[str | Mapping[str, str]]:
    tests = item.metadata.get("tests")
    if not isinstance(tests, list | tuple) or not tests:
        raise ConfigError(
            f"item {item.id}: unit tests are a list in metadata['tests']; it has {tests!r:.60}"
        )
    for each in tests:
        is_pair = isinstance(each, Mapping) and {"input", "output"} <= each.keys()
        if not isinstance(each, str) and not is_pair:
            raise ConfigError(
                f"item {item.id}: a test is code that asserts, or {{'input': …, 'output': …}}; "
                f"this is {each!r:.60}"
            )
    return tests


def _same_output(printed: str, wanted: str) -> bool:
    """Line by line, blanks at ends of lines and of the whole aside."""
    if len(printed) > _MAX_OUTPUT:
        return False
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, wanted)]
    return lines[0] == lines[1]


async def _nobody(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise HostCallError("NameError", f"name '{name}' is not defined")


class _Bench:
    """One event loop in one thread, with the sandboxes of all tests: scores are asked for from many
    threads, and a jail takes a tenth of a second to open."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._open: dict[bytes, Sandbox] = {}

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=self._loop.run_forever, name="ramify unit tests", daemon=True
                )
                self._thread.start()
                atexit.register(self.close)
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(work, loop).result()

    def sandbox(self, spec: SandboxSpec) -> Sandbox:
        """On the loop."""
        key = msgspec.json.encode(spec)
        if key not in self._open:
            self._open[key] = open_sandbox(spec)
        return self._open[key]

    def close(self) -> None:
        """End all sessions and the thread. Idempotent; the next test opens them again."""
        with self._lock:
            loop, thread, self._loop = self._loop, self._thread, None
            if loop is None or thread is None:
                return
            sandboxes, self._open = list(self._open.values()), {}
        for sandbox in sandboxes:
            with contextlib.suppress(RamifyError, OSError, TimeoutError):
                asyncio.run_coroutine_threadsafe(sandbox.close(), loop).result(10.0)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10.0)
        loop.close()


_bench = _Bench()
close = _bench.close
unit_tests = UnitTestScore()
"""All tests, ten seconds each."""
