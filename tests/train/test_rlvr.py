"""``recipes/rlvr.py``: one prompt, one reply, a reward, without a session."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from ramify.train.data.sft_data import read
from ramify.train.recipe import load_recipe
from tests.shown import train
from tests.train.checkpoints import chat_checkpoint

RECIPE = Path(__file__).parents[2] / "recipes/rlvr.py"
ROWS = [
    {
        "prompt": [
            {"role": "system", "content": "Reply with a number."},
            {"role": "user", "content": f"{number} + 2?"},
        ],
        "answer": f"{number + 2}",
    }
    for number in range(60)
]
SHORT = (
    "rl.steps=2",
    "rl.sample.items=2",
    "rl.sample.max_items=null",
    "rl.rollout.group=3",
    "rl.optim.lr=0.0003",
    "limits.max_reply_tokens=12",
    "evaluate.num=2",
    "policy.slots=8",
    "schedule.save_rollouts_every=1",
    "threads=1",
)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [False, True])
def test_recipe_trains_on_plain_prompts(rows: bool, tmp_path: Path) -> None:
    """On the recipe's own sums, and on rows with messages."""
    changes = [f"policy.path={chat_checkpoint(tmp_path / 'llama')}", *SHORT]
    if rows:
        path = tmp_path / "rows.jsonl"
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in ROWS))
        changes += [f"task.name={path}", 'task.options={"reward": "last_number"}']
    run = load_recipe(RECIPE, changes)
    state = train(run, tmp_path / "out", say=lambda text: None)
    assert state.step == 2
    rollouts = [each for path in (tmp_path / "out/rollouts").iterdir() for each in read(path)]
    assert len(rollouts) == 2 * 2 * 3
    assert {call.kind for each in rollouts for call in each.calls} == {"lm"}
    assert {len(each.calls) for each in rollouts} == {1}
    for rollout in rollouts:
        (turn,) = rollout.root.turns
        roles = [message.role for message in turn.prompt]
        assert roles == (["system", "user"] if rows else ["user"])
        assert turn.reply.token_ids
        assert turn.reply.logprobs is not None
        assert set(rollout.rewards) == {"correct"}
