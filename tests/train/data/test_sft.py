"""Demonstrations are tokenised reply by reply, with the same ids as the renderer gives for the
whole conversation."""

from __future__ import annotations

from itertools import chain
from pathlib import Path

import pytest

from ramify.engine.prompt_scaffold import SCAFFOLDS
from ramify.errors import ConfigError
from ramify.models.chat_renderer import renderer_of
from ramify.models.tokenizer_training import train_tokenizer
from ramify.tasks.ledger.scripted_demonstrator import EXPERT, NOISY, demonstrations
from ramify.tasks.ledger.task import ledger
from ramify.train.advantages.sft import SFT
from ramify.train.data.rollout_sequences import token_sequences
from ramify.train.data.sft_data import (
    TrajectoryTokenizer,
    append_trajectories,
    induction_warmup_sequences,
    prompt_format,
    read,
    rows_by_step,
    trajectory_of,
)
from ramify.types.message import Message, Reply
from ramify.types.trajectory import Call, CallForkOrigin, Group, Trajectory, Turn

ITEMS = ledger(multi=0.5, rows=(6, 9), doc_rows=(4, 6)).splits["train"][:40]
TEXTS = prompt_format(SCAFFOLDS["tiny"])
DEMOS = list(demonstrations(ITEMS, NOISY, 0, TEXTS))
TOKENIZER = train_tokenizer(
    (m.content for demo in DEMOS for call in demo for m in call.messages), 320
)
RENDERER = renderer_of(TOKENIZER)


def test_demonstrations_become_call_trees() -> None:
    trees = [trajectory_of(demo) for demo in DEMOS]
    assert max(tree.depth for tree in trees) == 1
    for demo, tree in zip(DEMOS, trees, strict=True):
        assert tree.task == demo[0].item
        assert [call.id for call in tree.walk()] == [each.call for each in demo]
        assert [tuple(tree.conversation(call)) for call in tree.calls] == [
            each.messages for each in demo
        ]
        assert tree.rewards["correct"] == demo[0].correct
    experts = [trajectory_of(demo) for demo in demonstrations(ITEMS, EXPERT, 0, TEXTS)]
    assert {tree.rewards["correct"] for tree in experts} == {1.0}


def test_tokenised_paths_match_the_renderer() -> None:
    tokeniser = TrajectoryTokenizer(RENDERER)
    for tree in map(trajectory_of, DEMOS):
        tokenised = tokeniser.tokenised(tree)
        for call in tokenised.calls:
            (path,) = tokenised.paths(call)
            sampled_reply = call.turns[-1].reply.token_ids or ()
            whole = RENDERER.prompt(tokenised.conversation(call))
            assert [*path.ids, *RENDERER.extend([], after=sampled_reply)] == whole
            sampled = [
                id for id, is_sampled in zip(path.ids, path.sampled, strict=True) if is_sampled
            ]
            replies = [m.content for m in tokenised.conversation(call) if m.role == "assistant"]
            assert TOKENIZER.decode(sampled) == "".join(f"{reply}<|end|>" for reply in replies)


def test_only_sampled_tokens_carry_cross_entropy() -> None:
    tree = TrajectoryTokenizer(RENDERER).tokenised(trajectory_of(DEMOS[0]))
    rows = token_sequences(SFT().assign_advantages([Group("", [tree])], {}).rollouts)
    for row in rows:
        assert row.ce is not None
        assert (row.ce > 0).tolist() == row.mask.tolist()


def test_truncated_history_is_tokenised_again_and_branches_are_rejected() -> None:
    def sampled_reply(text: str) -> Reply:
        return Reply(Message("assistant", text))

    def user_message(text: str) -> Message:
        return Message("user", text)

    turns = [
        Turn(0, (user_message("q"),), sampled_reply("a")),
        Turn(1, (user_message("summary"),), sampled_reply("b")),
    ]
    tree = TrajectoryTokenizer(RENDERER).tokenised(
        Trajectory("t", "q", calls=[Call("0", "rlm", "m", 0, "q", turns=turns)])
    )
    assert [turn.reused_ids for turn in tree.root.turns] == [0, 0]
    assert list(tree.root.turns[1].reply.prompt_ids or ()) == RENDERER.prompt(
        [user_message("q"), user_message("summary")]
    )
    turns = [Turn(0, (user_message("q"),), sampled_reply("a"))]
    forked = Call("0:1", "rlm", "m", 0, "q", fork=CallForkOrigin("0", 0), turns=turns)
    with pytest.raises(ConfigError, match="branches"):
        TrajectoryTokenizer(RENDERER).tokenised(Trajectory("t", "q", calls=[forked]))


def test_trajectories_round_trip_through_a_file(tmp_path: Path) -> None:
    trees = [trajectory_of(demo) for demo in DEMOS[:3]]
    path = tmp_path / "demos.jsonl"
    append_trajectories(path, trees[:2])
    append_trajectories(path, trees[2:])
    assert list(read(path)) == trees
    with path.open("a") as file:
        file.write('{"id": 4}\n')
    with pytest.raises(ConfigError, match=r"demos\.jsonl, line 4: not a trajectory"):
        list(read(path))
    with pytest.raises(ConfigError, match="cannot be read from"):
        list(read(tmp_path / "none.jsonl"))


def test_order_shuffles_each_epoch_and_fills_steps() -> None:
    rows = induction_warmup_sequences(0, range(8), 400)
    size = len(rows[0])
    steps = rows_by_step(rows, 3 * size, epochs=2, seed=1)
    half = len(steps) // 2
    assert all(
        sorted(chain.from_iterable(part)) == list(range(len(rows)))
        for part in (steps[:half], steps[half:])
    )
    assert {len(step) for step in steps} <= {3, len(rows) % 3}
    assert steps[:half] != steps[half:]
    assert (
        steps
        == rows_by_step(rows, 3 * size, epochs=2, seed=1)
        != rows_by_step(rows, 3 * size, epochs=2, seed=2)
    )
    assert {len(step) for step in rows_by_step(rows, 1, 1, 0)} == {1}
    assert rows_by_step([], 10, 3, 0) == []


def test_sft_reads_evaluated_runs_from_a_store(tmp_path: Path) -> None:
    """A scripted model answers eight items, three of them wrongly: only the correct runs are
    trained on."""
    from ramify import Store
    from ramify.evaluate.run_evaluation import EvaluationStore
    from tests.evaluate.helpers import evaluated, plan, unless

    store = Store(tmp_path / "store")
    record = EvaluationStore(store.root).create(plan())
    evaluated(unless(lambda n: n in (1, 2, 5)), record=record, store=store)
    record.close()
    found = list(read(store.root))
    assert sorted(each.rewards["correct"] for each in found) == [0, 0, 0, 1, 1, 1, 1, 1]
    tokeniser = TrajectoryTokenizer(RENDERER)
    groups = [Group(each.task, [tokeniser.tokenised(each)]) for each in found]
    assigned = SFT(min_reward=1.0).assign_advantages(groups, {})
    assert len(token_sequences(assigned.rollouts)) == 5
