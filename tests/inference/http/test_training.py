"""The one loop with engines in processes of their own: a run of the small recipe over `ramify serve-policy` is the run that
it is with the engine in its own process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ramify.build import train
from ramify.inference.http.spec import InferenceSpec
from ramify.train.config import Run
from tests.train.small import small

MEASURED = ("loss", "rl_loss", "grad_norm", "validation/reward", "test/reward", "sampled_tokens", "mismatch_max")


def short(**changes: Any) -> Run:
    run = small(warmup=None, **changes)
    assert run.rl is not None
    return msgspec.structs.replace(run, rl=msgspec.structs.replace(run.rl, steps=2))


def measured(out: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{name: row["values"][name] for name in MEASURED if name in row["values"]} for row in rows]


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    out = tmp_path_factory.mktemp("embedded")
    train(short(), out, say=lambda _: None)
    return measured(out)


@pytest.mark.parametrize(
    "spec",
    [InferenceSpec(), InferenceSpec(num=2, carrier="delta")],
    ids=["one, shared memory", "two, deltas"],
)
def test_a_run_is_the_same_over_http(spec: InferenceSpec, embedded: list[dict[str, float]], tmp_path: Path) -> None:
    said: list[str] = []
    train(short(inference=spec), tmp_path, say=said.append)
    ours = measured(tmp_path)
    assert [row.keys() for row in ours] == [row.keys() for row in embedded]
    assert sum("rl_loss" in row for row in ours) == 2
    for one, other in zip(ours, embedded, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert said == []
