"""Run a program that answers one task item, and limit its running time and its output.

    words, variables ──> ChildProcess ── output ──> ProgramOutcome
                              │ too late, or too much output: SIGTERM, then SIGKILL

The program is not trusted. It gets few environment variables of this process, and no key except the
one for its own metered access to the model. It works in an empty folder that is deleted afterwards.
A guard process ends the program together with everything that it started. The output is interpreted
by ``command.py`` and ``peer_libraries.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ramify.actors.child_process import ChildProcess
from ramify.actors.command_template import passed_environment
from ramify.actors.output_pipe import OutputPipe
from ramify.engine.event_loop_thread import run_in_daemon_thread
from ramify.evaluate.systems.base import MeteredModelAccess
from ramify.terminal_sanitizer import replace_unprintable

MAX_OUTPUT_BYTES = 8 << 20
"""Maximum output of a program, in bytes, before it is stopped."""
_KEPT_ERROR_BYTES = 1 << 16
_END_S = 2.0
"""Seconds between SIGTERM and SIGKILL."""
_QUOTED = 300
"""Maximum characters of error output that are quoted."""


class ProgramOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result of running a program: its output, or the reason why it failed."""

    output: str = ""
    """Text that the program wrote to stdout."""
    failure: str = ""
    """Sentence that says why the output is unusable; empty if the program succeeded."""
    is_late: bool = False
    """True if the program was stopped at its time limit."""
    seconds: float = 0.0


async def run_program(
    words: Sequence[str],
    folder: Path,
    seat: MeteredModelAccess,
    timeout_s: float,
    *,
    needs_output: bool = True,
) -> ProgramOutcome:
    """Run a program in a folder and return its output, or the reason why it failed.

    Its environment variables hold the address and key of its access to the model (``seat``). If
    ``needs_output`` is true, a program that writes nothing to stdout has failed. Cancelling the
    call ends the program.
    """
    began = time.perf_counter()
    run = _ProgramRun()
    environment = {**passed_environment(), **_variables_of(seat)}
    try:
        how = await run.ended(words, environment, folder, timeout_s)
    except OSError as error:
        hint = "; give the question in a shorter form" if error.errno == errno.E2BIG else ""
        failure = f"{words[0]} cannot be started: {error.strerror}{hint}"
        return ProgramOutcome(failure=failure, seconds=time.perf_counter() - began)
    errors = _last_words(run.errors, seat)
    failures = {
        "late": f"it did not end within {timeout_s:g} s and was ended",
        "flood": f"it wrote more than {MAX_OUTPUT_BYTES >> 20} MB and was ended",
    }
    failure = failures.get(how, "")
    if not failure and run.status:
        ended = "was killed by signal" if run.status < 0 else "ended with status"
        failure = f"it {ended} {abs(run.status)}" + (f": {errors}" if errors else "")
    elif not failure and needs_output and not run.output.strip():
        failure = "it ended and wrote nothing to stdout" + (f": {errors}" if errors else "")
    return ProgramOutcome(
        output=run.output,
        failure=failure,
        is_late=how == "late",
        seconds=time.perf_counter() - began,
    )


def _variables_of(seat: MeteredModelAccess) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": seat.base_url,
        "OPENAI_API_BASE": seat.base_url,
        "OPENAI_API_KEY": seat.key,
        "OPENAI_MODEL": seat.model,
        "PYTHONUNBUFFERED": "1",
    }


def _last_words(errors: str, seat: MeteredModelAccess) -> str:
    """Return the end of a program's error output as one line, without the model's API key."""
    lines = [line.strip() for line in errors.replace(seat.key, "KEY").splitlines() if line.strip()]
    return replace_unprintable(" | ".join(lines)[-_QUOTED:])


class _ProgramRun:
    """A running program of an evaluated system, and the output collected from it so far."""

    def __init__(self) -> None:
        self.status = 0
        self.output = ""
        self.errors = ""
        self._loop = asyncio.get_running_loop()
        self._how: asyncio.Future[str] = self._loop.create_future()
        """How the run ended: ``end`` (by itself), ``late`` (at its time limit) or ``flood`` (it
        printed too much)."""

    async def ended(
        self, words: Sequence[str], environment: Mapping[str, str], folder: Path, timeout_s: float
    ) -> str:
        """Run the program until it exits or reaches a limit, and return how it ended.

        The result is ``end`` if it exited by itself, ``late`` if it reached its time limit, or
        ``flood`` if it wrote too much. Raises OSError if it cannot be started.
        """
        with contextlib.ExitStack() as opened:
            output = OutputPipe(MAX_OUTPUT_BYTES, lambda: self._check_size(output))
            errors = OutputPipe(_KEPT_ERROR_BYTES)
            opened.callback(output.close)
            opened.callback(errors.close)
            child = await _start_program(
                words, environment, folder, (output.writing, errors.writing)
            )
            output.start_reading(self._loop)
            errors.start_reading(self._loop)
            self._loop.add_reader(child, self._check_ended, child)
            try:
                async with asyncio.timeout(timeout_s):
                    return await self._how
            except TimeoutError:
                return "late"
            finally:
                self._loop.remove_reader(child)
                if child.poll() is None:
                    # Shielded, because a cancelled attempt must not leave the program running.
                    await asyncio.shield(run_in_daemon_thread(child.end, _END_S))
                self.status = child.poll() or 0
                self.output, self.errors = (
                    output.finish_reading(self._loop),
                    errors.finish_reading(self._loop),
                )

    def _check_ended(self, child: ChildProcess) -> None:
        if child.poll() is not None:
            self._set_how_ended("end")

    def _check_size(self, output: OutputPipe) -> None:
        if output.num_bytes > MAX_OUTPUT_BYTES:
            self._set_how_ended("flood")

    def _set_how_ended(self, how: str) -> None:
        if not self._how.done():
            self._how.set_result(how)


async def _start_program(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    files: tuple[int, int],
) -> ChildProcess:
    """Start the program without blocking the event loop.

    ``files`` are the file descriptors for its stdout and stderr.
    """

    def start() -> ChildProcess:
        return ChildProcess(
            words, environment=environment, inherits=False, folder=folder, files=(None, *files)
        )

    starting = asyncio.ensure_future(run_in_daemon_thread(start))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        # The thread uses the pipes until it has ended.
        await asyncio.wait([starting])
        if starting.exception() is None:
            await run_in_daemon_thread(starting.result().end, 0.0)
        raise
