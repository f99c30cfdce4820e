"""Where a step of ``recipes/tiny_recursive.py`` goes, in its steady state: the packaged policy, which was
trained on the same kind of task, continues for a few steps in the recipe's sizes, in a separate process
with one thread per product.

The first step is left out, since it begins the fork server and imports. ``train/metrics.py`` names the
parts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

from figures import Figure

ROOT = Path(__file__).parents[1]


def measure(*, quick: bool) -> Iterator[Figure]:
    """Yield the share of what is neither sampling nor forward and backward passes, of wall time and of
    CPU time."""
    steps = 3 if quick else 6
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    found = subprocess.run(
        [sys.executable, __file__, str(steps)],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    rows: list[dict[str, float]] = json.loads(found.stdout.splitlines()[-1])
    for kind, name in (("time", "wall"), ("time_cpu", "CPU")):
        parts = sorted({key for row in rows for key in row if key.startswith(f"{kind}/")})
        middle = {key: median(row[key] for row in rows) for key in parts}
        step_s = middle[f"{kind}/step_s"]
        beside: dict[str, float | str] = {
            key.removeprefix(f"{kind}/").removesuffix("_s"): f"{100 * middle[key] / step_s:.1f} %"
            for key in sorted(parts, key=lambda each: -middle[each])
            if not key.endswith(("/step_s", "/overhead")) and middle[key] >= step_s / 1000
        }
        yield Figure(
            f"neither sampling nor passes, share of a step's {name} time",
            middle[f"{kind}/overhead"],
            "",
            {"step": f"{step_s:.3g} s", **beside},
            0.1,
        )


def run_steps(steps: int) -> list[dict[str, float]]:
    """Train for ``steps`` steps, and return the metrics of all but the first."""
    sys.path.insert(0, str(ROOT / "recipes"))
    import msgspec
    from tiny_recursive import run

    from ramify import train

    recipe = run()
    assert recipe.rl is not None
    recipe = msgspec.structs.replace(
        recipe,
        policy=train.PolicySpec(path="tiny"),
        warmup=None,
        sft=None,
        rl=msgspec.structs.replace(recipe.rl, steps=steps),
        evaluate=train.EvaluateSpec(num=1, validation=1, final=()),
        schedule=train.Schedule(evaluate_every=None),
        threads=1,
    )
    with tempfile.TemporaryDirectory() as folder:
        train.train(recipe, Path(folder) / "run")
        rows = [row.values for row in train.read_metrics(Path(folder) / "run")]
    return [row for row in rows if "time/step_s" in row][1:]


if __name__ == "__main__":
    print(json.dumps(run_steps(int(sys.argv[1]))))
