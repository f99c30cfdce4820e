"""Does training keep its promises: tasks with a correct scorer, runs that are extended, runs that
are stopped at random, a mixture that learns each of its tasks, and a policy
from scratch that learns to find evidence?

    python benchmarks/evidence.py                 300 items, 20 signals, curves of three seeds
    python benchmarks/evidence.py --quick         60 items, 5 signals, no curves
    python benchmarks/evidence.py --models-only    two policies, and a remote sub-model that fails
    python benchmarks/evidence.py --curves-only --seeds 1 --keep runs    only curves, of one seed
    python benchmarks/evidence.py --mixture-only --keep runs    only three tasks, together and alone
    python benchmarks/evidence.py --json          also print the figures as JSON, like engine.py

A seed's curves take some fifteen minutes of one core: one policy that imitates the scripted expert
(``recipes/tiny_evidence.py``), and from it reinforcement learning with trained children, with
untrained children, and with the policy after imitation as a frozen sub-model. The
mixture takes about as long: ``recipes/tiny.py`` imitates, then learns three kinds of question
together and each alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from figures import Figure, show

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ramify.engine.limits import Limits  # noqa: E402
from ramify.engine.prompt_scaffold import Scaffold  # noqa: E402
from ramify.tasks.base import DatasetTask, Item, Task, generated, items_of, task_of  # noqa: E402
from ramify.tasks.validation import answer_only_trajectory  # noqa: E402
from ramify.testing.reply_script import server_error  # noqa: E402
from ramify.train.advantages.group_estimators import DrGRPO  # noqa: E402
from ramify.train.backends.base import OptimizerSpec  # noqa: E402
from ramify.train.call_depth_models import DepthSpec, FrozenModelBudget  # noqa: E402
from ramify.train.checkpoint import CheckpointStore, read_state  # noqa: E402
from ramify.train.config import (  # noqa: E402
    EvaluateSpec,
    PolicySpec,
    RlSpec,
    Schedule,
    SftSpec,
    TaskSpec,
)
from ramify.train.data.sft_data import read as read_trajectories  # noqa: E402
from ramify.train.execute import train  # noqa: E402
from ramify.train.metrics import read_metrics  # noqa: E402
from ramify.train.recipe import load_recipe  # noqa: E402
from ramify.train.rollouts.group_queue import RolloutBatchSpec  # noqa: E402
from ramify.train.rollouts.rollouter import RolloutOptions  # noqa: E402
from ramify.train.sft_training_data import demonstrate  # noqa: E402
from ramify.types.message import Message  # noqa: E402
from ramify.types.trajectory import Trajectory  # noqa: E402
from tests.train.small import SHAPE, small  # noqa: E402
from tests.train.test_continued_training import is_stopped, learned, run_of  # noqa: E402
from tests.train.test_depth_models import served  # noqa: E402
from tests.train.test_loop import same  # noqa: E402
from tests.train.test_two_policies import begin, differing, one_stays  # noqa: E402


def evidence_figures(num: int) -> Iterator[Figure]:
    """Scores of gold and of wrong answers over ``num`` items: does the scorer separate them?"""
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
        lowest = min(
            lowest, task.score(item, answer_only_trajectory(item, item.gold)).rewards["f1"]
        )
        for name, answer in answers.items():
            f1 = task.score(item, answer_only_trajectory(item, answer)).rewards["f1"]
            worst[name] = max(worst[name], f1)  # type: ignore[assignment]
    yield Figure(f"evidence, gold, lowest of {num}", lowest, "F1", {}, least=1.0)
    for name, limit in (
        ("wrong spans", 0.2),
        ("whole papers with a fact", 0.3),
        ("all papers", 0.3),
    ):
        yield Figure(f"evidence, {name}, highest of {num}", round(worst[name], 3), "F1", {}, limit)


def extension_figures(folder: Path) -> Iterator[Figure]:
    """Compare a run of 4 steps that is extended by 4 more with a run of 8 steps."""
    whole, broken = folder / "whole", folder / "extended"
    train(run_of(8), whole)
    train(run_of(4), broken)
    train(run_of(8), broken, resume=broken)
    yield Figure("4 + 4 steps differ from 8", float(not same(whole, broken)), "runs", {}, 0.0)


def sigterm_figures(folder: Path, num: int) -> Iterator[Figure]:
    """Stop ``num`` runs by SIGTERM at random moments, and resume them."""
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
                chosen.randint(1, 3), chosen.random() * step_s, signal.SIGTERM, run, out
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


def two_policy_figures(folder: Path) -> Iterator[Figure]:
    """Compare two policies, one of them at learning rate 0, with one over the other frozen."""
    begins = folder / "begins"
    ours, theirs = one_stays(begin(begins), folder / "two")
    differ = len(differing(ours, theirs)) + (not same(ours, theirs))
    yield Figure(
        "two policies, one at rate 0: differs from one over it frozen", differ, "values", {}, 0
    )
    yield Figure(
        "two policies, one at rate 0: its run learns",
        float(not same(begins, ours)),
        "",
        {},
        least=1.0,
    )


ANSWERS = {"a": "good", "b": "bad"}
"""Answers of the remote sub-model."""


def _asks(messages: Sequence[Message]) -> str:
    """The expert's reply: either a root that asks the sub-model, or the sub-model itself."""
    asked = messages[-1].content
    choice = random.Random(asked).choice("ab")
    return ANSWERS.get(asked.strip(), f"FINAL(llm_query('{choice}'))")


asks = DatasetTask(
    "asks",
    generated("asks", lambda rng: Item(f"{rng.randrange(10**9)}?", "text", gold="good")),
    lambda answer, item: float(answer == item.gold),
)


def asked(task: Task, num: int, seed: int, scaffold: Scaffold) -> list[Trajectory]:
    return demonstrate(task, _asks, num, scaffold, limits=Limits(max_turns=1, max_depth=0))


def remote_model_figures(folder: Path) -> Iterator[Figure]:
    """Train a policy over a slow remote sub-model that fails a tenth of its calls."""
    run = small(
        policy=PolicySpec(shape=SHAPE, vocab_size=270, slots=32),
        task=TaskSpec(name=f"{__file__}:asks"),
        warmup=None,
        sft=SftSpec(
            demos=f"{__file__}:asked",
            num=200,
            batch_tokens=1_000,
            epochs=8,
            optim=OptimizerSpec(kind="muon", lr=1e-2),
        ),
        depths=(DepthSpec(), DepthSpec(model="openai:gpt-5-mini", max_reply_tokens=16)),
        frozen=FrozenModelBudget(step_calls=BUDGET, run_cost=0.05),
        limits=Limits(
            max_turns=1, max_depth=0, max_reply_tokens=24, max_reasoning_tokens=0, max_seconds=300
        ),
        rl=RlSpec(
            steps=16,
            sample=RolloutBatchSpec(items=4),
            rollout=RolloutOptions(group=8, concurrency=32),
            algorithm=DrGRPO(),
            optim=OptimizerSpec(lr=2e-3),
        ),
        evaluate=EvaluateSpec(num=4, final=()),
        schedule=Schedule(evaluate_every=None, save_rollouts_every=1),
    )
    numbers = itertools.count(1)

    def script(messages: Sequence[Message]) -> Any:
        return server_error() if next(numbers) % 10 == 0 else _asks(messages)

    with served(script, latency_s=0.05) as server:
        before = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "OPENAI_BASE_URL")}
        os.environ.update(OPENAI_API_KEY="sk-loopback", OPENAI_BASE_URL=server.url)
        try:
            train(run, folder)
        finally:
            for name, value in before.items():
                os.environ.pop(name) if value is None else os.environ.update({name: value})
    rows = [row.values for row in read_metrics(folder) if "reward" in row.values]
    rewards = [row["reward"] for row in rows]
    calls = [
        (tree, call)
        for path in sorted((folder / "rollouts").glob("step-*.jsonl"))
        for tree in read_trajectories(path)
        for call in tree.calls
        if call.model == "openai:gpt-5-mini"
    ]
    with_credit = sum(
        place.split("/")[0] == call.id
        for tree, call in calls
        for place in tree.metadata.get("advantages", ())
    )
    with_ids = sum(turn.reply.token_ids is not None for _, call in calls for turn in call.turns)
    shown = {
        "rewards": " ".join(f"{reward:.2f}" for reward in rewards),
        "failed": f"{sum(row.get('frozen/openai:gpt-5-mini/failed', 0) for row in rows):.0f}",
        "calls": f"{rows[-1]['frozen/calls_total']:.0f}",
    }
    rise = fmean(rewards[-2:]) - fmean(rewards[:2])
    yield Figure(
        "remote sub-model, 10 % fail, late: rise of reward", round(rise, 3), "", shown, least=0.2
    )
    over = max(row["frozen/calls"] - BUDGET for row in rows)
    cost = max(row["frozen/cost_total"] for row in rows)
    yield Figure(
        "its requests beyond the budget of a step",
        max(0.0, over),
        "requests",
        {"most": max(row["frozen/calls"] for row in rows)},
        0.0,
    )
    yield Figure("its cost", cost, "$", {}, 0.05)
    yield Figure(
        "its calls with credit or token ids",
        with_credit + with_ids,
        "calls",
        {"calls": len(calls)},
        0,
    )


def depth_model_figures(folder: Path) -> Iterator[Figure]:
    """Yield the figures of runs with a different model by depth."""
    yield from two_policy_figures(folder)
    yield from remote_model_figures(folder / "remote")


BUDGET = 33
"""Requests to the sub-model allowed in a step of 32 rollouts."""
RECIPE = ROOT / "recipes/tiny_evidence.py"
VARIANTS = {
    "RL, trained children": (),
    "RL, children untrained": ("rl.algorithm.children=false",),
    "RL, frozen sub-model": ('depths=[{}, {"model": "local:SFT"}]',),
}


def curve_figures(folder: Path, seeds: int) -> Iterator[Figure]:
    """F1 on the test split after imitation and after each variant of reinforcement learning."""
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
    """Metrics of the final evaluation on ``test`` for each run of one seed. Runs that ``folder``
    already has are not repeated."""
    imitated = folder / "sft"
    tested = {"SFT": _train_and_test(imitated, "rl=null", f"seed={seed}")}
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
        tested[name] = _train_and_test(folder / name.replace(" ", "-"), *begins, *changed)
    return tested


def _train_and_test(out: Path, *overrides: str, recipe: Path = RECIPE) -> dict[str, float]:
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


def mixture_figures(folder: Path, steps: int) -> Iterator[Figure]:
    """Compare a run of three tasks with a separate run of each: same policy, same number of steps,
    same items (a step of the mixture has those of the three other runs)."""
    _train_and_test(folder / "sft", "rl=null", "evaluate.final=[]", recipe=MIXED_RECIPE)
    parts = {kind: {"task": "ledger", "options": {"kinds": [kind]}} for kind in KINDS}
    mixed = _run_mixture(folder, "all", parts, steps)
    for kind in KINDS:
        alone = _run_mixture(folder, kind, {kind: parts[kind]}, steps)
        names = [f"test_{kind}/reward{end}" for end in ("", "_low", "_high")]
        shown = {
            run: "{:.3f} ({:.3f} to {:.3f})".format(*(values[name] for name in names))
            for run, values in (("mixture", mixed), ("alone", alone))
        }
        lead = mixed[names[0]] - alone[names[0]]
        yield Figure(f"mixture above a run of {kind}", round(lead, 3), "share", shown, least=-0.03)


def _run_mixture(folder: Path, name: str, parts: dict[str, Any], steps: int) -> dict[str, float]:
    """Test scores of a run on ``parts``: each step has four items of each, and zero-variance groups
    are kept, so that all runs of a part have the same items."""
    recipe = load_recipe(MIXED_RECIPE)
    assert recipe.sft is not None
    tests = json.dumps([f"test_{kind}" for kind in parts])
    return _train_and_test(
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
    parser.add_argument("--models-only", action="store_true")
    parser.add_argument("--mixture-only", action="store_true")
    parser.add_argument("--steps", type=int, default=24, help="steps of each mixture run")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--keep", type=Path, help="folder of runs; existing ones continue")
    arguments = parser.parse_args()
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        kept = arguments.keep or Path(folder) / "kept"
        if arguments.models_only:
            found += depth_model_figures(Path(folder))
            arguments.curves_only = arguments.quick = True
        if not arguments.curves_only and not arguments.mixture_only:
            found += depth_model_figures(Path(folder))
            found += evidence_figures(60 if arguments.quick else 300)
            found += extension_figures(Path(folder))
            found += sigterm_figures(Path(folder), 5 if arguments.quick else 20)
        if not arguments.quick and not arguments.curves_only:
            found += mixture_figures(kept / "mixture", arguments.steps)
        if not arguments.quick and not arguments.mixture_only:
            found += curve_figures(kept, arguments.seeds)
    show(found)
    if arguments.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
