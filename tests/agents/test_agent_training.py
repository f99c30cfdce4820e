"""Training an agent that was written elsewhere: a few steps of the whole trainer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.agents.agent_job import AgentRolloutInput
from ramify.agents.agent_result import AgentRun
from ramify.agents.agent_task import ExternalAgentTask
from ramify.train.advantages.group_estimators import GRPO, DrGRPO
from ramify.train.advantages.ppo import PPO
from ramify.train.config import EvaluateSpec, PolicySpec, RlSpec, Run, Schedule
from ramify.train.losses.gspo import Gspo
from ramify.train.losses.total_loss import LossSpec
from ramify.train.recipe import load_recipe
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from ramify.train.rollouts.rollouter import RolloutOptions
from ramify.train.signals.judge import ProcessRewardSignal
from ramify.train.signals.signal_composition import Hybrid
from ramify.train.signals.signal_term import HybridTerm
from tests.agents.small_agent import ROWS, ask, chat, even
from tests.shown import train
from tests.train.small import small
from tests.train.test_loop import read_rows

ROOT = Path(__file__).parents[2]


def two_turns(job: AgentRolloutInput) -> str:
    """Ask twice in one conversation, and a third time in another one."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": job.item.question}]
    reply = chat(job.base_url, job.api_key, messages, max_tokens=6)["choices"][0]["message"]
    messages += [
        {"role": "assistant", "content": reply["content"]},
        {"role": "user", "content": "Again."},
    ]
    chat(job.base_url, job.api_key, messages, max_tokens=6)
    return ask(job)


def even_by_call(run: AgentRun) -> Mapping[str, float]:
    """The reward of each call: the share of even ids among its own."""
    shares = {}
    for call in run.trajectory.calls:
        ids = [id for turn in call.turns for id in turn.reply.token_ids or ()]
        shares[call.id] = sum(id % 2 == 0 for id in ids) / max(len(ids), 1)
    return shares


def fails_at_times(job: AgentRolloutInput) -> str:
    """Raise an error for questions whose last number is odd."""
    if int(job.item.question.split()[-1][:-1]) % 2:
        raise ValueError("no such table")
    return ask(job)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A policy created once by SFT; the runs of this file only do RL."""
    out = tmp_path_factory.mktemp("base")
    given = small(warmup=None, rl=None, evaluate=EvaluateSpec(num=1, final=()))
    assert given.sft is not None
    sft = msgspec.structs.replace(given.sft, num=8)
    train(msgspec.structs.replace(given, sft=sft), out)
    return str(out / "policy")


def run(base: str, task: ExternalAgentTask, **options: Any) -> Run:
    fields: dict[str, Any] = {
        "steps": 2,
        "sample": RolloutBatchSpec(items=2),
        "rollout": RolloutOptions(group=3, concurrency=6),
        **options,
    }
    return small(
        policy=PolicySpec(path=base, slots=16),
        task=task,
        warmup=None,
        sft=None,
        rl=RlSpec(**fields),
        evaluate=EvaluateSpec(num=1, final=()),
        schedule=Schedule(evaluate_every=None),
    )


def test_task_in_a_recipe_is_plain_data(base: str) -> None:
    given = run(base, ExternalAgentTask(agent=ask, items=ROWS, reward=even, max_seconds=60))
    assert given.task.name == "agent"
    assert given.task.options == {
        "agent": "tests.agents.small_agent:ask",
        "items": ROWS,
        "reward": "tests.agents.small_agent:even",
        "max_seconds": 60,
    }


def test_scaffold_of_the_recipe_does_not_concern_an_agent(base: str, tmp_path: Path) -> None:
    """The default scaffold has a system message, which the format of this policy cannot write."""
    given = run(base, ExternalAgentTask(agent=ask, items=ROWS, reward=even), steps=1)
    train(msgspec.structs.replace(given, scaffold="default"), tmp_path, say=pytest.fail)
    assert [row.values for row in read_rows(tmp_path, "rl") if "loss" in row.values]


WAYS: dict[str, dict[str, Any]] = {
    "grpo": {"algorithm": GRPO()},
    "credit of calls": {"algorithm": DrGRPO(credit="per_role")},
    "sequence loss": {"algorithm": GRPO(), "loss": LossSpec(policy=Gspo())},
    "critic": {"algorithm": PPO(lam=0.9)},
    "signal": {
        "algorithm": Hybrid(
            outcome=DrGRPO(), terms=(HybridTerm(signal="rule", weight=0.3, norm="step_index"),)
        ),
        "signals": {"rule": ProcessRewardSignal(judge="tests.train.signals.rules:Steps")},
    },
}


@pytest.mark.parametrize("way", WAYS)
def test_tree_of_an_agent_is_learned_from_in_every_way(way: str, base: str, tmp_path: Path) -> None:
    task = ExternalAgentTask(agent=two_turns, items=ROWS, reward=even_by_call)
    train(run(base, task, **WAYS[way]), tmp_path, say=pytest.fail)
    steps = [row.values for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert len(steps) == 2
    for step in steps:
        assert step["failed_rollouts"] == step["agent/crashed"] == 0
        assert step["groups_with_signal"] > 0
        assert step["grad_norm"] > 0


def test_failed_agents_are_counted_and_not_learned_from(base: str, tmp_path: Path) -> None:
    task = ExternalAgentTask(agent=fails_at_times, items=ROWS, reward=even)
    train(run(base, task, sample=RolloutBatchSpec(items=6), steps=1), tmp_path)
    (step,) = [row.values for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert 0 < step["agent/crashed"] < 18
    assert step["agent/crashed"] == step["failed_rollouts"]
    assert step["agent/hung"] == 0


def test_recipe_trains_a_command(base: str, tmp_path: Path) -> None:
    recipe = load_recipe(ROOT / "recipes/agent.py", ["task.options.max_seconds=60"])
    task = ExternalAgentTask(**recipe.task.options)
    train(run(base, task, steps=1, algorithm=GRPO()), tmp_path)
    (step,) = [row.values for row in read_rows(tmp_path, "rl")][:1]
    assert step["failed_rollouts"] == 0
    assert "reward/short" in step
