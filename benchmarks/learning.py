"""Does training work? Three runs from scratch, and recursive runs with each credit, with other
reductions, and without training the children.

    python benchmarks/learning.py            train; write docs/learning.md, docs/learning.svg and
                                             results/learning.json
    python benchmarks/learning.py --quick    one seed of the single-document run, cut short; within
                                             five minutes
    python benchmarks/learning.py --on-test  `tiny.py` with the five seeds SEEDS_ON_TEST, on test only
    python benchmarks/learning.py --forks    `tiny_recursive.py` with estimators over forks, against
                                             the default at equal CPU time; results/learning_forks.json
    python benchmarks/learning.py --json     also print the figures as JSON, like
                                             benchmarks/engine.py

Each run is a process with one torch thread. Its cost is the CPU time of that process (its sessions
are reported separately), which depends less on other load of the machine. Existing runs
(``--runs``) are reused: after a kill, start the command again. ``--report`` trains nothing and
reports the finished runs. The exit code is 1 if a figure misses its limit.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, stdev
from typing import NamedTuple

from figures import Figure
from studies import ROOT, fill, folder_of, is_trained, parser, tell, train

from ramify.evaluate.statistics import share_with_interval
from ramify.train.metrics import StepMetrics, read_metrics

RESULTS = ROOT / "benchmarks" / "results" / "learning.json"
PAGE, PICTURE = ROOT / "docs" / "learning.md", ROOT / "docs" / "learning.svg"
FIRST_ITEM = 20_000
"""Index of the first rollout item, far beyond the items of the demonstrations."""
SEEDS_ON_TEST = (6007, 1753, 3391, 8819, 4520)
"""Seeds of ``--on-test``, chosen before the first of these runs. The claim is that `tiny.py`
reaches at least 96 % on test, as a mean over them."""
NUM = 1024
"""Questions in each reported split; each is asked once."""
CREDITS = {
    "per_role": ("the default", []),
    "root": ("credit of the root", ["rl.algorithm.credit=root"]),
    "siblings": (
        "per_role as it was",
        ["rl.algorithm.credit=benchmarks/credit.py:among_all_calls"],
    ),
    "untrained": ("children not trained", ["rl.algorithm.children=false"]),
    "hierarchical": ("credit hierarchical", ["rl.algorithm.credit=hierarchical"]),
    "token": ("reduction by token", ["rl.algorithm.reduction=token"]),
    "fixed": ("L of 200", ["rl.algorithm.rollout_tokens=200"]),
}
"""Variant of the recursive run -> (description, overrides)."""
FORKS = {
    "default": [],
    "branch": ["rl.algorithm=branch", 'rl.rollout.branch={"where": [1], "num": 4, "budget": 4}'],
    "vine": [
        "rl.algorithm=vine",
        'rl.rollout.branch={"where": [1], "num": 4, "budget": 4, "lines": "first"}',
    ],
}
"""Variants of ``--forks`` -> overrides. Each samples 160 lines per step: the default as 20 items with
8 rollouts, the others as 10 items with 4 rollouts of 4 lines. Chosen before the first run."""
BEFORE = {"tiny": (240, 248, 248), "per_role": (221, 236, 220)}
"""Run -> right answers out of 256 after RL, by seed, under the defaults until November 2026: each
rollout divided by its own tokens, and ``siblings`` credit."""
T_95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""97.5th percentile of Student's t-distribution for 1, 2, … degrees of freedom."""


class RunResult(NamedTuple):
    """Results of one run."""

    name: str
    seed: int
    curve: list[tuple[float, float]]
    """(CPU seconds since rollouts began, reward on the validation stream)."""
    rewards: dict[str, float]
    """``first test``, ``last test``, ``best test_formats count`` … -> reward."""
    cpu_s: float
    """CPU seconds of the process from its start to the last step, including validation but not
    reports on other splits."""
    validation_s: float
    """CPU seconds of validation."""


def trained(name: str, seed: int, folder: Path) -> RunResult:
    """Read the results of a run from the metrics in ``folder``."""
    rows = list(read_metrics(folder))
    steps = [row for row in rows if row.stage not in ("first", "last", "best")]
    began = next((row.values["cpu_s"] for row in rows if row.stage == "first"), 0.0)
    scores = [row for row in rows if "validation/reward" in row.values]
    curve = [
        (max(row.values["cpu_s"] - began, 0.0), row.values["validation/reward"]) for row in scores
    ]
    rewards = {
        f"{row.stage} {key.replace('/', ' ')}": value
        for row in rows
        for key, value in row.values.items()
        if "/" in key
    }
    rewards = {
        key.removesuffix(" reward"): value
        for key, value in rewards.items()
        if not key.endswith((" failed", " reward_low", " reward_high")) and " metric " not in key
    }
    validated = cpu_seconds_before(
        rows, lambda row: "validation/reward" in row.values and row.stage not in ("last", "best")
    )
    reported = cpu_seconds_before(
        rows, lambda row: row.stage == "first" and "validation/reward" not in row.values
    )
    return RunResult(name, seed, curve, rewards, steps[-1].values["cpu_s"] - reported, validated)


def cpu_seconds_before(rows: Sequence[StepMetrics], on: Callable[[StepMetrics], bool]) -> float:
    """Return the CPU seconds between the measurements for which ``on`` is true and their
    predecessors."""
    return sum(
        after.values["cpu_s"] - before.values["cpu_s"]
        for before, after in pairwise(rows)
        if on(after)
    )


# --- runs -----------------------------------------------------------------------------------------


def single(runs: Path, seed: int, quick: bool) -> Iterator[RunResult]:
    short = ["sft.num=4000", "rl.steps=8"] if quick else []
    splits = [f"evaluate.num={NUM}", 'evaluate.first=["test"]']
    folder = train(runs / f"tiny-{seed}", "recipes/tiny.py", f"seed={seed}", *splits, *short)
    yield trained("tiny", seed, folder)


def on_test(runs: Path, only_finished: bool) -> Figure:
    """Mean share of right answers on the test split, over the seeds in ``SEEDS_ON_TEST``."""
    shares: dict[int, float] = {}
    for seed in SEEDS_ON_TEST:
        folder = runs / f"tiny-{seed}"
        if only_finished and not is_trained(folder):
            continue
        asked = [f"seed={seed}", f"evaluate.num={NUM}", 'evaluate.final=["test"]']
        train(folder, "recipes/tiny.py", *asked)
        shares[seed] = trained("tiny", seed, folder).rewards["last test"]
    return Figure(
        f"tiny.py on test, {len(shares)} of {len(SEEDS_ON_TEST)} seeds",
        mean(shares.values()) if shares else None,
        "right",
        {f"seed {seed}": share for seed, share in shares.items()},
        valid=len(shares) == len(SEEDS_ON_TEST),
        least=0.96,
    )


def recursive(runs: Path, seed: int, variants: Sequence[str]) -> Iterator[RunResult]:
    """Yield the recursive run and its variants, which all start from the same demonstrations."""
    name, recipe = f"tiny-recursive-{seed}", "recipes/tiny_recursive.py"
    asked = [f"seed={seed}", f"evaluate.num={NUM}"]
    start = train(runs / f"{name}-sft", recipe, *asked, "rl=null", 'evaluate.final=["test"]')
    for variant in variants:
        folder = train(
            runs / f"{name}-{variant}",
            recipe,
            *asked,
            f"policy.path={start}/policy",
            "warmup=null",
            "sft=null",
            f"rl.sample.first_item={FIRST_ITEM}",
            "evaluate.first=[]",
            *CREDITS[variant][1],
        )
        yield read_recursive_result(folder, start, variant, seed)


def with_forks(runs: Path, seed: int, only_finished: bool) -> Iterator[RunResult]:
    """Yield the runs of ``FORKS``, which all start from the same demonstrations. Times of their
    curves are without validation."""
    name, recipe = f"tiny-recursive-{seed}", "recipes/tiny_recursive.py"
    start, asked = runs / f"{name}-sft", [f"seed={seed}", "evaluate.num=512"]
    if not only_finished:
        train(start, recipe, *asked, "rl=null", 'evaluate.final=["test"]')
    for variant, overrides in FORKS.items():
        folder = runs / f"{name}-forks-{variant}"
        if not only_finished:
            forked = ["rl.sample.items=10", "rl.rollout.group=4"] if overrides else []
            train(
                folder,
                recipe,
                *asked,
                f"policy.path={start}/policy",
                "warmup=null",
                "sft=null",
                f"rl.sample.first_item={FIRST_ITEM}",
                "evaluate.first=[]",
                "evaluate.final=[]",
                "evaluate.validation=256",
                "schedule.evaluate_every=12",
                *forked,
                *overrides,
            )
        if is_trained(folder):
            rows = list(read_metrics(folder))
            curve = curve_without_validation(rows)
            yield RunResult(variant, seed, curve, {}, rows[-1].values["cpu_s"], 0.0)


def curve_without_validation(rows: Sequence[StepMetrics]) -> list[tuple[float, float]]:
    """Return (CPU seconds of rollouts and learning, reward on the validation stream)."""
    curve, spent, last = [], 0.0, rows[0].values["cpu_s"]
    for row in rows:
        if "validation/reward" in row.values:
            curve.append((spent, row.values["validation/reward"]))
        else:
            spent += row.values["cpu_s"] - last
        last = row.values["cpu_s"]
    return curve


def at_equal_time(runs: Sequence[RunResult]) -> dict[str, dict[int, float]]:
    """Return each variant's reward on the validation stream by seed, at the CPU time at which the
    shortest of the seed's runs ended (linear between two validations)."""
    rewards: dict[str, dict[int, float]] = {}
    for seed in dict.fromkeys(run.seed for run in runs):
        of_seed = [run for run in runs if run.seed == seed]
        end = min(run.curve[-1][0] for run in of_seed)
        for run in of_seed:
            rewards.setdefault(run.name, {})[seed] = between(run.curve, end)
    return rewards


def between(curve: Sequence[tuple[float, float]], time: float) -> float:
    """Return the value of the piecewise linear ``curve`` at ``time``."""
    for (before, low), (after, high) in pairwise(curve):
        if before <= time <= after:
            return low + (high - low) * (time - before) / (after - before)
    return curve[-1][1]


def figures_of_forks(runs: Sequence[RunResult]) -> Iterator[Figure]:
    """Yield what each estimator over forks gains against the default, in points of reward at equal
    CPU time: positive is better, and the interval is Student's over seeds."""
    rewards = at_equal_time(runs)
    for variant in FORKS:
        seeds = sorted(set(rewards.get(variant, {})) & set(rewards.get("default", {})))
        if variant == "default" or not seeds:
            continue
        pairs = [100 * (rewards[variant][s] - rewards["default"][s]) for s in seeds]
        ends = {
            f"{name} at its end": mean(run.curve[-1][1] for run in runs if run.name == name)
            for name in ("default", variant)
        }
        yield Figure(
            f"{variant} against the default at equal CPU time, {mean_of_pairs(pairs)}",
            mean(pairs),
            "points",
            {**{f"seed {s}": pair for s, pair in zip(seeds, pairs, strict=True)}, **ends},
            valid=len(seeds) == 3,
        )


def read_recursive_result(folder: Path, start: Path, variant: str, seed: int) -> RunResult:
    found, begun = trained(variant, seed, folder), trained("sft", seed, start)
    rewards = {**found.rewards, "first test": begun.rewards.get("last test", 0.0)}
    return found._replace(cpu_s=found.cpu_s + begun.cpu_s, rewards=rewards)


def finished_runs(runs: Path, seed: int) -> Iterator[RunResult]:
    """Yield the finished runs of ``seed``."""
    if is_trained(runs / f"tiny-{seed}"):
        yield trained("tiny", seed, runs / f"tiny-{seed}")
    for variant in CREDITS:
        folder, start = (runs / f"tiny-recursive-{seed}-{name}" for name in (variant, "sft"))
        if is_trained(folder):
            yield read_recursive_result(folder, start, variant, seed)


# --- figures --------------------------------------------------------------------------------------


def of(runs: Sequence[RunResult], name: str, key: str) -> float | None:
    values = [run.rewards[key] for run in runs if run.name == name and key in run.rewards]
    return median(values) if values else None


def wrong(reward: float | None) -> float | None:
    return None if reward is None else 1 - reward


def figures(runs: Sequence[RunResult], quick: bool) -> Iterator[Figure]:
    """Yield the shares of held-out tasks that are answered wrong: less is better."""

    def figure(
        what: str, run: str, split: str, most: float | None, against: dict[str, float | None]
    ) -> Figure:
        others = {name: value for name, value in against.items() if value is not None}
        return Figure(
            what,
            wrong(of(runs, run, f"last {split}")),
            "wrong",
            dict(others),
            None if quick else most,
        )

    before = {"after SFT": wrong(of(runs, "tiny", "first test"))}
    yield figure("single documents, after RL", "tiny", "test", 0.03, before)
    yield figure("the same, in a held-out format", "tiny", "test_formats", 0.15, {})
    yield figure("the same, about held-out names", "tiny", "test_names", None, {})
    seconds = [run.cpu_s for run in runs if run.name == "tiny"]
    yield Figure(
        "the whole run, one thread",
        median(seconds) if seconds else None,
        "CPU s",
        {},
        None if quick else 240,
    )
    if quick:
        return
    for variant, (what, _) in CREDITS.items():
        most = 0.12 if variant == "per_role" else None
        against = {"after SFT": wrong(of(runs, variant, "first test"))}
        yield figure(f"several documents, {what}", variant, "test", most, against)
    for name, what in (("tiny", "single documents"), ("per_role", "several documents")):
        right = share_with_interval(sum(BEFORE[name]), 256 * len(BEFORE[name]))
        against = {"before": 1 - right.value}
        yield figure(f"{what}, against the default before", name, "test", 1 - right.low, against)
    kept = [run for run in runs if run.name == "per_role" and "last test_formats" in run.rewards]
    yield Figure(
        "several documents in a held-out format, the worst seed",
        max((1 - run.rewards["last test_formats"] for run in kept), default=None),
        "wrong",
        {},
        0.25,
    )
    seconds = [run.cpu_s for run in runs if run.name == "per_role"]
    yield Figure(
        "the whole recursive run, one thread",
        median(seconds) if seconds else None,
        "CPU s",
        {},
        1200,
    )


# --- output ---------------------------------------------------------------------------------------


def table(runs: Sequence[RunResult]) -> str:
    """Return a Markdown table with a row per run."""
    lines = [
        "| run | seed | after SFT | after RL | held-out format | held-out names | CPU s | of it "
        "validation |",
        "|" + " --- |" * 8,
    ]
    for run in runs:
        shown = [
            run.rewards.get(key)
            for key in ("first test", "last test", "last test_formats", "last test_names")
        ]
        cells = ["" if value is None else with_interval(value) for value in shown]
        lines.append(
            f"| {run.name} | {run.seed} | {' | '.join(cells)} | {run.cpu_s:.0f} | "
            f"{run.validation_s:.0f} |"
        )
    return "\n".join(lines) + "\n"


def with_interval(reward: float) -> str:
    """A share of ``NUM`` questions with its 95 % interval."""
    share = share_with_interval(round(reward * NUM), NUM)
    return f"{share.value:.1%} ({100 * share.low:.1f}-{100 * share.high:.1f})"


def differences(runs: Sequence[RunResult]) -> str:
    """Return a Markdown table of each variant minus the default, over the seeds that both have."""
    scores = {(run.name, run.seed): run.rewards.get("last test") for run in runs}
    lines = ["| run | seeds | less `per_role`, by seed | mean, 95 % interval |", "|" + " --- |" * 4]
    for name in CREDITS:
        pairs = [
            100 * (theirs - ours)
            for (other, seed), theirs in sorted(scores.items())
            if other == name != "per_role" and theirs is not None
            if (ours := scores.get(("per_role", seed))) is not None
        ]
        if pairs:
            by_seed = ", ".join(f"{pair:+.1f}" for pair in pairs)
            lines.append(f"| `{name}` | {len(pairs)} | {by_seed} | {mean_of_pairs(pairs)} |")
    return "\n".join(lines) + "\n"


LATE = range(16, 21)
"""Steps whose rollouts are compared, including those of unfinished runs."""


def rollouts(folder: Path, seeds: Sequence[int]) -> str:
    """Return a Markdown table of the mean reward of the rollouts of the steps ``LATE``."""
    lines = ["| run | " + " | ".join(f"seed {seed}" for seed in seeds) + " |"]
    lines.append("|" + " --- |" * (len(seeds) + 1))
    for name in CREDITS:
        found = [late_reward(folder / f"tiny-recursive-{seed}-{name}") for seed in seeds]
        if any(found):
            cells = " | ".join("" if value is None else f"{value:.1%}" for value in found)
            lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines) + "\n"


def late_reward(folder: Path) -> float | None:
    rows = [] if not folder.exists() else list(read_metrics(folder))
    values = [
        row.values["reward"]
        for row in rows
        if row.stage == "rl" and row.step in LATE and "loss" in row.values
    ]
    return mean(values) if len(values) == len(LATE) else None


def mean_of_pairs(pairs: Sequence[float]) -> str:
    """Mean of the differences with Student's interval, which reflects the variation over seeds."""
    if len(pairs) < 2:
        return f"{pairs[0]:+.1f}"
    reach = T_95[len(pairs) - 2] * stdev(pairs) / len(pairs) ** 0.5
    return f"{mean(pairs):+.1f} ({mean(pairs) - reach:+.1f} to {mean(pairs) + reach:+.1f})"


def kinds(runs: Sequence[RunResult]) -> str:
    """Return a Markdown table of medians by kind of question."""
    names = list(dict.fromkeys(run.name for run in runs))
    found = sorted(
        {
            key.removeprefix("last test ")
            for run in runs
            for key in run.rewards
            if key.startswith("last test ")
        }
    )
    lines = ["| run | " + " | ".join(found) + " |", "|" + " --- |" * (len(found) + 1)]
    for name in names:
        values = [of(runs, name, f"last test {kind}") for kind in found]
        lines.append(
            f"| {name} | "
            + " | ".join("" if value is None else f"{value:.0%}" for value in values)
            + " |"
        )
    return "\n".join(lines) + "\n"


def picture(runs: Sequence[RunResult]) -> str:
    """Return all curves as SVG: reward on the validation stream against CPU time."""
    width, height, left, bottom = 760, 340, 50, 300
    longest = max((seconds for run in runs for seconds, _ in run.curve), default=1.0)
    hues = ("#1f77b4", "#2ca02c", "#ff7f0e", "#9467bd", "#888888", "#8c564b", "#e377c2", "#17becf")
    colours = dict(zip(("tiny", *CREDITS), hues, strict=True))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        y = bottom - tenth / 10 * 270
        parts.append(
            f'<path d="M{left} {y:.0f}H{width - 20}" stroke="#ddd"/>'
            f'<text x="18" y="{y + 4:.0f}">{tenth * 10}%</text>'
        )
    for run in runs:
        points = " ".join(
            f"{left + s / longest * 680:.1f},{bottom - r * 270:.1f}" for s, r in run.curve
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colours[run.name]}" stroke-width="1.5"/>'
        )
    for index, name in enumerate(dict.fromkeys(run.name for run in runs)):
        parts.append(
            f'<text x="{left + 110 * index}" y="{height - 6}" fill="{colours[name]}">{name}</text>'
        )
    parts.append(
        f'<text x="{width - 20}" y="{height - 6}" text-anchor="end">'
        f"CPU seconds of rollouts and learning, 0 to {longest:.0f}</text></svg>"
    )
    return "\n".join(parts) + "\n"


def write(
    runs: Sequence[RunResult], found: Sequence[Figure], folder: Path, seeds: Sequence[int]
) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    data = {
        "figures": [figure.as_json() for figure in found],
        "runs": [run._asdict() for run in runs],
    }
    RESULTS.write_text(json.dumps(data, indent=1) + "\n")
    PICTURE.write_text(picture(runs))
    parts = {"runs": table(runs), "differences": differences(runs), "kinds": kinds(runs)}
    fill(PAGE, {**parts, "rollouts": rollouts(folder, seeds)})


def main() -> int:
    options_of = parser(
        "Does it learn?", "one seed of the single-document run, cut short", "learning", 3
    )
    options_of.add_argument("--only", choices=["single", "recursive"], help="one of the two")
    options_of.add_argument(
        "--on-test", action="store_true", help="tiny.py with five seeds, on test only"
    )
    options_of.add_argument(
        "--forks", action="store_true", help="tiny_recursive.py with estimators over forks"
    )
    options_of.add_argument(
        "--variants", nargs="+", choices=CREDITS, default=list(CREDITS), help="of the recursive run"
    )
    options = options_of.parse_args()
    folder = folder_of(options)
    if options.on_test:
        return tell([on_test(folder, options.report)], options.json)
    if options.forks:
        with_seeds = [run for s in options.seeds for run in with_forks(folder, s, options.report)]
        gains = list(figures_of_forks(with_seeds))
        data = {
            "figures": [gain.as_json() for gain in gains],
            "runs": [r._asdict() for r in with_seeds],
        }
        (RESULTS.parent / "learning_forks.json").write_text(json.dumps(data, indent=1) + "\n")
        return tell(gains, options.json)
    runs: list[RunResult] = []
    for seed in options.seeds[:1] if options.quick else options.seeds:
        if options.report:
            runs += finished_runs(folder, seed)
            continue
        if options.only != "recursive":
            runs += single(folder, seed, options.quick)
        if options.only != "single" and not options.quick:
            runs += recursive(folder, seed, options.variants)
    runs.sort(key=lambda run: (["tiny", *CREDITS].index(run.name), run.seed))
    found = list(figures(runs, options.quick))
    if not options.quick and options.only is None:
        write(runs, found, folder, options.seeds)
    return tell(found, options.json)


if __name__ == "__main__":
    sys.exit(main())
