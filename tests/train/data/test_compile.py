"""Stamped rollouts become sequences: where each stamp stands, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest

from ramify.train.advantages.base import AssignedRollout, TokenCredit
from ramify.train.data.compile import token_sequences
from ramify.types.message import Message, Reply, VersionSpan
from ramify.types.trajectory import Call, Fork, Parent, Trajectory, Turn


def turn(prompt: tuple[int, ...], sampled: tuple[int, ...], reused: int = 0, **more: Any) -> Turn:
    given: dict[str, Any] = {"logprobs": tuple(-0.5 * id for id in sampled)} | more
    reply = Reply(Message("assistant", "x"), prompt_ids=prompt, token_ids=sampled, **given)
    return Turn(0, (), reply, reused_ids=reused)


def call(id: str, *turns: Turn, **more: Any) -> Call:
    return Call(
        id=id, kind="rlm", model="m", depth=id.count("."), question="q", turns=list(turns), **more
    )


def rollout(credits: dict[tuple[str, int], TokenCredit], *calls: Call) -> AssignedRollout:
    return AssignedRollout(Trajectory("t", "q", calls=list(calls)), credits)


def told(found: Any) -> list[tuple[str, list[int], list[float]]]:
    return [(each.name, each.token_ids.tolist(), each.rl.tolist()) for each in found]


def rl(*weights: float) -> TokenCredit:
    return TokenCredit(advantages=[2.0] * len(weights), rl=list(weights))


def test_calls_and_turns_become_paths():
    """root: 1 2 3 [7 8] 4 [9]; its child: 1 2 5 [6]; an lm call without a stamp."""
    root = call(
        "0", turn((1, 2, 3), (7, 8), versions=(VersionSpan(0, 2, 4),)), turn((4,), (9,), reused=5)
    )
    child = call("0.0", turn((1, 2, 5), (6,)), parent=Parent("0", 0, 0))
    zero_variance = call("0.1", turn((1,), (2,)), parent=Parent("0", 0, 0))
    found = token_sequences(
        [
            rollout(
                {("0", 0): rl(1, 2), ("0", 1): rl(3), ("0.0", 0): rl(4)}, root, child, zero_variance
            )
        ],
        0.7,
    )
    assert told(found) == [
        ("t/call=0", [1, 2, 3, 7, 8, 4, 9], [0, 0, 0, 1, 2, 0, 3]),
        ("t/call=0.0", [1, 2, 5, 6], [0, 0, 0, 4]),
    ]
    whole = found[0]
    assert whole.mask.tolist() == [False, False, False, True, True, False, True]
    assert whole.advantages.tolist() == [0, 0, 0, 2, 2, 0, 2]
    assert whole.sampler_logprobs.tolist() == [0, 0, 0, -3.5, -4, 0, -4.5]
    assert whole.versions.tolist() == [-1, -1, -1, 4, 4, -1, -1]
    assert (whole.ce, whole.kd, whole.kept, whole.temperature) == (None, None, None, 0.7)


def test_a_fork_counts_shared_tokens_once():
    root = call("0", turn((1, 2), (7,)), turn((4,), (9,), reused=3))
    fork = call("0.f", turn((5,), (6,), reused=3), fork=Fork("0", 0))
    found = token_sequences(
        [rollout({("0", 0): rl(1), ("0", 1): rl(2), ("0.f", 0): rl(3)}, root, fork)]
    )
    assert told(found) == [
        ("t/call=0", [1, 2, 7, 4, 9], [0, 0, 1, 0, 2]),
        ("t/call=0.f", [1, 2, 7, 5, 6], [0, 0, 0, 0, 3]),
    ]
    assert found[1].mask.tolist() == [False, False, True, False, True]


def test_a_history_that_was_cut_becomes_two_paths():
    """turn 1 reuses two of the four ids: 1 2 3 [7] is one path, 1 2 5 [6] the other."""
    split = call("0", turn((1, 2, 3), (7,)), turn((5,), (6,), reused=2))
    found = token_sequences([rollout({("0", 0): rl(1), ("0", 1): rl(2)}, split)])
    assert told(found) == [
        ("t/call=0/path=0", [1, 2, 3, 7], [0, 0, 0, 1]),
        ("t/call=0/path=1", [1, 2, 5, 6], [0, 0, 0, 2]),
    ]


def test_a_reply_that_was_cut_in_its_middle_keeps_all_its_stamps():
    split = call("0", turn((1,), (7, 8, 9)), turn((5,), (6,), reused=3))
    found = token_sequences([rollout({("0", 0): rl(1, 2, 3), ("0", 1): rl(4)}, split)])
    assert told(found) == [
        ("t/call=0/path=0", [1, 7, 8, 9], [0, 1, 2, 3]),
        ("t/call=0/path=1", [1, 7, 8, 5, 6], [0, 0, 0, 0, 4]),
    ]


def test_further_streams_and_kept_sets_stand_at_their_tokens():
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


def test_what_is_refused():
    plain = call("0", turn((1,), (7, 8)))
    with pytest.raises(
        ValueError,
        match="trajectory t, call 0, turn 0: a credit stream of 1 numbers for 2 sampled tokens",
    ):
        token_sequences([rollout({("0", 0): rl(1)}, plain)])
    with pytest.raises(
        ValueError,
        match="1 turns with credit in trajectory t fit no path, the first being call 0, turn 1",
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


def test_nothing_stamped_is_nothing_to_learn():
    assert (
        token_sequences(
            [
                rollout({}, call("0", turn((1,), (7,)))),
                rollout({("0", 0): TokenCredit()}, call("0")),
            ]
        )
        == []
    )


def test_growth_is_near_linear():
    """Four times the calls, of three turns each: four times the time, within a factor of two."""

    def seconds(num: int) -> float:
        calls = [
            call(
                f"0.{index}",
                *(turn((1,) * 20, (7,) * 20, 40 * at) for at in range(3)),
                parent=Parent("0", 0, 0),
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
