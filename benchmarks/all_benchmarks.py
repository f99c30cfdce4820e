"""Every benchmark, one after the other, and one table: what holds, what falls short, what was not
measured, and what crashed.

    benchmarks/setup && benchmarks/all --quick     everything, each within five quiet minutes
    benchmarks/all --quick --only engine           one; repeat for more
    benchmarks/all --quick --without-peers         ours alone
    benchmarks/all --quick --json                  the last line is {"figures": [{"benchmark",
                                                   "name", "value", …}, …], "crashed": {…}}

A benchmark is a module of this folder with a command, unless it is a part of another
(``faces_view`` of ``faces``) or is named in ``NOT_BENCHMARKS``. Each runs in a separate process,
which is ended after ``--limit-s``. A benchmark crashed if its last line of output is not JSON with
figures. A figure without a value was not measured. The exit code is 1 if anything crashed, falls
short or was not measured although something is promised. Not here: what is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import peers

HERE = Path(__file__).parent
NOT_BENCHMARKS = {
    "all_benchmarks": "runs the others",
    "gather_stress": "runs until something breaks",
    "inference_part": "a part of training",
    "journals": "compares two commits",
    "sandbox_chaos": "runs until something breaks",
    "scenes": "the scripted server",
    "side_droste": "one side of a comparison",
    "side_ramify": "one side of a comparison",
    "side_raw": "one side of a comparison",
    "side_rlms": "one side of a comparison",
    "side_trl": "one side of a comparison",
}
"""Module with a command -> why it is not a benchmark."""
WITH_PEERS = ("engine", "objectives", "sandbox", "suites", "training")
"""Benchmarks with the option ``--without-peers``."""
LIMIT_S = 900


class BenchmarkOutcome(NamedTuple):
    name: str
    seconds: float
    figures: Sequence[dict[str, Any]]
    error: str
    """Why there are no figures; empty if the benchmark ended as it should."""

    def named(self, *, measured: bool) -> list[str]:
        """Names of figures that do not hold: those with a value, or those without one."""
        return [
            figure["name"]
            for figure in self.figures
            if figure["holds"] is False and (figure["value"] is not None) is measured
        ]


def names() -> list[str]:
    """All benchmarks, by name."""
    commands = [
        path.stem
        for path in sorted(HERE.glob("*.py"))
        if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
        and path.stem not in NOT_BENCHMARKS
    ]
    parts = {each for each in commands for whole in commands if each.startswith(f"{whole}_")}
    return [each for each in commands if each not in parts or each in INDEPENDENT]


INDEPENDENT = ("map_ray",)
"""Benchmarks whose name begins like another's, and which that one does not run."""


def run(name: str, options: Sequence[str], limit_s: float) -> BenchmarkOutcome:
    """Run one benchmark, and pass its messages on."""
    has_trl = name == "objectives" and peers.WITH_TRL.python_with("trl")
    python = str(peers.WITH_TRL.python) if has_trl else sys.executable
    began = time.monotonic()
    process = subprocess.Popen(
        [python, str(HERE / f"{name}.py"), *options, "--json"],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        cwd=HERE.parent,
    )
    try:
        stdout, _ = process.communicate(timeout=limit_s)
        error = ""
    except subprocess.TimeoutExpired:
        stdout, error = "", f"ended after {limit_s:g} s"
    finally:  # with all that it started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    figures = _figures(stdout)
    if figures is None and not error:
        error = f"exit code {process.returncode}, without figures"
    return BenchmarkOutcome(name, time.monotonic() - began, figures or (), error)


def _figures(stdout: str) -> list[dict[str, Any]] | None:
    """The figures of the last line of a benchmark's output; None if it has none."""
    try:
        found: list[dict[str, Any]] = json.loads(stdout.splitlines()[-1])["figures"]
    except (IndexError, KeyError, TypeError, ValueError):
        return None
    return found


def lines(outcomes: Sequence[BenchmarkOutcome]) -> Iterator[str]:
    """The table, and below it the names of what does not hold."""
    yield f"{'benchmark':<20} {'seconds':>7} {'holds':>6} {'short':>6} {'not measured':>12}"
    for outcome in outcomes:
        holds = sum(figure["holds"] is True for figure in outcome.figures)
        short, empty = outcome.named(measured=True), outcome.named(measured=False)
        row = f"{outcome.name:<20} {outcome.seconds:>7.0f} {holds:>6} {len(short):>6}"
        yield f"{row} {len(empty):>12}" + (f"  crashed: {outcome.error}" if outcome.error else "")
    for outcome in outcomes:
        for words, measured in (("falls short", True), ("not measured", False)):
            for name in outcome.named(measured=measured):
                yield f"{words}: {outcome.name}: {name}"


def main() -> int:
    parser = argparse.ArgumentParser(description="All benchmarks, in one table.")
    parser.add_argument("--quick", action="store_true", help="each within five quiet minutes")
    parser.add_argument("--json", action="store_true", help="print all figures on the last line")
    parser.add_argument("--only", metavar="NAME", action="append", choices=names())
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="seconds for each benchmark")
    peers.add_option(parser)
    options = parser.parse_args()
    outcomes = []
    for name in options.only or names():
        print(f"benchmarks/{name}.py", file=sys.stderr)
        more = ["--quick"] * options.quick
        more += ["--without-peers"] * (options.without_peers and name in WITH_PEERS)
        outcomes.append(run(name, more, options.limit_s))
    print("\n".join(lines(outcomes)))
    if options.json:
        figures = [{"benchmark": each.name, **fig} for each in outcomes for fig in each.figures]
        crashed = {each.name: each.error for each in outcomes if each.error}
        print(json.dumps({"figures": figures, "crashed": crashed}))
    fails = any(
        outcome.error or any(figure["holds"] is False for figure in outcome.figures)
        for outcome in outcomes
    )
    return int(fails)


if __name__ == "__main__":
    sys.exit(main())
