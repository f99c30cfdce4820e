"""Token paths, reassembled from what the tree stores once. Ids below 10 are prompt tokens, the
others are sampled."""

from __future__ import annotations

import msgspec
import pytest

from ramify.types import (
    Call,
    CallForkOrigin,
    CallTokenIds,
    Message,
    Reply,
    SampledTokenSpan,
    Trajectory,
    Turn,
    VersionSpan,
)
from ramify.types.event import (
    AnyEvent,
    CallStarted,
    ReplyReceived,
    RequestStarted,
    RunStarted,
    TrajectoryBuilder,
)


def turn(
    reused_ids: int, prompt: tuple[int, ...] | None, sampled: tuple[int, ...] | None, **more: object
) -> Turn:
    logprobs = None if sampled is None else tuple(-each / 10 for each in sampled)
    reply = Reply(
        Message("assistant", "…"), prompt_ids=prompt, token_ids=sampled, logprobs=logprobs
    )
    return Turn(0, (), msgspec.structs.replace(reply, **more), reused_ids=reused_ids)


def tree(*calls: tuple[str, CallForkOrigin | None, list[Turn]]) -> Trajectory:
    made = [Call(id, "rlm", "m", 0, "?", fork=fork, turns=turns) for id, fork, turns in calls]
    return Trajectory(id="r", question="?", calls=made)


ROOT = [
    turn(0, (1, 2), (10, 11), versions=(VersionSpan(0, 1, 4), VersionSpan(1, 2, 5))),
    turn(4, (3,), (12,), versions=(VersionSpan(0, 1, 5),)),
]


def test_path_contains_prompt_and_sampled_tokens() -> None:
    trajectory = tree(("0", None, ROOT))
    path = trajectory.path(trajectory.root)
    assert path == CallTokenIds(
        ids=(1, 2, 10, 11, 3, 12),
        sampled=(False, False, True, True, False, True),
        logprobs=(0.0, 0.0, -1.0, -1.1, 0.0, -1.2),
        versions=(-1, -1, 4, 5, -1, 5),
        spans=(SampledTokenSpan("0", 0, 2, 4), SampledTokenSpan("0", 1, 5, 6)),
    )
    assert len(path) == 6
    assert trajectory.path(trajectory.root, 0).ids == (1, 2, 10, 11)  # type: ignore[union-attr]
    assert trajectory.paths(trajectory.root) == [path]


def test_branch_shares_path_of_its_origin() -> None:
    trajectory = tree(
        ("0", None, ROOT),
        ("0:1", CallForkOrigin("0", 0), [turn(4, (3,), (13, 14)), turn(7, (4,), (15,))]),
        ("0:1:1", CallForkOrigin("0:1", 0), [turn(7, (4,), (16,))]),
        ("0:2", CallForkOrigin("0", -1), [turn(0, (1, 2), (17,))]),
        ("1", CallForkOrigin("0:1", 1), []),
    )
    paths = {call.id: trajectory.path(call) for call in trajectory.calls}
    assert {id: path and path.ids for id, path in paths.items()} == {
        "0": (1, 2, 10, 11, 3, 12),
        "0:1": (1, 2, 10, 11, 3, 13, 14, 4, 15),
        "0:1:1": (1, 2, 10, 11, 3, 13, 14, 4, 16),
        "0:2": (1, 2, 17),
        "1": (1, 2, 10, 11, 3, 13, 14, 4, 15),
    }
    assert paths["0:1:1"] is not None
    assert [(span.call, span.turn) for span in paths["0:1:1"].spans] == [
        ("0", 0),
        ("0:1", 0),
        ("0:1:1", 0),
    ]
    assert trajectory.paths(trajectory.call("0:1")) == [paths["0:1"]]
    assert trajectory.paths(trajectory.call("1")) == [], "it sampled nothing of its own"


def test_turn_that_does_not_extend_path_starts_new_row() -> None:
    cut_inside_a_reply = turn(3, (9,), (20,))
    trajectory = tree(("0", None, [*ROOT, cut_inside_a_reply, turn(5, (8,), (21, 22))]))
    rows = trajectory.paths(trajectory.root)
    assert [row.ids for row in rows] == [(1, 2, 10, 11, 3, 12), (1, 2, 10, 9, 20, 8, 21, 22)]
    assert rows[1].sampled == (False, False, True, False, True, False, True, True)
    assert rows[1].logprobs == (0.0, 0.0, -1.0, 0.0, -2.0, 0.0, -2.1, -2.2)
    assert rows[1].spans == (
        SampledTokenSpan("0", 0, 2, 3),
        SampledTokenSpan("0", 2, 4, 5),
        SampledTokenSpan("0", 3, 6, 8),
    )
    assert trajectory.path(trajectory.root) == rows[1]
    assert trajectory.path(trajectory.root, 1) == rows[0]


def test_turns_without_ids_have_no_path() -> None:
    trajectory = tree(
        ("0", None, [turn(0, None, None)]),
        ("1", None, []),
        ("2", None, [ROOT[0], turn(0, None, (12,)), turn(0, (1, 2, 10, 11, 3, 12, 4), (13,))]),
    )
    assert [trajectory.path(call) for call in trajectory.calls[:2]] == [None, None]
    assert [trajectory.paths(call) for call in trajectory.calls[:2]] == [[], []]
    mixed = trajectory.call("2")
    assert trajectory.path(mixed, 1) is None
    assert [row.ids for row in trajectory.paths(mixed)] == [
        (1, 2, 10, 11),
        (1, 2, 10, 11, 3, 12, 4, 13),
    ]
    assert trajectory.paths(mixed)[1].spans == (SampledTokenSpan("2", 2, 7, 8),)


def test_fields_that_server_omits_are_none() -> None:
    bare = tree(("0", None, [ROOT[0], turn(4, (3,), (12,), logprobs=None)]))
    path = bare.path(bare.root)
    assert path is not None
    assert (path.logprobs, path.versions, path.kept) == (None, (-1, -1, 4, 5, -1, -1), None)
    cut_off = tree(("0", None, [ROOT[0], turn(4, (3,), (12, 13), kept=((12, 19), (13,)))]))
    path = cut_off.path(cut_off.root)
    assert path is not None
    assert path.kept == ((), (), (), (), (), (12, 19), (13,))
    with pytest.raises(ValueError, match="2 token ids but 1 kept sets in one reply"):
        Reply(Message("assistant", ""), token_ids=(1, 2), kept=((1,),))


def test_fold_counts_turns_that_do_not_extend_path() -> None:
    first, again = ROOT
    events: list[AnyEvent] = [
        RunStarted(id="r", question="?", started_at=0.0),
        CallStarted(id="0", kind="rlm", model="m", depth=0, question="?"),
        *_turn_events("0", 0, 0, first),
        *_turn_events("0", 1, 2, again),
        *_turn_events("0", 2, 1, turn(2, (9,), (20,))),  # summarised: the messages diverge, too
        CallStarted(
            id="0:1", kind="rlm", model="m", depth=0, question="?", fork=CallForkOrigin("0", 0)
        ),
        *_turn_events("0:1", 0, 2, turn(3, (9,), (20,))),
    ]
    fold = TrajectoryBuilder()
    for event in events:
        fold.apply(event)
    assert fold.trajectory.metrics == {"split_turns": 2, "retokenised_turns": 1}
    assert fold.trajectory.errors == [
        "call 0:1, turn 0: its prompt keeps 3 of the 4 ids of the previous turns although it keeps "
        "their text: the client tokenized that text again"
    ]
    assert [[step.reused_ids for step in call.turns] for call in fold.trajectory.calls] == [
        [0, 4, 2],
        [3],
    ]


def _turn_events(call: str, index: int, reused: int, step: Turn) -> list[AnyEvent]:
    prompt = (Message("user", "x"),)
    return [
        RequestStarted(call=call, turn=index, reused=reused, prompt=prompt, prompt_hash="h"),
        ReplyReceived(call=call, turn=index, reply=step.reply, reused_ids=step.reused_ids),
    ]
