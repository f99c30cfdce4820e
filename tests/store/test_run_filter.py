"""The filter of runs, by the table that the page is tested with, too."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from ramify.errors import ConfigError
from ramify.store.reviews import HumanRunReview
from ramify.store.run_filter import parse_run_filter
from ramify.store.run_summary import RunSummary
from ramify.types.message import Usage
from ramify.types.trajectory import Stop

TABLE = json.loads(Path(__file__).with_name("filter_cases.json").read_text())
NOW = datetime.fromisoformat(TABLE["now"]).timestamp()


def summary(row: dict[str, Any]) -> RunSummary:
    return RunSummary(
        row["id"],
        row["question"],
        row["model"],
        datetime.fromisoformat(row["when"]).timestamp(),
        row["seconds"],
        num_calls=row["calls"],
        depth=row["depth"],
        usage=Usage(input_tokens=row["tokens"]),
        cost=row["cost"],
        stop=Stop(row["stop"]) if row["stop"] else None,
        rewards={"correct": row["reward"]} if "reward" in row else {},
        answer=row.get("answer"),
        task=row.get("task", ""),
        review=HumanRunReview(tuple(row.get("labels", ())), row.get("note", "")),
    )


RUNS = [summary(row) for row in TABLE["rows"]]


@pytest.mark.parametrize(("text", "ids"), TABLE["cases"])
def test_filter_selects_and_sorts(text: str, ids: list[str]) -> None:
    assert [run.id for run in parse_run_filter(text, NOW).apply(RUNS)] == ids


@pytest.mark.parametrize(("text", "why", "fix"), TABLE["wrong"])
def test_unreadable_filter_is_an_error_with_its_fix(text: str, why: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_run_filter(text, NOW)
    assert why in str(caught.value)
    assert f"use {fix}" in str(caught.value)


def test_groups_have_the_most_frequent_value_first() -> None:
    found = parse_run_filter("group:label").groups(RUNS)
    assert [(name, len(runs)) for name, runs in found] == [("", 4), ("odd, wrong unit", 1)]
