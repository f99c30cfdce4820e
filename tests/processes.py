"""Descendants of a process, found in ``/proc``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path


def below(pid: int) -> Iterator[tuple[int, str]]:
    """(pid, command line) of every descendant of ``pid``."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            command = (path.parent / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if parent == pid:
            yield int(path.parent.name), command
            yield from below(int(path.parent.name))


def kill(pid: int, what: str) -> None:
    for each, command in below(pid):
        if what in command:
            os.kill(each, signal.SIGKILL)
            return
    raise AssertionError(f"{what} is not there: {list(below(pid))}")
