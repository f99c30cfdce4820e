"""Manage the memory that a training step needs for activations.

This module estimates how many tokens fit, recomputes activations instead of storing them, and
configures whether freed memory returns to the system. It also estimates the compute time per token.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ramify.errors import ConfigError
from ramify.train.data.pack import PackingCostModel

LEAST_TOKENS = 1024
"""Lower limit of ``max_tokens``, even on devices with little memory."""
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3
_LARGE = 1 << 30
_BLOCK = 1 << 20


def max_activation_bytes(memory: int) -> int:
    """Return how many bytes of memory the activations of a training step may occupy.

    ``memory`` is the memory of the GPU in bytes, or 0 on a CPU.
    """
    return 2 * memory // 5 if memory else 4 << 30


def max_logit_elements(is_cuda: bool) -> int:
    return 1 << 26 if is_cuda else 1 << 22


def activation_bytes_per_token(
    width: int, mlp: int, layers: int, recompute: bool, itemsize: int
) -> int:
    """Estimate the activation memory in bytes that one token needs until its backward pass.

    Each layer stores about ten vectors of the model's width and four of the MLP's. With activation
    checkpointing (``recompute``), a layer stores only one vector.

    ``itemsize`` is the size in bytes of a number in matrix products. The estimate for bf16 is half
    of that for fp32; on an H200, bf16 took 0.39 to 0.45 of the fp32 estimate (Qwen3 0.6B, 1.7B and
    4B). A layer's input, which ``recompute`` stores, is always fp32.
    """
    return layers * (4 * width if recompute else itemsize * (10 * width + 4 * mlp))


def total_gpu_bytes(device: torch.device) -> int:
    """Return the total memory of a GPU in bytes, or 0 if the device is a CPU."""
    if device.type != "cuda":
        return 0
    return int(torch.cuda.get_device_properties(device).total_memory)


def max_tokens_in_memory(config: Any, device: torch.device, recompute: bool, precision: str) -> int:
    """Return the number of tokens whose activations fit into the memory of the device.

    ``precision`` is the precision of matrix products, ``fp32`` or ``bf16``.
    """
    itemsize = 2 if precision == "bf16" else 4
    mlp = getattr(config, "intermediate_size", None) or 4 * config.hidden_size
    layers = config.num_hidden_layers
    token = activation_bytes_per_token(config.hidden_size, mlp, layers, recompute, itemsize)
    return max(LEAST_TOKENS, max_activation_bytes(total_gpu_bytes(device)) // token)


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the transformer layers of a model, taken from its longest ``ModuleList``.

    Returns an empty list if the model has no such list.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    longest: nn.ModuleList = max(lists, key=len, default=nn.ModuleList())
    return list(longest)


def set_activation_checkpointing(model: nn.Module, enabled: bool) -> None:
    """Turn activation checkpointing on or off for each layer of a model.

    Off must be set too, since an earlier backend of the same model may have turned it on.
    """
    layers = layers_of(model)
    if enabled and not layers:
        raise ConfigError("compute.recompute needs a model whose layers are in a ModuleList")
    for layer in layers:
        if isinstance(vars(layer).get("forward"), _RecomputedLayer):
            del layer.forward
        if enabled:
            layer.forward = _RecomputedLayer(layer.forward)


class _RecomputedLayer:
    """A layer whose forward pass is recomputed in the backward pass."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._forward(*args, **kwargs)
        return checkpoint(self._forward, *args, use_reentrant=False, **kwargs)


def keep_malloc_memory() -> bool:
    """Configure glibc's malloc to keep freed memory in the process, for training on a CPU.

    Returns False if that is not possible, as on a system without glibc.

    A training step frees and reallocates the same hundreds of megabytes again and again. By default
    glibc returns large blocks to the system each time, and the kernel zeroes their pages on
    reallocation: 5 to 10 % of a step of a small model. The price is that the process keeps its peak
    memory.
    """
    return _configure_malloc(_LARGE, _LARGE, 1 << 26)


def disable_malloc_retention() -> bool:
    """Configure glibc's malloc to return large freed blocks to the system.

    Returns False if that is not possible, as on a system without glibc.

    A rank repeatedly gathers and frees whole layers. By default glibc serves such blocks from the
    heap once the first ones were freed, and smaller allocations between them keep the heap from
    shrinking. With a model of 264 MB on two ranks, memory peaked at 2.6 times what the ranks hold,
    and at 1.02 times with this setting.
    """
    return _configure_malloc(_BLOCK, _BLOCK, 0)


def _configure_malloc(mmap_threshold: int, trim_threshold: int, top_pad: int) -> bool:
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):  # musl has none
        return False
    return all(
        [
            mallopt(_MMAP_THRESHOLD, mmap_threshold),
            mallopt(_TRIM_THRESHOLD, trim_threshold),
            mallopt(_TOP_PAD, top_pad),
        ]
    )


class _Speed(NamedTuple):
    """Approximate speeds of a device, used to decide when computing a shared prefix only once saves
    time.

    CPU speeds were measured on one core. GPU speeds come from data sheets, and assume that
    attention launches one kernel for each level of the prefix tree.
    """

    products: float
    """FLOP per second of matrix products."""
    attention: float
    """FLOP per second of attention."""
    call_s: float
    """Fixed overhead of computing a shared prefix only once, in seconds per layer."""
    join_s: float
    """Overhead of each token after a shared prefix, in seconds per layer and per element of its
    attention output (heads times head size).
    """


_SPEEDS = {"cpu": _Speed(5e10, 3.5e10, 5e-4, 1.2e-8), "cuda": _Speed(2e14, 1e14, 1e-5, 1e-11)}


def packing_cost_model(model: nn.Module, config: Any, device: str) -> PackingCostModel:
    """Estimate a model's compute costs on a device, which are used to balance batches.

    The unit is the forward and backward work of one token, 6 FLOP per weight of the layers.
    Attention between two tokens costs 14 FLOP per layer and element of the heads: two products in
    the forward pass and five in the backward pass.
    """
    speed = _SPEEDS.get(device, _SPEEDS["cuda"])
    matrices = sum(
        p.numel() for name, p in model.named_parameters() if p.dim() >= 2 and "embed" not in name
    )
    token_s = 6 * max(1, matrices) / speed.products
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    layers = config.num_hidden_layers
    return PackingCostModel(
        pair=14 * layers * width / speed.attention / token_s,
        share=layers * speed.call_s / token_s,
        join=layers * width * speed.join_s / token_s,
    )
