"""Trees of token sequences with given shapes, and the rows that trainers without trees make of
them.

    group      siblings under one prompt, with several turns each:
               prompt [reply observation] [reply observation] … [reply]
    two_level  siblings that fork again half way; under each, a child call that begins with the
               system prompt of its parent
    stepwise   each turn is a row that repeats everything before it

Ids are random, so that siblings share nothing by chance. Replies are sampled and carry loss; all
other tokens are given.
"""

from __future__ import annotations

import msgspec
import numpy as np

from ramify.train.data.pack import PackingSpec, pack
from ramify.types.training_sequences import Batch, Ints, TokenSequence

VOCAB, REPLY, OBSERVATION = 512, 16, 8


def group(turns: int, siblings: int, prompt: int, seed: int = 0) -> list[TokenSequence]:
    rng = np.random.default_rng(seed)
    given = _ids(rng, prompt)
    return [_row(f"{index}", [given], turns, rng) for index in range(siblings)]


def two_level(
    turns: int, siblings: int, prompt: int, forks: int = 3, seed: int = 0
) -> list[TokenSequence]:
    """Build siblings whose first half of turns is shared by ``forks`` continuations.

    Each continuation has a child, whose prompt begins with the first half of the root's and
    continues with its own task, and which has half as many turns."""
    rng = np.random.default_rng(seed)
    given = _ids(rng, prompt)
    rows = []
    for index in range(siblings):
        trunk = _row(f"{index}", [given], turns // 2, rng)
        for fork in range(forks):
            whole = _row(
                f"{index}.{fork}",
                [trunk.token_ids, _ids(rng, OBSERVATION)],
                turns - turns // 2,
                rng,
            )
            if fork == 0:  # turns that all forks share are trained once
                whole.rl[: len(trunk)], whole.mask[: len(trunk)] = trunk.rl, trunk.mask
                whole.sampler_logprobs[: len(trunk)] = trunk.sampler_logprobs
                whole.advantages[: len(trunk)] = trunk.advantages
            task = _ids(rng, prompt // 4)
            rows += [
                whole,
                _row(f"{index}.{fork}.child", [given[: prompt // 2], task], turns // 2, rng),
            ]
    return rows


def stepwise(rows: list[TokenSequence]) -> list[list[TokenSequence]]:
    """Return, for each turn, the rows that end with it. No row is a prefix of another of the same
    turn."""
    turns: list[list[TokenSequence]] = []
    for row in rows:
        weighs = np.flatnonzero(row.rl)
        starts = weighs[np.concatenate([[True], np.diff(weighs) > 1])]
        ends = weighs[np.concatenate([np.diff(weighs) > 1, [True]])]
        for turn, (start, end) in enumerate(zip(starts, ends, strict=True)):
            here = np.arange(end + 1) >= start
            part = TokenSequence(
                name=row.name,
                token_ids=row.token_ids[: end + 1],
                mask=row.mask[: end + 1],
                sampler_logprobs=row.sampler_logprobs[: end + 1],
                advantages=row.advantages[: end + 1],
                rl=row.rl[: end + 1] * here,
            )
            turns += [[] for _ in range(turn + 1 - len(turns))]
            turns[turn].append(part)
    return turns


def stepwise_batches(rows: list[TokenSequence], packing: PackingSpec) -> list[Batch]:
    """Pack rows of one turn together, as many as fit, without sharing."""
    total = {"rl": float(sum(row.rl.sum() for row in rows))}
    alone = msgspec.structs.replace(packing, share=False)
    return [batch for turn in stepwise(rows) for batch in pack(turn, alone, total)]


def num_tokens(batches: list[Batch]) -> int:
    return sum(len(batch) for batch in batches)


def _ids(rng: np.random.Generator, num: int) -> Ints:
    return rng.integers(0, VOCAB, num)


def _row(name: str, given: list[Ints], turns: int, rng: np.random.Generator) -> TokenSequence:
    """Build a row of ``given`` and ``turns`` replies with observations between them."""
    start, between = sum(map(len, given)), REPLY + OBSERVATION
    length = start + turns * between - OBSERVATION
    places = np.arange(length) - start
    mask = (places >= 0) & (places % between < REPLY)
    random = rng.normal(size=length).astype(np.float32)
    return TokenSequence(
        name=name,
        token_ids=np.concatenate([*given, _ids(rng, length - start)]),
        mask=mask,
        sampler_logprobs=np.where(mask, -6 + 0.1 * random, 0).astype(np.float32),
        advantages=np.where(mask, random, 0).astype(np.float32),
        rl=mask.astype(np.float32),
    )
