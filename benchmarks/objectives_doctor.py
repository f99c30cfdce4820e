"""Test whether the doctor names the fault of a run: twelve broken runs, healthy runs, and the cost
of the metrics.

    python benchmarks/objectives_doctor.py           20 healthy runs
    python benchmarks/objectives_doctor.py --quick   5 healthy runs; within five minutes
    python benchmarks/objectives_doctor.py --json    also print the figures as JSON

All runs are on the small task of tests/train/small.py, from one policy that demonstrations taught to
write ``FINAL('b e a')``, or to ask a child for it. Each broken run is a function that returns the
run, and its name says what breaks it. The fault is there from the first step of rollouts, and the
first diagnosis must name it within three steps, or at the first evaluation if only that can show it.
A healthy run has no diagnosis at all.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import msgspec  # noqa: E402
from figures import Figure, show  # noqa: E402

from ramify.engine.limits import Limits  # noqa: E402
from ramify.errors import SandboxError, TrainError  # noqa: E402
from ramify.sandbox.base import SandboxSpec  # noqa: E402
from ramify.sandbox.providers.inprocess import InprocessSandbox  # noqa: E402
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated  # noqa: E402
from ramify.train import stages, trainer  # noqa: E402
from ramify.train.advantages.group_estimators import DrGRPO  # noqa: E402
from ramify.train.backends.base import OptimizerSpec  # noqa: E402
from ramify.train.build_trainer import opened_trainer  # noqa: E402
from ramify.train.config import (  # noqa: E402
    EvaluateSpec,
    PolicySpec,
    RlSpec,
    Run,
    Schedule,
    SftSpec,
    TaskSpec,
)
from ramify.train.execute import train  # noqa: E402
from ramify.train.learner import Learner, PolicyWeightTransfer  # noqa: E402
from ramify.train.load_run_parts import assemble  # noqa: E402
from ramify.train.metrics import Diagnosis, read_metrics  # noqa: E402
from ramify.train.resolve_run import resolve  # noqa: E402
from ramify.train.rollouts.group_queue import RolloutBatchSpec  # noqa: E402
from ramify.train.rollouts.rollouter import RolloutOptions  # noqa: E402
from ramify.train.signals.judge import ProcessRewardSignal, StepJudge  # noqa: E402
from ramify.train.signals.signal_composition import Hybrid  # noqa: E402
from ramify.train.signals.signal_term import HybridTerm  # noqa: E402
from ramify.train.training_guard import TrainingGuardSpec  # noqa: E402
from ramify.types.trajectory import Trajectory  # noqa: E402
from tests.train.small import SHAPE, _even, _make, small  # noqa: E402

HERE = str(Path(__file__).resolve())
WITHIN = 3
"""Number of steps after a fault within which the doctor must name it."""
SEEDS = range(100, 120)
"""Seeds of the healthy runs. They were chosen before the first run."""
MAX_SHARE = 0.03
"""Largest share of a step's CPU time that the metrics may cost."""
_LETTERS = "abcdefgh"


# --- the policy that all runs begin with


def demonstrations(path: Path, num: int, longest: int = 6, seed: int = 1) -> None:
    """Write conversations: a number is answered by letters, or by a child that is asked letters;
    letters are answered by letters."""
    rng = random.Random(seed)

    def letters() -> str:
        return " ".join(rng.choice(_LETTERS) for _ in range(rng.randint(1, longest)))

    rows = []
    for _ in range(num):
        kind, number = rng.random(), f"{rng.randrange(10**6)}?"
        if kind < 0.3:
            asked, reply = letters(), f"FINAL('{letters()}')"
        elif kind < 0.7:
            asked, reply = number, f"FINAL(rlm_query('{letters()}'))"
        else:
            asked, reply = number, f"FINAL('{letters()}')"
        messages = [{"role": "user", "content": asked}, {"role": "assistant", "content": reply}]
        rows.append(json.dumps({"messages": messages}))
    path.write_text("\n".join(rows) + "\n")


def taught(folder: Path) -> Path:
    """Return the folder of a policy that writes valid code and ends its replies."""
    demonstrations(folder / "demos.jsonl", 1500)
    run = small(
        policy=PolicySpec(shape=SHAPE, vocab_size=280, slots=16),
        scaffold="bare",
        warmup=None,
        rl=None,
        sft=SftSpec(
            demos=str(folder / "demos.jsonl"),
            num=1500,
            batch_tokens=2000,
            epochs=4,
            optim=OptimizerSpec(kind="muon", lr=1e-2),
        ),
        evaluate=EvaluateSpec(num=8, final=()),
    )
    train(run, folder / "taught")
    return folder / "taught" / "policy"


def healthy(policy: Path, seed: int = 0, *, steps: int = 8, **rl: Any) -> Run:
    """The run that is then broken."""
    options: dict[str, Any] = {
        "steps": steps,
        "sample": RolloutBatchSpec(items=4),
        "rollout": RolloutOptions(group=4, concurrency=16),
        "optim": OptimizerSpec(lr=1e-3),
    }
    return small(
        seed=seed,
        policy=PolicySpec(path=str(policy), slots=16),
        scaffold="bare",
        warmup=None,
        sft=None,
        limits=Limits(max_turns=2, max_depth=1, max_reply_tokens=24, max_seconds=300),
        rl=RlSpec(**(options | rl)),
        evaluate=EvaluateSpec(num=16, final=()),
        schedule=Schedule(evaluate_every=steps if steps < 4 else 4),
        guard=TrainingGuardSpec(),
    )


def _on(policy: Path, task: str, **changes: Any) -> Run:
    run = healthy(policy, steps=WITHIN)
    spec = TaskSpec(name=f"{HERE}:{task}", validate=False)
    return msgspec.structs.replace(run, task=spec, **changes)


# --- what breaks a run; each function returns the run


def rate_times_100(policy: Path) -> Run:
    return healthy(policy, steps=WITHIN, optim=OptimizerSpec(lr=0.1))


def negated_reward(policy: Path) -> Run:
    """Training items have rewards with the wrong sign. Validation has the right sign."""
    return _on(policy, "negated")


def no_end_token(policy: Path) -> Run:
    """Demonstrations that are cut before they end teach the policy to write on."""
    path = policy.parents[1] / "endless.jsonl"
    demonstrations(path, 200, longest=80, seed=2)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    endless = "FINAL('" + " ".join(random.Random(3).choices(_LETTERS, k=70))
    for row in rows:
        row["messages"][1]["content"] = endless
    path.write_text("\n".join(map(json.dumps, rows)) + "\n")
    sft = SftSpec(
        demos=str(path),
        num=200,
        batch_tokens=2000,
        epochs=2,
        optim=OptimizerSpec(kind="muon", lr=1e-2),
    )
    run = healthy(policy, steps=WITHIN)
    limits = msgspec.structs.replace(run.limits, max_turns=1)
    return msgspec.structs.replace(run, sft=sft, limits=limits)


def stale_weights(policy: Path) -> Run:
    """The engine has separate weights, and ``_execute`` lets no newer ones reach it."""
    run = healthy(policy, steps=WITHIN)
    return msgspec.structs.replace(
        run, policy=msgspec.structs.replace(run.policy, dtype="bfloat16")
    )


def constant_reward(policy: Path) -> Run:
    return _on(policy, "constant")


def wrong_chat_template(policy: Path) -> Run:
    """Replies end with a different token from the one that the policy has learned."""
    folder = policy.parents[1] / "wrong-template"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(policy, folder)
    (folder / "checksums.json").unlink()
    for name in ("chat_template.jinja", "tokenizer_config.json"):
        text = (folder / name).read_text()
        (folder / name).write_text(text.replace("<|end|>", "<|pad|>"))
    for name in ("config.json", "generation_config.json"):
        config = json.loads((folder / name).read_text())
        config.pop("eos_token_id", None)
        (folder / name).write_text(json.dumps(config))
    return healthy(folder, steps=WITHIN)


def children_cut(policy: Path) -> Run:
    """The root uses so many of the rollout's tokens that too few are left for a child's reply."""
    run = healthy(policy, steps=WITHIN)
    return msgspec.structs.replace(run, limits=msgspec.structs.replace(run.limits, max_tokens=120))


def negated_advantage(policy: Path) -> Run:
    return healthy(policy, steps=WITHIN, algorithm=NegatedAdvantage())


def judges_abstain(policy: Path) -> Run:
    path = policy.parents[1] / "mute.json"
    path.write_text(json.dumps([{"match": "Judge", "reply": "well, 11 of 10!"}]))
    judge = ProcessRewardSignal(judge=StepJudge(model=f"scripted:{path}"))
    terms = (HybridTerm(signal="process", weight=0.3),)
    return healthy(policy, steps=WITHIN, signals={"process": judge}, algorithm=Hybrid(terms=terms))


def items_too_hard(policy: Path) -> Run:
    return _on(policy, "impossible")


def reward_grows_with_length(policy: Path) -> Run:
    return _on(policy, "by_length")


def session_always_fails(policy: Path) -> Run:
    run = healthy(policy, steps=WITHIN)
    sandbox = SandboxSpec(provider=f"{HERE}:no_sessions", allow_weaker=True)
    return msgspec.structs.replace(run, sandbox=sandbox)


BROKEN: dict[Callable[[Path], Run], tuple[str, ...]] = {
    rate_times_100: ("divergence",),
    negated_reward: ("negated_reward",),
    no_end_token: ("endless_replies",),
    stale_weights: ("stale_engine",),
    constant_reward: ("constant_reward",),
    wrong_chat_template: ("wrong_template",),
    children_cut: ("dead_children",),
    negated_advantage: ("wrong_sign",),
    judges_abstain: ("judges_abstain",),
    items_too_hard: ("too_hard",),
    reward_grows_with_length: ("length_hacking",),
    session_always_fails: ("failed_rollouts",),
}
"""Map each broken run to the names of the findings that are correct for it."""


# --- their parts


class NegatedAdvantage(DrGRPO, frozen=True, kw_only=True):
    """``dr_grpo`` with the sign reversed."""

    def compare(self, returns: Any, lengths: Any = ()) -> list[float]:
        return [-value for value in super().compare(returns, lengths)]


def no_sessions(spec: SandboxSpec) -> NoSessions:
    """A provider whose sessions never start; see ``SandboxSpec.provider``."""
    return NoSessions(spec)


class NoSessions(InprocessSandbox):
    async def open(self, **_: Any) -> Any:
        raise SandboxError("the session's process ended before it answered")


class StaleHandle:
    """Publishes nothing: the engine keeps the weights that it has."""

    def __init__(self, weights: PolicyWeightTransfer) -> None:
        self._weights = weights
        self._behind = 0

    @property
    def version(self) -> int:
        return self._weights.version + self._behind

    async def publish(self) -> None:
        self._behind += 1

    async def put_engines_to_sleep(self) -> bool:
        return False

    def release_memory(self) -> None: ...

    def save(self, folder: Path) -> None:
        self._weights.save(folder)

    def load(self, folder: Path) -> None:
        self._weights.load(folder)


def _negated(item: Item, trajectory: Trajectory) -> float:
    reward = _even(item, trajectory)
    return -reward if "/train/" in item.id else reward


def _by_length(item: Item, trajectory: Trajectory) -> float:
    turns = [turn for call in trajectory.calls for turn in call.turns]
    return min(sum(len(turn.reply.token_ids or ()) for turn in turns) / 100, 0.99)


negated = DatasetTask("negated", generated("negated", _make), TrajectoryRewardFunction(_negated))
constant = DatasetTask("constant", generated("constant", _make), lambda answer, item: 0.5)
impossible = DatasetTask("impossible", generated("impossible", _make), lambda answer, item: 0.0)
by_length = DatasetTask("by length", generated("long", _make), TrajectoryRewardFunction(_by_length))


# --- running them


def _execute(run: Run, out: Path, *, is_stale: bool = False) -> list[tuple[int, Diagnosis]]:
    """Run a recipe, and return each diagnosis with the number of rollout steps before it."""
    if is_stale:
        asyncio.run(_with_stale_engine(run, out))
    else:
        with contextlib.suppress(TrainError):
            train(run, out)
    rows = list(read_metrics(out))
    before = max((row.step for row in rows if row.stage not in ("rl", "last", "best")), default=0)
    return [(row.step - before, each) for row in rows for each in row.diagnoses]


async def _with_stale_engine(run: Run, out: Path) -> None:
    async with opened_trainer(assemble(resolve(run)), out) as trainer:
        (learner,) = trainer._learners._all
        learner.publisher.policy = StaleHandle(learner.publisher.policy)  # type: ignore[arg-type]
        learner.publisher.check = None  # it would find the engine's old weights at once
        await trainer.run()


def broken_runs(
    folder: Path, policy: Path
) -> Iterator[tuple[Path, tuple[str, ...], list[tuple[int, Diagnosis]]]]:
    """Run each broken run; yield its folder, the correct names of its fault, and its diagnoses."""
    for breaks, right in BROKEN.items():
        out = folder / breaks.__name__
        yield out, right, _execute(breaks(policy), out, is_stale=breaks is stale_weights)


def healthy_run(folder: Path, policy: Path, seed: int) -> list[tuple[int, Diagnosis]]:
    """Run a healthy run in ``folder``; return its diagnoses, of which there should be none."""
    return _execute(healthy(policy, seed), folder)


def measure(quick: bool) -> Iterator[Figure]:
    """Return the figures of the doctor, for ``objectives.py``."""
    with tempfile.TemporaryDirectory(prefix="ramify-doctor-") as name:
        folder = Path(name)
        policy = taught(folder)
        named = {}
        for out, right, found in broken_runs(folder, policy):
            step, first = found[0] if found else (0, None)
            named[out.name] = (
                first is not None and first.name in right and step <= WITHIN,
                "nothing" if first is None else f"{first.name} at step {step}",
            )
            print(f"{out.name}: {named[out.name][1]}", file=sys.stderr)
        yield Figure(
            f"broken runs named rightly within {WITHIN} steps",
            float(sum(is_right for is_right, _ in named.values())),
            f"of {len(named)}",
            {name: text for name, (_, text) in named.items()},
            least=float(len(named)),
        )
        seeds = SEEDS[:5] if quick else SEEDS
        alarms = {}
        for seed in seeds:
            found = healthy_run(folder / f"healthy-{seed}", policy, seed)
            if found:
                alarms[f"seed {seed}"] = ", ".join(each.name for _, each in found)
                print(f"healthy run, seed {seed}: {alarms[f'seed {seed}']}", file=sys.stderr)
        yield Figure(
            f"alarms in {len(seeds)} healthy runs", float(len(alarms)), "runs", alarms, 0.0
        )
        share = cost(healthy(policy, steps=3), folder / "cost")
        yield Figure("CPU time of metrics, of a step's", share, "share", {}, MAX_SHARE)


def cost(run: Run, out: Path) -> float:
    """Share of the steps' CPU time that the metrics of samples and the doctor cost: with the
    steps of a usual size, 16 items with 8 rollouts each."""
    assert run.rl is not None
    rl = msgspec.structs.replace(
        run.rl, sample=RolloutBatchSpec(items=16), rollout=RolloutOptions(group=8, concurrency=32)
    )
    spent = [0.0]

    def timed(work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            started = time.thread_time()
            try:
                return work(*arguments, **options)
            finally:
                spent[0] += time.thread_time() - started

        return call

    with contextlib.ExitStack() as stack:
        for owner, name in (
            (stages, "rollout_sampling_metrics"),
            (stages, "advantage_reward_correlation"),
            (Learner, "probe"),
            (Learner, "metrics_before_update"),
            (Learner, "metrics_after_update"),
            (trainer, "check_step"),
        ):
            original = getattr(owner, name)
            setattr(owner, name, timed(original))
            stack.callback(setattr, owner, name, original)
        train(msgspec.structs.replace(run, rl=rl), out)
    rows = [row for row in read_metrics(out) if row.stage in ("first", "rl")]
    steps_s = sum(
        row.values["cpu_s"] - before.values["cpu_s"]
        for before, row in itertools.pairwise(rows)
        if "learn_s" in row.values
    )
    return spent[0] / steps_s


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="5 healthy runs")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    options = parser.parse_args()
    figures = list(measure(options.quick))
    show(figures)
    if options.json:
        print(json.dumps({"figures": [figure.as_json() for figure in figures]}))
    return int(any(figure.holds is False for figure in figures))


if __name__ == "__main__":
    sys.exit(main())
