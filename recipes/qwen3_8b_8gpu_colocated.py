"""Like ``qwen3_8b_8gpu_split.py``, but all eight GPUs sample and then all eight train: engines
sleep while the trainer learns.

    ramify cluster plan recipes/qwen3_8b_8gpu_colocated.py policy.path=qwen3-8b --device h100
    ramify train recipes/qwen3_8b_8gpu_colocated.py policy.path=qwen3-8b --out runs/colocated

Rank n and engine n share GPU n. A test runs it cut down, on CPU ranks with `ramify serve-policy`;
no GPU has run it yet.
"""

from __future__ import annotations

import msgspec
from qwen3_8b_8gpu_split import VLLM
from qwen3_8b_8gpu_split import run as split

from ramify import inference, train


def run() -> train.Run:
    base = split()
    return msgspec.structs.replace(
        base,
        name="qwen3-8b-8gpu-colocated",
        compute=msgspec.structs.replace(base.compute, shard=train.FsdpSpec(ranks=8)),
        inference=inference.InferenceSpec(
            engine="vllm",
            num=8,
            gpus=tuple(map(str, range(8))),
            args=("--gpu-memory-utilization", "0.45", *VLLM[2:]),
            sleep="learn",
        ),
    )
