"""Sequences become batches: small examples, properties of every entry for arbitrary ones, and
near-linear time."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ramify.train.data.pack import (
    PackingCostModel,
    PackingSpec,
    copy_to_sequences,
    pack,
    packing_statistics,
)
from ramify.types.training_sequences import Batch, PackedTokenSegment, SamplingMask, TokenSequence

FREE = PackingCostModel(pair=0.0, share=0.0, join=0.0)
"""Sharing always pays."""


def sequence(name: str, ids: list[int], rl: dict[int, float], **more: Any) -> TokenSequence:
    """Return a sequence with weights ``rl`` by token; its advantages are 10 times and its sampler
    log-probabilities -1 times the token's position."""
    weights = np.zeros(len(ids), np.float32)
    weights[list(rl)] = list(rl.values())
    places = np.arange(len(ids), dtype=np.float32)
    fields = {"token_ids": np.array(ids), "mask": weights > 0, "rl": weights, "name": name}
    return TokenSequence(
        **(fields | {"sampler_logprobs": -places, "advantages": 10 * places} | more)
    )


def path(batch: Batch, token: int) -> list[int]:
    """Return the ids from the root to ``token`` of the batch, and check its position."""
    segment = next(
        index for index, each in enumerate(batch.segments) if each.start <= token < each.end
    )
    ids: list[int] = batch.token_ids[batch.segments[segment].start : token + 1].tolist()
    while (segment := batch.segments[segment].parent) >= 0:
        ids = (
            batch.token_ids[batch.segments[segment].start : batch.segments[segment].end].tolist()
            + ids
        )
    assert batch.positions[token] == len(ids) - 1
    return ids


def spans(batch: Batch) -> list[tuple[int, int, int]]:
    return [(each.start, each.end, each.parent) for each in batch.segments]


SIBLINGS = [
    sequence("a", [1, 2, 3, 7, 8, 4], {3: 1.0, 4: 2.0}),
    sequence("b", [1, 2, 3, 9], {3: 3.0}),
    sequence("c", [1, 2, 3, 7, 8, 5], {5: 4.0}),
    sequence("d", [1, 2], {}),
]


def test_siblings_share_prefixes_and_keep_their_entries():
    (batch,) = pack(SIBLINGS, PackingSpec(cost=FREE))
    assert batch.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 5, 9]
    assert batch.positions.tolist() == [0, 1, 2, 3, 4, 5, 5, 3]
    assert batch.segments == [
        PackedTokenSegment(0, 3, -1), PackedTokenSegment(3, 5, 0), PackedTokenSegment(5, 6, 1), PackedTokenSegment(6, 7, 1), PackedTokenSegment(7, 8, 0)
    ]  # fmt: skip
    assert batch.sources.tolist() == [2, 3, 4, 2]
    assert batch.targets.tolist() == [7, 8, 5, 9]
    assert batch.owners.tolist() == [[0, 3], [0, 4], [2, 5], [1, 3]]
    assert batch.sequences == {0: "a", 2: "c", 1: "b"}
    assert batch.denominators == {"rl": 10.0}
    assert {name: column.tolist() for name, column in batch.streams.items()} == {
        "rl": [1, 2, 4, 3], "advantages": [30, 40, 50, 30], "sampler_logprobs": [-3, -4, -5, -3],
        "temperature": [1, 1, 1, 1],
    }  # fmt: skip
    assert packing_statistics([batch], SIBLINGS) == {
        "batches": 1,
        "packed_tokens": 8,
        "row_tokens": 16,
        "shared": 2.0,
    }


def test_identical_siblings_keep_one_entry_each():
    twins = [
        sequence("a", [1, 2, 7], {2: 1.0}),
        sequence("b", [1, 2, 7], {2: 1.0}, advantages=np.float32([0, 0, -5])),
    ]
    (batch,) = pack(twins)
    assert batch.token_ids.tolist() == [1, 2, 7]
    assert (batch.sources.tolist(), batch.targets.tolist()) == ([1, 1], [7, 7])
    assert batch.streams["advantages"].tolist() == [20, -5]


def test_rows_do_not_share_prefixes():
    (batch,) = pack(SIBLINGS, PackingSpec(share=False))
    assert batch.token_ids.tolist() == [1, 2, 3, 7, 8, 4, 1, 2, 3, 7, 8, 5, 1, 2, 3, 9]
    assert spans(batch) == [(0, 6, -1), (6, 12, -1), (12, 16, -1)]


def test_prefixes_are_shared_only_if_that_saves_cost():
    """Sharing [1 2 3] saves 3 tokens for 2 children, [7 8] another 2."""
    (batch,) = pack(SIBLINGS, PackingSpec(cost=PackingCostModel(pair=0.0, share=2.5, join=0.0)))
    assert spans(batch) == [(0, 3, -1), (3, 6, 0), (6, 9, 0), (9, 10, 0)]
    (batch,) = pack(SIBLINGS, PackingSpec(cost=PackingCostModel(pair=0.0, share=6.5, join=0.0)))
    assert spans(batch) == [(0, 6, -1), (6, 12, -1), (12, 16, -1)]


def test_oversized_tree_is_cut_and_its_prefix_repeated():
    batches = pack(SIBLINGS, PackingSpec(max_tokens=7, cost=FREE))
    assert [batch.token_ids.tolist() for batch in batches] == [[1, 2, 3, 7, 8, 4, 5], [1, 2, 3, 9]]
    assert [spans(batch) for batch in batches] == [[(0, 5, -1), (5, 6, 0), (6, 7, 0)], [(0, 4, -1)]]
    batches = pack(SIBLINGS, PackingSpec(max_tokens=2, cost=FREE))
    assert sorted(len(batch) for batch in batches) == [4, 6, 6]


def test_fill_tokens_does_not_cut_trees():
    """Trees are grouped up to four tokens, and the tree of eight stays whole."""
    rows = [*SIBLINGS, sequence("e", [8, 1, 2], {1: 1.0}), sequence("f", [9, 1], {1: 1.0})]
    batches = pack(rows, PackingSpec(max_tokens=8, cost=FREE, fill_tokens=4))
    assert sorted(sorted(batch.sequences.values()) for batch in batches) == [
        ["a", "b", "c"],
        ["e"],
        ["f"],
    ]
    assert len(pack(rows, PackingSpec(max_tokens=5, cost=FREE, fill_tokens=4))) > 3


def test_batches_are_balanced_by_cost_rather_than_tokens():
    """Rows of 40, 20, 20 and 20 tokens: with quadratic cost the long one stays alone."""
    rows = [
        sequence(str(first), [first] * num, {1: 1.0}) for first, num in enumerate((40, 20, 20, 20))
    ]
    batches = pack(rows, PackingSpec(max_tokens=60, cost=PackingCostModel(pair=1.0)))
    assert [list(batch.sequences) for batch in batches] == [[0], [1, 2, 3]]
    batches = pack(rows, PackingSpec(max_tokens=60, cost=PackingCostModel(pair=0.0)))
    assert [list(batch.sequences) for batch in batches] == [[0, 3], [1, 2]]


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 2), min_size=2, max_size=8), min_size=1, max_size=10),
    st.integers(1, 30),
    st.floats(0, 5),
    st.booleans(),
    st.randoms(),
)
def test_pack_properties_hold_for_arbitrary_sequences(
    rows: list[list[int]], max_tokens: int, price: float, share: bool, shuffled: random.Random
):
    sequences = [
        sequence(str(index), row, dict.fromkeys(range(1 + index % 2, len(row)), index + 1.0))
        for index, row in enumerate(rows)
    ]
    packing = PackingSpec(max_tokens, share, PackingCostModel(pair=0.1, share=price, join=0.0))
    batches = pack(sequences, packing)
    found = []
    for batch in batches:
        assert (
            len(batch) <= max_tokens
            or len(batch.sequences) == 1
            or len(batch) == max(map(len, rows))
        )
        for entry, (index, token) in enumerate(batch.owners.tolist()):
            assert path(batch, int(batch.sources[entry])) == rows[index][:token]
            assert batch.targets[entry] == rows[index][token]
            assert batch.streams["rl"][entry] == index + 1
            found.append((index, token))
    assert sorted(found) == [
        (i, t) for i, row in enumerate(rows) for t in range(1 + i % 2, len(row))
    ]
    shuffled.shuffle(sequences)
    again = pack(sequences, packing)
    assert [batch.token_ids.tolist() for batch in again] == [
        batch.token_ids.tolist() for batch in batches
    ]
    assert [batch.streams["rl"].tolist() for batch in again] == [
        batch.streams["rl"].tolist() for batch in batches
    ]


def test_denominators_cover_the_whole_step():
    batches = pack(SIBLINGS, PackingSpec(max_tokens=4, cost=FREE))
    assert [batch.denominators for batch in batches] == [{"rl": 10.0}] * 3
    assert pack(SIBLINGS, denominators={"rl": 4.0, "ce": 1.0})[0].denominators == {"rl": 4.0}
    with pytest.raises(ValueError, match=r"component 'rl' has weights, but its denominator 0\.0"):
        pack(SIBLINGS, denominators={"ce": 1.0})


def test_cross_entropy_of_token_sampled_at_temperature_gets_separate_entry():
    """Sampled at temperature 0.5 from kept sets: token 1 has RL weight, 2 CE weight, 3 both."""
    kept = SamplingMask(np.array([0, 0, 2, 2, 3]), np.array([7, 9, 5]))
    both = sequence(
        "a", [1, 7, 6, 5], {1: 1.0, 3: 1.0}, ce=np.float32([0, 0, 2, 3]), temperature=0.5, kept=kept,
        versions=np.array([-1, 4, 4, 5]),
    )  # fmt: skip
    (batch,) = pack([both])
    assert batch.targets.tolist() == [7, 5, 6, 5]
    assert batch.sources.tolist() == [0, 2, 1, 2]
    assert batch.streams["rl"].tolist() == [1, 1, 0, 0]
    assert batch.streams["ce"].tolist() == [0, 0, 2, 3]
    assert batch.streams["temperature"].tolist() == [0.5, 0.5, 1, 1]
    assert batch.versions.tolist() == [4, 5, 4, 5]
    assert (batch.kept.offsets.tolist(), batch.kept.ids.tolist()) == ([0, 2, 3, 3, 3], [7, 9, 5])


@pytest.mark.parametrize("share", [True, False])
def test_attach_uses_the_entry_at_the_sampling_temperature(share: bool):
    """Tokens 1 and 2 have RL or KD weight, 2 and 3 also CE weight; their plain entries have value
    9, the others 7."""
    rows = [
        sequence("a", [1, 2, 3, 4], {1: 1.0, 2: 1.0}, ce=np.float32([0, 0, 1, 1]), temperature=0.7),
        sequence(
            "b",
            [1, 2, 3, 5],
            {},
            ce=np.float32([0, 0, 1, 1]),
            kd=np.float32([0, 1, 1, 0]),
            temperature=0.7,
        ),
    ]
    batches = pack(rows, PackingSpec(share=share, cost=FREE))
    assert sum(len(batch.owners) for batch in batches) == 8
    computed = [
        np.where(batch.streams["temperature"] == 1, 9, 7).astype(np.float32) for batch in batches
    ]
    copy_to_sequences(rows, batches, "old_logprobs", computed)
    assert [row.streams["old_logprobs"].tolist() for row in rows] == [[0, 7, 7, 9]] * 2


def test_named_streams_round_trip_through_batches():
    teacher = np.arange(8, dtype=np.float32).reshape(4, 2)
    rows = [
        sequence(name, [first, 2, 3, 4], {2: 1.0, 3: 1.0}, streams={"teacher": teacher})
        for first, name in enumerate("ab")
    ]
    batches = pack(rows, PackingSpec(max_tokens=4))
    assert [batch.streams["teacher"].tolist() for batch in batches] == [[[4, 5], [6, 7]]] * 2
    copy_to_sequences(rows, batches, "ref_logprobs", [np.float32([-1, -2]), np.float32([-3, -4])])
    assert [row.streams["ref_logprobs"].tolist() for row in rows] == [
        [0, 0, -1, -2],
        [0, 0, -3, -4],
    ]
    rows[1].streams.clear()
    with pytest.raises(
        ValueError, match="sequence b has no stream 'ref_logprobs', which others of this step have"
    ):
        pack(rows)


def test_no_weights_give_no_batch_and_weighted_first_token_is_rejected():
    assert pack([]) == pack(SIBLINGS[3:]) == []
    with pytest.raises(ValueError, match="sequence a has a weight on its first token"):
        pack([sequence("a", [1, 2], {0: 1.0})])


def test_pack_time_is_near_linear_in_groups():
    """Four times the groups take four times as long, within a factor of two."""

    def seconds(groups: int) -> float:
        rng = np.random.default_rng(0)
        rows = []
        for group in range(groups):
            prompt = rng.integers(0, 500, 200).tolist()
            rows += [
                sequence(f"{group}", prompt + rng.integers(0, 500, 100).tolist(), {250: 1.0})
                for _ in range(8)
            ]
        best = float("inf")
        for _ in range(3):
            start = time.process_time()
            pack(rows, PackingSpec(max_tokens=4096))
            best = min(best, time.process_time() - start)
        return best

    assert seconds(80) < 8 * seconds(20)
