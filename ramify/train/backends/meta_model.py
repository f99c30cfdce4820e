"""Build a model from its configuration without allocating its weights.

The model is on PyTorch's meta device and has only modules and shapes.

Ranks create such a model before they split and fill it, and checks use it to find out what a model
consists of.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from ramify.models.dense import DenseModel, unsupported_reason


def build_meta_model(config: Any, *, splits_layers: bool = False) -> nn.Module:
    """Build the model of a Hugging Face configuration on the meta device, without allocating its
    weights.

    Computed buffers, such as rotary frequencies, hold their real values. ``splits_layers`` selects
    the class from ``transformers``, which comes with plans for splitting its layers.
    """
    if unsupported_reason(config) is None and not splits_layers:
        with torch.device("meta"):
            return DenseModel(config).eval()
    from transformers import AutoModelForCausalLM

    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]
    if unsupported_reason(config) is None:  # the padding token learns as it does in our own model
        model.get_input_embeddings().padding_idx = None
    return cast(nn.Module, model.eval())


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move every parameter that a module registers inside the ``with`` block to the meta device.

    Buffers keep their values, because checkpoints do not contain them.
    """
    register = nn.Module.register_parameter

    def to_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = nn.Parameter(parameter.to("meta"), requires_grad=parameter.requires_grad)
        register(module, name, parameter)

    nn.Module.register_parameter = to_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]
