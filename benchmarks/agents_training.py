"""Figures of training with an agent that was written elsewhere: its reward rises, and a killed trainer
loses nothing.

The agent is a Python function that speaks plain HTTP to its address. It asks for a number and gets a
reward for the share of even token ids, as the small task of ``tests/train/small.py``. ``rises`` is
the difference between the means of the last and the first five steps, in standard errors, of the
worst of three seeds. ``lost`` counts rollouts that differ, are missing or are there twice, after the
trainer and its endpoint were ended by SIGKILL in the middle of a step and the run was resumed; the
other run was never disturbed.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from figures import Figure

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from ramify import train  # noqa: E402
from ramify.train.execute import train as run_training  # noqa: E402
from tests.train.small import small  # noqa: E402

STEPS = 20
SEEDS = (0, 1, 2)
ROWS = [{"question": f"What comes after {number}?", "answer": "?"} for number in range(40)]
KILLS_AT = "RAMIFY_BENCHMARK_KILLS_AT"
"""Variable with the file that the agent creates before it kills the trainer."""
KILLED_QUESTION = 37
"""Number of the request that kills the trainer."""
_requests = 0


def ask(job: train.AgentRolloutInput) -> str:
    """Ask the question, and return the reply."""
    body = {
        "model": job.model,
        "messages": [{"role": "user", "content": job.item.question}],
        "max_tokens": 8,
    }
    request = urllib.request.Request(
        f"{job.base_url}/chat/completions",
        json.dumps(body).encode(),
        {"Authorization": f"Bearer {job.api_key}", "Content-Type": "application/json"},
    )
    _kill_if_due()
    with urllib.request.urlopen(request) as reply:
        return str(json.load(reply)["choices"][0]["message"]["content"])


def _kill_if_due() -> None:
    """End this process, the trainer, at its 37th request, if a file says so."""
    global _requests
    _requests += 1
    if not (file := os.environ.get(KILLS_AT)) or _requests < KILLED_QUESTION:
        return
    Path(file).touch()
    os.kill(os.getpid(), signal.SIGKILL)


def even(run: train.AgentRun) -> float:
    """Share of the even ids among those that were sampled."""
    ids = [
        id
        for call in run.trajectory.calls
        for turn in call.turns
        for id in turn.reply.token_ids or ()
    ]
    return sum(id % 2 == 0 for id in ids) / len(ids) if ids else 0.0


def recipe(steps: int = STEPS, seed: int = 0, **changes: Any) -> train.Run:
    """A run of the small policy with the agent."""
    run = small(
        seed=seed,
        warmup=None,
        task=train.ExternalAgentTask(agent=ask, items=ROWS, reward=even),
        rl=train.RlSpec(
            steps=steps,
            algorithm=train.GRPO(),
            sample=train.RolloutBatchSpec(items=4),
            rollout=train.RolloutOptions(group=8, concurrency=8),
            optim=train.OptimizerSpec(lr=1e-2),
        ),
        evaluate=train.EvaluateSpec(num=1, final=()),
        schedule=train.Schedule(
            evaluate_every=None, checkpoint_every=1, save_rollouts_every=1, keep_last=2
        ),
        **changes,
    )
    assert run.sft is not None
    return msgspec.structs.replace(run, sft=msgspec.structs.replace(run.sft, num=10))


def run() -> train.Run:
    """The run that is killed."""
    return recipe(steps=4, deterministic=True)


def figures(quick: bool) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="ramify-agents-") as folder:
        yield _rises(Path(folder))
        yield _lost(Path(folder))


def _rises(folder: Path) -> Figure:
    found = {}
    for seed in SEEDS:
        out = folder / f"seed-{seed}"
        run_training(recipe(seed=seed), out)
        rewards = [
            row.values["reward"]
            for row in train.read_metrics(out)
            if row.stage == "rl" and "loss" in row.values
        ]
        first, last = rewards[:5], rewards[-5:]
        error = (statistics.variance(first) / 5 + statistics.variance(last) / 5) ** 0.5
        rise = statistics.mean(last) - statistics.mean(first)
        found[f"seed {seed}"] = rise / max(error, 1e-9)
        print(
            f"seed {seed}: {statistics.mean(first):.3f} -> {statistics.mean(last):.3f}, "
            f"{found[f'seed {seed}']:.1f} standard errors",
            file=sys.stderr,
        )
    against: dict[str, float | str] = {name: round(value, 1) for name, value in found.items()}
    return Figure(
        "agent: its reward rises within 20 steps, worst of three seeds",
        round(min(found.values()), 2),
        "standard errors",
        against,
        least=3.0,
    )


def _lost(folder: Path) -> Figure:
    """Compare the rollouts of a run that was killed and resumed with those of an undisturbed
    one."""
    marker = folder / "killed"
    whole, killed = folder / "whole", folder / "killed-run"
    _ramify(whole)
    ended = _ramify(killed, {KILLS_AT: str(marker)}, check=False)
    was_killed = ended == -signal.SIGKILL and marker.exists()
    _ramify(killed, resume=True)
    ours, theirs = _rollouts(killed), _rollouts(whole)
    num_lost = sum(ours.get(name) != value for name, value in theirs.items())
    num_more = len(ours.keys() - theirs.keys())
    return Figure(
        "agent: rollouts that a killed trainer loses, changes or repeats",
        num_lost + num_more,
        "rollouts",
        {"rollouts": len(theirs), "was killed": str(was_killed)},
        floor=0,
        valid=was_killed and len(theirs) == 4 * 4 * 8,
    )


def _ramify(
    out: Path, more: dict[str, str] | None = None, *, resume: bool = False, check: bool = True
) -> int:
    """Train in another process; returns its exit status."""
    command = [sys.executable, "-m", "ramify", "train", __file__, "--out", str(out)]
    done = subprocess.run(
        [*command, *(["--resume", str(out)] if resume else [])],
        env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'benchmarks'}", **(more or {})},
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
        stderr=None if check else subprocess.DEVNULL,
        check=check,
    )
    return done.returncode


def _rollouts(out: Path) -> dict[str, list[Any]]:
    """Name of each saved rollout -> what it sampled, and its reward. A rollout that is saved twice
    has more than one entry."""
    found: dict[str, list[Any]] = {}
    for path in sorted((out / "rollouts").rglob("*.jsonl")):
        for line in path.read_bytes().splitlines():
            tree = json.loads(line)
            sampled = [
                turn["reply"].get("token_ids")
                for call in tree.get("calls", ())
                for turn in call.get("turns", ())
            ]
            found.setdefault(str(tree["id"]), []).append(
                [tree.get("task"), sampled, tree.get("rewards")]
            )
    return found
