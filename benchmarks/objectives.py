"""Objectives: the cross table against papers and other trainers, and the doctor of runs.

    python benchmarks/objectives.py            print a table
    python benchmarks/objectives.py --quick    fewer batches and runs, within five minutes on two cores
    python benchmarks/objectives.py --json     also print, as the last line, {"figures": [{"name",
                                               "value", "unit", "against", "floor", "holds"}, …]}

    objectives_table.py     every objective, with and without each preset: loss and gradients equal
                            to 1e-6 to formulas written from the papers and from each trainer's code
    objectives_doctor.py    broken and healthy runs: is the fault named, and soon

The exit code is 1 if a figure misses its limit. TRL's own code takes part in the Python of
``benchmarks/.venv-trl``, which ``benchmarks/setup`` makes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import objectives_table
from figures import Figure, show

QUICK, FULL = 4, 20
"""Random batches per cell."""


def measure(quick: bool) -> Iterator[Figure]:
    """The figures of all parts."""
    yield from objectives_table.figures(QUICK if quick else FULL)
    if find_spec("objectives_doctor"):
        import objectives_doctor

        yield from objectives_doctor.measure(quick)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Figures of objectives, and of the doctor of runs."
    )
    parser.add_argument(
        "--quick", action="store_true", help="fewer batches and runs; within five minutes"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    parser.add_argument(
        "--without-peers", action="store_true", help="do not miss TRL if it is not installed here"
    )
    options = parser.parse_args()
    figures = list(measure(options.quick))
    if not find_spec("trl") and not options.without_peers:
        figures.append(
            Figure("peer trl: run with the Python of benchmarks/.venv-trl", None, "", {}, least=1)
        )
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return int(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
