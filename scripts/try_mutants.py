"""Run tests on mutants of one module without a new process for each: a process that has collected
the tests forks for every mutant. ``scripts/mutate`` runs this file in a copy of the tree, in
Ramify's environment.

    try_mutants.py cover MODULE RESULT TEST...    which tests run which lines, and their seconds
    try_mutants.py serve MODULE IN OUT TEST...    try the mutants that arrive at descriptor IN

    {"source": …, "tests": [[id, limit in seconds], …]}  ──>  {"outcome": …, "by": id of a test}

In the fork, the changed functions get their new code. A mutant outside of functions
(``"fresh": true``) needs a new import, so it gets a new process. The changed file is also in the
tree, for tests that start processes. The outcome is ``killed`` (a test failed), ``timed out`` (a
test took longer than its limit) or ``survived``. It does not decide which tests are run (see
``mutate``).
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

_PR_SET_CHILD_SUBREAPER = 36
_START_S = 60.0
"""Maximum seconds that a new process needs to start and import its modules."""
PYTEST = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]


class CoveringTests:
    """Plugin that records for each test its lines and its duration."""

    def __init__(self, module: Path, result: Path) -> None:
        import coverage

        self.coverage = coverage.Coverage(data_file=None, include=[str(module)], config_file=False)
        self.module = module
        self.result = result
        self.seconds: dict[str, float] = {}
        self.failed: set[str] = set()
        self.with_processes: set[str] = set()
        """Tests that start another Python process, whose lines coverage does not see."""
        self.test = ""
        sys.addaudithook(self.note_process)
        self.coverage.start()

    def note_process(self, event: str, args: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and self.test and str(args[0]) == sys.executable:
            words = " ".join(map(str, args[1]))
            if "ramify" in words and "sandbox" not in words:
                self.with_processes.add(self.test)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        self.coverage.switch_context(item.nodeid)
        self.test = item.nodeid
        began = time.perf_counter()
        result = yield
        self.seconds[item.nodeid] = time.perf_counter() - began
        self.coverage.switch_context("")
        return result

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self.coverage.stop()
        lines = self.coverage.get_data().contexts_by_lineno(str(self.module))
        passed = {test: s for test, s in self.seconds.items() if test not in self.failed}
        found = {"lines": lines, "seconds": passed, "failed": sorted(self.failed)}
        found["with_processes"] = sorted(self.with_processes - self.failed)
        self.result.write_text(json.dumps(found))


class MutantServer:
    """Plugin that tries mutants in place of running the session's tests."""

    def __init__(self, module: Path, source: int, sink: int) -> None:
        self.module = module
        self.original = module.read_text()
        self.requests = os.fdopen(source)
        self.answers = os.fdopen(sink, "w")
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed = self.has_failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for line in self.requests:
            request = json.loads(line)
            temporary = tempfile.mkdtemp(prefix="ramify-mutant-")
            self.module.write_text(request["source"])
            try:
                run = self.in_new_process if request["fresh"] else self.in_fork
                answer = run(request, items, temporary)
            finally:
                self.module.write_text(self.original)
                reap_orphans()
                shutil.rmtree(temporary, ignore_errors=True)
            self.answers.write(json.dumps(answer) + "\n")
            self.answers.flush()
        return True

    def in_fork(
        self, request: dict[str, Any], items: dict[str, pytest.Item], temporary: str
    ) -> dict[str, Any]:
        tests = [(test, limit_s) for test, limit_s in request["tests"] if test in items]
        progress, report = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(progress)
            self.run_and_exit(
                request["source"], [items[test] for test, _ in tests], report, temporary
            )
        os.close(report)
        try:
            for test, limit_s in tests:
                if not select.select([progress], [], [], limit_s)[0]:
                    return {"outcome": "timed out", "by": test}
                mark = os.read(progress, 1)
                if mark != b".":
                    return {"outcome": "killed", "by": test}
            return {"outcome": "survived", "by": ""}
        finally:
            os.close(progress)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)

    def run_and_exit(
        self, source: str, items: list[pytest.Item], report: int, temporary: str
    ) -> None:
        """In the fork: change the module, run ``items``, and write a dot for each that passes."""
        try:
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = temporary
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            self.change_functions(source)
            for item, following in zip(items, [*items[1:], None], strict=True):
                item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
                if self.has_failed:
                    break
                os.write(report, b".")
        finally:
            os._exit(1)

    def change_functions(self, source: str) -> None:
        """Replace the code of each function in the module by its code in ``source``."""
        path = str(self.module)
        before = dict(functions_in(compile(self.original, path, "exec")))
        after = dict(functions_in(compile(source, path, "exec")))
        changed = {key: after[key] for key, code in before.items() if code != after.get(key, code)}
        for each in gc.get_objects():
            if type(each) is types.FunctionType and each.__code__.co_filename == path:
                code = changed.get((each.__code__.co_qualname, each.__code__.co_firstlineno))
                if code is not None:
                    each.__code__ = code

    def in_new_process(
        self, request: dict[str, Any], items: dict[str, pytest.Item], temporary: str
    ) -> dict[str, Any]:
        tests = [test for test, _ in request["tests"]]
        command = [sys.executable, "-m", "pytest", *PYTEST, "-x", "-rf", *tests]
        limit_s = _START_S + sum(limit_s for _, limit_s in request["tests"])
        env = {**os.environ, "PYTEST_DEBUG_TEMPROOT": temporary}
        child = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            text, _ = child.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            return {"outcome": "timed out", "by": ""}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
        if child.returncode == 0:
            return {"outcome": "survived", "by": ""}
        by = next((test for test in tests if f"FAILED {test}" in text), "")
        return {"outcome": "killed", "by": by}


def functions_in(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield (each.co_qualname, each.co_firstlineno), each
            yield from functions_in(each)


def reap_orphans() -> None:
    """End all processes that the mutant left running. They are children of this process now."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while alive := children.read_text().split():
        for pid in map(int, alive):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main() -> int:
    role, module = sys.argv[1], Path.cwd() / sys.argv[2]
    sys.path.insert(0, str(Path.cwd()))
    if role == "cover":
        sys.path.append(os.environ["MUTATION_TOOLS"])  # last, so that nothing of ours is replaced
        return pytest.main(
            [*PYTEST, *sys.argv[4:]], plugins=[CoveringTests(module, Path(sys.argv[3]))]
        )
    source, sink = int(sys.argv[3]), int(sys.argv[4])
    return pytest.main([*PYTEST, *sys.argv[5:]], plugins=[MutantServer(module, source, sink)])


if __name__ == "__main__":
    sys.exit(main())
