"""Every suite proves itself: its right answers, its wrong ones, its texts, and its bounds."""

from __future__ import annotations

import functools
import hashlib
import importlib
import re
import statistics
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.errors import RamifyError
from ramify.extras import ENTRY_POINTS
from ramify.extras.suites.mrcr import MrcrScorer
from ramify.extras.suites.niah import NeedleScorer
from ramify.extras.suites.oolong_pairs import PairListF1Scorer
from ramify.extras.suites.planted import PlantedFactRecallScorer
from ramify.tasks.base import SPLITS, DatasetTask, Item, items_of, task_of, total
from ramify.tasks.validation import answer_only_trajectory, validate
from tests.extras.suites.readers import READERS, read

PAGE = Path(__file__).parents[3] / "docs/suites.md"
SUITES = tuple(READERS)
FAMILIES = {
    suite: tuple(importlib.import_module(f"ramify.extras.suites.{suite}").FAMILIES)
    for suite in SUITES
}
EACH = [(suite, family) for suite in SUITES for family in FAMILIES[suite]]
each_family = pytest.mark.parametrize(("suite", "family"), EACH, ids=map("-".join, EACH))
each_suite = pytest.mark.parametrize("suite", SUITES)
POOLS = 2_000_000
"""Bytes of the sentences and names from which filler is chosen. They do not grow with the text."""
NUM = 200
"""Items over which the score of a constant answer is computed."""


def score(task: DatasetTask, item: Item, answer: Any) -> float:
    return total(task.score(item, answer_only_trajectory(item, answer)).rewards, task.weights)


@functools.cache
def made(
    suite: str, family: str, tokens: int = 1_000, num: int = 4
) -> tuple[DatasetTask, list[Item]]:
    task = task_of(suite, tokens=tokens, families=(family,))
    assert isinstance(task, DatasetTask)
    return task, list(items_of(task, "test")[:num])


def right_of(item: Item) -> Any:
    return item.gold if item.right is None else item.right


def test_every_module_of_a_suite_is_proved_here() -> None:
    modules = {
        place.partition(":")[0].rpartition(".")[2]
        for place in ENTRY_POINTS["ramify.tasks"].values()
        if ".suites." in place
    }
    assert modules == set(SUITES)


@each_family
def test_a_program_that_reads_everything_scores_1(suite: str, family: str) -> None:
    task, items = made(suite, family)
    assert task.families == (family,)
    for item in items:
        assert score(task, item, read(suite, item).answer) == 1, item.question
        assert item.kind.split()[0] == family


@each_family
def test_right_answers_score_1_and_wrong_ones_do_not(suite: str, family: str) -> None:
    task, items = made(suite, family)
    assert validate(task, num=2) == ""
    for item in items:
        right = right_of(item)
        others = [right_of(other) for other in items if right_of(other) != right]
        assert score(task, item, right) == 1
        wrong = {
            "a near miss": item.wrong,
            "the right answer of another item": others[0],
            "only its beginning": str(right)[: len(str(right)) // 2],
            "a refusal": "The text does not say.",
            "nothing": None,
        }
        scores = {kind: score(task, item, answer) for kind, answer in wrong.items()}
        assert max(scores.values()) < 1, scores
        assert scores["a refusal"] == scores["nothing"] == 0


@each_family
def test_a_copy_of_the_text_does_not_score_1(suite: str, family: str) -> None:
    task, items = made(suite, family, 8_192, 2)
    for item in items:
        assert score(task, item, item.context) < 1
        assert score(task, item, item.context[-1_000:]) < 1


@each_family
def test_two_lengths_of_an_item_differ_only_in_filler(suite: str, family: str) -> None:
    for short, long in zip(
        made(suite, family, 5_000)[1], made(suite, family, 12_000)[1], strict=True
    ):
        for tokens, item in ((5_000, short), (12_000, long)):
            assert len(item.context) == pytest.approx(4 * tokens, rel=0.03)
        if suite == "oolong":  # no line of its texts is filler: docs/suites.md
            continue
        same = [
            (item.id, item.question, item.gold, item.kind, item.metadata) for item in (short, long)
        ]
        assert same[0] == same[1]
        assert read(suite, short).facts == read(suite, long).facts


@each_family
def test_an_answer_leaks_neither_into_the_question_nor_into_the_metadata(
    suite: str, family: str
) -> None:
    task, items = made(suite, family)
    for item in items:
        shown = " ".join([item.question, str(dict(item.metadata)), item.id, item.kind])
        if suite != "oolong":  # its questions name the labels, one of which is the answer
            assert score(task, item, shown) < 1
            assert suite == "code_qa" or str(right_of(item)) not in shown


@pytest.mark.parametrize("family", FAMILIES["code_qa"])
def test_no_letter_is_more_often_right_than_others(family: str) -> None:
    letters = [item.gold for item in made("code_qa", family, 1_000, 200)[1]]
    assert all(30 <= letters.count(letter) <= 70 for letter in "ABCD")


def test_the_order_of_values_does_not_show_which_one_is_right() -> None:
    ranks = []
    for item in made("code_qa", "value", 1_000, 200)[1]:
        values = [int(text) for text in item.metadata["choices"]]
        ranks.append(sorted(values).index(values["ABCD".index(item.gold)]))
    assert all(30 <= ranks.count(rank) <= 70 for rank in range(4))


@each_suite
def test_the_page_states_the_score_of_the_best_constant_answer(suite: str) -> None:
    task = task_of(suite, tokens=1_000)
    assert isinstance(task, DatasetTask)
    items = list(items_of(task, "test")[:NUM])
    # The best constant is known from other items: their answers, and parts of them.
    rights = [right_of(item) for item in items_of(task, "train")[:50]]
    candidates = {str(right) for right in rights} | {str(number) for number in range(20)}
    best = max(
        statistics.fmean(score(task, item, answer) for item in items) for answer in candidates
    )
    assert stated_constants()[suite] == f"{best:.2f}"


def stated_constants() -> dict[str, str]:
    """Suite -> the score in the table of its page."""
    rows = re.findall(r"^\| `(\w+)` \|.*\| (\d\.\d\d) \|$", PAGE.read_text(), re.MULTILINE)
    return dict(rows)


HASHES = {
    "code_qa": "4ad839dac6d8319c",
    "mrcr": "38023d583f3d19d7",
    "multihop": "d4dec4e557c61a25",
    "niah": "67df2501c407d721",
    "oolong": "7d8992bd23cc3860",
    "oolong_pairs": "c033ad74d0006b85",
    "planted": "4ff0d5ce47530936",
}
"""Suite -> hash of its items; the same on all versions of Python."""


@each_suite
def test_items_are_the_same_bytes_on_every_machine(suite: str) -> None:
    digest = hashlib.sha256()
    for family in FAMILIES[suite]:
        for item in made(suite, family, 1_000, 1)[1]:
            digest.update(msgspec.json.encode((item.question, item.context, item.gold, item.wrong)))
    assert digest.hexdigest()[:16] == HASHES[suite]


EARLIER = {
    "needle": (
        "ba1c76580dc2ab9a",
        ({"chars": 1_000, "distractors": 2}, {"chars": 20_000, "depth": 0.3, "seed": 4}),
    ),
    "oolong": (
        "d9b40b51d0810fa4",
        ({"tokens": 1_000, "with_labels": True, "users": 3}, {"tokens": 8_192, "seed": 4}),
    ),
}
"""Task -> hash of its items in the version before the suites, and the options that they had."""


@pytest.mark.parametrize("name", EARLIER)
def test_stored_configurations_have_the_items_of_earlier_versions(name: str) -> None:
    known, configurations = EARLIER[name]
    digest = hashlib.sha256()
    for options in configurations:
        for split in SPLITS:
            for item in items_of(task_of(name, **options), split)[:5]:
                parts = (item.id, item.question, item.context, item.gold, item.kind, item.wrong)
                digest.update(msgspec.json.encode(parts))
    assert digest.hexdigest()[:16] == known


@each_family
def test_a_text_needs_less_than_three_times_its_size(suite: str, family: str) -> None:
    task = task_of(suite, tokens=250_000, families=(family,))
    items = items_of(task, "test")
    items_of(task_of(suite, tokens=1_000, families=(family,)), "test")[0]  # fills caches
    tracemalloc.start()
    try:
        chars = len(items[0].context)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert chars == pytest.approx(1_000_000, rel=0.03)
    assert peak < 3 * chars + POOLS


@pytest.mark.parametrize(
    ("suite", "options", "message"),
    [
        (
            "niah",
            {"families": ("single1",)},
            "niah: unknown family 'single1': did you mean 'single_1'",
        ),
        ("niah", {"families": "vt, cw"}, "niah: unknown family 'cw': did you mean 'cwe'"),
        ("niah", {"families": ()}, "niah: give at least one family"),
        ("niah", {"families": 5}, "niah: families=5; give names, as in families=a,b"),
        ("niah", {"tokens": "lots"}, "niah: tokens=lots; give 1,000 to 10,000,000 tokens"),
        ("niah", {"tokens": 999}, "niah: tokens=999; give 1,000 to 10,000,000 tokens"),
        ("niah", {"tokens": 10_000_001}, "give 1,000 to 10,000,000 tokens"),
        ("niah", {"test": "nothing.jsonl"}, "file nothing.jsonl does not exist"),
        ("oolong_pairs", {"users": 14, "tokens": 1_000}, "users=14; give 6 to 13"),
        ("nia", {}, "unknown task 'nia': did you mean 'niah'"),
    ],
)
def test_wrong_options_are_one_line(suite: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RamifyError, match=re.escape(message)) as error:
        task_of(suite, **options)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("golds", "answer", "expected"),
    [
        (["7311460"], "The special magic number is 7311460.", 1.0),
        (["7311460"], "7311460 or 1112223", 0.5),
        (["7311460"], "27311460", 0.0),
        (["7311460", "1112223"], ["1112223", "7311460"], 1.0),
        (["7311460", "1112223"], "1112223", 0.5),
        (["7311460", "1112223"], "1112223, 5556667", 0.5),
        (["QWERT", "ASDFG"], "qwert and ASDFG; not ZXCVB", 2 / 3),
        (["tea", "jam"], "tea, jam", 1.0),
        (["tea", "jam"], "tea, jam, ham, egg", 0.5),
        (["tea", "jam"], "teapot", 0.0),
        (["tea", "jam"], "x" * 600 + " tea jam", 0.0),
    ],
)
def test_needle_score(golds: list[str], answer: Any, expected: float) -> None:
    words = "oil cup pan pot tea jam ham egg tea jam rye"
    listed = " ".join(f"{number}. {word}" for number, word in enumerate(words.split(), 1))
    item = Item("?", listed, golds)
    assert NeedleScorer()(answer, item) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("(12, 15)\n(15, 20)", 1.0),
        ([[15, 12], [20, 15]], 1.0),
        ("1. 12, 15", 0.0),
        ("12, 15\n20; 15", 1.0),
        ("(12, 15), (15, 20), (12, 20)", 0.8),
        ("(12, 15), (12, 15)", 2 / 3),
        ("12, 15, 20", 0.0),
        ("none", 0.0),
    ],
)
def test_pair_score(answer: Any, expected: float) -> None:
    item = Item("?", gold=[[12, 15], [15, 20]])
    assert PairListF1Scorer()(answer, item) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("aZ9The red tower.", 1.0),
        ("The red tower.", 0.0),
        (" aZ9The red tower.", 0.0),
        ("aZ9", 0.0),
        ("aZ9The red", 2 * 7 / (7 + 14)),
        ("aZ9" + "The red tower." * 5, 0.0),
        (None, 0.0),
    ],
)
def test_repeat_score(answer: Any, expected: float) -> None:
    item = Item("?", gold="aZ9The red tower.", metadata={"random_string_to_prepend": "aZ9"})
    assert MrcrScorer()(answer, item) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Lodavi received 4,210 crowns. Kelumo: 3100", 1.0),
        ({"Lodavi": 4210, "Kelumo": "3100"}, 1.0),
        ("4210 crowns for Lodavi and 3100 crowns for Kelumo", 1.0),
        ("Lodavi rose from 1,900 to 4,210 crowns.", 0.0),
        ("Lodavi 4210. Kelumo 4210.", 0.5),
        ("Lodavi 3100, Kelumo 4210", 0.0),
        ("Lodavi 4210. Kelumo 3100. Bibini 7000. Zavu 8000.", 0.5),
        ("word " * 150 + "Lodavi 4210", 0.0),
    ],
)
def test_fact_score(answer: Any, expected: float) -> None:
    item = Item("?", gold={"Lodavi": "4210", "Kelumo": "3100"})
    assert PlantedFactRecallScorer()(answer, item) == pytest.approx(expected)
