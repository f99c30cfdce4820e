"""Simulation inputs measured from a run's folder, and the command that uses them."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest

from ramify.cli.parser import ExitCode, UsageError
from ramify.errors import ConfigError
from ramify.extras.cluster.plan_and_simulate_commands import SIMULATE
from ramify.extras.cluster.simulate import SimulationSetting, simulate
from ramify.extras.cluster.simulation_inputs import read_measured_run
from ramify.train.checkpoint import CheckpointedProgress, CheckpointStore
from ramify.train.config import EvaluateSpec, Schedule, SftSpec, TaskSpec
from ramify.train.data.sft_data import append_trajectories
from ramify.train.execute import train
from ramify.train.metrics import GROUPS, MetricsFile, RolloutGroupRecord
from ramify.types.message import Message, Reply, Usage
from ramify.types.trajectory import Call, Cell, Trajectory, Turn
from tests.train.small import small

TOKEN_S, READY_S, LEARN_S, PUBLISH_S, EVALUATE_S = 0.01, 0.2, 3.0, 0.5, 7.0


def rollout(name: str, started_at: float, tokens: int) -> Trajectory:
    """A rollout of one request, at 0.01 s per token, and one cell of 0.1 s."""
    seconds = TOKEN_S * tokens
    reply = Reply(
        Message("assistant", ""),
        Usage(20, tokens, calls=1),
        prompt_ids=(1,) * 20,
        token_ids=(2,) * tokens,
        seconds=seconds,
    )
    call = Call(
        "0",
        "rlm",
        "m",
        0,
        "?",
        turns=[Turn(0, (), reply, (Cell("", seconds=0.1),))],
        ended_s=seconds + 0.1,
    )
    return Trajectory(
        name, "?", task="i", calls=[call], seconds=seconds + 0.1, started_at=started_at
    )


def folder(out: Path, steps: int = 4, items: int = 3, group: int = 2, **rollouts: object) -> Path:
    """Write the folder of a synchronous run that evaluates after step 2. Rollouts of a step start
    together; the longest has 100 tokens."""
    out.mkdir()
    draw, metrics, at_s = random.Random(0), MetricsFile(out), 0.0
    (out / "rollouts").mkdir()
    for step in range(1, steps + 1):
        lengths = [100, *(draw.randrange(5, 100) for _ in range(items * group - 1))]
        trees = [
            rollout(
                f"step={step}/group={index // group}/rollout={index % group}", 1000.0 + at_s, tokens
            )
            for index, tokens in enumerate(lengths)
        ]
        append_trajectories(out / f"rollouts/step-{step:06d}.jsonl", trees)
        work_s = TOKEN_S * 100 + 0.1 + READY_S
        at_s += work_s + LEARN_S + PUBLISH_S
        metrics.write(step, "rl", at_s, {"work_s": work_s, "learn_s": LEARN_S, "items": items * 2})
        if step == 2:
            at_s += EVALUATE_S
            metrics.write(step, "rl", at_s, {"evaluate_s": EVALUATE_S})
    sample, told = (
        {"items": items, "max_items": 9, "straggler_factor": 3.0, **rollouts},
        {"group": group, "concurrency": 64},
    )
    state = CheckpointedProgress(
        step=steps, config={"rl": {"sample": sample, "rollout": told}, "policy": {"slots": 32}}
    )
    CheckpointStore(out).save(state, {})
    accounts = [
        RolloutGroupRecord(
            number=number,
            item="i",
            version=0,
            outcome="no_signal" if number % 3 == 0 else "learnt",
            rollouts=[],
        )
        for number in range(9)
    ]
    GROUPS.append(out, [msgspec.structs.replace(each, step=1) for each in accounts])
    return out


def test_measured_inputs_match_the_run_folder(tmp_path: Path) -> None:
    found = read_measured_run(folder(tmp_path / "run"))
    assert (len(found.groups), {len(group) for group in found.groups}) == (12, {2})
    sizes = found.sizes
    assert (
        sizes.items,
        sizes.group,
        sizes.concurrency,
        sizes.slots,
        sizes.engines,
        sizes.ranks,
    ) == (
        3,
        2,
        64,
        32,
        1,
        1,
    )
    assert (sizes.staleness, sizes.max_items, sizes.straggler_factor) == (0, 9, 3.0)
    assert found.rate.decode_step_s(3) == pytest.approx(TOKEN_S)
    assert found.rate.prompt_token_s == pytest.approx(0, abs=1e-9)
    assert found.step_s == pytest.approx([1.3 + 3.5] * 3)
    assert found.publish_s == pytest.approx([0.5] * 3)
    assert found.prepare_s == pytest.approx([READY_S] * 4)
    assert found.draw_learning_times(
        random.Random(0), sum(each.trainer_tokens for each in found.groups[0]) * 3, 1
    )[0] == pytest.approx(3, rel=0.5)
    assert found.zero_variance == pytest.approx(1 / 3)
    assert len(read_measured_run(tmp_path / "run", last=1).groups) == 3


def test_simulation_of_the_same_setting_predicts_the_run(tmp_path: Path) -> None:
    found = read_measured_run(folder(tmp_path / "run"))
    found.zero_variance = 0.0
    same = SimulationSetting(items=3, group=2, concurrency=64, slots=32)
    steps = [
        simulate(found, same, steps=12, in_order=in_order).step_mean_s for in_order in (True, False)
    ]
    assert steps == [pytest.approx(1.3 + 3.5, rel=0.1), pytest.approx(1.3 + 3.5, rel=0.2)]


def test_inputs_are_measured_from_a_real_run(tmp_path: Path) -> None:
    sft, evaluate = (
        SftSpec(demos="ledger", num=4, task=TaskSpec(options={"rows": [4, 6]})),
        EvaluateSpec(num=1, final=()),
    )
    train(
        small(
            warmup=None,
            sft=sft,
            evaluate=evaluate,
            schedule=Schedule(evaluate_every=None, save_rollouts_every=1),
        ),
        tmp_path / "run",
    )
    found = read_measured_run(tmp_path / "run")
    assert (found.sizes.items, found.sizes.group, found.sizes.concurrency, found.sizes.slots) == (
        2,
        3,
        1,
        16,
    )
    assert (len(found.groups), len(found.step_s)) == (8, 3)
    assert found.learn_base_s + found.learn_token_s > 0
    assert simulate(found, SimulationSetting(items=2, group=3, concurrency=1), steps=2).step_s > 0
    assert found.host is not None
    assert found.host.request_s > 0
    assert len(found.computed_s) == 4
    same = SimulationSetting(items=2, group=3, concurrency=1, slots=16, keeps=True, embedded=True)
    once = simulate(found, same, steps=2, in_order=True)
    assert 0.3 < once.computed_s / (sum(found.computed_s) / 4) < 3


@pytest.mark.parametrize(
    ("lacks", "says"),
    [
        ("all", r"nowhere is not a run's folder: give the --out of ramify train"),
        (
            "metrics.jsonl",
            r"no metrics.jsonl with steps of reinforcement learning: .*schedule\.save_rollouts_every=1",
        ),
        (
            "rollouts",
            r"no saved rollouts of its 4 steps: train with schedule\.save_rollouts_every=1",
        ),
        ("a step", r"run has one step of reinforcement learning, .* give a run of at least two"),
        ("sense", r"step-000002.jsonl does not contain trajectories"),
    ],
)
def test_run_folder_without_needed_data_is_refused(tmp_path: Path, lacks: str, says: str) -> None:
    run = folder(tmp_path / "run")
    if lacks == "metrics.jsonl":
        (run / lacks).unlink()
    elif lacks == "rollouts":
        for path in (run / lacks).iterdir():
            path.unlink()
    elif lacks == "a step":
        (run / "metrics.jsonl").write_text(
            (run / "metrics.jsonl").read_text().splitlines()[0] + "\n"
        )
    elif lacks == "sense":
        (run / "rollouts/step-000002.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=says):
        read_measured_run(tmp_path / "nowhere" if lacks == "all" else run)


def test_simulate_command_prints_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(folder(tmp_path / "run"))
    assert (
        SIMULATE.call([run, "--devices", "3", "--staleness", "0,1", "--steps", "3"])
        == ExitCode.ANSWERED
    )
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "based on 24 rollouts in 12 groups; the run had 3 groups of 2 per step"
    head = next(
        number
        for number, line in enumerate(said)
        if line.split()[:4] == ["engines", "slots", "ranks", "stale"]
    )
    assert [line.partition(":")[0] for line in said[3:head]] == [
        "assumed",
        "assumed",
        "assumed",
        "assumed of caches",
        "assumed of evaluations",
        "",
    ]
    assert len(said) == head + 1 + 6 + 1
    hours = [float(line.replace(" shared", "").split()[6]) for line in said[head + 1 : -1]]
    assert hours == sorted(hours, reverse=True)
    assert said[-1].startswith("most steps per hour: ")
    asked = [
        run,
        "--engines",
        "1,2",
        "--slots",
        "4",
        "--straggler-factor",
        "0",
        "--steps",
        "3",
        "--seed",
        "5",
        "--json",
    ]
    assert SIMULATE.call(asked) == ExitCode.ANSWERED
    first = capsys.readouterr().out
    assert SIMULATE.call(asked) == ExitCode.ANSWERED
    assert capsys.readouterr().out == first
    told = json.loads(first)
    assert [
        (each["setting"]["engines"], each["setting"]["slots"]) for each in told["predicted"]
    ] == [(1, 4), (2, 4)]
    assert told["measured"]["sizes"]["slots"] == 32


def test_impossible_or_too_many_settings_are_refused(tmp_path: Path) -> None:
    run = str(folder(tmp_path / "run"))
    with pytest.raises(
        ConfigError,
        match="3 devices are too few for an engine of 4: give more, or lower --engine-devices",
    ):
        SIMULATE.call([run, "--devices", "3", "--engine-devices", "4"])
    with pytest.raises(
        ConfigError,
        match=r"100000 settings over 20 steps are .* rollouts, and at most .* are simulated: try",
    ):
        SIMULATE.call([run, "--devices", "100000"])


def test_evaluations_reduce_steps_per_hour_but_not_step_time(tmp_path: Path) -> None:
    """An evaluation of 7 s follows every second step of 4.8 s."""
    found = read_measured_run(folder(tmp_path / "run"))
    found.zero_variance = 0.0
    plain, evaluated = (
        simulate(
            found,
            SimulationSetting(items=3, group=2, concurrency=64, slots=32, evaluate=every),
            steps=6,
        )
        for every in (0, 2)
    )
    assert evaluated.step_mean_s == pytest.approx(plain.step_mean_s)
    assert evaluated.steps_per_hour == pytest.approx(3600 / (plain.step_mean_s + EVALUATE_S / 2))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--devices", "4", "--engines", "2"],
            "--devices tries every split: remove --engines and --ranks",
        ),
        (["--engines", "two"], "--engines two: give numbers separated by commas: 1,2,4"),
        (["--slots", "0"], "--slots 0: each must be at least 1"),
        (["--staleness", "-1"], "--staleness -1: each must be at least 0"),
        (["--steps", "0"], "--steps 0: give 1 or more"),
        (["--devices", "0"], "--devices 0: give 1 or more"),
        (
            ["--engine-devices", "2"],
            "--engine-devices applies to --devices: give --devices as well",
        ),
        (["--engines", "1,,2"], "--engines 1,,2: give numbers separated by commas: 1,2,4"),
        (
            ["--straggler-factor", "nan"],
            "--straggler-factor nan: give a multiple of the median that is at least 1, or 0 for never",
        ),
        (["--grace-steps", "-1"], "--grace-steps -1: give 0 or more"),
    ],
)
def test_invalid_options_are_refused(tmp_path: Path, options: list[str], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        SIMULATE.call([str(tmp_path), *options])
