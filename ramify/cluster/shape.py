"""What of a model decides memory and time: how many parameters of which kind, and how wide its
layers are.

Counted on the model itself, made without memory for its weights (PyTorch's meta device), so that
every architecture that trains here is counted right, tied matrices once.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from ramify.errors import ConfigError

if TYPE_CHECKING:
    from torch import nn

    from ramify.train.config import LoraSpec, Run


class ModelShape(msgspec.Struct, frozen=True):
    """Sizes of one model."""

    parameters: int
    inside: int
    """Of them in matrices inside layers: what Muon moves."""
    products: int
    """Of them in matrices that every token is multiplied by: those inside layers and the output
    matrix."""
    largest_layer: int
    """Parameters."""
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
    """Tokens."""
    adapters: int = 0
    """Parameters of adapters, where only these are trained."""

    @property
    def trained(self) -> int:
        return self.adapters or self.parameters

    def cache_bytes_per_token(self, itemsize: int) -> int:
        """Keys and values of one position."""
        return 2 * self.layers * self.kv_heads * self.head_size * itemsize


def shape_of(config: Any, lora: LoraSpec | None = None) -> ModelShape:
    """Of a Hugging Face configuration."""
    from ramify.models.load import window_of
    from ramify.train.backends.optimizers import is_inside
    from ramify.train.backends.sharding import on_meta
    from ramify.train.backends.single import layers_of

    model = on_meta(config)
    named = dict(model.named_parameters())
    layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
    parameters = sum(p.numel() for p in named.values())
    inside = sum(p.numel() for name, p in named.items() if is_inside(name, p))
    text = config.get_text_config()
    heads = text.num_attention_heads
    return ModelShape(
        parameters=parameters,
        inside=inside,
        products=inside + text.vocab_size * text.hidden_size,
        largest_layer=max(layers, default=parameters),
        outside=parameters - sum(layers),
        layers=text.num_hidden_layers,
        width=text.hidden_size,
        mlp=getattr(text, "intermediate_size", None) or 4 * text.hidden_size,
        heads=heads,
        head_size=getattr(text, "head_dim", None) or text.hidden_size // heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        vocabulary=text.vocab_size,
        window=window_of(text),
        adapters=_adapters(model, lora) if lora is not None else 0,
    )


def config_of(run: Run) -> Any:
    """The configuration of the run's policy, without its weights. Of one whose tokenizer is trained
    on demonstrations the vocabulary is that asked for, which is the most it can have."""
    from transformers import AutoConfig

    from ramify.models.load import load_tokenizer, read_config
    from ramify.models.tokenizer import word_tokenizer

    spec = run.policy
    if spec.path:
        return read_config(spec.path)
    if spec.tokenizer:
        vocabulary = len(load_tokenizer(Path(spec.tokenizer)))
    else:
        vocabulary = len(word_tokenizer(spec.words)) if spec.words else spec.vocab_size
    try:
        return AutoConfig.for_model(
            **{"vocab_size": vocabulary, "bos_token_id": None, **spec.shape}
        )
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"policy.shape is no configuration: {error}") from None


def _adapters(model: nn.Module, lora: LoraSpec) -> int:
    """A [r, columns] and B [rows, r] of each chosen matrix."""
    from torch import nn

    from ramify.train.lora import is_chosen

    chosen = [each for name, each in model.named_modules() if is_chosen(name, each, lora.targets)]
    return sum(
        lora.rank * (each.in_features + each.out_features)
        for each in chosen
        if isinstance(each, nn.Linear)
    )
