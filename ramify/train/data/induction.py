"""Induction warm-up: random token strings, each repeated once, with the loss on the repetition.

A model trained from scratch first has to learn to copy. Demonstrations teach that slowly, since the
names and separators to copy are few among many other tokens. The warm-up needs no task, text or
tokenizer, only ids.

    a b c d | a b c d      loss on the last three: the first repeated token cannot be predicted
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np

from ramify.types.sequence import TokenSequence

SHORTEST, LONGEST = 6, 40
"""Length of a string in tokens: [SHORTEST, LONGEST)."""


def induction(step: int, ids: Many[int], num_tokens: int, seed: int = 0) -> list[TokenSequence]:
    """The sequences of one step, all of the same length: about ``num_tokens`` tokens in total,
    drawn from ``ids``. The result depends only on the arguments."""
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
