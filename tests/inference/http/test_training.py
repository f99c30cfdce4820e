"""The training loop with engines in other processes: a run of the small recipe over `ramify
serve-policy` equals the run with the engine in the trainer's process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.config import EvaluateSpec, LoraSpec, Run
from ramify.train.metrics import StepMetrics
from tests.shown import train
from tests.train.small import small

MEASURED = (
    "loss",
    "rl_loss",
    "grad_norm",
    "validation/reward",
    "test/reward",
    "sampled_tokens",
    "mismatch_max",
)


def short(**changes: Any) -> Run:
    """Return a run of two steps, with a weight update after the first."""
    run = small(warmup=None, evaluate=EvaluateSpec(num=1, final=("test",)), **changes)
    assert run.rl is not None
    assert run.sft is not None
    rl = msgspec.structs.replace(run.rl, steps=2)
    return msgspec.structs.replace(run, rl=rl, sft=msgspec.structs.replace(run.sft, num=10))


def measured(out: Path) -> list[dict[str, float]]:
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [
        {name: row["values"][name] for name in MEASURED if name in row["values"]} for row in rows
    ]


def test_run_over_http_equals_run_with_embedded_engine(tmp_path: Path) -> None:
    said: list[str] = []
    train(short(), tmp_path / "embedded", say=said.append)
    log, refused = tmp_path / "http/inference/server-0.log", set[int]()

    def ask_as_a_stranger(_: StepMetrics) -> None:
        url = re.search(r"http://127\.0\.0\.1:\d+", log.read_text())
        assert url
        for path in ("/v1/models", "/update_weights", "/pause"):
            with pytest.raises(HTTPError) as error:
                urlopen(
                    Request(url[0] + path, method="GET" if "models" in path else "POST"), timeout=60
                )
            refused.add(error.value.code)
            error.value.close()

    train(
        short(inference=InferenceSpec()),
        tmp_path / "http",
        listener=ask_as_a_stranger,
        say=said.append,
    )
    assert refused == {401}
    ours, theirs = measured(tmp_path / "http"), measured(tmp_path / "embedded")
    assert [row.keys() for row in ours] == [row.keys() for row in theirs]
    assert sum("rl_loss" in row for row in ours) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert one == pytest.approx(other, abs=1e-5)
    assert said == []
    assert (
        (tmp_path / "http/inference/server-0.log")
        .read_text()
        .startswith(str(tmp_path / "http/inference/checkpoint"))
    )


@pytest.mark.slow
def test_run_that_syncs_only_adapters_equals_run_with_embedded_engine(tmp_path: Path) -> None:
    """Each sync is checked against the fingerprint of the merged weights."""
    base = short()
    run = msgspec.structs.replace(
        base, policy=msgspec.structs.replace(base.policy, lora=LoraSpec(rank=2, alpha=4.0))
    )
    train(run, tmp_path / "embedded")
    apart = msgspec.structs.replace(
        run, inference=InferenceSpec(weight_sync="delta", weight_sync_options={"by": "gloo"})
    )
    train(apart, tmp_path / "http")
    ours, theirs = measured(tmp_path / "http"), measured(tmp_path / "embedded")
    assert sum("rl_loss" in row for row in ours) == 2
    assert ours == [pytest.approx(row, abs=1e-4) for row in theirs]


def test_unsupported_sampling_options_are_refused_before_anything_starts(tmp_path: Path) -> None:
    run = short(inference=InferenceSpec(engine="vllm"))
    assert run.rl is not None
    cut = msgspec.structs.replace(
        run.rl, rollout=msgspec.structs.replace(run.rl.rollout, top_p=0.9)
    )
    with pytest.raises(
        ConfigError,
        match=r"top_p=0.9 and top_k=None cannot be used in training with inference.engine=vllm",
    ):
        train(msgspec.structs.replace(run, rl=cut), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            InferenceSpec(engine="vllm"),
            r"inference\.engine=vllm cannot be started: no program 'vllm', also not on PATH: pip install "
            r"'vllm>=0\.29,<0\.34', set inference\.command to the command that starts it, or inference\.urls to servers that already run",
        ),
        (
            InferenceSpec(engine="sglang"),
            r"the package sglang is not installed for .*: pip install 'sglang>=0\.5\.23,<0\.6'",
        ),
        (
            InferenceSpec(command=("/nowhere/ramify", "serve-policy")),
            "no program '/nowhere/ramify', also not on PATH",
        ),
    ],
)
def test_missing_engine_program_is_reported_before_the_run_begins(
    spec: InferenceSpec, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=message):
        train(short(inference=spec), tmp_path / "out")
    assert not (tmp_path / "out").exists()
