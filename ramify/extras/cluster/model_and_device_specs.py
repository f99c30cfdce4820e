"""Model sizes and device speeds, for estimating the memory and time of a run.

A model is described by its numbers of parameters and the widths of its layers. Parameters are
counted on the model itself, which is created without memory for its weights (on PyTorch's meta
device). So the count is right for every supported architecture, and tied matrices count once.

A device is described by its memory and the two speeds that bound training and decoding. The figures
are from data sheets, for dense bf16 without sparsity. A program achieves a share of them
(``DeviceEfficiency``), which is stated with each estimate. The figures of a CPU core were measured
for this package (``backends/single_device.py``).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.errors import ConfigError, did_you_mean
from ramify.train.backends.mesh import EXPERTS
from ramify.train.config import LoraSpec, Run
from ramify.train.policy_dependent_defaults import scratch_model_config

if TYPE_CHECKING:
    from torch import nn


class DeviceHardwareSpec(msgspec.Struct, frozen=True):
    """The memory and peak speeds of one GPU, or of one CPU core."""

    name: str
    memory_gb: float
    """Memory in 10^9 bytes; 0 for a device without its own memory."""
    tflops: float
    """Peak throughput of matrix products, in 10^12 FLOP per second."""
    gb_per_s: float
    """Memory bandwidth in 10^9 bytes per second."""

    @property
    def is_cpu(self) -> bool:
        return not self.memory_gb


class DeviceEfficiency(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fraction of a device's peak speed that real programs reach.

    There is one fraction from 0 to 1 for each kind of work.
    """

    train: float = 0.35
    """Fraction of peak FLOP/s in forward and backward passes (MFU)."""
    prefill: float = 0.4
    """Fraction of peak FLOP/s while prompts are read."""
    decode: float = 0.6
    """Fraction of peak memory bandwidth while tokens are sampled."""

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not 0 < value <= 1:
                raise ConfigError(f"the share {name}={value:g} must be above 0 and at most 1")


DEVICES = {
    device.name: device
    for device in (
        DeviceHardwareSpec("cpu", 0, 0.05, 10),
        DeviceHardwareSpec("l4", 24, 121, 300),
        DeviceHardwareSpec("rtx4090", 24, 165, 1008),
        DeviceHardwareSpec("l40s", 48, 362, 864),
        DeviceHardwareSpec("a100", 80, 312, 2039),
        DeviceHardwareSpec("h100", 80, 989, 3350),
        DeviceHardwareSpec("h200", 141, 989, 4800),
        DeviceHardwareSpec("b200", 180, 2250, 7700),
        DeviceHardwareSpec("mi300x", 192, 1307, 5300),
    )
}


def device_of(name: str) -> DeviceHardwareSpec:
    """Return the hardware specification of the device with this name, such as ``h100``.

    Raises ConfigError for an unknown name.
    """
    if name not in DEVICES:
        raise ConfigError(f"unknown device '{name}': {did_you_mean(name, DEVICES)}")
    return DEVICES[name]


class ModelParameterCounts(msgspec.Struct, frozen=True):
    """The sizes of a model that determine how much memory and time it needs.

    All counts are numbers of parameters unless a field says otherwise.
    """

    parameters: int
    inside: int
    """Parameters in matrices inside layers, which Muon optimizes."""
    products: int
    """Parameters in matrices that multiply every token: those inside layers, and the output matrix.
    """
    largest_layer: int
    """Parameters of the largest layer."""
    outside: int
    """Parameters outside layers."""
    layers: int
    width: int
    mlp: int
    heads: int
    head_size: int
    kv_heads: int
    vocabulary: int
    window: int
    """Context window in tokens."""
    adapters: int = 0
    """Parameters of adapters, if only adapters are trained."""
    experts: int = 0
    """Parameters of the experts of all layers."""
    experts_per_token: int = 0
    """Number of experts that process each token."""

    @property
    def num_trained_parameters(self) -> int:
        return self.adapters or self.parameters

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Return how many bytes the KV cache needs for one token."""
        return 2 * self.layers * self.kv_heads * self.head_size * itemsize


def model_shape_from_config(config: Any, lora: LoraSpec | None = None) -> ModelParameterCounts:
    """Compute a model's sizes from its Hugging Face configuration and optional LoRA adapters."""
    from ramify.models.load import context_window_from_config
    from ramify.train.backends.activation_memory import layers_of
    from ramify.train.backends.meta_model import build_meta_model
    from ramify.train.backends.optimizers import is_hidden_matrix

    model = build_meta_model(config)
    params = dict(model.named_parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    parameters = sum(p.numel() for p in params.values())
    inside = sum(p.numel() for name, p in params.items() if is_hidden_matrix(name, p))
    text = config.get_text_config()
    heads = text.num_attention_heads
    experts = sum(p.numel() for p in params.values() if p.dim() == 3)
    chosen = (getattr(text, "num_experts_per_tok", None) or 1) if experts else 0
    active = experts * chosen // num_experts(text) if num_experts(text) else 0
    return ModelParameterCounts(
        parameters=parameters,
        inside=inside,
        products=inside + active + text.vocab_size * text.hidden_size,
        largest_layer=max(layers, default=parameters),
        outside=parameters - sum(layers),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        vocabulary=text.vocab_size,
        window=context_window_from_config(text),
        adapters=_count_adapter_parameters(model, lora) if lora is not None else 0,
        experts=experts,
        experts_per_token=chosen,
    )


def num_experts(config: Any) -> int:
    """Return the number of experts in a layer, or 0 if the model is not a mixture of experts."""
    text = config.get_text_config()
    return next((getattr(text, name) for name in EXPERTS if getattr(text, name, None)), 0)


def policy_config(run: Run) -> Any:
    """Return the Hugging Face configuration of the run's policy, without loading any weights.

    If the tokenizer is trained on demonstrations, its final size is unknown, and the configured
    maximum, ``vocab_size``, is used. Other sizes that depend on demonstrations are the smallest
    possible.
    """
    from transformers import AutoConfig

    from ramify.models.load import load_tokenizer, read_config
    from ramify.models.tokenizer_training import word_tokenizer

    spec = run.policy
    if spec.path:
        return read_config(spec.path)
    if spec.tokenizer:
        vocabulary = len(load_tokenizer(Path(spec.tokenizer)))
    else:
        vocabulary = len(word_tokenizer(spec.words)) if spec.words else spec.vocab_size or 512
    try:
        return AutoConfig.for_model(
            **{
                "vocab_size": vocabulary,
                "bos_token_id": None,
                **(spec.shape or scratch_model_config(0, 0)),
            }
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"policy.shape is not a valid configuration: {error}") from None


def _count_adapter_parameters(model: nn.Module, lora: LoraSpec) -> int:
    """Return the number of parameters that LoRA adapters add to a model.

    Each adapted matrix gets two: A of shape [rank, columns] and B of shape [rows, rank].
    """
    from torch import nn

    from ramify.train.backends.lora import is_adapter_target

    chosen = [
        module
        for name, module in model.named_modules()
        if is_adapter_target(name, module, lora.targets)
    ]
    return sum(
        lora.rank * (module.in_features + module.out_features)
        for module in chosen
        if isinstance(module, nn.Linear)
    )
