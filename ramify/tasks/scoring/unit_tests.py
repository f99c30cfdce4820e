"""Scores answers that are programs.

Each program runs in a sandbox against the unit tests of its task item.

    metadata["tests"]: ["assert add(2, 3) == 5", {"input": "2 3", "output": "5"}, …]

An ``assert`` runs after the program in the same session. An input/output test runs the program with
its standard input, and the output is compared in the host. Each test has its own session.

A malicious program can tamper with asserts that share its session. If that matters, use
input/output tests, whose expected outputs never enter the session. How code is confined is
described in ``sandbox/``.
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
from ramify.sandbox.base import (
    AnySandboxSpec,
    CellResult,
    JailSpec,
    Sandbox,
    SandboxSpec,
    open_sandbox,
    provider_spec,
)
from ramify.tasks.base import Item
from ramify.tasks.scoring.answer_text import as_text

T = TypeVar("T")
_FENCE = re.compile(r"```(?:python|py|repl)?[ \t]*\n(.*?)```", re.DOTALL)
_MAX_OUTPUT = 200_000


class UnitTestScorer(msgspec.Struct, frozen=True):
    """A scorer that returns 1 if a program passes all unit tests of its task item, otherwise 0.

    With ``share``, the score is the fraction of tests that it passes.

    Example:
        tasks.UnitTestScorer(share=True)    # half of the tests pass: 0.5
    """

    timeout_s: float = 10.0
    """Time limit in seconds for one test, which includes running the program."""
    share: bool = False
    sandbox: AnySandboxSpec = JailSpec(cell_s=60.0, pool=1)

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "sandbox", provider_spec(self.sandbox))

    def __call__(self, answer: Any, item: Item) -> float:
        tests = _tests(item)
        program = extract_code(answer)
        if program is None:
            return 0.0
        passed = _bench.run(self._run_tests(program, tests))
        return sum(passed) / len(tests) if self.share else float(all(passed))

    async def _run_tests(
        self, program: str, tests: Sequence[str | Mapping[str, str]]
    ) -> list[bool]:
        sandbox = _bench.sandbox(self.sandbox)
        results = []
        for test in tests:
            results.append(await self._passes_test(sandbox, program, test))
            if not results[-1] and not self.share:
                return results
        return results

    async def _passes_test(
        self, sandbox: Sandbox, program: str, test: str | Mapping[str, str]
    ) -> bool:
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
            result = await self._run(session.run, program)
            return result.cell.error is None and _same_output(result.cell.stdout, test["output"])
        except (SessionDied, HostCallError):  # the program's fault: it was killed or crashed
            return False
        finally:
            await session.close()

    async def _run(self, run: Any, code: str) -> CellResult:
        result: CellResult = await run(code, answer=_no_host_calls, timeout_s=self.timeout_s)
        return result


def extract_code(answer: Any) -> str | None:
    """Return the program that an answer contains.

    It is the last fenced code block, or the whole text if there is none. Returns None if it is not
    valid Python.
    """
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
    for test in tests:
        is_pair = isinstance(test, Mapping) and {"input", "output"} <= test.keys()
        if not isinstance(test, str) and not is_pair:
            raise ConfigError(
                f"item {item.id}: a test is code that asserts, or {{'input': …, 'output': …}}; "
                f"this is {test!r:.60}"
            )
    return tests


def _same_output(printed: str, expected: str) -> bool:
    """Return True if a program's printed output has the same lines as the expected output.

    Trailing blanks, and empty lines at the beginning and end, are ignored.
    """
    if len(printed) > _MAX_OUTPUT:
        return False
    lines = [[line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected)]
    return lines[0] == lines[1]


async def _no_host_calls(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise HostCallError("NameError", f"name '{name}' is not defined")


class _Bench:
    """A background thread in which the sandboxes of all unit tests run on one event loop.

    Many threads share these sandboxes, because opening one takes 0.1 s.
    """

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
        """Return the open sandbox for ``spec``, and open it first if necessary.

        Call this only on the event loop.
        """
        key = msgspec.json.encode(spec)
        if key not in self._open:
            self._open[key] = open_sandbox(spec)
        return self._open[key]

    def close(self) -> None:
        """Close all sandboxes and stop the thread.

        The next test starts them again.
        """
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
unit_tests = UnitTestScorer()
"""Scores 1 if an answer passes all tests, with a time limit of ten seconds per test."""
