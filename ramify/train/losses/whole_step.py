"""Values that a loss needs about a whole optimizer step, computed before any of its batches is
learned from.

    choose        tokens that some losses treat differently (``cov.py``), selected
                  by means over the whole step and by random numbers keyed by sequence and
                  position, so that the cut and the order of the step do not matter
    calls_of      for a loss over sequences: which entries belong to one call. A call whose history
                  was cut or rendered again has several paths; its sequence is then all its
                  sampled tokens, each counted once, on whichever path it carries weight
    check_whole   for such a loss: each call is whole, in one batch

Legend: E entries of a batch, N tokens of the step.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many

import msgspec
import numpy as np
import numpy.typing as npt

from ramify.errors import TrainError
from ramify.train.losses.base import LossStep, TokenSelectingLoss
from ramify.train.losses.loss import LossSpec
from ramify.types.sequence import Batch, Floats, Ints, path_group


def chooses(loss: LossSpec) -> bool:
    """Whether batches must go through ``choose`` first."""
    return isinstance(loss.policy, TokenSelectingLoss)


def choose(batches: Many[Batch], loss: LossSpec, logprobs: Many[Floats]) -> list[Batch]:
    """``batches`` with the stream ``chosen``. ``logprobs``: for each batch, [E] log-probabilities
    under the current policy."""
    weighs = [batch.streams["rl"] != 0 for batch in batches]
    with_mask = list(zip(batches, weighs, strict=True))
    now = _joined(column[mask] for column, mask in zip(logprobs, weighs, strict=True))
    old_name = (
        "old_logprobs"
        if all("old_logprobs" in batch.streams for batch in batches)
        else "sampler_logprobs"
    )
    old = (
        now
        if loss.old == "now"
        else _joined(batch.streams[old_name][mask] for batch, mask in with_mask)
    )
    advantages = _joined(batch.streams["advantages"][mask] for batch, mask in with_mask)
    keys = np.concatenate([_keys(batch)[mask] for batch, mask in with_mask])
    chosen = loss.policy.choose(LossStep(now, old, advantages, keys))
    chosen_batches, start = [], 0
    for batch, mask in with_mask:
        column = np.zeros(len(mask), np.float32)
        column[mask] = chosen[start : start + int(mask.sum())]
        start += int(mask.sum())
        chosen_batches.append(
            msgspec.structs.replace(batch, streams={**batch.streams, "chosen": column})
        )
    return chosen_batches


def calls_of(batch: Batch) -> tuple[Ints, int]:
    """([E] index of each entry's call, from 0; the number of calls). Paths of one call have the
    same index."""
    owners, places = np.unique(batch.owners[:, 0], return_inverse=True)
    numbers: dict[str | int, int] = {}
    calls = [
        numbers.setdefault(path_group(batch.sequences[owner], owner), len(numbers))
        for owner in owners.tolist()
    ]
    return np.array(calls, np.int64)[places], len(numbers)


def check_whole(batches: Many[Batch]) -> None:
    """Raise TrainError if a call with policy-gradient weight occurs in two batches."""
    places = Counter[str | int]()
    for batch in batches:
        learnt = np.unique(batch.owners[batch.streams["rl"] != 0, 0]).tolist()
        places.update({path_group(batch.sequences[index], index) for index in learnt})
    for name, num in places.items():
        if num > 1:
            raise TrainError(
                f"the loss reads whole calls, and {name} is in {num} batches: pack them with "
                "whole_calls=True"
            )


def _joined(parts: Iterator[Floats]) -> npt.NDArray[np.float64]:
    return np.concatenate([part.astype(np.float64) for part in parts])


def _keys(batch: Batch) -> npt.NDArray[np.uint64]:
    """[E] a pseudorandom number for each entry that depends only on its sequence's name and its
    position."""
    seeds = {index: _hash(name) for index, name in batch.sequences.items()}
    mixed = np.array([seeds[index] for index in batch.owners[:, 0].tolist()], np.uint64)
    with np.errstate(over="ignore"):  # splitmix64
        mixed = mixed + (batch.owners[:, 1].astype(np.uint64) + np.uint64(1)) * np.uint64(
            0x9E3779B97F4A7C15
        )
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def _hash(name: str) -> int:
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")
