"""The command of a benchmark that has one module for each part, beside its own:
``NAME_PART.py`` with ``figures(quick)``."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Sequence

from figures import Figure, show


def run_parts(name: str, parts: Sequence[str], quick: str) -> int:
    """Measure the parts that the command line names, or all of them, and print their figures.

    A part is imported when its turn comes, because it imports the library that it measures.
    ``quick`` is the help text of ``--quick``. Returns the exit code: 1 if a figure misses its limit.
    """
    parser = argparse.ArgumentParser(description=f"Figures of {name}.")
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--part", action="append", choices=parts, help="repeat for more")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    found: list[Figure] = []
    for part in options.part or parts:
        found += importlib.import_module(f"{name}_{part}").figures(options.quick)
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0
