"""Attention over a packed forest: every token sees the tokens of its path, and shared tokens are
stored once.

    segments      0 [prompt]            segment  own block (causal)   descendant blocks (all keys)
    in preorder   ├── 1 [turn, cells]      0        0 x 0                1 2 3 4 x 0
                  │   ├── 2 [child]        1        1 x 1                2 3 x 1
                  │   └── 3 [child]        2, 3     2 x 2, 3 x 3
                  └── 4 [sibling]          4        4 x 4

In preorder, the descendants of a segment are one contiguous range of queries. Its keys and values
are therefore read once for all of them, without a mask and without a copy for each sibling; forks
at any depth are just more blocks. The results of several blocks are combined by their log-sum-exps
(2205.14135), and the backward pass runs over the same blocks. Forward and backward cost as much as
the tree, and the numbers are those of the separate paths.

Not here: windows and dropout (``trunk.py`` only uses models without them, or runs them on rows).

Legend: T tokens, S segments, H query heads, K key-value heads, d head size, N queries or keys of
one level.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ramify.models.attention_kernels import (
    BlockKernel,
    CpuFlashKernel,
    CudaFlashKernel,
    PlainAttentionKernel,
    PlainVarlenKernel,
    VarlenKernel,
    VarlenRanges,
)
from ramify.types.sequence import Segment

Kernel = BlockKernel | CudaFlashKernel | PlainVarlenKernel


class DescendantRange(NamedTuple):
    """The descendants [start, end) of the segment [key_start, start)."""

    key_start: int
    start: int
    end: int
    level: int
    """Number of segments above this one."""


class ForestAttentionPlan(NamedTuple):
    """The attention blocks of a forest."""

    own: list[int]
    """Lengths of the segments that have tokens, in order: causal blocks, one after another."""
    below: list[DescendantRange]
    """Descendant blocks; a segment's block precedes those of its descendants."""

    @classmethod
    def of(cls, segments: Many[Segment]) -> ForestAttentionPlan:
        levels: list[int] = []
        ends = [segment.end for segment in segments]
        """Segment -> where its last descendant ends."""
        for segment in segments:
            levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 0)
        for index in range(len(segments) - 1, -1, -1):
            if (parent := segments[index].parent) >= 0:
                ends[parent] = max(ends[parent], ends[index])
        own = [segment.end - segment.start for segment in segments if segment.end > segment.start]
        below = [
            DescendantRange(segment.start, segment.end, end, level)
            for segment, end, level in zip(segments, ends, levels, strict=True)
            if segment.start < segment.end < end
        ]
        return cls(own, below)


class ForestAttention:
    """Attention over the forest of one batch; one object serves all layers. Implements
    ``dense.CausalAttention``."""

    def __init__(self, segments: Many[Segment], kernel: Kernel | None = None) -> None:
        """``kernel``: by default the fastest for the queries' device and type."""
        self._plan = ForestAttentionPlan.of(segments)
        self._kernel = kernel
        self._walks: dict[tuple[str, torch.dtype, int], _Walk] = {}

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        device = q_THd.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
            q_THd, k_TKd, v_TKd = q_THd.to(kind), k_TKd.to(kind), v_TKd.to(kind)
        key = (device, q_THd.dtype, q_THd.shape[-1])
        if key not in self._walks:
            self._walks[key] = _walk(self._plan, self._kernel or _fastest(*key), q_THd.device)
        return cast(Tensor, _Attend.apply(q_THd, k_TKd, v_TKd, self._walks[key], scale))  # type: ignore[no-untyped-call]


def _fastest(device: str, dtype: torch.dtype, head_size: int) -> Kernel:
    if device == "cpu":
        return CpuFlashKernel()
    if device == "cuda" and CudaFlashKernel.takes(dtype, head_size):
        return CudaFlashKernel()
    return PlainAttentionKernel()


class _Walk(Protocol):
    """A plan, and how one kind of kernel runs its blocks."""

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(o [T, H, d], lse [H, T], additional tensors for ``backward``)"""
        ...

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv); ``saved`` is q, k, v, o, lse."""
        ...


def _walk(plan: ForestAttentionPlan, kernel: Kernel, device: torch.device) -> _Walk:
    if isinstance(kernel, (CudaFlashKernel, PlainVarlenKernel)):
        return _Levels(plan, kernel, device)
    return _Blocks(plan, kernel)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, walk: _Walk, scale: float
    ) -> Tensor:
        o_THd, lse_HT, more = walk.forward(q_THd, k_TKd, v_TKd, scale)
        ctx.save_for_backward(q_THd, k_TKd, v_TKd, o_THd, lse_HT, *more)
        ctx.walk, ctx.scale = walk, scale
        return o_THd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        saved = ctx.saved_tensors
        return (*ctx.walk.backward(grads[0], saved[:5], list(saved[5:]), ctx.scale), None, None)


class _Blocks:
    """Block after block, on views: no index, and no copy of queries or keys except for repeated
    heads.

    A block of a few dozen tokens takes some 30 µs, so views are made for all blocks at once if
    possible.
    """

    def __init__(self, plan: ForestAttentionPlan, kernel: BlockKernel) -> None:
        self._plan, self._kernel = plan, kernel

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        o_THd = torch.empty_like(q_THd)
        lse_HT = q_THd.new_empty(
            q_THd.shape[1], q_THd.shape[0], dtype=torch.promote_types(q_THd.dtype, torch.float32)
        )
        q, k, v, o = (
            _heads_first(x)
            for x in (q_THd, _repeated(k_TKd, q_THd), _repeated(v_TKd, q_THd), o_THd)
        )
        lse = lse_HT[None]
        own = (_split(x, self._plan.own) for x in (q, k, v, o, lse))
        for q_own, k_own, v_own, o_own, lse_own in zip(*own, strict=True):
            block_o, block_lse = self._kernel.forward(q_own, k_own, v_own, True, scale)
            o_own.copy_(block_o)
            lse_own.copy_(block_lse)
        for below in self._plan.below:
            at, seen = (below.start, below.end), (below.key_start, below.start)
            more, more_lse = self._kernel.forward(
                _at(q, *at), _at(k, *seen), _at(v, *seen), False, scale
            )
            _join(_at(o, *at), _at(lse, *at), more, more_lse)
        return o_THd, lse_HT, []

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_THd, k_TKd, v_TKd, o_THd, lse_HT = saved
        k_THd, v_THd = _repeated(k_TKd, q_THd), _repeated(v_TKd, q_THd)
        gradients = [torch.empty_like(x) for x in (q_THd, k_THd, v_THd)]
        do, q, k, v, o, dq, dk, dv = (
            _heads_first(x) for x in (do_THd, q_THd, k_THd, v_THd, o_THd, *gradients)
        )
        lse = lse_HT[None]
        own = (_split(x, self._plan.own) for x in (do, q, k, v, o, lse, dq, dk, dv))
        for do_own, q_own, k_own, v_own, o_own, lse_own, *gradient_views in zip(*own, strict=True):
            block_gradients = self._kernel.backward(
                do_own, q_own, k_own, v_own, o_own, lse_own, True, scale
            )
            for gradient, part in zip(gradient_views, block_gradients, strict=True):
                gradient.copy_(part)
        for below in self._plan.below:
            at, seen = (below.start, below.end), (below.key_start, below.start)
            k_seen, v_seen, o_at, lse_at = _at(k, *seen), _at(v, *seen), _at(o, *at), _at(lse, *at)
            block_gradients = self._kernel.backward(
                _at(do, *at), _at(q, *at), k_seen, v_seen, o_at, lse_at, False, scale
            )
            for gradient, part in zip(
                (_at(dq, *at), _at(dk, *seen), _at(dv, *seen)), block_gradients, strict=True
            ):
                gradient.add_(part)
        return gradients[0], _summed(gradients[1], k_TKd), _summed(gradients[2], v_TKd)


class _Level(NamedTuple):
    """The blocks below all segments of one level, in one call."""

    rows: Tensor
    """[N] indices of the queries."""
    queries: VarlenRanges
    key_rows: Tensor
    """[N] indices of the keys."""
    keys: VarlenRanges


class _Levels:
    """All own blocks in one call, then one call per level of the forest, on gathered queries and
    keys."""

    def __init__(
        self, plan: ForestAttentionPlan, kernel: VarlenKernel, device: torch.device
    ) -> None:
        self._kernel = kernel
        self._own = _stretches(plan.own, device)
        levels: dict[int, list[DescendantRange]] = {}
        for below in plan.below:
            levels.setdefault(below.level, []).append(below)
        self._levels = [_level(levels[level], device) for level in sorted(levels)]

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        q_THd, k_TKd, v_TKd = q_THd.contiguous(), k_TKd.contiguous(), v_TKd.contiguous()
        o_THd, lse_HT, more = self._kernel.forward(
            q_THd, k_TKd, v_TKd, self._own, self._own, True, scale
        )
        saved = list(more)
        for level in self._levels:
            q, k, v = q_THd[level.rows], k_TKd[level.key_rows], v_TKd[level.key_rows]
            o_more, lse_more, more = self._kernel.forward(
                q, k, v, level.queries, level.keys, False, scale
            )
            o, lse = o_THd[level.rows], lse_HT[:, level.rows]
            _join(_heads_first(o), lse[None], _heads_first(o_more), lse_more[None])
            o_THd[level.rows], lse_HT[:, level.rows] = o, lse
            saved += more
        return o_THd, lse_HT, saved

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_THd, k_TKd, v_TKd, o_THd, lse_HT = (x.contiguous() for x in saved)
        do_THd = do_THd.contiguous()
        per_call = len(more) // (1 + len(self._levels))
        inputs = (do_THd, q_THd, k_TKd, v_TKd, o_THd, lse_HT, tuple(more[:per_call]))
        dq_THd, dk_TKd, dv_TKd = self._kernel.backward(*inputs, self._own, self._own, True, scale)
        for index, level in enumerate(self._levels, 1):
            do, q, o, lse = (
                *(x[level.rows] for x in (do_THd, q_THd, o_THd)),
                lse_HT[:, level.rows].contiguous(),
            )
            k, v = k_TKd[level.key_rows], v_TKd[level.key_rows]
            state = tuple(more[index * per_call : (index + 1) * per_call])
            dq, dk, dv = self._kernel.backward(
                do, q, k, v, o, lse, state, level.queries, level.keys, False, scale
            )
            dq_THd.index_add_(0, level.rows, dq)
            dk_TKd.index_add_(0, level.key_rows, dk)
            dv_TKd.index_add_(0, level.key_rows, dv)
        return dq_THd, dk_TKd, dv_TKd


def _level(belows: list[DescendantRange], device: torch.device) -> _Level:
    def gathered(ranges: list[tuple[int, int]]) -> tuple[Tensor, VarlenRanges]:
        rows = torch.cat([torch.arange(start, end) for start, end in ranges])
        return rows.to(device), _stretches([end - start for start, end in ranges], device)

    rows, queries = gathered([(below.start, below.end) for below in belows])
    key_rows, keys = gathered([(below.key_start, below.start) for below in belows])
    return _Level(rows, queries, key_rows, keys)


def _stretches(lengths: list[int], device: torch.device) -> VarlenRanges:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return VarlenRanges(bounds, max(lengths, default=0))


def _join(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Combine attention over further keys with the attention so far, in place. [1, H, n, d] and [1,
    H, n]"""
    share = torch.sigmoid(more_lse - lse).to(o.dtype)
    o.transpose(1, 2).lerp_(more.transpose(1, 2), share.transpose(1, 2)[..., None])
    lse.copy_(torch.logaddexp(lse, more_lse))


def _repeated(x_TKd: Tensor, q_THd: Tensor) -> Tensor:
    """[T, H, d]: each key head repeated for every query head that reads it."""
    groups = q_THd.shape[1] // x_TKd.shape[1]
    return x_TKd if groups == 1 else x_TKd.repeat_interleave(groups, 1)


def _summed(grad_THd: Tensor, x_TKd: Tensor) -> Tensor:
    """[T, K, d]: the gradient before ``_repeated``."""
    groups = grad_THd.shape[1] // x_TKd.shape[1]
    return grad_THd if groups == 1 else grad_THd.view(*x_TKd.shape[:2], groups, -1).sum(2)


def _heads_first(x_THd: Tensor) -> Tensor:
    """[1, H, T, d], a view."""
    return x_THd.transpose(0, 1)[None]


def _split(x: Tensor, lengths: list[int]) -> tuple[Tensor, ...]:
    """Views of the consecutive ranges of dimension 2."""
    return torch.split(x, lengths, 2)


def _at(x: Tensor, start: int, end: int) -> Tensor:
    """Tokens [start, end) of [1, H, T] or [1, H, T, d], a view."""
    return x.narrow(2, start, end - start)
