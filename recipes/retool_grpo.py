"""GRPO for a math agent with a Python tool, with outcome reward only, on DAPO-Math-17k.

It continues from the checkpoint of ``retool_sft``:

    ramify train recipes/retool_grpo.py policy.path=runs/retool-sft/policy \\
        task.options.train=dapo-math-17k.parquet task.options.validation=aime-2025.parquet \\
        task.options.test=aime-2024.parquet --out runs/retool-grpo

The settings are those of the tool-calling study at 4B. A correct answer has reward 1, a wrong one
-1.1 to -0.6, depending on how often the tool was used. A step has 32 problems with 8 rollouts each,
in two optimizer steps. Learning rate 1e-6, clip 0.2 and 0.28, a KL of 0.01 to the initial policy,
16 turns, and AIME with 16 samples every 20 steps.
"""

from __future__ import annotations

import msgspec
from retool_sft import run as retool_sft

from ramify import train


def run() -> train.Run:
    return msgspec.structs.replace(
        retool_sft(),
        name="retool-grpo",
        sft=None,
        rl=train.RlSpec(
            steps=250,
            sample=train.RolloutBatchSpec(items=32, minibatches=2),
            rollout=train.RolloutOptions(group=8, concurrency=256),
            signals={"outcome": train.OutcomeSignal()},
            algorithm=train.Hybrid(outcome=train.GRPO()),
            loss=train.LossSpec(
                policy=train.PpoClip(clip_low=0.2, clip_high=0.28), kl_beta=0.01, kl="k3"
            ),
            optim=train.OptimizerSpec(lr=1e-6, betas=(0.9, 0.98), weight_decay=0.1),
        ),
        schedule=train.Schedule(evaluate_every=20),
    )
