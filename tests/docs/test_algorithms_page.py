"""``docs/algorithms.md``: its tables are up to date and agree with numbers computed independently
here."""

from __future__ import annotations

import re

import numpy as np
import pytest

from ramify.train.advantages import ALGORITHMS
from ramify.train.losses import POLICY_LOSSES
from ramify.train.losses.corrections import CORRECTIONS
from tests.docs.pages import ROOT, script

PAGE = (ROOT / "docs/algorithms.md").read_text(encoding="utf-8")
PAGE_SCRIPT = script("algorithms_page")


def column(table: str, index: int = 1) -> dict[str, list[float]]:
    """Return the numbers of one column by the name of the row."""
    (body,) = re.findall(rf"<!-- begin {table} -->\n(.*?)<!-- end", PAGE, re.DOTALL)
    rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in body.splitlines()[2:]]
    return {
        row[0].strip("`"): [float(each) for each in re.findall(r"-?[\d.]+", row[index])]
        for row in rows
    }


def test_tables_are_up_to_date():
    assert PAGE_SCRIPT.written(PAGE) == PAGE, "run: python scripts/algorithms_page.py"
    assert set(column("estimators")) == set(ALGORITHMS) - set(PAGE_SCRIPT.OTHERS)
    assert set(column("losses")) == set(POLICY_LOSSES)
    assert set(column("corrections")) == set(CORRECTIONS)


def whitened(values: list[float], lengths: tuple[int, ...] = (2, 1, 3, 2, 1, 1)) -> list[float]:
    every = np.repeat(values, lengths)
    return [(value - every.mean()) / every.std(ddof=1) for value in values]


R = np.array([1, 0.5, 0, 0])
STD = R.std(ddof=1)
BY_LENGTH = (2 * 1 + 1 * 0.5) / 8

ESTIMATES = {
    "dr_grpo": [0.625, 0.125, -0.375, -0.375, 0, 0],
    "grpo": [*((R - 0.375) / STD), 0, 0],
    "rloo": [1 - 0.5 / 3, 0.5 - 1 / 3, -0.5, -0.5, 0, 0],
    "maxrl": [*((R - 0.375) / 0.375), 0, 0],
    "opo": [*(R - BY_LENGTH), 0, 0],
    "pass_at_k": [0.5 / STD, 0, 0, 0, 0, 0],
    "gdpo": whitened([*((R - 0.375) / STD), 0, 0], (1, 1, 1, 1, 1, 1)),  # by rollout
    "hierarchical": [0.625, 0.125, -0.375, -0.375, 0, 0],
    "reinforce_pp": whitened([1, 0.5, 0, 0, 1, 1]),
    "reinforce_pp_baseline": whitened([0.625, 0.125, -0.375, -0.375, 0, 0]),
    "remax": [0.75, 0.25, -0.25, -0.25, 0.75, 0.75],
    "rae": [0.6, 0.1, -0.4, -0.4, 0.6, 0.6],
    "ppo": whitened([0.75, 0.25, -0.25, -0.25, 0.75, 0.75]),
}


@pytest.mark.parametrize("name", ESTIMATES)
def test_estimator_table_matches_independent_values(name: str):
    assert PAGE_SCRIPT.advantages_of(name) == pytest.approx(ESTIMATES[name], abs=5e-6)
    assert column("estimators")[name] == pytest.approx(ESTIMATES[name], abs=6e-4)


def test_reduction_table_has_the_weight_of_each_token():
    assert column("reductions", 2) == {
        "rollout": pytest.approx([1 / 2, 1, 1 / 3, 1 / 2, 1, 1], abs=6e-4), "token": [1] * 6, "constant": [0.1] * 6,
        "group": pytest.approx([1 / 8, 1 / 4, 1 / 12, 1 / 8, 1 / 2, 1 / 2], abs=6e-4),
        "call": pytest.approx([1 / 2, 1, 1 / 3, 1 / 2, 1, 1], abs=6e-4),
        "prompt": pytest.approx([1 / 8] * 4 + [1 / 2] * 2, abs=6e-4), "sum": [1] * 6,
    }  # fmt: skip
    divided = {
        "rollout": [6],
        "call": [6],
        "token": [10],
        "constant": [6],
        "group": [2],
        "prompt": [2],
        "sum": [1],
    }
    assert column("reductions", 3) == divided


def test_critic_table_matches_independent_values():
    assert [row[0] for row in column("critic", 3).values()] == pytest.approx(
        [0.125, 0.405]
    )  # the first two have one V
    assert "| 0.5 | 0.0 | 1.0 | 0.32 |" in PAGE  # held at 0.2: ½ 0.8²
