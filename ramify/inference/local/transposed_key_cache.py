"""A KV cache for CPU decoding that stores keys transposed, and the attention that reads it.

A decoding sequence has one query per head, so its attention takes as long as reading its keys and
values. Batched matrix products of PyTorch read them at half the speed of ``torch.embedding_bag``,
which sums weighted rows of a table and fetches the next rows meanwhile. Both products of attention
are such sums:

    scores    sum of q[i] · keys[slot, head, i]         over the d dimensions i of a head
    output    sum of weight[t] · values[slot, head, t]  over the positions t

So a row of keys holds one dimension of a slot's keys at all positions:

    kv[0, layer, slot, head]    [d, C]
    kv[1, layer, slot, head]    [C, d]

Legend: as in ``kv_cache.py``; W positions that a step reads per slot, in b parts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.inference.local.kv_cache import DecodeAttention, KeyValueCache, KvCacheLayout
from ramify.inference.local.kv_cache_slots import EngineStep
from ramify.models import onednn_products

_LEAST_WIDTH = 64
"""Cache capacities are rounded up to a multiple of this many positions, which is also the smallest
part into which a row of keys is divided."""
_LEAST_HEADS = 24
"""Minimum product of decoding sequences and key-value heads at which attention is faster with sums
of rows than with matrix products."""
_HORIZON = 8
"""Number of consecutive steps for which the row numbers to read are computed in advance."""


def is_faster(layout: KvCacheLayout) -> bool:
    """Return True if decoding over a ``TransposedKeyCache`` is faster than over a
    ``KeyValueCache``.

    It is in fp32 on CPUs of AMD; others were not measured.
    """
    return (
        layout.dtype == torch.float32
        and layout.device.type == "cpu"
        # PyTorch's fast kernel for sums of rows is FBGEMM's.
        and "fbgemm" in torch.backends.quantized.supported_engines
        and onednn_products.is_faster_on_cpu()
    )


class TransposedKeyCache(KeyValueCache):
    """A KV cache on a CPU with transposed keys.

    Capacities are rounded up to multiples of 64 tokens.
    """

    def __init__(self, layout: KvCacheLayout, num_slots: int, capacity: int) -> None:
        super().__init__(layout, num_slots, -(-capacity // _LEAST_WIDTH) * _LEAST_WIDTH)
        keys = self.kv[0].view(-1, num_slots, self.heads, self.size, self.capacity)
        self.keys, self.values = keys, self.kv[1]
        """Keys, [layers, slots, key-value heads, head size, positions], and values, [layers, slots,
        key-value heads, positions, head size]."""
        self.blocks = [
            (k.flatten(0, 1).transpose(1, 2), v.flatten(0, 1))
            for k, v in zip(keys, self.values, strict=True)
        ]
        self._flat_keys = [k.view(-1) for k in keys]
        self._slot_size = self.heads * self.size * self.capacity
        self._key_offsets = torch.arange(0, self._slot_size, self.capacity)
        self._head_offsets = torch.arange(self.heads) * self.capacity
        self._attention: TransposedCacheAttention | None = None

    def writer(self, rows_T: Tensor) -> Callable[[int, Tensor, Tensor], None]:
        slots_T = torch.div(rows_T, self.heads * self.capacity, rounding_mode="floor")
        # The keys of a slot begin at the same place as its values: d times its first row.
        first_T = torch.add(rows_T, slots_T, alpha=self._slot_size - self.heads * self.capacity)
        keys_at = (first_T[:, None] + self._key_offsets).view(-1)
        rows = (rows_T[:, None] + self._head_offsets).view(-1)

        def write(layer: int, k_TKd: Tensor, v_TKd: Tensor) -> None:
            self._flat_keys[layer].scatter_(0, keys_at, k_TKd.reshape(-1))
            self.rows[layer][1].index_copy_(0, rows, v_TKd.reshape(-1, self.size))

        return write

    def keys_and_values(self, layer: int, slot: int, end: int) -> tuple[Tensor, Tensor]:
        k_Ktd = self.keys[layer, slot, :, :, :end].transpose(1, 2)
        # PyTorch's fast attention needs contiguous heads.
        return k_Ktd.contiguous(), self.values[layer, slot, :, :end]

    def prefix_views(self, slot: int, length: int) -> list[Tensor]:
        return [self.keys[:, slot, :, :, :length], self.values[:, slot, :, :length]]

    def build_decode_attention(
        self, step: EngineStep
    ) -> TransposedCacheAttention | DecodeAttention:
        if len(step.slots) * self.heads < _LEAST_HEADS:
            return DecodeAttention.for_step(self, step)
        if self._attention is None or not self._attention.continues_with(step):
            self._attention = TransposedCacheAttention(self, step)
        return self._attention


class TransposedCacheAttention:
    """Decode attention over a ``TransposedKeyCache``.

    It is computed as weighted sums of the cache's rows. Each sequence has one query token. It can
    be used again for the next few steps of the same sequences.
    """

    def __init__(self, cache: TransposedKeyCache, step: EngineStep) -> None:
        self._cache = cache
        self._slots, self._positions = list(step.slots), list(step.positions)
        self._steps_left = _HORIZON - 1
        # One row of biases is enough for sequences of equal length.
        last = step.positions if len(set(step.positions)) > 1 else step.positions[:1]
        last_n = torch.tensor(last)
        self._width = min(-(-(max(last) + _HORIZON) // 8) * 8, cache.capacity)
        hidden_nW = torch.arange(self._width) > last_n[:, None]
        self._bias_n1W = torch.where(hidden_nW, -torch.inf, 0.0)[:, None]
        self._shown = torch.arange(len(last)) * self._width + last_n
        """Index, in the flattened biases, of each sequence's last visible position."""
        self._part_width = _part_width(self._width, cache.capacity)
        self._tables = [
            (keys.view(-1, self._part_width), rows[1])
            for keys, rows in zip(cache.keys, cache.rows, strict=True)
        ]
        self._rows: tuple[_RowSums, _RowSums] | None = None
        """Row numbers to read for keys, whose sums are scores [n, K, g, b, C / b], and for values,
        whose sums are outputs [n, K, g, d]. None until the number of query heads is known."""

    def continues_with(self, step: EngineStep) -> bool:
        """Return True if this object can also compute the attention of ``step``.

        The step must decode the next token of each sequence of the step before. This object then
        computes its attention, too.
        """
        if (
            not self._steps_left
            or step.slots != self._slots
            or step.positions != [position + 1 for position in self._positions]
        ):
            return False
        self._steps_left -= 1
        self._positions = list(step.positions)
        self._bias_n1W.view(-1).index_fill_(0, self._shown.add_(1), 0)
        return True

    def __call__(self, layer: int, q_THd: Tensor, scale: float) -> Tensor:
        """Return one layer's attention output for each query token, [T, H, d]."""
        num, heads = q_THd.shape[:2]
        if self._rows is None:
            self._rows = self._rows_read(heads // self._cache.heads)
        key_rows, value_rows = self._rows
        keys, values = self._tables[layer]
        num_parts = key_rows.num // (num * heads)
        if num_parts > 1:
            q = q_THd[:, :, None].expand(-1, -1, num_parts, -1).reshape(-1)
        else:
            q = q_THd.reshape(-1)
        parts = key_rows.sums(keys, q if scale == 1 else q * scale)
        scores = parts.view(num, heads, -1)[..., : self._width]
        weights = (scores + self._bias_n1W).softmax(-1)
        return value_rows.sums(values, weights.view(-1)).view(q_THd.shape)

    def _rows_read(self, group: int) -> tuple[_RowSums, _RowSums]:
        """Return the weighted sums over cache rows that attention needs in this step and the next
        few.

        One covers the key rows and one the value rows. The key rows are divided into parts. There
        are ``group`` query heads per key head. What is past a sequence's last position by then is
        replaced by what is before, so that less memory is read.
        """
        cache = self._cache
        heads_nK = torch.tensor(self._slots)[:, None] * cache.heads + torch.arange(cache.heads)
        last_n = torch.tensor(self._positions).add_(_HORIZON - 1).clamp_(max=cache.capacity - 1)
        at_nW = torch.arange(self._width).minimum(last_n[:, None])
        value_rows_nKW = heads_nK[..., None] * cache.capacity + at_nW[:, None]
        last_part_n = torch.div(last_n, self._part_width, rounding_mode="floor")
        at_nb = torch.arange(-(-self._width // self._part_width)).minimum(last_part_n[:, None])
        rows_nKd = heads_nK[..., None] * cache.size + torch.arange(cache.size)
        parts_per_row = cache.capacity // self._part_width
        key_rows_nKbd = rows_nKd[:, :, None] * parts_per_row + at_nb[:, None, :, None]
        return _RowSums.of(key_rows_nKbd, group), _RowSums.of(value_rows_nKW, group)


def _part_width(width: int, capacity: int) -> int:
    """Return the part width that makes reading the first positions of a key row fastest.

    The row has ``capacity`` positions, of which ``width`` are read. Positions are read in whole
    parts. Each part of a sum takes as long as 64 more positions.
    """
    widths = [each for each in range(_LEAST_WIDTH, capacity + 1, 32) if capacity % each == 0]
    return min(widths, key=lambda each: -(-width // each) * (each + 64))


class _RowSums(NamedTuple):
    """Row numbers for several weighted sums of table rows, which are computed in one call.

    Each sum lists the numbers of its rows.
    """

    rows: Tensor
    """Row numbers of all sums, concatenated."""
    bounds: Tensor
    """The row numbers of sum i are ``rows[bounds[i] : bounds[i + 1]]``."""

    @classmethod
    def of(cls, rows_nK: Tensor, group: int) -> _RowSums:
        """Create one set of weighted sums of table rows for each query head.

        They run over the last dimension of ``rows_nK``. ``rows_nK`` holds row numbers [n, K, …],
        and each of the K key heads has ``group`` query heads.
        """
        rows = rows_nK[:, :, None].expand(-1, -1, group, *rows_nK.shape[2:]).reshape(-1)
        return cls(rows, torch.arange(0, len(rows) + 1, rows_nK.shape[-1]))

    @property
    def num(self) -> int:
        """The number of sums."""
        return len(self.bounds) - 1

    def sums(self, table: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sums of a table's rows, [number of sums, row width].

        There is one weight per row number.
        """
        # Mode 0 is a sum; the last argument says that ``bounds`` has the end of the last sum, too.
        sums: Tensor = torch.embedding_bag(
            table, self.rows, self.bounds, False, 0, False, weights, True
        )[0]
        return sums
