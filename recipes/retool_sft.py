"""A math agent with a Python tool, by imitation: ReTool's demonstrations, for any checkpoint that
can call tools.

    ramify train recipes/retool_sft.py sft.options.source=ReTool-SFT.parquet task.options.test=aime-2024.parquet \\
        task.options.validation=aime-2025.parquet policy.path=Qwen/Qwen3-4B-Instruct-2507 --out runs/retool-sft

Files are the public sets as they are published (JoeYing/ReTool-SFT, BytedTsinghua-SIA/AIME-2024,
…), on disk. Settings are those of the published recipe: 3 epochs, 1e-5 with a cosine to a tenth,
some 128 demonstrations a step; what came back from the tool is context, and never learnt. Without
native calls in the template: ``scaffold=retool``, which writes tags.
"""

from __future__ import annotations

from ramify.engine.limits import Limits
from ramify.sandbox.base import SandboxSpec
from ramify.train.backends.base import ComputeSpec, OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, Run, SftSpec, TaskSpec
from ramify.train.training_loop import Schedule

DATA = {"validation": "data/aime-2025.parquet", "test": "data/aime-2024.parquet"}
LIMITS = Limits(
    max_turns=16,
    max_depth=0,
    max_reply_tokens=8192,
    max_seconds=86_400,
    max_tokens=400_000,
    max_concurrency=256,
)
SANDBOX = SandboxSpec(cell_s=120.0, memory_bytes=4 << 30, pool=8)
"""Whole Python in the jail; ``sandbox.packages=["sympy", "numpy"]`` where they are installed."""


def run() -> Run:
    return Run(
        name="retool-sft",
        policy=PolicySpec(path="Qwen/Qwen3-4B-Instruct-2507"),
        task=TaskSpec(name="toolmath", options={**DATA, "train": "data/dapo-math-17k.parquet"}),
        sft=SftSpec(
            demos="retool", num=10_000, options={"source": "data/ReTool-SFT.parquet"}, epochs=3, batch_tokens=300_000,
            optim=OptimizerSpec(
                lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, schedule="cosine", warmup_steps=5, final_fraction=0.1
            ),
        ),
        scaffold="retool_native",
        limits=LIMITS,
        sandbox=SANDBOX,
        evaluate=EvaluateSpec(num=30, attempts=16),
        schedule=Schedule(checkpoint_every=16),
        compute=ComputeSpec(max_tokens=16_384, recompute=True),
    )  # fmt: skip
