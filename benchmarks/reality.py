"""Benchmarks of a run under everyday failures: misbehaving providers, outages, limits and careless
models.

    python benchmarks/reality.py            print a table; --quick for fewer cases
    python benchmarks/reality.py --before FOLDER    also compare the overhead with a checkout
    python benchmarks/reality.py --json     also print, as the last line, {"figures": [{"name", …},
                                            …]}

Every provider is a real server on loopback; waits run on a fast clock (``FastLoop``). The table of
misbehaviours (``reality_table.py``) has one run for each behaviour, protocol, frequency and kind of
connection; ``--quick`` runs each behaviour once. Calls through LiteLLM are measured if it is
installed. The exit code is 1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import reality_journals
import reality_limits
import reality_mutations
import reality_providers
import reality_table
import reality_transport
import reality_work
from figures import Figure, show

FIGURES: tuple[Callable[[bool], Iterable[Figure]], ...] = (
    reality_table.misbehaviours,
    reality_limits.measure,
    reality_journals.measure,
    reality_mutations.measure,
    reality_transport.measure,
    reality_providers.outages,
    reality_work.interruptions,
    reality_work.careless_models,
)
"""Functions that measure figures; the argument is True for the quick form."""


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of runs under everyday failures.")
    parser.add_argument("--quick", action="store_true", help="fewer cases")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--before", type=Path, metavar="FOLDER", help="checkout with which to compare the overhead"
    )
    options = parser.parse_args()
    found = [figure for measure in FIGURES for figure in measure(options.quick)]
    if options.before is not None:
        found += reality_work.overhead(options.before.resolve(), options.quick)
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
