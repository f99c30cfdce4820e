"""Two policies trained together: each on its own calls, with its own weights, optimizer, engine
and checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from ramify.engine.limits import Limits
from ramify.models.weights import read_weights
from ramify.tasks.base import DatasetTask, Item, TrajectoryRewardFunction, generated
from ramify.train.advantages.group_estimators import DrGRPO
from ramify.train.backends.base import OptimizerSpec
from ramify.train.call_depth_models import DepthSpec
from ramify.train.config import (
    CoTrainedPolicySpec,
    EvaluateSpec,
    PolicySpec,
    RlSpec,
    Run,
    Schedule,
    TaskSpec,
)
from ramify.train.data.sft_data import read as read_trajectories
from ramify.train.metrics import read_metrics
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.types.message import Message
from ramify.types.trajectory import Trajectory
from tests.shown import train
from tests.train.small import _make, assemble, small
from tests.train.test_depth_models import FROZEN, POLICY, served
from tests.train.test_loop import Killed, kill_at, same


def _letters(item: Item, trajectory: Trajectory) -> float:
    """1 for the gold answer, otherwise 0.9 times the share of even letters of the answer."""
    text = str(trajectory.answer or "")
    if text == str(item.gold):
        return 1.0
    return sum(ord(letter) % 2 == 0 for letter in text) / len(text) * 0.9 if text else 0.0


letters = DatasetTask("letters", generated("letters", _make), TrajectoryRewardFunction(_letters))


def begin(out: Path) -> Path:
    """Save a random initial policy."""
    assemble(small(warmup=None, rl=None)).export_initial_policy(out / "policy")
    return out / "policy"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The initial policy."""
    out = tmp_path_factory.mktemp("trained")
    return begin(out)


SHORT = msgspec.structs.replace(POLICY, max_reply_tokens=8)


def run_of(policy: Path, children: DepthSpec, **changes: Any) -> Run:
    """Return a run with a scripted root that calls ``policy`` and ``children`` by name."""
    fields: dict[str, Any] = {
        "policy": PolicySpec(path=str(policy), slots=16),
        "task": TaskSpec(name="tests.train.test_two_policies:letters"),
        "warmup": None,
        "sft": None,
        "depths": (FROZEN, SHORT, msgspec.structs.replace(children, max_reply_tokens=8)),
        "limits": Limits(
            max_turns=1,
            max_depth=2,
            max_reply_tokens=200,
            max_reasoning_tokens=0,
            max_seconds=300,
        ),
        "evaluate": EvaluateSpec(num=1, final=(), keep="last"),
        "schedule": Schedule(evaluate_every=None, save_rollouts_every=1, keep_last=9),
        "rl": RlSpec(
            steps=2,
            sample=RolloutBatchSpec(items=1),
            rollout=RolloutOptions(group=2, concurrency=1),
            algorithm=DrGRPO(llm_calls=True),
            optim=OptimizerSpec(lr=1e-2),
        ),
        "deterministic": True,
    }
    return small(**(fields | changes))


def trained_over(run: Run, out: Path, children: str, **options: Any) -> Any:
    """Train; the root's code calls the second policy ``children``."""

    # Most replies are cut off at their token limit, which raises.
    code = f"""
def asked(model):
    try:
        return llm_query('a', model=model)
    except SubcallError as error:
        return str(error.partial)
FINAL(asked('small') + asked('{children}'))
"""

    def script(messages: Sequence[Message]) -> str:
        return code

    with pytest.MonkeyPatch.context() as patch, served(script) as server:
        patch.setenv("OPENAI_API_KEY", "sk-test")
        patch.setenv("OPENAI_BASE_URL", server.url)
        return train(run, out, **options)


CHILDREN = DepthSpec(model="children")


def both(policy: Path, lr: float, **changes: Any) -> Run:
    spec = CoTrainedPolicySpec(policy=PolicySpec(path=str(policy)), optim=OptimizerSpec(lr=lr))
    return run_of(policy, CHILDREN, policies={"children": spec}, **changes)


def weights(out: Path, name: str = "policy") -> dict[str, Any]:
    return read_weights(out / name)


def differing(first: Path, second: Path) -> list[str]:
    """Return the names of training metrics that differ between two runs, not counting times and
    token counts, which a frozen model does not report."""
    rows = [
        [row.values for row in read_metrics(folder) if "learn_s" in row.values]
        for folder in (first, second)
    ]
    assert len(rows[0]) == len(rows[1]) > 0
    names = {"loss", "reward", "reward_std", "grad_norm", "lr", "entropy", "approx_kl"}
    return [
        name
        for ours, theirs in zip(*rows, strict=True)
        for name in sorted(names & (ours.keys() | theirs.keys()))
        if ours.get(name) != theirs.get(name)
    ]


def one_stays(policy: Path, out: Path) -> list[Path]:
    """Return the folders of two runs: second policy with learning rate 0, and frozen instead."""
    model, runs = f"local:{policy}", [out / "both", out / "frozen"]
    trained_over(both(policy, 0.0), runs[0], "small.children")
    trained_over(run_of(policy, DepthSpec(model=model)), runs[1], model)
    return runs


def test_second_policy_with_learning_rate_0_equals_a_frozen_model(
    trained: Path, tmp_path: Path
) -> None:
    ours, theirs = one_stays(trained, tmp_path)
    assert same(ours, theirs)
    assert differing(ours, theirs) == []
    first, last = weights(trained.parent), weights(ours, "policies/children")
    assert all(torch.equal(first[name], last[name]) for name in first)
    assert not same(trained.parent, ours)


def test_each_policy_trains_on_its_own_calls_and_resumes_identically(
    trained: Path, tmp_path: Path
) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run = both(trained, 5e-3)
    state = trained_over(run, whole, "small.children")
    rows = [row.values for row in read_metrics(whole) if "learn_s" in row.values]
    assert [row["policy.children/lr"] for row in rows] == [5e-3] * 2
    assert all(row["lr"] == 1e-2 for row in rows)
    trees = list(read_trajectories(whole / f"rollouts/step-{state.step:06d}.jsonl"))
    models = {
        tree.call(place.split("/")[0]).model
        for tree in trees
        for place in tree.metadata["advantages"]
    }
    assert models == {"local:small", "local:small.children"}
    first = weights(trained.parent)
    for name in ("policy", "policies/children"):
        last = weights(whole, name)
        assert not all(torch.equal(first[each], last[each]) for each in first)
    with pytest.raises(Killed):
        trained_over(
            msgspec.structs.replace(
                run, schedule=Schedule(evaluate_every=None, checkpoint_every=1)
            ),
            broken,
            "small.children",
            listener=kill_at(2),
        )
    trained_over(run, broken, "small.children", resume=broken)
    for name in ("policy", "policies/children"):
        ours, theirs = weights(whole, name), weights(broken, name)
        assert all(torch.equal(ours[each], theirs[each]) for each in ours)
