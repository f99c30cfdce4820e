"""Train a policy from random weights to play Gymnasium's FrozenLake (4×4, not slippery) in three
minutes of CPU time.

    ramify train recipes/frozen_lake.py --out runs/lake

Each turn is one action: the policy calls ``step`` in its session, and sees the square that it
stands on. It first imitates a player that moves at random, in those episodes that reached the goal
(``sft``); no other demonstrator is asked. Reinforcement learning finds the rest: how to arrive
within the turns that an episode has.

    Walk from S to G. You are at (0, 0) S.
    step("right")            ──> (0, 1) F
    …
    step("right")            ──> (3, 3) G, and the episode has ended
    FINAL("done")
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import Any

from ramify import ConfigError, Limits, Message, Scaffold, Trajectory, tasks, train

DIRECTIONS = ("left", "down", "right", "up")
"""Actions of the environment, by its number."""
MAX_MOVES = 20
"""Maximum number of moves in a demonstration, and in an episode of the policy."""


def square(env: Any, place: int) -> str:
    """5 -> ``(1, 1) H``: row, column and letter (S, F, H or G)"""
    row, column = divmod(place, 4)
    return f"({row}, {column}) {env.unwrapped.desc[row, column].decode()}"


def direction(text: str) -> int:
    if text not in DIRECTIONS:
        raise ValueError(f"{text!r} is not one of {', '.join(DIRECTIONS)}")
    return DIRECTIONS.index(text)


def make_lake(item: tasks.Item | None = None) -> Any:
    try:
        import gymnasium
    except ImportError:
        raise ConfigError("recipes/frozen_lake.py needs Gymnasium: pip install gymnasium") from None
    return gymnasium.make("FrozenLake-v1", is_slippery=False)


def lake() -> tasks.Task:
    def item(rng: random.Random) -> tasks.Item:
        return tasks.Item("Walk from S to G. You are at (0, 0) S.")

    splits = tasks.generated("lake", item)
    return tasks.env_task("lake", splits, make_lake, parse=direction, render=square)


def random_walks(seed: int) -> Iterator[list[int]]:
    """Yield the episodes of a random player that reach the goal within ``MAX_MOVES``."""
    env, rng = make_lake(), random.Random(seed)
    while True:
        env.reset()
        moves: list[int] = []
        reward, is_over = 0.0, False
        while not is_over and len(moves) < MAX_MOVES:
            moves.append(rng.randrange(len(DIRECTIONS)))
            _, reward, is_over, _, _ = env.step(moves[-1])
        if reward:
            yield moves


def demos(task: tasks.Task, num: int, seed: int, scaffold: Scaffold) -> list[Trajectory]:
    """Play ``num`` of these episodes in sessions, as a policy does."""
    walks = random_walks(seed)
    moves: Iterator[int] = iter(())

    def play(messages: Sequence[Message]) -> str:
        nonlocal moves
        if len(messages) == 1:
            moves = iter(next(walks))
        move = next(moves, None)  # a walk ends where the episode does
        return 'FINAL("done")' if move is None else f'step("{DIRECTIONS[move]}")'

    return train.demonstrate(
        task, play, num, scaffold, limits=Limits(max_turns=MAX_MOVES + 1), concurrency=1
    )


SHAPE = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "intermediate_size": 128,
    "max_position_embeddings": 1024,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
}
"""A model of 0.1M parameters."""


def run() -> train.Run:
    return train.Run(
        name="frozen-lake",
        policy=train.PolicySpec(shape=SHAPE, vocab_size=300),
        task=train.TaskSpec(name=f"{__file__}:lake"),
        sft=train.SftSpec(
            demos=f"{__file__}:demos",
            num=300,
            epochs=8,
            optim=train.OptimizerSpec(
                kind="muon", lr=6e-3, weight_decay=0.01, warmup_steps=10, schedule="linear"
            ),
        ),
        rl=train.RlSpec(
            steps=24,
            sample=train.RolloutBatchSpec(items=10),
            rollout=train.RolloutOptions(group=8),
            optim=train.OptimizerSpec(
                lr=2e-3, warmup_steps=2, schedule="linear", max_grad_norm=0.5
            ),
        ),
        scaffold="bare",
        limits=Limits(
            max_turns=MAX_MOVES + 1, max_depth=0, max_reply_tokens=12, max_seconds=86_400
        ),
        evaluate=train.EvaluateSpec(num=100, validation=32, first=("test",)),
        schedule=train.Schedule(evaluate_every=None),
        compute=train.TrainerComputeSpec(precision="fp32"),
        threads=1,
    )
