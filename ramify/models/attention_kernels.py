"""Attention kernels for one block of queries and one block of keys.

Each result includes its log-sum-exp, with which the results of several blocks can be combined
exactly.

    forward   o = softmax(scale q k^T) v,  lse = log sum exp(scale q k^T)
    backward  given o and lse over *all* keys that the queries saw, the block's exact share of
              the gradients: with P = exp(scale q k^T - lse) and D = sum_d(do o):
              dv = P^T do,  dS = P (do v^T - D),  dq = scale dS k, …

A softmax over several blocks therefore needs neither masks nor copies of keys: each block is
computed by a standard dense kernel. Causal blocks are square: a query sees the keys up to its own
position. This file decides how each kernel is called; ``forest_attention.py`` decides which kernel
a device and a type get.

Legend: B blocks of one shape, n queries and m keys of a block, H query heads, K key-value heads, d
head size, T tokens, N consecutive ranges of queries or keys.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ramify.errors import ConfigError

_aten = torch.ops.aten
_MAX_SCORES = 1 << 24
"""Maximum number of attention scores that ``PlainAttentionKernel`` holds in memory at once."""


class AttentionBlockKernel(Protocol):
    """Computes attention for one block of queries and keys at a time.

    Tensors are views [blocks, heads, queries or keys, head size] whose last dimension is
    contiguous. The log-sum-exp is fp32 [blocks, heads, queries].
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return the attention output of one block, and the log-sum-exp of its scores."""
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of a block's queries, keys and values."""
        ...


class CpuFlashKernel:
    """Computes attention with PyTorch's flash attention for CPUs, in fp32, fp64, bf16 or fp16."""

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        o, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            do, q, k, v, o, lse, 0.0, causal, scale=scale
        )
        return dq, dk, dv


class PlainAttentionKernel:
    """Computes attention with plain matrix products and a softmax.

    To save memory, only a limited number of queries is computed at a time. It works on any device
    and in any precision.
    """

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float
    ) -> tuple[Tensor, Tensor]:
        o = torch.empty_like(q)
        lse = q.new_empty(q.shape[:3], dtype=torch.promote_types(q.dtype, torch.float32))
        for at in self._query_chunks(q, k):
            scores = self._scores(q, k, at, causal, scale)
            lse[:, :, at] = scores.logsumexp(-1)
            o[:, :, at] = ((scores - lse[:, :, at, None]).exp() @ v.to(scores.dtype)).to(o.dtype)
        return o, lse

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = lse.dtype
        dq, dk, dv = (torch.zeros(x.shape, dtype=kind, device=x.device) for x in (q, k, v))
        for at in self._query_chunks(q, k):
            p = (self._scores(q, k, at, causal, scale) - lse[:, :, at, None]).exp()
            do_n, o_n = do[:, :, at].to(kind), o[:, :, at].to(kind)
            dv += p.mT @ do_n
            # The gradient of softmax, dS = P (dP - D). D = sum(do o) avoids a sum over all keys.
            ds = p * (do_n @ v.to(kind).mT - (do_n * o_n).sum(-1, keepdim=True)) * scale
            dq[:, :, at] = ds @ k.to(kind)
            dk += ds.mT @ q[:, :, at].to(kind)
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, at: slice, causal: bool, scale: float) -> Tensor:
        kind = torch.promote_types(q.dtype, torch.float32)
        scores = scale * (q[:, :, at].to(kind) @ k.to(kind).mT)
        if causal:
            later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(
                1 + at.start
            )
            scores.masked_fill_(later, -torch.inf)
        return scores

    def _query_chunks(self, q: Tensor, k: Tensor) -> list[slice]:
        size = max(1, _MAX_SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
        return [slice(start, start + size) for start in range(0, q.shape[2], size)]


class VarlenRanges(NamedTuple):
    """Boundaries of consecutive query or key ranges that are packed into one tensor."""

    bounds: Tensor
    """int32 tensor [N + 1] on the device. Range i is ``[bounds[i], bounds[i + 1])``."""
    longest: int


class VarlenAttentionKernel(Protocol):
    """Computes attention for many blocks of different sizes in one call.

    Each range of queries attends to the range of keys with the same index. Tensors are contiguous
    [tokens, heads, head size], and the log-sum-exp is fp32 [heads, tokens].
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return the attention output of all blocks, and what the backward pass needs.

        The result contains the output, the log-sum-exp of the scores, and extra tensors for the
        backward pass.
        """
        ...

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        more: tuple[Tensor, ...],
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the gradients of the queries, keys and values of all blocks."""
        ...


class CudaFlashKernel:
    """Computes attention with the FlashAttention kernels in PyTorch, in fp16 or bf16 on a GPU.

    Key heads that several query heads share are not copied.
    """

    @staticmethod
    def is_supported(dtype: torch.dtype, head_size: int) -> bool:
        return dtype in (torch.bfloat16, torch.float16) and head_size % 8 == 0 and head_size <= 256

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        o, lse, state, unused, _ = _aten._flash_attention_forward(
            q,
            k,
            v,
            queries.bounds,
            keys.bounds,
            queries.longest,
            keys.longest,
            0.0,
            causal,
            False,
            scale=scale,
        )
        if lse.shape != (q.shape[1], q.shape[0]):
            raise ConfigError(
                "training on a GPU in bf16 needs torch 2.7 or later, but this is "
                f"{torch.__version__}"
            )
        return o, lse, (state, unused)

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        more: tuple[Tensor, ...],
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        state, unused = more
        dq, dk, dv = _aten._flash_attention_backward(
            do,
            q,
            k,
            v,
            o,
            lse,
            queries.bounds,
            keys.bounds,
            queries.longest,
            keys.longest,
            0.0,
            causal,
            state,
            unused,
            scale=scale,
        )
        return dq, dk, dv


class PlainVarlenKernel:
    """A reference implementation of ``CudaFlashKernel``.

    It runs on any device and computes one range after another.
    """

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        o, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for at, seen in _query_key_ranges(queries, keys):
            o_block, lse_block = PlainAttentionKernel().forward(
                _head_major_slice(q, at), *_repeat_keys_values(k, v, seen, q), causal, scale
            )
            o[at], lse[:, at] = o_block[0].transpose(0, 1), lse_block[0].to(lse.dtype)
        return o, lse, ()

    def backward(
        self,
        do: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        o: Tensor,
        lse: Tensor,
        more: tuple[Tensor, ...],
        queries: VarlenRanges,
        keys: VarlenRanges,
        causal: bool,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
        for at, seen in _query_key_ranges(queries, keys):
            inputs = (
                _head_major_slice(do, at),
                _head_major_slice(q, at),
                *_repeat_keys_values(k, v, seen, q),
                _head_major_slice(o, at),
                lse[None, :, at],
            )
            dq_block, dk_block, dv_block = PlainAttentionKernel().backward(*inputs, causal, scale)
            dq[at] = dq_block[0].transpose(0, 1)
            for whole, part in ((dk, dk_block), (dv, dv_block)):
                whole[seen] = (
                    part[0]
                    .transpose(0, 1)
                    .reshape(*whole[seen].shape[:2], -1, whole.shape[2])
                    .sum(2)
                )
        return dq, dk, dv


def _query_key_ranges(queries: VarlenRanges, keys: VarlenRanges) -> list[tuple[slice, slice]]:
    q, k = queries.bounds.tolist(), keys.bounds.tolist()
    return [(slice(*q[i : i + 2]), slice(*k[i : i + 2])) for i in range(len(q) - 1)]


def _head_major_slice(x_THd: Tensor, at: slice) -> Tensor:
    return x_THd[at].transpose(0, 1)[None]


def _repeat_keys_values(k: Tensor, v: Tensor, seen: slice, q: Tensor) -> tuple[Tensor, Tensor]:
    groups = q.shape[1] // k.shape[1]
    return _head_major_slice(k.repeat_interleave(groups, 1), seen), _head_major_slice(
        v.repeat_interleave(groups, 1), seen
    )
