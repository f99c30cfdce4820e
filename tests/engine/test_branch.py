"""Branches of one turn share the turns before it and end independently; one is chosen to answer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import Stop, Store
from ramify.engine.branch_search import BestOfBranches, by_score, vote
from ramify.errors import ConfigError, ReplayDiverged
from ramify.types.message import Message
from ramify.types.trajectory import CallForkOrigin
from tests.engine.helpers import client, code, rlm
from tests.store.test_line_checksums import without_checksums


def test_branches_of_first_turn_are_decided_by_majority(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = client([code("FINAL('a')"), code("FINAL('b')"), code("FINAL('b')"), "no", "none", "no"])
    with rlm(model, store=store) as r:
        result = r.completion("text", "?", search=4)
        assert (result.answer, result.stop) == ("b", Stop.FINAL)
        calls = {
            call.id: (call.answer, call.fork, len(call.turns)) for call in result.trajectory.calls
        }
        assert calls == {
            "0": ("a", None, 1),
            "0:1": ("b", CallForkOrigin("0", -1), 1),
            "0:2": ("b", CallForkOrigin("0", -1), 1),
            "0:3": (None, CallForkOrigin("0", -1), 3),
        }
        assert result.trajectory.answered_by == "0:1"
        assert result.usage == model.served
        again = r.replay("last")
        assert (again.answer, again.usage) == (result.answer, result.usage)
        assert (again.trajectory.answered_by, store.load("last")) == ("0:1", result.trajectory)


def test_later_turn_branches_in_forks_of_its_session() -> None:
    replies = iter([code("x = [1]"), *[code(f"x.append({i})\nFINAL(x)") for i in range(3)]])
    model = client(lambda messages: next(replies))
    best = BestOfBranches(3, turn=1, choose_by=lambda answers: answers.index(max(answers)))
    with rlm(model) as r:
        result = r.completion("text", "?", search=best)
    assert result.answer == [1, 2]
    assert sorted(call.answer for call in result.trajectory.calls[1:]) == [[1, 1], [1, 2]]
    _, *branches = result.trajectory.calls
    assert [branch.fork for branch in branches] == [CallForkOrigin("0", 0)] * 2
    for branch in branches:
        assert result.trajectory.conversation(branch)[:-1] == list(model.requests[1].messages)


def test_branching_a_session_without_fork_support_is_an_error() -> None:
    model = client(lambda messages: code("1"))

    async def main() -> Any:
        async with rlm(model, sandbox="inprocess") as r:
            return await r.start("text", "?", search=BestOfBranches(2, turn=1)).result()

    result = asyncio.run(main())
    assert (result.stop, result.answer) == (Stop.ERROR, None)
    assert "fork" in result.error


def test_vote_takes_the_most_common_answer() -> None:
    assert [
        vote(answers)
        for answers in ([1, 2, 2], ["a", "b"], [None, "x"], [None, None], [{"a": 1}, {"a": 1.0}, 3])
    ] == [
        1,
        0,
        1,
        0,
        0,
    ]
    with pytest.raises(ConfigError, match="num must be at least 2"):
        BestOfBranches(1)


def test_rlm_can_branch_by_default() -> None:
    def model() -> Any:
        return client([code(f"FINAL('{letter}')") for letter in "abb"])

    with rlm(model(), branches=3) as r:
        assert r.completion("text", "?").answer == "b"
    with rlm(model(), branches=3) as r:
        result = r.completion("text", "?", search=1)
        assert (result.answer, result.trajectory.answered_by) == ("a", "")
    with rlm(model(), branches=3) as r:
        assert r.completion("text", "?", search=BestOfBranches(2)).trajectory.answered_by == "0"
    with rlm(
        model(), search=BestOfBranches(3, choose_by=by_score(lambda answer: answer == "a"))
    ) as r:
        assert r.completion("text", "?").answer == "a"


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"branches": 0}, "branches is 0: give 1 for no branching, or more"),
        (
            {"branches": 2, "search": BestOfBranches(2)},
            "branches is 2: a search was given too: give only one of them",
        ),
        ({"search": "best"}, "search='best' is a str: give a BranchSearch or a whole number"),
    ],
)
def test_invalid_search_is_refused(options: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        rlm([], **options)


def test_choosing_a_missing_answer_is_refused() -> None:
    class Odd:
        def width(self, call: Any) -> int:
            return 2 if call.id == "0" and call.turn == 0 else 1

        def choose(self, answers: Any) -> int:
            return 7

    with (
        rlm([code("FINAL(1)")] * 2, search=Odd()) as r,
        pytest.raises(ConfigError, match="chose 7 of 2 answers"),
    ):
        r.completion("text", "?")


TWO_LEVELS = BestOfBranches(3, turn=1)


def _two_levels(messages: tuple[Message, ...]) -> str:
    """After a first turn, every branch makes its own child call and plain call and answers with the
    replies."""
    if messages[0].role != "system":
        return f"re: {messages[-1].content}"
    if "Question: child" in messages[1].content:
        return code("FINAL(context)")
    num = sum(message.role == "assistant" for message in messages)
    asking = (
        "luck = random.random()\na = rlm_query('child', f'{luck}')\nb = llm_query(a)\nx.append(b)"
    )
    return code(["import random\nx = []", asking, "FINAL(x)"][num])


@pytest.mark.parametrize("cut", [0, 5, 12, 16, 24])
def test_branches_of_a_later_turn_are_replayed_and_resumed(tmp_path: Path, cut: int) -> None:
    store, model = Store(tmp_path), client(_two_levels)
    with rlm(model, store=store, search=TWO_LEVELS) as r:
        result = r.completion("text", "?")
        again = r.replay("last")
    ids = {call.id for call in result.trajectory.calls}
    assert ids == {"0", "0:1", "0:2", "0.0", "0.1", "0:1.0", "0:1.1", "0:2.0", "0:2.1"}
    assert (again.answer, again.usage) == (result.answer, result.usage)
    assert {call.id: call.answer for call in again.trajectory.calls} == _answers(result)
    if cut:
        journal = next(tmp_path.rglob("*.jsonl"))
        journal.write_bytes(b"".join(journal.read_bytes().splitlines(keepends=True)[:cut]))
        with rlm(client(_two_levels), store=store) as r:
            resumed = r.resume("last")
        assert _answers(resumed) == _answers(result), "forks draw the same random numbers again"


def _answers(result: Any) -> dict[str, Any]:
    return {call.id: call.answer for call in result.trajectory.calls}


def test_failed_branch_does_not_affect_the_others() -> None:
    lines = [code("import os; os.abort()"), code("FINAL('b')"), code("FINAL('b')")]
    rest = iter(lines)
    model = client(lambda messages: next(rest, lines[0]))
    with rlm(model, branches=3) as r:
        result = r.completion("text", "?")
    assert result.answer == "b"
    assert sorted((call.stop, call.answer) for call in result.trajectory.calls) == [
        (Stop.ERROR, None),
        (Stop.FINAL, "b"),
        (Stop.FINAL, "b"),
    ]


def test_reason_of_branches_without_an_answer_counts_the_turns_of_one_of_them() -> None:
    with rlm(lambda _: code("print(1)"), branches=3, limits={"max_turns": 4}) as r:
        result = r.completion("text", "?", answer_type=int)
    assert (result.stop, result.answer) == (Stop.MAX_TURNS, None)
    reason = "4 of 4 turns were used, and one more for a final reply: raise max_turns"
    assert result.reason == reason


def test_replay_diverging_in_a_branch_names_the_call(tmp_path: Path) -> None:
    store = Store(tmp_path)
    with rlm([code("FINAL(llm_query('a'))")] * 2 + ["one", "two"], store=store, branches=2) as r:
        r.completion("text", "?")
    journal = next(tmp_path.rglob("*.jsonl"))
    lines = without_checksums(journal)
    journal.write_bytes(b"".join(line for line in lines if b'"0:1.0"' not in line))
    with rlm([], store=store) as r, pytest.raises(ReplayDiverged, match=r"call 0:1\.0"):
        r.replay("last")


def test_conversation_continues_from_the_chosen_branch() -> None:
    model = client(
        [
            code("x = 'a'\nFINAL(x)"),
            code("x = 'b'\nFINAL(x)"),
            code("x = 'b'\ny = 1\nFINAL(x)"),
            code("FINAL(x + '1')"),
            code("FINAL(x + '2')"),
            code("FINAL(x + '2')"),
            code("FINAL(x)"),
        ]
    )
    with rlm(model, branches=3) as r, r.conversation("text") as c:
        assert [c.ask("?").answer, c.ask("and?").answer, c.ask("last?", search=1).answer] == [
            "b",
            "b2",
            "b",
        ]
        trajectory = c.trajectory
    assert [(call.id, call.fork, call.answer) for call in trajectory.calls] == [
        ("0", None, "a"),
        ("0:1", CallForkOrigin("0", -1), "b"),
        ("0:2", CallForkOrigin("0", -1), "b"),
        ("1", CallForkOrigin("0:1", 0), "b1"),
        ("1:1", CallForkOrigin("1", -1), "b2"),
        ("1:2", CallForkOrigin("1", -1), "b2"),
        ("2", CallForkOrigin("1:1", 0), "b"),
    ]
    said = [
        message.content
        for message in trajectory.conversation(trajectory.call("2"))
        if message.role == "assistant"
    ]
    assert said == [code("x = 'b'\nFINAL(x)"), code("FINAL(x + '2')"), code("FINAL(x)")]


def test_branches_can_branch_again() -> None:
    class Twice:
        """Branches in two at the first turn and again at the second."""

        def width(self, call: Any) -> int:
            return 2 if call.num_turns_before + call.turn < 2 else 1

        def choose(self, answers: Any) -> int:
            return by_score(sum)(answers)

    num = iter(range(100))

    def script(messages: tuple[Message, ...]) -> str:
        turn = sum(message.role == "assistant" for message in messages)
        return code(f"x = [{next(num)}]" if turn == 0 else f"x.append({next(num)})\nFINAL(x)")

    with rlm(client(script), search=Twice()) as r, r.conversation("text") as c:
        result = c.ask("?")
        answered_by = c.trajectory.answered_by
        going_on = c.ask("and?", search=1)
    calls = {call.id: call for call in result.trajectory.calls}
    last = calls.pop("1")
    assert {id: call.fork for id, call in calls.items()} == {
        "0": None,
        "0:1": CallForkOrigin("0", -1),
        "0:2": CallForkOrigin("0", 0),
        "0:1:1": CallForkOrigin("0:1", 0),
    }
    assert last.fork == CallForkOrigin(answered_by, len(calls[answered_by].turns) - 1)
    answers = {id: call.answer for id, call in calls.items()}
    assert answers["0"][0] == answers["0:2"][0] != answers["0:1"][0] == answers["0:1:1"][0]
    assert len({answer[1] for answer in answers.values()}) == 4
    assert result.answer == answers[answered_by] == max(answers.values(), key=sum)
    assert going_on.answer[:2] == result.answer, (
        "the conversation must continue in the session of the chosen branch"
    )
