"""What a loss needs to know of a whole optimizer step before any of its batches is learnt from.

    choose        tokens that some formulas treat otherwise (``policy_losses/cov.py``): by means over the whole step and by
                  random numbers keyed by sequence and place, hence the same however the step is cut or ordered
    check_whole   a formula over sequences was given each of them whole, in one batch

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
from ramify.train.loss import LossSpec
from ramify.train.policy_losses.base import LossStep, TokenSelectingLoss
from ramify.types.sequence import Batch, Floats


def chooses(loss: LossSpec) -> bool:
    """Whether batches must go through ``choose`` first."""
    return isinstance(loss.policy, TokenSelectingLoss)


def choose(batches: Many[Batch], loss: LossSpec, logprobs: Many[Floats]) -> list[Batch]:
    """``batches`` with the stream ``chosen``. ``logprobs`` [E] of each are the policy's as it is
    now."""
    weighs = [batch.streams["rl"] != 0 for batch in batches]
    wheres = list(zip(batches, weighs, strict=True))
    now = _joined(each[where] for each, where in zip(logprobs, weighs, strict=True))
    old_name = (
        "old_logprobs"
        if all("old_logprobs" in batch.streams for batch in batches)
        else "sampler_logprobs"
    )
    old = (
        now
        if loss.old == "now"
        else _joined(batch.streams[old_name][where] for batch, where in wheres)
    )
    advantages = _joined(batch.streams["advantages"][where] for batch, where in wheres)
    keys = np.concatenate([_keys(batch)[where] for batch, where in wheres])
    chosen = loss.policy.choose(LossStep(now, old, advantages, keys))
    found, start = [], 0
    for batch, where in wheres:
        column = np.zeros(len(where), np.float32)
        column[where] = chosen[start : start + int(where.sum())]
        start += int(where.sum())
        found.append(msgspec.structs.replace(batch, streams={**batch.streams, "chosen": column}))
    return found


def check_whole(batches: Many[Batch]) -> None:
    """TrainError where a sequence with policy-gradient weight stands in two batches or two rows."""
    rows = Counter[str]()
    for batch in batches:
        for index in np.unique(batch.owners[batch.streams["rl"] != 0, 0]).tolist():
            rows[call_of(batch.sequences[index])] += 1
    for name, num in rows.items():
        if num > 1:
            raise TrainError(
                f"the loss looks at whole sequences, and {name} is split into {num}: its history "
                "was cut or rendered anew, or "
                "its rows were split; use a loss that goes token by token, or a scaffold whose "
                "histories only grow"
            )


def call_of(name: str) -> str:
    """The call that a sequence is a path of: ``7c1f/call=0.3/path=1`` -> ``7c1f/call=0.3``."""
    return name.partition("/path=")[0]


def _joined(parts: Iterator[Floats]) -> npt.NDArray[np.float64]:
    return np.concatenate([part.astype(np.float64) for part in parts])


def _keys(batch: Batch) -> npt.NDArray[np.uint64]:
    """[E] a number for each entry that looks random and depends on its sequence's name and its
    place alone."""
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
