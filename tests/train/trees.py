"""Small hand-made trajectories with token ids."""

from __future__ import annotations

from typing import Any

import msgspec

from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, CallSite, Group, Stop, Trajectory, Turn


def call(
    id: str, *sampled: int, reward: float | None = None, kind: Any = "rlm", **options: Any
) -> tuple[Call, float | None]:
    """Return a call with one turn per number in ``sampled``: that many sampled tokens after two
    prompt tokens."""
    turns = []
    before = 0
    for index, num in enumerate(sampled):
        reply = Reply(
            Message("assistant", f"turn {index}"),
            prompt_ids=(1, 2),
            token_ids=tuple(range(10, 10 + num)),
            logprobs=(-0.5,) * num,
        )
        turns.append(
            Turn(
                0 if index == 0 else 2 * index,
                (Message("user", "go on"),),
                reply,
                reused_ids=before,
            )
        )
        before += 2 + num
    parent = CallSite(id.rpartition(".")[0], 0, 0) if "." in id else None
    question = options.pop("question", f"what of {id}?")
    stop = options.pop("stop", Stop.FINAL)
    return Call(
        id,
        kind,
        "test:m",
        id.count("."),
        question,
        parent=parent,
        turns=turns,
        stop=stop,
        **options,
    ), reward


def cut(id: str, num: int, **options: Any) -> tuple[Call, float | None]:
    """Return a call whose only reply was cut at its token limit."""
    made, reward = call(id, num, **options)
    reply = msgspec.structs.replace(made.turns[-1].reply, finish="length")
    made.turns[-1] = msgspec.structs.replace(made.turns[-1], reply=reply)
    return made, reward


def tree(*calls: tuple[Call, float | None], reward: float | None = None) -> Trajectory:
    """Return a rollout with a total ``reward`` (None: it failed) and the rewards of its calls."""
    own = {each.id: {"own": value} for each, value in calls if value is not None}
    rewards = {} if reward is None else {"correct": reward}
    return Trajectory(
        "t",
        "q",
        task="test/train/0",
        calls=[each for each, _ in calls],
        rewards=rewards,
        call_rewards=own,
    )


def group(*trajectories: Trajectory) -> Group:
    return Group("test/train/0", list(trajectories))
