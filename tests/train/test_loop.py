"""The training loop over real parts: a policy created from scratch, its engine, in-process
sessions, and the trainer.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.clients.base import Request, Sampling
from ramify.errors import ConfigError, TrainError
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import SamplingDefaults, load_policy
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.train.advantages.sft import SFT
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.checkpoint import CheckpointStore, read_state
from ramify.train.config import PolicySpec, Schedule, SftSpec, TaskSpec
from ramify.train.data.pack import pack
from ramify.train.data.sft_data import read as read_trajectories
from ramify.train.losses.total_loss import LossSpec
from ramify.train.metrics import StepMetrics, read_metrics
from ramify.train.run_record import FinalPolicyInfo, RewardConfidenceInterval
from ramify.train.stages import Minibatch, OfflineDataStage, StepData
from ramify.train.training_guard import TrainingGuardSpec
from ramify.types.message import Message
from ramify.types.training_sequences import TokenSequence
from ramify.types.trajectory import Trajectory
from tests.shown import train
from tests.train.backends.small import policy, tree
from tests.train.small import Unpublished, _even, _make, not_evaluated, small, weights_of
from tests.train.trainers import trainer_over


class Killed(BaseException):
    """Ends a run at any point, as a signal would."""


def kill_at(step: int) -> Callable[[StepMetrics], None]:
    def listen(measured: StepMetrics) -> None:
        if measured.step == step:
            raise Killed

    return listen


def same(first: Path, second: Path) -> bool:
    ours, theirs = weights_of(first), weights_of(second)
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_killed_and_resumed_run_is_bit_identical(tmp_path: Path) -> None:
    """Warm-up, SFT and RL; killed once during each of the last two stages, between checkpoints."""
    run = small(schedule=Schedule(evaluate_every=2, checkpoint_every=2, keep_last=1))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    state = train(run, whole, say=pytest.fail)
    rl = read_rows(whole, "rl")
    assert [row.step for row in rl] == [
        state.step - 3,
        state.step - 2,
        state.step - 2,
        state.step - 1,
        state.step,
        state.step,
    ]
    with pytest.raises(Killed):
        train(run, broken, listener=kill_at(5))
    for step in (state.step - 1, None):
        resumed = read_state(CheckpointStore(broken).all()[-1])
        assert resumed.step < state.step
        listener = None if step is None else kill_at(step)
        if step is None:
            train(run, broken, resume=broken)
        else:
            with pytest.raises(Killed):
                train(run, broken, resume=broken, listener=listener)
    assert same(whole, broken)
    assert [(row.step, row.stage) for row in read_metrics(whole)] == [
        (row.step, row.stage) for row in read_metrics(broken)
    ]
    steady = ("loss", "reward", "grad_norm", "lr", "validation/reward", "test/reward")
    for ours, theirs in zip(read_metrics(whole), read_metrics(broken), strict=True):
        assert {k: ours.values.get(k) for k in steady} == {k: theirs.values.get(k) for k in steady}


def test_resuming_from_earlier_checkpoint_abandons_the_later_ones(
    tmp_path: Path,
) -> None:
    """Resumed in place from the start of RL: later checkpoints become an abandoned branch, even if
    the run is then killed."""
    run, said = (
        small(
            warmup=None,
            schedule=Schedule(
                evaluate_every=None, checkpoint_every=1, keep_last=9, save_rollouts_every=1
            ),
        ),
        [],
    )
    last = train(run, tmp_path, say=pytest.fail).step
    ended = weights_of(tmp_path)
    folder = tmp_path / "checkpoints"
    middle, aside = folder / f"step-{last - 4:06d}", folder / "abandoned"
    with pytest.raises(Killed):
        train(run, tmp_path, resume=middle, listener=kill_at(last - 1), say=said.append)
    assert said == [
        f"the run goes back to step {last - 4}: 4 checkpoints of later steps are moved to {aside}"
    ]
    assert [read_state(path).step for path in sorted(aside.iterdir())] == [
        last - 3,
        last - 2,
        last - 1,
        last,
    ]
    assert CheckpointStore(tmp_path).latest() == folder / f"step-{last - 2:06d}"
    assert max(each.step for each in read_metrics(tmp_path)) == last - 1
    assert len([*(tmp_path / "rollouts").iterdir()]) == 2
    train(run, tmp_path, resume=tmp_path, say=pytest.fail)
    assert all(torch.equal(ended[name], each) for name, each in weights_of(tmp_path).items())
    assert len(read_rows(tmp_path, "first")) == 1
    with pytest.raises(ConfigError, match="already contains a run"):
        train(run, tmp_path, resume=aside / f"step-{last:06d}")


JUDGED: list[str] = []
"""Validation items that were scored."""


def _down_at_second(item: Item, trajectory: Trajectory) -> float:
    """A grader that is down during the second of three evaluations (two items each) and gives the
    first the best score."""
    if "/validation/" not in item.id or not trajectory.calls[0].turns:
        return _even(item, trajectory)
    JUDGED.append(item.id)
    if len(JUDGED) in (3, 4):
        raise OSError("the grader is down")
    return 0.5 if len(JUDGED) < 3 else 0.25


SAMPLINGS = [
    Sampling(8),
    Sampling(8, seed=1),
    Sampling(8, temperature=0.0),
    *(Sampling(8, temperature=1.0, seed=n) for n in (1, 2)),
]
"""Two without a temperature, one at 0, two at 1."""
sometimes = DatasetTask(
    "sometimes", generated("sometimes", _make), TrajectoryRewardFunction(_down_at_second)
)


def test_best_policy_may_be_the_one_before_rl(tmp_path: Path) -> None:
    """An evaluation that could not be scored gives no score, and no score of older weights is
    kept."""
    JUDGED.clear()
    said: list[str] = []
    told: list[str] = []
    run = small(
        warmup=None,
        task=TaskSpec(name="tests.train.test_loop:sometimes"),
        guard=TrainingGuardSpec(patience=1),
        schedule=Schedule(evaluate_every=2, checkpoint_every=1, keep_last=9),
    )
    state = train(run, tmp_path, say=said.append, inform=told.append)
    shown = [each.values for each in read_metrics(tmp_path) if "validation/failed" in each.values]
    assert [(each.get("validation/reward"), each["validation/failed"]) for each in shown] == [
        (0.5, 0),
        (None, 2),
        (0.25, 0),
    ]
    (sentence,) = [each for each in said if each.startswith("validation")]
    reason, _, place = sentence.partition(", at ")
    assert reason == (
        "validation: all 2 attempts failed for reasons outside the policy: this evaluation has "
        "no score; the first: task "
        f"'sometimes', item {JUDGED[2]}: its score raised OSError: the grader is down"
    )
    assert place.startswith(__file__)
    assert place.endswith(" (_down_at_second)")
    kept = CheckpointStore(tmp_path)
    assert [read_state(each).score for each in kept.all()][-5:] == [0.5, None, None, None, 0.25]
    first, last = kept.all()[-5], kept.all()[-1]
    assert (kept.best(), kept.latest()) == (first, last)
    assert state.step == read_state(first).step + 4
    left, began, ended = (weights_of(each) for each in (tmp_path, first, last))
    assert all(torch.equal(left[name], began[name]) for name in left)
    assert not all(torch.equal(left[name], ended[name]) for name in left)
    assert [row.values.keys() >= {"test/reward"} for row in read_rows(tmp_path, "best")] == [True]
    kept_policy = read_policy(tmp_path)
    assert (kept_policy.is_best, kept_policy.step, kept_policy.last_step) == (
        True,
        state.step - 4,
        state.step,
    )
    assert list(kept_policy.scores) == ["validation", "test"]
    assert kept_policy.scores["validation"] == RewardConfidenceInterval(0.5, 0.5, 0.5)
    assert told[-1] == str(kept_policy)
    again = msgspec.structs.replace(
        run, evaluate=msgspec.structs.replace(run.evaluate, keep="last")
    )
    train(again, tmp_path, resume=tmp_path)
    left = weights_of(tmp_path)
    assert all(torch.equal(left[name], ended[name]) for name in left)
    kept_policy = read_policy(tmp_path)
    assert (kept_policy.is_best, kept_policy.step) == (False, state.step)
    assert kept_policy.scores["validation"].reward == 0.25


def read_policy(folder: Path) -> FinalPolicyInfo:
    return msgspec.json.decode((folder / "policy.json").read_bytes(), type=FinalPolicyInfo)


def _slowly_even(item: Item, trajectory: Trajectory) -> float:
    """The same scores, each after a different delay."""
    time.sleep(0.01 * (len(trajectory.id) % 3))
    return _even(item, trajectory)


slow = DatasetTask("even", generated("even", _make), TrajectoryRewardFunction(_slowly_even))


def test_same_seed_gives_same_policy_however_long_rollouts_take(tmp_path: Path) -> None:
    """Rollouts run one at a time, so that the engine computes the same batches."""
    for name in ("even", "slow"):
        run = small(
            warmup=None,
            task=TaskSpec(name=f"tests.train.{'small' if name == 'even' else 'test_loop'}:{name}"),
        )
        train(run, tmp_path / name)
    quick, slowly = (weights_of(tmp_path / name) for name in ("even", "slow"))
    assert all(torch.equal(quick[name], slowly[name]) for name in quick)


def test_trained_policy_samples_at_temperature_0_by_default(
    tmp_path: Path,
) -> None:
    """Rollouts are sampled at 1, but a served policy should give its likeliest answer. Every
    checkpoint stores this default, too."""
    train(small(warmup=None), tmp_path)
    for folder in (tmp_path, *tmp_path.glob("checkpoints/step-*")):
        policy = load_policy(folder / "policy")
        assert policy.defaults == SamplingDefaults(temperature=0.0)
    client = LocalClient(policy, slots=1)
    try:
        replies = [
            asyncio.run(client.complete(Request((Message("user", "?"),), each)))
            for each in SAMPLINGS
        ]
    finally:
        asyncio.run(client.close())
    unsaid, again, greedy, *warm = [reply.token_ids for reply in replies]
    assert unsaid == again == greedy
    assert len({*warm}) > 1


def read_rows(out: Path, stage: str) -> list[StepMetrics]:
    return [row for row in read_metrics(out) if row.stage == stage]


def test_metrics_and_final_policy_are_written(tmp_path: Path) -> None:
    run = small(warmup=None)
    state = train(run, tmp_path)
    first = read_rows(tmp_path, "rl")[0].values
    assert {
        "reward",
        "loss",
        "grad_norm",
        "lr",
        "sampled_tokens",
        "given_tokens",
        "tokens_per_s",
        "mismatch_max",
        "cpu_s",
    } <= set(first)
    assert first["mismatch_max"] < 1e-5
    assert first["split_turns"] == 0
    assert [row.values.keys() >= {"test/reward"} for row in read_rows(tmp_path, "last")] == [True]
    assert (state.stage, state.next_item) == (2, 30 + 4 * 2)
    best = CheckpointStore(tmp_path).best()
    assert best is not None
    loaded = Path(tmp_path / "policy")
    assert (loaded / "config.json").is_file()
    assert (loaded / "tokenizer.json").is_file()


def test_saved_rollouts_can_be_used_for_rejection_sampling(tmp_path: Path) -> None:
    run = small(warmup=None, schedule=Schedule(save_rollouts_every=2))
    train(run, tmp_path / "rl")
    kept = list(read_trajectories(tmp_path / "rl/rollouts"))
    noted = [each.metadata.get("advantages") for each in kept]
    assert any(noted)
    assert all(
        {key.split("/")[0] for key in each} <= {call.id for call in tree.calls}
        for each, tree in zip(noted, kept, strict=True)
        if each
    )
    assert [
        len(list(read_trajectories(path))) for path in sorted((tmp_path / "rl/rollouts").iterdir())
    ] == [6, 6]
    rewards = sorted(trajectory.rewards["correct"] for trajectory in kept)
    best = SFT(min_reward=rewards[-4])
    sft = SftSpec(trajectories=str(tmp_path / "rl/rollouts"), algorithm=best, batch_tokens=10_000)
    policy = PolicySpec(path=str(tmp_path / "rl/policy"))
    train(small(policy=policy, warmup=None, rl=None, sft=sft), tmp_path / "sft")
    (row,) = read_rows(tmp_path / "sft", "sft")[:1]
    said = [call.turns for t in kept if t.rewards["correct"] >= rewards[-4] for call in t.calls]
    assert row.values["row_tokens"] == sum((turns[-1].num_ids or 0) for turns in said)


def test_step_without_signal_is_logged_and_leaves_weights_unchanged(tmp_path: Path) -> None:
    said: list[str] = []
    run = small(task=msgspec.structs.replace(small().task, name="tests.train.small:zero_variance"))
    rl = msgspec.structs.replace(run.rl, steps=1)
    train(msgspec.structs.replace(run, rl=rl), tmp_path, say=said.append)
    assert said[0].endswith(
        "(rl) has nothing to learn from: in each of 2 groups all rollouts did equally well"
    )
    (row, _) = read_rows(tmp_path, "rl")
    assert (row.values["no_signal"], "loss" in row.values) == (1, False)
    before, after = (
        torch.load(path / "backend/backend.pt")["weights"]
        for path in CheckpointStore(tmp_path, 9).all()[-2:]
    )
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_step_with_only_failed_rollouts_ends_the_run(tmp_path: Path) -> None:
    run = small(
        task=msgspec.structs.replace(small().task, name="tests.train.small:failing"), warmup=None
    )
    with pytest.raises(
        TrainError,
        match=r"^step \d+ \(rl\): all 6 rollouts failed: 6 times: .*the grader is down, at .*; repair ",
    ):
        train(run, tmp_path)


def test_non_finite_loss_stops_the_run_after_a_checkpoint(
    tmp_path: Path,
) -> None:
    run = small(warmup=None, rl=None)
    sft = msgspec.structs.replace(run.sft, optim=OptimizerSpec(lr=1e30, warmup_steps=0))
    with pytest.raises(TrainError, match="not finite"):
        train(
            msgspec.structs.replace(run, sft=sft, schedule=Schedule(checkpoint_every=1)), tmp_path
        )
    assert CheckpointStore(tmp_path).latest() == tmp_path / "checkpoints/step-000001"


def test_dynamic_sampling_tries_more_items(tmp_path: Path) -> None:
    run = small(task=msgspec.structs.replace(small().task, name="tests.train.small:zero_variance"))
    rl = msgspec.structs.replace(run.rl, steps=1)
    sample = msgspec.structs.replace(rl.sample, max_items=5)
    state = train(
        msgspec.structs.replace(run, rl=msgspec.structs.replace(rl, sample=sample)),
        tmp_path,
    )
    assert read_rows(tmp_path, "rl")[0].values["items"] == 5
    assert state.next_item == 30 + 5


def test_kl_reference_is_the_policy_at_the_start_of_rl(tmp_path: Path) -> None:
    run = small(warmup=None)
    rl = msgspec.structs.replace(
        run.rl,
        loss=LossSpec(kl_beta=0.1),
        sample=msgspec.structs.replace(run.rl.sample, minibatches=1),
    )
    run = msgspec.structs.replace(run, rl=rl)
    train(run, tmp_path / "whole")
    kl = [
        row.values["ref_kl"]
        for row in read_rows(tmp_path / "whole", "rl")
        if "ref_kl" in row.values
    ]
    assert kl[0] == pytest.approx(0, abs=1e-9)
    assert all(value > 0 for value in kl[1:])
    with pytest.raises(Killed):
        train(
            run,
            tmp_path / "broken",
            listener=kill_at(read_state(CheckpointStore(tmp_path / "whole").all()[-1]).step - 1),
        )
    train(run, tmp_path / "broken", resume=tmp_path / "broken")
    assert same(tmp_path / "whole", tmp_path / "broken")


class RecordingStage(OfflineDataStage):
    """A stage that records its calls."""

    name, optim = "noted", OptimizerSpec()

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.num_steps = num_steps
        self.notes: list[str] = []

    async def step_data(self, step: int) -> StepData:
        self.notes.append(f"work {step}")
        if step == 3:
            raise TrainError("no fourth step")
        return StepData([], {})

    def note_new_weights(self, step: int) -> None:
        self.notes.append(f"newer {step}")


class StageInParts(OfflineDataStage):
    """A single step of several minibatches."""

    name, optim, num_steps = "in parts", OptimizerSpec(), 1

    def __init__(self, parts: list[list[TokenSequence]]) -> None:
        super().__init__()
        self.parts = [Minibatch(rows, None) for rows in parts]

    async def step_data(self, step: int) -> StepData:
        return StepData(self.parts, {})

    def note_new_weights(self, step: int) -> None:
        """Its data is fixed."""


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_step_metrics_average_over_minibatches_that_report_them(
    order: tuple[int, int], tmp_path: Path
) -> None:
    """One minibatch has RL weights; the other has KD and CE weights."""
    plain, distilled = tree(0)[:3], tree(1)[:3]
    for row in (*plain, *distilled):
        row.ce = None
    for row in distilled:
        row.ce, row.kd = row.rl / 2, row.rl.copy()
        row.streams["teacher_logprobs"] = row.sampler_logprobs + 0.1 * row.mask
    parts = [(plain, distilled)[index] for index in order]
    backend, apart = SingleBackend(policy(), compute=TrainerComputeSpec(precision="fp32")), []
    for rows in parts:
        apart.append(
            backend.forward_backward(pack(rows, backend.packing), LossSpec()) | backend.optim_step()
        )
    trained = SingleBackend(policy(), compute=TrainerComputeSpec(precision="fp32"))
    loop = trainer_over(
        tmp_path, [StageInParts(parts)], lambda _: trained, Unpublished(), not_evaluated
    )
    asyncio.run(loop.run())
    values = next(row.values for row in read_metrics(tmp_path) if "learn_s" in row.values)
    assert {"kd_loss", "ce_loss", "teacher_gap"} <= apart[order.index(1)].keys() - apart[
        order.index(0)
    ].keys()
    for name in apart[0].keys() | apart[1].keys():
        found = [each[name] for each in apart if name in each]
        wanted = apart[0][name] if name.startswith("mismatch") else sum(found) / len(found)
        assert values[name] == pytest.approx(wanted, rel=1e-6), name
    assert values["batches"] == 2


def test_step_data_is_requested_after_the_previous_step_is_done(tmp_path: Path) -> None:
    stage = RecordingStage(5)

    def backend_of(stage: Any) -> Any:
        return None

    loop = trainer_over(
        tmp_path,
        [stage],
        backend_of,
        Unpublished(),
        not_evaluated,
        listener=lambda row: stage.notes.append(f"step {row.step}"),
    )
    with pytest.raises(TrainError, match="no fourth step"):
        asyncio.run(loop.run())
    steps = [[f"work {step}", f"step {step + 1}", f"newer {step + 1}"] for step in range(3)]
    assert stage.notes == [*(note for step in steps for note in step), "work 3"]


def test_objects_that_the_application_froze_stay_frozen(tmp_path: Path) -> None:
    """Otherwise each later garbage collection of the application scans them again."""
    gc.freeze()
    rl = msgspec.structs.replace(small().rl, steps=1)
    train(small(warmup=None, rl=rl), tmp_path)
    assert gc.get_freeze_count() > 0
