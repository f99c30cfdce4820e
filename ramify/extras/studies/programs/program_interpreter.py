"""A sandbox provider for the task ``programs``.

It evaluates programs and answers within this process instead of running code.

No code that a model wrote is ever executed. A cell is parsed with the grammar of
``toy_program_language.py`` and evaluated with plain arithmetic; any other cell gets a one-line
error. The results equal those of a sandbox that runs the programs as Python (a test compares them),
but no session needs a process. Select the provider by the name of this module:
``SandboxSpec(provider="ramify.extras.studies.programs.program_interpreter", allow_weaker=True)``.
"""

from __future__ import annotations

import re
from typing import Any

from ramify.errors import HostCallError, SandboxError
from ramify.extras.studies.programs.toy_program_language import (
    NO_PROGRAM,
    ToyProgram,
    ToyWordMeanings,
    ViolatedProgramRule,
)
from ramify.sandbox.base import (
    Answer,
    CellResult,
    PreparedContext,
    SandboxCapabilities,
    SandboxSpec,
)
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
"""Capabilities of the sandbox. All isolation properties hold, because no code is executed."""


class ProgramInterpreterSession:
    """A session that can only evaluate programs of the task ``programs``.

    Implements the part of ``sandbox.base.Session`` that programs need.
    """

    caps = _CAPS

    def __init__(self) -> None:
        self._library: ToyWordMeanings | None = None
        self._cells = 0

    async def run(self, code: str, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        """Evaluate a cell, which is either a program or a final answer.

        The result holds the program's value or its error.
        """
        self._cells += 1
        final = _ANSWER.fullmatch(code)
        if final is not None:
            return CellResult(
                Cell(code), {"prelude": {"cell": self._cells, "final": int(final[1])}}
            )
        value, error = self._work_out(code)
        return CellResult(Cell(code, value=value, error=error), {"prelude": {"cell": self._cells}})

    def _work_out(self, code: str) -> tuple[str | None, str | None]:
        """Evaluate a program in the toy language, and return its value or its error.

        Returns its value and its error. One of the two is None.
        """
        if self._library is None:
            raise SandboxError(
                "the programs sandbox was opened for another task: its library of programs is not "
                "installed"
            )
        program = ToyProgram.parse(code)
        if program is None:
            return None, NO_PROGRAM
        outcome = self._library.run(program)
        return (
            (None, self._library.error_message(program, outcome))
            if isinstance(outcome, ViolatedProgramRule)
            else (str(outcome), None)
        )

    async def install(self, module: str, source: str) -> None:
        if module != "ops":
            return  # only code can call other modules, and no code is executed
        try:
            self._library = ToyWordMeanings.from_source(source)
        except ValueError as error:
            raise SandboxError(
                f"the sandbox of programs accepts only the library of programs: {error}"
            ) from None

    async def set(self, name: str, value: Any, *, reserved: bool = False) -> None:
        raise SandboxError(
            f"the sandbox of programs holds no variables, so '{name}' cannot be set: use another "
            "sandbox"
        )

    async def get(self, name: str) -> Any:
        raise HostCallError("NameError", f"name '{name}' is not defined")

    async def fork(self) -> ProgramInterpreterSession:
        branch = ProgramInterpreterSession()
        branch._library, branch._cells = self._library, self._cells
        return branch

    async def resume(self, *, answer: Answer, timeout_s: float | None = None) -> CellResult:
        raise SandboxError("a program never waits for its host: there is nothing to resume")

    def interrupt(self, reason: str) -> None:
        """Do nothing, because no code is ever running."""

    async def close(self) -> None:
        """Do nothing, because a session holds no resources."""

    async def close_tree(self) -> None:
        """Do nothing, because a session holds no resources."""


class ToyProgramSandbox:
    """A sandbox whose sessions can only evaluate programs of the task ``programs``.

    Implements ``sandbox.base.Sandbox``.
    """

    caps = _CAPS
    warning: str | None = None

    async def open(
        self, *, context: PreparedContext | None = None, seed: str = ""
    ) -> ProgramInterpreterSession:
        if context is not None:
            raise SandboxError(
                "the sandbox of programs holds no context: use another sandbox for this task"
            )
        return ProgramInterpreterSession()

    async def close(self) -> None:
        """Do nothing, because the sandbox holds no resources."""


def open_provider(spec: SandboxSpec) -> ToyProgramSandbox:
    """Return the sandbox that evaluates programs without executing code.

    ``sandbox.base.open_sandbox`` calls this function.
    """
    return ToyProgramSandbox()
