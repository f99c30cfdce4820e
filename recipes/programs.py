"""A small math agent, trained from scratch to write programs, call its tool and correct what an
error names.

    ramify train recipes/programs.py --out runs/programs          demonstrations, then outcome
    reward
    ramify train recipes/programs.py rl=null --out runs/programs-sft              demonstrations
    only
    ramify train recipes/programs.py policy.path=runs/programs-sft/policy sft=null \\
        --out runs/programs-outcome                                               outcome reward
        only

A transformer of 170,000 parameters imitates a demonstrator that knows about half of 24 words, and
learns the others by reinforcement learning. See ``docs/hybrid.md`` for the effect of other signals,
and ``benchmarks/hybrid.py``, which compares them.
"""

from __future__ import annotations

from ramify.engine.limits import Limits
from ramify.sandbox.base import SandboxSpec
from ramify.tasks.programs.vocabulary import WORDS
from ramify.train.advantages.group_estimators import GRPO
from ramify.train.backends.base import ComputeSpec, OptimizerSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Run, SftSpec, TaskSpec
from ramify.train.losses import PpoClip
from ramify.train.losses.loss import LossSpec
from ramify.train.rollouts.admission_rules import StepSampleSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.training_loop import Schedule

SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "intermediate_size": 192,
    "max_position_embeddings": 256,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}


def run() -> Run:
    return Run(
        name="programs",
        policy=PolicySpec(shape=SHAPE, words=WORDS, slots=256),
        task=TaskSpec(name="programs"),
        sft=SftSpec(
            demos="programs",
            num=60_000,
            batch_tokens=6_000,
            options={"knows": 0.45},
            optim=OptimizerSpec(
                kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30, schedule="linear"
            ),
        ),
        rl=RlSpec(
            steps=30,
            sample=StepSampleSpec(items=8, first_item=1_000_000, minibatches=2),
            rollout=RolloutOptions(group=8, concurrency=256),
            algorithm=GRPO(),
            loss=LossSpec(policy=PpoClip(), kl_beta=0.01, kl="k3"),
            optim=OptimizerSpec(lr=2e-4),
        ),
        scaffold="bare",
        limits=Limits(
            max_turns=3,
            max_depth=0,
            max_reply_tokens=32,
            max_seconds=86_400,
            max_concurrency=512,
        ),
        sandbox=SandboxSpec(provider="ramify.tasks.programs.evaluator"),
        evaluate=EvaluateSpec(num=256, validation=32, attempts=8, final=("test",)),
        schedule=Schedule(evaluate_every=10),
        compute=ComputeSpec(precision="fp32"),
        threads=1,
    )
