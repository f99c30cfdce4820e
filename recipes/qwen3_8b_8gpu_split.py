"""Reinforcement learning of all weights of an 8B checkpoint on eight GPUs of one machine: four
train and four sample, in turns.

    ramify cluster plan recipes/qwen3_8b_8gpu_split.py policy.path=qwen3-8b --device h100
    ramify train recipes/qwen3_8b_8gpu_split.py policy.path=qwen3-8b --out runs/qwen3-8b-split

Nothing but the path has to be changed; vLLM must be installed. GPUs 0 to 3 hold the trainer's ranks
(FSDP), 4 to 7 one vLLM server each. ``qwen3_8b_8gpu_async.py`` lets both work at the same time,
``qwen3_8b_8gpu_colocated.py`` gives all GPUs to both in turn. A test runs it cut down, on CPU ranks
with `ramify serve-policy`; no GPU has run it yet.
"""

from __future__ import annotations

import msgspec
from qwen3_8b_1gpu import run as one_gpu

from ramify import inference, train

VLLM = ("--gpu-memory-utilization", "0.85", "--max-model-len", "32768")


def run() -> train.Run:
    single = one_gpu()
    assert single.rl is not None
    return msgspec.structs.replace(
        single,
        name="qwen3-8b-8gpu-split",
        policy=train.PolicySpec(path=single.policy.path),
        rl=msgspec.structs.replace(
            single.rl,
            sample=train.RolloutBatchSpec(items=32, max_items=96),
            rollout=train.RolloutOptions(group=8, concurrency=512),
            optim=train.OptimizerSpec(lr=1e-6, warmup_steps=5, max_grad_norm=1.0),
        ),
        compute=train.TrainerComputeSpec(
            backend="fsdp", shard=train.FsdpSpec(ranks=4), max_tokens=16_384, recompute=True
        ),
        inference=inference.InferenceSpec(
            engine="vllm", num=4, gpus=("4", "5", "6", "7"), args=VLLM
        ),
    )
