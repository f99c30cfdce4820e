"""Plans are checked when they are composed, and they can be printed, written and read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from ramify import ConfigError, plans
from tests.plans.helpers import LABELS, label_leaf

TEXT = plans.Leaf("Say what it is about.", label="about")
YES = plans.Leaf("Is it about money?", {"type": "boolean"}, label="money")
ROW = plans.Leaf(
    "Read it.",
    {
        "type": "object",
        "properties": {
            "user": {"type": "string"},
            "day": {"type": "string", "format": "date"},
            "price": {"type": "number"},
            "label": {"enum": LABELS},
        },
    },
    each=True,
    label="row",
)
LINES = plans.split("lines", 2000)
ROWS = LINES | plans.map(ROW) | plans.concat()


@pytest.mark.parametrize(
    ("plan", "kind"),
    [
        (LINES | plans.map(TEXT) | plans.reduce(TEXT), "text"),
        (LINES | plans.filter(YES) | plans.map(TEXT), "list of text"),
        (LINES | plans.map(YES) | plans.filter(plans.Comparison()), "list of boolean"),
        (ROWS | plans.count("label", "user"), "counts"),
        (ROWS | plans.total("price"), "number"),
        (ROWS | plans.best("price") | plans.field("user"), "text"),
        (ROWS | plans.periods("day", "month") | plans.count("day"), "counts"),
        (ROWS | plans.cross("user"), "list of pair of text and text"),
        (
            ROWS
            | plans.both(
                plans.filter(plans.Comparison("label", "==", "ham")) | plans.distinct("user"),
                plans.filter(plans.Comparison("price", ">", 3)) | plans.distinct("user"),
            )
            | plans.combine("intersection"),
            "list of text",
        ),
    ],
)
def test_a_plan_knows_the_type_of_its_answer(plan: plans.Plan, kind: str) -> None:
    assert str(plan.type) == kind
    assert plans.Plan.from_json(plan.to_json()) == plan


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (LINES, lambda: plans.filter(TEXT), "the predicate must give a boolean, but gives text"),
        (ROWS, lambda: plans.filter(plans.Comparison("label")), "the predicate must give a boolean, but gives text"),
        (ROWS, lambda: plans.filter(plans.Comparison("price", "==", "3")), "compares number with a str"),
        (ROWS, lambda: plans.filter(plans.Comparison("label", "==", "egg")), "not one of the labels ham"),
        (ROWS, lambda: plans.count("labl"), "needs the field 'labl', but the record has user, day"),
        (ROWS, lambda: plans.total("user"), "total needs a number, but got text"),
        (ROWS, lambda: plans.cross("user", plans.Comparison("user")), "must give a boolean, but gives text"),
        (ROWS, lambda: plans.periods("price"), "needs dates, but got number"),
        (ROWS, lambda: plans.join("user"), "join needs a pair of lists, but got list of record"),
        (ROWS | plans.both(plans.count("user"), plans.distinct("user")),
         lambda: plans.combine("union"), "needs a list, but got counts"),
        (ROWS | plans.both(plans.top(3, "price"), plans.top(2, "price")),
         lambda: plans.join("user"), "both records have the field"),
        (LINES, lambda: plans.concat() | plans.concat(), "concat needs a list, but got text"),
        (LINES, lambda: plans.reduce(YES), "merges items of type part, but its leaf gives boolean"),
        (plans.split("tokens"), lambda: plans.map(label_leaf()), "split by lines, records or sentences"),
        (plans.split("lines", 5000), lambda: plans.map(TEXT), "reads at most 4,000 tokens, but a part may have 5,000"),
        (LINES | plans.map(TEXT), lambda: plans.split("lines"), "split needs a text, but got list of text"),
        (LINES, lambda: plans.reduce(plans.Leaf("Merge.", tokens=100)), "two of its answers may take"),
    ],
)  # fmt: skip
def test_steps_that_do_not_fit_are_refused_when_they_are_joined(
    first: plans.Plan, second: Callable[[], plans.Plan], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        first | second()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: plans.classify([]), "set of labels is empty"),
        (lambda: plans.classify(["a", " "]), "none of them blank"),
        (lambda: plans.classify(["a", "b", "a"]), "'a' is given twice"),
        (lambda: plans.Leaf("Label.", {"enum": []}), "no labels|enum"),
        (lambda: plans.Leaf(" "), "empty prompt"),
        (lambda: plans.Leaf("a", reply_tokens=0), "reply_tokens=0"),
        (lambda: plans.Leaf("a", {"type": "strng"}), "strng"),
        (lambda: plans.Pattern("(?=a)"), "is not understood"),
        (lambda: plans.Relevance(0), "from 1 to 100"),
        (lambda: plans.ready_plan("sumarise"), "did you mean 'summarise'"),
        (lambda: plans.ready_plan("summarise", labels=["a"]), "labels"),
        (lambda: plans.split("words"), "by='words': Invalid enum value 'words'.*lines, records"),
        (lambda: plans.split("lines", "4k"), "tokens='4k': Expected 'int', got 'str'"),
        (lambda: plans.split("lines", True), "tokens=True: Expected 'int', got 'bool'"),
        (lambda: plans.top("3"), "k='3': Expected 'int'"),
        (lambda: plans.total("n", "median"), "how='median': Invalid enum value 'median'"),
        (lambda: plans.Comparison("n", "~"), "op='~'"),
        (lambda: plans.Leaf(3), "prompt=3: Expected 'str'"),
        (lambda: plans.map("label"), "leaf='label': Expected 'object', got 'str'"),
        (lambda: plans.Plan(()), "no steps"),
        (lambda: plans.Plan.from_json('{"steps": [{"step": "splat"}]}'), "splat"),
        (lambda: plans.Plan.from_json('{"steps": [{"step": "peek", "tokens": 0}]}'), "tokens=0"),
    ],
)
def test_wrong_values_are_refused(make: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()  # type: ignore[operator]


def test_a_plan_prints_as_a_picture() -> None:
    plan = ROWS | plans.both(plans.top(2, "price"), plans.top(3, "price")) | plans.combine("union")
    assert (
        str(plan)
        == """\
context
  │ split by lines, at most 2,000 tokens
  ▼ list of part
  │ map row
  ▼ list of list of record {user: text, day: date, price: number, label: text}
  │ concat
  ▼ list of record {user: text, day: date, price: number, label: text}
  ├─ left
  │    │ top 2 by price
  │    ▼ list of record {user: text, day: date, price: number, label: text}
  ├─ right
  │    │ top 3 by price
  │    ▼ list of record {user: text, day: date, price: number, label: text}
  ▼ pair of list of record {user: text, day: date, price: number, label: text} and list of record \
{user: text, day: date, price: number, label: text}
  │ combine (union)
  ▼ list of record {user: text, day: date, price: number, label: text}"""
    )


@pytest.mark.parametrize(
    ("question", "name"),
    [
        ("Summarise the reports", "summarise"),
        ("List all pairs of users who …", "pairwise"),
        ("How many errors are there?", "aggregate"),
        ("Which label is most common?", "aggregate"),
        ("Who wrote the play that won the prize which Ann founded?", "multi-hop"),
        ("Which host failed first?", "search"),
    ],
)
def test_the_words_of_a_question_choose_a_plan(question: str, name: str) -> None:
    assert plans.plan_for(question).name == name
    assert plans.plan_for(question).reason


FIRST_USE = """
import sys, threading
from ramify import plans
sys.setswitchinterval(1e-6)
ready = threading.Barrier(32)
threads = [threading.Thread(target=lambda: (ready.wait(), plans.aggregate())) for _ in range(32)]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


def test_many_threads_may_make_their_first_plan_at_once() -> None:
    """One in five of these processes crashed in msgspec, so several are started."""
    started = [subprocess.Popen([sys.executable, "-c", FIRST_USE]) for _ in range(4)]
    assert [process.wait(100) for process in started] == [0] * 4
