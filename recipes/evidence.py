"""Evidence over several papers: a root chooses papers, and its children find the passages.

    ramify eval evidence --model openai:gpt-5 --split train --items 600 --store traces     1 record
    ramify train recipes/evidence.py sft.trajectories=traces --out runs/evidence      2, 3 and 4

1 a stronger model of any provider is recorded on training items; 2 its runs are filtered by score
(``sft.algorithm.min_reward``); 3 they are imitated; 4 reinforcement learning with trained children
continues. As written it is for one GPU and a checkpoint of 4B parameters. Variants:

    rl.algorithm.children=false                                       children are not trained
    'depths=[{}, {"model": "openai:gpt-5-mini"}]' frozen.run_cost=20        over a frozen model
    rl=null                                                           imitation only
"""

from __future__ import annotations

from ramify import Limits, train


def run() -> train.Run:
    return train.Run(
        name="evidence",
        policy=train.PolicySpec(path="Qwen/Qwen3-4B-Instruct-2507"),
        task=train.TaskSpec(
            name="evidence", options={"papers": [6, 12], "chars": [8_000, 40_000], "facts": [2, 8]}
        ),
        sft=train.SftSpec(
            trajectories="traces",
            epochs=2,
            batch_tokens=65_536,
            algorithm=train.SFT(min_reward=0.8),
            optim=train.OptimizerSpec(lr=1e-5, schedule="cosine", warmup_steps=5),
        ),
        rl=train.RlSpec(
            steps=100,
            sample=train.RolloutBatchSpec(items=16, max_items=48, first_item=10_000),
            rollout=train.RolloutOptions(group=8, concurrency=128),
            algorithm=train.DrGRPO(credit="per_role", overlong="mask"),
            optim=train.OptimizerSpec(lr=1e-6, warmup_steps=5, max_grad_norm=1.0),
        ),
        scaffold="default",
        limits=Limits(
            max_turns=10,
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
