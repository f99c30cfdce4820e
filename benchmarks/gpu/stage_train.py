"""A training step of rows at Qwen3's sizes, with and without recomputation: tokens per second, model
FLOPs utilisation, and peak memory beside what ``ramify cluster plan`` says."""

from __future__ import annotations

import msgspec
import torch
import trees
from kit import SHAPES, Kit, Skipped
from products import products
from stage_parity import LOSS

from ramify.extras.cluster import memory_estimates
from ramify.extras.cluster.model_and_device_specs import (
    ModelParameterCounts,
    model_shape_from_config,
)
from ramify.train.backends.base import OptimizerSpec, TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.config import PolicySpec, Run, SftSpec
from ramify.train.data.pack import pack
from ramify.types.training_sequences import Batch

_BYTES_OF_STATE = 16
"""Weights, gradients and both moments of Adam in fp32, of one parameter."""


def measure(kit: Kit) -> None:
    for name in ("0.6B", "1.7B", "4B"):
        shape = model_shape_from_config(kit.config(name))
        for recompute in (False, True):
            label = f"{name}{', recomputed' if recompute else ''}"
            with kit.figure(label):
                kit.need(label, 1.3 * shape.parameters * _BYTES_OF_STATE / 1e9)
                _step(kit, name, shape, recompute, label)


def _step(kit: Kit, name: str, shape: ModelParameterCounts, recompute: bool, label: str) -> None:
    rows = trees.group(4, 4 if kit.quick else 16, 64 if kit.quick else 1024)
    precision = "bf16" if kit.is_cuda else "fp32"
    compute = TrainerComputeSpec(
        precision=precision,  # type: ignore[arg-type]
        recompute=recompute,
        max_tokens=4096 if kit.quick else 16_384,
    )
    backend = SingleBackend(kit.policy(name), OptimizerSpec(lr=1e-6), compute)
    batches = pack(rows, msgspec.structs.replace(backend.packing, share=False))

    def step() -> None:
        backend.forward_backward(batches, LOSS)
        backend.optim_step()

    tokens, flops = trees.num_tokens(batches), _flops(shape, batches)
    expected = peak = None
    if kit.sheet is not None:
        peak = kit.sheet.tflops * 1e12
        low, high = (0.0, 1.0) if kit.quick else (0.2, 0.75)
        speed = tokens * peak / flops
        why = "of the products' peak"
        expected = kit.expect(label, low * speed, high * speed, "tok/s", why)
    took = kit.timed(step, 2 if kit.quick else 3).median
    with kit.traced(label.replace(", ", "-")):
        step()
    dtype = torch.bfloat16 if kit.is_cuda else torch.float32
    alone_s = kit.timed(products(backend.model, batches, dtype), 2).median
    share: dict[str, float | str] = {"step to its matrix products alone": took / alone_s}
    if peak is not None:
        share["model FLOPs utilisation"] = flops / peak / took
    kit.add(f"{label}: tokens learnt", tokens / took, "tok/s", expected=expected, against=share)
    with kit.figure(f"{label}: peak memory"):
        _memory(kit, name, shape, compute, step, label)


def _memory(
    kit: Kit,
    name: str,
    shape: ModelParameterCounts,
    compute: TrainerComputeSpec,
    step: object,
    label: str,
) -> None:
    if kit.sheet is None:
        raise Skipped("the plan needs the device's data sheet")
    run = Run(policy=PolicySpec(shape=SHAPES[name]), compute=compute, sft=SftSpec(demos="ledger"))
    plan = memory_estimates.estimate_rank_memory(run, shape, kit.sheet, 1)
    # This process has no engine.
    parts = {
        part: num_bytes / 1e9
        for part, num_bytes in plan.parts.items()
        if part not in ("the engine's weights", "keys and values")
    }
    planned = sum(parts.values())
    low = 0.0 if kit.quick else 0.5
    expected = kit.expect(f"{label}: peak to plan", low, 1.15, "×", f"the plan is {planned:.1f} GB")
    peak = kit.peak_gb(step)  # type: ignore[arg-type]
    kit.add(
        f"{label}: peak memory to the plan",
        peak / planned,
        "×",
        expected=expected,
        against={"peak GB": peak, "planned GB": planned, **parts},
    )


def _flops(shape: ModelParameterCounts, batches: list[Batch]) -> float:
    """FLOPs of forward and backward without recomputation."""
    tokens = trees.num_tokens(batches)
    entries = sum(len(batch.owners) for batch in batches)
    pairs = sum(int((batch.positions + 1).sum()) for batch in batches)
    heads = shape.layers * shape.heads * shape.head_size
    return (
        6.0 * (shape.inside * tokens + shape.vocabulary * shape.width * entries)
        + 12.0 * heads * pairs
    )
