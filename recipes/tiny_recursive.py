"""A small policy, trained from scratch to divide a question over several documents among child
calls.

    ramify train recipes/tiny_recursive.py --out runs/tiny-recursive

Each document has its own format, so no single piece of code reads them all. Half of the
demonstrations are about one document, which is the task of a child. Rollouts ask only about several
documents, so single documents are learnt from children's calls. The children's tokens are trained,
with credit for their own answers and for what their parent makes of them.

One training item in twenty has 10,000 to 3,000,000 characters. A policy that has only seen short
contexts may fail if its first message gives a length of seven digits.
"""

from __future__ import annotations

import msgspec
from tiny import run as tiny

from ramify import train

LONG = 0.05
"""Share of the items, in demonstrations and in rollouts, whose contexts are long."""


def run() -> train.Run:
    single = tiny()
    assert single.sft is not None
    return msgspec.structs.replace(
        single,
        name="tiny-recursive",
        task=train.TaskSpec(name="ledger", options={"multi": 1.0, "long": LONG}),
        sft=msgspec.structs.replace(
            single.sft,
            num=9_000,
            task=train.TaskSpec(name="ledger", options={"multi": 0.5, "long": LONG}),
        ),
        rl=train.RlSpec(
            steps=25,
            sample=train.RolloutBatchSpec(items=20, minibatches=2),
            rollout=train.RolloutOptions(group=8, concurrency=96),
            algorithm=train.DrGRPO(credit="per_role"),
            optim=train.OptimizerSpec(
                lr=7e-4, warmup_steps=3, schedule="linear", max_grad_norm=0.5
            ),
        ),
        evaluate=train.EvaluateSpec(num=256, validation=128, final=("test", "test_formats")),
        schedule=train.Schedule(evaluate_every=5),
    )
