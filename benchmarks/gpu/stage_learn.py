"""Short recursive training runs: the packaged recipe on this device, and a model of 0.6B from its
configuration, for the plumbing. Seconds of a step by its parts."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from kit import SHAPES, Kit, Skipped

from ramify.train.metrics import StepMetrics, read_metrics

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
RECIPE = ROOT / "recipes" / "tiny_recursive.py"
_PARTS = {"rollout and scoring": "work_s", "learning": "learn_s"}
"""An engine in the trainer's process computes with the trainer's own weights: nothing is sent."""
_RUN_S = 260


def measure(kit: Kit) -> None:
    items = ["rl.sample.items=4", "rl.rollout.group=4"] if kit.quick else []
    with kit.figure("tiny recursive"):
        expected = kit.expect("a step", 0.0, 120.0, "s", "a few thousand short tokens")
        begins = ["policy.path=tiny", "policy.shape={}", "warmup=null", "sft=null"]
        steps = _train(kit, [*begins, *items, f"rl.steps={2 if kit.quick else 6}"])
        _split(kit, "tiny recursive", steps, expected)
    with kit.figure("0.6B recursive"):
        shape = {**SHAPES["0.6B"], "vocab_size": 512, "max_position_embeddings": 2048}
        if kit.quick:
            shape |= {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}
            shape |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
        kit.need("0.6B with its optimizer", 20.0)
        expected = kit.expect("a step", 0.0, 240.0, "s", "replies of a model that knows nothing")
        begins = [f"policy.shape={json.dumps(shape)}", "warmup.steps=2", "sft.num=64"]
        begins += [f"task.name={HERE / 'chance.py'}:task", "task.options={}", "task.validate=false"]
        begins += [] if kit.quick else ["compute.precision=bf16"]
        sizes = ["rl.sample.items=4", "rl.rollout.group=4", "rl.steps=2"]
        steps = _train(kit, [*begins, *sizes, "rl.algorithm.credit=root"])
        _split(kit, "0.6B recursive", steps, expected)


def _train(kit: Kit, changes: Sequence[str]) -> list[StepMetrics]:
    """Run the recipe with ``changes``; returns the metrics of its steps of reinforcement learning."""
    with tempfile.TemporaryDirectory() as folder:
        common = [f"policy.device={kit.device.type}", "evaluate.num=8", "evaluate.validation=8"]
        common += ["evaluate.final=[]", "schedule.evaluate_every=1000"]
        common += ["rl.optim.schedule=constant", "rl.optim.warmup_steps=1"]
        if "sft=null" not in changes:
            common += ["sft.optim.schedule=constant", "sft.optim.warmup_steps=1"]
        command = [sys.executable, "-m", "ramify", "train", str(RECIPE), "--out", folder, "--quiet"]
        try:
            done = subprocess.run(
                [*command, *common, *changes],
                capture_output=True,
                text=True,
                timeout=_RUN_S,
                cwd=ROOT,
            )
        except subprocess.TimeoutExpired:
            raise Skipped(f"the run took more than {_RUN_S} s") from None
        lines = [each for each in read_metrics(Path(folder)) if each.stage == "rl"]
        steps = [each for each in lines if "work_s" in each.values]
        if done.returncode:
            said = done.stderr.strip().splitlines()
            raise AssertionError(f"ramify train ended with {done.returncode}: {said[-1:]}")
        if not steps:
            raise AssertionError("the run has no step of reinforcement learning")
        return steps


def _split(kit: Kit, name: str, steps: list[StepMetrics], expected: tuple[float, float]) -> None:
    later = steps[1:] or steps
    parts: dict[str, float | str] = {
        part: fmean(each.values.get(key, 0.0) for each in later) for part, key in _PARTS.items()
    }
    total = fmean(_seconds(each) for each in later)
    sampled = fmean(each.values.get("sampled_tokens", 0.0) for each in later)
    kit.add(
        f"{name}: a step",
        total,
        "s",
        expected=expected,
        against={
            **parts,
            "tokens sampled": sampled,
            "tokens learnt": fmean(each.values.get("packed_tokens", 0.0) for each in later),
            "steps": float(len(steps)),
        },
    )


def _seconds(step: StepMetrics) -> float:
    return sum(step.values.get(key, 0.0) for key in _PARTS.values())
