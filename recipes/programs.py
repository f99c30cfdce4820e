"""A small math agent, trained from scratch to write programs, call its tool and correct what an
error names.

    ramify train recipes/programs.py --out runs/programs    demonstrations, then outcome reward
    ramify train recipes/programs.py rl=null --out runs/programs-sft    demonstrations only
    ramify train recipes/programs.py policy.path=runs/programs-sft/policy sft=null \\
        --out runs/programs-outcome                         outcome reward only

A transformer of 170,000 parameters imitates a demonstrator that knows about half of 24 words, and
learns the others by reinforcement learning. See ``docs/learning.md`` for the effect of other
signals, and ``benchmarks/hybrid.py``, which compares them.
"""

from __future__ import annotations

from ramify import Limits, SandboxSpec, tasks, train

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


def run() -> train.Run:
    return train.Run(
        name="programs",
        policy=train.PolicySpec(shape=SHAPE, words=tasks.PROGRAM_WORDS, slots=256),
        task=train.TaskSpec(name="programs"),
        sft=train.SftSpec(
            demos="programs",
            num=60_000,
            batch_tokens=6_000,
            options={"knows": 0.45},
            optim=train.OptimizerSpec(
                kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=30, schedule="linear"
            ),
        ),
        rl=train.RlSpec(
            steps=30,
            sample=train.RolloutBatchSpec(items=8, first_item=1_000_000, minibatches=2),
            rollout=train.RolloutOptions(group=8, concurrency=256),
            # As in the study (docs/learning.md): the hybrid gains less with the default reduction.
            algorithm=train.GRPO(reduction="rollout"),
            loss=train.LossSpec(policy=train.PpoClip(), kl_beta=0.01, kl="k3"),
            optim=train.OptimizerSpec(lr=2e-4),
        ),
        scaffold="bare",
        limits=Limits(
            max_turns=3,
            max_depth=0,
            max_reply_tokens=32,
            max_seconds=86_400,
            max_concurrency=512,
        ),
        sandbox=SandboxSpec(provider="ramify.extras.studies.programs.program_interpreter"),
        evaluate=train.EvaluateSpec(num=256, validation=32, attempts=8, final=("test",)),
        schedule=train.Schedule(evaluate_every=10),
        compute=train.TrainerComputeSpec(precision="fp32"),
        threads=1,
    )
