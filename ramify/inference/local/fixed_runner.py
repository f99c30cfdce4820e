"""The model runner of deterministic runs: a token's logits have the same bits whatever else is in
the step, in the cache, or in the slot's past (``models/fixed_shapes.py``).

    step ── its tokens in blocks of 64, one pass each ──> cache, hidden rows ── blocks of 64 ──>
    logits

A step of one sequence costs as much as a step of 64. With products in bf16, weights stay in fp32 as
in the trainer, and are cast once per step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
from torch import Tensor

from ramify.inference.local.kv_cache import CacheLayout, KeyValueCache
from ramify.inference.local.slots import SlotMove
from ramify.inference.local.step import EngineStep, SlotSpan
from ramify.models.dense import DenseModel
from ramify.models.fixed_shapes import (
    BLOCK,
    attend_path,
    cast_for_products,
    in_blocks,
    padded,
    runs_of,
)


class FixedShapeRunner:
    """Implements ``ModelRunner`` in fixed shapes."""

    is_fixed = True

    def __init__(self, model: DenseModel, products: torch.dtype) -> None:
        """``products``: the precision of matrix products, which the trainer also uses."""
        shape, parameter = model.shape, next(model.parameters())
        sizes = (shape.num_layers, shape.num_kv_heads, shape.head_size)
        self._model = model
        self._products = products
        self._device = parameter.device
        self._layout = CacheLayout(*sizes, products, parameter.device)
        self.bytes_per_token = self._layout.bytes_per_token
        self._cache = KeyValueCache(self._layout, 1, BLOCK)

    @property
    def cache_bytes(self) -> int:
        return self._cache.kv.untyped_storage().nbytes()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
        tokens = list(zip(step.slots, step.positions, step.ids, strict=True))
        rows = list(range(len(tokens)))
        for span, is_wanted in zip(step.spans, wanted, strict=True):
            tokens += [(span.slot, span.start + at, id) for at, id in enumerate(span.ids)]
            rows += [len(tokens) - 1] if is_wanted else []
        return self._logits(self._cache, tokens, rows)

    def change(self, change: SlotMove) -> None:
        self._cache.change(change)

    def resize(self, stay: Sequence[int], num_slots: int, capacity: int) -> None:
        self._cache = self._cache.resized(stay, num_slots, padded(capacity))

    def forget(self) -> None:
        """Nothing to do: slots are written before they are read."""

    @torch.inference_mode()
    def all_logits(self, ids: Sequence[int]) -> Tensor:
        cache = KeyValueCache(self._layout, 1, padded(len(ids)))
        tokens = [(0, position, id) for position, id in enumerate(SlotSpan(0, 0, ids).ids)]
        return self._logits(cache, tokens, range(len(ids)))

    def _logits(
        self, cache: KeyValueCache, tokens: Sequence[tuple[int, int, int]], rows: Sequence[int]
    ) -> Tensor:
        """fp32 [n, V] after the ``tokens`` (slot, position, id) at the indices ``rows``."""
        with self._precision():
            h_TD = torch.cat(
                [
                    self._block(cache, tokens[start : start + BLOCK])
                    for start in range(0, len(tokens), BLOCK)
                ]
            )
            index = torch.tensor(rows, dtype=torch.long, device=self._device)
            return in_blocks(self._model.logits, h_TD.index_select(0, index))

    def _block(self, cache: KeyValueCache, tokens: Sequence[tuple[int, int, int]]) -> Tensor:
        """[n, D] of at most ``BLOCK`` tokens."""
        slots, positions, ids = (list(each) for each in zip(*tokens, strict=True))
        padding = [0] * (BLOCK - len(tokens))
        ids_T, positions_T = torch.tensor(
            [[*ids, *padding], [*positions, *padding]], device=self._device
        )
        attend = _CachedBlock(cache, slots, positions)
        return self._model.hidden(ids_T, positions_T, attend)[: len(tokens)]

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        if self._products == torch.float32:
            return contextlib.nullcontext()
        return torch.autocast(self._device.type, self._products)


class _CachedBlock:
    """Attention of one block over the cache. Implements ``dense.CausalAttention``."""

    def __init__(self, cache: KeyValueCache, slots: list[int], positions: list[int]) -> None:
        self._cache = cache
        self._runs = runs_of(slots, positions)
        self._num = len(slots)
        self._write_at = cache.write_rows(torch.tensor(cache.row_of(slots, positions)))
        self._write_at = self._write_at.to(cache.kv.device)

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        q_THd, k_TKd, v_TKd = cast_for_products(q_THd, k_TKd, v_TKd)
        self._cache.write(layer, self._write_at, k_TKd[: self._num], v_TKd[: self._num])
        o_THd = torch.zeros_like(q_THd)
        for run in self._runs:
            at, length = slice(run.row, run.row + run.num), padded(run.position + run.num)
            k, v = (self._cache.kv[which, layer, run.source, :, :length] for which in (0, 1))
            o_THd[at] = attend_path(q_THd[at], k, v, run.position, scale)
        return o_THd
