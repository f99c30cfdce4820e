"""A policy for the package: questions about one document and about several.

    ramify train recipes/packaged.py --out runs/packaged
    python scripts/package_tiny.py runs/packaged      # stores it in the package as `tiny`

Rollouts of `tiny_recursive.py` are only about several documents, so its policies never learn to
name the *latest* quantity of a person, which is asked about one. Here some rollouts are about one
document, in the shares of `tiny.py`. The policy in the package is of this recipe.
"""

from __future__ import annotations

import msgspec
from tiny import ASKED
from tiny_recursive import LONG
from tiny_recursive import run as recursive

from ramify import train


def _asked(multi: float) -> train.TaskSpec:
    return train.TaskSpec(name="ledger", options={"multi": multi, "long": LONG, "kinds": ASKED})


def run() -> train.Run:
    base = recursive()
    assert base.sft is not None
    assert base.rl is not None
    return msgspec.structs.replace(
        base,
        name="packaged",
        task=_asked(0.6),
        sft=msgspec.structs.replace(base.sft, num=14_000, task=_asked(0.4)),
        rl=msgspec.structs.replace(base.rl, steps=24),
        evaluate=msgspec.structs.replace(base.evaluate, final=("test", "test_names")),
        schedule=train.Schedule(evaluate_every=12),
    )
