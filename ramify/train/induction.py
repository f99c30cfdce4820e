"""Induction warm-up: random token strings said twice, with the loss on the second time.

A model made from nothing first has to learn to copy, and demonstrations teach that slowly: names
and separators that are copied stand among many tokens that are not. No task, no text, no tokenizer:
ids alone.

    a b c d | a b c d      loss on the last three: the first of the second time cannot be known
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from ramify.types.sequence import TokenSequence

SHORTEST, LONGEST = 6, 40
"""Tokens of a string: [SHORTEST, LONGEST)."""


def induction(step: int, ids: Many[int], num_tokens: int, seed: int = 0) -> list[TokenSequence]:
    """The sequences of one step, all of one length: about ``num_tokens`` tokens in all, drawn from
    ``ids``. The same for the same arguments, whenever they are asked for."""
    random = np.random.default_rng((seed, step))
    length = int(random.integers(SHORTEST, LONGEST))
    drawn = random.choice(np.asarray(ids, np.int64), (max(2, num_tokens // (2 * length)), length))
    weights = np.zeros(2 * length, np.float32)
    weights[length + 1 :] = 1
    none = np.zeros(2 * length, np.float32)
    return [
        TokenSequence(
            name=f"induction/step={step}/row={row}",
            token_ids=np.concatenate([string, string]),
            mask=weights > 0,
            sampler_logprobs=none,
            advantages=none,
            rl=none,
            ce=weights,
        )
        for row, string in enumerate(drawn)
    ]
