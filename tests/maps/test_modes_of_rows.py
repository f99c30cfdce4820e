"""The mode of a map: how each of its rows is answered, and a budget that a row's plan may exceed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import ramify
from ramify import ScriptedClient, Store
from tests.plans.helpers import lines, reply

QUESTION = "How many are spam?"
SESSION = "```repl\nFINAL('seen')\n```"
SHORT, LONG = lines(5), lines(900)


def script(messages: Any) -> str:
    return SESSION if messages[0].role == "system" else reply(messages)


@pytest.mark.parametrize(
    ("mode", "kinds"),
    [
        ("free", ["rlm", "rlm"]),
        ("plan", ["strategy", "strategy"]),
        ("direct", []),
        ("auto", ["strategy"]),
    ],
)
def test_rows_are_answered_in_the_mode_of_the_map(
    tmp_path: Path, mode: Any, kinds: list[str]
) -> None:
    """A row that one plain call answers has no run."""
    store = Store(tmp_path)
    client = ScriptedClient(script)
    result = ramify.map(QUESTION, [SHORT, LONG], client, store=store, mode=mode)
    assert (result.num_answered, result.num_failed) == (2, 0)
    runs = [store.load(summary.id) for summary in store.runs()]
    assert [run.root.kind for run in runs] == kinds
    again = ramify.map(QUESTION, [SHORT, LONG], ScriptedClient([]), store=store, mode=mode)
    assert [row["answer"] for row in again.table] == [row["answer"] for row in result.table]


def test_a_plan_of_a_row_that_may_exceed_the_budget_is_refused_before_any_call() -> None:
    client = ScriptedClient(script)
    result = ramify.map(QUESTION, [LONG], client, mode="plan", max_calls=3)
    (row,) = result.table
    assert "the plan may take 10 calls, and the limit is 3 calls: raise max_calls" in row["error"]
    assert not client.requests
