"""The sandbox of programs for training: cells that are programs or answers to the letter are worked
out in this process.

Nothing that a model wrote is ever executed here. A cell is read by the grammar of
``program_library.py`` and worked out by plain arithmetic; what the grammar does not know is
answered with one line that says so. On programs it says what any other sandbox does where they run
as Python (a test compares them), without a process for each session. Named by its module:
``SandboxSpec(provider="ramify.tasks.programs.evaluator", allow_weaker=True)``.
"""

from __future__ import annotations

import re
from typing import Any

from ramify.errors import HostCallError, SandboxError
from ramify.sandbox.base import (
    Answer,
    CellResult,
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
)
from ramify.tasks.programs.program_library import Program, ProgramLibrary, RuleViolation
from ramify.tasks.programs.vocabulary import NO_PROGRAM
from ramify.types.trajectory import Cell

_ANSWER = re.compile(r"FINAL\((\d{1,9})\)")
_CAPS = SandboxCapabilities(
    isolates_files=True,
    isolates_network=True,
    isolates_processes=True,
    limits_memory=True,
    kill=True,
    full_python=False,
)
"""All true: what is not executed reaches nothing."""


class ProgramSession:
    """Implements ``sandbox.base.Session`` as far as programs go."""

    caps = _CAPS

    def __init__(self) -> None:
        self._library: ProgramLibrary | None = None
        self._cells = 0

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """The number that a program comes to, or the error that it raises."""
        self._cells += 1
        final = _ANSWER.fullmatch(code)
        if final is not None:
            return CellResult(
                Cell(code), {"prelude": {"cell": self._cells, "final": int(final[1])}}
            )
        value, error = self._work_out(code)
        return CellResult(Cell(code, value=value, error=error), {"prelude": {"cell": self._cells}})

    def _work_out(self, code: str) -> tuple[str | None, str | None]:
        """(what is echoed, what is raised)"""
        if self._library is None:
            raise SandboxError(
                "the sandbox of programs was opened for another task: it needs the library "
                "installed"
            )
        program = Program.read(code)
        if program is None:
            return None, NO_PROGRAM
        found = self._library.run(program)
        return (
            (None, self._library.message(program, found))
            if isinstance(found, RuleViolation)
            else (str(found), None)
        )

    async def install(self, module: str, source: str) -> None:
        if module != "ops":
            return  # what others install can only be called by code, and no code is run
        try:
            self._library = ProgramLibrary.of_source(source)
        except ValueError as error:
            raise SandboxError(
                f"the sandbox of programs works with their library alone: {error}"
            ) from None

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        raise SandboxError(
            f"the sandbox of programs holds no variables, and '{name}' was to be one: use another"
        )

    async def get(self, name: str) -> Any:
        raise HostCallError("NameError", f"name '{name}' is not defined")

    async def fork(self) -> ProgramSession:
        branch = ProgramSession()
        branch._library, branch._cells = self._library, self._cells
        return branch

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        raise SandboxError("a program never waits for its host: there is nothing to resume")

    def interrupt(self, reason: str) -> None:
        """Nothing ever runs."""

    async def close(self) -> None:
        """Nothing is held."""

    async def close_tree(self) -> None:
        """Nothing is held."""


class ProgramSandbox:
    """Implements ``sandbox.base.Sandbox``."""

    caps = _CAPS
    warning: str | None = None

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> ProgramSession:
        if context is not None:
            raise SandboxError(
                "the sandbox of programs holds no context: use another for this task"
            )
        return ProgramSession()

    async def close(self) -> None:
        """Nothing is held."""


def open_provider(spec: SandboxSpec) -> ProgramSandbox:
    """What ``sandbox.base.open_sandbox`` calls."""
    return ProgramSandbox()
