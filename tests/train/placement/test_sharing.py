"""Engines that share GPUs with the trainer: detection, sleep mode, and memory planning."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from ramify.errors import ConfigError
from ramify.extras.cluster.plan import format_plan_lines, plan
from ramify.inference.http.inference_spec import InferenceSpec
from ramify.train.backends.base import FsdpSpec, TrainerComputeSpec
from ramify.train.config import Run
from ramify.train.placement.placement_spec import NodePoolSpec, PlacementSpec, RoleSpec
from ramify.train.placement_plan import colocation_reason, resolve_sleep_mode
from ramify.train.rollouts.group_queue import RolloutBatchSpec
from tests.extras.cluster.test_memory import half
from tests.train.small import small

POOL = {"main": NodePoolSpec(gpus=2, cpus=8)}


def ray(trainer: float, inference: float, *colocate: str) -> PlacementSpec:
    group = (colocate,) if colocate else ()
    return PlacementSpec(
        kind="ray",
        pools=POOL,
        trainer=RoleSpec(gpus=trainer),
        inference=RoleSpec(gpus=inference),
        colocate=group,
    )


@pytest.mark.parametrize(
    ("fields", "visible", "why"),
    [
        ({}, None, "share the GPU 0"),
        ({"inference": InferenceSpec(gpus=("1",))}, None, ""),
        ({"inference": InferenceSpec(num=2, gpus=("1", "0"))}, None, "share the GPU 0"),
        ({"inference": InferenceSpec(gpus=("3",))}, "3,4", "share the GPU 3"),
        ({"inference": InferenceSpec(gpus=("4",))}, "3,4", ""),
        (
            {
                "compute": TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2)),
                "inference": InferenceSpec(gpus=("1",)),
            },
            None,
            "GPU 1",
        ),
        (
            {
                "compute": TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2)),
                "inference": InferenceSpec(gpus=("2",)),
            },
            None,
            "",
        ),
        ({"inference": InferenceSpec(urls=("http://n1:1",))}, None, ""),
        ({"inference": None}, None, ""),
        (
            {"placement": ray(1, 1, "trainer", "inference")},
            None,
            "placement.colocate has trainer and engines share GPUs",
        ),
        ({"placement": ray(1, 1)}, None, ""),
        ({"placement": ray(0.5, 0.5)}, None, "parts of one GPU"),
        ({"placement": ray(0.5, 0.75)}, None, ""),
    ],
)
def test_engines_that_share_a_gpu_with_the_trainer_sleep(
    fields: dict[str, Any], visible: str | None, why: str, monkeypatch: Any
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    run = small(**{"inference": InferenceSpec(), **fields})
    assert (
        (why in colocation_reason(run, "cuda")) if why else (colocation_reason(run, "cuda") == "")
    )
    assert colocation_reason(run, "cpu") == ""
    found = resolve_sleep_mode(run, "cuda")
    assert (found.sleep if found is not None else "never") == ("learn" if why else "never")


def run_ahead(**fields: Any) -> Run:
    run = small(inference=InferenceSpec(**fields))
    assert run.rl is not None
    rl = msgspec.structs.replace(run.rl, sample=RolloutBatchSpec(items=2, max_staleness=1))
    return msgspec.structs.replace(run, rl=rl)


def test_engines_cannot_sleep_while_rollouts_run_ahead() -> None:
    pattern = r"{}, so engines sleep while the trainer learns, but with rl.sample.max_staleness=1 they also sample meanwhile"
    with pytest.raises(
        ConfigError, match=pattern.format(r"trainer and engines share the GPU 0 \(inference.gpus\)")
    ):
        resolve_sleep_mode(run_ahead(gpus=("0",)), "cuda")
    with pytest.raises(ConfigError, match=pattern.format("inference.sleep=learn")):
        resolve_sleep_mode(run_ahead(sleep="learn"), "cpu")
    assert resolve_sleep_mode(run_ahead(sleep="never", gpus=("0",)), "cuda") == InferenceSpec(
        sleep="never", gpus=("0",)
    )
    found = resolve_sleep_mode(run_ahead(), "cpu")
    assert found is not None
    assert found.sleep == "never"


def placed(**fields: Any) -> Run:
    return half(
        compute=TrainerComputeSpec(backend="fsdp", shard=FsdpSpec(ranks=2), max_tokens=8192),
        inference=InferenceSpec(num=2, **fields),
        placement=ray(1, 1, "trainer", "inference"),
    )


def test_shared_gpu_holds_the_larger_phase_with_sleep_and_both_without() -> None:
    planned = plan(placed())
    rank, engine = (planned.parts[index].memory for index in (0, 2))
    kept = sum(rank.parts[name] for name in ("weights", "optimizer", "the engine's weights"))
    taking_turns, at_once = planned.together, plan(placed(sleep="never")).together
    assert taking_turns[0].bytes == {
        "engines answer": kept + engine.total,
        "the trainer learns": rank.total,
    }
    assert at_once[0].bytes == {"both run": rank.total + engine.total}
    assert (taking_turns[0].sleeps, at_once[0].sleeps) == (True, False)
    text = "\n".join(format_plan_lines(planned))
    assert "  trainer and inference on one device: 3" in text


def test_vllm_default_memory_fits_only_if_it_sleeps() -> None:
    """vLLM takes 0.9 of 80 GB by default, next to 4 GB that a sleeping trainer of 17 GB keeps."""
    assert plan(placed(engine="vllm")).too_large == []
    assert plan(placed(engine="vllm", sleep="never")).too_large == [
        "trainer and inference share a device of 80 GB and hold 89.3 GB together while both run: "
        "let engines sleep "
        "(inference.sleep=learn), or give them separate devices"
    ]
    less = placed(engine="vllm", args=("--gpu-memory-utilization=0.25",))
    planned = plan(less)
    assert planned.parts[2].memory.total == int(0.25 * 80e9)
    assert planned.too_large == []


def test_plan_is_rejected_if_engines_cannot_sleep() -> None:
    run = placed()
    assert run.rl is not None
    apart = msgspec.structs.replace(
        run, rl=msgspec.structs.replace(run.rl, sample=RolloutBatchSpec(max_staleness=1))
    )
    with pytest.raises(
        ConfigError, match=r"placement\.colocate has trainer and engines share GPUs, so engines"
    ):
        plan(apart)
