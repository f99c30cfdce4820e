"""The ledger task: formats, lengths and splits, and the reward of each call of a trajectory."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import random
from pathlib import Path
from typing import Any

import pytest

from ramify import RLM, SandboxSpec
from ramify.errors import ConfigError
from ramify.sandbox.base import digest_of
from ramify.tasks.base import Item, score_trajectory, task_of
from ramify.tasks.ledger.ledger_rows import (
    FORMATS,
    HELD_OUT_FORMATS,
    HELD_OUT_NAMES,
    KINDS,
    KNOWN_FORMATS,
    KNOWN_NAMES,
    LABELS,
    LedgerRowTextFormat,
    make_rows,
    solve,
)
from ramify.tasks.ledger.scripted_demonstrator import EXPERT, LedgerDemonstrator
from ramify.tasks.ledger.task import LedgerQuestion, documents_of, ledger
from ramify.tasks.validation import validate
from ramify.train.recipe import load_recipe
from ramify.types.trajectory import Call, CallSite, ContextRef, Stop, Trajectory

ROOT = Path(__file__).parents[2]
ROWS = [("bavo", "red", 17), ("fred", "blue", 5), ("kilu", "red", 8), ("bavo", "blue", 9)]


def test_row_formats_write_and_read_rows() -> None:
    assert (
        LedgerRowTextFormat("|", (2, 0, 1), True).format_rows(ROWS[:2])
        == "label|qty|user\nred|17|bavo\nblue|5|fred"
    )
    assert (
        LedgerRowTextFormat(",", (0, 1, 2), False).format_rows(ROWS[:2])
        == "bavo,red,17\nfred,blue,5"
    )
    assert (len(FORMATS), len(KNOWN_FORMATS), len(HELD_OUT_FORMATS)) == (48, 46, 2)
    assert all(each.parse_rows(each.format_rows(ROWS)) == ROWS for each in FORMATS)


@pytest.mark.parametrize(
    ("kind", "about", "answer"),
    [
        ("count", "red", 2),
        ("sum", "red", 25),
        ("max", "blue", 9),
        ("top", "", "bavo"),
        ("latest", "bavo", 9),
    ],
)
def test_solve_gives_the_expected_answers(kind: Any, about: str, answer: object) -> None:
    assert solve(ROWS, kind, about) == answer


def test_known_and_held_out_names_are_disjoint() -> None:
    assert (len(KNOWN_NAMES), len(HELD_OUT_NAMES)) == (320, 80)
    assert not set(KNOWN_NAMES) & set(HELD_OUT_NAMES)
    assert not [name for name in KNOWN_NAMES + HELD_OUT_NAMES for label in LABELS if label in name]


@pytest.mark.parametrize("kind", KINDS)
def test_sloppy_shortcuts_give_wrong_answers_on_every_ledger(kind: Any) -> None:
    """Counting in the text, leaving out the filter, comparing as text and taking the first row all
    give wrong answers."""
    rng, form = random.Random(kind), FORMATS[0]
    for header in (False, True):
        for _ in range(30):
            about = {"top": "", "latest": "bavo"}.get(kind, "red")
            rows = make_rows(rng, kind, about, header, 20)
            match kind:
                case "count":
                    wrong: object = form.format_rows(rows).count("red")
                case "sum":
                    wrong = sum(quantity for _, _, quantity in rows)
                case "max":
                    wrong = int(max(str(quantity) for _, label, quantity in rows if label == "red"))
                case "top":
                    wrong = max(rows, key=lambda row: str(row[2]))[0]
                case _:
                    wrong = next(quantity for user, _, quantity in rows if user == "bavo")
            assert wrong != solve(rows, kind, about)
            if not header and kind in (
                "count",
                "sum",
                "max",
            ):  # skipping a header that does not exist loses a row
                assert solve(rows[1:], kind, about) != solve(rows, kind, about)


def test_ledger_items_are_valid_and_follow_from_their_documents() -> None:
    validate(ledger(), num=50)
    validate(ledger(multi=0.5), num=50)
    item = ledger(multi=1.0, docs=(3, 3)).splits["train"][0]
    mark = item.metadata["mark"]
    parts = item.context[4:].split(f"\n{mark}\n")
    documents = documents_of(item)
    assert item.context.startswith(mark + "\n")
    assert parts == [item.context[each.start : each.end] for each in documents]
    rows = [row for each in documents for row in each.rows(item.context)]
    asked = LedgerQuestion.parse(item.question)
    assert asked is not None
    assert (asked.text, asked.over_all, solve(rows, asked.kind, asked.about)) == (
        item.question,
        True,
        item.gold,
    )


def test_held_out_formats_and_names_occur_only_in_their_splits() -> None:
    task = ledger(multi=0.5)

    def formats(split: str) -> set[LedgerRowTextFormat]:
        return {
            each.format
            for item in itertools.islice(task.splits[split], 200)
            for each in documents_of(item)
        }

    def names(split: str) -> set[str]:
        asked = [
            LedgerQuestion.parse(item.question)
            for item in itertools.islice(task.splits[split], 600)
        ]
        return {each.about for each in asked if each is not None and each.kind == "latest"}

    assert all(
        formats(split) == set(KNOWN_FORMATS)
        for split in ("train", "validation", "test", "test_names")
    )
    assert formats("test_formats") == set(HELD_OUT_FORMATS)
    assert names("train") <= set(KNOWN_NAMES)
    assert names("test") <= set(KNOWN_NAMES)
    assert names("test_names") == set(HELD_OUT_NAMES)
    assert "test_names" not in ledger(kinds=("count",)).splits


@pytest.mark.parametrize("chars", [300, 5_000, 200_000])
@pytest.mark.parametrize("multi", [0.0, 1.0])
def test_chars_sets_the_context_length(chars: int, multi: float) -> None:
    task = ledger(chars=max(chars, 600 if multi else 0), multi=multi)
    lengths = [len(item.context) for item in itertools.islice(task.splits["test"], 10)]
    assert sum(lengths) / 10 == pytest.approx(
        max(chars, 600 if multi else 0), rel=0.12 if chars < 1000 else 0.03
    )


def test_long_sets_the_share_of_long_training_items() -> None:
    """Spread evenly over orders of magnitude, with answers that follow from their rows; only in the
    training split."""
    task = ledger(multi=0.5, long=0.2, long_chars=(2_000, 200_000))
    items = list(itertools.islice(task.splits["train"], 500))
    lengths = [len(item.context) for item in items if len(item.context) > 1_900]
    assert len(lengths) == pytest.approx(0.2 * len(items), rel=0.2)
    assert sum(length < 20_000 for length in lengths) == pytest.approx(len(lengths) / 2, rel=0.3)
    assert max(lengths) < 1.03 * 200_000
    for item in items:
        asked = LedgerQuestion.parse(item.question)
        assert asked is not None
        rows = [row for document in documents_of(item) for row in document.rows(item.context)]
        assert solve(rows, asked.kind, asked.about) == item.gold
    plain = ledger(multi=0.5)
    for split in ("validation", "test", "test_formats", "test_names"):
        assert task.splits[split][:20] == plain.splits[split][:20]


@pytest.mark.parametrize("long_chars", [(10_000, 3_000_000), (1, 1)])
def test_long_zero_leaves_items_unchanged(long_chars: tuple[int, int]) -> None:
    """The contexts are the same as before the option existed."""
    items = ledger(multi=0.5, long=0, long_chars=long_chars).splits["train"][:200]
    text = "".join(item.question + item.context + str(item.gold) for item in items)
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == "c8a67a21b8c4b57a"


@pytest.mark.slow
def test_recursive_recipe_has_contexts_over_a_million_characters() -> None:
    """In demonstrations and rollouts, since the demo has a context of that length."""
    run = load_recipe(ROOT / "recipes/tiny_recursive.py")
    assert run.sft is not None
    for spec in (run.task, run.sft.task):
        assert spec is not None
        items = itertools.islice(task_of(spec.name, **spec.options).splits["train"], 500)
        lengths = [len(item.context) for item in items]
        assert max(lengths) > 1_000_000
        assert 0.02 < sum(length > 9_000 for length in lengths) / len(lengths) < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("multi", [0.0, 1.0])
def test_ledger_over_ten_million_characters(multi: float) -> None:
    """Answered in a session by the same code as for a few hundred characters."""
    task = ledger(chars=10_000_000, multi=multi, docs=(4, 4))
    item = task.splits["test"][0]
    assert len(item.context) == pytest.approx(10_000_000, rel=0.02)

    async def run() -> Trajectory:
        spec = SandboxSpec(provider="process", allow_weaker=True)
        async with RLM(LedgerDemonstrator(item, EXPERT), scaffold="tiny", sandbox=spec) as rlm:
            return (await rlm.start(await task.prepare(item), item.question).result()).trajectory

    trajectory = score_trajectory(task, item, asyncio.run(run()))
    assert trajectory.rewards == {"correct": 1.0}
    assert trajectory.call_rewards == {call.id: {"correct": 1.0} for call in trajectory.calls}
    assert len(trajectory.calls) == (5 if multi else 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ("cuont",)}, "unknown kind 'cuont': did you mean 'count'"),
        ({"kinds": ()}, "give at least one kind"),
        ({"multi": 1.5}, "a share from 0 to 1"),
        (
            {"multi": 0.5, "kinds": ("top", "latest")},
            "none of \\['top', 'latest'\\] can be asked over several",
        ),
        ({"rows": (3, 9)}, "rows=\\(3, 9\\); give at least 4"),
        ({"docs": (3, 2), "multi": 1.0}, "docs=\\(3, 2\\)"),
        ({"chars": 100}, "chars=100 is too short for a question"),
        ({"long": 1.5}, "long=1.5, long_chars=\\(10000, 3000000\\): long must be from 0 to 1"),
        ({"long": 0.1, "multi": 0.5, "long_chars": (500, 900)}, "at least 200 for each"),
        ({"long": 0.1, "long_chars": (900, 500)}, "the smaller first"),
    ],
)
def test_invalid_ledger_options_are_rejected(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ledger(**options)


# --- rewards of calls

FIRST, SECOND = (
    LedgerRowTextFormat(",", (0, 1, 2), False),
    LedgerRowTextFormat("|", (2, 0, 1), True),
)
CONTEXT = f"###\n{FIRST.format_rows(ROWS)}\n###\n{SECOND.format_rows(ROWS[:2])}"
SPANS = [
    {
        "start": 4,
        "end": 4 + len(FIRST.format_rows(ROWS)),
        "format": {"separator": ",", "order": [0, 1, 2], "header": False},
    },
    {
        "start": len(CONTEXT) - len(SECOND.format_rows(ROWS[:2])),
        "end": len(CONTEXT),
        "format": {"separator": "|", "order": [2, 0, 1], "header": True},
    },
]
ITEM = Item(
    "sum qty of 'red' in all docs",
    CONTEXT,
    42,
    id="ledger/test/0",
    metadata={"documents": SPANS, "mark": "###"},
)


def ref(text: str) -> ContextRef:
    return ContextRef(digest_of(text), len(text), "str")


def child(number: int, question: str, text: str, answer: Any, kind: Any = "rlm") -> Call:
    return Call(
        f"0.{number}",
        kind,
        "m:m",
        1,
        question,
        parent=CallSite("0", 0, 0),
        context=ref(text),
        answer=answer,
        stop=Stop.FINAL,
    )


def test_each_call_is_scored_by_its_own_question() -> None:
    first, second = FIRST.format_rows(ROWS), SECOND.format_rows(ROWS[:2])
    calls = [
        Call(
            "0", "rlm", "m:m", 0, ITEM.question, context=ref(CONTEXT), answer="42", stop=Stop.FINAL
        ),
        child(0, "sum qty of 'red'", first, 25),
        child(1, "sum qty of 'red'", second, 99),
        child(
            2, "count rows of 'red'", second + "\n", "1"
        ),  # right, although its parent should have asked another question
        child(3, "max qty of 'gold'", first, 3),  # no row is gold
        child(4, "sum qty of 'red'", first[3:], 25),  # unknown rows
        child(5, "What is the sum of red?", first, 25),  # not a ledger question
        child(6, "sum qty of 'red'", CONTEXT, 42),  # the whole context
        child(7, "user with top qty", first, "bavo", "lm"),
        child(8, "top qty", first, {"bavo": float("nan")}),
        Call(
            "0:1", "rlm", "m:m", 0, ITEM.question, context=ref(CONTEXT), answer=41, stop=Stop.FINAL
        ),  # a branch
    ]
    trajectory = Trajectory(
        "r", ITEM.question, context=ref(CONTEXT), calls=calls, answer=42, stop=Stop.FINAL
    )
    score_trajectory(ledger(multi=1.0), ITEM, trajectory)
    assert trajectory.rewards == {"correct": 1.0}
    assert {id: rewards["correct"] for id, rewards in trajectory.call_rewards.items()} == {
        "0": 1.0,
        "0.0": 1.0,
        "0.1": 0.0,
        "0.2": 1.0,
        "0.6": 1.0,
        "0.7": 1.0,
        "0:1": 0.0,
    }
    assert trajectory.metrics == {"children_correct": 0.8}


@pytest.mark.parametrize(
    "text", ["sum qty of 'red' in all docs", "user with top qty", "latest qty of 'bavo'"]
)
def test_ledger_questions_round_trip(text: str) -> None:
    asked = LedgerQuestion.parse(f" {text}\n")
    assert asked is not None
    assert asked.text == text


@pytest.mark.parametrize(
    "text", ["", "sum qty of 'red", "sum qty of ''", "sum qty of 'r'*9", "x" * 10**6]
)
def test_other_texts_are_not_ledger_questions(text: str) -> None:
    assert LedgerQuestion.parse(text) is None
