"""The catalogue of provider misbehaviours (``benchmarks/reality_catalogue.py``): its page, a sample
of its rows, and that a row can fail. ``benchmarks/reality.py`` runs the whole table."""

from __future__ import annotations

import importlib
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module", autouse=True)
def benchmarks() -> Iterator[None]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield
    sys.path.pop(0)


@pytest.fixture(scope="module")
def catalogue() -> Any:
    return importlib.import_module("reality_catalogue")


@pytest.fixture(scope="module")
def table() -> Any:
    return importlib.import_module("reality_table")


def test_page_has_the_table_and_each_weakness_of_litellm(catalogue):
    page = catalogue.MODELS_PAGE.read_text(encoding="utf-8")
    assert catalogue.written(page) == page, "run: python benchmarks/reality_catalogue.py"
    words = " ".join(page.split())
    sentences = {weakness.sentence for weakness in catalogue.WEAKER.values()}
    for sentence in sentences | {catalogue.LITELLM_OVER_TLS}:
        assert f"- {sentence}" in words


def test_each_behaviour_is_in_one_row_of_the_page(catalogue):
    names = [each.name for each in catalogue.BEHAVIOURS]
    assert len(set(names)) == len(names)
    outcomes = {catalogue.usual_effect(each) for each in catalogue.BEHAVIOURS}
    assert outcomes == set(catalogue.EFFECTS)
    assert {each.weaker for each in catalogue.BEHAVIOURS} - {""} == set(catalogue.WEAKER)


def test_quick_form_has_each_behaviour_once_and_every_combination(catalogue, table):
    rows = list(table.rows(quick=True))
    assert [row.behaviour for row in rows] == catalogue.BEHAVIOURS
    wires = {row.wire.name for row in rows}
    assert {"chat", "responses"} <= wires
    assert len({(row.wire.name, row.is_always, row.is_tls) for row in rows}) == 4 * len(wires)


SAMPLE = [
    "finish: null",
    "finish: length",
    "finish: filtered",
    "text: null",
    "text: a number",
    "choices: null inside",
    "error: beside a reply",
    "usage: missing",
    "body: a web page",
    "body: nested 100,000 deep",
    "status 400",
    "status 401",
    "status 429: wait until the year 3000000000",
    "http: closed in the body",
    "http: a late second reply that was not asked for",
    "http: a length of a terabyte",
    "stream: whole",
    "stream: an event with empty data",
    "stream: an error before any text",
    "stream: an error after text",
    "stream: ends in the middle",
]


@pytest.mark.parametrize("wire", ["chat", "responses", "messages"])
def test_sample_of_the_table_has_the_expected_outcomes(table, wire):
    chosen = [
        row
        for row in table.rows(quick=False)
        if row.behaviour.name in SAMPLE and row.wire.name == wire and not row.is_tls
    ]
    assert len(chosen) == 2 * len(SAMPLE)
    assert table.run_table(chosen).faults == {}


def test_row_with_tls(table):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    chosen = [row for row in table.rows(quick=False, only="http: gzip that is cut") if row.is_tls]
    assert table.run_table(row for row in chosen if row.wire.name == "chat").faults == {}


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("RIGHT", "ended as suspended instead of answer"),
        ("RETRIED_FREE", "booked (calls, unknown)"),
        ("REFUSED", "ended as suspended instead of error"),
    ],
)
def test_row_with_another_outcome_is_a_fault(catalogue, table, wrong, fault):
    (row, *_) = table.rows(quick=False, only="finish: null")
    row = row._replace(behaviour=row.behaviour._replace(outcomes=getattr(catalogue, wrong)))
    ((found,),) = table.run_table([row]).faults.values()
    assert fault in found


def test_believed_half_of_an_answer_is_a_wrong_answer(catalogue, table):
    """A server that cuts a reply and calls it complete cannot be found out by any client."""
    cut = catalogue.reply("cut", lambda wire, text: wire.body(catalogue.HALF), catalogue.RIGHT)
    (row, *_) = table.rows(quick=False, only="finish: null")
    ((found,),) = table.run_table([row._replace(behaviour=cut)]).faults.values()
    assert found.startswith("WRONG ANSWER")
