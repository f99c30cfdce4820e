"""Which runner a model gets: the one that computes all sequences of a step in one pass, if it gives
the model's own results.

    DenseModel             one pass
    transformers module    one pass through its attention interface, if a probe gives the logits
                           of the module alone (``models.trunk``); otherwise one sequence at a
                           time, with transformers' own cache
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.inference.local.kv_cache import CacheLayout
from ramify.inference.local.model_runner import FlatRunner, ModelRunner, dense_runner
from ramify.inference.local.module_runner import ModuleRunner
from ramify.inference.local.step import EngineStep, SlotSpan
from ramify.models.dense import CausalAttention, DenseModel
from ramify.models.trunk import ModuleTrunk

_TOLERANCE = {torch.float32: 1e-3}
_COARSE = 5e-2
"""Tolerance for logits in half precision."""


def runner_of(model: nn.Module) -> ModelRunner:
    """The fastest runner that computes what ``model`` computes."""
    if isinstance(model, DenseModel):
        return dense_runner(model)
    return _flat(model) or ModuleRunner(model)


class _ModuleDecoder:
    """A transformers module as a ``DecoderModel``."""

    def __init__(self, trunk: ModuleTrunk) -> None:
        self._trunk = trunk

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttention,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        with self._trunk.scope():
            h_TD = self._trunk.attended(ids_T, positions_T, attend)
        return h_TD if rows_N is None else h_TD.index_select(0, rows_N)

    def logits(self, h_ND: Tensor) -> Tensor:
        return self._trunk.logits(h_ND)


@torch.inference_mode()
def _flat(module: Any) -> FlatRunner | None:
    """The one-pass runner; None if the module does not support it."""
    try:
        trunk = ModuleTrunk(module)
    except ConfigError:
        return None
    if not trunk.shares:
        return None
    try:
        runner = FlatRunner(_ModuleDecoder(trunk), _layout(module))
        agrees = _agrees(runner, module)
    except (RuntimeError, ValueError, TypeError, AttributeError, IndexError):
        return None
    return runner if agrees else None


def _agrees(runner: FlatRunner, module: Any) -> bool:
    """Whether two sequences, in parts and side by side, get the same logits as separately."""
    vocabulary = module.config.get_text_config().vocab_size
    first, second = ([(start + 13 * index) % vocabulary for index in range(8)] for start in (1, 5))
    runner.resize([], 2, 8)
    steps = [
        EngineStep(spans=[SlotSpan(0, 0, first[:5])]),
        EngineStep([0], [5], first[5:6], [SlotSpan(1, 0, second[:6])]),
        EngineStep([0, 1], [6, 6], [first[6], second[6]]),
        EngineStep(spans=[SlotSpan(0, 7, first[7:])]),
    ]
    logits = torch.cat([runner.forward(step, [True] * len(step.spans)) for step in steps])
    inputs = torch.tensor([first, second], device=logits.device)
    all_logits = module(input_ids=inputs, use_cache=False).logits.float()
    expected = all_logits[[0, 0, 1, 0, 1, 0], [4, 5, 5, 6, 6, 7]]
    tolerance = _TOLERANCE.get(module.dtype, _COARSE)
    return bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance))


def _layout(module: Any) -> CacheLayout:
    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheLayout(config.num_hidden_layers, heads, size, module.dtype, module.device)
