"""Does hindsight help? A study of demonstrations, outcome reward, and outcome reward with a
hindsight teacher, with variants and with controls that must not help, on named-operation programs
(``recipes/programs.py``).

    python benchmarks/hybrid.py            train all arms; write docs/learning.md, docs/hybrid.svg and
                                           results/hybrid.json
    python benchmarks/hybrid.py --quick    one seed of three arms, cut short, to test the study
                                           itself
    python benchmarks/hybrid.py --arms outcome hybrid --seeds 0 1
    python benchmarks/hybrid.py --report   train nothing; report the finished runs
    python benchmarks/hybrid.py --json     also print the figures as JSON, like benchmarks/engine.py

All arms of a seed start from the same policy, after demonstrations, and get the same number of
rollouts of the same problems. The policy of the last step is compared, on 256 problems that
training never sees, with 8 attempts each at temperature 1; no checkpoint is selected by its score.
Each run is a process with one torch thread. Existing runs (``--runs``) are reused. The exit code is
1 if a figure misses its limit.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any, NamedTuple

import numpy as np
from figures import Figure
from studies import ROOT, fill, folder_of, parser, python, tell, train

from ramify.evaluate.statistics import pass_at_k
from ramify.train.checkpoint import CheckpointStore
from ramify.train.metrics import read_metrics

RESULTS = ROOT / "benchmarks" / "results" / "hybrid.json"
PAGE, PICTURE = ROOT / "docs" / "learning.md", ROOT / "docs" / "hybrid.svg"
NUM_ITEMS, NUM_ATTEMPTS = 256, 8
NUM_QUICK = 32
MINUTES = 60.0
"""Limit on the study's CPU time in minutes."""
DRAWS = 4000
STEPS, ANNEALED = 30, 24
SOURCE = {
    "name": "hindsight",
    "judge": {"name": "ramify.extras.studies.programs.judges:RuleHintJudge"},
    "filter": {"min_chars": 5},
}
FADING = {"start": 1.0, "end": 0.0, "steps": ANNEALED}


def terms(**changes: Any) -> str:
    """Return the override that sets the only term of the hybrid algorithm."""
    term = {"signal": "teacher", "weight": FADING, "clip": 2.0, "route": "hinted", **changes}
    return f"rl.algorithm.terms={json.dumps([term])}"


class Arm(NamedTuple):
    what: str
    overrides: tuple[str, ...] = ()
    recipe: str = "recipes/programs_hybrid.py"
    num_seeds: int = 1
    """Number of seeds in the full study."""


ARMS = {
    "outcome": Arm("outcome reward alone (GRPO)", recipe="recipes/programs.py", num_seeds=5),
    "hybrid": Arm("and a frozen teacher with hints from errors, fading", num_seeds=5),
    "process": Arm(
        "outcome, and a mark for each turn that ran",
        (
            "rl.algorithm.terms=[]",
            'rl.signals={"process": {"name": "process", "judge": {"name": "ramify.extras.studies.programs.judges:ProgramErrorJudge"}}}',
            'rl.algorithm.terms=[{"signal": "process", "weight": 0.3, "norm": "step_index"}]',
        ),
    ),
    "process-alone": Arm(
        "marks for turns, no outcome",
        (
            "rl.algorithm.terms=[]",
            'rl.signals={"process": {"name": "process", "judge": {"name": "ramify.extras.studies.programs.judges:ProgramErrorJudge"}}}',
            'rl.algorithm.terms=[{"signal": "process", "weight": 1.0, "norm": "step_index"}]',
            "rl.algorithm.w_rl=0",
        ),
        num_seeds=2,
    ),
    "teacher-alone": Arm("the teacher, no outcome", ("rl.algorithm.w_rl=0", terms(weight=1.0))),
    "privileged": Arm(
        "hints from facts (privileged: an upper bound)",
        ("rl.signals.teacher.hints.judge=ramify.extras.studies.programs.judges:OracleJudge",),
    ),
    "ema": Arm("a teacher that follows the policy (EMA .05)", ("rl.signals.teacher.source=ema",)),
    "live": Arm("the policy itself as the teacher", ("rl.signals.teacher.source=live",)),
    "constant": Arm("weight 1 to the end", (terms(weight=1.0),)),
    "unclipped": Arm("the gap unclipped", (terms(clip=None),)),
    "v2": Arm(
        "V2: reverse KL on the teacher's 50 likeliest tokens",
        ("rl.signals.teacher.top=50", terms(clip=None, into="loss"), "rl.loss.kd=reverse"),
    ),
    "v3": Arm(
        "V3: the policy's 4 likeliest tokens, hint by overlap",
        (
            "rl.signals.teacher.top=4",
            "rl.signals.teacher.support=student",
            "rl.signals.teacher.choose=overlap",
            "rl.signals.teacher.hints.judge.several=true",
            terms(clip=None, into="loss"),
            "rl.loss.kd=surrogate",
            "rl.loss.kd_clip=2.0",
        ),
    ),
    "named": Arm(
        "hybrid, scored up to the turn that the hint is about",
        ("rl.signals.teacher.turns=named",),
        num_seeds=2,
    ),
    "failed": Arm(
        "hints for rollouts that failed alone",
        ("rl.signals.teacher.hints.only=failed",),
        num_seeds=2,
    ),
    "once": Arm("each hint once in a group", ("rl.signals.teacher.hints.once=true",)),
    "narrow": Arm(
        "all three: failed, once, up to the turn that it is about",
        (
            "rl.signals.teacher.turns=named",
            "rl.signals.teacher.hints.only=failed",
            "rl.signals.teacher.hints.once=true",
        ),
        num_seeds=5,
    ),
    "shuffled": Arm(
        "control: hints of other problems",
        (
            "rl.signals.teacher.hints="
            + json.dumps(
                {"name": "ramify.extras.studies.programs.judges:ShuffledHints", "source": SOURCE}
            ),
        ),
        num_seeds=3,
    ),
    "random": Arm(
        "control: a teacher of random weights", ("rl.signals.teacher.source=random",), num_seeds=2
    ),
    "kl": Arm(
        "control: no hints, ten times the KL to the frozen policy",
        ("rl.loss.kl_beta=0.1",),
        "recipes/programs.py",
    ),
}
CONTROLS = ("shuffled", "random", "kl")
MAIN = ("sft", "outcome", "hybrid")
"""Arms that run with all seeds. Other arms run with the first seed; their further seeds are
optional."""
EXPECTED = 3 / 8
"""Share of rollouts for which a judge is expected to give a hint: 35 to 40 %."""
QUICK = ("sft.num=3000", "rl.steps=3", "evaluate.validation=4")


class ArmResult(NamedTuple):
    """Results of one run."""

    arm: str
    """Name of the arm; ``sft`` for the policy from which all arms of a seed start."""
    seed: int
    rewards: dict[str, list[float]]
    """Item -> reward of each attempt by the policy of the last step."""
    best: float
    """Average reward, on the same problems, of the checkpoint that is best on the validation
    stream."""
    best_step: int
    curve: list[tuple[int, float]]
    """(step, average on the validation stream)."""
    hint_rate: list[float]
    """Hint rate of each step; empty without hints."""
    cpu_s: float
    """CPU seconds of the training and evaluation processes."""
    step_s: float
    """Median CPU time of a step of rollouts and learning; 0 for demonstrations."""
    signal_share: float
    """Share of a step's time that signals took; 0 without signals."""
    teacher_tokens: float
    """Tokens scored by teachers, as a share of the tokens packed for training, over the steps in
    which teachers scored."""
    teacher_expected: float
    """The same share at a hint rate of ``EXPECTED``."""
    gates: dict[str, float]
    """Probabilities in demonstrations; see ``gates``."""

    @property
    def average(self) -> float:
        return _average(self.rewards)

    @property
    def passes(self) -> float:
        return fmean(
            pass_at_k(len(each), sum(map(round, each)), NUM_ATTEMPTS)
            for each in self.rewards.values()
        )


# --- runs -----------------------------------------------------------------------------------------


def is_finished(folder: Path) -> bool:
    return (folder / "attempts.json").is_file()


def train_and_evaluate(
    folder: Path, recipe: str, *overrides: str, num_items: int = NUM_ITEMS
) -> None:
    """Train and evaluate, or continue a run that was killed."""
    train(folder, recipe, *overrides)
    if not is_finished(folder):
        python(str(Path(__file__).resolve()), "--attempts", str(folder), "--items", str(num_items))


def begin(runs: Path, seed: int, quick: bool) -> Path:
    """Return the folder of the policy from which all arms of a seed start."""
    folder = runs / f"sft-{seed}"
    short = QUICK[:1] if quick else ()
    train_and_evaluate(
        folder,
        "recipes/programs.py",
        f"seed={seed}",
        "rl=null",
        "evaluate.final=[]",
        "evaluate.validation=4",
        *short,
        num_items=NUM_QUICK if quick else NUM_ITEMS,
    )
    return folder


def run_arm(runs: Path, name: str, seed: int, quick: bool) -> None:
    arm, start = ARMS[name], begin(runs, seed, quick)
    short = QUICK[1:] if quick else ()
    train_and_evaluate(
        runs / f"{name}-{seed}",
        arm.recipe,
        f"seed={seed}",
        "sft=null",
        f"policy.path={start}/policy",
        "evaluate.final=[]",
        *arm.overrides,
        *short,
        num_items=NUM_QUICK if quick else NUM_ITEMS,
    )


# --- evaluation -----------------------------------------------------------------------------------


def attempts(folder: Path, num_items: int) -> None:
    """Attempt the test problems with the policy of the last step and, if another checkpoint is best
    on the validation stream, with that one. Runs in a separate process; stores each reward."""
    last, best = CheckpointStore(folder).latest(), CheckpointStore(folder).best()
    assert last is not None, folder
    found = asyncio.run(
        _attempt_all(last / "policy", num_items, is_start=folder.name.startswith("sft-"))
    )
    if best is not None and best != last:
        found["best"] = asyncio.run(_attempt_all(best / "policy", num_items, is_start=False))[
            "rewards"
        ]
        found["best_step"] = int(best.name.rpartition("-")[2])
    usage = resource.getrusage(resource.RUSAGE_SELF)
    found["cpu_s"] = usage.ru_utime + usage.ru_stime
    (folder / "attempts.json").write_text(json.dumps(found))


async def _attempt_all(policy: Path, num_items: int, is_start: bool) -> dict[str, Any]:
    import torch

    from ramify import RLM, Limits, SandboxSpec
    from ramify.clients.base import Sampling
    from ramify.evaluate.run_evaluation import EvaluationPlan, evaluate
    from ramify.inference.local.local_client import LocalClient
    from ramify.models.load import load_policy
    from ramify.tasks.base import task_of

    torch.set_num_threads(1)
    sys.setswitchinterval(5e-4)
    task = task_of("programs")
    client = LocalClient(load_policy(str(policy)), name="local:policy", slots=256)
    rlm = RLM(
        client,
        scaffold="bare",
        sandbox=SandboxSpec(provider="ramify.extras.studies.programs.program_interpreter"),
        limits=Limits(
            max_turns=3, max_depth=0, max_reply_tokens=32, max_seconds=86_400, max_concurrency=512
        ),
    )
    plan = EvaluationPlan(
        model="local:policy", task="programs", items=num_items, attempts=NUM_ATTEMPTS
    )
    done = await evaluate(rlm, task, plan, sampling=Sampling(temperature=1.0), concurrency=256)
    rewards: dict[str, list[float]] = {}
    for outcome in done.outcomes:
        assert outcome.reward is not None, outcome.error
        rewards.setdefault(outcome.item, []).append(outcome.reward)
    found: dict[str, Any] = {"rewards": rewards}
    if is_start:
        malformed = fmean(outcome.metrics.get("malformed", 1.0) for outcome in done.outcomes)
        found["gates"] = {"format errors": malformed, **await gates(client, task)}
    await client.close()
    return found


async def gates(client: Any, task: Any) -> dict[str, float]:
    """Return the probability of the right function at its position, with and without a hint that
    names it."""
    from ramify.extras.studies.programs.scripted_demonstrator import ToyLanguageRule, hint_text
    from ramify.extras.studies.programs.toy_program_language import (
        IMPORTED,
        PROGRAM_HINT,
        ProgramWritingExercise,
        generate_word_functions,
    )
    from ramify.types.message import Message

    renderer, tokenizer, known = (
        client.policy.renderer,
        client.policy.tokenizer,
        generate_word_functions(),
    )
    right = dict(enumerate(known.right))
    likely: dict[str, list[float]] = {"p(right | hint)": [], "p(right)": []}
    for item in task.splits["validation"][:100]:
        problem = ProgramWritingExercise.parse(item.question)
        assert problem is not None
        words = [word for word, _ in problem.steps][:3]
        imports = tuple(sorted({right[word] for word, _ in problem.steps} & set(IMPORTED)))
        program = tokenizer.encode(problem.program_for_meanings(right, imports).text)
        for name, hint in (
            (
                "p(right | hint)",
                PROGRAM_HINT + hint_text(ToyLanguageRule(w, right[w]) for w in words),
            ),
            ("p(right)", ""),
        ):
            given = renderer.prompt([Message("user", item.question + hint)])
            logprobs = await client.logprobs([*given, *program])
            places = [
                len(given) + program.index(tokenizer.convert_tokens_to_ids(f"@w{w}")) for w in words
            ]
            likely[name] += [float(np.exp(logprobs[place])) for place in places]
    return {name: fmean(values) for name, values in likely.items()}


# --- results of runs ------------------------------------------------------------------------------


def read_result(folder: Path, arm: str, seed: int) -> ArmResult:
    rows = list(read_metrics(folder))
    done = json.loads((folder / "attempts.json").read_text())
    steps = [row for row in rows if row.stage == "rl" and "learn_s" in row.values]
    curve = [
        (row.step, row.values["validation/reward"])
        for row in rows
        if "validation/reward" in row.values
    ]
    took = [each.values["work_s"] + each.values["learn_s"] for each in steps]
    computed = [
        after.values["cpu_s"] - before.values["cpu_s"]
        for before, after in pairwise(row for row in rows if "cpu_s" in row.values)
        if after.stage == "rl" and "learn_s" in after.values
    ]
    signal_s = [each.values.get("teacher_s", 0.0) for each in steps]
    read_steps = [each.values for each in steps if each.values.get("teacher_tokens")]
    shares = [values["teacher_tokens"] / values["packed_tokens"] for values in read_steps]
    rates = [values["teacher/hint_rate"] for values in read_steps]
    average = _average(done["rewards"])
    return ArmResult(
        arm,
        seed,
        done["rewards"],
        _average(done["best"]) if "best" in done else average,
        done.get("best_step", rows[-1].step),
        curve,
        [each.values["teacher/hint_rate"] for each in steps if "teacher/hint_rate" in each.values],
        rows[-1].values.get("cpu_s", 0.0) + done["cpu_s"],
        median(computed) if computed else 0.0,
        sum(signal_s) / sum(took) if took else 0.0,
        fmean(shares) if shares else 0.0,
        EXPECTED * sum(shares) / sum(rates) if rates else 0.0,
        done.get("gates", {}),
    )


def _average(rewards: Mapping[str, Sequence[float]]) -> float:
    return fmean(fmean(each) for each in rewards.values())


def finished_runs(runs: Path, seeds: Sequence[int]) -> Iterator[ArmResult]:
    """Yield the finished runs."""
    for name in ("sft", *ARMS):
        for seed in seeds:
            if is_finished(runs / f"{name}-{seed}"):
                yield read_result(runs / f"{name}-{seed}", name, seed)


def paired_difference(
    runs: Sequence[ArmResult], ours: str, theirs: str
) -> tuple[float, float, float] | None:
    """Return (mean difference of avg@8, and its 95 % interval) over the seeds that both arms have.

    Seeds are drawn with replacement, and problems within seeds, so that the interval reflects few
    seeds as well as few problems."""
    a, b = ({run.seed: run for run in runs if run.arm == name} for name in (ours, theirs))
    seeds = sorted(a.keys() & b.keys())
    if not seeds:
        return None
    items = sorted(a[seeds[0]].rewards)
    differences = np.array(
        [[fmean(a[s].rewards[i]) - fmean(b[s].rewards[i]) for i in items] for s in seeds]
    )
    rng = np.random.default_rng(0)
    drawn_seeds = rng.integers(len(seeds), size=(DRAWS, len(seeds)))
    drawn_items = rng.integers(len(items), size=(DRAWS, len(items)))
    means = np.array(
        [differences[s][:, i].mean() for s, i in zip(drawn_seeds, drawn_items, strict=True)]
    )
    low, high = np.quantile(means, [0.025, 0.975])
    return float(differences.mean()), float(low), float(high)


def figures(runs: Sequence[ArmResult], quick: bool) -> Iterator[Figure]:
    def of(name: str) -> list[ArmResult]:
        return [run for run in runs if run.arm == name]

    def mean(name: str, passes: bool = False) -> float | None:
        found = [run.passes if passes else run.average for run in of(name)]
        return fmean(found) if found else None

    others = {name: value for name in ("sft", "outcome") if (value := mean(name)) is not None}
    yield Figure("avg@8 of the hybrid", mean("hybrid"), "right", dict(others))
    others = {name: value for name in ("sft", "outcome") if (value := mean(name, True)) is not None}
    yield Figure("pass@8 of the hybrid", mean("hybrid", True), "right", dict(others))
    for ours, theirs in (("outcome", "sft"), ("hybrid", "outcome")):
        found = paired_difference(runs, ours, theirs)
        against = {} if found is None else {"95 % interval": f"{found[1]:+.3f} to {found[2]:+.3f}"}
        least = None if quick else 1e-9
        yield Figure(
            f"{ours} less {theirs}, at least (lower end)",
            found[1] if found else None,
            "",
            dict(against),
            least=least,
        )
    for name in CONTROLS:
        found = paired_difference(runs, name, "outcome")
        if found is not None:
            against = {"95 % interval": f"{found[1]:+.3f} to {found[2]:+.3f}"}
            yield Figure(
                f"control '{name}' less outcome (lower end)",
                found[1],
                "",
                dict(against),
                None if quick else 0.0,
            )
    found = paired_difference(runs, "narrow", "hybrid")
    if found is not None:
        against = {"95 % interval": f"{found[1]:+.3f} to {found[2]:+.3f}"}
        yield Figure("fewer hints ('narrow') less hybrid", found[0], "", dict(against))
    for name in ("hybrid", "narrow"):
        if mine := of(name):
            yield Figure(
                f"signals' share of a step, {name}", fmean(run.signal_share for run in mine), "", {}
            )
            rate = f"at {fmean(fmean(run.hint_rate) for run in mine):.0%} hinted"
            yield Figure(
                f"teacher's tokens by training's, {name}, 3 of 8 hinted",
                fmean(run.teacher_expected for run in mine),
                "",
                {rate: fmean(run.teacher_tokens for run in mine)},
                None if quick else 0.5,
            )
    further = [run for run in runs if run.arm not in MAIN and run.seed != runs[0].seed]
    minutes, more = (sum(run.cpu_s for run in each) / 60 for each in (runs, further))
    yield Figure("the study, one thread", minutes - more, "CPU min", {}, None if quick else MINUTES)
    yield Figure("further seeds of variants and controls", more, "CPU min", {})


# --- output ---------------------------------------------------------------------------------------


def table(runs: Sequence[ArmResult]) -> str:
    """Return a Markdown table with a row per arm."""
    lines = [
        "| arm | what | seeds | avg@8 | pass@8 | best avg@8 | less outcome alone (95 %) | hints | "
        "s per step |",
        "|" + " --- |" * 9,
    ]
    for name in ("sft", *ARMS):
        mine = [run for run in runs if run.arm == name]
        if not mine:
            continue
        found = paired_difference(runs, name, "outcome") if name not in ("sft", "outcome") else None
        less = "" if found is None else f"{found[0]:+.3f} [{found[1]:+.3f}, {found[2]:+.3f}]"
        rates = [fmean(run.hint_rate) for run in mine if run.hint_rate]
        what = ARMS[name].what if name in ARMS else "demonstrations alone: where all others begin"
        step = fmean(run.step_s for run in mine)
        cells = [
            name,
            what,
            str(len(mine)),
            _spread([run.average for run in mine]),
            _spread([run.passes for run in mine]),
            f"{fmean(run.best for run in mine):.3f}",
            less,
            f"{fmean(rates):.0%}" if rates else "",
            f"{step:.2f}" if step else "",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _spread(values: Sequence[float]) -> str:
    return f"{fmean(values):.3f}" + (f" ± {stdev(values):.3f}" if len(values) > 1 else "")


def by_seed(runs: Sequence[ArmResult]) -> str:
    """Return a Markdown table of the three main arms by seed, with the gates of each."""
    seeds = sorted({run.seed for run in runs if run.arm == "sft"})
    lines = [
        "| seed | sft | outcome | hybrid | narrow | format errors | p(right function), hinted | "
        "not hinted |",
        "|" + " --- |" * 8,
    ]
    found = {(run.arm, run.seed): run for run in runs}
    for seed in seeds:
        cells = [
            f"{found[arm, seed].average:.3f} / {found[arm, seed].passes:.3f}"
            if (arm, seed) in found
            else ""
            for arm in (*MAIN, "narrow")
        ]
        gate: Mapping[str, float] = found["sft", seed].gates
        shares = [
            f"{gate[name]:.1%}"
            for name in ("format errors", "p(right | hint)", "p(right)")
            if name in gate
        ]
        lines.append(f"| {' | '.join([str(seed), *cells, *shares])} |")
    return "\n".join(lines) + "\n"


def picture(runs: Sequence[ArmResult]) -> str:
    """Return validation curves as SVG: the mean over the seeds of each arm by step."""
    width, height, left, bottom = 760, 380, 50, 320
    shown = {
        "outcome": "#1f77b4",
        "hybrid": "#d62728",
        "privileged": "#2ca02c",
        "constant": "#ff7f0e",
        "shuffled": "#888888",
    }
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for tenth in range(0, 11, 2):
        y = bottom - tenth / 10 * 290
        parts.append(
            f'<path d="M{left} {y:.0f}H{width - 20}" stroke="#ddd"/>'
            f'<text x="14" y="{y + 4:.0f}">{tenth * 10}%</text>'
        )
    for index, (name, colour) in enumerate(shown.items()):
        curves = [run.curve for run in runs if run.arm == name]
        steps = sorted({step for curve in curves for step, _ in curve})
        means = [
            (step, fmean(v for curve in curves for s, v in curve if s == step)) for step in steps
        ]
        points = " ".join(
            f"{left + step / STEPS * 680:.1f},{bottom - value * 290:.1f}" for step, value in means
        )
        parts.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'
        )
        parts.append(
            f'<text x="{left + 110 * index}" y="{height - 30}" fill="{colour}">{name}</text>'
        )
    parts.append(
        f'<text x="{width - 20}" y="{height - 8}" text-anchor="end">steps, 0 to {STEPS}; share right on the validation '
        "stream, mean over seeds</text></svg>"
    )
    return "\n".join(parts) + "\n"


def write(runs: Sequence[ArmResult], found: Sequence[Figure]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    data = {
        "figures": [figure.as_json() for figure in found],
        "runs": [run._asdict() for run in runs],
    }
    RESULTS.write_text(json.dumps(data) + "\n")
    PICTURE.write_text(picture(runs))
    fill(
        PAGE, {"arms": f"{table(runs)}\n![Validation curves](hybrid.svg)\n", "seeds": by_seed(runs)}
    )


def main() -> int:
    options_of = parser("Does hindsight help?", "one seed of three arms, cut short", "hybrid", 5)
    options_of.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    options_of.add_argument("--attempts", type=Path, help=argparse.SUPPRESS)
    options_of.add_argument("--items", type=int, default=NUM_ITEMS, help=argparse.SUPPRESS)
    options = options_of.parse_args()
    if options.attempts is not None:
        attempts(options.attempts, options.items)
        return 0
    folder = folder_of(options)
    seeds = options.seeds[:1] if options.quick else options.seeds
    arms = ["outcome", "hybrid", "shuffled"] if options.quick else options.arms
    for index, seed in enumerate([] if options.report else seeds):
        for name in arms:
            if index < ARMS[name].num_seeds:
                run_arm(folder, name, seed, options.quick)
    runs = list(finished_runs(folder, seeds))
    found = list(figures(runs, options.quick))
    if not options.quick and set(options.arms) == set(ARMS):
        write(runs, found)
    return tell(found, options.json)


if __name__ == "__main__":
    sys.exit(main())
