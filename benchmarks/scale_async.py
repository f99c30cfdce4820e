"""Asynchronous against synchronous rollouts: wall time of a step, and the final reward.

    python benchmarks/scale_async.py            wall time per step with a scripted engine; a tenth
                                                of the rollouts are ten times as slow
    python benchmarks/scale_async.py --reward   also train the tiny recipe, synchronous and one step
                                                ahead, with three seeds; takes minutes

The engine answers after 50 or 500 ms, depending on the rollout's seed. Everything else is real: the
loop, the queue, rollouts of one turn without a session, and the trainer with a policy of a few
thousand parameters. The rewards are those of runs that start from one policy.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import random
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import msgspec
import torch
from figures import Figure, show
from transformers import AutoModelForCausalLM, Qwen3Config

from ramify import RLM, Limits, ScriptedClient
from ramify.clients.base import Request
from ramify.models.dense import DenseModel
from ramify.models.load import Policy
from ramify.tasks.base import DatasetTask, Item
from ramify.testing.scripted_client import NUM_IDS, ScriptedByteTokenizer
from ramify.train import run_record
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.config import PolicySpec, RlSpec, Run, Schedule
from ramify.train.execute import train
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.recipe import load_recipe
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions, TaskRolloutRunner
from ramify.train.stages import RlStage
from ramify.types.message import Reply
from tests.train.trainers import trainer_over

STEPS, WARM = 20, 4
FAST_S, SLOW_S, SLOW = 0.05, 0.5, 0.1
SHAPE = Qwen3Config(
    vocab_size=NUM_IDS,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=16,
    tie_word_embeddings=True,
    max_position_embeddings=4096,
    bos_token_id=None,
    eos_token_id=3,
    pad_token_id=0,
)
SIDES = {
    "synchronous": RolloutBatchSpec(items=8),
    "staleness 1": RolloutBatchSpec(items=8, max_staleness=1),
    "staleness 1, none late": RolloutBatchSpec(items=8, max_staleness=1, grace_steps=0),
    "staleness 2": RolloutBatchSpec(items=8, max_staleness=2),
}


def figures(quick: bool) -> Iterator[Figure]:
    torch.set_num_threads(1)
    rounds = [
        {name: wall_time_and_staleness(sample, seed) for name, sample in SIDES.items()}
        for seed in range(1 if quick else 3)
    ]
    wall = {name: median(each[name]["wall_s"] for each in rounds) for name in SIDES}
    beside: dict[str, float | str] = {"synchronous, s": f"{wall['synchronous']:.3g}"}
    for name in list(SIDES)[1:]:
        ratio = median(each["synchronous"]["wall_s"] / each[name]["wall_s"] for each in rounds)
        oldest = max(each[name]["oldest"] for each in rounds)
        age = fmean(each[name]["staleness"] for each in rounds)
        figure = f"synchronous wall per step to that of {name}"
        about = {**beside, "mean staleness": f"{age:.2g}", "oldest token": oldest}
        yield Figure(figure, ratio, "×", about, least=2.0 if name == "staleness 1" else None)


# --- wall time ------------------------------------------------------------------------------------


class LongTailed(ScriptedClient):
    """Client that takes ten times as long for one rollout in ten, selected by its seed. Its answer
    also depends on the seed."""

    async def complete(self, request: Request) -> Reply:
        await asyncio.sleep(
            SLOW_S if random.Random(request.sampling.seed).random() < SLOW else FAST_S
        )
        return await super().complete(request)


class ScriptedPublisher:
    """Policy publisher for the scripted engine: it sets the version of sampled tokens."""

    def __init__(self, ids: ScriptedByteTokenizer) -> None:
        self._ids = ids

    @property
    def version(self) -> int:
        return self._ids.version

    async def publish(self) -> None:
        self._ids.version += 1

    async def put_engines_to_sleep(self) -> bool:
        return False

    def release_memory(self) -> None: ...

    def save(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def load(self, folder: Path) -> None: ...


def wall_time_and_staleness(sample: RolloutBatchSpec, seed: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        rows = asyncio.run(trained(sample, seed, Path(folder)))
        assert run_record.read_group_records(Path(folder)).has_each_group_once
    rows = rows[WARM:]
    return {
        "wall_s": (rows[-1].at_s - rows[0].at_s) / (len(rows) - 1),
        "staleness": fmean(row.values["staleness"] for row in rows),
        "oldest": max(row.values["staleness_max"] for row in rows),
    }


async def trained(sample: RolloutBatchSpec, seed: int, out: Path) -> list[StepMetrics]:
    """Return the metrics of each step of one run."""
    ids = ScriptedByteTokenizer()
    answers = iter(random.Random(seed).choices(('FINAL("heads")', 'FINAL("tails")'), k=1_000_000))
    client = LongTailed(lambda messages: next(answers), ids=ids)
    task = DatasetTask(
        "coin",
        {"train": [Item("heads or tails?", gold="heads", id=str(n)) for n in range(64)]},
        right,
    )
    torch.manual_seed(seed)
    model = DenseModel(SHAPE)
    model.load_state_dict(AutoModelForCausalLM.from_config(SHAPE).state_dict())
    policy = Policy(model.eval(), None, None, SHAPE, 0, "dense")  # type: ignore[arg-type]
    backend = SingleBackend(policy, OptimizerSpec(lr=1e-4), TrainerComputeSpec(precision="fp32"))
    async with RLM(
        client, scaffold="tiny", limits=Limits(max_seconds=60), sandbox="inprocess"
    ) as rlm:
        spec = RlSpec(steps=STEPS, sample=sample, rollout=RolloutOptions(group=4))
        rollouts = TaskRolloutRunner(rlm, task, spec.rollout, seed=seed)
        stage = RlStage(spec, spec.algorithm, task, rollouts)
        loop = trainer_over(
            out,
            [stage],
            lambda _: backend,
            ScriptedPublisher(ids),
            no_evaluation,
            schedule=Schedule(evaluate_every=None),
        )
        await loop.run()
    return [row for row in read_metrics(out) if "loss" in row.values]


def right(answer: Any, item: Item) -> float:
    return float(answer == item.gold)


async def no_evaluation(split: str) -> Mapping[str, float]:
    return {}


# --- reward ---------------------------------------------------------------------------------------


def rewards(folder: Path, steps: int = 15) -> Iterator[Figure]:
    """Yield the test reward after ``steps`` steps of rollouts from one policy that saw few
    demonstrations. Runs that exist in ``folder`` are reused."""
    tiny = load_recipe(Path(__file__).parents[1] / "recipes/tiny.py")
    assert tiny.sft is not None
    if not (folder / "sft/policy").is_dir():
        few = msgspec.structs.replace(tiny.evaluate, num=64, validation=64, final=())
        sft = msgspec.structs.replace(tiny.sft, num=DEMONSTRATIONS)
        train(
            msgspec.structs.replace(tiny, sft=sft, rl=None, evaluate=few),
            folder / "sft",
        )
    sides = {"synchronous": 0, "staleness 1": 1}
    reached = {
        side: [reward(tiny, folder, ahead, seed, steps) for seed in range(3)]
        for side, ahead in sides.items()
    }
    differences = [
        a - b for a, b in zip(reached["staleness 1"], reached["synchronous"], strict=True)
    ]
    margin = T95 * stdev(differences) / math.sqrt(len(differences))
    beside: dict[str, float | str] = {
        side: " ".join(f"{each:.3f}" for each in found) for side, found in reached.items()
    }
    beside["95 % interval"] = f"±{margin:.3f}"
    about = f"test reward of staleness 1 less that of synchronous, {steps} steps"
    yield Figure(about, fmean(differences), "", beside, least=-margin)


DEMONSTRATIONS = 6500
"""Enough demonstrations to learn the form of answers; most of the skill must come from rollouts."""
T95 = 4.303
"""Quantile of Student's t-distribution with two degrees of freedom, for three paired seeds."""


def reward(tiny: Run, folder: Path, ahead: int, seed: int, steps: int) -> float:
    """Return the reward of one run on the first items of the test split."""
    assert tiny.rl is not None
    out = folder / f"ahead-{ahead}-seed-{seed}"
    if not (out / "policy").is_dir():
        sample = msgspec.structs.replace(
            tiny.rl.sample, max_staleness=ahead, first_item=DEMONSTRATIONS
        )
        run = msgspec.structs.replace(
            tiny,
            seed=seed,
            policy=PolicySpec(path=str(folder / "sft/policy")),
            warmup=None,
            sft=None,
            rl=msgspec.structs.replace(tiny.rl, steps=steps, sample=sample),
            schedule=Schedule(evaluate_every=None),
            evaluate=msgspec.structs.replace(
                tiny.evaluate, num=256, validation=64, final=("test",)
            ),
        )
        train(run, out)
    assert run_record.read_group_records(out).has_each_group_once
    return next(
        row.values["test/reward"] for row in read_metrics(out) if "test/reward" in row.values
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Asynchronous against synchronous rollouts.")
    parser.add_argument("--quick", action="store_true", help="one round")
    parser.add_argument("--reward", action="store_true", help="also measure the final reward")
    parser.add_argument("--keep", type=Path, help="folder for its runs; existing ones are reused")
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    found = list(figures(options.quick))
    if options.reward:
        with tempfile.TemporaryDirectory() as folder:
            found += rewards(options.keep or Path(folder))
    show(found)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
