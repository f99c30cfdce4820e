"""Like ``qwen3_8b_8gpu_split.py``, but rollouts run ahead of training: neither half of the GPUs
waits for the other.

    ramify cluster plan recipes/qwen3_8b_8gpu_async.py policy.path=qwen3-8b --device h100
    ramify train recipes/qwen3_8b_8gpu_async.py policy.path=qwen3-8b --out runs/qwen3-8b-async

Rollouts may begin two steps ahead; the loss accounts for tokens that are older than the policy
(``decoupled``, 2505.24298). A test runs it cut down, on CPU ranks with `ramify serve-policy`; no
GPU has run it yet.
"""

from __future__ import annotations

import msgspec
from qwen3_8b_8gpu_split import run as split

from ramify import train


def run() -> train.Run:
    base = split()
    assert base.rl is not None
    return msgspec.structs.replace(
        base,
        name="qwen3-8b-8gpu-async",
        rl=msgspec.structs.replace(
            base.rl,
            sample=train.RolloutBatchSpec(items=32, max_items=96, max_staleness=2),
            loss=train.LossSpec(policy=train.Decoupled()),
        ),
    )
