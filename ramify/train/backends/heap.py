"""Freed memory stays with the process, on a CPU under glibc.

A training step frees and asks for the same hundreds of megabytes again and again. glibc gives large
blocks back to the system each time and the kernel clears them page by page when they return: 5 to
10 % of a step of a small model. The price is that the process keeps the most memory it ever needed.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = 1 << 30


def keep_freed_memory() -> bool:
    """Whether it could be arranged; elsewhere nothing changes. Once is enough, more does no
    harm."""
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
