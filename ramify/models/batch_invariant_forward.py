"""Compute batch-invariant forward passes of a model.

A token gets exactly the same result, bit for bit, whatever other tokens are in its batch. This
holds in the inference engine and in the trainer.

    tokens of a step, or of a forest in preorder
      ── blocks of 64 rows, the last one padded ──> DenseModel.hidden, block after block
             attention: each query by itself, over keys in path order, padded to a multiple of 64
      ── wanted rows, in blocks of 64 ──> logits ── log_softmax

Kernels round differently for different shapes, so every operation here has one fixed shape,
whatever the number of tokens. Within a fixed shape, these kernels round every row in the same way,
wherever the row is; ``train/engine_consistency_checks.py`` checks this on the device. Gradients are
those of ordinary attention. They depend on the batch, which is the same if the rollouts are the
same. ``train/rollouts`` determines the order of rollouts, and ``inference/local/model_runner.py``
holds the engine's cache.

Legend: n rows of a block or queries of a run, T tokens, H query heads, K key-value heads, g query
heads per key head, d head size, L keys, D width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils import parametrize

from ramify.models.dense import DenseModel
from ramify.types.training_sequences import PackedTokenSegment

BLOCK = 64
"""Number of rows in every matrix product. The number of attended keys is rounded up to a multiple
of it."""


def round_up_to_block(num_keys: int) -> int:
    """Round a number of keys up to the next multiple of the block size."""
    return -(-num_keys // BLOCK) * BLOCK


def apply_in_blocks(function: Callable[[Tensor], Tensor], x_n: Tensor) -> Tensor:
    """Apply a function to a tensor in blocks of ``BLOCK`` rows, and join the results.

    The last block is padded with zeros, so that the function always gets the same shape.
    """
    parts = []
    for start in range(0, len(x_n), BLOCK):
        part = x_n[start : start + BLOCK]
        parts.append(function(_pad_to_block(part))[: len(part)])
    return torch.cat(parts) if parts else function(_pad_to_block(x_n))[:0]


def _pad_to_block(x_n: Tensor) -> Tensor:
    missing = BLOCK - len(x_n)
    return torch.cat([x_n, x_n.new_zeros(missing, *x_n.shape[1:])]) if missing else x_n


def causal_attention(
    q_nHd: Tensor, k_KLd: Tensor, v_KLd: Tensor, position: int, scale: float
) -> Tensor:
    """Return the causal attention of consecutive tokens of one sequence.

    The first token is at ``position``. Keys are padded to whole blocks, and all of the tokens must
    be in the last block. Keys after a token do not affect it, but must be finite. Returns a tensor
    [tokens, heads, head size].
    """
    (num, _, size), (heads, length, _) = q_nHd.shape, k_KLd.shape
    later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=q_nHd.device).triu(1)
    start = position % BLOCK
    bias_n1 = torch.zeros(num, length, dtype=q_nHd.dtype, device=q_nHd.device)
    bias_n1[:, length - BLOCK :].masked_fill_(later[start : start + num], float("-inf"))
    # Each query is one element of the kernel's batch, so it is computed as if it were alone.
    inputs = (
        q_nHd.reshape(num, heads, -1, size),
        k_KLd.expand(num, -1, -1, -1),
        v_KLd.expand(num, -1, -1, -1),
    )
    bias = bias_n1[:, None, None]
    if q_nHd.device.type == "cpu":
        o, _ = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *inputs, 0.0, False, attn_mask=bias, scale=scale
        )
    else:
        mask = bias.expand(-1, heads, inputs[0].shape[2], -1)
        o = F.scaled_dot_product_attention(*inputs, attn_mask=mask, scale=scale)
    return cast(Tensor, o).reshape(q_nHd.shape)


class BlockTokenSpan(NamedTuple):
    """Consecutive tokens of one sequence that lie in the same block of rows."""

    row: int
    """Row of the first token within its block."""
    num: int
    position: int
    """Position of the first token in its path."""
    source: int
    """Slot (in the engine) or segment (in the trainer) that the tokens belong to."""


def consecutive_token_spans(
    sources: Sequence[int], positions: Sequence[int]
) -> list[BlockTokenSpan]:
    """Divide the rows of one block into runs of consecutive tokens of a sequence.

    All tokens of a run belong to the same segment and attend to the same padded number of keys.
    """
    runs: list[BlockTokenSpan] = []
    for row, (source, position) in enumerate(zip(sources, positions, strict=True)):
        last = runs[-1] if runs else None
        if (
            last is not None
            and last.source == source
            and last.position + last.num == position
            and position % BLOCK
        ):
            runs[-1] = last._replace(num=last.num + 1)
        else:
            runs.append(BlockTokenSpan(row, 1, position, source))
    return runs


def cast_for_products(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Cast tensors to the precision in which autocast computes matrix products.

    Return them unchanged if autocast is off.
    """
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    return tuple(each.to(torch.get_autocast_dtype(device)) for each in tensors)


class BatchInvariantTrunk:
    """Runs a ``DenseModel`` in blocks of a fixed shape, so that a token's result does not depend on
    other tokens.

    Implements ``trunk.ModelWithoutLoss``.
    """

    can_share_prefixes = True

    def __init__(self, model: DenseModel) -> None:
        self._model = model

    def forward_context(self) -> AbstractContextManager[None]:
        """Return a context manager that caches merged adapter weights during a pass.

        Use it for forward and backward passes. Within it, each adapter is merged into its weight
        once instead of once per block.
        """
        return parametrize.cached()

    def hidden(
        self,
        ids_T: Tensor,
        positions_T: Tensor,
        segments: Sequence[PackedTokenSegment],
        rows_N: Tensor,
    ) -> Tensor:
        """Return the hidden states after the final norm, one row for each token in ``rows_N``."""
        forest = _ForestKeys(segments, positions_T.tolist())
        blocks = []
        for start in range(0, len(ids_T), BLOCK):
            ids, positions = ids_T[start : start + BLOCK], positions_T[start : start + BLOCK]
            attend = _BlockAttention(forest, start // BLOCK)
            h_nD = self._model.hidden(_pad_to_block(ids), _pad_to_block(positions), attend)
            blocks.append(h_nD[: len(ids)])
        return torch.cat(blocks).index_select(0, rows_N)

    def logits(self, h_ND: Tensor) -> Tensor:
        """Return fp32 logits, one row per hidden state.

        The computation has a fixed shape if exactly ``BLOCK`` states are given.
        """
        return self._model.logits(h_ND)


class _ForestKeys:
    """The keys and values computed so far for a forest of token sequences.

    The runs of consecutive tokens in each block are stored, too.
    """

    def __init__(self, segments: Sequence[PackedTokenSegment], positions: Sequence[int]) -> None:
        self._segments = segments
        owners = [index for index, each in enumerate(segments) for _ in range(each.start, each.end)]
        self.runs = [
            consecutive_token_spans(owners[start : start + BLOCK], positions[start : start + BLOCK])
            for start in range(0, len(owners), BLOCK)
        ]
        self.computed: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
        """(layer, block) -> keys and values, [n, K, d] each."""

    def pieces(self, layer: int, block: int, run: BlockTokenSpan) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values to which a run of tokens attends, as a list of pieces.

        They are ordered from the root of the tree to the last token of the run.
        """
        segment = self._segments[run.source]
        ranges = [(segment.start, block * BLOCK + run.row + run.num)]
        while segment.parent >= 0:
            segment = self._segments[segment.parent]
            ranges.append((segment.start, segment.end))
        pieces = []
        for start, end in reversed(ranges):
            for index in range(start // BLOCK, -(-end // BLOCK)):
                k_nKd, v_nKd = self.computed[layer, index]
                at = slice(max(start - index * BLOCK, 0), min(end - index * BLOCK, BLOCK))
                pieces.append((k_nKd[at], v_nKd[at]))
        return pieces


class _BlockAttention:
    """Computes the attention of one block of rows of a forest.

    Implements ``dense.CausalAttentionKernel``.
    """

    def __init__(self, forest: _ForestKeys, block: int) -> None:
        self._forest = forest
        self._block = block

    def __call__(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float
    ) -> Tensor:
        q_THd, k_TKd, v_TKd = cast_for_products(q_THd, k_TKd, v_TKd)
        self._forest.computed[layer, self._block] = (k_TKd, v_TKd)
        outputs = []
        for run in self._forest.runs[self._block]:
            keys, values = zip(*self._forest.pieces(layer, self._block, run), strict=True)
            q_nHd = q_THd[run.row : run.row + run.num]
            outputs.append(
                cast(Tensor, _AttendPath.apply(q_nHd, run.position, scale, *keys, *values))  # type: ignore[no-untyped-call]
            )
        return _pad_to_block(torch.cat(outputs))


class _AttendPath(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q_nHd: Tensor, position: int, scale: float, *pieces: Tensor) -> Tensor:
        ctx.save_for_backward(q_nHd, *pieces)
        ctx.position, ctx.scale = position, scale
        half = len(pieces) // 2
        k_KLd, v_KLd = _heads_first(pieces[:half]), _heads_first(pieces[half:])
        return causal_attention(q_nHd, k_KLd, v_KLd, position, scale)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q_nHd, *pieces = ctx.saved_tensors
        half = len(pieces) // 2
        joined = (q_nHd, torch.cat(pieces[:half]), torch.cat(pieces[half:]))
        q, k, v = (each.detach().requires_grad_() for each in joined)
        with torch.enable_grad():
            o_nHd = _plain_attention(q, k, v, ctx.position, ctx.scale)
        dq, dk, dv = torch.autograd.grad(o_nHd, (q, k, v), grads[0])
        lengths = [len(piece) for piece in pieces[:half]]
        return (dq, None, None, *torch.split(dk, lengths), *torch.split(dv, lengths))


def _heads_first(pieces: Sequence[Tensor]) -> Tensor:
    """Join pieces of keys or values into one tensor [heads, tokens, head size].

    Each piece has the shape [tokens, heads, head size]. The number of tokens is padded with zeros
    to a multiple of the block size.
    """
    first, length = pieces[0], sum(len(piece) for piece in pieces)
    x_KLd = first.new_zeros(first.shape[1], round_up_to_block(length), first.shape[2])
    x_KLd[:, :length] = torch.cat(list(pieces)).transpose(0, 1)
    return x_KLd


def _plain_attention(
    q_nHd: Tensor, k_LKd: Tensor, v_LKd: Tensor, position: int, scale: float
) -> Tensor:
    """Compute the same attention as ``causal_attention`` with an ordinary masked kernel, so that
    gradients can flow.

    Returns a tensor [tokens, heads, head size].
    """
    groups = q_nHd.shape[1] // k_LKd.shape[1]
    k, v = (x.repeat_interleave(groups, 1).transpose(0, 1)[None] for x in (k_LKd, v_LKd))
    device = q_nHd.device
    last_n = torch.arange(position, position + len(q_nHd), device=device)
    seen_nL = torch.arange(len(k_LKd), device=device) <= last_n[:, None]
    q = q_nHd.transpose(0, 1)[None]
    o = F.scaled_dot_product_attention(q, k, v, attn_mask=seen_nL, scale=scale)
    return o[0].transpose(0, 1)
