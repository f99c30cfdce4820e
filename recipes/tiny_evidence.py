"""A small policy, trained from scratch to find evidence in several papers, in some minutes on one
thread. ``recipes/evidence.py`` is the same with a checkpoint of 4B parameters.

    ramify train recipes/tiny_evidence.py --out runs/tiny-evidence
    ramify train recipes/tiny_evidence.py rl=null --out runs/tiny-evidence-sft

1 a scripted expert answers training items; it chooses the right papers and sentences in a part of
its calls and has other habits in the rest; 2 its runs are filtered by their score; 3 a transformer
of half a million parameters learns to copy, then imitates them; 4 reinforcement learning with
children finds out which habits find the evidence.

    root    S,O='Lodavine','yield'                            child   Lodavine yield
            P=[p for p,t,a in papers() if S in t and O in t]          k=extract_section('Intro…
            print(P)                                                  FINAL([[a,b] for a,b,s in
            R=rlm_query_batched([S+' '+O]*len(P),[context[…             search('yield') if …
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

import ramify
from ramify import Limits, tasks, train

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
"""A model of 0.5M parameters."""
CHILDREN = (
    "('{s}' in s or k in s) and any(map(str.isdigit,s))",  # by full or short name, with a figure
    "'{s}' in s and any(map(str.isdigit,s))",  # by the full name only
    "any(map(str.isdigit,s))",  # of any substance
    "'{s}' in s",  # even if nothing was measured
)
"""Conditions for the sentences that a child returns, shown equally often. The first is right."""
PAPERS = ("", "[:1]")
"""Parts of the matching papers that a root gives to children. The first is right."""


def expert(messages: Sequence[ramify.Message]) -> str:
    """The next reply of a call. It knows the tools, but chooses what to return at random."""
    asked = messages[0].content
    choose = random.Random(asked).choice
    effect = re.search(r"effect of (\S+) on (\S+)\?", asked)
    if effect is None:  # a child, which is asked as below
        substance, outcome = asked.split()[:2]
        condition = choose(CHILDREN).replace("{s}", substance)
        return (
            "k=extract_section('Introduction')[2].split()[2]\n"
            f"FINAL([[a,b] for a,b,s in search('{outcome}') if {condition}])"
        )
    if len(messages) == 1:
        return (
            f"S,O='{effect[1]}','{effect[2]}'\n"
            f"P=[p for p,t,a in papers() if S in t and O in t]{choose(PAPERS)}\nprint(P)"
        )
    return (
        "R=rlm_query_batched([S+' '+O]*len(P),[context[p] for p in P])\n"
        "FINAL([[p,*x] for p,r in zip(P,R) for x in r])"
    )


def demos(
    task: tasks.Task, num: int, seed: int, scaffold: ramify.Scaffold
) -> list[ramify.Trajectory]:
    return train.demonstrate(task, expert, num, scaffold, limits=LIMITS)


LIMITS = Limits(max_turns=3, max_depth=1, max_children=8, max_reply_tokens=100)
MUON = train.OptimizerSpec(kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=20)


def run() -> train.Run:
    return train.Run(
        name="tiny-evidence",
        policy=train.PolicySpec(shape=SHAPE, vocab_size=768),
        task=train.TaskSpec(name="evidence"),
        warmup=train.InductionWarmUpSpec(steps=100, optim=MUON),
        sft=train.SftSpec(
            demos=f"{__file__}:demos",
            num=1_200,
            epochs=3,
            algorithm=train.SFT(min_reward=0.2),
            optim=msgspec.structs.replace(MUON, schedule="linear", max_grad_norm=1.0),
        ),
        rl=train.RlSpec(
            steps=16,
            sample=train.RolloutBatchSpec(items=12, minibatches=2),
            rollout=train.RolloutOptions(group=8, concurrency=96),
            algorithm=train.DrGRPO(credit="per_role"),
            optim=train.OptimizerSpec(
                lr=5e-4, warmup_steps=3, schedule="linear", max_grad_norm=0.5
            ),
        ),
        scaffold="tiny",
        limits=msgspec.structs.replace(LIMITS, max_seconds=86_400, max_concurrency=512),
        evaluate=train.EvaluateSpec(num=128, validation=48, first=("test",), final=("test",)),
        schedule=train.Schedule(evaluate_every=8),
        compute=train.TrainerComputeSpec(precision="fp32"),
        threads=1,
    )
