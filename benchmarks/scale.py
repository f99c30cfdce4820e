"""Figures of training beyond one process.

    python benchmarks/scale.py                 a table, in a quarter of an hour; --quick for fewer rounds, within five minutes
    python benchmarks/scale.py --json          also prints, as its last line, {"figures": [{"name", "value", …}, …]}
    python benchmarks/scale.py --part async    one part alone: ranks, weights, async, simulate
    python benchmarks/scale.py --compile       also compiles layers, which takes minutes

Times are ratios of what was measured in turns on this machine. Exits with 1 where a figure misses
what is promised. What takes longer has a command of its own: `scale_soak.py`, half an hour and
more, and `scale_async.py --reward`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable

from engine import Figure, show


def ranks(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Two ranks against one process."""
    import scale_fsdp

    return scale_fsdp.figures(quick, compiled)


def weights(quick: bool, compiled: bool) -> Iterable[Figure]:
    """What a weight sync costs, by carrier."""
    import scale_weights

    return scale_weights.weights_figures(quick=quick)


def asynchronous(quick: bool, compiled: bool) -> Iterable[Figure]:
    """Rollouts that do not wait."""
    import scale_async

    return scale_async.figures(quick)


def simulated(quick: bool, compiled: bool) -> Iterable[Figure]:
    """What the simulator predicts."""
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
    parser.add_argument("--part", choices=PARTS, help="one part alone")
    parser.add_argument("--compile", action="store_true", help="compiled layers too")
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
