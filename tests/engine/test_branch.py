"""Several continuations of one turn: they share what came before, end on their own, and one of them answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from ramify import Stop, Store
from ramify.engine.branch import Branches, vote
from ramify.errors import ConfigError
from ramify.types.trajectory import Fork
from tests.engine.helpers import client, code, rlm


def test_first_turns_are_tried_several_times_and_most_answers_win(tmp_path: Path) -> None:
    store = Store(tmp_path)
    model = client([code("FINAL('a')"), code("FINAL('b')"), code("FINAL('b')"), "no idea", "none"])
    with rlm(model, store=store) as r:
        result = r.completion("text", "?", search=4)
        assert (result.answer, result.stop) == ("b", Stop.FINAL)
        calls = {call.id: (call.answer, call.fork, len(call.turns)) for call in result.trajectory.calls}
        assert calls == {
            "0": ("b", None, 1),
            "0:1": ("b", Fork("0", -1), 1),
            "0:2": ("b", Fork("0", -1), 1),
            "0:3": ("none", Fork("0", -1), 2),
        }
        assert result.usage == model.served
        again = r.replay("last")
        assert (again.answer, again.usage) == (result.answer, result.usage)


def test_a_later_turn_is_continued_in_forks_of_its_session() -> None:
    replies = iter([code("x = [1]"), *[code(f"x.append({i})\nFINAL(x)") for i in range(3)]])
    model = client(lambda messages: next(replies))
    best = Branches(3, turn=1, choose_by=lambda answers: answers.index(max(answers)))
    with rlm(model) as r:
        result = r.completion("text", "?", search=best)
    assert result.answer == [1, 2]
    assert sorted(call.answer for call in result.trajectory.calls[1:]) == [[1, 1], [1, 2]]
    _, *branches = result.trajectory.calls
    assert [branch.fork for branch in branches] == [Fork("0", 0)] * 2
    for branch in branches:
        assert result.trajectory.conversation(branch)[:-1] == list(model.requests[1].messages)


def test_a_session_that_cannot_fork_says_so() -> None:
    model = client(lambda messages: code("1"))

    async def main() -> Any:
        async with rlm(model, sandbox="inprocess") as r:
            return await r.start("text", "?", search=Branches(2, turn=1)).result()

    result = asyncio.run(main())
    assert (result.stop, result.answer) == (Stop.ERROR, None)
    assert "fork" in result.error


def test_votes() -> None:
    assert [vote(answers) for answers in ([1, 2, 2], ["a", "b"], [None, "x"], [None, None], [{"a": 1}, {"a": 1.0}, 3])] == [
        1, 0, 1, 0, 0,
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="at least 2 continuations"):
        Branches(1)
