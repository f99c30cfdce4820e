"""Write the audit events of a process and its children into memory that they share.

A session of the jail can write nowhere else, and a system call for each event would change what is
measured. Loaded in the processes that ``cold_start.py`` measures, so it imports little. Not here:
what the events mean.
"""

from __future__ import annotations

import mmap
import os
import struct
import time

PROCESSES, _PER_PROCESS = 16, 2000
_HEAD = 64
_EVENT = struct.Struct("<q88s")
_SIZE = _HEAD + _EVENT.size * _PER_PROCESS * PROCESSES


def clear(path: str) -> None:
    """Make the file ``path`` empty memory for events."""
    with open(path, "wb") as file:
        file.truncate(_SIZE)


def read(path: str) -> list[tuple[int, int, str]]:
    """Return (nanoseconds of the monotonic clock, process in the order of their starts, text)."""
    events = []
    with open(path, "rb") as file:
        data = file.read()
    for process in range(PROCESSES):
        for number in range(_PER_PROCESS):
            at = _HEAD + (process * _PER_PROCESS + number) * _EVENT.size
            time_ns, text = _EVENT.unpack_from(data, at)
            if not time_ns:
                break
            events.append((time_ns, process, text.rstrip(b"\0").decode("utf-8", "replace")))
    return sorted(events)


class EventRecorder:
    """Records the events of this process, and of those that are forked from it."""

    def __init__(self, path: str) -> None:
        file = os.open(path, os.O_RDWR)
        self._memory = mmap.mmap(file, _SIZE)
        os.close(file)
        self._child = 0
        self._begin(self._reserve())
        self.note("python")
        os.register_at_fork(before=self._before, after_in_child=self._inside)

    def note(self, text: str) -> None:
        if self._at < self._end:
            _EVENT.pack_into(self._memory, self._at, time.monotonic_ns(), text.encode()[:88])
            self._at += _EVENT.size

    def hook(self, event: str, arguments: tuple[object, ...]) -> None:
        """An audit hook."""
        if event in ("import", "open"):
            self.note(f"{event} {arguments[0]}"[:80])
        elif event == "compile" and str(arguments[1]).startswith("<cell"):
            self.note(f"compile {arguments[1]}")
        elif event in ("subprocess.Popen", "socket.connect"):
            self.note(event)

    def _reserve(self) -> int:
        """Return the number of a new process. The measured processes start one after the other."""
        (taken,) = struct.unpack_from("<q", self._memory)
        struct.pack_into("<q", self._memory, 0, taken + 1)
        return min(int(taken), PROCESSES - 1)

    def _begin(self, process: int) -> None:
        self._at = _HEAD + process * _PER_PROCESS * _EVENT.size
        self._end = self._at + _PER_PROCESS * _EVENT.size

    def _before(self) -> None:
        self._child = self._reserve()
        self.note(f"fork {self._child}")

    def _inside(self) -> None:
        self._begin(self._child)
        self.note("forked")
