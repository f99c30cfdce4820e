"""The model interface of the engine: a step of tokens in, logits out, and a cache of slots.

``FlatRunner`` computes all spans of a step in one pass over one token axis. ``runner_choice.py``
decides which models it can run; the others run one sequence at a time (``module_runner.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from ramify.inference.local.kv_cache import CacheLayout, KeyValueCache, StepAttention
from ramify.inference.local.slots import SlotMove
from ramify.inference.local.step import EngineStep, SlotSpan
from ramify.models.dense import CausalAttention, DenseModel


class ModelRunner(Protocol):
    """A model with a cache of slots."""

    bytes_per_token: int
    """Cache bytes per token; 0 if the cache is not allocated in advance."""

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

    def __init__(self, decoder: DecoderModel, layout: CacheLayout) -> None:
        self._decoder = decoder
        self._layout = layout
        self.bytes_per_token = layout.bytes_per_token
        self._cache = KeyValueCache(layout, 1, 1)

    @property
    def cache_bytes(self) -> int:
        return self._cache.kv.untyped_storage().nbytes()

    def forward(self, step: EngineStep, wanted: Sequence[bool]) -> Tensor:
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

    def forget(self) -> None:
        """Nothing to do: slots are written before they are read."""

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


def dense_runner(model: DenseModel) -> FlatRunner:
    """The runner of a ``DenseModel``."""
    shape, parameter = model.shape, next(model.parameters())
    return FlatRunner(
        model,
        CacheLayout(
            shape.num_layers, shape.num_kv_heads, shape.head_size, parameter.dtype, parameter.device
        ),
    )
