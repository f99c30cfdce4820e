"""Input text of the benchmarks. It uses only the standard library, and every side generates it
outside of the timed part."""

from __future__ import annotations

LINE = "2026-01-01 00:00:00 host-{:07d} INFO request served in 12 ms\n"


def log_text(chars: int) -> str:
    """Return a log of ``chars`` characters in which every line is different."""
    return "".join(map(LINE.format, range(chars // len(LINE.format(0)) + 1)))[:chars]
