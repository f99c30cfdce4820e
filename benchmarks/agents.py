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

import argparse
import importlib
import json
import sys
from pathlib import Path

from engine import Figure, show

PARTS = sorted(
    path.stem.removeprefix("agents_") for path in Path(__file__).parent.glob("agents_*.py")
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of agents.")
    parser.add_argument("--quick", action="store_true", help="fewer requests and steps")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeat for more")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    found: list[Figure] = []
    for part in options.part or PARTS:
        found += importlib.import_module(f"agents_{part}").figures(options.quick)
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
