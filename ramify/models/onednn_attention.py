"""Attention over a forest of token sequences, computed with oneDNN matmuls.

It is used on CPUs where these are faster than PyTorch's flash attention (``onednn_products.py``).

The plan of ``forest_attention.py`` consists of causal blocks and of blocks without a mask. Long
causal blocks are halved, which leaves more work without a mask. Large blocks are then divided into
tiles of about 512 by 512 scores, which fit into a core's cache, and each step of a tile is one
operation; small blocks are left to flash attention:

    start       o = v,  L = q·k                   each token attends to itself
    extend      P = exp2(q' k'^T)                 q' = [q, -L],  k' = [k, 1]
                o = (o + P v) / (1 + sum P),  L += log2(1 + sum P)
    gradients   P^T = exp2(k q^T - L)             the bias of a product
                dS^T = (v do^T - D) P^T           D = sum_d(do o); one product
                dv += P^T do,  dk += dS^T q,  dq^T += k^T dS^T

A tile on the diagonal has a mask, which is added to its scores. Scores are relative to L, the
log-sum-exp (base 2) of what a query attends to already. If a score is above it by so much that fp32
overflows, the tile is computed again relative to its highest score.

Tensors begin with the key heads, so that the rows of a tile are contiguous: query heads that share
a key head are rows of the same tile. The sizes of tiles are rounded, because oneDNN compiles a
kernel for each size; rows after a tile's last one are other tokens', and their weights are zero.

Legend: T tokens, K key-value heads, g query heads per key head, d head size, e = d + 1; n queries
and m keys of a block, N = n g rows of a tile of queries, M rows of a tile of keys.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from ramify.models.attention_kernels import CpuFlashKernel
from ramify.models.onednn_products import fused_linear_mul, product

_LONGEST_CAUSAL = 384
"""Maximum number of tokens in a causal block. Longer blocks are split in half."""
_TILE = 512
"""Maximum number of rows in a tile. A tile of queries may have twice as many if there are few
keys."""
_QUERY_STEP, _KEY_STEP = 128, 64
"""Row counts of query tiles and of key tiles are rounded up to multiples of these."""
_LEAST_SCORES = 1 << 15
"""Minimum number of scores per key head for which a block is computed in tiles."""
_LEAST_ROWS, _LEAST_KEYS = 96, 48
_LARGEST_SUM = 1e30
_LOG2_E, _LN_2 = math.log2(math.e), math.log(2)

Span = tuple[int, int]
"""Range of rows [start, end)."""


class QueryKeyBlock(NamedTuple):
    """A block of attention scores: a range of queries and the range of keys they attend to."""

    keys: Span
    queries: Span
    is_causal: bool
    """True if both ranges are equal and each query attends to the keys up to its own position."""


class TiledAttention:
    """Computes all attention blocks of one forest in fp32, tile by tile.

    The inputs and outputs are those of ``_Walk`` in ``forest_attention.py``.
    """

    def __init__(
        self, causal: Many[Span], below: Many[tuple[Span, Span]], rows_N: Tensor | None
    ) -> None:
        """Prepare to compute attention over the given causal and unmasked blocks.

        ``causal`` lists the causal blocks, and ``below`` the (keys, queries) range pairs of the
        blocks without a mask. If ``rows_N`` is given, only these rows of the output are needed, and
        the query ranges are indices into it.
        """
        self._own = [block for span in causal for block in _halve_causal_block(span)]
        self._below = [QueryKeyBlock(keys, queries, False) for keys, queries in below]
        self._rows_N = rows_N

    def is_worthwhile(self, groups: int) -> bool:
        """Return True if tiling is worthwhile for these attention blocks.

        Most scores must lie in blocks that are large enough. ``groups`` is the number of query
        heads that share a key head.
        """
        scores = {True: 0, False: 0}
        for block in (*self._own, *self._below):
            (start, end), (first, last) = block.queries, block.keys
            scores[_is_tileable(block, groups)] += (end - start) * (last - first)
        return scores[True] > scores[False]

    def forward(
        self, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Return the attention output [T, H, d] and the negative base-2 log-sum-exp [K, T, g].

        The third result, the list of further tensors, is empty.
        """
        (num, kv_heads, size), groups = k_TKd.shape, q_THd.shape[1] // k_TKd.shape[1]
        q_KTge = _allocate_padded(kv_heads, num, groups, size + 1, like=q_THd)
        q_KTgd = q_KTge[:, :num, :, :size]
        torch.mul(_by_key_head(q_THd, kv_heads), scale * _LOG2_E, out=q_KTgd)
        k_KTe = _allocate_padded(kv_heads, num, size + 1, like=k_TKd)
        k_KTe[:, :num, :size] = k_TKd.transpose(0, 1)
        # With -L in the last column of q, this column makes a product give scores relative to L.
        k_KTe[:, :, size] = 1
        v_KTd = _allocate_padded(kv_heads, num, size, like=v_TKd)
        v_KTd[:, :num] = v_TKd.transpose(0, 1)
        # The softmax begins with a query's own key, so L is finite before the first block.
        own_scores = torch.linalg.vecdot(q_KTgd, k_KTe[:, :num, None, :size])
        torch.neg(own_scores, out=q_KTge[:, :num, :, size])
        o_KTgd = v_KTd[:, :num, None].expand(-1, -1, groups, -1).contiguous()
        for block in self._own:
            _extend(o_KTgd, q_KTge, k_KTe, v_KTd, block)
        rows = self._rows_N
        if rows is None:
            o_needed, q_needed = o_KTgd, q_KTge
        else:
            o_needed = o_KTgd.index_select(1, rows)
            # Only q needs rows after the last one: tiles read them, but write no output there.
            q_needed = _allocate_padded(kv_heads, len(rows), groups, size + 1, like=q_THd)
            q_needed[:, : len(rows)] = q_KTge.index_select(1, rows)
        for block in self._below:
            _extend(o_needed, q_needed, k_KTe, v_KTd, block)
        if rows is not None:
            o_KTgd.index_copy_(1, rows, o_needed)
            q_KTge.index_copy_(1, rows, q_needed[:, : len(rows)])
        return o_KTgd.transpose(0, 1).flatten(1, 2), q_KTge[:, :num, :, size].contiguous(), []

    def backward(
        self, do_THd: Tensor, saved: tuple[Tensor, ...], more: list[Tensor], scale: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries, keys and values.

        ``saved`` holds these, and the output and the negative log-sum-exp that ``forward``
        returned.
        """
        q_THd, k_TKd, v_TKd, o_THd, minus_lse_KTg = saved
        (num, kv_heads, size), groups = k_TKd.shape, q_THd.shape[1] // k_TKd.shape[1]
        q_KTgd, do_KTgd = (
            _allocate_padded(kv_heads, num, groups, size, like=q_THd) for _ in range(2)
        )
        torch.mul(_by_key_head(q_THd, kv_heads), scale * _LOG2_E, out=q_KTgd[:, :num])
        do_KTgd[:, :num] = _by_key_head(do_THd, kv_heads)
        k_KTd, v_KTd = (_allocate_padded(kv_heads, num, size, like=k_TKd) for _ in range(2))
        k_KTd[:, :num] = k_TKd.transpose(0, 1)
        # ln(2) in v and delta and log2(e) in q cancel, so the keys' gradient is not scaled again.
        torch.mul(v_TKd.transpose(0, 1), _LN_2, out=v_KTd[:, :num])
        bias_KTg, delta_KTg = (
            _allocate_padded(kv_heads, num, groups, like=q_THd) for _ in range(2)
        )
        bias_KTg[:, :num] = minus_lse_KTg
        delta_TH = torch.linalg.vecdot(do_THd, o_THd)
        delta_KTg[:, :num] = _by_key_head(delta_TH, kv_heads) * -_LN_2
        o_KTgd = _by_key_head(o_THd, kv_heads)
        tensors = _Backward(do_KTgd, q_KTgd, k_KTd, v_KTd, bias_KTg, delta_KTg, o_KTgd)
        gradients = _Gradients(*(torch.zeros_like(x[:, :num]) for x in (q_KTgd, k_KTd, v_KTd)))
        for block in self._own:
            _add_gradients(gradients, tensors, block)
        rows = self._rows_N
        if rows is None:
            needed, needed_gradients = tensors, gradients
        else:
            needed = _Backward(
                _select_rows(do_KTgd, rows),
                _select_rows(q_KTgd, rows),
                k_KTd,
                v_KTd,
                _select_rows(bias_KTg, rows),
                _select_rows(delta_KTg, rows),
                o_KTgd.index_select(1, rows),
            )
            dq = gradients.q.index_select(1, rows)
            needed_gradients = gradients._replace(q=dq)
        for block in self._below:
            _add_gradients(needed_gradients, needed, block)
        if rows is not None:
            gradients.q.index_copy_(1, rows, needed_gradients.q)
        dq_THd = (gradients.q.transpose(0, 1) * (scale * _LOG2_E)).flatten(1, 2)
        return dq_THd, gradients.k.transpose(0, 1), gradients.v.transpose(0, 1)


class _Backward(NamedTuple):
    """The tensors from which the backward pass computes the gradients of attention blocks."""

    do: Tensor
    """Gradient of the output, [K, T, g, d]. Queries and outputs have this shape too."""
    q: Tensor
    """Queries, multiplied by the scale and log2(e)."""
    k: Tensor
    """Keys, [K, T, d]."""
    v: Tensor
    """Values, multiplied by ln(2). Scores are in base 2, and ln(2) is the factor in the derivative
    of 2 ** x."""
    minus_lse: Tensor
    """Negative log-sum-exp in base 2, [K, T, g]."""
    minus_delta: Tensor
    """[K, T, g]: sum over the head's dimensions of the output times its gradient, times -ln(2). The
    gradient of the softmax needs this sum."""
    o: Tensor


class _Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor


def _by_key_head(x_TH: Tensor, kv_heads: int) -> Tensor:
    """View a tensor [T, H, …] as [K, T, g, …], in which each key head has its g query heads."""
    return x_TH.view(len(x_TH), kv_heads, -1, *x_TH.shape[2:]).transpose(0, 1)


def _allocate_padded(heads: int, num: int, *sizes: int, like: Tensor) -> Tensor:
    """Allocate a tensor [K, T, …] for T tokens, with spare rows at the end.

    The rows after the last token are zeros, because a tile may read them.
    """
    room = like.new_empty(heads, num + _QUERY_STEP, *sizes)
    room[:, num:] = 0
    return room


def _select_rows(x: Tensor, rows_N: Tensor) -> Tensor:
    found = _allocate_padded(x.shape[0], len(rows_N), *x.shape[2:], like=x)
    found[:, : len(rows_N)] = x.index_select(1, rows_N)
    return found


def _halve_causal_block(span: Span) -> Iterator[QueryKeyBlock]:
    """Halve a causal block repeatedly into small causal blocks and unmasked blocks."""
    start, end = span
    if end - start <= _LONGEST_CAUSAL:
        yield QueryKeyBlock(span, span, True)
        return
    middle = start + _round_up((end - start) // 2, _KEY_STEP)
    yield from _halve_causal_block((start, middle))
    yield from _halve_causal_block((middle, end))
    yield QueryKeyBlock((start, middle), (middle, end), False)


def _is_tileable(block: QueryKeyBlock, groups: int) -> bool:
    """Return True if an attention block is large enough for tiles to be worthwhile."""
    rows, keys = (block.queries[1] - block.queries[0]) * groups, block.keys[1] - block.keys[0]
    return rows >= _LEAST_ROWS and keys >= _LEAST_KEYS and rows * keys >= _LEAST_SCORES


def _tiles(num: int, most: int, step: int) -> list[tuple[int, int, int]]:
    """Divide ``num`` rows into tiles of similar size, each with at most ``most`` rows.

    Returns the start, the end and the rounded-up number of rows of each range.
    """
    size = _round_up(-(-num // -(-num // most)), step)
    return [
        (start, min(start + size, num), _round_up(min(size, num - start), step))
        for start in range(0, num, size)
    ]


def _round_up(num: int, step: int) -> int:
    return -(-num // step) * step


def _key_tiles(block: QueryKeyBlock, last_query: int, groups: int) -> list[tuple[int, int, int]]:
    """Return the tiles of keys to which a block's first query rows attend.

    These are the rows before ``last_query``.
    """
    num = block.keys[1] - block.keys[0]
    if block.is_causal:
        num = min(num, -(-last_query // groups))
    return _tiles(num, _TILE, _KEY_STEP)


@functools.cache
def _mask(groups: int) -> Tensor:
    """Return the mask to add to the attention scores [N, m] of a causal block.

    It is minus infinity except for the keys before each query's own position.
    """
    num = _LONGEST_CAUSAL
    seen = torch.ones(num, num, dtype=torch.bool).tril(-1).repeat_interleave(groups, 0)
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


@functools.cache
def _transposed_mask(groups: int) -> Tensor:
    """Return the mask that is added to the transposed scores [m, N] of a causal block.

    It lets queries attend to the keys up to their own position.
    """
    num = _LONGEST_CAUSAL
    seen = torch.ones(num, num, dtype=torch.bool).triu().repeat_interleave(groups, 1)
    return torch.zeros(seen.shape).masked_fill_(~seen, -math.inf)


# --- forward


def _extend(o: Tensor, q: Tensor, k: Tensor, v: Tensor, block: QueryKeyBlock) -> None:
    """Add the attention over one block of keys to the output of its queries, in place.

    It is merged into the output ``o`` [K, T, g, d] and into the last column of ``q`` [K, T, g, e],
    which holds the negative log-sum-exp to base 2.

    A causal block is the first block of its queries. In tiles, it excludes each token's own key,
    which the output already contains. A small one is left to flash attention, which includes that
    key and replaces the output.
    """
    (start, end), (first, last) = block.queries, block.keys
    groups, size = q.shape[2], v.shape[2]
    if not _is_tileable(block, groups):
        _extend_by_flash(o, q, k, v, block)
        return
    # With few keys, twice as many queries still make no more scores than a full tile.
    most = 2 * _TILE if last - first <= _TILE // 2 else _TILE
    for head in range(len(k)):
        q_h, o_h = q[head].flatten(0, 1), o[head].flatten(0, 1)
        for n0, n1, n_rows in _tiles((end - start) * groups, most, _QUERY_STEP):
            begin, num = start * groups + n0, n1 - n0
            keys = [
                _KeyTile(k[head, first + m0 :][:m_rows], v[head, first + m0 :][:m_rows], m0, m1)
                for m0, m1, m_rows in _key_tiles(block, n1, groups)
            ]
            q_Ne = q_h[begin : begin + n_rows]
            mask_Nm = _mask(groups)[n0:n1] if block.is_causal else None
            more, sums = _attend(q_Ne, keys, mask_Nm)
            o_at, minus_lse = o_h[begin : begin + num], q_h[begin : begin + num, size:]
            # The usual case: no sum overflows. Scores are relative to the old L, so the old output
            # has weight 1.
            if float(sums[:num].max()) < _LARGEST_SUM:  # not if it is NaN either
                total = sums[:num].add_(1)
                o_at.add_(more[:num]).div_(total)
                minus_lse.sub_(total.log2_())
                continue
            # Some score is far above the old L: repeat the tile relative to the highest score.
            highest = torch.zeros(n_rows, 1)
            for tile in keys:
                scores_Nm = _scores(q_Ne, tile, mask_Nm)[:, : tile.end - tile.start]
                highest = torch.maximum(highest, scores_Nm.amax(1, keepdim=True))
            q_Ne = torch.cat([q_Ne[:, :size], q_Ne[:, size:] - highest], 1)
            more, sums = _attend(q_Ne, keys, mask_Nm)
            before = (-highest[:num]).exp2_()
            total = sums[:num] + before
            o_at.mul_(before).add_(more[:num]).div_(total)
            minus_lse.sub_(total.log2_() + highest[:num])


class _KeyTile(NamedTuple):
    k_Me: Tensor
    v_Md: Tensor
    start: int
    """Index of the first key within the block."""
    end: int
    """Index after the last key. Rows after it belong to other tokens."""


def _attend(q_Ne: Tensor, keys: Many[_KeyTile], mask_Nm: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the sum [N, d] of the values, weighted by exp2(score), and the sums of weights [N,
    1]."""
    more = sums = None
    for tile in keys:
        p_NM, num = _scores(q_Ne, tile, mask_Nm).exp2_(), tile.end - tile.start
        if num < p_NM.shape[1]:
            p_NM[:, num:] = 0
        tile_more, tile_sums = product(p_NM, tile.v_Md.t()), p_NM.sum(1, keepdim=True)
        more = tile_more if more is None else more.add_(tile_more)
        sums = tile_sums if sums is None else sums.add_(tile_sums)
    assert more is not None
    assert sums is not None
    return more, sums


def _scores(q_Ne: Tensor, tile: _KeyTile, mask_Nm: Tensor | None) -> Tensor:
    """Return base-2 attention scores [N, M] relative to each query's log-sum-exp so far.

    Scores in padding rows are meaningless.
    """
    scores_NM = product(q_Ne, tile.k_Me)
    if mask_Nm is not None:
        scores_NM[: len(mask_Nm), : tile.end - tile.start] += mask_Nm[:, tile.start : tile.end]
    return scores_NM


def _extend_by_flash(o: Tensor, q: Tensor, k: Tensor, v: Tensor, block: QueryKeyBlock) -> None:
    (start, end), (first, last) = block.queries, block.keys
    size, groups = v.shape[2], q.shape[2]
    q_Kgnd = q[:, start:end, :, :size].transpose(1, 2)
    k_Kgmd, v_Kgmd = (x[:, None, first:last, :size].expand(-1, groups, -1, -1) for x in (k, v))
    more, lse = CpuFlashKernel().forward(q_Kgnd, k_Kgmd, v_Kgmd, block.is_causal, _LN_2)
    minus_lse, o_at = q[:, start:end, :, size], o[:, start:end]
    more, lse_Kng = more.transpose(1, 2), lse.transpose(1, 2) * _LOG2_E
    if block.is_causal:
        o_at.copy_(more)
        minus_lse.copy_(-lse_Kng)
        return
    share = torch.sigmoid((lse_Kng + minus_lse) * _LN_2)
    o_at.lerp_(more, share[..., None])
    minus_lse.copy_(-torch.logaddexp2(lse_Kng, -minus_lse))


# --- backward


def _add_gradients(to: _Gradients, x: _Backward, block: QueryKeyBlock) -> None:
    """Add the gradients of one attention block to the totals, in place.

    The gradient of the queries still lacks the factor that ``x.q`` contains.
    """
    (start, end), (first, last) = block.queries, block.keys
    groups = x.q.shape[2]
    if not _is_tileable(block, groups):
        _add_gradients_by_flash(to, x, block)
        return
    most = 2 * _TILE if last - first <= _TILE // 2 else _TILE
    for head in range(len(x.k)):
        do_h, q_h, dq_h = (each[head].flatten(0, 1) for each in (x.do, x.q, to.q))
        lse_h, delta_h = x.minus_lse[head].flatten(), x.minus_delta[head].flatten()
        k_h, v_h = x.k[head], x.v[head]
        transposed: dict[tuple[int, int], Tensor] = {}
        for n0, n1, n_rows in _tiles((end - start) * groups, most, _QUERY_STEP):
            begin, num = start * groups + n0, n1 - n0
            at = slice(begin, begin + n_rows)
            q_Nd, do_Nd = q_h[at], do_h[at]
            dq_dN = None
            for m0, m1, m_rows in _key_tiles(block, n1, groups):
                k_Md, v_Md = (each[first + m0 : first + m0 + m_rows] for each in (k_h, v_h))
                p_MN = product(k_Md, q_Nd, lse_h[at])
                if block.is_causal:  # with each token's own key, which no other block has
                    p_MN[: m1 - m0, :num] += _transposed_mask(groups)[m0:m1, n0:n1]
                p_MN.exp2_()
                # The tile is padded with rows of other tokens, whose weights must be zero.
                if m1 - m0 < m_rows:
                    p_MN[m1 - m0 :] = 0
                if num < n_rows:
                    p_MN[:, num:] = 0
                ds_MN = fused_linear_mul(v_Md, do_Nd, delta_h[at], p_MN)
                to_keys = slice(first + m0, first + m1)
                to.v[head, to_keys] += product(p_MN, do_Nd.t())[: m1 - m0]
                to.k[head, to_keys] += product(ds_MN, q_Nd.t())[: m1 - m0]
                if (m0, m_rows) not in transposed:
                    transposed[m0, m_rows] = k_Md.t().contiguous()
                tile_dq = product(transposed[m0, m_rows], ds_MN.t())
                dq_dN = tile_dq if dq_dN is None else dq_dN.add_(tile_dq)
            assert dq_dN is not None
            dq_h[begin : begin + num] += dq_dN.t()[:num]


def _add_gradients_by_flash(to: _Gradients, x: _Backward, block: QueryKeyBlock) -> None:
    (start, end), (first, last) = block.queries, block.keys
    groups = x.q.shape[2]
    do, q, o = (each[:, start:end].transpose(1, 2) for each in (x.do, x.q, x.o))
    k_Kmd, v_Kmd = x.k[:, first:last], x.v[:, first:last] * _LOG2_E
    k, v = (each[:, None].expand(-1, groups, -1, -1) for each in (k_Kmd, v_Kmd))
    lse = (x.minus_lse[:, start:end] * -_LN_2).transpose(1, 2).contiguous()
    dq, dk, dv = CpuFlashKernel().backward(do, q, k, v, o, lse, block.is_causal, _LN_2)
    to.q[:, start:end] += dq.transpose(1, 2)
    to.k[:, first:last] += dk.sum(1)
    to.v[:, first:last] += dv.sum(1)
