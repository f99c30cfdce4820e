"""Accuracy of the simulator: predictions of one run from the measurements of another, over measured
values.

    python benchmarks/scale_simulate.py             about ten minutes, mostly asleep
    python benchmarks/scale_simulate.py --quick     fewer steps and settings
    python benchmarks/scale_simulate.py --json      also print {"figures": […]} like engine.py
    python benchmarks/scale_simulate.py --embedded  also runs whose engine shares two cores with
                                                    everything else
    python benchmarks/scale_simulate.py --blind     only such runs, with settings that were drawn
                                                    before any was measured

These are runs of the real loop whose engines, trainer and publication take time by sleeping
(``scale_stepped.py``), so a busy machine changes little. The first run is synchronous with one
engine. The others differ in the number of engines, concurrent rollouts or staleness, and are
predicted from the first run only. Figures are predicted over measured seconds of a step.

Figures of the embedded engine are only limited on a quiet machine, because its steps wait for other
work on a busy one. CPU seconds (of engine, loop and sessions in a step's rollouts) exclude that
wait, although a busy machine's caches increase them; they are reported alongside.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import fmean

from figures import Figure, show
from scale_stepped import Shape, carry_out

from ramify.extras.cluster.simulate import SimulationResult, SimulationSetting, simulate
from ramify.extras.cluster.simulation_inputs import SimulationInputs, read_measured_run

MOST_OFF = 0.15
"""Tolerance of a step's seconds in either direction."""
FIRST = Shape()
OTHERS = {
    "a third of the rollouts at once": Shape(concurrency=12),
    "2 engines with half the slots": Shape(engines=2, slots=8),
    "staleness 1": Shape(staleness=1),
    "staleness 1, 2 engines": Shape(staleness=1, engines=2, slots=8),
    "staleness 1, nothing late": Shape(staleness=1, grace_steps=0),
    "staleness 1, 2 engines, stragglers cut": Shape(
        staleness=1, grace_steps=0, engines=2, slots=8, straggler_factor=2.0
    ),
}
QUICK = ("staleness 1",)
_FULL = ("rl.sample.items=8", "rl.rollout.concurrency=32")
EMBEDDED = {
    "the embedded engine (itself)": _FULL,
    "the embedded engine, more and smaller groups": (
        "rl.sample.items=12",
        "rl.rollout.group=4",
        "rl.rollout.concurrency=32",
    ),
    "the embedded engine, a quarter of the rollouts at once": (
        "rl.sample.items=8",
        "rl.rollout.concurrency=8",
    ),
    "the embedded engine, 16 slots": (*_FULL, "policy.slots=16"),
    "the embedded engine, 4 slots": (*_FULL, "policy.slots=4"),
}
BLIND_SEED = 20_261_122
"""Seed of settings for which nothing was tuned: the model was final before any of them was run."""
_STEPS = 60
"""Number of simulated steps."""


def simulate_figures(*, quick: bool = False, embedded: bool = False) -> Iterator[Figure]:
    """Yield the figures of this file; ``scale.py`` includes them."""
    with tempfile.TemporaryDirectory() as name:
        folder, steps = Path(name), 6 if quick else 16
        found = run_and_measure(folder / "first", FIRST._replace(steps=steps))
        yield figure("one engine, synchronous (itself)", found, found, floor=False)
        for index, (what, shape) in enumerate(OTHERS.items()):
            if not quick or what in QUICK:
                other = run_and_measure(folder / str(index), shape._replace(steps=steps))
                yield figure(what, found, other)
                if shape.staleness:
                    yield freshness(what, found, other, folder / str(index))
        if embedded:
            yield from _embedded(folder, EMBEDDED, 4 if quick else 6)


def run_and_measure(out: Path, shape: Shape) -> SimulationInputs:
    carry_out(out, shape)
    return read_measured_run(out)


def figure(
    what: str, by: SimulationInputs, other: SimulationInputs, *, floor: bool = True
) -> Figure:
    """Return the mean seconds of a step of ``other`` as predicted from ``by``, over the measured
    ones."""
    predicted = at(by, other)
    stale = other.sizes.staleness
    took = fmean(other.step_s[stale : len(other.step_s) - stale or None])
    ratio = predicted.step_mean_s / took
    against: dict[str, float | str] = {
        "measured": f"{took:.3g} s a step",
        "predicted": f"{predicted.step_mean_s:.3g} s",
    }
    bound = 1 + MOST_OFF if floor else None
    return Figure(
        f"predicted step, {what}",
        ratio,
        "×",
        against,
        floor=bound,
        least=1 - MOST_OFF if floor else None,
    )


def freshness(what: str, by: SimulationInputs, other: SimulationInputs, out: Path) -> Figure:
    """Return the mean staleness of tokens in versions, predicted and measured."""
    from ramify.train.metrics import read_metrics

    stale = other.sizes.staleness
    seen = [each.values["staleness"] for each in read_metrics(out) if "staleness" in each.values][
        stale : -stale or None
    ]
    predicted = at(by, other).staleness
    return Figure(
        f"predicted staleness, {what}",
        predicted,
        "versions",
        {"measured": f"{fmean(seen):.3g} versions"},
    )


def at(by: SimulationInputs, other: SimulationInputs) -> SimulationResult:
    """Return the prediction from ``by`` for the setting of ``other``."""
    sizes = other.sizes
    setting = SimulationSetting(
        engines=sizes.engines,
        slots=sizes.slots,
        ranks=sizes.ranks,
        staleness=sizes.staleness,
        items=sizes.items,
        max_items=sizes.max_items,
        straggler_factor=sizes.straggler_factor,
        grace_steps=sizes.grace_steps,
        group=sizes.group,
        concurrency=sizes.concurrency,
        on_wire=sizes.on_wire,
        keeps=sizes.keeps,
        cache_tokens=sizes.cache_tokens,
        embedded=sizes.embedded,
    )
    return simulate(by, setting, steps=_STEPS)


def drawn() -> dict[str, tuple[str, ...]]:
    """Draw the settings of the blind test."""
    draw = random.Random(BLIND_SEED)
    found = {}
    for _ in range(2):
        at_once, slots = draw.choice([4, 6, 12, 20, 48]), draw.choice([6, 12, 24, 128])
        items, group = draw.choice([(4, 8), (6, 8), (10, 6), (16, 4)])
        what = f"blind: {items} groups of {group}, {at_once} rollouts at once, {slots} slots"
        found[what] = (
            f"rl.sample.items={items}",
            f"rl.rollout.group={group}",
            f"rl.rollout.concurrency={at_once}",
            f"policy.slots={slots}",
        )
    return found


def blind_figures(*, steps: int = 4) -> Iterator[Figure]:
    """Yield a figure for each setting, predicted once from the first of ``EMBEDDED``."""
    with tempfile.TemporaryDirectory() as name:
        first = next(iter(EMBEDDED.items()))
        yield from _embedded(Path(name), dict([first, *drawn().items()]), steps)


def _embedded(folder: Path, runs: dict[str, tuple[str, ...]], steps: int) -> Iterator[Figure]:
    """Yield figures of the packaged policy on its recursive task, in separate processes, each
    predicted from the first run."""
    first: SimulationInputs | None = None
    for index, (what, fields) in enumerate(runs.items()):
        out = folder / f"embedded-{index}"
        _train(out, f"rl.steps={steps}", *fields)
        found = read_measured_run(out)
        first = first or found
        yield figure(what, first, found, floor=False)
        computed, predicted = fmean(found.computed_s), at(first, found).computed_s
        against: dict[str, float | str] = {
            "measured": f"{computed:.3g} s",
            "predicted": f"{predicted:.3g} s",
        }
        yield Figure(
            f"predicted processor seconds of a step, {what}", predicted / computed, "×", against
        )


def _train(out: Path, *fields: str) -> None:
    root = Path(__file__).parents[1]
    fixed = (
        "policy.path=ramify/models/tiny",
        "policy.shape={}",
        "warmup=null",
        "sft=null",
        "rl.sample.minibatches=1",
        "evaluate.num=2",
        "evaluate.validation=2",
        "evaluate.final=[]",
        "schedule.save_rollouts_every=1",
        "schedule.evaluate_every=null",
    )
    command = [
        sys.executable,
        "-m",
        "ramify",
        "train",
        "recipes/tiny_recursive.py",
        "--out",
        str(out),
        "--quiet",
    ]
    subprocess.run([*command, *fixed, *fields], cwd=root, check=True)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Predictions of the simulator over measured values."
    )
    parser.add_argument("--quick", action="store_true", help="fewer steps and settings")
    parser.add_argument("--embedded", action="store_true", help="also the engine of this process")
    parser.add_argument(
        "--blind",
        action="store_true",
        help="only settings that were drawn before they were measured",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the figures as JSON on the last line"
    )
    options = parser.parse_args()
    figures = (
        blind_figures()
        if options.blind
        else simulate_figures(quick=options.quick, embedded=options.embedded)
    )
    found = list(figures)
    show(found)
    if options.json:
        print(json.dumps({"figures": [each.as_json() for each in found]}))
    return 1 if any(each.holds is False for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
