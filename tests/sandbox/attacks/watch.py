"""Processes, descriptors and memory during an attack, as reported by the kernel."""

from __future__ import annotations

import ctypes
import os
import re
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Make this process the parent of orphans from now on, so that all of them are counted."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def parents() -> dict[int, int]:
    """Every process that is not a zombie, with its parent."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                state, parent = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                )
            except OSError:
                continue
            if state not in "ZX":
                found[int(entry)] = int(parent)
    return found


def descendants(root: int) -> set[int]:
    """Living descendants of ``root``."""
    tree = parents()
    found = {root}
    while more := {pid for pid, parent in tree.items() if parent in found} - found:
        found |= more
    return found - {root}


def reap_orphans(ours: set[int]) -> None:
    """Reap dead orphans, except the children in ``ours``, for which other code waits."""
    for entry in os.listdir("/proc"):
        if entry.isdigit() and int(entry) not in ours:
            try:
                state, parent = (
                    Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:2]
                )
                if state == "Z" and int(parent) == os.getpid():
                    os.waitpid(int(entry), os.WNOHANG)
            except OSError:
                continue


def start_time(pid: int) -> str | None:
    """When a process began, which distinguishes it from a later one with the same pid; None if it
    is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def open_descriptors() -> list[str]:
    """The targets of this process's descriptors."""
    found = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            found.append(os.readlink(f"/proc/self/fd/{fd}"))
        except OSError:
            continue
    return found


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def memory_mb(field: str) -> int:
    """``VmRSS`` or ``VmHWM`` (the peak since ``reset_peak``) of this process."""
    found = re.search(rf"^{field}:\s+(\d+)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return int(found[1]) // 1024 if found else 0
