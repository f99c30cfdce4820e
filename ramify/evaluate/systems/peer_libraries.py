"""Evaluate other libraries for recursive language models (peers) in virtual environments.

Each peer has its own environment and is evaluated as a system.

    ~/.cache/ramify/systems/rlms-0.1.3/      a virtual environment with the pinned versions of PEERS
      bin/python -I peer_library_program.py rlms item.json result.json

The dependencies of these libraries contradict each other and those of Ramify, so none is installed
beside Ramify or imported here. If an environment is missing, the error contains the command that
creates it; nothing is installed without being asked for. The script ``peer_library_program.py``
calls each library.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

from ramify.errors import ConfigError
from ramify.evaluate.systems.base import EvaluatedSystemAnswer, MeteredModelAccess
from ramify.evaluate.systems.program_runner import run_program
from ramify.store.durable_files import FILE_MODE

PEERS: dict[str, tuple[str, ...]] = {
    "rlms": ("rlms==0.1.3", "openai==3.57.0"),
    "droste": ("droste==0.26.0",),
    "dspy": ("dspy==3.4.1", "litellm==1.110.2", "openai==3.57.0"),
}
"""Name of another RLM library (a peer) -> package versions in its virtual environment, of which the
first is the library itself."""
FOLDER_VARIABLE = "RAMIFY_SYSTEMS"
"""Environment variable that replaces the default folder of the virtual environments for other
libraries."""
_PROGRAM = Path(__file__).with_name("peer_library_program.py")
_OVERTIME_S = 10.0
"""Seconds by which another library may exceed the time limit that it was given before its process
is stopped."""


class _PeerResult(msgspec.Struct):
    """The result for one task item that a peer library's program writes to a file.

    The program is ``peer_library_program.py``.
    """

    answer: str | None = None
    failure: str = ""
    requests: int | None = None
    input_tokens: int | None = None
    output_tokens: int | None = None


class PeerLibrarySystem:
    """A question-answering system that uses another library for recursive language models.

    The library runs in a separate virtual environment. Implements ``EvaluatedSystem``.
    """

    def __init__(self, name: str, *, timeout_s: float, environment: Path | None = None) -> None:
        """Create a system from the name of a library in ``PEERS``.

        ``environment`` is the folder of its virtual environment, if not the default one. Raises
        ConfigError with the command that creates the environment if it is missing.
        """
        self.name = name
        self._timeout_s = timeout_s
        folder = environment or environment_folder(name)
        self._python = folder / "bin" / "python"
        if not self._python.exists():
            raise ConfigError(
                f"--with {name}: {PEERS[name][0]} is not installed in {folder}: run "
                f"{install_command(name)}"
            )

    async def answer(
        self, question: str, context: str, *, seat: MeteredModelAccess
    ) -> EvaluatedSystemAnswer:
        folder = Path(tempfile.mkdtemp(prefix="ramify-system-"))
        try:
            work, item_file, result_file = folder / "work", folder / "item.json", folder / "result"
            work.mkdir()
            item = {
                "question": question,
                "context": context,
                "base_url": seat.base_url,
                "api_key": seat.key,
                "model": seat.model,
                "max_calls": seat.budget.max_calls,
                "max_tokens": seat.budget.max_tokens,
                "timeout_s": self._timeout_s,
            }
            await asyncio.to_thread(_write_item, item_file, item)
            words = [str(self._python), "-I", str(_PROGRAM), self.name]
            words += [str(item_file), str(result_file)]
            limit_s = self._timeout_s + _OVERTIME_S
            end = await run_program(words, work, seat, limit_s, needs_output=False)
            result = await asyncio.to_thread(_read_result, result_file)
        finally:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
        failure = end.failure or result.failure.replace(seat.key, "KEY")
        return EvaluatedSystemAnswer(
            answer=None if failure else result.answer,
            failure=failure or ("" if result.answer is not None else "it gave no answer"),
            is_late=end.is_late,
            requests=result.requests,
            input_tokens=result.input_tokens,
            output_tokens=result.output_tokens,
            seconds=end.seconds,
        )


def environment_folder(name: str) -> Path:
    """Return the folder of the virtual environment in which a peer library is installed.

    Each version has its own folder.
    """
    given = os.environ.get(FOLDER_VARIABLE)
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    root = Path(given) if given else Path(cache) / "ramify" / "systems"
    return root.expanduser() / PEERS[name][0].replace("==", "-")


def install_command(name: str) -> str:
    """Return the shell command that creates a peer library's virtual environment."""
    folder = shlex.quote(str(environment_folder(name)))
    python = shlex.quote(sys.executable)
    return f"{python} -m venv {folder} && {folder}/bin/pip install {' '.join(PEERS[name])}"


def _write_item(path: Path, item: dict[str, Any]) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, FILE_MODE)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(item))


def _read_result(path: Path) -> _PeerResult:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_PeerResult)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        return _PeerResult(failure=f"it wrote no result ({error})")
