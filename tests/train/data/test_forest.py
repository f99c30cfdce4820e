"""The radix tree of token sequences: small examples, properties of arbitrary ones, and near-linear
time."""

from __future__ import annotations

import random
import time

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.train.data.prefix_forest import PrefixForest, forest
from ramify.types.training_sequences import TokenSequence


def sequence(*ids: int) -> TokenSequence:
    zeros = np.zeros(len(ids), np.float32)
    return TokenSequence(
        token_ids=np.array(ids, np.int64),
        mask=zeros > 0,
        sampler_logprobs=zeros,
        advantages=zeros,
        rl=zeros,
    )


def nodes_of(
    found: PrefixForest, sequences: list[TokenSequence]
) -> list[tuple[tuple[int, ...], int]]:
    """Return (token ids, parent) of each node."""
    return [
        (tuple(sequences[node.sequence].token_ids[node.begin : node.end].tolist()), node.parent)
        for node in found.nodes
    ]


def path(found: PrefixForest, sequences: list[TokenSequence], leaf: int) -> list[int]:
    """Return the ids from the root to the end of node ``leaf``."""
    ids: list[int] = []
    while leaf >= 0:
        node = found.nodes[leaf]
        ids = [*sequences[node.sequence].token_ids[node.begin : node.end].tolist(), *ids]
        leaf = node.parent
    return ids


def test_shared_prefixes_are_stored_once():
    given_ones = [
        sequence(1, 2, 3, 7, 8, 4),
        sequence(1, 2, 3, 9),
        sequence(1, 2, 3, 7, 8, 5),
        sequence(2, 2),
    ]
    found = forest(given_ones)
    assert nodes_of(found, given_ones) == [
        ((1, 2, 3), -1), ((7, 8), 0), ((4,), 1), ((5,), 1), ((9,), 0), ((2, 2), -1),
    ]  # fmt: skip
    assert found.leaves == [2, 4, 3, 5]
    assert found.num_tokens == 10


def test_prefix_and_duplicate_sequences_add_no_tokens():
    given_ones = [sequence(1, 2, 3), sequence(1, 2), sequence(1, 2, 3)]
    found = forest(given_ones)
    assert nodes_of(found, given_ones) == [((1, 2), -1), ((3,), 0)]
    assert found.leaves == [1, 0, 1]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=7), min_size=1, max_size=9),
    st.randoms(),
)
def test_forest_properties_hold_for_arbitrary_sequences(
    rows: list[list[int]], shuffled: random.Random
):
    sequences = [sequence(*row) for row in rows]
    found = forest(sequences)
    for row, leaf in zip(rows, found.leaves, strict=True):
        assert path(found, sequences, leaf) == row
    assert found.num_tokens == len(
        {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
    )
    for index, node in enumerate(found.nodes):
        assert -1 <= node.parent < index
        assert node.begin == (found.nodes[node.parent].end if node.parent >= 0 else 0) < node.end
    shuffled.shuffle(rows)
    again = [sequence(*row) for row in rows]
    assert nodes_of(forest(again), again) == nodes_of(found, sequences)


def test_forest_time_is_near_linear_in_siblings():
    """Sixteen times the siblings (2,000 tokens each, 1,900 shared) take sixteen times as long, within
    a factor of four, which leaves room for caches. Quadratic time would be a factor of 256."""

    def seconds(num: int) -> float:
        rng = np.random.default_rng(0)
        prompt = rng.integers(0, 500, 1900)
        rows = [sequence(*prompt, *rng.integers(0, 500, 100)) for _ in range(num)]
        best = float("inf")
        for _ in range(5):
            start = time.process_time()
            found = forest(rows)
            best = min(best, time.process_time() - start)
        assert found.num_tokens <= 1900 + 100 * num
        return best

    assert seconds(6400) < 64 * seconds(400)
