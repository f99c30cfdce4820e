"""Attention over a forest of token sequences that share prefixes.

Every token attends to the earlier tokens of its sequence. Tokens that several sequences share are
stored and computed once.

    segments      0 [prompt]            segment  own block (causal)   descendant blocks (all keys)
    in preorder   ├── 1 [turn, cells]      0        0 x 0                1 2 3 4 x 0
                  │   ├── 2 [child]        1        1 x 1                2 3 x 1
                  │   └── 3 [child]        2, 3     2 x 2, 3 x 3
                  └── 4 [sibling]          4        4 x 4

In preorder, the descendants of a segment form one contiguous range of queries. The segment's keys
and values are therefore read once for all descendants, without a mask and without a copy for each
sibling; forks at any depth are simply more blocks. The results of several blocks are combined by
their log-sum-exps (2205.14135), and the backward pass runs over the same blocks. The cost of both
passes is proportional to the size of the tree, and the results are those of computing each sequence
separately.

The outputs of the last layer matter only for tokens whose prediction contributes to the loss. In
that layer, each segment is cut at its first such token: the part before the cut, such as a prompt,
has keys but no queries.

Windows and dropout are not supported (``training_forward.py`` runs models that have them on padded
rows).

Legend: T tokens, S segments, H query heads, K key-value heads, d head size, N queries or keys of
one level, or the rows whose output matters.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Many
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from ramify.models import onednn_products
from ramify.models.attention_kernels import (
    AttentionBlockKernel,
    CpuFlashKernel,
    CudaFlashKernel,
    PlainAttentionKernel,
    PlainVarlenKernel,
    VarlenAttentionKernel,
    VarlenRanges,
)
from ramify.models.onednn_attention import TiledAttention
from ramify.types.training_sequences import PackedTokenSegment

TILED: Literal["tiled"] = "tiled"
"""Name of the kernel that computes a whole forest at once (``onednn_attention.py``)."""
Kernel = AttentionBlockKernel | CudaFlashKernel | PlainVarlenKernel | Literal["tiled"]


class DescendantAttentionBlock(NamedTuple):
    """An attention block without a mask, in which tokens attend to an ancestor segment.

    All tokens in the descendants of a tree segment attend to all keys of that segment.
    """

    keys: tuple[int, int]
    """Range [start, end) of the key tokens."""
    queries: tuple[int, int]
    """Range [start, end) of the query tokens, as indices among the tokens that have queries."""
    level: int
    """Depth of the segment: the number of segments above it. Some kernels compute all blocks of one
    depth in one call."""


class ForestAttentionPlan(NamedTuple):
    """The dense blocks into which attention over a forest of token sequences is divided.

    Each segment has a causal block for its own tokens, and a block in which its descendants' tokens
    attend to it.
    """

    own: list[int]
    """Lengths of the causal blocks, one for each segment that has tokens, in the order of the
    segments."""
    below: list[DescendantAttentionBlock]
    """Blocks in which descendants attend to a segment. A segment's block precedes those of its
    descendants."""
    skipped: list[int]
    """Number of tokens without queries before each causal block, then the number after the last
    one. Empty if all tokens have queries."""

    @property
    def causal_segment_ranges(self) -> list[tuple[int, int]]:
        """Return the token range [start, end) of each causal attention block in the plan."""
        blocks, end = [], 0
        for skipped, length in zip_longest(self.skipped, self.own, fillvalue=0):
            start = end + skipped
            end = start + length
            blocks.append((start, end))
        return blocks[: len(self.own)]

    @classmethod
    def for_segments(
        cls, segments: Many[PackedTokenSegment], rows: Many[int] | None = None
    ) -> ForestAttentionPlan:
        """Plan the attention blocks for the segments of a packed forest.

        ``rows`` lists the tokens whose output is needed, in ascending order, and defaults to all. A
        segment's causal block begins at its first needed token and includes all later tokens of the
        segment.
        """
        levels: list[int] = []
        ends = [segment.end for segment in segments]
        """Segment -> index after the last token of its last descendant."""
        for segment in segments:
            levels.append(levels[segment.parent] + 1 if segment.parent >= 0 else 0)
        # In preorder, children follow their parents: backwards, each child is complete first.
        for index in range(len(segments) - 1, -1, -1):
            if (parent := segments[index].parent) >= 0:
                ends[parent] = max(ends[parent], ends[index])
        own: list[int] = []
        below: list[DescendantAttentionBlock] = []
        skipped: list[int] = []
        computed = 0
        for segment, end, level in zip(segments, ends, levels, strict=True):
            first = segment.start
            if rows is not None:
                at = bisect_left(rows, segment.start)
                # The next needed token may belong to a later segment.
                first = min(rows[at], segment.end) if at < len(rows) else segment.end
            if first < segment.end:
                own.append(segment.end - first)
                skipped.append(first - computed)
                computed = segment.end
            # Keys before the first needed token form a separate block, which the segment's needed
            # tokens attend to as well as its descendants.
            for keys in ((segment.start, first), (first, segment.end)):
                queries = (keys[1], end)
                if rows is not None:  # queries are counted among the needed tokens
                    queries = (bisect_left(rows, keys[1]), bisect_left(rows, end))
                if keys[0] < keys[1] and queries[0] < queries[1]:
                    below.append(DescendantAttentionBlock(keys, queries, level))
        skipped.append(ends[-1] - computed if segments else 0)
        return cls(own, below, skipped if rows is not None else [])


class LayerRowSelection(NamedTuple):
    """A selection of the rows of one layer's output that later computation needs."""

    layer: int
    rows: Tensor
    """[N] distinct row indices in ascending order."""


class ForestAttention:
    """Computes attention over the forest of one batch, for all layers of a model.

    Implements ``dense.CausalAttentionKernel``.
    """

    def __init__(
        self,
        segments: Many[PackedTokenSegment],
        kernel: Kernel | None = None,
        needed: LayerRowSelection | None = None,
    ) -> None:
        """Plan the attention computation for the segments of a packed batch.

        The default kernel is the fastest one for the device and precision of the queries.
        ``needed`` names a layer in which only some output rows are used. Its other rows may have
        any value.
        """
        self._segments = segments
        self._kernel = kernel
        self._needed = needed
        self._walks: dict[tuple[str, torch.dtype, int, bool], _Walk] = {}

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        device = q_THd.device.type
        if torch.is_autocast_enabled(device):
            kind = torch.get_autocast_dtype(device)
            q_THd, k_TKd, v_TKd = q_THd.to(kind), k_TKd.to(kind), v_TKd.to(kind)
        is_needed = self._needed is not None and self._needed.layer == layer
        key = (device, q_THd.dtype, q_THd.shape[-1], is_needed)
        if key not in self._walks:
            kernel = self._kernel or _fastest_kernel(*key[:3])
            rows = self._needed.rows if is_needed and self._needed is not None else None
            self._walks[key] = _walk(
                self._segments, kernel, q_THd.device, rows, q_THd.shape[1] // k_TKd.shape[1]
            )
        return cast(Tensor, _Attend.apply(q_THd, k_TKd, v_TKd, self._walks[key], scale))  # type: ignore[no-untyped-call]


def _fastest_kernel(device: str, dtype: torch.dtype, head_size: int) -> Kernel:
    if device == "cpu":
        # Each product of a tile waits for all threads, and flash attention once for a whole block.
        is_single = dtype == torch.float32 and torch.get_num_threads() == 1
        return TILED if is_single and onednn_products.is_faster_on_cpu() else CpuFlashKernel()
    if device == "cuda" and CudaFlashKernel.is_supported(dtype, head_size):
        return CudaFlashKernel()
    return PlainAttentionKernel()


class _Walk(Protocol):
    """Interface for computing all blocks of an attention plan with one kind of kernel."""

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the attention output of all tokens, and what the backward pass needs.

        The result contains the output [tokens, heads, head size], its log-sum-exp [heads, tokens],
        and extra tensors for the backward pass.
        """
        ...

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries, keys and values of all tokens.

        ``saved`` holds the queries, keys, values, output and log-sum-exp of the forward pass.
        """
        ...


def _walk(
    segments: Many[PackedTokenSegment],
    kernel: Kernel,
    device: torch.device,
    rows_N: Tensor | None,
    groups: int,
) -> _Walk:
    if isinstance(kernel, (CudaFlashKernel, PlainVarlenKernel)):
        # All rows: further calls for cut segments would cost more than one layer's queries.
        return _Levels(ForestAttentionPlan.for_segments(segments), kernel, device)
    rows = None if rows_N is None else rows_N.tolist()
    plan = ForestAttentionPlan.for_segments(segments, rows)
    if kernel == TILED:
        below = [(each.keys, each.queries) for each in plan.below]
        tiled = TiledAttention(plan.causal_segment_ranges, below, rows_N)
        if tiled.is_worthwhile(groups):
            return tiled
        kernel = CpuFlashKernel()
    return _Blocks(plan, kernel, rows_N)


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
    """Computes the blocks of an attention plan one at a time, on views of the tensors.

    Keys and values are copied only if several query heads share a key head. Queries are copied only
    if some rows are not needed.

    Computing a block of a few dozen tokens takes only about 30 µs, so views are made for all blocks
    at once where possible, and adjacent causal blocks of one length are computed in one call.
    """

    def __init__(
        self, plan: ForestAttentionPlan, kernel: AttentionBlockKernel, rows_N: Tensor | None
    ) -> None:
        self._plan, self._kernel, self._rows_N = plan, kernel, rows_N
        self._runs = _runs(plan)

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        o_THd = self._allocate_like(q_THd)
        lse_HT = q_THd.new_zeros(
            q_THd.shape[1], q_THd.shape[0], dtype=torch.promote_types(q_THd.dtype, torch.float32)
        )
        k, v = (_repeat_heads(x, q_THd) for x in (k_TKd, v_TKd))
        q, o, lse = _heads_first(q_THd), _heads_first(o_THd), lse_HT[None]
        own = (self._split_causal_blocks(x) for x in (q, k, v, o, lse))
        for q_own, k_own, v_own, o_own, lse_own in zip(*own, strict=True):
            block_o, block_lse = self._kernel.forward(q_own, k_own, v_own, True, scale)
            o_own.copy_(block_o)
            lse_own.copy_(block_lse)
        q_N, o_N, lse_N = (self._select_needed(x) for x in (q, o, lse))
        for below in self._plan.below:
            more, more_lse = self._kernel.forward(
                _slice_tokens(q_N, below.queries),
                _slice_tokens(k, below.keys),
                _slice_tokens(v, below.keys),
                False,
                scale,
            )
            _merge_attention(
                _slice_tokens(o_N, below.queries),
                _slice_tokens(lse_N, below.queries),
                more,
                more_lse,
            )
        if self._rows_N is not None:
            o.index_copy_(2, self._rows_N, o_N)
            lse.index_copy_(2, self._rows_N, lse_N)
        return o_THd, lse_HT, []

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        q_THd, k_TKd, v_TKd, o_THd, lse_HT = saved
        k, v = (_repeat_heads(x, q_THd) for x in (k_TKd, v_TKd))
        dq_THd = self._allocate_like(q_THd)
        dk, dv = self._allocate_like(k), self._allocate_like(v)
        do, q, o, dq = (_heads_first(x) for x in (do_THd, q_THd, o_THd, dq_THd))
        lse = lse_HT[None]
        # The output and log-sum-exp are those over all blocks, so the blocks' gradients add up.
        # Causal blocks do not overlap and come first, so each writes; later blocks add.
        own = (self._split_causal_blocks(x) for x in (do, q, k, v, o, lse, dq, dk, dv))
        for do_own, q_own, k_own, v_own, o_own, lse_own, *gradient_views in zip(*own, strict=True):
            block_gradients = self._kernel.backward(
                do_own, q_own, k_own, v_own, o_own, lse_own, True, scale
            )
            for gradient, part in zip(gradient_views, block_gradients, strict=True):
                gradient.copy_(part)
        do_N, q_N, o_N, lse_N, dq_N = (self._select_needed(x) for x in (do, q, o, lse, dq))
        for below in self._plan.below:
            at, seen = below.queries, below.keys
            do_at, q_at, o_at, lse_at = (_slice_tokens(x, at) for x in (do_N, q_N, o_N, lse_N))
            block_gradients = self._kernel.backward(
                do_at,
                q_at,
                _slice_tokens(k, seen),
                _slice_tokens(v, seen),
                o_at,
                lse_at,
                False,
                scale,
            )
            for gradient, part in zip(
                (_slice_tokens(dq_N, at), _slice_tokens(dk, seen), _slice_tokens(dv, seen)),
                block_gradients,
                strict=True,
            ):
                gradient.add_(part)
        if self._rows_N is not None:
            dq.index_copy_(2, self._rows_N, dq_N)
        return dq_THd, _sum_repeated_heads(dk, k_TKd), _sum_repeated_heads(dv, v_TKd)

    def _allocate_like(self, x: Tensor) -> Tensor:
        """Allocate an output tensor with the shape of ``x``.

        It is zero-filled if the causal blocks leave some of its rows unwritten.
        """
        return torch.empty_like(x) if self._rows_N is None else torch.zeros_like(x)

    def _split_causal_blocks(self, x: Tensor) -> Many[Tensor]:
        """Return one view per run of causal blocks, with the tokens of that run.

        Tokens are dimension 2 of the tensor, and the blocks of a run have equal lengths. The first
        dimension of a view counts the blocks.
        """
        lengths = [each for run in self._runs for each in (run.skipped, run.num * run.length)]
        parts = torch.split(x, [*lengths, x.shape[2] - sum(lengths)], 2)[1::2]
        return [
            part if run.num == 1 else _in_blocks(part, run.num)
            for run, part in zip(self._runs, parts, strict=True)
        ]

    def _select_needed(self, x: Tensor) -> Tensor:
        """Return only the tokens (dimension 2) whose attention output is needed."""
        return x if self._rows_N is None else x.index_select(2, self._rows_N)


class _CausalRun(NamedTuple):
    """Adjacent causal attention blocks of equal length, computed in one kernel call."""

    skipped: int
    """Number of tokens without queries before the first block."""
    num: int
    length: int


def _in_blocks(x: Tensor, num: int) -> Tensor:
    """View a tensor [1, heads, tokens, …] as ``num`` blocks of tokens.

    The view has the shape [blocks, heads, block tokens, …].
    """
    heads, num_tokens = x.shape[1:3]
    return x[0].view(heads, num, num_tokens // num, *x.shape[3:]).transpose(0, 1)


def _runs(plan: ForestAttentionPlan) -> list[_CausalRun]:
    runs: list[_CausalRun] = []
    for length, skipped in zip(plan.own, plan.skipped or [0] * len(plan.own), strict=False):
        if runs and not skipped and runs[-1].length == length:
            runs[-1] = runs[-1]._replace(num=runs[-1].num + 1)
        else:
            runs.append(_CausalRun(skipped, 1, length))
    return runs


class _Level(NamedTuple):
    """The attention blocks in which tokens attend to the segments at one depth of the forest.

    A single kernel call computes them.
    """

    rows: Tensor
    """[N] row indices of the queries."""
    queries: VarlenRanges
    key_rows: Tensor
    """[N] row indices of the keys."""
    keys: VarlenRanges


class _Levels:
    """Runs an attention plan in only a few kernel calls: one for all causal blocks, and one for
    each level of the forest.

    It first gathers the queries and keys of a level into one tensor.
    """

    def __init__(
        self, plan: ForestAttentionPlan, kernel: VarlenAttentionKernel, device: torch.device
    ) -> None:
        self._kernel = kernel
        self._own = _to_varlen_ranges(plan.own, device)
        levels: dict[int, list[DescendantAttentionBlock]] = {}
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
            # No row occurs twice: segments of one depth have no descendants in common.
            o, lse = o_THd[level.rows], lse_HT[:, level.rows]
            _merge_attention(_heads_first(o), lse[None], _heads_first(o_more), lse_more[None])
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


def _level(belows: list[DescendantAttentionBlock], device: torch.device) -> _Level:
    def gathered(ranges: list[tuple[int, int]]) -> tuple[Tensor, VarlenRanges]:
        rows = torch.cat([torch.arange(start, end) for start, end in ranges])
        return rows.to(device), _to_varlen_ranges([end - start for start, end in ranges], device)

    rows, queries = gathered([below.queries for below in belows])
    key_rows, keys = gathered([below.keys for below in belows])
    return _Level(rows, queries, key_rows, keys)


def _to_varlen_ranges(lengths: list[int], device: torch.device) -> VarlenRanges:
    bounds = torch.tensor([0, *lengths]).cumsum(0).to(device=device, dtype=torch.int32)
    return VarlenRanges(bounds, max(lengths, default=0))


def _merge_attention(o: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge the attention over additional keys into an existing attention output, in place.

    Both are weighted by their log-sum-exp. Outputs are [1, heads, queries, head size], and
    log-sum-exps [1, heads, queries].
    """
    share = torch.sigmoid(more_lse - lse).to(o.dtype)
    o.transpose(1, 2).lerp_(more.transpose(1, 2), share.transpose(1, 2)[..., None])
    lse.copy_(torch.logaddexp(lse, more_lse))


def _repeat_heads(x_TKd: Tensor, q_THd: Tensor) -> Tensor:
    """Repeat each key head once for every query head that uses it.

    Returns a tensor [1, query heads, tokens, head size].
    """
    groups = q_THd.shape[1] // x_TKd.shape[1]
    x_KTd = x_TKd.transpose(0, 1)
    return (x_KTd if groups == 1 else x_KTd.repeat_interleave(groups, 0))[None]


def _sum_repeated_heads(grad: Tensor, x_TKd: Tensor) -> Tensor:
    """Return the gradient of each key head, summed over its repetitions in the forward pass.

    Returns a tensor [tokens, key heads, head size].
    """
    num, kv_heads, size = x_TKd.shape
    grad_KTd = grad.view(kv_heads, -1, num, size).sum(1) if grad.shape[1] > kv_heads else grad[0]
    return grad_KTd.transpose(0, 1)


def _heads_first(x_THd: Tensor) -> Tensor:
    """Return a view [1, heads, tokens, head size] of a tensor [tokens, heads, head size]."""
    return x_THd.transpose(0, 1)[None]


def _slice_tokens(x: Tensor, span: tuple[int, int]) -> Tensor:
    """Return a view of the tokens in the range [``span[0]``, ``span[1]``).

    Tokens are dimension 2 of the tensor.
    """
    return x.narrow(2, span[0], span[1] - span[0])
