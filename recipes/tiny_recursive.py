"""From nothing to a policy that splits a question over several documents among children of its own.

    ramify train recipes/tiny_recursive.py --out runs/tiny-recursive

Each document has a format of its own, so that no single piece of code reads them all. Half of the
demonstrations are about one document: that is what a child has to do. Rollouts ask about several
alone, so that whatever is learnt of single documents there, children learn. Their tokens are
trained, with credit for what they answered themselves and for what their parent made of it.

One training item in twenty has 10,000 to 3,000,000 characters. A policy that has only seen short
contexts may fail where its first message gives a length of seven digits.
"""

from __future__ import annotations

import msgspec
from tiny import run as tiny

from ramify.train.algorithms.dr_grpo import DrGRPO
from ramify.train.backends.base import OptimizerSpec
from ramify.train.config import EvaluateSpec, RlSpec, Run, TaskSpec
from ramify.train.rollout import RolloutOptions
from ramify.train.stages import StepSampleSpec
from ramify.train.training_loop import Schedule

LONG = 0.05
"""Share of the items, in demonstrations and in rollouts, whose contexts are long."""


def run() -> Run:
    single = tiny()
    assert single.sft is not None
    return msgspec.structs.replace(
        single,
        name="tiny-recursive",
        task=TaskSpec(name="ledger", options={"multi": 1.0, "long": LONG}),
        sft=msgspec.structs.replace(
            single.sft, task=TaskSpec(name="ledger", options={"multi": 0.5, "long": LONG})
        ),
        rl=RlSpec(
            steps=25,
            sample=StepSampleSpec(items=20, minibatches=2),
            rollout=RolloutOptions(group=8, concurrency=96),
            algorithm=DrGRPO(credit="per_role"),
            optim=OptimizerSpec(lr=7e-4, warmup_steps=3, schedule="linear", max_grad_norm=0.5),
        ),
        evaluate=EvaluateSpec(num=256, validation=128, final=("test", "test_formats")),
        schedule=Schedule(evaluate_every=5),
    )
