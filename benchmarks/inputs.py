"""The input of the benchmarks. Standard library only: every side makes it for itself, outside of
what is timed."""

from __future__ import annotations

LINE = "2026-01-01 00:00:00 host-{:07d} INFO request served in 12 ms\n"


def log_text(chars: int) -> str:
    """A log of ``chars`` characters, each line different."""
    return "".join(map(LINE.format, range(chars // len(LINE.format(0)) + 1)))[:chars]
