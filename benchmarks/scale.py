"""Benchmarks of training beyond one process.

    python benchmarks/scale.py                 print a table, in 15 minutes; --quick: within five
    python benchmarks/scale.py --json          also print, as the last line, {"figures": [{"name",
                                               …}, …]}
    python benchmarks/scale.py --part async    only one part: ranks, weights, async, simulate
    python benchmarks/scale.py --compile       also compile layers, which takes minutes

Times are ratios of interleaved measurements on this machine. The exit code is 1 if a figure misses
its limit. Longer benchmarks have their own commands: `scale_soak.py` (half an hour and more) and
`scale_async.py --reward`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable

from figures import Figure, show


def ranks(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Compare two ranks with one process."""
    import scale_fsdp

    return scale_fsdp.figures(quick, compiled)


def weights(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Measure the cost of a weight sync for each transport."""
    import scale_weights

    return scale_weights.weights_figures(quick=quick)


def asynchronous(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Compare asynchronous with synchronous rollouts."""
    import scale_async

    return scale_async.figures(quick)


def simulated(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Compare predictions of the simulator with measurements."""
    import scale_simulate

    return scale_simulate.simulate_figures(quick=quick)


PARTS: dict[str, Callable[[bool, bool], Iterable[Figure]]] = {
    "ranks": ranks,
    "weights": weights,
    "async": asynchronous,
    "simulate": simulated,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of training beyond one process.")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--part", choices=PARTS, help="measure only this part")
    parser.add_argument("--compile", action="store_true", help="also compile layers")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    parts = [PARTS[options.part]] if options.part else list(PARTS.values())
    found = [figure for part in parts for figure in part(options.quick, options.compile)]
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
