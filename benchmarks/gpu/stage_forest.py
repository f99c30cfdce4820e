"""A training step of siblings as a forest, as merged rows and as step-wise rows, for three ratios of
prompt to sampled tokens: seconds, memory and model FLOPs utilisation."""

from __future__ import annotations

import msgspec
import torch
import trees
from kit import Kit, Skipped
from products import products
from stage_parity import LOSS

from ramify.models.attention_kernels import CudaFlashKernel
from ramify.train.backends.base import TrainerComputeSpec
from ramify.train.backends.single_device import SingleBackend
from ramify.train.data.pack import pack
from ramify.types.training_sequences import Batch

TURNS, SIBLINGS = 16, 8


def measure(kit: Kit) -> None:
    precision = "bf16" if kit.is_cuda else "fp32"
    with kit.figure("attention kernel"):
        _kernel(kit)
    backend = SingleBackend(kit.policy("0.6B"), compute=TrainerComputeSpec(precision=precision))  # type: ignore[arg-type]
    for ratio, least in ((1, 2.0), (4, 5.0), (16, 8.0)):
        with kit.figure(f"{ratio}:1"):
            _ratio(kit, backend, ratio, least)


def _kernel(kit: Kit) -> None:
    if not kit.is_cuda:
        raise Skipped("the kernel for many lengths runs on a GPU; a CPU takes its own")
    if not CudaFlashKernel.is_supported(torch.bfloat16, 128):
        raise Skipped(f"torch {torch.__version__} has no FlashAttention for heads of 128")
    kit.add("attention kernel: FlashAttention over many lengths", 1.0, "in use")


def _ratio(kit: Kit, backend: SingleBackend, ratio: int, least: float) -> None:
    turns, siblings = (4, 4) if kit.quick else (TURNS, SIBLINGS)
    rows = trees.group(turns, siblings, trees.REPLY * turns * ratio)
    alone = msgspec.structs.replace(backend.packing, share=False)
    sides = {
        "forest": pack(rows, backend.packing),
        "merged rows": pack(rows, alone),
        "step-wise rows": trees.stepwise_batches(rows, backend.packing),
    }
    tokens = {name: trees.num_tokens(batches) for name, batches in sides.items()}
    fewer = tokens["step-wise rows"] / tokens["forest"]
    # On a CPU the cut-down model is bound by calls, and small ratios gain little.
    low = 0.8 if kit.quick else least
    gain = kit.expect("a gain", low, 1.5 * fewer, "×", f"it has {fewer:.1f} × the tokens")
    low = 0.0 if kit.quick else 0.15
    share = kit.expect("utilisation", low, 1.0, "", "share of dense products on the sheet")
    took: dict[str, float] = {}
    memory: dict[str, float | str] = {}
    for name, batches in sides.items():

        def step(batches: list[Batch] = batches) -> None:
            backend.forward_backward(batches, LOSS)
            backend.clear_gradient()

        took[name] = kit.timed(step, 2 if kit.quick else 3).median
        if kit.is_cuda:
            memory[name] = kit.peak_gb(step)
    with kit.traced(f"forest-{ratio}"):
        backend.forward_backward(sides["forest"], LOSS)
    backend.clear_gradient()
    kit.add(
        f"{ratio}:1: step-wise rows to forest, seconds",
        took["step-wise rows"] / took["forest"],
        "×",
        expected=gain,
        against={
            "merged rows": took["merged rows"] / took["forest"],
            "forest tok/s": tokens["forest"] / took["forest"],
        },
    )
    dtype = torch.bfloat16 if kit.is_cuda else torch.float32
    alone_s = kit.timed(products(backend.model, sides["forest"], dtype), 3).median
    kit.add(
        f"{ratio}:1: the forest's step to its matrix products alone",
        took["forest"] / alone_s,
        "×",
        against={"step s": took["forest"], "products s": alone_s},
    )
    if memory:
        kit.add(f"{ratio}:1: memory of a step", float(memory.pop("forest")), "GB", against=memory)
    if kit.sheet is not None:
        utilisation = _flops(kit, sides["forest"]) / took["forest"] / (kit.sheet.tflops * 1e12)
        name = f"{ratio}:1: model FLOPs utilisation of the forest"
        kit.add(name, utilisation, "", expected=share)


def _flops(kit: Kit, batches: list[Batch]) -> float:
    """FLOPs of forward and backward: 6 per weight of a product and token, and 12 per pair of tokens
    and element of the heads."""
    config = kit.config("0.6B")
    inside = config.num_hidden_layers * (
        config.hidden_size
        * config.head_dim
        * (2 * config.num_attention_heads + 2 * config.num_key_value_heads)
        + 3 * config.hidden_size * config.intermediate_size
    )
    tokens = trees.num_tokens(batches)
    entries = sum(len(batch.owners) for batch in batches)
    pairs = sum(int((batch.positions + 1).sum()) for batch in batches)
    heads = config.num_hidden_layers * config.num_attention_heads * config.head_dim
    output = config.vocab_size * config.hidden_size
    return float(6 * inside * tokens + 6 * output * entries + 12 * heads * pairs)
