"""Does a training session hold what it promises: tasks that prove themselves, runs that are
extended, runs that are stopped at random, a mixture that learns each of its tasks, and a policy
from scratch that learns to find evidence?

    python benchmarks/evidence.py                 300 items, 20 signals, curves of three seeds
    python benchmarks/evidence.py --quick         60 items, 5 signals, no curves
    python benchmarks/evidence.py --curves-only --seeds 1 --keep runs    only curves, of one seed
    python benchmarks/evidence.py --mixture-only --keep runs    only three tasks, together and alone
    python benchmarks/evidence.py --json          also print the figures as JSON, like engine.py

A seed's curves take some fifteen minutes of one core: one policy that imitates the scripted expert
(``recipes/tiny_evidence.py``), and from it reinforcement learning with trained children, with
children that are not trained, and over a frozen sub-model, which is the policy that imitated. The
mixture takes about as long: ``recipes/tiny.py`` imitates, then learns three kinds of question
together and each alone.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean
from typing import Any

from engine import Figure, show

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ramify.tasks.base import items_of, task_of  # noqa: E402
from ramify.tasks.validation import answered  # noqa: E402
from ramify.train.checkpoint import CheckpointStore, read_state  # noqa: E402
from ramify.train.config import Schedule  # noqa: E402
from ramify.train.execute import train  # noqa: E402
from ramify.train.metrics import read_metrics  # noqa: E402
from ramify.train.recipe import load_recipe  # noqa: E402
from tests.train.test_extend import is_stopped, learned, run_of  # noqa: E402
from tests.train.test_loop import same  # noqa: E402


def of_evidence(num: int) -> Iterator[Figure]:
    """The task's own proof over ``num`` items."""
    task = task_of("evidence")
    worst: Counter[str] = Counter()
    lowest = 1.0
    for item in items_of(task, "train")[:num]:
        chosen = {place[0] for place in item.gold}
        answers = {
            "wrong spans": item.wrong,
            "whole papers with a fact": [[id, 0, len(item.context[id])] for id in chosen],
            "all papers": [[id, 0, len(text)] for id, text in item.context.items()],
        }
        lowest = min(lowest, task.score(item, answered(item, item.gold)).rewards["f1"])
        for name, answer in answers.items():
            f1 = task.score(item, answered(item, answer)).rewards["f1"]
            worst[name] = max(worst[name], f1)  # type: ignore[assignment]
    yield Figure(f"evidence, gold, lowest of {num}", lowest, "F1", {}, least=1.0)
    for name, limit in (
        ("wrong spans", 0.2),
        ("whole papers with a fact", 0.3),
        ("all papers", 0.3),
    ):
        yield Figure(f"evidence, {name}, highest of {num}", round(worst[name], 3), "F1", {}, limit)


def of_extension(folder: Path) -> Iterator[Figure]:
    """4 steps and 4 more, and 8 steps."""
    whole, broken = folder / "whole", folder / "extended"
    train(run_of(8), whole)
    train(run_of(4), broken)
    train(run_of(8), broken, resume=broken)
    yield Figure("4 + 4 steps differ from 8", float(not same(whole, broken)), "runs", {}, 0.0)


def of_signals(folder: Path, num: int) -> Iterator[Figure]:
    """``num`` runs, each ended by SIGTERM at a random moment and resumed."""
    run = run_of(6, schedule=Schedule(evaluate_every=4, checkpoint_every=100))
    began = time.monotonic()
    state = train(run, folder / "calm")
    step_s, chosen = (time.monotonic() - began) / state.step, random.Random(0)
    lost = unequal = sent = 0
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        for number in range(num):
            out = folder / f"stopped-{number}"
            while sent <= number and is_stopped(
                chosen.randint(1, 3), chosen.random() * step_s, run, out
            ):
                sent += 1
                latest = CheckpointStore(out).latest()
                lost += max(learned(out)) - (read_state(latest).step if latest else 0)
            if not (out / "policy").is_dir():
                is_begun = any(out.glob("checkpoints/step-*"))
                train(run, out, resume=out if is_begun else None)
            unequal += not same(folder / "calm", out)
    finally:
        signal.signal(signal.SIGTERM, before)
    yield Figure(f"whole steps lost by {sent} SIGTERM", float(lost), "steps", {}, 0.0, sent > 0)
    yield Figure("stopped runs that end elsewhere", float(unequal), "runs", {}, 0.0)


RECIPE = ROOT / "recipes/tiny_evidence.py"
VARIANTS = {
    "RL, trained children": (),
    "RL, children untrained": ("rl.algorithm.children=false",),
    "RL, frozen sub-model": ('depths=[{}, {"model": "local:SFT"}]',),
}


def of_curves(folder: Path, seeds: int) -> Iterator[Figure]:
    """F1 on the test split after imitation and after each way of reinforcement learning."""
    measured: dict[str, list[dict[str, float]]] = {"SFT": [], **{name: [] for name in VARIANTS}}
    for seed in range(seeds):
        for name, values in curve(folder / f"seed-{seed}", seed).items():
            measured[name].append(values)
    for name, found in measured.items():
        shown: dict[str, float | str] = {
            f"seed {seed}": f"{each['test/reward']:.3f} ({each['test/reward_low']:.3f} to "
            f"{each['test/reward_high']:.3f})"
            for seed, each in enumerate(found)
        }
        yield Figure(f"evidence, F1 after {name}", _mean(found), "F1", shown)
    rise = _mean(measured["RL, trained children"]) - _mean(measured["SFT"])
    yield Figure("evidence, RL above SFT", round(rise, 3), "F1", {}, least=0.2)


def curve(folder: Path, seed: int) -> dict[str, dict[str, float]]:
    """Metrics of the last evaluation on ``test`` of each run of one seed. A run that is whole in
    ``folder`` is not repeated."""
    imitated = folder / "sft"
    tested = {"SFT": _tested(imitated, "rl=null", f"seed={seed}")}
    policy = (imitated / "policy").resolve()
    recipe = load_recipe(RECIPE)
    assert recipe.sft is not None
    begins = (
        "warmup=null",
        "sft=null",
        f"policy.path={policy}",
        "policy.shape={}",
        f"rl.sample.first_item={recipe.sft.num}",
        f"seed={seed}",
    )
    for name, overrides in VARIANTS.items():
        changed = (each.replace("SFT", str(policy)) for each in overrides)
        tested[name] = _tested(folder / name.replace(" ", "-"), *begins, *changed)
    return tested


def _tested(out: Path, *overrides: str, recipe: Path = RECIPE) -> dict[str, float]:
    """Metrics of the last policy on all final splits."""
    if not (out / "policy").is_dir():
        is_begun = any(out.glob("checkpoints/step-*"))
        train(load_recipe(recipe, overrides), out, resume=out if is_begun else None)
    values: dict[str, float] = {}
    for row in read_metrics(out):
        values |= row.values if row.stage == "last" else {}
    return values


MIXED_RECIPE = ROOT / "recipes/tiny.py"
KINDS = ("count", "sum", "max")
"""Kinds of question about a ledger: the three tasks of the mixture."""


def of_mixture(folder: Path, steps: int) -> Iterator[Figure]:
    """Three tasks in one run, and each in its own run: from the same policy, in as many
    steps, on the same items (a step of the mixture has those of the three other runs)."""
    _tested(folder / "sft", "rl=null", "evaluate.final=[]", recipe=MIXED_RECIPE)
    parts = {kind: {"task": "ledger", "options": {"kinds": [kind]}} for kind in KINDS}
    mixed = _mixed(folder, "all", parts, steps)
    for kind in KINDS:
        alone = _mixed(folder, kind, {kind: parts[kind]}, steps)
        names = [f"test_{kind}/reward{end}" for end in ("", "_low", "_high")]
        shown = {
            run: "{:.3f} ({:.3f} to {:.3f})".format(*(values[name] for name in names))
            for run, values in (("mixture", mixed), ("alone", alone))
        }
        lead = mixed[names[0]] - alone[names[0]]
        yield Figure(f"mixture above a run of {kind}", round(lead, 3), "share", shown, least=-0.03)


def _mixed(folder: Path, name: str, parts: dict[str, Any], steps: int) -> dict[str, float]:
    """Test scores of a run on ``parts``: four items of each in a step, none left out for equal
    rewards, so that every run of a part has the same items."""
    recipe = load_recipe(MIXED_RECIPE)
    assert recipe.sft is not None
    tests = json.dumps([f"test_{kind}" for kind in parts])
    return _tested(
        folder / name,
        "warmup=null",
        "sft=null",
        f"policy.path={(folder / 'sft/policy').resolve()}",
        "policy.shape={}",
        "task.name=mixture",
        f"task.options.parts={json.dumps(parts)}",
        f"rl.steps={steps}",
        f"rl.sample.items={4 * len(parts)}",
        "rl.sample.max_items=null",
        f"rl.sample.first_item={recipe.sft.num * len(parts)}",
        "evaluate.keep=last",
        "evaluate.num=512",
        f"evaluate.final={tests}",
        recipe=MIXED_RECIPE,
    )


def _mean(measured: list[dict[str, float]]) -> float:
    return round(fmean(each["test/reward"] for each in measured), 3)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--curves-only", action="store_true")
    parser.add_argument("--mixture-only", action="store_true")
    parser.add_argument("--steps", type=int, default=24, help="of each run with a mixture")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of the runs, which are then continued")
    arguments = parser.parse_args()
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = arguments.keep or Path(folder) / "kept"
        if not arguments.curves_only and not arguments.mixture_only:
            found += of_evidence(60 if arguments.quick else 300)
            found += of_extension(Path(folder))
            found += of_signals(Path(folder), 5 if arguments.quick else 20)
        if not arguments.quick and not arguments.curves_only:
            found += of_mixture(kept / "mixture", arguments.steps)
        if not arguments.quick and not arguments.mixture_only:
            found += of_curves(kept, arguments.seeds)
    show(found)
    if arguments.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
