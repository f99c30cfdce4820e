"""The saved rollouts of a training step, in their order on the page."""

from __future__ import annotations

from pathlib import Path

from ramify.train.data.sft_data import append_trajectories
from ramify.types.trajectory import Call, Trajectory
from ramify.viewer.training_and_evaluation_pages import saved_rollouts


def test_rollouts_are_listed_best_first_and_failed_ones_last(tmp_path: Path) -> None:
    rewards = (0.0, None, 1.0, -2.0, None, 0.5)
    (tmp_path / "rollouts").mkdir()
    append_trajectories(
        tmp_path / "rollouts/step-000001.jsonl",
        [
            Trajectory(
                f"{number}",
                "?",
                calls=[Call("0", "lm", "m", 0, "?")],
                rewards={} if reward is None else {"correct": reward},
                errors=["no session"] if reward is None else [],
            )
            for number, reward in enumerate(rewards)
        ],
    )
    rows = saved_rollouts(tmp_path, 1, "key")["rows"]
    assert [row["reward"] for row in rows] == [1.0, 0.5, 0.0, -2.0, None, None]
