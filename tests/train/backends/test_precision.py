"""Precision is derived from the checkpoint and the device type; every precision starts and trains
on the CPU."""

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
from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec, resolve_precision
from ramify.train.backends.single_device import SingleBackend
from ramify.train.build_trainer import model_to_train
from ramify.train.config import Run
from ramify.train.data.pack import pack
from ramify.train.engine_consistency_checks import (
    CanaryTolerance,
    EngineConsistencyChecks,
    TokenIdHashingClient,
)
from ramify.train.execute import train
from ramify.train.load_run_parts import PreparedTrainingRun
from ramify.train.numeric_precision import RunNumericPrecision, choose_precisions
from ramify.types.message import Message
from tests.train.backends.small import policy as small_policy
from tests.train.backends.small import tree
from tests.train.small import assemble, small

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
def test_auto_precision_follows_the_policy_dtype(
    asked: Any, dtype: torch.dtype, found: str
) -> None:
    assert resolve_precision(TrainerComputeSpec(precision=asked), dtype, "cpu").precision == found


def chosen_precisions(
    dtype: Any, products: Any, stored: str, device: str, **more: Any
) -> tuple[str, str]:
    return tuple(choose_precisions(run_with_precision(products, dtype), stored, device, **more))  # type: ignore[return-value]


def test_engine_dtype_and_trainer_precision_are_chosen_together() -> None:
    found = {
        (dtype, products): [
            chosen_precisions(dtype, products, stored, device)
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
    assert chosen_precisions("auto", "auto", "float16", "cuda", has_bf16=False) == (
        "float16",
        "fp32",
    )


def test_canary_tolerance_follows_from_dtype_and_precision() -> None:
    def limits(dtype: str, products: Any, **inference: Any) -> tuple[float, float]:
        spec = InferenceSpec(**inference) if inference else None
        return RunNumericPrecision(dtype, products).canary_limits(small(inference=spec))[:2]

    assert limits("float32", "fp32") == (1e-4, 0.0)
    assert limits("float32", "fp32", engine="vllm", urls=("http://a",)) == (1e-3, 0.0)
    assert limits("float16", "fp32") == (0.04, 2**-8)
    assert limits("float16", "bf16") == limits("bfloat16", "fp32") == (0.3, 2**-5)
    assert limits("bfloat16", "bf16", tolerance=0.1) == (0.1, 0.0)


def test_incompatible_precisions_are_rejected() -> None:
    mixed = msgspec.structs.replace(run_with_precision("bf16", "float32"), deterministic=True)
    with pytest.raises(ConfigError, match=r"^deterministic=true needs one precision.*only one"):
        choose_precisions(mixed, "float32", "cpu")
    with pytest.raises(ConfigError, match=r"^policy\.dtype=auto and compute\.precision=bf16: this"):
        chosen_precisions("auto", "bf16", "bfloat16", "cuda", has_bf16=False)
    near = msgspec.structs.replace(
        run_with_precision("bf16", "auto"),
        inference=InferenceSpec(urls=("http://a",), tolerance=1e-3),
    )
    with pytest.raises(
        ConfigError, match=r"^inference\.tolerance=0\.001 is below the rounding error"
    ):
        choose_precisions(near, "float32", "cpu")


ASKING = re.compile(
    r"\b(_is_\w+_supported|get_cpu_capability|get_capabilities|_is_mkldnn\w*|\w*avx\w*)\b"
)
"""Names by which a program asks torch which CPU features are fast."""


def test_no_code_queries_cpu_capabilities() -> None:
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
from ramify.train.backends.base import TrainerComputeSpec
from tests.train.small import small
run = small(compute=TrainerComputeSpec())
rows = []
train(run, sys.argv[2], listener=rows.append)
losses = [row.values[name] for row in rows for name in ("loss", "grad_norm") if name in row.values]
print(json.dumps([torch.get_float32_matmul_precision(), losses]))
"""


def test_run_does_not_depend_on_reported_bf16_support(tmp_path: Path) -> None:
    """Start-up and training with the answer forced to yes and to no, in separate processes."""
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
    assert precision == "highest"  # no imported library has lowered it
    assert len(losses) >= 8


def run_with_precision(precision: Any, dtype: Any, **compute: Any) -> Run:
    run = small(compute=TrainerComputeSpec(precision=precision, **compute))
    return msgspec.structs.replace(run, policy=msgspec.structs.replace(run.policy, dtype=dtype))


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("precision", ["auto", "fp32", "bf16"])
def test_every_precision_starts_and_trains(precision: str, dtype: str, tmp_path: Path) -> None:
    """On any CPU, with canary checks at the start and after each weight sync."""
    run = run_with_precision(precision, dtype)
    assert run.rl is not None
    assert run.sft is not None
    sft, rl = (
        msgspec.structs.replace(run.sft, num=4),
        msgspec.structs.replace(run.rl, steps=2),
    )
    state = train(msgspec.structs.replace(run, warmup=None, sft=sft, rl=rl), tmp_path)
    assert state.step == 3


def test_bf16_with_fsdp_starts_and_trains(tmp_path: Path) -> None:
    run = run_with_precision("bf16", "auto", backend="fsdp", shard=FsdpSpec(ranks=1, timeout_s=200))
    assert train(run, tmp_path).step == 11


@pytest.mark.parametrize(
    ("precision", "dtype", "computed"),
    [("auto", "auto", "fp32"), ("auto", "bfloat16", "bf16"), ("fp32", "bfloat16", "fp32")],
)
def test_every_stage_backend_uses_the_chosen_precision(
    precision: str, dtype: str, computed: str, tmp_path: Path
) -> None:
    """The second backend gets weights that the first converted to fp32."""
    made = assemble(run_with_precision(precision, dtype))
    assert str(made.serving.dtype) == ("torch.bfloat16" if dtype == "bfloat16" else "torch.float32")
    trained = model_to_train(made, tmp_path)
    wanted = "bf16" if computed == "bf16" else "fp32"
    backends = [trained.backend(stage.optim) for stage in made.fixed]
    assert [each.compute.precision for each in backends] == [wanted, wanted]  # type: ignore[attr-defined]


def test_resumed_backend_uses_its_own_precision(tmp_path: Path) -> None:
    rows = tree()
    rough = SingleBackend(small_policy(), compute=TrainerComputeSpec(precision="bf16"))
    rough.save(tmp_path)
    exact, resumed = (
        SingleBackend(small_policy(), compute=TrainerComputeSpec(precision="fp32"))
        for _ in range(2)
    )
    resumed.load(tmp_path)
    batches = pack(rows, exact.packing)
    for one, other in zip(exact.logprobs(batches), resumed.logprobs(batches), strict=True):
        assert (one == other).all()


# --- the canary: rounding passes, a different model does not


def sharp(made: PreparedTrainingRun, seed: int) -> Policy:
    """A policy with log-probabilities down to -50: more confident than any trained one."""
    policy = from_config(made.policy.config, made.policy.tokenizer, seed)
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(60.0)  # type: ignore[union-attr,operator]
    return policy


async def at_once(work: Any, *arguments: Any) -> Any:
    return work(*arguments)


def worst_difference(precision: Any, engine: torch.dtype, rounding: float, other: int = 6) -> float:
    """Return the worst difference that the canary measures."""
    made = assemble(small())
    served, trained = sharp(made, 6), sharp(made, other)
    served.model.to(engine)
    client = LocalClient(served, name="local:sharp")
    hint = "set compute.precision=fp32"
    check = EngineConsistencyChecks(
        TokenIdHashingClient(client),
        served.model.named_parameters,
        PROMPT,
        CanaryTolerance(0.3, rounding, hint),
    )
    try:
        asyncio.run(
            check.check_engines(
                SingleBackend(trained, compute=TrainerComputeSpec(precision=precision)), at_once
            )
        )
    finally:
        asyncio.run(client.close())
    return check.worst


BF16 = RunNumericPrecision("bfloat16", "bf16").canary_limits(small()).rounding


@pytest.mark.parametrize(
    ("precision", "engine"),
    [("bf16", torch.float32), ("fp32", torch.bfloat16), ("bf16", torch.bfloat16)],
)
def test_canary_allows_bf16_rounding(precision: str, engine: torch.dtype) -> None:
    assert worst_difference(precision, engine, BF16) > 0.01


def test_canary_without_rounding_allowance_rejects_confident_bf16_policy() -> None:
    with pytest.raises(TrainError, match=r"differ by .*; set compute.precision=fp32$"):
        worst_difference("bf16", torch.bfloat16, 0.0)


def test_canary_detects_a_different_model_in_bf16() -> None:
    with pytest.raises(TrainError, match="they compute different models"):
        worst_difference("bf16", torch.bfloat16, BF16, other=7)
