"""Run an agent, written in any language, as a separate process.

    AgentCommandTemplate("{python} my_agent.py {item_file}")     checked before anything is loaded
      ── words(job) ──> ["/usr/bin/python3", "/here/my_agent.py", "/tmp/…/item.json"]

The command is split into words first and filled in afterwards, so a question with spaces or quotes
is one argument, and no shell reads it. With ``shell=True`` a shell runs the text, and each value is
quoted. A word that names a file of the folder in which the trainer was started becomes an absolute
path, because the agent works in another folder.

The agent gets a small environment: where programs and the home folder are, the language, the
addresses and its key, and the variables that the task names. No key of the trainer is among them.
The process has its own session and a guard (``actors/process_guard.py``), which ends it with all
that it started: when it has ended, when it is stopped, and when this process ends for any reason.
``agent_attempt.py`` applies the time limits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ramify.actors.child_process import ChildProcess
from ramify.actors.command_template import (
    absolute_path_if_file,
    check_program_installed,
    fill_placeholders,
    passed_environment,
    replace_null_characters,
    split_command,
)
from ramify.actors.output_pipe import OutputPipe
from ramify.agents.agent_container import AgentContainer
from ramify.agents.agent_job import AgentRolloutInput
from ramify.agents.agent_result import MAX_OUTPUT_CHARS, output_tail
from ramify.engine.event_loop_thread import run_in_daemon_thread
from ramify.errors import ConfigError, RamifyError

PLACEHOLDERS = {
    "item_file": "the item as a JSON file",
    "question": "the item's question",
    "id": "the item's id",
    "kind": "the item's kind",
    "folder": "the agent's working folder",
    "here": "the folder in which the trainer was started",
    "python": "the Python interpreter of the trainer",
    "base_url": "the base URL for clients of OpenAI's APIs",
    "anthropic_base_url": "the base URL for clients of Anthropic's API",
    "model": "a name of the model",
}
"""Placeholder in a command -> its meaning."""
_END_S = 2.0
"""Seconds between SIGTERM and SIGKILL for an agent that is stopped."""
_LEFT_S = 1.0
"""Seconds that an agent's child processes may take to end after the agent."""
_CLEANUP_S = 30.0
"""Seconds that the removal of a container may take."""
_MAX_BYTES = 4 * MAX_OUTPUT_CHARS


class AgentCommandTemplate:
    """The command that starts an agent, with placeholders for the values of each rollout."""

    def __init__(
        self, command: str | Sequence[str], *, shell: bool = False, container: str = ""
    ) -> None:
        """Parse the command that starts an agent, and check it.

        If ``container`` names an image, the command runs in a Docker container, otherwise on this
        machine.

        Raises ConfigError if the command is empty, has an unknown placeholder, or names a program
        that does not exist.
        """
        self.container: AgentContainer | None = None
        """Container in which the command runs; None if it runs on this machine."""
        self._shell = command if shell and isinstance(command, str) else ""
        if shell and not self._shell:
            raise ConfigError("ExternalAgentTask: shell=True needs the command as one string")
        words = split_command(command, PLACEHOLDERS, "ExternalAgentTask")
        self._words = [word if container else absolute_path_if_file(word) for word in words]
        if container:
            self.container = AgentContainer(container)
        elif not shell:
            check_program_installed(self._words[0], "ExternalAgentTask")

    def fill_placeholders(self, job: AgentRolloutInput) -> list[str]:
        """Fill in the placeholders for one rollout, and return the command as a list of words.

        In a container, ``{python}`` is the container's ``python3``.
        """
        values = {
            "item_file": str(job.item_file),
            "question": job.item.question,
            "id": job.item.id,
            "kind": job.item.kind,
            "folder": str(job.folder),
            "here": str(Path.cwd()),
            "python": "python3" if self.container else sys.executable,
            "base_url": job.base_url,
            "anthropic_base_url": job.anthropic_base_url,
            "model": job.model,
        }
        if self._shell:
            quoted = {
                name: shlex.quote(value) for name, value in replace_null_characters(values).items()
            }
            return ["/bin/sh", "-c", self._shell.format_map(quoted)]
        return fill_placeholders(self._words, values)

    def cleanup_command(self, job: AgentRolloutInput) -> list[str]:
        """Return the command that cleans up after an agent that was stopped early.

        It may, for example, remove the agent's container. Returns an empty list if there is nothing
        to clean up.
        """
        return [] if self.container is None else self.container.docker_remove_command(job)


def parse_task_environment(names: Sequence[str]) -> dict[str, str]:
    """Parse the environment variables that a task sets for its agent.

    Each entry of ``names`` is ``NAME=value``, or the name of a variable of this process.

    Raises ConfigError for an empty name, and for a variable that is not set in this process.
    """
    environment = {}
    for each in names:
        name, sign, value = each.partition("=")
        if not name or "\0" in each:
            raise ConfigError(f"ExternalAgentTask: env: {each!r:.100} is not NAME or NAME=value")
        if not sign and name not in os.environ:
            raise ConfigError(
                f"ExternalAgentTask: env: the variable {name} is not set here: set it, or give "
                f"{name}=…"
            )
        environment[name] = value if sign else os.environ[name]
    return environment


def build_agent_environment(job: AgentRolloutInput, names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables to set for an agent, such as its model URLs and API key.

    They include the variables that the agent's task names.
    """
    return parse_task_environment(names) | {
        "OPENAI_BASE_URL": job.base_url,
        "OPENAI_API_KEY": job.api_key,
        "ANTHROPIC_BASE_URL": job.anthropic_base_url,
        "ANTHROPIC_API_KEY": job.api_key,
        "PYTHONUNBUFFERED": "1",
    }


async def start_command(
    template: AgentCommandTemplate, job: AgentRolloutInput, names: Sequence[str]
) -> AgentProcess:
    """Start an agent's command for one rollout, and return the running agent.

    Raises RamifyError if the command cannot be started.
    """
    own = build_agent_environment(job, names)
    words, cleanup = template.fill_placeholders(job), template.cleanup_command(job)
    if template.container is not None:
        words = template.container.docker_run_command(words, job, own)
    environment = {**passed_environment(), **own}
    with contextlib.ExitStack() as opened:
        outputs = [OutputPipe(_MAX_BYTES), OutputPipe(_MAX_BYTES)]
        for output in outputs:
            opened.callback(output.close)
        files = (None, outputs[0].writing, outputs[1].writing)
        starting = asyncio.ensure_future(
            run_in_daemon_thread(_start_child, words, environment, job.folder, files)
        )
        try:
            child = await asyncio.shield(starting)
        except asyncio.CancelledError:
            # The thread uses the pipes until it has ended.
            await asyncio.wait([starting])
            if starting.exception() is None:
                await run_in_daemon_thread(starting.result().end, 0.0)
            raise
        except OSError as error:
            hint = ": give it {item_file}" if error.errno == errno.E2BIG else ""
            raise RamifyError(
                f"the agent's command {words[0]!r:.200} cannot be started: {error.strerror}{hint}"
            ) from None
        opened.pop_all()
    return AgentProcess(child, outputs[0], outputs[1], cleanup)


def _run_quietly(command: Sequence[str]) -> None:
    """Run a command until it ends or times out, and suppress any error.

    Its output and its result are ignored.
    """
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_CLEANUP_S,
            check=False,
        )


def _start_child(
    words: Sequence[str],
    environment: Mapping[str, str],
    folder: Path,
    files: tuple[int | None, int | None, int | None],
) -> ChildProcess:
    return ChildProcess(
        words,
        environment=environment,
        inherits=False,
        folder=folder,
        files=files,
        left_s=_LEFT_S,
    )


class AgentProcess:
    """An agent that runs as a separate process for one rollout; implements ``RunningAgent``."""

    def __init__(
        self,
        child: ChildProcess,
        output: OutputPipe,
        errors: OutputPipe,
        cleanup: Sequence[str] = (),
    ) -> None:
        """Start to watch a process in which an agent runs.

        ``cleanup`` is the command to run if the process has to be stopped early.
        """
        self._cleanup = list(cleanup)
        self._loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[None] = self._loop.create_future()
        self.answer: Any = None
        self.exit_code: int | None = None
        self.output = ""
        self.error_output = ""
        self.num_left = 0
        self._child = child
        self._output, self._errors = output, errors
        self._is_stopped = False
        output.start_reading(self._loop)
        errors.start_reading(self._loop)
        self._loop.add_reader(child, self._check_ended)

    def current_code_position(self) -> str:
        """Return an empty string, because the current line of another process cannot be
        determined."""
        return ""

    async def terminate(self) -> None:
        """End the process and everything that it started, and run the cleanup command.

        Calling this again has no effect.
        """
        if not self.ended.done():
            self._is_stopped = True
            await run_in_daemon_thread(self._child.end, _END_S)
            if self._cleanup:
                await run_in_daemon_thread(_run_quietly, self._cleanup)
            self._check_ended()

    def _check_ended(self) -> None:
        """Check whether the process of the agent has ended.

        If it has, record its exit code and output, and complete the future ``ended``.
        """
        if self.ended.done() or (status := self._child.poll()) is None:
            return
        self._loop.remove_reader(self._child)
        self.exit_code = None if self._is_stopped else status
        self.num_left = self._child.num_left
        self.output = output_tail(self._output.finish_reading(self._loop))
        self.error_output = output_tail(self._errors.finish_reading(self._loop))
        self.answer = self.output.strip()
        self.ended.set_result(None)
