"""Keeps freed memory in the process, on a CPU with glibc.

A training step frees and reallocates the same hundreds of megabytes again and again. By default
glibc returns large blocks to the system each time, and the kernel zeroes their pages on
reallocation: 5 to 10 % of a step of a small model. The price is that the process keeps its peak
memory.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Configure malloc. Returns whether that was possible; if not, nothing changes. Idempotent."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    return all(
        [
            mallopt(_MMAP_THRESHOLD, _LARGE),
            mallopt(_TRIM_THRESHOLD, _LARGE),
            mallopt(_TOP_PAD, 1 << 26),
        ]
    )
