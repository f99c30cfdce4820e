"""Assigned rollouts become token sequences: position of each token credit, and rejected input."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ramify.train.advantages.base import RolloutAdvantages, TokenCredit
from ramify.train.data.rollout_sequences import token_sequences
from ramify.types.message import Message, Reply, VersionSpan
from ramify.types.trajectory import Call, CallForkOrigin, CallSite, Trajectory, Turn


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...], reused: int = 0, **more: Any) -> Turn:
    given: dict[str, Any] = {"logprobs": tuple(-0.5 * id for id in sampled)} | more
    reply = Reply(Message("assistant", "x"), prompt_ids=prompt, token_ids=sampled, **given)
    return Turn(0, (), reply, reused_ids=reused)


def call(id: str, *turns: Turn, **more: Any) -> Call:
    return Call(
        id=id, kind="rlm", model="m", depth=id.count("."), question="q", turns=list(turns), **more
    )


def rollout(credits: dict[tuple[str, int], TokenCredit], *calls: Call) -> RolloutAdvantages:
    return RolloutAdvantages(Trajectory("t", "q", calls=list(calls)), credits)


def summary(found: Any) -> list[tuple[str, list[int], list[float]]]:
    return [(each.name, each.token_ids.tolist(), each.rl.tolist()) for each in found]


def rl(*weights: float) -> TokenCredit:
    return TokenCredit(advantages=[2.0] * len(weights), rl=list(weights))


def test_each_call_becomes_one_path_of_its_turns():
    """root: 1 2 3 [7 8] 4 [9]; its child: 1 2 5 [6]; and a call without credit."""
    root = call(
        "0", turn((1, 2, 3), (7, 8), versions=(VersionSpan(0, 2, 4),)), turn((4,), (9,), reused=5)
    )
    child = call("0.0", turn((1, 2, 5), (6,)), parent=CallSite("0", 0, 0))
    zero_variance = call("0.1", turn((1,), (2,)), parent=CallSite("0", 0, 0))
    found = token_sequences(
        [
            rollout(
                {("0", 0): rl(1, 2), ("0", 1): rl(3), ("0.0", 0): rl(4)}, root, child, zero_variance
            )
        ],
        0.7,
    )
    assert summary(found) == [
        ("t/call=0", [1, 2, 3, 7, 8, 4, 9], [0, 0, 0, 1, 2, 0, 3]),
        ("t/call=0.0", [1, 2, 5, 6], [0, 0, 0, 4]),
    ]
    whole = found[0]
    assert whole.mask.tolist() == [False, False, False, True, True, False, True]
    assert whole.advantages.tolist() == [0, 0, 0, 2, 2, 0, 2]
    assert whole.sampler_logprobs.tolist() == [0, 0, 0, -3.5, -4, 0, -4.5]
    assert whole.versions.tolist() == [-1, -1, -1, 4, 4, -1, -1]
    assert (whole.ce, whole.kd, whole.kept, whole.temperature) == (None, None, None, 0.7)


def test_fork_has_weights_only_on_its_own_tokens():
    root = call("0", turn((1, 2), (7,)), turn((4,), (9,), reused=3))
    fork = call("0.f", turn((5,), (6,), reused=3), fork=CallForkOrigin("0", 0))
    found = token_sequences(
        [rollout({("0", 0): rl(1), ("0", 1): rl(2), ("0.f", 0): rl(3)}, root, fork)]
    )
    assert summary(found) == [
        ("t/call=0", [1, 2, 7, 4, 9], [0, 0, 1, 0, 2]),
        ("t/call=0.f", [1, 2, 7, 5, 6], [0, 0, 0, 0, 3]),
    ]
    assert found[1].mask.tolist() == [False, False, True, False, True]


def test_call_with_truncated_history_becomes_two_paths():
    """Turn 1 reuses two of the four ids: 1 2 3 [7] is one path, 1 2 5 [6] the other."""
    split = call("0", turn((1, 2, 3), (7,)), turn((5,), (6,), reused=2))
    found = token_sequences([rollout({("0", 0): rl(1), ("0", 1): rl(2)}, split)])
    assert summary(found) == [
        ("t/call=0/path=0", [1, 2, 3, 7], [0, 0, 0, 1]),
        ("t/call=0/path=1", [1, 2, 5, 6], [0, 0, 0, 2]),
    ]


def test_reply_truncated_midway_keeps_all_its_credit():
    split = call("0", turn((1,), (7, 8, 9)), turn((5,), (6,), reused=3))
    found = token_sequences([rollout({("0", 0): rl(1, 2, 3), ("0", 1): rl(4)}, split)])
    assert summary(found) == [
        ("t/call=0/path=0", [1, 7, 8, 9], [0, 1, 2, 3]),
        ("t/call=0/path=1", [1, 7, 8, 5, 6], [0, 0, 0, 0, 4]),
    ]


def test_streams_and_kept_sets_are_aligned_with_their_tokens():
    credit = TokenCredit(
        ce=[1.0, 0.5], streams={"ref_logprobs": [-1.0, -2.0], "teacher": [[1, 2, 3], [4, 5, 6]]}
    )
    only = call("0", turn((1,), (7, 8), kept=((7, 9), (8,))))
    (found,) = token_sequences([rollout({("0", 0): credit}, only)])
    assert found.ce.tolist() == [0, 1, 0.5]
    assert found.rl.tolist() == [0, 0, 0]
    assert found.streams["ref_logprobs"].tolist() == [0, -1, -2]
    assert found.streams["teacher"].tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6]]
    assert (found.kept.offsets.tolist(), found.kept.ids.tolist()) == ([0, 0, 2, 3], [7, 9, 8])


def test_inconsistent_credit_is_rejected():
    plain = call("0", turn((1,), (7, 8)))
    with pytest.raises(
        ValueError,
        match="trajectory t, call 0, turn 0: a credit stream of 1 numbers for 2 sampled tokens",
    ):
        token_sequences([rollout({("0", 0): rl(1)}, plain)])
    with pytest.raises(
        ValueError,
        match="1 turns with credit in trajectory t are in no token sequence, the first being call 0, turn 1",
    ):
        token_sequences([rollout({("0", 0): rl(1, 1), ("0", 1): rl(1)}, plain)])
    without = call("0", turn((1,), (7,), logprobs=None))
    with pytest.raises(
        ValueError, match="sequence t/call=0 has policy-gradient weights, but not all"
    ):
        token_sequences([rollout({("0", 0): rl(1)}, without)])
    assert (
        len(token_sequences([rollout({("0", 0): TokenCredit(ce=[1.0])}, without)], temperature=0.0))
        == 1
    )
    with pytest.raises(
        ValueError, match="t/call=0 has policy-gradient weights, but was sampled at temperature 0"
    ):
        token_sequences([rollout({("0", 0): rl(1, 1)}, plain)], temperature=0.0)
    with pytest.raises(ValueError, match="weight 'rl' on its first token, which nothing predicts"):
        token_sequences([rollout({("0", 0): rl(1)}, call("0", turn((), (7,))))])


def test_rollouts_without_credit_give_no_sequences():
    assert (
        token_sequences(
            [
                rollout({}, call("0", turn((1,), (7,)))),
                rollout({("0", 0): TokenCredit()}, call("0")),
            ]
        )
        == []
    )


def test_compile_time_is_near_linear_in_calls():
    """Four times the calls (three turns each) take four times as long, within a factor of two."""

    def seconds(num: int) -> float:
        calls = [
            call(
                f"0.{index}",
                *(turn((1,) * 20, (7,) * 20, 40 * at) for at in range(3)),
                parent=CallSite("0", 0, 0),
            )
            for index in range(num)
        ]
        credits = {(each.id, at): rl(*[1.0] * 20) for each in calls for at in range(3)}
        many = rollout(credits, *calls)
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            assert len(token_sequences([many])) == num
            best = min(best, time.process_time() - start)
        return best

    assert seconds(400) < 8 * seconds(100)
