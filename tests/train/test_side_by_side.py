"""The recipes that stand side by side in docs/recipes.md: each trains two steps."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest

from ramify.engine.prompt_scaffold import scaffold_of
from ramify.plugins import load_file
from ramify.tasks.base import items_of
from ramify.train.data.sft_data import read
from ramify.train.recipe import load_recipe
from tests.shown import train
from tests.train.checkpoints import chat_checkpoint
from tests.train.test_loop import read_rows

RECIPES = Path(__file__).parents[2] / "recipes"
SHORT = (
    "rl.steps=2",
    "rl.optim.warmup_steps=0",
    "rl.sample.items=2",
    "rl.rollout.group=2",
    "evaluate.num=2",
    "evaluate.validation=2",
    "schedule.save_rollouts_every=1",
    "policy.slots=8",
    "threads=1",
)
FROM_SCRATCH = {
    "frozen_lake": ("sft.num=6", "sft.optim.warmup_steps=0", "limits.max_turns=4"),
    "rejection_sampling": (
        "warmup.steps=2",
        "sft.num=40",
        "sft.optim.warmup_steps=0",
        "rl.sample.minibatches=2",
        "rl.algorithm.min_reward=0",
        "limits.max_turns=2",
        "limits.max_reply_tokens=8",
    ),
}
FROM_A_CHECKPOINT = {
    "sqlite_tools": ("limits.max_turns=2",),
    "hf_grpo": ("limits.max_turns=2", 'task.options={"multi": 0.5, "chars": 600}'),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_SCRATCH)
def test_recipe_from_random_weights_trains_two_steps(name: str, tmp_path: Path) -> None:
    if name == "frozen_lake":
        pytest.importorskip("gymnasium")
    _train(name, FROM_SCRATCH[name], tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize("name", FROM_A_CHECKPOINT)
def test_recipe_from_a_checkpoint_trains_two_steps(name: str, tmp_path: Path) -> None:
    options = (
        f"policy.path={chat_checkpoint(tmp_path / 'llama')}",
        "rl.sample.max_items=null",
        "rl.optim.lr=0.0003",
        "limits.max_reply_tokens=12",
        *FROM_A_CHECKPOINT[name],
    )
    _train(name, options, tmp_path / "out")


def _train(name: str, options: tuple[str, ...], out: Path) -> None:
    run = load_recipe(RECIPES / f"{name}.py", [*SHORT, *options])
    train(run, out, say=lambda text: None)
    assert sum("reward" in row.values for row in read_rows(out, "rl")) == 2
    rollouts = [each for path in (out / "rollouts").iterdir() for each in read(path)]
    assert len(rollouts) == 2 * 2 * 2
    assert all(each.rewards for each in rollouts)
    assert all(turn.reply.token_ids for each in rollouts for turn in each.root.turns)


def test_demonstrations_of_the_lake_are_random_walks_that_arrive() -> None:
    pytest.importorskip("gymnasium")
    lake = load_file(RECIPES / "frozen_lake.py")
    walks = list(islice(lake.random_walks(seed=3), 40))
    assert {len(walk) for walk in walks} > {8, 10}
    assert max(map(len, walks)) <= lake.MAX_MOVES
    assert {move for walk in walks for move in walk} == {0, 1, 2, 3}
    env = lake.make_lake()
    for walk in walks:
        env.reset()
        *_, (_, reward, is_over, _, _) = map(env.step, walk)
        assert (reward, is_over) == (1, True)
    shown = lake.demos(lake.lake(), 2, 3, scaffold_of("bare"))
    for run, walk in zip(shown, walks, strict=False):
        replies = [turn.reply.message.content for turn in run.root.turns]
        moves = [f'step("{lake.DIRECTIONS[move]}")' for move in walk]
        assert replies == [*moves, 'FINAL("done")']
        assert run.rewards == {"return": 1.0}
        assert run.root.turns[1].prompt[0].content.startswith("'(")


def test_questions_of_the_shop_have_the_answers_of_their_queries() -> None:
    shop = load_file(RECIPES / "sqlite_tools.py")
    first, again = (items_of(shop.shop(), "train")[:50] for _ in range(2))
    assert list(first) == list(again)
    assert len({each.question for each in first}) > 40
    assert len({each.gold for each in first}) > 8
