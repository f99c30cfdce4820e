"""Calls of several runs are matched by question."""

from __future__ import annotations

from typing import Any

from ramify.types.run_call_node import RunCallNode
from ramify.types.trajectory import CallSite, Stop
from ramify.viewer.run_comparison import match_calls


def run(*calls: tuple[str, str, str]) -> list[RunCallNode]:
    """Calls from (id, question, answer)."""
    nodes = []
    for index, (id, question, answer) in enumerate(calls):
        parent = CallSite(id.rpartition(".")[0], 0, 0) if "." in id else None
        node = RunCallNode(index, id, "rlm", "m", id.count("."), question, parent=parent)
        node.subject, node.stop = hash(question), Stop.FINAL
        node.set_answer(answer)
        nodes.append(node)
    return nodes


def table(*runs: list[RunCallNode]) -> list[Any]:
    return [
        (row["depth"], [call and call[0] for call in row["calls"]], row["same"])
        for row in match_calls(runs)
    ]


def test_calls_are_matched_by_question_not_position() -> None:
    first = run(
        ("0", "sum", "5"), ("0.0", "May", "2"), ("0.0.0", "week", "1"), ("0.1", "June", "3")
    )
    second = run(
        ("0", "sum", "5"), ("0.0", "June", "4"), ("0.1", "May", "2"), ("0.1.0", "week", "1")
    )
    assert table(first, second) == [
        (0, ["0", "0"], True),
        (1, ["0.0", "0.1"], True),
        (2, ["0.0.0", "0.1.0"], True),
        (1, ["0.1", "0.0"], False),
    ]


def test_runs_with_different_questions_show_missing_calls_as_gaps() -> None:
    first = run(("0", "first host", "a"), ("0.0", "read part 1 of 2", "x"))
    second = run(("0", "last host", "b"), ("0.0", "read part 1 of 3", "x"), ("0.1", "sum up", "y"))
    third = run(("0", "first host", "a"), ("0.0", "sum up", "y"))
    assert table(first, second, third) == [
        (0, ["0", "0", "0"], False),
        (1, ["0.0", "0.0", None], False),
        (1, [None, "0.1", "0.0"], False),
    ]


def test_equal_questions_are_matched_in_order() -> None:
    first = run(("0", "q", "a"), *((f"0.{n}", "the same", str(n)) for n in range(3)))
    assert table(first, first[:3]) == [
        (0, ["0", "0"], True),
        (1, ["0.0", "0.0"], True),
        (1, ["0.1", "0.1"], True),
        (1, ["0.2", None], False),
    ]
