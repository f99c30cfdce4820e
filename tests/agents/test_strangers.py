"""Agents of other libraries, unchanged and in separate environments: each is trained for two steps.
``scripts/setup --agents`` makes the environments; ``scripts/test`` calls it."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.agents.small_policy import make
from tests.agents.strangers import STRANGERS, missing, trained, turns_of, worst_logprob
from tests.train.test_loop import read_rows

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("policy"))


@pytest.mark.parametrize("name", STRANGERS)
def test_stranger_is_trained_unchanged(name: str, policy: Path, tmp_path: Path) -> None:
    if reason := missing(name):
        pytest.skip(reason)
    steps = trained(name, policy, tmp_path)
    rows = [row.values for row in read_rows(tmp_path, "rl") if "loss" in row.values]
    assert len(rows) == len(steps) == 2
    assert all(row["failed_rollouts"] == 0 for row in rows)
    # The first step has the weights of the checkpoint, so its ids can be checked against them.
    num_ids, difference = worst_logprob(policy, steps[0])
    assert num_ids >= 6
    assert difference < 1e-3
    # None of these libraries rewrites a history that it repeats, so every request that is not the
    # first of its conversation continues the ids of the one before.
    assert turns_of(steps)["rewritten"] == 0
    causes = {call.cause for step in steps for each in step for call in each.calls}
    assert causes == {"new"}
    if name != "rlms":  # whose sub-calls are separate calls
        assert all(len(each.calls) == 1 for step in steps for each in step)
