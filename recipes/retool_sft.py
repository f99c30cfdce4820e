"""Imitation of ReTool's demonstrations by any checkpoint that can call tools: a math agent with a
Python tool.

    ramify train recipes/retool_sft.py sft.options.source=ReTool-SFT.parquet \\
        task.options.test=aime-2024.parquet task.options.validation=aime-2025.parquet \\
        policy.path=Qwen/Qwen3-4B-Instruct-2507 --out runs/retool-sft

The files are public datasets in their published form (JoeYing/ReTool-SFT,
BytedTsinghua-SIA/AIME-2024, …), on disk. The settings are those of the published recipe: 3 epochs,
learning rate 1e-5 with a cosine schedule to a tenth, about 128 demonstrations per step. The tool's
output is context and not trained on. For a chat template without native tool calls, use
``scaffold=retool``, which writes tags.
"""

from __future__ import annotations

from ramify import JailSpec, Limits, train

DATA = {"validation": "data/aime-2025.parquet", "test": "data/aime-2024.parquet"}
LIMITS = Limits(
    max_turns=16,
    max_depth=0,
    max_reply_tokens=8192,
    max_seconds=86_400,
    max_tokens=400_000,
    max_concurrency=256,
)
SANDBOX = JailSpec(cell_s=120.0, memory_bytes=4 << 30, pool=8)
"""Full Python in the jail; add ``sandbox.packages=["sympy", "numpy"]`` if they are installed."""


def run() -> train.Run:
    return train.Run(
        name="retool-sft",
        policy=train.PolicySpec(path="Qwen/Qwen3-4B-Instruct-2507"),
        task=train.TaskSpec(
            name="toolmath", options={**DATA, "train": "data/dapo-math-17k.parquet"}
        ),
        sft=train.SftSpec(
            demos="retool",
            num=10_000,
            options={"source": "data/ReTool-SFT.parquet"},
            epochs=3,
            batch_tokens=300_000,
            optim=train.OptimizerSpec(
                lr=1e-5,
                betas=(0.9, 0.95),
                weight_decay=0.1,
                schedule="cosine",
                warmup_steps=5,
                final_fraction=0.1,
            ),
        ),
        scaffold="retool_native",
        limits=LIMITS,
        sandbox=SANDBOX,
        evaluate=train.EvaluateSpec(num=30, attempts=16),
        schedule=train.Schedule(checkpoint_every=16),
        compute=train.TrainerComputeSpec(max_tokens=16_384, recompute=True),
    )
