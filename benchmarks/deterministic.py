"""Benchmark of deterministic runs: whether two of them give the same bits, and what that costs.

    python benchmarks/deterministic.py            print a table
    python benchmarks/deterministic.py --quick    a smaller step
    python benchmarks/deterministic.py --json     also print {"figures": […]} as the last line

Each run trains the packaged policy for two steps of 16 questions with 8 attempts each, all 128 at
once. Two runs are compared bit by bit: every sampled token with its log-probability, and the
weights after the last step. Costs are ratios of CPU seconds of the process to a usual run, in one
thread, with alternating runs. The exit code is 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from figures import Figure, show

from ramify import Limits, train
from ramify.models.weights import read_weights
from ramify.train.data.sft_data import read
from ramify.train.metrics import StepMetrics


class Outcome(NamedTuple):
    """The results of a run that are compared."""

    tokens: str
    """Hash of every sampled token and its log-probability."""
    weights: str
    """Hash of the trained weights."""
    mismatch: float
    """Largest difference of the sampler's and the trainer's log-probabilities."""
    rollout_s: float
    """CPU seconds of the engine in rollouts."""
    learn_s: float
    """Seconds of learning."""


def recipe(quick: bool, deterministic: bool, precision: str) -> train.Run:
    return train.Run(
        name="deterministic",
        deterministic=deterministic,
        policy=train.PolicySpec(path="tiny"),
        task=train.TaskSpec(name="ledger", options={"multi": 0.5}),
        rl=train.RlSpec(
            steps=1 if quick else 2,
            sample=train.RolloutBatchSpec(items=16),
            rollout=train.RolloutOptions(group=8, concurrency=128),
            optim=train.OptimizerSpec(lr=1e-4),
        ),
        scaffold="tiny",
        limits=Limits(max_turns=5, max_depth=1, max_reply_tokens=100, max_seconds=86_400),
        evaluate=train.EvaluateSpec(num=4, final=()),
        schedule=train.Schedule(save_rollouts_every=1),
        compute=train.TrainerComputeSpec(precision=precision),  # type: ignore[arg-type]
        threads=1,
    )


def outcome(run: train.Run) -> Outcome:
    """Train ``run`` in a temporary folder."""
    rows: list[StepMetrics] = []
    with tempfile.TemporaryDirectory() as folder:
        train.train(run, folder, listener=rows.append)
        tokens = hashlib.sha256()
        for path in sorted(Path(folder).glob("rollouts/*.jsonl")):
            for trajectory in read(path):
                for call in trajectory.calls:
                    replies = [turn.reply for turn in call.turns]
                    values: Any = [call.id, [[x.token_ids, x.logprobs] for x in replies]]
                    tokens.update(repr(values).encode())
        weights = hashlib.sha256()
        for name, tensor in sorted(read_weights(Path(folder) / "policy").items()):
            weights.update(name.encode() + tensor.float().numpy().tobytes())
    steps = [row.values for row in rows if "mismatch_max" in row.values]
    return Outcome(
        tokens.hexdigest(),
        weights.hexdigest(),
        max(step["mismatch_max"] for step in steps),
        sum(step["cpu/engine_s"] for step in steps),
        sum(step["learn_s"] for step in steps),
    )


def figures(quick: bool) -> Iterator[Figure]:
    for precision in ("fp32", "bf16"):
        pairs = [
            [outcome(recipe(quick, fixed, precision)) for fixed in (True, False)] for _ in range(2)
        ]
        one, other = pairs[0][0], pairs[1][0]
        same = float(one[:2] == other[:2])
        usual = float(pairs[0][1][:2] == pairs[1][1][:2])
        yield Figure(
            f"{precision}: two runs of 128 rollouts at once are equal to the bit",
            same,
            "",
            {"usual runs": usual},
            least=1.0,
        )
        worst = max(pair[0].mismatch for pair in pairs)
        others = {"usual runs": max(pair[1].mismatch for pair in pairs)}
        name = f"{precision}: sampler and trainer differ by"
        yield Figure(name, worst, "", others, 0.0)
        for part in ("rollout_s", "learn_s"):
            ratios = [getattr(fixed, part) / getattr(usual, part) for fixed, usual in pairs]
            name = "sampling" if part == "rollout_s" else "learning"
            yield Figure(f"{precision}: {name}, deterministic to usual", median(ratios), "×", {})


def main() -> int:
    parser = argparse.ArgumentParser(description="Figures of deterministic runs.")
    parser.add_argument("--quick", action="store_true", help="one step instead of two")
    parser.add_argument("--json", action="store_true", help="also print the figures as JSON")
    options = parser.parse_args()
    found = list(figures(options.quick))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
