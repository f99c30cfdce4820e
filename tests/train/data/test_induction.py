"""Induction sequences of the warm-up stage."""

from __future__ import annotations

import numpy as np

from ramify.train.data.sft_data import LONGEST, SHORTEST, induction_warmup_sequences


def test_each_sequence_repeats_a_string_and_trains_only_on_the_repeat() -> None:
    for step in range(20):
        sequences = induction_warmup_sequences(step, range(4, 512), 2048, seed=3)
        length = len(sequences[0]) // 2
        assert SHORTEST <= length < LONGEST
        assert 0 <= 2048 - sum(map(len, sequences)) < 2 * length
        for sequence in sequences:
            assert (sequence.token_ids[:length] == sequence.token_ids[length:]).all()
            assert min(sequence.token_ids) >= 4
            assert sequence.ce is not None
            assert sequence.ce.tolist() == [0] * (length + 1) + [1] * (length - 1)


def test_induction_step_is_reproducible_from_its_seed() -> None:
    first, again, other = (
        induction_warmup_sequences(5, range(100), 512, seed) for seed in (1, 1, 2)
    )
    assert all(np.array_equal(a.token_ids, b.token_ids) for a, b in zip(first, again, strict=True))
    assert len(first) != len(other) or not np.array_equal(first[0].token_ids, other[0].token_ids)
