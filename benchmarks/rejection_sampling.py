"""Is iterated rejection sampling better than GRPO at equal CPU time? Both begin with the same
policy, which has imitated 160 episodes of a random player on FrozenLake.

    python benchmarks/rejection_sampling.py            three seeds
    python benchmarks/rejection_sampling.py --quick    one seed, cut short
    python benchmarks/rejection_sampling.py --json     figures as JSON, like benchmarks/engine.py

Both run ``recipes/frozen_lake.py`` and differ in ``rl`` alone: rounds that imitate the right
rollouts, as in ``recipes/rejection_sampling.py``, or steps of GRPO. The CPU
time is that of the whole process after imitation, sessions and the last evaluation included. Each
return is a mean over test episodes with the interval of one policy; the interval over seeds is
Student's on paired differences.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple

from figures import Figure
from learning import mean_of_pairs
from studies import folder_of, parser, python, tell

from ramify.evaluate.statistics import share_with_interval
from ramify.train.metrics import read_metrics

RECIPE = "recipes/frozen_lake.py"
NUM = 200
"""Test episodes per run."""
VARIANTS = {
    "rejection": [
        "rl.algorithm=sft",
        "rl.algorithm.min_reward=1",
        "rl.steps=7",
        "rl.sample.items=13",
        "rl.sample.minibatches=8",
    ],
    "grpo": ["rl.algorithm=grpo", "rl.steps=16", "rl.sample.items=5"],
}
"""Variant -> overrides."""
QUICK = ["rl.steps=3", "rl.sample.items=2", "rl.sample.minibatches=1"]


class TrainedVariant(NamedTuple):
    variant: str
    seed: int
    reward: float
    """Mean return of the last policy on the test episodes."""
    cpu_s: float


def trained(folder: Path, variant: str, *overrides: str) -> tuple[float, float]:
    """Return the reward and the CPU seconds of a run. A finished run is read from its folder."""
    result = folder / "result.json"
    if not result.exists():
        cpu_s = python(
            *("-m", "ramify", "train", RECIPE, "--plain", "--out", str(folder)),
            f"evaluate.num={NUM}",
            "evaluate.validation=8",
            "evaluate.first=[]",
            "schedule.evaluate_every=null",
            "schedule.save_rollouts_every=null",
            *overrides,
            quiet=True,
        )
        (reward,) = (
            row.values["test/reward"] for row in read_metrics(folder) if "test/reward" in row.values
        )
        result.write_text(json.dumps([reward, cpu_s]))
    reward, cpu_s = json.loads(result.read_text())
    return reward, cpu_s


def runs_of(folder: Path, seed: int, quick: bool) -> list[TrainedVariant]:
    """Return the runs of one seed: the policy after imitation, and both variants that start from
    it."""
    start = folder / f"start-{seed}"
    found = [
        TrainedVariant(
            "start", seed, *trained(start, "start", f"seed={seed}", "sft.num=160", "rl=null")
        )
    ]
    for variant, overrides in VARIANTS.items():
        given = [
            f"seed={seed}",
            f"policy.path={start}/policy",
            "sft=null",
            "rl.sample.first_item=160",
            *overrides,
            *(QUICK if quick else ()),
        ]
        found.append(
            TrainedVariant(variant, seed, *trained(folder / f"{variant}-{seed}", variant, *given))
        )
    return found


def table(runs: list[TrainedVariant]) -> str:
    lines = ["| seed | " + " | ".join(("start", *VARIANTS)) + " |", "|" + " --- |" * 4]
    for seed in sorted({run.seed for run in runs}):
        cells = []
        for run in [run for run in runs if run.seed == seed]:
            share = share_with_interval(round(run.reward * NUM), NUM)
            reach = f"{100 * share.low:.1f} to {100 * share.high:.1f}"
            cells.append(f"{share.value:.1%} ({reach}), {run.cpu_s:.0f} CPU s")
        lines.append(f"| {seed} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> int:
    options_of = parser("Rejection sampling or GRPO?", "one seed, cut short", "rejection", 3)
    options = options_of.parse_args()
    seeds = options.seeds[:1] if options.quick else options.seeds
    folder = folder_of(options)
    runs = [run for seed in seeds for run in runs_of(folder, seed, options.quick)]
    print(table(runs))
    by_name = {name: [run for run in runs if run.variant == name] for name in ("start", *VARIANTS)}
    gains = [
        100 * (ours.reward - theirs.reward)
        for ours, theirs in zip(by_name["rejection"], by_name["grpo"], strict=True)
    ]
    print(f"rejection sampling less GRPO, in points: {mean_of_pairs(gains)}")
    figures = [
        Figure(
            f"seed {ours.seed}: return of rejection sampling",
            ours.reward,
            "return",
            {"GRPO": theirs.reward, "before": start.reward},
        )
        for start, ours, theirs in zip(*by_name.values(), strict=True)
    ]
    ratios = [
        ours.cpu_s / theirs.cpu_s
        for ours, theirs in zip(by_name["rejection"], by_name["grpo"], strict=True)
    ]
    figures.append(Figure("CPU time against GRPO, largest", max(ratios), "ratio", {}))
    return tell(figures, options.json)


if __name__ == "__main__":
    sys.exit(main())
