"""OOLONG: questions that every line of a long text contributes to, for a root with children.

    ramify train recipes/oolong.py --out runs/oolong
    ramify train recipes/oolong.py task.options.test=oolong-synth/test.parquet          public files
    ramify train --resume runs/oolong task.options.tokens=262144 rl.steps=120         longer texts

Texts are generated, with labels that have to be inferred. Numbers score 0.75^difference, all other
answers exactly. As written it is for one GPU and a checkpoint of 4B parameters; as in
``recipes/evidence.py``, runs of a stronger model can be imitated first (``sft``), and a frozen
sub-model can answer below the root (``depths``).
"""

from __future__ import annotations

import msgspec
from evidence import run as evidence

from ramify import train


def run() -> train.Run:
    return msgspec.structs.replace(
        evidence(),
        name="oolong",
        task=train.TaskSpec(name="oolong", options={"tokens": 32_768}),
        sft=None,
    )
