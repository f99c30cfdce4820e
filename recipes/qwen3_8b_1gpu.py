"""Reinforcement learning of an 8B checkpoint on one GPU of 80 GB or more, by adapters (LoRA).

    hf download Qwen/Qwen3-8B --local-dir qwen3-8b
    ramify cluster plan recipes/qwen3_8b_1gpu.py policy.path=qwen3-8b --device h100
    ramify train recipes/qwen3_8b_1gpu.py policy.path=qwen3-8b --out runs/qwen3-8b

Nothing but the path has to be changed. The engine is in the trainer's process. One policy answers
at the root and in child calls, and both are trained. Adapters bear ten times the learning rate of a
whole checkpoint. A test runs it cut down; no GPU has run it yet.
"""

from __future__ import annotations

import msgspec
from hf_grpo import run as hf_grpo

from ramify import train


def run() -> train.Run:
    base = hf_grpo()
    assert base.rl is not None
    return msgspec.structs.replace(
        base,
        name="qwen3-8b-1gpu",
        policy=train.PolicySpec(
            path="Qwen/Qwen3-8B",
            lora=train.LoraSpec(rank=32),
            slots=64,
            cache_bytes=12_000_000_000,
        ),
        rl=msgspec.structs.replace(
            base.rl,
            sample=train.RolloutBatchSpec(items=8, max_items=24),
            rollout=train.RolloutOptions(group=8, concurrency=64),
            optim=train.OptimizerSpec(lr=1e-5, warmup_steps=5, max_grad_norm=1.0),
        ),
        schedule=train.Schedule(evaluate_every=20, keep_last=1),
        compute=train.TrainerComputeSpec(max_tokens=8192, recompute=True),
    )
