"""Attention over a forest against attention over each path alone, written naively in fp64."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ramify.models import onednn_products
from ramify.models.attention_kernels import CpuFlashKernel, PlainAttentionKernel, PlainVarlenKernel
from ramify.models.forest_attention import (
    TILED,
    DescendantAttentionBlock,
    ForestAttention,
    ForestAttentionPlan,
    LayerRowSelection,
)
from ramify.types.training_sequences import PackedTokenSegment

KERNELS = [CpuFlashKernel(), PlainAttentionKernel(), PlainVarlenKernel()]
KERNELS += [TILED] if onednn_products.is_available() else []
needs_onednn = pytest.mark.skipif(
    not onednn_products.is_available(), reason="this build of PyTorch has no oneDNN"
)
TREES = {
    "a row": [PackedTokenSegment(0, 7, -1)],
    "rows of one length": [PackedTokenSegment(0, 5, -1), PackedTokenSegment(5, 10, -1), PackedTokenSegment(10, 15, -1)],
    "siblings": [PackedTokenSegment(0, 33, -1), PackedTokenSegment(33, 50, 0), PackedTokenSegment(50, 67, 0), PackedTokenSegment(67, 70, 0)],
    "two levels": [
        PackedTokenSegment(0, 4, -1), PackedTokenSegment(4, 9, 0), PackedTokenSegment(9, 12, 1), PackedTokenSegment(12, 15, 1), PackedTokenSegment(15, 16, 0),
        PackedTokenSegment(16, 20, -1), PackedTokenSegment(20, 21, 5), PackedTokenSegment(21, 22, 6), PackedTokenSegment(22, 23, 7), PackedTokenSegment(23, 24, 6),
    ],
    "empty segment": [PackedTokenSegment(0, 3, -1), PackedTokenSegment(3, 3, 0), PackedTokenSegment(3, 6, 1), PackedTokenSegment(6, 8, 1)],
}  # fmt: skip


def parents(tokens: list[PackedTokenSegment]) -> list[int]:
    """Return for each token the one before it on its path, -1 for the first."""
    last = {-1: -1}
    found: list[int] = []
    for index, segment in enumerate(tokens):
        before = last[segment.parent]
        for token in range(segment.start, segment.end):
            found.append(before)
            before = token
        last[index] = before
    return found


def naive(
    segments: list[PackedTokenSegment], q: Tensor, k: Tensor, v: Tensor, scale: float
) -> Tensor:
    """Compute each query separately, over the keys of its path."""
    before, rows = parents(segments), []
    for token in range(len(q)):
        path = [token]
        while before[path[-1]] >= 0:
            path.append(before[path[-1]])
        groups = q.shape[1] // k.shape[1]
        keys, values = (x[path].repeat_interleave(groups, 1) for x in (k, v))
        weights = (torch.einsum("hd,nhd->hn", q[token], keys) * scale).softmax(-1)
        rows.append(torch.einsum("hn,nhd->hd", weights, values))
    return torch.stack(rows)


def tensors(num: int, heads: int, kv_heads: int, dtype: torch.dtype) -> list[Tensor]:
    rng = torch.Generator().manual_seed(num)
    sizes = [(num, heads, 8), (num, kv_heads, 8), (num, kv_heads, 8)]
    return [
        (2 * torch.randn(size, generator=rng, dtype=torch.double)).to(dtype).requires_grad_()
        for size in sizes
    ]


def check(
    segments: list[PackedTokenSegment],
    kernel: object,
    dtype: torch.dtype,
    tolerance: float,
    rows: list[int] | None = None,
) -> None:
    """``rows``: those whose output is needed; None: all."""
    every = torch.tensor(rows if rows is not None else range(segments[-1].end), dtype=torch.long)
    needed = None if rows is None else LayerRowSelection(0, every)
    attend = ForestAttention(segments, kernel, needed)  # type: ignore[arg-type]
    q, k, v = tensors(segments[-1].end, 4, 2, dtype)
    given_grad = torch.randn(
        q[every].shape, generator=torch.Generator().manual_seed(1), dtype=torch.double
    )
    o = attend(0, q, k, v, 0.3)[every]
    grads = torch.autograd.grad(o, (q, k, v), given_grad.to(dtype))
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    o_exact = naive(segments, *exact, 0.3)[every]
    grads_exact = torch.autograd.grad(o_exact, exact, given_grad.to(dtype).double())
    for found, wanted in zip((o, *grads), (o_exact, *grads_exact), strict=True):
        torch.testing.assert_close(found.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: type(kernel).__name__)
@pytest.mark.parametrize("tree", TREES)
def test_each_token_attends_to_its_path(tree: str, kernel: object):
    check(TREES[tree], kernel, torch.float32, 2e-5)


LARGE = [
    PackedTokenSegment(0, 900, -1), PackedTokenSegment(900, 1310, 0), PackedTokenSegment(1310, 1313, 1), PackedTokenSegment(1313, 1700, 0),
    PackedTokenSegment(1700, 1765, 3), PackedTokenSegment(1765, 1765, 3), PackedTokenSegment(1765, 1960, 3),
]  # fmt: skip


@needs_onednn
@pytest.mark.parametrize("largest", [1.0, 6.0, 60.0])
@pytest.mark.parametrize("heads", [(4, 2), (3, 1), (2, 2)])
@pytest.mark.parametrize("every", [None, 7])
def test_tiles_of_a_large_forest_match_flash_attention_in_fp64(
    largest: float, heads: tuple[int, int], every: int | None
):
    """At 60, some scores are above all before them by more than the range of fp32."""
    rng = torch.Generator().manual_seed(0)
    num = LARGE[-1].end
    rows = torch.arange(0 if every is None else 950, num, every or 1)
    exact = [
        (largest**0.5 * torch.randn(num, h, 32, generator=rng, dtype=torch.double)).requires_grad_()
        for h in (heads[0], heads[1], heads[1])
    ]
    given_grad = torch.randn(len(rows), heads[0], 32, generator=rng, dtype=torch.double)
    found = []
    for kernel, dtype in ((TILED, torch.float32), (CpuFlashKernel(), torch.double)):
        inputs = [x.detach().to(dtype).requires_grad_() for x in exact]
        needed = None if every is None else LayerRowSelection(0, rows)
        o = ForestAttention(LARGE, kernel, needed)(0, *inputs, 0.3)[rows]
        found.append([o, *torch.autograd.grad(o, inputs, given_grad.to(dtype))])
    for tiled, wanted in zip(*found, strict=True):
        difference = (tiled.double() - wanted).abs().max() / wanted.abs().max()
        assert difference < 2e-6 * max(largest, 1)


def test_attention_is_exact_in_fp64():
    check(TREES["two levels"], CpuFlashKernel(), torch.float64, 1e-12)


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=12),
    st.sampled_from(KERNELS),
    st.none() | st.sets(st.integers(0, 108)),
)
def test_random_forest_matches_naive_attention(
    shape: list[tuple[int, int]], kernel: object, needed: set[int] | None
):
    """Each pair: number of tokens of a segment, and how far up the current path its parent is.
    ``needed``: rows whose output matters; None: all."""
    segments: list[PackedTokenSegment] = []
    path: list[int] = []
    for num, up in [(1, 0), *shape]:
        path = path[: max(0, len(path) - up)]
        start = segments[-1].end if segments else 0
        segments.append(PackedTokenSegment(start, start + num, path[-1] if path else -1))
        path.append(len(segments) - 1)
    num = segments[-1].end
    rows = None if needed is None else sorted({row % num for row in needed} | {num - 1})
    check(segments, kernel, torch.float32, 5e-5, rows)


def test_attention_plan_of_a_forest():
    plan = ForestAttentionPlan.for_segments(TREES["two levels"][:5])
    assert plan.own == [4, 5, 3, 3, 1]
    assert plan.below == [
        DescendantAttentionBlock((0, 4), (4, 16), 0),
        DescendantAttentionBlock((4, 9), (9, 15), 1),
    ]


def test_segments_are_cut_at_their_first_needed_row():
    plan = ForestAttentionPlan.for_segments(TREES["two levels"][:5], [7, 8, 13, 15])
    assert list(zip(plan.skipped, plan.own, strict=False)) == [(7, 2), (4, 2), (0, 1)]
    assert plan.below == [
        DescendantAttentionBlock((0, 4), (0, 4), 0),
        DescendantAttentionBlock((4, 7), (0, 3), 1),
        DescendantAttentionBlock((7, 9), (2, 3), 1),
        DescendantAttentionBlock((12, 13), (2, 3), 2),
    ]


def test_long_blocks_are_computed_in_chunks(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("ramify.models.attention_kernels._MAX_SCORES", 100)
    check(TREES["siblings"], PlainAttentionKernel(), torch.float32, 2e-5)


def test_any_number_of_siblings_is_one_block_below_their_prefix():
    bounds = [10]
    for index in range(100):
        bounds.append(bounds[-1] + 1 + index % 7)
    segments = [
        PackedTokenSegment(0, 10, -1),
        *(PackedTokenSegment(a, b, 0) for a, b in pairwise(bounds)),
    ]
    plan = ForestAttentionPlan.for_segments(segments)
    assert len(plan.below) == 1
    assert (len(plan.own), sum(plan.own)) == (101, bounds[-1])
