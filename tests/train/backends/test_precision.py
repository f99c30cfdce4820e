"""Precision follows from the checkpoint and the kind of device; any of them starts and trains
here."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import ramify
from ramify.errors import ConfigError, TrainError
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.inference.local.local_client import LocalClient
from ramify.models.load import Policy, from_config
from ramify.train.assemble import RunParts, assemble
from ramify.train.backends.base import ComputeSpec, ShardSpec, decided
from ramify.train.backends.single import SingleBackend
from ramify.train.config import Run
from ramify.train.data.pack import pack
from ramify.train.execute import train
from ramify.train.open_run import trained_model
from ramify.train.policy_defaults import RunPrecision, precision_of
from ramify.train.selfcheck import AuditedClient, CanaryLimits, SelfCheck
from ramify.types.message import Message
from tests.train.backends.small import policy as small_policy
from tests.train.backends.small import tree
from tests.train.small import small

ROOT = Path(ramify.__file__).parent
PROMPT = [Message("user", "count rows of 'red' in a table with more columns than any other")]


@pytest.mark.parametrize(
    ("asked", "dtype", "found"),
    [
        ("auto", torch.float32, "fp32"),
        ("auto", torch.bfloat16, "bf16"),
        ("auto", torch.float16, "bf16"),
        ("fp32", torch.bfloat16, "fp32"),
        ("bf16", torch.float32, "bf16"),
    ],
)
def test_auto_is_the_precision_of_the_policy(asked: Any, dtype: torch.dtype, found: str) -> None:
    assert decided(ComputeSpec(precision=asked), dtype, "cpu").precision == found


def both(dtype: Any, products: Any, stored: str, device: str, **more: Any) -> tuple[str, str]:
    return tuple(precision_of(precise(products, dtype), stored, device, **more))  # type: ignore[return-value]


def test_engine_and_trainer_are_decided_together() -> None:
    found = {
        (dtype, products): [
            both(dtype, products, stored, device)
            for stored, device in (("bfloat16", "cpu"), ("float32", "cuda"), ("float16", "cuda"))
        ]
        for dtype, products in (
            ("auto", "auto"),
            ("auto", "bf16"),
            ("auto", "fp32"),
            ("bfloat16", "auto"),
            ("float32", "bf16"),
        )
    }
    fp32, bf16 = ("float32", "fp32"), ("bfloat16", "bf16")
    assert found == {
        ("auto", "auto"): [fp32, fp32, ("float16", "bf16")],
        ("auto", "bf16"): [bf16] * 3,
        ("auto", "fp32"): [fp32] * 3,
        ("bfloat16", "auto"): [bf16] * 3,
        ("float32", "bf16"): [("float32", "bf16")] * 3,
    }
    assert both("auto", "auto", "float16", "cuda", has_bf16=False) == ("float16", "fp32")


def test_the_tolerance_follows_from_both() -> None:
    def limits(dtype: str, products: Any, **inference: Any) -> tuple[float, float]:
        spec = InferenceSpec(**inference) if inference else None
        return RunPrecision(dtype, products).canary_limits(small(inference=spec))[:2]

    assert limits("float32", "fp32") == (1e-4, 0.0)
    assert limits("float32", "fp32", engine="vllm", urls=("http://a",)) == (1e-3, 0.0)
    assert limits("float16", "fp32") == (0.04, 2**-8)
    assert limits("float16", "bf16") == limits("bfloat16", "fp32") == (0.3, 2**-5)
    assert limits("bfloat16", "bf16", tolerance=0.1) == (0.1, 0.0)


def test_precisions_that_cannot_agree() -> None:
    mixed = msgspec.structs.replace(precise("bf16", "float32"), deterministic=True)
    with pytest.raises(ConfigError, match=r"^deterministic=true needs one precision.*only one"):
        precision_of(mixed, "float32", "cpu")
    with pytest.raises(ConfigError, match=r"^policy\.dtype=auto and compute\.precision=bf16: this"):
        both("auto", "bf16", "bfloat16", "cuda", has_bf16=False)
    near = msgspec.structs.replace(
        precise("bf16", "auto"), inference=InferenceSpec(urls=("http://a",), tolerance=1e-3)
    )
    with pytest.raises(
        ConfigError, match=r"^inference\.tolerance=0\.001 is less than one rounding"
    ):
        precision_of(near, "float32", "cpu")


ASKING = re.compile(
    r"\b(_is_\w+_supported|get_cpu_capability|get_capabilities|_is_mkldnn\w*|\w*avx\w*)\b"
)
"""Names by which a program learns from torch what a processor is fast at."""


def test_nothing_asks_what_the_processor_is_fast_at() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted(ROOT.rglob("*.py"))
        for name in ASKING.findall(path.read_text())
    ]
    assert found == []


FORCED = """
import sys, torch
for name in dir(torch.cpu):
    if name.startswith("_is_") and name.endswith("_supported"):
        setattr(torch.cpu, name, lambda: sys.argv[1] == "yes")
import json
from ramify.train.execute import train
from ramify.train.backends.base import ComputeSpec
from tests.train.small import small
run = small(compute=ComputeSpec())
rows = []
train(run, sys.argv[2], listener=rows.append)
losses = [row.values[name] for row in rows for name in ("loss", "grad_norm") if name in row.values]
print(json.dumps([torch.get_float32_matmul_precision(), losses]))
"""


def test_a_run_is_the_same_whatever_the_processor_says_of_bf16(tmp_path: Path) -> None:
    """Start-up and training with the answer forced to yes and to no, each in its own process."""
    found = []
    for answer in ("yes", "no"):
        done = subprocess.run(
            [sys.executable, "-c", FORCED, answer, str(tmp_path / answer)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
            cwd=ROOT.parent,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert done.returncode == 0, done.stderr[-2000:]
        found.append(json.loads(done.stdout.splitlines()[-1]))
    (precision, losses), without = found
    assert (precision, losses) == tuple(without)
    assert precision == "highest"  # no library that a run loads has lowered it
    assert len(losses) >= 8


def precise(precision: Any, dtype: Any, **compute: Any) -> Run:
    run = small(compute=ComputeSpec(precision=precision, **compute))
    return msgspec.structs.replace(run, policy=msgspec.structs.replace(run.policy, dtype=dtype))


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_each_precision_starts_and_trains(precision: str, dtype: str, tmp_path: Path) -> None:
    """On any CPU, with the canary's checks at the start and after each weight sync."""
    state = train(precise(precision, dtype), tmp_path)
    assert state.step == 11


def test_bf16_over_ranks_starts_and_trains(tmp_path: Path) -> None:
    run = precise("bf16", "auto", backend="fsdp", shard=ShardSpec(ranks=1, timeout_s=200))
    assert train(run, tmp_path).step == 11


@pytest.mark.parametrize(
    ("precision", "dtype", "computed"),
    [("auto", "auto", "fp32"), ("auto", "bfloat16", "bf16"), ("fp32", "bfloat16", "fp32")],
)
def test_stages_and_references_compute_as_decided(
    precision: str, dtype: str, computed: str, tmp_path: Path
) -> None:
    """The second backend finds weights that the first turned into fp32."""
    made = assemble(precise(precision, dtype))
    assert str(made.serving.dtype) == ("torch.bfloat16" if dtype == "bfloat16" else "torch.float32")
    trained = trained_model(made, tmp_path)
    wanted = "bf16" if computed == "bf16" else "fp32"
    backends = [trained.backend(stage.optim) for stage in made.fixed]
    assert [each._compute.precision for each in backends] == [wanted, wanted]  # type: ignore[attr-defined]


def test_a_resumed_backend_computes_as_its_run_says(tmp_path: Path) -> None:
    rows = tree()
    rough = SingleBackend(small_policy(), compute=ComputeSpec(precision="bf16"))
    rough.save(tmp_path)
    exact, resumed = (
        SingleBackend(small_policy(), compute=ComputeSpec(precision="fp32")) for _ in range(2)
    )
    resumed.load(tmp_path)
    batches = pack(rows, exact.packing)
    for one, other in zip(exact.logprobs(batches), resumed.logprobs(batches), strict=True):
        assert (one == other).all()


# --- the canary: rounding passes, another model does not


def sharp(made: RunParts, seed: int) -> Policy:
    """A policy whose log-probabilities reach -50: as sure of itself as a trained one, and surer."""
    policy = from_config(made.policy.config, made.policy.tokenizer, seed)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(60.0)  # type: ignore[union-attr,operator]
    return policy


async def at_once(work: Any, *arguments: Any) -> Any:
    return work(*arguments)


def shown(precision: Any, engine: torch.dtype, rounding: float, other: int = 6) -> float:
    """The worst difference that the canary shows."""
    made = assemble(small())
    served, trained = sharp(made, 6), sharp(made, other)
    served.model.to(engine)
    client = LocalClient(served, name="local:sharp")
    hint = "set compute.precision=fp32"
    check = SelfCheck(
        AuditedClient(client),
        served.model.named_parameters,
        PROMPT,
        CanaryLimits(0.3, rounding, hint),
    )
    try:
        asyncio.run(
            check.engine(SingleBackend(trained, compute=ComputeSpec(precision=precision)), at_once)
        )
    finally:
        asyncio.run(client.close())
    return check.worst


BF16 = RunPrecision("bfloat16", "bf16").canary_limits(small()).rounding


@pytest.mark.parametrize(
    ("precision", "engine"),
    [("bf16", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.bfloat16)],
)
def test_the_canary_allows_what_bf16_rounds(precision: str, engine: torch.dtype) -> None:
    assert shown(precision, engine, BF16) > 0.01


def test_without_it_a_sure_policy_would_be_refused() -> None:
    with pytest.raises(TrainError, match=r"differ by .*; set compute.precision=fp32$"):
        shown("bf16", torch.bfloat16, 0.0)


def test_another_model_is_found_in_bf16() -> None:
    with pytest.raises(TrainError, match="they compute different models"):
        shown("bf16", torch.bfloat16, BF16, other=7)
