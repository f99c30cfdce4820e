"""A small policy, trained from scratch to answer questions about one document, in about five
minutes on one thread.

    ramify train recipes/tiny.py --out runs/tiny
    ramify ask --model local:runs/tiny/policy "sum qty of 'red'" ledger.txt

A transformer of half a million parameters learns to copy (``warmup``), imitates demonstrations of
which a third are right (``sft``), and finds out by reinforcement learning which of their habits are
right (``rl``). See ``docs/learning.md`` for curves.
"""

from __future__ import annotations

from ramify import Limits, train

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 256,
    "max_position_embeddings": 512,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
"""A model of 0.5M parameters. Four times as many take three and a half times as long."""
IMITATE = train.OptimizerSpec(
    kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30, schedule="linear", max_grad_norm=1.0
)

ASKED = ["count", "sum", "max", "top", "latest", "latest"]
"""Kinds of questions in demonstrations. Code for ``latest`` copies a name of two syllables, which
takes more examples than the labels of the others do."""


def run() -> train.Run:
    return train.Run(
        name="tiny",
        policy=train.PolicySpec(shape=SHAPE),
        task=train.TaskSpec(name="ledger"),
        warmup=train.InductionWarmUpSpec(
            steps=150,
            optim=train.OptimizerSpec(kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30),
        ),
        sft=train.SftSpec(
            demos="ledger",
            num=10_800,
            task=train.TaskSpec(name="ledger", options={"kinds": ASKED}),
            optim=IMITATE,
        ),
        rl=train.RlSpec(
            steps=24,
            sample=train.RolloutBatchSpec(items=12, max_items=36, minibatches=2),
            rollout=train.RolloutOptions(group=8, concurrency=128),
            optim=train.OptimizerSpec(
                lr=5e-4, warmup_steps=3, schedule="linear", max_grad_norm=0.5
            ),
        ),
        scaffold="tiny",
        limits=Limits(
            max_turns=5, max_depth=1, max_reply_tokens=100, max_seconds=86_400, max_concurrency=512
        ),
        evaluate=train.EvaluateSpec(
            num=256, validation=128, final=("test", "test_formats", "test_names")
        ),
        schedule=train.Schedule(evaluate_every=8),
        compute=train.TrainerComputeSpec(precision="fp32"),
        threads=1,
    )
