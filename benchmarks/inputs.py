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

import sys

from parts import run_parts

PARTS = (
    "documents",
    "large",
    "pictures",
    "places",
    "search",
    "tables",
    "values",
)

if __name__ == "__main__":
    sys.exit(run_parts("inputs", PARTS, "smaller inputs"))
