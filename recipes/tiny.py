"""A small policy, trained from scratch to answer questions about one document, in about five
minutes on one thread.

    ramify train recipes/tiny.py --out runs/tiny
    ramify ask --model local:runs/tiny/policy "sum qty of 'red'" ledger.txt

A transformer of half a million parameters learns to copy (``warmup``), imitates demonstrations of
which a third are right (``sft``), and finds out by reinforcement learning which of their habits are
right (``rl``). See ``docs/learning.md`` for curves.
"""

from __future__ import annotations

from ramify.engine.limits import Limits
from ramify.train.backends.base import ComputeSpec, OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Run, SftSpec, TaskSpec, WarmUpSpec
from ramify.train.rollouts.admission_rules import StepSampleSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.training_loop import Schedule

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
IMITATE = OptimizerSpec(
    kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30, schedule="linear", max_grad_norm=1.0
)


def run() -> Run:
    return Run(
        name="tiny",
        policy=PolicySpec(shape=SHAPE),
        task=TaskSpec(name="ledger"),
        warmup=WarmUpSpec(
            steps=150, optim=OptimizerSpec(kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30)
        ),
        sft=SftSpec(demos="ledger", num=9_000, optim=IMITATE),
        rl=RlSpec(
            steps=24,
            sample=StepSampleSpec(items=12, max_items=36, minibatches=2),
            rollout=RolloutOptions(group=8, concurrency=128),
            optim=OptimizerSpec(lr=5e-4, warmup_steps=3, schedule="linear", max_grad_norm=0.5),
        ),
        scaffold="tiny",
        limits=Limits(
            max_turns=5, max_depth=1, max_reply_tokens=100, max_seconds=86_400, max_concurrency=512
        ),
        evaluate=EvaluateSpec(
            num=256, validation=128, final=("test", "test_formats", "test_names")
        ),
        schedule=Schedule(evaluate_every=8),
        compute=ComputeSpec(precision="fp32"),
        threads=1,
    )
