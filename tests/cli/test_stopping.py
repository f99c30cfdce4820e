"""Ctrl-C and SIGTERM while the event loop is blocked, in a separate process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from ramify.cli.parser import ExitCode
from tests.cli.helpers import Shell

ASKING = """
class Running:
    def wrap_up(self): pass
    def cancel(self): pass

async def blocked():
    with RunInterrupts(StderrMessageWriter(True)).handle_signals(Running()):
        {block}
"""
SERVING = """
async def blocked():
    add_stop_handler(lambda: None)
    {block}
"""
VIEW = """
async def blocked():
    with ProgressDisplay(StderrMessageWriter(False), "live"):
        {block}
"""
PROGRAM = """
import asyncio, sys, threading
from ramify.cli.ask_runner import RunInterrupts
from ramify.cli.terminal_text import StderrMessageWriter
from ramify.cli.progress_display import ProgressDisplay
from ramify.cli.serve import add_stop_handler

def ready():
    print("ready", flush=True)

def spin():
    ready()
    while True:
        pass

{blocked}
asyncio.run(blocked())
"""
IN_A_TASK = "spin()"
IN_A_CALLBACK = "asyncio.get_running_loop().call_soon(spin); await asyncio.sleep(600)"
IN_A_LOCK = "ready(); lock = threading.Lock(); lock.acquire(); lock.acquire()"


def ended_by(shell: Shell, program: str, number: signal.Signals, times: int) -> int:
    """Return the exit code of a process that gets signal ``number`` up to ``times`` times."""
    with subprocess.Popen(
        [sys.executable, "-c", program],
        env=shell.env,
        cwd=shell.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == b"ready\n"
            for _ in range(times):
                process.send_signal(number)
                try:
                    process.wait(1)  # signals sent at the same time would be merged
                except subprocess.TimeoutExpired:
                    continue
            return process.wait(60)
        finally:
            process.kill()


@pytest.mark.parametrize(
    "block", [IN_A_TASK, IN_A_CALLBACK, IN_A_LOCK], ids=["task", "callback", "lock"]
)
@pytest.mark.parametrize("command", [ASKING, SERVING, VIEW], ids=["ask", "serve", "live view"])
def test_one_sigterm_ends_a_blocked_command(shell: Shell, command: str, block: str) -> None:
    program = PROGRAM.format(blocked=command.format(block=block))
    assert ended_by(shell, program, signal.SIGTERM, 1) == ExitCode.TERMINATED


@pytest.mark.parametrize(
    "block", [IN_A_TASK, IN_A_CALLBACK, IN_A_LOCK], ids=["task", "callback", "lock"]
)
@pytest.mark.parametrize("command", [ASKING, SERVING], ids=["ask", "serve"])
def test_ctrl_c_twice_ends_a_blocked_command(shell: Shell, command: str, block: str) -> None:
    program = PROGRAM.format(blocked=command.format(block=block))
    assert ended_by(shell, program, signal.SIGINT, 2) == -signal.SIGINT
