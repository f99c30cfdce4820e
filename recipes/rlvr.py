"""Plain reinforcement learning with verifiable rewards: one prompt, one reply, one number. No
session, no code.

    ramify train recipes/rlvr.py policy.path=Qwen/Qwen3-0.6B --out runs/rlvr
    ramify train recipes/rlvr.py policy.path=… task.name=rows.parquet \\
        'task.options={"reward": "boxed_math"}'

``direct=True`` answers an item by one plain call. The prompt is the item's messages in the
checkpoint's own chat template. The rows may have the columns of TRL, verifiers, prime-rl, SkyRL or
verl; ``task.name=my_task.py:task`` names your task, whose reward is any function of
(answer, item).
"""

from __future__ import annotations

from ramify import Limits, tasks, train


def sums() -> tasks.DatasetTask:
    """Sums of two numbers, to see the recipe run before you bring your own rows."""

    def item(rng) -> tasks.Item:  # type: ignore[no-untyped-def]
        a, b = rng.randrange(1000), rng.randrange(1000)
        return tasks.Item(f"{a} + {b} = ? End with the number.", gold=a + b)

    return tasks.DatasetTask("sums", tasks.generated("sums", item), tasks.last_number)


def run() -> train.Run:
    return train.Run(
        name="rlvr",
        policy=train.PolicySpec(path="Qwen/Qwen3-0.6B"),
        task=train.TaskSpec(name=f"{__file__}:sums"),
        rl=train.RlSpec(
            steps=200,
            sample=train.RolloutBatchSpec(items=16, max_items=48),
            rollout=train.RolloutOptions(group=8, concurrency=128, direct=True),
            optim=train.OptimizerSpec(lr=1e-6, warmup_steps=5, max_grad_norm=1.0),
        ),
        limits=Limits(max_reply_tokens=1024, max_seconds=86_400, max_concurrency=512),
        evaluate=train.EvaluateSpec(num=64),
    )
