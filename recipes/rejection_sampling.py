"""Iterated rejection sampling: answer items with the newest policy, keep the right rollouts,
imitate them, repeat. (Also called RAFT, ReST or expert iteration.)

    ramify train recipes/rejection_sampling.py --out runs/rejection
    ramify train recipes/rejection_sampling.py policy.path=FOLDER warmup=null sft=null task.name=…

A step of ``rl`` is a round: ``sample.items`` items, ``rollout.group`` attempts at each, all by the
weights of the round before. ``SFT(min_reward=1)`` keeps the right ones, and ``sample.minibatches``
optimizer steps imitate them. Every round's rollouts are saved in OUT/rollouts, with their rewards
and token ids, and may be imitated again: ``sft.trajectories=OUT/rollouts
sft.algorithm.min_reward=1``.

The policy and the task are those of ``tiny.py``, so that it runs on a laptop. docs/recipes.md
compares it with GRPO. For a checkpoint, set ``rl.optim.lr=null``, which takes the usual rate.
"""

from __future__ import annotations

import msgspec
from tiny import run as tiny

from ramify import train


def run() -> train.Run:
    base = tiny()
    assert base.rl is not None
    rounds = msgspec.structs.replace(
        base.rl,
        steps=6,
        sample=train.RolloutBatchSpec(items=48, minibatches=8),
        algorithm=train.SFT(min_reward=1.0),
    )
    return msgspec.structs.replace(
        base,
        name="rejection-sampling",
        rl=rounds,
        schedule=train.Schedule(evaluate_every=2, save_rollouts_every=1),
    )
