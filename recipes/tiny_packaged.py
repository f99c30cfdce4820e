"""The policy of the package, ``--model tiny``: every kind of question, over one document and over several.

    ramify train recipes/tiny_packaged.py --out runs/tiny-packaged
    python scripts/package_tiny.py runs/tiny-packaged

What ``tiny_recursive`` is, with more demonstrations and longer, and with single documents among the questions that
rollouts answer: over several nobody asks for the latest or the user with the most.
"""

from __future__ import annotations

import msgspec
from tiny_recursive import run as recursive

from ramify.train.config import EvaluateSpec, Run, TaskSpec


def run() -> Run:
    base = recursive()
    assert base.sft is not None
    assert base.rl is not None
    return msgspec.structs.replace(
        base,
        name="tiny-packaged",
        task=TaskSpec(name="ledger", options={"multi": 0.6}),
        sft=msgspec.structs.replace(base.sft, num=12_000),
        rl=msgspec.structs.replace(base.rl, steps=40),
        evaluate=EvaluateSpec(num=256, validation=128, final=("test", "test_formats", "test_names")),
    )
