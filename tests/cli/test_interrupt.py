"""The first Ctrl-C asks for the best answer so far; a second one, or SIGTERM, stops the command."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from tests.cli.helpers import Shell, code

SLEEP = code("import time\nfound = 3\nprint('so far', found)\ntime.sleep(60)")
ASK = ("--no-direct", "how many?", "log.txt", "-v")


def started(shell: Shell, script: list[object], until: bytes) -> subprocess.Popen[bytes]:
    """Start ``ask -v`` with ``script`` and wait until ``until`` appears on its stderr."""
    shell.write("log.txt", "abc")
    process = shell.start("ask", "-m", shell.model(script), *ASK)
    assert process.stderr is not None
    for line in process.stderr:
        if until in line:
            return process
    raise AssertionError(f"{until!r} was not printed")


def test_first_ctrl_c_answers_with_best_result_so_far(shell: Shell) -> None:
    process = started(shell, [SLEEP, "FINAL(at least 3)"], b"turn 1: reply")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out) == (3, b"at least 3\n")
    assert b"finishing with the best answer so far; Ctrl-C again to stop" in err
    summary, reason = err.decode().splitlines()[-2:]
    assert summary.startswith("cancelled · ")
    assert reason == "ended: cancelled: it was asked to finish before it had a final answer"


def test_first_ctrl_c_works_while_model_is_stalled(shell: Shell) -> None:
    process = started(shell, [{"fail": "stalled"}, "FINAL(nothing yet)"], b"call 0 (rlm")
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out) == (3, b"nothing yet\n")


def test_one_interrupt_during_an_outage_ends_within_seconds(shell: Shell) -> None:
    """The last word is asked for, too, but not for the ten minutes of --patience."""
    process = started(shell, [{"fail": "server_error"}] * 999, b"trying again")
    began = time.monotonic()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=100)
    assert (process.returncode, time.monotonic() - began < 60) == (4, True)
    assert b"scripted:script.json" in err.splitlines()[-3]


def test_second_ctrl_c_stops_at_once(shell: Shell) -> None:
    process = started(shell, [{"fail": "stalled"}] * 2, b"call 0 (rlm")
    process.send_signal(signal.SIGINT)
    assert process.stderr is not None
    while b"Ctrl-C again" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=100)
    assert (process.returncode, out, err.splitlines()[-1]) == (130, b"", b"ramify: stopped")
    assert "cancelled" in shell.run("runs").out


@pytest.mark.parametrize("script", [[{"fail": "stalled"}], [SLEEP]])
def test_sigterm_exits_with_code_143(shell: Shell, script: list[object]) -> None:
    process = started(shell, script, b"call 0 (rlm")
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=100)
    assert (process.returncode, out) == (143, b"")


def test_ctrl_c_during_imports_gives_no_traceback(shell: Shell) -> None:
    """The signal arrives before any handler is installed. (Python's own start-up is out of scope;
    ``-X importtime`` shows when it is over.)"""
    for until in (b" ramify.cli", b" ramify.cli.parser", b" ramify.cli.main"):
        command = [sys.executable, "-X", "importtime", "-m", "ramify", "ask", "how many?"]
        with subprocess.Popen(
            command, env=shell.env, cwd=shell.folder, stderr=subprocess.PIPE
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                if line.rstrip().endswith(until):
                    process.send_signal(signal.SIGINT)
                    break
            rest = process.stderr.read()
        assert b"Traceback" not in rest
        assert process.returncode in (-signal.SIGINT, 130, 1), rest
