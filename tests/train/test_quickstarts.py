"""Quickstarts of other libraries, redone here (``benchmarks/quickstarts``): each runs as it is, with
tiny models and data sets under the names that it uses, and has at most as many lines as theirs."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NAMES = [
    "trl_sft",
    "trl_grpo",
    "verifiers_env",
    "skyrl_gsm8k",
    "tinker_rl_basic",
    "tinker_sl_basic",
]


@pytest.fixture(scope="module")
def quickstarts() -> Iterator[Any]:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    yield importlib.import_module("bring_your_own_quickstarts")
    sys.path.pop(0)


@pytest.fixture(scope="module")
def folder(quickstarts: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("quickstarts")
    quickstarts.prepare(path)
    return path


def test_each_is_at_most_as_long_as_theirs(quickstarts: Any) -> None:
    lines = {
        each.ours.removesuffix(".py"): (
            quickstarts.num_lines(quickstarts.FOLDER / "ours" / each.ours),
            quickstarts.num_lines(quickstarts.FOLDER / "theirs" / each.theirs),
        )
        for each in quickstarts.QUICKSTARTS
    }
    assert list(lines) == NAMES
    assert not {name: pair for name, pair in lines.items() if pair[0] > pair[1]}


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_ours_runs_two_steps_at_the_first_try(name: str, quickstarts: Any, folder: Path) -> None:
    pytest.importorskip("datasets")
    if name.startswith("tinker"):
        pytest.importorskip("peft")
    each = next(each for each in quickstarts.QUICKSTARTS if each.ours == f"{name}.py")
    done = quickstarts.start(each, folder)
    assert done.returncode == 0, done.stderr
    steps = (folder / "out" / name / "metrics.jsonl").read_text().splitlines()
    assert len(steps) >= 2
    assert (folder / "out" / name / "policy/config.json").is_file()
