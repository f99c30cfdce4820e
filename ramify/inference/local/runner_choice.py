"""Which runner a model gets: all sequences of a step in one pass where that computes what the model
computes.

Dense                    one pass
transformers module      one pass through its attention interface, where a probe gives the logits of the module alone
                         (``policy.trunk``); else one sequence at a time, with transformers' own cache
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
"""Of logits in half precision."""


def runner_of(model: nn.Module) -> ModelRunner:
    """The fastest runner that computes what ``model`` computes."""
    if isinstance(model, DenseModel):
        return dense_runner(model)
    return _flat(model) or ModuleRunner(model)


class _ModuleDecoder:
    """A transformers module as a ``Decoder``."""

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
    """The runner in one pass; None where the module does not lend itself to it."""
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
    """Whether two sequences, in parts and beside each other, get the logits that they get alone."""
    vocabulary = module.config.get_text_config().vocab_size
    one, other = ([(start + 13 * index) % vocabulary for index in range(8)] for start in (1, 5))
    runner.resize([], 2, 8)
    steps = [
        EngineStep(spans=[SlotSpan(0, 0, one[:5])]),
        EngineStep([0], [5], one[5:6], [SlotSpan(1, 0, other[:6])]),
        EngineStep([0, 1], [6, 6], [one[6], other[6]]),
        EngineStep(spans=[SlotSpan(0, 7, one[7:])]),
    ]
    ours = torch.cat([runner.forward(step, [True] * len(step.spans)) for step in steps])
    inputs = torch.tensor([one, other], device=ours.device)
    theirs = module(input_ids=inputs, use_cache=False).logits.float()
    expected = theirs[[0, 0, 1, 0, 1, 0], [4, 5, 5, 6, 6, 7]]
    tolerance = _TOLERANCE.get(module.dtype, _COARSE)
    return bool(torch.allclose(ours, expected, rtol=tolerance, atol=tolerance))


def _layout(module: Any) -> CacheLayout:
    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheLayout(config.num_hidden_layers, heads, size, module.dtype, module.device)
