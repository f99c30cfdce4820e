"""Benchmarks of what a context can be made of: documents, tables, values and places.

    python benchmarks/inputs.py                 print a table
    python benchmarks/inputs.py --quick         smaller inputs, within five minutes on two cores
    python benchmarks/inputs.py --part tables   one part only
    python benchmarks/inputs.py --json          also print, as the last line, {"figures": [{"name",
                                                "value", "unit", "against", "floor", "least",
                                                "holds"}, …]}

Each part is a module ``inputs_PART.py`` with ``figures(quick)``. It is imported when its turn
comes, because it imports the library that it measures. The exit code is 1 if a figure misses its
limit.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys

from engine import Figure, show

PARTS = (
    "documents",
    "large",
    "pictures",
    "places",
    "search",
    "tables",
    "values",
)


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of inputs.")
    parser.add_argument("--quick", action="store_true", help="smaller inputs")
    parser.add_argument("--part", action="append", choices=PARTS, help="repeat for more")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    found: list[Figure] = []
    for part in options.part or PARTS:
        found += importlib.import_module(f"inputs_{part}").figures(options.quick)
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
