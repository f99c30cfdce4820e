"""Soak test: asynchronous training of a small policy while parts of it are killed repeatedly.

    python benchmarks/scale_soak.py           30 minutes with a kill every 20 s, then five
                                              undisturbed runs for comparison
    python benchmarks/scale_soak.py --quick   three minutes
    python benchmarks/scale_soak.py --json    also print {"figures": […]} like engine.py
    python benchmarks/scale_soak.py --steps 60 --every 40 --keep runs/soak
                                              another length; all files are kept

The packaged policy, degraded by noise, is trained on questions about one document, with rollouts
one step ahead, sessions in the default sandbox and an engine in a separate process, by ``ramify
train THIS-FILE --restarts``. Each kill (SIGKILL) hits the engine, a session, the sandbox's
supervisor or the trainer, selected by ``--seed``. A step takes about a second; a part that is being
started is not killed before it is ready.

The score of the soak must lie in the 95 % prediction interval of the five undisturbed runs, mean ±
t(4) · s · √(1 + 1/5), since it is one more draw of the same kind. The undisturbed runs use this
process, one after the other, with an embedded engine. Groups are counted in OUT/groups.jsonl.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from ramify.engine.limits import Limits
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Run, Schedule, TaskSpec
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions

NOISE = 0.15
"""Standard deviation of the added noise, relative to that of each matrix."""
ITEMS = 8
UNDISTURBED = 5
T_4 = 2.776
"""97.5th percentile of Student's t-distribution with four degrees of freedom."""
STEPS_PER_MINUTE = 16
"""Steps per minute that the soak completes, including kills."""
PARTS = ("engine", "session", "supervisor", "trainer")


def run() -> Run:
    """The recipe."""
    return Run(
        name="soak",
        policy=PolicySpec(path="tiny"),
        task=TaskSpec(name="ledger"),
        rl=RlSpec(
            steps=24,
            sample=RolloutBatchSpec(items=ITEMS, max_staleness=1),
            rollout=RolloutOptions(group=4, temperature=1.3),
            optim=OptimizerSpec(lr=3e-4, warmup_steps=3, max_grad_norm=0.5),
        ),
        scaffold="tiny",
        limits=Limits(
            max_turns=5, max_depth=1, max_reply_tokens=100, max_seconds=600, max_concurrency=512
        ),
        evaluate=EvaluateSpec(num=96, final=()),
        schedule=Schedule(evaluate_every=None, checkpoint_every=2),
        compute=TrainerComputeSpec(precision="fp32"),
        inference=InferenceSpec(restarts=1000),
        stall_s=600.0,
        threads=1,
    )


# --- the soak -------------------------------------------------------------------------------------


class SoakResult(NamedTuple):
    kills: dict[str, int]
    minutes: float
    status: int


def soak(out: Path, policy: Path, steps: int, every_s: float, seed: int) -> SoakResult:
    """Train with a kill every ``every_s`` seconds until the run is finished."""
    rng, kills = random.Random(seed), Counter[str]()
    started = time.monotonic()
    process = _start_training(out, policy, steps, seed, "--restarts", "1000")
    try:
        while process.poll() is None:
            due = time.monotonic() + every_s
            while process.poll() is None and time.monotonic() < due:
                time.sleep(0.2)
            wanted = rng.choice(PARTS)
            while process.poll() is None and not kill(process.pid, wanted, rng):
                time.sleep(0.2)  # the part is being started
            if process.poll() is None:
                kills[wanted] += 1
                print(
                    f"{(time.monotonic() - started) / 60:5.1f} min: killed {wanted}",
                    file=sys.stderr,
                    flush=True,
                )
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
    return SoakResult(dict(kills), (time.monotonic() - started) / 60, process.returncode)


def kill(above: int, part: str, rng: random.Random) -> bool:
    """Kill a part of the run supervised by process ``above``. Returns True if the part existed."""
    below = children()
    trainers = [pid for pid in below.get(above, ()) if " train " in command_of(pid)]
    found: dict[str, list[int]] = {
        "trainer": trainers,
        "engine": [],
        "supervisor": [],
        "session": [],
    }
    for trainer in trainers:
        for pid in below.get(trainer, ()):
            command = command_of(pid)
            if "serve-policy" in command:
                found["engine"].append(pid)
            elif "forkserver" in command:
                found["supervisor"].append(pid)
                found["session"] += list(_descendants(pid, below))
    if not found[part]:
        return False
    with contextlib.suppress(ProcessLookupError):  # the session may have ended meanwhile
        os.kill(rng.choice(found[part]), signal.SIGKILL)
    return True


def children() -> dict[int, list[int]]:
    """Return process id -> ids of its child processes."""
    found: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            parent = int(path.read_text().rpartition(")")[2].split()[1])
            found.setdefault(parent, []).append(int(path.parent.name))
    return found


def command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return (
            Path(f"/proc/{pid}/cmdline")
            .read_bytes()
            .replace(b"\0", b" ")
            .decode("utf-8", "replace")
        )
    return ""


def _descendants(pid: int, below: dict[int, list[int]]) -> Iterator[int]:
    for child in below.get(pid, ()):
        yield child
        yield from _descendants(child, below)


# --- undisturbed runs and the comparison ----------------------------------------------------------


def _start_training(
    out: Path, policy: Path, steps: int, seed: int, *more: str
) -> subprocess.Popen[bytes]:
    words = [__file__, *_overrides(policy, steps, seed)]
    command = [sys.executable, "-m", "ramify", "train", *words, "--out", str(out), "--plain", *more]
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)


def _overrides(policy: Path, steps: int, seed: int) -> list[str]:
    return [f"policy.path={policy}", f"rl.steps={steps}", f"seed={seed}"]


def score(out: Path) -> float | None:
    """Return the final score on the validation stream."""
    from ramify.train.metrics import read_metrics

    found = [
        each.values["validation/reward"]
        for each in read_metrics(out)
        if "validation/reward" in each.values
    ]
    return found[-1] if len(found) > 1 else None


def add_noise(folder: Path) -> Path:
    """Create a copy of the packaged policy with noise in its matrices."""
    import torch

    from ramify.models.load import load_policy, save_policy
    from ramify.trained_policy_settings import packaged_policy_folder

    policy, draws = (
        load_policy(str(packaged_policy_folder("tiny")), torch.float32, "cpu"),
        torch.Generator().manual_seed(0),
    )
    with torch.no_grad():
        for weight in policy.model.parameters():
            if weight.dim() > 1:
                weight += NOISE * weight.std() * torch.randn(weight.shape, generator=draws)
    save_policy(policy, folder)
    return folder


def undisturbed(folder: Path, policy: Path, steps: int, seed: int) -> list[float]:
    """Return the scores of undisturbed runs."""
    from ramify.train.config_overrides import override
    from ramify.train.execute import train

    scores = []
    for number in range(1, 1 + UNDISTURBED):
        out = folder / f"undisturbed-{number}"
        recipe = override(run(), [*_overrides(policy, steps, seed + number), "inference=null"], {})
        train(recipe, out)
        scores.append(score(out) or 0.0)
    return scores


def soak_figures(folder: Path, steps: int, every_s: float, seed: int) -> list[object]:
    from figures import Figure

    from ramify.train.metrics import read_metrics
    from ramify.train.run_record import read_group_records

    policy = add_noise(folder / "policy")
    out = folder / "soak"
    ended = soak(out, policy, steps, every_s, seed)
    found = read_group_records(out)
    learnt = sum(found.outcomes.values())
    scores = undisturbed(folder, policy, steps, seed)
    half = T_4 * stdev(scores) * (1 + 1 / len(scores)) ** 0.5
    low, high = mean(scores) - half, mean(scores) + half
    whole = ended.status == 0 and learnt == steps * ITEMS and not found.pending
    first = next(
        (
            each.values["validation/reward"]
            for each in read_metrics(out)
            if "validation/reward" in each.values
        ),
        0.0,
    )
    kills: dict[str, float | str] = {name: float(num) for name, num in sorted(ended.kills.items())}
    return [
        Figure("soak: minutes", ended.minutes, "min", kills),
        Figure(
            "soak: final validation reward",
            score(out),
            "",
            {"before": first, "low": low, "high": high},
            high,
            whole,
            low,
        ),
        Figure(
            "soak: groups lost or duplicated",
            float(len(found.missing) + len(found.duplicated)),
            "groups",
            {"accounted for": float(learnt)},
            0.0,
            whole,
        ),
    ]


def main() -> int:
    from figures import show

    parser = argparse.ArgumentParser(description="Training while parts of it are killed.")
    parser.add_argument("--quick", action="store_true", help="three minutes")
    parser.add_argument(
        "--minutes", type=float, default=30.0, help="approximate length of the soak"
    )
    parser.add_argument(
        "--steps", type=int, default=0, help="steps of training, instead of minutes"
    )
    parser.add_argument("--every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--keep", default="", help="new folder in which to keep all files; default: a temporary one"
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the started processes
    steps = options.steps or round(STEPS_PER_MINUTE * (3 if options.quick else options.minutes))
    with contextlib.ExitStack() as stack:
        folder = Path(options.keep or stack.enter_context(tempfile.TemporaryDirectory()))
        figures = soak_figures(folder, steps, options.every, options.seed)
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return 1 if any(figure.holds is False for figure in figures) else 0


if __name__ == "__main__":
    sys.exit(main())
