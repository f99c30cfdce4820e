"""Run tests on mutants of one module without a new process for each: a process that has collected
the tests forks for every mutant. ``scripts/mutate`` runs this file in a copy of the tree, in
Ramify's environment.

    try_mutants.py cover MODULE RESULT TEST...    which tests run which lines, and their seconds
    try_mutants.py serve MODULE IN OUT TEST...    try the mutants that arrive at descriptor IN

    {"source": …, "tests": [[id, limit in seconds], …]}  ──>  {"outcome": …, "by": id of a test}

In the fork, the changed functions get their new code. A mutant outside of functions
(``"fresh": true``) needs a new import, so its fork is of another process, which has imported what
the tests need except the tree. The changed file is also in the tree, for tests that start
processes. The outcome is ``killed`` (a test failed), ``timed out`` (a test took longer than its
limit) or ``survived``. It does not decide which tests are run (see ``mutate``).
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import select
import shutil
import signal
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

_PR_SET_CHILD_SUBREAPER = 36
_IMPORT_S = 60.0
"""Maximum seconds that a fork needs to import the tree and collect its tests."""
PYTEST = ["-q", "-s", "-p", "no:cacheprovider", "-p", "no:xdist", "-o", "timeout=0"]
HANGS_UNDER_COVERAGE = (
    "tests/engine/test_outages.py"
    "::test_fixable_call_failure_suspends_the_run_instead_of_reaching_the_code"
)
"""A test that CPython 3.11.7 does not end while coverage traces it (docs/log.md). It tries no
mutant, because a mutant is tried only by the tests that are known to run its line."""
Tests = list[tuple[str, float]]
"""(id, limit in seconds) of each test"""


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

    def __init__(self, module: Path, source: int, sink: int, importer: Importer) -> None:
        self.module = module
        self.original = module.read_text()
        self.requests = os.fdopen(source)
        self.answers = os.fdopen(sink, "w")
        self.importer = importer

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        items = {item.nodeid: item for item in session.items}
        self.importer.begin()
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        for line in self.requests:
            request = json.loads(line)
            temporary = tempfile.mkdtemp(prefix="ramify-mutant-")
            self.module.write_text(request["source"])
            try:
                if request["fresh"]:
                    answer = self.importer.ask(request["tests"], temporary)
                else:
                    tests = [(test, limit_s) for test, limit_s in request["tests"] if test in items]
                    chosen = [items[test] for test, _ in tests]
                    run = functools.partial(self.run, request["source"], chosen)
                    answer = in_fork(tests, temporary, run)
            finally:
                self.module.write_text(self.original)
                reap_orphans(but=self.importer.pid)
                shutil.rmtree(temporary, ignore_errors=True)
            self.answers.write(json.dumps(answer) + "\n")
            self.answers.flush()
        return True

    def run(self, source: str, items: list[pytest.Item], report: int) -> None:
        """In the fork: change the module, and run ``items``."""
        self.change_functions(source)
        reporter = Reporter(report)
        items[0].config.pluginmanager.register(reporter)
        reporter.run(items)

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


class Importer:
    """A process that has imported the packages of the tests but nothing of the tree. Its forks
    import the changed tree, and run tests."""

    def __init__(self) -> None:
        """Fork the process. It must be the first use of this file, before the tree is imported."""
        source, requests = os.pipe()
        answers, sink = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(requests)
            os.close(answers)
            try:
                self._serve(os.fdopen(source), os.fdopen(sink, "w"))
            finally:
                os._exit(0)
        os.close(source)
        os.close(sink)
        self._requests = os.fdopen(requests, "w")
        self._answers = os.fdopen(answers)

    def begin(self) -> None:
        """Have it import all modules that this process has imported from outside the tree."""
        tree = str(Path.cwd())
        names = [
            name
            for name, module in list(sys.modules.items())
            if not (getattr(module, "__file__", None) or tree).startswith(tree)
        ]
        self._send(names)

    def ask(self, tests: list[list[Any]], temporary: str) -> dict[str, str]:
        """Return the outcome of ``tests`` on the tree as it is now."""
        self._send({"tests": tests, "temporary": temporary})
        answer: dict[str, str] = json.loads(self._answers.readline())
        return answer

    def _send(self, message: Any) -> None:
        self._requests.write(json.dumps(message) + "\n")
        self._requests.flush()

    def _serve(self, requests: Iterator[str], answers: Any) -> None:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for name in json.loads(next(requests)):
                with contextlib.suppress(Exception):
                    importlib.import_module(name)
        for line in requests:
            request = json.loads(line)
            tests = [test for test, _ in request["tests"]]
            limits = [("", _IMPORT_S), *request["tests"]]
            run = functools.partial(collect, tests)
            answer = in_fork(limits, request["temporary"], run)
            reap_orphans()
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def collect(tests: list[str], report: int) -> None:
    """In a fork of the importer: collect ``tests``, and run them in this order."""
    # Packages that pytest would rewrite are imported already.
    options = [*PYTEST, "-W", "ignore::pytest.PytestAssertRewriteWarning"]
    pytest.main([*options, *tests], plugins=[Reporter(report, tests)])


class Reporter:
    """Plugin of a fork that writes a dot for each test that passes, and stops at the first failure.
    If it has collected the tests, it writes a dot for that, too."""

    def __init__(self, report: int, tests: Sequence[str] = ()) -> None:
        self.report = report
        self.tests = tests
        self.has_failed = False

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.has_failed = self.has_failed or report.failed

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if not session.testsfailed:
            items = {item.nodeid: item for item in session.items}
            os.write(self.report, b".")
            self.run([items[test] for test in self.tests])
        return True

    def run(self, items: list[pytest.Item]) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.has_failed:
                break
            os.write(self.report, b".")


def in_fork(tests: Tests, temporary: str, run: Callable[[int], None]) -> dict[str, str]:
    """Call ``run(descriptor)`` in a fork, which writes a dot for each of ``tests`` that passes."""
    progress, report = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(progress)
            os.setsid()
            os.environ["PYTEST_DEBUG_TEMPROOT"] = temporary
            nothing = os.open(os.devnull, os.O_RDWR)
            for fd in (0, 1, 2):
                os.dup2(nothing, fd)
            run(report)
        finally:
            os._exit(1)
    os.close(report)
    try:
        for test, limit_s in tests:
            if not select.select([progress], [], [], limit_s)[0]:
                return {"outcome": "timed out", "by": test}
            if os.read(progress, 1) != b".":
                return {"outcome": "killed", "by": test}
        return {"outcome": "survived", "by": ""}
    finally:
        os.close(progress)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)


def functions_in(code: types.CodeType) -> Iterator[tuple[tuple[str, int], types.CodeType]]:
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield (each.co_qualname, each.co_firstlineno), each
            yield from functions_in(each)


def reap_orphans(but: int = 0) -> None:
    """End all processes that the mutant left running. They are children of this process now, as is
    the process ``but``, which stays."""
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    while alive := [pid for pid in map(int, children.read_text().split()) if pid != but]:
        for pid in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def main() -> int:
    role, module = sys.argv[1], Path.cwd() / sys.argv[2]
    sys.path.insert(0, str(Path.cwd()))
    if role == "cover":
        sys.path.append(os.environ["MUTATION_TOOLS"])  # last, so that nothing of ours is replaced
        options = [*PYTEST, "--deselect", HANGS_UNDER_COVERAGE]
        return pytest.main(
            [*options, *sys.argv[4:]], plugins=[CoveringTests(module, Path(sys.argv[3]))]
        )
    source, sink = int(sys.argv[3]), int(sys.argv[4])
    server = MutantServer(module, source, sink, Importer())
    return pytest.main([*PYTEST, *sys.argv[5:]], plugins=[server])


if __name__ == "__main__":
    sys.exit(main())
