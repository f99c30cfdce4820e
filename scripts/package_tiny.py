"""Store the policy of a training run in the package as the model `tiny`: `scripts/package_tiny.py
RUN`.

RUN is the folder written by `ramify train recipes/packaged.py --out RUN`. Decides how the weights
are stored (bfloat16) and what the model card says; its figures are read from the run.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from ramify.models import load
from ramify.tasks.ledger.ledger_rows import KINDS
from ramify.train import metrics
from ramify.train.checkpoint import read_state, resolve_checkpoint
from ramify.trained_policy_settings import packaged_policy_folder

CARD = """\
# tiny

A transformer of {parameters:,} parameters ({layers} layers, width {width}, {vocabulary} tokens),
trained from scratch by `ramify train recipes/packaged.py seed={seed}`: a warm-up, demonstrations of
which most are wrong, and reinforcement learning in sandboxed sessions, including child calls;
{minutes:.0f} minutes of CPU time. Stored as bfloat16. `policy.json` names its scaffold and limits.

**Purpose.** It shows a recursive language model at work without a key, an account or a GPU, and it
serves in tests. It answers questions of the ledger family, in their exact words: `count rows of
'red'`, `sum qty of 'red'` and `max qty of 'red'`, over one document or, with `in all docs`, over
several; `user with top qty` and `latest qty of 'zamo'` over one. It can do nothing else.

**Held-out tests**, {num} questions each over documents that training never saw, asked once at
temperature 1 before it was stored (with `--model tiny` it answers greedily, which is better still):

| questions | answered right |
|---|---|
{rows}
**Limits.** It fails on row layouts that it was not trained on, on names unlike the trained ones,
and on questions in any other words. Licence: that of this package; the training data is generated
by it.
"""


NAMES = {
    "test": "**all**",
    "test_formats": "in a layout that it was not trained on",
    "test_names": "about unknown names",
}


def main(run: Path) -> None:
    policy = load.load_policy(run / "policy")
    policy.defaults = load.SamplingDefaults(0.0)  # users want the likeliest answer
    folder = packaged_policy_folder("tiny")
    assert folder is not None
    load.save_policy(policy, folder, torch.bfloat16)
    rows = list(metrics.read_metrics(run))
    config = read_state(resolve_checkpoint(run)).config
    shape = policy.config
    card = CARD.format(
        parameters=policy.num_parameters,
        layers=shape.num_hidden_layers,
        width=shape.hidden_size,
        vocabulary=shape.vocab_size,
        seed=config["seed"],
        num=config["evaluate"]["num"],
        minutes=rows[-1].values["cpu_s"] / 60,
        rows="".join(_tested(rows)),
    )
    (folder / "README.md").write_text(card, "utf-8")
    for path in folder.iterdir():
        path.chmod(0o644)
    print(card)


def _tested(rows: list[metrics.StepMetrics]) -> Iterator[str]:
    """Yield a table row for each split reported at the end, and for each kind of the test split."""
    for row in rows:
        if row.stage != "last":
            continue
        for name, value in row.values.items():
            split, _, kind = name.partition("/")
            if kind == "reward" and split in NAMES:
                yield f"| {NAMES[split]} | {100 * value:.0f} % |\n"
            elif split == "test" and kind.removeprefix("multi ") in KINDS:
                yield f"| {kind} | {100 * value:.0f} % |\n"


if __name__ == "__main__":
    main(Path(sys.argv[1]))
