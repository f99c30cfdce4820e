"""How cost grows with the work: exponents of time and memory over doubled sizes.

    python benchmarks/growth.py              runs of up to 20,000 calls, 2 GB, journals of 1,000,000
                                             events; about half an hour
    python benchmarks/growth.py --quick      smaller sizes, within five minutes on two cores
    python benchmarks/growth.py --only turns one axis; repeat for more
    python benchmarks/growth.py --json       also print, as the last line, {"figures": [{"name",
                                             "value", "unit", "against", "floor", "holds"}, …]}

An axis is a kind of work (``growth_axes.py``). It is done at three sizes, each twice the one before,
and at a size at which next to nothing is done: the cost of that is the constant. For each size, the
lowest cost of the rounds counts. An exponent is the slope of a straight line through

    log(size), log(cost - constant)        1: twice the work costs twice as much

by least squares. If the largest size costs less than ``NOTHING`` more than the constant, the
exponent is 0. Times are CPU times of all processes of a work,
since wall times depend on what else the machine does; the exponents of wall times are printed, too.
Memory is the largest growth of the process that works, and the size of the largest process that it
started. Exponents are rounded to a tenth, which is what three sizes can tell. Not here: how fast
something is.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from figures import Figure, show
from growth_axes import JOURNALS, Cost
from processes import HERE, quiet_env

MOST_TIME, MOST_MEMORY = 1.1, 1.0
NOTHING = Cost(0.2, 0.1, 4.0)
RESUME_S = 20.0
"""Promised for the resume of a journal of ``RESUMED`` events."""
RESUMED = 1_000_000


class Axis(NamedTuple):
    name: str
    unit: str
    quick: int
    """Largest size with ``--quick``."""
    most: int
    """Largest size without it."""
    smallest: int = 1
    """Size that stands for the constant."""


AXES = (
    Axis("turns", "turns", 400, 400),
    Axis("children", "children in one cell", 500, 2_000),
    Axis("sub_calls", "sub-calls in one cell, 1,000 at once", 20_000, 20_000),
    Axis("depth", "levels of children", 32, 64),
    Axis("context", "characters of a context", 512_000_000, 2_000_000_000),
    Axis("output", "characters that a cell prints", 64_000_000, 128_000_000),
    Axis("resume", "events of a resumed journal", 200_000, RESUMED, 8),
    Axis("show", "events of a shown journal", 200_000, RESUMED, 8),
    Axis("view", "events of a journal on the page", 200_000, RESUMED, 8),
    Axis("listing", "events of a listed journal", 200_000, RESUMED, 8),
)
FIELDS = (("time", "cpu_s", MOST_TIME), ("memory", "mb", MOST_MEMORY), ("wall", "wall_s", None))


def exponent(
    sizes: Sequence[int], costs: Sequence[float], constant: float, nothing: float
) -> float:
    """The slope of log(cost - constant) over log(size); 0 if the last cost is next to the constant.

    >>> exponent([1, 2, 4], [3.0, 5.0, 9.0], 1.0, 0.1)
    1.0
    """
    if costs[-1] - constant < nothing:
        return 0.0
    points = [
        (math.log(size), math.log(max(cost - constant, nothing / 100)))
        for size, cost in zip(sizes, costs, strict=True)
    ]
    middle = sum(x for x, _ in points) / len(points)
    spread = sum((x - middle) ** 2 for x, _ in points)
    return sum((x - middle) * y for x, y in points) / spread


def figures(axes: Sequence[Axis], quick: bool, rounds: int) -> Iterator[Figure]:
    # Axes that read the same journals follow each other, so that each is written once.
    with tempfile.TemporaryDirectory() as folder:
        for axis in axes:
            most = axis.quick if quick else axis.most
            sizes = [most // 4, most // 2, most]
            constant, *costs = (
                least(axis.name, size, Path(folder), rounds) for size in (axis.smallest, *sizes)
            )
            for name, field, floor in FIELDS:
                measured = [getattr(cost, field) for cost in costs]
                base = getattr(constant, field)
                value = exponent(sizes, measured, base, getattr(NOTHING, field))
                unit = "MB" if field == "mb" else "s"
                shown = " ".join(f"{each:.3g}" for each in measured)
                against = {f"at up to {most:,}": f"{shown} {unit}, over {base:.3g}"}
                yield Figure(f"{name}: {axis.unit}", round(value, 1), "", against, floor)
            if axis.name == "resume" and most == RESUMED:
                seconds = costs[-1].wall_s
                yield Figure(f"resume of {RESUMED:,} events", seconds, "s", {}, RESUME_S)


def least(axis: str, size: int, folder: Path, rounds: int) -> Cost:
    """The lowest time and memory of the rounds."""
    journals = folder / str(size)
    if axis in JOURNALS and not journals.exists():
        do("journals", size, journals)
    costs = [do(axis, size, journals if axis in JOURNALS else None) for _ in range(rounds)]
    return Cost(*map(min, zip(*costs, strict=True)))


def do(axis: str, size: int, folder: Path | None) -> Cost:
    """The cost of a work, which is done in a separate process."""
    with tempfile.TemporaryDirectory() as new:
        command = [
            sys.executable,
            str(HERE / "growth_axes.py"),
            axis,
            str(size),
            str(folder or new),
        ]
        done = subprocess.run(command, env=quiet_env(), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{axis} of {size:,}: {done.stderr[-2000:]}")
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description="How cost grows with the work.")
    parser.add_argument("--quick", action="store_true", help="smaller sizes, within five minutes")
    parser.add_argument("--json", action="store_true", help="print the figures on the last line")
    parser.add_argument(
        "--only", metavar="AXIS", action="append", choices=[axis.name for axis in AXES]
    )
    options = parser.parse_args()
    axes = [axis for axis in AXES if not options.only or axis.name in options.only]
    found = list(figures(axes, options.quick, 2 if options.quick else 3))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return int(any(figure.holds is False for figure in found))


if __name__ == "__main__":
    sys.exit(main())
