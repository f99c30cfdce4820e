"""Hostile text on a terminal: what reaches it through every command, and what cleaning it costs.

    python benchmarks/edges.py --only terminal

Texts are known attacks and random mixtures of control characters. They are the prompts, code,
output, errors and answers of a run, the replies of a model, and the arguments of each command. Each
command runs on a pseudo-terminal, with many texts in one start. Not here: which sequences are
allowed (see `tests/terminals.py`).
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from figures import Figure

sys.path.insert(0, str(Path(__file__).parents[1]))

from ramify.terminal_sanitizer import strip_control_characters
from tests.terminals import KNOWN_ATTACKS, Machine, hostile_texts, outputs_on_terminal

BATCH = 50
"""Texts in one start of a command."""
MEGABYTE = 1_000_000
PATTERNS = (
    *KNOWN_ATTACKS,
    "\x9d",
    "\x1b]",
    "\x1b[0;",
    "\x9b0",
    "\x1b ",
    "\x9dabc",
    "\x90\x1b",
    "\x9d" * 50 + "\x1bA",
)


def measure(quick: bool) -> list[Figure]:
    texts = hostile_texts(BATCH if quick else 500)
    starts = controls = silent = 0
    for first in range(0, len(texts), BATCH):
        with tempfile.TemporaryDirectory() as folder:
            for shown in outputs_on_terminal(Machine(Path(folder)), texts[first : first + BATCH]):
                starts += 1
                controls += len(shown.controls)
                silent += not shown.written.strip()
                if shown.controls:
                    print(f"{shown.command}: {shown.controls[:3]}", file=sys.stderr)
    against: dict[str, float | str] = {"texts": len(texts), "starts of commands": starts}
    return [
        Figure("terminal: control sequences of others' text", controls, "sequences", against, 0),
        Figure("terminal: commands that printed nothing", silent, "commands", {}, 0),
        Figure("terminal: CPU to clean 1 MB, worst pattern", _slowest_s(), "s", {}, 0.2),
    ]


def _slowest_s() -> float:
    return max(_cpu_s((pattern * MEGABYTE)[:MEGABYTE] + "\x1bA") for pattern in PATTERNS)


def _cpu_s(text: str) -> float:
    """Return the CPU time of cleaning ``text``: the least of three, since other work on the machine
    only adds."""
    least = float("inf")
    for _ in range(3):
        began = time.process_time()
        strip_control_characters(text)
        least = min(least, time.process_time() - began)
    return least
