"""Evaluate any command-line program as a question-answering system.

The command receives a question and a file with the context, and prints the answer.

    --with "./my_rlm {question} {context_file}"
    --with "{python} -m my_rlm --ask {question} --over {context_file} --model {model}"

The answer is what the command writes to stdout, without surrounding whitespace. The command finds
the model at ``OPENAI_BASE_URL`` with the key ``OPENAI_API_KEY``. It is run without a shell. The
process and its limits are managed by ``program_runner.py``.
"""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
import tempfile
from pathlib import Path

from ramify.actors.command_template import (
    absolute_path_if_file,
    check_program_installed,
    fill_placeholders,
    split_command,
)
from ramify.errors import ConfigError
from ramify.evaluate.systems.base import EvaluatedSystemAnswer, MeteredModelAccess
from ramify.evaluate.systems.program_runner import run_program

PLACEHOLDERS = {
    "question": "the question",
    "context_file": "a UTF-8 file with the context",
    "base_url": "the base URL for clients of OpenAI's APIs",
    "model": "the name of the model",
    "folder": "an empty folder, in which the command runs",
    "python": "the Python interpreter that runs Ramify",
}
"""Placeholder in a command -> description of its value."""
TIMEOUT_S = 1800.0
"""Default time limit of a system for one item, in seconds."""
_WHERE = "--with"
_RUNS_PROGRAMS = re.compile(r"python[\d.]*|(ba|z)?sh|node|uv|run|env|timeout|[\d.]+")
"""Words of a command, such as interpreters, that are skipped when the system is named after it."""


class CommandLineSystem:
    """A system that answers each item by running a user-supplied command.

    Implements ``EvaluatedSystem``.
    """

    def __init__(self, command: str, *, timeout_s: float = TIMEOUT_S) -> None:
        """Create a system from a command line with placeholders such as ``{question}``.

        The placeholders are filled in for each task item. Raises ConfigError if the command has no
        ``{question}``, has an unknown placeholder, or names a program that does not exist.
        """
        words = split_command(command, PLACEHOLDERS, _WHERE)
        if not any("{question}" in word for word in words):
            raise ConfigError(
                f"{_WHERE}: command {command!r:.200} has no {{question}}, so it cannot know what "
                "is asked: add {question}, and {context_file} for the context"
            )
        self._words = [absolute_path_if_file(word) for word in words]
        check_program_installed(self._words[0], _WHERE)
        self.name = _name_of(self._words)
        self._timeout_s = timeout_s

    async def answer(
        self, question: str, context: str, *, seat: MeteredModelAccess
    ) -> EvaluatedSystemAnswer:
        folder = Path(tempfile.mkdtemp(prefix="ramify-system-"))
        try:
            context_file = folder / "context.txt"
            await asyncio.to_thread(context_file.write_bytes, _encode_text(context))
            work = folder / "work"
            work.mkdir()
            values = {
                "question": question,
                "context_file": str(context_file),
                "base_url": seat.base_url,
                "model": seat.model,
                "folder": str(work),
                "python": sys.executable,
            }
            end = await run_program(
                fill_placeholders(self._words, values), work, seat, self._timeout_s
            )
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        return EvaluatedSystemAnswer(
            answer=None if end.failure else end.output.strip(),
            failure=end.failure,
            is_late=end.is_late,
            seconds=end.seconds,
        )


def _name_of(words: list[str]) -> str:
    """Return the name of the program in a command, ignoring interpreters and options.

    For example, ``{python} -u /here/my_rlm.py {question}`` runs ``my_rlm.py``.
    """
    plain = [Path(word).name for word in words if "{" not in word and not word.startswith("-")]
    named = [name for name in plain if not _RUNS_PROGRAMS.fullmatch(name)]
    return (named or plain or ["command"])[0]


def _encode_text(text: str) -> bytes:
    return text.encode("utf-8", "backslashreplace")
