"""Training an agent that was written elsewhere: a few steps of the whole trainer."""

from __future__ import annotations

from pathlib import Path

from ramify.agents.agent_task import AgentTask
from tests.agents.small_agent import ROWS, ask, even
from tests.shown import train
from tests.train.small import small
from tests.train.test_loop import read_rows


def test_function_is_trained_as_it_is(tmp_path: Path) -> None:
    run = small(task=AgentTask(agent=ask, items=ROWS, reward=even), warmup=None)
    assert run.task.options == {
        "agent": "tests.agents.small_agent:ask",
        "items": ROWS,
        "reward": "tests.agents.small_agent:even",
    }
    train(run, tmp_path)
    steps = [row.values for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert len(steps) == 4
    assert all(0 < step["reward"] < 1 and step["failed_rollouts"] == 0 for step in steps)
    assert any(step["groups_with_signal"] for step in steps)
