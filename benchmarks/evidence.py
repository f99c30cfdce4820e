"""Does a training session hold what it promises: tasks that prove themselves, runs that are
extended, and runs that are stopped at random?

    python benchmarks/evidence.py            300 items, 20 signals
    python benchmarks/evidence.py --quick    60 items, 5 signals
    python benchmarks/evidence.py --json     also print the figures as JSON, like engine.py

Not measured here: learning curves of the evidence task, which need hours on a processor.
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

from engine import Figure, show

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from ramify.tasks.base import items_of, task_of  # noqa: E402
from ramify.tasks.validation import answered  # noqa: E402
from ramify.train.checkpoint import CheckpointStore, read_state  # noqa: E402
from ramify.train.config import Schedule  # noqa: E402
from ramify.train.execute import train  # noqa: E402
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


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = [
            *of_evidence(60 if arguments.quick else 300),
            *of_extension(Path(folder)),
            *of_signals(Path(folder), 5 if arguments.quick else 20),
        ]
    show(found)
    if arguments.json:
        print(json.dumps({"figures": [figure.as_json() for figure in found]}))
    return 1 if any(figure.holds is False for figure in found) else 0


if __name__ == "__main__":
    sys.exit(main())
