"""Progress of a running command: bars on a terminal, lines or JSON in a pipe; the terminal is
restored at the end."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import signal
import struct
import termios
import time
from typing import Any

import pytest

from ramify.cli.parser import ExitCode
from ramify.cli.progress_display import ProgressDisplay, progress_bar_line
from ramify.cli.terminal_text import StderrMessageWriter
from ramify.progress import ProgressState, track_progress
from tests.cli.helpers import SESSION_SCRIPT, Shell
from tests.cli.test_eval import MINE, RIGHT

EVAL = ("--scaffold", "tiny", "--sandbox", "process", "--allow-weaker", "--no-validate")
HIDDEN, SHOWN = b"\x1b[?25l", b"\x1b[?25h"
"""Escape sequences that hide and show a terminal's cursor."""


def evaluating(shell: Shell, *arguments: str) -> tuple[str, ...]:
    shell.write("my_task.py", MINE)
    return ("eval", "my_task.py:teal", "--model", shell.model(RIGHT), *EVAL, *arguments)


def lines_of(err: str) -> list[dict[str, Any]]:
    """Parse standard error as JSON lines and check that each has an event and a time."""
    found = [json.loads(line) for line in err.splitlines()]
    assert all({"event", "at_s"} <= line.keys() for line in found)
    return found


def test_progress_bar_shows_counts_and_time_left() -> None:
    work = ProgressState(0, "evaluating", 250, 1000, "attempts", "average 0.81", False)
    drawn = "━" * 6 + "─" * 18
    assert (
        progress_bar_line(work, 20.0, 100)
        == f"evaluating   {drawn} 250 of 1,000 attempts · average 0.81 · 1 min left"
    )
    resumed = ProgressState(0, "rl", 250, 1000, "steps", "", False, first=200)  # 50 steps in 20 s
    assert progress_bar_line(resumed, 20.0, 100).endswith("250 of 1,000 steps · 5 min left")
    reading = ProgressState(0, "reading", 12_300_000, None, "bytes", "a\x1b]0;title\x07.txt", False)
    assert progress_bar_line(reading, 0.0, 100).split("─ ")[-1] == "12.3 MB · a.txt"
    assert len(progress_bar_line(reading, 3.0, 30)) == 30
    assert progress_bar_line(
        ProgressState(0, "starting", 0, None, "", "", False), 4.0, 80
    ).endswith("─ 4 s")


def test_ask_reports_progress_as_json_lines(shell: Shell) -> None:
    shell.write("log.txt", "abc")
    done = shell.ask(SESSION_SCRIPT, "--no-direct", "--progress", "json", "how long?", "log.txt")
    assert (done.code, done.out) == (ExitCode.ANSWERED, "3\n")
    lines = lines_of(done.err)
    reading = [line for line in lines if line["event"] == "progress"]
    assert [(line["what"], line["done"], line["over"]) for line in reading] == [
        ("reading", 0, False),
        ("reading", 3, True),
    ]
    steps = [line["kind"] for line in lines if line["event"] == "step"]
    assert steps == ["CallStarted", "Replied", "CellRan", "Replied", "CellRan", "CallEnded"]
    notes = [line["text"] for line in lines if line["event"] == "note"]
    assert notes[0] == "log.txt: text, 3 characters"
    assert notes[-1].startswith("final · 2 turns")
    as_json = shell.ask(
        SESSION_SCRIPT, "--no-direct", "--progress", "json", "--json", "how long?", "log.txt"
    )
    assert json.loads(as_json.out)["answer"] == 3
    assert lines_of(as_json.err)


def test_eval_limits_rate_of_json_progress_lines(shell: Shell) -> None:
    done = shell.run(*evaluating(shell, "--items", "60", "--progress", "json", "--json"))
    found = json.loads(done.out)
    assert found["attempts"] == 60
    lines = lines_of(done.err)
    attempts = [line for line in lines if line["event"] == "attempt"]
    assert len({line["item"] for line in attempts}) == 60
    assert {line["reward"] for line in attempts} == {1.0}
    progress_lines = [line for line in lines if line["event"] == "progress"]
    assert progress_lines[-1] | {"at_s": 0} == {
        "event": "progress",
        "at_s": 0,
        "what": "evaluating test",
        "done": 60,
        "total": 60,
        "unit": "attempts",
        "note": "average 1.000",
        "over": True,
    }
    seconds = progress_lines[-1]["at_s"] - progress_lines[0]["at_s"]
    assert len(progress_lines) <= 10 * seconds + 3


def test_piped_progress_is_lines_without_control_characters(shell: Shell) -> None:
    done = shell.run(*evaluating(shell, "--items", "10"))
    assert "7 of 10 attempts, average 1.000" in done.err
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", done.err)
    silent = shell.run(*evaluating(shell, "--items", "10", "--progress", "none"))
    assert "attempts" not in silent.err
    assert shell.run(*evaluating(shell, "--items", "2", "-q", "--progress", "json")).err == ""
    wrong = shell.run(*evaluating(shell, "--progress", "jsno"))
    assert (wrong.code, "--progress jsno: did you mean 'json'?" in wrong.err) == (
        ExitCode.USAGE,
        True,
    )


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, ExitCode.STOPPED), (signal.SIGTERM, ExitCode.TERMINATED)]
)
def test_interrupted_command_restores_the_cursor(shell: Shell, number: int, code: ExitCode) -> None:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    process = shell.start(
        *evaluating(shell, "--items", "5000", "--concurrency", "2"), stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    written = b""
    try:
        while block := os.read(ours, 1 << 16):
            written += block
            if number and re.search(rb"evaluating test.*? [1-9]\d* of 5,000 attempts", written):
                process.send_signal(number)
                number = 0
    except OSError:
        pass  # Linux raises this once the other end is closed
    os.close(ours)
    assert process.wait(100) == code
    assert written.count(HIDDEN) == 1
    assert written.index(HIDDEN) < written.rindex(SHOWN)
    assert b"Traceback" not in written


def test_line_progress_names_all_running_tasks(capsys: pytest.CaptureFixture[str]) -> None:
    notes = StderrMessageWriter()
    err = ""
    with (
        ProgressDisplay(notes, "lines", has_lines=True),
        track_progress("sft", 500, "steps") as task,
    ):
        task.set_progress(120, "loss 0.1")
        with track_progress("saving"):
            while "sft" not in err:
                time.sleep(0.05)
                err += capsys.readouterr().err
    assert re.sub(r"\d+ s\b( left)?", "", err) == (
        "sft: 120 of 500 steps · loss 0.1 ·  · saving: \n"
    )
