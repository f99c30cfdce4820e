"""Reinforcement learning of any Hugging Face checkpoint, including child calls, on a GPU.

    ramify train recipes/hf_grpo.py policy.path=Qwen/Qwen3-0.6B --out runs/qwen
    ramify train recipes/hf_grpo.py policy.path=Qwen/Qwen3-8B 'policy.lora={"rank": 32}'
    ramify train recipes/hf_grpo.py policy.path=… task.name=my_task.py:task rl.algorithm.credit=root

The checkpoint must be on disk (``hf download NAME``); its own chat template is used. On a GPU, the
engine samples in the checkpoint's precision from a copy of the weights, and the trainer keeps the
weights in fp32 and multiplies in bf16. Sizes to check first: ``policy.cache_bytes`` (keys and
values of the engine), ``compute.max_tokens`` (activations of a batch), ``rl.rollout.concurrency``
and ``limits.max_reply_tokens``.
"""

from __future__ import annotations

from ramify import Limits, train


def run() -> train.Run:
    return train.Run(
        name="hf-grpo",
        policy=train.PolicySpec(path="Qwen/Qwen3-0.6B"),
        task=train.TaskSpec(name="ledger", options={"multi": 0.5, "chars": 20_000}),
        rl=train.RlSpec(
            steps=200,
            sample=train.RolloutBatchSpec(items=16, max_items=48),
            rollout=train.RolloutOptions(group=8, concurrency=128),
            algorithm=train.DrGRPO(credit="per_role", overlong="mask"),
            optim=train.OptimizerSpec(lr=1e-6, warmup_steps=5, max_grad_norm=1.0),
        ),
        scaffold="default",
        limits=Limits(
            max_turns=8,
            max_depth=1,
            max_children=16,
            max_reply_tokens=1024,
            max_seconds=86_400,
            max_concurrency=512,
        ),
        evaluate=train.EvaluateSpec(num=64, first=("test",), final=("test",)),
        schedule=train.Schedule(evaluate_every=10, keep_last=1),
        compute=train.TrainerComputeSpec(max_tokens=16_384, recompute=True),
    )
