"""Rollouts in separate processes: the run equals the run in one process; a dead rollout worker is
reported, and its rollouts are still sampled."""

from __future__ import annotations

import asyncio
import datetime
import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.actors.launcher import LocalLauncher
from ramify.clients.base import Sampling
from ramify.errors import ConfigError, TrainError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.tasks.base import Item
from ramify.train.call_depth_models import DepthSpec
from ramify.train.config import Run, TaskSpec
from ramify.train.data.sft_data import read as trajectories
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.placement.placement_spec import PlacementSpec, RoleSpec
from ramify.train.placement.rollout_worker import RolloutWorkerSpec, SerializedTaskItem
from ramify.train.placement.rollout_workers import RolloutWorkers
from ramify.train.placement_plan import plan_placement
from ramify.types.message import Message
from ramify.types.trajectory import Trajectory
from tests.shown import heard, logged, train
from tests.train.backends.test_ranks import tuned
from tests.train.rollouts import test_scored_steps as scored_steps

ONE_WORKER = PlacementSpec(rollouts=RoleSpec(count=1))


def short(**changes: Any) -> Run:
    """Two steps that save their rollouts, with a weight update between them."""
    run = tuned(**changes)
    return msgspec.structs.replace(
        run,
        schedule=msgspec.structs.replace(run.schedule, evaluate_every=None, save_rollouts_every=1),
    )


def sampled(out: Path) -> list[tuple[Any, ...]]:
    """Return everything about the saved rollouts except their times."""
    files = sorted((out / "rollouts").iterdir())
    return [without_times(tree) for file in files for tree in trajectories(file)]


def without_times(tree: Trajectory) -> tuple[Any, ...]:
    replies = [turn.reply for call in tree.calls for turn in call.turns]
    ids = [(reply.prompt_ids, reply.token_ids, reply.versions) for reply in replies]
    return (
        tree.id,
        tree.task,
        tree.answer,
        tree.rewards,
        ids,
        [value for r in replies for value in r.logprobs or ()],
    )


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_run_with_rollout_worker_matches_one_process_even_if_worker_is_lost(tmp_path: Path) -> None:
    depths = (DepthSpec(temperature=1.8, max_turns=1),)
    train(short(depths=depths), tmp_path / "one")
    killed: list[str] = []

    def kill(measured: StepMetrics) -> None:
        if "loss" in measured.values and not killed:
            pid = next(workers_with(str(tmp_path)))
            os.kill(pid, signal.SIGSTOP)  # so that it does not finish its next rollout
            threading.Timer(1.0, os.kill, (pid, signal.SIGKILL)).start()
            killed.append(
                f"rollout worker 0 (process {pid} on {os.uname().nodename}) is lost: it was killed "
                "by signal 9; its log ends: "
            )

    messages: list[str] = []
    run = short(inference=InferenceSpec(), placement=ONE_WORKER, depths=depths)
    os.environ["RAMIFY_TEST_PLACE"] = str(tmp_path)
    try:
        train(run, tmp_path / "two", listener=kill, say=messages.append, inform=messages.append)
    finally:
        del os.environ["RAMIFY_TEST_PLACE"]
    ours, theirs = sampled(tmp_path / "two"), sampled(tmp_path / "one")
    assert len(ours) == len(theirs) == 12
    for (*fields, logprobs), (*other, expected) in zip(ours, theirs, strict=True):
        assert fields == other
        assert logprobs == pytest.approx(expected, abs=1e-5)
    losses = [
        [row.values["loss"] for row in read_metrics(tmp_path / name) if "loss" in row.values]
        for name in ("one", "two")
    ]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)
    lost = next(number for number, text in enumerate(messages) if text.startswith(killed[0]))
    assert messages[lost].endswith("0 other workers remain; it is restarted")
    assert re.match(r"rollout worker 0 is back \(process \d+ on ", messages[lost + 1])
    assert logged(tmp_path / "two", "restart") == [("two", "")]
    assert not list(workers_with(str(tmp_path)))


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_step_of_rollout_workers_is_scored_by_the_run_with_one_call(tmp_path: Path) -> None:
    task = TaskSpec(name="tests.train.rollouts.test_scored_steps:ranked", validate=False)
    scored_steps.calls.clear()
    train(short(inference=InferenceSpec(), placement=ONE_WORKER, task=task), tmp_path)
    rewards = [rewards for _, _, _, rewards, *_ in sampled(tmp_path)]
    assert len(rewards) == 12
    assert all(0 < each["rank"] <= 1 for each in rewards)
    steps = [num for num in scored_steps.calls if num == 6]
    assert (len(steps), sum(steps)) == (2, 12)


def workers_with(text: str) -> Any:
    """Ids of the rollout workers that have ``text`` in their environment."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            command = (path.parent / "cmdline").read_bytes()
            found = path.read_bytes()
        except OSError:
            continue
        if text.encode() in found and b"ramify.train.placement.rollout_worker" in command:
            yield int(path.parent.name)


class NoEngines:
    """Engines at an address where no server listens."""

    version = 0
    up_to_date_urls = ("http://127.0.0.1:9",)

    async def handle_reported_loss(self, url: str, who: str) -> None: ...


def test_rollout_worker_that_cannot_start_reports_the_reason(tmp_path: Path) -> None:
    run = short()
    spec = RolloutWorkerSpec(
        name="x",
        task="nonesuch",
        options={},
        scaffold="tiny",
        limits=run.limits,
        sandbox=run.sandbox,
        inference=InferenceSpec(urls=("http://127.0.0.1:9",), probe_s=0.1),
        checkpoint=str(run.policy.path),
        dtype="float32",
        grace_s=1.0,
    )

    async def begin() -> None:
        await RolloutWorkers(
            LocalLauncher(), 1, spec, tmp_path, NoEngines(), seen=lambda paths: None
        ).start()

    with pytest.raises(ConfigError, match="rollout worker 0 cannot start: unknown task 'nonesuch'"):
        asyncio.run(begin())


def test_rollout_workers_need_engines_over_http() -> None:
    with pytest.raises(ConfigError, match="rollout workers call engines over HTTP: set inference"):
        plan_placement(tuned(placement=ONE_WORKER))
    rl = tuned().rl
    assert rl is not None
    stale = msgspec.structs.replace(rl, sample=msgspec.structs.replace(rl.sample, max_staleness=1))
    with pytest.raises(ConfigError, match=r"needs inference\.engine=ramify"):
        plan_placement(
            tuned(rl=stale, inference=InferenceSpec(engine="vllm"), placement=ONE_WORKER)
        )


def test_items_keep_the_types_of_their_values() -> None:
    item = Item(
        "q",
        context={"rows": [(1, "a"), (2, b"b")], 3: {4.5, None}},
        gold=(1, float("inf")),
        right={"a"},
        kind="k",
        id="task/train/1",
        metadata={"day": datetime.date(2026, 1, 2), "pairs": ((1, 2),)},
        messages=(Message("system", "be brief"), Message("assistant", "hm", reasoning="why")),
    )
    assert SerializedTaskItem.from_item(item).to_item() == item
    assert type(SerializedTaskItem.from_item(item).to_item().context["rows"][0]) is tuple
    with pytest.raises(ConfigError, match="the item 'x/1' cannot be sent to a rollout worker: a"):
        SerializedTaskItem.from_item(Item("q", id="x/1", gold=object()))


SILENT = """
import sys, time
from ramify.actors.connect_back import connect_back
from ramify.train.placement.rollout_worker import RolloutWorkerSpec, RolloutWorkerMessage
channel = connect_back()
channel.receive(RolloutWorkerSpec)
channel.send(RolloutWorkerMessage("ready"))
print("it hangs", flush=True)
time.sleep(1000)
"""
ENDS = SILENT.replace("time.sleep(1000)", "sys.exit(5)")


class ReplacementLauncher(LocalLauncher):
    """Starts another program instead of each worker."""

    def __init__(self, program: str) -> None:
        super().__init__()
        self._program = program

    def start(
        self, member: Any, command: Any, environment: Any, log: Path, stdin: bytes = b""
    ) -> Any:
        command = [sys.executable, "-c", self._program]
        return super().start(member, command, environment, log, stdin)


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (SILENT, r"rollout worker 0 \(process \d+ on .*\) is lost: no heartbeat for 1 s"),
        (
            ENDS,
            r"rollout worker 0 \(.*\) is lost: it ended with status 5; its log ends: .*it hangs",
        ),
    ],
)
def test_worker_lost_more_often_than_restarts_is_given_up(
    program: str, reason: str, tmp_path: Path
) -> None:
    run, messages = short(), []
    spec = RolloutWorkerSpec(
        name="x",
        task="nonesuch",
        options={},
        scaffold="tiny",
        limits=run.limits,
        sandbox=run.sandbox,
        inference=InferenceSpec(),
        checkpoint="",
        dtype="float32",
        grace_s=1.0,
    )

    async def ask() -> None:
        workers = RolloutWorkers(
            ReplacementLauncher(program),
            1,
            spec,
            tmp_path,
            NoEngines(),
            seen=lambda paths: None,
            restarts=1,
            heartbeat_s=1.0,
        )
        await workers.start()
        try:
            await workers.sample_rollout(Item("question"), "a", Sampling())
        finally:
            await workers.close()

    with (
        heard(messages.append),
        pytest.raises(TrainError, match=f"no rollout worker is left: {reason}"),
    ):
        asyncio.run(ask())
    assert [each.rpartition("; ")[2] for each in messages] == ["it is restarted", "it is given up"]
