"""Benchmarks of training agents that were written elsewhere.

    python benchmarks/agents.py                  print a table
    python benchmarks/agents.py --quick          fewer requests and steps, within five minutes
    python benchmarks/agents.py --part training  one part only
    python benchmarks/agents.py --json           also print, as the last line, {"figures": [{"name",
                                                 "value", "unit", "against", "floor", "least",
                                                 "holds"}, …]}

Each part is a module ``agents_PART.py`` beside this one with ``figures(quick)``. It is imported
when its turn comes, because it imports the library that it measures. The exit code is 1 if a figure
misses its limit.
"""

from __future__ import annotations

import sys
from pathlib import Path

from parts import run_parts

PARTS = sorted(
    path.stem.removeprefix("agents_") for path in Path(__file__).parent.glob("agents_*.py")
)

if __name__ == "__main__":
    sys.exit(run_parts("agents", PARTS, "fewer requests and steps"))
