"""Train ``recipes/frozen_lake.py`` from random weights, and measure its return and its CPU time.

    python benchmarks/bring_your_own_frozen_lake.py            three seeds, one after another
    python benchmarks/bring_your_own_frozen_lake.py --quick    one seed, cut to about a CPU minute
    python benchmarks/bring_your_own_frozen_lake.py --json     figures as JSON, like engine.py

Sessions count: the time is that of the process and of all its children. The seeds were chosen
before the first run with any of them. A part of ``benchmarks/bring_your_own.py``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from figures import Figure
from studies import python, tell

from ramify.train.metrics import read_metrics

SEEDS = (11, 12, 13)
LEAST_RETURN = 0.9
MOST_MINUTES = 5.0
QUICK = ("sft.num=150", "rl.steps=8", "rl.sample.items=6", "evaluate.num=64")


class LakeRun(NamedTuple):
    seed: int
    imitated: float
    """Mean return on the test split after imitation, before reinforcement learning."""
    trained: float
    """Mean return on the test split at the end of training."""
    cpu_s: float
    """CPU seconds of the whole run: sessions, demonstrations and all evaluations included."""


def trained(seed: int, folder: Path, overrides: tuple[str, ...] = ()) -> LakeRun:
    """Train one seed in a process. Raises SystemExit if it fails."""
    out = folder / f"lake-{seed}"
    command = ("-m", "ramify", "train", "recipes/frozen_lake.py", "--plain", "--out", str(out))
    cpu_s = python(*command, f"seed={seed}", *overrides, quiet=True)
    returns = {
        row.stage: row.values["test/reward"]
        for row in read_metrics(out)
        if "test/reward" in row.values
    }
    return LakeRun(seed, returns["first"], returns["last"], cpu_s)


def measure(quick: bool) -> list[Figure]:
    with tempfile.TemporaryDirectory(prefix="ramify-lake-") as folder:
        seeds, overrides = (SEEDS[:1], QUICK) if quick else (SEEDS, ())
        runs = [trained(seed, Path(folder), overrides) for seed in seeds]
    name = f"FrozenLake 4x4 from random weights, seeds {', '.join(str(run.seed) for run in runs)}"
    before = {"after imitation": min(run.imitated for run in runs)}
    by_seed = {f"seed {run.seed}": run.trained for run in runs}
    minutes = {f"seed {run.seed}": run.cpu_s / 60 for run in runs}
    return [
        Figure(
            f"{name}: lowest return",
            min(run.trained for run in runs),
            "return",
            {**before, **by_seed},
            least=None if quick else LEAST_RETURN,
        ),
        Figure(
            f"{name}: longest run, sessions included",
            max(run.cpu_s for run in runs) / 60,
            "CPU min",
            dict(minutes),
            None if quick else MOST_MINUTES,
        ),
    ]


def main() -> int:
    options = argparse.ArgumentParser(description="Is an environment learned from random weights?")
    options.add_argument("--quick", action="store_true", help="one seed, about a CPU minute")
    options.add_argument("--json", action="store_true", help="print the figures as JSON")
    given = options.parse_args()
    return tell(measure(given.quick), given.json)


if __name__ == "__main__":
    sys.exit(main())
