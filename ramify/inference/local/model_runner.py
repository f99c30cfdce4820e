"""The model interface of the engine: a step of tokens in, logits out, and a cache of slots.

``FlatRunner`` computes all spans of a step in one pass over one token axis. A model
gets the fastest runner that gives its own results:

    DenseModel             one pass; on a GPU, decoding steps are CUDA graphs (``captured.py``)
    transformers module    one pass through its attention interface, if a probe gives the logits
                           of the module alone (``models.trunk``); otherwise one sequence at a
                           time, with transformers' own cache (``module_runner.py``)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ramify.errors import ConfigError
from ramify.inference.local.captured import CapturedDecoding
from ramify.inference.local.fixed_runner import FixedShapeRunner
from ramify.inference.local.kv_cache import CacheLayout, KeyValueCache, StepAttention
from ramify.inference.local.module_runner import ModuleRunner
from ramify.inference.local.slots import SlotMove
from ramify.inference.local.step import EngineStep, SlotSpan
from ramify.models.dense import CausalAttention, DenseModel
from ramify.models.trunk import ModuleTrunk


class ModelRunner(Protocol):
    """A model with a cache of slots."""

    bytes_per_token: int
    """Cache bytes per token; 0 if the cache is not allocated in advance."""

    is_fixed: bool
    """Whether it computes in fixed shapes (``fixed_runner.py``)."""

    @property
    def cache_bytes(self) -> int:
        """Bytes that the cache uses now; 0 if that is not known."""
        ...

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        """Compute ``step`` into the cache. Returns fp32 logits [n, V] after each decoding token and
        after each span that is ``wanted``, in order."""
        ...

    def change(self, change: SlotMove) -> None:
        """Copy or swap slots."""
        ...

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        """Allocate new slots, the first of which take over the contents of the slots ``stay``."""
        ...

    def forget(self) -> None:
        """Mark everything cached as outdated: it will not be read again."""
        ...

    def all_logits(self, ids: Sequence[int]) -> Tensor:
        """fp32 logits [T, V] after each of ``ids``, without touching the slots."""
        ...


class DecoderModel(Protocol):
    """A model over one token axis, such as ``models.dense.DenseModel``."""

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        attend: CausalAttention,
        rows_N: Tensor | None = None,
    ) -> Tensor:
        """[T, D] after the last norm, or [N, D] of the tokens at ``rows_N``."""
        ...

    def logits(self, h_ND: Tensor) -> Tensor:
        """fp32 [N, V]"""
        ...


class FlatRunner:
    """Model runner that computes all spans of a step in one pass."""

    is_fixed = False

    def __init__(
        self, decoder: DecoderModel, layout: CacheLayout, captured: CapturedDecoding | None = None
    ) -> None:
        """``captured``: computes the decoding steps that it can."""
        self._decoder = decoder
        self._layout = layout
        self._captured_steps = captured
        self.bytes_per_token = layout.bytes_per_token
        self._cache = KeyValueCache(layout, 1, 1)

    @property
    def cache_bytes(self) -> int:
        return self._cache.kv.untyped_storage().nbytes()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        if self._captured_steps is not None:
            h_ND = self._captured_steps.hidden(self._cache, step)
            if h_ND is not None:
                return self._decoder.logits(h_ND)
        rows_N = None
        if step.spans:
            rows = list(range(len(step.slots)))
            end = len(rows) - 1
            for span, is_wanted in zip(step.spans, wanted, strict=True):
                end += len(span.ids)
                if is_wanted:
                    rows.append(end)
            rows_N = torch.tensor(rows, dtype=torch.long, device=self._layout.device)
        return self._decoder.logits(self._hidden(step, self._cache, rows_N))

    def change(self, change: SlotMove) -> None:
        self._cache.change(change)

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        self._cache = self._cache.resized(stay, num_slots, capacity)
        if self._captured_steps is not None:
            self._captured_steps.clear()

    def forget(self) -> None:
        # The cache needs nothing: slots are written before they are read.
        if self._captured_steps is not None:
            self._captured_steps.weights_changed()

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        cache = KeyValueCache(self._layout, 1, len(ids))
        return self._decoder.logits(
            self._hidden(EngineStep(spans=[SlotSpan(0, 0, ids)]), cache, None)
        )

    def _hidden(self, step: EngineStep, cache: KeyValueCache, rows_N: Tensor | None) -> Tensor:
        ids, positions = list(step.ids), list(step.positions)
        for span in step.spans:
            ids += span.ids
            positions += range(span.start, span.end)
        ids_T, positions_T = torch.tensor([ids, positions], device=self._layout.device)
        return self._decoder.hidden(ids_T, positions_T, StepAttention(cache, step), rows_N)


def runner_of(
    model: nn.Module, fixed_shapes: torch.dtype | None = None, *, capture: bool = True
) -> ModelRunner:
    """The fastest runner that computes what ``model`` computes; with ``fixed_shapes`` the one that
    computes in fixed shapes, with products in this precision. ``capture``: whether it may decode by
    CUDA graphs."""
    if fixed_shapes is not None:
        if not isinstance(model, DenseModel):
            raise ConfigError(f"a {type(model).__name__} cannot compute in fixed shapes")
        return FixedShapeRunner(model, fixed_shapes)
    if isinstance(model, DenseModel):
        shape, parameter = model.shape, next(model.parameters())
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
        layout = CacheLayout(*sizes, parameter.dtype, parameter.device)
        if parameter.device.type != "cuda" or not capture:
            return FlatRunner(model, layout)
        return FlatRunner(model, layout._replace(num_spare=16), CapturedDecoding(model))
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
    tolerance = 1e-3 if module.dtype == torch.float32 else 5e-2
    return bool(torch.allclose(logits, expected, rtol=tolerance, atol=tolerance))


def _layout(module: Any) -> CacheLayout:
    config = module.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return CacheLayout(config.num_hidden_layers, heads, size, module.dtype, module.device)
