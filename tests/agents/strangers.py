"""A few steps of training for an agent of ``examples/agents``, and what its rollouts show.

Used by the tests and by ``benchmarks/agents_strangers.py``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from examples.agents import recipe
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import load_policy
from ramify.train import (
    AgentRun,
    EvaluateSpec,
    RolloutBatchSpec,
    RolloutOptions,
    Run,
    Schedule,
    TaskSpec,
)
from ramify.types.trajectory import Trajectory
from tests.shown import train

STRANGERS = ("langgraph", "openai_agents", "openai_agents_js", "rlms", "verifiers")


class SampledTurn(NamedTuple):
    """One reply of the policy, with all that came before it."""

    ids: tuple[int, ...]
    """Ids of the prompt and the reply."""
    num_prompt: int
    """Ids of the prompt."""
    logprobs: tuple[float, ...]
    """Log-probability of each sampled id, as the engine reported it."""


def missing(name: str) -> str:
    """Why the agent cannot run here; empty if its environment exists."""
    if (recipe.BUILT / name / "stamp").exists():
        return ""
    return f"build/agents/{name} does not exist: run scripts/setup --agents"


def spread(run: AgentRun) -> float:
    """A number from 0 to 1 that differs between rollouts with different replies, so that a step
    with few rollouts has something to learn from."""
    ids = [id for turn in sampled_turns(run.trajectory) for id in turn.ids[turn.num_prompt :]]
    return sum(id * 37 % 101 for id in ids) / (100 * len(ids))


def short_run(name: str, policy: Path, *, steps: int = 2, group: int = 3) -> Run:
    """The recipe's run of an agent with few rollouts, which are saved, and ``spread`` as reward."""
    run = recipe.run(name)
    assert run.rl is not None
    assert isinstance(run.task, TaskSpec)
    options = {**run.task.options, "reward": "tests.agents.strangers:spread"}
    rl = msgspec.structs.replace(
        run.rl,
        steps=steps,
        sample=RolloutBatchSpec(items=1),
        rollout=RolloutOptions(group=group, concurrency=group),
    )
    return msgspec.structs.replace(
        run,
        rl=rl,
        task=msgspec.structs.replace(run.task, options=options),
        policy=msgspec.structs.replace(run.policy, path=str(policy)),
        evaluate=EvaluateSpec(num=1, validation=1, final=()),
        schedule=Schedule(save_rollouts_every=1, evaluate_every=None),
    )


def trained(name: str, policy: Path, out: Path, **sizes: int) -> list[list[Trajectory]]:
    """Train the agent, and return the rollouts of each step."""
    train(short_run(name, policy, **sizes), out)
    return [
        [msgspec.json.decode(line, type=Trajectory) for line in file.read_bytes().splitlines()]
        for file in sorted((out / "rollouts").glob("step-*.jsonl"))
    ]


def sampled_turns(trajectory: Trajectory) -> Iterator[SampledTurn]:
    for call in trajectory.calls:
        for index, turn in enumerate(call.turns):
            path = trajectory.path(call, index)
            assert path is not None
            num_sampled = len(turn.reply.token_ids or ())
            yield SampledTurn(
                path.ids, len(path.ids) - num_sampled, tuple(turn.reply.logprobs or ())
            )


def worst_logprob(policy: Path, trajectories: list[Trajectory]) -> tuple[int, float]:
    """Recompute the log-probability of every sampled id by a forward pass over its whole path.

    Returns the number of ids, and the largest difference from what the engine reported when it
    sampled them. An id that was not the sampled one, or a prompt that was not the sent one, has
    another log-probability.
    """

    async def check() -> tuple[int, float]:
        num_ids, worst = 0, 0.0
        client = LocalClient(load_policy(policy), slots=1)
        try:
            for trajectory in trajectories:
                for turn in sampled_turns(trajectory):
                    again = (await client.logprobs(turn.ids))[turn.num_prompt - 1 :]
                    assert len(again) == len(turn.logprobs)
                    num_ids += len(again)
                    differences = (abs(a - b) for a, b in zip(again, turn.logprobs, strict=True))
                    worst = max(worst, *differences)
        finally:
            await client.close()
        return num_ids, worst

    return asyncio.run(check())


def turns_of(steps: list[list[Trajectory]]) -> dict[str, Any]:
    """Numbers of calls and turns, and why each call began."""
    calls = [call for step in steps for each in step for call in each.calls]
    turns = sum(len(call.turns) for call in calls)
    return {
        "calls": len(calls),
        "turns": turns,
        "continued": turns - len(calls),
        "rewritten": sum(
            call.cause is not None and call.cause.is_history_rewritten() for call in calls
        ),
    }
