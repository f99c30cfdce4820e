"""Paid replies are not lost: partially failed batches, limits in the middle of a batch, reserved
names, and unusual forms of answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ramify import Stop, Store
from ramify.testing.scripted_client import refused
from tests.engine.helpers import by_role, client, code, rlm


def reply_or_refuse(prompt: str) -> Any:
    return refused(400, "no") if "bad" in prompt else f"re: {prompt}"


@pytest.mark.parametrize(
    "cell",
    [
        "found = llm_query_batched(['a', 'bad', 'c'])",
        "try:\n  llm_query_batched(['a', 'bad', 'c'])\nexcept SubcallError: pass",
        "found = [llm_query(p) for p in ['a', 'c', 'bad']]",
        "found = [int(r) for r in llm_query_batched(['a', 'c'])]",
    ],
)
def test_replies_of_a_failed_cell_are_available_in_the_next(cell: str) -> None:
    model = client(
        by_role([code(cell), code("FINAL([r for r in last_replies if r])")], reply_or_refuse)
    )
    with rlm(model) as r:
        result = r.completion("text", "?")
    assert result.answer == ["re: a", "re: c"]
    assert "replies to this cell's calls arrived; all are in the list `last_replies`" in (
        result.trajectory.root.turns[1].prompt[-1].content
    )


def test_existing_last_replies_variable_is_not_overwritten() -> None:
    lines = [
        "last_replies = 1",
        "llm_query_batched(['a', 'bad'])",
        "FINAL([last_replies, last_replies_])",
    ]
    with rlm(client(by_role([code(line) for line in lines], reply_or_refuse))) as r:
        assert r.completion("text", "?").answer == [1, ["re: a", None]]


def test_batch_exceeding_the_remaining_calls_is_refused_before_its_first_call(
    tmp_path: Path,
) -> None:
    lines = [
        "llm_query_batched([str(i) for i in range(9)])",
        "FINAL(llm_query_batched(['a', 'b']))",
    ]
    model = client(by_role([code(line) for line in lines]))
    with rlm(model, limits={"max_calls": 8}, store=Store(tmp_path)) as r:
        result = r.completion("text", "?")
        assert r.replay("last").answer == result.answer == ["re: a", "re: b"]
    error = result.trajectory.root.turns[0].cells[0].error
    assert error is not None
    assert "9 calls, but 6 of the run's 8 are left: none was made; ask for 6 at most" in error
    assert [call.id for call in result.trajectory.calls] == ["0", "0.0", "0.1"]


@pytest.mark.parametrize(
    ("last", "answer"),
    [
        ("FINAL(len(rs))", 3),
        (code("FINAL(sorted(rs))"), ["re: 0", "re: 1", "re: 2"]),
        ("FINAL(rs)", ["re: 0", "re: 1", "re: 2"]),
        ("FINAL(three)", "three"),
        ("FINAL(f(x) is unknown)", "f(x) is unknown"),
        ("FINAL(f(x))", "f(x)"),
        (code("FINAL(llm_query('more'))"), None),
    ],
)
@pytest.mark.parametrize("limit", [{"max_calls": 5}, {"max_turns": 1}])
def test_last_word_can_run_code_but_make_no_calls(
    limit: dict[str, Any], last: str, answer: Any
) -> None:
    root = [code("rs = llm_query_batched(['0', '1', '2'])"), last]
    model = client(by_role(root))
    with rlm(model, limits=limit) as r:
        result = r.completion("text", "?")
    assert (result.answer, result.stop.is_truncated()) == (answer, True)
    assert len(model.requests) == 5


def test_value_assigned_to_reserved_name_is_kept_under_another() -> None:
    lines = [
        "context = llm_query('a')\nhistory = [1]",
        "FINAL([own_context, own_history, context])",
    ]
    with rlm(client(by_role([code(line) for line in lines]))) as r:
        result = r.completion("text", "?")
    assert result.answer == ["re: a", [1], "text"]
    shown = result.trajectory.root.turns[1].prompt[-1].content
    assert "[note] your value of `history` is in `own_history`" in shown
    assert "[note] your value of `context` is in `own_context`" in shown


def test_dict_assigned_to_answer_counts_as_answer() -> None:
    with rlm([code("answer = {'content': [1], 'ready': True}")]) as r:
        result = r.completion("text", "?")
    assert (result.answer, result.stop, len(result.trajectory.root.turns)) == ([1], Stop.FINAL, 1)


def test_third_lost_session_still_allows_a_last_word(tmp_path: Path) -> None:
    lines = [code("import os; os._exit(3)")] * 3 + ["FINAL(what I saw)"]
    with rlm(client(lines), store=Store(tmp_path)) as r:
        result = r.completion("text", "?")
    assert (result.stop, result.answer) == (Stop.ERROR, "what I saw")
    assert "The session was lost 3 times." in result.trajectory.root.turns[3].prompt[-1].content
