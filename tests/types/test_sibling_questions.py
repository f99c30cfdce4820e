"""What tells the calls of one cell apart, and the sentence about one that differs."""

from __future__ import annotations

from typing import Any

import pytest

from ramify.types.call_tree import CallTree
from ramify.types.sibling_question_diff import SiblingQuestionStore
from ramify.types.trajectory import Call, CallSite, Stop, Trajectory


def told(questions: list[str]) -> list[tuple[str, str]]:
    """(telling part, name) of each question."""
    asked = SiblingQuestionStore()
    for question in questions:
        asked.add(question)
    return [(asked.distinguishing_text(n), asked.call_name(n)) for n in range(len(questions))]


LONG = "Read this page and answer. " * 60
CASES: list[tuple[list[str], list[tuple[str, str]]]] = [
    (
        [f"Sum the revenue column of sheet {n} of the workbook" for n in (1, 2, 10)],
        [("sheet 1", "sheet 1"), ("sheet 2", "sheet 2"), ("sheet 10", "sheet 10")],
    ),
    (  # a short beginning is not left out
        [f"part {n}: which hosts fail? {n * 'x'}" for n in (1, 2)],
        [("", "part 1"), ("", "part 2")],
    ),
    (
        ["Summarise the report of Al.", "Summarise the report of Bob."],
        [("Al.", "Al"), ("Bob.", "Bob")],
    ),
    (["When did it fail?", "Why did it fail?"], [("", "“When did it fail?”"), ("", "“Why did it fail?”")]),
    (["the same"] * 3, [("", f"number {n} of 3") for n in (1, 2, 3)]),
    ([LONG + f"page {n}" for n in (7, 8)], [("page 7", "page 7"), ("page 8", "page 8")]),
    (["", "a"], [("", "number 1 of 2"), ("", "“a”")]),
    (["alone"], [("", "number 1 of 1")]),
    (  # the third shares less with the first than the second did
        ["Count the rows of table 1 in May", "Count the rows of table 2 in May", "Count the rows of June"],
        [("table 1 in May", "table 1 in May"), ("table 2 in May", "table 2 in May"), ("June", "June")],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("questions", "expected"), CASES)
def test_telling_part_and_name(questions: list[str], expected: list[tuple[str, str]]) -> None:
    assert told(questions) == expected


def test_telling_parts_do_not_depend_on_later_agreement() -> None:
    """A part that grows gets back exactly what it had shared before."""
    words = [f"Count the rows of table {n} in {place}" for place in "AB" for n in range(30)]
    parts = told(words)
    assert all(
        word.endswith(telling) and telling for word, (telling, _) in zip(words, parts, strict=True)
    )
    assert len({telling for telling, _ in parts}) == 60


def marked(answers: list[Any], question: str = "Sum the revenue column of sheet {}") -> list[str]:
    """Sentences about the calls that differ, of a cell whose calls returned ``answers``."""
    run = Trajectory(id="run", question="all?")
    root = Call("0", "rlm", "m", 0, "all?", stop=Stop.FINAL)
    children = [
        Call(f"0.{n}", "lm", "m", 1, question.format(n + 1), CallSite("0", 0, 0), answer=answer,
             stop=Stop.ERROR if isinstance(answer, Exception) else Stop.FINAL)
        for n, answer in enumerate(answers)
    ]  # fmt: skip
    for call in children:
        if isinstance(call.answer, Exception):
            call.answer, call.error = None, str(call.answer)
    run.calls = [root, *children]
    tree = CallTree()
    tree.build_from_trajectory(run)
    return [node.outlier for node in tree.order if node.outlier]


def test_sentence_names_the_call_in_words() -> None:
    numbers = [30_000 + 37 * n for n in range(12)]
    assert marked([*numbers[:6], 1414, *numbers[7:]]) == [
        "sheet 7 returned 1,414; its siblings about 30,166"
    ]
    assert marked(["31"] * 3 + ["30"] + ["31"], "How many days has May?") == [
        "number 4 of 5 returned 30; 4 of 5 with the same question returned 31"
    ]
    assert marked([1, 2, 3, "none found", 5]) == [
        "sheet 4 returned text: “none found”; 4 siblings returned a number"
    ]
    assert marked(["a b"] * 5 + ["word " * 40]) == [
        "sheet 6 returned 200 characters; its siblings about 3: “word word word word word word word word…”"
    ]
    assert marked([*numbers, ValueError("the prompt was filtered")]) == [
        "sheet 13 failed, unlike most of its 12 siblings: the prompt was filtered"
    ]
    assert marked(numbers) == []
